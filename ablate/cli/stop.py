"""`ablate stop` and `ablate workers`: orders for the controller that runs a sweep. Names are checked before
anything is ordered.
"""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ablate.cli.common import Profile, State, console
from ablate.cli.settings import find_settings
from ablate.errors import InputError, nearest
from ablate.execution.sweep_control import folders, give, holder
from ablate.results.ledger import Ledger

_TAKEN_SECONDS = 15.0
"""A controller looks for orders a few times a second, but for when it starts, or waits for a file system."""

Sweep = Annotated[str, typer.Argument(metavar="X", help="A sweep that runs, by name or by YAML file.")]


def stop(
    sweep: Sweep,
    arm: Annotated[str | None, typer.Option(help="Only this arm, by name.")] = None,
    trial: Annotated[
        str | None, typer.Option(help="Only this trial, by its id or the beginning of it.")
    ] = None,
    state: State = None,
    profile: Profile = None,
) -> None:
    """Stop a sweep that runs, or one arm or one trial of it. Nothing is lost: the sweep's command, given
    again, goes on with it.
    """
    if arm is not None and trial is not None:
        raise InputError(["--arm and --trial: give one of them"])
    folder = _running(sweep, state, profile)
    members = _members(folder)
    if arm is not None:
        order, said = {"stop": "arm", "name": arm}, _arm(arm, members)
    elif trial is not None:
        member = _trial(trial, members)
        order, said = {"stop": "trial", "id": member["id"]}, _said(f"Trial {member['id']}", [member])
    else:
        order, said = (
            {"stop": "sweep"},
            f"{_said('The sweep', members)} Its command then ends with status 130.",
        )
    _give(folder, order, said)


def workers(
    sweep: Sweep,
    count: Annotated[int, typer.Argument(min=1, metavar="N", help="Trials at once from now on.")],
    state: State = None,
    profile: Profile = None,
) -> None:
    """Add workers to a sweep that runs, or take some away. What runs is not ended: fewer means that no more
    are started.
    """
    folder = _running(sweep, state, profile)
    _give(
        folder,
        {"workers": count},
        f"{count} trials at once from now on, where the machine or the cluster has room for them.",
    )


def _running(sweep: str, state: Path | None, profile: str | None) -> Path:
    """The folder of a sweep that somebody runs."""
    (folder,) = folders(find_settings(profile, state=state).state, [sweep])
    if holder(folder) is None:
        raise InputError([f"{folder.name}: nobody runs this sweep; there is nothing to stop or change"])
    return folder


def _members(folder: Path) -> list[Any]:
    ledger = Ledger(folder / "ledger.db", readonly=True)
    members = ledger.members()
    ledger.close()
    return members


def _arm(name: str, members: list[Any]) -> str:
    mine = [member for member in members if member["name"] == name]
    if not mine:
        raise InputError(
            [
                f"--arm {name}: no such arm; {nearest(name, dict.fromkeys(member['name'] for member in members))}"
            ]
        )
    return _said(f"Arm {name}", mine)


def _trial(beginning: str, members: list[Any]) -> Any:
    known = {member["id"]: member for member in members}
    found = [trial for trial in known if trial.startswith(beginning)]
    if not found:
        raise InputError([f"--trial {beginning}: no such trial; {nearest(beginning, known)}"])
    if len(found) > 1:
        raise InputError([f"--trial {beginning}: {len(found)} trials begin so: {', '.join(found[:6])}"])
    return known[found[0]]


def _said(what: str, members: list[Any]) -> str:
    """What will happen; InputError where there is nothing left to stop."""
    status = {member["id"]: member["status"] for member in members}
    runs, waits = (sum(found == wanted for found in status.values()) for wanted in ("running", "pending"))
    if not runs and not waits:
        raise InputError(
            [f"{what} is over ({', '.join(sorted(set(status.values())))}): there is nothing to stop"]
        )
    ended = f"{_trials(runs)} that {'runs is' if runs == 1 else 'run are'} ended" if runs else ""
    dropped = f"{_trials(waits)} that {'waits is' if waits == 1 else 'wait are'} not started" if waits else ""
    return f"{what}: {' and '.join(filter(None, (ended, dropped)))}; all keep what they recorded."


def _trials(number: int) -> str:
    return f"{number} trial{'' if number == 1 else 's'}"


def _give(folder: Path, order: dict[str, Any], said: str) -> None:
    """Leave the order, say what it does, and wait a moment to see it taken. One that nobody lives to take is
    taken back.
    """
    screen = console()
    order_file = give(folder, order)
    screen.print(said, soft_wrap=True, markup=False)
    deadline = time.monotonic() + _TAKEN_SECONDS
    while order_file.exists() and time.monotonic() < deadline:
        if holder(folder) is None and _taken_back(order_file):
            raise InputError([f"{folder.name}: its controller ended before it could take the order"])
        time.sleep(0.05)
    screen.print(
        f"{folder.name} is busy, and takes the order as soon as it can." if order_file.exists() else "Taken.",
        soft_wrap=True,
        markup=False,
    )


def _taken_back(order_file: Path) -> bool:
    try:
        order_file.unlink()
    except FileNotFoundError:  # taken at the last moment
        return False
    return True
