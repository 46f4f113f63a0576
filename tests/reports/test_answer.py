"""Tests of a report's answer: the verdict that the numbers allow and no more, and every loss by name."""

import itertools
import json
import math
import random
import re
import shutil
import sqlite3
from collections import Counter
from contextlib import closing

import pytest
from support.books import ALIKE, BASE, LOOSE, SPEC, WORSE, add, learn, noisy, whole_grid
from support.cases import every
from support.experiments import ledger, problems, sweep, tiny, write
from support.made_up import grid
from support.made_up import member as finish
from support.tables import cells

from ablate.experiment.arms import label
from ablate.experiment.recorded_spec import RecordedSpec
from ablate.experiment.schema import Constraint, Metric, Published
from ablate.reports import answer_tables
from ablate.reports.answer import Answer
from ablate.reports.comparison_tables import summary_table
from ablate.reports.evidence import summary_markdown
from ablate.results.gate import checks
from ablate.results.next_runs import undecided, winner
from ablate.results.published import replications
from ablate.results.subject import compared, described, source_name, title
from ablate.results.summary import UNLEARNED, Gaps, judge_learned, summaries
from ablate.results.verdict_text import REASONS, needed_text
from ablate.store.divergences import divergences
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Store
from ablate.training.workloads import context_free


@pytest.fixture
def book(tmp_path):
    ledger = Ledger(tmp_path / "sweeps" / "x" / "ledger.db")
    ledger.describe(question="Does it?", metric='{"name": "val/loss", "min_effect": 0.01}', search="")
    yield ledger
    ledger.close()


def said(book) -> str:
    answer = Answer(book)
    return "\n".join(part.markdown() for part in (*answer.headline(), answer.reading()))


def notes(table) -> set[str]:
    """Every note on a row of a table."""
    return {note for row in table.notes for note in row}


def test_the_verdict_states_every_arm_and_none_is_picked(book):
    add(book, "bf16", BASE, None)
    add(book, "odd", LOOSE)
    add(book, "mxfp4", WORSE)
    add(book, "nvfp4", ALIKE)
    assert Answer(book).answer.lead == "Answered in part, 2 of 3."
    assert Answer(book).answer.text == (
        "Against bf16, by val/loss: mxfp4 is worse, +0.1015 nats; nvfp4 is equivalent within 0.01; odd is"
        " undecided."
    )


def test_what_does_not_stand_after_holm_is_a_verdict_nowhere(book):
    """.0365 ±.0224 alone, among eight that say nothing."""
    add(book, "bf16", BASE, None)
    barely = {0: 0.051, 1: 0.02, 2: 0.03, 3: 0.045}
    add(book, "barely", {seed: BASE[seed] + barely[seed] for seed in BASE})
    (alone,) = [arm for arm in Answer(book).arms if arm.name == "barely"]
    assert alone.verdict.kind == "worse"
    assert Answer(book).verdict().startswith("Worse. barely instead of bf16 raises val/loss by 0.0365 nats")
    noisy(book, 8)
    answer = Answer(book)
    (among,) = [arm for arm in answer.arms if arm.name == "barely"]
    assert (among.verdict.kind, among.gap) == ("undecided", alone.gap)
    row = next(row for row in cells(answer.effects()) if row["arm"] == "barely")
    assert row["p (Holm)"][1] == among.verdict.p > 0.05
    assert (among.verdict.alone, row["verdict"]) == ("worse", "undecided")
    assert "worse alone, not after Holm's correction" in notes(answer.effects())
    assert '<tr class="undecided"><td>barely' in answer.effects().html()
    assert "barely" not in answer.verdict()
    assert "Not answered yet." in answer.verdict()
    assert "nothing is decided; changes from " in answer.verdict()
    comparisons = answer.comparisons()
    assert comparisons is not None
    assert {*comparisons.classes} == {"undecided"}
    assert 'class="worse"' not in comparisons.html()


def test_equivalence_is_corrected_too(book):
    """Within .01 alone (.0050 ±.0047), not beside eight more comparisons."""
    add(book, "bf16", BASE, None)
    near = {0: 0.0018, 1: 0.0082, 2: 0.0035, 3: 0.0065}
    add(book, "near", {seed: BASE[seed] + near[seed] for seed in BASE})
    assert Answer(book).arms[1].verdict.kind == "equivalent"
    noisy(book, 8)
    (among,) = [arm for arm in Answer(book).arms if arm.name == "near"]
    assert among.verdict.kind == "undecided"
    assert among.verdict.alone == "equivalent"


def test_a_grids_verdict_states_each_knobs_main_effect_and_nothing_else(book):
    whole_grid(book)
    answer = Answer(book)
    assert answer.answer.text.partition(": ")[0] == "Averaged over other knobs, by val/loss"
    stated = answer.answer.text.removesuffix(".").partition(": ")[2].split("; ")
    assert [part.split(",")[0] for part in stated] == [
        "stochastic rounding is worse",
        "rotation is equivalent within 0.01",
    ]
    rows = {row["knob"]: row for row in answer.averages().rows if row[""] == "main effect"}
    assert [rows[knob]["verdict"] for knob in ("rht", "sr")] == ["equivalent", "worse"]
    assert [effect.effect.mean for effect, _ in answer.main_effects] == [
        rows[knob]["effect"][1] for knob in ("rht", "sr")
    ]


def test_a_page_has_a_column_for_each_knob_in_place_of_names_and_a_file_has_the_names(book, tmp_path):
    add(book, "bf16", BASE, None, knobs={"recipe": "bf16"})
    for rht, sr in itertools.product((True, False), repeat=2):
        add(book, label({"rht": rht, "sr": sr}), ALIKE, knobs={"rht": rht, "sr": sr})
    answer = Answer(book, tmp_path)
    page = answer.show("Every arm", answer.effects())
    heads = re.findall(r"<button[^>]*>(.*?)</button>", page.html())
    assert heads[:4] == ["arm", "rht", "sr", "val/loss, nats"]
    rows = re.findall(r"<tr[^>]*><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td>", page.html())
    assert sorted(rows) == [
        ("", "false", "false"),
        ("", "false", "true"),
        ("", "true", "false"),
        ("", "true", "true"),
        ("bf16", "", ""),
    ]
    lines = (tmp_path / "effects-val-loss.csv").read_text().splitlines()
    assert (lines[0].split(",")[:2], lines[2].split(",")[0]) == (["arm", "val/loss"], "rht=true sr=true")


def test_arms_that_set_different_knobs_keep_their_names(book):
    whole_grid(book)
    add(book, "another", BASE, knobs={"block": "1x8", "sr": True})
    answer = Answer(book)
    assert '<button type="button">rht</button>' not in answer.show("Every arm", answer.effects()).html()


@pytest.mark.parametrize(
    ("direction", "left", "right"), [("minimize", "← better", "worse →"), ("maximize", "← worse", "better →")]
)
def test_the_ends_of_the_axis_say_which_is_better_and_marks_have_the_verdicts_shapes(
    book, direction, left, right
):
    book.describe(metric=json.dumps({"name": "val/loss", "min_effect": 0.01, "direction": direction}))
    add(book, "bf16", BASE, None)
    add(book, "mxfp4", WORSE)
    add(book, "nvfp4", ALIKE)
    html = Answer(book).comparisons().html()
    assert re.findall(r'<text class="end"[^>]*>(.*?)</text>', html) == [left, right]
    drawn = re.findall(r'<svg class="(\w+)".*?aria-label="gap to bf16, (\w+).*?class="mean" d="(.{6})', html)
    worse = "worse" if direction == "minimize" else "better"
    assert {(kind, arm) for kind, arm, _ in drawn} == {(worse, "mxfp4"), ("equivalent", "nvfp4")}
    assert len({shape for _, _, shape in drawn}) == 1 + (worse == "worse")


def test_the_seeds_for_a_verdict_are_the_same_number_everywhere(book):
    add(book, "bf16", BASE, None)
    add(book, "close", {seed: BASE[seed] + gap for seed, gap in enumerate((0.012, -0.009, 0.004, 0.001))})
    answer = Answer(book)
    needed = answer.arms[1].verdict.needed
    assert 4 < needed.low < needed.count < needed.high
    (row,) = answer.power().rows
    assert "true spread" in answer.power().caption
    assert (
        row["seeds needed"]
        == cells(answer.effects())[1]["seeds needed"]
        == (needed_text(needed), needed.count)
    )
    assert needed_text(needed) in summary_markdown(book)


def test_an_effect_whose_square_overflows_takes_more_seeds_than_are_named(book):
    book.describe(metric='{"name": "val/loss", "min_effect": 0.1}')
    add(book, "bf16", BASE, None)
    add(book, "vast", {0: 1e156, 1: 2e156, 2: 9e156})
    answer = Answer(book)
    assert "over 200 seeds" in answer.answer.settling.text
    assert len(answer.verdict()) < 300


def test_a_note_names_the_seeds_of_the_table_among_several_arms(book):
    """Open arms beside a decided one, which counts in neither correction for the open."""
    add(book, "bf16", BASE, None)
    add(book, "mxfp4", WORSE)
    for place in range(4):
        gaps = [0.012 * math.sin(2 + 3 * place + 5 * seed) for seed in BASE]
        add(book, f"open {place}", {seed: BASE[seed] + gaps[seed] for seed in BASE})
    arms = summaries(book)
    assert {arm.verdict.kind for arm in arms[2:]} == {"undecided"}
    assert len({arm.verdict.needed for arm in arms[2:]}) > 1
    assert [Gaps(book).of(place)[1] for place in range(2, 7)] == [arm.verdict for arm in arms[1:]]


def test_an_arm_that_is_not_over_counts_as_open_in_a_note(book):
    add(book, "bf16", BASE, None)
    add(
        book,
        "barely",
        {seed: BASE[seed] + more for seed, more in {0: 0.051, 1: 0.02, 2: 0.03, 3: 0.045}.items()},
    )
    assert Gaps(book).of(2)[1].kind == "worse"
    for number in range(8):
        book.add_member(book.add_arm(f"waiting {number}", {}, 1, None), 0, f"waiting/{number}", SPEC)
    assert (Gaps(book).of(2)[1].kind, Gaps(book).of(2)[1].alone) == ("undecided", "worse")


def test_wilcoxons_p_is_corrected_over_all_arms_and_not_over_those_shown(book):
    """The smallest p of 8 pairs, 2 / 2^8, times three; the arms that are shown are those with the best means."""
    base = {seed: 3 + 0.1 * math.sin(seed) for seed in range(8)}
    add(book, "bf16", base, None)
    for place in range(3):
        add(
            book,
            f"lower {place}",
            {seed: loss - 0.1 - 0.01 * place - 0.001 * seed for seed, loss in base.items()},
        )
    add(book, "shift", {seed: loss - 5.0 for seed, loss in base.items()})
    rows = {row["arm"]: row["Wilcoxon, p (Holm)"] for row in Answer(book, most_arms=2).checks().rows}
    assert rows == {"lower 2": ("0.023", pytest.approx(3 * 2 / 2**8)), "shift": ""}


@pytest.mark.parametrize(("interval", "ranked"), [("t", True), ("split:4", False), ("sequence", False)])
def test_wilcoxons_p_is_left_out_while_seeds_grow(interval, ranked, book):
    """It has no correction for looks: 11 % of sweeps without an effect are below 5 % at one of four."""
    book.describe(interval=interval)
    base = {seed: 3 + 0.1 * math.sin(seed) for seed in range(8)}
    add(book, "bf16", base, None)
    add(book, "lower", {seed: loss - 0.1 - 0.001 * seed for seed, loss in base.items()})
    table = Answer(book).checks()
    assert ("Wilcoxon, p (Holm)" in table.markdown()) == ranked
    assert ("valid at one look" in table.caption) != ranked


def test_averages_of_counts_that_agree_are_not_the_same_numbers(book):
    """Both knobs move every run, and their averages over the other agree."""
    add(book, "bf16", {0: 1.0, 1: 2.0}, None, knobs={"recipe": "bf16"})
    for rht, sr, second in ((True, True, 3.0), (True, False, 4.0), (False, True, 4.0), (False, False, 3.0)):
        add(book, f"rht={rht} sr={sr}", {0: second - 2, 1: second}, knobs={"rht": rht, "sr": sr})
    assert [verdict.kind for _, verdict in Answer(book).main_effects] == ["unjudged", "unjudged"]


def test_a_knob_that_changes_no_run_gives_the_same_numbers_on_average_too(book):
    add(book, "bf16", BASE, None, knobs={"recipe": "bf16"})
    for rht, sr in ((True, True), (True, False), (False, True), (False, False)):
        add(book, f"rht={rht} sr={sr}", WORSE if sr else ALIKE, knobs={"rht": rht, "sr": sr})
    answer = Answer(book)
    assert [verdict.kind for _, verdict in answer.main_effects] == ["same", "worse"]
    assert answer.averages().rows[-1]["verdict"] == "same"


def test_a_searchs_arm_that_learned_nothing_has_no_colour(book):
    book.describe(search="tpe")
    add(book, "bf16", BASE, None)
    add(book, "bad", {seed: value + 6 for seed, value in WORSE.items()}, optuna=1)
    learn(book, 4.0)
    answer = Answer(book)
    assert (answer.arms[1].verdict.kind, answer.arms[1].colour) == ("worse", "")
    assert "<tr><td>bad" in answer.effects().html()
    (column,) = [
        column
        for column in summary_table(answer.arms, answer.metric).terminal().columns
        if column.header == "verdict"
    ]
    assert [str(cell.style) for cell in column.cells] == ["dim", ""]


def test_where_nothing_was_learned_no_arm_is_judged(book):
    whole_grid(book)
    assert [verdict.kind for _, verdict in Answer(book).main_effects] == ["equivalent", "worse"]
    learn(book, 2.5)
    answer = Answer(book)
    assert {arm.verdict.kind for arm in answer.arms} == {"unjudged"}
    assert {arm.verdict for arm in answer.arms[1:]} == {UNLEARNED}
    assert {contrast.verdict for contrast in answer.contrasts} == {UNLEARNED}
    assert answer.verdict().startswith("No answer: nothing was learned. ")
    assert {verdict for _, verdict in answer.main_effects} == {UNLEARNED}
    assert undecided(book) == []
    assert notes(answer.averages()) == {REASONS["nothing_learned"].text}
    assert REASONS["nothing_learned"].text in summary_markdown(book)


def test_the_lowest_loss_where_nothing_was_learned_is_that_of_every_arm(book):
    """The baseline ends lowest, and turns none of the grid's knobs."""
    whole_grid(book)
    learn(book, 2.5)
    best = min(Answer(book).arms, key=lambda arm: arm.loss)
    assert best.name == "bf16"
    assert f"The lowest loss is {best.loss:.4f} (bf16)" in Answer(book).verdict()


def test_a_knob_of_rules_is_compared_by_the_names_of_its_arms(book):
    add(book, "bf16", BASE, None, knobs={"recipe": "bf16"})
    for name, count in (("no layers", 0), ("down projections", 1)):
        rules = [{"match": {"name": "*.down"}, "keep": "bf16"}] * count
        losses = {seed: value + 0.1 + 0.01 * count for seed, value in BASE.items()}
        add(book, name, losses, knobs={"recipe.layers.rules": rules})
    ((effect, _),) = Answer(book).main_effects
    assert effect.change == '"down projections" instead of "no layers"'


def test_a_grid_that_learned_nothing_has_no_verdict_though_its_baseline_learned(book):
    """The baseline ends near 3.1, every cell of the grid near 9."""
    add(book, "bf16", BASE, None, knobs={"recipe": "bf16"})
    for place, (rht, sr) in enumerate(((True, True), (True, False), (False, True), (False, False))):
        losses = {
            seed: value + 6 + 0.1 * sr + 0.002 * math.sin(3 * seed + place) for seed, value in BASE.items()
        }
        add(book, f"rht={rht} sr={sr}", losses, knobs={"rht": rht, "sr": sr})
    learn(book, 4.0)
    answer = Answer(book)
    assert {arm.verdict.kind for arm in answer.arms[1:]} == {"worse"}
    assert notes(answer.averages()) == {REASONS["nothing_learned"].text}
    contrasts = [line for line in answer.comparisons().rows if not line.group.startswith("gap")]
    assert {line.verdict.reason for line in contrasts} == {"nothing_learned"}
    assert answer.verdict().startswith("No answer: nothing was learned. ")


def test_an_unrelated_arm_that_learned_gives_no_verdict_to_two_that_did_not(book):
    add(book, "bf16", {seed: value + 5 for seed, value in BASE.items()}, None)
    add(book, "bad", {seed: value + 5 for seed, value in WORSE.items()})
    add(book, "fine", WORSE)
    learn(book, 4.0)
    _, bad, fine = Answer(book).arms
    assert (bad.verdict, fine.verdict.kind) == (UNLEARNED, "better")
    assert Gaps(book).of(2)[1] == UNLEARNED
    assert undecided(book) == []
    figures = [
        Published(arm="bad", against=against, metric="val/loss", value=value, source="a paper")
        for against, value in (("bf16", "higher"), (None, 8.2))
    ]
    assert [line.verdict.reason for line in replications(book, figures)] == ["nothing_learned"] * 2
    assert "bad has no verdict (no answer: nothing was learned)" in Answer(book).verdict()


def test_a_report_names_the_model_that_was_trained_and_not_the_fields_that_it_replaces():
    model = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2}
    of_run = {"context": 32, "steps": 300, "layers": 4, "width": 128}
    spec = RecordedSpec.of({"workload": {"gpt": of_run | {"model": model}}})
    assert title(spec) == "gpt qwen3 with 2 layers of width 64, 300 steps"
    assert described(spec) == "gpt (model qwen3, layers 2, width 64, context 32, steps 300)"
    named = RecordedSpec.of({"workload": {"finetune": {"model": "org/name", "steps": 5}}})
    assert (title(named), described(named)) == (
        "finetune org/name, 5 steps",
        "finetune (model org/name, steps 5)",
    )
    sized = "gpt with 4 layers of width 128"
    assert title(RecordedSpec.of({"workload": {"gpt": of_run}})) == f"{sized}, 300 steps"
    mixed = of_run | {"experts": {"count": 8, "top_k": 2}}
    assert title(RecordedSpec.of({"workload": {"gpt": mixed}})) == f"{sized} and 8 experts, 300 steps"
    small = "gpt (layers 4, width 128, context 32, steps 300, data"
    for data, name in (("fineweb", "fineweb"), ({"train": "/x/a.bin", "val": "/x/b.bin"}, "a.bin")):
        shown = described(RecordedSpec.of({"workload": {"gpt": of_run | {"data": data}}}))
        assert shown == f"{small} {name})"


@every(
    data__name=(
        ({"train": "/x/a.bin", "val": "/x/b.bin"}, "a.bin"),
        ({"bytes_per_token": None, "dtype": "uint16", "train": "/x/a.bin", "val": "/x/b.bin"}, "a.bin"),
        ({"column": "text", "config": None, "dataset": "org/books", "tokenizer": "gpt2"}, "books"),
        ({"column": None, "text": "/x/c.txt", "tokenizer": "bytes"}, "c.txt"),
        ({"prepared": "/x/folder"}, "folder"),
        ("stdlib", "stdlib"),
    )
)
def test_data_have_the_name_of_their_source(data, name):
    assert source_name(data) == name


@every(
    text__arms__line=(
        ("recipe: nvfp4", {"a": {"rht": True}}, "nvfp4 (a) against bf16"),
        (
            "recipe: {from: mxfp4, rht: true}",
            {"rht=true": {"rht": True}},
            "mxfp4 changed (rht varied in 1 arm) against bf16",
        ),
        ("recipe: nvfp4", {"nvfp4": {}}, "nvfp4 against bf16"),
        (
            "recipe: nvfp4",
            {"mxfp4": {"recipe": "mxfp4"}, "hif4": {"recipe": "hif4"}},
            "mxfp4, hif4 against bf16",
        ),
        ("question: none", {f"arm {n}": {} for n in range(5)}, "5 arms against bf16"),
    )
)
def test_a_page_says_in_one_line_what_was_compared(text, arms, line, tmp_path):
    with closing(Ledger(tmp_path / f"{len(line)}" / "ledger.db")) as book:
        book.describe(**{"experiment.yaml": text, "metric": '{"name": "val/loss"}'})
        add(book, "bf16", BASE, None)
        for name, knobs in arms.items():
            add(book, name, ALIKE, knobs=knobs)
        add(book, "known bad: mxfp4", WORSE, role="bad")
        shown = compared(book, summaries(book))
    assert shown == f"Compared: {line} · gpt · 4 seeds per arm"


def test_the_line_of_a_sweep_whose_arms_have_baselines_of_their_own_names_them_once(book):
    for number, (name, seeds) in enumerate((("lr=0.1", 4), ("lr=0.2", 3)), 1):
        losses = {seed: BASE[seed] for seed in range(seeds)}
        add(book, f"bf16 {name}", losses, None, {"recipe": "bf16"})
        add(book, name, losses, 2 * number - 1, {"workload.lr": float(name[3:])})
    assert (
        compared(book, summaries(book))
        == "Compared: lr varied in 2 arms against bf16 · gpt · 3 to 4 seeds per arm"
    )


@pytest.mark.parametrize(("share", "kind"), [("0.1", "warning"), ("0.8", None), ("", None)])
def test_an_answer_says_that_a_recipe_quantises_little_of_a_model(share, kind, book):
    book.describe(covered=share)
    add(book, "bf16", BASE, None)
    add(book, "mxfp4", WORSE)
    found = [check for check in checks(book, summaries(book)) if "matrix weights" in check.text]
    assert [check.kind for check in found] == ([kind] if kind else [])
    assert all(f"{float(share):.0%}" in check.text for check in found)


@pytest.mark.parametrize(("short", "allowed"), [(None, False), (50, False), (50, True), (100, False)])
def test_runs_that_end_early_are_named_and_unequal_ones_have_no_verdict(short, allowed, book):
    """The arm of 50 steps is better by what it computed, and worse by its last loss: the baseline has 100."""
    metric = {"name": "val/loss", "min_effect": 0.01, "any_length": allowed}
    book.describe(metric=json.dumps(metric))
    spec = json.dumps({"workload": {"python": {"steps": 200 if short == 100 else 100}}})
    base = book.add_arm("bf16", {}, None, None)
    arm = book.add_arm("nvfp4", {}, base, None)
    for seed in range(4):
        for number, last in ((base, 100), (arm, short or 100)):
            loss = 3.0 + 0.01 * seed + (0.1 + 0.001 * seed) * (number == arm)
            finish(book, number, seed, [(1, {"val/loss": 4.0}), (last, {"val/loss": loss})], spec=spec)
    verdict = summaries(book)[1].verdict
    unequal = short == 50 and not allowed
    assert (verdict.kind, verdict.reason) == (("unjudged", "length") if unequal else ("worse", None))
    named = [check.text for check in checks(book, summaries(book)) if "ended early" in check.text]
    assert len(named) == bool(short)
    assert all(f"{4 if short == 50 else 8} of 8 runs" in text for text in named)
    assert Gaps(book).of(arm)[1].kind == verdict.kind
    pair = summaries(book)
    (of_knob,) = judge_learned([(pair[1].gap, None, pair)], book.facts.metric)
    assert (of_knob.reason == "length") == unequal
    claim = Published(arm="nvfp4", against="bf16", metric="val/loss", value="lower", source="a paper")
    (beside,) = replications(book, [claim])
    assert beside.verdict.kind == ("unjudged" if unequal else "disagrees")
    answer = Answer(book).verdict()
    assert answer.startswith("No answer: nvfp4 ended at an earlier step than other runs") == unequal


@pytest.mark.parametrize("recorded", [True, False])
def test_without_the_files_of_trials_a_model_that_learned_nothing_has_not_learned(recorded, tmp_path):
    """The figure that the check needs is in the ledger; one without it says that it is unknown."""
    sweep(tiny(tmp_path, shape={"steps": 2}), tmp_path / "runs")
    with closing(ledger(tmp_path / "runs")) as book:
        store = Store(tmp_path / "runs")
        floors = {m.trial: context_free(store.result(m.id)) for m in book.members()}
        assert book.context_free() == floors
        assert all(floors.values())
    statement = "UPDATE context_free SET loss = 0.1" if recorded else "DELETE FROM context_free"
    with closing(sqlite3.connect(tmp_path / "runs" / "sweeps" / "tiny" / "ledger.db")) as db, db:
        db.execute(statement)
    shutil.rmtree(tmp_path / "runs" / "trials")
    with closing(ledger(tmp_path / "runs")) as book:
        arms = summaries(book)
        check = next(check for check in checks(book, arms) if "learned" in check.text)
    assert (check.kind, "unknown" in check.text) == (("failed", False) if recorded else ("warning", True))
    assert all(arm.floor_unknown != recorded for arm in arms)
    if recorded:
        assert {arm.verdict.reason for arm in arms if arm.gap} == {"nothing_learned"}


def test_an_arm_that_alone_learned_nothing_keeps_its_verdict_and_is_marked(book):
    add(book, "bf16", BASE, None)
    add(book, "mxfp4", WORSE)
    learn(book, 3.15)  # between the two: 3.0875 and 3.1890
    bf16, mxfp4 = Answer(book).arms
    assert (bf16.learned, mxfp4.learned, mxfp4.verdict.kind) == (True, False, "worse")
    assert mxfp4.verdict.reference == 3.15
    assert "mxfp4 learned nothing" in said(book)
    speed = summaries(book, Metric(name="throughput/tokens_per_s"))
    assert all(arm.learned for arm in speed)


def test_the_sign_of_a_percentage_is_that_of_its_gap_where_values_are_negative(book):
    add(book, "bf16", {seed: -value for seed, value in BASE.items()}, None)
    add(book, "lower", {seed: -value - 0.1 * (1 + 0.1 * seed) for seed, value in BASE.items()})
    row = cells(Answer(book).effects())[1]
    assert row["gap to baseline"][1] < 0
    assert row["in percent"][1] < 0


def test_one_seed_and_one_arm_are_counted_as_one(book):
    add(book, "bf16", {0: 3.0}, None)
    assert "1 arm of workload gpt" in Answer(book).method().text
    assert "1 seed per arm" in Answer(book).method().text
    add(book, "a", {0: 3.1})
    assert "over 1 seed;" in said(book)
    assert "1 seeds" not in said(book) + Answer(book).method().text


def test_tokens_to_match_and_percent_are_those_of_the_curves(book):
    """Each curve falls .2 in a doubling from 320 tokens on: .1015 behind is a factor sqrt 2 and a little."""
    add(book, "bf16", BASE, None)
    add(book, "mxfp4", WORSE)
    row = cells(Answer(book).effects())[1]
    by_seed = [2 ** ((WORSE[s] - BASE[s]) / 0.2) - 1 for s in BASE]
    assert row["tokens to match"][1] == pytest.approx(sum(by_seed) / 4, rel=1e-6)
    assert row["in percent"][1] == pytest.approx(sum(WORSE[s] / BASE[s] - 1 for s in BASE) / 4)


def test_no_tokens_to_match_if_the_baseline_never_was_as_bad_as_one_seed(book):
    add(book, "bf16", BASE, None)
    add(book, "mxfp4", WORSE | {3: 13.0})
    row = cells(Answer(book).effects())[1]
    assert row["gap to baseline"][1] > 2
    assert not row.get("tokens to match")


@pytest.mark.parametrize(
    ("fill", "expected"),
    [
        (lambda b: add(b, "bf16", BASE, None), "No answer: only one arm has finished"),
        (lambda b: (add(b, "bf16", {0: 3.0}, None), add(b, "a", {0: 3.1})), "One seed per arm"),
        (
            lambda b: (add(b, "bf16", BASE, None, status="diverged"), add(b, "a", BASE, status="diverged")),
            "No answer: every run diverged",
        ),
        (
            lambda b: (add(b, "bf16", BASE, None, status="failed"), add(b, "a", BASE, status="failed")),
            "Failed: all 8 runs failed.",
        ),
        (
            lambda b: (add(b, "bf16", BASE, None, status="failed"), add(b, "a", BASE, status="pending")),
            "Failed: 4 of 8 runs failed, and the others have not finished.",
        ),
        (lambda b: add(b, "bf16", BASE, None, status="pending"), "No answer yet: no run has finished."),
        (
            lambda b: (add(b, "bf16", BASE, None), add(b, "a", {0: 3.1}), add(b, "b", {1: 3.1})),
            "No answer yet: no arm shares two finished seeds with its baseline.",
        ),
    ],
    ids=["one arm", "one seed", "all diverged", "all failed", "some failed", "none finished", "one pair"],
)
def test_where_nothing_can_be_claimed_that_is_said_and_why(book, fill, expected):
    fill(book)
    answer = Answer(book)
    assert answer.verdict().startswith(expected)
    for table in (
        answer.averages(),
        answer.components(),
        answer.power(),
        answer.checks(),
        answer.published(),
    ):
        assert table is None or table.html()
    assert answer.effects().html()
    assert answer.method().text


@every(levels=[2, 3], harm=[0.0, 0.1])
def test_only_a_grid_with_more_than_noise_is_mapped(levels, harm, tmp_path):
    """Noise of 0.01 on five seeds; the rotation does `harm`. Of two levels each, a map is four numbers."""
    with closing(Ledger(tmp_path / "sweeps" / "x" / "ledger.db")) as book:
        book.describe(metric='{"name": "val/loss"}', search="")
        draw = random.Random(levels)
        add(book, "bf16", dict.fromkeys(range(5), 3.0), None, knobs={"recipe": "bf16"})
        for size, rht in itertools.product([16, 32, 64][:levels], (False, True)):
            values = {seed: 3 + harm * rht + draw.gauss(0, 0.01) for seed in range(5)}
            add(book, f"size={size} rht={rht}", values, knobs={"size": size, "rht": rht})
        assert (Answer(book).mapped_grid is not None) == (levels == 3 and harm > 0)


def test_published_and_measured_stand_side_by_side_with_interval_and_verdict(book):
    add(book, "bf16", BASE, None)
    add(book, "mxfp4", WORSE)
    figure = {"arm": "mxfp4", "against": "bf16", "metric": "val/loss", "source": "a paper"}
    book.describe(published=json.dumps([{**figure, "value": value} for value in ("lower", 0.05)]))
    rows = [
        [cell[0] if isinstance(cell, tuple) else cell for cell in row.values()]
        for row in cells(Answer(book).published())
    ]
    assert rows == [
        ["mxfp4 minus bf16", "val/loss", "lower", "+0.1015 ±0.0021", "disagrees", "a paper"],
        ["mxfp4 minus bf16", "val/loss", "+0.05", "+0.1015 ±0.0021", "agrees", "a paper"],
    ]
    assert Answer(book).published().notes == [[], ["larger here than published"]]


def test_what_is_missing_and_what_diverged_is_said_with_its_seeds(book):
    add(book, "bf16", BASE, None)
    arm = add(book, "a", {0: 3.1, 1: 3.2})
    for seed, status in ((2, "diverged"), (3, "failed")):
        book.settle(book.add_member(arm, seed, f"a/{seed}", SPEC), status, "why")
    text = said(book)
    assert "**Incomplete:** 1 of 8 runs are missing (1 failed)" in text
    assert "**Diverged:** a on seed 2." in text
    assert (Answer(book).arms[1].verdict.diverged, Answer(book).arms[1].verdict.seeds) == (1, 4)


def test_a_metric_that_some_finished_runs_lack_is_said(book):
    add(book, "bf16", BASE, None)
    arm = add(book, "a", {0: 3.1, 1: 3.2})
    book.settle(book.add_member(arm, 2, "a/2", SPEC), "done")
    assert "**val/loss is missing** in finished runs of a." in said(book)


def test_a_searchs_best_arm_is_not_declared_on_the_data_that_chose_it(book):
    book.describe(search="tpe")
    add(book, "bf16", BASE, None, knobs={"recipe": "bf16"})
    for number in range(3):
        add(
            book,
            f"lr={number}",
            {s: v - 0.1 * number for s, v in WORSE.items()},
            knobs={"workload.lr": number},
            optuna=number,
        )
    verdict = Answer(book).verdict()
    assert verdict.startswith("The best of 3 arms is lr=2, ")
    assert "exploratory until the arm runs again on fresh seeds (with search.confirm, such as 5)" in verdict
    again = add(book, "again", dict.fromkeys(range(10, 14), 3.0), None)
    add(
        book,
        "confirm: lr=2",
        {seed + 10: 2.9 + 0.001 * seed for seed in range(4)},
        again,
        role="confirmed",
    )
    found = (
        "The search found an improvement. On fresh seeds, its best arm (lr=2) instead of again lowers val/"
    )
    assert Answer(book).verdict().startswith(found)


def test_the_best_arm_of_a_search_has_all_of_its_seeds_and_keeps_the_constraints(book):
    """The mean of its only seed that did not diverge, and that of an arm over its limit, are the lowest of all."""
    limit = Constraint(metric="memory/rss", at_most=2.0)
    book.describe(search="tpe", constraints=json.dumps([limit.model_dump()]))
    add(book, "bf16", BASE, None)
    lost = add(book, "lost", {0: 1.0}, knobs={"lr": 0}, optuna=0)
    for seed in (1, 2, 3):
        book.settle(book.add_member(lost, seed, f"lost/{seed}", SPEC), "diverged")
    large, small = (
        add(
            book,
            name,
            {seed: loss - 1.0 / knob for seed, loss in BASE.items()},
            knobs={"lr": knob},
            optuna=knob,
        )
        for name, knob in (("large", 1), ("small", 2))
    )
    for arm, size in ((large, 3.0), (small, 1.0)):
        for member in book.members(arm):
            book.record(member.trial, [{"step": 40, "time": 0.0, "metrics": {"memory/rss": size}}])
    assert Answer(book).verdict().startswith("The best of 1 arm is small, ")
    assert winner(book) == "small"
    for member in book.members(small):
        book.settle(member.trial, "failed")
    assert Answer(book).verdict().startswith("No answer yet: no arm of the search has all of its seeds")
    assert winner(book) is None


@pytest.mark.parametrize(
    ("more", "first"),
    [
        (-0.1, "The search found an improvement"),
        (0.1, "The search found no improvement"),
        (0.0, "The winner of the search is not confirmed"),
        (None, "The best of 1 arm is 0: rht, "),
    ],
)
def test_the_headline_says_of_a_winner_what_the_fresh_seeds_say(book, more, first):
    """Better than its baseline on the seeds that chose it, whatever the others say; without fresh pairs there is nothing to confirm."""
    book.describe(search="tpe")
    seeds = {seed: loss + 0.001 * seed for seed, loss in BASE.items()}
    add(book, "bf16", BASE | {seed + 10: loss for seed, loss in BASE.items()}, None)
    add(book, "0: rht", {seed: loss - 0.1 for seed, loss in seeds.items()}, knobs={"rht": True}, optuna=0)
    fresh = {seed + 10: loss + (more or 0) for seed, loss in seeds.items()}
    again = book.add_arm("confirm: 0: rht", {"rht": True}, 1, None, "confirmed")
    for seed, loss in fresh.items():
        trial = book.add_member(again, seed, f"again/{seed}", SPEC)
        book.record(trial, [{"step": 40, "time": 0.0, "metrics": {"val/loss": loss}}])
        book.settle(trial, "failed" if more is None else "done")
    verdict, table = Answer(book).verdict(), Answer(book).comparisons()
    assert verdict.startswith(first)
    assert "confirm: " not in (table.html() if table else "")
    assert ("lowers val/loss" in verdict) == (more == -0.1)
    assert ("not confirmed: on fresh seeds it has only 0 pairs with its baseline" in verdict) == (
        more is None
    )


def test_a_comparison_without_a_verdict_is_not_counted_as_undecided(book):
    """Seven comparisons: four that are undecided, two on too few distinct values, one worse."""
    add(book, "bf16", BASE, None)
    noisy(book, 4)
    for number in range(2):
        add(book, f"step {number}", {seed: loss + 0.1 * (seed % 2) for seed, loss in BASE.items()})
    add(book, "mxfp4", WORSE)
    answer = Answer(book)
    assert Counter(arm.verdict.kind for arm in answer.arms[1:]) == {"undecided": 4, "unjudged": 2, "worse": 1}
    assert answer.answer.lead == "Answered in part, 1 of 7."
    worse, undecided_, unjudged = answer.answer.text.partition(": ")[2].removesuffix(".").split("; ")
    assert worse.startswith("mxfp4 is worse, +0.1")
    assert undecided_ == "4 are undecided"
    assert unjudged == "step 0 and step 1 have no verdict"


def test_seeds_are_promised_to_undecided_comparisons_though_others_have_no_verdict(book):
    add(book, "bf16", BASE, None)
    for number in range(6):
        gaps = [0.012 * math.sin(2 + 3 * number + 5 * seed) for seed in BASE]
        add(book, f"open {number}", {seed: BASE[seed] + gaps[seed] for seed in BASE})
    add(book, "one", {0: 3.1, 1: 3.2})
    answer = Answer(book)
    needed = [arm.verdict.needed.count for arm in answer.arms[1:7]]
    assert answer.answer.settling.seeds == max(needed)
    assert f"With {max(needed)} seeds in all, each undecided comparison has an 80 % chance" in said(book)
    assert answer.verdict().endswith("6 are undecided; one has no verdict.")


def test_provenance_counts_cost_and_names_the_data(book):
    add(book, "bf16", BASE, None)
    facts = {row["what"]: row["which"] for row in Answer(book).provenance().rows}
    assert facts["cost"] == "4.00 worker-hours"
    assert facts["data"] == "abc"


def test_a_share_of_the_baseline_says_what_matters(book):
    book.describe(metric='{"name": "val/loss", "min_effect": "10%"}')
    add(book, "bf16", BASE, None)
    add(book, "mxfp4", WORSE)
    arm = Answer(book).arms[1]
    assert arm.margin == pytest.approx(0.1 * sum(BASE.values()) / 4)
    assert arm.verdict.kind == "equivalent"


def leave(book, *left: tuple[str, int, str]) -> None:
    """Files that runs left: (arm, seed, file)."""
    for arm, seed, name in left:
        folder = book.path.parents[2] / "trials" / arm / f"{seed}" / "artifacts"  # an id is `arm/seed` here
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{arm} {seed} {name}")


def test_of_what_runs_left_each_arm_shows_the_pictures_of_its_first_seed_that_is_done(book):
    add(book, "bf16", BASE, None)
    add(book, "nvfp4", WORSE)
    add(book, "late", {2: 3.3, 1: 3.2})
    add(book, "lost", BASE, status="diverged")
    leave(
        book,
        ("bf16", 0, "grid.png"),
        ("bf16", 0, "more.png"),
        ("bf16", 0, "notes.txt"),
        ("bf16", 1, "grid.png"),
    )
    leave(
        book,
        ("nvfp4", 1, "grid.png"),
        ("late", 1, "grid.png"),
        ("late", 2, "grid.png"),
        ("lost", 0, "grid.png"),
    )
    found = {
        gallery.name: [(title, path.read_text()) for title, path in gallery.pictures]
        for gallery in Answer(book).galleries()
    }
    # Seed 0 of nvfp4 left nothing: another seed's picture beside the first one's would be of other weights.
    assert found == {
        "grid": [("bf16", "bf16 0 grid.png"), ("late", "late 1 grid.png")],
        "more": [("bf16", "bf16 0 more.png")],
    }


def test_where_no_run_left_anything_there_is_no_section(book):
    add(book, "bf16", BASE, None)
    assert Answer(book).galleries() == []
    assert Answer(book).show("Sample outputs", Answer(book).galleries()).html() == ""


def test_a_loss_is_in_nats_where_its_workload_says_so(book):
    add(book, "bf16", BASE, None)
    assert Answer(book).unit == "nats"


def test_a_loss_of_pixels_is_in_no_nats(tmp_path, monkeypatch):
    monkeypatch.setitem(add.__globals__, "SPEC", json.dumps({"workload": {"python": {"steps": 1}}}))
    book = Ledger(tmp_path / "sweeps" / "y" / "ledger.db")
    book.describe(question="Does it?", metric='{"name": "val/loss"}', search="")
    add(book, "bf16", BASE, None)
    add(book, "mxfp4", WORSE)
    assert (
        "mxfp4 instead of bf16 raises val/loss by 0.1015 (95 % CI 0.0994 to 0.1036)."
        in Answer(book).verdict()
    )
    book.close()


def test_what_guards_did_is_told_a_run_a_line(book):
    add(book, "bf16", BASE, None)
    assert Answer(book).interventions() is None
    arm = add(book, "nvfp4", ALIKE)
    trial = book.add_member(arm, 2, "nvfp4/2", SPEC)
    for step in (5, 12, 31):
        book.record(
            trial,
            [
                {
                    "step": step,
                    "time": 0.0,
                    "metrics": {},
                    "events": [f"loss {step} is too much; step skipped"],
                }
            ],
        )
    (row,) = Answer(book).interventions().rows
    assert (row["arm"], row["seed"], row["interventions"]) == ("nvfp4", "2", ("3", 3))
    assert (row["first step"][1], row["last step"][1], row["the first"]) == (
        5,
        31,
        "loss 5 is too much; step skipped",
    )


@every(knob=[{"choice": [{}]}, [], {}])
def test_a_knob_to_ask_for_is_a_name(knob, tmp_path):
    (problem,) = problems(write(tmp_path, answer={"knob": knob}))
    assert "answer.knob: " in str(problem)


def test_presets_are_compared_with_each_other_below_their_gaps(tmp_path):
    """The headline is about the gaps to the baseline unless the file asks for the knob `recipe`."""
    for name, asked in (("gaps", None), ("presets", {"knob": "recipe"})):
        keys = {"ablate": {"recipe": ["nvfp4", "mxfp8"]}, "against": "bf16", "seeds": 2, "answer": asked}
        sweep(tiny(tmp_path, name, **keys), tmp_path)
        book = ledger(tmp_path, name)
        found = [(line.group, line.label, line.asked) for line in Answer(book).comparisons().rows]
        book.close()
        gaps = {("gap to bf16", "nvfp4", False), ("gap to bf16", "mxfp8", False)}
        presets = ("recipe", '"mxfp8" instead of "nvfp4"', asked is not None)
        assert {*found} == gaps | {presets}
        assert found.index(presets) == (0 if asked else 2)


def test_runs_that_diverged_have_their_place_and_the_baselines_fate(tmp_path):
    book = grid(tmp_path / "sweeps")
    (lost,) = divergences(book)
    assert (lost.member.name, lost.member.seed, lost.baseline) == ("rht=false sr=false", 2, "done")
    assert lost.of_baseline == "did not diverge"
    (row,) = answer_tables.divergences_table(book).rows
    assert (row["arm"], row["seed"], row["its baseline"]) == (lost.member.name, "2", lost.of_baseline)
    (base,) = [member for member in book.members() if member.baseline is None and member.seed == 2]
    book.settle(base.trial, "diverged", "non-finite loss or gradient at step 3: loss")
    first, second = divergences(book)
    assert (first.of_baseline, second.of_baseline) == ("it is the baseline", "diverged too")
    assert str(first) == "non-finite loss or gradient at step 3: loss; it is the baseline"
    book.close()


def test_a_run_from_elsewhere_that_diverged_has_no_pair_at_an_equal_seed(tmp_path):
    book = Ledger(tmp_path / "sweeps" / "x" / "ledger.db")
    base = book.add_arm("bf16", {}, None, None)
    book.settle(book.add_member(base, 0, "ours", "{}"), "done", None)
    theirs = book.add_arm("elsewhere: theirs", {}, base, None, "foreign")
    book.settle(book.add_member(theirs, 0, "theirs", "{}"), "diverged", "val/loss is nan")
    (lost,) = divergences(book)
    assert (lost.member.seed, lost.baseline) == (0, None)
    assert str(lost) == "val/loss is nan; the baseline is not paired with it"
    book.close()


RULES = {
    "first": [{"match": "class:Experts"}],
    "second": [{"match": "class:Attention"}],
    "third": [{"match": "class:Experts", "use": {"fprop": {"x": {"rounding": "stochastic"}}}}],
    "fourth": [{"match": "class:Experts", "use": {"fprop": {"x": {"rounding": "nearest"}}}}],
}


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        (("first", "second"), "within Experts: high precision → within Attention: high precision"),
        (("third", "fourth"), '"stochastic"'),  # two rules of equal words: all of both
    ],
)
def test_rules_for_layers_are_words_in_the_row_of_a_recipe(tmp_path, arms, said):
    book = Ledger(tmp_path / "sweeps" / "x" / "ledger.db")
    book.describe(question="Q?", metric='{"name": "val/loss"}')
    base = None
    for name in ("bf16", *arms):
        recipe = {} if base is None else {"fprop": {"x": {}}, "layers": {"rules": RULES[name]}}
        spec = json.dumps({"workload": {"gpt": {"layers": 2}}, "recipe": recipe})
        arm = book.add_arm(name, {}, base, None)
        base = base or arm
        for seed in range(2):
            finish(book, arm, seed, [(9, {"val/loss": 2.0 + seed})], spec=spec)
    text = Answer(book).recipes().rows[-1][f"differs from {arms[0]} in"]
    book.close()
    assert text.startswith("`layers.rules` ")
    assert said in text
