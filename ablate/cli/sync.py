"""`ablate rebuild --sync`: send the records of sweeps that MLflow does not have yet, or all of them again."""

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn

from ablate.cli.common import DONE, FAILED, Screen, console, interruption, raise_on_sigterm, summary_of
from ablate.cli.settings import Settings
from ablate.errors import InputError, redact
from ablate.execution.sweep_control import check, damage, holder, put_aside
from ablate.execution.tracking.access import check_login, import_client
from ablate.execution.tracking.database import unusable
from ablate.execution.tracking.mlflow_tracker import behind
from ablate.files import Busy, lock
from ablate.store.checked_ledger import folders, open_checked
from ablate.store.databases import path_of
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import FINISHED

if TYPE_CHECKING:
    from ablate.execution.projections import Mirror

_LOOK_SECONDS = 0.25


def sync(settings: Settings, sweeps: list[str] | None, anew: bool, timeout: float) -> int:
    """Send to MLflow the records that it does not have yet, each once, and return the exit status.

    `sweeps`: names or YAML files; None: all; `anew`: send all records again; `timeout`: seconds without
    progress after which it gives up.
    """
    screen = console()
    if settings.mlflow is None:
        raise InputError(
            f"no MLflow to send to: {settings.origins['mlflow']} says `none`; give an address with --mlflow"
        )
    check_login(settings.mlflow)
    selected = folders(settings.state, sweeps)
    _refuse_damaged(settings, anew, bool(sweeps))
    try:
        with raise_on_sigterm():
            return _sync_all(selected, bool(sweeps), settings, anew, timeout, screen)
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
    remedy = "; `ablate rebuild --sync --force`, without names, replaces it"
    if running:
        remedy = f", and in use by {', '.join(running)}; `ablate stop` ends a sweep"
    if running or not replaces:
        raise InputError(f"{path}: damaged ({why}){remedy}")
    put_aside(path)


def _sync_all(
    sweeps: list[Path], named: bool, settings: Settings, anew: bool, timeout: float, screen: Screen
) -> int:
    """Send the records of one sweep after another and return the exit status. A sweep that cannot be sent is
    an InputError if it was named, and otherwise a printed line."""
    status = DONE
    for number, folder in enumerate(sweeps):
        try:
            with lock(folder / "lock", wait=False):
                complete = _sync(folder, settings, anew, timeout, screen)
        except (InputError, Busy) as error:
            ended = isinstance(error, InputError)
            why = str(error) if ended else f"{folder.name}: is running ({error}), and sends its own records"
            if named:
                raise InputError(why) from None
            screen.lines(why)
            status = FAILED if ended else status
            continue
        if not complete:
            if rest := ", ".join(path.name for path in sweeps[number + 1 :]):
                screen.lines(f"Not tried: {rest}")
            return FAILED
    return status


def _sync(folder: Path, settings: Settings, anew: bool, timeout: float, screen: Screen) -> bool:
    check(folder, f"{folder.name}.yaml")
    open_checked(folder / "ledger.db").close()  # MLflow would keep wrong records
    from ablate.execution.projections import Mirror  # pandas

    address = settings.mlflow
    assert address is not None  # `sync` refuses it
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
        unsent = mirror.finish(ended, summary_of(ledger), 0.0 if missing else timeout)
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
