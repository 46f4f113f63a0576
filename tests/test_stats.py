"""Differences against scipy and by hand, intervals that cover what they say, and verdicts that say no more than that."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from ablate.stats import Difference, Interval, decided, paired_difference, verdict

T, SEQUENCE = Interval(), Interval("sequence")
PLAIN_NORMAL = stats.norm(0, 1.8)
"""What the sequence mixes over: the effect in deviations of a paired difference."""


def by_seed(values) -> dict[int, float]:
    return dict(enumerate(map(float, values)))


@pytest.mark.parametrize("pairs", [2, 3, 5, 20])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_interval_is_scipys_paired_t_interval(pairs, seed):
    arm, baseline = np.random.default_rng(seed).normal(3, 0.1, (2, pairs))
    found, expected = paired_difference(by_seed(arm), by_seed(baseline)), stats.ttest_rel(arm, baseline).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert found.mean == pytest.approx((arm - baseline).mean(), rel=1e-12)
    assert found.deviation == pytest.approx(np.std(arm - baseline, ddof=1), rel=1e-12)
    assert found.pairs == pairs


def test_two_pairs_by_hand():
    found = paired_difference({0: 1.0, 1: 2.0}, {0: 0.9, 1: 1.7})  # differences 0.1 and 0.3: mean 0.2, deviation 0.1414, t(1) 12.706
    assert found.mean == pytest.approx(0.2)
    assert found.deviation == pytest.approx(math.sqrt(0.02))
    assert found.high - found.mean == pytest.approx(12.7062047 * 0.1, rel=1e-6)
    assert found.mean - found.low == pytest.approx(12.7062047 * 0.1, rel=1e-6)


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
    assert verdict(found, True, 0.1) == "one seed: no interval"


def test_no_pair_has_nothing():
    found = paired_difference({0: 1.5}, {1: 1.0})
    assert (found.pairs, found.has_interval) == (0, False)
    assert verdict(found, True, None) == "no pair of finished seeds"


def test_pairs_that_differ_by_the_same_amount_have_an_interval_of_no_width():
    found = paired_difference({0: 1.5, 1: 2.5, 2: 3.5}, {0: 1.0, 1: 2.0, 2: 3.0})
    assert (found.low, found.mean, found.high, found.deviation) == (0.5, 0.5, 0.5, 0.0)
    assert verdict(found, True, None) == "worse"


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

    def density(effect: float, log: float) -> float:
        return math.exp(stats.norm.logpdf(shifted, effect * math.exp(log), math.exp(log)).sum())

    null = integrate.quad(lambda log: density(0, log), -3, 8, limit=200)[0]
    mixed = integrate.dblquad(lambda effect, log: density(effect, log) * PLAIN_NORMAL.pdf(effect), -3, 8, -12, 12, epsabs=1e-14)[0]
    assert mixed / null == pytest.approx(20, rel=1e-3)  # what lies beyond these limits


@pytest.mark.parametrize("pairs", [2, 3])
def test_a_sequence_bounds_nothing_where_no_data_of_so_few_pairs_could_reach_20(pairs):
    """The most that the factor can be: its limit for t without end is k^((pairs - 1) / 2)."""
    assert (1 + pairs * 1.8**2) ** ((pairs - 1) / 2) < 20 < (1 + 4 * 1.8**2) ** (3 / 2)
    assert SEQUENCE.half_width(pairs) == math.inf > SEQUENCE.half_width(4)
    found = paired_difference(by_seed([0.1, 0.11, 0.12][:pairs]), by_seed(np.zeros(pairs)), SEQUENCE)
    assert (found.low, found.high, found.has_interval) == (-math.inf, math.inf, False)
    assert verdict(found, True, 0.02).startswith("undecided; ~")
    assert not decided(found, 0.02)


@pytest.mark.parametrize("pairs", [2, 5, 12])
@pytest.mark.parametrize("looks", [1, 4, 10])
def test_a_split_is_a_t_interval_at_its_share_of_5_percent(pairs, looks):
    values = np.random.default_rng(pairs).normal(0.01, 0.006, pairs)
    found = paired_difference(by_seed(values), by_seed(np.zeros(pairs)), Interval("split", looks))
    expected = stats.ttest_1samp(values, 0).confidence_interval(1 - 0.05 / looks)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_an_interval_is_known_by_its_text_and_says_what_it_is():
    assert [Interval.parse(text) for text in ("t", "split:10", "sequence")] == [T, Interval("split", 10), SEQUENCE]
    assert str(Interval("split", 10)) == "t interval, its 5 % split over 10 looks"
    assert (str(T), str(SEQUENCE)) == ("95 % t interval", "95 % confidence sequence")
    assert paired_difference({0: 1.0}, {0: 2.0}, SEQUENCE).interval == SEQUENCE


def test_the_seeds_that_would_settle_it_are_counted_in_the_intervals_own_width():
    half = SEQUENCE.half_width(5)
    more = [verdict(Difference(0, -half, half, 5, 1.0, kind), True, 1.0) for kind in (T, SEQUENCE, Interval("split", 10))]
    assert more == ["undecided; ~2 more seeds for ±1", "undecided; ~9 more seeds for ±1", "undecided; ~8 more seeds for ±1"]


def looked_at(random: np.random.Generator, effect: float, interval: Interval, most: int = 12) -> Difference:
    """One experiment that is looked at from 3 pairs on, and ended as soon as its interval excludes zero."""
    seeds, residual = random.normal(3, 0.02, most), random.normal(0, 0.006, most)
    arm, baseline = by_seed(seeds + effect + residual), by_seed(seeds)
    for pairs in range(3, most + 1):
        found = paired_difference({seed: arm[seed] for seed in range(pairs)}, baseline, interval)
        if decided(found, None):
            break
    return found


@pytest.mark.parametrize(("kind", "wrong"), [("t", (0.16, 0.21)), ("sequence", (0.005, 0.05)), ("split:10", (0.005, 0.05))])
def test_an_effect_of_nothing_is_seldom_found_however_often_one_looks_unless_by_plain_t_intervals(kind, wrong):
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
    assert verdict(between(low, high), minimize, min_effect) == expected


@pytest.mark.parametrize("minimize", [True, False])
@pytest.mark.parametrize(("low", "high", "min_effect"), [(-0.01, 0.01, None), (-0.01, 0.004, 0.005), (-0.02, 0.001, None)])
def test_an_interval_that_holds_zero_and_more_is_undecided(low, high, minimize, min_effect):
    assert verdict(between(low, high), minimize, min_effect).startswith("undecided; ")


@pytest.mark.parametrize(("half", "target"), [(0.01, 0.005), (0.02, 0.01), (0.006, 0.005), (0.0051, 0.005)])
def test_the_seeds_that_would_settle_it_are_the_fewest_that_narrow_the_interval_to_the_effect(half, target):
    difference = between(-half, half)
    said = verdict(difference, True, target)
    more = int(said.removeprefix("undecided; ~").split()[0])
    width = [stats.t.ppf(0.975, n - 1) * difference.deviation / math.sqrt(n) for n in (5 + more - 1, 5 + more)]
    assert width[0] > target >= width[1]
    assert said.endswith(f"for ±{target:g}")


def test_more_seeds_than_anyone_runs_are_not_counted():
    assert verdict(between(-1.0, 1.0), True, 1e-6) == "undecided; over 1000 seeds for ±1e-06"


SIMULATED = 4000
"""Standard error of a share of 5 %: .35 %, of 2.5 %: .25 %."""


def share_of(said: str, effect: float, pairs: int, margin: float) -> float:
    """How often a verdict is given of an arm that is truly so much worse, its seeds paired with noise of .006."""
    random, found = np.random.default_rng(pairs), 0
    for _ in range(SIMULATED):
        seeds, noise = random.normal(3, 0.02, pairs), random.normal(effect, 0.006, pairs)
        found += verdict(paired_difference(by_seed(seeds + noise), by_seed(seeds)), True, margin) == said
    return found / SIMULATED


@pytest.mark.parametrize("pairs", [3, 5, 8])
def test_an_arm_like_its_baseline_is_called_better_or_worse_in_one_comparison_of_twenty(pairs):
    wrong = share_of("better", 0.0, pairs, 1e-9) + share_of("worse", 0.0, pairs, 1e-9)
    assert 0.04 <= wrong <= 0.06  # three standard errors


@pytest.mark.parametrize("pairs", [3, 5, 8])
def test_an_arm_that_is_as_bad_as_matters_is_called_equivalent_in_one_comparison_of_forty_at_most(pairs):
    assert share_of("equivalent", 0.01, pairs, 0.01) <= 0.025 + 3 * 0.0025
