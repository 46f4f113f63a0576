"""`ablate plan X.yaml`: arms, trials, what is already done and what the rest would cost. Runs nothing, imports no torch."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ablate.cli import Device, Profile, State, alone, console, duration
from ablate.experiment import Experiment, load
from ablate.forks import Family
from ablate.place import find
from ablate.store import Store
from ablate.yamlfile import display

_START_SECONDS = 8.0
"""Ray, and torch in each worker."""


def plan(
    file: Annotated[Path, typer.Argument(help="The experiment, a YAML file.")],
    state: State = None,
    profile: Profile = None,
    device: Device = None,
) -> None:
    """Say what an experiment would run, what of it is done, and what the rest would cost. Runs nothing."""
    place = find(profile, state=state, device=device)
    show(load(file, place.device), place.state, place.device)


def show(experiment: Experiment, state: Path, where: str) -> None:
    """Print the plan: arms, trials, what is done, and what the rest would cost on this class of device."""
    store = Store(state)
    screen = console()
    screen.print(f"[bold]{experiment.question}[/]\n")
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("arm", "baseline", "trials", "done", "ids"):
        table.add_column(name)
    seconds, missing, seen, family = 0.0, 0, set(), Family()
    for arm in experiment.arms:
        specs = [experiment.spec(arm, seed, where) for seed in experiment.seeds]
        ids = [spec.id for spec in specs]
        done = [trial for trial in ids if store.result(trial) is not None]
        new = set(ids) - set(done) - seen
        seen |= set(ids)
        missing += len(new)
        for spec in specs:
            if spec.id in new:
                family.add(spec)
        seconds += len(new) * arm.config.cost(not arm.recipe.plain)
        table.add_row(
            arm.name,
            arm.baseline or "-",
            str(len(ids)),
            str(len(done)),
            " ".join(trial[:8] for trial in ids[:4]) + (" ..." if len(ids) > 4 else ""),
        )
    screen.print(table)
    searched = _searched(experiment)
    if searched:
        missing += searched
        seconds += searched * experiment.base.config.cost(quantised=True)
        screen.print(f"\nand {experiment.search.trials} arms that {experiment.search.sampler} proposes within:")
        for knob, dimension in experiment.space.items():
            screen.print(f"  {knob}: {_range(dimension)}")
    if experiment.engine_why:
        screen.print(f"\nEngine: {experiment.engine} (auto), since {experiment.engine_why}.", markup=False)
    elif experiment.engine != "emulated":
        screen.print(f"\nEngine: {experiment.engine}.")
    alone, together = family.steps()
    if together < alone:
        screen.print(f"\nTrials that begin alike share what they have in common: {alone - together:,} of {alone:,} steps are not run.")
        seconds *= together / alone
    screen.print(f"\n{missing} trials to run, {len(seen) + searched - missing} done. {_cost(missing, seconds, where)}")


def _searched(experiment: Experiment) -> int:
    return experiment.search.trials * len(experiment.seeds) if experiment.search else 0


def _range(dimension) -> str:
    only = ", ".join(f"{knob} is {display(value)}" for knob, value in dimension.when.items())
    found = ", ".join(map(str, dimension.choices)) or f"{dimension.low:g} to {dimension.high:g}{' (log)' if dimension.log else ''}"
    return f"{found} (where {only})" if only else found


def _cost(missing: int, seconds: float, device: str) -> str:
    if not missing:
        return "Nothing would be run."
    if device == "cuda":
        return "What that takes on this GPU is not known."
    cores = min(missing, os.cpu_count() or 1)
    return (
        f"Roughly {duration(seconds / cores + _START_SECONDS)} on this machine's {os.cpu_count()} cores ({duration(seconds)} of one core)."
    )


if __name__ == "__main__":
    alone(plan)
