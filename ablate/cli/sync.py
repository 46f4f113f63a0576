"""`ablate sync`: ship to MLflow what it does not have of a sweep's ledger, or all of it again."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ablate.cli.common import (
    DONE,
    FAILED,
    Mlflow,
    Profile,
    State,
    Sweeps,
    console,
    interruption,
    raise_on_sigterm,
)
from ablate.cli.settings import Settings, find_settings
from ablate.errors import InputError, redact
from ablate.execution.sweep_control import check, damage, folders, holder, put_aside
from ablate.execution.tracking import behind, knock, unusable
from ablate.files import Busy, lock
from ablate.results.databases import path_of
from ablate.results.ledger import Ledger
from ablate.results.ledger_rows import FINISHED

_LOOK_SECONDS = 0.25


def sync(
    sweeps: Sweeps = None,
    rebuild: Annotated[
        bool,
        typer.Option(
            "--rebuild",
            help="Draw everything again: the database was deleted or is damaged, or runs were deleted in it.",
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds without progress after which to give up.")
    ] = 300.0,
    state: State = None,
    profile: Profile = None,
    mlflow: Mlflow = None,
) -> None:
    """Ship to MLflow what it does not have yet; nothing is written twice. Exit status: 0 it has everything, 1
    it does not.
    """
    settings, screen = find_settings(profile, state=state, mlflow=mlflow), console()
    if settings.mlflow is None:
        raise InputError(
            [
                f"there is no MLflow to ship to ({settings.origins['mlflow']} says none); name one with --mlflow"
            ]
        )
    knock(settings.mlflow)
    known = folders(settings.state, sweeps)
    _refuse_damaged(settings, rebuild, bool(sweeps))
    try:
        with raise_on_sigterm():
            raise typer.Exit(_all(known, bool(sweeps), settings, rebuild, timeout, screen))
    except KeyboardInterrupt as error:
        code, what = interruption(error)
        screen.print(f"{what}. What was shipped stays; the same command ships the rest.")
        raise typer.Exit(code) from None


def _refuse_damaged(settings: Settings, rebuild: bool, named: bool) -> None:
    """A SQLite database that cannot be opened is put aside by --rebuild, which then has to draw all sweeps:
    it held all of them.
    """
    path = path_of(settings.mlflow)
    if path is None:
        return
    found = unusable(path) if rebuild and not named else damage(path)
    if not found:
        return
    if not rebuild or named:
        raise InputError(
            [
                f"{path}: damaged ({found}); `ablate sync --rebuild`, for all sweeps, puts it aside and makes it again"
            ]
        )
    running = [folder.name for folder in folders(settings.state, None) if holder(folder)]
    if running:
        raise InputError(
            [
                f"{path}: damaged ({found}), and still in use by {', '.join(running)}; `ablate stop` ends a sweep"
            ]
        )
    put_aside(path)


def _all(
    known: list[Path], named: bool, settings: Settings, rebuild: bool, timeout: float, screen: Console
) -> int:
    """Ship one sweep after another. Where one is not asked for by name, that it cannot be shipped is only
    said.
    """
    status = DONE
    for folder in known:
        try:
            complete = _locked(folder, settings, rebuild, timeout, screen)
        except InputError as error:
            if named:
                raise
            screen.print(str(error), soft_wrap=True, markup=False)
            status = FAILED
            continue
        except Busy as busy:
            said = f"{folder.name}: runs ({busy}), and ships by itself"
            if named:
                raise InputError([said]) from None
            screen.print(said, soft_wrap=True, markup=False)
            continue
        if not complete:
            rest = [path.name for path in known[known.index(folder) + 1 :]]
            screen.print(f"Not tried: {', '.join(rest)}", soft_wrap=True, markup=False) if rest else None
            return FAILED
    return status


def _locked(folder: Path, settings: Settings, rebuild: bool, timeout: float, screen: Console) -> bool:
    with lock(folder / "lock", wait=False):
        check(folder, f"{folder.name}.yaml")
        return _ship(folder, settings, rebuild, timeout, screen)


def _ship(folder: Path, settings: Settings, rebuild: bool, timeout: float, screen: Console) -> bool:
    """Ship one sweep, whose lock is held, and say how that went; whether MLflow has everything."""
    from ablate.execution.projections import Mirror  # pandas

    ledger = Ledger(folder / "ledger.db")
    try:
        if rebuild:
            ledger.forget_mlflow()
        mirror = Mirror(settings.mlflow, ledger, settings.state, folder, folder.name, busy=True)
        before = behind(ledger)
        missing = _wait(mirror, ledger, folder.name, timeout, screen)
        trouble = mirror.trouble
        unsaid = mirror.finish(_ended(ledger), 0.0 if missing else timeout)
        if missing or unsaid:
            why = redact(trouble or mirror.trouble or "no answer", settings.mlflow)
            screen.print(
                f"{folder.name}: {missing:,} of {before:,} records are missing in {redact(settings.mlflow)}: {why}",
                soft_wrap=True,
                markup=False,
            )
            return False
        screen.print(
            f"{folder.name}: {before:,} records shipped, none is missing in {redact(settings.mlflow)}",
            soft_wrap=True,
            markup=False,
        )
        return True
    finally:
        ledger.close()


def _wait(mirror: Any, ledger: Ledger, name: str, timeout: float, screen: Console) -> int:
    """Until everything was shipped, or nothing moved for `timeout` seconds; how many records are missing."""
    missing = first = behind(ledger)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} records {task.fields[why]}", markup=False),
    )
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task(name, total=first, why="")
        moved = time.monotonic()
        while (missing or _unclosed(ledger)) and time.monotonic() - moved < timeout:
            time.sleep(_LOOK_SECONDS)
            mirror.hear()
            now = behind(ledger)
            moved = time.monotonic() if now < missing else moved
            missing = now
            progress.update(task, completed=first - missing, why=mirror.trouble or "")
    return missing


def _unclosed(ledger: Ledger) -> int:
    """Members that are over, and whose run in MLflow does not say so."""
    return sum(
        not member["closed"] and member["status"] not in ("pending", "running") for member in ledger.members()
    )


def _ended(ledger: Ledger) -> str:
    """The status of the sweep's run in MLflow, as the ledger has it."""
    found = {member["status"] for member in ledger.members()}
    return (
        "FINISHED"
        if found <= set(FINISHED) | {"pruned"}
        else "FAILED"
        if "failed" in found or "oom" in found
        else "KILLED"
    )
