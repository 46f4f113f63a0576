"""Types that a running sweep reports: progress, trials in flight, and the outcome; and the interface of its
workers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ablate.execution.messages import Message, TrialRequest
from ablate.execution.time_model import MachinePaces, Timed
from ablate.execution.tracking.tracker import Tracker
from ablate.execution.trial_queue import Work
from ablate.store.ledger import Ledger


class Executor(Protocol):
    """Workers that run trials; `workers/` has the implementations."""

    wanted: int
    """Number of trials that run or wait; no more workers are started."""

    @property
    def slots(self) -> int: ...
    def submit(self, request: TrialRequest) -> None: ...
    def wait(self, seconds: float) -> Sequence[tuple[str, Message]]: ...
    def stop(self, trial: str) -> None: ...
    def resize(self, slots: int) -> None: ...
    def close(self) -> None: ...


@dataclass
class Running:
    """Trial in flight, as the live view shows it."""

    name: str
    seed: int
    trial: int
    attempt: int
    started: float
    steps: int
    request: TrialRequest
    work: Work
    begun: int = 0
    """Step from which it resumed."""
    step: int = 0
    loss: float = math.nan
    warned: bool = False
    """True once its first alarm was reported."""
    guarded: bool = False
    """True once the first intervention of its guard was reported."""
    ending: tuple[str, str] | None = None
    """Status and reason that it gets when it ends, if it was ordered to stop."""

    @property
    def timed(self) -> Timed:
        """Properties of the trial by which its time is estimated."""
        done = (self.step - self.begun) / max(1, self.steps - self.begun)
        return Timed(self.work.load, self.work.part, self.started, done)

    @property
    def title(self) -> str:
        """Name and seed, as lines of news begin."""
        return f"{self.name} seed={self.seed}"


class Routine(str):
    """Line of news about a run that went as planned."""


@dataclass(frozen=True)
class Progress:
    """State of the sweep after an event; `news` has a line for each thing that happened."""

    done: int
    total: int
    failed: int
    running: tuple[Running, ...]
    news: tuple[str, ...]
    mlflow: str | None
    seconds_left: float
    """Estimate; 0 while trials run longer than estimated."""


Status = Literal["done", "failed", "budget", "stopped", "disk"]


@dataclass(frozen=True)
class Outcome:
    """End of a run; `why` explains it if the status alone does not, and `cause` is the exception of the
    user's code that most failed trials ended by. `diverged` says how many runs diverged, and how many of
    them are baselines'; it is empty if none did."""

    status: Status
    ran: int
    reused: int
    failed: int
    seconds: float
    why: str = ""
    cause: str = ""
    diverged: str = ""


@dataclass(frozen=True)
class RunOptions:
    """Options of one run that are not part of the experiment."""

    fork: bool = True
    """Run a prefix that several trials share only once."""
    fresh: bool = False
    """Run finished trials again."""
    accept_version: bool = False
    """Run a sweep that was begun with other versions of the code again as a whole."""
    same_code: bool = False
    """Take finished trials over whose code alone was edited."""
    price: float | None = None
    """Cost of one slot-hour, in the unit of the experiment's `budget: {cost: ...}`."""
    paces: MachinePaces | None = None
    """Measurements of this machine for estimates; trials that ran are added. None to leave them out."""
    describe: Callable[[Ledger], str] = lambda ledger: ""
    """Function from the finished sweep's ledger to the description of its parent run in MLflow, Markdown."""
    trackers: Mapping[str, Tracker] = field(default_factory=dict)
    grace: float = 30.0
    """Seconds that a finished sweep waits for MLflow and other trackers that are behind."""
    spare: int = 512 << 20
    """Minimum free bytes on the disk for starting a trial, beside space for one checkpoint per slot."""
