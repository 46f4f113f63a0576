"""`ablate calibrate X.yaml`: find the sharpest design for a model, and write it into the experiment."""

import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ablate.cli.common import FAILED, console, program
from ablate.cli.options import DeviceFlags, ExperimentFile
from ablate.cli.settings import Settings
from ablate.errors import InputError
from ablate.execution.forecast import forecast
from ablate.experiment.forked_design import CALIBRATION, FEWEST_SEEDS, FULL_CALIBRATION
from ablate.experiment.load import Experiment, load
from ablate.experiment.roles import BAD
from ablate.experiment.schema import START
from ablate.experiment.yaml_document import with_values
from ablate.files import Json
from ablate.provenance import own_command
from ablate.reports.plain_text import duration
from ablate.training.workloads.own_code import OwnCode

if TYPE_CHECKING:
    from ablate.results.calibration import Candidate

_FIRST_SEED = 900_000
"""Calibrations have seeds of their own: a design is not chosen by the seeds that it is used on."""
_MOST_UNLIKE = 3
"""Number of the experiment's own arms that a calibration runs."""


def calibrate(
    context: typer.Context,
    file: ExperimentFile,
    flags: DeviceFlags,
    hours: Annotated[
        float | None, typer.Option(min=0.001, help="Longest time for the calibration; fewer seeds fit less.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=FEWEST_SEEDS, max=100, help="Seeds to calibrate on.")] = 4,
    bad: Annotated[
        str, typer.Option(help="Known-bad arm: a preset that is certainly worse than the others.")
    ] = "mxfp4",
    full: Annotated[bool, typer.Option(help="Try full runs beside forks.")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the proposal and write no file beside the experiment.")
    ] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Trials to run at once.")] = None,
) -> None:
    """Find the design that tells most per hour for this model, and write it into the experiment.

    Two small sweeps on seeds of their own, X_calibration and X_calibration_full, run the baseline, its twin,
    a known-bad arm and up to three arms of the experiment: in forks of a trunk, and in full runs. Designs and
    seeds follow from their noise and their speed. The same command continues it. Exit status: 0 done, 1 a
    trial failed or the known-bad arm cannot be seen, 2 bad input.
    """
    from ablate.results.calibration import best, candidates_of  # imports scipy: only to read results

    settings = flags.settings(workers=workers)
    experiment = load(file, settings.device)
    screen = console()
    if dry_run:
        for path in (_beside(file, CALIBRATION), _beside(file, FULL_CALIBRATION)):
            if not path.exists():
                context.call_on_close(partial(path.unlink, missing_ok=True))
    seeds, sweeps = _fitting(file, experiment, seeds, bad, full, hours, settings)
    options = ["--state", str(settings.state)]
    options += ["--profile", flags.profile] if flags.profile else []
    options += ["--device", flags.device] if flags.device else []
    options += ["--workers", str(workers)] if workers else []
    for path in sweeps:
        screen.print(f"Calibrating: {path.name}, {seeds} seeds of its own")
        command = own_command("ablate.sweep", str(path), "--quiet", "--no-report", *options)
        if (status := subprocess.run(command, check=False).returncode) not in (0,):
            raise typer.Exit(status)
    candidates = candidates_of(experiment, settings.state)
    arms = len(experiment.arms) + (experiment.search.trials if experiment.search else 0)
    chosen = best(candidates, arms)
    screen.print(_table(candidates, chosen, arms))
    if chosen.sharpness(arms) == 0:
        screen.print(
            f"No design sees the known-bad arm ({bad}): its damage is smaller than its standard error in"
            " each. Give more seeds (--seeds), more steps, or another arm (--bad). Nothing is written."
        )
        raise typer.Exit(FAILED)
    count = chosen.proposed_seeds()
    screen.print(
        f"Sharpest: {chosen.name}. With {count} seeds of {arms} arms a 95 % interval is expected to be"
        f" ±{chosen.half_width(count):.2g} wide (at most ±{chosen.half_width(count, True):.2g} with a chance"
        f" of 80 %), after {duration(count * chosen.seconds(arms))} of one worker. A fifth of the known-bad"
        f" arm's damage is {chosen.goal:.2g}."
    )
    if chosen.design and experiment.published:
        screen.print(f"{file} has published figures of full runs, which forks do not measure: not written.")
    elif not dry_run:
        file.write_text(with_values(file.read_text(), _proposal(experiment, chosen, count, bad)))
        screen.print(f"Written into {file}: `{program('ablate')} plan {file}` shows it.")


def _sweeps(
    file: Path, experiment: Experiment, seeds: int, bad: str, full: bool
) -> dict[Path, dict[str, Json]]:
    """Return the files of the calibration's sweeps, with what they change of the experiment."""
    own = [arm for arm in experiment.arms if not arm.outside and arm.name not in experiment.added]
    own = [arm for arm in own if arm.baseline is not None] or [experiment.base.arm({})]
    middle = sorted({0, len(own) // 2, len(own) - 1})
    chosen = [own[index] for index in middle][:_MOST_UNLIKE]
    named = [experiment.against.arm] if experiment.against.arm else []
    arms: dict[str, Json] = {arm.name: dict(arm.knobs) for arm in (*named, *chosen)}
    trunk = START if isinstance(experiment.base.config, OwnCode) else "bf16"
    design: dict[str, Json] = {"trunk": experiment.design.trunk if experiment.design else trunk}
    common: dict[str, Json] = {
        "question": f"Calibration of {experiment.name}: {experiment.question}",
        "arms": arms,
        "seeds": list(range(_FIRST_SEED, _FIRST_SEED + seeds)),
        "null": True,
        "metric": {"name": experiment.metric.name, "direction": experiment.metric.direction},
        **dict.fromkeys(("ablate", "answer", "search", "published", "constraints", "budget", "design")),
    }
    sweeps = {_beside(file, CALIBRATION): common | {"design": design | {"bad": bad}}}
    if full and not isinstance(experiment.base.config, OwnCode):
        bad_arm: dict[str, Json] = {f"{BAD}{bad}": {"recipe": bad}}
        sweeps[_beside(file, FULL_CALIBRATION)] = common | {"arms": arms | bad_arm}
    return sweeps


def _beside(file: Path, suffix: str) -> Path:
    return file.with_name(f"{file.stem}{suffix}.yaml")


def _fitting(
    file: Path,
    experiment: Experiment,
    seeds: int,
    bad: str,
    full: bool,
    hours: float | None,
    settings: Settings,
) -> tuple[int, list[Path]]:
    """Write the sweeps' files with as many seeds as fit into the hours; return their number and the files.

    Raises:
        InputError: not even three seeds of the forks fit.
    """
    workers = settings.workers or 1
    for count, both in ((seeds, full), (FEWEST_SEEDS, full), (FEWEST_SEEDS, False)):
        files, total = _sweeps(file, experiment, count, bad, both), 0.0
        for path, values in files.items():
            path.write_text(with_values(experiment.text, values))
            sweep = _loaded(path, settings.device)
            total += forecast(sweep, settings.state, settings.device).seconds
        if hours is None or total / workers <= 3600 * hours:
            return count, list(files)
    raise InputError(
        [
            f"{file}: a calibration on {FEWEST_SEEDS} seeds takes about {duration(total / workers)};"
            " give more --hours, or a smaller workload"
        ]
    )


def _loaded(path: Path, device: str) -> Experiment:
    """Return a sweep of the calibration. A refusal of its full runs names the option that leaves them out."""
    try:
        return load(path, device)
    except InputError as error:
        if not path.stem.endswith(FULL_CALIBRATION):
            raise
        instead = f"{path}: has the full runs of the calibration; --no-full calibrates forks alone"
        raise InputError([*error.problems, instead]) from None


def _table(candidates: "Sequence[Candidate]", chosen: "Candidate", arms: int) -> Table:
    table = Table(header_style="bold", pad_edge=False, box=None, padding=(0, 2, 0, 0))
    for column in ("design", "known-bad arm", "deviation", "s a seed", "t after 1 h", "± at 3, 5, 8 seeds"):
        table.add_column(column, justify="left" if column == "design" else "right")
    for one in sorted(candidates, key=lambda each: -each.sharpness(arms)):
        widths = ", ".join(f"{one.half_width(seeds):.2g}" for seeds in (3, 5, 8))
        table.add_row(
            one.name,
            f"{one.effect:+.2g} ±{one.effect_error:.1g}",
            f"{one.deviation:.2g}",
            f"{one.seconds(arms):.0f}",
            f"{one.sharpness(arms):.1f}",
            widths,
            style="bold" if one is chosen else "",
        )
    return table


def _proposal(experiment: Experiment, chosen: "Candidate", seeds: int, bad: str) -> dict[str, Json]:
    """Return the keys that the proposal changes in the experiment's file."""
    if chosen.design is None:
        return {"design": None, "seeds": seeds}
    design = chosen.design.model_dump(mode="json", exclude_defaults=True) | {
        "trunk": chosen.design.trunk,
        "bad": bad,
    }
    metric: dict[str, Json] = {"name": experiment.metric.name}
    if experiment.metric.direction != "minimize":
        metric["direction"] = experiment.metric.direction
    return {"design": design, "seeds": seeds, "metric": metric}
