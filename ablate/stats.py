"""What the numbers allow one to say. Differences are paired by seed, and none is stated without its interval."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import special

ALPHA = 0.05
_SCALE = 1.8
"""Standard deviation of the sequence's mixture over effects, in deviations of a paired difference. It costs no validity, only width:
1.83 makes the interval narrowest on average over 5 to 10 pairs, and from 1.4 to 2.6 it is within 2 % of that."""
_MOST_SEEDS = 1000


@dataclass(frozen=True)
class Interval:
    """How a 95 % interval is made, which is how often it may be looked at while seeds are added: once, so many times, or at will."""

    kind: str = "t"
    looks: int = 1

    @classmethod
    def parse(cls, text: str) -> "Interval":
        """From its text: `t`, `split:10` or `sequence`."""
        kind, _, looks = text.partition(":")
        return cls(kind, int(looks or 1))

    def half_width(self, pairs: int) -> float:
        """Half its width in standard deviations of the differences; infinite where so few pairs bound nothing."""
        return HALF_WIDTHS[self.kind](pairs, self.looks)

    def __str__(self) -> str:
        """As it stands under a table."""
        return NAMES[self.kind].format(looks=self.looks)


@functools.cache
def _t(pairs: int, looks: int) -> float:
    """Student's t at its share of alpha. Split evenly over looks declared beforehand, all hold together (Bonferroni)."""
    return float(special.stdtrit(pairs - 1, 1 - ALPHA / looks / 2)) / math.sqrt(pairs) if pairs > 1 else math.inf


@functools.cache
def _sequence(pairs: int, looks: int) -> float:
    """The t-mixture: all effects whose Bayes factor against N(effect, (scale sd)^2) is below 1 / alpha.

    With Jeffreys' prior 1 / sd on the deviation (the right Haar measure of scale) the factor at n pairs depends on t alone,

        sqrt(1 / k) ((1 + t^2 / (n - 1)) / (1 + t^2 / (n - 1) / k))^(n / 2),  k = 1 + n scale^2,

    and is a martingale of what is free of scale. By Ville's inequality it ever reaches 1 / alpha with probability alpha at most, so
    that all intervals hold together, whatever decides when to look or stop. It never exceeds k^((n - 1) / 2): below 1 / alpha no
    effect can be excluded and the interval is infinite, up to 3 pairs here. (Wang and Ramdas 2023, arXiv 2310.03722; Lai 1976 has
    a flat mixture.)
    """
    k = 1 + pairs * _SCALE**2
    c = (k / ALPHA**2) ** (1 / pairs)
    return math.sqrt((pairs - 1) / pairs * k * (c - 1) / (k - c)) if c < k else math.inf


def sequence_factor(t: float, pairs: int) -> float:
    """The Bayes factor of `_sequence` against no effect, at this t: its inverse is a p-value that holds at every look."""
    k = 1 + pairs * _SCALE**2
    x = t * t / (pairs - 1)
    return math.exp(pairs / 2 * (math.log1p(x) - math.log1p(x / k)) - math.log(k) / 2)


@dataclass(frozen=True)
class Difference:
    """An arm minus its baseline over the seeds that both finished, in the metric's unit, with a paired interval."""

    mean: float
    low: float
    high: float
    pairs: int
    deviation: float
    """Standard deviation of the paired differences; NaN from one pair."""
    interval: Interval = Interval()

    @property
    def has_interval(self) -> bool:
        """One pair gives a number but no interval, and a sequence bounds nothing at first."""
        return math.isfinite(self.low)


def common(arm: Mapping[int, float], baseline: Mapping[int, float]) -> list[int]:
    """The seeds that both finished with a finite value: the pairs."""
    return sorted(seed for seed in arm.keys() & baseline.keys() if math.isfinite(arm[seed]) and math.isfinite(baseline[seed]))


def paired_difference(arm: Mapping[int, float], baseline: Mapping[int, float], interval: Interval = Interval()) -> Difference:
    """The mean of arm - baseline over common seeds with finite values, and its 95 % interval of the given kind."""
    seeds = common(arm, baseline)
    if not seeds:
        return Difference(math.nan, math.nan, math.nan, 0, math.nan, interval)
    differences = np.array([arm[seed] - baseline[seed] for seed in seeds])
    mean = float(np.mean(differences))
    if len(seeds) == 1:
        return Difference(mean, math.nan, math.nan, 1, math.nan, interval)
    deviation = float(np.std(differences, ddof=1))
    half = deviation and deviation * interval.half_width(len(seeds))  # numbers that do not vary need no width
    return Difference(mean, mean - half, mean + half, len(seeds), deviation, interval)


def decided(difference: Difference, min_effect: float | None) -> bool:
    """Whether its interval excludes zero or lies within the effect that matters, or the numbers are the same: no seed is needed more."""
    same = difference.mean == difference.deviation == 0
    return difference.pairs > 1 and (same or difference.low > 0 or difference.high < 0 or _too_small(difference, min_effect))


def _too_small(difference: Difference, min_effect: float | None) -> bool:
    return min_effect is not None and -min_effect < difference.low and difference.high < min_effect


def verdict(difference: Difference, minimize: bool, min_effect: float | None) -> str:
    """`better`, `worse`, `equivalent`, or `undecided` with the seeds that would settle it; never more than that."""
    if difference.pairs < 2:
        return "one seed: no interval" if difference.pairs else "no pair of finished seeds"
    if difference.mean == difference.deviation == 0:
        return "the same numbers"
    if _too_small(difference, min_effect):
        return "equivalent"
    if not decided(difference, min_effect):
        return f"undecided{_more_seeds(difference, min_effect)}"
    return "better" if (difference.mean < 0) == minimize else "worse"


def _more_seeds(difference: Difference, min_effect: float | None) -> str:
    """How many more seeds would narrow the interval to the effect that matters, going by the deviation seen so far."""
    target = min_effect or abs(difference.mean)
    for n in range(difference.pairs + 1, _MOST_SEEDS + 1):
        if difference.interval.half_width(n) * difference.deviation <= target:
            more = n - difference.pairs
            return f"; ~{more} more seed{'s' if more > 1 else ''} for ±{target:.2g}"
    return f"; over {_MOST_SEEDS} seeds for ±{target:.2g}"


HALF_WIDTHS = {"t": _t, "split": _t, "sequence": _sequence}
"""By kind, how half an interval's width in deviations follows from the pairs and from how often one looks."""

NAMES = {
    "t": "95 % t interval",
    "split": "t interval, its 5 % split over {looks} looks",
    "sequence": "95 % confidence sequence",
}
