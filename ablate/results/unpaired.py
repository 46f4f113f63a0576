"""Differences between arms whose runs share no seeds, as runs from elsewhere often do.

Without common seeds there are no pairs, and the noise of both arms stays in the difference. An interval of
the difference of two means then takes each arm's own deviation, with Welch's (1947) degrees of freedom if
both arms have as many runs. Else they are one less than the smaller number of runs (Hsu 1938): Welch's are
too many in the tails that a correction for several arms needs. 14 % of tables of 4 arms of 3 runs beside a
baseline of 30 had a false verdict by Welch's, 0.1 % have one by Hsu's. Nothing is pooled over arms. Verdicts
follow as from as many pairs as the smaller arm has runs, so an arm of two runs gets none.
"""

import math
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

import numpy as np
from scipy import special

from ablate.results.intervals import ALPHA, Interval
from ablate.results.paired_stats import FEWEST_DISTINCT, Difference, distinct_of, paired_difference


def difference_of(
    arm: Mapping[int, float],
    baseline: Mapping[int, float],
    interval: Interval,
    seeds: tuple[AbstractSet[int], AbstractSet[int]] | None = None,
) -> Difference:
    """Return the difference of two arms of which either may lack seeds of the other.

    The seeds of all runs of both (None: those with a value) decide, never the values: paired, with this kind
    of interval, if one arm's seeds are all seeds of the other, else unpaired over all runs. Diverged runs
    have no value.
    """
    own, other = seeds or (arm.keys(), baseline.keys())
    if own and other and (own <= other or other <= own):
        return paired_difference(arm, baseline, interval)
    return unpaired_difference(arm, baseline)


def unpaired_difference(arm: Mapping[int, float], baseline: Mapping[int, float]) -> Difference:
    """Return the mean of an arm minus that of its baseline, with an unpaired 95 % t interval, in the metric's
    unit. The values are finite, by seed or by any other key.

    `pairs` is the number of runs of the smaller arm, and `deviation` the standard error times its root. There
    is no bound if an arm has fewer than 3 distinct values.
    """
    sides = [np.array([*values.values()], dtype=float) for values in (arm, baseline)]
    counts = len(sides[0]), len(sides[1])
    pairs = min(counts)
    if not pairs:
        return Difference(math.nan, math.nan, math.nan, 0, math.nan, sides=counts)
    largest = max(float(np.abs(side).max()) for side in sides)
    scale = 2.0 ** (math.frexp(largest)[1] - 1)  # exact; squares of the values would leave the floats
    sides = [side / scale for side in sides]
    mean = float(sides[0].mean() - sides[1].mean()) * scale
    distinct = min(distinct_of(side, largest / scale) for side in sides)
    if pairs < FEWEST_DISTINCT or distinct < FEWEST_DISTINCT:
        deviation = math.nan if pairs == 1 else 0.0
        return Difference(
            mean, math.nan, math.nan, pairs, deviation, distinct=distinct, runs_equal=False, sides=counts
        )
    shares = [float(side.var(ddof=1)) / len(side) for side in sides]
    error = math.sqrt(sum(shares)) * scale
    freedom = pairs - 1.0
    if counts[0] == counts[1]:
        ratio = min(shares) / max(shares)
        freedom *= (1 + ratio) ** 2 / (1 + ratio**2)
    half = error * float(special.stdtrit(freedom, 1 - ALPHA / 2))
    return Difference(
        mean,
        mean - half,
        mean + half,
        pairs,
        error * math.sqrt(pairs),
        distinct=distinct,
        runs_equal=False,
        freedom=freedom,
        sides=counts,
    )


def pairing(gaps: Iterable[Difference | None]) -> str:
    """Return how differences (None for a baseline) were taken: `paired by seed`, `unpaired`, or both."""
    kinds = {gap.sides is None for gap in gaps if gap is not None and gap.pairs}
    if kinds == {False}:
        return "unpaired"
    return "paired by seed where arms share seeds, else unpaired" if len(kinds) > 1 else "paired by seed"
