"""Orders to a sweep that runs: names are checked first, what will happen is said, and the order arrives."""

import json
import sqlite3
import subprocess
import sys

import pytest
from support.commands import INLINE, here
from support.experiments import end, environment, ledger, start, statuses, sweep, tiny, until, values, write
from support.processes import HOLD_LOCK, ready_process

from ablate.execution.sweep_control import take
from ablate.experiment.load import load

TAKE = """
import json, sys, time
from pathlib import Path
from ablate.execution.sweep_control import take
from ablate.experiment.load import load
from ablate.files import lock
folder = Path(sys.argv[1])
with lock(folder / "lock"):
    print("ready", flush=True)
    while True:
        for order in take(folder):
            print(json.dumps(order), flush=True)
        time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """The state folder of a sweep of which 2 of 6 trials are done; orders to it are taken or taken back."""
    folder = tmp_path_factory.mktemp("stop")
    sweep(tiny(folder, budget={"trials": 2}), folder / "state")
    return folder / "state"


@pytest.fixture
def taker(state):
    """A process that holds the sweep and takes its orders, as a controller does."""
    found = ready_process(TAKE, state / "sweeps" / "tiny")
    yield found
    end(found)


def refused(*words, state) -> str:
    done = here(*words, "--state", state)
    assert done.returncode == 2, done.stdout
    assert not list(state.glob("sweeps/*/orders/*"))
    (line,) = done.stderr.splitlines()
    return line


def test_an_order_arrives_and_what_will_happen_is_said(state, taker):
    trial = sorted(path.name for path in state.glob("trials/*"))
    waiting = tiny(state.parent).spec(tiny(state.parent).arms[1], 1, "cpu").id
    assert waiting not in trial
    commands = {
        ("stop", "tiny"): (
            {"stop": "sweep"},
            "The sweep: 4 waiting trials will not be started; records are kept.",
        ),
        ("stop", state.parent / "tiny.yaml", "--arm", "rht=true"): (
            {"stop": "arm", "name": "rht=true"},
            "Arm rht=true: 1 waiting trial will not be started; records are kept.",
        ),
        ("stop", "tiny", "--trial", waiting[:10]): (
            {"stop": "trial", "id": waiting},
            f"Trial {waiting}: 1 waiting trial will not be started",
        ),
        ("stop", "tiny", "--workers", "3"): ({"workers": 3}, "3 trials at once from now on"),
    }
    for words, (order, said) in commands.items():
        done = here(*words, "--state", state)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(said)
        assert done.stdout.endswith("Accepted.\n")
        assert json.loads(taker.stdout.readline()) == order


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("stop", "tinny"), "tinny: no such sweep in "),
        (
            ("stop", "tiny", "--arm", "rht=tru"),
            "--arm rht=tru: no such arm; 'rht=true' is the nearest of rht=true, rht=false, bf16",
        ),
        (("stop", "tiny", "--trial", "zzz"), "--trial zzz: no such trial; "),
        (("stop", "tiny", "--trial", ""), "--trial: it is empty; give "),
        (("stop", "tiny", "--arm", ""), "--arm : no such arm; "),
        (("stop", "tiny", "--arm", "a", "--trial", "b"), "--arm and --trial: both were given"),
        (("stop", "tiny", "--trial", "b", "--workers", "2"), "--trial and --workers: both were given"),
        (("stop", "tinny", "--workers", "3"), "tinny: no such sweep in "),
    ],
    ids=["sweep", "arm", "trial", "empty trial", "empty arm", "both", "and workers", "workers"],
)
def test_a_wrong_name_is_told_and_nothing_is_ordered(words, said, state, taker):
    assert refused(*words, state=state).startswith(said)


def test_what_is_over_cannot_be_stopped(state, taker):
    done = next(iter(state.glob("trials/*/result.json"))).parent.name
    assert (
        refused("stop", "tiny", "--trial", done, state=state)
        == f"Trial {done} has already ended (done): there is nothing to stop"
    )


@pytest.mark.parametrize("words", [("stop", "tiny"), ("stop", "tiny", "--workers", "2")], ids=" ".join)
def test_a_sweep_that_nobody_runs_is_told(words, state):
    assert (
        refused(*words, state=state) == "tiny: this sweep is not running; there is nothing to stop or change"
    )


def test_fewer_than_one_worker_is_refused(state):
    assert here("stop", "tiny", "--workers", "0", "--state", state).returncode == 2


def test_an_order_that_nobody_lived_to_take_is_taken_back(state):
    holder = ready_process(HOLD_LOCK, state / "sweeps" / "tiny" / "lock")
    command = [sys.executable, "-m", "ablate", "stop", "tiny", "--state", str(state)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    stopping = subprocess.Popen(command, text=True, env=environment(), **pipes)
    assert stopping.stdout.readline().startswith("The sweep: 4 ")
    end(holder)
    _, errors = stopping.communicate(timeout=300)
    assert (stopping.returncode, errors) == (2, "tiny: its controller ended before it accepted the order\n")
    assert take(state / "sweeps" / "tiny") == []


# A sweep that really runs


def found(state) -> dict[tuple[str, int], str]:
    try:
        return statuses(state)
    except sqlite3.OperationalError:  # its ledger is not there, or not yet filled
        return {}


def asleep(folder, seconds: float):
    """A sweep of two short trials and two that last; how long a trial sleeps before each of its records is no part of what it is."""
    arms = {"long": {"rht": True, "workload.steps": 600}, "short": {"rht": False}}
    return write(folder, workload={"idle": {"steps": 3, "seconds": seconds}}, ablate=None, arms=arms, seeds=1)


def running_member(state, name: str) -> str:
    """The id of an arm's trial, once that runs."""
    until(lambda: found(state).get((name, 0)) == "running")
    book = ledger(state)
    (trial,) = [member.id for member in book.members() if member.name == name]
    book.close()
    return trial


@pytest.mark.slow
def test_a_trial_an_arm_and_a_sweep_that_are_stopped_let_the_others_go_on_and_go_on_later(tmp_path):
    path, state = asleep(tmp_path, 0.5), tmp_path / "state"
    driver = start("sweep", path, "--state", state, *INLINE)
    try:
        trial = running_member(state, "bf16 steps=600")
        until(lambda: seen(state, trial))
        done = here("stop", "tiny", "--arm", "long", "--state", state)
        assert done.stdout.startswith("Arm long: 1 waiting trial will not be started; records are kept.")
        done = here("stop", "tiny", "--trial", trial, "--state", state)
        assert done.stdout.startswith(f"Trial {trial}: 1 running trial will be ended; records are kept.")
        output, _ = driver.communicate(timeout=600)
    finally:
        end(driver)
    assert driver.returncode == 1, output
    assert found(state) == {
        ("bf16 steps=600", 0): "stopped",
        ("bf16", 0): "done",
        ("long", 0): "stopped",
        ("short", 0): "done",
    }
    assert seen(state, trial)

    driver = start("sweep", path, "--state", state, *INLINE)
    try:
        assert running_member(state, "bf16 steps=600") == trial
        done = here("stop", "tiny", "--state", state)
        assert (done.returncode, "Accepted." in done.stdout) == (0, True)
        output, _ = driver.communicate(timeout=300)
    finally:
        end(driver)
    assert driver.returncode == 130
    assert "Stopped as ordered. Nothing is lost: the same command goes on." in output
    assert sorted(found(state).values()) == ["done", "done", "pending", "stopped"]

    done = here("sweep", asleep(tmp_path, 0.0), "--state", state, *INLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    sweep(load(path), tmp_path / "undisturbed")
    assert values(state) == values(tmp_path / "undisturbed")


def seen(state, trial: str) -> int:
    """Return how many values of a trial the ledger has."""
    book = ledger(state)
    (number,) = [member.trial for member in book.members() if member.id == trial]
    records = len(list(book.records(number)))
    book.close()
    return records
