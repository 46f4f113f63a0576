"""Tables of a sweep's ledger and the version of their format. ledger.py explains their meaning."""

import sqlite3
from pathlib import Path

from ablate.errors import InputError
from ablate.store import databases, ledger_seals

FORMAT = 1
"""Version of the tables, in SQLite's `user_version`. Raise it by hand when this code cannot read a ledger of
the last release, or that release one of this code. Ledgers of another format are refused."""

_SCHEMA = (
    "CREATE TABLE sweep (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID",
    "CREATE TABLE arms (arm INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, knobs TEXT NOT NULL,"
    " baseline INTEGER REFERENCES arms, optuna INTEGER, place INTEGER, role TEXT NOT NULL,"
    " repeats INTEGER REFERENCES arms, reason TEXT)",
    "CREATE INDEX repeats_of_an_arm ON arms (repeats) WHERE repeats IS NOT NULL",
    "CREATE TABLE trials (trial INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, spec TEXT NOT NULL,"
    " status TEXT NOT NULL DEFAULT 'pending', reason TEXT, seconds REAL, reused INTEGER NOT NULL DEFAULT 0)",
    "CREATE TABLE members (arm INTEGER REFERENCES arms, seed INTEGER,"
    " trial INTEGER NOT NULL REFERENCES trials, mlflow TEXT, shipped INTEGER NOT NULL DEFAULT -1,"
    " closed INTEGER NOT NULL DEFAULT 0, wanted INTEGER NOT NULL DEFAULT 1, PRIMARY KEY (arm, seed))"
    " WITHOUT ROWID",
    "CREATE INDEX members_of_a_trial ON members (trial)",
    "CREATE TABLE attempts (trial INTEGER REFERENCES trials, attempt INTEGER, started REAL, ended REAL,"
    " outcome TEXT, reason TEXT, PRIMARY KEY (trial, attempt)) WITHOUT ROWID",
    "CREATE TABLE names (name INTEGER PRIMARY KEY, text TEXT UNIQUE NOT NULL)",
    "CREATE TABLE records (trial INTEGER, name INTEGER, step INTEGER, value REAL, time REAL,"
    " PRIMARY KEY (trial, name, step)) WITHOUT ROWID",
    "CREATE TABLE events (trial INTEGER, step INTEGER, text TEXT, PRIMARY KEY (trial, step, text))"
    " WITHOUT ROWID",
    "CREATE TABLE context_free (trial INTEGER PRIMARY KEY, loss REAL)",
    "CREATE TABLE compared (id TEXT PRIMARY KEY, signature TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE row_seals (part TEXT, key TEXT, seal TEXT, PRIMARY KEY (part, key)) WITHOUT ROWID",
)


def check(db: sqlite3.Connection, path: Path) -> bool:
    """Return True for a ledger that this code can read, False for a file without a ledger's tables.

    Raises:
        InputError: The ledger has another format.
        sqlite3.Error: The file is not a database.
    """
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
    stays.

    Raises:
        InputError: The ledger has another format.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        new = not check(db, path)
        for statement in _SCHEMA if new else ():
            db.execute(statement)
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
