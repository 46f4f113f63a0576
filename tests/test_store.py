"""The trial store: a result is there whole or not at all, a torn line is dropped, and a lock has one holder."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from experiments_for_tests import until

from ablate.store import Busy, Store, lock, write

HOLD = """
import sys, time; from pathlib import Path; from ablate.store import lock
with lock(Path(sys.argv[1])):
    print(1, flush=True)
    time.sleep(60)
"""
COMMIT = """
import sys; from pathlib import Path; from ablate.store import Store
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
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "lock")], stdout=subprocess.PIPE)
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


def test_events_come_attempt_by_attempt_without_a_torn_last_line(store):
    lines = [json.dumps({"step": n}) for n in range(5)]
    (store.folder("a") / "events-10.jsonl").write_text(f"{lines[4]}\n")
    (store.folder("a") / "events-2.jsonl").write_text(f"{lines[2]}\n{lines[3]}\n" + '{"step": 9, "me')
    (store.folder("a") / "events-1.jsonl").write_text(f"{lines[0]}\n{lines[1]}\n" + lines[2])  # a whole line but for its end
    assert [event["step"] for event in store.events("a")] == [0, 1, 2, 3, 4]


def test_the_log_ends_with_the_last_lines_printed(store):
    (store.folder("a") / "log-3.txt").write_bytes("\n".join(map(str, range(100))).encode() + b"\n\xff\n")
    assert store.log_tail("a", 3, 2) == "99\n�"
    assert store.log_tail("a", 4) == ""


def test_a_held_lock_is_refused_at_once_with_its_holders_name(tmp_path, holder):
    with pytest.raises(Busy, match=f"^pid {holder.pid} on {os.uname().nodename}$"), lock(tmp_path / "lock", wait=False):
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
    with store.claim("a", 1), store.claim("b", 1), pytest.raises(Busy), lock(store.folder("a") / "lock", wait=False):
        pass


def test_what_a_trial_left_are_the_files_of_its_folder_artifacts(store):
    assert store.artifacts("a") == store.artifacts("unknown") == []
    folder = store.folder("a") / "artifacts"
    (folder / "inner").mkdir(parents=True)
    for name in ("b.png", "a.txt"):
        (folder / name).touch()
    assert [path.name for path in store.artifacts("a")] == ["a.txt", "b.png"]
