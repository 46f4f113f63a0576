"""Workload without work: its records contain a number that is a hash.

It measures the cost of the platform itself and serves to try out a cluster; it trains nothing.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ablate.files import Json
from ablate.training.hyperparameters import MOST_STEPS
from ablate.training.workloads.base import Workload

if TYPE_CHECKING:
    from ablate.training.loop import Record
    from ablate.training.trial_run import TrialRun

_START_SECONDS = 0.02
"""Seconds that a trial's own process, its files and its result take."""


class Idle(Workload):
    """Workload that sleeps and yields records of a synthetic loss.

    The loss is a bowl in x and y plus 1 / step and noise, most of which arms share by seed: a search has a
    minimum to find, and a comparison is paired.
    """

    VERSION: ClassVar[int] = 1
    in_process: ClassVar[bool] = False
    METRICS: ClassVar[frozenset[str]] = frozenset({"val/loss"})

    steps: int = Field(20, ge=1, le=MOST_STEPS)
    seconds: float = Field(0.0, ge=0)
    """Seconds of sleep before each record; a sleeping trial uses no processor."""
    x: float = 0.0
    """Any number; the loss is lowest at 0.3."""
    y: float = 0.0
    """Any number; the loss is lowest at -0.2."""

    def recorded(self, metric: str) -> range:
        return range(1, self.steps)

    @property
    def tokens_per_step(self) -> int:
        """1: no tokens are read, but a schedule that counts tokens sees one per step."""
        return 1

    def problems(self) -> Iterator[tuple[str, str]]:
        return iter(())

    def identity(self) -> dict[str, Json]:
        return {**self.canonical({"seconds"})}

    def fingerprint(self) -> str:
        return "none"

    def cost(self, quantised: bool) -> float:
        return _START_SECONDS + self.steps * self.seconds

    def compute(self, run: TrialRun) -> Iterator[Record]:
        """Yield a Record after every step. Checkpoints are not used, since a rerun costs little."""
        from ablate.training.loop import Record

        arm = json.dumps([self.identity(), run.recipe.canonical()], sort_keys=True)
        bowl = (self.x - 0.3) ** 2 + (self.y + 0.2) ** 2
        for step in range(1, self.steps + 1):
            if self.seconds:
                time.sleep(self.seconds)
            noise = _hash(run.seed, step) + 0.1 * _hash(arm, run.seed, step)
            yield Record(step, {"val/loss": bowl + 1 / step + 0.01 * noise})


def _hash(*values: object) -> float:
    """Return a number in [0, 1), the same on every machine."""
    return int.from_bytes(hashlib.sha256(json.dumps(values).encode()).digest()[:6]) / 2**48
