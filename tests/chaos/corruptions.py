"""Corruptions of a state folder: of files of every kind, of rows of the ledger, of the folders of trials, and files that nobody wrote.

KINDS["events"](state, state / "sweeps" / "grid", Random(0))
# "3b816cc3a061f07f/events-1.jsonl: bit: byte 513 of 20480: b'ss": 2.5' -> b'ss": 2.7'"
"""

import math
import os
import shutil
import sqlite3
import struct
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from chaos import mutations


class Corrupted(NamedTuple):
    """Corrupted file or folder, and how."""

    path: Path
    what: str

    def __str__(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}: {self.what}"


Corruption = Callable[..., Corrupted | None]
"""Called with the state folder, the sweep's folder and a generator; None if there is nothing of its kind."""


# Corruptions of a file

CONTENT: dict[str, Callable[[bytes, Random], bytes]] = {
    "bit": mutations.bit,
    "short": mutations.cut,
    "bytes": lambda content, draw: draw.randbytes(draw.randint(1, 400)),
    "empty": lambda content, draw: b"",
    "digit": mutations.digit,
    "again": mutations.again,
}
"""Ways that write other content."""
BYTES = (
    "bit",
    "bit",
    "short",
    "removed",
    "bytes",
    "empty",
    "folder",
    "link",
    "other",
    "time",
    "mode",
    "name",
)
TEXT = (*BYTES, "digit", "digit", "lines", "again")
FILES = {
    "result": ("trials/*/result.json", TEXT),
    "events": ("trials/*/events-*.jsonl", TEXT),
    "spec": ("trials/*/spec.json", TEXT),
    "log": ("trials/*/log-*.txt", BYTES),
    "trunk": ("trials/*/trunk-*.json", TEXT),
    "lock": ("*/*/lock", TEXT),
    "checkpoint": ("trials/*/checkpoint.pt", BYTES),
    "shared checkpoint": ("checkpoints/*.pt", BYTES),
    "ledger": ("sweeps/*/ledger.db", BYTES),
    "log of a ledger": ("sweeps/*/ledger.db-*", BYTES),
    "journal": ("sweeps/*/optuna.log", TEXT),
    "report": ("reports/*/index.*", TEXT),
    "MLflow": ("mlflow.*", BYTES),
    "artifact": ("artifacts/**/*.json", TEXT),
    "note": ("../cache/*/*.json", TEXT),
    "judged": ("sweeps/*/judged.json", TEXT),
}
"""Pattern of the files of a kind, and the ways in which one is corrupted, the likelier ones twice."""


def damage(way: str, path: Path, others: list[Path], draw: Random) -> str | None:
    """Corrupt a file, and return a description; None if it cannot be corrupted so.

    Args:
        way: One of TEXT.
        path: The file.
        others: Other files of its kind.
        draw: Generator of what is left to chance.
    """
    content, about, other = path.read_bytes(), path.stat(), draw.choice(others or [path])
    if way in CONTENT:
        new = CONTENT[way](content, draw)
        if new == content:
            return None
        path.write_bytes(new)
        if way == "digit" and draw.random() < 0.5:
            os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
        at = next((at for at, (a, b) in enumerate(zip(content, new, strict=False)) if a != b), len(new))
        piece = slice(max(0, at - 12), at + 8)
        return f"{way}: byte {at} of {len(content)}: {content[piece]!r} -> {new[piece]!r}"
    if way in ("removed", "folder", "link"):
        path.unlink()
        if way != "removed":
            path.mkdir() if way == "folder" else path.symlink_to(path.parent / "nowhere")
    elif way == "other" and other != path:
        shutil.copy2(other, path)
        return f"copied from {other.parent.name}/{other.name}"
    elif way == "time":
        os.utime(path, (moment := draw.choice((0.0, 1.0, time.time() + 1e8)), moment))
    elif way == "mode":
        path.chmod(draw.choice((0o444, 0o000)))
    elif way == "name":
        path.rename(path.with_name(os.fsdecode(os.fsencode(path.stem) + b"\xff" + os.fsencode(path.suffix))))
    elif way == "lines":
        mine, theirs = (file.read_bytes().splitlines(keepends=True) for file in (path, other))
        theirs = mine if draw.random() < 0.5 else theirs
        if len(mine) < 2 or not theirs:
            return None
        one, two = draw.randrange(len(mine)), draw.randrange(len(theirs))
        mine[one], theirs[two] = theirs[two], mine[one]
        path.write_bytes(b"".join(mine))
        return f"line {one} exchanged with line {two} of {'its own' if theirs is mine else other.parent.name}"
    else:
        return None
    return way


def _file(kind: str) -> Corruption:
    pattern, ways = FILES[kind]

    def do(state: Path, sweep: Path, draw: Random, way: str | None = None) -> Corrupted | None:
        paths = [path for path in sorted(state.glob(pattern)) if path.is_file() and path.stat().st_size]
        if not paths:
            return None
        path = draw.choice(paths)
        others = [other for other in paths if other != path and other.name[:5] == path.name[:5]]
        what = damage(way or draw.choice(ways), path, others, draw)
        return what and Corrupted(path, what)

    return do


# Corruptions of rows and of folders

_VALUES = "SELECT trial, name, step, value FROM records WHERE value IS NOT NULL ORDER BY 1, 2, 3"


def _open(sweep: Path) -> closing[sqlite3.Connection]:
    """Connect to a ledger without the triggers that seal what a writer writes, and move its log into the file."""
    db = sqlite3.connect(sweep / "ledger.db", isolation_level=None)
    with suppress(sqlite3.DatabaseError):
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return closing(db)


def _value(state: Path, sweep: Path, draw: Random, way: str | None = None) -> Corrupted | None:
    """Flip a bit of one value in the ledger; the SQLite file stays valid."""
    with suppress(sqlite3.DatabaseError), _open(sweep) as db:
        if rows := db.execute(_VALUES).fetchall():
            *key, value = draw.choice(rows)
            bit = draw.randrange(63)  # not 64: SQLite does not store the sign of a zero
            (number,) = struct.unpack("<Q", struct.pack("<d", value))
            (other,) = struct.unpack("<d", struct.pack("<Q", number ^ 1 << bit))
            query = "UPDATE records SET value = ? WHERE trial = ? AND name = ? AND step = ?"
            db.execute(query, (other, *key))
            return Corrupted(sweep / "ledger.db", f"bit {bit} of record {key}: {value!r} -> {other!r}")
    return None


def _bytes_of_a_value(state: Path, sweep: Path, draw: Random, way: str | None = None) -> Corrupted | None:
    """Flip a bit of the ledger's file, in or next to a stored value."""
    path = sweep / "ledger.db"
    with suppress(sqlite3.DatabaseError):
        with _open(sweep) as db:
            values = [value for *_, value in db.execute(_VALUES) if math.isfinite(value) and value % 1]
        content = path.read_bytes()
        at = content.find(struct.pack(">d", draw.choice(values))) if values else -1
        if at > 0:
            path.write_bytes(mutations.bit(content, draw, at - 12, at + 16))
            return Corrupted(path, f"bit flipped near byte {at}")
    return None


def cell(state: Path, sweep: Path, draw: Random) -> Corrupted | None:
    """Change one cell of the ledger, or delete, or repeat, one row."""
    path = sweep / "ledger.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        query = "SELECT name FROM sqlite_master WHERE type = 'table'"
        table = draw.choice([name for (name,) in db.execute(query)])
        found = db.execute(f"SELECT * FROM {table}")
        columns, rows = [column[0] for column in found.description], found.fetchall()
        if not rows:
            return None
        row, at = draw.choice(rows), draw.randrange(len(columns))
        where = " AND ".join(f"{column} IS ?" for column in columns)
        value, change, name = _changed(row[at], draw), draw.random(), f"table {table}, row {row!r:.90}"
        if change < 0.2:
            db.execute(f"DELETE FROM {table} WHERE {where}", row)
            return Corrupted(path, f"{name}: deleted")
        with suppress(sqlite3.IntegrityError):
            if change < 0.36:
                marks = ", ".join("?" * len(columns))
                db.execute(f"INSERT INTO {table} VALUES ({marks})", (*row[:at], value, *row[at + 1 :]))
                return Corrupted(path, f"{name}: repeated with {columns[at]} = {value!r:.60}")
            db.execute(f"UPDATE {table} SET {columns[at]} = ? WHERE {where}", (value, *row))
            return Corrupted(path, f"{name}: {columns[at]} = {value!r:.60}")
    return None


def _changed(value: Any, draw: Random) -> Any:
    """Return another value of the same type, or of any other."""
    if draw.random() < 0.25:
        return draw.choice((None, -1, 1e308, "", b"\xff\x00", "1", 1 << 62))
    if isinstance(value, int):
        return value + draw.choice((1, -1, 100))
    if isinstance(value, float):
        return value * draw.choice((1.1, -1.0, 0.0)) + 1e-3
    if isinstance(value, str) and value:
        at = draw.randrange(len(value))
        return value[:at] + chr(33 + (ord(value[at]) - 32) % 90) + value[at + 1 :]
    return 1


def _trial(state: Path, sweep: Path, draw: Random) -> Corrupted:
    """Exchange, copy, delete or replace the folder of a trial."""
    one, two = draw.sample([path for path in sorted(state.glob("trials/*")) if path.is_dir()], 2)
    ways = ("exchanged", "copied to another id", "copied", "a file", "a dangling link", "a link", "removed")
    way, aside = draw.choice(ways), state / "aside"
    if way == "copied to another id":
        shutil.copytree(one, one.with_name(f"{draw.getrandbits(62):016x}"))
    else:
        one.rename(aside)
    if way == "exchanged":
        two.rename(one)
        aside.rename(two)
    elif way == "copied":
        shutil.copytree(two, one)
    elif way == "a file":
        one.write_text("0")
    elif way.endswith("link"):
        one.symlink_to(two if way == "a link" else two.with_name("nowhere"))
    shutil.rmtree(aside, ignore_errors=True)
    return Corrupted(one, f"{way}, with {two.name}")


def _stray(state: Path, sweep: Path, draw: Random) -> Corrupted:
    """Add a file or a folder that nobody wrote."""
    trial = draw.choice(sorted(state.glob("trials/*"))[:3]).relative_to(state)
    own = sweep.relative_to(state)
    names = (
        "trials/x", "sweeps/x", "sweeps/x/ledger.db", f"{trial}/events-9.jsonl", f"{trial}/log-x.txt",
        f"{trial}/events-x.jsonl", f"{trial}/trunk-9.json", f"{trial}/checkpoint.pt", "checkpoints/x.pt",
        "retired", f"{own}/orders/1.json", "reports/x/index.json", os.fsdecode(b"trials/\xff"),
        f"{own}/optuna.log.lock", os.fsdecode(b"sweeps/\xff/ledger.db"),
        f"{own}/ledger.db-journal", f"{trial}/log-{'9' * 30}.txt",
    )  # fmt: skip
    path = state / draw.choice(names)
    path.parent.mkdir(parents=True, exist_ok=True)
    if draw.random() < 0.3 and not path.exists():
        path.mkdir()
    else:
        path.write_bytes(draw.choice((b"", b"{}", b"[" * 5000, draw.randbytes(50))))
    return Corrupted(path, "added")


KINDS: dict[str, Corruption] = {kind: _file(kind) for kind in FILES} | {
    "value": _value,
    "bytes of a value": _bytes_of_a_value,
    "cell": cell,
    "trial": _trial,
    "stray": _stray,
}
"""Corruptions by name."""
LIVE = (
    ("events", "bit"),
    ("events", "short"),
    ("events", "removed"),
    ("checkpoint", "bit"),
    ("shared checkpoint", "bit"),
    ("result", "bit"),
    ("result", "short"),
    ("value", None),
    ("bytes of a value", None),
)
"""Corruptions, and their ways, that the same command repairs (those of a ledger: after `ablate rebuild`). A sweep that is killed suffers
several at a time."""
