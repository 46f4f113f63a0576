"""No work: records of a number that is a hash. For measuring what the platform itself costs and for trying a cluster; trains nothing."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from ablate.recipes.recipe import Recipe
from ablate.training.hyperparameters import MOST_STEPS
from ablate.training.workloads.modelless import Modelless

if TYPE_CHECKING:
    from ablate.training.checkpoints import Checkpoints
    from ablate.training.loop import Record, Telemetry

_START_SECONDS = 0.02
"""A trial's own process, its files and its result."""


class Idle(Modelless):
    """So many records, so far apart. Its loss is a bowl in x and y, lifted by noise that arms share by seed and by a tenth of it that
    they do not: a search has something to find, and a comparison is paired."""

    VERSION: ClassVar[int] = 1
    METRICS: ClassVar[frozenset[str]] = frozenset({"val/loss"})

    steps: int = Field(20, ge=1, le=MOST_STEPS)
    seconds: float = Field(0.0, ge=0)
    """Of sleep before each record; a sleeping trial takes no processor."""
    x: float = 0.0
    """Any number; the loss is lowest at 0.3."""
    y: float = 0.0
    """Any number; the loss is lowest at -0.2."""

    def recorded(self, metric: str) -> range:
        """Every step before the last."""
        return range(1, self.steps)

    @property
    def tokens_per_step(self) -> int:
        """None are read; a schedule that counts tokens sees one a step."""
        return 1

    def problems(self) -> Iterator[tuple[str, str]]:
        """Whatever its fields allow can run."""
        return iter(())

    def identity(self) -> dict[str, Any]:
        """The fields that determine the numbers: not how long it sleeps."""
        return self.canonical({"seconds"})

    def fingerprint(self) -> str:
        """There are no data."""
        return "none"

    def cost(self, quantised: bool) -> float:
        """Seconds of one trial, whatever the recipe."""
        return _START_SECONDS + self.steps * self.seconds

    def records(
        self,
        recipe: Recipe,
        seed: int,
        engine: str,
        device: str,
        telemetry: Telemetry,
        checkpoints: Checkpoints | None = None,
    ) -> Iterator[Record]:
        """A Record after every step. Nothing is lost by running it again, so no checkpoints."""
        from ablate.training.loop import Record

        arm = json.dumps([self.identity(), recipe.canonical()], sort_keys=True)
        bowl = (self.x - 0.3) ** 2 + (self.y + 0.2) ** 2
        for step in range(1, self.steps + 1):
            if self.seconds:
                time.sleep(self.seconds)
            noise = _hash(seed, step) + 0.1 * _hash(arm, seed, step)
            yield Record(step, {"val/loss": bowl + 1 / step + 0.01 * noise})


def _hash(*what: Any) -> float:
    """A number in [0, 1), the same on every machine."""
    return int.from_bytes(hashlib.sha256(json.dumps(what).encode()).digest()[:6]) / 2**48
