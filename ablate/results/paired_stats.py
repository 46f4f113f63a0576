"""Paired differences between arms, their intervals, and verdicts corrected for the number of comparisons.

The problem: the effect of a part of an FP4 recipe (0.002 to 0.01 nats) is as small as the noise between
seeds. Two unpaired means do not show it.

What is paired: an arm and its baseline share initial weights and data order at each seed, so they are
compared seed by seed. `paired_difference` takes the mean of arm minus baseline over the seeds that both
finished.

  >>> arm, baseline = {0: 3.01, 1: 3.12, 2: 3.23}, {0: 3.00, 1: 3.10, 2: 3.20}
  >>> paired_difference(arm, baseline)        # mean +0.0200, 95 % interval -0.0048 to +0.0448

Which test: a verdict rests on two hypotheses. "There is no effect" is rejected at 5 % for "better" and
"worse". "The effect is min_effect or more" is rejected for "equivalent", by the two-sided p-value of the
nearer margin. Both p-values are valid for the number of looks that the sweep's interval allows: one look
(Student's t), a declared number of looks (t with the 5 % split), or any number (a confidence sequence).

Which correction: Holm's, over all comparisons of one table, separately for the two hypotheses.

Measured error rates (docs/reference/statistics.md; benchmarks/simulated_truth.py prints them): the 95 % t
interval covers 94.7 to 95.7 % of normal differences at 3 to 8 seeds, and only 82 to 84 % of lognormal ones.
In sweeps of 8 arms without an effect, at a deviation of 2 min_effect, 4.8 to 5.0 % have any false "better" or
"worse", against 27 to 32 % without the correction. At the number of seeds that `seeds_needed` names, 78 to 82
% of comparisons get their verdict, pooled over effects and deviations.

Refused: an interval, a p-value or a verdict from fewer than 3 distinct differences, "the same" for equal
counts, and a number of seeds without a `min_effect`.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from scipy import special

from ablate.results.intervals import ALPHA, SINGLE_LOOK, Interval, sequence_factor

CHANCE = 0.8
"""Probability of a verdict at the number of seeds that is named."""
MOST_SEEDS = 200
"""Largest number of seeds that is named. Beyond it: "over 200"."""
FEWEST_DISTINCT = 3
"""Smallest number of distinct differences for an interval. Fewer have no usable spread: equal counts on two
seeds would give an interval of width zero."""
FEWEST_RANKED = 6
"""Fewest pairs of Wilcoxon's test: two-sided, Wilcoxon's smallest p-value is 2 / 2^n: .0625 from 5 pairs."""
_PRIOR = 1.0
"""Standard deviation of the prior over effects in `seeds_needed`, in units of min_effect."""
_RESOLUTION = 1e-9
"""Differences closer than this share of the largest value count as one value: fp32 metrics resolve 1e-7, and
sums in another order differ by 1e-16."""
_VAST = 1e100
"""Limit on effects and deviations, in units of min_effect: beyond it their squares would overflow, and more
than 200 seeds are needed anyway."""
_DRAWS = 512


@dataclass(frozen=True)
class Difference:
    """An arm minus its baseline over the seeds that both finished, in the metric's unit, with a paired
    interval."""

    mean: float
    low: float
    high: float
    pairs: int
    deviation: float
    """Standard deviation of the paired differences; NaN for one pair."""
    interval: Interval = SINGLE_LOOK
    distinct: int | None = None
    """Number of distinct values among the differences. None: as many as pairs."""
    whole: bool = False
    """True if all values of both arms are whole numbers, as counts are."""
    shared_error: float = 0.0
    """Standard error of the mean that all pairs share, as from an evaluation on the same data.

    More pairs do not reduce it."""
    runs_equal: bool = field(default=True, compare=False)
    """False for a difference of averages whose runs are not equal one by one: such averages can agree by
    chance."""
    values: tuple[float, ...] = field(default=(), compare=False, repr=False)
    """The differences by seed, ascending."""
    freedom: float | None = None
    """Degrees of freedom of an unpaired difference (unpaired.py); None: paired, one less than the pairs."""
    sides: tuple[int, int] | None = None
    """Runs of the arm and of its baseline in an unpaired difference; None: paired."""

    @property
    def has_interval(self) -> bool:
        """True if the interval is finite: two pairs or more, enough distinct values, and a sequence that
        excludes something."""
        return math.isfinite(self.low)

    @property
    def half(self) -> float:
        """Half the width of the interval; NaN without one."""
        return self.high - self.mean if self.has_interval else math.nan

    @property
    def informative(self) -> bool:
        """True if the spread of the differences supports an interval and a p-value."""
        distinct = self.pairs if self.distinct is None else self.distinct
        return min(self.pairs, distinct) >= FEWEST_DISTINCT and self.deviation > 0

    @property
    def runs(self) -> str:
        """Number of pairs as text, or the runs on both sides: `5`, `5 + 4`."""
        return " + ".join(map(str, self.sides or (self.pairs,)))

    @property
    def same(self) -> bool:
        """True if the arms agree on every seed, run by run, and there are two seeds or more."""
        return self.runs_equal and self.pairs > 1 and self.mean == self.deviation == 0

    @property
    def error(self) -> float:
        """Standard error of the mean: of the pairs, and the one that they share."""
        return math.hypot(self.deviation / math.sqrt(self.pairs), self.shared_error)

    def with_shared_error(self, error: float) -> "Difference":
        """Return the difference with an interval that includes an error that all pairs share, a standard
        error in the metric's unit."""
        if not self.has_interval:
            return self
        shared = replace(self, shared_error=error)
        half = shared.error * math.sqrt(self.pairs) * self.interval.half_width(self.pairs)
        return replace(shared, low=self.mean - half, high=self.mean + half)


def common(arm: Mapping[int, float], baseline: Mapping[int, float]) -> list[int]:
    """Return the seeds at which both arms have a finite value, in ascending order: the pairs."""
    return sorted(
        seed
        for seed in arm.keys() & baseline.keys()
        if math.isfinite(arm[seed]) and math.isfinite(baseline[seed])
    )


def wilcoxon(arm: Mapping[int, float], baseline: Mapping[int, float]) -> float:
    """Return the two-sided p-value of Wilcoxon's signed-rank test on paired differences; ValueError for fewer
    than 6 pairs, by which p cannot fall below 5 %."""
    seeds = common(arm, baseline)
    if len(seeds) < FEWEST_RANKED:
        raise ValueError(
            f"Wilcoxon's test cannot decide with {len(seeds)} pairs: two-sided its p is at least"
            f" {2 / 2 ** len(seeds):.3g}, above {ALPHA}; it takes {FEWEST_RANKED}"
        )
    from scipy import stats  # takes most of a second, and few reports rank

    return float(stats.wilcoxon([arm[seed] - baseline[seed] for seed in seeds], method="auto").pvalue)


def paired_difference(
    arm: Mapping[int, float], baseline: Mapping[int, float], interval: Interval = SINGLE_LOOK
) -> Difference:
    """Return the mean of arm minus baseline over their common seeds, with its 95 % interval, in the metric's
    unit.

    Seeds with a value that is not finite are left out. The bounds are NaN with fewer than 3 distinct
    differences, and the mean is NaN without a common seed.
    """
    seeds = common(arm, baseline)
    if not seeds:
        return Difference(math.nan, math.nan, math.nan, 0, math.nan, interval)
    values = np.array([[arm[seed], baseline[seed]] for seed in seeds])
    differences = values[:, 0] - values[:, 1]
    mean = float(np.mean(differences))
    if len(seeds) == 1:
        return Difference(mean, math.nan, math.nan, 1, math.nan, interval, 1, values=(mean,))
    distinct = distinct_of(differences, np.abs(values).max())
    scale = 2.0**512 if np.abs(differences).max() > _VAST else 1.0  # their squares would overflow
    deviation = float(np.std(differences / scale, ddof=1)) * scale if distinct > 1 else 0.0
    half = deviation * interval.half_width(len(seeds))
    return Difference(
        mean,
        mean - half if distinct >= FEWEST_DISTINCT else math.nan,
        mean + half if distinct >= FEWEST_DISTINCT else math.nan,
        len(seeds),
        deviation,
        interval,
        distinct,
        bool((values == np.round(values)).all()),
        values=tuple(differences.tolist()),
    )


def distinct_of(values: np.ndarray, largest: float) -> int:
    """Return the number of distinct ones of some values; `largest`: the largest of all that are compared."""
    return 1 + int(np.sum(np.diff(np.sort(values)) > _RESOLUTION * largest))


# p-values


def p_value(difference: Difference, at: float = 0.0) -> float:
    """Return the two-sided p-value of "the true difference is `at`" (in the metric's unit): below 5 % exactly
    if the interval excludes `at`; NaN if the differences have no usable spread.

    It is valid as the interval is: at its one look, at every declared look, or at any look.
    """
    if not difference.informative:
        return math.nan
    t = (difference.mean - at) / difference.error
    if difference.interval.kind == "sequence":
        return min(1.0, 1 / sequence_factor(t, difference.pairs))
    freedom = difference.pairs - 1 if difference.freedom is None else difference.freedom
    return min(1.0, difference.interval.looks * 2 * float(special.stdtr(freedom, -abs(t))))


def equivalence(difference: Difference, margin: float | None) -> float:
    """Return the p-value of "the true difference is at least the margin, in either direction": below 5 % if
    the interval lies within the margin, in the metric's unit; 1 if the mean lies beyond it; NaN without a
    margin, or if the differences have no usable spread.

    It is the two-sided p-value of the nearer margin: twice the p-value of two one-sided tests (TOST), so a
    false rejection at 5 % has a probability of at most 2.5 %.
    """
    if margin is None or not difference.informative:
        return math.nan
    nearer = math.copysign(margin, difference.mean)
    return p_value(difference, nearer) if abs(difference.mean) < margin else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values after Holm's correction for the number of comparisons, in the same order. A NaN is not
    a comparison and stays NaN.

    If all hypotheses with a corrected p-value below alpha are rejected, the probability of any false
    rejection is at most alpha.
    """
    corrected, largest = list(p_values), 0.0
    finite = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    for rank, (p, index) in enumerate(finite):
        largest = max(largest, min(1.0, (len(finite) - rank) * p))
        corrected[index] = largest
    return corrected


# Verdicts

Kind = Literal["better", "worse", "equivalent", "same", "undecided", "unjudged"]
"""Kinds of verdict. docs/reference/statistics.md defines each."""
Reason = Literal[
    "no_pair",
    "one_pair",
    "few_values",
    "equal_counts",
    "nothing_learned",
    "censored",
    "length",
    "copies",
    "baseline",
    "refused",
    "pruned",
    "horizon",
    "position",
    "blind",
    "windows",
]
"""Reasons why there is no verdict."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on one comparison of a table, with everything that qualifies it, as data.

    `verdict_text` turns it into a sentence. `judge` fills in all fields but the last six, which verdicts on
    arms have.
    """

    kind: Kind
    reason: Reason | None = None
    """Reason why there is no verdict; set if and only if the kind is "unjudged"."""
    p: float = math.nan
    """P-value of "no effect", after Holm's correction."""
    p_equivalence: float = math.nan
    """P-value of "an effect of min_effect or more", after Holm's correction."""
    alone: Kind | None = None
    """Kind before Holm's correction, if the correction made the verdict undecided."""
    count: int = 0
    """Number of pairs of seeds, or of distinct differences if there are too few of those."""
    planned: "tuple[Difference, float | None, float, float] | None" = None
    """Arguments of `seeds_needed`, if the verdict is undecided and seeds are planned."""
    exploratory: bool = False
    """True if the arm was chosen by the numbers that are compared: a search's proposal."""
    fresh_seeds: int = 0
    """Number of pairs on seeds that took no part in choosing a search's winner; 0 for all other arms."""
    reference: float | None = None
    """Loss of a model that ignores its input, if the arm's mean loss is no better and its baseline's is."""
    diverged: int = 0
    """Number of seeds on which the arm diverged. The verdict is on the others."""
    seeds: int = 0
    """Number of seeds that an arm with diverged seeds was given."""
    mixed: int = 0
    """Number of pairs whose runs were computed by two kinds of processors or versions of torch."""

    @cached_property
    def needed(self) -> "Needed | None":
        """Seeds needed for a verdict; None unless it is undecided and `min_effect` is known."""
        return seeds_needed(*self.planned) if self.planned else None

    @property
    def decided(self) -> bool:
        """True if no further seed is needed."""
        return self.resolved or self.kind in ("equivalent", "same")

    @property
    def resolved(self) -> bool:
        """True if the sign of the difference is known."""
        return self.kind in ("better", "worse")

    @property
    def shown(self) -> str:
        """Kind that a drawing shows: `better`, `worse`, `equivalent`; `open` if none is decided, or if a
        search chose the arm by the same numbers."""
        if self.exploratory or not self.decided:
            return "open"
        return "equivalent" if self.kind == "same" else self.kind


def judge(
    compared: Sequence[tuple[Difference, float | None]], minimize: bool, plan: bool = True, among: int = 1
) -> list[Verdict]:
    """Return the verdicts on the differences of one table, in the same order, corrected by Holm over all of
    them.

    Each difference has its margin, the smallest effect that matters (None: not given). `plan`: name the seeds
    that an undecided comparison needs; `among`: number of comparisons of the table, if some have no result
    yet.
    """
    unseen = [1.0] * (among - len(compared))
    effects = holm([*(p_value(difference) for difference, _ in compared), *unseen])
    equivalences = holm([*(equivalence(difference, margin) for difference, margin in compared), *unseen])
    open_effects, open_equivalences = (
        max(1, sum(p >= ALPHA for p in corrected)) for corrected in (effects, equivalences)
    )
    verdicts = []
    # Comparisons without a result stand last, and have p-values alone.
    for (difference, margin), p, same in zip(compared, effects, equivalences, strict=False):
        verdict = replace(_verdict(difference, minimize, p, same), p=p, p_equivalence=same)
        if verdict.kind == "undecided":
            alone = _verdict(difference, minimize, p_value(difference), equivalence(difference, margin)).kind
            verdict = replace(
                verdict,
                alone=alone if alone != "undecided" else None,
                planned=(difference, margin, open_effects, open_equivalences) if plan else None,
            )
        verdicts.append(verdict)
    return verdicts


def _verdict(difference: Difference, minimize: bool, p: float, same: float) -> Verdict:
    """Return the verdict that follows from these p-values, without storing them."""
    pairs = difference.pairs
    if pairs < 2:
        return Verdict("unjudged", "one_pair" if pairs else "no_pair", count=pairs)
    # Equal losses come from equal bits. Equal counts may differ on the next seed.
    if difference.same and difference.whole:
        return Verdict("unjudged", "equal_counts", count=pairs)
    if difference.same:
        return Verdict("same", count=pairs)
    if not difference.informative:
        return Verdict("unjudged", "few_values", count=difference.distinct or pairs)
    if same < ALPHA:
        return Verdict("equivalent", count=pairs)
    if p < ALPHA:
        return Verdict("better" if (difference.mean < 0) == minimize else "worse", count=pairs)
    return Verdict("undecided", count=pairs)


# Seeds for a verdict


def deviation_range(difference: Difference) -> tuple[float, float]:
    """Return the 80 % confidence interval (chi-square) of the true standard deviation of the differences, in
    the metric's unit; NaN if they have no usable spread."""
    if not difference.informative:
        return math.nan, math.nan
    free = difference.pairs - 1
    low, high = (difference.deviation * math.sqrt(free / float(special.chdtri(free, q))) for q in (0.1, 0.9))
    return low, high


@dataclass(frozen=True)
class Needed:
    """Seeds, in all, for an 80 % chance of a verdict. None stands for more than 200."""

    count: int | None
    low: int | None
    high: int | None
    """`low` and `high`: the same number if the deviation is at the 10th and the 90th percentile of its
    posterior."""


def seeds_needed(
    difference: Difference,
    margin: float | None,
    effects: float = 1,
    equivalences: float = 1,
    ranged: bool = True,
) -> Needed | None:
    """Return the smallest number of seeds, in all, at which the chance of a verdict reaches 80 %, `ranged`
    with its range. None without a margin (the effect may be arbitrarily small, so no number suffices), or if
    the differences have no usable spread.

    The chance is a predictive probability given the seeds so far: that the interval at that number, old and
    new pairs together, excludes zero or lies within the margin. It is averaged over the posterior of the
    effect (prior N(0, margin^2)) and of the deviation (Jeffreys' prior).

    `effects` and `equivalences`: comparisons of the table whose p-value of "no effect", or of "an effect that
    matters", is still open. Half of the others are assumed to be decided by then, so Holm's correction
    divides the 5 % by the mean of 1 and their number.
    """
    if not margin or not difference.informative:
        return None
    scaled = difference.mean / margin, difference.deviation / margin
    if max(map(abs, scaled)) > _VAST:
        return Needed(None, None, None)
    rule = _Rule(
        difference.interval, (effects + 1) / 2, (equivalences + 1) / 2, difference.shared_error / margin
    )
    return _needed(difference.pairs, *scaled, rule, ranged)


class _Rule(NamedTuple):
    """Rule by which a verdict is given at some number of pairs."""

    interval: Interval
    effects: float
    """Number by which the 5 % are divided for "no effect"."""
    equivalences: float
    """The same for "an effect that matters"."""
    shared_error: float
    """Standard error that all pairs share, in units of the margin."""


@functools.lru_cache(4096)
def _needed(pairs: int, mean: float, deviation: float, rule: _Rule, ranged: bool) -> Needed:
    posterior = _Posterior(pairs, mean, deviation)
    count = posterior.smallest(posterior.quantiles(_uniform()[0]), rule)
    return Needed(
        count,
        *(posterior.smallest(posterior.quantiles(np.array(q)), rule) if ranged else None for q in (0.1, 0.9)),
    )


@functools.cache
def _uniform() -> np.ndarray:
    """Return [4, draws] numbers that fill the unit cube evenly, the same at every call: an additive
    recurrence by the root of x^5 = x + 1."""
    steps = 1.1673039782614187 ** -np.arange(1.0, 5.0)
    return (0.5 + steps[:, None] * np.arange(1, _DRAWS + 1)) % 1


@dataclass(frozen=True)
class _Posterior:
    """Posterior of the effect and of the deviation given some pairs, both in units of the margin."""

    pairs: int
    mean: float
    deviation: float

    def quantiles(self, levels: np.ndarray) -> np.ndarray:
        """Return quantiles of the deviation's posterior."""
        grid = np.log(self.deviation) + np.linspace(-3, 6, 1024)
        variance = np.exp(2 * grid)
        log = -(self.pairs - 1) * (grid + self.deviation**2 / variance / 2)
        total = _PRIOR**2 + variance / self.pairs
        log -= np.log(total) / 2 + self.mean**2 / total / 2
        share = np.cumsum(np.exp(log - log.max()))
        return np.exp(np.interp(levels, share / share[-1], grid))

    def chance(self, total: int, spreads: np.ndarray, rule: _Rule) -> float:
        """Return the chance of a verdict at `total` pairs, over these deviations and the effects that go with
        each."""
        _, *uniform = _uniform()
        new = total - self.pairs
        variance = 1 / (1 / _PRIOR**2 + self.pairs / spreads**2)
        effect = variance * self.pairs * self.mean / spreads**2
        effect = effect + np.sqrt(variance) * special.ndtri(uniform[0])
        added = effect + spreads / math.sqrt(new) * special.ndtri(uniform[1])
        squares = spreads**2 * special.chdtri(new - 1, uniform[2]) if new > 1 else 0.0
        squares = squares + (self.pairs - 1) * self.deviation**2
        squares = squares + self.pairs * new / total * (self.mean - added) ** 2
        mean, deviation = (self.pairs * self.mean + new * added) / total, np.sqrt(squares / (total - 1))
        error = np.hypot(deviation, rule.shared_error * math.sqrt(total))
        excludes = np.abs(mean) > rule.interval.half_width(total, rule.effects) * error
        within = np.abs(mean) + rule.interval.half_width(total, rule.equivalences) * error < 1
        return float(np.mean(excludes | within))

    def smallest(self, spreads: np.ndarray, rule: _Rule) -> int | None:
        """Return the smallest number of pairs with an 80 % chance of a verdict, None for more than 200."""
        low, high = self.pairs, MOST_SEEDS + 1  # never enough, taken for enough
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.chance(middle, spreads, rule) >= CHANCE else (middle, high)
        return high if high <= MOST_SEEDS else None
