"""The way in for every reader of a sweep's numbers: a ledger that still holds what was written into it.

The problem: a reader that opens the file by itself shows whatever is there. One UPDATE of table `records`
changes a verdict, and nothing that SQLite checks notices. So all readers open a ledger here. Its rows and the
records of all its trials are compared with their seals first; a difference is one sentence with the command
that repairs it, and no number is shown.

    ledger = open_checked(path)       # or InputError: ".../ledger.db: damaged (table records, trial 9f3c...
    unverified(ledger)                # "" or "unverified: 4 of 4 trials have no seal of their records ..."

A file that was compared is not read again until its size, inode or times differ: `ablate.cache` keeps a note.
Not compared here: the folders of the trials (verify.py does), and a trial that still runs, which has no seal.
"""

import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from shlex import quote

from ablate import cache
from ablate.errors import InputError, nearest
from ablate.store.judged import Judged
from ablate.store.judged_files import kept_alone
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import OVER

_CHECK = "ledger agrees with its seals, 1"
"""Name of what a note says. Raise the number when another thing is compared."""


class NoSweep(InputError, FileNotFoundError):
    """The state folder has no sweep of this name."""


def folders(state: Path, words: Iterable[str] | None) -> list[Path]:
    """Return the folders of sweeps given by name or YAML file; of all sweeps if none is given. NoSweep if one
    is missing."""
    known = {path.name: path for path in sorted(state.glob("sweeps/*")) if path.is_dir()}
    names = [Path(word).stem if word.endswith((".yaml", ".yml")) else word for word in words or known]
    for name in names:
        if name not in known:
            hint = nearest(name, known) if known else "none has been run there"
            raise NoSweep(f"{name}: no such sweep in {state}; {hint}")
    return [known[name] for name in dict.fromkeys(names)]


def open_ledger(state: Path, sweep: str) -> Ledger:
    """Open the ledger of a sweep for reading, compared with its seals. NoSweep if the sweep has not been run;
    InputError if the ledger differs from its seals."""
    (folder,) = folders(state, [sweep])
    return open_checked(folder / "ledger.db")


def open_checked(path: Path) -> Ledger:
    """Open a ledger for reading, compared with its seals. InputError if it differs from them, is no database,
    or has no tables yet."""
    if why := absent(path):
        raise InputError(why)
    try:
        ledger = Ledger(path, readonly=True)
    except sqlite3.OperationalError as error:
        none = absent(path, empty=True) if "no such table" in str(error) else None
        raise InputError(none or f"{path}: cannot be read: {error}") from None
    except sqlite3.DatabaseError as error:
        raise InputError(refusal(path, str(error))) from None
    try:
        if why := difference(ledger):
            raise InputError(refusal(path, why, ledger=ledger))
    except BaseException:
        ledger.close()
        raise
    return ledger


def difference(ledger: Ledger) -> str | None:
    """Return a description of the first difference between a ledger and its seals; None if there is none. A
    difference in the records of a trial names the trial. Parts without seal do not differ (`unverified`)."""
    try:
        if ledger.foreign:  # before the note, since a link has the stamp of the file that it leads to
            return ledger.foreign
    except sqlite3.DatabaseError as error:
        return str(error)
    log = ledger.path.with_name(f"{ledger.path.name}-wal")
    files = [ledger.path, log] if log.exists() and log.stat().st_size else [ledger.path]
    stamp = cache.stamp(files)
    key = cache.key_of(_CHECK, stamp)
    if stamp and cache.noted(key):
        return ledger.lost()
    why = _difference(ledger)
    if stamp and not why:
        with suppress(OSError):  # a cache that cannot be written: it is compared every time
            cache.note(key, "yes")
    return why or ledger.lost()


def _difference(ledger: Ledger) -> str | None:
    try:
        if why := ledger.flaw():
            return why
        for row in ledger.wanted_trials():
            with ledger.snapshot():  # one state of both, while the sweep runs
                seal = ledger.records_seal(row.trial)
                if seal is not None and ledger.digest(row.trial) != seal:
                    return f"table records, trial {row.id}: its records are not what was written"
    except (sqlite3.DatabaseError, ValueError) as error:
        return str(error)
    return None


def absent(path: Path, empty: bool = False) -> str | None:
    """Return a sentence on a sweep's folder in which the ledger is missing; None if something is there.
    `empty`: the file is known to have no tables, which is as good as no file."""
    files = (path, path.with_name(f"{path.name}-wal"))
    if not empty and (path.is_symlink() or any(file.exists() and file.stat().st_size for file in files)):
        return None
    return f"{path}: this sweep has no ledger: it never began, or the file is lost; {remedy(path)}"


def unverified(ledger: Ledger) -> str:
    """Return a sentence on the trials whose records have no seal to be compared with; empty if all have one.
    Trials that wait or run have none, as their status says, and do not count."""
    over = [row for row in ledger.wanted_trials() if row.status in OVER]
    without = [row for row in over if ledger.records_seal(row.trial) is None]
    if not without:
        return ""
    return (
        f"unverified: {len(without)} of {len(over)} trials have no seal of their records;"
        f" `ablate status --verify {quote(ledger.name)}{state_option(ledger.path.parent)}` compares them with"
        " the trial folders"
    )


def refusal(path: Path, why: str, file: str = "", ledger: Ledger | None = None) -> str:
    """Return the error message for a ledger that is damaged (`why`); other arguments as for `remedy`."""
    return f"{path}: damaged ({why}); {remedy(path, file, ledger)}"


def remedy(path: Path, file: str = "", ledger: Ledger | None = None) -> str:
    """Return a sentence on what makes a lost or damaged ledger again. `file` is the YAML file of the sweep;
    empty for one with the sweep's name. `ledger` is given if its facts can be read."""
    folder = path.absolute().parent
    if kept_alone(folder) or (ledger and Judged.alone(ledger)):
        return "the same `ablate judge` command writes it again"
    if ledger and ledger.lost():
        command = rebuild_command(path, file).replace("rebuild", "sweep", 1)
        return f"`{command}` reads them again from the trial folders, and runs what is missing"
    return f"`{rebuild_command(path, file)}` makes it again from the trial folders"


def rebuild_command(path: Path, file: str = "") -> str:
    """Return the command that makes a ledger again; arguments as for `remedy`."""
    folder = path.parent
    return f"ablate rebuild {quote(file or f'{folder.absolute().name}.yaml')}{state_option(folder)}"


def state_option(folder: Path) -> str:
    """Return the option that names the state folder of a sweep's folder, after a space; empty for `runs`, the
    default, and for a folder that is in none."""
    state = folder.parent.parent
    return "" if folder.parent.name != "sweeps" or state == Path("runs") else f" --state {quote(str(state))}"
