"""`ablate rebuild X.yaml`: rebuild a damaged ledger from the experiment, the trial folders and the journal of
the study. With `--sync`, send MLflow the records of sweeps that it lacks, or all of them again.

A ledger that SQLite can read is also damaged if its records differ from the results of its trials. A trial
folder that contradicts itself is moved aside, so that the sweep runs the trial again.
"""

import re
import sqlite3
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn

from ablate.cli.common import DONE, FAILED, Screen, console, interruption, nothing_runs, raise_on_sigterm
from ablate.cli.options import DeviceFlags, MlflowFlags, complete_sweeps
from ablate.cli.settings import Settings
from ablate.errors import InputError, redact
from ablate.execution.controller import Controller
from ablate.execution.sweep_control import check, compared, damage, exclusive, holder, put_aside
from ablate.execution.tracking.access import check_login, import_client
from ablate.execution.tracking.database import unusable
from ablate.execution.tracking.mlflow_tracker import behind
from ablate.experiment.load import Experiment, load
from ablate.files import Busy, Json, lock
from ablate.store.checked_ledger import absent, folders, open_checked
from ablate.store.databases import path_of
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import FINISHED
from ablate.store.trial_store import Store

if TYPE_CHECKING:
    from ablate.execution.projections import Mirror

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
        raise typer.Exit(_sync(settings, sweeps, force, timeout))
    if not sweeps or len(sweeps) > 1:
        raise InputError("rebuild: give the YAML file of one experiment; --sync takes several sweeps, or all")
    file = Path(sweeps[0])
    experiment = load(file, settings.device)
    folder = settings.state / "sweeps" / experiment.name
    if not folder.exists():
        raise InputError(f"{folder}: there is no such folder, so this sweep has never run")
    with exclusive(folder, file):
        _rebuild(experiment, file, folder, settings, force)


def _rebuild(experiment: Experiment, file: Path, folder: Path, settings: Settings, force: bool) -> None:
    path, screen = folder / "ledger.db", console()
    again = f"ablate sweep {quote(str(file))}{settings.state_option}"
    why = damage(path) or ("it is empty" if path.exists() and absent(path) else None)
    foreign, identity = False, None
    if why:  # the identity of another sweep would name that sweep's runs in MLflow
        with suppress(sqlite3.DatabaseError), closing(Ledger(path, readonly=True)) as ledger:
            foreign = ledger.foreign is not None
    elif path.exists():
        store, retired = Store(settings.state), list[str]()
        for mismatch in compared(folder, store).mismatches:
            if mismatch.path == str(path):
                why = why or mismatch.why.removeprefix(f"{path}: ")
            elif aside := store.retire(mismatch.trial):
                retired.append(f"Trial {mismatch.trial}: {mismatch.why}. Its folder is kept as {aside}.")
        screen.lines(*retired)
        why = why or ("--force was given" if force else None)
        if retired and not why:
            screen.lines(f"`{again}` runs {'it' if len(retired) == 1 else 'them'} again.")
            return
        if not why:
            sound = "not damaged, and equal to the records of its trials"
            raise InputError(f"{path}: {sound}; --force rebuilds it all the same")
    if why:
        kept = put_aside(path)
        files = [each for each in (kept, kept.with_name(f"{kept.name}-wal")) if each.is_file()]
        match = None if foreign else _IDENTITY.search(b"".join(each.read_bytes() for each in files))
        identity = match[1].decode() if match else None
        screen.lines(f"The old ledger ({why}) is kept as {kept}.")
    points: list[dict[str, Json]] = []
    given_up: dict[int, int] = {}
    if experiment.keys.search:
        from ablate.execution.search import journal

        log, name = folder / "optuna.log", experiment.name
        points, given_up = journal.points(log, name), journal.given_up(log, name) if experiment.prunes else {}
    news = Controller(experiment, settings.state, settings.device, nothing_runs, None).adopt(points, given_up)
    ledger = Ledger(path)
    if identity:
        ledger.facts.id = identity
    # MLflow may have records of unfinished trials that only the old ledger had.
    ledger.discard(sorted({(member.id, "") for member in ledger.members() if member.status not in FINISHED}))
    screen.lines(*news, *_recovered(ledger, identity, experiment, len(points)))
    ledger.close()
    screen.lines(f"`{again}` runs the missing trials.")


def _recovered(ledger: Ledger, identity: str | None, experiment: Experiment, proposed: int) -> list[str]:
    counts = Counter({member.trial: member.status for member in ledger.members()}.values())
    total, waiting = counts.total(), counts.pop("pending", 0)
    finished = ", ".join(f"{number} {status}" for status, number in counts.items()) or "none finished"
    points = f", {proposed} points of the search" if experiment.keys.search else ""
    records = f"{ledger.record_count():,} records"
    rest = f"{waiting} trials are not finished; each continues from its last checkpoint."
    recovered = f"{len(ledger.arms())} arms{points}, {total} trials ({finished}) with {records}."
    lost = ["failed trials and their reasons (they run again)", "members that the file names no more"]
    if not any(arm.role == "foreign" for arm in ledger.arms()):
        lost.append("runs that `ablate judge --into` added, if they have no judged.json")
    if experiment.keys.search and not proposed:
        lost.append(
            "the points of the search (its journal has none; it restarts, and reuses finished trials)"
        )
    if identity is None:
        lost.append("the runs of this sweep in MLflow (new ones are created)")
    return [f"Recovered: {recovered}", *[rest] * bool(waiting), f"Lost: {'; '.join(lost)}."]


_LOOK_SECONDS = 0.25


# MLflow's copy


def _sync(settings: Settings, sweeps: list[str] | None, anew: bool, timeout: float) -> int:
    """Send to MLflow the records that it does not have yet, each once, and return the exit status. A sweep
    that cannot be sent is an InputError if it was named, and otherwise a printed line.

    `sweeps`: names or YAML files; None: all; `anew`: send all records again; `timeout`: seconds without
    progress after which it gives up.
    """
    screen, status = console(), DONE
    if settings.mlflow is None:
        raise InputError(
            f"no MLflow to send to: {settings.origins['mlflow']} says `none`; give an address with --mlflow"
        )
    check_login(settings.mlflow)
    selected = folders(settings.state, sweeps)
    _refuse_damaged(settings, anew, bool(sweeps))
    try:
        with raise_on_sigterm():
            for number, folder in enumerate(selected):
                try:
                    with lock(folder / "lock", wait=False):
                        complete = _sync_one(folder, settings, anew, timeout, screen)
                except (InputError, Busy) as error:
                    ended = isinstance(error, InputError)
                    running = f"{folder.name}: is running ({error}), and sends its own records"
                    why = str(error) if ended else running
                    if sweeps:
                        raise InputError(why) from None
                    screen.lines(why)
                    status = FAILED if ended else status
                    continue
                if not complete:
                    if rest := ", ".join(path.name for path in selected[number + 1 :]):
                        screen.lines(f"Not tried: {rest}")
                    return FAILED
            return status
    except KeyboardInterrupt as error:
        code, description = interruption(error)
        screen.print(f"{description}. MLflow keeps what was sent; the same command sends the rest.")
        return code


def _refuse_damaged(settings: Settings, anew: bool, named: bool) -> None:
    """Handle a local database that SQLite cannot open: raise InputError or, with `anew` for all sweeps,
    move it aside. The database holds all sweeps, so all of them have to be sent again."""
    path, replaces = path_of(settings.mlflow), anew and not named
    if path is None or not (why := unusable(path) if replaces else damage(path)):
        return
    running = [folder.name for folder in folders(settings.state, None) if replaces and holder(folder)]
    remedy = f"; `ablate rebuild --sync --force{settings.state_option}`, without names, replaces it"
    if running:
        remedy = f", and in use by {', '.join(running)}; `ablate stop{settings.state_option}` ends a sweep"
    if running or not replaces:
        raise InputError(f"{path}: damaged ({why}){remedy}")
    put_aside(path)


def _sync_one(folder: Path, settings: Settings, anew: bool, timeout: float, screen: Screen) -> bool:
    check(folder, f"{folder.name}.yaml")
    open_checked(folder / "ledger.db").close()  # MLflow would keep wrong records
    from ablate.execution.projections import Mirror  # pandas
    from ablate.reports.evidence import summary_markdown

    address = settings.mlflow
    assert address is not None  # `_sync` refuses it
    import_client()  # takes seconds, in which MLflow is not asked yet
    with closing(Ledger(folder / "ledger.db")) as ledger:
        if anew:
            ledger.forget_mlflow()
        mirror = Mirror(address, ledger, settings.state, folder, folder.name, busy=True)
        before = behind(ledger)
        missing = _wait_for(mirror, ledger, folder.name, timeout, screen)
        trouble = mirror.trouble
        statuses = {member.status for member in ledger.members()}
        ended = "FAILED" if statuses & {"failed", "oom"} else "KILLED"
        ended = "FINISHED" if statuses <= {*FINISHED, "pruned"} else ended
        unsent = mirror.finish(ended, summary_markdown(ledger), 0.0 if missing else timeout)
        if missing or unsent:
            why = redact(trouble or mirror.trouble or "no answer", address)
            result = f"{missing:,} of {before:,} records are missing in {redact(address)}: {why}"
        else:
            result = f"{before:,} records sent, none is missing in {redact(address)}"
        screen.lines(f"{folder.name}: {result}")
        return not (missing or unsent)


def _wait_for(mirror: "Mirror", ledger: Ledger, name: str, timeout: float, screen: Screen) -> int:
    """Wait until MLflow has all records, or none arrives for `timeout` seconds; return the number missing."""
    missing = first = behind(ledger)

    def unclosed() -> bool:
        """Return True while the MLflow run of a member that has ended is open."""
        return any(not each.closed and each.status not in ("pending", "running") for each in ledger.members())

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} records {task.fields[why]}", markup=False),
    )
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task(name, total=first, why="")
        last_progress = time.monotonic()
        while (missing or unclosed()) and time.monotonic() - last_progress < timeout:
            time.sleep(_LOOK_SECONDS)
            mirror.refresh()
            now = behind(ledger)
            if now < missing:
                last_progress = time.monotonic()
            missing = now
            progress.update(task, completed=first - missing, why=mirror.trouble or "")
    return missing
