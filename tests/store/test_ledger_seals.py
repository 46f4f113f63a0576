"""A cell, a row or a seal of a ledger that is not what was written is noticed, wherever it lies, before a number is reported."""

import random
import shutil
import sqlite3
from contextlib import closing

import pytest
from support.commands import here
from support.experiments import ledger, sweep, tiny

from ablate.execution.sweep_control import damage
from ablate.store.ledger import Ledger
from ablate.store.ledger_seals import SEALED, difference
from ablate.store.trial_store import Store
from ablate.store.verify import verify

SEARCH = {
    "ablate": {"cooldown": {"uniform": [0.25, 0.5]}, "workload.lr": {"uniform": [1e-4, 3.0], "log": True}},
    "search": {
        "trials": 8,
        "sampler": "random",
        "seed": 1,
        "pruner": "median",
        "rungs": [2, 4],
        "confirm": 2,
    },
    "seeds": 1,
}
SHAPE = {"steps": 6, "eval_every": 2}
BOOKKEEPING = {("members", "mlflow"), ("members", "shipped"), ("members", "closed")}
"""Columns without a seal: what MLflow was sent."""
TABLES = (*SEALED, "records", "events", "row_seals")
FLIPS = 60


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A finished search with trials that were pruned and a winner that was confirmed, to be copied."""
    folder = tmp_path_factory.mktemp("searched")
    sweep(tiny(folder, shape=SHAPE, **SEARCH), folder / "state")
    with closing(
        Ledger(folder / "state/sweeps/tiny/ledger.db")
    ) as book:  # a guard's intervention, which none of these trials has
        *_, trial = (row.trial for row in book.wanted_trials() if row.status == "pruned")
        book.record(trial, [{"step": 2, "time": 0.5, "metrics": {}, "events": ["lr halved"]}])
        book.seal_records(trial, book.tally(trial).sealed()["sha256"])
    return folder


@pytest.fixture
def copied(searched, tmp_path):
    """A copy of it to be damaged: its state folder and the path of its ledger."""
    state = shutil.copytree(searched, tmp_path / "copy") / "state"
    return state, state / "sweeps" / "tiny" / "ledger.db"


def why(state, path) -> list[str]:
    """Return what `status --verify` and every report would refuse the sweep for."""
    if found := damage(path):
        return [found]
    with closing(Ledger(path, readonly=True)) as book:
        return [str(mismatch) for mismatch in verify(book, Store(state)).mismatches]


def changed(value, draw: random.Random):
    """Return another value, near this one."""
    match value:
        case None:
            return draw.choice([0, 1, "x"])
        case int():
            return value ^ 1 << draw.randrange(4)
        case float():
            return value * (1 + 2**-40) or 1e-9
        case str() if value:
            place = draw.randrange(len(value))
            return value[:place] + chr(ord(value[place]) ^ 1) + value[place + 1 :]
    return "x"


@pytest.mark.parametrize("seed", range(FLIPS))
def test_a_random_cell_that_is_flipped_is_noticed(seed, copied):
    (state, path), draw = copied, random.Random(seed)
    table = TABLES[seed % len(TABLES)]
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        cursor = db.execute(f"SELECT * FROM {table}")
        columns, rows = [column for column, *_ in cursor.description], cursor.fetchall()
        while True:
            row, column = draw.choice(rows), draw.randrange(len(columns))
            value = changed(row[column], draw)
            same = " AND ".join(f"{name} IS ?" for name in columns)
            if (table, columns[column]) in BOOKKEEPING:
                continue
            try:
                assert (
                    db.execute(
                        f"UPDATE {table} SET {columns[column]} = ? WHERE {same}", (value, *row)
                    ).rowcount
                    == 1
                )
                break
            except sqlite3.IntegrityError:  # of a key that another row has
                continue
    assert why(state, path), f"{table}.{columns[column]} of {row}: {value!r}"


@pytest.mark.parametrize("table", SEALED)
@pytest.mark.parametrize("how", ["deleted", "added"])
def test_a_row_that_is_deleted_or_added_is_named_and_no_report_is_made(how, table, copied):
    state, path = copied
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        columns, keys = SEALED[table].columns, SEALED[table].keys
        row = db.execute(
            f"SELECT {', '.join(columns)} FROM {table} ORDER BY 1 DESC, 2 DESC LIMIT 1"
        ).fetchone()
        if how == "deleted":
            same = " AND ".join(f"{column} = ?" for column in columns[:keys])
            assert db.execute(f"DELETE FROM {table} WHERE {same}", row[:keys]).rowcount == 1
        else:  # a copy of the row with another key and other unique names
            other = {"name": 9999 if table == "names" else "another", "arm": 77, "trial": 77}
            other |= dict.fromkeys(("key", "id", "text"), "another")
            row = [other.get(column, value) for column, value in zip(columns, row, strict=True)]
            db.execute(
                f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(row))})", row
            )
    key = "/".join(str(cell) for cell in row[:keys])
    (found,) = why(state, path)
    assert f"table {table}, row {key}: " in found
    reported = here("report", "tiny", "--state", state, "--mlflow", "none")
    *_, line = reported.stderr.splitlines()
    assert (reported.returncode, "Traceback" in reported.stderr) == (2, False)
    assert f"table {table}, row {key}: " in line
    assert f"`ablate rebuild tiny --state {state}`" in line
    assert not (state / "reports").exists()


def test_a_dangling_arm_is_a_sentence_in_the_leaderboard(copied):
    state, path = copied
    for statement, found in (
        ("UPDATE arms SET repeats = 1", "table arms, row 1: "),
        ("DROP TABLE row_seals", "a cell cannot be read: no such table: "),
    ):
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute(statement)
        shown = here("show", "--state", state)
        assert "Traceback" not in shown.stderr
        assert f"left out: {path}: damaged ({found}" in shown.stderr


def test_whatever_a_writer_does_leaves_every_row_with_its_seal(tmp_path):
    draw, trials = random.Random(7), {}
    with closing(Ledger(tmp_path / "ledger.db")) as book:
        for moment in range(300):
            match draw.randrange(9):
                case 0:
                    book.describe(**{f"fact {draw.randrange(5)}": str(moment)})
                case 1:
                    book.add_arm(
                        f"arm {draw.randrange(6)}",
                        {"rht": moment},
                        None,
                        draw.choice([None, moment]),
                        "listed",
                    )
                case 2 | 3 if arms := book.arms():
                    identity = f"{draw.randrange(12)}"
                    number = book.add_member(draw.choice(arms).arm, draw.randrange(3), identity, "{}")
                    trials[number] = identity
                case 4 if draw.random() < 0.3:
                    book.unwant()
                case 5 if trials:
                    book.start_attempt(draw.choice([*trials]), draw.randrange(4), moment)
                case 6 if trials:
                    book.end_attempt(draw.choice([*trials]), draw.randrange(4), moment, "done")
                case 7 if trials:
                    book.record(
                        draw.choice([*trials]),
                        [{"step": moment, "time": 0.5, "metrics": {f"m{draw.randrange(4)}": 1.0}}],
                    )
                case 8 if trials:
                    draw.choice(
                        [
                            book.forget,
                            lambda trial: book.settle(trial, "failed", "x", 3),
                            lambda trial: book.requeue(1.0),
                        ]
                    )(draw.choice([*trials]))
            assert difference(book.db) is None, moment
        rows = sum(book.db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in SEALED)
        seals = "SELECT count(*) FROM row_seals WHERE part != 'commits'"
        assert book.db.execute(seals).fetchone()[0] == rows


def _describe_and_fail(book: Ledger) -> None:
    with book.transaction():
        book.describe(metric="another")
        book.db.execute("INSERT INTO sweep (key) VALUES ('metric')")


def test_a_transaction_that_is_rolled_back_leaves_no_seal(tmp_path):
    with closing(Ledger(tmp_path / "ledger.db")) as book:
        before = book.db.execute("SELECT * FROM row_seals").fetchall()
        with pytest.raises(sqlite3.IntegrityError):
            _describe_and_fail(book)
        assert book.db.execute("SELECT * FROM row_seals").fetchall() == before
        assert book.flaw() is None


@pytest.mark.parametrize("what", ["ledger", "file"])
def test_a_pruned_trials_records_are_kept_where_its_file_is_damaged_and_read_again_where_the_ledger_is(
    what, copied, searched
):
    state, path = copied
    with closing(ledger(state)) as book:
        pruned = next(row for row in book.wanted_trials() if row.status == "pruned")
        before = book.tally(pruned.trial).sealed()
    assert before["count"]
    if what == "file":
        (file,) = (state / "trials" / pruned.id).glob("events-*.jsonl")
        file.write_bytes(file.read_bytes().replace(b"{", b"[", 1))
    else:
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            first = "SELECT min(step) FROM records WHERE trial = ?1"
            db.execute(f"DELETE FROM records WHERE trial = ?1 AND step = ({first})", (pruned.trial,))
        assert any("table records" in line and pruned.id in line for line in why(state, path))
    assert sweep(tiny(state.parent, shape=SHAPE, **SEARCH), state)[0].ran == 0
    with closing(ledger(state)) as book:
        assert book.tally(pruned.trial).sealed() == before
    assert why(state, path) == []
