"""`ablate plan X.yaml`: arms, trials, what is already done and what the rest would cost. Runs nothing,
imports no torch.
"""

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ablate.cli.common import Device, Profile, State, console, duration
from ablate.cli.recipe import placements
from ablate.cli.settings import Settings, find_settings
from ablate.errors import one_line
from ablate.execution.estimate import Load, Pace, time_left, unproposed
from ablate.execution.shared_prefixes import Family, note
from ablate.experiment.arms import Arm, KnobError
from ablate.experiment.edits import redefined, redefinition
from ablate.experiment.load import Experiment, load
from ablate.experiment.roles import role_of
from ablate.experiment.search_space import conditions
from ablate.experiment.trial_spec import TrialSpec
from ablate.experiment.yaml_document import display
from ablate.recipes.recipe import Layers
from ablate.results.ledger import Ledger
from ablate.results.trial_store import Store
from ablate.training.workloads.finetune import Finetune
from ablate.training.workloads.text import outlined

_START_SECONDS = {"ray": 8.0, "inline": 6.0}
"""The imports of this process and the proof of the numerics; on Ray its start, and torch in each worker."""
_ENOUGH = 0.5
"""The share of a model's matrices below which it is said that the rest is not quantised."""


def plan(
    file: Annotated[Path, typer.Argument(help="The experiment, a YAML file.")],
    state: State = None,
    profile: Profile = None,
    device: Device = None,
) -> None:
    """Say what an experiment would run, what of it is done, and what the rest would cost. Runs nothing."""
    settings = find_settings(profile, state=state, device=device)
    show(load(file, settings.device), settings)


@dataclass
class Forecast:
    """What a run of an experiment would do from here, and how long it would take."""

    rows: list[tuple[Arm, list[TrialSpec], int]] = field(default_factory=list)
    """The arms that the file names, their trials, and how many of those are done."""
    trials: int = 0
    """Trials to run of arms that are known."""
    later: int = 0
    """The most trials that a search may still propose, baselines and confirmation included."""
    grown: int = 0
    """The most trials of seeds that are added where arms stay undecided."""
    done: int = 0
    proposed: int = 0
    """Points that the search has proposed."""
    redefined: list[str] = field(default_factory=list)
    """Names of arms that stood for other trials when the sweep last ran."""
    alone: int = 0
    """Training steps of the trials to run that can share some, each computed for itself; of known arms."""
    resumed: int = 0
    """Those of them that lie before the trials' own checkpoints."""
    steps: int = 0
    """Steps that they compute when what they share is computed once."""
    seconds: float = 0.0
    """Of all trials to run, one after the other."""
    longest: float = 0.0
    measured: int = 0
    """Trials in the state folder that the seconds were learned from."""


def forecast(experiment: Experiment, state: Path, device: str) -> Forecast:
    """Count what a run of the experiment would do. Reads the trial store and the sweep's ledger, and opens no
    other file.
    """
    store, found = Store(state), Forecast()
    known = _known(experiment, state / "sweeps" / experiment.name / "ledger.db", store, device)
    pace, family = Pace(experiment, store, device), Family(note=note(experiment.telemetry))
    todo: dict[str, float] = {}
    finished = set(known.finished)
    for position, (arm, seeds) in enumerate(known.arms):
        specs = [experiment.spec(arm, seed, device) for seed in seeds]
        seconds = pace.seconds(Load.of(arm, experiment, device))
        done = {spec.id for spec in specs if spec.id in known.pruned or store.finished(spec.id)}
        finished |= done
        for spec in (
            specs
        ):  # those that are done, too: where a trial parts from one of them is where it leaves a state
            family.add(spec, store.checkpoint_step(spec.id))
            if spec.id not in done:
                todo[spec.id] = seconds
        if position < len(experiment.arms):
            found.rows.append((arm, specs, sum(spec.id in done for spec in specs)))
    named = {
        (arm.name, spec.seed): {"id": spec.id, "spec": spec.wire}
        for arm, specs, _ in found.rows
        for spec in specs
    }
    found.redefined = redefined(known.members, named)
    computed = family.steps(todo.keys(), {path.stem for path in (state / "checkpoints").glob("*.pt")})
    whole = {spec.id: spec.config.steps for spec in family if spec.id in todo}
    shared = {trial: computed[trial] / steps for trial, steps in whole.items()}
    parts = [seconds * shared.get(trial, 1.0) for trial, seconds in todo.items()]
    found.trials, found.done, found.proposed, found.measured = (
        len(todo),
        len(finished),
        known.proposed,
        pace.measured,
    )
    found.alone, found.steps = sum(whole.values()), sum(computed.values())
    found.resumed = sum(step for trial, step in family.resumed.items() if trial in todo)
    found.seconds, found.longest = sum(parts), max(parts, default=0.0)
    if known.ended and not todo:
        return found
    if experiment.growth:
        found.grown = sum(experiment.growth.most - len(seeds) for _, seeds in known.arms)
    asks = experiment.search.trials - known.proposed if experiment.search else 0
    for each, count in unproposed(experiment, asks, not known.confirmed, device).items():
        found.later += count
        found.seconds += count * pace.seconds(each)
        found.longest = max(found.longest, pace.seconds(each) if count else 0.0)
    return found


@dataclass
class _Known:
    """What the file names and what the sweep's ledger adds to it."""

    arms: list[tuple[Arm, tuple[int, ...]]]
    """With their seeds, those of the file first."""
    members: dict[tuple[str, int], Any] = field(default_factory=dict)
    """The ledger's members, by arm's name and seed."""
    proposed: int = 0
    finished: set[str] = field(default_factory=set)
    """Ids of the trials of proposed arms that need not run again; these arms are left out above."""
    pruned: set[str] = field(default_factory=set)
    confirmed: bool = False
    ended: bool = False
    """The last run of the same file left nothing to do."""


def _known(experiment: Experiment, path: Path, store: Store, device: str) -> _Known:
    known = _Known([(arm, experiment.seeds) for arm in experiment.arms])
    if path.exists():
        with (
            suppress(sqlite3.DatabaseError),
            closing(Ledger(path, readonly=True)) as ledger,
        ):  # damaged: a sweep refuses it
            _add_recorded(known, experiment, ledger, store, device)
    return known


def _add_recorded(known: _Known, experiment: Experiment, ledger: Ledger, store: Store, device: str) -> None:
    """Add the points that a search proposed, the seeds that arms have beside the file's, and what was given
    up.
    """
    rows = ledger.members()
    same = ledger.fact("experiment.yaml") == experiment.text
    known.members = {(row["name"], row["seed"]): row for row in rows}
    known.ended = same and ledger.fact("ended") == "done"
    known.pruned = {row["id"] for row in rows if row["status"] == "pruned"}
    members: dict[str, list[Any]] = {}
    for row in rows:
        members.setdefault(row["name"], []).append(row)
    if experiment.growth:
        known.arms = [(arm, _seeds(own, members.get(arm.name, []))) for arm, own in known.arms]
    if not experiment.search:
        return
    known.proposed = ledger.proposed()
    wanted = {"engine": experiment.engine, "device": device}
    named = {arm.name for arm in experiment.arms}
    for arm in ledger.arms():
        known.confirmed |= role_of(arm, True, 1) == "confirmed"
        first = experiment.seeds if arm["name"] in named else ()
        own = [row for row in members.get(arm["name"], []) if row["seed"] not in first]
        if same and all(_over(row, wanted, store, known.pruned) for row in own):
            known.finished |= {row["id"] for row in own}
        elif own:
            with suppress(KnobError):  # of an edited file
                known.arms.append((experiment.base.arm(json.loads(arm["knobs"])), _seeds((), own)))


def _seeds(first: tuple[int, ...], rows: list[Any]) -> tuple[int, ...]:
    """These seeds and those of the members."""
    return tuple(sorted({*first, *(row["seed"] for row in rows)}))


def _over(row: Any, wanted: dict[str, str], store: Store, pruned: set[str]) -> bool:
    """Return True if a member's trial, computed by the wanted engine and device, need not run again."""
    return wanted.items() <= json.loads(row["spec"]).items() and (
        row["id"] in pruned or store.finished(row["id"])
    )


def show(experiment: Experiment, settings: Settings) -> None:
    """Print the plan: arms, trials, what is done, and what the rest would cost on this class of device."""
    screen, where = console(), settings.device
    screen.print(Text(experiment.question, "bold"), "")
    found = forecast(experiment, settings.state, where)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("arm", "baseline", "trials", "done", "ids"):
        table.add_column(name)
    for arm, specs, done in found.rows:
        ids = " ".join(spec.id[:8] for spec in specs[:4]) + (" ..." if len(specs) > 4 else "")
        table.add_row(one_line(arm.name), one_line(arm.baseline or "-"), str(len(specs)), str(done), ids)
    screen.print(table)
    if experiment.search:
        proposed = f" ({found.proposed} proposed so far)" if found.proposed else ""
        screen.print(
            f"\nand {experiment.search.trials} arms that {experiment.search.sampler} proposes{proposed} within:"
        )
        for knob, dimension in experiment.space.items():
            screen.print(f"  {knob}: {one_line(_range(dimension))}")
    if experiment.engine_why:
        screen.print(f"\nEngine: {experiment.engine} (auto), since {experiment.engine_why}.", markup=False)
    elif experiment.engine != "emulated":
        screen.print(f"\nEngine: {experiment.engine}.")
    layout = experiment.resources.layout(where)
    if layout.ranks > 1:
        screen.print(
            f"\nEach trial is computed by {layout.ranks} ranks{', each with a part of the model' * layout.sharded}."
        )
    for arms, lines in policies(experiment):
        screen.print(
            f"\nLayers of arm {arms}:",
            *(f"  {line}" for line in lines),
            sep="\n",
            markup=False,
            soft_wrap=True,
        )
    for remark in remarks(experiment):
        screen.print(f"\nNote: {remark}", markup=False, soft_wrap=True)
    if found.redefined:
        screen.print(f"\nNote: {one_line(redefinition(found.redefined))}.", markup=False, soft_wrap=True)
    if found.resumed:
        screen.print(
            f"\nTrials that were interrupted go on from their checkpoints: {found.resumed:,} of {found.alone:,} steps are done."
        )
    if found.steps < (rest := found.alone - found.resumed):
        saved = f"{rest - found.steps:,} of {rest:,} steps are not run"
        screen.print(f"\nTrials that begin alike share what they have in common: {saved}.")
    counted = (
        f"{found.trials} trials to run"
        if not found.later
        else f"At most {found.trials + found.later} trials to run"
    )
    screen.print(
        f"\n{counted}, {found.done} done. {_cost(found, settings, layout.ranks)}",
        markup=False,
        soft_wrap=True,
    )
    if found.grown:
        screen.print(f"At most {found.grown} more trials, on more seeds, where arms stay undecided.")


def policies(experiment: Experiment) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names of arms whose layer policies select alike, with a line for each part of the policy; arms without
    a policy are left out.
    """
    arms: dict[tuple[str, ...], list[str]] = {}
    for arm in experiment.arms:
        if arm.recipe.layers != Layers() and arm.config.linear_layers:
            arms.setdefault(tuple(placements(arm.recipe, arm.config.linear_layers)), []).append(
                one_line(arm.name)
            )
    for lines, names in arms.items():
        yield ", ".join(map(repr, names[:3])) + f" and {len(names) - 3} more" * (len(names) > 3), lines


def remarks(experiment: Experiment) -> Iterator[str]:
    """What makes the experiment's answer weaker than it looks, though it can be run: each in a sentence."""
    yield from experiment.notes
    yield from _strays(experiment)
    yield from _idle_knobs(experiment)
    yield from _uncovered(experiment)


def _strays(experiment: Experiment) -> Iterator[str]:
    """Paths that are relative to the working directory: another one finds other files, or none."""
    if strays := experiment.base.strays:
        folder = experiment.base.folder
        yield (
            f"{', '.join(strays)}: found in the working directory and not beside the experiment file. Write paths relative to "
            f"{folder}: a later version looks only there."
        )


def _idle_knobs(experiment: Experiment) -> Iterator[str]:
    """Knobs that only turn what no trial computes: arms that differ in nothing else are equal."""
    idle: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for arms in (experiment.arms, *_ends(experiment)):
        computed: dict[Any, Arm] = {}
        for arm in arms:
            if isinstance(arm.config, Finetune) and arm.config.lora:
                twin = computed.setdefault((arm.content[0], arm.config.computed(arm.recipe)), arm)
                if twin.content != arm.content:
                    knobs = tuple(
                        sorted(
                            name
                            for name in {*arm.knobs, *twin.knobs}
                            if arm.knobs.get(name) != twin.knobs.get(name)
                        )
                    )
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
    configs = dict.fromkeys(
        (experiment.base.config, *(arm.config for arm in experiment.arms if not arm.recipe.plain))
    )
    models = {
        (config.model, config.data): config
        for config in configs
        if getattr(config, "model", None) is not None
    }
    for config in models.values():
        found = outlined(config.model, config.corpus)
        if found.covered < _ENOUGH:
            yield (
                f"workload.model: {found.covered:.0%} of the weights in its matrices (embeddings apart) are in layers that a recipe "
                f"quantises; the largest of the others, {found.left}, is no nn.Linear in a block and stays in high precision."
            )


def _range(dimension) -> str:
    only = ", ".join(f"{knob} is {display(value)}" for knob, value in dimension.when.items())
    found = (
        ", ".join(map(str, dimension.choices))
        or f"{dimension.low:g} to {dimension.high:g}{' (log)' if dimension.log else ''}"
    )
    return f"{found} (where {only})" if only else found


def _cost(found: Forecast, settings: Settings, ranks: int) -> str:
    missing = found.trials + found.later
    if not missing:
        return "Nothing would be run."
    here = settings.device == "cpu" and not settings.ray
    if settings.device == "cuda" and not found.measured:
        return "What that takes on this GPU is not known before a trial has run on it."
    own = max(1, (os.cpu_count() or 1) // ranks) if here else 1
    slots = min(missing, 1 if settings.executor == "inline" else settings.workers or own)
    unmeasured = 1 if found.measured else ranks  # a workload's cost is that of one core
    seconds = (
        time_left(found.seconds / unmeasured, found.longest / unmeasured, (), slots)
        + _START_SECONDS[settings.executor]
    )
    at_once = f"{slots} trials at once" if slots > 1 else "one trial at a time"
    basis = (
        f"learned from {found.measured} trials of this state folder"
        if found.measured
        else "nothing is measured yet"
    )
    return f"Roughly {duration(seconds)} with {at_once}; {basis}."
