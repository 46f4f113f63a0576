"""Every reader of a sweep's numbers opens its ledger in one place, which compares rows and records with their seals."""

import ast
import json
import os
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from support.commands import here
from support.experiments import ledger, sweep, tiny

import ablate
from ablate.cli.commands import VERBS
from ablate.errors import InputError
from ablate.reports.answer import Answer
from ablate.store.checked_ledger import open_checked, unverified
from ablate.store.ledger import Ledger

PACKAGE = Path(ablate.__file__).parent
CHANGE = (
    "UPDATE records SET value = value + 1 WHERE name = (SELECT name FROM names WHERE text = 'val/loss')"
    " AND trial IN (SELECT trial FROM members JOIN arms USING (arm) WHERE arms.name = 'rht=true')"
)
READERS = {
    "show of one": ("show", "tiny"),
    "show of all": ("show",),
    "show of two": ("show", "tiny:rht=true", "tiny:rht=false"),
    "show as tables": ("show", "tiny", "--to", "csv", "--out", "{out}"),
    "report": ("report", "tiny", "--mlflow", "none"),
    "status": ("status", "tiny", "--verify"),
    "sync": ("rebuild", "tiny", "--sync", "--mlflow", "sqlite:///{out}/mlflow.db"),
    "plan": (
        "plan",
        "{state}/../tiny.yaml",
    ),
}
"""Commands that show or send numbers of the records of other runs of `ablate`, with arguments that make them do so."""
OTHERS = {
    "sweep": "its controller compares each trial that it finds, and reads what differs again (test_judged_files.py)",
    "calibrate": "runs its sweeps again first, whose controllers do the same",
    "collect": "the same: it is a sweep whose trials a batch system ran",
    "run-task": "runs one trial, and opens no ledger",
    "judge": "reads runs from elsewhere, and writes their ledger before it shows it",
    "ui": "shows reports that were written, and counts of runs",
    "stop": "reads names and ids",
    "init": "reads no ledger",
    "check": "reads no ledger",
    "doctor": "reads no ledger",
    "recipe": "reads no ledger",
    "data": "reads no ledger",
    "bench": "reads ledgers of its own alone",
    "conform": "reads no ledger",
    "rank": "reads no ledger",
}
"""All other commands, with the reason why a changed record changes nothing that they show."""
OPENED_APART = {
    "cli/rebuild.py": "compares with the trial folders",
    "cli/servers/reports.py": "counts of runs, and facts",
    "cli/stop.py": "names and ids",
    "cli/ui.py": "facts about the projection",
    "execution/forecast.py": "names and statuses of members",
    "execution/shared_prefixes.py": "facts",
    "execution/sweep_control.py": "compares rows, for commands that repair records",
    "judging/answer.py": "the ledger that it has just written",
    "judging/judged_ledger.py": "where runs are from, before they are replaced",
    "execution/sweep_status.py": "progress, after a comparison of rows with their seals",
    "execution/tracking/tracker.py": "a thread of the process that writes it",
    "reports/report_files.py": "the state that a report shows, not its records",
    "store/checked_ledger.py": "the one place",
}
"""Files that open a ledger for reading without a comparison, with what they read or do instead."""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Return the state folder of a small sweep that is over."""
    folder = tmp_path_factory.mktemp("checked")
    sweep(tiny(folder, seeds=3), folder / "state")
    return folder / "state"


@pytest.fixture
def copied(swept, tmp_path):
    """Return a copy of the state folder, and its ledger."""
    shutil.copytree(swept, tmp_path / "state")
    return tmp_path / "state", tmp_path / "state" / "sweeps" / "tiny" / "ledger.db"


def execute(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        assert db.execute(statement).rowcount != 0


def test_each_command_is_known_to_read_records_or_not_to():
    names = {verb for verbs in VERBS.values() for verb in verbs}
    read = {words[0] for words in READERS.values()}
    assert not read & OTHERS.keys()
    assert names == read | OTHERS.keys()


def test_no_file_opens_a_ledger_for_reading_apart_unless_it_shows_no_record():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", "") == "Ledger"
                and any(word.arg == "readonly" for word in node.keywords)
            ):
                found.add(str(path.relative_to(PACKAGE)))
    assert found == OPENED_APART.keys()


@pytest.mark.parametrize("reader", READERS)
def test_a_changed_record_is_refused_by_every_command_in_one_sentence_with_the_way_out(
    reader, copied, tmp_path
):
    state, path = copied
    name = "tiny"
    if reader == "plan":  # it reads the ledger of a calibration
        name = "tiny_calibration"
        tiny(tmp_path, seeds=3)
        path = path.parent.rename(path.parent.with_name(name)) / "ledger.db"
        with closing(Ledger(path)) as renamed:
            renamed.describe(name=name)
    words = [word.format(out=tmp_path, state=state) for word in READERS[reader]]
    if reader != "sync":  # MLflow takes seconds to start; tests/cli/test_sync.py has what is whole
        whole = here(*words, "--state", state)
        assert whole.returncode == 0, whole.stderr
    execute(path, CHANGE)
    done = here(*words, "--state", state)
    assert done.returncode == (1 if reader == "status" else 2)
    assert "Traceback" not in done.stderr
    lines = [line for line in (done.stdout + done.stderr).splitlines() if str(path) in line]
    assert lines
    assert all("its records are not what was written" in line for line in lines)
    assert all(f"`ablate rebuild {name}.yaml --state {state}`" in line for line in lines)


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda state: ablate.reports.open("tiny", state=state), ValueError),
        (lambda state: Answer.open(state, "tiny"), InputError),
        (lambda state: warmed(state), InputError),
    ],
    ids=["reports.open", "Answer.open", "search.warm"],
)
def test_a_changed_record_is_refused_in_python(read, error, copied):
    state, path = copied
    read(state)
    execute(path, CHANGE)
    with pytest.raises(error, match=r"records are not what was written.*`ablate rebuild tiny\.yaml --state "):
        read(state)


def warmed(state: Path) -> None:
    """Run a search that begins with the arms of the sweep."""
    search = {"trials": 1, "sampler": "random", "seed": 1, "warm": ["tiny"]}
    space = {"ablate": {"rht": {"choice": [True, False]}}, "search": search, "seeds": 1}
    shutil.rmtree(state / "sweeps" / "warm", ignore_errors=True)
    sweep(tiny(state.parent, "warm", **space), state)


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM records WHERE trial = 1",
        "DELETE FROM records WHERE trial = 1 AND step = 4",
        "INSERT INTO records SELECT trial, name, 9, value, time FROM records WHERE trial = 1 AND step = 4",
        "UPDATE records SET value = 'x' WHERE trial = 1 AND step = 4",
        "UPDATE context_free SET loss = loss - 1 WHERE trial = 1",
        "UPDATE trials SET status = 'running' WHERE trial = 1",
        "UPDATE names SET text = 'val/other' WHERE text = 'val/loss'",
    ],
)
def test_any_change_of_what_numbers_are_computed_from_is_refused(statement, copied):
    _, path = copied
    open_checked(path).close()
    execute(path, statement)
    with pytest.raises(InputError, match=r"damaged \(.*; `ablate rebuild tiny\.yaml --state "):
        open_checked(path)


def test_what_has_no_seal_is_shown_as_unverified(copied, tmp_path):
    state, path = copied
    execute(path, "DELETE FROM row_seals WHERE part = 'records' AND key = '1'")
    text = "unverified: 1 of 9 trials have no seal"
    with ablate.reports.open("tiny", state=state) as results:
        assert results.unverified.startswith(text)
        assert text in repr(results)
    for reader in ("show of one", "show of all", "show of two", "show as tables"):
        words = [word.format(out=tmp_path, state=state) for word in READERS[reader]]
        done = here(*words, "--state", state)
        assert (done.returncode, text in done.stdout) == (0, True), reader
    assert text in here("show", "--to", "md", "--state", state).stdout
    for reader in ("show of all", "show of two"):
        for entry in json.loads(here(*READERS[reader], "--json", "--state", state).stdout):
            assert text in str(entry["unverified"])


def test_a_sweep_that_was_only_begun_is_not_unverified(tmp_path):
    with closing(Ledger(tmp_path / "sweeps" / "tiny" / "ledger.db")) as book:
        book.add_member(book.add_arm("a", {}, None, None), 0, "0" * 16, "{}")
    with closing(ledger(tmp_path)) as book:
        assert unverified(book) == ""


def test_a_ledger_is_compared_once_until_its_file_changes(copied, cache, monkeypatch):
    _, path = copied
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)  # nothing has changed for an hour
    open_checked(path).close()
    (note,) = (cache / "notes").iterdir()
    written = note.stat()
    open_checked(path).close()
    assert (note.stat().st_ino, note.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    facts = path.stat()
    execute(path, CHANGE)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    for _ in range(2):  # a difference is not noted, since it may be of the moment
        with pytest.raises(InputError, match="not what was written"):
            open_checked(path)


def test_a_cache_that_cannot_be_written_costs_a_comparison_and_no_more(copied, tmp_path, monkeypatch):
    _, path = copied
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path / "file"))
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    open_checked(path).close()
    execute(path, CHANGE)
    with pytest.raises(InputError, match="not what was written"):
        open_checked(path)
