"""Paired differences with intervals, and the verdicts that they allow after correction for how many were compared.

A verdict has two hypotheses behind it: "there is no effect" (rejected: better or worse) and "the effect is min_effect or more"
(rejected: equivalent). Each has a p-value that holds as the sweep's interval does (one look, declared looks, or any look), and each kind
is corrected by Holm over the comparisons that stand in one table. `seeds_needed` plans with the same rule. docs/statistics.md has the
assumptions and the measured error rates.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
from scipy import special

ALPHA = 0.05
CHANCE = 0.8
"""Probability of a verdict at the number of seeds that is named."""
MOST_SEEDS = 200
"""Numbers of seeds above it are not told apart."""
FEWEST_DISTINCT = 3
"""Distinct values of the differences below which their spread says nothing: equal counts on two seeds are no proof of an effect."""
_SCALE = 1.8
"""Standard deviation of the sequence's mixture over effects, in deviations of a paired difference. It costs no validity, only width:
1.83 makes the interval narrowest on average over 5 to 10 pairs, and from 1.4 to 2.6 it is within 2 % of that."""
_PRIOR = 1.0
"""Standard deviation of the effects that `seeds_needed` expects before it has seen any, in units of min_effect."""
_RESOLUTION = 1e-9
"""Differences closer than this share of the largest value are one value: fp32 metrics resolve 1e-7, sums in another order 1e-16."""
_VAST = 1e100
"""Effects and deviations beyond it, in units of min_effect, take more than 200 seeds; their squares would overflow."""
_DRAWS = 512


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

    def half_width(self, pairs: int, comparisons: float = 1) -> float:
        """Half its width in standard deviations of the differences; infinite where so few pairs bound nothing.

        `comparisons`: the 5 % are divided by it.
        """
        return HALF_WIDTHS[self.kind](pairs, self.looks, ALPHA / comparisons)

    def __str__(self) -> str:
        """As it stands under a table."""
        return NAMES[self.kind].format(looks=self.looks)


@functools.cache
def _t(pairs: int, looks: int, alpha: float) -> float:
    """Student's t at its share of alpha. Split evenly over looks declared beforehand, all hold together (Bonferroni)."""
    return (
        float(special.stdtrit(pairs - 1, 1 - alpha / looks / 2)) / math.sqrt(pairs) if pairs > 1 else math.inf
    )


@functools.cache
def _sequence(pairs: int, looks: int, alpha: float) -> float:
    """The t-mixture: all effects whose Bayes factor against N(effect, (scale sd)^2) is below 1 / alpha.

    With Jeffreys' prior 1 / sd on the deviation (the right Haar measure of scale) the factor at n pairs depends on t alone,

        sqrt(1 / k) ((1 + t^2 / (n - 1)) / (1 + t^2 / (n - 1) / k))^(n / 2),  k = 1 + n scale^2,

    and is a martingale of what is free of scale. By Ville's inequality it ever reaches 1 / alpha with probability alpha at most, so
    that all intervals hold together, whatever decides when to look or stop. It never exceeds k^((n - 1) / 2): below 1 / alpha no
    effect can be excluded and the interval is infinite, up to 3 pairs here. (Wang and Ramdas 2023, arXiv 2310.03722; Lai 1976 has
    a flat mixture.)
    """
    k = 1 + pairs * _SCALE**2
    c = (k / alpha**2) ** (1 / pairs)
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
    distinct: int | None = None
    """Distinct values among the differences; None: as many as pairs."""
    whole: bool = False
    """All values of both arms are whole numbers, as counts are."""
    runs_equal: bool = field(default=True, compare=False)
    """False if zeros are differences of averages whose runs are not equal one by one: such averages agree by chance."""

    @property
    def has_interval(self) -> bool:
        """False from one pair, from too few distinct values, and while a sequence bounds nothing."""
        return math.isfinite(self.low)

    @property
    def tells(self) -> bool:
        """True where the spread of the differences is worth an interval and a p-value."""
        return (
            min(self.pairs, self.pairs if self.distinct is None else self.distinct) >= FEWEST_DISTINCT
            and self.deviation > 0
        )

    @property
    def same(self) -> bool:
        """True where the arms agree on every seed, run by run, and there are two seeds or more."""
        return self.runs_equal and self.pairs > 1 and self.mean == self.deviation == 0


def common(arm: Mapping[int, float], baseline: Mapping[int, float]) -> list[int]:
    """The seeds that both finished with a finite value: the pairs."""
    return sorted(
        seed
        for seed in arm.keys() & baseline.keys()
        if math.isfinite(arm[seed]) and math.isfinite(baseline[seed])
    )


def paired_difference(
    arm: Mapping[int, float], baseline: Mapping[int, float], interval: Interval = Interval()
) -> Difference:
    """The mean of arm - baseline over common seeds with finite values, and its 95 % interval of the given kind.

    Without an interval (NaN) from fewer than 3 distinct values of the differences.
    """
    seeds = common(arm, baseline)
    if not seeds:
        return Difference(math.nan, math.nan, math.nan, 0, math.nan, interval)
    values = np.array([[arm[seed], baseline[seed]] for seed in seeds])
    differences = values[:, 0] - values[:, 1]
    mean = float(np.mean(differences))
    if len(seeds) == 1:
        return Difference(mean, math.nan, math.nan, 1, math.nan, interval, 1)
    distinct = 1 + int(np.sum(np.diff(np.sort(differences)) > _RESOLUTION * np.abs(values).max()))
    scale = 2.0**512 if np.abs(differences).max() > _VAST else 1.0  # their squares would overflow
    deviation = float(np.std(differences / scale, ddof=1)) * scale if distinct > 1 else 0.0
    whole = bool((values == np.round(values)).all())
    if distinct < FEWEST_DISTINCT:
        return Difference(mean, math.nan, math.nan, len(seeds), deviation, interval, distinct, whole)
    half = deviation * interval.half_width(len(seeds))
    return Difference(mean, mean - half, mean + half, len(seeds), deviation, interval, distinct, whole)


# p-values, each valid as its interval is: at its one look, at every declared look, or whenever


def p_value(difference: Difference, at: float = 0.0) -> float:
    """Two-sided p of "the true difference is `at`"; NaN where the differences do not tell. Below 5 % where the interval excludes `at`."""
    if not difference.tells:
        return math.nan
    t = (difference.mean - at) / difference.deviation * math.sqrt(difference.pairs)
    if difference.interval.kind == "sequence":
        return min(1.0, 1 / sequence_factor(t, difference.pairs))
    return min(1.0, difference.interval.looks * 2 * float(special.stdtr(difference.pairs - 1, -abs(t))))


def equivalence(difference: Difference, margin: float | None) -> float:
    """p of "the true difference is the margin or more, either way": the two-sided p of the nearer margin, 1 beyond it.

    Below 5 % where the interval lies within the margin. It is twice the p of two one-sided tests, so that a false rejection at 5 % has a
    probability of at most 2.5 %. NaN without a margin, or where the differences do not tell.
    """
    if margin is None or not difference.tells:
        return math.nan
    return (
        p_value(difference, math.copysign(margin, difference.mean)) if abs(difference.mean) < margin else 1.0
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values after Holm's correction: below alpha, the chance of any false one among all is below alpha.

    NaN stays NaN and counts as no comparison.
    """
    corrected, largest = list(p_values), 0.0
    finite = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    for rank, (p, place) in enumerate(finite):
        largest = max(largest, min(1.0, (len(finite) - rank) * p))
        corrected[place] = largest
    return corrected


# Verdicts

Kind = Literal["better", "worse", "equivalent", "same", "undecided", "unjudged"]
Reason = Literal[
    "no_pair", "one_pair", "few_values", "equal_counts", "nothing_learned", "baseline", "refused", "pruned"
]
"""Why there is no verdict."""


@dataclass(frozen=True)
class Verdict:
    """One comparison's verdict among all of its table, with everything that qualifies it, as data.

    `verdict_text` turns it into words. Verdicts on arms are those of `judge` with the last five fields filled in.
    """

    kind: Kind
    reason: Reason | None = None
    """Set if and only if the kind is "unjudged"."""
    p: float = math.nan
    """Of no effect, after Holm's correction."""
    p_equivalence: float = math.nan
    """Of an effect of min_effect or more, after Holm's correction."""
    alone: Kind | None = None
    """Kind before Holm's correction, if the correction made an undecided verdict of it."""
    count: int = 0
    """Pairs of seeds; the number of distinct differences if they are too few."""
    planned: "tuple[Difference, float | None, float, float] | None" = None
    """Arguments of `seeds_needed`, if it is undecided and seeds are planned."""
    exploratory: bool = False
    """True if the arm was chosen by the numbers that are compared: a search's proposal."""
    fresh_seeds: int = 0
    """Pairs of seeds that took no part in choosing a search's winner; 0 for all other arms."""
    reference: float | None = None
    """Loss of a model that ignores its input, if the arm's mean loss is no better and its baseline's is."""
    diverged: int = 0
    """Seeds on which the arm diverged. The verdict is on the others."""
    seeds: int = 0
    """Seeds that an arm with diverged seeds was given."""

    @cached_property
    def needed(self) -> "Needed | None":
        """Seeds for a verdict, if it is undecided and the effect that matters is known."""
        return seeds_needed(*self.planned) if self.planned else None

    @property
    def decided(self) -> bool:
        """True if no further seed is needed."""
        return self.kind in ("better", "worse", "equivalent", "same")


def judge(
    compared: Sequence[tuple[Difference, float | None]], minimize: bool, plan: bool = True, among: int = 1
) -> list[Verdict]:
    """Return the verdicts on differences that stand in one table, each with its margin, corrected by Holm over all of them.

    `plan`: name the seeds that an undecided one needs. `among`: comparisons of the table, if they are more than are given here.
    """
    unseen = [1.0] * (among - len(compared))
    effects = holm([*(p_value(difference) for difference, _ in compared), *unseen])
    likenesses = holm([*(equivalence(difference, margin) for difference, margin in compared), *unseen])
    open_effects, open_likenesses = (
        max(1, sum(p >= ALPHA for p in corrected)) for corrected in (effects, likenesses)
    )
    verdicts = []
    for (difference, margin), p, same in zip(compared, effects, likenesses):  # noqa: B905 - the unseen have p-values alone
        verdict = replace(_verdict(difference, minimize, p, same), p=p, p_equivalence=same)
        if verdict.kind == "undecided":
            alone = _verdict(difference, minimize, p_value(difference), equivalence(difference, margin)).kind
            verdict = replace(
                verdict,
                alone=alone if alone != "undecided" else None,
                planned=(difference, margin, open_effects, open_likenesses) if plan else None,
            )
        verdicts.append(verdict)
    return verdicts


def _verdict(difference: Difference, minimize: bool, p: float, same: float) -> Verdict:
    """Return the verdict that follows from these p-values, without them."""
    pairs = difference.pairs
    if pairs < 2:
        return Verdict("unjudged", "one_pair" if pairs else "no_pair", count=pairs)
    if difference.same:
        # Equal losses come from equal bits. Equal counts may differ on the next seed.
        return (
            Verdict("unjudged", "equal_counts", count=pairs)
            if difference.whole
            else Verdict("same", count=pairs)
        )
    if not difference.tells:
        return Verdict("unjudged", "few_values", count=difference.distinct or pairs)
    if same < ALPHA:
        return Verdict("equivalent", count=pairs)
    if p < ALPHA:
        return Verdict("better" if (difference.mean < 0) == minimize else "worse", count=pairs)
    return Verdict("undecided", count=pairs)


def decided(difference: Difference, min_effect: float | None) -> bool:
    """Return True if the only comparison of a table needs no more seeds."""
    return judge([(difference, min_effect)], True, plan=False)[0].decided


# Seeds for a verdict


def deviation_range(difference: Difference) -> tuple[float, float]:
    """80 % confidence interval of the differences' true standard deviation (chi-square); NaN where they do not tell."""
    if not difference.tells:
        return math.nan, math.nan
    free = difference.pairs - 1
    low, high = (difference.deviation * math.sqrt(free / float(special.chdtri(free, q))) for q in (0.1, 0.9))
    return low, high


@dataclass(frozen=True)
class Needed:
    """Seeds, in all, for an 80 % chance of a verdict; None stands for more than 200."""

    count: int | None
    low: int | None
    high: int | None
    """The same if the deviation is known to lie at the 10th and the 90th percentile of what the seeds so far leave open."""


def seeds_needed(
    difference: Difference,
    margin: float | None,
    effects: float = 1,
    likenesses: float = 1,
    ranged: bool = True,
) -> Needed | None:
    """The smallest number of seeds, in all, at which the chance of a verdict is 80 %, given the seeds so far.

    The chance is the predictive probability that the interval at that number, old and new pairs together, excludes zero or lies within
    the margin, averaged over what the data leave open of the effect and of the deviation: effects are expected to be N(0, margin^2), the
    deviation has Jeffreys' prior. `effects` and `likenesses` are the open comparisons of the table, for either kind of p: when this one
    gets its verdict, half of the others are taken to have theirs, so that Holm's correction divides the 5 % by the mean of 1 and their
    number. Without `ranged` the range is left out. None without a margin (an effect may be as small as one likes, and then no number
    suffices) or where the differences do not tell.
    """
    if not margin or not difference.tells:
        return None
    scaled = difference.mean / margin, difference.deviation / margin
    if max(map(abs, scaled)) > _VAST:
        return Needed(None, None, None)
    return _needed(
        difference.pairs, *scaled, difference.interval, (effects + 1) / 2, (likenesses + 1) / 2, ranged
    )


@functools.lru_cache(4096)
def _needed(
    pairs: int,
    mean: float,
    deviation: float,
    interval: Interval,
    effects: float,
    likenesses: float,
    ranged: bool,
) -> Needed:
    open_ = _Open(pairs, mean, deviation)
    rule = interval, effects, likenesses
    count = open_.fewest(open_.quantiles(_uniform()[0]), rule)
    return Needed(
        count, *(open_.fewest(open_.quantiles(np.array(q)), rule) if ranged else None for q in (0.1, 0.9))
    )


@functools.cache
def _uniform() -> np.ndarray:
    """[4, draws] numbers that fill the unit cube evenly (an additive recurrence by the root of x^5 = x + 1), the same at every call."""
    steps = 1.1673039782614187 ** -np.arange(1.0, 5.0)
    return (0.5 + steps[:, None] * np.arange(1, _DRAWS + 1)) % 1


@dataclass(frozen=True)
class _Open:
    """What some pairs leave open of the effect and of the deviation, both in units of the margin."""

    pairs: int
    mean: float
    deviation: float

    def quantiles(self, levels: np.ndarray) -> np.ndarray:
        """Quantiles of the deviation's posterior."""
        grid = np.log(self.deviation) + np.linspace(-3, 6, 1024)
        variance = np.exp(2 * grid)
        log = -(self.pairs - 1) * (grid + self.deviation**2 / variance / 2)
        total = _PRIOR**2 + variance / self.pairs
        log -= np.log(total) / 2 + self.mean**2 / total / 2
        share = np.cumsum(np.exp(log - log.max()))
        return np.exp(np.interp(levels, share / share[-1], grid))

    def chance(self, total: int, spreads: np.ndarray, rule: tuple[Interval, float, float]) -> float:
        """The chance of a verdict at so many pairs, over these deviations and the effects that go with each."""
        _, *uniform = _uniform()
        interval, effects, likenesses = rule
        new = total - self.pairs
        variance = 1 / (1 / _PRIOR**2 + self.pairs / spreads**2)
        effect = variance * self.pairs * self.mean / spreads**2 + np.sqrt(variance) * special.ndtri(
            uniform[0]
        )
        added = effect + spreads / math.sqrt(new) * special.ndtri(uniform[1])
        squares = spreads**2 * special.chdtri(new - 1, uniform[2]) if new > 1 else 0.0
        squares = (
            squares
            + (self.pairs - 1) * self.deviation**2
            + self.pairs * new / total * (self.mean - added) ** 2
        )
        mean, deviation = (self.pairs * self.mean + new * added) / total, np.sqrt(squares / (total - 1))
        excludes = np.abs(mean) > interval.half_width(total, effects) * deviation
        within = np.abs(mean) + interval.half_width(total, likenesses) * deviation < 1
        return float(np.mean(excludes | within))

    def fewest(self, spreads: np.ndarray, rule: tuple[Interval, float, float]) -> int | None:
        """The smallest number of pairs with an 80 % chance of a verdict; None beyond 200."""
        low, high = self.pairs, MOST_SEEDS + 1  # never enough, taken for enough
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.chance(middle, spreads, rule) >= CHANCE else (middle, high)
        return high if high <= MOST_SEEDS else None


HALF_WIDTHS = {"t": _t, "split": _t, "sequence": _sequence}
"""By kind, how half an interval's width in deviations follows from the pairs, from how often one looks, and from alpha."""

NAMES = {
    "t": "95 % t interval",
    "split": "t interval, its 5 % split over {looks} looks",
    "sequence": "95 % confidence sequence",
}
