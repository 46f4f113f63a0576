"""One run of a sweep, in this process: what is missing is run, what is done is reused, what goes wrong is said."""

import math
import re
from contextlib import closing
from pathlib import Path

import pytest
from support.experiments import (
    TOO_LARGE,
    WILD,
    Children,
    idle,
    ledger,
    shards,
    statuses,
    sweep,
    tiny,
    values,
)
from support.studies import trials

from ablate.execution.controller import Controller
from ablate.execution.progress import Outcome
from ablate.execution.workers import Inline
from ablate.results.gate import checks
from ablate.results.summary import summaries
from ablate.store.checked_ledger import open_ledger
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Store


def test_everything_that_is_wanted_is_run_once_and_counted(tmp_path):
    outcome, news = sweep(tiny(tmp_path), tmp_path)
    assert (outcome.status, outcome.ran, outcome.reused, outcome.failed) == ("done", 6, 0, 0)
    assert statuses(tmp_path) == {
        (arm, seed): "done" for arm in ("bf16", "rht=true", "rht=false") for seed in (0, 1)
    }
    assert len(news) == 6
    assert news[0].startswith("bf16 seed=0: val/loss 4.")
    book = ledger(tmp_path)
    assert [tuple(row) for row in book.db.execute("SELECT attempt, outcome FROM attempts")] == [
        (1, "done")
    ] * 6
    steps = {(name, step) for step, name, _, _ in book.records(1)}
    assert {("val/loss", 2), ("val/loss", 4), ("val/loss_bf16", 4), ("train/loss", 4)} <= steps
    book.close()


def test_pairs_complete_early_since_seeds_go_in_turn(tmp_path):
    _, news = sweep(idle(tmp_path), tmp_path)
    assert [line.partition(":")[0][-1] for line in news] == ["0", "0", "0", "1", "1", "1"]


def test_progress_counts_what_is_done_and_names_what_runs(tmp_path):
    controller = Controller(idle(tmp_path, seeds=1), tmp_path, "cpu", Inline, None)
    steps = list(controller.run())
    controller.ledger.close()
    assert isinstance(steps[-1], Outcome)
    done = [step.done for step in steps[:-1]]
    assert done == sorted(done)
    assert (done[0], done[-1], {step.total for step in steps[:-1]}) == (0, 3, {3})
    running = [run for step in steps[:-1] for run in step.running]
    assert {run.name for run in running} == {"bf16", "rht=true", "rht=false"}
    assert all(run.steps == 4 and run.step <= 4 for run in running)


def test_a_second_run_runs_nothing_and_connects_to_nothing(tmp_path):
    def nowhere():
        raise AssertionError("nothing is left to run")

    sweep(idle(tmp_path), tmp_path)
    before = values(tmp_path)
    outcome, news = sweep(idle(tmp_path), tmp_path, connect=nowhere)
    assert (outcome.status, outcome.ran, outcome.reused) == ("done", 0, 6)
    assert not news
    assert values(tmp_path) == before


def test_another_sweep_in_the_same_state_folder_reuses_what_is_the_same_trial(tmp_path):
    sweep(idle(tmp_path), tmp_path)
    outcome, _ = sweep(idle(tmp_path, "other", ablate={"rht": [True], "sr": [True, False]}), tmp_path)
    assert (outcome.ran, outcome.reused) == (
        2,
        4,
    )  # the baseline and rht=true sr=true, which is nvfp4, are there
    first, other = values(tmp_path), values(tmp_path, "other")
    assert other["bf16", 1] == first["bf16", 1]
    assert other["rht=true sr=true", 0] == first["rht=true", 0]
    book = ledger(tmp_path, "other")
    assert {m.name: m.reused for m in book.members()} == {
        "bf16": 1,
        "rht=true sr=true": 1,
        "rht=true sr=false": 0,
    }
    reused = list(book.records(book.members()[0].trial))
    book.close()
    book = ledger(tmp_path)
    assert reused == list(book.records(book.members()[0].trial))
    book.close()


def test_arms_of_one_sweep_that_are_the_same_trial_run_it_once(tmp_path):
    keys = {"ablate": {"rht": [True, False]}, "search": {"trials": 4, "sampler": "random"}}
    outcome, _ = sweep(idle(tmp_path, **keys), tmp_path)
    assert outcome.status == "done"
    assert outcome.ran <= 6
    assert len(list((tmp_path / "trials").iterdir())) == outcome.ran


def test_a_lost_ledger_is_made_again_from_the_trial_folders(tmp_path):
    sweep(idle(tmp_path), tmp_path)
    before = values(tmp_path)
    for path in (tmp_path / "sweeps" / "tiny").glob("ledger.db*"):
        path.unlink()
    outcome, _ = sweep(idle(tmp_path), tmp_path)
    assert outcome.ran == 0
    assert values(tmp_path) == before


def test_a_trial_folder_that_is_gone_is_run_again(tmp_path):
    import shutil

    sweep(idle(tmp_path), tmp_path)
    before = values(tmp_path)
    book = ledger(tmp_path)
    shutil.rmtree(tmp_path / "trials" / book.members()[3].id)
    book.close()
    outcome, _ = sweep(idle(tmp_path), tmp_path)
    assert (outcome.ran, outcome.reused) == (1, 5)
    assert values(tmp_path) == before


def test_an_arm_that_diverges_is_a_result_and_harms_no_other(tmp_path):
    outcome, news = sweep(tiny(tmp_path, ablate=None, arms=WILD), tmp_path)
    assert (outcome.status, outcome.failed) == ("done", 0)
    assert "diverged on every seed" in outcome.why  # the baseline of its own learning rate
    assert outcome.diverged == "4 of 8 runs diverged, 2 of them of a baseline."
    found = statuses(tmp_path)
    assert found["wild", 0] == found["wild", 1] == "diverged"
    assert found["good", 0] == found["bf16", 1] == "done"
    assert sum("diverged: non-finite loss or gradient at step" in line for line in news) >= 2
    book = open_ledger(tmp_path, "tiny")
    (wild,) = [arm for arm in summaries(book) if arm.name == "wild"]
    assert (wild.diverged, wild.values, wild.nans) == ((0, 1), {}, 2)
    reasons = [m.reason for m in book.members() if m.name == "wild"]
    assert all("at step " in reason and "First to grow: fprop.w of blocks.0" in reason for reason in reasons)
    book.close()
    again, _ = sweep(tiny(tmp_path, ablate=None, arms=WILD), tmp_path)
    assert again.ran == 0


def test_a_sweep_whose_baseline_diverges_on_every_seed_fails_and_says_so(tmp_path):
    wild = {"lr": 1e30, "clip": None, "warmup": 0.0}
    outcome, _ = sweep(tiny(tmp_path, shape=wild), tmp_path)
    assert (outcome.status, outcome.failed) == ("failed", 0)
    assert "bf16 diverged on every seed" in outcome.why
    with closing(open_ledger(tmp_path, "tiny")) as book:
        texts = [(check.kind, check.text) for check in checks(book, summaries(book))]
    assert ("failed", "6 of 6 runs diverged, also of the baseline bf16") in texts


def test_a_budget_ends_a_run_and_the_same_sweep_goes_on(tmp_path):
    experiment = idle(tmp_path, budget={"trials": 2})
    outcomes = [sweep(experiment, tmp_path)[0] for _ in range(4)]
    assert [(outcome.status, outcome.ran) for outcome in outcomes] == [
        ("budget", 2),
        ("budget", 2),
        ("done", 2),
        ("done", 0),
    ]
    assert set(statuses(tmp_path).values()) == {"done"}


def test_what_a_dead_driver_left_running_is_run_again_and_said(tmp_path):
    sweep(idle(tmp_path, budget={"trials": 2}), tmp_path)
    book = Ledger(tmp_path / "sweeps" / "tiny" / "ledger.db")
    orphan = next(member.trial for member in book.members() if member.status == "pending")
    name = next(member.id for member in book.members() if member.trial == orphan)
    book.start_attempt(orphan, Store(tmp_path).begin(name), 1.0)  # and then its driver was killed
    book.close()
    outcome, news = sweep(idle(tmp_path), tmp_path)
    assert (outcome.status, outcome.ran) == ("done", 4)
    assert "left unfinished" in news[0]
    book = ledger(tmp_path)
    attempts = book.db.execute(
        "SELECT attempt, outcome FROM attempts WHERE trial = ? ORDER BY attempt", (orphan,)
    ).fetchall()
    book.close()
    assert [tuple(row) for row in attempts] == [(1, "orphaned"), (2, "done")]


@pytest.mark.slow
def test_a_trial_that_fails_is_tried_again_and_then_failed_with_its_reason_while_the_others_go_on(tmp_path):
    data = shards(tmp_path / "broken", tokens=11_000)
    listed = {"good": {"rht": False}, "broken": {"rht": True, "workload.data": data}}
    experiment = tiny(
        tmp_path, ablate=None, arms=listed, against={"rht": False, "sr": False}, retry=1, seeds=1
    )
    Path(data["train"]).unlink()
    outcome, news = sweep(experiment, tmp_path, connect=Children)
    assert (outcome.status, outcome.failed, outcome.ran) == (
        "failed",
        2,
        2,
    )  # the broken arm and its baseline; the good arm and its own
    book = ledger(tmp_path)
    (status, reason), good = [
        (m.status, m.reason) for name in ("broken", "good") for m in book.members() if m.name == name
    ]
    assert (status, good) == ("failed", ("done", None))
    assert "train.bin" in reason
    assert f"broken seed=0: {reason}; retry 1/1" in news
    (failed,) = [line for line in news if line.startswith(f"broken seed=0: failed: {reason}\n")]
    assert 'File "' in failed
    attempts = [tuple(row) for row in book.db.execute("SELECT attempt, outcome FROM attempts")]
    assert sorted(attempts) == [(1, "done")] * 2 + [(1, "failed")] * 2 + [(2, "failed")] * 2
    book.close()


@pytest.mark.parametrize("connect", [Inline, pytest.param(Children, marks=pytest.mark.slow)])
def test_what_runs_out_of_memory_is_a_result_that_is_told_and_not_tried_again(connect, tmp_path):
    listed = {"good": {"rht": False}, "huge": {"rht": True, "workload.hidden": TOO_LARGE}}
    experiment = tiny(tmp_path, ablate=None, arms=listed, against={"rht": False, "sr": False}, seeds=1)
    outcome, news = sweep(experiment, tmp_path, connect=connect)
    assert (outcome.status, outcome.failed, outcome.ran) == ("failed", 2, 2)
    assert {name: status for (name, _), status in statuses(tmp_path).items() if status == "oom"}.keys() >= {
        "huge"
    }
    (line,) = [line for line in news if line.startswith("huge seed=0: ")]
    assert re.search(r"out of memory after step 0, \d\.\d GB in use: .*you tried to allocate \d+ bytes", line)
    book = ledger(tmp_path)
    assert book.db.execute("SELECT count(*) FROM attempts WHERE outcome = 'oom'").fetchone()[0] == 2
    book.close()


def test_a_run_that_is_closed_leaves_everything_resumable(tmp_path):
    controller = Controller(idle(tmp_path), tmp_path, "cpu", Inline, None)
    steps = controller.run()
    for step in steps:
        if step.done == 2 and any(run.step for run in step.running):
            break
    steps.close()
    found = list(statuses(tmp_path).values())
    assert found.count("done") == 2
    assert found.count("pending") == 4
    book = ledger(tmp_path)
    assert [row[0] for row in book.db.execute("SELECT outcome FROM attempts ORDER BY trial, attempt")].count(
        "interrupted"
    ) == 1
    book.close()
    outcome, _ = sweep(idle(tmp_path), tmp_path)
    assert (outcome.status, outcome.ran, outcome.reused) == ("done", 4, 2)


def test_an_exception_of_a_trial_inline_passes_through_and_leaves_the_sweep_resumable(tmp_path):
    experiment = tiny(tmp_path)
    in_the_way = Store(tmp_path).folder(experiment.spec(experiment.arms[0], 0, "cpu").id) / "events-1.jsonl"
    in_the_way.mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        sweep(experiment, tmp_path)
    assert set(statuses(tmp_path).values()) == {"pending"}


# The file was edited


EDITS = {
    "an arm more": (
        {"ablate": None, "arms": {"x": {"rht": True}}},
        {"ablate": None, "arms": {"x": {"rht": True}, "y": {"rht": False}}},
        1,
    ),
    "a value more": ({"ablate": {"rht": [True]}}, {"ablate": {"rht": [True, False]}}, 1),
    "a knob more": ({"ablate": {"rht": [True]}}, {"ablate": {"rht": [True], "sr": [True, False]}}, 1),
    "a longer name": ({"ablate": {"rht": [True]}}, {"ablate": None, "arms": {"rht": {"rht": True}}}, 0),
    "a seed more": ({"seeds": 1}, {"seeds": 2}, 3),
    "a range moved": (
        {"ablate": {"cooldown": {"uniform": [0.25, 0.5]}}, "search": {"trials": 1}},
        {"ablate": {"cooldown": {"uniform": [0.5, 0.9]}}, "search": {"trials": 2}},
        1,
    ),
    "a searched knob more": (
        {"ablate": {"cooldown": {"uniform": [0.25, 0.5]}}, "search": {"trials": 1}},
        {"ablate": {"cooldown": {"uniform": [0.25, 0.5]}, "sr": [True, False]}, "search": {"trials": 2}},
        1,
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_only_what_is_new_in_an_edited_file_is_run(edit, tmp_path):
    before, after, new = EDITS[edit]
    sweep(idle(tmp_path, **({"seeds": 1} | before)), tmp_path)
    outcome, _ = sweep(idle(tmp_path, **({"seeds": 1} | after)), tmp_path)
    assert (outcome.status, outcome.ran) == ("done", new)


def test_another_baseline_is_what_every_arm_is_compared_with(tmp_path):
    sweep(idle(tmp_path), tmp_path)
    sweep(idle(tmp_path, against="rht=false"), tmp_path)
    book = open_ledger(tmp_path, "tiny")
    found = {arm.name: arm.baseline for arm in summaries(book)}
    book.close()
    assert (found["rht=true"], found["rht=false"]) == ("rht=false", None)


@pytest.mark.parametrize(
    "edit", [{"ablate": {"rht": [True]}}, {"seeds": 1}], ids=["an arm less", "a seed less"]
)
def test_what_the_file_no_longer_names_is_not_in_its_answer(edit, tmp_path):
    sweep(idle(tmp_path), tmp_path)
    experiment = idle(tmp_path, **edit)
    sweep(experiment, tmp_path)
    book = open_ledger(tmp_path, "tiny")
    found = {(arm.name, *arm.values) for arm in summaries(book)}
    book.close()
    assert found == {(arm.name, *experiment.seeds) for arm in experiment.arms}


def test_a_changed_workload_is_told_anew(tmp_path):
    sweep(idle(tmp_path), tmp_path)
    outcome, _ = sweep(idle(tmp_path, workload={"idle": {"steps": 6}}), tmp_path)
    assert outcome.ran == 6
    now = values(tmp_path)
    assert trials(tmp_path)[-2].value == pytest.approx(
        (now["rht=true", 0] + now["rht=true", 1]) / 2, rel=1e-12
    )


def test_a_metric_that_is_missing_is_not_a_number_and_no_traceback(tmp_path):
    outcome, news = sweep(tiny(tmp_path, metric={"name": "grad/norm"}), tmp_path)
    assert outcome.status == "done"
    assert not any(math.isnan(value) for value in values(tmp_path, metric="grad/norm").values())
    assert len(news) == 6
