"""Dose-response: what each value of an ordered knob does to the gap.

    cooldown    gap to bf16          change from 0        of the gap closed
    0           +0.0105 ±0.0070
    0.1         +0.0063 ±0.0051      -0.0042 ±0.0031      40 % (12 to 90)

The share is a ratio of two means over the same seeds, both uncertain. Its 95 % interval is Fieller's: all
ratios that the paired values do not exclude. It is bounded only if the gap of the first value is told from
zero by its own interval, and the share is given only then.

Source: E. C. Fieller, "Some problems in interval estimation", J. R. Stat. Soc. B 16 (1954).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ablate.results.attribution import Grid
from ablate.results.intervals import Interval
from ablate.results.number_text import interval
from ablate.results.paired_stats import FEWEST_DISTINCT, Difference, common, paired_difference
from ablate.results.summary import ArmSummary

_FEWEST = 3
"""Fewest values of a knob for a dose-response."""


@dataclass(frozen=True)
class Share:
    """Share of a gap that a dose closes, 1 for all of it, with a 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def told(self) -> bool:
        """True if the interval excludes 0."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{100 * self.value:.0f} % ({100 * self.low:.0f} to {100 * self.high:.0f})"


def share_closed(first: Mapping[int, float], dose: Mapping[int, float], interval: Interval) -> Share | None:
    """Return the share of the first gap that a dose closes, with Fieller's interval.

    Args:
        first: gap of the first value, by seed.
        dose: gap of the dose, by seed.
        interval: kind of the interval.

    Returns:
        The share; None if the first gap is not told from zero, so that the interval is unbounded.
    """
    seeds = common(first, dose)
    if len(seeds) < FEWEST_DISTINCT:
        return None
    a, b = (np.array([side[seed] for seed in seeds]) for side in (first, dose))
    width = interval.half_width(len(seeds))
    covariance = width**2 * np.cov(a, b)
    square = a.mean() ** 2 - covariance[0, 0]
    if not square > 0:
        return None
    product = a.mean() * b.mean() - covariance[0, 1]
    root = math.sqrt(max(0.0, product**2 - square * (b.mean() ** 2 - covariance[1, 1])))
    return Share(
        float(1 - b.mean() / a.mean()),
        float(1 - (product + root) / square),
        float(1 - (product - root) / square),
    )


@dataclass(frozen=True)
class Dose:
    """One value of an ordered knob."""

    value: float
    gap: Difference
    """Gap to the baseline, on average over the other knobs."""
    change: Difference | None
    """Its gap minus that of the first value; None for that one."""
    closed: "Share | None"
    """Share of the first value's gap that it closes; None if that gap is not told from zero."""


def doses(grid: Grid | None, baselines: Mapping[str, ArmSummary]) -> dict[str, list[Dose]]:
    """Return the values of each ordered knob of a grid, ascending, with their gaps.

    Args:
        grid: arms that are a product of knobs' levels, or None.
        baselines: every arm by name.

    Returns:
        The doses by knob: of knobs with three numbers or more, if all arms have one baseline.
    """
    if grid is None or len({arm.baseline for arm in grid.arms}) > 1:
        return {}
    base = baselines.get(grid.arms[0].baseline or "") if grid.arms else None
    if base is None:
        return {}
    found = {}
    for knob, levels in grid.levels.items():
        numbers = [one for one in levels if isinstance(one, int | float) and not isinstance(one, bool)]
        if len(numbers) < max(_FEWEST, len(levels)):
            continue
        order = sorted(range(len(levels)), key=numbers.__getitem__)
        means = [grid.mean(grid.cells(**{knob: level})) for level in order]
        gaps = [paired_difference(mean, base.values, grid.interval) for mean in means]
        by_seed = [{s: mean[s] - base.values[s] for s in common(mean, base.values)} for mean in means]
        found[knob] = [
            Dose(
                float(numbers[level]),
                gap,
                paired_difference(mean, means[0], grid.interval) if place else None,
                share_closed(by_seed[0], by_seed[place], grid.interval) if place else None,
            )
            for place, (level, mean, gap) in enumerate(zip(order, means, gaps, strict=True))
        ]
    return found


def sentence(knob: str, values: list[Dose]) -> str:
    """Return what the doses say in a sentence.

    Args:
        knob: name of the knob.
        values: its doses, ascending.
    """
    first, last = values[0], values[-1]
    if last.closed is None or last.change is None:
        return (
            f"The gap at {knob} {first.value:g}, {interval(first.gap)}, is not told from zero, so that no"
            " share of it can be closed."
        )
    steps = [later.gap.mean - earlier.gap.mean for earlier, later in pairwise(values)]
    steady = "" if all(step <= 0 for step in steps) or all(step >= 0 for step in steps) else ", not steadily"
    at, of = f"{knob} {last.value:g}", f"the gap of {knob} {first.value:g}"
    if not last.closed.told:
        return f"{at} changes {of} by {interval(last.change)}, which is not told from zero{steady}."
    low, high = sorted(abs(100 * bound) for bound in (last.closed.low, last.closed.high))
    verb = "closes" if last.closed.value > 0 else "widens by"
    share = f"{abs(100 * last.closed.value):.0f} % (95 % interval {low:.0f} to {high:.0f} %)"
    return f"{at} {verb} {share} of {of}{steady}."
