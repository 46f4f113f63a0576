"""A sweep that outlives its terminal, and one whose addresses hold passwords: seen as its user sees it."""

import os
import pty
import signal
import subprocess
import sys

import psutil
import pytest
from experiments_for_tests import ablate, environment, statuses, until, write
from test_commands import INLINE

from ablate.control import holder
from ablate.store import lock


@pytest.fixture
def started():
    """Process ids of detached sweeps that the test started; whatever of them is left is ended."""
    found: list[int] = []
    yield found
    for pid in found:
        if psutil.pid_exists(pid):
            psutil.Process(pid).kill()


def pid_of(state) -> int:
    return int(holder(state / "sweeps" / "tiny").split()[1])


def test_a_detached_sweep_goes_on_by_itself_and_says_how_to_follow_it(tmp_path, started):
    path, state = write(tmp_path, shape={"steps": 150}), tmp_path / "state"
    done = ablate("sweep", path, "--state", state, *INLINE, "--detach")
    assert (done.returncode, done.stderr) == (0, "")
    pid = pid_of(state)
    started.append(pid)
    assert f"goes on without this terminal: pid {pid}, state folder {state}" in done.stdout
    for line in (
        f"ablate status tiny --state {state} --watch",
        f"tail -f {state}/sweeps/tiny/console.txt",
        f"ablate stop tiny --state {state}",
    ):
        assert line in done.stdout
    until(lambda: holder(state / "sweeps" / "tiny") is None, 120)
    console = (state / "sweeps" / "tiny" / "console.txt").read_text()
    assert "6 trials run in" in console
    assert "verdict" in console
    assert set(statuses(state).values()) == {"done"}


@pytest.mark.slow
def test_it_survives_the_terminal_that_started_it(tmp_path, started):
    path, state = write(tmp_path, shape={"steps": 150}), tmp_path / "state"
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "ablate", "sweep", str(path), "--state", str(state), *INLINE, "--detach"]
    shell = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment(), start_new_session=True)
    os.close(end)
    assert shell.wait(timeout=60) == 0
    pid = pid_of(state)
    started.append(pid)
    assert os.getsid(pid) == pid != shell.pid
    os.close(terminal)  # what was attached to it hears SIGHUP
    with pytest.raises(ProcessLookupError):
        os.killpg(shell.pid, signal.SIGHUP)
    until(lambda: holder(state / "sweeps" / "tiny") is None, 120)
    assert set(statuses(state).values()) == {"done"}


@pytest.mark.slow
def test_a_detached_sweep_that_is_interrupted_can_be_gone_on_with(tmp_path, started):
    path, state = write(tmp_path, shape={"steps": 200}), tmp_path / "state"
    assert ablate("sweep", path, "--state", state, *INLINE, "--detach").returncode == 0
    started.append(pid_of(state))
    until(lambda: list(state.glob("trials/*/result.json")), 60)
    os.kill(started[0], signal.SIGINT)
    until(lambda: holder(state / "sweeps" / "tiny") is None, 60)
    assert (state / "sweeps" / "tiny" / "console.txt").read_text().endswith("Interrupted. Nothing is lost: the same command goes on.\n")
    assert ablate("sweep", path, "--state", state, *INLINE).returncode == 0


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


def test_what_is_wrong_with_the_file_is_said_before_anything_is_detached(tmp_path):
    done = ablate("sweep", write(tmp_path, seeds=0), "--state", tmp_path / "state", "--detach")
    assert done.returncode == 2
    assert not (tmp_path / "state").exists()


def test_a_detached_sweep_that_has_nothing_to_do_answers_and_ends(tmp_path):
    path, state = write(tmp_path, seeds=1), tmp_path / "state"
    ablate("sweep", path, "--state", state, *INLINE)
    done = ablate("sweep", path, "--state", state, *INLINE, "--detach")
    assert done.returncode == 0
    until(lambda: holder(state / "sweeps" / "tiny") is None, 60)
    assert "0 trials run, 3 already done" in (state / "sweeps" / "tiny" / "console.txt").read_text()


# Passwords

SECRET = "hunter2hunter2"
ADDRESSES = [f"postgresql://ablate:{SECRET}@127.0.0.1:9/mlflow", f"http://ablate:{SECRET}@127.0.0.1:9"]


def everything(folder) -> str:
    """Every byte that a sweep left, but for the trials' checkpoints."""
    return "".join(path.read_bytes().decode("latin-1") for path in folder.rglob("*") if path.is_file() and path.suffix != ".pt")


@pytest.mark.slow
@pytest.mark.parametrize("address", ADDRESSES, ids=["postgresql", "http"])
def test_no_password_is_in_what_is_printed_or_kept(address, tmp_path, started):
    path, state = write(tmp_path, seeds=1), tmp_path / "state"
    words = ("--state", state, "--executor", "inline")
    done = ablate("sweep", path, *words, "--mlflow", address, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "records behind (" in done.stdout
    assert "ablate:***@127.0.0.1:9" in done.stdout
    outputs = [done.stdout + done.stderr]
    for verb in (("status",), ("sync", "--timeout", 3, "--mlflow", address), ("place", "--mlflow", address)):
        found = ablate(*verb, "--state", state, timeout=200)
        outputs.append(found.stdout + found.stderr)
    outputs.append(everything(tmp_path))
    assert [SECRET in output for output in outputs] == [False] * len(outputs)


@pytest.mark.slow
def test_no_password_is_in_the_words_of_a_detached_process(tmp_path, started):
    path, state = write(tmp_path, shape={"steps": 600}), tmp_path / "state"
    done = ablate("sweep", path, "--state", state, "--executor", "inline", "--mlflow", ADDRESSES[0], "--detach")
    assert done.returncode == 0, done.stdout + done.stderr
    started.append(pid_of(state))
    process = psutil.Process(started[0])
    assert SECRET not in " ".join(process.cmdline())
    assert process.environ()["ABLATE_MLFLOW"] == ADDRESSES[0]
    assert SECRET not in done.stdout + everything(tmp_path)
