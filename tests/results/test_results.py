"""An experiment back from its ledger: summaries and contrasts from known numbers, paired by seed."""

import io
import json
import math
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from support.books import decided
from support.cases import every
from support.experiments import sweep, tiny

from ablate.cli.answer_view import DISPENSABLE
from ablate.experiment.roles import CONFIRM
from ablate.experiment.schema import Growth, Metric, Published
from ablate.reports.comparison_tables import foremost, published_table, summary_table
from ablate.reports.evidence import summary_markdown
from ablate.reports.table_notes import emulated, reading
from ablate.results.attribution import grid, main_effects
from ablate.results.comparisons import Comparisons
from ablate.results.contrasts import contrasts
from ablate.results.headline import headline_of
from ablate.results.intervals import Interval
from ablate.results.next_runs import fresh_seeds, undecided, winner
from ablate.results.number_text import interval, number, percents, shortened
from ablate.results.paired_stats import Difference, paired_difference
from ablate.results.published import Agreement, agreement_notes, agreement_text, replications
from ablate.results.summary import summaries
from ablate.store.checked_ledger import open_ledger
from ablate.store.ledger import Ledger
from ablate.store.records import frame
from ablate.store.trial_store import Store

LOSSES = {
    "bf16": {0: 3.00, 1: 3.10, 2: 3.20},
    "rht=true sr=true": {0: 3.01, 1: 3.12, 2: 3.2101},
    "rht=true sr=false": {0: 3.05, 1: 3.15, 2: 3.25},
    "rht=false sr=true": {0: 2.90, 1: 3.01, 2: 3.09},
    "rht=false sr=false": {0: 3.00, 1: math.nan},
}


def knobs(name: str) -> dict:
    return (
        {word.partition("=")[0]: word.endswith("true") for word in name.split()}
        if "=" in name
        else {"recipe": name}
    )


def add(
    book: Ledger, arm: str, baseline: int | None, losses: dict[int, float | None], status: str = "done"
) -> int:
    number = book.add_arm(arm, knobs(arm), baseline, None)
    for seed, loss in losses.items():
        trial = book.add_member(number, seed, f"{arm}/{seed}", "{}")
        if loss is not None:
            metrics = {
                "val/loss": loss,
                "quant/fprop.x/sqnr_db": 20.0 + seed,
                "throughput/tokens_per_s": 100.0,
            }
            book.record(
                trial,
                [
                    {"step": 1, "time": 0.0, "metrics": {"val/loss": 9.0}},
                    {"step": 2, "time": 1.0, "metrics": metrics},
                ],
            )
        book.settle(trial, status)
    return number


@pytest.fixture
def book(tmp_path):
    """A sweep's ledger with known numbers: the last arm has one NaN and one failed seed."""
    ledger = Ledger(tmp_path / "sweeps" / "x" / "ledger.db")
    ledger.describe(
        question="Does it?", metric='{"name": "val/loss", "direction": "minimize", "min_effect": 0.005}'
    )
    base = add(ledger, "bf16", None, LOSSES["bf16"])
    for arm, losses in list(LOSSES.items())[1:]:
        add(ledger, arm, base, losses)
    failed = ledger.add_member(5, 2, "failed", "{}")
    ledger.settle(failed, "failed", "why")
    yield ledger
    ledger.close()


def test_a_summary_is_the_last_value_by_seed_and_the_paired_gap(book):
    base, full, _, better, _ = summaries(book)
    assert (base.baseline, base.gap, base.verdict.reason, base.values) == (
        None,
        None,
        "baseline",
        LOSSES["bf16"],
    )
    assert full.gap == paired_difference(LOSSES["rht=true sr=true"], LOSSES["bf16"])
    assert full.mean == pytest.approx(math.fsum(LOSSES["rht=true sr=true"].values()) / 3)
    assert better.verdict.kind == "better"
    assert (base.sqnr_db, base.tokens_per_s) == (21.0, 100.0)


def end_a_trial(book: Ledger) -> None:
    trial = book.members(2)[0].trial
    book.record(trial, [{"step": 2, "time": 1.0, "metrics": {"val/loss": 3.0}}])
    book.settle(trial, "done")


def propose_an_arm(book: Ledger) -> None:
    add(book, "rht=true sr=false", 1, {0: 3.05})


class Meanwhile(Ledger):
    """Ledger that a running sweep writes to while it is read."""

    def write(self, book: Ledger) -> None:
        raise NotImplementedError

    def rates(self, metric: str) -> dict[int, float]:
        with closing(Ledger(self.path)) as book:
            self.write(book)
        return super().rates(metric)


@pytest.mark.parametrize("write", [end_a_trial, propose_an_arm])
def test_summaries_show_one_moment_of_a_sweep_that_runs(write, tmp_path):
    """A trial that ends between two queries would be done with the loss of an earlier step."""
    path = tmp_path / "ledger.db"
    with closing(Ledger(path)) as book:
        add(book, "bf16", None, {0: 3.0})
        arm = book.add_arm("rht=true sr=true", {"rht": True}, 1, None)
        trial = book.add_member(arm, 0, "running", "{}")
        book.record(trial, [{"step": 1, "time": 0.0, "metrics": {"val/loss": 9.0}}])
        before = [found.values for found in summaries(book, Metric(name="val/loss"))]
    assert before == [{0: 3.0}, {}]
    kind = type("Kind", (Meanwhile,), {"write": lambda self, book: write(book)})
    with closing(kind(path, readonly=True)) as reader:
        assert [found.values for found in summaries(reader, Metric(name="val/loss"))] == before
    with closing(Ledger(path)) as book:
        later = [found.values for found in summaries(book, Metric(name="val/loss"))]
    assert later != before


def test_the_speed_of_an_arm_is_the_work_of_its_seeds_over_their_time(tmp_path):
    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        arm = ledger.add_arm("bf16", {}, None, None)
        for seed, speed in enumerate((100.0, 300.0)):
            trial = ledger.add_member(arm, seed, f"t{seed}", "{}")
            metrics = {"val/loss": 1.0, "throughput/tokens_per_s": speed}
            ledger.record(trial, [{"step": 10, "time": 0.0, "metrics": metrics}])
            ledger.settle(trial, "done")
        (found,) = summaries(ledger, Metric(name="val/loss"))
    assert found.tokens_per_s == pytest.approx(150.0)


def test_seeds_without_a_finite_value_are_left_out_and_counted(book):
    last = summaries(book)[-1]
    assert last.values == {0: 3.0}
    assert (last.missing, last.diverged) == ((2,), ())
    assert (last.gap.pairs, last.verdict.reason) == (1, "one_pair")


def test_a_diverged_seed_is_counted_and_is_no_value(book):
    number = book.add_arm("wild", {}, 1, None)
    trial = book.add_member(number, 0, "wild", "{}")
    book.record(
        trial,
        [
            {
                "step": 3,
                "time": 0.0,
                "metrics": {"train/loss": math.nan, "nan/first_step": 3.0, "val/loss": 3.0},
            }
        ],
    )
    book.settle(trial, "diverged", "at step 3")
    wild = summaries(book)[-1]
    assert (wild.values, wild.diverged, wild.missing, wild.nans) == ({}, (0,), (), 1)
    assert (wild.verdict.kind, wild.verdict.diverged, wild.verdict.seeds) == ("unjudged", 1, 1)
    assert math.isnan(wild.mean)


def test_a_contrast_is_every_two_arms_that_differ_in_one_knob(book):
    found = contrasts(summaries(book), book.facts.metric)
    assert [(c.knob, c.change, c.held) for c in found] == [
        ("rht", "true instead of false", "sr=true"),
        ("rht", "true instead of false", "sr=false"),
        ("sr", "true instead of false", "rht=true"),
        ("sr", "true instead of false", "rht=false"),
    ]
    assert found[0].effect == paired_difference(LOSSES["rht=true sr=true"], LOSSES["rht=false sr=true"])
    assert found[0].verdict.reason == "few_values"  # two of the three differences are the same


@pytest.mark.parametrize(("direction", "expected"), [("minimize", "better"), ("maximize", "worse")])
def test_what_is_better_follows_the_metrics_direction(direction, expected, book):
    book.describe(metric=f'{{"name": "val/loss", "direction": "{direction}"}}')
    assert summaries(book)[3].verdict.kind == expected


def test_the_frame_has_a_row_a_record_and_a_column_a_knob(book):
    table = frame(book)
    assert len(table) == sum(len(losses) for losses in LOSSES.values()) * 4
    row = table[
        (table["arm"] == "rht=true sr=false")
        & (table["seed"] == 1)
        & (table["metric"] == "val/loss")
        & (table["step"] == 2)
    ]
    assert row[["baseline", "value", "rht", "sr", "status", "trial"]].values.tolist() == [
        ["bf16", 3.15, True, False, "done", "rht=true sr=false/1"]
    ]


def test_the_markdown_is_the_question_and_a_line_an_arm(book):
    text = summary_markdown(book).splitlines()
    assert text[0] == "**Does it?**"
    assert text[2] == headline_of(Comparisons(book)).sentence
    text = text[2:]
    assert text[4] == "| bf16 | 3.1000 |  | 3 | baseline |  |"
    assert "| rht=false sr=true | 3.0000 | -0.1000 ±0.0248 | 3 | better |  |" in text
    assert text[5 + 3].endswith("| 1 of 3 | not judged² |  |")
    assert text[4 + len(LOSSES) :] == [
        "",
        "¹ distinct differences by seed: 1 of the 3 that a verdict needs  ",
        "² one seed: no interval",
    ]


def test_an_interval_is_written_only_where_there_is_one():
    assert (
        interval(paired_difference({0: 1.0, 1: 2.0, 2: 3.0}, {0: 0.9, 1: 1.8, 2: 2.7})) == "+0.2000 ±0.2484"
    )
    assert interval(paired_difference({0: 1.0}, {0: 0.9})) == "+0.1000"
    assert interval(paired_difference({}, {})) == "-"
    assert interval(paired_difference({0: 1.0, 1: 2.0}, {0: 0.9, 1: 1.7})) == "+0.2000"
    assert (
        interval(paired_difference({0: 1.0, 1: 2.0, 2: 3.0}, {0: 0.9, 1: 1.8, 2: 2.7}, Interval("sequence")))
        == "+0.2000 ±∞"
    )


def test_a_sweep_that_was_never_run_has_no_ledger(tmp_path):
    with pytest.raises(FileNotFoundError, match="unknown: no such sweep in"):
        open_ledger(tmp_path, "unknown")


def figure(value: float, **fields) -> Published:
    return Published(arm="bf16", metric="val/loss", value=value, source="a paper", **fields)


@pytest.mark.parametrize(
    ("value", "fields", "verdict"),
    [
        (3.1, {}, Agreement("agrees", tolerance=0.02)),
        (3.15, {}, Agreement("agrees", tolerance=0.02)),
        (3.0, {}, Agreement("differs", apart=0.1 / 3)),
        (3.0, {"tolerance": 0.05}, Agreement("agrees", tolerance=0.05)),
        (9.0, {"step": 1}, Agreement("agrees", tolerance=0.02)),
        (9.0, {"step": 3}, Agreement("unjudged", "not_measured")),
        (0.0, {}, Agreement("differs")),
    ],
)
def test_a_published_figure_stands_beside_the_mean_over_seeds(book, value, fields, verdict):
    (line,) = replications(book, [figure(value, **fields)])
    apart = line.verdict.apart
    assert replace(line.verdict, apart=None) == replace(verdict, apart=None)
    assert apart == (None if verdict.apart is None else pytest.approx(verdict.apart))
    if verdict.kind != "unjudged":
        assert line.measured.mean == pytest.approx(9.0 if "step" in fields else 3.1)


# What "rht=true sr=true" has over bf16: .01, .02, .01, so +.0133 with an interval from -.0010 to +.0277; rht=false sr=true is lower by
# .1, .09, .11; by hand, with t(2) = 4.303.
UP, DOWN = "rht=true sr=true", "rht=false sr=true"
CONTRADICTED = Agreement("disagrees", detail="negligible")
CLAIMS = {
    "the same direction": (DOWN, "lower", Agreement("agrees")),
    "the other direction": (DOWN, "higher", Agreement("disagrees")),
    "a difference where none was published": (DOWN, "no difference", Agreement("disagrees")),
    "an interval that holds zero": (UP, "higher", Agreement("unresolved")),
    "an interval too wide for none": (UP, "no difference", Agreement("unresolved")),
    "the same size": (DOWN, -0.11, Agreement("agrees", detail="within")),
    "another size": (DOWN, -0.01, Agreement("agrees", detail="larger")),
    "a size with the other sign": (DOWN, 0.01, Agreement("disagrees")),
    "a size beyond an interval that holds zero": (UP, 0.05, Agreement("unresolved", detail="smaller")),
    "a size within an interval that holds zero": (UP, 0.02, Agreement("unresolved", detail="within")),
    "nothing, as a number": (DOWN, 0.0, Agreement("disagrees")),
    "a share": (DOWN, "-3.2%", Agreement("agrees", detail="within")),
    "a share of another size": (DOWN, "-32 %", Agreement("agrees", detail="smaller")),
    "one pair": ("rht=false sr=false", "lower", Agreement("unjudged", "one_pair")),
    "an arm that was not run": ("nobody", "lower", Agreement("unjudged", "not_measured")),
}


@every(case=CLAIMS)
def test_a_published_difference_is_judged_by_its_direction_and_its_size_is_said_beside_it(book, case):
    arm, value, verdict = CLAIMS[case]
    (line,) = replications(
        book, [Published(arm=arm, against="bf16", metric="val/loss", value=value, source="a paper")]
    )
    assert line.verdict == verdict


@pytest.mark.parametrize(
    ("lost", "short", "long"),
    [
        ((3,), "diverged; agrees", "diverged on 1 of 4 seeds; on the others: agrees"),
        ((0, 1, 2, 3), "diverged", "diverged on 4 of 4 seeds"),
    ],
)
def test_that_an_arm_diverged_is_the_first_thing_said_of_a_published_difference(book, lost, short, long):
    arm = add(
        book,
        "shaky",
        1,
        {seed: loss for seed, loss in {0: 2.8, 1: 2.91, 2: 3.005}.items() if seed not in lost},
    )
    for seed in lost:
        book.settle(book.add_member(arm, seed, f"shaky/lost {seed}", "{}"), "diverged")
    (line,) = replications(
        book, [Published(arm="shaky", against="bf16", metric="val/loss", value="lower", source="a paper")]
    )
    assert (agreement_text(line, short=True), agreement_text(line)) == (short, long)
    assert [note.partition(":")[0] for note in agreement_notes(line)] == [long.partition(";")[0]]


@pytest.mark.parametrize("value", ["lower", "no difference", -1.0, "-10%"])
def test_equal_counts_neither_agree_nor_disagree_with_a_published_difference(book, value):
    counts = {0: 2.0, 1: 3.0}
    add(book, "counted", None, counts)
    add(book, "counted too", 6, counts)
    (line,) = replications(
        book, [Published(arm="counted too", against="counted", metric="val/loss", value=value, source="a")]
    )
    assert line.verdict == Agreement("unjudged", "equal_counts")
    assert agreement_text(line) == "not judged (equal counts on 2 seeds)"


def test_the_same_losses_are_no_difference_as_a_share_either(book):
    add(book, "again", 1, LOSSES["bf16"])
    figures = [
        Published(arm="again", against="bf16", metric="val/loss", value=value, source="a")
        for value in ("-1%", "0%")
    ]
    assert [line.verdict for line in replications(book, figures)] == [CONTRADICTED, Agreement("agrees")]


@pytest.mark.parametrize("zeros", [{0: 0.0, 1: 0.0, 2: 0.0}, {0: -1.0, 1: 0.0, 2: 1.0}])
def test_of_a_baseline_of_zero_there_is_no_share(book, zeros):
    add(book, "zero", None, zeros)
    add(book, "more", 6, {0: 1.0, 1: 2.0, 2: 4.0})
    (line,) = replications(
        book, [Published(arm="more", against="zero", metric="val/loss", value="-1.0%", source="a")]
    )
    assert line.verdict == Agreement("unjudged", "no_share")
    assert agreement_text(line) == "not judged (val/loss of zero is 0, so the difference is no share of it)"


def test_what_is_too_small_to_matter_is_no_difference_and_contradicts_one(book):
    book.describe(metric='{"name": "val/loss", "min_effect": 0.05}')
    higher, none = (
        Published(arm=UP, against="bf16", metric="val/loss", value=value, source="a")
        for value in ("higher", "no difference")
    )
    assert [line.verdict for line in replications(book, [higher, none])] == [
        CONTRADICTED,
        Agreement("agrees"),
    ]
    shares = [
        Published(arm=arm, against="bf16", metric="val/loss", value=value, source="a")
        for arm, value in ((UP, "+0.4%"), (DOWN, "0%"))
    ]
    # .05 of 3.1 is 1.6 %: -.03 to .9 % lies within, -3.9 to -2.5 % does not
    assert [line.verdict for line in replications(book, shares)] == [CONTRADICTED, Agreement("disagrees")]


def test_a_difference_the_same_way_that_is_too_small_to_matter_says_so(book):
    book.describe(metric='{"name": "val/loss", "min_effect": 0.2}')
    figures = [
        Published(arm=DOWN, against="bf16", metric="val/loss", value=value, source="a")
        for value in ("lower", -0.3, "no difference")
    ]
    small = Agreement("agrees", detail="negligible")
    assert [line.verdict for line in replications(book, figures)] == [small, small, Agreement("agrees")]


def test_a_published_difference_is_shown_with_its_sign_its_unit_and_the_measured_interval(book):
    values = ("lower", -0.01, "-1.0%")
    figures = [
        Published(arm=DOWN, against="bf16", metric="val/loss", value=value, source="a paper")
        for value in values
    ]
    lines = replications(book, [*figures, figure(3.1)])
    assert [line.published for line in lines] == ["lower", "-0.01", "-1 %", "3.1"]
    assert [line.found for line in lines] == [
        "-0.1000 ±0.0248",
        "-0.1000 ±0.0248",
        "-3.22 ±0.70 %",
        "3.1 ±0.25",
    ]
    assert {line.subject for line in lines} == {f"{DOWN} minus bf16", "bf16"}
    drawn = screen(published_table(lines).terminal())
    assert all(
        word in drawn
        for word in (
            "rht=false sr=true minus bf16",
            "-3.22 ±0.70 %",
            "agrees¹",
            "¹ larger here than published",
        )
    )


def test_memory_is_the_most_of_a_trial_and_a_gpus_own_where_there_is_one(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db")
    for arm, peaks in (("cpu", {}), ("gpu", {"memory/peak_allocated": 3e9})):
        trial = ledger.add_member(
            ledger.add_arm(arm, {"recipe": arm}, None, None), 0, arm, '{"engine": "emulated"}'
        )
        for step, resident in ((1, 4e8), (2, 9e8), (3, 5e8)):
            metrics = {"val/loss": 3.0, "memory/rss": resident, "throughput/tokens_per_s": 10.0, **peaks}
            ledger.record(trial, [{"step": step, "time": 0.0, "metrics": metrics}])
        ledger.settle(trial, "done")
    arms = summaries(ledger)
    assert [arm.memory for arm in arms] == [9e8, 3e9]
    drawn = screen(summary_table(arms, Metric()).terminal())
    assert "900 MB" in drawn
    assert "3,000 MB" in drawn
    assert (
        emulated(ledger)
        == "tokens/s and memory are those of the emulation here, not of hardware that has these formats."
    )


@pytest.mark.parametrize(("workload", "said"), [("gpt", False), ("python", True)])
def test_speed_of_hardware_that_has_the_formats_needs_no_such_word_and_that_of_own_code_says_of_what_it_is(
    workload, said, tmp_path
):
    ledger = Ledger(tmp_path / "ledger.db")
    spec = json.dumps({"engine": "transformer_engine", "workload": {workload: {}}})
    trial = ledger.add_member(ledger.add_arm("nvfp4", {}, None, None), 0, "x", spec)
    ledger.record(trial, [{"step": 1, "time": 0.0, "metrics": {"throughput/tokens_per_s": 10.0}}])
    assert ("without the loading of data" in emulated(ledger)) == said == bool(emulated(ledger))


def test_the_memory_of_code_that_states_no_tokens_is_of_the_emulation_too(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db")
    spec = json.dumps({"engine": "emulated", "workload": {"python": {}}})
    trial = ledger.add_member(ledger.add_arm("nvfp4", {}, None, None), 0, "x", spec)
    ledger.record(trial, [{"step": 1, "time": 0.0, "metrics": {"throughput/step_ms": 10.0}}])
    assert emulated(ledger).startswith("memory is that of the emulation here")
    assert "tokens/s" not in emulated(ledger)


def screen(*parts) -> str:
    """Return the output of a wide terminal."""
    console = Console(file=io.StringIO(), width=240)
    console.print(*parts)
    return console.file.getvalue()


def test_a_figure_of_an_arm_that_was_not_run_is_not_measured(book):
    (line,) = replications(book, [figure(3.1).model_copy(update={"arm": "nobody"})])
    assert line.verdict == Agreement("unjudged", "not_measured")
    assert agreement_text(line) == agreement_text(line, short=True) == "not measured"


def test_arms_can_be_summarised_by_any_metric(book):
    base = summaries(book, Metric(name="quant/fprop.x/sqnr_db", direction="maximize"))[0]
    assert base.values == {0: 20.0, 1: 21.0, 2: 22.0}


def test_knobs_of_the_workload_and_presets_are_no_contrasts_and_nor_is_a_gap(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db")
    arms = [
        {"rht": True, "workload.x": "a"},
        {"rht": False, "workload.x": "a"},
        {"rht": True, "workload.x": "b"},
    ]
    arms += [{"rht": False, "workload.x": "b"}, {"recipe": "bf16"}, {"recipe": "nvfp4"}]
    for number_, knobs_ in enumerate(arms):
        ledger.add_arm(
            str(number_), knobs_, 4 if number_ == 0 else None, None
        )  # the first is compared with the fourth
    found = contrasts(summaries(ledger, Metric()), Metric())
    assert [(c.knob, c.change, c.held) for c in found] == [
        ("rht", "true instead of false", "x=a"),
        ("rht", "true instead of false", "x=b"),
    ]


def test_a_contrast_has_the_sign_of_the_main_effect(tmp_path):
    """A value minus the one that the file lists first; true minus false, whichever comes first."""
    for knob, (first, second), change in (
        ("block", ("1x16", "1x32"), '"1x32" instead of "1x16"'),
        ("rht", (False, True), "true instead of false"),
        ("sr", (True, False), "true instead of false"),
    ):
        ledger = Ledger(tmp_path / knob / "ledger.db")
        base = add(ledger, "bf16", None, LOSSES["bf16"])
        for place, value in enumerate((first, second)):
            arm = ledger.add_arm(f"arm {place}", {knob: value}, base, None)
            for seed, loss in enumerate((3.0, 3.1, 3.25)):
                trial = ledger.add_member(arm, seed, f"{place}/{seed}", "{}")
                metrics = {"val/loss": loss + place * (0.1 + 0.01 * seed)}
                ledger.record(trial, [{"step": 1, "time": 0.0, "metrics": metrics}])
                ledger.settle(trial, "done")
        arms = summaries(ledger)
        (contrast,), (effect,) = contrasts(arms, Metric()), main_effects(grid(arms))
        assert (contrast.change, contrast.effect) == (effect.change, effect.effect)
        assert contrast.change == change
        assert contrast.effect.mean == pytest.approx(-0.11 if knob == "sr" else 0.11)
        ledger.close()


def test_more_contrasts_than_anyone_reads_are_none(book):
    arms, metric = summaries(book), book.facts.metric
    assert contrasts(arms, metric, most=4) == contrasts(arms, metric)
    assert contrasts(arms, metric, most=3) == []


@pytest.mark.parametrize(
    ("direction", "first"), [("minimize", "rht=false sr=true"), ("maximize", "rht=true sr=false")]
)
def test_of_many_arms_the_best_are_shown_with_what_they_are_compared_with(direction, first, book):
    metric = Metric(name="val/loss", direction=direction)
    for place in range(60):
        add(book, f"arm {place}", 1, {0: 4.0 + place / 100 if direction == "minimize" else place / 100})
    arms = summaries(book, metric)
    best = arms[5:10] if direction == "minimize" else arms[-5:]
    assert foremost(arms, metric, 10) == arms[:5] + best
    assert foremost(arms, metric, 65) == arms
    assert {arm.name for arm in foremost(arms, metric, 1)} == {"bf16", first}


def test_the_markdown_of_many_arms_fits_a_tag_of_mlflow(book):
    for place in range(1000):
        book.add_arm(f"an arm with a rather long name, number {place}", {}, 1, None)
    text = summary_markdown(book)
    assert len(text) < 8000
    assert "| rht=false sr=true | 3.0000 |" in text
    assert text.endswith("and 965 more arms, none of them better")


@pytest.mark.parametrize(
    ("mean", "half", "shown"),
    [
        (0.0133, 0.0132, "+0.0133 ±0.0132"),
        (0.001283, 0.00002, "+0.001283 ±0.000020"),
        (-8.49e-5, 3.2e-6, "-0.0000849 ±0.0000032"),
        (1e-5, 0.02, "+0.0000 ±0.0200"),
        (-1e-5, 0.02, "+0.0000 ±0.0200"),
        (0.01324, 0.01322, "+0.01324 ±0.01322"),
        (-0.013236, 0.01323, "-0.013236 ±0.013230"),
        (0.0132300001, 0.01323, "+0.013230 ±0.013230"),
    ],
)
def test_an_interval_shows_what_it_resolves(mean, half, shown):
    assert interval(Difference(mean, mean - half, mean + half, 3, 1.0)) == shown


@pytest.mark.parametrize(
    ("scale", "shown"),
    [(1.0, "+20 ±25 %"), (0.1, "+2.0 ±2.5 %"), (0.001, "+0.020 ±0.025 %"), (-10.0, "-200 ±248 %")],
)
def test_a_percentage_ends_at_the_second_digit_of_its_interval(scale, shown):
    values = {seed: scale * value for seed, value in enumerate((0.1, 0.2, 0.3))}
    assert percents(paired_difference(values, dict.fromkeys(values, 0.0))) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(-0.0, "0.0000"), (2.43662, "2.4366"), (0.0090471, "0.009047"), (0.0, "0.0000"), (-12.5, "-12.5000")],
)
def test_a_small_number_shows_digits_and_a_large_one_decimals(value, shown):
    assert number(value) == shown


def shown(arms: list, metric: Metric) -> list[list[str]]:
    """The table's rows as a terminal shows them, by cell."""
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(summary_table(arms, metric).terminal())
    return [line.split("  ") for line in console.export_text().splitlines()]


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_a_table_of_verdicts_leaves_columns_out_rather_than_wrap_a_cell(width, book):
    """Every arm is one line; what went is said. Notes stand under the table in lines of their own."""
    arms = summaries(book)
    console = Console(width=width, file=io.StringIO())
    console.print(summary_table(arms, book.facts.metric).terminal(width, DISPENSABLE))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    assert [line.split("  ")[0] for line in lines[2 : 2 + len(LOSSES)]] == list(LOSSES)
    assert "² one seed: no interval" in lines
    assert ("tokens/s" in lines[0] + lines[1]) == (width >= 100)
    assert any("in a wider terminal" in line for line in lines) == (width < 100)


# Seeds that grow

PAIRS = {
    "wide": (-0.02, 0.03, 0.01, -0.01, 0.005, -0.01),
    "clear": (0.1, 0.11, 0.101, 0.111, 0.1, 0.11),
    "same": (0.0,) * 6,
    "tiny": (1e-4, -1e-4, 2e-4, 0.0, 1e-4, 5e-5),
}


@pytest.fixture
def grown(tmp_path):
    """bf16 on seven seeds, and arms on six with known gaps to it; intervals are sequences."""
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.describe(
        question="Does it?", metric='{"name": "val/loss", "min_effect": 0.005}', interval="sequence"
    )
    base = add(ledger, "bf16", None, dict.fromkeys(range(7), 3.05))
    for arm, gaps in PAIRS.items():
        add(ledger, arm, base, {seed: 3.05 + gap for seed, gap in enumerate(gaps)})
    yield ledger
    ledger.close()


def test_every_comparison_is_made_by_the_interval_that_the_sweep_declares(grown):
    sequence, arms = Interval("sequence"), summaries(grown)
    assert {arm.gap.interval for arm in arms if arm.gap} == {sequence}
    assert arms[1].gap == paired_difference(arms[1].values, arms[0].values, sequence)
    assert arms[1].gap.high - arms[1].gap.mean == pytest.approx(
        arms[1].gap.deviation * sequence.half_width(6)
    )
    turned = [arm for arm in arms if arm.name in ("wide", "clear")]
    for arm, value in zip(turned, (True, False), strict=True):
        arm.knobs.clear()
        arm.knobs["rht"] = value
    assert contrasts(turned, grown.facts.metric)[0].effect.interval == sequence
    assert replications(grown, [figure(3.0)])[0].measured.interval == sequence


def test_a_ledger_that_declares_nothing_has_plain_t_intervals(book):
    assert summaries(book)[1].gap.interval == Interval("t")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("t", "95 % t interval of one comparison by itself;"),
        ("split:10", "t interval, its 5 % split over 10 looks of one comparison by itself;"),
        ("sequence", "95 % confidence sequence of one comparison by itself;"),
    ],
)
def test_what_is_read_names_the_interval(kind, said, grown):
    grown.describe(interval=kind)
    assert reading(summaries(grown)).startswith(
        f"Gaps and effects are paired over 6 seeds; ± is half a {said}"
    )
    assert ("valid at every look" in reading(summaries(grown))) == (kind == "sequence")
    assert f"gap to baseline, {Interval.parse(kind)}" in summary_markdown(grown)


def test_an_arm_shows_its_own_seeds_and_the_reading_says_that_they_differ(grown):
    trial = grown.add_member(2, 6, "wide/6", "{}")
    grown.record(trial, [{"step": 2, "time": 0.0, "metrics": {"val/loss": 3.0}}])
    grown.settle(trial, "done")
    wild = grown.add_member(3, 6, "clear/6", "{}")
    grown.settle(wild, "diverged", "at step 1")
    arms = summaries(grown)
    assert [(arm.name, arm.seeds, len(arm.values)) for arm in arms[:3]] == [
        ("bf16", 7, 7),
        ("wide", 7, 7),
        ("clear", 7, 6),
    ]
    assert "paired by seed, each arm over its own seeds, so compare gaps and not means;" in reading(arms)
    cells = {
        row[0]: [cell.strip() for cell in row if cell.strip()] for row in shown(arms, grown.facts.metric)
    }
    assert (cells["wide"][2], cells["clear"][2]) == ("7", "6 of 7")


def test_a_seed_without_a_finite_metric_is_a_seed_that_was_given(book):
    assert (summaries(book)[-1].seeds, summaries(book)[-1].values) == (3, {0: 3.0})


def test_only_an_arm_whose_interval_is_too_wide_is_grown(grown):
    assert undecided(grown) == [("wide", "bf16")]
    grown.describe(metric='{"name": "val/loss"}')
    assert undecided(grown) == [
        ("wide", "bf16"),
        ("tiny", "bf16"),
    ]  # without a min_effect no gap is too small to matter
    assert undecided(grown, Metric(min_effect=0.5)) == []


@pytest.mark.parametrize("status", ["pending", "running", "failed", "diverged"])
@pytest.mark.parametrize("arm", [1, 2])
def test_an_arm_is_not_grown_past_a_seed_without_a_pair(arm, status, grown):
    """Check an arm or its baseline: one that is not over is waited for, and no further seed makes up for one that failed or diverged."""
    trial = next(member.trial for member in grown.members() if (member.arm, member.seed) == (arm, 1))
    grown.settle(trial, status)
    assert undecided(grown) == []
    grown.settle(trial, "done")
    assert undecided(grown) == [("wide", "bf16")]


def test_an_arm_whose_metric_is_not_finite_on_some_seed_is_not_grown(grown):
    assert undecided(grown) == [("wide", "bf16")]
    trial = grown.add_member(2, 6, "wide/6", "{}")
    grown.record(trial, [{"step": 2, "time": 0.0, "metrics": {"val/loss": math.inf}}])
    grown.settle(trial, "done")
    assert undecided(grown) == []


def grow(book: Ledger, growth: Growth, member: Callable[[str, int], None]) -> None:
    """Add seeds as the controller does, for each undecided arm and its baseline, until none is undecided or all have the most."""
    while True:
        counts = {arm.name: arm.seeds for arm in summaries(book)}
        wanted = [
            (name, seed)
            for arm, base in undecided(book)
            for seed in growth.more(counts[arm])
            for name in (arm, base)
        ]
        if not wanted:
            return
        for name, seed in wanted:
            member(name, seed)


@pytest.mark.parametrize("by", ["sequence", "split"])
def test_growth_ends_with_every_arm_decided_or_at_the_most_and_ends_the_same_when_it_is_run_again(
    by, tmp_path
):
    growth = Growth(start=3, most=12, by=by, step=2)
    ledger, random = Ledger(tmp_path / "ledger.db"), np.random.default_rng(5)
    ledger.describe(metric='{"name": "val/loss", "min_effect": 0.005}', interval=growth.interval)
    seeds, gaps = random.normal(3, 0.02, 12), {"bf16": 0.0, "far": 0.03, "near": 0.008, "none": 0.0}
    losses = {arm: seeds + gap + random.normal(0, 0.006, 12) for arm, gap in gaps.items()}

    def member(arm: str, seed: int) -> None:
        trial = ledger.add_member(list(gaps).index(arm) + 1, seed, f"{arm}/{seed}", "{}")
        ledger.record(trial, [{"step": 1, "time": 0.0, "metrics": {"val/loss": losses[arm][seed]}}])
        ledger.settle(trial, "done")

    counts = []
    for _ in range(2):
        ledger.unwant()
        for arm in gaps:
            ledger.add_arm(arm, {}, None if arm == "bf16" else 1, None)
            for seed in growth.first:
                member(arm, seed)
        grow(ledger, growth, member)
        counts.append({arm.name: arm.seeds for arm in summaries(ledger)})
    arms = summaries(ledger)
    ledger.close()
    assert counts[0] == counts[1]
    assert all(arm.seeds == 12 or decided(arm.gap, 0.005) for arm in arms[1:])
    assert all(sorted(arm.values) == list(range(arm.seeds)) for arm in arms)
    assert 3 < counts[0]["far"] < counts[0]["none"] == 12 == counts[0]["bf16"]
    assert arms[1].verdict.kind == "worse"


def test_growth_of_a_sweep_that_was_really_run_extends_the_undecided_arms_and_their_baseline(tmp_path):
    """Three arms on 2 seeds; whoever is undecided takes over further trials of a sweep that ran them all."""
    whole, growth = tiny(tmp_path, name="whole", seeds=5), Growth(start=2, most=5, by="split")
    few = tiny(tmp_path, seeds=2)
    sweep(whole, tmp_path)
    sweep(few, tmp_path)
    arms = {arm.name: (number, arm) for number, arm in enumerate(few.arms, 1)}
    with (
        closing(Ledger(tmp_path / "sweeps" / "tiny" / "ledger.db")) as book,
        closing(open_ledger(tmp_path, "whole")) as other,
    ):
        book.describe(interval=growth.interval)
        started = {arm for arm, _ in undecided(book)}
        grow(
            book, growth, lambda name, seed: adopted(book, tmp_path, few, arms[name][1], arms[name][0], seed)
        )
        found, all_ = ({arm.name: arm for arm in summaries(ledger)} for ledger in (book, other))
    assert started == set(found) - {"bf16"}  # two seeds decide nothing here
    assert found["bf16"].values == all_["bf16"].values
    for arm in started:
        assert found[arm].seeds == 5 or decided(found[arm].gap, None)
        assert found[arm].values == {seed: all_[arm].values[seed] for seed in range(found[arm].seeds)}


# A search and its winner


def adopted(book: Ledger, state, experiment, arm, number: int, seed: int) -> None:
    """A member whose trial the store has, as the controller takes it over."""
    spec, store = experiment.spec(arm, seed, "cpu"), Store(state)
    trial = book.add_member(number, seed, spec.id, spec.wire)
    book.record(trial, store.events(spec.id))
    result = store.result(spec.id)
    book.settle(trial, result["status"], result["reason"], result["seconds"])


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A search of four arms on two seeds, really run; leave its folder as it is."""
    folder = tmp_path_factory.mktemp("searched")
    keys = {
        "ablate": {"workload.lr": {"uniform": [0.001, 0.1], "log": True}, "rht": [True, False]},
        "search": {"trials": 4},
        "seeds": 2,
    }
    experiment = tiny(folder, **keys)
    assert sweep(experiment, folder)[0].status == "done"
    return folder, experiment


@pytest.fixture
def studied(searched, tmp_path):
    """Its ledger, a copy to write in, with the fact that it is a search."""
    folder, experiment = searched
    with (
        closing(open_ledger(folder, experiment.name)) as source,
        closing(sqlite3.connect(tmp_path / "ledger.db")) as copy,
    ):
        source.db.backup(copy)
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.describe(search=experiment.keys.search.sampler)
    yield ledger
    ledger.close()


def searches(book: Ledger) -> None:
    """As if a sampler had proposed the arms that have a baseline."""
    book.describe(search="tpe")
    book.db.execute("UPDATE arms SET role = iif(baseline IS NULL, 'baseline', 'searched')")
    book.db.execute("UPDATE arms SET optuna = arm WHERE baseline NOTNULL")


def test_what_a_search_saw_is_exploratory_and_its_colour_is_kept_for_results(grown):
    """One gap that its interval resolves and one that it does not, as a sampler's and as the file's own."""
    colours = {}
    for search in ("", "tpe"):
        if search:
            searches(grown)
        arms = summaries(grown)
        (column,) = [
            column
            for column in summary_table(arms, grown.facts.metric).terminal().columns
            if column.header == "verdict"
        ]
        colours[search] = dict(
            zip([arm.name for arm in arms], [str(cell.style) for cell in column.cells], strict=True)
        )
    assert [arm.role for arm in arms] == ["baseline", *["searched"] * 4]
    assert [(arm.verdict.kind, arm.verdict.exploratory) for arm in arms[2:4]] == [
        ("worse", True),
        ("same", True),
    ]
    assert (arms[1].verdict.kind, arms[1].verdict.needed) == (
        "undecided",
        None,
    )  # of a proposal no seeds are planned
    assert (colours[""]["clear"], colours["tpe"]["clear"]) == ("red", "")
    assert "rerun it on fresh seeds before you rely on it" in reading(arms)


def test_the_winner_has_the_best_mean_of_the_arms_whose_seeds_are_all_done(studied):
    means = {arm.name: arm.mean for arm in summaries(studied) if arm.role == "searched"}
    order = sorted(means, key=means.get)
    assert winner(studied) == order[0]
    assert winner(studied, Metric(direction="maximize")) == order[-1]
    first = next(member for member in studied.members() if member.name == order[0])
    for status in ("failed", "diverged", "pending"):
        studied.settle(first.trial, status)
        assert winner(studied) == order[1]


def test_a_winner_is_not_one_whose_worst_seed_is_missing(grown):
    """Without its seed 1 the first arm has the best mean of all."""
    searches(grown)
    assert winner(grown) == "same"
    trial = next(member.trial for member in grown.members() if (member.name, member.seed) == ("wide", 1))
    grown.settle(trial, "failed")
    assert summaries(grown)[1].mean < 3.05
    assert winner(grown) == "same"


def test_what_a_search_proposed_and_its_winner_run_again_are_in_no_contrast(grown):
    """The first were chosen by the numbers that a contrast would rest on; the second has other seeds."""
    grown.describe(search="tpe")
    for point, value in enumerate((True, False)):
        grown.add_arm(f"{point}: rht", {"rht": value}, 1, point, "searched")
    grown.add_arm(f"{CONFIRM}0: rht", {"rht": True}, 1, None, "confirmed")
    arms = [arm for arm in summaries(grown) if arm.knobs.keys() == {"rht"}]
    assert [arm.role for arm in arms] == ["searched", "searched", "confirmed"]
    assert contrasts(arms, grown.facts.metric) == []


def test_a_search_whose_best_arm_is_its_baseline_has_no_winner(studied):
    studied.db.execute("UPDATE arms SET baseline = NULL WHERE name = ?", (winner(studied),))
    assert winner(studied) is None


def test_fresh_seeds_are_those_that_no_proposed_arm_was_ever_run_on(studied):
    assert fresh_seeds(studied, 3) == (2, 3, 4)
    arm = next(arm for arm in studied.arms() if arm.optuna is not None)
    studied.add_member(arm.arm, 3, "another", "{}")
    studied.unwant()  # the file named that seed once, and the sampler was told what came of it
    assert fresh_seeds(studied, 3) == (2, 4, 5)
    studied.add_member(arm.baseline, 2, "baseline", "{}")
    assert fresh_seeds(studied, 3) == (2, 4, 5)  # a baseline's seeds chose nothing


def test_a_winner_run_again_has_a_line_with_the_gap_of_the_fresh_seeds_alone(studied, searched):
    """The trials are real: an experiment of the winner alone runs them, and the ledger adopts them as the controller does."""
    folder, experiment = searched
    name, seeds = winner(studied), fresh_seeds(studied, 3)
    row = next(arm for arm in studied.arms() if arm.name == name)
    arm, baseline = experiment.propose(json.loads(row.knobs))
    again = tiny(folder, name="again", ablate=None, arms={"winner": dict(arm.knobs)}, seeds=list(seeds))
    assert sweep(again, folder)[0].status == "done"
    number = studied.add_arm(CONFIRM + name, arm.knobs, row.baseline, None, "confirmed")
    for seed in seeds:
        adopted(studied, folder, experiment, arm, number, seed)
        adopted(studied, folder, experiment, baseline, row.baseline, seed)

    arms = {arm.name: arm for arm in summaries(studied)}
    confirmed, before = arms[CONFIRM + name], arms[name]
    with closing(open_ledger(folder, "again")) as book:
        losses = {arm.name: arm.values for arm in summaries(book)}
    assert confirmed.values == losses["winner"]
    assert confirmed.gap == paired_difference(
        losses["winner"], losses[next(arm for arm in losses if arm != "winner")]
    )
    assert before.gap.pairs == 2  # untouched by its baseline's new seeds
    assert confirmed.verdict.fresh_seeds == 3
    assert winner(studied) == name
    assert fresh_seeds(studied, 3) == seeds  # the same when the sweep goes on
    note = "Winner on fresh seeds: the search's best arm, rerun on seeds that took no part in choosing it"
    assert note in reading(list(arms.values()))
    lines = [cells[0].strip() for cells in shown(list(arms.values()), studied.facts.metric)]
    short = shortened([*arms])
    assert lines[lines.index(short(arms[name].baseline)) + 1] == short(CONFIRM + name)
    assert not any(
        contrast.effect.pairs == 0 for contrast in contrasts(list(arms.values()), studied.facts.metric)
    )
