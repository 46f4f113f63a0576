"""Tests of the trials that a sweep wants: nothing computed twice, nothing lost, whichever sweep, ledger or version of the code began it."""

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from support.experiments import Children, events_of, idle, ledger, statuses, sweep, tiny, values
from support.gates import Gate
from support.studies import trials

from ablate.errors import InputError
from ablate.execution import sweep_control
from ablate.execution.controller import Controller
from ablate.execution.messages import Ended, Message, TrialRequest
from ablate.execution.progress import Outcome, RunOptions
from ablate.execution.supervisor import run_inline
from ablate.execution.trial_runner import Superseded, run
from ablate.execution.workers import Inline
from ablate.numerics import spec as numerics
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Store
from ablate.store.verify import verify

OWN = ("throughput/", "memory/")


def wished(experiment, state: Path, **options) -> tuple[Outcome, list[str]]:
    """Run the sweep in this process with options; its outcome and what it said."""
    steps = list(Controller(experiment, state, "cpu", Inline, None, RunOptions(**options)).run())
    return steps[-1], [line for step in steps[:-1] for line in step.news]


def records(state: Path, name: str = "tiny") -> dict:
    """Everything recorded that two runs of one trial have in common, by arm and seed."""
    book = ledger(state, name)
    found = {
        (m.name, m.seed): {
            (step, key): value for step, key, value, _ in book.records(m.trial) if not key.startswith(OWN)
        }
        for m in book.members()
    }
    book.close()
    return found


def interrupted(experiment, state: Path, after: int) -> None:
    """Run the sweep and leave it once a trial has reached step `after`."""
    steps = Controller(experiment, state, "cpu", Inline, None).run()
    for step in steps:
        if any(running.step >= after for running in step.running):
            break
    steps.close()


# --- attempts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["another sweep", "a lost ledger"])
def test_who_goes_on_with_a_trial_that_another_began_loses_none_of_its_records(how, tmp_path):
    shape, keys = {"steps": 12, "eval_every": 4}, {"seeds": 1, "telemetry": {"checkpoint": 0, "log": 1}}
    interrupted(tiny(tmp_path, "tiny", shape, **keys), tmp_path / "a", after=6)
    name = "other" if how == "another sweep" else "tiny"
    if how == "a lost ledger":
        for path in (tmp_path / "a" / "sweeps" / "tiny").glob("ledger.db*"):
            path.unlink()
    outcome, news = sweep(tiny(tmp_path, name, shape, **keys), tmp_path / "a")
    assert outcome.status == "done"
    assert any("goes on from step" in line for line in news)
    sweep(tiny(tmp_path, "tiny", shape, **keys), tmp_path / "b")
    assert records(tmp_path / "a", name) == records(tmp_path / "b")


def test_attempts_are_numbered_by_the_store_whoever_asks(tmp_path):
    store, numbers = Store(tmp_path), []
    threads = [
        threading.Thread(target=lambda: numbers.extend(store.begin("t") for _ in range(50))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 201))


def test_an_attempt_that_wakes_up_after_a_later_one_began_writes_nothing_more(tmp_path):
    experiment, store = tiny(tmp_path, shape={"steps": 8}), Store(tmp_path)
    spec = experiment.spec(experiment.arms[0], 0, "cpu")
    old = run(spec, store, store.begin(spec.id), {"log": 1})
    assert [next(old)["step"], next(old)["step"]] == [1, 2]
    (
        store.folder(spec.id) / "lock"
    ).unlink()  # what a file system does that has lost sight of the old one's machine
    new = list(run(spec, store, store.begin(spec.id), {"log": 1}))
    assert [event["step"] for event in new] == list(range(1, 9))
    with pytest.raises(Superseded, match=r"attempt 1 .* superseded by a later one"):
        next(old)
    assert len((store.folder(spec.id) / "events-1.jsonl").read_text().splitlines()) == 2
    assert store.result(spec.id)["attempt"] == 2


def test_who_wants_a_trial_that_another_process_runs_says_so_waits_and_adopts_it(tmp_path):
    experiment, store = tiny(tmp_path, shape={"steps": 60}), Store(tmp_path)
    spec = experiment.spec(experiment.arms[0], 0, "cpu")
    first = run(spec, store, store.begin(spec.id), {"log": 1})
    next(first)
    request = TrialRequest(spec.id, spec.wire, str(tmp_path), store.begin(spec.id), {"log": 1})
    heard: list[Message] = []
    listener = threading.Thread(target=lambda: heard.extend(run_inline(request)))
    listener.start()
    rest = list(first)
    listener.join(60)
    assert heard[0].holder.endswith(", attempt 1")
    assert [event["step"] for event in events_of(heard)] == [1, *(event["step"] for event in rest)]
    assert heard[-1].status == "done"


# --- what does not match --------------------------------------------------------------------------


def test_a_ledger_that_says_otherwise_than_the_folders_is_read_again_and_said(tmp_path):
    experiment = idle(tmp_path, seeds=1)
    sweep(experiment, tmp_path)
    before = records(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "sweeps" / "tiny" / "ledger.db")) as db:
        db.execute("UPDATE records SET value = value + 1e-9 WHERE trial = 2 AND step = 4")
        db.commit()
    for path in (tmp_path / "trials").glob("*/result.json"):
        path.touch()
    outcome, news = sweep(experiment, tmp_path)
    assert (outcome.ran, outcome.reused) == (0, 3)
    assert len(news) == 1
    assert records(tmp_path) == before
    with contextlib.closing(ledger(tmp_path)) as book:  # so that the next run need not read the files again
        for trial in {member.id for member in book.members()}:
            assert book.files_seen(trial) == Store(tmp_path).signature(trial)


def test_an_unfinished_trials_records_in_the_ledger_are_those_of_its_events(tmp_path):
    shape, keys = {"steps": 12, "eval_every": 4}, {"seeds": 1, "telemetry": {"checkpoint": 0, "log": 1}}
    experiment = tiny(tmp_path, "tiny", shape, **keys)
    interrupted(experiment, tmp_path / "a", after=6)
    with contextlib.closing(sqlite3.connect(tmp_path / "a" / "sweeps" / "tiny" / "ledger.db")) as db:
        db.execute("UPDATE records SET value = value + 1e-9 WHERE step = 3")
        db.commit()
    sweep(experiment, tmp_path / "a")
    sweep(experiment, tmp_path / "b")
    assert records(tmp_path / "a") == records(tmp_path / "b")


def test_a_trial_that_went_on_from_the_state_of_one_that_is_put_aside_runs_again_too(tmp_path):
    shape, keys = (
        {"steps": 20, "eval_every": 5},
        {"seeds": 1, "ablate": {"cooldown": [0, 0.25]}, "telemetry": {"log": 1}},
    )
    experiment = tiny(tmp_path, "tiny", shape, **keys)
    sweep(experiment, tmp_path)
    before = records(tmp_path)
    (forked,) = tmp_path.glob("trials/*/trunk-1.json")
    trunk = tmp_path / "trials" / json.loads(forked.read_text())["trial"] / "events-1.jsonl"
    trunk.write_bytes(
        b"".join(trunk.read_bytes().splitlines(keepends=True)[:-1])
    )  # beyond where the other went on
    outcome, _ = sweep(experiment, tmp_path)
    assert (outcome.status, outcome.ran, outcome.reused) == ("done", 2, 1)
    assert records(tmp_path) == before
    book = ledger(tmp_path)
    assert verify(book, Store(tmp_path)).mismatches == ()
    book.close()


def test_a_result_that_was_not_made_of_what_was_recorded_is_not_taken_and_the_trial_runs_again(
    tmp_path, monkeypatch
):
    experiment, spoiled = idle(tmp_path, seeds=1, retry=1), []

    class Spoiling(Inline):
        def wait(self, seconds: float) -> list[tuple[str, Message]]:
            answers = super().wait(seconds)
            if not spoiled and any(isinstance(message, Ended) for _, message in answers):
                # the disk loses the end of the first trial's events
                spoiled.append(Store(tmp_path).folder(answers[0][0]) / "events-1.jsonl")
                book = Ledger(tmp_path / "sweeps" / "tiny" / "ledger.db")
                book.db.execute("DELETE FROM records WHERE step = 4")
                book.close()
                spoiled[0].write_bytes(spoiled[0].read_bytes()[:-9])
            return answers

    outcome, news = sweep(experiment, tmp_path, connect=Spoiling)
    assert (outcome.status, outcome.ran) == ("done", 3)
    assert any(str(spoiled[0].parent) in line and line.endswith("retry 1/1") for line in news)
    sweep(experiment, tmp_path / "plain")
    assert records(tmp_path) == records(tmp_path / "plain")


# --- what is wanted -------------------------------------------------------------------------------


def test_fresh_runs_everything_again_once_and_keeps_what_was_there(tmp_path):
    experiment = idle(tmp_path, seeds=1)
    sweep(experiment, tmp_path)
    before = records(tmp_path)
    outcome, _ = wished(experiment, tmp_path, fresh=True)
    assert (outcome.ran, outcome.reused) == (3, 0)
    assert records(tmp_path) == before
    assert len(list((tmp_path / "retired").glob("*/result.json"))) == 3
    assert sweep(experiment, tmp_path)[0].ran == 0


def test_a_changed_sweep_says_what_it_wants_more_and_what_no_longer(tmp_path):
    """Without blaming the file: `--seeds` changes a sweep as well."""
    sweep(idle(tmp_path, seeds=1, ablate={"rht": [True, False]}), tmp_path)
    _, news = sweep(idle(tmp_path, seeds=2, ablate={"sr": [True, False]}), tmp_path)
    assert news[0] == "changed since the last run: +2 arms, 2 arms no longer wanted (kept), +1 seed"
    assert "changed" not in " ".join(
        sweep(idle(tmp_path, seeds=2, ablate={"sr": [True, False]}), tmp_path)[1]
    )


def test_code_that_changed_in_the_middle_of_a_sweep_is_refused_until_it_is_accepted(tmp_path, monkeypatch):
    experiment = idle(tmp_path, budget={"trials": 2})
    sweep(experiment, tmp_path)
    then = numerics.VERSION
    monkeypatch.setattr(numerics, "VERSION", then + 1)
    changed = idle(tmp_path)
    with pytest.raises(
        InputError,
        match=rf"2 trials are done under numerics version {then}, now {then + 1}, and 6 would run: .*--accept-version",
    ):
        sweep(changed, tmp_path)
    assert sorted(statuses(tmp_path).values()) == ["done"] * 2 + ["pending"] * 4  # as it was
    outcome, _ = wished(changed, tmp_path, accept_version=True)
    assert (outcome.status, outcome.ran) == ("done", 6)
    assert sweep(changed, tmp_path)[0].ran == 0
    monkeypatch.setattr(numerics, "VERSION", then)
    assert (
        wished(idle(tmp_path), tmp_path, accept_version=True)[0].ran == 4
    )  # what was done at first is still there
    monkeypatch.setattr(numerics, "VERSION", then + 1)
    assert sweep(changed, tmp_path)[0].ran == 0  # and all of it is done under this one too


def test_a_budget_of_cost_ends_a_run(tmp_path):
    experiment = tiny(tmp_path, budget={"cost": 1e-5})
    outcome, _ = wished(experiment, tmp_path, price=1.0)
    assert outcome.status == "budget"
    assert 1 <= outcome.ran < 6
    assert wished(experiment, tmp_path, price=1e-6)[0].status == "done"


# --- what is ordered, and what is full ------------------------------------------------------------


LONG = {"workload": {"idle": {"steps": 30}}}


def ordered(state: Path, order: dict, connect, monkeypatch) -> tuple[Outcome, list[str]]:
    """Run a sweep, and give an order once the first trial of rht=true is on its way; a child waits for it."""
    gate = Gate(state)
    gate.shut(1)
    monkeypatch.setenv("PYTHONPATH", gate.environment["PYTHONPATH"])
    experiment = tiny(state, seeds=1, retry=0, **LONG)
    running, news, outcome = Controller(experiment, state, "cpu", connect, None), [], None
    given = False
    for step in running.run():
        if isinstance(step, Outcome):
            outcome = step
            continue
        news += step.news
        if not given and any(run.name == "rht=true" and run.step for run in step.running):
            given = True
            sweep_control.give(running.folder, order(step) if callable(order) else order)
        if any(": stopped" in line for line in step.news):
            gate.open()
    return outcome, news


@pytest.mark.parametrize("connect", [Inline, pytest.param(Children, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "order",
    [{"stop": "arm", "name": "rht=true"}, lambda step: {"stop": "trial", "id": step.running[0].work.spec.id}],
    ids=["an arm", "a trial"],
)
def test_what_is_stopped_keeps_its_records_and_goes_on_with_the_next_run(
    connect, order, tmp_path, monkeypatch
):
    outcome, news = ordered(tmp_path, order, connect, monkeypatch)
    assert (outcome.status, outcome.failed, outcome.ran) == ("failed", 1, 2)
    assert statuses(tmp_path) == {("bf16", 0): "done", ("rht=true", 0): "stopped", ("rht=false", 0): "done"}
    assert any(line.startswith("rht=true seed=0: stopped") for line in news)
    assert records(tmp_path)["rht=true", 0]
    experiment = tiny(tmp_path, seeds=1, **LONG)
    assert sweep(experiment, tmp_path)[0].status == "done"
    sweep(experiment, tmp_path / "plain")
    assert records(tmp_path) == records(tmp_path / "plain")


def test_a_stopped_sweep_ends_and_the_same_command_goes_on(tmp_path, monkeypatch):
    outcome, _ = ordered(tmp_path, {"stop": "sweep"}, Inline, monkeypatch)
    assert (outcome.status, outcome.ran) == ("stopped", 1)
    assert "goes on" in outcome.why
    assert sorted(statuses(tmp_path).values()) == ["done", "pending", "stopped"]


def test_an_order_to_a_controller_that_is_no_more_is_not_obeyed_by_the_next(tmp_path):
    experiment = idle(tmp_path, seeds=1, budget={"trials": 1})
    sweep(experiment, tmp_path)
    sweep_control.give(tmp_path / "sweeps" / "tiny", {"stop": "sweep"})
    assert sweep(idle(tmp_path, seeds=1), tmp_path)[0].status == "done"


def test_a_disk_that_is_nearly_full_starts_nothing_and_says_how_much_to_free(tmp_path):
    outcome, _ = sweep(idle(tmp_path, seeds=1), tmp_path, spare=1 << 60)
    assert (outcome.status, outcome.ran) == ("disk", 0)
    assert "free 11529" in outcome.why
    assert sweep(idle(tmp_path, seeds=1), tmp_path)[0].status == "done"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 24 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(path: Path) -> None:
    """Take all the room there is."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("connect", [Inline, pytest.param(Children, marks=pytest.mark.slow)])
def test_a_disk_that_runs_full_in_the_middle_of_a_sweep_loses_nothing(connect, small_disk, tmp_path):
    experiment = idle(tmp_path)
    ballast = small_disk / "ballast"
    running = Controller(experiment, small_disk, "cpu", connect, None, RunOptions(spare=0))
    for step in running.run():
        if not ballast.exists() and not isinstance(step, Outcome) and step.done == 1:
            fill(ballast)
    assert step.status == "disk"
    assert "full: free some of it, then run the same command again" in step.why
    ballast.unlink()
    outcome, _ = sweep(experiment, small_disk, spare=0)
    assert outcome.status == "done"
    sweep(experiment, tmp_path / "plain")
    assert records(small_disk) == records(tmp_path / "plain")


def test_room_is_made_by_removing_the_shared_checkpoints_that_were_unused_for_longest(tmp_path, monkeypatch):
    store = Store(tmp_path)
    for age, name in enumerate("abc"):
        store.shared(name).parent.mkdir(exist_ok=True)
        store.shared(name).write_bytes(b"x" * 1000)
        os.utime(store.shared(name), (1000 - age, 1000 - age))
    usage = shutil.disk_usage(tmp_path)

    def left(path):
        return usage._replace(free=sum(1000 for name in "abc" if not store.shared(name).exists()))

    monkeypatch.setattr(shutil, "disk_usage", left)
    assert store.collect(2000)
    assert [name for name in "abc" if store.shared(name).exists()] == ["a"]
    assert not store.collect(4000)


# --- seeds that grow ------------------------------------------------------------------------------


def test_undecided_arms_get_more_seeds_with_their_baselines_and_a_second_run_asks_for_none(tmp_path):
    grows = idle(
        tmp_path, seeds={"start": 2, "most": 6, "step": 2}, metric={"name": "val/loss", "min_effect": 1e-9}
    )
    outcome, news = sweep(grows, tmp_path)
    assert outcome.status == "done"
    found = values(tmp_path)
    assert {seed for name, seed in found if name == "bf16"} == {0, 1, 2, 3, 4, 5}
    assert sum("undecided after 2 seeds, 2 more" in line for line in news) == 2
    again, said = sweep(grows, tmp_path)
    assert (again.status, again.ran, values(tmp_path)) == ("done", 0, found)
    assert not any("edited" in line for line in said)


def test_an_arm_that_is_decided_gets_no_more_seeds(tmp_path):
    grows = idle(
        tmp_path, seeds={"start": 3, "most": 6, "step": 2}, metric={"name": "val/loss", "min_effect": 100.0}
    )
    sweep(grows, tmp_path)
    assert {seed for _, seed in values(tmp_path)} == {0, 1, 2}


def test_an_arm_that_grew_is_one_point_of_the_study_with_the_mean_of_all_its_seeds(tmp_path):
    grows = idle(
        tmp_path, seeds={"start": 2, "most": 4, "step": 1}, metric={"name": "val/loss", "min_effect": 1e-9}
    )
    sweep(idle(tmp_path, seeds=2), tmp_path)  # told with two seeds, before it grows
    sweep(grows, tmp_path)
    found = values(tmp_path)
    for trial in trials(tmp_path):
        own = [value for (name, _), value in found.items() if name == trial.user_attrs["arm"]]
        assert len(own) == 4
        assert trial.value == pytest.approx(sum(own) / 4, rel=1e-12)


# --- searches -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("connect", [Inline, Children])
def test_an_arm_that_its_pruner_gives_up_stops_at_its_rung_with_all_its_seeds(connect, tmp_path):
    search = {"trials": 8, "sampler": "random", "seed": 1, "pruner": "median", "rungs": [3]}
    seconds = 0.04 if connect is Children else 0.0  # or its trials end before they can be given up
    knobs = {"recipe.layers.last_fraction": {"uniform": [0.0, 0.9]}}  # one baseline for all
    experiment = tiny(
        tmp_path, workload={"idle": {"steps": 20, "seconds": seconds}}, search=search, ablate=knobs
    )
    outcome, news = sweep(experiment, tmp_path, connect=connect)
    assert outcome.status == "done"
    found = statuses(tmp_path)
    given_up = {name for (name, _), status in found.items() if status == "pruned"}
    assert given_up
    assert sum("pruned: given up by median at 3" in line for line in news) == len(given_up)
    last = {
        name: max((step for step, _ in kept), default=0)
        for (name, _), kept in records(tmp_path).items()
        if name in given_up
    }
    assert all(step < experiment.base.config.steps for step in last.values())
    states = {trial.user_attrs["arm"]: trial.state.name for trial in trials(tmp_path)}
    assert {name for name, state in states.items() if state == "PRUNED"} == given_up
    again, _ = sweep(experiment, tmp_path)
    assert (again.status, again.ran, statuses(tmp_path)) == ("done", 0, found)


def test_the_winner_of_a_search_runs_again_on_fresh_seeds_once(tmp_path):
    search = {"trials": 4, "sampler": "random", "seed": 1, "confirm": 3}
    experiment = idle(tmp_path, search=search, ablate={"workload.x": {"uniform": [-1.0, 1.0]}})
    outcome, news = sweep(experiment, tmp_path)
    assert outcome.status == "done"
    found = statuses(tmp_path)
    fresh = {(name, seed) for name, seed in found if name.startswith("confirm: ")}
    assert {seed for _, seed in fresh} == {2, 3, 4}
    assert len(fresh) == 3
    assert any("runs again on 3 fresh seeds" in line for line in news)
    assert any(line.startswith("winner on fresh seeds, ") for line in news)
    assert not any("confirm: " in line for line in news)
    again, _ = sweep(experiment, tmp_path)
    assert (again.status, again.ran, statuses(tmp_path)) == ("done", 0, found)
