"""`ablate plan X.yaml`: arms, trials, finished trials, and an estimate for the rest. Runs nothing, without
torch.
"""

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table
from rich.text import Text

from ablate.cli.common import console
from ablate.cli.options import Capability, DeviceFlags, ExperimentFile, JsonOption, Seeds, SweepFlags
from ablate.cli.recipe import placements
from ablate.cli.settings import Settings
from ablate.engines import makes_operands
from ablate.engines.hardware import Machine, rented_machine
from ablate.errors import InputError, one_line
from ablate.execution.estimate import Load, TimeModel, time_left, unproposed
from ablate.execution.machine_paces import MachinePaces
from ablate.execution.shared_prefixes import Family, note
from ablate.experiment.arms import Arm, KnobError
from ablate.experiment.edits import PlannedTrial, redefined, redefinition
from ablate.experiment.forked_design import CALIBRATION
from ablate.experiment.load import Experiment, load
from ablate.experiment.search_space import Dimension, conditions
from ablate.experiment.trial_spec import TrialSpec
from ablate.experiment.yaml_document import display
from ablate.files import Json
from ablate.recipes.gpu_kernels import on_reference
from ablate.recipes.recipe import Layers
from ablate.reports.plain_text import duration
from ablate.reports.tensor_cores import as_data as multiplied_data
from ablate.reports.tensor_cores import library, multiplied, on_reference_lines
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import Member
from ablate.store.trial_store import Store
from ablate.training.fork_design import Forks
from ablate.training.memory_estimate import MemoryEstimate, estimate
from ablate.training.workloads.finetune import Finetune
from ablate.training.workloads.gpt import Gpt
from ablate.training.workloads.own_code import OwnCode
from ablate.training.workloads.text import outlined

if TYPE_CHECKING:
    from ablate.results.calibration import Candidate

_START_SECONDS = {"ray": 8.0, "inline": 6.0}
"""Start-up time by executor: imports and the check of the numerics; with Ray also its start, and torch in
each worker.
"""
_LEAST_COVERED = 0.5
"""Fraction of a model's matrix weights in quantisable layers below which a note says so."""


def machine_of(capability: str | None, device: str | None) -> Machine | None:
    """Return the machine that `--capability` describes; None without it.

    Args:
        capability: compute capability, such as `10.0`.
        device: what `--device` says.

    Raises:
        InputError: there is no such capability, or the device is a CPU.
    """
    if capability is None:
        return None
    if device == "cpu":
        raise InputError(["--capability: describes a machine with a GPU, and --device is cpu"])
    try:
        return rented_machine(capability)
    except ValueError as error:
        raise InputError([f"--capability: {error}"]) from None


def settings_for(machine: Machine | None, flags: DeviceFlags | SweepFlags, **more: object) -> Settings:
    """Return the settings of a command; for another machine, as if this one had its GPU.

    Args:
        machine: what `--capability` describes; None without it.
        flags: the command's options.
        more: values of further options, by field of `Settings`.
    """
    if machine is None:
        return flags.settings(**more)
    return replace(flags.settings(**more | {"device": "cuda"}), device_note="")


def plan(
    file: ExperimentFile,
    flags: DeviceFlags,
    as_json: JsonOption = False,
    seeds: Seeds = None,
    capability: Capability = None,
) -> None:
    """Show the arms and trials of an experiment, how many are done, and an estimate of the time for the rest.
    Runs nothing.
    """
    machine = machine_of(capability, flags.device)
    settings = settings_for(machine, flags)
    experiment = load(file, settings.device, seeds, machine)
    if as_json:
        print(json.dumps(as_data(experiment, settings), indent=2))
    else:
        show(experiment, settings)


@dataclass
class Forecast:
    """Forecast of a run of an experiment: trials, training steps and seconds."""

    rows: list[tuple[Arm, list[TrialSpec], int]] = field(default_factory=list)
    """Each arm that the file names, its trials, and the number of those that are done."""
    trials: int = 0
    """Number of trials to run, of arms that exist already."""
    later: int = 0
    """Upper bound of the trials that a search may still propose, including baselines and confirmation."""
    grown: int = 0
    """Upper bound of the trials on added seeds, if arms stay undecided."""
    done: int = 0
    """Number of finished trials."""
    proposed: int = 0
    """Number of points that the search has proposed."""
    redefined: list[str] = field(default_factory=list)
    """Names of arms whose trials differ from those of the last run."""
    alone: int = 0
    """Training steps of the trials to run that can share a prefix, without sharing; of existing arms."""
    resumed: int = 0
    """Those of `alone` that the trials' own checkpoints save."""
    steps: int = 0
    """Steps that these trials compute when each shared prefix is computed once."""
    seconds: float = 0.0
    """Duration of all trials to run, one after the other."""
    longest: float = 0.0
    """Duration of the longest trial, in seconds."""
    measured: int = 0
    """Number of trials in the state folder on which the estimate of the seconds is based."""
    recalled: int = 0
    """Number of trials of other state folders on this machine on which it is based, too."""
    known: bool = True
    """False for a user's own code, of whose speed nothing is known before a trial has run."""


def forecast(experiment: Experiment, state: Path, device: str, paces: MachinePaces | None = None) -> Forecast:
    """Forecast a run of the experiment, from the trial store and the ledger of the sweep.

    `paces`: what this machine has measured for other state folders; None to leave it out.
    """
    store = Store(state)
    result = Forecast(known=not isinstance(experiment.base.config, OwnCode))
    recorded = _recorded(experiment, state / "sweeps" / experiment.name / "ledger.db", store, device)
    pace, family = TimeModel(experiment, store, device), Family(note=note(experiment.telemetry))
    if paces:
        pace.recall(paces.read())
    todo: dict[str, float] = {}
    finished = set(recorded.finished)
    for position, (arm, seeds) in enumerate(recorded.arms):
        specs = [experiment.spec(arm, seed, device) for seed in seeds]
        seconds = pace.seconds(Load.of(arm, experiment, device))
        done = {spec.id for spec in specs if spec.id in recorded.pruned or store.finished(spec.id)}
        finished |= done
        # Finished trials, too: a trial that shares a prefix with one starts from its checkpoint.
        for spec in specs:
            family.add(spec, store.checkpoint_step(spec.id))
            if spec.id not in done:
                todo[spec.id] = seconds
        if position < len(experiment.arms):
            result.rows.append((arm, specs, sum(spec.id in done for spec in specs)))
    named = {
        (arm.name, spec.seed): PlannedTrial(spec.id, spec.wire)
        for arm, specs, _ in result.rows
        for spec in specs
    }
    result.redefined = redefined(recorded.members, named)
    computed = family.steps(todo.keys(), {path.stem for path in (state / "checkpoints").glob("*.pt")})
    whole = {spec.id: spec.steps for spec in family if spec.id in todo}
    shared = {trial: computed[trial] / steps for trial, steps in whole.items()}
    parts = [seconds * shared.get(trial, 1.0) for trial, seconds in todo.items()]
    result.trials, result.done, result.proposed, result.measured = (
        len(todo),
        len(finished),
        recorded.proposed,
        pace.measured,
    )
    result.alone, result.steps = sum(whole.values()), sum(computed.values())
    result.resumed = sum(step for trial, step in family.resumed.items() if trial in todo)
    result.seconds, result.longest = sum(parts), max(parts, default=0.0)
    result.recalled = pace.recalled
    if recorded.ended and not todo:
        return result
    if experiment.growth:
        result.grown = sum(experiment.growth.most - len(seeds) for _, seeds in recorded.arms)
    asks = experiment.search.trials - recorded.proposed if experiment.search else 0
    for each, count in unproposed(experiment, asks, not recorded.confirmed, device).items():
        result.later += count
        result.seconds += count * pace.seconds(each)
        result.longest = max(result.longest, pace.seconds(each) if count else 0.0)
    result.recalled = pace.recalled
    return result


@dataclass
class _Recorded:
    """Arms of the experiment file and of the ledger of its sweep, and what the ledger records about them."""

    arms: list[tuple[Arm, tuple[int, ...]]]
    """Arms with their seeds, those of the file first."""
    members: dict[tuple[str, int], Member] = field(default_factory=dict)
    """Members of the ledger, by name of arm and seed."""
    proposed: int = 0
    """Number of points that the search has proposed."""
    finished: set[str] = field(default_factory=set)
    """Ids of the finished trials of proposed arms, which `arms` leaves out."""
    pruned: set[str] = field(default_factory=set)
    """Ids of pruned trials."""
    confirmed: bool = False
    """The search has begun to confirm its winner."""
    ended: bool = False
    """The last run of the same file finished all trials."""


def _recorded(experiment: Experiment, path: Path, store: Store, device: str) -> _Recorded:
    recorded = _Recorded([(arm, experiment.seeds) for arm in experiment.arms])
    if path.exists():  # a damaged ledger is skipped here; `ablate sweep` refuses it
        with suppress(sqlite3.DatabaseError), closing(Ledger(path, readonly=True)) as ledger:
            _add_ledger(recorded, experiment, ledger, store, device)
    return recorded


def _add_ledger(
    recorded: _Recorded, experiment: Experiment, ledger: Ledger, store: Store, device: str
) -> None:
    """Add the points that a search proposed, seeds beyond those of the file, and pruned trials."""
    rows = ledger.members()
    unchanged = ledger.fact("experiment.yaml") == experiment.text
    recorded.members = {(row.name, row.seed): row for row in rows}
    recorded.ended = unchanged and ledger.fact("ended") == "done"
    recorded.pruned = {row.id for row in rows if row.status == "pruned"}
    members: dict[str, list[Member]] = {}
    for row in rows:
        members.setdefault(row.name, []).append(row)
    if experiment.growth:
        recorded.arms = [(arm, _seeds(own, members.get(arm.name, []))) for arm, own in recorded.arms]
    if not experiment.search:
        return
    recorded.proposed = ledger.proposed()
    wanted = {"engine": experiment.engine, "device": device}
    named = {arm.name for arm in experiment.arms}
    for arm in ledger.arms():
        recorded.confirmed |= arm.role == "confirmed"
        first = experiment.seeds if arm.name in named else ()
        own = [row for row in members.get(arm.name, []) if row.seed not in first]
        if unchanged and all(_finished(row, wanted, store, recorded.pruned) for row in own):
            recorded.finished |= {row.id for row in own}
        elif own:
            with suppress(KnobError):  # the file was edited
                recorded.arms.append((experiment.base.arm(json.loads(arm.knobs)), _seeds((), own)))


def _seeds(first: tuple[int, ...], rows: list[Member]) -> tuple[int, ...]:
    """Return the union of these seeds and those of the members."""
    return tuple(sorted({*first, *(row.seed for row in rows)}))


def _finished(row: Member, wanted: dict[str, str], store: Store, pruned: set[str]) -> bool:
    """Return True if the member's trial is finished or pruned, on the wanted engine and class of device."""
    return wanted.items() <= json.loads(row.spec).items() and (row.id in pruned or store.finished(row.id))


def show(experiment: Experiment, settings: Settings) -> None:
    """Print the plan: arms, trials, how many are done, and the time for the rest on this class of device."""
    screen = console()
    screen.print(Text(experiment.question, "bold"), "")
    result = forecast(experiment, settings.state, settings.device, _paces(experiment, settings))
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("arm", "baseline", "trials", "done", "ids"):
        table.add_column(name)
    for arm, specs, done in result.rows:
        ids = " ".join(spec.id[:8] for spec in specs[:4]) + (" ..." if len(specs) > 4 else "")
        table.add_row(one_line(arm.name), one_line(arm.baseline or "-"), str(len(specs)), str(done), ids)
    screen.print(table)
    if experiment.search:
        proposed = f" ({result.proposed} proposed so far)" if result.proposed else ""
        search = f"{experiment.search.trials} arms that {experiment.search.sampler} proposes{proposed}"
        screen.print(f"\nand {search} within:")
        for knob, dimension in experiment.space.items():
            screen.print(f"  {knob}: {one_line(_range(dimension))}")
    if experiment.design and (first := experiment.forks(experiment.arms[0])):
        screen.print(f"\nForks: {one_line(_windows(first))}.", markup=False, soft_wrap=True)
    if experiment.engine_why:
        screen.print(f"\nEngine: {experiment.engine} (auto), since {experiment.engine_why}.", markup=False)
    elif experiment.engine != "emulated":
        screen.print(f"\nEngine: {experiment.engine}{library(experiment.engine)}.")
    layout = experiment.resources.layout(settings.device)
    if layout.ranks > 1:
        sharded = ", each with a part of the model" * layout.sharded
        screen.print(f"\nEach trial is computed by {layout.ranks} ranks{sharded}.")
    for arms, lines in multiplied(experiment):
        screen.print(f"Products of arm {arms}:", *(f"  {line}" for line in lines), sep="\n", markup=False)
    for arms, lines in on_reference_lines(experiment, settings.device):
        screen.print(f"\nOn a GPU, arm {arms}: {lines[0]}.", markup=False, soft_wrap=True)
    for arms, lines in policies(experiment):
        screen.print(
            f"\nLayers of arm {arms}:",
            *(f"  {line}" for line in lines),
            sep="\n",
            markup=False,
            soft_wrap=True,
        )
    if largest := memory(experiment, settings.device):
        name, needed = largest
        parts = ", ".join(f"{name} {_size(size)}" for name, size in needed._asdict().items())
        screen.print(
            f"\nGPU memory of a trial: at most about {_size(needed.total)} beside CUDA's own, by arm"
            f" {one_line(name)} ({parts}).",
            markup=False,
            soft_wrap=True,
        )
    for remark in (*filter(None, [settings.device_note]), *remarks(experiment)):
        screen.print(f"\nNote: {remark}", markup=False, soft_wrap=True)
    if result.redefined:
        screen.print(f"\nNote: {one_line(redefinition(result.redefined))}.", markup=False, soft_wrap=True)
    if result.resumed:
        steps = f"{result.resumed:,} of {result.alone:,} steps are done"
        screen.print(f"\nInterrupted trials continue from their checkpoints: {steps}.")
    if result.steps < (rest := result.alone - result.resumed):
        saved = f"{rest - result.steps:,} of {rest:,} steps are not run"
        screen.print(f"\nTrials with a common prefix compute it once: {saved}.")
    bound = "At most " if result.later else ""
    counts = f"{bound}{result.trials + result.later} trials to run, {result.done} done."
    screen.print(f"\n{counts} {_duration_text(result, settings, layout.ranks)}", markup=False, soft_wrap=True)
    if width := expected_width(experiment, settings.state):
        screen.print(f"Expected half-width of a 95 % interval: {width}.", markup=False, soft_wrap=True)
    if result.grown:
        screen.print(f"At most {result.grown} more trials, on more seeds, if arms stay undecided.")


def _paces(experiment: Experiment, settings: Settings) -> MachinePaces | None:
    return MachinePaces.of(experiment, settings.device, settings.ray is not None)


def _windows(forks: Forks) -> str:
    """Return the windows of a forked design in words."""
    *rest, last = map(str, forks.windows)
    lengths = f"{', '.join(rest)} and {last} steps" if rest else f"{last} steps"
    where = (
        f"after steps {', '.join(map(str, forks.positions))} of a trunk"
        if forks.trunk
        else "from the weights that the workload starts from"
    )
    rate = ", the rate falling to zero" if forks.anneal else ""
    return f"every arm trains windows of {lengths} {where}{rate}"


def expected_width(experiment: Experiment, state: Path) -> str:
    """Return the half-width that the experiment's calibration promises for its design and seeds, as text;
    empty without a calibration.
    """
    chosen = _planned(experiment, state)
    if chosen is None:
        return ""
    from ablate.results.intervals import Interval

    seeds = len(experiment.seeds)
    interval = Interval.parse(experiment.growth.interval if experiment.growth else "t")
    likely, careful = (chosen.half_width(seeds, careful, interval) for careful in (False, True))
    return f"{likely:.2g} with {seeds} seeds (at most {careful:.2g} with a chance of 80 %; {chosen.name})"


def _planned(experiment: Experiment, state: Path) -> "Candidate | None":
    """Return what a calibration found of the experiment's design; None without one."""
    if not (state / "sweeps" / f"{experiment.name}{CALIBRATION}" / "ledger.db").exists():
        return None
    from ablate.results.calibration import (
        planned,  # imports numpy and scipy: only if there is something to read
    )

    return planned(experiment, state)


def _on_reference(experiment: Experiment, arm: Arm, device: str) -> Json:
    """Return the quantised operands of an arm that no GPU kernel makes; None on a CPU."""
    if device != "cuda" or not makes_operands(experiment.engine):
        return None
    return list(on_reference(arm.recipe).slots)


def as_data(experiment: Experiment, settings: Settings) -> dict[str, Json]:
    """Return the plan as JSON data: what `show` prints."""
    result = forecast(experiment, settings.state, settings.device, _paces(experiment, settings))
    layout = experiment.resources.layout(settings.device)
    time = _time_needed(result, settings, layout.ranks)
    return {
        "sweep": experiment.name,
        "question": experiment.question,
        "engine": experiment.engine,
        "engine_why": experiment.engine_why,
        "products": multiplied_data(experiment),
        "device": settings.device,
        "ranks": layout.ranks,
        "arms": [
            {
                "arm": arm.name,
                "baseline": arm.baseline,
                "knobs": dict(arm.knobs),
                "operands_on_reference": _on_reference(experiment, arm, settings.device),
                "trials": [{"seed": spec.seed, "id": spec.id} for spec in specs],
                "done": done,
            }
            for arm, specs, done in result.rows
        ],
        "search": {"trials": experiment.search.trials, "proposed": result.proposed}
        if experiment.search
        else None,
        "to_run": result.trials,
        "to_run_later_at_most": result.later + result.grown,
        "done": result.done,
        "steps": result.steps,
        "seconds": time.seconds if time else None,
        "at_once": time.at_once if time else None,
        "measured_trials": result.measured,
        "recalled_trials": result.recalled,
        "changed_arms": list(result.redefined),
        "expected_half_width": width.half_width(len(experiment.seeds))
        if (width := _planned(experiment, settings.state))
        else None,
        "notes": list(remarks(experiment)),
    }


def memory(experiment: Experiment, device: str) -> tuple[str, MemoryEstimate] | None:
    """Return the name of the arm whose trials need most memory on a GPU, and how much.

    None for a CPU, several ranks, another engine than the emulated one, or where nothing is known.
    """
    if device != "cuda" or experiment.engine != "emulated" or experiment.resources.layout(device).ranks > 1:
        return None
    needed = [
        (arm.name, size)
        for arm in experiment.arms
        if isinstance(arm.config, Gpt) and (size := estimate(arm.config, arm.recipe, device))
    ]
    return max(needed, key=lambda each: each[1].total, default=None)


def _size(number: int) -> str:
    """Return a number of bytes as text, as in `5.1 MB`."""
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def policies(experiment: Experiment) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield names of arms whose layer policies select the same layers, and one line for each part of the
    policy.

    Arms without a layer policy are left out.
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
    """Yield one sentence for each weakness of an experiment that can run all the same."""
    yield from experiment.notes
    yield from _idle_knobs(experiment)
    yield from _uncovered(experiment)


def _idle_knobs(experiment: Experiment) -> Iterator[str]:
    """Yield a note for each set of knobs without any effect: arms that differ only in them are equal."""
    idle: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for arms in (experiment.arms, *_extremes(experiment)):
        computed: dict[tuple[object, object], Arm] = {}
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
        equal = f"arms {first!r} and {second!r} are equal{more}"
        yield f"{' and '.join(knobs)}: only changes wgrad, and {frozen}: {equal}."


def _extremes(experiment: Experiment) -> Iterator[list[Arm]]:
    """Yield, for each knob of a search, the arms at the ends of its range."""
    for knob, dimension in experiment.space.items() if experiment.search else ():
        arms = []
        for value in dimension.ends():
            with suppress(KnobError):  # the value is only valid with one of another knob
                arms.append(experiment.base.arm(conditions(knob, experiment.space) | {knob: value}))
        yield arms


def _uncovered(experiment: Experiment) -> Iterator[str]:
    """Yield a note for each model of another library if most of its matrix weights cannot be quantised."""
    configs = dict.fromkeys(
        (experiment.base.config, *(arm.config for arm in experiment.arms if not arm.recipe.plain))
    )
    models = {
        (config.model, config.data): outlined(config.model, config.corpus)
        for config in configs
        if isinstance(config, Gpt | Finetune) and config.model is not None
    }
    for outline in models.values():
        if outline.covered < _LEAST_COVERED:
            yield (
                f"workload.model: {outline.covered:.0%} of its matrix weights, without embeddings, "
                "are in layers that a recipe quantises. The largest of the others stays in high precision, "
                f"{outline.largest_uncovered}."
            )


def _range(dimension: Dimension) -> str:
    only = ", ".join(f"{knob} is {display(value)}" for knob, value in dimension.when.items())
    choices = ", ".join(map(str, dimension.choices))
    values = choices or f"{dimension.low:g} to {dimension.high:g}{' (log)' if dimension.log else ''}"
    return f"{values} (if {only})" if only else values


class _Time(NamedTuple):
    """Estimated duration of a run, and the number of trials at once."""

    seconds: float
    at_once: int


def _duration_text(result: Forecast, settings: Settings, ranks: int) -> str:
    """Return a sentence with the estimated duration of the run."""
    if not result.trials + result.later:
        return "Nothing to run."
    time = _time_needed(result, settings, ranks)
    if time is None:
        what = "of this code has run here" if not result.known else "has run on this GPU"
        return f"No estimate of the time: no trial {what} yet."
    at_once = f"{time.at_once} trials at once" if time.at_once > 1 else "one trial at a time"
    basis = (
        f"based on {result.measured} trials of this state folder"
        if result.measured
        else "not based on measurements yet"
    )
    if result.recalled:
        also = f"{basis} and on " if result.measured else "based on "
        basis = f"{also}{result.recalled} trials measured on this machine before"
    return f"Roughly {duration(time.seconds)} with {at_once}; {basis}."


def _time_needed(result: Forecast, settings: Settings, ranks: int) -> _Time | None:
    """Return the estimated duration of the run; None if there is nothing to base it on."""
    missing = result.trials + result.later
    if not missing:
        return _Time(0.0, 1)
    local_cpu = settings.device == "cpu" and not settings.ray
    measured = result.measured + result.recalled
    if not measured and (settings.device == "cuda" or not result.known):
        return None
    own = max(1, (os.cpu_count() or 1) // ranks) if local_cpu else 1
    slots = min(missing, 1 if settings.executor == "inline" else settings.workers or own)
    unmeasured = 1 if measured else ranks  # without measurements, the cost of a workload is that of one core
    seconds = (
        time_left(result.seconds / unmeasured, result.longest / unmeasured, (), slots)
        + _START_SECONDS[settings.executor]
    )
    return _Time(seconds, slots)
