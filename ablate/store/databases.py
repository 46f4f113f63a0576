"""SQLite files: their addresses, and the journal mode that their file system allows.

A path becomes part of an address in three ways, and each has characters that end or change the path: `?` and
`%` in SQLAlchemy's `sqlite:///...` (which MLflow reads), `?`, `#` and `%` in SQLite's own `file:...`. Every
address of a database is made and read here.

Write-ahead logging (WAL) needs shared memory between all processes that open the database. A network file
system has none between machines, and SQLite then corrupts the database without an error. There a rollback
journal is used: slower, and safe as long as the file system's locks work, which `place.writable` tests.
"""

import os
import re
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote, unquote

_SQLITE, _WITH_DRIVER = "sqlite:///", "sqlite+pysqlite:///"
BESIDE = ("-wal", "-shm", "-journal", "-commits")
"""Endings of the files beside a database: SQLite's logs, and the number that commit_count.py keeps."""
_MOUNTS = Path("/proc/self/mounts")
_NETWORK = re.compile(
    r"nfs[34]?|lustre|gpfs|cifs|smb2|smb3|smbfs|9p|afs|ceph|beegfs|glusterfs|virtiofs|orangefs|pvfs2|panfs"
    r"|wekafs|gfs2|ocfs2|davfs|coda|vboxsf|acfs|ncpfs|fuse(\..*)?"
)
"""Types of file systems that other machines write too, or that do not share memory between processes."""


def readonly_uri(path: Path) -> str:
    """Return the address by which SQLite opens a file for reading only.

    In a folder that cannot be written, SQLite opens no database in WAL mode. A database that was closed is
    complete without its log, and is opened as a file that does not change. sqlite3.OperationalError if the
    folder cannot be written, and the log has content that the file lacks.
    """
    address = f"file:{quote(os.fsencode(path))}?mode=ro"
    if not path.exists() or os.access(path.parent, os.W_OK) or path.read_bytes()[18:19] != b"\x02":
        return address
    log = path.with_name(f"{path.name}-wal")
    if log.exists() and log.stat().st_size:
        raise sqlite3.OperationalError(
            f"its folder is read-only, and {log.name} holds what it lacks; copy the folder, and read the copy"
        )
    return f"{address}&immutable=1"


def open_readonly(path: Path, seconds: float = 60.0) -> sqlite3.Connection:
    """Open a database for reading, and wait up to `seconds` for a writer.

    A process that was killed in a transaction leaves a rollback journal, which only a writing connection can
    undo: one is opened first. The journal of a running process is locked, and stays. sqlite3.Error if the
    file cannot be opened; sqlite3.DatabaseError if a folder or a link is in the place of one of its files.
    """
    if why := misplaced(path):
        raise sqlite3.DatabaseError(why)
    journal = path.with_name(f"{path.name}-journal")
    with suppress(FileNotFoundError, sqlite3.Error):  # a running writer removes its journal at any moment
        if journal.stat().st_size and path.exists():
            with closing(sqlite3.connect(path, timeout=seconds)) as db:
                db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return sqlite3.connect(readonly_uri(path), uri=True, isolation_level=None, timeout=seconds)


def misplaced(path: Path) -> str | None:
    """Return a sentence on what is in the place of a database's file or of its logs and is not a file; None
    if nothing is. SQLite reports all of this as `unable to open database file`."""
    for part in ("", *BESIDE):
        file = f"{path}{part}"  # a log may vanish between two looks at it, which os.path allows
        if os.path.isdir(file):
            return f"{path.name}{part} is a folder"
        if os.path.islink(file) and not os.path.exists(file):
            return f"{path.name}{part} is a link that leads nowhere"
        if part and os.path.islink(file):  # SQLite follows none
            return f"{path.name}{part} is a link, not a file"
    return None


def tables(db: sqlite3.Connection) -> set[str]:
    """Return the names of a database's tables."""
    return {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def quick_check(db: sqlite3.Connection) -> str | None:
    """Return the first error that SQLite finds in a database's pages, None if there is none."""
    problem = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    return None if problem == "ok" else " ".join(problem.removeprefix("*** in database main ***").split())


def url(path: Path) -> str:
    """Return the address of a database for SQLAlchemy and MLflow: `sqlite:///` and the path, which has `%`
    and `?` escaped. With an escape the driver is named too, since MLflow makes the unescaped path's folder
    for whatever begins with `sqlite:///`."""
    escaped = str(path).replace("%", "%25").replace("?", "%3F")
    return (_SQLITE if escaped == str(path) else _WITH_DRIVER) + escaped


def path_of(address: str | None) -> Path | None:
    """Return the file that `sqlite:///...` names, or None for the address of a server."""
    for prefix in (_SQLITE, _WITH_DRIVER):
        if address and address.startswith(prefix):
            return Path(unquote(address.removeprefix(prefix).partition("?")[0]))
    return None


def file_system(path: Path, mounts: str) -> str:
    """Return the type of the file system that holds a path, from the text of a mounts table; empty if the
    table has none."""
    kind, longest = "", -1
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[1])
        if len(point) >= longest and Path(path).is_relative_to(point):  # of equal ones the last is on top
            kind, longest = fields[2], len(point)
    return kind


def network_file_system(path: Path, mounts: str | None = None) -> str | None:
    """Return the type of the network file system that holds a path, such as `nfs4`; None for a local one.
    `mounts` is the text of a mounts table; default: this machine's."""
    if mounts is None:
        mounts = _MOUNTS.read_text(errors="surrogateescape") if _MOUNTS.exists() else ""
    kind = file_system(Path(path).resolve(), mounts)
    return kind if _NETWORK.fullmatch(kind) else None


def set_journal(db: sqlite3.Connection, path: Path, mounts: str | None = None) -> None:
    """Set the journal mode of an open database: WAL on a local file system, a rollback journal on a network
    file system. `mounts` as for `network_file_system`.

    A database that was written in WAL mode elsewhere is opened exclusively to be converted, since that needs
    no shared memory. sqlite3.OperationalError if another process has the database open, so that the mode
    cannot be set.
    """
    if network_file_system(path, mounts) is None:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        return
    db.execute("PRAGMA locking_mode = EXCLUSIVE")
    mode = db.execute("PRAGMA journal_mode = DELETE").fetchone()[0]
    db.execute("PRAGMA locking_mode = NORMAL")
    db.execute("PRAGMA user_version").fetchone()  # the exclusive lock is released at the next access
    db.execute("PRAGMA synchronous = FULL")
    if mode != "delete":
        raise sqlite3.OperationalError(
            f"{path}: its journal mode is {mode}, which is not safe on this file system"
        )
