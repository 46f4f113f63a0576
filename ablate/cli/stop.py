"""`ablate stop`: orders to the controller of a running sweep. Names are checked first."""

import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated

import typer

from ablate.cli.common import console
from ablate.cli.options import Flags, complete_sweeps
from ablate.errors import InputError, nearest
from ablate.execution.sweep_control import Order, give, holder
from ablate.store.checked_ledger import folders
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import Member

_ACCEPT_SECONDS = 15.0
"""Time to wait for the controller to accept an order. It checks a few times a second, except while it starts
or waits for a file system.
"""


def stop(
    sweep: Annotated[str, typer.Argument(metavar="X", autocompletion=complete_sweeps)],
    flags: Flags,
    arm: str | None = None,
    trial: str | None = None,
    workers: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Stop a running sweep, or one arm or one trial of it. Results are kept: the same sweep command continues
    it.

    Or change its number of workers: running trials continue; with fewer workers, no new ones start yet.

    Args:
        sweep: A running sweep, by name or by YAML file.
        arm: Stop only this arm, given by name.
        trial: Stop only this trial, given by its id or a prefix of it.
        workers: Stop nothing: run this many trials at once from now on.
    """
    options = {"--arm": arm, "--trial": trial, "--workers": workers}
    if len(given := [option for option, value in options.items() if value is not None]) > 1:
        raise InputError(f"{given[0]} and {given[1]}: both were given; give one of them")
    (folder,) = folders(flags.settings().state, [sweep])
    if holder(folder) is None:
        raise InputError(f"{folder.name}: this sweep is not running; there is nothing to stop or change")
    order: Order
    if workers is not None:
        order = {"workers": workers}
        effect = f"{workers} trials at once from now on, if the machine or the cluster has room for them."
    else:
        order, effect = _stop_order(folder, arm, trial)
    screen, order_file = console(), give(folder, order)
    screen.lines(effect)
    deadline = time.monotonic() + _ACCEPT_SECONDS
    while order_file.exists() and time.monotonic() < deadline:
        if holder(folder) is None:
            with suppress(FileNotFoundError):  # accepted at the last moment
                order_file.unlink()
                raise InputError(f"{folder.name}: its controller ended before it accepted the order")
        time.sleep(0.05)
    pending = f"{folder.name} is busy; it accepts the order as soon as it can."
    screen.lines(pending if order_file.exists() else "Accepted.")


def _stop_order(folder: Path, arm: str | None, trial: str | None) -> tuple[Order, str]:
    """Return the order that stops an arm, a trial or, without both, the sweep, and its effect."""
    with closing(Ledger(folder / "ledger.db", readonly=True)) as ledger:
        members = ledger.members()
    if arm is not None:
        if not (selected := [member for member in members if member.name == arm]):
            hint = nearest(arm, dict.fromkeys(member.name for member in members))
            raise InputError(f"--arm {arm}: no such arm; {hint}")
        return {"stop": "arm", "name": arm}, _stop_effect(f"Arm {arm}", selected)
    if trial is not None:
        if not trial:
            raise InputError(
                "--trial: it is empty; give the first digits of a trial's id, as `ablate status` has it"
            )
        trials = {member.id: member for member in members}
        if not (matches := [each for each in trials if each.startswith(trial)]):
            raise InputError(f"--trial {trial}: no such trial; {nearest(trial, trials)}")
        if len(matches) > 1:
            listed = f"{len(matches)} trials have this prefix: {', '.join(matches[:6])}"
            raise InputError(f"--trial {trial}: {listed}; give more digits")
        effect = _stop_effect(f"Trial {matches[0]}", [trials[matches[0]]])
        return {"stop": "trial", "id": matches[0]}, effect
    effect = f"{_stop_effect('The sweep', members)} Its command then ends with status 130."
    return {"stop": "sweep"}, effect


def _stop_effect(subject: str, members: list[Member]) -> str:
    counts = Counter({member.id: member.status for member in members}.values())
    parts = [
        f"{counts[status]} {name} trial{'' if counts[status] == 1 else 's'} will {end}"
        for status, name, end in (
            ("running", "running", "be ended"),
            ("pending", "waiting", "not be started"),
        )
        if counts[status]
    ]
    if not parts:
        raise InputError(
            f"{subject} has already ended ({', '.join(sorted(counts))}): there is nothing to stop"
        )
    return f"{subject}: {' and '.join(parts)}; records are kept."
