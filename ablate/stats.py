"""What the numbers allow one to say. Differences are paired by seed, and none is stated without its interval."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
_MOST_SEEDS = 1000


@dataclass(frozen=True)
class Difference:
    """An arm minus its baseline over the seeds that both finished, in the metric's unit, with a paired t interval."""

    mean: float
    low: float
    high: float
    pairs: int
    deviation: float
    """Standard deviation of the paired differences; NaN from one pair."""

    @property
    def has_interval(self) -> bool:
        """One pair gives a number but no interval."""
        return math.isfinite(self.low)


def paired_difference(arm: Mapping[int, float], baseline: Mapping[int, float]) -> Difference:
    """The mean of arm - baseline over common seeds with finite values, and its 95 % t interval (scipy.stats.ttest_rel)."""
    seeds = sorted(seed for seed in arm.keys() & baseline.keys() if math.isfinite(arm[seed]) and math.isfinite(baseline[seed]))
    a, b = (np.array([values[seed] for seed in seeds]) for values in (arm, baseline))
    if len(seeds) == 0:
        return Difference(math.nan, math.nan, math.nan, 0, math.nan)
    mean = float(np.mean(a - b))
    if len(seeds) == 1:
        return Difference(mean, math.nan, math.nan, 1, math.nan)
    deviation = float(np.std(a - b, ddof=1))
    if deviation == 0:
        return Difference(mean, mean, mean, len(seeds), 0.0)
    interval = stats.ttest_rel(a, b).confidence_interval(CONFIDENCE)
    return Difference(mean, float(interval.low), float(interval.high), len(seeds), deviation)


def verdict(difference: Difference, minimize: bool, min_effect: float | None) -> str:
    """`better`, `worse`, `no difference that matters`, or `undecided` with the seeds that would settle it; never more than that."""
    if not difference.has_interval:
        return "one seed: no interval" if difference.pairs else "no pair of finished seeds"
    if difference.mean == difference.deviation == 0:
        return "the same numbers"
    low, high = (difference.low, difference.high) if minimize else (-difference.high, -difference.low)
    if min_effect is not None and -min_effect < low and high < min_effect:
        return "no difference that matters"
    if high < 0:
        return "better"
    if low > 0:
        return "worse"
    return f"undecided{_more_seeds(difference, min_effect)}"


def _more_seeds(difference: Difference, min_effect: float | None) -> str:
    """How many more seeds would narrow the interval to the effect that matters, going by the deviation seen so far."""
    target = min_effect or abs(difference.mean)
    for n in range(difference.pairs + 1, _MOST_SEEDS + 1):
        if stats.t.ppf((1 + CONFIDENCE) / 2, n - 1) * difference.deviation / math.sqrt(n) <= target:
            return f"; ~{n - difference.pairs} more seeds for ±{target:.2g}"
    return f"; over {_MOST_SEEDS} seeds for ±{target:.2g}"
