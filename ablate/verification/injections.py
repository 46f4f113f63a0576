"""Faults of the fault benchmark: signals to processes of a sweep, and corruption of its files (flipped bits,
truncation, removal).
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

from ablate.store.ledger_damage import overwrite, stored_values


@dataclass(frozen=True)
class Harm:
    """Corruption of one file of a state folder.

    `do` takes the state folder, the sweep's folder and a generator. It returns a description, or None
    if there is no such file yet.
    """

    do: Callable[[Path, Path, np.random.Generator], str | None]


def flip(path: Path, rng: np.random.Generator, low: int = 0, high: int | None = None) -> str:
    """Flip one random bit of a file, in the bytes from `low` up to `high`."""
    content = bytearray(path.read_bytes())
    position, bit = int(rng.integers(low, min(high or len(content), len(content)))), int(rng.integers(8))
    content[position] ^= 1 << bit
    path.write_bytes(content)
    return f"{path.parent.name}/{path.name}: bit {bit} of byte {position} of {len(content)}"


def shorten(path: Path, rng: np.random.Generator) -> str:
    """Truncate a file to a random length, possibly 0."""
    size = path.stat().st_size
    length = int(rng.integers(size))
    os.truncate(path, length)
    return f"{path.parent.name}/{path.name}: {length} of {size} bytes left"


def _to_one(pattern: str, how: Callable[[Path, np.random.Generator], str]) -> Callable[..., str | None]:
    """Return a function that applies `how` to a random non-empty file that matches a pattern."""

    def do(state: Path, folder: Path, rng: np.random.Generator) -> str | None:
        paths = [path for path in sorted(state.glob(pattern)) if path.stat().st_size]
        return how(paths[int(rng.integers(len(paths)))], rng) if paths else None

    return do


def _checkpoint(state: Path, folder: Path, rng: np.random.Generator) -> str | None:
    """Flip a bit of a trial's checkpoint or of a shared one."""
    paths = [*sorted(state.glob("trials/*/checkpoint.pt")), *sorted(state.glob("checkpoints/*.pt"))]
    return flip(paths[int(rng.integers(len(paths)))], rng) if paths else None


def remove(path: Path, rng: np.random.Generator) -> str:
    """Delete a file."""
    path.unlink()
    return f"{path.parent.name}/{path.name}: removed"


def _value(state: Path, folder: Path, rng: np.random.Generator) -> str | None:
    """Flip a bit of one value in the ledger; the SQLite file stays valid."""
    path = folder / "ledger.db"
    with suppress(sqlite3.DatabaseError):
        if rows := stored_values(path):
            # 63, not 64: SQLite does not store the sign of a zero.
            row, bit = rows[int(rng.integers(len(rows)))], int(rng.integers(63))
            (number,) = struct.unpack("<Q", struct.pack("<d", row.value))
            (other,) = struct.unpack("<d", struct.pack("<Q", number ^ 1 << bit))
            overwrite(path, row, other)
            return (
                f"ledger.db: bit {bit} of trial {row.trial}'s value at step {row.step}: {row.value!r} ->"
                f" {other!r}"
            )
    return None


def _cell(state: Path, folder: Path, rng: np.random.Generator) -> str | None:
    """Flip a bit of the ledger's file, in or next to a stored value."""
    path = folder / "ledger.db"
    with suppress(sqlite3.DatabaseError):
        rows = [
            row.value
            for row in stored_values(path)
            if math.isfinite(row.value) and not row.value.is_integer()
        ]
        content = path.read_bytes()
        position = content.find(struct.pack(">d", rows[int(rng.integers(len(rows)))])) if rows else -1
        return flip(path, rng, position - 12, position + 16) if position > 0 else None
    return None


CHECKPOINT = "bit flip in a checkpoint"
HARMS = {
    "bit flip in events": Harm(_to_one("trials/*/events-*.jsonl", flip)),
    "events cut short": Harm(_to_one("trials/*/events-*.jsonl", shorten)),
    "events removed": Harm(_to_one("trials/*/events-*.jsonl", remove)),
    CHECKPOINT: Harm(_checkpoint),
    "bit flip in a result": Harm(_to_one("trials/*/result.json", flip)),
    "torn result": Harm(_to_one("trials/*/result.json", shorten)),
    "bit flip of a ledger's value": Harm(_value),
    "bit flip in a ledger's cell": Harm(_cell),
}
"""Kinds of corruption."""


@dataclass(frozen=True)
class Fault:
    """Signal to one process with a role.

    `then` changes the sweep's folder after all processes that the signal ended are gone.
    """

    role: str
    signal: signal.Signals
    ends: bool = False
    """True if the sweep's command ends by it."""
    then: Callable[[Path, np.random.Generator], None] | None = None


def tear(folder: Path, rng: np.random.Generator) -> None:
    """Truncate Optuna's journal inside its last line."""
    journal = folder / "optuna.log"
    if journal.exists():
        content = journal.read_bytes()
        last = len(content.rstrip(b"\n").rpartition(b"\n")[2])
        with journal.open("r+b") as file:
            file.truncate(len(content) - int(rng.integers(1, max(2, last))))


def delete(folder: Path, rng: np.random.Generator) -> None:
    """Delete Optuna's journal."""
    (folder / "optuna.log").unlink(missing_ok=True)


def lock(folder: Path, rng: np.random.Generator) -> None:
    """Create the lock file of Optuna's journal, which a process leaves behind if it dies during a write."""
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
"""Controller of a separate sweep, killed while MLflow creates its database in the state folder."""
KINDS = (*FAULTS, *HARMS, MIGRATION)
