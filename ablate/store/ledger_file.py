"""The file of a ledger: its tables' version, its connection, its transactions, and facts about the sweep.

Base class of the parts of `Ledger`. ledger.py explains the meaning of the tables.
"""

import sqlite3
import time
import uuid
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from ablate.errors import InputError, one_line
from ablate.store import commit_count, databases, ledger_seals
from ablate.store.sweep_facts import SweepFacts

FORMAT = 1
"""Version of the tables, in SQLite's `user_version`. Raise it by hand when this code cannot read a ledger of
the last release, or that release one of this code. Ledgers of another format are refused."""

_SCHEMA = Path(__file__).with_name("ledger.sql")
"""Statements that make the tables; SQLite keeps their text, so line breaks become spaces."""
_BUSY_SECONDS = 60
"""Longest wait for another process that writes."""
_UNSEALED = (("members", "mlflow"), ("compared", "id"), ("compared", "signature"), ("events", "text"))
"""Columns of text that no seal of a row covers, by table."""


def check(db: sqlite3.Connection, path: Path) -> bool:
    """Return True for a ledger that this code can read, False for a file without a ledger's tables.
    InputError if the ledger has another format; sqlite3.Error if the file is not a database."""
    # Tables first: another process may create the ledger between the two statements, and version 0 read
    # before it and tables read after it would be those of a ledger without a version.
    if "sweep" not in databases.tables(db):
        return False
    written = db.execute("PRAGMA user_version").fetchone()[0]
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
            _, _, statements = _SCHEMA.read_text(encoding="utf-8").partition("\n")
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


class LedgerFile:
    """Open file of a ledger."""

    def __init__(self, path: Path, readonly: bool = False, mounts: str | None = None) -> None:
        """Open the ledger; create the file unless `readonly`. `mounts` as for `databases.set_journal`.
        InputError if another version of this package wrote it, in another format; sqlite3.Error if the file
        cannot be opened, or is not a database; sqlite3.DatabaseError if a metric's name is not text."""
        self.path = path
        self._commits: commit_count.CommitCount | None = None
        try:
            if readonly:
                self.db = databases.open_readonly(path)
                check(self.db, path)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                self.db = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_SECONDS)
                check(self.db, path)
                databases.set_journal(self.db, path, mounts)
                create(self.db, path)
                self._commits = commit_count.CommitCount(self.db, path)
            self.db.row_factory = sqlite3.Row
        except sqlite3.Error as error:
            error.add_note(str(path))
            raise
        self._replaced: list[tuple[str, str]] = []
        """Trials and members whose runs in MLflow are to be removed, until the transaction ends."""
        try:
            self._names = {row["text"]: row["name"] for row in self.db.execute("SELECT * FROM names")}
        except sqlite3.OperationalError as error:
            self.db.close()
            if "decode" not in str(error):  # no table: the ledger is being made
                raise
            raise sqlite3.DatabaseError(f"table names: a name is not text: {error}") from None

    @property
    def name(self) -> str:
        """Name of the sweep: that of its folder."""
        return self.path.absolute().parent.name

    @property
    def foreign(self) -> str | None:
        """Sentence on the sweep that the ledger belongs to; None if it is that of its folder's name."""
        owner = self.facts.name or self.name
        return None if owner == self.name else f"it is the ledger of sweep {one_line(str(owner))}"

    def query(self, sql: str, *values: str | float | None) -> sqlite3.Cursor:
        return self.db.execute(sql, values)

    def cell(self, sql: str, *values: str | float | None) -> Any:
        """Return the first cell of a query's first row; None if it has no row."""
        row = self.query(sql, *values).fetchone()
        return row and row[0]

    def close(self) -> None:
        """Close the file. The ledger is complete at every moment before."""
        if self._commits:
            self._commits.close()
            self._commits = None
        self.db.close()

    def write(self, sql: str, *values: str | float | None) -> sqlite3.Cursor:
        """Execute a statement that changes rows, in a transaction."""
        with self.atomic():
            return self.query(sql, *values)

    def move_log(self) -> None:
        """Move the write-ahead log into the file, unless another process reads it just now. SQLite ignores
        everything after a damaged byte of the log, and does not miss a log that is gone: the ledger would
        silently be that of an earlier moment."""
        self.db.execute("PRAGMA busy_timeout = 0")
        try:
            self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
        finally:
            self.db.execute(f"PRAGMA busy_timeout = {_BUSY_SECONDS * 1000}")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the writes within the block as one transaction: all or none are stored."""
        self.db.execute("BEGIN")
        try:
            yield
            if self._replaced:
                self.discard(self._replaced)
            if self._commits:
                self._commits.store()
            self.db.execute("COMMIT")
        except BaseException as error:
            if self.db.in_transaction:  # a full disk has ended it
                self.db.execute("ROLLBACK")
            error.add_note(str(self.path))
            raise
        finally:
            self._replaced = []
        if self._commits:
            self._commits.promise()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read one state of the ledger within the block, whatever a running sweep writes meanwhile. Queries
        that are compared with each other need it: a trial that ends between two of them would be done with
        the records of an earlier moment. Write nothing within the block."""
        if self.db.in_transaction:
            yield
            return
        self.db.execute("BEGIN")
        try:
            yield
        finally:
            if self.db.in_transaction:  # some errors of SQLite end it
                self.db.execute("COMMIT")

    def atomic(self) -> AbstractContextManager[None]:
        """Return a new transaction, or a null context within an open one."""
        return nullcontext() if self.db.in_transaction else self.transaction()

    def describe(self, **facts: str | None) -> None:
        """Write facts about the sweep, by their keys."""
        with self.atomic():
            self.db.executemany("INSERT OR REPLACE INTO sweep VALUES (?, ?)", facts.items())

    def fact(self, key: str) -> str | None:
        """Return the text of a fact, by its key; None if it was never set."""
        return self.cell("SELECT value FROM sweep WHERE key = ?", key)

    @property
    def facts(self) -> SweepFacts:
        """Facts about the sweep, as values."""
        return SweepFacts(self.fact, self.describe)

    def identity(self) -> str:
        """Return the ledger's unique id: 32 hexadecimal digits, drawn once. Ledgers of the same name differ
        in it."""
        if (identity := self.facts.id) is None:
            self.facts.id = identity = uuid.uuid4().hex
        return identity

    def discard(self, runs: Iterable[tuple[str, str]]) -> None:
        """Record that MLflow's present runs of these are to be removed: pairs of a trial's id and a member's
        key, in which the key "" stands for all members of the trial."""
        now = int(time.time() * 1000)
        self.facts.mlflow_discarded = [*self.discarded(), *((trial, now, member) for trial, member in runs)]

    def discarded(self, gone: Collection[tuple[str, int, str]] = ()) -> list[tuple[str, int, str]]:
        """Return the runs that `discard` recorded, without those in `gone`. Each is a trial's id, the moment
        (milliseconds) before which the runs began, and a member's key."""
        noted = self.facts.mlflow_discarded
        if gone and {*gone} & {*noted}:
            noted = [run for run in noted if run not in gone]
            self.facts.mlflow_discarded = noted
        return noted

    def lost(self) -> str | None:
        """Return a sentence on committed transactions that are missing, None if there are none, or the ledger
        cannot be read (`flaw`). What is there was written once: it is the ledger of an earlier moment."""
        with suppress(sqlite3.DatabaseError):
            return commit_count.lost(self.db, self.path)
        return None

    def flaw(self) -> str | None:
        """Return a description of the first row that differs from what was written, by table and row; None if
        there is none. The ledger of another sweep agrees with its own seals, so its name is compared first.
        Records are not checked here, but by `tally`."""
        try:
            if self.foreign:
                return self.foreign
            table, row, change = ledger_seals.difference(self.db) or ("", "", "")
            return f"table {table}, row {row}: {change}" if table else _not_text(self.db)
        except sqlite3.OperationalError as error:
            return f"a cell cannot be read: {error}"


def _not_text(db: sqlite3.Connection) -> str | None:
    """Return a sentence on a cell without a seal that is not text; None if there is none.
    sqlite3.OperationalError if a text is in no encoding."""
    for table, column in (*_UNSEALED, ("row_seals", "seal")):
        for (cell,) in db.execute(f"SELECT {column} FROM {table}"):
            if not isinstance(cell, str | None):
                return f"table {table}: a cell of column {column} is not text"
    return None
