"""Ends and places that batch systems and containers bring: SIGTERM, quotas, no home, a state folder that cannot be written."""

import errno
import itertools
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from support.commands import INLINE, here
from support.experiments import WILD, end, environment, ledger, start, statuses, sweep, tiny, until, write

from ablate.cli.common import INTERRUPTED, TERMINATED, Terminated, interruption, raise_on_sigterm
from ablate.execution.messages import Ended, Exited, TrialRequest
from ablate.execution.supervisor import end_of_attempt
from ablate.execution.trial_runner import NO_SPACE
from ablate.files import full
from ablate.store.databases import open_readonly, url

SLOW = {"workload": {"idle": {"steps": 1000, "seconds": 0.05}}, "seeds": 1}
FAST = {"workload": {"idle": {"steps": 4}}, "seeds": 1}


def interrupted_by_sigterm() -> None:
    """Be ended by SIGTERM as in a call of Ray, which raises KeyboardInterrupt in place of the handler's exception."""
    with raise_on_sigterm():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        except Terminated:
            raise KeyboardInterrupt from None


def test_a_sigterm_that_a_library_turned_into_ctrl_c_keeps_its_own_status():
    assert interruption(KeyboardInterrupt())[0] == INTERRUPTED
    with pytest.raises(KeyboardInterrupt) as ended:
        interrupted_by_sigterm()
    assert interruption(ended.value)[0] == TERMINATED
    with raise_on_sigterm():  # the next command begins without it
        assert interruption(KeyboardInterrupt())[0] == INTERRUPTED


def test_sigterm_ends_a_sweep_as_ctrl_c_does_with_its_own_status(tmp_path):
    driver = start("sweep", write(tmp_path, **SLOW), "--state", tmp_path / "state", *INLINE)
    try:
        until(lambda: list((tmp_path / "state").glob("trials/*/events-1.jsonl")))
        driver.send_signal(signal.SIGTERM)
        driver.send_signal(signal.SIGTERM)  # SLURM and a script may both send one
        output, _ = driver.communicate(timeout=60)
    finally:
        end(driver)
    assert (driver.returncode, "Traceback" in output) == (143, False)
    assert output.rstrip().endswith("Ended by SIGTERM. Nothing is lost: the same command goes on.")
    assert set(statuses(tmp_path / "state").values()) == {"pending"}
    outcomes = ledger(tmp_path / "state").db.execute("SELECT outcome FROM attempts").fetchall()
    assert [tuple(row) for row in outcomes] == [("interrupted",)]


@pytest.mark.parametrize(
    ("keys", "status", "last"),
    [
        (
            {"ablate": None, "arms": WILD, "against": "good"},
            0,
            "2 of 4 runs diverged, none of them of the baseline good.",
        ),
        (
            {"shape": {"lr": 1e30, "clip": None, "warmup": 0.0}},
            1,
            "6 of 6 runs diverged, 2 of them of the baseline bf16.",
        ),
    ],
)
def test_the_last_line_says_how_many_runs_diverged_and_whether_the_baseline_did(keys, status, last, tmp_path):
    path = write(tmp_path, **keys)
    done = here("sweep", path, "--state", tmp_path / "state", *INLINE, "--no-report", "-q")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (status, last), done.stderr


@pytest.mark.slow
@pytest.mark.services
@pytest.mark.parametrize("killed", ["no process", "gcs_server"])
def test_sigterm_has_its_status_on_ray_beside_another_fault(killed, tmp_path):
    driver = start("sweep", write(tmp_path, **SLOW), "--state", tmp_path / "state", "--mlflow", "none")
    try:
        until(lambda: list((tmp_path / "state").glob("trials/*/events-1.jsonl")))
        for process in psutil.Process(driver.pid).children(recursive=True):
            if killed in process.name():
                process.kill()
        driver.send_signal(signal.SIGTERM)
        output, _ = driver.communicate(timeout=60)
    finally:
        end(driver)
    assert (driver.returncode, "SIGTERM received" in output) == (143, False), output


# Full disks, in all their forms


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_a_quota_and_a_limit_are_one_thing(number):
    error = OSError(number, os.strerror(number))
    wrapped = RuntimeError("while saving")
    wrapped.__cause__ = error
    assert full(error)
    assert full(wrapped)


def test_other_errors_are_no_full_disk(tmp_path):
    broken = sqlite3.OperationalError("disk I/O error")
    broken.sqlite_errorname = "SQLITE_IOERR_WRITE"
    assert not any(map(full, (None, OSError(errno.EIO, "Input/output error"), RuntimeError("no"), broken)))
    assert not full(broken, tmp_path)
    assert not list(tmp_path.iterdir())


LIMITED = """
import os, resource, sys
from ablate.execution.trial_runner import exit_status
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
sys.stderr = open(sys.argv[1] + ".log", "w")  # as full as the other
sys.stderr.write("x" * 4096); sys.stderr.flush()
def work():
    with open(sys.argv[1], "w") as file:
        file.write("x" * 10_000)
os._exit(exit_status(work))  # as a trial's process ends
"""


def test_a_process_that_can_write_no_more_says_so_by_its_status_whatever_its_log_holds(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "file")],
        capture_output=True,
        env=environment(),
        check=False,
    )
    assert done.returncode == NO_SPACE, done.stderr
    assert done.stdout == b""
    request = TrialRequest("trial", "{}", str(tmp_path), 1, {})
    assert [end_of_attempt(request, Exited(status), None, False).disk_full for status in (NO_SPACE, 1)] == [
        True,
        False,
    ]


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV"), (35, "a real-time signal")])
def test_a_trial_that_any_signal_kills_has_failed(number, name, tmp_path):
    """Python has no name for most real-time signals, which batch systems send as warnings."""
    end = end_of_attempt(TrialRequest("trial", "{}", str(tmp_path), 1, {}), Exited(-number), None, False)
    assert (end.status, end.reason) == ("failed", f"killed by signal {number} ({name})")


class Fails:
    """An executor whose trials end with one message."""

    slots = 1

    def __init__(self, message: Ended) -> None:
        self.message, self.wanted = message, 0

    def submit(self, request: TrialRequest) -> None:
        self.trial = request.id

    def wait(self, seconds: float) -> list:
        return [(self.trial, self.message)]

    def stop(self, trial: str) -> None: ...

    def resize(self, slots: int) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(("full", "status"), [(True, "disk"), (False, "failed")])
def test_a_trial_that_could_write_no_more_is_run_again_and_ends_the_sweep_for_now(full, status, tmp_path):
    said = Ended("failed", "OSError: [Errno 122] Disk quota exceeded", disk_full=full)
    outcome, _ = sweep(tiny(tmp_path, **FAST, retry=0), tmp_path, connect=lambda: Fails(said))
    assert outcome.status == status
    assert ("pending" in statuses(tmp_path).values()) is full


# No home


HOMELESS = """
import os, pwd, sys
from pathlib import Path
from ablate.cli.common import run
os.setgid(54321)
os.setuid(54321)
run(lambda: print(Path.home()))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs the right to become another user")
def test_a_user_without_home_or_entry_gets_a_folder():
    kept = {
        key: value
        for key, value in environment(PYTHONPATH=os.pathsep.join(sys.path)).items()
        if key != "HOME"
    }
    home = Path("/tmp/ablate-54321")
    try:
        done = subprocess.run(
            [sys.executable, "-c", HOMELESS], capture_output=True, text=True, env=kept, check=False
        )
        assert (done.returncode, done.stdout, f"{home} is used as home" in done.stderr) == (
            0,
            f"{home}\n",
            True,
        ), done.stderr
        assert (home.stat().st_uid, home.stat().st_mode & 0o777) == (54321, 0o700)
    finally:
        shutil.rmtree(home, ignore_errors=True)


# A state folder that cannot be written


@pytest.fixture
def frozen(tmp_path):
    """A state folder on a file system that was mounted for reading only once a sweep was run."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    sweep(tiny(tmp_path, **FAST), disk)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_report_of_a_state_folder_that_cannot_be_written_goes_elsewhere_or_names_the_flag(frozen, tmp_path):
    words = (
        "report",
        "tiny",
        "--state",
        frozen,
        "--mlflow",
        "none",
        "--no-pdf",
        "--notebook",
        "training_health",
    )
    refused = here(*words)
    assert (refused.returncode, "--out" in refused.stderr, "Traceback" in refused.stderr) == (2, True, False)
    done = here(*words, "--out", tmp_path / "out", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "tiny" / "index.html").stat().st_size > 1000
    assert here("status", "tiny", "--state", frozen).returncode == 0


def test_a_database_that_cannot_be_written_is_read_unless_its_log_holds_more(frozen):
    path = frozen / "sweeps" / "tiny" / "ledger.db"
    with closing(open_readonly(path)) as db:
        assert db.execute("SELECT count(*) FROM trials").fetchone()[0] == 3
    subprocess.run(["mount", "-o", "remount,rw", str(frozen)], check=True)
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("UPDATE trials SET status = 'failed'")
        writer.commit()
        for part in ("", "-wal"):
            shutil.copyfile(f"{path}{part}", frozen / f"killed.db{part}")  # as a killed writer leaves them
    subprocess.run(["mount", "-o", "remount,ro", str(frozen)], check=True)
    with pytest.raises(sqlite3.OperationalError, match=r"killed\.db-wal"):
        open_readonly(frozen / "killed.db")


@pytest.mark.parametrize(
    "words", [("rebuild", "{file}", "--force"), ("rebuild", "tiny", "--sync", "--mlflow", "{mlflow}")]
)
def test_what_writes_refuses_a_state_folder_that_cannot_be_written(words, frozen, tmp_path):
    names = {"file": tmp_path / "tiny.yaml", "mlflow": url(tmp_path / "mlflow.db")}
    done = here(*(word.format(**names) for word in words), "--state", frozen)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert str(frozen / "sweeps" / "tiny" / "lock") in done.stderr


def test_a_folder_or_a_lost_link_in_place_of_a_file_is_named_or_replaced(tmp_path):
    path, whole = write(tmp_path, **FAST), tmp_path / "whole"
    assert here("sweep", path, "--state", whole, *INLINE).returncode == 0
    verbs = [("sweep", path, *INLINE), ("rebuild", path, "--force"), ("show", "tiny"), ("status",)]
    files = sorted(file.relative_to(whole) for file in whole.rglob("*") if file.is_file())
    files = list({file.name: file for file in files}.values())
    cases = [*itertools.product(files, ("folder", "link"), verbs)]
    for number, (file, kind, verb) in enumerate(random.Random(0).sample(cases, 40)):
        state = shutil.copytree(whole, tmp_path / str(number))
        (state / file).unlink()
        if kind == "folder":
            (state / file).mkdir()
        else:
            (state / file).symlink_to("nowhere/file")
        done = here(*verb, "--state", state)
        assert done.returncode in (0, 2), (file, kind, verb, done.stderr)
        assert "Traceback" not in done.stderr
