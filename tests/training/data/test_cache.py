"""Tests of the cache: what is made once is whole or absent, and a process that waits for it receives signs of progress."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ablate.cache import digest, growing, kept, note, stamp

pytestmark = pytest.mark.usefixtures("cache")
HELD = "import sys, time; from ablate.cache import kept; kept('k', 'a', lambda folder: (print('made', flush=True), sys.stdin.read()))"


def fill(folder):
    (folder / "a").write_text("1")
    yield "first"
    (folder / "b").write_text("2")
    yield "second"


def test_what_grows_yields_as_it_is_made_and_is_then_what_is_kept():
    assert len(list(growing("k", "a", fill))) == 2
    folder = kept("k", "a", lambda _: pytest.fail("made twice"))
    assert [path.read_text() for path in sorted(folder.iterdir())] == ["1", "2"]
    assert list(growing("k", "a", fill)) == []


def test_what_is_left_halfway_is_not_there_and_is_made_anew(cache):
    begun = growing("k", "a", fill)
    next(begun)
    begun.close()
    assert [path.name for path in (cache / "k").iterdir()] == ["a.lock"]
    assert len(list(growing("k", "a", fill))) == 2


def test_whoever_waits_for_another_process_hears_that_it_goes_on(monkeypatch):
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda _: sleep(0.02))
    with subprocess.Popen(
        [sys.executable, "-c", HELD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "made\n"
        waiting = growing("k", "a", lambda _: pytest.fail("the other makes it"))
        for _ in range(3):
            next(waiting)
        other.stdin.close()
        list(waiting)
        assert other.wait(timeout=300) == 0


def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the clock an hour ahead: digests of files are cached some seconds after the last change."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)


def test_an_edit_that_restores_the_time_of_modification_changes_the_digest(tmp_path, monkeypatch):
    settled(monkeypatch)
    data = tmp_path / "data.bin"
    data.write_bytes(b"1.0")
    before, facts = digest([data]), data.stat()
    with data.open("r+b") as file:
        file.write(b"9.0")
    os.utime(data, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert data.stat().st_mtime_ns == facts.st_mtime_ns
    assert digest([data]) != before


def exchanged(notes: list[Path]) -> None:
    one, other = (note.read_bytes() for note in notes)
    notes[0].write_bytes(other)
    notes[1].write_bytes(one)


def edited(notes: list[Path]) -> None:
    for path in notes:
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"text": "0" * 32}))


@pytest.mark.parametrize("damage", [exchanged, edited])
def test_notes_that_were_exchanged_or_edited_do_not_count(damage, cache, tmp_path, monkeypatch):
    settled(monkeypatch)
    files = [tmp_path / "one", tmp_path / "other"]
    for file in files:
        file.write_text(file.name)
    digests = [digest([file]) for file in files]
    for file in files:
        note(stamp([file]), file.name)
    assert [digest([file]) for file in files] == ["one", "other"]  # the notes are used
    damage(sorted((cache / "notes").iterdir()))
    assert [digest([file]) for file in files] == digests
