"""The simulation behind docs/reference/statistics.md, at its smallest size: the same figures in any order, resumed, and the goals it is for."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(
    str(Path(__file__).parents[2] / "benchmarks")
)  # behind the standard library: names there may shadow it
import simulated_truth
from simulated_truth import KINDS, Scenario, run, scenarios, tables

SWEEPS = 300


def within(part: int, whole: int, low: float, high: float) -> bool:
    """Return True if a share lies within limits, three binomial standard errors beyond them allowed."""
    return (
        low - 3 * math.sqrt(low * (1 - low) / whole)
        <= part / whole
        <= high + 3 * math.sqrt(high * (1 - high) / whole)
    )


@pytest.mark.parametrize("interval", ["t", "split:4", "sequence"])
def test_eight_arms_without_an_effect_have_a_false_headline_in_one_sweep_of_twenty_at_most(interval):
    got = KINDS["headline"](Scenario("headline", interval, 5, 2.0, arms=8), SWEEPS)
    assert within(got["false"], got["sweeps"], 0.0, 0.05)
    if interval == "t":
        assert got["uncorrected"] / got["sweeps"] > 0.2  # what the correction is for


def test_seeds_that_grow_are_no_way_round_it():
    got = KINDS["growth"](Scenario("growth", "split:4", 3, 1.0, arms=8), 100)
    assert within(got["false"], got["sweeps"], 0.0, 0.05)


def test_four_of_five_promises_of_seeds_are_kept():
    """Over effects from 0 to 2 and deviations 1 and 2, in units of min_effect."""
    lines = [
        KINDS["promise"](Scenario("promise", "t", 5, deviation, effect), 40)
        for deviation in (1, 2)
        for effect in (0, 0.5, 1, 2)
    ]
    kept, made = (sum(line[key] for line in lines) for key in ("kept", "made"))
    assert made > 100
    assert within(kept, made, 0.75, 0.85)


def test_equal_counts_on_two_seeds_are_never_a_verdict():
    got = KINDS["counts"](Scenario("counts", "t", 2, 2.0), SWEEPS)
    assert got["zero_width"] > 0
    assert got["false"] == 0


@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_an_effect_that_only_the_positions_make_seldom_has_a_winner(seeds):
    """An effect of 0 varies over drawn positions by half a deviation of a pair; one of 4 is still found."""
    got = KINDS["positions"](Scenario("positions", "t", seeds, 0.5, 0.0, 3), 1000)
    assert got["winners"] < 0.05 * 1000 < 1.5 * got["unguarded"]
    assert KINDS["positions"](Scenario("positions", "t", seeds, 0.5, 4.0, 3), 100)["winners"] >= 95


def test_intervals_cover_under_what_they_assume_and_not_under_what_their_captions_exclude():
    """Fisher's needs normal values, effects of a search need a sampler that does not learn, ranks need one look."""
    normal, outlier = (
        KINDS["correlation"](Scenario("correlation", "t", 20, 1.0, 0.8, shape=shape), SWEEPS)
        for shape in ("normal", "outlier")
    )
    random, tpe = (
        KINDS["search"](Scenario("search", "t", 1, 0.3, 1.0, 100, sampler), 20)
        for sampler in ("random", "tpe")
    )
    for good, bad in ((normal, outlier), (random, tpe)):
        assert within(good["covered"], good["experiments"], 0.93, 0.97)
        assert bad["covered"] < 0.8 * bad["experiments"]
    looks = KINDS["ranks"](Scenario("ranks", "split:4", 6), SWEEPS)
    assert looks["anywhere"] > 0.07 * SWEEPS


def test_steps_to_a_loss_have_no_gap_while_seeds_never_reach_it():
    """The fastest seeds alone would show another gap than the true one."""
    short, whole = (KINDS["steps"](Scenario("steps", "t", 8, 15.0, 20.0, last), 12) for last in (80, 160))
    assert (short["given"], whole["given"]) == (0, 12)
    assert short["fastest"] > 2
    assert whole["wrong"] <= 2


def test_a_scenario_gives_the_same_figures_alone_and_resumed(tmp_path, monkeypatch):
    few = [scenario for scenario in scenarios() if scenario.kind in ("coverage", "counts")][:3]
    monkeypatch.setattr(simulated_truth, "scenarios", lambda: iter(few))
    whole = run(tmp_path / "whole.json", 50, set(KINDS))
    monkeypatch.setattr(simulated_truth, "scenarios", lambda: iter(few[2:]))
    run(tmp_path / "part.json", 50, set(KINDS))
    monkeypatch.setattr(simulated_truth, "scenarios", lambda: iter(few))
    assert run(tmp_path / "part.json", 50, set(KINDS)) == whole
    assert json.loads((tmp_path / "part.json").read_text())["experiments"] == 50
    with pytest.raises(SystemExit):
        run(tmp_path / "part.json", 51, set(KINDS))
    assert list(tables(whole))


def test_scenarios_differ_in_their_draws():
    names = [scenario.name for scenario in scenarios()]
    assert len(set(names)) == len(names)
    one = Scenario("coverage")
    assert one.random().random() != replace(one, pairs=6).random().random()
