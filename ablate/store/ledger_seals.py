"""Seals: a digest of each row of a ledger's small tables, written in the same transaction as the row.

A bad disk, a copy or an edit by hand can change, add or remove a row without damage that SQLite detects. The
writer's connection therefore has temporary triggers: each row that it inserts, updates or deletes has its
seal written or removed in the same transaction. A write without them leaves a row that differs from its seal,
a row without a seal, or a seal without a row:

    writer = Ledger(path);                  writer.describe(metric="val/loss")         # row and seal
    other = sqlite3.connect(path);          other.execute("DELETE FROM sweep")         # seals remain
    difference(Ledger(path, readonly=True).db)   # -> ("sweep", "edition", "is gone")

There are too many records for a seal each: a trial that does not run has one seal of all its records (part
`records`). Columns on what MLflow has been sent (`members.mlflow`, `shipped`, `closed`) have none: `ablate
rebuild --sync --force` sends everything again. A seal detects damage, not intent: anybody who can write the
file can write its seals.
"""

import hashlib
import json
import sqlite3
from dataclasses import dataclass

from ablate.store.commit_count import COMMITS


@dataclass(frozen=True)
class _Table:
    """Sealed columns of a table. The first `keys` of them identify a row."""

    columns: tuple[str, ...]
    keys: int = 1

    def key(self, row: str = "") -> str:
        """Return an SQL expression for the key of a row: its key columns, joined by a slash."""
        return " || '/' || ".join(f"{row}{column}" for column in self.columns[: self.keys])

    @property
    def digest(self) -> str:
        """Return an SQL expression for a row's seal."""
        return f"row_digest({', '.join(self.columns)})"


SEALED = {
    "sweep": _Table(("key", "value")),
    "arms": _Table(("arm", "name", "knobs", "baseline", "optuna", "place", "role", "repeats", "reason")),
    "trials": _Table(("trial", "id", "spec", "status", "reason", "seconds", "reused")),
    "members": _Table(("arm", "seed", "trial", "wanted"), keys=2),
    "attempts": _Table(("trial", "attempt", "started", "ended", "outcome", "reason"), keys=2),
    "names": _Table(("name", "text")),
    "context_free": _Table(("trial", "loss")),
}
"""Sealed columns by table. A change here makes every seal of existing ledgers wrong: raise
`ledger_file.FORMAT` with it."""

RECORDS = "records"
"""Part of the seals that each cover all records of one trial."""


def _row_digest(*cells: object) -> str:
    return hashlib.blake2b(repr(cells).encode(), digest_size=8).hexdigest()


def install(db: sqlite3.Connection) -> None:
    """Add the triggers to a writer's connection."""
    _define(db)
    for name, table in SEALED.items():
        # No conflict clause in the bodies: SQLite replaces it with that of the statement that fires the
        # trigger.
        drop = f"DELETE FROM row_seals WHERE part = '{name}' AND key = CAST({{}} AS TEXT);"
        same = " AND ".join(f"{column} = NEW.{column}" for column in table.columns[: table.keys])
        add = (
            f"INSERT INTO row_seals SELECT '{name}', {table.key()}, {table.digest} FROM {name} WHERE {same};"
        )
        old, new = drop.format(table.key("OLD.")), drop.format(table.key("NEW."))
        for event, body in (
            ("INSERT", new + add),
            (f"UPDATE OF {', '.join(table.columns)}", old + new + add),
            ("DELETE", old),
        ):
            db.execute(
                f"CREATE TEMP TRIGGER seal_{name}_{event.split()[0]} AFTER {event} ON main.{name}"
                f" BEGIN {body} END"
            )


def _define(db: sqlite3.Connection) -> None:
    db.create_function("row_digest", -1, _row_digest, deterministic=True)


def difference(db: sqlite3.Connection) -> tuple[str, str, str] | None:
    """Return the first row that differs from its seal, as name of the table, key of the row, and the
    difference (`is gone`, for example); None if there is none. sqlite3.OperationalError if a cell cannot be
    read."""
    _define(db)
    for name, table in SEALED.items():
        rows = f"(SELECT CAST({table.key()} AS TEXT) AS key, {table.digest} AS seal FROM {name})"
        row = db.execute(
            f"SELECT rows.key, seals.seal IS NULL FROM {rows} AS rows LEFT JOIN row_seals AS seals"
            " ON part = ? AND seals.key = rows.key WHERE seals.seal IS NOT rows.seal LIMIT 1",
            (name,),
        ).fetchone()
        if row:
            return name, str(row[0]), "was not written by a sweep" if row[1] else "is not what was written"
        row = db.execute(
            f"SELECT key FROM row_seals WHERE part = ? AND key NOT IN (SELECT CAST({table.key()} AS TEXT)"
            f" FROM {name} WHERE {table.key()} IS NOT NULL) LIMIT 1",
            (name,),
        ).fetchone()
        if row:
            return name, str(row[0]), "is gone"
    stray = (
        "part NOT IN (SELECT value FROM json_each(?)) AND (part != ?"
        " OR key NOT IN (SELECT CAST(trial AS TEXT) FROM trials))"
    )
    row = db.execute(
        f"SELECT part, key FROM row_seals WHERE {stray} LIMIT 1", (json.dumps([*SEALED, COMMITS]), RECORDS)
    ).fetchone()
    return ("row_seals", f"{row[0]} {row[1]}", "is not what was written") if row else None
