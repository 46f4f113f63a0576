"""A sweep's folder seen from outside: which sweeps there are, who runs one, whether its ledger is sound, orders for its controller.

sweeps/<name>/orders/<when>.json   one order a file, renamed in by who gives it, removed by the controller that takes it
It starts nothing, waits for nothing, and never writes the ledger.
"""

import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ablate.errors import InputError, nearest
from ablate.files import Holder, write
from ablate.results.databases import open_readonly, quick_check
from ablate.results.ledger import Ledger
from ablate.results.ledger_integrity import flaw


def folders(state: Path, words: Iterable[str] | None) -> list[Path]:
    """The folders of sweeps given by name or by YAML file, of all there are where none is given; InputError for one that there is not."""
    known = {path.parent.name: path.parent for path in sorted(state.glob("sweeps/*/ledger.db"))}
    names = [Path(word).stem if word.endswith((".yaml", ".yml")) else word for word in words or known]
    unknown = [name for name in names if name not in known]
    if unknown:
        hint = nearest(unknown[0], known) if known else "none has been run there"
        raise InputError([f"{unknown[0]}: no such sweep in {state}; {hint}"])
    return [known[name] for name in dict.fromkeys(names)]


def changed(folder: Path) -> float:
    """When the sweep's ledger was last written; an empty log beside it was made by a reader."""
    files = [path.stat() for path in (folder / "ledger.db", folder / "ledger.db-wal") if path.exists()]
    return max((file.st_mtime for file in files if file.st_size), default=0.0)


# Who runs it


def holder(folder: Path) -> Holder | None:
    """Return the process that runs the sweep; None if none does. It never gets into a controller's way.

    A lock that names a dead process of this machine is not tried, so that a controller that starts at that moment finds it free.
    """
    try:
        with (folder / "lock").open() as file:
            found = Holder.parse(file.read())
            if found is None or _dead(found):
                return None
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return found
    return None


def _dead(holder: Holder) -> bool:
    """Return True if the process that a lock names is known to be gone."""
    if holder.host != os.uname().nodename:
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's
        return False
    return False


# Whether its ledger is sound


def damage(path: Path) -> str | None:
    """What is wrong with a SQLite file, None where it is sound, empty or not there."""
    if not path.exists() or not path.stat().st_size:
        return None
    try:
        db = open_readonly(path)
        try:
            found = quick_check(db)
        finally:
            db.close()
    except sqlite3.OperationalError as error:
        raise InputError([f"{path}: cannot be read: {error}"]) from None
    except sqlite3.DatabaseError as error:
        return str(error)
    return found or _flaw(path)


def _flaw(path: Path) -> str | None:
    """What a SQLite file that is sound as such holds in place of what was written; None where it is no ledger, or only begun."""
    ledger = None
    try:
        ledger = Ledger(path, readonly=True)
        return flaw(ledger)
    except sqlite3.OperationalError:
        return None
    finally:
        if ledger:
            ledger.close()


def put_aside(path: Path) -> Path:
    """Rename a SQLite file and what belongs to it; its new name, which says when."""
    when = time.strftime("%Y%m%d-%H%M%S")
    for part in ("", "-wal", "-shm", "-journal"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + part).rename(path.with_name(f"{path.name}.damaged-{when}{part}"))
    return path.with_name(f"{path.name}.damaged-{when}")


def check(folder: Path, file: str) -> None:
    """InputError where the sweep's ledger is damaged. Call it before the ledger is opened, holding the sweep's lock."""
    found = damage(folder / "ledger.db")
    if found:
        raise InputError([refusal(folder, found, file)])


def refusal(folder: Path, found: str, file: str) -> str:
    """What is said of a damaged ledger."""
    return f"{folder / 'ledger.db'}: damaged ({found}); `ablate rebuild {file}` makes it again from the trial folders"


# Orders


def give(folder: Path, order: dict[str, Any]) -> Path:
    """Leave an order for the sweep's controller; its file is gone once it was taken.

    {"stop": "sweep"}, {"stop": "arm", "name": ...}, {"stop": "trial", "id": ...}, {"workers": N}
    """
    orders = folder / "orders"
    orders.mkdir(exist_ok=True)
    path = orders / f"{time.time_ns():020}-{os.getpid()}.json"
    write(path, order)
    return path


def take(folder: Path) -> list[dict[str, Any]]:
    """The orders given since the last call, in order of arrival. For the controller, which alone takes them; cheap where there are none.

    A controller that starts takes what was meant for the one before it, and lets it go.
    """
    taken = []
    with suppress(FileNotFoundError):
        for path in sorted(path for path in (folder / "orders").iterdir() if path.suffix == ".json"):
            with suppress(ValueError):  # somebody else's file; orders come in whole
                taken.append(json.loads(path.read_bytes()))
            path.unlink()
    return taken
