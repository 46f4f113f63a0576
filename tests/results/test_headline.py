"""One answer for every surface: about the comparison that the file names, below checks of whether anything may be said."""

import csv
import itertools
import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats
from support import books
from support.books import ALIKE, BASE, LOOSE, WORSE, add, learn, whole_grid
from support.compose import ROOT
from support.experiments import ablate, problems, write

from ablate.experiment.load import load
from ablate.experiment.recipe_source import resolve
from ablate.experiment.schema import Asked, Metric
from ablate.recipes import KNOBS
from ablate.reports.answer import Answer
from ablate.reports.effect_table import lines
from ablate.results.answer_sentences import MOST_WORDS, Compared, Setting, of_effect, of_family
from ablate.results.attribution import Effect
from ablate.results.comparisons import Comparisons
from ablate.results.gate import checks
from ablate.results.headline import headline_of
from ablate.results.paired_stats import Difference, Verdict
from ablate.results.summary import summaries
from ablate.results.verdict_text import verdict_notes
from ablate.store.ledger import Ledger
from ablate.store.registration import late_changes, register
from ablate.training.metric_names import ARITHMETIC, PRODUCT_BITS

GRID = {"rht": [True, False], "sr": [True, False]}


@pytest.fixture
def book(tmp_path):
    ledger = Ledger(tmp_path / "sweeps" / "x" / "ledger.db")
    ledger.describe(
        question="Does it?", metric='{"name": "val/loss", "min_effect": 0.01}', search="", file="x.yaml"
    )
    yield ledger
    ledger.close()


def asked(book, **keys) -> None:
    book.describe(answer=Asked(**keys).model_dump_json())


# The file


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"knob": "srr"}, "answer.knob: 'srr': is not turned by this file; 'sr' is the nearest of"),
        ({"knob": "sr", "given": {"rht": 1}}, "answer.given.rht: 1: is not among its values: true, false"),
        ({"knob": "sr", "given": {"sr": True}}, "is the knob that is asked for; hold other knobs"),
        (
            {"knob": "sr", "given": {"block": "1x16"}},
            "answer.given.block: 'block': is not turned by this file",
        ),
        ({"arm": "nvfp4"}, "no arm has this name"),
        ({"arm": "bf16"}, "is a baseline; name the arm that it is compared with as against"),
        ({"arm": "rht=true sr=true", "against": "rht=true sr=true"}, "is the arm itself"),
        ({}, "name either a knob, with the values of others as given, or an arm, or a family"),
        ({"arm": "bf16", "given": {"rht": True}}, "given holds knobs beside a knob"),
        ({"knob": "sr", "against": "bf16"}, "name the arm"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_refused_at_its_place(answer, said, tmp_path):
    found = problems(write(tmp_path, ablate=GRID, answer=answer))
    assert any(said in str(problem) for problem in found), found


def test_an_arm_that_the_file_asks_for_has_one_verdict_in_headline_and_tables(book):
    """Alone it is worse (p about .02); among nine, after Holm's correction, it is undecided."""
    add(book, "bf16", BASE, None)
    add(book, "asked", {seed: loss + (0.03, 0.05, 0.07, 0.1)[seed] for seed, loss in BASE.items()})
    for number in range(8):
        add(book, f"noise {number}", {s: v + 0.1 * math.sin(7 * s + number) for s, v in BASE.items()})
    together = next(arm for arm in summaries(book) if arm.name == "asked")
    asked(book, arm="asked")
    compared = Comparisons(book)
    row = next(arm for arm in compared.arms if arm.name == "asked")
    (stated,) = headline_of(compared).verdicts
    assert (together.verdict.kind, row.verdict.kind, stated.kind) == ("undecided", "worse", "worse")
    assert (row.verdict.p, row.verdict.needed) == (stated.p, stated.needed)


def test_a_search_answers_by_its_winner(tmp_path):
    search = {"sampler": "random", "trials": 2}
    knobs = {"sr": {"choice": [True, False]}}
    (problem,) = problems(write(tmp_path, ablate=knobs, search=search, answer={"knob": "sr"}))
    assert "a search answers by its winner" in str(problem)


SEARCH = {"sampler": "random", "trials": 2}


@pytest.mark.parametrize(
    ("answer", "keys", "said"),
    [
        ("winner", {}, "needs a search whose winner is run again on fresh seeds"),
        ("winner", {"search": SEARCH}, "needs a search whose winner"),
        ("winner", {"search": SEARCH | {"confirm": 3}}, ""),
        ("arms", {"search": SEARCH | {"confirm": 3}}, "answer: {family: winner}"),
        ("knobs", {"search": SEARCH}, "answer: {family: winner}"),
        ("knobs", {"ablate": None, "arms": {"a": {"sr": True}}}, "needs a grid"),
        ("knobs", {}, ""),
        ("arms", {}, ""),
        ("each", {}, "answer.family"),
    ],
)
def test_a_family_answers_where_the_file_has_it(answer, keys, said, tmp_path):
    knobs = {"sr": {"choice": [True, False]}} if "search" in keys else GRID
    found = list(map(str, problems(write(tmp_path, answer={"family": answer}, **({"ablate": knobs} | keys)))))
    assert any(said in problem for problem in found) if said else not found, found


def test_every_shipped_file_names_its_answer():
    files = sorted((ROOT / "experiments").glob("*.yaml"))
    assert len(files) > 20
    keys = {file.name: load(file, device="cpu").keys for file in files}
    unnamed = [name for name, each in keys.items() if not (each.answer or each.blame or each.map)]
    assert unnamed == []  # a search for a cause and a map have an answer of their own


@pytest.mark.parametrize("kind", [(), ("--training",), ("--forks",)])
def test_the_file_to_start_from_names_its_answer_and_what_matters(kind, tmp_path):
    ablate("init", "mine", "--folder", tmp_path, *kind)
    keys = load(tmp_path / "mine.yaml", device="cpu").keys
    assert keys.answer
    assert keys.metric["min_effect"]
    assert bool(keys.design) == (kind == ("--forks",))


def test_the_map_to_start_from_has_a_cell_for_each_product_of_each_block(tmp_path):
    ablate("init", "mine", "--folder", tmp_path, "--map")
    experiment = load(tmp_path / "mine.yaml", device="cpu")
    assert experiment.keys.map
    assert len(experiment.arms) == 1 + 4 * 3 + 2


def test_a_short_name_of_a_workloads_knob_may_be_asked_for(tmp_path):
    path = write(
        tmp_path,
        ablate={"lr": [1e-3, 2e-3], "sr": [True, False]},
        answer={"knob": "sr", "given": {"lr": 1e-3}},
    )
    assert load(path).keys.answer.given == {"workload.lr": 1e-3}
    path = write(tmp_path, ablate={"lr": [1e-3, 2e-3]}, answer={"knob": "lr"})
    assert load(path).keys.answer.knob == "workload.lr"


@pytest.mark.parametrize(
    ("history", "late"),
    [
        ([("q", "m", 9, 0)], []),
        ([("q", "m", 9, 3)], []),  # baselines that another sweep ran
        ([("q", "m", 9, 9)], ["question", "metrics"]),
        ([("q", "m", 9, 0), ("q", "m", 15, 9)], []),  # more seeds
        ([("q", "m", 9, 0), ("r", "m", 9, 0)], []),
        ([("q", "m", 9, 0), ("r", "m", 9, 4)], ["question"]),
        ([("q", "m", 9, 0), ("q", "n", 9, 4), ("q", "n", 15, 9)], ["metrics"]),
        ([("", "", 9, 0), ("q", "m", 9, 4)], []),
    ],
)
def test_a_question_or_a_metric_that_is_named_after_results_is_said_to_be(history, late, book):
    for number, (question, metrics, trials, finished) in enumerate(history):
        parts = {"question": question, "metrics": metrics}
        register(book, f"{number:032x}", float(number), trials, lambda count=finished: count, parts)
    add(book, "bf16", BASE, None)
    add(book, "a", WORSE)
    assert [part for part, _ in late_changes(book)] == late
    said = [text for text, kind in kinds(book).items() if kind == "warning" and "after" in text]
    assert len(said) == len(late), said


def test_of_several_late_changes_the_last_one_is_reported(book):
    for number, (question, finished) in enumerate([("q", 0), ("r", 4), ("s", 6), ("s", 8)]):
        parts = {"question": question, "metrics": "m"}
        register(book, f"{number:032x}", float(number), 9, lambda count=finished: count, parts)
    assert [(part, entry.finished) for part, entry in late_changes(book)] == [("question", 6)]


def test_baselines_of_another_sweep_are_no_results_of_a_search(book):
    book.describe(search="tpe")
    register(book, "0" * 32, 0.0, 2, lambda: 2, {"question": "q", "metrics": "m"})
    assert list(late_changes(book)) == []


def test_a_number_of_seeds_on_the_command_line_is_as_if_the_file_said_so(tmp_path):
    path = write(tmp_path, seeds=2)
    grown = load(path, count=5)
    assert grown.seeds == (0, 1, 2, 3, 4)
    assert [grown.spec(grown.arms[0], seed, "cpu").id for seed in (0, 1)] == [
        load(path).spec(load(path).arms[0], seed, "cpu").id for seed in (0, 1)
    ]
    assert "5" in re.search(r"seeds.*", grown.text)[0]
    plan = json.loads(ablate("plan", path, "--seeds", 5, "--json", "--state", tmp_path / "runs").stdout)
    assert [len(arm["trials"]) for arm in plan["arms"]] == [5] * len(grown.arms)


# What it is about


def test_the_asked_comparison_is_one_paired_t_test_of_the_two_arms_it_names(book):
    """The oracle is scipy's paired t on the runs at rht true alone."""
    whole_grid(book)
    asked(book, knob="sr", given={"rht": True})
    values = {arm.name: arm.values for arm in summaries(book)}
    on, off = ([values[f"rht=True sr={sr}"][seed] for seed in BASE] for sr in (True, False))
    test = stats.ttest_rel(on, off)
    low, high = test.confidence_interval(0.95)
    ((effect, verdict),) = Comparisons(book).asked_effects
    assert effect.effect.mean == pytest.approx(np.mean(np.subtract(on, off)))
    assert (effect.effect.low, effect.effect.high) == pytest.approx((low, high))
    assert verdict.p == pytest.approx(test.pvalue)  # alone in its family: nothing is corrected
    answer = headline_of(Comparisons(book))
    assert answer.lead == "Worse."
    assert answer.text.startswith("With rotation on, stochastic rounding raises val/loss by 0.1")


def test_what_is_not_held_is_averaged_over(book):
    whole_grid(book)
    asked(book, knob="sr")
    values = {arm.name: arm.values for arm in summaries(book)}
    means = [
        np.mean([[values[f"rht={rht} sr={sr}"][seed] for seed in BASE] for rht in (True, False)], axis=0)
        for sr in (True, False)
    ]
    ((effect, _),) = Comparisons(book).asked_effects
    assert effect.effect.mean == pytest.approx(np.mean(means[0] - means[1]))
    text = headline_of(Comparisons(book)).text
    assert text.startswith("Averaged over other knobs, stochastic rounding raises val/loss by ")
    asked(book, knob="sr", given={"batch": 8})  # the only value of this knob, so that rht is not held
    text = headline_of(Comparisons(book)).text
    assert text.startswith("With batch 8, averaged over other knobs, stochastic rounding raises val/loss by ")


def test_two_arms_may_be_asked_for(book):
    add(book, "bf16", BASE, None)
    add(book, "one", WORSE)
    add(book, "other", ALIKE)
    asked(book, arm="one", against="other")
    ((effect, verdict),) = Comparisons(book).asked_effects
    assert effect.effect.mean == pytest.approx(np.mean([WORSE[seed] - ALIKE[seed] for seed in BASE]))
    assert verdict.kind == "worse"
    assert headline_of(Comparisons(book)).text.startswith("one instead of other raises val/loss by")


@pytest.mark.parametrize(
    ("gaps", "lead", "said"),
    [
        ((0.1, 0.12, 0.11, 0.13), "Worse.", "more than 0.01, the smallest that matters."),
        ((0.008, 0.012, 0.011, 0.013), "Worse.", "whether it exceeds 0.01"),
        ((-0.1, -0.12, -0.11, -0.13), "Better.", "more than 0.01, the smallest that matters."),
        (
            (0.001, -0.001, 0.0005, 0.0),
            "No difference that matters.",
            "an effect of 0.01, the smallest that matters, is ruled out",
        ),
        ((0.05, -0.06, 0.04, -0.05), "Not answered yet.", "it may help or hurt by more than 0.01"),
        (
            (0.02, -0.003, 0.01, 0.005),
            "Not answered yet.",
            "it may hurt by more than 0.01, but does not help by that much",
        ),
        ((0.0, 0.0, 0.0, 0.0), "No difference at all.", "gives the same val/loss on every seed"),
    ],
)
def test_the_sentence_says_what_the_interval_leaves_possible(book, gaps, lead, said):
    add(book, "bf16", BASE, None)
    add(book, "a", {seed: BASE[seed] + gap for seed, gap in zip(BASE, gaps, strict=True)})
    asked(book, arm="a")
    answer = headline_of(Comparisons(book))
    assert answer.lead == lead
    assert said in answer.text
    assert answer.answered == (lead != "Not answered yet.")
    assert answer.even == lead.startswith("No difference")


def test_an_undecided_answer_has_the_command_that_adds_its_seeds_and_what_it_costs(book):
    add(book, "bf16", BASE, None)
    add(book, "close", {seed: BASE[seed] + gap for seed, gap in enumerate((0.012, -0.009, 0.004, 0.001))})
    answer = headline_of(Comparisons(book))
    needed = summaries(book)[1].verdict.needed.count
    assert answer.command == f"ablate sweep x.yaml --seeds {needed} --state {book.path.parents[2]}"
    runs = 2 * (needed - 4)
    cost = f"80 % chance of a verdict; +{runs} runs, about {runs}.0 h of one worker"  # an hour a run
    assert answer.cost == cost
    other = add(book, "late", {9: 3.0})
    assert headline_of(Comparisons(book)).command == ""  # --seeds would drop seeds that a list names
    book.db.execute("DELETE FROM members WHERE arm = ?", (other,))
    book.describe(interval="split:4")
    assert headline_of(Comparisons(book)).command == ""  # such a file grows by itself


def test_the_simplest_recipe_is_named_only_while_nothing_is_told_from_anything(book):
    def recipe(rounding):
        return json.dumps({"workload": {"gpt": {}}, "recipe": {"wgrad": {"g": {"rounding": rounding}}}})

    add(book, "bf16", BASE, None)
    for name, rounding in (("sr", "stochastic"), ("rn", "nearest")):
        arm = book.add_arm(name, {name: True}, 1, None)
        for seed, loss in LOOSE.items():
            trial = book.add_member(arm, seed, f"{name}/{seed}", recipe(rounding))
            value = loss + 0.05 * math.sin(seed + len(name + rounding))
            book.record(trial, [{"step": 40, "time": 0.0, "metrics": {"val/loss": value}}])
            book.settle(trial, "done", seconds=1.0)
    assert headline_of(Comparisons(book)).simplest.endswith("the simplest recipe, rn.")
    add(book, "bad", WORSE)
    assert headline_of(Comparisons(book)).simplest == ""


def test_of_two_formats_none_is_called_the_simplest(book):
    """One has a longer list of settings, and neither has all of the other's."""
    add(book, "bf16", BASE, None)
    scales = {"one": {"format": "e4m3"}, "other": {"format": "e6m2", "micro_exponents": [8, 4]}}
    for name, scale in scales.items():
        arm = book.add_arm(name, {"recipe": name}, 1, None)
        for seed, loss in LOOSE.items():
            fields = json.dumps({"workload": {"gpt": {}}, "recipe": {"fprop": {"x": {"scale": scale}}}})
            trial = book.add_member(arm, seed, f"{name}/{seed}", fields)
            value = loss + 0.05 * math.sin(seed + len(name))
            book.record(trial, [{"step": 40, "time": 0.0, "metrics": {"val/loss": value}}])
            book.settle(trial, "done", seconds=1.0)
    answer = headline_of(Comparisons(book))
    assert {verdict.kind for verdict in answer.verdicts} == {"undecided"}
    assert answer.simplest == ""


# The gate


def kinds(book) -> dict[str, str]:
    return {check.text: check.kind for check in checks(book, summaries(book))}


def test_a_contrast_that_is_asked_for_has_one_verdict_in_every_table(book):
    """Among all contrasts Holm would leave it undecided; asked for, it is a family of its own."""
    whole_grid(book)
    before = {(one.knob, one.held): one.verdict for one in Comparisons(book).contrasts}
    asked(book, knob="sr", given={"rht": True})
    sweep = Comparisons(book)
    ((_, verdict),) = sweep.asked_effects
    after = {(one.knob, one.held): one.verdict for one in sweep.contrasts}
    assert after.pop(("sr", "rht=true")) == verdict
    assert verdict != before.pop(("sr", "rht=true"))
    assert after == before


def test_an_asked_contrast_with_several_knobs_held_is_listed_once(book):
    """Its label is not that of the contrast: `with rht true, cooldown null`, and not `with rht true cooldown null`."""
    add(book, "bf16", BASE, None, knobs={"recipe": "bf16"})
    for place, (rht, sr, part) in enumerate(itertools.product((False, True), (False, True), (None, 0.1))):
        losses = {seed: loss + 0.1 * sr + 0.002 * math.sin(3 * seed + place) for seed, loss in BASE.items()}
        add(book, f"arm {place}", losses, knobs={"rht": rht, "sr": sr, "cooldown": part})
    asked(book, knob="sr", given={"rht": True, "cooldown": None})
    held = [line for line in lines(Comparisons(book)) if line.group == "sr: true instead of false"]
    held = [line for line in held if line.label != "on average"]
    assert [line.label for line in held if line.asked] == ["with rht true, cooldown null"]
    assert len(held) == 4


def test_the_table_says_beside_a_knob_what_it_is(book):
    whole_grid(book)
    html = Answer(book).comparisons().html()
    assert f'sr: true instead of false <span class="means">{KNOBS["sr"].help}</span>' in html


def test_finished_finite_runs_pass_and_the_spread_is_noted(book):
    add(book, "bf16", BASE, None)
    add(book, "a", WORSE)
    found = kinds(book)
    assert found["8 of 8 runs finished"] == found["no NaN, no divergence"] == "passed"
    spread = np.std(list(BASE.values()), ddof=1)
    assert found[f"bf16 varies by {spread:.2g} (standard deviation) between seeds"] == "note"
    unpaired = np.var(list(BASE.values()), ddof=1) + np.var(list(WORSE.values()), ddof=1)
    paired = np.var([WORSE[seed] - BASE[seed] for seed in BASE], ddof=1)
    assert found[f"without pairing by seed it would take {unpaired / paired:,.0f}× the seeds"] == "note"


def test_pairs_of_runs_that_multiplied_in_different_ways_are_named_above_the_verdict(book):
    add(book, "bf16", BASE, None)
    add(book, "a", WORSE)
    for member in book.members():
        bits = 32.0 if member.name == "a" and member.seed in (1, 3) else 16.0
        book.record(member.trial, [{"step": 41, "time": 0.0, "metrics": {PRODUCT_BITS: bits}}])
    found = kinds(book)
    assert (
        found[
            "2 of 8 runs multiplied in fp32, the others by bf16 instructions: pairs of seeds 1, 3 compare the CPUs too"
        ]
        == "warning"
    )


def test_pairs_of_runs_on_two_kinds_of_processors_are_named_above_the_verdict(book):
    add(book, "bf16", BASE, None)
    add(book, "a", WORSE)
    for member in book.members():
        kind = 7.0 if member.name == "a" and member.seed == 2 else 5.0
        book.record(member.trial, [{"step": 41, "time": 0.0, "metrics": {ARITHMETIC: kind}}])
    sentence = "runs on 2 kinds of processors or versions of torch: pairs of seed 2 compare those too"
    assert kinds(book)[sentence] == "warning"
    assert [arm.verdict.mixed for arm in summaries(book)] == [0, 1]
    mark = "1 pair compares two kinds of processors or versions of torch, too"
    assert mark in verdict_notes(summaries(book)[1].verdict)
    assert mark in Answer(book).effects().html()


@pytest.mark.slow
def test_variables_that_change_sums_make_another_kind_of_processor():
    changes = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
    program = (
        "import json, torch; from ablate.provenance import arithmetic, environment\n"
        f"found = environment(); recorded = [found.get(name) for name in {[*changes]}]\n"
        "print(json.dumps([arithmetic('cpu'), recorded, found.get('simd')]))"
    )
    plain = {key: text for key, text in os.environ.items() if key not in changes}
    environments = [plain, *(plain | {name: value} for name, value in changes.items())]
    numbers, recorded, simd = zip(
        *(
            json.loads(subprocess.check_output([sys.executable, "-c", program], env=one, text=True))
            for one in environments
        ),
        strict=True,
    )
    assert numbers[0] not in numbers[1:]
    first, second = (f"{name}={value}" for name, value in changes.items())
    assert recorded == ([None, None], [first, None], [None, second])
    assert all(simd)


def test_another_version_of_torch_is_another_kind_of_processor(tmp_path):
    """Python takes the version from the first torch-*.dist-info on its path."""
    (tmp_path / "torch-9.9.dist-info").mkdir()
    (tmp_path / "torch-9.9.dist-info" / "METADATA").write_text("Name: torch\nVersion: 9.9\n")
    program = "from ablate.provenance import arithmetic; print(arithmetic('cpu'))"
    numbers = [
        subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:0] = {path}; {program}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for path in ([], [str(tmp_path)])
    ]
    assert numbers[0] != numbers[1]


def test_missing_diverged_and_non_finite_runs_are_named_above_the_verdict(book):
    add(book, "bf16", BASE, None)
    add(book, "wild", WORSE, status="diverged")
    add(book, "late", ALIKE, status="pending")
    trial = book.members()[0].trial
    book.record(trial, [{"step": 41, "time": 0.0, "metrics": {"nan/grad": 2.0}}])
    found = kinds(book)
    assert found["8 of 12 runs finished"] == "warning"
    add(book, "later", ALIKE, status="pending")
    for member in book.members():
        if member.name.startswith("late"):
            book.settle(member.trial, "failed", "it broke\nfor a reason", None)
    text = "8 of 12 runs finished; none of late, later did: it broke for a reason"
    assert kinds(book)[text.replace("12", "16")] == "warning"
    assert found["4 of 8 runs diverged"] == "warning"


@pytest.mark.parametrize(
    ("arms", "answer", "named"),
    [
        ({"nvfp4": {}, "four_over_six": {}}, {"knob": "recipe"}, ["nvfp4: none", "last_fraction 0.167"]),
        ({"nvfp4": {}, "four_over_six": {}}, {}, ["nvfp4: none", "last_fraction 0.167"]),
        ({"nvfp4": {}, "mxfp4": {}}, {}, []),
        ({"four_over_six": {}}, {}, []),
        ({"nvfp4": {}, "nvfp4 skip_first=1": {"skip_first": 1}}, {"knob": "skip_first"}, []),
        ({"nvfp4": {}, "four_over_six": {}, "mxfp4": {}}, {"arm": "mxfp4", "against": "nvfp4"}, []),
        ({"nvfp4": {}, "four_over_six": {}}, {"arm": "four_over_six", "against": "nvfp4"}, ["nvfp4: none"]),
    ],
)
def test_layers_left_in_bf16_beside_other_casts_are_named_above_the_verdict(arms, answer, named, book):
    """Only what is compared counts: bf16 has no casts, and layers that a knob turns alone are the question."""
    if answer:
        asked(book, **answer)
    for name, knobs in {"bf16": {}, **arms}.items():
        preset = name.split()[0]
        recipe = resolve(preset, knobs).model_dump(mode="json")
        turned = {"recipe": preset, "skip_first": 0} | knobs
        add(book, name, ALIKE, 1 if arms.get(name) is not None else None, turned, recipe=recipe)
    texts = [check.text for check in headline_of(Comparisons(book)).checks if check.kind == "warning"]
    (text,) = [text for text in texts if "layers left in bf16" in text] or [""]
    assert all(part in text for part in named)
    assert bool(text) == bool(named)


def test_without_a_finite_run_there_is_no_answer_and_no_table(book):
    add(book, "bf16", BASE, None, status="diverged")
    add(book, "a", WORSE, status="diverged")
    answer = Answer(book)
    assert not answer.answer.valid
    assert answer.answer.command == answer.answer.simplest == ""
    assert answer.comparisons() is None


# The table


def test_every_comparison_is_one_line_with_the_numbers_that_decide_it(book, tmp_path):
    whole_grid(book)
    asked(book, knob="sr", given={"rht": True})
    answer = Answer(book)
    table = answer.comparisons()
    labels = [(line.group, line.label) for line in table.rows]
    assert len(labels) == len(set(labels)) == 4 + 2 + 4  # contrasts, main effects, gaps: the asked one once
    assert labels[0] == ("sr: true instead of false", "with rht true")
    assert [line.asked for line in table.rows].count(True) == 1
    by_effect = [line.difference.mean for line in table.rows if line.group == "gap to bf16"]
    assert by_effect == sorted(by_effect)
    table.save(tmp_path)
    with (tmp_path / "comparisons.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row, line in zip(rows, table.rows, strict=True):
        each = [float(value) for value in row["differences by seed"].split()]
        assert float(row["effect"]) == pytest.approx(np.mean(each), rel=1e-4)
        assert line.difference.low < np.mean(each) < line.difference.high


def test_a_drawing_has_its_numbers_as_text_and_nothing_beyond_its_edge(book):
    add(book, "bf16", BASE, None)
    add(book, "near", ALIKE)
    add(book, "far <b>", {seed: value + 50.0 * (seed + 1) for seed, value in BASE.items()})
    page = Answer(book).comparisons().html()
    assert 'aria-label="gap to bf16, far &lt;b&gt;: +125.' in page
    assert "<b>" not in page
    for x in re.findall(r'(?:x1|x2|cx|x)="(-?[\d.]+)"', page):
        assert 0 <= float(x) <= 300


def test_the_answer_is_not_about_the_arms_that_a_design_adds(book):
    """A known-bad arm that is worse, and a twin, answer no question: they are checks."""
    add(book, "bf16", BASE, None)
    add(book, "open", {seed: value + 0.1 * math.sin(7 * seed) for seed, value in BASE.items()})
    for name, role in (("known bad: mxfp4", "bad"), ("null: bf16", "null")):
        arm = book.add_arm(name, {}, 1, None, role)
        for seed, loss in WORSE.items():
            trial = book.add_member(arm, seed, f"{name}/{seed}", "{}")
            book.record(trial, [{"step": 40, "time": 0.0, "metrics": {"val/loss": loss}}])
            book.settle(trial, "done", seconds=1.0)
    answer = headline_of(Comparisons(book))
    assert (answer.lead, len(answer.verdicts)) == ("Not answered yet.", 1)
    assert "mxfp4" not in answer.text
    assert {line.label for line in Answer(book).comparisons().rows} == {"open"}
    assert any(check.text.startswith("detects mxfp4") for check in answer.checks)


# Its length


def drawn(random: np.random.Generator, number: int) -> Compared:
    """A comparison with a verdict of any kind, and with an interval or none."""
    kind = random.choice(["better", "worse", "equivalent", "same", "undecided", "unjudged"])
    reasons = ["no_pair", "few_values", "horizon", "position", "blind", "windows"]
    reason = str(random.choice(reasons)) if kind == "unjudged" else None
    mean, half = random.normal() * 10.0 ** random.integers(-5, 2), 10.0 ** random.uniform(-6, 1)
    low, high = (mean - half, mean + half) if random.random() < 0.8 else (math.nan, math.nan)
    difference = Difference(mean, low, high, 4, half)
    name = f"{random.choice(['arm', 'an arm', 'kind=a x=b', 'hot, the same'])} {number}"
    return Compared(name, difference, Verdict(str(kind), reason), 0.01)


def test_an_answer_says_one_seed_not_one_seeds():
    setting, difference = Setting(Metric(name="val/loss"), ""), Difference(0.1, 0.05, 0.15, 3, 0.02)
    one = Compared("a", difference, Verdict("unjudged", "length", count=1))
    effect = Effect(("sr",), "true instead of false", difference, None, {})
    assert "unequal length on 1 seed: no verdict" in of_effect(effect, one.verdict, setting)[1]
    assert "unequal length on 1 seed: no verdict" in of_family([one], setting, "Against bf16")[1]


@pytest.mark.parametrize("seed", range(60))
def test_an_answer_has_at_most_forty_words_and_two_numbers_and_no_seeds(seed):
    random = np.random.default_rng(seed)
    metric = Metric(name="val/loss", min_effect=0.01 if random.random() < 0.5 else None)
    scope = str(random.choice(["", "after 300 steps", "over 30 steps from a bf16 checkpoint"]))
    setting = Setting(metric, str(random.choice(["", "nats"])), scope, "", bool(random.random() < 0.3))
    family = [drawn(random, number) for number in range(random.integers(2, 60))]
    lead, text = of_family(family, setting, "Against bf16")
    assert len(f"{lead} {text}".replace(" %", "%").split()) <= MOST_WORDS
    (one,) = family[:1]
    asked = Effect(("sr",), "true instead of false", one.difference, 0.01, {"rht": True})
    short = " ".join(of_effect(asked, one.verdict, setting, [False, True], True))
    assert len(short.replace(" %", "%").split()) <= MOST_WORDS
    assert not re.search(r"\d+ (fresh )?seed", text + short)
    for sentence in (text.partition(": ")[2], short.replace(scope, "")):
        plain = re.sub(
            r"\(.*?\)|arm \d+|a x=b \d+|the same \d+|\b\d+ (more )?(are|is|has|have|give)\b", "", sentence
        )
        assert len(re.findall(r"\d+\.\d+", plain)) <= 2, sentence


@pytest.mark.parametrize(
    ("margin", "floor", "said"),
    [
        (0.01, 5.0, []),
        (0.5, 5.0, ["min_effect 0.5 is loose"]),
        (
            0.5,
            3.3,
            [
                "min_effect 0.5 exceeds what training gained",
                "min_effect 0.5 is loose",
            ],
        ),
    ],
)
def test_a_smallest_effect_that_nothing_can_reach_is_named_above_the_verdict(book, margin, floor, said):
    book.describe(metric=json.dumps({"name": "val/loss", "min_effect": margin}))
    add(book, "bf16", BASE, None)
    add(book, "a", WORSE)
    add(book, "b", ALIKE)
    learn(book, floor)
    found = [text for text, kind in kinds(book).items() if kind == "warning" and "min_effect" in text]
    assert (
        [any(text.startswith(part) for text in found) for part in said]
        == [True] * len(said)
        == [True] * len(found)
    )


@pytest.mark.parametrize(("workload", "kind"), [("gpt", "passed"), ("finetune", "note")])
def test_training_that_began_from_trained_weights_is_not_said_to_have_learned(
    book, workload, kind, monkeypatch
):
    monkeypatch.setattr(books, "SPEC", json.dumps({"workload": {workload: {}}}))
    add(book, "bf16", BASE, None)
    add(book, "a", WORSE)
    learn(book, 5.0)
    (check,) = [
        check for check in checks(book, summaries(book)) if "a model that ignores its input)" in check.text
    ]
    assert check.kind == kind
    assert ("began from trained weights" in check.text) == (kind == "note")


@pytest.mark.parametrize(
    ("gap", "lead"), [(0.2, "No gap to close is visible here."), (0.0, "No difference that matters.")]
)
def test_a_cooldown_closes_no_gap_that_is_not_resolved(book, gap, lead):
    """Runs with the knob share the noise of those without; the baseline does not, or is resolved."""
    add(book, "bf16", BASE, None)
    for dose in (0, 0.1, 0.2):
        noise = {seed: 0.5 + gap * (-1) ** seed + 0.0001 * math.sin(9 * seed + 50 * dose) for seed in BASE}
        values = {seed: BASE[seed] + noise[seed] for seed in BASE}
        add(book, f"cooldown={dose}", values, knobs={"cooldown": dose})
    asked(book, knob="cooldown")
    answer = headline_of(Comparisons(book))
    assert answer.lead == lead
    assert answer.answered == (gap == 0)
    assert ("differs from bf16 by +0.5" in answer.text) == (gap > 0)
