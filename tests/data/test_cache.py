"""Tests of the cache: what is made once is whole or absent, and a process that waits for it receives signs of progress."""

import subprocess
import sys

import pytest

from ablate.cache import growing, kept

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
    monkeypatch.setattr("ablate.cache.POLL_SECONDS", 0.02)
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
