"""`ablate rebuild X.yaml`: make a damaged ledger again, from the experiment, the trial folders and the
study's journal.

Damaged is also a ledger that SQLite finds sound and whose records are not those of its trials' results. A
trial's folder that does not agree with itself is put aside, so that the sweep runs the trial again.
"""

import re
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from ablate.cli.common import Device, Profile, State, console
from ablate.cli.settings import find_settings
from ablate.errors import InputError
from ablate.execution.controller import Controller
from ablate.execution.sweep_control import damage, put_aside
from ablate.experiment.load import Experiment, load
from ablate.files import Busy, lock
from ablate.results.ledger import Ledger
from ablate.results.ledger_progress import record_count
from ablate.results.ledger_rows import FINISHED
from ablate.results.trial_store import Store
from ablate.results.verify import verify

_IDENTITY = re.compile(rb"id([0-9a-f]{32})")
"""How the sweep's identity lies in the ledger's file. Nothing else has it, and by it the sweep's runs are
found again in MLflow.
"""


def rebuild(
    file: Annotated[Path, typer.Argument(help="The experiment, a YAML file.")],
    state: State = None,
    profile: Profile = None,
    device: Device = None,
    force: Annotated[
        bool, typer.Option("--force", help="Make it again where nothing is found to be wrong with it, too.")
    ] = False,
) -> None:
    """Make the damaged ledger of a sweep again, and say what came back. The damaged file is kept beside it;
    nothing is run.
    """
    settings = find_settings(profile, state=state, device=device)
    experiment = load(file, settings.device)
    folder = settings.state / "sweeps" / experiment.name
    if not folder.exists():
        raise InputError([f"{folder}: no such sweep has been run"])
    try:
        with lock(folder / "lock", wait=False):
            _rebuild(experiment, file, folder, settings.state, settings.device, force)
    except Busy as busy:
        raise InputError([f"{file}: another process ({busy}) runs this sweep"]) from None


def _rebuild(experiment: Experiment, file: Path, folder: Path, state: Path, device: str, force: bool) -> None:
    path, screen = folder / "ledger.db", console()
    found, put = damage(path), []
    if path.exists() and not found:
        found, put = _compared(path, state)
    for line in put:
        screen.print(line, soft_wrap=True, markup=False)
    found = found or ("--force was given" if force and path.exists() else None)
    if put and not found:
        screen.print(
            f"`ablate sweep {file}` runs {'it' if len(put) == 1 else 'them'} again.",
            soft_wrap=True,
            markup=False,
        )
        return
    if path.exists() and not found:
        raise InputError(
            [
                f"{path}: sound, with the records of its trials; there is nothing to rebuild (--force does it all the same)"
            ]
        )
    if found:
        kept = put_aside(path)
        facts = _identity(kept)
        screen.print(
            f"The ledger was put aside ({found}); it is kept as {kept}.", soft_wrap=True, markup=False
        )
    else:
        facts = {}
    points, given_up = _points(experiment, folder / "optuna.log")
    news = Controller(experiment, state, device, _nothing_runs, None).adopt(points, given_up)
    ledger = Ledger(path)
    ledger.describe(**facts)
    # MLflow's run of a trial that goes on, or begins anew, may show records that only the old ledger had.
    ledger.discard(
        sorted({(member["id"], "") for member in ledger.members() if member["status"] not in FINISHED})
    )
    for line in (*news, *_came_back(ledger, experiment, points), *_lost(facts, experiment, points)):
        screen.print(line, soft_wrap=True, markup=False)
    ledger.close()
    screen.print(f"`ablate sweep {file}` goes on with what is missing.", soft_wrap=True, markup=False)


def _compared(path: Path, state: Path) -> tuple[str | None, list[str]]:
    """How a sound ledger differs from the trial folders, None where it does not; and which damaged folders
    were put aside, in words.
    """
    ledger, store, put = Ledger(path, readonly=True), Store(state), []
    try:
        mismatches = verify(ledger, store).mismatches
    except sqlite3.DatabaseError as error:
        return str(error), []
    finally:
        ledger.close()
    for mismatch in mismatches:
        if mismatch.path != str(path) and (aside := store.retire(mismatch.trial)):
            put.append(f"Trial {mismatch.trial}: {mismatch.why}. Its folder is kept as {aside}.")
    wrong = next(
        (mismatch.why.removeprefix(f"{path}: ") for mismatch in mismatches if mismatch.path == str(path)),
        None,
    )
    return wrong, put


def _nothing_runs() -> Any:
    raise AssertionError("a rebuild runs nothing")


def _points(experiment: Experiment, journal: Path) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """The points that a search had proposed, and the steps at which its pruner gave points up, as its study
    has them.
    """
    if not experiment.search:
        return [], {}
    from ablate.execution.search import given_up, points  # Optuna takes half a second

    return points(journal, experiment.name), given_up(journal, experiment.name) if experiment.prunes else {}


def _identity(kept: Path) -> dict[str, str]:
    """The sweep's identity, where it can still be read off a damaged file, or the log beside it."""
    content = b"".join(
        path.read_bytes() for path in (kept, kept.with_name(f"{kept.name}-wal")) if path.exists()
    )
    found = _IDENTITY.search(content)
    return {"id": found[1].decode()} if found else {}


def _came_back(ledger: Ledger, experiment: Experiment, points: list[dict[str, Any]]) -> list[str]:
    trials = {member["trial"]: member["status"] for member in ledger.members()}
    counts = Counter(trials.values())
    records = record_count(ledger)
    finished = (
        ", ".join(f"{number} {status}" for status, number in counts.items() if status != "pending")
        or "none finished"
    )
    proposed = f", {len(points)} points of the search" if experiment.search else ""
    waiting = counts["pending"]
    return [
        f"Came back: {len(ledger.arms())} arms{proposed}, {len(trials)} trials ({finished}) with {records:,} records.",
        *([f"{waiting} trials are not finished; each goes on from its last checkpoint."] if waiting else []),
    ]


def _lost(facts: dict[str, str], experiment: Experiment, points: list[dict[str, Any]]) -> list[str]:
    lost = ["which trials had failed, and why (they run again)", "what earlier versions of the file wanted"]
    if experiment.search and not points:
        lost.append(
            "the points of the search (its journal has none; it begins anew, and what it proposes again is not run again)"
        )
    if "id" not in facts:
        lost.append("which runs in MLflow are this sweep's (it is drawn there again, beside them)")
    return [f"Lost: {'; '.join(lost)}."]
