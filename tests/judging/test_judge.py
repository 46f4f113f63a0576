"""Verdicts on runs that were not started here: the numbers of a sweep, and what is refused."""

import csv
import json
import math
import re
import shutil
from contextlib import closing
from cProfile import Profile
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support import foreign_files, made_up
from support.commands import INLINE, here
from support.experiments import tiny

import ablate
from ablate.errors import InputError
from ablate.execution.tracking.runs import gaps
from ablate.experiment.schema import Metric
from ablate.judging.answer import judge
from ablate.judging.chosen_runs import Question
from ablate.judging.columns import Columns
from ablate.judging.judged_ledger import add_to_sweep, write_ledger
from ablate.judging.run import ForeignRun, Found
from ablate.judging.sources import read
from ablate.reports.figures.curves import gap_curve
from ablate.results.comparisons import Comparisons
from ablate.results.headline import headline_of
from ablate.results.intervals import SINGLE_LOOK
from ablate.results.paired_stats import p_value
from ablate.results.single_runs import curves
from ablate.results.summary import summaries
from ablate.results.unpaired import difference_of, unpaired_difference
from ablate.store.judged import Judged
from ablate.store.ledger import Ledger
from ablate.store.records import frame


def rows_of(path: Path, rows: list[dict]) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return path


def table(effects: dict[str, float], seeds: int = 5, steps: tuple[int, ...] = (10, 20), **more) -> list[dict]:
    """Rows of runs whose seeds shift all arms alike: one row a step."""
    draw = np.random.default_rng(5)
    shifts = draw.normal(0, 0.1, seeds)
    return [
        {
            "recipe": arm,
            "seed": seed,
            "step": step,
            "val/loss": 3 + shift + effect + draw.normal(0, 0.002) + 1 / step,
        }
        | more
        for arm, effect in effects.items()
        for seed, shift in enumerate(shifts)
        for step in steps
    ]


# --- statistics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(60))
def test_an_unpaired_difference_is_welchs_or_hsus(number):
    """Welch's t with as many runs in both arms; else with one degree of freedom less than the smaller arm has runs."""
    draw = np.random.default_rng(number)
    counts = draw.integers(3, 9, 2) if number % 2 else draw.integers(3, 9).repeat(2)
    sides = [draw.normal(3, draw.uniform(0.01, 1), count) for count in counts]
    mine = unpaired_difference(*(dict(enumerate(side)) for side in sides))
    theirs = stats.ttest_ind(*sides, equal_var=False)
    freedom = theirs.df if counts[0] == counts[1] else min(counts) - 1
    half = stats.t.isf(0.025, freedom) * abs((sides[0].mean() - sides[1].mean()) / theirs.statistic)
    assert (mine.low, mine.high) == pytest.approx((mine.mean - half, mine.mean + half), rel=1e-9)
    assert p_value(mine) == pytest.approx(2 * stats.t.sf(abs(theirs.statistic), freedom), rel=1e-9)
    assert mine.freedom == pytest.approx(freedom, rel=1e-9)


def test_seeds_alone_decide_whether_a_difference_is_paired():
    base = {0: 3.0, 1: 3.2, 2: 3.1, 3: 3.3}
    assert difference_of({0: 3.1, 1: 3.4, 2: 3.2}, base, SINGLE_LOOK).sides is None
    assert difference_of({2: 3.1, 3: 3.4, 4: 3.2}, base, SINGLE_LOOK).sides == (3, 4)
    assert difference_of({7: 3.1, 8: 3.4, 9: 3.2}, base, SINGLE_LOOK).sides == (3, 4)
    diverged = {1: 3.4, 2: 3.2, 3: 3.1}, {0: 3.0, 1: 3.2, 2: 3.1}, SINGLE_LOOK
    assert difference_of(*diverged, ({*range(4)}, {*range(4)})).pairs == 2


@pytest.mark.parametrize("sides", [([3.0, 3.1], [3.0, 3.2, 3.1]), ([3.0, 3.0, 3.0], [3.1, 3.2, 3.3])])
def test_too_few_values_have_no_interval(sides):
    found = unpaired_difference(*(dict(enumerate(side)) for side in sides))
    assert not found.has_interval
    assert math.isnan(p_value(found))


@pytest.mark.parametrize(("runs", "of_baseline"), [(5, 5), (3, 20), (8, 4)])
def test_false_alarms_of_unpaired_arms_stay_below_five_percent(runs, of_baseline):
    """4 arms without an effect, 1,500 tables: 5 % and 3 standard errors (0.6 %) of chance."""
    draw, alarms = np.random.default_rng(11), 0
    for _ in range(1500):
        base = dict(enumerate(draw.normal(0, 1, of_baseline)))
        arms = [dict(enumerate(draw.normal(0, 1, runs))) for _ in range(4)]
        p = min(p_value(unpaired_difference(arm, base)) for arm in arms)
        alarms += min(1.0, 4 * p) < 0.05
    assert alarms / 1500 < 0.05 + 3 * 0.0056


# --- the same numbers as a sweep's -----------------------------------------------------------------


def test_records_of_a_sweep_in_a_table_have_the_sweeps_own_numbers(tmp_path):
    with closing(made_up.grid(tmp_path, seeds=5)) as ledger:
        own = {arm.name: arm for arm in summaries(ledger)}
        records = frame(ledger)
        records = records[records["metric"] == "val/loss"]
        rows = [
            {"arm": row.arm, "seed": row.seed, "step": row.step, "val/loss": repr(float(row.value))}
            for row in records.itertuples()
        ]
    place = rows_of(tmp_path / "runs.csv", rows)
    asked = here(
        "judge", place, "--against", "bf16", "--min-effect", "0.01", "--no-report", "--state", tmp_path
    )
    assert asked.returncode == 0, asked.stderr
    with closing(Ledger(tmp_path / "sweeps" / "runs" / "ledger.db", readonly=True)) as ledger:
        judged = {arm.name: arm for arm in summaries(ledger)}
    assert judged.keys() == own.keys()
    for name, arm in own.items():
        again = judged[name]
        assert (again.values, again.gap, again.diverged, again.margin) == (
            arm.values, arm.gap, arm.diverged, arm.margin,
        )  # fmt: skip
        assert (again.verdict.kind, again.verdict.reason) == (arm.verdict.kind, arm.verdict.reason)
        assert again.verdict.p == pytest.approx(arm.verdict.p, nan_ok=True)


@pytest.mark.parametrize("name", foreign_files.SOURCES)
def test_every_format_of_the_same_runs_has_the_same_numbers(name, tmp_path, monkeypatch):
    """Three arms of four seeds, by the metric that all formats have, beside a ledger that holds the values themselves."""
    draw = np.random.default_rng(9)
    arms, seeds = {"bf16": 0.0, "nvfp4": 0.02, "mxfp4": 0.2}, range(4)
    shifts = draw.normal(0, 0.1, 4)
    truth = {
        (arm, seed, metric, step): round(
            float(3 + effect + shifts[seed] + draw.normal(0, 0.005) + 1 / step), 4
        )
        for metric in ("train/loss", "val/loss")
        for arm, effect in arms.items()
        for seed in seeds
        for step in foreign_files.STEPS
        if metric == "train/loss" or step % 20 == 0
    }
    monkeypatch.setattr(foreign_files, "ARMS", tuple(arms))
    monkeypatch.setattr(foreign_files, "SEEDS", tuple(seeds))
    monkeypatch.setattr(foreign_files, "TRUTH", truth)
    files = foreign_files.SOURCES[name]()
    foreign_files.write(files, tmp_path)
    metric, last = ("val/loss", 40) if name == "csv, wide" else ("train/loss", 50)
    kept = (
        (lambda value: float(np.float32(value))) if name == "TensorBoard" else float
    )  # its scalars are fp32
    ledger = Ledger(tmp_path / "truth" / "ledger.db")
    ledger.describe(metric=Metric(name=metric, min_effect=0.05).model_dump_json())
    base = None
    for arm in arms:
        number = ledger.add_arm(arm, {}, base, None, "listed" if base else "baseline")
        base = base or number
        for seed in seeds:
            made_up.member(ledger, number, seed, [(last, {metric: kept(truth[arm, seed, metric, last])})])
    expected = {arm.name: (arm.values, arm.gap, arm.verdict.kind) for arm in summaries(ledger)}
    ledger.close()
    places = [str(tmp_path / place) for place in files.places]
    found = read(places, Columns(**files.columns), logs=files.logs)
    ended = [replace(run, status="done") for run in found.runs]  # those files of W&B have no end
    given = Found(ended, found.said, places)
    write_ledger(tmp_path, "runs", given, Question("bf16", metric, 0.05))
    with closing(Ledger(tmp_path / "sweeps" / "runs" / "ledger.db", readonly=True)) as judged:
        assert {arm.name: (arm.values, arm.gap, arm.verdict.kind) for arm in summaries(judged)} == expected
    assert [kind for _, _, kind in expected.values()] == ["unjudged", "equivalent", "worse"]


def test_python_and_the_command_agree(tmp_path):
    rows = table({"bf16": 0, "nvfp4": 0.02, "mxfp4": 0.1})
    place = rows_of(tmp_path / "runs.csv", rows)
    printed = here("judge", place, "--against", "bf16", "--min-effect", "0.05", "--json", "--state", tmp_path)
    mine = ablate.judge(str(place), "bf16", min_effect=0.05)
    assert json.loads(printed.stdout) == mine.document()
    values = {
        arm: {row["seed"]: row["val/loss"] for row in rows if row["recipe"] == arm}
        for arm in ("bf16", "nvfp4", "mxfp4")
    }
    final = judge(values, "bf16", metric="val/loss", min_effect=0.05)
    assert [arm.verdict["kind"] for arm in final.arms] == ["equivalent", "worse"]
    assert [(arm.difference, arm.low) for arm in final.arms] == [
        (arm.difference, arm.low) for arm in mine.arms
    ]


def test_runs_without_seeds_are_compared_unpaired():
    found = judge({"bf16": [3.0, 3.1, 3.2, 3.3], "nvfp4": [3.2, 3.3, 3.1, 3.4]}, "bf16", min_effect=0.05)
    (arm,) = found.arms
    assert not arm.paired
    assert arm.verdict["kind"] == "undecided"
    assert any("the source names no seeds" in text for _, text in found.checks)


# --- what cannot be said ---------------------------------------------------------------------------


def test_one_seed_has_no_verdict_and_its_curve_is_one_result():
    rows = table({"bf16": 0, "nvfp4": 0.05}, seeds=1, steps=tuple(range(10, 400, 10)))
    runs = [
        ForeignRun(
            arm, arm, 0, {"val/loss": {row["step"]: row["val/loss"] for row in rows if row["recipe"] == arm}}
        )
        for arm in ("bf16", "nvfp4")
    ]
    found = curves(*(run.records["val/loss"] for run in reversed(runs)))
    assert (found.steps, found.above) == (39, 39)
    judged = judge({run.arm: {0: run.records["val/loss"][390]} for run in runs}, "bf16", metric="val/loss")
    assert judged.answer.startswith("One seed per arm: no difference has an interval")
    assert not judged.answered


def test_the_worth_of_a_curve_is_that_of_an_autoregression():
    """4,000 steps of an AR(1) process with coefficient 0.9 weigh as (1 - 0.9) / (1 + 0.9) of their number, to 20 %."""
    draw, value, series = np.random.default_rng(3), 0.0, {}
    for step in range(4000):
        value = 0.9 * value + draw.normal()
        series[step] = value
    found = curves(series, dict.fromkeys(series, 0.0))
    assert found.worth == pytest.approx(4000 * 0.1 / 1.9, rel=0.2)
    assert "they weigh as" in found.text


PLANTED = {
    "no such arm": (
        {},
        ["--against", "bf17"],
        "--against bf17: no such arm; 'bf16' is the nearest of bf16, nvfp4",
    ),
    "no such arm, and a field that has it": (
        {"format": lambda row: "fp32" if row["recipe"] == "bf16" else "fp4", "lr": lambda row: row["seed"]},
        ["--against", "fp32"],
        "--against fp32: no such arm; 'nvfp4' is the nearest of nvfp4, bf16; --column arm=format has it",
    ),
    "a column as a file": ({}, ["arm=recipe", "--against", "bf16"], "; --column arm=recipe names a column"),
    "two columns of the arm": (
        {"variant": lambda row: row["recipe"]},
        ["--against", "bf16", "--column", "seed=seed"],
        "'recipe', 'variant'; name one, --column arm=COLUMN",
    ),
    "no such metric": ({}, ["--against", "bf16", "--metric", "val/lss"], "no run has a metric 'val/lss'"),
    "no arm named": ({}, [], "--against is needed"),
    "an effect of zero": (
        {},
        ["--against", "bf16", "--min-effect", "0"],
        "min_effect 0: is no positive number",
    ),
    "a column without a role": ({}, ["--against", "bf16", "--column", "recipe"], "give a role and a column"),
    "no such role": ({}, ["--against", "bf16", "--column", "arms=recipe"], "column 'arms': no such role"),
    "two configurations in an arm": (
        {"lr": lambda row: 1e-3 if row["seed"] < 2 else 2e-3},
        ["--against", "bf16"],
        "nvfp4: its runs have different configurations (lr 0.001 and 0.002)",
    ),
}


@pytest.mark.parametrize("case", PLANTED)
def test_what_cannot_be_compared_is_one_sentence(case, tmp_path):
    fields, words, sentence = PLANTED[case]
    rows = [
        row | {name: make(row) for name, make in fields.items()} for row in table({"bf16": 0, "nvfp4": 1})
    ]
    asked = here("judge", rows_of(tmp_path / "runs.csv", rows), *words, "--state", tmp_path, "--no-report")
    assert asked.returncode == 2
    assert sentence in asked.stderr.splitlines()[-1]
    assert "Traceback" not in asked.stderr


def judged_ledger(tmp_path: Path, runs: list[ForeignRun], **question) -> Ledger:
    write_ledger(tmp_path, "runs", Found(runs, [], ["here"]), Question("bf16", "val/loss", **question))
    return Ledger(tmp_path / "sweeps" / "runs" / "ledger.db", readonly=True)


def runs_of(lengths: dict[str, int], seeds: int = 4, last: float | None = None) -> list[ForeignRun]:
    draw = np.random.default_rng(0)
    return [
        ForeignRun(
            f"{arm} {seed}", arm, seed,
            {"val/loss": {step: float(3 + draw.normal(0, 0.1)) if last is None or step < length else last for step in range(10, length + 1, 10)}},
            {"rate": 1, "id": f"{arm}{seed}"},
        )
        for arm, length in lengths.items()
        for seed in range(seeds)
    ]  # fmt: skip


def test_an_arm_with_a_run_that_ended_early_has_no_verdict(tmp_path):
    runs = runs_of({"bf16": 100, "nvfp4": 100})[:-1]
    runs += runs_of({"bf16": 100, "nvfp4": 80})[-1:]
    with closing(judged_ledger(tmp_path, runs)) as ledger:
        assert {arm.verdict.reason for arm in summaries(ledger)} == {"length", "baseline"}
        assert "ended at an earlier step" in headline_of(Comparisons(ledger)).text


def test_a_short_run_that_is_left_out_counts_as_a_run_without_a_result(tmp_path):
    """Its arm has a verdict on the others, and every answer says that it may look too good."""
    whole = table({"bf16": 0, "nvfp4": 0.1}, seeds=4)
    rows = [row for row in whole if (row["recipe"], row["seed"], row["step"]) != ("nvfp4", 3, 20)]
    place, short = rows_of(tmp_path / "runs.csv", rows), "seed 3 of nvfp4"
    refused, found = judge(place, "bf16"), judge(place, "bf16", without=[short])
    expected = judge(
        rows_of(tmp_path / "three.csv", [row for row in rows if row["seed"] < 3 or row["recipe"] == "bf16"]),
        "bf16",
    )
    assert [arm.verdict["reason"] for arm in refused.arms] == ["length"]
    assert any(f"--without '{short}' leaves it out" in text for text in refused.said)
    assert [replace(arm, verdict={}) for arm in found.arms] == [
        replace(arm, verdict={}) for arm in expected.arms
    ]
    warned = [text for kind, text in found.checks if kind == "warning"]
    assert any("7 of 8 runs finished" in text for text in warned)
    assert any(
        f"{short} is left out as asked: it ends at step 10 of 20; if it failed, nvfp4" in text
        for text in warned
    )
    asked = here("judge", place, "--against", "bf16", "--without", short, "--state", tmp_path)
    assert asked.returncode == 0, asked.stderr
    report = (tmp_path / "reports" / "runs" / "index.md").read_text()
    assert "1 of 8 runs are missing (1 failed)" in report
    assert "continues them" not in report


def test_only_a_short_run_can_be_left_out(tmp_path):
    """Neither one that ended with the others, nor one that diverged, nor any run of a gate."""
    rows = table({"bf16": 0, "nvfp4": 0.1}, seeds=4)
    rows = [row for row in rows if (row["recipe"], row["seed"], row["step"]) != ("nvfp4", 3, 20)]
    lost = [
        row | ({"val/loss": math.nan} if (row["recipe"], row["seed"]) == ("nvfp4", 3) else {}) for row in rows
    ]
    place, diverged = rows_of(tmp_path / "runs.csv", rows), rows_of(tmp_path / "lost.csv", lost)
    gate = ("--gate", "--history", tmp_path / "history", "--without", "seed 3 of nvfp4")
    for given, words, sentence in (
        (place, ("--without", "seed 3 of bf16"), "at step 20 of 20; only a run that ended early"),
        (place, ("--without", "seed 9 of bf16"), "no such run"),
        (diverged, ("--without", "seed 3 of nvfp4"), "nan at step 10 of 20; only a run that ended early"),
        (place, gate, "a gate counts every run"),
    ):
        asked = here("judge", given, "--against", "bf16", "--state", tmp_path, "--no-report", *words)
        assert asked.returncode == 2
        assert sentence in asked.stderr.splitlines()[-1]


@pytest.mark.parametrize(("shift", "drawn"), [(0, True), (2, False)])
def test_a_curve_of_gaps_has_the_pairs_of_the_verdicts_alone(shift, drawn, tmp_path):
    runs = [
        ForeignRun(**vars(run) | {"seed": run.seed + shift * (run.arm == "nvfp4")})
        for run in runs_of({"bf16": 100, "nvfp4": 100})
    ]
    with closing(judged_ledger(tmp_path, runs)) as ledger:
        assert [arm.gap.sides is None for arm in summaries(ledger) if arm.gap] == [drawn]
        assert (gap_curve(frame(ledger), Metric()) is not None) == drawn


def test_a_run_that_ends_with_nan_has_diverged(tmp_path):
    with closing(judged_ledger(tmp_path, runs_of({"bf16": 100, "nvfp4": 100}, last=math.nan))) as ledger:
        assert all(len(arm.diverged) == 4 for arm in summaries(ledger))
        assert headline_of(Comparisons(ledger)).sentence.startswith("No answer")


def test_a_nan_of_another_metric_is_said(tmp_path):
    runs = runs_of({"bf16": 100, "nvfp4": 100})
    bad = {"train/loss": {10: 3.0, 20: math.nan, 30: 3.1}}
    runs[5] = replace(runs[5], records={**runs[5].records, **bad})
    with closing(judged_ledger(tmp_path, runs)) as ledger:
        found = {check.text: check.kind for check in headline_of(Comparisons(ledger)).checks}
    assert found["non-finite values in 1 run"] == "warning"
    assert "no NaN, no divergence" not in found


def test_what_differs_between_arms_is_said(tmp_path):
    runs = runs_of({"bf16": 100, "nvfp4": 100})
    runs = [
        ForeignRun(**vars(run) | {"config": {"rate": 1 + (run.arm == "nvfp4"), "id": run.name}})
        for run in runs
    ]
    with closing(judged_ledger(tmp_path, runs)) as ledger:
        notes = [check.text for check in headline_of(Comparisons(ledger)).checks]
    assert "nvfp4 also differs from its baseline in rate 1 → 2" in notes


def test_a_smallest_effect_that_was_changed_is_said(tmp_path):
    for effect in (0.01, 0.01, 0.5):
        with closing(
            judged_ledger(tmp_path, runs_of({"bf16": 100, "nvfp4": 100}), min_effect=effect)
        ) as ledger:
            warned = [
                check.text for check in headline_of(Comparisons(ledger)).checks if "judged" in check.text
            ]
            assert bool(warned) == (effect == 0.5)


@pytest.mark.parametrize("seeds", [1, 4])
def test_reruns_of_one_configuration_are_described_and_not_compared(seeds, tmp_path):
    rows = table({"bf16": 0, "nvfp4": 0.05}, seeds=seeds) + [
        row | {"recipe": "again"} for row in table({"bf16": 0}, seeds=6)
    ]
    place = rows_of(tmp_path / "runs.csv", rows)
    asked = here("judge", place, "--against", "bf16", "--floor", "again", "--no-report", "--state", tmp_path)
    assert asked.returncode == 0, asked.stderr
    spread = np.std(
        [row["val/loss"] for row in rows if row["recipe"] == "again" and row["step"] == 20], ddof=1
    )
    assert f"Note: 6 reruns of one configuration vary by {spread:.2g} (standard deviation)" in asked.stdout
    last = {row["recipe"]: row["val/loss"] for row in rows if row["step"] == 20}
    errors = abs(last["nvfp4"] - last["bf16"]) / (spread * math.sqrt(2))
    said = f"nvfp4's difference is {errors:.1f} standard errors of such runs"
    assert (said in asked.stdout) == (seeds == 1), asked.stdout
    assert "again " not in asked.stdout


# --- the state folder ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    """A small sweep, with runs from elsewhere in its report."""
    folder = tmp_path_factory.mktemp("swept")
    tiny(folder, seeds=3)
    assert here("sweep", folder / "tiny.yaml", *INLINE, "--no-report", "--state", folder).returncode == 0
    return folder


def test_runs_from_elsewhere_stay_in_a_sweep_that_goes_on(swept):
    with closing(Ledger(swept / "sweeps" / "tiny" / "ledger.db", readonly=True)) as ledger:
        own = {arm.name: (arm.values, arm.gap) for arm in summaries(ledger)}
    base = next(iter(own))
    into = ("--into", "tiny", "--against", base, "--no-report", "--state", swept)
    longer = here("judge", rows_of(swept / "longer.csv", table({"theirs": 0.5}, seeds=4)), *into)
    assert longer.returncode == 2
    assert "the last val/loss is of step 20, and of step 4 in tiny" in longer.stderr
    place = rows_of(swept / "other.csv", table({"theirs": 0.5}, seeds=4, steps=(2, 4)))
    asked = here("judge", place, *into)
    assert asked.returncode == 0, asked.stderr
    assert here("sweep", swept / "tiny.yaml", *INLINE, "--no-report", "--state", swept).returncode == 0
    with closing(Ledger(swept / "sweeps" / "tiny" / "ledger.db", readonly=True)) as ledger:
        after = {arm.name: arm for arm in summaries(ledger)}
        origin = Judged.of(ledger)
        paired = {
            compared.name for member in ledger.members() for compared, *_ in gaps(ledger, member, "val/loss")
        }
    assert paired == own.keys()  # an equal seed of a run from elsewhere makes no pair, in MLflow too
    added = after.pop("elsewhere: theirs")
    assert {name: (arm.values, arm.gap) for name, arm in after.items()} == own
    assert added.gap.sides == (4, 3)
    assert str(place) in origin.sources
    both = rows_of(swept / "both.csv", table({"theirs": 0.5, "ours": 0.0}, seeds=4))
    again = here("judge", both, "--against", "theirs", "--as", "tiny", "--state", swept)
    assert again.returncode == 2
    assert "a sweep of this name is in" in again.stderr


def added_runs(arm: str, *changes: dict) -> list[ForeignRun]:
    """Runs that end where those of the small sweep do, each with fields of its own."""
    records = {"val/loss": {2: 3.5, 4: 3.4}}
    return [
        replace(ForeignRun(f"{arm} {seed}", arm, seed, records), **change)
        for seed, change in enumerate(changes)
    ]


def test_left_out_and_non_finite_runs_from_elsewhere_stand_in_the_report_until_they_are_replaced(
    swept, tmp_path
):
    """So do the files that they are from."""
    state, bad = tmp_path / "state", {"val/loss": {2: 3.5, 4: 3.4}, "train/loss": {2: math.nan}}
    shutil.copytree(swept, state)
    first = [
        *added_runs("a", {}, {"records": bad}, {"status": "failed"}),
        *added_runs("b", {}, {"status": "failed"}),
    ]
    steps = [
        ("first", first, ["first"], ["a 2 is left out: it is failed", "b 1 is left out: it is failed"], 1),
        ("second", added_runs("a", {}, {}), ["first", "second"], ["b 1 is left out: it is failed"], 0),
        ("third", added_runs("b", {}, {"records": bad}), ["second", "third"], [], 1),
    ]
    for place, runs, sources, left_out, nonfinite in steps:
        add_to_sweep(state, "tiny", Found(runs, [f"read {place}"], [place]), Question("bf16"))
        with closing(Ledger(state / "sweeps" / "tiny" / "ledger.db", readonly=True)) as ledger:
            judged, sweep = Judged.of(ledger), Comparisons(ledger)
            warned = [check.text for check in headline_of(sweep).checks if check.kind == "warning"]
            printed = [text for text in judged.said if "left out" in text]
        named = [place for place in judged.sources if place in ("first", "second", "third")]
        assert (named, judged.left_out, judged.nonfinite) == (sources, left_out, nonfinite)
        assert printed == left_out
        assert any("left out" in text for text in warned) == bool(left_out)
        assert any(text.startswith("non-finite values in 1 run") for text in warned) == bool(nonfinite)


def test_a_sweep_does_not_take_the_name_of_judged_runs(tmp_path):
    tiny(tmp_path, seeds=2)
    place = rows_of(tmp_path / "tiny.csv", table({"bf16": 0, "nvfp4": 0.1}))
    assert here("judge", place, "--against", "bf16", "--no-report", "--state", tmp_path).returncode == 0
    refused = here("sweep", tmp_path / "tiny.yaml", *INLINE, "--no-report", "--state", tmp_path)
    assert refused.returncode == 2
    assert "tiny: holds runs not started here" in refused.stderr


def test_the_report_says_where_the_runs_are_from(tmp_path):
    place = rows_of(tmp_path / "runs.csv", table({"bf16": 0, "nvfp4": 0.1}))
    asked = here("judge", place, "--against", "bf16", "--state", tmp_path)
    assert asked.returncode == 0, asked.stderr
    text = (tmp_path / "reports" / "runs" / "index.md").read_text()
    assert "trained elsewhere" in text
    assert "unchanged since" in text
    assert "sha256" in text
    assert "commit" not in text
    place.write_text(place.read_text() + "bf16,9,10,3.0\n")
    assert here("report", "runs", "--no-pdf", "--state", tmp_path).returncode == 0
    assert "no longer has what was read" in (tmp_path / "reports" / "runs" / "index.md").read_text()


def test_a_judgement_and_its_report_compute_the_answer_once(tmp_path):
    place = rows_of(tmp_path / "runs.csv", table({"bf16": 0, "nvfp4": 0.1}))
    with Profile() as profile:
        assert here("judge", place, "--against", "bf16", "--state", tmp_path).returncode == 0
    once = ("headline_of", "summaries")
    entries = [entry for entry in profile.getstats() if getattr(entry.code, "co_name", "") in once]
    assert {(entry.code.co_name, entry.callcount) for entry in entries} == {(name, 1) for name in once}


def test_no_bad_value_of_python_is_judged():
    with pytest.raises(InputError, match="no such arm"):
        judge({"bf16": [1.0, 2.0, 3.0], "nvfp4": [1.0, 2.0, 3.0]}, "fp32")


# --- several columns, a public file, a gate --------------------------------------------------------


def test_several_columns_make_an_arm(tmp_path):
    rows = [
        {
            "lr": lr,
            "rounding": how,
            "batch": 8,
            "seed": seed,
            "step": 10,
            "val/loss": lr + seed + len(how) / 100,
        }
        for lr in (0.1, 0.2)
        for how in ("sr", "rtn")
        for seed in range(3)
    ]
    place = rows_of(tmp_path / "runs.csv", rows)
    found = judge(place, "lr=0.1 rounding=sr", columns={"arm": "lr,rounding"})
    assert {arm.arm for arm in found.arms} == {
        "lr=0.1 rounding=rtn", "lr=0.2 rounding=sr", "lr=0.2 rounding=rtn",
    }  # fmt: skip
    halves = [rows_of(tmp_path / f"{lr}.csv", [row for row in rows if row["lr"] == lr]) for lr in (0.1, 0.2)]
    assert judge(halves, "lr=0.1 rounding=sr", columns={"arm": "lr,rounding"}).arms == found.arms
    with pytest.raises(InputError, match="no column 'round'"):
        judge(place, "x", columns={"arm": "lr,round"})


PUBLIC = """\
# Final losses, one seed each.
group,bquant,final_loss
baseline,,3.094649
nvidia,nvfp4,3.1078
quartet,mxfp4,3.1532
"""


def test_final_losses_of_one_seed_have_no_verdict(tmp_path):
    place = tmp_path / "public.csv"
    place.write_text(PUBLIC)
    asked = here(
        "judge", place, "--column", "arm=group", "--against", "baseline", "--no-report", "--state", tmp_path
    )
    assert asked.returncode == 0, asked.stderr
    assert "One seed per arm: no difference has an interval" in asked.stdout
    assert not any(
        word in asked.stdout.replace("the better", "") for word in ("better", "worse", "equivalent")
    )


def loop(tmp_path: Path, name: str, gains: dict[str, float], *words, runs: int = 8, first: int = 0, **more):
    draw = np.random.default_rng([first, runs])
    rows = [
        {"arm": arm, "seed": first + seed, "step": 10, "loss": 3 - gain + draw.normal(0, 0.01)}
        for arm, gain in gains.items()
        for seed in range(20 if arm == "reruns" else runs)
    ]
    place = rows_of(tmp_path / f"{name}.csv", rows)
    return here(
        "judge", place, "--gate", "--history", tmp_path / "loop.jsonl", "--against", "base", "--metric", "loss=loss",
        *words, **more,
    )  # fmt: skip


def test_a_gate_keeps_discards_and_asks_for_runs_by_its_exit_status(tmp_path):
    floor = ("--floor", "reruns")
    kept = loop(tmp_path, "one", {"base": 0, "warm-up": 0.2, "reruns": 0}, *floor)
    assert (kept.returncode, kept.stdout.splitlines()[-2].split()[0]) == (0, "Keep:"), kept.stderr
    discarded = loop(tmp_path, "two", {"base": 0, "decay": -0.1}, runs=4, first=100)
    assert discarded.returncode == 3, discarded.stdout + discarded.stderr
    again = loop(tmp_path, "three", {"base": 0, "clip": 0.2}, "--json", runs=2, first=200)
    assert again.returncode == 4
    assert json.loads(again.stdout)["decision"]["runs_candidate"] == 2
    history = tmp_path / "loop.jsonl"
    history.write_text("\n".join(history.read_text().splitlines()[:-1]) + "\n")
    shortened = loop(tmp_path, "four", {"base": 0, "mix": 0.2}, first=300)
    assert shortened.returncode == 2
    assert "loop.jsonl" in shortened.stderr


def test_a_run_counts_once_whatever_its_file_is_called(tmp_path):
    """Two runs a side, then the same and two more in another file: four a side, as the sentence says."""
    draw = np.random.default_rng(4)

    def rows(arm: str, mean: float, seeds: range) -> list[dict]:
        return [
            {"arm": arm, "seed": seed, "step": step, "loss": mean + draw.normal(0, 0.01)}
            for seed in seeds
            for step in (10, 20, 30)
        ]

    first = rows("base", 3, range(2)) + rows("cand", 2.98, range(2))
    grown = first + rows("base", 3, range(2, 4)) + rows("cand", 2.98, range(2, 4))
    words = ("--gate", "--history", tmp_path / "loop.jsonl", "--against", "base", "--metric", "loss=loss")
    begun = rows_of(tmp_path / "a.csv", first + rows("again", 3, range(20)))
    assert here("judge", begun, *words, "--floor", "again").returncode == 4
    said = here("judge", rows_of(tmp_path / "b.csv", grown), *words, "--floor", "again").stdout
    last = {
        arm: [row["loss"] for row in grown if row["arm"] == arm and row["step"] == 30]
        for arm in ("base", "cand")
    }
    assert f"gain {np.mean(last['base']) - np.mean(last['cand']):.4g} over 4 runs each" in said
    earlier = [row | {"arm": "third" if row["arm"] == "cand" else row["arm"]} for row in grown]
    other = here("judge", rows_of(tmp_path / "c.csv", earlier), *words)
    assert other.returncode == 2
    assert "was given with another proposal" in other.stderr


def test_a_crashed_run_is_left_out_and_its_rerun_counts(tmp_path):
    rows = [
        row | {"State": "finished", "Name": f"{row['recipe']}-{row['seed']}"}
        for row in table({"bf16": 0, "nvfp4": 1}, steps=(10,))
    ]
    rows = [{name: value for name, value in row.items() if name != "step"} for row in rows]
    rows += [rows[0] | {"State": "crashed", "Name": "early", "val/loss": ""}]
    rows += [rows[7] | {"State": "crashed", "Name": "late", "val/loss": 9.0}]
    rows += [rows[8] | {"State": "crashed", "Name": "alone", "seed": 7, "val/loss": 9.0}]
    place = rows_of(tmp_path / "runs.csv", rows)
    asked = here("judge", place, "--against", "bf16", "--no-report", "--state", tmp_path)
    assert asked.returncode == 0, asked.stderr
    assert "10 of 10 runs finished" in asked.stdout
    assert "alone" in next(line for line in asked.stdout.splitlines() if line.startswith("Mind:"))
    assert "Worse. nvfp4 instead of bf16 raises" in asked.stdout
    listed = here("show", "--state", tmp_path)
    assert "runs from elsewhere: val/loss" in listed.stdout, listed.stderr


def test_other_runs_under_a_decided_proposals_name_are_refused(tmp_path):
    loop(tmp_path, "one", {"base": 0, "cand": 0.2, "reruns": 0}, "--floor", "reruns")
    same = loop(tmp_path, "one", {"base": 0, "cand": 0.2, "reruns": 0}, "--floor", "reruns")
    assert same.returncode == 0
    other = loop(tmp_path, "two", {"base": 0, "cand": 0.0}, first=50)
    assert other.returncode == 2
    assert "give the new proposal another name with --as" in other.stderr
    assert loop(tmp_path, "two", {"base": 0, "cand": 0.0}, "--as", "second", first=50).returncode in (3, 4)


@pytest.mark.parametrize(
    ("gains", "words", "sentence"),
    [
        ({"base": 0, "cand": 0}, (), "needs a noise floor"),
        (
            {"base": 0, "cand": 0, "other": 0, "reruns": 0},
            ("--floor", "reruns"),
            "a gate judges one proposal",
        ),
        ({"base": 0, "cand": 0, "reruns": 0}, ("--floor", "rerun"), "--floor rerun: no such arm"),
        ({"base": 0, "cand": 0}, ("--min-effect", "0.1"), "a gate counts in noise floors"),
    ],
)
def test_a_gate_refuses_in_a_sentence(gains, words, sentence, tmp_path):
    refused = loop(tmp_path, "one", gains, *words)
    assert refused.returncode == 2
    assert sentence in refused.stderr.splitlines()[-1]


# --- found by an attack ----------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["descending", "shuffled"])
def test_the_order_of_rows_changes_no_number(order, tmp_path):
    steps = tuple(range(0, 101, 20))
    rows = table({"bf16": 0, "nvfp4": 0.05}, steps=tuple(step + 1 for step in steps))
    for name, these in (
        ("sorted", rows),
        (order, rows[::-1] if order == "descending" else [*np.random.default_rng(0).permutation(rows)]),
    ):
        for arm in ("bf16", "nvfp4"):
            for seed in range(5):
                folder = tmp_path / name / arm
                folder.mkdir(parents=True, exist_ok=True)
                own = [
                    {"step": row["step"], "val/loss": row["val/loss"]}
                    for row in these
                    if (row["recipe"], row["seed"]) == (arm, seed)
                ]
                rows_of(folder / f"seed{seed}.csv", own)
    one, other = (
        judge(str(tmp_path / name / "{arm}" / "seed{seed}.csv"), "bf16") for name in ("sorted", order)
    )
    assert one.arms == other.arms


def test_equal_final_values_without_seeds_are_runs_of_their_own(tmp_path):
    values = {"a": [0.5, 0.5, 0.7, 0.8], "b": [0.5, 0.6, 0.75, 0.75]}
    rows = [{"arm": arm, "acc": value} for arm in values for value in values[arm]]
    found = judge(rows_of(tmp_path / "runs.csv", rows), "a", metric="acc", direction="maximize")
    assert (found.arms[0].runs, found.arms[0].difference) == (4, pytest.approx(0.025))
    assert judge(values, "a", direction="maximize").arms[0].low == pytest.approx(found.arms[0].low)


def test_frames_are_read_as_their_files_are(tmp_path):
    rows = table({"bf16": 0, "nvfp4": 0.1}, steps=(10, 20, 30))
    data = pd.DataFrame(
        [row | {"val/loss": row["val/loss"] if row["step"] % 20 else math.nan} for row in rows]
    )
    data.to_csv(tmp_path / "runs.csv", index=False)
    assert judge(data, "bf16").arms == judge(tmp_path / "runs.csv", "bf16").arms
    twice = pd.concat([data.assign(run="x"), data.assign(run="y", **{"val/loss": data["val/loss"] + 1})])
    with pytest.raises(InputError, match="are both seed 0 of bf16"):
        judge(twice, "bf16")


KINDS = {
    "times": lambda data: data.assign(when=pd.Timestamp("2026-01-01", tz="UTC")),
    "categories": lambda data: data.assign(recipe=data["recipe"].astype("category")),
    "decimals": lambda data: data.assign(**{"val/loss": data["val/loss"].map(str).map(Decimal)}),
    "numpy's scalars": lambda data: data.astype(object).map(
        lambda one: np.float64(one) if isinstance(one, float) else one
    ),
    "an index of seeds": lambda data: data.set_index("seed"),
    "an index of steps": lambda data: data.set_index(["recipe", "step", "seed"]),
    "levels of columns": lambda data: data.set_axis(
        pd.MultiIndex.from_tuples([(*name.split("/"), "")[:2] for name in data]), axis=1
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_is_judged_whatever_its_columns_hold(kind):
    data = pd.DataFrame(table({"bf16": 0, "nvfp4": 0.1}))
    assert judge(KINDS[kind](data), "bf16").arms == judge(data, "bf16").arms


@pytest.mark.parametrize("names", [("val/loss", "val/loss"), (1, "1")])
def test_a_frame_with_two_columns_of_one_name_is_refused(names):
    data = pd.DataFrame(table({"bf16": 0, "nvfp4": 0.1}))
    data = pd.concat([data.drop(columns="val/loss"), *[data["val/loss"]] * 2], axis=1)
    data.columns = [*data.columns[:-2], *names]
    with pytest.raises(InputError, match="the table: two columns are named"):
        judge(data, "bf16")


def test_arms_may_be_numbers():
    values = {4: [3.1, 3.3, 3.2], 8: [3.0, 3.1, 3.3]}
    rows = [{"arm": arm, "seed": seed, "loss": one} for arm in values for seed, one in enumerate(values[arm])]
    found = judge(pd.DataFrame(rows), 8), judge({arm: dict(enumerate(values[arm])) for arm in values}, 8)
    assert {(each.arm, each.difference) for one in found for each in one.arms} == {
        ("4", found[0].arms[0].difference)
    }


@pytest.mark.parametrize("unit", [1e-200, 1e200, 1e307])
def test_an_unpaired_interval_follows_the_unit(unit):
    usual = {"a": [3.0, 3.3, 3.2], "b": [1.0, 1.1, 1.3]}
    scaled = {arm: [value * unit for value in values] for arm, values in usual.items()}
    (one,), (other,) = judge(usual, "a").arms, judge(scaled, "a").arms
    assert other.verdict["kind"] == one.verdict["kind"] == "better"
    numbers = (other.difference, other.low, other.high)
    assert [value / unit for value in numbers] == pytest.approx([one.difference, one.low, one.high])


def test_runs_that_differ_by_rounding_alone_are_one_value():
    arms = {"a": [3.0, 3.0 + 4e-15, 3.0 + 9e-15], "b": [3.0 + 1e-13, 3.0 + 1.1e-13, 3.0 + 1.2e-13]}
    for given in (arms, {arm: dict(enumerate(values)) for arm, values in arms.items()}):
        (found,) = judge(given, "a").arms
        assert (found.verdict["kind"], found.verdict["reason"]) == ("unjudged", "few_values")


def test_an_index_named_as_a_column_is_refused():
    data = pd.DataFrame(table({"bf16": 0, "nvfp4": 0.1}))
    with pytest.raises(InputError, match="two columns are named 'seed'"):
        judge(data.rename_axis("seed"), "bf16")


def test_two_arms_of_one_name_are_refused():
    with pytest.raises(InputError, match="two arms have one name: 4, 8, '8'"):
        judge({4: [3.1, 3.3, 3.2], 8: [3.0, 3.1, 3.3], "8": [4.0, 4.1, 4.3]}, "4")


def test_a_fraction_that_no_float_holds_is_refused():
    with pytest.raises(InputError, match="b: 0: "):
        judge({"a": [1, 2, 3], "b": [Fraction(10**400), 2, 3]}, "a")


@pytest.mark.parametrize("kind", [np.array, pd.Series, np.float32, tuple])
def test_final_values_may_be_of_numpy_or_pandas(kind):
    values = {"a": [1.0, 1.5, 1.75], "b": [2.0, 2.25, 3.0]}
    given = {arm: [*map(kind, each)] if kind is np.float32 else kind(each) for arm, each in values.items()}
    assert judge(given, "a").arms == judge(values, "a").arms


def test_an_arm_whose_baseline_left_the_file_is_shown_without_a_gap(tmp_path):
    tiny(tmp_path, seeds=3)
    run = ("sweep", tmp_path / "tiny.yaml", *INLINE, "--no-report", "--state", tmp_path)
    assert here(*run).returncode == 0
    with closing(Ledger(tmp_path / "sweeps" / "tiny" / "ledger.db", readonly=True)) as ledger:
        against = [arm.name for arm in ledger.arms() if arm.baseline is not None][-1]
    place = rows_of(tmp_path / "other.csv", table({"theirs": 0.5}, seeds=4, steps=(2, 4)))
    assert (
        here(
            "judge", place, "--into", "tiny", "--against", against, "--no-report", "--state", tmp_path
        ).returncode
        == 0
    )
    with closing(Ledger(tmp_path / "sweeps" / "tiny" / "ledger.db")) as ledger:
        number = ledger.arm(against)
        ledger.db.execute("UPDATE arms SET place = NULL WHERE arm = ?", (number,))
        found = {arm.name: arm for arm in summaries(ledger)}
    assert found["elsewhere: theirs"].gap is None


@pytest.mark.parametrize("effect", ["1e-1%", "+5%", "5.%", "0.1 %", "1e-16%", "5e-324%", "1.23456789e-12%"])
def test_every_way_to_write_a_share_is_read(effect):
    assert judge({"a": [1.0, 1.1, 1.2], "b": [1.0, 1.1, 1.3]}, "a", min_effect=effect).arms


BAD = {
    "a direction": (({"a": [1.0], "b": [2.0]},), {"direction": "max"}, "is minimize or maximize"),
    "a value beyond floats": (({"a": [1.0], "b": [10**400]},), {}, "does not fit a float"),
    "a seed that is no whole number": (({"a": {0.2: 1.0}, "b": {0: 2.0}},), {}, "a seed is a whole number"),
    "a seed that is no number": (({"a": {"x": 1.0}, "b": {0: 2.0}},), {}, "a seed is a whole number"),
    "a seed that is NaN": (({"a": {math.nan: 1.0}, "b": {0: 2.0}},), {}, "a seed is a whole number"),
    "an infinite seed": (({"a": {math.inf: 1.0}, "b": {0: 2.0}},), {}, "a seed is a whole number"),
    "text": (({"a": "124", "b": [1.0]},), {}, "give values by seed"),
    "no values": (({"a": [], "b": [1.0]},), {}, "give values by seed"),
    "one number": (({"a": 1.0, "b": [1.0]},), {}, "give values by seed"),
    "an empty array": (({"a": np.array([]), "b": [1.0]},), {}, "give values by seed"),
    "values in two dimensions": (({"a": np.ones((2, 2)), "b": [1.0]},), {}, "a value a number"),
    "None": (({"a": [None], "b": [1.0]},), {}, "a value a number"),
    "a name that is no metric's": (({"a": [1.0], "b": [1.0]},), {"metric": "acc%"}, "rename it"),
    "a huge seed": (({"a": {1 << 63: 1.0}, "b": {0: 1.0}},), {}, "too large"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_values_in_python_are_refused_in_a_sentence(case):
    given, more, sentence = BAD[case]
    with pytest.raises(InputError, match=re.escape(sentence)):
        judge(*given, "a", **more)


def test_another_files_runs_do_not_replace_a_judgement(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        rows_of(tmp_path / folder / "runs.csv", table({"bf16": 0, "nvfp4": 0.1}))
    asked = [
        here("judge", tmp_path / folder / "runs.csv", "--against", "bf16", "--no-report", "--state", tmp_path)
        for folder in "ab"
    ]
    assert [one.returncode for one in asked] == [0, 2]
    assert "give another name with --as" in asked[1].stderr
