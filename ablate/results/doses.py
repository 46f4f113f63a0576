"""Dose-response: what each value of an ordered knob does, beside its first value in the file.

    cooldown    change from 0           verdict       of the gap closed
    0.05        -0.0021 ±0.0035         undecided
    0.1         -0.0042 ±0.0031         better        40 % (12 to 90)

Changes and verdicts are those of the sweep's comparisons: the one that the file asks for, else main effects.
The share is a ratio of two means over the same seeds, both uncertain. Its 95 % interval is Fieller's: all
ratios that the paired values do not exclude. It is bounded only if the interval of the first value's gap
excludes zero. The share is given only then, and only if that arm's verdict is "better" or "worse".

Source: E. C. Fieller, "Some problems in interval estimation", J. R. Stat. Soc. B 16 (1954).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ablate.files import Json
from ablate.results.attribution import Effect, Grid
from ablate.results.comparisons import Comparisons
from ablate.results.intervals import Interval
from ablate.results.number_text import interval
from ablate.results.paired_stats import FEWEST_DISTINCT, Difference, Verdict, common, paired_difference

_FEWEST = 3
"""Fewest values of a knob for a dose-response."""


@dataclass(frozen=True)
class Share:
    """Share of a gap that a dose closes, 1 for all of it, with a 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:.0f} % ({100 * self.low:.0f} to {100 * self.high:.0f})"


def share_closed(first: Mapping[int, float], dose: Mapping[int, float], interval: Interval) -> Share | None:
    """Return the share of the first value's gap by seed that a dose closes, with Fieller's interval; None if
    the first gap is not told from zero, so that the interval is unbounded."""
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

    value: float | None
    """The number; None for a knob that is off (null), as the first value alone can be."""
    change: tuple[Difference, Verdict] | None
    """Its metric minus that of the knob's first value, judged; None for that one."""
    gap: Difference | None
    """Gap to the baseline, on average over the other knobs; None without a common baseline."""
    closed: Share | None
    """Share of the first value's gap that it closes; None if that gap is not resolved."""

    def __str__(self) -> str:
        return "null" if self.value is None else f"{self.value:g}"


@dataclass(frozen=True)
class Doses:
    """All values of an ordered knob."""

    knob: str
    given: Mapping[str, Json]
    """Values at which other knobs are held."""
    margin: float | None
    """Smallest effect that matters, in the metric's unit."""
    values: Sequence[Dose]
    """Ascending, behind null."""

    @property
    def reference(self) -> Dose:
        """The value that the others are compared with."""
        return next(dose for dose in self.values if dose.change is None)


def doses(sweep: Comparisons) -> list[Doses]:
    """Return the values of each ordered knob of a sweep's grid: of knobs with three numbers or more."""

    def place(dose: Dose) -> float:
        return -math.inf if dose.value is None else dose.value

    if sweep.grid is None:
        return []
    found = []
    for knob, levels in sweep.grid.levels.items():
        off = int(levels[0] is None)
        numbers = [one for one in levels[off:] if isinstance(one, int | float) and not isinstance(one, bool)]
        judged = _judged(sweep, knob)
        if len(numbers) < max(_FEWEST, len(levels) - off) or len(judged) != len(levels) - 1:
            continue
        changes = [None, *((effect.effect, verdict) for effect, verdict in judged)]
        values = [
            Dose(number, change, *gap)
            for number, change, gap in zip(
                [*[None] * off, *map(float, numbers)], changes, _gaps(sweep, sweep.grid, knob), strict=True
            )
        ]
        first = judged[0][0]
        found.append(Doses(knob, first.given, first.margin, sorted(values, key=place)))
    return found


def _judged(sweep: Comparisons, knob: str) -> Sequence[tuple[Effect, Verdict]]:
    """Return the effects of a knob's levels with their verdicts: those that the file asks for, if it asks for
    any, else its main effects."""
    for family in (sweep.asked_effects, sweep.main_effects):
        if own := [(effect, verdict) for effect, verdict in family if effect.knobs == (knob,)]:
            return own
    return []


def _gaps(sweep: Comparisons, grid: Grid, knob: str) -> list[tuple[Difference | None, Share | None]]:
    """Return the gap to the baseline at each level of a knob, and the share of the first that it closes;
    None if the arms have several baselines."""
    baselines = {arm.baseline for arm in grid.arms}
    base = next((arm.values for arm in sweep.arms if baselines == {arm.name}), None)
    if base is None:
        return [(None, None)] * len(grid.levels[knob])
    # The gap at the first value has a verdict of its own if it is a single arm's.
    alone = [arm for arm in grid.arms if arm.knobs[knob] == grid.levels[knob][0]]
    names = [arm.name for arm in alone] if len(alone) == 1 else []
    resolved = all(arm.verdict.resolved for arm in sweep.arms if arm.name in names)
    means = [grid.mean(grid.cells(**{knob: level})) for level in range(len(grid.levels[knob]))]
    by_seed = [{seed: mean[seed] - base[seed] for seed in common(mean, base)} for mean in means]
    return [
        (
            paired_difference(mean, base, grid.interval),
            share_closed(by_seed[0], gap, grid.interval) if level and resolved else None,
        )
        for level, (mean, gap) in enumerate(zip(means, by_seed, strict=True))
    ]


def sentence(doses: Doses) -> str:
    """Return the share of the gap that the value farthest from the reference closes, in a sentence; empty
    without a baseline, or if other knobs are held."""
    reference, knob = doses.reference, doses.knob
    gaps = [dose.gap for dose in doses.values if dose.gap]
    if reference.gap is None or reference.value is None or doses.given:
        return ""
    zero = reference.value
    last = max(doses.values, key=lambda dose: abs((dose.value or 0.0) - zero))
    if last.closed is None:
        return (
            f"The gap at {knob} {reference}, {interval(reference.gap)}, is not resolved, so no share of it is"
            " stated."
        )
    steps = [later.mean - earlier.mean for earlier, later in pairwise(gaps)]
    steady = "" if all(step <= 0 for step in steps) or all(step >= 0 for step in steps) else ", not steadily"
    low, high = (100 * bound for bound in (last.closed.low, last.closed.high))
    verb = "closes"
    if high < 0:
        verb, low, high = "widens by", -high, -low
    share = f"{abs(100 * last.closed.value) if low > 0 else 100 * last.closed.value:.0f} %"
    return (
        f"{knob} {last} {verb} {share} (95 % interval {low:.0f} to {high:.0f} %) of the gap at"
        f" {knob} {reference}{steady}{'' if low > 0 else ', perhaps none of it'}."
    )
