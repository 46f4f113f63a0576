"""Damage to the values of a ledger, for the faults' tests: a connection of its own, as a bad disk or an edit
by hand would have.

Nothing else writes a ledger past its writer, whose triggers seal what it writes (ledger_seals.py).
"""

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StoredValue:
    """A row of table `records` with its key."""

    trial: int
    name: int
    step: int
    value: float


def stored_values(path: Path) -> list[StoredValue]:
    """Return all values that are no NaN, by trial, name and step, once all of them are in the ledger's file
    itself."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        rows = db.execute(
            "SELECT trial, name, step, value FROM records WHERE value IS NOT NULL ORDER BY 1, 2, 3"
        ).fetchall()
    return [StoredValue(*row) for row in rows]


def overwrite(path: Path, row: StoredValue, value: float) -> None:
    """Put another value in a row's place."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        key = (value, row.trial, row.name, row.step)
        db.execute("UPDATE records SET value = ? WHERE trial = ? AND name = ? AND step = ?", key)
