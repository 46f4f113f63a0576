"""Tests of survival: trials killed while they share their beginnings, and heads and nodes of Ray that go."""

import math
import re
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from support.commands import INLINE, here
from support.experiments import (
    gone,
    start,
    statuses,
    tiny,
    until,
    words_of,
    write,
)
from support.gates import Gate
from support.services import trials_in

from ablate.execution.shared_prefixes import Family
from ablate.execution.trial_runner import run
from ablate.execution.workers.pool import Placements
from ablate.store.trial_store import Store
from ablate.training.metric_names import parse

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
