"""Kinds of 95 % interval of a mean paired difference: t for one look, t for several, a confidence sequence.

Adding seeds until a result looks decided means looking more than once. A t interval, valid at one look, then
excludes a true zero in more than 5 % of sweeps. `split` divides the 5 % among looks that are declared
beforehand; `sequence` is valid at any number of looks.
"""

import functools
import math
from dataclasses import dataclass

from scipy import special

ALPHA = 0.05
"""Largest accepted probability of a false rejection."""
_SCALE = 1.8
"""Standard deviation of the sequence's mixture over effects, in deviations of a paired difference.

It affects the width of the sequence, not its validity: 1.83 gives the narrowest interval on average over 5 to
10 pairs, and values from 1.4 to 2.6 are within 2 % of that.
"""


@dataclass(frozen=True)
class Interval:
    """Kind of a 95 % interval: it fixes how often results may be looked at while seeds are added. `t`: one
    look. `split`: a declared number of looks. `sequence`: any number of looks."""

    kind: str = "t"
    looks: int = 1

    @classmethod
    def parse(cls, text: str) -> "Interval":
        """Return the interval described by a text: `t`, `split:10` (10 looks) or `sequence`."""
        kind, _, looks = text.partition(":")
        return cls(kind, int(looks or 1))

    def half_width(self, pairs: int, comparisons: float = 1) -> float:
        """Return half the width of the interval, in standard deviations of the differences; infinite if so
        few pairs bound nothing. The 5 % are divided by `comparisons` (Bonferroni)."""
        return HALF_WIDTHS[self.kind](pairs, self.looks, ALPHA / comparisons)

    def __str__(self) -> str:
        """Return the name of the interval, as the caption of a table has it."""
        return NAMES[self.kind].format(looks=self.looks)


@functools.cache
def _t(pairs: int, looks: int, alpha: float) -> float:
    """Return the half-width of Student's t interval at its share of alpha. With alpha split evenly over looks
    that are declared beforehand, all intervals hold together (Bonferroni)."""
    return (
        float(special.stdtrit(pairs - 1, 1 - alpha / looks / 2)) / math.sqrt(pairs) if pairs > 1 else math.inf
    )


@functools.cache
def _sequence(pairs: int, looks: int, alpha: float) -> float:
    """Return the half-width of the t-mixture sequence, in deviations of a paired difference.

    It contains all effects whose Bayes factor against N(effect, (scale sd)^2) is below 1 / alpha. With
    Jeffreys' prior 1 / sd on the deviation (the right Haar measure of scale) the factor at n pairs depends on
    t alone,

        sqrt(1 / k) ((1 + t^2 / (n - 1)) / (1 + t^2 / (n - 1) / k))^(n / 2),  k = 1 + n scale^2,

    and is a martingale with respect to the scale-invariant data. By Ville's inequality it reaches 1 / alpha
    at any time with probability at most alpha, so all intervals hold together, whatever rule decides when to
    look or stop. The factor never exceeds k^((n - 1) / 2): while that is below 1 / alpha (up to 3 pairs here)
    no effect can be excluded and the interval is infinite. Source: Wang and Ramdas 2023, arXiv 2310.03722;
    Lai 1976 has a flat mixture.
    """
    k = 1 + pairs * _SCALE**2
    c = (k / alpha**2) ** (1 / pairs)
    return math.sqrt((pairs - 1) / pairs * k * (c - 1) / (k - c)) if c < k else math.inf


def sequence_factor(t: float, pairs: int) -> float:
    """Return the Bayes factor of `_sequence` against no effect, by Student's t of 2 paired differences or
    more. Its inverse is a p-value that is valid at every look."""
    k = 1 + pairs * _SCALE**2
    x = t * t / (pairs - 1)
    logarithm = pairs / 2 * (math.log1p(x) - math.log1p(x / k)) - math.log(k) / 2
    return math.exp(min(700.0, logarithm))  # more has no float


HALF_WIDTHS = {"t": _t, "split": _t, "sequence": _sequence}
"""Half-width of an interval in deviations, as a function of (pairs, looks, alpha), by kind."""

NAMES = {
    "t": "95 % t interval",
    "split": "t interval, its 5 % split over {looks} looks",
    "sequence": "95 % confidence sequence",
}
"""Names of the kinds of interval."""

SINGLE_LOOK = Interval()
"""Student's t interval, valid at one look."""
