"""`ablate check`: run the contract of workloads on one's own training code."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ablate.cli.common import DONE, FAILED, console
from ablate.errors import InputError
from ablate.experiment.arms import KnobError, StartingPoint
from ablate.experiment.load import load
from ablate.experiment.yaml_document import scalar
from ablate.files import Json
from ablate.training.workloads import Workload


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
    measurements, pass the recipe on to its layers, and resume bit for bit. Exit status: 0 all kept, 1 one is
    not, 2 bad input.
    """
    workload = _workload(file, function, config or []).model_copy(update={"steps": steps})
    screen = console()
    screen.print(f"Running {file} for {steps} steps, several times ...")
    from ablate.verification.workload_checks import Runs, promises

    broken = 0
    for promise in promises(Runs(workload)):
        broken += not promise.kept
        word = Text("PASS", "green") if promise.kept else Text("FAIL", "bold red")
        screen.print(Text.assemble(word, "  ", promise.name))
        screen.print(Text(f"      {promise.detail}", "dim" if promise.kept else ""))
        if promise.remedy:
            screen.print(Text(f"      To mend: {promise.remedy}"))
    screen.print("" if broken else "A sweep may compare runs of this function.")
    raise typer.Exit(FAILED if broken else DONE)


def _workload(file: Path, function: str, pairs: list[str]) -> Workload:
    """Return the workload of an experiment or of a Python file; InputError with every reason if none."""
    if file.suffix in (".yaml", ".yml"):
        return load(file).base.config
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
        return StartingPoint("python", values, "nvfp4").arm({}).config
    except KnobError as error:
        raise InputError([f"{file}: {why}" for _, why in error.reasons]) from None
