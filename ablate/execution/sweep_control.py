"""Access to a sweep's folder from other processes: list sweeps, find who runs one, check its ledger, send it
orders.

sweeps/<name>/orders/<time>.json   one order a file, renamed into place by its sender, removed by the
controller

This file starts nothing, waits for nothing, and never writes the ledger.
"""

import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Literal, TypedDict

from ablate.errors import InputError
from ablate.files import Busy, Holder, holder_of, lock, write
from ablate.store.checked_ledger import absent, refusal, remedy
from ablate.store.databases import BESIDE, misplaced, open_readonly, quick_check
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Store
from ablate.store.verify import Mismatch, Verified, verify


class Order(TypedDict, total=False):
    """Order to a sweep's controller; either `stop` or `workers` is given."""

    stop: Literal["sweep", "arm", "trial"]
    name: str
    """Name of the arm to stop."""
    id: str
    """Id of the trial to stop."""
    workers: int
    """Number of trials that may run at once from now on."""


def changed(folder: Path) -> float:
    """Return the Unix time at which the sweep's ledger was last written. An empty log beside it comes from a
    reader."""
    files = [path.stat() for path in (folder / "ledger.db", folder / "ledger.db-wal") if path.exists()]
    return max((file.st_mtime for file in files if file.st_size), default=0.0)


# The process that runs it


def holder(folder: Path) -> Holder | None:
    """Return the process that runs the sweep; None if none does. It never blocks a controller."""
    return holder_of(folder / "lock")


@contextmanager
def exclusive(folder: Path, subject: object, advice: str = "") -> Iterator[None]:
    """Hold the lock of a sweep within the block; InputError, with an advice, if another process does."""
    try:
        with lock(folder / "lock", wait=False):
            yield
    except Busy as busy:
        raise InputError(f"{subject}: another process ({busy}) runs this sweep{advice}") from None


# Soundness of the ledger


def damage(path: Path) -> str | None:
    """Return a description of the damage to a SQLite file; None if it is intact, empty or missing."""
    if not (why := misplaced(path)) and (not path.exists() or not path.stat().st_size):
        return None
    try:
        if why:
            return why
        with closing(open_readonly(path)) as db:
            if why := quick_check(db):
                return why
    except sqlite3.OperationalError as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    except sqlite3.DatabaseError as error:
        return str(error)
    try:
        with closing(Ledger(path, readonly=True)) as ledger:
            return ledger.flaw()
    except sqlite3.DatabaseError as error:  # also a name that is not text; no table: no ledger, or only begun
        begun = isinstance(error, sqlite3.OperationalError) and "no such table" in str(error)
        return None if begun else str(error)


def compared(folder: Path, store: Store) -> Verified:
    """Compare one sweep with the folders of its trials. A ledger that cannot be read counts as a mismatch."""
    path = folder / "ledger.db"
    try:
        if not (why := absent(path) or damage(path)):
            with closing(Ledger(path, readonly=True)) as ledger:
                return verify(ledger, store)
    except (sqlite3.DatabaseError, InputError) as error:
        why = str(error)
    why = why.removeprefix(f"{path}: ")
    return Verified(0, 0, 0, (Mismatch("", str(path), f"{path}: {why}", remedy(path)),))


def put_aside(path: Path) -> Path:
    """Rename a file and, if it is a database, the files beside it; return its new name, which contains the
    time."""
    when = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09}"
    for part in ("", *BESIDE):
        with suppress(FileNotFoundError):
            path.with_name(path.name + part).rename(path.with_name(f"{path.name}.damaged-{when}{part}"))
    return path.with_name(f"{path.name}.damaged-{when}")


def check(folder: Path, file: str) -> None:
    """Raise InputError if the sweep's ledger is damaged. Call it before the ledger is opened, holding the
    sweep's lock."""
    if found := damage(folder / "ledger.db"):
        raise InputError(refusal(folder / "ledger.db", found, file))


# Orders


def give(folder: Path, order: Order) -> Path:
    """Write an order for the sweep's controller, and return its file, which the controller removes when it
    takes the order. {"stop": "sweep"}, {"stop": "arm", "name": ...}, {"stop": "trial", "id": ...},
    {"workers": N}"""
    orders = folder / "orders"
    orders.mkdir(exist_ok=True)
    path = orders / f"{time.time_ns():020}-{os.getpid()}.json"
    write(path, order)
    return path


def take(folder: Path) -> list[Order]:
    """Return the orders since the last call, in order of arrival, and remove them. Only the controller calls
    this. A controller that starts takes the orders to its predecessor and discards them."""
    taken: list[Order] = []
    with suppress(FileNotFoundError):
        for path in sorted(path for path in (folder / "orders").iterdir() if path.suffix == ".json"):
            with suppress(ValueError, RecursionError):  # somebody else's file; orders come in whole
                taken.append(json.loads(path.read_bytes()))
            path.unlink()
    return taken
