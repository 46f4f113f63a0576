"""What a run of a sweep reports while it goes on and when it ends, and what it needs of the workers that run its trials."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ablate.execution.messages import Message, TrialRequest
from ablate.execution.scheduler import Work


class Executor(Protocol):
    """Where trials run; see workers/."""

    wanted: int
    """How many trials there are to run, in flight or waiting, where that is of use: a cluster's places are shared."""

    @property
    def slots(self) -> int: ...
    def submit(self, request: TrialRequest) -> None: ...
    def wait(self, seconds: float) -> Sequence[tuple[str, Message]]: ...
    def stop(self, trial: str) -> None: ...
    def resize(self, slots: int) -> None: ...
    def close(self) -> None: ...


@dataclass
class Running:
    """A trial in flight, as the live view shows it."""

    name: str
    seed: int
    trial: int
    attempt: int
    started: float
    steps: int
    estimate: float
    request: TrialRequest
    work: Work
    begun: int = 0
    """The step that it went on from."""
    step: int = 0
    loss: float = math.nan
    warned: bool = False
    """Whether its first alarm was told."""
    guarded: bool = False
    """Whether the first intervention of its guard was."""
    ending: tuple[str, str] | None = None
    """Status and reason that it gets once it is over, where it was told to stop."""


@dataclass(frozen=True)
class Progress:
    """The state of the sweep after something happened; `news` says what, where it is worth a line."""

    done: int
    total: int
    failed: int
    running: tuple[Running, ...]
    news: tuple[str, ...]
    mlflow: str | None
    seconds_left: float


Status = Literal["done", "failed", "budget", "stopped", "disk"]


@dataclass(frozen=True)
class Outcome:
    """How a run of the sweep ended; `why` where that needs words."""

    status: Status
    ran: int
    reused: int
    failed: int
    seconds: float
    why: str = ""


@dataclass(frozen=True)
class RunOptions:
    """What a command may ask of a run beside what the experiment says."""

    fork: bool = True
    """Run what trials have in common from the start once."""
    fresh: bool = False
    """Run finished trials again."""
    accept_version: bool = False
    """Run all of a sweep anew that was begun with other versions of the code."""
    price: float | None = None
    """Of an hour of one slot, in the unit of the experiment's `budget: {cost: ...}`."""
