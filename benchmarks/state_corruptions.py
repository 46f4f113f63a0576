"""Corruptions of a state folder, for benchmarks/corruption.py: of files of every kind, of rows of the ledger,
of the folders of trials, and files that nobody wrote.

    KINDS["events"](state, state / "sweeps" / "grid", np.random.default_rng(0))
    # "3b816cc3a061f07f/events-1.jsonl: bit 3 of byte 513 of 20480"
"""

import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np

from ablate.verification.injections import HARMS, flip, remove, shorten

Generator = np.random.Generator
Corruption = Callable[[Path, Path, Generator], str | None]
DIGIT = re.compile(rb"(?<=[\s:\[.0-9])[0-9](?=[0-9.,\s}\]e])")
"""Digit of a number in a text."""


# Corruptions of a file

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
"""Pattern of the files of a kind, and the ways in which one is corrupted."""


def damage(how: str, path: Path, rng: Generator, others: list[Path]) -> str | None:
    """Corrupt a file, and return a description; None if it cannot be corrupted so.

    Args:
        how: One of TEXT.
        path: The file.
        rng: Generator of what is left to chance.
        others: Other files of its kind.
    """

    def draw(number: int) -> int:
        return int(rng.integers(number))

    content, about, other = path.read_bytes(), path.stat(), others[draw(len(others))] if others else path
    lines, theirs = content.splitlines(keepends=True), other.read_bytes().splitlines(keepends=True)
    if how in ("bit", "short", "removed"):
        return {"bit": flip, "short": shorten, "removed": remove}[how](path, rng).partition(": ")[2]
    if how in ("folder", "link"):
        path.unlink()
        path.mkdir() if how == "folder" else path.symlink_to(path.parent / "nowhere")
    elif how in ("bytes", "empty"):
        path.write_bytes(rng.bytes(1 + draw(400)) if how == "bytes" else b"")
    elif how == "other" and other != path:
        shutil.copy2(other, path)
        return f"copied from {other.parent.name}/{other.name}"
    elif how == "time":
        os.utime(path, (moment := (0.0, 1.0, time.time() + 1e8)[draw(3)], moment))
    elif how == "mode":
        path.chmod((0o444, 0o000)[draw(2)])
    elif how == "name":
        path.rename(path.with_name(os.fsdecode(os.fsencode(path.stem) + b"\xff" + os.fsencode(path.suffix))))
    elif how == "digit" and (digits := [match.start() for match in DIGIT.finditer(content)]):
        at = digits[draw(len(digits))]
        new = b"%d" % ((content[at] - 48 + 1 + draw(9)) % 10)
        path.write_bytes(content[:at] + new + content[at + 1 :])
        if draw(2):
            os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
        return f"digit {content[max(0, at - 20) : at + 8]!r}, now {new!r}"
    elif how == "lines" and len(lines) > 1 and theirs:
        theirs = lines if draw(2) else theirs
        one, two = draw(len(lines)), draw(len(theirs))
        lines[one], theirs[two] = theirs[two], lines[one]
        path.write_bytes(b"".join(lines))
        return (
            f"line {one} exchanged with line {two} of {'its own' if theirs is lines else other.parent.name}"
        )
    elif how == "again" and lines:
        path.write_bytes(b"".join([*lines, lines[draw(len(lines))]]))
    else:
        return None
    return how


def _file(kind: str) -> Corruption:
    pattern, ways = FILES[kind]

    def do(state: Path, sweep: Path, rng: Generator) -> str | None:
        paths = [path for path in sorted(state.glob(pattern)) if path.is_file() and path.stat().st_size]
        if not paths:
            return None
        path, how = paths[int(rng.integers(len(paths)))], ways[int(rng.integers(len(ways)))]
        what = damage(how, path, rng, [two for two in paths if two != path and two.name[:5] == path.name[:5]])
        return what and f"{path.parent.name}/{path.name}: {what}"

    return do


# Corruptions of rows and of folders


def cell(state: Path, sweep: Path, rng: Generator) -> str | None:
    """Change one cell of the ledger, or delete, or repeat, one row."""
    path = sweep / "ledger.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        table = tables[int(rng.integers(len(tables)))]
        rows = db.execute(f"SELECT * FROM {table}")
        columns, cells = [column[0] for column in rows.description], rows.fetchall()
        if not cells:
            return None
        row, at = cells[int(rng.integers(len(cells)))], int(rng.integers(len(columns)))
        where = " AND ".join(f"{column} IS ?" for column in columns)
        name = f"table {table}, row {row!r:.90}"
        if rng.random() < 0.2:
            db.execute(f"DELETE FROM {table} WHERE {where}", row)
            return f"ledger.db: {name}: deleted"
        value = _changed(row[at], rng)
        with suppress(sqlite3.IntegrityError):
            if rng.random() < 0.2:
                marks = ", ".join("?" * len(columns))
                db.execute(f"INSERT INTO {table} VALUES ({marks})", (*row[:at], value, *row[at + 1 :]))
                return f"ledger.db: {name}: repeated with {columns[at]} = {value!r:.60}"
            db.execute(f"UPDATE {table} SET {columns[at]} = ? WHERE {where}", (value, *row))
            return f"ledger.db: {name}: {columns[at]} = {value!r:.60}"
    return None


def _changed(value: object, rng: Generator) -> object:
    """Return another value of the same type, or of any other."""
    if rng.random() < 0.25:
        return (None, -1, 1e308, "", b"\xff\x00", "1", 1 << 62)[int(rng.integers(7))]
    if isinstance(value, int):
        return value + (1, -1, 100)[int(rng.integers(3))]
    if isinstance(value, float):
        return value * (1.1, -1.0, 0.0)[int(rng.integers(3))] + 1e-3
    if isinstance(value, str) and value:
        at = int(rng.integers(len(value)))
        return value[:at] + chr(33 + (ord(value[at]) - 32) % 90) + value[at + 1 :]
    return 1


def _trial(state: Path, sweep: Path, rng: Generator) -> str | None:
    """Exchange, copy, delete or replace the folder of a trial."""
    trials = [path for path in sorted(state.glob("trials/*")) if path.is_dir()]
    one, two = (trials[int(at)] for at in rng.choice(len(trials), 2, replace=False))
    ways = ("exchanged", "copied to another id", "copied", "a file", "a dangling link", "a link", "removed")
    how, aside = ways[int(rng.integers(len(ways)))], state / "aside"
    if how == "copied to another id":
        shutil.copytree(one, one.with_name(f"{int(rng.integers(1 << 62)):016x}"))
    else:
        one.rename(aside)
    if how == "exchanged":
        two.rename(one)
        aside.rename(two)
    elif how == "copied":
        shutil.copytree(two, one)
    elif how == "a file":
        one.write_text("0")
    elif how.endswith("link"):
        one.symlink_to(two if how == "a link" else two.with_name("nowhere"))
    shutil.rmtree(aside, ignore_errors=True)
    return f"trials/{one.name}, {two.name}: {how}"


def _stray(state: Path, sweep: Path, rng: Generator) -> str:
    """Add a file or a folder that nobody wrote."""
    trial = sorted(path for path in state.glob("trials/*"))[int(rng.integers(3))].relative_to(state)
    own = sweep.relative_to(state)
    names = (
        "trials/x", "sweeps/x", "sweeps/x/ledger.db", f"{trial}/events-9.jsonl", f"{trial}/log-x.txt",
        f"{trial}/events-x.jsonl", f"{trial}/trunk-9.json", f"{trial}/checkpoint.pt", "checkpoints/x.pt",
        "retired", f"{own}/orders/1.json", "reports/x/index.json", os.fsdecode(b"trials/\xff"),
        f"{own}/optuna.log.lock", os.fsdecode(b"sweeps/\xff/ledger.db"),
        f"{own}/ledger.db-journal", f"{trial}/log-{'9' * 30}.txt",
    )  # fmt: skip
    name = names[int(rng.integers(len(names)))]
    path = state / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if rng.random() < 0.3 and not path.exists():
        path.mkdir()
    else:
        path.write_bytes((b"", b"{}", b"[" * 5000, rng.bytes(50))[int(rng.integers(4))])
    return f"{name!r}: added"


KINDS: dict[str, Corruption] = {
    **{kind: _file(kind) for kind in FILES if kind != "judged"},
    **{name: HARMS[name].do for name in ("bit flip of a ledger's value", "bit flip in a ledger's cell")},
    "cell": cell, "trial": _trial, "stray": _stray,
}  # fmt: skip
JUDGED = {"judged": _file("judged"), "judged 2": _file("judged")}
"""Corruptions of what only sweeps with judged runs have, drawn for those alone: seeds of the others stay."""
"""Corruptions by name. Each takes the state folder, the sweep's folder and a generator, and returns a
description, or None if there is nothing of its kind."""
