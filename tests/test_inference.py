"""Corrected p-values, equivalence, ranks, resampling and power, against scipy and by simulation; refusals where there are too few pairs."""

import math

import numpy as np
import pytest
from scipy import stats

from ablate.inference import bootstrap, detectable, equivalence, holm, p_value, pairs_to_detect, repeated_measures, wilcoxon
from ablate.stats import Interval, paired_difference


def by_seed(values) -> dict[int, float]:
    return dict(enumerate(map(float, values)))


def pairs(count: int, seed: int, effect: float = 0.0, noise: float = 1.0):
    random = np.random.default_rng(seed)
    base = random.normal(3, 5, count)
    return base + random.normal(effect, noise, count), base


@pytest.mark.parametrize("count", [2, 3, 5, 20])
@pytest.mark.parametrize("seed", [0, 1])
def test_p_is_scipys_paired_t_test(count, seed):
    arm, base = pairs(count, seed)
    assert p_value(paired_difference(by_seed(arm), by_seed(base))) == pytest.approx(stats.ttest_rel(arm, base).pvalue, rel=1e-9)


@pytest.mark.parametrize("kind", ["t", "split:4", "sequence"])
@pytest.mark.parametrize("count", [4, 6, 12])
def test_p_is_below_5_percent_exactly_where_the_interval_excludes_zero(kind, count):
    for seed in range(200):
        found = paired_difference(*map(by_seed, pairs(count, seed, effect=1.0)), Interval.parse(kind))
        assert (p_value(found) < 0.05) == (found.low > 0 or found.high < 0)


def test_one_pair_and_the_same_numbers_have_no_p():
    assert math.isnan(p_value(paired_difference({0: 1.0}, {0: 2.0})))
    assert math.isnan(p_value(paired_difference({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0})))


def test_holm_by_hand():
    """Sorted .01, .02, .04 times 3, 2, 1: .03, .04, .04, none below the one before."""
    assert holm([0.04, math.nan, 0.01, 0.02]) == pytest.approx([0.04, math.nan, 0.03, 0.04], nan_ok=True)
    assert holm([]) == []
    assert all(map(math.isnan, holm([math.nan])))


def test_holm_calls_any_of_ten_like_arms_different_in_one_table_of_twenty(monkeypatch):
    """2000 tables: the standard error is .5 %. Uncorrected, 4 tables of 10 would."""
    monkeypatch.setattr("gc.collect", lambda: 0)  # statsmodels collects garbage at each call: .1 s
    random, wrong, raw = np.random.default_rng(0), 0, 0
    for _ in range(2000):
        p = stats.ttest_1samp(random.normal(0, 1, (5, 10)), 0).pvalue
        wrong += min(holm(p)) < 0.05
        raw += min(p) < 0.05
    assert wrong / 2000 <= 0.05 + 3 * 0.005
    assert raw / 2000 > 0.3


@pytest.mark.parametrize("count", [3, 5, 8])
def test_equivalence_is_shown_exactly_where_the_95_percent_interval_lies_within_the_margin(count):
    decided = set()
    for seed in range(200):
        arm, base = map(by_seed, pairs(count, seed, noise=0.01))
        found, margin = paired_difference(arm, base), 0.02
        within = -margin < found.low and found.high < margin
        decided.add(within)
        assert (equivalence(arm, base, margin) < 0.025) == within
    assert decided == {True, False}


def test_wilcoxon_is_refused_below_six_pairs_and_says_why():
    with pytest.raises(ValueError, match=r"cannot decide with 5 pairs: two-sided its p is at least 0.0625, above 0.05; it takes 6"):
        wilcoxon(*map(by_seed, pairs(5, 0)))
    arm, base = pairs(6, 0, effect=10.0)
    assert wilcoxon(by_seed(arm), by_seed(base)) == pytest.approx(2 / 2**6)


def test_a_bootstrap_is_refused_below_twenty_pairs_and_covers_from_there():
    """400 experiments of 20 pairs: the standard error of a coverage of 94 % is 1.2 %."""
    with pytest.raises(ValueError, match="a bootstrap of 19 pairs is too narrow"):
        bootstrap(*map(by_seed, pairs(19, 0)))
    covered = 0
    for seed in range(60):
        low, high = bootstrap(*map(by_seed, pairs(20, seed, effect=1.0)))
        covered += low <= 1.0 <= high
    assert covered >= 51  # 60 at 93 %: 4 expected outside, 9 is beyond three deviations


@pytest.mark.parametrize("count", [3, 5, 10])
def test_the_effect_that_is_called_detectable_is_found_eight_times_in_ten(count):
    """2000 experiments: the standard error of 80 % is .9 %."""
    effect = detectable(0.006, count)
    random = np.random.default_rng(count)
    p = stats.ttest_1samp(random.normal(effect, 0.006, (count, 2000)), 0).pvalue
    assert 0.77 <= (p < 0.05).mean() <= 0.83


@pytest.mark.parametrize("effect", [0.003, 0.006, 0.02, 0.2])
def test_the_pairs_that_detect_an_effect_are_the_fewest(effect):
    count = pairs_to_detect(0.006, effect)
    assert detectable(0.006, count) <= effect * (1 + 1e-6)
    assert count == 2 or detectable(0.006, count - 1) > effect


def test_no_spread_and_no_effect_need_no_power():
    assert math.isnan(detectable(0.0, 5))
    assert math.isnan(detectable(1.0, 1))
    assert pairs_to_detect(0.0, 1.0) is None
    assert pairs_to_detect(1.0, 0.0) is None


@pytest.mark.parametrize("seed", range(5))
def test_of_two_levels_the_analysis_of_variance_is_the_paired_t_test_of_the_means(seed):
    random = np.random.default_rng(seed)
    cells = {(a, b): by_seed(random.normal(a + 0.5 * a * b, 1, 6)) for a in (0, 1) for b in (0, 1)}
    found = repeated_measures(cells)
    mean = {a: [(cells[a, 0][s] + cells[a, 1][s]) / 2 for s in range(6)] for a in (0, 1)}
    cross = [cells[1, 1][s] - cells[1, 0][s] - cells[0, 1][s] + cells[0, 0][s] for s in range(6)]
    assert found[0,] == pytest.approx(stats.ttest_rel(mean[1], mean[0]).pvalue, rel=1e-9)
    assert found[0, 1] == pytest.approx(stats.ttest_1samp(cross, 0).pvalue, rel=1e-9)


def test_one_seed_has_no_analysis_of_variance():
    assert repeated_measures({(0,): {0: 1.0}, (1,): {0: 2.0}}) == {}
