"""Tests of the parts of a gap and of the worth of pairing: identities on a real sweep, SciPy's own figures, planted damage."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
from support.experiments import sweep, tiny

import ablate
from ablate.reports.answer import Answer
from ablate.reports.answer_tables import alarms_table, routes_tables
from ablate.results.comparisons import Comparisons
from ablate.results.decomposition import correlation, damages, routed
from ablate.results.headline import headline_of
from ablate.results.summary import summaries
from ablate.store.ledger import Ledger


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    sweep(tiny(folder, ablate={"sr": [True, False]}, seeds=4), folder)
    return folder


def tables(ledger, arms) -> list:
    """The tables of gaps by rounding and by flipped routes, and of what flipped."""
    return routes_tables(SimpleNamespace(ledger=ledger, shown=arms))


def readings(results) -> dict:
    table = results.records("val/loss", "val/loss_bf16").sort_values("step")
    return table.groupby(["metric", "arm", "seed"], observed=True)["value"].last().to_dict()


def test_the_parts_add_up_to_the_gap_and_each_is_the_paired_t_interval_of_its_readings(state):
    with ablate.reports.open("tiny", state=state) as results:
        parts, last = results.damage.set_index("arm"), readings(results)
    assert set(parts.index) == {"sr=true", "sr=false"}
    for arm, row in parts.iterrows():
        own, high = (
            [last[name, arm, seed] - last[name, "bf16", seed] for seed in range(4)]
            for name in ("val/loss", "val/loss_bf16")
        )
        direct = np.array(own) - np.array(high)
        for name, values in (("direct", direct), ("learnt", np.array(high))):
            low, high_end = scipy.stats.t.interval(0.95, 3, values.mean(), scipy.stats.sem(values))
            assert (row[name], row[f"{name}_low"], row[f"{name}_high"]) == pytest.approx(
                (values.mean(), low, high_end), rel=1e-9
            )
        assert row["direct"] + row["learnt"] == pytest.approx(row["gap"], abs=1e-14)
        assert row["direct"] != 0
        assert row["pairs"] == 4


def test_the_report_has_both_tables(state):
    answer = Answer.open(state, "tiny")
    assert [row["arm"] for row in answer.damage().rows] == ["sr=true", "sr=false"]
    (row, _) = answer.pairing().rows
    assert "normal values" in answer.pairing().caption
    text, value = row["correlation with baseline"]
    assert text.startswith(f"{value:+.2f} (")


def planted(folder, high: dict[str, list[float]], cast: dict[str, float]) -> Ledger:
    """A ledger whose arms end at these losses in high precision, and so much above them in their own."""
    ledger = Ledger(folder / "sweeps" / "x" / "ledger.db")
    ledger.identity()
    base = None
    for name, values in high.items():
        arm = ledger.add_arm(name, {"recipe": name}, base, None)
        base = base or arm
        for seed, value in enumerate(values):
            trial = ledger.add_member(arm, seed, f"{name}/{seed}", "{}")
            metrics = {"val/loss": value + cast[name], "val/loss_bf16": value}
            ledger.record(trial, [{"step": 1, "time": 0.0, "metrics": metrics}])
            ledger.settle(trial, "done")
    return ledger


def test_planted_damage_is_found_in_its_part(tmp_path):
    rng = np.random.default_rng(0)
    base = rng.normal(3, 0.02, 6)
    learnt = rng.normal(0.01, 0.003, 6)
    high = {"base": [*base], "worse learnt": [*(base + learnt)], "worse cast": [*base]}
    ledger = planted(tmp_path, high, {"base": 0.001, "worse learnt": 0.001, "worse cast": 0.005})
    first, second = damages(ledger, summaries(ledger), "val/loss")
    assert first.direct.mean == pytest.approx(0, abs=1e-12)
    assert first.learnt.mean == pytest.approx(learnt.mean())
    assert second.direct.mean == pytest.approx(0.004)
    assert second.learnt.mean == 0
    assert damages(ledger, summaries(ledger), "val/loss_bf16") == []
    ledger.close()


def test_the_total_of_a_forked_design_has_the_interval_of_the_table_of_arms(tmp_path):
    """Sixteen parts of the validation data that differ in the damage: an error that no seed removes."""
    rng = np.random.default_rng(0)
    ledger = planted(
        tmp_path,
        {"bf16": [*rng.normal(3, 1e-4, 6)], "fp4": [*rng.normal(3, 1e-4, 6)]},
        {"bf16": 0.0, "fp4": 0.0},
    )
    ledger.describe(design='{"trunk": "bf16", "positions": 1, "window": 0.5, "horizons": [2]}')
    of_data = rng.normal(0, 1e-3, 16)
    for member in ledger.members():
        parts = {f"evaluated/{part}/loss": 3 + (member.name == "fp4") * of_data[part] for part in range(16)}
        ledger.record(
            member.trial,
            [
                {
                    "step": 2,
                    "time": 0.0,
                    "metrics": parts
                    | {"val/loss": 3.0 + rng.normal(0, 1e-4), "val/loss_bf16": 3.0, "fork/5/4/loss": 3.0},
                }
            ],
        )
    (arm,) = (arm for arm in summaries(ledger) if arm.baseline)
    (damage,) = damages(ledger, summaries(ledger), "val/loss")
    assert (damage.gap.low, damage.gap.high) == (arm.gap.low, arm.gap.high)
    assert damage.gap.shared_error == pytest.approx(np.std(of_data, ddof=1) / 4)
    ledger.close()


@pytest.mark.parametrize("seeds", [4, 8, 30])
@pytest.mark.parametrize("shared", [-0.9, 0.0, 0.7])
def test_a_correlation_and_its_interval_are_scipys(seeds, shared):
    rng = np.random.default_rng(seeds)
    x = rng.normal(size=seeds)
    y = shared * x + rng.normal(size=seeds)
    found = correlation(dict(enumerate(x)), dict(enumerate(y)) | {seeds: 1.0})
    expected = scipy.stats.pearsonr(x, y)
    bounds = expected.confidence_interval(0.95)
    assert (found.value, found.low, found.high, found.pairs) == pytest.approx(
        (expected.statistic, bounds.low, bounds.high, seeds)
    )


def test_a_correlation_of_too_little_is_none():
    few, same = correlation({0: 1.0, 1: 2.0}, {0: 1.0, 1: 3.0}), correlation(
        dict.fromkeys(range(5), 1.0), dict(enumerate([1.0, 2, 3, 4, 5]))
    )  # fmt: skip
    assert math.isnan(few.value)
    assert math.isnan(same.value)
    three = correlation(dict(enumerate([1.0, 2, 4])), dict(enumerate([1.0, 3, 4])))
    assert three.value == pytest.approx(np.corrcoef([1, 2, 4], [1, 3, 4])[0, 1])
    assert math.isnan(three.low)


def test_a_gap_with_experts_is_rounding_plus_flipped_routes_at_every_seed(tmp_path):
    """Arms of one recipe, free and replayed, beside others: each part is SciPy's interval of its differences."""
    rng = np.random.default_rng(0)
    base = rng.normal(3, 0.02, 6)
    ends = {"bf16": base, "free": base + rng.normal(0.01, 2e-3, 6), "held": base + rng.normal(0.006, 2e-3, 6)}
    ends["other"] = base + 0.02
    recipes = {"bf16": {"name": "bf16"}, "free": {"name": "nvfp4"}, "other": {"name": "mxfp4"}}
    recipes["held"] = {"name": "nvfp4", "experts": {"routing": "replay"}}
    ledger = planted(tmp_path, {}, {})
    first = None
    for name, values in ends.items():
        arm = ledger.add_arm(name, {}, first, None)
        first = first or arm
        for seed, value in enumerate(values[: 5 if name == "held" else 6]):  # one seed is not finished
            spec = {"workload": {"gpt": {"steps": 2}}, "recipe": recipes[name], "seed": seed}
            trial = ledger.add_member(arm, seed, f"{name}/{seed}", json.dumps(spec))
            ledger.record(trial, [{"step": 2, "time": 0.0, "metrics": {"val/loss": value}}])
            ledger.settle(trial, "done")
    arms = summaries(ledger)
    (parts,) = routed(ledger, arms)
    assert (parts.arm, parts.held, parts.gap.pairs) == ("free", "held", 5)
    for part, (one, other) in {
        parts.gap: ("free", "bf16"),
        parts.rounding: ("held", "bf16"),
        parts.flips: ("free", "held"),
    }.items():
        values = (ends[one] - ends[other])[:5]
        low, high = scipy.stats.t.interval(0.95, 4, values.mean(), scipy.stats.sem(values))
        assert (part.mean, part.low, part.high) == pytest.approx((values.mean(), low, high), rel=1e-9)
    assert parts.rounding.mean + parts.flips.mean == pytest.approx(parts.gap.mean, abs=1e-7)
    (row,) = tables(ledger, arms)[0].rows
    assert row["flipped routes"][1] == parts.flips.mean
    sentence = headline_of(Comparisons(ledger)).text
    assert "Of free's gap, +0.0099 ±0.0028, rounding with routes held makes +0.0040 ±0.0020" in sentence
    assert sentence.endswith(f"flipped routes {row['flipped routes'][0]}.")
    assert routed(ledger, [arm for arm in arms if arm.name != "held"]) == []
    assert tables(ledger, [arm for arm in arms if arm.name != "held"])[0] is None
    ledger.close()


def test_flipped_tokens_and_pairs_are_means_over_windows_then_over_finished_seeds(tmp_path):
    """A trunk's zeros would halve the shares; a seed that has not finished would move them."""
    ledger = planted(tmp_path, {}, {})
    forks = {"trunk": {}, "positions": [10, 20], "windows": [5]}
    first = None
    for name in ("bf16", "nvfp4", "without"):
        arm = ledger.add_arm(name, {}, first, None)
        first = first or arm
        for seed in range(3):
            spec = {"workload": {"gpt": {"steps": 30}}, "recipe": {"name": name}, "forks": forks}
            trial = ledger.add_member(arm, seed, f"{name}/{seed}", json.dumps(spec))
            for step in (1, 20, 21, 30):
                share = (1 + seed) * step / 500 if step > 20 and name == "nvfp4" else 0.0
                values = {"routing/flipped": share, "routing/tokens_flipped": 4 * share}
                metrics = {"val/loss": 3.0} | (values if name != "without" else {})
                ledger.record(trial, [{"step": step, "time": 0.0, "metrics": metrics}])
            if seed < 2:
                ledger.settle(trial, "done")
    arms = summaries(ledger)
    bf16, nvfp4 = tables(ledger, arms)[1].rows
    assert (bf16["arm"], bf16["tokens flipped"], bf16["seeds"]) == ("bf16", ("0.00 %", 0.0), ("2", 2))
    pairs = np.mean([[0.042, 0.060], [0.084, 0.120]])
    assert (nvfp4["arm"], nvfp4["seeds"]) == ("nvfp4", ("2", 2))
    assert nvfp4["pairs flipped"] == ("7.65 %", pytest.approx(pairs))
    assert nvfp4["tokens flipped"] == ("30.60 %", pytest.approx(4 * pairs))
    assert tables(ledger, [arm for arm in arms if arm.name == "without"])[1] is None
    ledger.close()


def test_alarms_are_listed_by_arm_and_operand_with_the_worst_first(tmp_path):
    """With any of them a sweep is not called healthy."""

    def zeros(fprop: float, dgrad: float, layer: int) -> dict[str, float]:
        shares = {"fprop.x": fprop, "dgrad.g": dgrad}
        return {f"quant/{slot}/blocks.{layer}.up/zero_frac": share for slot, share in shares.items()}

    ledger = planted(tmp_path, {}, {})
    first = None
    for name in ("bf16", "coarse"):
        arm = ledger.add_arm(name, {}, first, None)
        first = first or arm
        for seed in range(3):
            spec = {"workload": {"gpt": {"steps": 30}}, "recipe": {"name": name}}
            trial = ledger.add_member(arm, seed, f"{name}/{seed}", json.dumps(spec))
            for step in (10, 20, 30):
                metrics = {"val/loss": 3.0}
                if name == "coarse":
                    wrong = seed < 2 and step > 10
                    metrics |= zeros(0.5, 0.5, 0) | zeros(0.59 + seed / 100 if wrong else 0.1, 0.1, 1)
                    metrics |= zeros(0.1, 0.71 if (seed, step) == (2, 10) else 0.1, 2)
                ledger.record(trial, [{"step": step, "time": 0.0, "metrics": metrics}])
            ledger.settle(trial, "done")
    answer = Answer(ledger)
    verdict, *parts = answer.health(answer.records("quant/*/sqnr_db"))
    assert verdict.lead == "To look at."
    (table,) = parts
    lines = [[cell[0] if isinstance(cell, tuple) else cell for cell in row.values()] for row in table.rows]
    assert lines == [
        ["coarse", "71% of the elements rounded to zero", "dgrad.g", "blocks.2.up", "1", "10", "1"],
        ["coarse", "60% of the elements rounded to zero", "fprop.x", "blocks.1.up", "1", "20", "2"],
    ]
    ledger.db.execute("DELETE FROM records WHERE value > 0.5 AND value < 1")
    assert alarms_table(ledger) is None
    verdict, *parts = answer.health(answer.records("quant/*/sqnr_db"))
    assert (verdict.lead, parts) == ("Healthy.", [])
    ledger.close()
