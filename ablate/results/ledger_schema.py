"""Tables of a sweep's ledger, and the columns and tables that ledgers of earlier versions lack. ledger.py
explains their meaning."""

import sqlite3

from ablate.results import ledger_seals

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sweep (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS arms (
    arm INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, knobs TEXT NOT NULL,
    baseline INTEGER REFERENCES arms, optuna INTEGER, place INTEGER);
CREATE TABLE IF NOT EXISTS trials (
    trial INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, spec TEXT NOT NULL,
    status TEXT NOT NULL DEFAULT 'pending', reason TEXT, seconds REAL, reused INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS members (
    arm INTEGER REFERENCES arms, seed INTEGER, trial INTEGER NOT NULL REFERENCES trials, mlflow TEXT,
    shipped INTEGER NOT NULL DEFAULT -1, closed INTEGER NOT NULL DEFAULT 0, wanted INTEGER NOT NULL DEFAULT 1,
    PRIMARY KEY (arm, seed)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS members_of_a_trial ON members (trial);
CREATE TABLE IF NOT EXISTS attempts (
    trial INTEGER REFERENCES trials, attempt INTEGER, started REAL, ended REAL, outcome TEXT, reason TEXT,
    PRIMARY KEY (trial, attempt)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS names (name INTEGER PRIMARY KEY, text TEXT UNIQUE NOT NULL);
CREATE TABLE IF NOT EXISTS records (
    trial INTEGER, name INTEGER, step INTEGER, value REAL, time REAL,
    PRIMARY KEY (trial, name, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    trial INTEGER, step INTEGER, text TEXT, PRIMARY KEY (trial, step, text)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS context_free (trial INTEGER PRIMARY KEY, loss REAL);
INSERT OR IGNORE INTO sweep VALUES ('edition', lower(hex(randomblob(16))));
CREATE TABLE IF NOT EXISTS compared (id TEXT PRIMARY KEY, signature TEXT NOT NULL) WITHOUT ROWID;
"""
_LATER = {"role": "TEXT", "repeats": "INTEGER REFERENCES arms", "reason": "TEXT"}
"""Columns of `arms` that ledgers of earlier versions lack: the arm's role, the arm that a point of a search
repeats, and the reason why a point cannot be run."""


def create(db: sqlite3.Connection) -> None:
    """Create the tables, and the columns and seals that an earlier version's ledger lacks. Existing content
    stays."""
    db.executescript(_SCHEMA)
    db.execute("DROP TABLE IF EXISTS seals")  # of an earlier version: seals of facts and members only
    for column in missing_columns(db):
        db.execute(f"ALTER TABLE arms ADD COLUMN {column} {_LATER[column]}")
    db.execute("CREATE INDEX IF NOT EXISTS repeats_of_an_arm ON arms (repeats) WHERE repeats IS NOT NULL")
    ledger_seals.install(db)


def missing_columns(db: sqlite3.Connection) -> set[str]:
    """Return the columns of `arms` that an earlier version's ledger, opened read-only, does not have."""
    return _LATER.keys() - {row[1] for row in db.execute("PRAGMA table_info(arms)")}


def has_table(db: sqlite3.Connection, name: str) -> bool:
    """Return False for a table that an earlier version's ledger, opened read-only, does not have."""
    return bool(db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)).fetchone())
