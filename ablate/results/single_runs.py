"""Two single runs, step by step: what their curves say about a difference, and what they cannot say.

The problem. "Below the baseline at 39 of 39 logged steps" sounds like 39 results. Neighbouring steps of a run
share its weights and its seed, so that the curve of one run is one result, and a second seed may shift it as
a whole.

The idea. The differences d of the two runs at their common steps are a series. With the autocorrelation r of
neighbours, n of them estimate their mean as n (1 - r) / (1 + r) independent values would (that of an AR(1)
process). The number is small, and it is still about this one pair of seeds: no interval is made of it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ablate.results.paired_stats import common

FEWEST_STEPS = 8
"""Smallest number of common steps whose autocorrelation is stated."""


@dataclass(frozen=True)
class Curves:
    """Differences of two runs at their common steps."""

    steps: int
    """Common steps with finite values."""
    above: int
    """Steps at which the first run's value is the larger one."""
    below: int
    """Steps at which it is the smaller one."""
    last_quarter: float
    """Mean difference over the last quarter of the steps, in the metric's unit."""
    autocorrelation: float
    """Correlation of neighbouring differences; NaN for fewer than 8 steps, or if they do not vary."""

    @property
    def worth(self) -> float:
        """Number of independent values that the steps are worth, about this one pair of runs."""
        return self.steps * (1 - self.autocorrelation) / (1 + self.autocorrelation)

    @property
    def text(self) -> str:
        if not self.above + self.below:
            return f"equal at all {self.steps} steps"
        side = "above" if self.above >= self.below else "below"
        count = max(self.above, self.below)
        end = "above" if self.last_quarter > 0 else "below"
        text = f"{side} it at {count} of {self.steps} steps, {'and ' * (end != side)}{end}"
        text += f" by {abs(self.last_quarter):.3g} in the last quarter"
        weight = (
            f" (neighbours correlate {self.autocorrelation:.2f}: they weigh as {max(1.0, self.worth):.0f})"
            if self.worth <= self.steps / 2
            else ""
        )
        return f"{text}; the steps of one run are one result{weight}: another seed may move the whole curve"


def curves(run: Mapping[int, float], baseline: Mapping[int, float]) -> Curves | None:
    """Compare two runs, a metric's values by step, at their common steps; None with fewer than two of
    them."""
    shared = common(run, baseline)
    if len(shared) < 2:
        return None
    found = np.array([run[step] - baseline[step] for step in shared])
    centred = found - found.mean()
    spread = float(centred @ centred)
    known = len(shared) >= FEWEST_STEPS and spread > 0
    neighbours = float(centred[1:] @ centred[:-1]) / spread if known else math.nan
    quarter = max(1, len(shared) // 4)
    signs = int(np.sum(found > 0)), int(np.sum(found < 0))
    return Curves(len(shared), *signs, float(found[-quarter:].mean()), neighbours)
