"""Tests of the status of a sweep, read from its ledger while it runs: true, quick, and without a trace."""

import hashlib
import json
import os
import pty
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial

import pytest
from support.commands import INLINE, here
from support.experiments import (
    TOO_LARGE,
    Children,
    end,
    environment,
    idle,
    start,
    sweep,
    tiny,
    until,
    write,
)
from support.ledgers import overwrite_middle
from support.processes import modules

from ablate.execution.sweep_control import exclusive
from ablate.execution.sweep_status import read
from ablate.execution.tracking.mlflow_tracker import behind
from ablate.files import Holder, lock
from ablate.reports.report_about import stamp, write_about
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Store

STEPS = 6000


def said(state, *words) -> list[dict]:
    done = here("status", *words, "--json", "--state", state)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("status")
    sweep(tiny(folder), folder / "state")
    return folder / "state"


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A sweep in another process that is a second into its second trial, which lasts for minutes; (state folder, the process)."""
    folder = tmp_path_factory.mktemp("running")
    state = folder / "state"
    sweep(tiny(folder, workload={"idle": {"steps": STEPS, "seconds": 1e-4}}, budget={"trials": 1}), state)
    driver = start(
        "sweep",
        write(folder, workload={"idle": {"steps": STEPS, "seconds": 0.05}}),
        "--state",
        state,
        *INLINE,
    )

    def second() -> bool:
        found = read(state / "sweeps" / "tiny", Store(state))
        return found.trials.get("done") == 1 and any(flight.steps_per_s for flight in found.running)

    try:
        until(second)
        yield state, driver
    finally:
        end(driver)


# What is over


def test_a_sweep_that_is_over_is_counted(swept):
    (found,) = said(swept)
    assert (found["name"], found["question"], found["controller"]) == ("tiny", "Does it matter?", None)
    assert (found["trials"], found["total"], found["over"]) == ({"done": 6}, 6, 6)
    assert (found["running"], found["failures"], found["mlflow_behind"], found["trouble"]) == (
        [],
        [],
        None,
        None,
    )


def test_it_is_told_without_torch(swept):
    done, imported = modules("status", "--state", swept)
    assert "6 of 6 trials  6 done" in done.stdout
    assert not imported & {"torch", "ray", "mlflow", "optuna", "pandas", "matplotlib", "scipy"}


def test_the_table_of_sweeps_has_an_answer_or_how_far_each_is(tmp_path):
    ended = {"a": ["done"] * 3, "b": ["failed", "failed", "done"], "c": ["done", "pending", "pending"]}
    ended |= {"d": ["done", "pending"]}
    for name, runs in ended.items():
        with closing(Ledger(tmp_path / "sweeps" / name / "ledger.db")) as made:
            made.describe(metrics="[]", question="q")
            arm = made.add_arm("x", {}, None, None)
            for seed, run in enumerate(runs):
                made.settle(made.add_member(arm, seed, f"{name}-{seed}", "{}"), run)
            if name == "a":
                report = tmp_path / "reports" / name
                report.mkdir(parents=True)
                lead = "No difference that matters."
                write_about(report, {"stamp": stamp(made), "lead": lead, "answer": f"{lead} It is 0."})
    with lock(tmp_path / "sweeps" / "d" / "lock"):
        shown = here("status", "--state", tmp_path).stdout
    table = shown[shown.index("sweep ") :].splitlines()[1:]
    rows = {line.split()[0]: re.split(r"  +", line)[1] for line in table}
    assert rows == {
        "a": "No difference that matters",
        "b": "failed: 2 runs",
        "c": "not finished, 1/3",
        "d": "running 1/2",
    }
    named = here("status", "a", "--state", tmp_path).stdout.splitlines()
    assert named[1] == "No difference that matters. It is 0."


def test_reading_leaves_no_trace_in_the_ledger(swept):
    path = swept / "sweeps" / "tiny" / "ledger.db"
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    said(swept)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before


def test_without_sweeps_it_says_so(tmp_path):
    assert here("status", "--state", tmp_path).stdout == f"No sweep has been run in {tmp_path}.\n"
    assert said(tmp_path) == []


def test_a_sweep_that_there_is_not_is_refused(swept):
    done = here("status", "tinny", "--state", swept)
    assert (done.returncode, done.stderr) == (
        2,
        f"tinny: no such sweep in {swept}; 'tiny' is the nearest of tiny\n",
    )


@pytest.mark.slow
def test_what_failed_is_told_with_its_reason_and_its_last_lines(tmp_path):
    large = tiny(
        tmp_path, "large", retry=0, seeds=1, ablate=None, arms={"broken": {"workload.hidden": TOO_LARGE}}
    )
    sweep(large, tmp_path)
    blind = tiny(tmp_path, "blind", retry=0, seeds=1, ablate={"rht": [True]})
    (tmp_path / "train.bin").unlink()
    sweep(blind, tmp_path, connect=Children)
    found = {one["name"]: one for one in said(tmp_path)}
    assert (found["large"]["trials"], found["blind"]["trials"]) == ({"oom": 2}, {"failed": 2})
    failure = found["blind"]["failures"][0]
    assert "train.bin" in failure["reason"]
    assert 0 < len(failure["log"]) <= 5
    assert failure["reason"] not in failure["log"]
    shown = here("status", "--state", tmp_path, "large", "blind").stdout
    assert "2 of 2 trials  2 out of memory" in shown
    assert "broken seed=0  out of memory after step 0" in shown
    assert "2 of 2 trials  2 failed" in shown
    assert "rht=true seed=0  failed: " in shown
    assert failure["log"][0] in shown


# What runs


@pytest.mark.slow
def test_a_sweep_that_runs_says_what_runs_how_fast_and_how_long_still(running):
    state, driver = running
    (found,) = said(state)
    assert found["controller"] == f"pid {driver.pid} on {os.uname().nodename}"
    assert (found["trials"]["done"], found["trials"]["running"], found["trials"]["pending"]) == (1, 1, 4)
    (flight,) = found["running"]
    assert (flight["seed"], flight["attempt"], flight["steps"]) == (0, 1, STEPS)
    assert flight["where"] == f"pid {driver.pid} on {os.uname().nodename}"
    assert 0 < flight["step"] < STEPS
    assert flight["silent_s"] < 5
    left = (STEPS - flight["step"]) / flight["steps_per_s"]
    assert flight["seconds_left"] == pytest.approx(left)
    assert found["seconds_left"] >= left  # what waits comes on top, if the others were as slow
    shown = here("status", "--state", state).stdout
    assert f"runs (pid {driver.pid} on " in shown
    assert "1 of 6 trials  1 done, 1 running, 4 waiting" in shown


@pytest.mark.slow
def test_asking_again_and_again_disturbs_nothing_and_never_waits(running, monkeypatch):
    """Not even while someone writes to the ledger, which a reader that writes would have to wait for."""
    state, driver = running
    writer = sqlite3.connect(state / "sweeps" / "tiny" / "ledger.db", isolation_level=None, timeout=60)
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, timeout=0))
    for _ in range(200):
        assert not read(state / "sweeps" / "tiny", Store(state)).trouble
    writer.execute("BEGIN IMMEDIATE")
    for _ in range(20):
        assert not read(state / "sweeps" / "tiny", Store(state)).trouble
    writer.execute("ROLLBACK")
    writer.close()
    assert driver.poll() is None


@pytest.mark.slow
def test_it_can_be_watched_until_ctrl_c(running):
    state, _ = running
    terminal, ours = pty.openpty()
    command = [sys.executable, "-m", "ablate", "status", "--watch", "--state", str(state)]
    watching = subprocess.Popen(
        command, stdout=ours, stderr=ours, env=environment(TERM="xterm"), start_new_session=True
    )
    os.close(ours)
    output = ""
    while "1 running" not in output:
        output += os.read(terminal, 4096).decode(errors="replace")
    watching.send_signal(signal.SIGINT)
    with suppress(OSError):  # a terminal that nobody writes to any more
        while more := os.read(terminal, 4096):
            output += more.decode(errors="replace")
    os.close(terminal)
    assert watching.wait(timeout=300) == 0, output
    assert "Traceback" not in output


@pytest.mark.slow
def test_what_a_killed_controller_left_is_not_said_to_run(running):
    state, driver = running  # the last test that wants it
    driver.send_signal(signal.SIGKILL)
    end(driver)
    (found,) = said(state)
    assert (found["controller"], found["running"], found["seconds_left"]) == (None, [], None)
    shown = here("status", "--state", state).stdout
    assert "not running; last change" in shown
    assert "1 of 6 trials  1 done, 5 waiting" in shown


# What is wrong


def test_a_damaged_ledger_is_said_and_hides_no_other_sweep(swept, tmp_path):
    for name, content in (
        ("text", b"nothing" * 2000),
        ("pages", overwrite_middle((swept / "sweeps/tiny/ledger.db").read_bytes())),
    ):
        (tmp_path / "sweeps" / name).mkdir(parents=True)
        (tmp_path / "sweeps" / name / "ledger.db").write_bytes(content)
    sweep(idle(tmp_path, seeds=1), tmp_path)
    found = {one["name"]: one for one in said(tmp_path)}
    assert found["tiny"]["trouble"] is None
    for name in ("text", "pages"):
        assert found[name]["trouble"].endswith(
            f"`ablate rebuild {name}.yaml --state {tmp_path}` makes it again from the trial folders"
        )
    shown = here("status", "--state", tmp_path).stdout
    assert "text  " in shown
    assert "3 done" in shown


def test_a_ledger_that_has_just_been_made_begins(tmp_path):
    (tmp_path / "sweeps" / "new").mkdir(parents=True)
    sqlite3.connect(tmp_path / "sweeps" / "new" / "ledger.db").close()
    with lock(tmp_path / "sweeps" / "new" / "lock"):
        (found,) = said(tmp_path)
    assert (found["name"], found["trouble"], found["total"]) == ("new", "is starting", 0)
    (found,) = said(tmp_path)
    assert "this sweep has no ledger: it never began" in found["trouble"]


# How far MLflow is behind, and how fast a trial is, from a ledger made by hand


@pytest.fixture
def book(tmp_path):
    with closing(Ledger(tmp_path / "sweeps" / "hand" / "ledger.db")) as made:
        made.describe(metrics='["quant/blocks.0/x/sqnr_db"]', mlflow="digest")
        arm = made.add_arm("a", {}, None, None)
        spec = json.dumps({"workload": {"gpt": {"steps": 100}}})
        made.trial = made.add_member(arm, 0, "0123", spec)
        yield made


def record(book, steps, start, pace, **metrics):
    for step in steps:
        book.record(
            book.trial,
            [{"step": step, "time": start + step / pace, "metrics": {"train/loss": 1.0} | metrics}],
        )


def test_what_mlflow_lacks_is_counted_without_what_it_is_not_to_show(book):
    record(
        book, range(10), 0.0, 1.0, **{"quant/blocks.0.mlp/x/sqnr_db/9": 1.0, "quant/blocks.0/x/sqnr_db": 2.0}
    )
    assert behind(book) == 20
    book.shipped(1, 0, "run", 6, False)
    assert behind(book) == 6
    book.shipped(1, 0, "run", 9, True)
    assert behind(book) == 0


@pytest.fixture
def held(tmp_path) -> Iterator[Holder]:
    """This process, which holds the lock of sweep `hand` as its controller would."""
    with exclusive(tmp_path / "sweeps" / "hand", "hand"):
        yield Holder.this_process()


def test_a_trials_pace_is_that_of_its_last_records_in_this_attempt(book, held, tmp_path):
    now = time.time()
    book.start_attempt(book.trial, 1, now - 1000)
    record(book, range(0, 40), now - 1000, 4.0, **{"throughput/tokens_per_s": 128.0})
    book.end_attempt(book.trial, 1, now - 900, "failed")
    book.start_attempt(book.trial, 2, now - 12)
    (before,) = read(tmp_path / "sweeps" / "hand", Store(tmp_path)).running
    assert (before.attempt, before.step, before.steps_per_s, before.seconds_left) == (2, 39, None, None)
    assert before.silent_s == pytest.approx(12, abs=1)
    record(book, range(40, 60), now - 22, 5.0)
    (flight,) = read(tmp_path / "sweeps" / "hand", Store(tmp_path)).running
    assert (flight.step, flight.steps, flight.tokens_per_s) == (59, 100, 128.0)
    assert flight.steps_per_s == pytest.approx(5.0, rel=1e-4)
    assert flight.silent_s == pytest.approx(22 - 59 / 5, abs=1)


def test_an_estimate_that_has_run_out_says_so(held, tmp_path):
    with closing(Ledger(tmp_path / "sweeps" / "hand" / "ledger.db")) as made:
        made.describe(metrics="[]", mlflow="digest")
        made.facts.left = time.time() - 100.0, 50.0
    assert read(tmp_path / "sweeps" / "hand", Store(tmp_path)).seconds_left == 0.0
    assert f"runs ({held}), longer than estimated" in here("status", "--state", tmp_path).stdout


def test_a_trial_of_forks_counts_its_windows_and_no_time_left_is_negative(held, tmp_path):
    forks = {"trunk": None, "positions": [0], "windows": [40, 80]}
    spec = {"workload": {"gpt": {"steps": 100}}, "forks": forks}
    now = time.time()
    with closing(Ledger(tmp_path / "sweeps" / "hand" / "ledger.db")) as made:
        made.describe(metrics="[]", mlflow="digest")
        made.trial = made.add_member(made.add_arm("a", {}, None, None), 0, "0123", json.dumps(spec))
        made.start_attempt(made.trial, 1, now - 1000)
        for last, left in ((110, 2.0), (130, 0.0)):
            record(made, range(last - 10, last + 1), now - 40, 5.0)
            (flight,) = read(tmp_path / "sweeps" / "hand", Store(tmp_path)).running
            assert (flight.step, flight.steps) == (last, 120)
            assert flight.seconds_left == pytest.approx(left, rel=1e-4)


def test_a_status_asks_as_little_of_many_trials_as_of_few(tmp_path, monkeypatch):
    asked, connect = [], sqlite3.connect

    def watched(*words, **more):
        connection = connect(*words, **more)
        connection.set_trace_callback(asked.append)
        return connection

    def filled(name: str, arms: int) -> list[str]:
        with closing(Ledger(tmp_path / "sweeps" / name / "ledger.db")) as made:
            made.describe(metrics="[]", mlflow="digest", question="q")
            made.db.execute("BEGIN")
            for arm in range(arms):
                number = made.add_arm(f"arm {arm}", {}, None, None)
                for seed in range(10):
                    made.settle(made.add_member(number, seed, f"{arm}-{seed}", "{}"), "done", seconds=1.0)
            made.db.execute("COMMIT")
        with monkeypatch.context() as patched:
            patched.setattr(sqlite3, "connect", watched)
            assert read(tmp_path / "sweeps" / name, Store(tmp_path)).trials == {"done": 10 * arms}
        found, asked[:] = asked[:], []
        return found

    few = filled("small", 1)
    assert few
    assert filled("large", 100) == few
