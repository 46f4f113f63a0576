"""Common base of workloads of a user's own code: `python` (a function) and `command` (a process).

Nothing is known of the code before it runs: neither its model, nor its metrics, nor how long a step takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from ablate import own_source
from ablate.files import user_path
from ablate.training.hyperparameters import MOST_STEPS, Guard
from ablate.training.workloads.base import Workload
from ablate.training.workloads.text import Fields

if TYPE_CHECKING:
    from ablate.training.guard import Watch

_SECONDS_A_STEP = 0.5
"""A guess: nothing is known of a user's code until a trial has run."""


class OwnCode(Workload):
    """Configuration of a user's code, and the length of a run."""

    METRICS: ClassVar[frozenset[str] | None] = None  # whatever the code logs
    own_code: ClassVar[bool] = True
    LATER: ClassVar[frozenset[str]] = frozenset({"guard_loss"})

    config: Annotated[dict[str, Any], AfterValidator(Fields)] = Field(default_factory=Fields)
    """Values that the code reads; each is a knob, `workload.config.<key>`."""
    steps: int = Field(100, ge=1, le=MOST_STEPS)
    """Optimizer steps of a run."""
    tokens_per_step: int = Field(1, ge=1)
    """Tokens, or samples, of one step: the unit of throughput and of schedules by tokens. 1: not stated."""
    data: tuple[str, ...] = Field((), strict=False)
    """Files and folders that the code reads; a trial's identity has their content."""
    log_every: int = Field(1, ge=1)
    """Steps between two records that all trials have, by which a search prunes."""

    guard_loss: float | None = Field(None, gt=1)
    """Factor over the median of the 32 last `train/loss`, if that is above 0, beyond which a run ends as
    diverged; null: only a `train/loss` that is not finite ends it."""

    @property
    def watch(self) -> Watch | None:
        from ablate.training.guard import Watch

        return Watch(Guard(loss=self.guard_loss)) if self.guard_loss else None

    def files(self) -> Iterator[Path]:
        for path in map(Path, self.data):
            yield from own_source.listed(user_path(path))

    def recorded(self, metric: str) -> range:
        return range(self.log_every, self.steps, self.log_every)

    def cost(self, quantised: bool) -> float:
        return _SECONDS_A_STEP * self.steps * (2 if quantised else 1)
