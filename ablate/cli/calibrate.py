"""`ablate calibrate X.yaml`: find the sharpest design for a model, and write it into the experiment."""

import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ablate.cli.common import FAILED, console, plain_table, program
from ablate.cli.options import DeviceFlags, ExperimentFile
from ablate.cli.settings import Settings
from ablate.errors import InputError
from ablate.execution.calibration_sweeps import TooLong, beside, proposal, write_fitting
from ablate.experiment.forked_design import CALIBRATION, FEWEST_SEEDS, FULL_CALIBRATION
from ablate.experiment.load import load
from ablate.experiment.yaml_document import with_values
from ablate.files import write_text
from ablate.provenance import own_command
from ablate.reports.plain_text import duration

if TYPE_CHECKING:
    from ablate.results.calibration import Candidate


def calibrate(
    context: typer.Context,
    file: ExperimentFile,
    flags: DeviceFlags,
    hours: Annotated[float | None, typer.Option(min=0.001)] = None,
    seeds: Annotated[int, typer.Option(min=FEWEST_SEEDS, max=100)] = 4,
    bad: str = "mxfp4",
    full: bool = True,
    dry_run: bool = False,
    workers: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Find the design that tells most per hour for this model, and write it into the experiment.

    Two small sweeps on seeds of their own, X_calibration and X_calibration_full, run the baseline, its twin,
    a known-bad arm and up to three arms of the experiment: in forks of a trunk, and in full runs. Designs and
    seeds follow from their noise and their speed. The same command continues it. Exit status: 0 done, 1 a
    trial failed or the known-bad arm cannot be seen, 2 bad input.

    Args:
        hours: Longest time for the calibration; fewer seeds fit less.
        seeds: Seeds to calibrate on.
        bad: Known-bad arm: a preset that is certainly worse than the others.
        full: Try full runs beside forks.
        dry_run: Print the proposal and write no file beside the experiment.
        workers: Trials to run at once.
    """
    from ablate.results.calibration import best, candidates_of  # imports scipy: only to read results

    settings, screen = flags.settings(workers=workers), console()
    experiment = load(file, settings.device)
    for path in (beside(file, CALIBRATION), beside(file, FULL_CALIBRATION)) if dry_run else ():
        if not path.exists():  # removed when the command ends, however it ends
            context.call_on_close(partial(path.unlink, missing_ok=True))
    try:
        seeds, sweeps = write_fitting(
            file, experiment, seeds, bad, full, hours, settings.state, settings.device, settings.workers or 1
        )
    except TooLong as error:
        takes = f"a calibration on {FEWEST_SEEDS} seeds takes about {duration(error.seconds)}"
        raise InputError(f"{file}: {takes}; give more --hours, or a smaller workload") from None
    for path in sweeps:
        screen.print(f"Calibrating: {path.name}, {seeds} seeds of its own")
        if status := _run(path, settings, flags, workers):
            raise typer.Exit(status)
    candidates = candidates_of(experiment, settings.state)
    arms = len(experiment.arms) + (experiment.keys.search.trials if experiment.keys.search else 0)
    chosen = best(candidates, arms)
    screen.print(_table(candidates, chosen, arms))
    if chosen.sharpness(arms) == 0:
        more = "Give more seeds (--seeds), more steps, or another arm (--bad). Nothing is written."
        why = f"({bad}): its damage is smaller than its standard error in each. {more}"
        screen.print(f"No design sees the known-bad arm {why}")
        raise typer.Exit(FAILED)
    screen.print(_sharpest(chosen, count := chosen.proposed_seeds(), arms))
    if chosen.design and experiment.keys.published:
        screen.print(f"{file} has published figures of full runs, which forks do not measure: not written.")
    elif not dry_run:
        values = proposal(experiment, chosen, count, bad)
        write_text(file.resolve(), with_values(file.read_text("utf-8"), values))
        screen.print(f"Written into {file}: `{program('ablate')} plan {quote(str(file))}` shows it.")


def _run(path: Path, settings: Settings, flags: DeviceFlags, workers: int | None) -> int:
    options = ["--state", str(settings.state)]
    options += ["--profile", flags.profile] if flags.profile else []
    options += ["--device", flags.device] if flags.device else []
    options += ["--workers", str(workers)] if workers else []
    command = own_command("ablate.sweep", str(path), "--quiet", "--no-report", *options)
    return subprocess.run(command, check=False).returncode


def _sharpest(chosen: "Candidate", seeds: int, arms: int) -> str:
    return (
        f"Sharpest: {chosen.name}. With {seeds} seeds of {arms} arms a 95 % interval is expected to be"
        f" ±{chosen.half_width(seeds):.2g} wide (at most ±{chosen.half_width(seeds, True):.2g} with a chance"
        f" of 80 %), after {duration(seeds * chosen.seconds(arms))} of one worker. A fifth of the known-bad"
        f" arm's damage is {chosen.goal:.2g}."
    )


def _table(candidates: "Sequence[Candidate]", chosen: "Candidate", arms: int) -> Table:
    numbers = ("known-bad arm", "deviation", "s a seed", "t after 1 h", "± at 3, 5, 8 seeds")
    table = plain_table("design", *numbers, right=numbers)
    for one in sorted(candidates, key=lambda each: -each.sharpness(arms)):
        table.add_row(
            one.name,
            f"{one.effect:+.2g} ±{one.effect_error:.1g}",
            f"{one.deviation:.2g}",
            f"{one.seconds(arms):.0f}",
            f"{one.sharpness(arms):.1f}",
            ", ".join(f"{one.half_width(seeds):.2g}" for seeds in (3, 5, 8)),
            style="bold" if one is chosen else "",
        )
    return table
