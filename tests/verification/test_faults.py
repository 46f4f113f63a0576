"""Tests of survival: trials killed while they share their beginnings, heads and nodes of Ray that go, and the whole suite of faults."""

import contextlib
import math
import re
import shutil
import sqlite3
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.clusters import end_family
from support.commands import INLINE, here
from support.experiments import (
    gone,
    ledger,
    start,
    statuses,
    sweep,
    tiny,
    until,
    words_of,
    write,
)
from support.gates import Gate

from ablate.execution import controller
from ablate.execution.shared_prefixes import Family
from ablate.execution.sweep_control import damage, put_aside
from ablate.execution.trial_runner import run
from ablate.execution.workers import Inline
from ablate.execution.workers.pool import Placements
from ablate.store.trial_store import Store
from ablate.store.verify import verify
from ablate.training.metric_names import parse
from ablate.verification import audit, passed_checks
from ablate.verification.fault_plan import deck
from ablate.verification.injections import CHECKPOINT, FAULTS, HARMS, KINDS
from ablate.verification.services import MARK, trials_in

# Trials that go on from each other's states


TELEMETRY = {"every": 5, "shadow": 5, "log": 1, "checkpoint": 60.0}
SHAPE = {"steps": 20, "eval_every": 5}


def advance(spec, family, state: Path, attempt: int, new: int | None = None) -> list[dict]:
    """Run an attempt, and end it after so many steps of its own as a kill does: without a checkpoint of its own. All that it told."""
    events, told, began = run(spec, Store(state), attempt, TELEMETRY, family.points(spec)), [], time.time()
    for event in events:
        told.append(event)
        if new and sum(one["time"] >= began for one in told) == new:
            break
    events.close()
    return told


def recorded(events) -> dict[tuple[int, str], float]:
    """Everything that no clock and no allocator decides."""
    found = {(event["step"], name): value for event in events for name, value in event["metrics"].items()}
    return {key: value for key, value in found.items() if not parse(key[1]).of_machine}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Two trials that part after 15 of 20 steps, each with a common state at 10 too, and what both record undisturbed."""
    folder = tmp_path_factory.mktemp("shared")
    experiment = tiny(folder, shape=SHAPE, ablate={"cooldown": [0, 0.25, 0.5]}, seeds=1)
    first, second, third = [experiment.spec(arm, 0, "cpu") for arm in experiment.arms if arm.name != "bf16"]
    family = Family([first, second, third])
    assert [[step for step, _ in family.points(spec)] for spec in (first, second)] == [[15, 10]] * 2
    plain = [recorded(run(spec, Store(folder / "plain"), 1, TELEMETRY)) for spec in (first, second)]
    return first, second, family, plain


def test_a_trial_that_goes_on_from_the_state_it_left_for_others_has_all_its_records(shared, tmp_path):
    first, _, family, (plain, _) = shared
    advance(first, family, tmp_path, 1, new=12)
    told = advance(first, family, tmp_path, 2)
    assert recorded(Store(tmp_path).events(first.id)) == recorded(told) == plain
    assert [event["resumed"] for event in told if "resumed" in event] == [10]
    files = sorted(path.name for path in Store(tmp_path).folder(first.id).glob("events-*"))
    assert files == ["events-1.jsonl", "events-2.jsonl"]


def test_two_trials_that_each_go_on_from_a_state_of_the_other_have_all_their_records(shared, tmp_path):
    first, second, family, plain = shared
    advance(first, family, tmp_path, 1, new=12)  # leaves 10
    told = [advance(second, family, tmp_path, 1)]  # goes on from there, and leaves 15
    told.insert(0, advance(first, family, tmp_path, 2))  # which is the furthest now
    assert [recorded(found) for found in told] == plain
    assert [event["resumed"] for event in told[0] if "resumed" in event][-1] == 15
    events = [list(Store(tmp_path).events(spec.id)) for spec in (first, second)]
    assert [recorded(found) for found in events] == plain
    assert [max(Counter(event["step"] for event in found).values()) for found in events] == [
        1,
        1,
    ]  # 11 and 12 count once


# What the audit sees


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished sweep and a second run of it in another state folder."""
    folder = tmp_path_factory.mktemp("finished")
    for state in ("ours", "theirs"):
        sweep(tiny(folder, seeds=1), folder / state)
    return folder


DAMAGE = {
    "a record is lost": ("DELETE FROM records WHERE trial = 1 AND step = 4", {"lost"}),
    "a value is another": ("UPDATE records SET value = value + 1e-9 WHERE trial = 1 AND step = 4", {"wrong"}),
    "a record is too many": (
        "INSERT INTO records SELECT trial, name, 3, value, time FROM records WHERE step = 4",
        {"wrong"},
    ),
    "a trial is not done": ("UPDATE trials SET status = 'running' WHERE trial = 2", {"lost"}),
    "a member is lost": ("DELETE FROM members WHERE arm = 2", {"lost"}),
    "an attempt never ended": ("UPDATE attempts SET ended = NULL WHERE trial = 1", {"wrong"}),
    "a trial was run twice": (
        "INSERT INTO attempts SELECT trial, 2, started, ended, outcome, reason FROM attempts",
        {"twice"},
    ),
}


def examine(folder: Path) -> list[audit.Finding]:
    mine, theirs = (folder / state / "sweeps" / "tiny" for state in ("ours", "theirs"))
    return [*audit.sweep(folder / "ours", mine, theirs), *audit.study(mine)]


def test_nothing_is_found_in_a_sweep_that_nothing_disturbed(finished):
    assert examine(finished) == []


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_ledger_is_found(what, finished, tmp_path):
    statement, kinds = DAMAGE[what]
    folder = shutil.copytree(finished, tmp_path / "copy")
    with contextlib.closing(sqlite3.connect(folder / "ours" / "sweeps" / "tiny" / "ledger.db")) as db:
        db.execute(statement)
        db.commit()
    assert kinds <= {found.kind for found in examine(folder)}


@pytest.mark.parametrize("what", ["result.json", "events-1.jsonl"])
def test_a_damaged_trial_folder_is_found(what, finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "copy")
    next((folder / "ours" / "trials").iterdir()).joinpath(what).unlink()
    assert {found.kind for found in examine(folder)} == {"lost"}


def test_the_same_seed_makes_the_same_faults_and_leaves_no_kind_out():
    drawn = [list(islice(deck(list(KINDS), np.random.default_rng(seed)), 100)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    counts = Counter(drawn[0])
    assert set(counts) == set(KINDS)
    assert min(counts[name] for name in KINDS) >= 2


LOGGED = {"seeds": 1, "telemetry": {"checkpoint": 0, "log": 1}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a finished sweep, with its file two folders above."""
    folder = tmp_path_factory.mktemp("undisturbed")
    sweep(tiny(folder, "tiny", {"steps": 8}, **LOGGED), folder)
    return folder / "sweeps" / "tiny"


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """The state folder of the same sweep, ended within its second trial."""
    folder = tmp_path_factory.mktemp("left")
    experiment = tiny(folder, "tiny", {"steps": 8}, **LOGGED)
    steps = controller.Controller(experiment, folder / "state", "cpu", Inline, None).run()
    for step in steps:
        if step.done == 1 and any(running.step >= 5 for running in step.running):
            break
    steps.close()
    return folder / "state"


@pytest.mark.slow
@pytest.mark.parametrize("kind", HARMS)
def test_what_is_corrupted_is_said_and_made_again_and_the_values_are_those_of_an_undisturbed_run(
    kind, left, undisturbed, tmp_path
):
    """First in a sweep that was left and then in the finished one; without Ray and MLflow."""
    experiment = tiny(tmp_path, "tiny", {"steps": 8}, **LOGGED)
    state, rng = tmp_path / "ours", np.random.default_rng(17)
    shutil.copytree(left, state)
    folder = state / "sweeps" / "tiny"
    for _ in range(2):
        done = HARMS[kind].do(state, folder, rng)
        if damage(folder / "ledger.db"):
            put_aside(folder / "ledger.db")  # as `rebuild` does
        assert sweep(experiment, state)[0].status == "done"
        assert done or kind == CHECKPOINT
    assert [*audit.sweep(state, folder, undisturbed)] == []
    book = ledger(state)
    assert (verify(book, Store(state)).verified, verify(book, Store(state)).mismatches) == (3, ())
    book.close()


# The suite


@pytest.mark.services
@pytest.mark.slow
def test_five_faults_of_unlike_parts_lose_nothing_repeat_nothing_and_leave_nothing_behind():
    """The corruptions of each kind have their test above."""
    number, seed = 5, 55883
    names = list(islice(deck(list(KINDS), np.random.default_rng(seed)), number))
    kinds = [FAULTS[name] for name in names if name in FAULTS]
    assert {kind.role for kind in kinds} == {"MLflow", "trial", "controller", "worker"}
    assert len({kind.signal for kind in kinds}) >= 2
    assert any(kind.then for kind in kinds)
    assert len({name for name in names if name in HARMS}) == 1
    bench = start("bench", "faults", "--faults", number, "--seed", seed)
    try:
        output, _ = bench.communicate(timeout=500)
    finally:
        end_family(bench)  # its servers and its Ray, too, if it takes too long
        bench.stdout.close()
    assert bench.returncode == 0, output
    assert f"faults {number}, silent differences 0, losses 0, duplicates 0" in output.splitlines()


def test_the_mark_of_a_suites_processes_does_not_make_them_repeat_the_checks_of_the_numerics(monkeypatch):
    before = passed_checks.subject()
    monkeypatch.setenv(MARK, "a command")
    assert passed_checks.subject() == before


# Ray


@pytest.mark.services
@pytest.mark.slow
def test_a_lost_head_of_ray_ends_the_command_with_status_130_and_the_same_command_goes_on(tmp_path):
    """Its head is lost in the first run of the command, and its process on this machine in the second, which goes on; the third is inline."""
    idle, gate = {"idle": {"steps": 2}}, Gate(tmp_path)
    path, state = write(tmp_path, workload=idle, ablate={"rht": [True]}, seeds=1), tmp_path / "state"
    gate.shut()
    words = ("sweep", path, "--state", state, "--workers", 1, "--mlflow", "none")
    for part in ("gcs_server", "raylet"):
        driver = start(*words, **gate.environment)
        until(
            lambda driver=driver: (
                trials_in(psutil.Process(driver.pid)) and list(state.glob("trials/*/events-*.jsonl"))
            ),
            60,
        )
        (victim,) = [
            process
            for process in psutil.Process(driver.pid).children(recursive=True)
            if process.name() == part
        ]
        family = [
            process
            for process in psutil.Process(driver.pid).children(recursive=True)
            if "ablate.execution.trial_process" in words_of(process)
        ]
        victim.kill()
        output, _ = driver.communicate(timeout=300)
        assert driver.returncode == 130, output
        assert re.search(
            r"Ray's (head|process on this machine) at \S+ is gone .*Nothing is lost: the same command goes on\.",
            output,
        )
        assert "Traceback" not in output
        assert family
        until(lambda family=family: gone(family))
    gate.open()
    assert here("sweep", path, "--state", state, *INLINE).returncode == 0
    assert set(statuses(state).values()) == {"done"}


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (
            "127.0.0.1:9",
            "Ray cannot be reached at 127.0.0.1:9: Connection refused; `ray start --head` prints the address of a head",
        ),
        (
            "nowhere",
            "Ray cannot be reached at nowhere: that is no address; give host:port, auto, or ray://host:port",
        ),
    ],
)
def test_an_address_where_no_ray_is_gets_a_hint(address, said, tmp_path):
    path = write(tmp_path, workload={"idle": {"steps": 2}}, ablate={"rht": [True]}, seeds=1)
    words = ("--state", tmp_path / "state", "--mlflow", "none", "--address", address)
    done = here("sweep", path, *words)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, said)


def test_a_place_on_a_lost_node_is_forgotten():
    """The next attempt would wait there until Ray learns of it, and be lost again."""
    placements = Placements()
    placements.places, placements.counted = [{"lost": 1}, {"kept": 1}], 5.0
    placements.lose(["lost"])
    assert placements.lost_nodes() == {"lost"}
    assert placements.counted == -math.inf  # counted again at once
    assert placements.places == [{"kept": 1}]
