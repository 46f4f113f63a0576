"""Gate for a loop of proposals: against a second implementation with scipy.stats, by simulation, and at its refusals."""

import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean, variance

import numpy as np
import pytest
from scipy import stats

sys.path.append(
    str(Path(__file__).parents[2] / "benchmarks")
)  # behind the standard library: names there may shadow it
import gate_loops
from gate_loops import PROPOSALS, ROBUST, RULES, Scenario, measure, not_better, run, scenarios, tables

from ablate.errors import InputError
from ablate.results.proposals import LOOKS, Decision, Floor, History, Plan, decide

NOISE, LEVEL = 0.01, 3.2


def runs(source: random.Random, count: int, gain: float = 0.0, deviation: float = 1.0) -> list[float]:
    """Return losses of a configuration that is better than the level by `gain` noise floors."""
    return [source.gauss(LEVEL - gain * NOISE, deviation * NOISE) for _ in range(count)]


def floor(source: random.Random) -> Floor:
    return Floor.of(runs(source, 16))


def case(seed: int) -> tuple[list[float], list[float], list[float], History, Plan]:
    """Return a random situation: reruns, baseline, candidate, history and plan."""
    source = random.Random(seed)
    plan = Plan(
        alpha=source.choice([0.01, 0.05, 0.2]),
        proposals=source.choice([1, 20, 50]),
        effect=source.choice([1.0, 2.0, 3.0]),
        most=source.choice([4, 8, 16]),
    )
    count = source.choice([2, 3, 4, 8, 16, 20])
    earlier = [runs(source, source.choice([1, 2, 4]), 0, source.choice([1, 1, 4])) for _ in range(seed % 7)]
    candidate = runs(source, count, source.choice([0, 1, 2, 4]), source.choice([0.5, 1, 3]))
    return (
        runs(source, source.choice([16, 30])),
        runs(source, count),
        candidate,
        History(0, 0, earlier),
        plan,
    )


def expected(reruns, baseline, candidate, history, plan) -> tuple[str, float, float, float]:
    """Return word, t, threshold and degrees of freedom, computed step by step with scipy.stats."""
    shares = {4: [0, 1], 8: [0, 0.25, 0.75], 16: [0, 0.1, 0.3, 0.6]}[plan.most]
    look = max(n for n in range(len(shares)) if 2 ** (n + 1) <= len(candidate))
    m = 2 ** (look + 1)
    a, b = np.array(candidate[:m]), np.array(baseline[:m])
    groups = [b, *(np.array(each) for each in history.baselines)]
    df = sum(len(each) - 1 for each in groups)
    own_base = sum(((each - each.mean()) ** 2).sum() for each in groups) / df
    reference, df_reference = np.var(reruns, ddof=1), len(reruns) - 1
    if stats.f.sf(own_base / reference, df, df_reference) < 0.01:
        base, df_base = own_base, df
    else:
        base = (df * own_base + df_reference * reference) / (df + df_reference)
        df_base = df + df_reference
    if a.var(ddof=1) / base > stats.f.median(m - 1, df_base):
        parts = a.var(ddof=1) / m, base / m
        error = math.sqrt(sum(parts))
        df_t = sum(parts) ** 2 / (parts[0] ** 2 / (m - 1) + parts[1] ** 2 / df_base)
    else:
        both = (df_base * base + (m - 1) * a.var(ddof=1)) / (df_base + m - 1)
        error, df_t = math.sqrt(2 * both / m), df_base + m - 1
    gain = b.mean() - a.mean()
    level = plan.alpha / plan.proposals * shares[look]
    threshold = stats.t.isf(level, df_t)
    if gain / error > threshold:
        word = "keep"
    elif look == len(shares) - 1:
        word = "discard"
    else:
        miss = [0.1, 0.05, 0.05][look]
        excluded = stats.t.cdf((gain - plan.effect * math.sqrt(base)) / error, df_t) < miss
        word = "discard" if excluded else "run again"
    return word, gain / error, threshold, df_t


def test_decisions_equal_a_second_implementation():
    words = {"keep": 0, "discard": 0, "run again": 0}
    seen = {"own": 0, "stale": 0}
    for seed in range(300):
        reruns, baseline, candidate, history, plan = case(seed)
        got = decide(Floor.of(reruns), baseline, candidate, history, plan)
        word, t, threshold, freedom = expected(reruns, baseline, candidate, history, plan)
        assert got.word == word, seed
        assert (
            2**got.looks
            == got.evidence.runs
            == max(r for r in (2, 4, 8, 16) if r <= min(len(candidate), plan.most))
        )
        assert got.alpha == plan.level(got.looks - 1)
        assert (got.evidence.t, got.evidence.freedom) == pytest.approx((t, freedom), rel=1e-9)
        assert got.evidence.threshold == pytest.approx(threshold, rel=1e-6)
        words[word] += 1
        seen["own"] += got.evidence.own
        seen["stale"] += got.evidence.stale
    assert min(*words.values(), *seen.values()) > 20


@pytest.mark.parametrize("seed", range(5))
def test_the_direction_scale_and_level_of_the_metric_change_nothing(seed):
    reruns, baseline, candidate, history, plan = case(seed)
    got = decide(Floor.of(reruns), baseline, candidate, history, plan)

    def other(values):
        return [7 - 1000 * value for value in values]

    moved = History(0, 0, [other(each) for each in history.baselines])
    mirrored = decide(Floor.of(other(reruns)), other(baseline), other(candidate), moved, plan, minimize=False)
    assert (mirrored.word, mirrored.looks) == (got.word, got.looks)
    assert mirrored.evidence.t == pytest.approx(got.evidence.t, rel=1e-6)


@pytest.mark.parametrize("most", [look.runs for look in LOOKS[1:]])
def test_no_way_through_the_looks_of_all_proposals_spends_more_than_alpha(most):
    plan = Plan(alpha=0.07, proposals=13, most=most)
    assert sum(plan.level(n) for n in range(len(plan.looks))) * 13 == pytest.approx(0.07)
    assert plan.level(0) == 0
    assert plan.looks[-1].runs == most


def test_a_look_uses_its_own_number_of_runs_in_their_order_and_is_taken_once():
    source = random.Random(1)
    reruns, baseline, candidate = floor(source), runs(source, 8), runs(source, 8, 1.5)
    four = decide(reruns, baseline[:4], candidate[:4])
    assert decide(reruns, baseline[:7], candidate[:6]).evidence == four.evidence
    assert (four.word, four.looks, four.runs_candidate, four.runs_baseline) == ("run again", 2, 4, 4)
    again = decide(reruns, baseline[:5], candidate[:6], History(looks=four.looks))
    assert (again.word, again.reason, again.alpha) == ("run again", "too few runs", 0)
    assert (again.runs_candidate, again.runs_baseline) == (2, 3)
    assert decide(reruns, baseline, candidate, History(looks=four.looks)).evidence.runs == 8


def test_nothing_is_kept_on_two_runs():
    source = random.Random(2)
    got = decide(floor(source), runs(source, 2), runs(source, 2, 40))
    assert (got.word, got.reason, got.evidence.threshold) == ("run again", "undecided", math.inf)
    assert decide(floor(source), runs(source, 4), runs(source, 4, 40)).word == "keep"


def test_a_first_call_without_runs_asks_for_the_first_look():
    got = decide(floor(random.Random(3)), [], [])
    assert (got.word, got.runs_candidate, got.runs_baseline, got.evidence) == ("run again", 2, 2, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200, 1e90])
def test_a_diverged_candidate_is_discarded_and_spends_nothing(bad):
    source = random.Random(4)
    got = decide(floor(source), runs(source, 2), [bad, *runs(source, 3, 50)])
    assert (got.word, got.reason, got.diverged, got.alpha) == ("discard", "diverged", 1, 0)


def test_the_largest_value_that_did_not_diverge_has_a_spread():
    source = random.Random(4)
    got = decide(floor(source), runs(source, 4), [9.9e74, *runs(source, 3)])
    assert (got.diverged, got.evidence.own) == (0, True)


def test_a_candidate_that_spreads_is_judged_by_its_own_spread():
    source = random.Random(5)
    baseline, wide = runs(source, 8), runs(source, 8, 6, 8)
    got = decide(floor(source), baseline, wide)
    assert got.evidence.own
    assert got.evidence.standard_error == pytest.approx(
        math.sqrt((variance(wide) + got.evidence.noise**2) / 8), rel=1e-9
    )
    assert got.evidence.freedom < 10
    assert got.evidence.gain == pytest.approx(fmean(baseline) - fmean(wide))


def test_a_floor_that_the_baselines_contradict_is_not_used():
    source = random.Random(6)
    small = Floor.of(runs(source, 16, deviation=0.2))
    earlier = [runs(source, 4) for _ in range(10)]
    got = decide(small, runs(source, 4), runs(source, 4), History(10, 0, earlier))
    assert got.evidence.stale
    assert got.evidence.noise == pytest.approx(NOISE, rel=0.3)
    assert "measure the floor again" in got.sentence
    assert not decide(floor(source), runs(source, 4), runs(source, 4), History(10, 0, earlier)).evidence.stale


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([3.0] * 3 + [3.1] * 12, "16 or more"),
        ([3.0] * 15 + [math.nan], "nan"),
        ([3.0] * 15 + [math.inf], "inf"),
        ([3.0] * 15 + [1e200], "1e\\+200"),
        ([3.0] * 20, "all reruns"),
    ],
)
def test_a_floor_that_measures_nothing_is_refused(values, words):
    with pytest.raises(InputError, match=words):
        Floor.of(values)


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": 0.0},
        {"alpha": 1.0},
        {"alpha": math.nan},
        {"proposals": 0},
        {"effect": 0.0},
        {"effect": math.inf},
        {"most": 2},
        {"most": 5},
    ],
)
def test_a_plan_that_is_no_plan_is_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        Plan(**wrong)


def test_more_proposals_than_declared_are_refused():
    source = random.Random(7)
    plan = Plan(proposals=3)
    values = floor(source), runs(source, 2), runs(source, 2)
    decide(*values, History(proposals=2), plan)
    with pytest.raises(InputError, match="3 proposals were declared"):
        decide(*values, History(proposals=3), plan)


def test_a_look_beyond_the_last_is_refused():
    source = random.Random(8)
    with pytest.raises(InputError, match="looks"):
        decide(floor(source), runs(source, 16), runs(source, 16), History(looks=4))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_diverged_baseline_is_refused(bad):
    source = random.Random(9)
    with pytest.raises(InputError, match="baseline"):
        decide(floor(source), [*runs(source, 2), bad], runs(source, 3))


def decisions() -> list[Decision]:
    source = random.Random(10)
    cases = [(0, 0), (2, 0), (2, 40), (4, 0), (4, 40), (8, 1), (16, 1), (16, 0)]
    found = [decide(floor(source), runs(source, n), runs(source, n, gain)) for n, gain in cases]
    return [*found, decide(floor(source), [], [math.nan])]


def test_decisions_are_read_back_and_have_a_sentence():
    found = decisions()
    assert {each.reason for each in found} >= {"better", "excluded", "not shown", "diverged", "undecided"}
    for each in found:
        assert Decision.parse(each.document()) == each
        assert each.sentence.lower().startswith(each.word)
        assert (each.word == "run again") == (each.runs_candidate + each.runs_baseline > 0)


# --- error rates ------------------------------------------------------------------------------------


def loop(source: random.Random, effect: float, proposals: int) -> list[tuple[bool, int]]:
    """Return (kept, runs) of each proposal of a loop that does what `decide` says, without the vectorised code."""
    reruns, baselines, results = floor(source), [], []
    for _ in range(proposals):
        history = History(len(baselines), 0, baselines)
        baseline, candidate = [], []
        while (got := decide(reruns, baseline, candidate, history)).word == "run again":
            baseline += runs(source, got.runs_baseline)
            candidate += runs(source, got.runs_candidate, effect)
            history = replace(history, looks=got.looks)
        baselines.append(baseline)
        results.append((got.word == "keep", len(baseline) + len(candidate)))
    return results


@pytest.mark.parametrize("effect", [1.0, 2.0])
def test_loops_that_do_as_they_are_told_have_the_rates_of_the_simulation(effect):
    got = [loop(random.Random(f"{effect}/{seed}"), effect, 1)[0] for seed in range(400)]
    told = measure(Scenario("gate", effect), 1000)["first"] / 1000
    assert fmean(kept for kept, _ in got) == pytest.approx(told, abs=4 * math.sqrt(told * (1 - told) / 286))


def test_the_gate_meets_its_goals_and_the_rules_in_use_do_not():
    idle = measure(Scenario("gate"), 1000)
    assert idle["any"] <= 50
    assert idle["median"] <= 6
    for effect, least in ((2.0, 0.5), (4.0, 0.8)):
        power = measure(Scenario("gate", effect), 100)["kept"] / 100 / PROPOSALS
        assert power > least
    for rule in ("greedy", "minimum", "bootstrap"):
        assert measure(Scenario(rule), 100)["any"] > 90


def test_the_bootstrap_of_three_equals_scipy():
    """The benchmark lists all 729 resamples; scipy draws them at random."""
    source = np.random.default_rng(11)
    base, ours = source.normal(size=(20, 3)), source.normal(1, size=(20, 3))
    drawn = [
        stats.bootstrap(
            (theirs, mine),
            lambda a, b, axis: b.mean(axis) - a.mean(axis),
            n_resamples=3000,
            method="percentile",
            rng=1,
        ).bootstrap_distribution
        for theirs, mine in zip(base, ours, strict=True)
    ]
    assert not_better(base, ours) == pytest.approx([(each <= 0).mean() for each in drawn], abs=0.04)


def test_results_are_resumed_and_other_loops_refused(tmp_path, monkeypatch):
    few = [Scenario("greedy"), Scenario("minimum")]
    monkeypatch.setattr(gate_loops, "scenarios", lambda: iter(few[:1]))
    cache = tmp_path / "cache.json"
    first = run(cache, 20)
    monkeypatch.setattr(gate_loops, "scenarios", lambda: iter(few))
    monkeypatch.setitem(gate_loops.KINDS, "greedy", None)
    second = run(cache, 20)
    assert second[few[0].name] == first[few[0].name]
    assert second[few[1].name] == measure(few[1], 20)
    with pytest.raises(SystemExit, match="--loops 20"):
        run(cache, 30)


def test_every_scenario_has_a_cell_and_a_name_of_its_own():
    names = [scenario.name for scenario in scenarios()]
    results = {name: {"loops": 10, "any": 1, "kept": 5, "first": 1, "median": 4, "mean": 5} for name in names}
    text = "\n".join(tables(results))
    assert all(title in text for title in (*RULES.values(), *ROBUST))
