"""Tests of the numbers in figures: each is computed here once more, in another way, from the sweep."""

import json
import math
import statistics

import numpy as np
import pytest
from scipy import stats
from support import made_up
from support.made_up import LOSS

from ablate.experiment.schema import Metric
from ablate.reports import figures
from ablate.reports.answer import Answer
from ablate.reports.operand_health import by_layer
from ablate.results import summary
from ablate.results.attribution import grid
from ablate.store.records import frame


@pytest.fixture
def book(tmp_path):
    ledger = made_up.grid(tmp_path, seeds=3)
    yield ledger
    ledger.close()


def losses(ledger) -> dict[str, dict[int, dict[int, float]]]:
    """By arm, seed and step, straight from the ledger."""
    found = {}
    for member in ledger.members():
        found.setdefault(member.name, {})[member.seed] = ledger.series(member.trial, "val/loss")
    return found


def test_a_gap_curve_is_the_mean_of_paired_differences_with_their_t_interval(book):
    known = losses(book)
    picture = figures.gap_curve(frame(book), LOSS)
    assert set(picture.data["arm"]) == known.keys() - {"bf16"}
    for line in picture.data.itertuples():
        arm, step = known[line.arm], int(line.step)
        apart = [
            arm[seed][step] - known["bf16"][seed][step]
            for seed in arm
            if math.isfinite(arm[seed].get(step, math.nan))
        ]
        assert line.gap == pytest.approx(statistics.fmean(apart))
        assert line.seeds == len(apart)
        low, high = stats.t.interval(0.95, len(apart) - 1, statistics.fmean(apart), stats.sem(apart))
        assert (line.low, line.high) == pytest.approx((low, high))
        assert line.tokens == step * 32 * 4
    assert picture.figure.axes[0].get_xscale() == "log"
    assert picture.data["step"].min() > 0


def test_a_gap_curve_goes_over_steps_where_there_are_no_tokens(book):
    table = frame(book).assign(tokens=np.nan)
    assert figures.gap_curve(table, LOSS).figure.axes[0].get_xlabel() == "step"


def test_curves_are_means_over_seeds_between_the_smallest_and_the_largest(book):
    known = losses(book)["bf16"]
    data = figures.curves(frame(book), "val/loss").data
    last = data[data["arm"] == "bf16"].iloc[-1]
    ends = [series[1000] for series in known.values()]
    assert (last["mean"], last["low"], last["high"]) == pytest.approx(
        (statistics.fmean(ends), min(ends), max(ends))
    )


def test_a_margin_in_percent_is_drawn_at_its_baseline(book):
    arms = summary.summaries(book, metric := Metric(min_effect="1%"))
    level = next(arm for arm in arms if arm.name == "bf16").mean
    for axes in figures.gap_curve(frame(book), metric).figure.axes:
        (band,) = axes.patches
        assert band.get_y() == pytest.approx(-band.get_height() / 2)
        assert band.get_height() == pytest.approx(2 * 0.01 * level, rel=0.05)


def test_an_interaction_shows_the_mean_of_every_cell(book):
    known = losses(book)
    whole = [seed for seed in range(3) if all(1000 in known[arm][seed] for arm in known)]
    data = figures.interaction(grid(summary.summaries(book)), LOSS).data
    assert len(data) == 4
    for line in data.itertuples():
        arm = f"{line.knob}={line.level} {line.other_knob}={line.other_level}"
        assert line.mean == pytest.approx(statistics.fmean(known[arm][seed][1000] for seed in whole))
        assert line.seeds == len(whole)


def test_divergence_tells_each_run_its_end(book):
    data = figures.divergence(summary.summaries(book), frame(book)).data
    state = {(line.arm, line.seed): line.state for line in data.itertuples()}
    assert state.pop(("rht=false sr=false", 2)) == "diverged"
    assert state.pop(("rht=false sr=true", 2)) == "missing"
    assert set(state.values()) == {"done"}
    lost = data[data["state"] == "diverged"].iloc[0]
    assert (lost["diverged_at_step"], lost["nan/loss"], lost["nan/grad"]) == (600, 3, 12)
    assert data["diverged_at_step"].notna().sum() == 1
    without = figures.divergence(summary.summaries(book)).data
    assert list(without["state"]) == list(data["state"])


def test_counts_of_an_interval_add_up_and_counts_so_far_do_not(tmp_path):
    """The training loop resets nan/loss with each record, and counts nan/activation from the run's first step on."""
    ledger = made_up.Ledger(tmp_path / "counts" / "ledger.db")
    ledger.describe(metric=made_up.LOSS.model_dump_json())
    arm = ledger.add_arm("a", {}, None, None)
    for seed in (0, 1):
        so_far = [{"nan/loss": 2.0, "nan/activation": 5.0 * step, "val/loss": 1.0} for step in (1, 2, 3)]
        made_up.member(ledger, arm, seed, list(zip((1, 2, 3), so_far, strict=True)))
    data = figures.divergence(summary.summaries(ledger), frame(ledger)).data
    assert list(data["nan/loss"]) == [6, 6]
    assert list(data["nan/activation"]) == [15, 15]
    ledger.close()


def test_a_run_that_ended_without_a_finite_value_is_told_from_one_that_did(book):
    metric = Metric(name="quant/fprop.x/rel_mse")  # the baseline quantises nothing
    data = figures.divergence(summary.summaries(book, metric)).data
    assert set(data.loc[data["arm"] == "bf16", "state"]) == {"done, value not finite"}


def test_slots_and_layers_are_means_over_seeds(book):
    name = "quant/dgrad.g/blocks.1.mlp.up/sqnr_db"
    by_arm = {}
    for member in book.members():
        if value := book.series(member.trial, name).get(1000):
            by_arm.setdefault(member.name, []).append(value)
    arm = "rht=true sr=true"
    data = by_layer(frame(book))
    line = data[(data["arm"] == arm) & (data["slot"] == "dgrad.g") & (data["layer"] == "blocks.1.mlp.up")]
    assert line["sqnr_db"].item() == pytest.approx(statistics.fmean(by_arm[arm]))
    assert list(dict.fromkeys(data["layer"])) == made_up.LAYERS


def test_the_best_so_far_never_gets_worse_and_lost_arms_have_a_place(tmp_path):
    ledger = made_up.search(tmp_path)
    arms = summary.summaries(ledger)
    data = figures.history(arms, LOSS).data
    finite = [value for value in data["value"] if math.isfinite(value)]
    assert len(finite) < len(data) == 24
    assert data["best_so_far"].iloc[-1] == min(finite)
    known = [
        min((v for v in data["value"][: n + 1] if math.isfinite(v)), default=math.nan) for n in range(24)
    ]
    np.testing.assert_array_equal(data["best_so_far"], known)
    best = data.loc[data["value"].idxmin(), "arm"]
    trial = next(member.trial for member in ledger.members() if member.name == best)
    ledger.settle(trial, "diverged")
    again = figures.history(summary.summaries(ledger, LOSS), LOSS).data
    assert again.loc[again["arm"] == best, "value"].isna().all()
    ledger.close()


def test_a_front_is_what_no_other_beats(tmp_path):
    ledger = made_up.search(tmp_path)
    both = {metric: summary.summaries(ledger, metric) for metric in (LOSS, made_up.SPEED)}
    data = figures.objectives(both).data
    for line in data.itertuples(index=False):
        beaten = (
            (data[LOSS.name] <= line[1]) & (data[made_up.SPEED.name] >= line[2]) & (data["arm"] != line.arm)
        ).any()
        assert line.front == (not beaten)
    ledger.close()


def test_errors_by_slot_are_means_of_last_values(book):
    expected = [
        book.last_value(m.trial, "quant/wgrad.x/magnitude")
        for m in book.members()
        if m.name == "rht=true sr=false"
    ]
    data = figures.errors_by_slot(frame(book)).data
    line = data[
        (data["arm"] == "rht=true sr=false") & (data["slot"] == "wgrad.x") & (data["error"] == "magnitude")
    ]
    assert line["mean"].item() == pytest.approx(statistics.fmean(expected))


def test_a_baseline_of_each_arm_stands_beside_it(tmp_path):
    ledger = made_up.Ledger(tmp_path / "pairs" / "ledger.db")
    for number, kind in enumerate(("gaussian", "student")):
        base = ledger.add_arm(f"{kind}, as it is", {"x": kind}, None, None)
        for arm, error in (
            (base, 0.01 + number),
            (ledger.add_arm(kind, {"x": kind, "rht": True}, base, None), 0.02 + number),
        ):
            made_up.member(ledger, arm, 0, [(1, {"quant/wgrad.g/rel_mse": error})])
    data = figures.errors_by_slot(frame(ledger)).data
    assert list(data["arm"]) == ["gaussian", "student"]
    assert list(data["baseline_mean"]) == [0.01, 1.01]
    ledger.close()


def test_a_histogram_counts_every_value_once():
    before, after = np.array([0.1, 0.2, -5.9, 7.0, np.nan, np.inf]), np.array([1.0, -1.0, 2.0])
    picture = figures.rotation_histogram(before, after)
    assert picture.data["count_before"].sum() == 4
    assert picture.data["count_after"].sum() == 3
    assert "50.0% before, 0.0% after" in picture.figure.texts[1].get_text().replace("\n", " ")
    assert figures.rotation_histogram(np.array([np.nan]), after) is None


def test_roundings_are_counted_by_code_and_their_errors_by_origin():
    values = np.array([0.1, 0.2, 0.4, 5.0, np.nan])
    nearest, stochastic = np.array([0.0, 0.0, 0.5, 4.0, 0.0]), np.array([0.0, 0.5, 0.5, 6.0, -0.0])
    picture = figures.rounding_histogram(values, nearest, stochastic)
    data = picture.data[picture.data["what"] == "goes to"]
    counts = {
        (line.rounding, line.value): line.count
        for line in data.drop(columns="mean_error").itertuples(index=False, name="Line")
    }
    assert {key: value for key, value in counts.items() if value} == {
        ("to nearest", 0.0): 2, ("to nearest", 0.5): 1, ("to nearest", 4.0): 1,
        ("stochastic", 0.0): 1, ("stochastic", 0.5): 2, ("stochastic", 6.0): 1,
    }  # fmt: skip
    error = np.mean(nearest[:4] - values[:4])
    assert f"to nearest {error:+.2g}".replace("-", "−") in picture.figure.texts[1].get_text()
    with pytest.raises(ValueError, match="5 values, and 5 and 2 roundings of them"):
        figures.rounding_histogram(values, nearest, nearest[:2])
    with pytest.raises(ValueError, match="divide by the block's scale first"):
        figures.rounding_histogram(np.arange(100.0), np.arange(100.0), np.arange(100.0))


def operands(error: float, slots: tuple[str, ...], layers: list[str]) -> dict[str, float]:
    """Records of operands that all have one error."""
    return {f"quant/{slot}/{layer}/sqnr_db": -10 * math.log10(error) for slot in slots for layer in layers}


@pytest.mark.parametrize("differ", [True, False])
def test_errors_of_operands_are_summed_in_the_first_step_that_has_them_all(tmp_path, differ):
    """An arm that quantises one of two layers has error 0 in the other, and a gradient of zeros has none."""
    ledger = made_up.Ledger(tmp_path / "sweeps" / "recipes" / "ledger.db")
    base = ledger.add_arm("bf16", {}, None, None)
    arms = {"bf16": (0.0, []), "a": (0.02, ["up", "down"]), "b": (0.01, ["up", "down"]), "c": (0.01, ["up"])}
    for name, (error, layers) in arms.items():
        arm = ledger.add_arm(name, {"recipe": name}, base, None) if layers else base
        spec = json.dumps(json.loads(made_up.SPEC) | {"recipe": {"name": name if differ else "same"}})
        for seed in range(3):
            own, loss = error * (1 + seed), {"val/loss": 3 + error + seed * error / 10}
            events = [(1, loss | operands(own, ("fprop.x",), layers))]
            events += [(step, loss | operands(own * step, ("fprop.x", "dgrad.g"), layers)) for step in (5, 9)]
            made_up.member(ledger, arm, seed, events, spec=spec)
    drawn = Answer(ledger).operand_errors()
    ledger.close()
    if not differ:
        assert drawn is None
        return
    data = drawn.data.set_index("arm")
    # 1 + seed is 2 in the mean over seeds, 5 is the step; two slots; over the two layers of any arm
    expected = {name: 2 * 5 * 2 * error * len(layers) / 2 for name, (error, layers) in arms.items() if layers}
    assert data["error"].to_dict() == pytest.approx(expected)
    assert data["gap"]["a"] == pytest.approx(0.022)
