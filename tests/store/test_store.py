"""The trial store: a result is there whole or not at all, a torn line is dropped, and a lock has one holder."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.experiments import until
from support.processes import HOLD_LOCK

from ablate.files import Busy, Damaged, lock, write
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Store, Tally, line

COMMIT = """
import sys; from pathlib import Path; from ablate.store.trial_store import Store
store, n = Store(Path(sys.argv[1])), 0
while True:
    n += 1
    store.commit("a", {"n": n, "padding": ["x" * 100] * 2000, "last": n})
"""


@pytest.fixture
def store(tmp_path) -> Store:
    (tmp_path / "trials" / "a").mkdir(parents=True)
    return Store(tmp_path)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock `tmp_path/lock`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(tmp_path / "lock")], stdout=subprocess.PIPE
    )
    assert process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_a_trial_without_a_result_is_not_finished(store):
    assert store.result("a") is None
    assert store.result("unknown") is None
    (store.folder("a") / "result.json.123.456").write_text("{")
    assert store.result("a") is None


def test_a_result_is_read_back_as_it_was_committed(store):
    store.commit("a", {"status": "done", "seconds": 1.5})
    assert store.result("a") == {"status": "done", "seconds": 1.5}
    assert [path.name for path in store.folder("a").iterdir()] == ["result.json"]


@pytest.mark.parametrize("after", [0.02, 0.05, 0.1])
def test_a_process_killed_while_it_commits_leaves_a_whole_result(after, store):
    process = subprocess.Popen([sys.executable, "-c", COMMIT, str(store.root)])
    until(lambda: store.result("a"))
    time.sleep(after)
    process.send_signal(signal.SIGKILL)
    process.wait()
    result = store.result("a")
    assert result["n"] == result["last"]


def test_readers_never_see_half_a_result(store):
    process = subprocess.Popen([sys.executable, "-c", COMMIT, str(store.root)])
    until(lambda: store.result("a"))
    seen = set()

    def many() -> bool:
        for _ in range(1000):
            result = store.result("a")
            assert result["n"] == result["last"]
            seen.add(result["n"])
        return len(seen) > 20

    until(many)
    process.kill()
    process.wait()


def test_writing_fails_whole_when_the_content_is_not_json(tmp_path):
    write(tmp_path / "x.json", {"a": 1})
    with pytest.raises(TypeError):
        write(tmp_path / "x.json", {"a": object()})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}


def event(step: int, time: float = 1.0, **metrics: float) -> dict:
    return {"step": step, "time": time, "metrics": metrics}


def put(store: Store, attempt: int, *events: dict, tail: bytes = b"", trial: str = "a") -> Path:
    """Write an attempt's events file; returns its path."""
    path = store.folder(trial) / f"events-{attempt}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(line(event, trial) for event in events) + tail)
    return path


def test_a_result_and_its_events_are_on_the_disk_before_the_result_has_its_name(store, monkeypatch):
    """By the inodes that are synced, and what is there at that moment: the power may fail at the next one."""
    folder, sync, synced = store.folder("a"), os.fsync, []
    events, result = folder / "events-1.jsonl", folder / "result.json"
    events.write_text("")

    def noted(descriptor: int) -> None:
        about = os.fstat(descriptor)
        synced.append((about.st_ino, about.st_size, result.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    store.commit("a", {"n": 1})
    for path in (events, result):
        assert (path.stat().st_ino, path.stat().st_size, False) in synced
    assert (folder.stat().st_ino, False) in [(inode, there) for inode, _, there in synced]


def test_events_come_by_step_without_a_torn_last_line(store):
    put(store, 10, event(4, x=1))
    put(store, 2, event(2, x=1), event(3, x=1), tail=b'{"step": 9, "me')
    put(
        store, 1, event(0, x=1), event(1, x=1), tail=line(event(2, x=9), "a")[:-1]
    )  # a whole line but for its end
    assert [found["step"] for found in store.events("a")] == [0, 1, 2, 3, 4]


def test_of_a_record_that_several_attempts_made_the_last_one_counts(store):
    put(store, 1, event(1, 1.0, x=1, y=1), event(2, 1.0, x=1))
    put(store, 2, event(1, 2.0, x=2), event(1, 2.0, x=3, z=3))
    found = {
        (e["step"], name): (value, e["time"])
        for e in store.events("a")
        for name, value in e["metrics"].items()
    }
    assert found == {(1, "y"): (1, 1.0), (1, "x"): (2, 2.0), (1, "z"): (3, 2.0), (2, "x"): (1, 1.0)}
    assert [e["step"] for e in store.events("a", until=1)] == [1, 1, 1]


def test_a_trunks_records_come_up_to_the_step_of_the_fork_below_the_trials_own(store):
    put(store, 1, event(1, x=1), event(2, x=2), event(3, x=3), trial="trunk")
    put(store, 1, event(2, 2.0, x=9))
    store.fork("a", 2, {"trial": "trunk", "step": 2})
    put(store, 2, event(3, 2.0, x=7))
    assert [(e["step"], e["metrics"]["x"]) for e in store.events("a")] == [(1, 1), (2, 9), (3, 7)]


@pytest.mark.parametrize("place", range(1, 60, 7))
def test_a_changed_byte_in_a_line_of_events_is_found_with_file_and_line(place, store):
    path = put(store, 1, event(1, x=0.25), event(2, x=0.125))
    content = bytearray(path.read_bytes())
    content[content.index(b"\n") + place] ^= 1
    path.write_bytes(content)
    with pytest.raises(Damaged, match=f"^{re.escape(str(path))}: line 2 "):
        list(store.events("a"))
    assert [e["step"] for e in store.events("a", strict=False)] == [1]


def test_a_line_without_a_checksum_is_damaged(store):
    (store.folder("a") / "events-1.jsonl").write_text(json.dumps(event(1, x=1)) + "\n")
    with pytest.raises(Damaged, match="line 1 is damaged"):
        list(store.events("a"))


def finished(store: Store, *events: dict, **changes) -> dict:
    """Write a trial's events and commit its result; returns that."""
    put(store, 1, *events)
    last = {"status": "done", "reason": None, "seconds": 1.0, "started": 1.0, "steps": events[-1]["step"]}
    last["id"] = "a"
    store.commit("a", last | {"records": Tally(events).sealed()} | changes)
    return store.result("a")


RECORDS = [
    event(1, x=0.5, y=math.nan),
    event(2, x=-0.0, y=math.inf),
    {**event(3, x=3), "events": ["skipped"]},
]
SHORTER = {
    "a line less": lambda content: b"".join(content.splitlines(keepends=True)[:-1]),
    "a line less in the middle": lambda content: b"".join(content.splitlines(keepends=True)[::2]),
    "torn": lambda content: content[:-3],
    "empty": lambda content: b"",
    "another value": lambda content: line(event(1, x=0.25, y=math.nan), "a") + content.partition(b"\n")[2],
}


@pytest.mark.parametrize("harm", SHORTER)
def test_events_that_are_not_those_a_result_was_made_of_are_found(harm, store):
    result = finished(store, *RECORDS)
    assert [e["step"] for e in store.proven("a", result)] == [1, 2, 3]
    path = store.folder("a") / "events-1.jsonl"
    path.write_bytes(SHORTER[harm](path.read_bytes()))
    with pytest.raises(Damaged, match=re.escape(str(store.folder("a")))):
        store.proven("a", result)


@pytest.mark.parametrize("key", ["records", "id", "steps"])
def test_a_result_that_lacks_a_field_is_damaged(key, store):
    result = finished(store, *RECORDS)
    del result[key]
    store.commit("a", result)
    with pytest.raises(Damaged, match=f"damaged: it has no {key}"):
        store.proven("a", store.result("a"))


def test_a_result_without_its_own_digest_is_damaged(store):
    write(store.folder("a") / "result.json", finished(store, *RECORDS))
    with pytest.raises(Damaged, match="checksum"):
        store.result("a")


@pytest.mark.parametrize("place", range(0, 270, 11))
def test_one_flipped_bit_anywhere_in_a_result_is_found(place, store):
    result = finished(store, *RECORDS)
    path = store.folder("a") / "result.json"
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
    found = None
    with suppress(Damaged):
        found = store.result("a")
    assert found in (None, result)  # the same: a blank between two keys


def test_a_ledger_with_the_same_records_has_the_same_digest_and_with_one_bit_changed_another(store):
    book = Ledger(store.root / "ledger.db")
    trial = book.add_member(book.add_arm("a", {}, None, None), 0, "a", "{}")
    book.record(trial, [RECORDS[2]])  # numbers its names in another order
    book.record(trial, RECORDS)
    assert book.tally(trial).sealed() == Tally(RECORDS).sealed()
    assert book.tally(trial).count == 5
    for change in (
        "value = value + 1e-15 WHERE value = 0.5",
        "time = time + 1e-9 WHERE step = 3",
        "step = 4 WHERE step = 3",
    ):
        book.db.execute("BEGIN")
        book.db.execute(f"UPDATE records SET {change}")
        assert book.tally(trial).sealed() != Tally(RECORDS).sealed()
        book.db.execute("ROLLBACK")
    book.db.execute("UPDATE records SET value = 'x' WHERE step = 3")
    with pytest.raises(ValueError, match="cell"):
        book.tally(trial)
    book.close()


def test_a_value_that_is_not_a_number_has_one_digest_in_events_and_in_a_ledger():
    tallies = [Tally() for _ in range(3)]
    for one, value in zip(tallies, (math.nan, -math.nan, None), strict=True):
        one.column("loss", [(1, value, 2.0)])
    assert tallies[0].sealed() == tallies[1].sealed() == tallies[2].sealed()


def test_the_log_ends_with_the_last_lines_printed(store):
    (store.folder("a") / "log-3.txt").write_bytes("\n".join(map(str, range(100))).encode() + b"\n\xff\n")
    assert store.log_tail("a", 3, 2) == "99\n�"
    assert store.log_tail("a", 4) == ""
    store.log("a", 3).write_text("x" * 100_000)
    assert len(store.log_tail("a", 3)) < 600


def test_a_checkpoint_that_another_sweep_removes_meanwhile_is_passed_over(tmp_path):
    store = Store(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    store.shared("whole").write_bytes(b"four")
    store.shared("gone").symlink_to(tmp_path / "nowhere")  # is listed, and is not there
    assert store.largest_checkpoint() == 4
    store.trim(["whole", "gone"], 1.0)
    assert store.shared("whole").exists()
    assert not store.collect(10**18)
    assert not store.shared("whole").exists()


def test_a_held_lock_is_refused_at_once_with_its_holders_name(tmp_path, holder):
    with (
        pytest.raises(Busy, match=f"^pid {holder.pid} on {os.uname().nodename}$"),
        lock(tmp_path / "lock", wait=False),
    ):
        pass


def test_a_lock_ends_with_its_process_however_that_ends(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with lock(tmp_path / "lock", wait=False):
        assert str(os.getpid()) in (tmp_path / "lock").read_text()


def test_who_waits_for_a_lock_gets_it_when_its_holder_is_gone(tmp_path, holder):
    got = threading.Event()

    def wait() -> None:
        with lock(tmp_path / "lock"):
            got.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert not got.wait(0.3)
    holder.kill()
    assert got.wait(5)
    thread.join()


def test_different_trials_are_claimed_independently(store):
    with (
        store.claim("a", 1),
        store.claim("b", 1),
        pytest.raises(Busy),
        lock(store.folder("a") / "lock", wait=False),
    ):
        pass


def test_what_a_trial_left_are_the_files_of_its_folder_artifacts(store):
    assert store.artifacts("a") == store.artifacts("unknown") == []
    folder = store.folder("a") / "artifacts"
    (folder / "inner").mkdir(parents=True)
    for name in ("b.png", "a.txt"):
        (folder / name).touch()
    (folder / "link").symlink_to(folder / "a.txt")
    (folder / "nowhere").symlink_to(folder / "c")
    assert [path.name for path in store.artifacts("a")] == ["a.txt", "b.png"]
    store.folder("b").mkdir()
    (store.folder("b") / "artifacts").symlink_to(folder)
    assert store.artifacts("b") == []


def test_a_line_or_a_result_of_another_trial_is_not_taken(store):
    """Whole and sound in itself, in a folder that it was not written for: copied there by hand, or by a restored backup."""
    path = put(store, 1, *RECORDS, trial="a")
    store.commit("a", {"id": "a", "status": "done", "records": Tally(RECORDS).sealed()})
    other = store.folder("b")
    other.mkdir(parents=True)
    (other / path.name).write_bytes(path.read_bytes())
    with pytest.raises(Damaged, match=r"events-1\.jsonl: line 1 is damaged"):
        list(store.events("b"))
    (other / "result.json").write_bytes((store.folder("a") / "result.json").read_bytes())
    with pytest.raises(Damaged, match=r"b/result\.json: the result of another trial, a$"):
        store.result("b")
    assert store.result("a")["id"] == "a"
