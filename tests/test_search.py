"""The study: one trial an arm, a journal that can be lost, torn or locked, and samplers that stay inside their ranges."""

import json
import math
import time

import optuna
import pytest
from experiments_for_tests import Children, content, ledger, sweep, tiny, write
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from ablate.experiment import load
from ablate.search import SAMPLERS, Point, Study

MIXED = {
    "workload.lr": {"uniform": [1e-4, 1e-1], "log": True},
    "cooldown": {"uniform": [0.0, 0.75]},
    "workload.batch": {"int": [1, 4]},
    "rht": [True, False],
    "recipe.wgrad.g": {"choice": [None, {"rounding": "stochastic"}, {"rounding": "nearest"}]},
}


def trials(state, name: str = "tiny") -> list[optuna.trial.FrozenTrial]:
    """What any Optuna reader, the dashboard for one, sees in the journal."""
    backend = JournalFileBackend(str(state / "sweeps" / name / "optuna.log"))
    return optuna.load_study(study_name=name, storage=JournalStorage(backend)).get_trials()


def told(state, name: str = "tiny") -> list[tuple]:
    return [(t.number, t.state.name, t.value, t.intermediate_values, t.user_attrs["arm"]) for t in trials(state, name)]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A grid of two arms and a baseline, run inline without MLflow; leave it as it is."""
    folder = tmp_path_factory.mktemp("grid")
    sweep(tiny(folder), folder)
    return folder


def test_the_study_has_one_trial_an_arm_with_the_mean_over_seeds(swept):
    book = ledger(swept)
    records = {(m["name"], m["seed"]): {s: v for s, n, v, _ in book.records(m["trial"]) if n == "val/loss"} for m in book.members()}
    for number, (trial, arm) in enumerate(zip(trials(swept), ["rht=true", "rht=false"], strict=True)):
        mean = {step: (records[arm, 0][step] + records[arm, 1][step]) / 2 for step in (2, 4)}
        assert (trial.number, trial.state, trial.user_attrs["arm"]) == (number, TrialState.COMPLETE, arm)
        assert trial.params == {"rht": arm == "rht=true"}
        assert trial.value == pytest.approx(mean[4], rel=1e-12)
        assert trial.intermediate_values == pytest.approx(mean, rel=1e-12)
        assert trial.user_attrs["seeds"] == [0, 1]
        assert trial.user_attrs["trials"] == [m["id"] for m in book.members() if m["name"] == arm]
    assert {row["name"]: row["optuna"] for row in book.arms()} == {"bf16": None, "rht=true": 0, "rht=false": 1}
    book.close()


def copy(swept, folder):
    """The sweep in a folder of its own, to be harmed."""
    import shutil

    shutil.copytree(swept / "sweeps", folder / "sweeps")
    shutil.copytree(swept / "trials", folder / "trials")
    return load(swept / "tiny.yaml")


def test_a_deleted_journal_is_drawn_again_as_it_was(swept, tmp_path):
    experiment = copy(swept, tmp_path)
    (tmp_path / "sweeps" / "tiny" / "optuna.log").unlink()
    outcome, _ = sweep(experiment, tmp_path)
    assert outcome.ran == 0
    assert told(tmp_path) == told(swept)


def test_a_torn_last_line_and_a_stale_lock_are_repaired(swept, tmp_path):
    experiment = copy(swept, tmp_path)
    journal = tmp_path / "sweeps" / "tiny" / "optuna.log"
    before = journal.read_bytes()
    journal.write_bytes(before + b'{"op_code": 4, "worker_')
    (journal.parent / "optuna.log.lock").symlink_to(journal)
    started = time.monotonic()
    sweep(experiment, tmp_path)
    assert time.monotonic() - started < 5
    assert all(json.loads(line) for line in journal.read_bytes().splitlines())
    assert journal.read_bytes().startswith(before)
    assert told(tmp_path) == told(swept)


def test_an_arm_that_was_never_told_is_told_by_the_next_run(swept, tmp_path):
    experiment = copy(swept, tmp_path)
    journal = tmp_path / "sweeps" / "tiny" / "optuna.log"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])  # the driver died while it told the last arm
    sweep(experiment, tmp_path)
    assert told(tmp_path) == told(swept)


def test_a_point_queued_by_a_driver_that_died_does_not_shift_the_others(tmp_path):
    experiment = tiny(tmp_path)
    (tmp_path / "sweeps" / "tiny").mkdir(parents=True)
    study = Study(tmp_path / "sweeps" / "tiny" / "optuna.log", experiment, [])
    study.study.enqueue_trial({"rht": True}, user_attrs={"arm": "rht=true"})
    sweep(experiment, tmp_path)
    complete = [trial for trial in trials(tmp_path) if trial.state == TrialState.COMPLETE]
    assert [(t.user_attrs["arm"], t.params["rht"]) for t in complete] == [("rht=true", True), ("rht=false", False)]
    assert not any(trial.state in (TrialState.WAITING, TrialState.RUNNING) for trial in trials(tmp_path))


def test_a_point_that_the_ledger_does_not_know_is_not_left_running(tmp_path):
    search = tiny(tmp_path, ablate={"cooldown": {"uniform": [0, 0.5]}}, search={"trials": 2}, seeds=1)
    (tmp_path / "sweeps" / "tiny").mkdir(parents=True)
    Study(tmp_path / "sweeps" / "tiny" / "optuna.log", search, []).ask()  # and then its driver died
    sweep(search, tmp_path)
    assert [trial.state.name for trial in trials(tmp_path)] == ["COMPLETE", "COMPLETE"]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_sampler_proposes_points_inside_a_mixed_space(sampler, tmp_path):
    experiment = tiny(tmp_path, ablate=MIXED, search={"trials": 40, "sampler": sampler, "seed": 3})
    study = Study(tmp_path / "optuna.log", experiment, [])
    points = []
    for n in range(14):
        number, knobs = study.ask()
        assert number == n
        assert list(knobs) == list(MIXED)
        assert 1e-4 <= knobs["workload.lr"] <= 1e-1
        assert 0 <= knobs["cooldown"] <= 0.75
        assert knobs["workload.batch"] in (1, 2, 3, 4)
        assert type(knobs["workload.batch"]) is int
        assert knobs["rht"] in (True, False)
        assert knobs["recipe.wgrad.g"] in MIXED["recipe.wgrad.g"]["choice"]
        value = math.inf if n == 3 else math.nan if n == 5 else math.log10(knobs["workload.lr"]) ** 2 + knobs["cooldown"]
        study.tell(number, value, {}, {})
        points.append(knobs)
    assert len({json.dumps(point) for point in points}) == 14


def test_a_study_opened_again_does_not_propose_the_same_points_again(tmp_path):
    experiment = tiny(tmp_path, ablate={"workload.lr": {"uniform": [0.001, 0.1]}}, search={"trials": 9})
    points: list[Point] = []
    for n in range(4):
        number, knobs = Study(tmp_path / "optuna.log", experiment, points).ask()
        assert number == n
        points.append(Point(f"{n}", knobs, None))
    assert len({point.knobs["workload.lr"] for point in points}) == 4


def test_the_same_seed_proposes_the_same_points_and_another_seed_others(tmp_path):
    def first(name: str, seed: int) -> list[dict]:
        experiment = tiny(tmp_path, ablate={"workload.lr": {"uniform": [0.001, 0.1]}}, search={"trials": 9, "seed": seed})
        study = Study(tmp_path / name, experiment, [])
        return [study.ask()[1] for _ in range(3)]

    assert first("a", 1) == first("b", 1) != first("c", 2)


def test_a_search_goes_on_after_its_budget_and_asks_for_no_more_than_its_trials(tmp_path):
    keys = {"ablate": {"cooldown": {"uniform": [0.0, 0.75]}, "rht": [True, False]}, "search": {"trials": 5, "sampler": "tpe"}}
    first, _ = sweep(tiny(tmp_path, budget={"trials": 5}, **keys), tmp_path)
    assert (first.status, first.ran) == ("budget", 5)
    second, _ = sweep(tiny(tmp_path, **keys), tmp_path)
    assert second.status == "done"
    found = trials(tmp_path)
    assert [(trial.number, trial.state) for trial in found] == [(n, TrialState.COMPLETE) for n in range(5)]
    assert len({trial.params["cooldown"] for trial in found}) == 5
    book = ledger(tmp_path)
    assert [row["optuna"] for row in book.arms()] == [None, 0, 1, 2, 3, 4]
    assert {m["status"] for m in book.members()} == {"done"}
    by_arm = {t.number: [book.last_values(m["trial"])["val/loss"] for m in book.members() if m["optuna"] == t.number] for t in found}
    book.close()
    assert {t.number: t.value for t in found} == pytest.approx({n: sum(v) / 2 for n, v in by_arm.items()})
    third, _ = sweep(tiny(tmp_path, **keys), tmp_path)
    assert (third.status, third.ran, len(trials(tmp_path))) == ("done", 0, 5)


def test_a_combination_that_cannot_be_run_does_not_end_a_search(tmp_path):
    keys = {"ablate": {"skip_first": {"int": [0, 2]}, "skip_last": {"int": [0, 2]}}, "search": {"trials": 9, "sampler": "random"}}
    experiment = tiny(tmp_path, shape={"layers": 3}, seeds=1, **keys)
    outcome, news = sweep(experiment, tmp_path)
    assert outcome.status == "done"
    states = [trial.state.name for trial in trials(tmp_path)]
    assert set(states) == {"COMPLETE", "FAIL"}
    assert len(states) == 9
    assert sum("cannot be run: skip_last: keeps all 3 blocks in high precision" in line for line in news) == states.count("FAIL")
    again, _ = sweep(experiment, tmp_path)
    assert (again.status, again.ran, [trial.state.name for trial in trials(tmp_path)]) == ("done", 0, states)


@pytest.mark.slow
def test_an_arm_that_failed_and_then_succeeded_is_complete(tmp_path):
    experiment = tiny(tmp_path, seeds=1, retry=0)
    train = tmp_path / "train.bin"
    train.rename(tmp_path / "away")
    assert sweep(experiment, tmp_path, connect=Children)[0].status == "failed"
    (tmp_path / "away").rename(train)
    assert sweep(experiment, tmp_path, connect=Children)[0].status == "done"
    assert [trial.state for trial in trials(tmp_path) if trial.user_attrs.get("arm") == "rht=true"][-1] == TrialState.COMPLETE


def test_what_is_told_is_what_the_file_says_is_better(tmp_path):
    path = write(tmp_path, metric={"name": "val/loss", "direction": "maximize"})
    points = [Point("rht=true", {"rht": True}, None), Point("rht=false", {"rht": False}, None)]
    study = Study(tmp_path / "optuna.log", load(path), points)
    for number, value in enumerate((1.0, 2.0)):
        study.tell(number, value, {}, {})
    assert study.study.best_trial.number == 1
    assert content(tmp_path)["seeds"] == 2
