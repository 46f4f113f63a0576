"""What the fault benchmark does to a sweep: signals to its processes, and corruption of its files (flipped
bits, lost ends).
"""

import math
import os
import signal
import sqlite3
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ablate.results.ledger_damage import overwrite, stored_values


@dataclass(frozen=True)
class Harm:
    """Corruption of one file of a state folder: `do` returns what was done, None where there is no such file
    yet.
    """

    do: Callable[[Path, Path, np.random.Generator], str | None]


def _flip(path: Path, rng: np.random.Generator, low: int = 0, high: int | None = None) -> str:
    """Flip one bit of a file, between two of its bytes."""
    content = bytearray(path.read_bytes())
    place, bit = int(rng.integers(low, min(high or len(content), len(content)))), int(rng.integers(8))
    content[place] ^= 1 << bit
    path.write_bytes(content)
    return f"{path.parent.name}/{path.name}: bit {bit} of byte {place} of {len(content)}"


def _shorten(path: Path, rng: np.random.Generator) -> str:
    """Cut a file anywhere, at its beginning too."""
    size = path.stat().st_size
    left = int(rng.integers(size))
    os.truncate(path, left)
    return f"{path.parent.name}/{path.name}: {left} of {size} bytes left"


def _to_one(pattern: str, how: Callable[[Path, np.random.Generator], str]) -> Callable[..., str | None]:
    """Do something to one of the files of a state folder that a pattern names."""

    def do(state: Path, folder: Path, rng: np.random.Generator) -> str | None:
        paths = [path for path in sorted(state.glob(pattern)) if path.stat().st_size]
        return how(paths[int(rng.integers(len(paths)))], rng) if paths else None

    return do


def _checkpoint(state: Path, folder: Path, rng: np.random.Generator) -> str | None:
    """Flip a bit of a checkpoint: a trial's own, or a shared one."""
    paths = [*sorted(state.glob("trials/*/checkpoint.pt")), *sorted(state.glob("checkpoints/*.pt"))]
    return _flip(paths[int(rng.integers(len(paths)))], rng) if paths else None


def _remove(path: Path, rng: np.random.Generator) -> str:
    path.unlink()
    return f"{path.parent.name}/{path.name}: removed"


def _value(state: Path, folder: Path, rng: np.random.Generator) -> str | None:
    """Flip a bit of one value in the ledger, which stays a sound SQLite file."""
    path = folder / "ledger.db"
    with suppress(sqlite3.DatabaseError):
        if rows := stored_values(path):
            row, bit = (
                rows[int(rng.integers(len(rows)))],
                int(rng.integers(63)),
            )  # not the sign of a zero, which SQLite does not keep
            (number,) = struct.unpack("<Q", struct.pack("<d", row.value))
            (other,) = struct.unpack("<d", struct.pack("<Q", number ^ 1 << bit))
            overwrite(path, row, other)
            return (
                f"ledger.db: bit {bit} of trial {row.trial}'s value at step {row.step}: {row.value!r} ->"
                f" {other!r}"
            )
    return None


def _cell(state: Path, folder: Path, rng: np.random.Generator) -> str | None:
    """Flip a bit of the ledger's file, in or beside a value that is stored there."""
    path = folder / "ledger.db"
    with suppress(sqlite3.DatabaseError):
        rows = [
            row.value
            for row in stored_values(path)
            if math.isfinite(row.value) and not row.value.is_integer()
        ]
        content = path.read_bytes()
        place = content.find(struct.pack(">d", rows[int(rng.integers(len(rows)))])) if rows else -1
        return _flip(path, rng, place - 12, place + 16) if place > 0 else None
    return None


CHECKPOINT = "bit flip in a checkpoint"
HARMS = {
    "bit flip in events": Harm(_to_one("trials/*/events-*.jsonl", _flip)),
    "events cut short": Harm(_to_one("trials/*/events-*.jsonl", _shorten)),
    "events removed": Harm(_to_one("trials/*/events-*.jsonl", _remove)),
    CHECKPOINT: Harm(_checkpoint),
    "bit flip in a result": Harm(_to_one("trials/*/result.json", _flip)),
    "torn result": Harm(_to_one("trials/*/result.json", _shorten)),
    "bit flip of a ledger's value": Harm(_value),
    "bit flip in a ledger's cell": Harm(_cell),
}
"""Corruption, which needs no waiting."""


@dataclass(frozen=True)
class Fault:
    """A signal to one process with a role, and what is done to the sweep's folder once everything that it
    ended is gone.
    """

    role: str
    signal: signal.Signals
    ends: bool = False
    """True if the sweep's command ends by it."""
    then: Callable[[Path, np.random.Generator], None] | None = None


def tear(folder: Path, rng: np.random.Generator) -> None:
    """Cut the journal inside its last line."""
    journal = folder / "optuna.log"
    if journal.exists():
        content = journal.read_bytes()
        last = len(content.rstrip(b"\n").rpartition(b"\n")[2])
        with journal.open("r+b") as file:
            file.truncate(len(content) - int(rng.integers(1, max(2, last))))


def delete(folder: Path, rng: np.random.Generator) -> None:
    """Delete the journal."""
    (folder / "optuna.log").unlink(missing_ok=True)


def lock(folder: Path, rng: np.random.Generator) -> None:
    """Leave the lock that Optuna takes around each write, as a process does that dies in one."""
    with suppress(FileExistsError):
        (folder / "optuna.log.lock").symlink_to(folder / "optuna.log")


FAULTS = {
    "trial killed": Fault("trial", signal.SIGKILL),
    "controller killed": Fault("controller", signal.SIGKILL, ends=True),
    "MLflow server killed": Fault("MLflow", signal.SIGKILL),
    "worker killed": Fault("worker", signal.SIGKILL),
    "PostgreSQL killed": Fault("PostgreSQL", signal.SIGKILL),
    "trial segmentation fault": Fault("trial", signal.SIGSEGV),
    "Ray head killed": Fault("gcs_server", signal.SIGKILL, ends=True),
    "warm process killed": Fault("child", signal.SIGKILL),
    "journal torn": Fault("controller", signal.SIGKILL, ends=True, then=tear),
    "trial stopped": Fault("trial", signal.SIGSTOP),
    "PostgreSQL stopped at once": Fault("PostgreSQL", signal.SIGQUIT),
    "Ctrl-C": Fault("controller", signal.SIGINT, ends=True),
    "raylet killed": Fault("raylet", signal.SIGKILL, ends=True),
    "journal deleted": Fault("controller", signal.SIGKILL, ends=True, then=delete),
    "stale journal lock": Fault("controller", signal.SIGKILL, ends=True, then=lock),
}

MIGRATION = "killed in MLflow's migration"
"""A driver of a sweep of its own, killed while MLflow makes its database in the state folder."""
KINDS = (*FAULTS, *HARMS, MIGRATION)
