"""Check that a ledger still holds what was written into it: records by number and digest, facts, arms and members by seals.

A bad disk, a copy or an edit by hand can change a cell while SQLite still finds the file sound. Read-only: the callers (verify.py,
agenda.py, control.py) decide what to do about a difference.
"""

import json
import math
import sqlite3
import struct
from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

from ablate.ledger import Ledger
from ablate.ledger_schema import has_table, seal
from ablate.store import Tally


def tally(ledger: Ledger, trial: int) -> Tally:
    """Return number and digest of a trial's records. ValueError where a cell does not hold what its column is for."""
    result, cursor = Tally(), ledger.db.cursor()
    cursor.row_factory = None
    names = ledger.names()
    rows = cursor.execute("SELECT name, step, value, time FROM records WHERE trial = ? ORDER BY name, step", (trial,))
    try:
        for name, found in groupby(rows, key=itemgetter(0)):
            result.column(names[name], ((step, value, moment) for _, step, value, moment in found))
    except (TypeError, KeyError, struct.error, sqlite3.OperationalError) as error:
        raise ValueError(f"a cell of its records cannot be read: {error}") from None
    if has_table(ledger.db, "events"):
        result.words(cursor.execute("SELECT step, text FROM events WHERE trial = ?", (trial,)).fetchall())
    return result


def strays(ledger: Ledger, trial: int, events: Iterable[Mapping[str, Any]]) -> bool:
    """Return True where a record of the trial is not among these events."""
    there = {
        (event["step"], name): (None if math.isnan(value) else value, event["time"])
        for event in events
        for name, value in event["metrics"].items()
    }
    rows = ledger.db.execute("SELECT step, text, value, time FROM records LEFT JOIN names USING (name) WHERE trial = ?", (trial,))
    return any(there.get((step, name)) != (value, moment) for step, name, value, moment in rows)


def flaw(ledger: Ledger) -> str | None:
    """What is not as it was written among the facts, arms and members, in words; None where all is. Records: `tally`."""
    try:
        found = ledger.identities()
        for _, name, knobs, _, seed, _, spec in found:
            if not (isinstance(json.loads(knobs), dict) and json.loads(spec)["workload"] and isinstance(seed, int)):
                return f"arm {name!r}: a cell does not hold what its column is for"
        if ledger.db.execute("SELECT 1 FROM members WHERE wanted AND trial NOT IN (SELECT trial FROM trials)").fetchone():
            return "a member is of no trial"
    except (ValueError, TypeError, KeyError, sqlite3.OperationalError) as error:
        return f"a cell cannot be read: {error}"
    if not has_table(ledger.db, "seals"):  # of an earlier version
        return None
    seals = {row["what"]: row["seal"] for row in ledger.db.execute("SELECT * FROM seals")}
    for identity in found:
        arm, name, _, _, seed, *_ = identity
        own = seal(json.dumps(identity))
        if seals.get(f"member:{arm}:{seed}", own) != own:
            return f"arm {name!r}, seed {seed}: not what was written"
    for row in ledger.db.execute("SELECT key, value FROM sweep"):
        if seals.get(f"fact:{row['key']}", seal(row["value"])) != seal(row["value"]):
            return f"fact {row['key']!r}: not what was written"
    return None
