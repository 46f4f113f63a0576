"""Forks: short trainings that leave a trunk, with a learning rate that falls to zero.

The problem. Full runs of small models differ by .01 nats from seed to seed, whatever their recipe: training
is chaotic, and two runs one ulp apart end .03 apart. A recipe's effect is smaller.

The idea. A *trunk* is trained once for each seed, in high precision. At some *positions* p every recipe goes
on from the trunk's state for a *window* of w steps, whose step j has the learning rate

    lr_trunk(p) (1 - j / w),      j = 0 ... w - 1

Nothing has time to diverge, and the falling rate removes the noise of single steps. What the arms differ by
at the end of their windows is the *damage* that a recipe does given a past in high precision. It is not the
gap of full runs (docs/reference/statistics.md).

The batches and the random draws of step p + j are those of the trunk's step p + j. State that a recipe
carries (amax histories, moving averages) starts empty.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple

from pydantic import model_validator

from ablate.numerics.spec import Spec
from ablate.recipes.recipe import Recipe
from ablate.training.metric_names import part_metric, window_metric

_PARTS = 32
"""Largest number of parts of the validation data whose losses are recorded one by one."""


def parts_of(losses: Sequence[float], name: str) -> dict[str, float]:
    """Return means of consecutive batches' losses, in at most 32 parts of equal size, as metrics of the
    reading `name`; what is over is left out."""
    size = math.ceil(len(losses) / _PARTS)
    means = (fmean(losses[first : first + size]) for first in range(0, len(losses) - size + 1, size))
    return {part_metric(number, name): mean for number, mean in enumerate(means)}


class Window(NamedTuple):
    """One window of one trial."""

    position: int
    """Step of the trunk after which it begins."""
    steps: int
    begun: int
    """Steps that the trial counts before the window's first: the trunk's, and those of earlier windows."""

    @property
    def last(self) -> int:
        return self.begun + self.steps

    def metric(self, name: str) -> str:
        """Return the name of a metric at the window's end: `fork/120/45/loss` of `val/loss`."""
        return window_metric(self.position, self.steps, name)

    @property
    def key(self) -> str:
        """Position and length as text: `120/45`."""
        return f"{self.position}/{self.steps}"


class Forks(Spec):
    """Windows that one trial trains, all from the same trunk."""

    trunk: Recipe | None
    """Recipe of the trunk; None: the windows begin from the weights that the workload itself starts from."""
    positions: tuple[int, ...]
    """Steps of the trunk after which windows begin, ascending."""
    windows: tuple[int, ...]
    """Steps of the windows at each position, ascending."""
    anneal: bool = True
    """False: the rate stays the trunk's own."""

    @model_validator(mode="after")
    def _ascending(self) -> "Forks":
        for name, values, least in (("positions", self.positions, 0), ("windows", self.windows, 1)):
            if not values or list(values) != sorted(set(values)) or values[0] < least:
                raise ValueError(f"{name} {values} must be different steps in ascending order")
        if (self.trunk is None) != (self.positions == (0,)):
            raise ValueError("forks without a trunk begin at position 0, and forks of a trunk later")
        return self

    @property
    def trunk_steps(self) -> int:
        """Steps of the trunk that are needed: up to the last position."""
        return self.positions[-1]

    @cached_property
    def cells(self) -> tuple[Window, ...]:
        """All windows, in the order in which a trial trains them."""
        pairs = [(position, steps) for position in self.positions for steps in self.windows]
        begun = accumulate((steps for _, steps in pairs), initial=self.trunk_steps)
        return tuple(Window(*pair, start) for pair, start in zip(pairs, begun, strict=False))

    @property
    def steps(self) -> int:
        """Steps that a trial counts: the trunk's and those of all windows."""
        return self.cells[-1].last

    def rate(self, trunk_rate: float, step: int, window: Window, own: float) -> float:
        """Return the learning rate of a step, by the trunk's clock (the position and more), of a window.
        `trunk_rate` is the trunk's rate at the window's position, `own` the one that it has at that step."""
        return trunk_rate * (1 - (step - window.position) / window.steps) if self.anneal else own
