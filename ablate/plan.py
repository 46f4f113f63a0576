"""`ablate plan X.yaml`: arms, trials, what is already done and what the rest would cost. Runs nothing, imports no torch."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ablate.arms import Arm, KnobError
from ablate.cli import Device, Profile, State, alone, console, duration
from ablate.experiment import Experiment, load
from ablate.forks import Family
from ablate.place import find
from ablate.space import conditions
from ablate.store import Store
from ablate.workloads.finetune import Finetune
from ablate.workloads.text import outlined
from ablate.yamlfile import display

_START_SECONDS = 8.0
"""Ray, and torch in each worker."""
_ENOUGH = 0.5
"""The share of a model's matrices below which it is said that the rest is not quantised."""


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
    layout = experiment.resources.layout(where)
    if layout.ranks > 1:
        screen.print(f"\nEach trial is computed by {layout.ranks} ranks{', each with a part of the model' * layout.sharded}.")
    for remark in remarks(experiment):
        screen.print(f"\nNote: {remark}", markup=False, soft_wrap=True)
    alone, together = family.steps()
    if together < alone:
        screen.print(f"\nTrials that begin alike share what they have in common: {alone - together:,} of {alone:,} steps are not run.")
        seconds *= together / alone
    screen.print(f"\n{missing} trials to run, {len(seen) + searched - missing} done. {_cost(missing, seconds, where)}")


def remarks(experiment: Experiment) -> Iterator[str]:
    """What makes the experiment's answer weaker than it looks, though it can be run: each in a sentence."""
    yield from _idle_knobs(experiment)
    yield from _uncovered(experiment)


def _idle_knobs(experiment: Experiment) -> Iterator[str]:
    """Knobs that only turn what no trial computes: arms that differ in nothing else are equal."""
    idle: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for arms in (experiment.arms, *_ends(experiment)):
        computed: dict[Any, Arm] = {}
        for arm in arms:
            if isinstance(arm.config, Finetune) and arm.config.lora:
                twin = computed.setdefault((arm.content[0], arm.config.computed(arm.recipe)), arm)
                if twin.content != arm.content:
                    knobs = tuple(sorted(name for name in {*arm.knobs, *twin.knobs} if arm.knobs.get(name) != twin.knobs.get(name)))
                    idle.setdefault(knobs, []).append((twin.name, arm.name))
    for knobs, pairs in idle.items():
        frozen = "under workload.lora the quantised layers' weights are frozen, so no wgrad is computed"
        first, second = pairs[0]
        more = f" (and {len(pairs) - 1} more such pairs)" if pairs[1:] else ""
        yield f"{' and '.join(knobs)}: turns wgrad alone, and {frozen}: arms {first!r} and {second!r} are equal{more}."


def _ends(experiment: Experiment) -> Iterator[list[Arm]]:
    """Of a search, for each knob the arms at its ends."""
    for knob, dimension in experiment.space.items() if experiment.search else ():
        arms = []
        for value in dimension.ends():
            with suppress(KnobError):  # a value that needs another knob's
                arms.append(experiment.base.arm(conditions(knob, experiment.space) | {knob: value}))
        yield arms


def _uncovered(experiment: Experiment) -> Iterator[str]:
    """Models of other libraries of whose matrices the recipe reaches less than half."""
    configs = dict.fromkeys((experiment.base.config, *(arm.config for arm in experiment.arms if not arm.recipe.plain)))
    models = {(config.model, config.data): config for config in configs if getattr(config, "model", None) is not None}
    for config in models.values():
        found = outlined(config.model, config.corpus)
        if found.covered < _ENOUGH:
            yield (
                f"workload.model: {found.covered:.0%} of the weights in its matrices (embeddings apart) are in layers that a recipe "
                f"quantises; the largest of the others, {found.left}, is no nn.Linear in a block and stays in high precision."
            )


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
