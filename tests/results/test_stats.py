"""Differences against scipy and by hand, intervals that cover what they say, and verdicts that say no more than that."""

import json
import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from scipy import integrate, stats
from support.books import decided
from support.cases import every

from ablate.results.intervals import Interval
from ablate.results.paired_stats import (
    Difference,
    Kind,
    Needed,
    Reason,
    Verdict,
    equivalence,
    judge,
    p_value,
    paired_difference,
    seeds_needed,
)
from ablate.results.verdict_text import needed_text, verdict_document, verdict_notes, verdict_text

T, SEQUENCE = Interval(), Interval("sequence")
PLAIN_NORMAL = stats.norm(0, 1.8)
"""Distribution that the sequence mixes over: the effect in deviations of a paired difference."""


def by_seed(values) -> dict[int, float]:
    return dict(enumerate(map(float, values)))


@pytest.mark.parametrize("pairs", [3, 5, 20])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_interval_is_scipys_paired_t_interval(pairs, seed):
    arm, baseline = np.random.default_rng(seed).normal(3, 0.1, (2, pairs))
    found, expected = (
        paired_difference(by_seed(arm), by_seed(baseline)),
        stats.ttest_rel(arm, baseline).confidence_interval(0.95),
    )
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert found.mean == pytest.approx((arm - baseline).mean(), rel=1e-12)
    assert found.deviation == pytest.approx(np.std(arm - baseline, ddof=1), rel=1e-12)
    assert found.pairs == pairs


def test_three_pairs_by_hand():
    """Differences .1, .2 and .3: mean .2, deviation .1, t(2) 4.302653."""
    found = paired_difference({0: 1.0, 1: 2.0, 2: 3.0}, {0: 0.9, 1: 1.8, 2: 2.7})
    assert (found.mean, found.deviation) == pytest.approx((0.2, 0.1))
    assert found.high - found.mean == pytest.approx(4.3026527 * 0.1 / math.sqrt(3), rel=1e-6)
    assert found.mean - found.low == pytest.approx(4.3026527 * 0.1 / math.sqrt(3), rel=1e-6)


@pytest.mark.parametrize("pairs", range(3, 11))
def test_the_interval_covers_the_true_difference_in_95_of_100_experiments(pairs):
    """2000 experiments: the standard error of the share is 0.5 %, so 93.5 to 96.5 % is three of them."""
    random, effect = np.random.default_rng(pairs), 0.01
    covered = 0
    for _ in range(2000):
        seeds, residual = random.normal(3, 0.02, pairs), random.normal(0, 0.006, pairs)
        found = paired_difference(by_seed(seeds + effect + residual), by_seed(seeds))
        covered += found.low <= effect <= found.high
    assert 0.935 <= covered / 2000 <= 0.965


def test_pairing_shrinks_the_interval_where_seeds_dominate():
    random = np.random.default_rng(0)
    seeds = random.normal(3, 0.5, 8)
    arm, baseline = seeds + random.normal(0.01, 0.001, 8), seeds + random.normal(0, 0.001, 8)
    paired = paired_difference(by_seed(arm), by_seed(baseline))
    unpaired = stats.ttest_ind(arm, baseline).confidence_interval(0.95)
    assert paired.high - paired.low < (unpaired.high - unpaired.low) / 50


def test_one_pair_has_a_difference_and_no_interval():
    found = paired_difference({0: 1.5}, {0: 1.0})
    assert (found.mean, found.pairs, found.has_interval) == (0.5, 1, False)
    (judged,) = judge([(found, 0.1)], True)
    assert (judged.kind, judged.reason, judged.count) == ("unjudged", "one_pair", 1)


def test_no_pair_has_nothing():
    found = paired_difference({0: 1.5}, {1: 1.0})
    assert (found.pairs, found.has_interval) == (0, False)
    (judged,) = judge([(found, None)], True)
    assert (judged.kind, judged.reason, judged.count) == ("unjudged", "no_pair", 0)


@every(
    kind=["t", "split:4", "sequence"],
    differences=[(2, 2), (2, 3), (2, 2, 2), (2, 3, 2, 3), (0.1 + 0.2, 0.3, 0.5), (0, 0, 1)],
)
def test_fewer_than_three_distinct_differences_have_no_interval_no_p_and_no_verdict(differences, kind):
    """Sums in another order are one value: .1 + .2 is not .3."""
    baseline = dict.fromkeys(range(len(differences)), 7.0)
    arm = {seed: 7.0 + difference for seed, difference in enumerate(differences)}
    found = paired_difference(arm, baseline, Interval.parse(kind))
    assert not found.has_interval
    assert math.isnan(p_value(found))
    assert math.isnan(equivalence(found, 100.0))
    (judged,) = judge([(found, 100.0)], True)
    assert (judged.kind, judged.reason, judged.decided, judged.needed) == (
        "unjudged",
        "few_values",
        False,
        None,
    )
    assert judged.count == len({round(value, 9) for value in differences})


def test_equal_losses_are_the_same_numbers_and_equal_counts_are_no_verdict():
    """Losses agree to the last bit only where the runs do; a count may differ on the next seed."""
    losses, counts = {0: 3.01, 1: 3.02, 2: 3.05}, {0: 0.0, 1: 0.0, 2: 4.0}
    found = [judge([(paired_difference(values, values), 0.1)], True)[0] for values in (losses, counts)]
    assert [(verdict.kind, verdict.reason, verdict.decided) for verdict in found] == [
        ("same", None, True),
        ("unjudged", "equal_counts", False),
    ]


def test_only_seeds_that_both_finished_with_a_finite_value_are_paired():
    arm = {0: 1.0, 1: 2.0, 2: math.nan, 3: 4.0, 5: 9.0}
    baseline = {0: 0.5, 1: 1.4, 2: 1.0, 3: math.inf, 4: 7.0}
    assert paired_difference(arm, baseline) == paired_difference({0: 1.0, 1: 2.0}, {0: 0.5, 1: 1.4})


# Intervals that are looked at more than once


@pytest.mark.parametrize("pairs", [4, 5, 7, 12, 30])
def test_the_sequence_ends_where_the_bayes_factor_is_20(pairs):
    """The factor from its definition: Student's t under an effect, noncentral, averaged over the mixture. Quadrature is good to 1e-7."""
    t = SEQUENCE.half_width(pairs) * math.sqrt(pairs)

    def averaged(effect: float) -> float:
        return stats.nct.pdf(t, pairs - 1, effect * math.sqrt(pairs)) * PLAIN_NORMAL.pdf(effect)

    mixed = integrate.quad(averaged, -12, 12, points=(0, t / math.sqrt(pairs)), limit=200)[0]
    assert mixed / stats.t.pdf(t, pairs - 1) == pytest.approx(20, rel=1e-6)


def test_the_bayes_factor_is_the_one_of_the_data_under_jeffreys_prior_on_the_deviation():
    """Both integrals done by quadrature on the differences themselves, log deviation flat: no t anywhere."""
    values = np.random.default_rng(4).normal(0.01, 0.006, 5)
    shifted = (values - paired_difference(by_seed(values), by_seed(np.zeros(5)), SEQUENCE).high) / 0.006

    def normal(x: float, deviation: float) -> float:  # scipy's takes 50 times as long for one number
        return math.exp(-((x / deviation) ** 2) / 2) / (deviation * math.sqrt(2 * math.pi))

    def density(effect: float, log: float) -> float:
        deviation = math.exp(log)
        return math.prod(normal(value - effect * deviation, deviation) for value in shifted.tolist())

    null = integrate.quad(lambda log: density(0, log), -3, 8, limit=200)[0]
    mixed = integrate.dblquad(
        lambda effect, log: density(effect, log) * normal(effect, 1.8), -3, 8, -12, 12, epsabs=1e-14
    )[0]
    assert mixed / null == pytest.approx(20, rel=1e-3)  # what lies beyond these limits


@pytest.mark.parametrize("pairs", [3])
def test_a_sequence_bounds_nothing_where_no_data_of_so_few_pairs_could_reach_20(pairs):
    """The most that the factor can be: its limit for t without end is k^((pairs - 1) / 2)."""
    assert (1 + pairs * 1.8**2) ** ((pairs - 1) / 2) < 20 < (1 + 4 * 1.8**2) ** (3 / 2)
    assert SEQUENCE.half_width(pairs) == math.inf > SEQUENCE.half_width(4)
    found = paired_difference(by_seed([0.1, 0.11, 0.12][:pairs]), by_seed(np.zeros(pairs)), SEQUENCE)
    assert (found.low, found.high, found.has_interval) == (-math.inf, math.inf, False)
    assert judge([(found, 0.02)], True)[0].kind == "undecided"
    assert not decided(found, 0.02)


@pytest.mark.parametrize("pairs", [3, 5, 12])
@pytest.mark.parametrize("looks", [1, 4, 10])
def test_a_split_is_a_t_interval_at_its_share_of_5_percent(pairs, looks):
    values = np.random.default_rng(pairs).normal(0.01, 0.006, pairs)
    found = paired_difference(by_seed(values), by_seed(np.zeros(pairs)), Interval("split", looks))
    expected = stats.ttest_1samp(values, 0).confidence_interval(1 - 0.05 / looks)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_an_interval_is_known_by_its_text_and_says_what_it_is():
    assert [Interval.parse(text) for text in ("t", "split:10", "sequence")] == [
        T,
        Interval("split", 10),
        SEQUENCE,
    ]
    assert str(Interval("split", 10)) == "t interval, its 5 % split over 10 looks"
    assert (str(T), str(SEQUENCE)) == ("95 % t interval", "95 % confidence sequence")
    assert paired_difference({0: 1.0}, {0: 2.0}, SEQUENCE).interval == SEQUENCE


def looked_at(random: np.random.Generator, effect: float, interval: Interval, most: int = 12) -> Difference:
    """One experiment that is looked at from 3 pairs on, and ended as soon as its interval excludes zero."""
    seeds, residual = random.normal(3, 0.02, most), random.normal(0, 0.006, most)
    arm, baseline = by_seed(seeds + effect + residual), by_seed(seeds)
    for pairs in range(3, most + 1):
        found = paired_difference({seed: arm[seed] for seed in range(pairs)}, baseline, interval)
        if decided(found, None):
            break
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "wrong"), [("t", (0.16, 0.21)), ("sequence", (0.005, 0.05)), ("split:10", (0.005, 0.05))]
)
def test_an_effect_of_nothing_is_seldom_found_however_often_one_looks_unless_by_plain_t_intervals(
    kind, wrong
):
    """3000 experiments: the standard error at 5 % is 0.4 %. Looking ten times at plain t intervals misleads in 18 of 100."""
    random = np.random.default_rng(7)
    found = [decided(looked_at(random, 0.0, Interval.parse(kind)), None) for _ in range(3000)]
    assert wrong[0] <= np.mean(found) <= wrong[1]


@pytest.mark.parametrize("kind", ["sequence", "split:10"])
def test_growth_finds_an_effect_with_fewer_seeds_than_it_may_use(kind):
    """2000 experiments with an effect of 1.7 deviations, which 12 pairs show nearly always."""
    random = np.random.default_rng(8)
    found = [looked_at(random, 0.01, Interval.parse(kind)) for _ in range(2000)]
    assert np.mean([difference.low > 0 for difference in found]) > 0.95
    assert 5 < np.mean([difference.pairs for difference in found]) < 8.5


# Verdicts


def between(low: float, high: float) -> Difference:
    """The difference of five pairs with this interval."""
    half = (high - low) / 2
    return Difference((low + high) / 2, low, high, 5, half * math.sqrt(5) / stats.t.ppf(0.975, 4))


@pytest.mark.parametrize(
    ("low", "high", "minimize", "min_effect", "expected"),
    [
        (-0.03, -0.01, True, None, "better"),
        (0.01, 0.03, True, None, "worse"),
        (-0.03, -0.01, False, None, "worse"),
        (0.01, 0.03, False, None, "better"),
        (-0.03, -0.01, True, 0.005, "better"),
        (-0.004, 0.003, True, 0.005, "equivalent"),
        (-0.004, 0.003, False, 0.005, "equivalent"),
        (-0.004, -0.001, True, 0.005, "equivalent"),
        (0.001, 0.004, False, 0.005, "equivalent"),
        (-0.006, -0.001, True, 0.005, "better"),
    ],
)
def test_a_verdict_is_what_the_interval_allows(low, high, minimize, min_effect, expected):
    assert judge([(between(low, high), min_effect)], minimize)[0].kind == expected


@pytest.mark.parametrize("minimize", [True, False])
@pytest.mark.parametrize(
    ("low", "high", "min_effect"), [(-0.01, 0.01, None), (-0.01, 0.004, 0.005), (-0.02, 0.001, None)]
)
def test_an_interval_that_holds_zero_and_more_is_undecided(low, high, minimize, min_effect):
    assert judge([(between(low, high), min_effect)], minimize)[0].kind == "undecided"


# Seeds for a verdict


def seen(pairs: int, mean: float, deviation: float, interval: Interval = T) -> Difference:
    """Return the difference of so many pairs with this mean and deviation."""
    half = deviation * interval.half_width(pairs)
    return Difference(mean, mean - half, mean + half, pairs, deviation, interval)


@pytest.mark.parametrize("margin", [None, 0.0])
def test_without_an_effect_that_matters_no_number_of_seeds_is_named(margin):
    assert seeds_needed(seen(5, 0.1, 1.0), margin) is None
    assert judge([(seen(5, 0.1, 1.0), margin)], True)[0].needed is None


def test_the_number_of_seeds_follows_from_ratios_and_grows_with_spread_with_caution_and_with_company():
    needed = seeds_needed(seen(5, 0.3, 1.5), 1.0)
    assert needed == seeds_needed(seen(5, 0.003, 0.015), 0.01)
    assert 5 < needed.low < needed.count < needed.high
    others = [seen(5, 0.3, 3.0), seen(5, 0.3, 1.5, Interval("split", 4)), seen(5, 0.3, 1.5, SEQUENCE)]
    assert all(seeds_needed(other, 1.0).count > needed.count for other in others)
    assert seeds_needed(seen(5, 0.3, 1.5), 1.0, 8, 8).count > needed.count
    assert seeds_needed(seen(5, 0.3, 30.0), 1.0).count is None
    assert judge([(seen(5, 0.3, 1.5), 1.0)], True)[0].needed == needed


@pytest.mark.parametrize(
    ("pairs", "mean", "deviation"),
    [(3, 1.4, 0.9), (4, 0.3, 1.5), (5, 0.9, 0.8), (8, 0.0, 2.0), (20, -0.5, 2.5)],
)
def test_the_number_of_seeds_is_that_of_draws_from_the_posterior(pairs, mean, deviation):
    """Against draws from a grid of prior times likelihood, which err by .0013; the 512 of the package by some .02."""
    random = np.random.default_rng(5)
    effects, spreads = np.linspace(-6, 6, 801), np.exp(np.log(deviation) + np.linspace(-2, 5, 801))
    effect, spread = np.meshgrid(effects, spreads)
    squares = (pairs - 1) * deviation**2 + pairs * (mean - effect) ** 2
    weight = stats.norm.logpdf(effect) - pairs * np.log(spread) - squares / 2 / spread**2
    weight = np.exp(weight - weight.max()).ravel()
    drawn = random.choice(weight.size, 100_000, p=weight / weight.sum())
    effect, spread = effect.ravel()[drawn], spread.ravel()[drawn]

    def chance(total: int) -> float:
        more = total - pairs
        added = random.normal(effect, spread / math.sqrt(more))
        squares = spread**2 * random.chisquare(more - 1, len(spread)) if more > 1 else 0.0
        squares = squares + (pairs - 1) * deviation**2 + pairs * more / total * (mean - added) ** 2
        middle, error = (pairs * mean + more * added) / total, np.sqrt(squares / (total - 1) / total)
        half = stats.t.ppf(0.975, total - 1) * error
        return float(np.mean((abs(middle) > half) | (abs(middle) + half < 1)))

    count = seeds_needed(seen(pairs, mean, deviation), 1.0, ranged=False).count
    assert chance(count) > 0.77
    assert count == pairs + 1 or chance(count - 1) < 0.83


@pytest.mark.slow
@pytest.mark.parametrize("interval", [T, Interval("split", 4), SEQUENCE], ids=str)
def test_a_verdict_comes_in_four_of_five_sweeps_at_the_number_of_seeds_that_was_named(interval):
    """300 sweeps with effects N(0, min_effect^2) and deviations from .5 to 2: the standard error of 80 % is 2.3 %."""
    random, kept = np.random.default_rng(17), []
    while len(kept) < 300:
        effect, deviation = random.normal(), math.exp(random.uniform(math.log(0.5), math.log(2)))
        values = random.normal(effect, deviation, 200)
        found = paired_difference(by_seed(values[:4]), by_seed(np.zeros(4)), interval)
        needed = None if decided(found, 1.0) else seeds_needed(found, 1.0, ranged=False)
        if needed and needed.count:
            count = needed.count
            kept.append(
                decided(paired_difference(by_seed(values[:count]), by_seed(np.zeros(count)), interval), 1.0)
            )
    assert 0.75 - 3 * 0.023 <= np.mean(kept) <= 0.85 + 3 * 0.023


# Error rates


def test_eight_arms_without_an_effect_give_a_false_verdict_in_one_table_of_twenty():
    """1500 tables over a shared baseline: the standard error of 5 % is .56 %. Uncorrected, 3 tables of 10 would."""
    random, false, alone = np.random.default_rng(3), 0, 0
    for _ in range(1500):
        values = random.normal(0, 2, (9, 4))
        found = [paired_difference(by_seed(arm), by_seed(values[8])) for arm in values[:8]]
        false += any(
            judged.kind in ("better", "worse")
            for judged in judge([(one, 1.0) for one in found], True, plan=False)
        )
        alone += any(one.low > 0 or one.high < 0 for one in found)
    assert false / 1500 <= 0.05 + 3 * 0.0056
    assert alone / 1500 > 0.2


def test_both_kinds_of_verdict_are_corrected():
    """At the edge alone: p .04 for an effect, and .04 for one that matters. Beside seven that say nothing neither stands."""
    edge = 4 * stats.t.ppf(0.98, 4) / stats.t.ppf(0.975, 4)  # of the half width: a p-value of .04
    for mean, alone in ((0.02 * edge / 4 + 1e-6, "worse"), (0.0, "equivalent")):
        deviation = 0.02 * math.sqrt(5) / stats.t.ppf(0.975, 4)
        margin = 0.02 * edge / 4 + 1e-6 if alone == "equivalent" else 1e-3
        line, dull = seen(5, mean, deviation), seen(5, 0.0, 1.0)
        assert judge([(line, margin)], True)[0].kind == alone
        among = judge([(line, margin), *[(dull, margin)] * 7], True)[0]
        assert among.kind == "undecided"
        assert among.alone == alone


SIMULATED = 4000
"""Standard error of a share of 5 %: .35 %, of 2.5 %: .25 %."""


def share_of(said: str, effect: float, pairs: int, margin: float) -> float:
    """Return how often a verdict is given on an arm that is truly so much worse, its seeds paired with noise of .006."""
    random, found = np.random.default_rng(pairs), 0
    for _ in range(SIMULATED):
        seeds, noise = random.normal(3, 0.02, pairs), random.normal(effect, 0.006, pairs)
        found += (
            judge([(paired_difference(by_seed(seeds + noise), by_seed(seeds)), margin)], True)[0].kind == said
        )
    return found / SIMULATED


@pytest.mark.parametrize("pairs", [3, 5, 8])
def test_an_arm_like_its_baseline_is_called_better_or_worse_in_one_comparison_of_twenty(pairs):
    wrong = share_of("better", 0.0, pairs, 1e-9) + share_of("worse", 0.0, pairs, 1e-9)
    assert 0.04 <= wrong <= 0.06  # three standard errors


@pytest.mark.parametrize("pairs", [3, 5, 8])
def test_an_arm_that_is_as_bad_as_matters_is_called_equivalent_in_one_comparison_of_forty_at_most(pairs):
    assert share_of("equivalent", 0.01, pairs, 0.01) <= 0.025 + 3 * 0.0025


# In words


UNDECIDED = judge([(seen(5, 0.3, 1.5), 1.0)], True)[0]
NEEDED = f"{UNDECIDED.needed.count} ({UNDECIDED.needed.low} to {UNDECIDED.needed.high})"
WORDS = {
    "better": (Verdict("better"), "better", [], "better"),
    "the same": (Verdict("same"), "same", ["the same numbers on every seed"], "the same numbers"),
    "undecided": (UNDECIDED, "undecided", [], f"undecided; {NEEDED} seeds in all"),
    "not after Holm": (
        replace(UNDECIDED, alone="worse"),
        "undecided",
        ["worse alone, not after Holm's correction"],
        f"undecided (worse alone, not after Holm's correction); {NEEDED} seeds in all",
    ),
    "exploratory": (
        Verdict("worse", exploratory=True),
        "worse",
        ["exploratory: the search chose this arm by the same numbers"],
        "worse (exploratory: the search chose this arm by the same numbers)",
    ),
    "fresh": (Verdict("worse", fresh_seeds=3), "worse", ["on 3 fresh seeds"], "worse (on 3 fresh seeds)"),
    "nothing learned": (
        Verdict("worse", reference=3.149),
        "worse",
        ["learned nothing: a model that ignores its input reaches 3.15"],
        "worse (learned nothing: a model that ignores its input reaches 3.15)",
    ),
    "depends on the horizon": (
        Verdict("unjudged", "horizon"),
        "depends on the horizon",
        [],
        "depends on the horizon",
    ),
    "depends on the position": (
        Verdict("unjudged", "position"),
        "depends on the position",
        [],
        "depends on the position",
    ),
    "sees nothing": (
        Verdict("unjudged", "blind"),
        "this design cannot tell",
        [],
        "this design cannot tell",
    ),
    "some diverged": (
        Verdict("worse", diverged=1, seeds=4),
        "diverged; worse",
        ["diverged on 1 of 4 seeds: the verdict is on the other seeds"],
        "diverged on 1 of 4 seeds; on the others: worse",
    ),
    "all diverged": (
        Verdict("unjudged", "no_pair", diverged=1, seeds=1),
        "diverged",
        ["diverged on 1 of 1 seed"],
        "diverged on 1 of 1 seed",
    ),
    "no pair": (
        Verdict("unjudged", "no_pair"),
        "not judged",
        ["no pair of finished seeds"],
        "no pair of finished seeds",
    ),
    "one pair": (
        Verdict("unjudged", "one_pair", count=1),
        "not judged",
        ["one seed: no interval"],
        "one seed: no interval",
    ),
    "few": (
        Verdict("unjudged", "few_values", count=2),
        "not judged",
        ["distinct differences by seed: 2 of the 3 that a verdict needs"],
        "distinct differences by seed: 2 of the 3 that a verdict needs",
    ),
    "counts": (
        Verdict("unjudged", "equal_counts", count=3),
        "not judged",
        ["equal counts on 3 seeds"],
        "equal counts on 3 seeds",
    ),
    "none learned": (
        Verdict("unjudged", "nothing_learned"),
        "not judged",
        ["no answer: nothing was learned"],
        "no answer: nothing was learned",
    ),
    "not reached": (
        Verdict("unjudged", "censored", count=2),
        "not judged",
        ["the target is not reached on 2 seeds of the pair, so there is no gap"],
        "the target is not reached on 2 seeds of the pair, so there is no gap",
    ),
    "not as long": (
        Verdict("unjudged", "length", count=2),
        "not judged",
        ["runs of unequal length on 2 seeds: no verdict"],
        "runs of unequal length on 2 seeds: no verdict",
    ),
    "not as long on one": (
        Verdict("unjudged", "length", count=1),
        "not judged",
        ["runs of unequal length on 1 seed: no verdict"],
        "runs of unequal length on 1 seed: no verdict",
    ),
    "copies": (
        Verdict("unjudged", "copies", count=1),
        "not judged",
        ["runs with the same values count as one, which leaves too few"],
        "runs with the same values count as one, which leaves too few",
    ),
    "two machines": (
        Verdict("worse", mixed=2),
        "worse",
        ["2 pairs compare two kinds of processors or versions of torch, too"],
        "worse (2 pairs compare two kinds of processors or versions of torch, too)",
    ),
    "a baseline": (Verdict("unjudged", "baseline"), "baseline", [], "baseline"),
    "refused": (Verdict("unjudged", "refused"), "refused", [], "refused"),
    "pruned": (Verdict("unjudged", "pruned"), "pruned", [], "pruned"),
    "windows": (Verdict("unjudged", "windows"), "not the same windows", [], "not the same windows"),
}
"""By case: the verdict, its word in a table, its footnotes, and all of it in a line."""


@every(case=WORDS)
def test_a_verdict_is_a_word_with_notes_in_a_table_and_all_of_it_in_a_line(case):
    verdict, short, notes, long = WORDS[case]
    assert (verdict_text(verdict, short=True), verdict_notes(verdict), verdict_text(verdict)) == (
        short,
        notes,
        long,
    )
    document = json.loads(json.dumps(verdict_document(verdict), allow_nan=False))
    assert (document["kind"], document["reason"], document["text"]) == (verdict.kind, verdict.reason, long)


def test_every_kind_and_reason_has_its_words():
    verdicts = [verdict for verdict, *_ in WORDS.values()]
    assert {verdict.kind for verdict in verdicts} == {*get_args(Kind)} - {
        "equivalent"
    }  # which is its own word, as better is
    assert {verdict.reason for verdict in verdicts} == {None, *get_args(Reason)}


@pytest.mark.parametrize(
    ("needed", "ranged", "shown"),
    [
        (None, True, ""),
        (Needed(8, 4, 66), True, "8 (4 to 66)"),
        (Needed(8, 4, 66), False, "8"),
        (Needed(80, 40, None), True, "80 (40 to over 200)"),
        (Needed(None, None, None), True, "over 200"),
        (Needed(None, 150, None), False, "over 200"),
    ],
)
def test_the_seeds_needed_are_shown_with_their_range_where_there_is_room(needed, ranged, shown):
    assert needed_text(needed, ranged) == shown
