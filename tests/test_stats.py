"""Differences against scipy and by hand, intervals that cover what they say, and verdicts that say no more than that."""

import math

import numpy as np
import pytest
from scipy import stats

from ablate.stats import Difference, paired_difference, verdict


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


@pytest.mark.parametrize("pairs", [3, 5, 8])
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
        (-0.004, 0.003, True, 0.005, "no difference that matters"),
        (-0.004, 0.003, False, 0.005, "no difference that matters"),
        (-0.004, -0.001, True, 0.005, "no difference that matters"),
        (0.001, 0.004, False, 0.005, "no difference that matters"),
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
    assert said.endswith(f"more seeds for ±{target:g}")


def test_more_seeds_than_anyone_runs_are_not_counted():
    assert verdict(between(-1.0, 1.0), True, 1e-6) == "undecided; over 1000 seeds for ±1e-06"
