"""`ablate rebuild X.yaml`: rebuild a damaged ledger from the experiment, the trial folders and the journal of
the study. With `--sync`, MLflow's copy of ledgers instead.

A ledger that SQLite can read is also damaged if its records differ from the results of its trials. A trial
folder that contradicts itself is moved aside, so that the sweep runs the trial again.
"""

import re
import sqlite3
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ablate.cli.common import console, nothing_runs
from ablate.cli.options import DeviceFlags, MlflowFlags, complete_sweeps
from ablate.cli.sync import sync as send
from ablate.errors import InputError
from ablate.execution.controller import Controller
from ablate.execution.sweep_control import damage, put_aside
from ablate.experiment.load import Experiment, load
from ablate.files import Busy, Json, lock
from ablate.store.checked_ledger import absent
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import FINISHED
from ablate.store.trial_store import Store
from ablate.store.verify import verify

Points = list[dict[str, Json]]
"""Knobs of the points that a search proposed, by number."""
_IDENTITY = re.compile(rb"id([0-9a-f]{32})")
"""Pattern of the sweep's identity in the bytes of the ledger. It is stored nowhere else, and MLflow's runs
are found by it.
"""


@dataclass(frozen=True)
class RebuildFlags(DeviceFlags, MlflowFlags):
    """State folder, profile, device and MLflow."""


def rebuild(
    flags: RebuildFlags,
    sweeps: Annotated[list[str] | None, typer.Argument(metavar="X", autocompletion=complete_sweeps)] = None,
    force: bool = False,
    sync: bool = False,
    timeout: Annotated[float, typer.Option(min=0)] = 300.0,
) -> None:
    """Rebuild the damaged ledger of a sweep, from its YAML file X, and print what was recovered. The damaged
    file is kept; no trial runs. With --sync, send the records of sweeps to MLflow.

    Exit status: 0 done, or MLflow has all records, 1 some are missing there, 2 bad input.

    Args:
        sweeps: Experiment file (YAML). With --sync: sweeps, by name or by file; default: all.
        force: Rebuild a ledger without damage, too; with --sync, send all records again, after data in MLflow
          were deleted or damaged.
        sync: Send MLflow the records that it does not have yet instead; none is written twice.
        timeout: With --sync: give up after this many seconds without progress.
    """
    settings = flags.settings()
    if sync:
        raise typer.Exit(send(settings, sweeps, force, timeout))
    if not sweeps or len(sweeps) > 1:
        raise InputError("rebuild: give the YAML file of one experiment; --sync takes several sweeps, or all")
    file = Path(sweeps[0])
    experiment = load(file, settings.device)
    folder = settings.state / "sweeps" / experiment.name
    if not folder.exists():
        raise InputError(f"{folder}: there is no such folder, so this sweep has never run")
    try:
        with lock(folder / "lock", wait=False):
            _rebuild(experiment, file, folder, settings.state, settings.device, force)
    except Busy as busy:
        raise InputError(f"{file}: another process ({busy}) runs this sweep") from None


def _rebuild(experiment: Experiment, file: Path, folder: Path, state: Path, device: str, force: bool) -> None:
    path, screen = folder / "ledger.db", console()
    why = damage(path) or ("it is empty" if path.exists() and absent(path) else None)
    foreign, identity = False, None
    if why:  # the identity of another sweep would name that sweep's runs in MLflow
        with suppress(sqlite3.DatabaseError), closing(Ledger(path, readonly=True)) as ledger:
            foreign = ledger.foreign is not None
    elif path.exists():
        why, retired = _compare(path, state)
        screen.lines(*retired)
        why = why or ("--force was given" if force else None)
        if retired and not why:
            screen.lines(f"`ablate sweep {file}` runs {'it' if len(retired) == 1 else 'them'} again.")
            return
        if not why:
            sound = "not damaged, and equal to the records of its trials"
            raise InputError(f"{path}: {sound}; --force rebuilds it all the same")
    if why:
        kept = put_aside(path)
        identity = None if foreign else _identity(kept)
        screen.lines(f"The old ledger ({why}) is kept as {kept}.")
    points: Points = []
    given_up: dict[int, int] = {}
    if experiment.keys.search:
        from ablate.execution.search import journal

        log, name = folder / "optuna.log", experiment.name
        points, given_up = journal.points(log, name), journal.given_up(log, name) if experiment.prunes else {}
    news = Controller(experiment, state, device, nothing_runs, None).adopt(points, given_up)
    ledger = Ledger(path)
    if identity:
        ledger.facts.id = identity
    # MLflow may have records of unfinished trials that only the old ledger had.
    ledger.discard(sorted({(member.id, "") for member in ledger.members() if member.status not in FINISHED}))
    lost = _lost(ledger, identity, experiment, points)
    screen.lines(*news, *_recovered(ledger, experiment, points), *lost)
    ledger.close()
    screen.lines(f"`ablate sweep {file}` runs the missing trials.")


def _compare(path: Path, state: Path) -> tuple[str | None, list[str]]:
    """Compare a readable ledger with the trial folders, and move damaged trial folders aside. Return how the
    ledger differs, or None, and one sentence for each folder that was moved."""
    store = Store(state)
    retired: list[str] = []
    try:
        with closing(Ledger(path, readonly=True)) as ledger:
            mismatches = verify(ledger, store).mismatches
    except sqlite3.DatabaseError as error:
        return str(error), []
    for mismatch in mismatches:
        if mismatch.path != str(path) and (aside := store.retire(mismatch.trial)):
            retired.append(f"Trial {mismatch.trial}: {mismatch.why}. Its folder is kept as {aside}.")
    difference = next(
        (mismatch.why.removeprefix(f"{path}: ") for mismatch in mismatches if mismatch.path == str(path)),
        None,
    )
    return difference, retired


def _identity(kept: Path) -> str | None:
    files = (path for path in (kept, kept.with_name(f"{kept.name}-wal")) if path.is_file())
    match = _IDENTITY.search(b"".join(path.read_bytes() for path in files))
    return match[1].decode() if match else None


def _recovered(ledger: Ledger, experiment: Experiment, points: Points) -> list[str]:
    counts = Counter({member.trial: member.status for member in ledger.members()}.values())
    total, waiting = counts.total(), counts.pop("pending", 0)
    finished = ", ".join(f"{number} {status}" for status, number in counts.items()) or "none finished"
    proposed = f", {len(points)} points of the search" if experiment.keys.search else ""
    records = f"{ledger.record_count():,} records"
    rest = f"{waiting} trials are not finished; each continues from its last checkpoint."
    recovered = f"{len(ledger.arms())} arms{proposed}, {total} trials ({finished}) with {records}."
    return [f"Recovered: {recovered}", *[rest] * bool(waiting)]


def _lost(ledger: Ledger, identity: str | None, experiment: Experiment, points: Points) -> list[str]:
    lost = ["failed trials and their reasons (they run again)", "members that the file names no more"]
    if not any(arm.role == "foreign" for arm in ledger.arms()):
        lost.append("runs that `ablate judge --into` added, if they have no judged.json")
    if experiment.keys.search and not points:
        lost.append(
            "the points of the search (its journal has none; it restarts, and reuses finished trials)"
        )
    if identity is None:
        lost.append("the runs of this sweep in MLflow (new ones are created)")
    return [f"Lost: {'; '.join(lost)}."]
