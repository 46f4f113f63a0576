"""An experiment back from its ledger: summaries and contrasts from known numbers, paired by seed."""

import math

import pytest

from ablate.ledger import Ledger
from ablate.results import contrasts, frame, interval, metric_of, number, open_ledger, replications, summaries, summary_markdown
from ablate.stats import Difference, paired_difference
from ablate.surface import Metric, Published

LOSSES = {
    "bf16": {0: 3.00, 1: 3.10, 2: 3.20},
    "rht=true sr=true": {0: 3.01, 1: 3.12, 2: 3.21},
    "rht=true sr=false": {0: 3.05, 1: 3.15, 2: 3.25},
    "rht=false sr=true": {0: 2.90, 1: 3.01, 2: 3.09},
    "rht=false sr=false": {0: 3.00, 1: math.nan},
}


def knobs(name: str) -> dict:
    return {word.partition("=")[0]: word.endswith("true") for word in name.split()} if "=" in name else {"recipe": name}


def add(book: Ledger, arm: str, baseline: int | None, losses: dict[int, float | None], status: str = "done") -> int:
    number = book.add_arm(arm, knobs(arm), baseline, None)
    for seed, loss in losses.items():
        trial = book.add_member(number, seed, f"{arm}/{seed}", "{}")
        if loss is not None:
            metrics = {"val/loss": loss, "quant/fprop.x/sqnr_db": 20.0 + seed, "throughput/tokens_per_s": 100.0}
            book.record(trial, [{"step": 1, "time": 0.0, "metrics": {"val/loss": 9.0}}, {"step": 2, "time": 1.0, "metrics": metrics}])
        book.settle(trial, status)
    return number


@pytest.fixture
def book(tmp_path):
    """A sweep's ledger with known numbers: the last arm has one NaN and one failed seed."""
    ledger = Ledger(tmp_path / "sweeps" / "x" / "ledger.db")
    ledger.describe(question="Does it?", metric='{"name": "val/loss", "direction": "minimize", "min_effect": 0.005}')
    base = add(ledger, "bf16", None, LOSSES["bf16"])
    for arm, losses in list(LOSSES.items())[1:]:
        add(ledger, arm, base, losses)
    failed = ledger.add_member(5, 2, "failed", "{}")
    ledger.settle(failed, "failed", "why")
    yield ledger
    ledger.close()


def test_a_summary_is_the_last_value_by_seed_and_the_paired_gap(book):
    base, full, _, better, _ = summaries(book)
    assert (base.baseline, base.gap, base.verdict, base.values) == (None, None, "baseline", LOSSES["bf16"])
    assert full.gap == paired_difference(LOSSES["rht=true sr=true"], LOSSES["bf16"])
    assert full.mean == pytest.approx(math.fsum(LOSSES["rht=true sr=true"].values()) / 3)
    assert better.verdict == "better"
    assert (base.sqnr_db, base.tokens_per_s) == (21.0, 100.0)


def test_seeds_without_a_finite_value_are_left_out_and_counted(book):
    last = summaries(book)[-1]
    assert last.values == {0: 3.0}
    assert (last.missing, last.diverged) == (1, 0)
    assert (last.gap.pairs, last.verdict) == (1, "one seed: no interval")


def test_a_diverged_seed_is_counted_and_is_no_value(book):
    number = book.add_arm("wild", {}, 1, None)
    trial = book.add_member(number, 0, "wild", "{}")
    book.record(trial, [{"step": 3, "time": 0.0, "metrics": {"train/loss": math.nan, "nan/first_step": 3.0, "val/loss": 3.0}}])
    book.settle(trial, "diverged", "at step 3")
    wild = summaries(book)[-1]
    assert (wild.values, wild.diverged, wild.missing, wild.nans, wild.verdict) == ({}, 1, 0, 1, "no pair of finished seeds")
    assert math.isnan(wild.mean)


def test_a_contrast_is_every_two_arms_that_differ_in_one_knob(book):
    found = contrasts(summaries(book), metric_of(book))
    assert [(c.knob, c.change, c.held) for c in found] == [
        ("rht", "true instead of false", "sr=true"),
        ("rht", "true instead of false", "sr=false"),
        ("sr", "true instead of false", "rht=true"),
        ("sr", "true instead of false", "rht=false"),
    ]
    assert found[0].effect == paired_difference(LOSSES["rht=true sr=true"], LOSSES["rht=false sr=true"])
    assert found[0].verdict == "worse"


@pytest.mark.parametrize(("direction", "expected"), [("minimize", "better"), ("maximize", "worse")])
def test_what_is_better_follows_the_metrics_direction(direction, expected, book):
    book.describe(metric=f'{{"name": "val/loss", "direction": "{direction}"}}')
    assert summaries(book)[3].verdict == expected


def test_the_frame_has_a_row_a_record_and_a_column_a_knob(book):
    table = frame(book)
    assert len(table) == sum(len(losses) for losses in LOSSES.values()) * 4
    row = table[(table["arm"] == "rht=true sr=false") & (table["seed"] == 1) & (table["metric"] == "val/loss") & (table["step"] == 2)]
    assert row[["baseline", "value", "rht", "sr", "status", "trial"]].values.tolist() == [
        ["bf16", 3.15, True, False, "done", "rht=true sr=false/1"]
    ]


def test_the_markdown_is_the_question_and_a_line_an_arm(book):
    text = summary_markdown(book).splitlines()
    assert text[0] == "**Does it?**"
    assert text[4] == "| bf16 | 3.1000 | baseline | baseline |"
    assert len(text) == 4 + len(LOSSES)
    assert "| rht=false sr=true | 3.0000 | -0.1000 ±0.0248 | better |" in text


def test_an_interval_is_written_only_where_there_is_one():
    assert interval(paired_difference({0: 1.0, 1: 2.0}, {0: 0.9, 1: 1.7})) == "+0.2000 ±1.2706"
    assert interval(paired_difference({0: 1.0}, {0: 0.9})) == "+0.1000"
    assert interval(paired_difference({}, {})) == "-"


def test_a_sweep_that_was_never_run_has_no_ledger(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such sweep has been run"):
        open_ledger(tmp_path, "unknown")


def figure(value: float, **fields) -> Published:
    return Published(arm="bf16", metric="val/loss", value=value, source="a paper", **fields)


@pytest.mark.parametrize(
    ("value", "fields", "verdict"),
    [
        (3.1, {}, "agrees within 2%"),
        (3.15, {}, "agrees within 2%"),
        (3.0, {}, "differs by +3.3%"),
        (3.0, {"tolerance": 0.05}, "agrees within 5%"),
        (9.0, {"step": 1}, "agrees within 2%"),
        (9.0, {"step": 3}, "not measured"),
        (0.0, {}, "differs"),
    ],
)
def test_a_published_figure_stands_beside_the_mean_over_seeds(book, value, fields, verdict):
    (line,) = replications(book, [figure(value, **fields)])
    assert line.verdict == verdict
    if verdict != "not measured":
        assert line.measured.mean == pytest.approx(9.0 if "step" in fields else 3.1)


def test_a_figure_of_an_arm_that_was_not_run_is_not_measured(book):
    (line,) = replications(book, [figure(3.1).model_copy(update={"arm": "nobody"})])
    assert line.verdict == "not measured"


def test_arms_can_be_summarised_by_any_metric(book):
    base = summaries(book, Metric(name="quant/fprop.x/sqnr_db", direction="maximize"))[0]
    assert base.values == {0: 20.0, 1: 21.0, 2: 22.0}


def test_knobs_of_the_workload_and_presets_are_no_contrasts_and_nor_is_a_gap(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db")
    arms = [{"rht": True, "workload.x": "a"}, {"rht": False, "workload.x": "a"}, {"rht": True, "workload.x": "b"}]
    arms += [{"rht": False, "workload.x": "b"}, {"recipe": "bf16"}, {"recipe": "nvfp4"}]
    for number_, knobs_ in enumerate(arms):
        ledger.add_arm(str(number_), knobs_, 4 if number_ == 0 else None, None)  # the first is compared with the fourth
    found = contrasts(summaries(ledger, Metric()), Metric())
    assert [(c.knob, c.change, c.held) for c in found] == [
        ("rht", "true instead of false", "x=a"),
        ("rht", "true instead of false", "x=b"),
    ]


@pytest.mark.parametrize(
    ("mean", "half", "shown"),
    [
        (0.0133, 0.0132, "+0.0133 ±0.0132"),
        (0.001283, 0.00002, "+0.001283 ±0.000020"),
        (-8.49e-5, 3.2e-6, "-0.0000849 ±0.0000032"),
        (1e-5, 0.02, "+0.0000 ±0.0200"),
    ],
)
def test_an_interval_shows_what_it_resolves(mean, half, shown):
    assert interval(Difference(mean, mean - half, mean + half, 3, 1.0)) == shown


@pytest.mark.parametrize(("value", "shown"), [(2.43662, "2.4366"), (0.0090471, "0.009047"), (0.0, "0.0000"), (-12.5, "-12.5000")])
def test_a_small_number_shows_digits_and_a_large_one_decimals(value, shown):
    assert number(value) == shown
