"""Check that a ledger still holds what was written into it: records by number and digest, rows of all other
tables by their seals.

Read-only: the callers (verify.py, scheduler.py, sweep_control.py) decide what to do about a difference.
"""

import json
import math
import sqlite3
import struct
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter

from ablate.results.ledger import Ledger
from ablate.results.ledger_schema import has_table, missing_columns
from ablate.results.ledger_seals import difference, is_sealed
from ablate.results.trial_store import Event, Tally


def tally(ledger: Ledger, trial: int) -> Tally:
    """Return number and digest of a trial's records.

    Raises:
        ValueError: A cell has a value of another type than its column, so its records cannot be read.
    """
    result, cursor = Tally(), ledger.db.cursor()
    cursor.row_factory = None
    names = ledger.names()
    rows = cursor.execute(
        "SELECT name, step, value, time FROM records WHERE trial = ? ORDER BY name, step", (trial,)
    )
    try:
        for name, cells in groupby(rows, key=itemgetter(0)):
            result.column(names[name], ((step, value, moment) for _, step, value, moment in cells))
    except (TypeError, KeyError, struct.error, sqlite3.OperationalError) as error:
        raise ValueError(f"a cell of its records cannot be read: {error}") from None
    if has_table(ledger.db, "events"):
        result.words(cursor.execute("SELECT step, text FROM events WHERE trial = ?", (trial,)).fetchall())
    return result


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
    there is none.

    Records are not checked here, but by `tally`. In a ledger of an earlier version, which has no seals, only
    cells are detected that cannot be read or that refer to a missing row.
    """
    try:
        if is_sealed(ledger.db):
            table, row, change = difference(ledger.db) or ("", "", "")
            return f"table {table}, row {row}: {change}" if table else None
        return _unreadable(ledger)
    except (ValueError, TypeError, KeyError, sqlite3.OperationalError) as error:
        return f"a cell cannot be read: {error}"


def _unreadable(ledger: Ledger) -> str | None:
    """Return a description of the first row that cannot be read, or refers to a missing row; None if none."""
    members = ledger.db.execute(
        "SELECT members.arm, seed, knobs, spec FROM members LEFT JOIN arms USING (arm) LEFT"
        " JOIN trials USING (trial) WHERE wanted"
    )
    for arm, seed, knobs, spec in members:
        if knobs is None or spec is None:
            return f"table members, row {arm}/{seed}: of no arm or trial"
        if not (
            isinstance(json.loads(knobs), dict) and json.loads(spec)["workload"] and isinstance(seed, int)
        ):
            return f"table members, row {arm}/{seed}: a cell does not hold what its column is for"
    for column in ("baseline", *({"repeats"} - missing_columns(ledger.db))):
        query = f"SELECT arm FROM arms WHERE place IS NOT NULL AND {column} NOT IN (SELECT arm FROM arms)"
        if row := ledger.db.execute(f"{query} OR {column} = arm").fetchone():
            return f"table arms, row {row[0]}: its {column} is no other arm"
    return None
