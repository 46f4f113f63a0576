"""Tables of a sweep's ledger and the version of their format. ledger.py explains their meaning."""

import sqlite3
from pathlib import Path

from ablate.errors import InputError
from ablate.store import databases, ledger_seals

FORMAT = 1
"""Version of the tables, in SQLite's `user_version`. Raise it by hand when this code cannot read a ledger of
the last release, or that release one of this code. Ledgers of another format are refused."""

_SCHEMA = Path(__file__).with_name("ledger.sql")
"""Statements that make the tables; SQLite keeps their text, so line breaks become spaces."""


def check(db: sqlite3.Connection, path: Path) -> bool:
    """Return True for a ledger that this code can read, False for a file without a ledger's tables.
    InputError if the ledger has another format; sqlite3.Error if the file is not a database."""
    # Tables first: another process may create the ledger between the two statements, and version 0 read
    # before it and tables read after it would be those of a ledger without a version.
    if "sweep" not in databases.tables(db):
        return False
    written = _format(db)
    if written == FORMAT:
        return True
    writer = (
        f"a later version of ablate wrote this ledger (format {written}; this one reads {FORMAT}):"
        " install that version"
        if written
        else "a version before 0.1.0 wrote this ledger, and none since reads it: remove the state folder"
    )
    raise InputError(f"{path}: {writer}, or choose another state folder with --state")


def create(db: sqlite3.Connection, path: Path) -> None:
    """Create the tables of a new ledger, all or none; define the triggers that write seals. Existing content
    stays. InputError if the ledger has another format."""
    db.execute("BEGIN IMMEDIATE")
    try:
        new = not check(db, path)
        if new:
            _, _, statements = _SCHEMA.read_text().partition("\n")
            for statement in statements.split(";"):
                db.execute(" ".join(statement.split()))
        ledger_seals.install(db)
        if new:
            db.execute("INSERT INTO sweep VALUES ('edition', lower(hex(randomblob(16))))")
            db.execute(f"PRAGMA user_version = {FORMAT}")
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _format(db: sqlite3.Connection) -> int:
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    return version
