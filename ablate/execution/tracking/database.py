"""MLflow's own SQLite database: made beside its place and renamed in, so that a process killed meanwhile
leaves nothing half-made there.

MLflow migrates a fresh database through some hundred revisions, which takes seconds; so an empty one of each
version of MLflow is cached and copied. Killed while it migrates, it leaves a file that no MLflow opens again.
A database that such a kill left (by a server of the user's) holds no experiment, not even the one that
every complete database begins with: it is put aside. Whatever holds an experiment is never touched here.

Call `prepare` with `lock_path` locked, and before a client is made: two processes that open a fresh database
crash each other.
"""

import os
import shutil
import sqlite3
import time
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path

from ablate.cache import kept, key_of
from ablate.errors import InputError, first_line
from ablate.execution.sweep_control import damage, put_aside
from ablate.execution.tracking.access import import_client
from ablate.execution.tracking.mlflow_private import close_database
from ablate.store.databases import open_readonly, path_of, set_journal, tables, url

_EMPTY = "mlflow.db"
"""Name of the empty database in the cache."""
_TABLES = {"alembic_version", "experiments", "runs", "metrics", "params", "tags"}
"""Tables by which a database is known as MLflow's; which of them are there depends on how far a migration
came."""


def lock_path(uri: str, state: Path) -> Path:
    """Return the lock file for whoever makes or opens a database: beside it, or in the state folder for one
    without a path."""
    path = path_of(uri)
    return state / "mlflow.lock" if path is None else path.with_suffix(".lock")


def half_made(path: Path) -> bool:
    """Return True if a file is a database of MLflow's whose first migration did not end.
    sqlite3.DatabaseError for another file."""
    if not path.exists() or not path.stat().st_size:
        return False
    with closing(open_readonly(path)) as db:
        found = tables(db)
        held = found & {"experiments", "runs"}
        used = any(db.execute(f"SELECT 1 FROM {table}").fetchone() for table in held)
        return bool(found & _TABLES) and not used


def unusable(path: Path) -> str | None:
    """Return why MLflow cannot use a database, or None if it can, or if there is none: damaged, half-made, or
    of another version."""
    found = damage(path)
    if found or not path.exists() or not path.stat().st_size:
        return found
    if half_made(path):
        return "its first migration was interrupted"
    import_client()  # before anything of MLflow's: its settings
    from alembic.util.exc import CommandError
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        migrate(path, path.parent)
    except (MlflowException, SQLAlchemyError, CommandError) as error:
        why = first_line(error)
        return None if "is locked" in why else why
    return None


def prepare(uri: str, artifacts: Path) -> Path | None:
    """Make a database where there is none; return where a half-made one was put aside, None if there was
    none. `artifacts`: where MLflow's own first experiment, which sweeps do not use, would keep its
    artifacts."""
    path = path_of(uri)
    if path is None:
        return None
    _check_address(uri, path)
    aside = put_aside(path) if half_made(path) else None
    if not path.exists() or not path.stat().st_size:
        _make(path, artifacts)
    return aside


def _check_address(uri: str, path: Path) -> None:
    """Raise InputError if SQLAlchemy reads another file out of the address: MLflow would write it outside of
    the state folder."""
    if "%" not in uri:  # how `?` and `%` are written in an address; SQLAlchemy takes long to import
        return
    from sqlalchemy import make_url

    if make_url(uri).database != str(path):
        why = "this version of SQLAlchemy cannot open a path with '?' or '%'"
        raise InputError(f"{path}: {why}; install SQLAlchemy 2.1, or move it")


def _make(path: Path, artifacts: Path) -> None:
    """Copy an empty database under another name, and rename it in. What an earlier process left under such
    names goes: the lock is held."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.glob(f".{path.stem}-*.new*"):
        old.unlink()
    fresh = path.with_name(f".{path.stem}-{os.getpid()}.new")
    try:
        made = kept("mlflow", key_of(version("mlflow")), lambda folder: migrate(folder / _EMPTY, artifacts))
        shutil.copyfile(made / _EMPTY, fresh)
        with closing(sqlite3.connect(fresh)) as db, db:
            place, now = artifacts.resolve().as_uri() + "/0", int(time.time() * 1000)
            columns = "artifact_location = ?, creation_time = ?, last_update_time = ?"
            db.execute(f"UPDATE experiments SET {columns}", (place, now, now))
    except (OSError, sqlite3.DatabaseError):  # a cache that cannot be written, or is damaged
        fresh.unlink(missing_ok=True)
        migrate(fresh, artifacts)
    fresh.replace(path)


def migrate(path: Path, artifacts: Path) -> None:
    """Have MLflow open a database, which makes its tables, and leave no connection to a file that is renamed
    afterwards."""
    import_client()
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    address = url(path)
    try:
        SqlAlchemyStore(address, artifacts.resolve().as_uri())
    finally:
        close_database(address)


def identity(path: Path | None) -> tuple[int, int] | None:
    """Return what tells a file from another one that replaces it under its name; None if there is none."""
    if path is None:
        return None
    with suppress(FileNotFoundError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return None


def wait_less(path: Path) -> None:
    """Set the journal mode of our own database: one disk wait per transaction instead of four, and readers
    beside the writer."""
    with closing(sqlite3.connect(path)) as db:
        set_journal(db, path)
