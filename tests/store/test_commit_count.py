"""A ledger whose write-ahead log is lost is named by every reader, with what restores it; one that is complete is not."""

import os
import shutil
import sqlite3
import threading
from contextlib import closing, suppress

import pytest
from support.commands import INLINE, here
from support.experiments import end, ledger, start, until, values, write

from ablate.errors import InputError
from ablate.store.checked_ledger import open_checked
from ablate.store.ledger import Ledger

READERS = (
    ("show", "tiny", "--to", "csv", "--out", "tables"),
    ("show", "tiny"),
    ("report", "tiny", "--mlflow", "none"),
)
LOG, COUNT = "ledger.db-wal", "ledger.db-commits"
LOSSES = {
    "removed": lambda path: path.unlink(),
    "renamed": lambda path: path.rename(path.with_suffix(".aside")),
    "emptied": lambda path: os.truncate(path, 0),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "flipped": lambda path: path.write_bytes(
        (content := path.read_bytes())[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
    ),
}
"""Ways to lose a log, or its last transaction."""


def asked(path, query):
    """Return the first cell of a query of a ledger that may not have its tables yet."""
    with suppress(sqlite3.OperationalError), closing(Ledger(path, readonly=True)) as book:
        return book.cell(query)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Return a folder with a sweep whose process was killed while its log held records."""
    folder = tmp_path_factory.mktemp("killed")
    path = write(folder, workload={"idle": {"steps": 60, "seconds": 0.03}}, seeds=1)
    process = start("sweep", path, "--state", folder / "state", *INLINE)
    recorded = "SELECT count(*) FROM records WHERE step > 3"  # after the move of the log at the trial's start
    try:
        until(lambda: asked(folder / "state" / "sweeps" / "tiny" / "ledger.db", recorded))
    finally:
        end(process)
    return folder


@pytest.fixture
def copy(killed, tmp_path):
    """Return a copy of that folder."""
    return shutil.copytree(killed, tmp_path / "copy")


def count_of(copy):
    with closing(ledger(copy / "state")) as book:
        return book.record_count()


def test_a_killed_sweep_with_its_log_is_complete(copy, monkeypatch):
    monkeypatch.chdir(copy)
    assert count_of(copy) > 0
    for words in READERS[:2]:
        assert here(*words, "--state", copy / "state").returncode == 0
    assert here("status", "--verify", "--state", copy / "state").returncode == 0


@pytest.mark.parametrize("how", LOSSES)
def test_a_lost_log_is_named_by_every_reader_until_the_sweep_continues(how, copy, monkeypatch):
    monkeypatch.chdir(copy)
    state, before = copy / "state", count_of(copy)
    LOSSES[how](state / "sweeps" / "tiny" / LOG)
    assert count_of(copy) < before
    for words in READERS:
        done = here(*words, "--state", state)
        assert (done.returncode, done.stdout) == (2, ""), done.stdout
        assert f"transactions are missing: {LOG} is gone or damaged); `ablate sweep tiny.yaml" in done.stderr
    assert LOG in here("status", "--state", state).stdout
    assert here("status", "--verify", "--state", state).returncode == 1
    again = here("sweep", copy / "tiny.yaml", "--state", state, *INLINE)
    assert (again.returncode, LOG in again.stdout + again.stderr) == (0, True)
    assert len(values(state)) == 3
    assert here("show", "tiny", "--state", state).returncode == 0
    assert here("status", "--verify", "--state", state).returncode == 0
    assert not (state / "sweeps" / "tiny" / COUNT).exists()


def test_a_ledger_that_lost_its_log_is_rebuilt_without_force(copy):
    (copy / "state" / "sweeps" / "tiny" / LOG).unlink()
    assert here("rebuild", copy / "tiny.yaml", "--state", copy / "state").returncode == 0
    assert here("show", "tiny", "--state", copy / "state").returncode == 0


def test_the_file_of_an_open_ledger_alone_is_refused(copy):
    folder = copy / "state" / "sweeps" / "tiny"
    for name in (LOG, COUNT):
        (folder / name).unlink()
    with pytest.raises(InputError, match=f"copied without {COUNT} and {LOG}"):
        open_checked(folder / "ledger.db")


@pytest.mark.parametrize("content", [b"", b"\xff", b"0"])
def test_a_damaged_count_alone_is_no_loss(content, copy):
    (copy / "state" / "sweeps" / "tiny" / COUNT).write_bytes(content)
    assert here("show", "tiny", "--state", copy / "state").returncode == 0


@pytest.mark.parametrize("mounts", [None, "server:/home / nfs4 rw 0 0\n"], ids=["log", "rollback journal"])
def test_an_open_ledger_and_a_closed_one_are_complete(mounts, tmp_path):
    path = tmp_path / "tiny" / "ledger.db"
    book = Ledger(path, mounts=mounts)
    book.facts.name = "tiny"
    trial = book.add_member(book.add_arm("a", {}, None, None), 0, "id", "{}")
    book.settle(trial, "running")
    with closing(open_checked(path)) as reader:
        assert (reader.lost(), reader.status(trial)) == (None, "running")
    assert path.with_name(COUNT).exists()
    book.close()
    assert [file.name for file in path.parent.iterdir()] == ["ledger.db"]
    open_checked(path).close()


def test_every_single_change_is_counted(tmp_path):
    with closing(Ledger(tmp_path / "ledger.db")) as book:
        trial = book.add_member(book.add_arm("a", {}, None, None), 0, "id", "{}")
        changes = (
            lambda: book.settle(trial, "failed"),
            lambda: book.start_attempt(trial, 1, 1.0),
            lambda: book.end_attempt(trial, 1, 2.0, "failed"),
            lambda: book.requeue(3.0),
            lambda: book.withdraw(1),
            lambda: book.note_context_free(trial, 4.0),
            lambda: book.seal_records(trial, "0"),
            lambda: book.files_seen("id", "0"),
            lambda: book.shipped(1, 0, "run", 1, True),
            lambda: book.forget_mlflow(),
            lambda: book.forget(trial),
        )
        for change in changes:
            before = int((tmp_path / COUNT).read_bytes())
            change()
            assert int((tmp_path / COUNT).read_bytes()) > before
            assert book.lost() is None


def test_no_reader_of_a_ledger_that_is_written_opened_and_closed_sees_a_loss(tmp_path):
    path, over = tmp_path / "ledger.db", threading.Event()
    Ledger(path).close()

    def write_again() -> None:
        for _ in range(40):
            with closing(Ledger(path)) as book:
                for number in range(10):
                    book.describe(question=str(number))
        over.set()

    writer = threading.Thread(target=write_again)
    writer.start()
    with closing(Ledger(path, readonly=True)) as reader:
        seen = {reader.lost()}
        while not over.is_set():
            seen.add(reader.lost())
    writer.join()
    assert seen == {None}


def test_a_full_disk_at_the_end_leaves_a_ledger_complete(tmp_path):
    path = tmp_path / "ledger.db"
    book = Ledger(path)
    book.describe(question="a")
    pages = book.db.execute("PRAGMA page_count").fetchone()[0]
    book.db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        book.describe(question="a" * 100_000)
    book.db.execute("PRAGMA query_only = ON")  # no write succeeds any more
    book.close()
    with closing(Ledger(path, readonly=True)) as reader:
        assert (reader.lost(), reader.facts.question) == (None, "a")
