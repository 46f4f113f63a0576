"""Check that a ledger still holds what was written into it: records by number and digest, rows of all other
tables by their seals.

Read-only: the callers (verify.py, scheduler.py, sweep_control.py) decide what to do about a difference.
"""

import math
import sqlite3
import struct
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter

from ablate.store.ledger import Ledger
from ablate.store.ledger_seals import difference
from ablate.store.trial_store import Event, Tally


def tally(ledger: Ledger, trial: int) -> Tally:
    """Return number and digest of a trial's records. ValueError if a cell has a value of another type than
    its column, so that the records cannot be read."""
    result, cursor = Tally(), ledger.db.cursor()
    cursor.row_factory = None
    names = ledger.names()
    # A search by key takes any row between two of the trial for one of it, so its own cell is compared.
    # BETWEEN, since of `trial = ?` SQLite puts the value in the place of the cell.
    own = "WHERE trial BETWEEN ? AND ? AND +trial = ?"
    key = (trial, trial, trial)
    rows = cursor.execute(
        f"SELECT name, step, value, time FROM records {own} ORDER BY trial, name, step", key
    )
    try:
        for name, cells in groupby(rows, key=itemgetter(0)):
            result.column(names[name], ((step, value, moment) for _, step, value, moment in cells))
    except (TypeError, KeyError, struct.error, sqlite3.OperationalError) as error:
        raise ValueError(f"a cell of its records cannot be read: {error}") from None
    try:
        result.words(cursor.execute(f"SELECT step, text FROM events {own}", key).fetchall())
    except sqlite3.OperationalError as error:
        raise ValueError(f"a cell of its events cannot be read: {error}") from None
    return result


def digest(ledger: Ledger, trial: int) -> str | None:
    """Return the digest of a trial's records, as a seal has it; None if one cannot be read."""
    try:
        return str(tally(ledger, trial).sealed()["sha256"])
    except ValueError:
        return None


def strays(ledger: Ledger, trial: int, events: Iterable[Event]) -> bool:
    """Return True if a record of the trial is not among these events."""
    recorded = {
        (event["step"], name): (None if math.isnan(value) else value, event["time"])
        for event in events
        for name, value in event["metrics"].items()
    }
    rows = ledger.db.execute(
        "SELECT step, text, value, time FROM records LEFT JOIN names USING (name) WHERE trial = ?", (trial,)
    )
    return any(recorded.get((step, name)) != (value, moment) for step, name, value, moment in rows)


def flaw(ledger: Ledger) -> str | None:
    """Return a description of the first row that differs from what was written, by table and row; None if
    there is none. The ledger of another sweep agrees with its own seals, so its name is compared first.
    Records are not checked here, but by `tally`."""
    try:
        if ledger.foreign:
            return ledger.foreign
        table, row, change = difference(ledger.db) or ("", "", "")
        return f"table {table}, row {row}: {change}" if table else _not_text(ledger.db)
    except sqlite3.OperationalError as error:
        return f"a cell cannot be read: {error}"


_UNSEALED = (("members", "mlflow"), ("compared", "id"), ("compared", "signature"), ("events", "text"))
"""Columns of text that no seal of a row covers, by table."""


def _not_text(db: sqlite3.Connection) -> str | None:
    """Return a sentence on a cell without a seal that is not text; None if there is none.
    sqlite3.OperationalError if a text is in no encoding."""
    for table, column in (*_UNSEALED, ("row_seals", "seal")):
        for (cell,) in db.execute(f"SELECT {column} FROM {table}"):
            if not isinstance(cell, str | None):
                return f"table {table}: a cell of column {column} is not text"
    return None
