"""Damage to the values of a ledger, for fault injection: as by a bad disk, or by an edit by hand.

It uses a connection of its own, without the triggers that seal what a writer writes (ledger_seals.py).
Nothing else writes to a ledger this way.
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
    """Return all values except NaN, by trial, name and step, after moving the write-ahead log into the
    file."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        rows = db.execute(
            "SELECT trial, name, step, value FROM records WHERE value IS NOT NULL ORDER BY 1, 2, 3"
        ).fetchall()
    return [StoredValue(*row) for row in rows]


def overwrite(path: Path, row: StoredValue, value: float) -> None:
    """Replace the value of a row."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        key = (value, row.trial, row.name, row.step)
        db.execute("UPDATE records SET value = ? WHERE trial = ? AND name = ? AND step = ?", key)
