"""A sweep that outlives its terminal, and one whose addresses hold passwords: seen as its user sees it."""

import json
import os
import pty
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from support.commands import INLINE, here
from support.experiments import IDLE, ablate, environment, program, statuses, until, write
from support.gates import Gate

from ablate.cli.settings import find_settings
from ablate.cli.sweep import SweepOptions, detached_command
from ablate.execution.sweep_control import holder
from ablate.files import lock


@pytest.fixture(scope="module")
def started():
    """Process ids of detached sweeps that the tests started; whatever of them is left is ended."""
    found: list[int] = []
    yield found
    for pid in found:
        if psutil.pid_exists(pid):
            psutil.Process(pid).kill()


def pid_of(state) -> int:
    return holder(state / "sweeps" / "tiny").pid


def console(state) -> str:
    return (state / "sweeps" / "tiny" / "console.txt").read_text()


@pytest.fixture(scope="module")
def detached(tmp_path_factory, started):
    """A detached sweep that was interrupted after a trial or two; (file, state folder, what its command said, its process)."""
    folder = tmp_path_factory.mktemp("detached")
    path, state, gate = write(folder, workload={"idle": {"steps": 10}}), folder / "state", Gate(folder)
    gate.shut(1)
    done = ablate("sweep", path, "--state", state, *INLINE, "--detach", **gate.environment)
    assert done.returncode == 0, done.stderr
    pid = pid_of(state)
    started.append(pid)
    until(lambda: list(state.glob("trials/*/result.json")))
    until(lambda: "done" in statuses(state).values())  # it has told the ledger
    os.kill(pid, signal.SIGINT)
    until(lambda: holder(state / "sweeps" / "tiny") is None)
    return path, state, done, pid


@pytest.mark.slow
def test_a_detached_sweep_says_how_to_follow_it(detached):
    _, state, done, pid = detached
    assert done.stderr == ""
    assert f"continues without this terminal: pid {pid}, state folder {state}" in done.stdout
    for line in (
        f"ablate status tiny --state {state} --watch",
        f"tail -f {state}/sweeps/tiny/console.txt",
        f"ablate stop tiny --state {state}",
    ):
        assert line in done.stdout


@pytest.mark.slow
def test_one_that_is_interrupted_is_gone_on_with_by_itself_and_survives_the_terminal_that_started_it(
    detached, started
):
    path, state, *_ = detached
    assert console(state).endswith("Interrupted. Nothing is lost: the same command goes on.\n")
    before = list(statuses(state).values()).count("done")
    assert 0 < before < 6

    terminal, end = pty.openpty()
    command = program("sweep", path, "--state", state, *INLINE, "--detach")
    shell = subprocess.Popen(
        command, stdin=end, stdout=end, stderr=end, env=environment(), start_new_session=True
    )
    os.close(end)
    assert shell.wait(timeout=300) == 0
    pid = pid_of(state)
    started.append(pid)
    assert os.getsid(pid) == pid != shell.pid
    os.close(terminal)  # what was attached to it hears SIGHUP
    with pytest.raises(ProcessLookupError):
        os.killpg(shell.pid, signal.SIGHUP)
    until(lambda: holder(state / "sweeps" / "tiny") is None)
    assert f"{6 - before} trials run, {before} already done in" in console(state)
    assert "verdict" in console(state)
    assert set(statuses(state).values()) == {"done"}


@pytest.mark.slow
def test_a_detached_sweep_that_cannot_begin_says_why_at_once(tmp_path):
    path, state = write(tmp_path), tmp_path / "state"
    (state / "sweeps" / "tiny").mkdir(parents=True)
    (state / "sweeps" / "tiny" / "ledger.db").write_bytes(b"nothing" * 2000)
    done = ablate("sweep", path, "--state", state, *INLINE, "--detach")
    assert done.returncode == 2
    assert "damaged (file is not a database)" in done.stderr
    with lock(state / "sweeps" / "tiny" / "lock"):
        done = ablate("sweep", path, "--state", state, *INLINE, "--detach")
    assert (done.returncode, "another process (pid" in done.stderr) == (2, True)


def test_bytes_of_no_text_in_the_output_of_one_that_cannot_begin_are_replaced(tmp_path):
    path, state = write(tmp_path, **IDLE), tmp_path / "runs"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif '--ready' in sys.orig_argv:\n    os.write(1, b'caf\\xe9\\n')\n    os._exit(2)\n"
    )
    done = ablate("sweep", path, "--detach", "--state", state, *INLINE, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, "caf\N{REPLACEMENT CHARACTER}")


def test_what_is_wrong_with_the_file_is_said_before_anything_is_detached(tmp_path):
    done = ablate("sweep", write(tmp_path, seeds=0), "--state", tmp_path / "state", "--detach")
    assert done.returncode == 2
    assert not (tmp_path / "state").exists()


def test_a_detached_sweep_that_has_nothing_to_do_answers_and_ends(tmp_path):
    path, state = write(tmp_path, seeds=1, **IDLE), tmp_path / "state"
    here("sweep", path, "--state", state, *INLINE)
    done = ablate("sweep", path, "--state", state, *INLINE, "--detach")
    assert done.returncode == 0
    until(lambda: holder(state / "sweeps" / "tiny") is None)
    assert "0 trials run, 3 already done" in (state / "sweeps" / "tiny" / "console.txt").read_text()


# Passwords

SECRET = "hunter2hunter2"
ADDRESSES = [f"postgresql://ablate:{SECRET}@127.0.0.1:9/mlflow", f"http://ablate:{SECRET}@127.0.0.1:9"]


def everything(folder) -> str:
    """Every byte that a sweep left, but for the trials' checkpoints."""
    return "".join(
        path.read_bytes().decode("latin-1")
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pt"
    )


HASTY = """
import json, sys, time
import mlflow.store.db.utils
from ablate.__main__ import main
from ablate.execution.tracking.tracker import Follower
from ablate.verification.checkup import Checkup
Checkup.start = Checkup.passed = lambda self: None
mlflow.store.db.utils.MAX_RETRY_COUNT = 0
finish = Follower.finish
def finish_once_refused(self, status, note, seconds):
    over = time.monotonic() + seconds
    while not self.trouble and time.monotonic() < over:
        time.sleep(0.05)
    return finish(self, status, note, 0.1)
Follower.finish = finish_once_refused
ends = []
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        main()
        ends.append(0)
    except SystemExit as end:
        ends.append(end.code or 0)
print(*ends)
"""
"""Several commands in one process, without the quick proof of the numerics; MLflow asks a database once, not for minutes, and what is still to be
shipped at a sweep's end is given up once the server has refused it, not after 30 s."""


@pytest.mark.slow
def test_no_password_is_in_what_is_printed_or_kept(tmp_path):
    path, commands = write(tmp_path, seeds=1), []
    for number, address in enumerate(ADDRESSES):
        there = ["--state", str(tmp_path / f"state{number}"), "--mlflow", address]
        commands += [
            ["sweep", str(path), "--executor", "inline", *there],
            ["rebuild", "--sync", "--timeout", "1", *there],
        ]
    words = [sys.executable, "-c", HASTY, json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=environment(), check=False)
    assert done.stdout.splitlines()[-1] == "0 1 0 1", done.stderr
    assert done.stdout.count("records behind (") >= len(ADDRESSES)
    assert "no answer yet" not in done.stdout
    assert all(address.replace(SECRET, "***") in done.stdout for address in ADDRESSES)
    outputs = [done.stdout + done.stderr]
    for number, address in enumerate(ADDRESSES):
        state = tmp_path / f"state{number}"
        for found in (
            here("status", "--state", state),
            here("place", "--mlflow", address, "--state", state),
        ):
            outputs.append(found.stdout + found.stderr)
    outputs.append(everything(tmp_path))
    assert [SECRET in output for output in outputs] == [False] * len(outputs)


@pytest.mark.slow
def test_no_password_is_in_the_words_of_a_detached_process(tmp_path, started):
    path, state = write(tmp_path, workload={"idle": {"steps": 600, "seconds": 0.1}}), tmp_path / "state"
    done = ablate(
        "sweep", path, "--state", state, "--executor", "inline", "--mlflow", ADDRESSES[0], "--detach"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    started.append(pid_of(state))
    process = psutil.Process(started[-1])
    assert SECRET not in " ".join(process.cmdline())
    assert process.environ()["ABLATE_MLFLOW"] == ADDRESSES[0]
    assert SECRET not in done.stdout + everything(tmp_path)
    process.kill()


def test_a_detached_sweep_gets_every_number_that_was_given_zero_too(tmp_path):
    settings = find_settings(state=tmp_path, price=0.0, workers=2)
    options = SweepOptions(seeds=3, quiet=True)
    words = detached_command(Path("x.yaml"), settings, options)
    pairs = {*pairwise(words)}
    assert pairs >= {("--price", "0.0"), ("--workers", "2"), ("--seeds", "3")}
    assert "--quiet" in words


def test_a_job_array_is_not_detached(tmp_path):
    done = here("sweep", write(tmp_path), "--state", tmp_path, "--detach", "--export-jobs", tmp_path / "jobs")
    assert (done.returncode, "--detach" in done.stderr) == (2, True)
    assert not (tmp_path / "sweeps").exists()
