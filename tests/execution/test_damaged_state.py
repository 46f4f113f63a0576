"""Files of a state folder that are not what was written: another sweep's ledger, folders and links in the place of files, bytes that
are no text."""

import json
import os
import shutil
import sqlite3
import struct
import time
from contextlib import closing
from pathlib import Path

import pytest
from support.commands import INLINE, here
from support.experiments import ablate, ledger, statuses, sweep, tiny, write

from ablate.cache import SETTLED_SECONDS
from ablate.cli.report import make
from ablate.errors import InputError
from ablate.execution.controller import Controller
from ablate.execution.search.annotations import decorate
from ablate.execution.sweep_control import damage, holder, take
from ablate.execution.workers import Inline
from ablate.files import Busy, Damaged, Holder, lock, read_json
from ablate.results.summary import summaries
from ablate.store.checked_ledger import folders, open_checked
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Store

NOT_TEXT = b"\xff\xfe\x80{"
DEEP = b"[" * 100_000
READERS = {
    "status": ("status", "tiny"),
    "show of one": ("show", "tiny"),
    "show of all": ("show",),
    "show of two": ("show", "tiny:rht=true", "tiny:rht=false"),
    "show as tables": ("show", "tiny", "--to", "csv", "--out", "{out}"),
    "report": ("report", "tiny", "--mlflow", "none"),
}
"""Commands that read a ledger, with their arguments."""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Return a folder with two small sweeps that are over, `tiny` and `other`, in `state`."""
    folder = tmp_path_factory.mktemp("swept")
    for name in ("tiny", "other"):
        sweep(tiny(folder, name, seeds=1, question=f"Question of {name}?"), folder / "state")
    return folder


@pytest.fixture
def copy(swept, tmp_path):
    """Return a copy of the folder of both sweeps."""
    shutil.copytree(swept, tmp_path / "copy")
    return tmp_path / "copy"


def read(verb: str, folder: Path):
    """Return the output of a command that reads sweep `tiny`."""
    words = (word.format(out=folder / "out") for word in READERS[verb])
    return here(*words, "--state", folder / "state")


def fail(folder: Path, word: str) -> None:
    """Check that each reader names the ledger in one sentence with a word, and shows none of its numbers."""
    for verb in READERS:
        done = read(verb, folder)
        output = done.stdout + done.stderr
        text = " ".join(output.split())
        assert (word in text, "ledger.db" in text, "Traceback" in text) == (True, True, False), (verb, output)
        assert verb in ("status", "show of all") or done.returncode == 2, verb
        assert "rht=true" not in done.stdout or "other" in done.stdout, verb


# Reports


@pytest.fixture(scope="module")
def reports(swept, tmp_path_factory):
    """Return the folder `reports` of the state folder with a report of `tiny`, which takes seconds to write."""
    shutil.copytree(swept, copied := tmp_path_factory.mktemp("reported") / "copy")
    return make(copied / "state", "tiny").folder.parent


@pytest.mark.parametrize("content", [b"0", DEEP, NOT_TEXT, b'{"stamp": 3}', "folder", "flipped"])
def test_the_answer_of_a_report_whose_facts_are_damaged_is_not_shown(content, copy, reports):
    state = copy / "state"
    shutil.copytree(reports, state / "reports")
    path = state / "reports" / "tiny" / "index.json"
    answers = [found["answer"] for found in json.loads(here("status", "--state", state, "--json").stdout)]
    assert sum(map(bool, answers)) == 1
    if content == "folder":
        path.unlink()
        path.mkdir()
    else:
        flipped = path.read_bytes().replace(b"tiny", b"tinz")
        assert flipped != path.read_bytes()
        path.write_bytes(flipped if content == "flipped" else content)
    for found in json.loads(here("status", "--state", state, "--json").stdout):
        assert (found["answer"], found["trouble"]) == (None, None)


# Trials


def test_a_finished_trial_whose_result_is_gone_is_put_aside_and_counted_once(copy):
    """Its second run would be the second attempt with a result, of one trial."""
    state = copy / "state"
    with closing(ledger(state)) as book:
        trial = book.members()[0].id
    (state / "trials" / trial / "result.json").unlink()
    done = here("sweep", copy / "tiny.yaml", "--state", state, *INLINE, "--no-report")
    assert (done.returncode, "missing, although the trial had finished" in done.stdout) == (0, True), (
        done.stderr
    )
    assert [path.name.partition("-")[0] for path in (state / "retired").iterdir()] == [trial]
    with closing(ledger(state)) as book:
        query = "SELECT count(*) FROM attempts JOIN trials USING (trial) WHERE id = ? AND outcome = 'done'"
        assert book.db.execute(query, (trial,)).fetchone()[0] == 1


STRAYS = ["log-1\udcff.txt", f"log-{'9' * 30}.txt", "events-x.jsonl", "events-1\udcff.jsonl", "trunk-.json"]


def test_files_under_names_that_no_attempt_gives_are_left_alone(copy):
    state = copy / "state"
    for folder in (state / "trials").iterdir():
        for name in STRAYS:
            (folder / name).write_bytes(NOT_TEXT)
    unknown = state / "sweeps" / "\udcff"
    unknown.mkdir()
    (unknown / "ledger.db").write_bytes(NOT_TEXT)
    done = here("sweep", copy / "tiny.yaml", "--state", state, *INLINE, "--no-report")
    assert (done.returncode, "0 trials run, 3 already done" in done.stdout) == (0, True), done.stderr
    assert here("status", "tiny", "--state", state, "--verify").returncode == 0
    done = ablate("status", "--state", state)
    assert (done.returncode, "\\udcff" in done.stdout) == (0, True), done.stderr


def test_a_link_that_leads_nowhere_in_place_of_a_trunk_is_damage(tmp_path):
    store = Store(tmp_path)
    store.folder("t").mkdir(parents=True)
    (store.folder("t") / "trunk-1.json").symlink_to("nowhere")
    assert store.attempts("t") == 0
    with pytest.raises(Damaged, match=r"trunk-1\.json"):
        list(store.events("t"))


def test_a_digit_of_records_whose_time_was_restored_is_found_by_the_next_sweep(copy):
    words = (copy / "tiny.yaml", "--state", copy / "state", *INLINE, "--no-report")
    assert here("sweep", *words).returncode == 0  # has compared the files of this copy
    path = next(copy.glob("state/trials/*/events-1.jsonl"))
    facts = path.stat()
    path.write_bytes(path.read_bytes().replace(b'"step": 2', b'"step": 3', 1))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    done = here("sweep", *words)
    assert (done.returncode, f"{path}: line" in done.stdout, "runs again" in done.stdout) == (0, True, True)


def test_a_file_in_place_of_a_trials_folder_is_named(copy):
    folder = next((copy / "state" / "trials").iterdir())
    shutil.rmtree(folder)
    folder.touch()
    done = here("sweep", copy / "tiny.yaml", "--state", copy / "state", *INLINE)
    assert (done.returncode, done.stderr.splitlines()[-1].startswith(f"{folder}: Not a directory")) == (
        2,
        True,
    )


# Journals


def test_a_torn_journal_gets_no_notes(copy):
    journal = copy / "state" / "sweeps" / "tiny" / "optuna.log"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:4]) + lines[4][:-9])
    with closing(open_checked(journal.with_name("ledger.db"))) as book:
        decorate(journal, "tiny", "A note.", summaries(book), book.facts.metric)


# Locks


@pytest.mark.parametrize(
    "content", [NOT_TEXT, DEEP, b'{"pid": -1, "host": "h"}', b'{"pid": 1e99, "host": "h"}']
)
def test_a_lock_whose_bytes_name_no_process_is_nobodys_and_can_be_taken(content, tmp_path):
    (tmp_path / "lock").write_bytes(content)
    assert Holder.parse(content) is None
    assert holder(tmp_path) is None
    with lock(tmp_path / "lock", wait=False) as held:
        assert held()
        assert holder(tmp_path) == Holder.this_process()
        (tmp_path / "lock").write_bytes(content)
        assert not held()
        with pytest.raises(Busy, match="unknown"), lock(tmp_path / "lock", wait=False):
            pass


def test_deep_brackets_are_damage_and_no_order(tmp_path):
    (tmp_path / "a.json").write_bytes(DEEP)
    with pytest.raises(Damaged, match=r"a\.json: torn or damaged"):
        read_json(tmp_path / "a.json")
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / "1.json").write_bytes(DEEP)
    assert take(tmp_path) == []


# Ledgers


def test_a_lost_log_of_the_ledger_costs_no_finished_trial(tmp_path):
    """SQLite does not miss a write-ahead log that is gone."""
    state = tmp_path / "state"
    (tmp_path / "lost").mkdir()
    path, lost = state / "sweeps" / "tiny" / "ledger.db", tmp_path / "lost" / "ledger.db"
    most = 0
    for _ in Controller(tiny(tmp_path, seeds=1), state, "cpu", Inline, None).run():
        over = [key for key, status in statuses(state).items() if status == "done"]
        shutil.copy(path, lost)
        if over:
            with closing(Ledger(lost, readonly=True)) as book:
                assert over == [(row.name, row.seed) for row in book.members() if row.status == "done"]
        most = max(most, len(over))
    assert most == 3


@pytest.mark.parametrize("how", ["copied", "linked"])
def test_the_ledger_of_another_sweep_is_refused_and_made_again_without_its_identity(how, copy):
    """Its rows agree with its own seals, and so nothing else tells it from the sweep's own."""
    path = copy / "state" / "sweeps" / "tiny" / "ledger.db"
    with closing(Ledger(path.parents[1] / "other" / "ledger.db")) as other:
        identity = other.identity()
    past = time.time() - 60  # old enough for a note in the cache that it agrees with its seals
    for file in (path.parents[1] / "other").iterdir():
        os.utime(file, (past, past))
    time.sleep(SETTLED_SECONDS)
    open_checked(path.parents[1] / "other" / "ledger.db").close()
    path.unlink()
    if how == "linked":
        path.symlink_to(path.parents[1] / "other" / "ledger.db")
    else:
        shutil.copy(path.parents[1] / "other" / "ledger.db", path)
    fail(copy, "it is the ledger of sweep other")
    words = (copy / "tiny.yaml", "--state", copy / "state")
    done = here("sweep", *words, *INLINE)
    assert (done.returncode, "it is the ledger of sweep other" in done.stderr) == (2, True), done.stdout
    assert here("rebuild", *words).returncode == 0
    with closing(open_checked(path)) as made:
        assert (made.fact("name"), made.fact("question")) == ("tiny", "Question of tiny?")
        assert made.fact("id") != identity
    assert set(statuses(copy / "state").values()) == {"done"}


@pytest.mark.parametrize(
    "kind",
    ["nothing", "no tables", "folder", "link", "folder in place of its log", "link in place of its log"],
)
def test_a_sweep_without_a_ledger_is_named_by_every_reader_and_made_again(kind, copy):
    folder = copy / "state" / "sweeps" / "tiny"
    path = folder / "ledger.db"
    if kind == "folder in place of its log":
        path.with_name("ledger.db-wal").mkdir()
    elif kind == "link in place of its log":
        path.with_name("ledger.db-shm").unlink(missing_ok=True)
        path.with_name("ledger.db-shm").symlink_to(path.parents[1] / "other" / "ledger.db")
    else:
        path.unlink()
    if kind == "no tables":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(folder / "nowhere")
    assert [found.name for found in folders(copy / "state", None)] == ["other", "tiny"]
    words = {
        "nothing": "no ledger",
        "no tables": "no ledger",
        "link": "a link that leads nowhere",
        "link in place of its log": "is a link",
    }
    fail(copy, words.get(kind, "is a folder"))
    assert here("rebuild", copy / "tiny.yaml", "--state", copy / "state").returncode == 0
    for verb in READERS:
        assert read(verb, copy).returncode == 0, verb
    assert set(statuses(copy / "state").values()) == {"done"}


@pytest.mark.parametrize("text", [b"val/\xff", b"val/\xed\xa0\x80"], ids=["no UTF-8", "lone surrogate"])
@pytest.mark.parametrize("table", ["names", "arms", "sweep", "members", "compared", "row_seals"])
def test_text_of_a_ledger_in_no_encoding_is_damage(table, text, copy):
    path = copy / "state" / "sweeps" / "tiny" / "ledger.db"
    where = {
        "names": "text = ? WHERE name = 1",
        "arms": "name = ? WHERE arm = 1",
        "sweep": "value = ? WHERE key = 'question'",
        "members": "mlflow = ?",
        "compared": "signature = ?",
        "row_seals": "seal = ? WHERE part = 'records'",
    }[table]
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(f"UPDATE {table} SET {where.replace('?', 'CAST(? AS TEXT)')}", (text,))
    assert damage(path)
    with pytest.raises(InputError, match="damaged"):
        open_checked(path)
    if table not in ("compared", "row_seals"):  # which `status` does not read
        fail(copy, "damaged")
    words = (copy / "tiny.yaml", "--state", copy / "state")
    assert here("sweep", *words, *INLINE).returncode == 2
    assert here("rebuild", *words).returncode == 0
    assert damage(path) is None


def test_a_record_that_names_another_trial_among_its_neighbours_is_damage(copy):
    """SQLite's quick check does not look at the order of rows, and a search by trial takes this one for its own."""
    path = copy / "state" / "sweeps" / "tiny" / "ledger.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        step, name = 2, db.execute("SELECT name FROM names WHERE text = 'val/loss'").fetchone()[0]
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        value, moment = db.execute(
            "SELECT value, time FROM records WHERE (trial, name, step) = (3, ?, ?)", (name, step)
        ).fetchone()
    row = bytes([3, name, step]) + struct.pack(">dd", value, moment)
    content = path.read_bytes()
    assert content.count(row) == 1
    path.write_bytes(content.replace(row, bytes([2]) + row[1:]))
    assert damage(path) is None
    with pytest.raises(InputError, match="records are not what was written"):
        open_checked(path)


def test_the_status_of_a_ledger_that_lacks_a_row_is_not_shown(copy):
    with closing(sqlite3.connect(copy / "state" / "sweeps" / "tiny" / "ledger.db")) as db, db:
        db.execute("DELETE FROM trials WHERE trial = 2")
    found = {
        one["name"]: one for one in json.loads(here("status", "--state", copy / "state", "--json").stdout)
    }
    assert (found["tiny"]["trials"], "table trials, row 2: is gone" in found["tiny"]["trouble"]) == ({}, True)
    assert found["other"]["trials"] == {"done": 3}


def test_a_sweep_that_only_took_its_lock_is_named(tmp_path):
    path = write(tmp_path)
    (tmp_path / "state" / "sweeps" / "tiny").mkdir(parents=True)
    done = here("status", "--state", tmp_path / "state", "--json")
    (found,) = json.loads(done.stdout)
    assert (found["name"], "no ledger" in found["trouble"]) == ("tiny", True)
    assert here("rebuild", path, "--state", tmp_path / "state").returncode == 0
