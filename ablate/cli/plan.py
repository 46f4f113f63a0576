"""`ablate plan X.yaml`: arms, trials, finished trials, and an estimate for the rest. Runs no trial, and
imports torch only to try functions that recipes name."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from ablate.cli.common import Screen, console, plain_table
from ablate.cli.options import Capability, DeviceFlags, ExperimentFile, JsonOption, Seeds, SweepFlags
from ablate.cli.settings import Settings
from ablate.engines import makes_operands
from ablate.engines.gpu_access import visible_gpus
from ablate.engines.hardware import Machine, rented_machine
from ablate.errors import InputError, as_input_error, one_line
from ablate.execution.forecast import Forecast, TimeNeeded, forecast, time_needed
from ablate.execution.sweep_facts import blame_facts
from ablate.execution.time_model import MachinePaces
from ablate.experiment.edits import redefinition
from ablate.experiment.forked_design import CALIBRATION
from ablate.experiment.load import Experiment, load
from ablate.experiment.plan_notes import commands, memory, own_functions, policies, remarks
from ablate.experiment.predicted_order import predicted_order
from ablate.experiment.search_space import Dimension
from ablate.experiment.yaml_document import display
from ablate.files import Json
from ablate.recipes.gpu_kernels import on_reference
from ablate.reports.plain_text import duration
from ablate.reports.tensor_cores import as_data as multiplied_data
from ablate.reports.tensor_cores import library, multiplied, on_reference_lines
from ablate.training.fork_design import Forks

_MOST_COMMANDS = 12
"""Largest number of commands that a plan prints."""

if TYPE_CHECKING:
    from ablate.results.calibration import Candidate


def machine_of(capability: str | None, device: str | None) -> Machine | None:
    """Return the machine that `--capability` (such as `10.0`) describes; None without it. InputError if there
    is no such capability, or `--device` is a CPU."""
    if capability is None:
        return None
    if device == "cpu":
        raise InputError("--capability: describes a machine with a GPU, and --device is cpu")
    with as_input_error(ValueError, before="--capability: "):
        return rented_machine(capability)


def read(
    file: Path,
    flags: DeviceFlags | SweepFlags,
    seeds: int | None,
    capability: str | None,
    **more: object,
) -> tuple[Settings, Experiment]:
    """Return the settings of a command and its experiment; for another machine, which `--capability`
    describes, as if this one had its GPU. `more`: values of further options, by field of `Settings`.
    InputError also if a function that a recipe names breaks its contract, before any trial runs."""
    if machine := machine_of(capability, flags.device):
        settings = replace(flags.settings(**more | {"device": "cuda"}), device_note="")
        return settings, load(file, settings.device, seeds, machine)
    settings = flags.settings(**more)
    experiment = load(file, settings.device, seeds)
    if functions := own_functions(experiment):
        from ablate.verification.function_checks import require  # torch: only if there is something to try

        require(file, functions, settings.device)
    return settings, experiment


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
    settings, experiment = read(file, flags, seeds, capability)
    if as_json:
        console(as_json).document(as_data(experiment, settings))
    else:
        show(experiment, settings)


def show(experiment: Experiment, settings: Settings) -> None:
    """Print the plan: arms, trials, how many are done, and the time for the rest on this class of device."""
    screen = console()
    screen.print(Text(experiment.keys.question, "bold"), "")
    result, time = _forecast(experiment, settings)
    _print_arms(screen, experiment, result)
    screen.lines(*_computation(experiment, settings.device), *predicted_order(experiment))
    screen.lines(*_work(experiment, settings, result, time))


def _print_arms(screen: Screen, experiment: Experiment, result: Forecast) -> None:
    rows = []
    for arm, specs, done in result.rows:
        ids = " ".join(spec.id[:8] for spec in specs[:4]) + (" ..." if len(specs) > 4 else "")
        rows.append((one_line(arm.name), one_line(arm.baseline or "-"), str(len(specs)), str(done), ids))
    screen.print(plain_table("arm", "baseline", "trials", "done", "ids", rows=rows))
    if search := experiment.keys.search:
        proposed = f" ({result.proposed} proposed so far)" if result.proposed else ""
        screen.print(f"\nand {search.trials} arms that {search.sampler} proposes{proposed} within:")
        for knob, dimension in experiment.space.items():
            screen.print(f"  {knob}: {one_line(_range(dimension))}")
    if experiment.blamed:
        from ablate.results.blame import planned  # scipy: only if there is such a search

        screen.lines(f"\n{one_line(planned(*experiment.blamed[::2]))}")


def _computation(experiment: Experiment, device: str) -> Iterator[str]:
    if experiment.keys.design and (first := experiment.forks(experiment.arms[0])):
        yield f"\nForks: {one_line(_windows(first))}."
    if asked := experiment.keys.map:
        alone = sum("recipe.layers" in arm.knobs for arm in experiment.arms)
        yield (
            f"\nMap: {alone} cells, each alone in {experiment.base.preset} and all else in bf16, with"
            f" {asked.times:g} times the error."
        )
    if stacks := experiment.base.config.stacks:
        yield f"\nRecipes: each arm's is exported to {' and '.join(stacks)}, and read back."
        of_arms, shared = commands(experiment, device)
        yield "Commands of the first seed, TRIAL the trial's folder:"
        for name, line in [*of_arms.items()][:_MOST_COMMANDS]:
            yield f"  {one_line(name)}: {one_line(line)}"
        if len(of_arms) > _MOST_COMMANDS:
            yield f"  and {len(of_arms) - _MOST_COMMANDS} more: --json has all"
        if shared:
            yield f"  variables of each: {one_line(shared)}"
    elif _computed_elsewhere(experiment):
        if not all(arm.recipe.plain for arm in experiment.arms):
            yield "\nRecipes: the command reads each arm's (ABLATE_RECIPE), and computes it itself."
    elif experiment.engine_why:
        yield f"\nEngine: {experiment.engine} (auto), since {experiment.engine_why}."
    elif experiment.engine != "emulated":
        yield f"\nEngine: {experiment.engine}{library(experiment.engine)}."
    layout = experiment.keys.resources.layout(device)
    if layout.ranks > 1:
        sharded = ", each with a part of the model" * layout.sharded
        yield f"\nEach trial is computed by {layout.ranks} ranks{sharded}."
    for arms, lines in multiplied(experiment):
        yield from (f"Products of arm {arms}:", *(f"  {line}" for line in lines))
    for arms, lines in on_reference_lines(experiment, device):
        yield f"\nOn a GPU, arm {arms}: {lines[0]}."
    for arms, lines in policies(experiment):
        yield from (f"\nLayers of arm {arms}:", *(f"  {line}" for line in lines))
    if largest := memory(experiment, device):
        arm, needed = largest
        parts = ", ".join(f"{name} {_size(size)}" for name, size in needed._asdict().items())
        total = f"at most about {_size(needed.total)} beside CUDA's own, by arm {one_line(arm)}"
        yield from (f"\nGPU memory of a trial: {total}.", f"  Parts: {parts}.")


def _computed_elsewhere(experiment: Experiment) -> bool:
    """Return True if trials are processes of the user's own, which no engine of this package computes."""
    return experiment.base.config.own_code and not experiment.base.config.in_process


def _work(
    experiment: Experiment, settings: Settings, result: Forecast, time: TimeNeeded | None
) -> Iterator[str]:
    for remark in (*filter(None, [settings.device_note]), *remarks(experiment, settings.device)):
        yield f"\nNote: {remark}"
    if result.redefined:
        yield f"\nNote: {one_line(redefinition(result.redefined))}."
    if result.resumed:
        steps = f"{result.resumed:,} of {result.alone:,} steps are done"
        yield f"\nInterrupted trials continue from their checkpoints: {steps}."
    if result.steps < (rest := result.alone - result.resumed):
        saved = f"{rest - result.steps:,} of {rest:,} steps are not run"
        yield f"\nTrials with a common prefix compute it once: {saved}."
    bound = "At most " if result.later else ""
    counts = f"{bound}{result.trials + result.later} trials to run, {result.done} done."
    yield f"\n{counts} {_duration_text(result, time)}"
    if width := expected_width(experiment, settings.state):
        yield f"Expected half-width of a 95 % interval: {width}."
    if result.grown:
        yield f"At most {result.grown} more trials, on more seeds, if arms stay undecided."


def _forecast(experiment: Experiment, settings: Settings) -> tuple[Forecast, TimeNeeded | None]:
    device, resources = settings.device, experiment.keys.resources
    paces = MachinePaces.of(experiment, device, settings.ray is not None)
    result = forecast(experiment, settings.state, device, paces)
    place = settings.executor, settings.workers, bool(settings.ray), visible_gpus()
    return result, time_needed(result, device, resources, *place)


def _windows(forks: Forks) -> str:
    *rest, last = map(str, forks.windows)
    lengths = f"{', '.join(rest)} and {last} steps" if rest else f"{last} steps"
    where = "from the weights that the workload starts from"
    if forks.trunk:
        where = f"after steps {', '.join(map(str, forks.positions))} of a trunk"
    rate = ", the rate falling to zero" if forks.anneal else ""
    return f"every arm trains windows of {lengths} {where}{rate}"


def expected_width(experiment: Experiment, state: Path) -> str:
    """Return the half-width that the experiment's calibration promises for its design and seeds, as text;
    empty without a calibration."""
    if (chosen := _planned(experiment, state)) is None:
        return ""
    from ablate.results.intervals import Interval

    seeds = len(experiment.seeds)
    interval = Interval.parse(experiment.keys.growth.interval if experiment.keys.growth else "t")
    likely, careful = (chosen.half_width(seeds, careful, interval) for careful in (False, True))
    return f"{likely:.2g} with {seeds} seeds (at most {careful:.2g} with a chance of 80 %; {chosen.name})"


def _planned(experiment: Experiment, state: Path) -> "Candidate | None":
    """Return what a calibration found of the experiment's design; None without one."""
    if not (state / "sweeps" / f"{experiment.name}{CALIBRATION}" / "ledger.db").exists():
        return None
    from ablate.results.calibration import planned  # scipy: only if there is something to read

    return planned(experiment, state)


def as_data(experiment: Experiment, settings: Settings) -> dict[str, Json]:
    """Return the plan as JSON data: what `show` prints."""
    result, time = _forecast(experiment, settings)
    lines, shared = commands(experiment, settings.device)
    on_gpu = settings.device == "cuda" and makes_operands(experiment.engine)
    search, width = experiment.keys.search, _planned(experiment, settings.state)
    return {
        "sweep": experiment.name,
        "question": experiment.keys.question,
        "engine": experiment.engine,
        "engine_why": "" if _computed_elsewhere(experiment) else experiment.engine_why,
        "products": multiplied_data(experiment),
        "device": settings.device,
        "ranks": experiment.keys.resources.layout(settings.device).ranks,
        "arms": [
            {
                "arm": arm.name,
                "baseline": arm.baseline,
                "knobs": dict(arm.knobs),
                # Quantised operands that no GPU kernel makes.
                "operands_on_reference": list(on_reference(arm.recipe).slots) if on_gpu else None,
                "trials": [{"seed": spec.seed, "id": spec.id} for spec in specs],
                "command": lines.get(arm.name),
                "done": done,
            }
            for arm, specs, done in result.rows
        ],
        "variables": shared,
        "search": {"trials": search.trials, "proposed": result.proposed} if search else None,
        "blame": blame_facts(experiment) or None,
        "to_run": result.trials,
        "to_run_later_at_most": result.later + result.grown,
        "done": result.done,
        "steps": result.steps,
        "seconds": time.seconds if time else None,
        "at_once": time.at_once if time else None,
        "measured_trials": result.measured,
        "recalled_trials": result.recalled,
        "changed_arms": list(result.redefined),
        "expected_half_width": width.half_width(len(experiment.seeds)) if width else None,
        "notes": list(remarks(experiment, settings.device)),
    }


def _size(number: int) -> str:
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def _range(dimension: Dimension) -> str:
    only = ", ".join(f"{knob} is {display(value)}" for knob, value in dimension.when.items())
    choices = ", ".join(map(str, dimension.choices))
    values = choices or f"{dimension.low:g} to {dimension.high:g}{' (log)' if dimension.log else ''}"
    return f"{values} (if {only})" if only else values


def _duration_text(result: Forecast, time: TimeNeeded | None) -> str:
    if not result.trials + result.later:
        return "Nothing to run."
    if time is None:
        what = "of this code has run here" if not result.known else "has run on this GPU"
        return f"No estimate of the time: no trial {what} yet."
    at_once = f"{time.at_once} trials at once" if time.at_once > 1 else "one trial at a time"
    counts = {"of this state folder": result.measured, "measured on this machine before": result.recalled}
    bases = " and on ".join(f"{count} trials {which}" for which, count in counts.items() if count)
    basis = f"based on {bases}" if bases else "not based on measurements yet"
    return f"Roughly {duration(time.seconds)} with {at_once}; {basis}."
