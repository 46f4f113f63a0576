"""Corrected p-values, equivalence and ranks, against scipy and by simulation; refusals where there are too few pairs."""

import math

import numpy as np
import pytest
from scipy import stats

from ablate.results.intervals import Interval
from ablate.results.paired_stats import equivalence, holm, p_value, paired_difference, wilcoxon


def by_seed(values) -> dict[int, float]:
    return dict(enumerate(map(float, values)))


def pairs(count: int, seed: int, effect: float = 0.0, noise: float = 1.0):
    random = np.random.default_rng(seed)
    base = random.normal(3, 5, count)
    return base + random.normal(effect, noise, count), base


@pytest.mark.parametrize("count", [3, 5, 20])
@pytest.mark.parametrize("seed", [0, 1])
def test_p_is_scipys_paired_t_test(count, seed):
    arm, base = pairs(count, seed)
    assert p_value(paired_difference(by_seed(arm), by_seed(base))) == pytest.approx(
        stats.ttest_rel(arm, base).pvalue, rel=1e-9
    )


@pytest.mark.parametrize("kind", ["t", "split:4", "sequence"])
@pytest.mark.parametrize("count", [4, 6, 12])
def test_p_is_below_5_percent_exactly_where_the_interval_excludes_zero(kind, count):
    for seed in range(200):
        found = paired_difference(*map(by_seed, pairs(count, seed, effect=1.0)), Interval.parse(kind))
        assert (p_value(found) < 0.05) == (found.low > 0 or found.high < 0)


@pytest.mark.parametrize("kind", ["t", "split:4", "sequence"])
def test_an_effect_of_many_deviations_on_many_seeds_has_a_p_near_zero(kind):
    """Its Bayes factor, and the odds of its t, are beyond the largest float."""
    found = paired_difference(*map(by_seed, pairs(400, 0, effect=100.0)), Interval.parse(kind))
    assert 0 <= p_value(found) < 1e-300


def test_one_pair_and_the_same_numbers_have_no_p():
    assert math.isnan(p_value(paired_difference({0: 1.0}, {0: 2.0})))
    assert math.isnan(p_value(paired_difference({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0})))


def test_holm_by_hand():
    """Sorted .01, .02, .04 times 3, 2, 1: .03, .04, .04, none below the one before."""
    assert holm([0.04, math.nan, 0.01, 0.02]) == pytest.approx([0.04, math.nan, 0.03, 0.04], nan_ok=True)
    # 1 * 0.021 is below 2 * 0.02, and a larger p-value stays no smaller.
    assert holm([0.021, 0.02]) == [0.04, 0.04]
    assert holm([]) == []
    assert all(map(math.isnan, holm([math.nan])))


def test_holm_calls_any_of_ten_like_arms_different_in_one_table_of_twenty():
    """2000 tables: the standard error is .5 %. Uncorrected, 4 tables of 10 would."""
    random, wrong, raw = np.random.default_rng(0), 0, 0
    for _ in range(2000):
        p = stats.ttest_1samp(random.normal(0, 1, (5, 10)), 0).pvalue
        wrong += min(holm(p)) < 0.05
        raw += min(p) < 0.05
    assert wrong / 2000 <= 0.05 + 3 * 0.005
    assert raw / 2000 > 0.3


@pytest.mark.parametrize("kind", ["t", "split:4", "sequence"])
@pytest.mark.parametrize("count", [4, 5, 8])
def test_equivalence_is_shown_exactly_where_the_interval_lies_within_the_margin(count, kind):
    decided = set()
    for seed in range(300):
        arm, base = map(by_seed, pairs(count, seed, noise=0.01))
        found, margin = paired_difference(arm, base, Interval.parse(kind)), 0.02
        within = -margin < found.low and found.high < margin
        decided.add(within)
        assert (equivalence(found, margin) < 0.05) == within
    assert decided == {True, False} or (kind, count) == ("sequence", 4)


@pytest.mark.parametrize("seed", range(5))
def test_equivalence_is_twice_the_p_of_two_one_sided_tests(seed):
    arm, base = pairs(5, seed, noise=0.01)
    one_sided = [
        stats.ttest_1samp(arm - base, edge, alternative=side).pvalue
        for edge, side in ((-0.02, "greater"), (0.02, "less"))
    ]
    found = equivalence(paired_difference(by_seed(arm), by_seed(base)), 0.02)
    assert found == pytest.approx(min(1.0, 2 * max(one_sided)), rel=1e-9)


def test_wilcoxon_is_refused_below_six_pairs_and_says_why():
    with pytest.raises(
        ValueError,
        match=r"cannot decide with 5 pairs: two-sided its p is at least 0.0625, above 0.05; it takes 6",
    ):
        wilcoxon(*map(by_seed, pairs(5, 0)))
    arm, base = pairs(6, 0, effect=10.0)
    assert wilcoxon(by_seed(arm), by_seed(base)) == pytest.approx(2 / 2**6)
