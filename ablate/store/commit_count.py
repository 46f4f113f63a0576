"""Number of a ledger's last transaction, in the ledger and in a file beside it: a lost log is noticed.

SQLite ignores everything after a damaged byte of a write-ahead log, and does not miss a log that is gone: the
ledger would silently be that of an earlier moment. A writer therefore stores the number of each transaction
beside the seals, and writes it to `ledger.db-commits` after the commit:

    ledger.db: 415    ledger.db-commits: 415, or 414 after a kill    # complete
    ledger.db: 404    ledger.db-commits: 415                         # the log of 11 transactions is lost
    ledger.db: 404    no such file                                   # a copy of the file alone

A ledger that was closed has neither number: its log is part of the file. After a power failure the file may
be ahead of the ledger, since neither it nor the log is synced; those transactions are lost indeed.
"""

import os
import sqlite3
from contextlib import suppress
from pathlib import Path

COMMITS = "commits"
"""Part of the seals that is this number, and last word of the file's name."""


class CommitCount:
    """Counter of one writer's transactions."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db, self._path = db, _beside(path)
        self._number = max(_stored(db), _promised(path) or 0)
        self._file: int | None = None

    def store(self) -> None:
        """Store the number of the open transaction in the ledger."""
        if self._file is None:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        self._number += 1
        self._db.execute("INSERT OR REPLACE INTO row_seals VALUES (?, '', ?)", (COMMITS, self._number))

    def promise(self) -> None:
        """Write the number to the file, after the commit."""
        if self._file is not None:
            with suppress(OSError):  # a full disk: the file promises less than the ledger has
                os.pwrite(self._file, b"%020d" % self._number, 0)

    def close(self) -> None:
        """Remove both numbers, unless no transaction was counted here, or the disk is full."""
        if self._file is None:
            return
        number, self._number = self._number, 0
        self.promise()  # first: a reader may come between the two
        try:
            self._db.execute("DELETE FROM row_seals WHERE part = ?", (COMMITS,))
            self._path.unlink(missing_ok=True)
        except sqlite3.Error:
            self._number = number
            self.promise()
        os.close(self._file)


def lost(db: sqlite3.Connection, path: Path) -> str | None:
    """Return a sentence on the transactions that a ledger lacks, None if it has all. Call it outside of a
    transaction: a running sweep commits, and writes the file after that."""
    while True:
        promised, stored, log = _promised(path), _stored(db), f"{path.name}-wal"
        if not stored if promised is None else promised <= stored:
            return None
        if promised == _promised(path):  # else a writer opened or closed it meanwhile
            break
    if promised is None:
        return f"it was copied without {_beside(path).name} and {log} before it was closed"
    return f"its last {promised - stored} of {promised} transactions are missing: {log} is gone or damaged"


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}-{COMMITS}")


def _promised(path: Path) -> int | None:
    """Return the number in the file, 0 if it is none; None without the file."""
    try:
        return int(_beside(path).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return 0


def _stored(db: sqlite3.Connection) -> int:
    query = "SELECT coalesce(max(CAST(seal AS INTEGER)), 0) FROM row_seals WHERE part = ?"
    number: int = db.execute(query, (COMMITS,)).fetchone()[0]
    return number
