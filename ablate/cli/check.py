"""`ablate check`: run the contract of workloads on one's own training code."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.status import Status
from rich.text import Text

from ablate.cli.common import DONE, FAILED, console
from ablate.errors import InputError
from ablate.experiment.arms import KnobError, StartingPoint
from ablate.experiment.load import load
from ablate.experiment.schema import START
from ablate.experiment.yaml_document import scalar
from ablate.files import Json
from ablate.recipes import Recipe
from ablate.training.workloads.base import Workload

_SILENT_SECONDS = 10.0
"""Seconds after which a line says where the runs are, if the output is no terminal."""


def check(
    file: Annotated[
        Path, typer.Argument(help="Experiment (YAML), or a Python file with a training function.")
    ],
    function: Annotated[str, typer.Option(help="Name of the function, for a Python file.")] = "train",
    config: Annotated[
        list[str] | None,
        typer.Option("--config", help="A value of trial.config, for a Python file: width=64; repeatable."),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of each short run.")] = 6,
) -> None:
    """Check that a training function keeps the promises that comparisons rest on.

    It is run for a few steps, about ten times: it must repeat to the bit, honour its seed, be unchanged by
    measurements, pass the recipe on to its layers, and resume bit for bit. The first promise that is broken
    ends the check. Files that it reads and that are not in a trial's identity are listed. Exit status: 0 all
    kept, 1 one is not, 2 bad input.
    """
    workload, recipe, metrics, anneals = _workload(file, function, config or [])
    workload = workload.model_copy(update={"steps": steps})
    screen = console()
    screen.print(f"Running {file} for {steps} steps, several times ...")
    from ablate.verification.workload_checks import Runs, promises

    broken = False
    with screen.status("") as status:
        show = ProgressLine(screen, status)
        for promise in promises(Runs(workload, "cpu", recipe, metrics, anneals, show)):
            broken |= not promise.kept
            word = Text("PASS", "green") if promise.kept else Text("FAIL", "bold red")
            if promise.kept and promise.remedy:
                word = Text("NOTE", "yellow")
            screen.print(Text.assemble(word, "  ", promise.name))
            screen.print(Text(f"      {promise.detail}", "dim" if word.plain == "PASS" else ""))
            if promise.remedy:
                screen.print(Text(f"      To mend: {promise.remedy}"))
    last = "A sweep may compare runs of this function."
    screen.print("The checks after the failed one were not run: mend it and check again." if broken else last)
    raise typer.Exit(FAILED if broken else DONE)


class ProgressLine:
    """Progress of the runs: beside a spinner in a terminal, else a line if none came for a while."""

    def __init__(self, screen: Console, status: Status, clock: Callable[[], float] = time.monotonic) -> None:
        self.screen, self.status, self.clock = screen, status, clock
        self.shown = clock()

    def __call__(self, text: str) -> None:
        """Show the progress of the present run."""
        self.status.update(text)
        if not self.screen.is_terminal and self.clock() - self.shown > _SILENT_SECONDS:
            self.shown = self.clock()
            self.screen.print(f"      ... {text}")


def _workload(
    file: Path, function: str, pairs: list[str]
) -> tuple[Workload, Recipe | None, tuple[str, ...], bool]:
    """Return workload, recipe and metrics of an experiment, or the workload of a Python file; and whether a
    forked design lets the rate fall.

    The recipe is that of the first arm that quantises, or the baseline's if none does; None for a file. The
    check then compares it with bf16. InputError with every reason if there is no such workload.
    """
    if file.suffix in (".yaml", ".yml"):
        experiment = load(file)
        design = experiment.keys.design
        recipes = [arm.recipe for arm in experiment.arms] or [experiment.base.arm({}).recipe]
        first = next((recipe for recipe in recipes if not recipe.plain), recipes[0])
        names = tuple(metric.name for metric in experiment.metrics)
        return (
            experiment.base.config,
            first,
            names,
            bool(design and design.anneal and design.trunk == START),
        )
    if not file.is_file():
        raise InputError([f"{file}: no such file"])
    parts = [pair.partition("=") for pair in pairs]
    if unfinished := [f"--config {key}: write key=value" for key, equals, _ in parts if not equals]:
        raise InputError(unfinished)
    values: dict[str, Json] = {
        "file": str(file.resolve()),
        "function": function,
        "config": {key: scalar(value) for key, _, value in parts},
    }
    try:
        return StartingPoint("python", values, "nvfp4").arm({}).config, None, (), False
    except KnobError as error:
        raise InputError([f"{file}: {why}" for _, why in error.reasons]) from None
