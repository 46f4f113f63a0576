"""`ablate check`: run the contract of workloads, or of functions in quantisers, on one's own code."""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.status import Status
from rich.text import Text

from ablate import own_source
from ablate.cli.common import BAD_INPUT, DONE, FAILED, Due, console
from ablate.errors import InputError
from ablate.experiment.arms import KnobError, StartingPoint
from ablate.experiment.load import load
from ablate.experiment.schema import START
from ablate.experiment.yaml_document import scalar
from ablate.files import Json
from ablate.numerics import own
from ablate.recipes import Recipe
from ablate.training.workloads.base import Workload

if TYPE_CHECKING:
    from ablate.verification.workload_checks import Promise

_SILENT_SECONDS = 10.0
"""Seconds after which a line says where the runs are, if the output is no terminal."""


def check(
    file: Path,
    function: str = "train",
    config: Annotated[list[str] | None, typer.Option("--config")] = None,
    steps: Annotated[int, typer.Option(min=2)] = 6,
) -> None:
    """Check that a function of your own keeps the promises that comparisons rest on.

    A training function is run for a few steps, about ten times: it must repeat to the bit, honour its seed,
    be unchanged by measurements, pass the recipe on to its layers, and resume bit for bit. Files that it
    reads and that are not in a trial's identity are listed. A function of a quantiser is tried on ties, zeros
    and numbers that are not finite. The first promise that is broken ends the check. Exit status: 0 all kept,
    1 one is not, 2 bad input, or the function does not begin from the experiment's `start`.

    Args:
        file: Experiment (YAML), a Python file with a training function, or FILE:FUNCTION, a rounding, scale
          rule, statistic, grid or quantiser of your own.
        function: Name of the function, for a Python file.
        config: A value of trial.config, for a Python file: width=64; repeatable.
        steps: Optimizer steps of each short run.
    """
    screen = console()
    if ":" in file.name:
        from ablate.verification import function_checks

        field, word = function_checks.subject(str(file))
        screen.print(f"Checking {word} as `{field}` ...")
        last = f"A recipe may name it: `{field}: {file}`."
        raise typer.Exit(_printed(screen, function_checks.promises(field, word), last))
    workload, recipe, metrics, anneals = _workload(file, function, config or [])
    workload = workload.model_copy(update={"steps": steps})
    screen.print(f"Running {file} for {steps} steps, several times ...")
    from ablate.verification.workload_checks import Runs, promises

    with screen.status("") as status:
        show = ProgressLine(screen, status)
        made = promises(Runs(workload, "cpu", recipe, metrics, anneals, show))
        raise typer.Exit(_printed(screen, made, "A sweep may compare runs of this function."))


def _printed(screen: Console, promises: "Iterable[Promise]", last: str) -> int:
    status = DONE
    for promise in promises:
        if not promise.kept:
            status = BAD_INPUT if promise.refused else FAILED
        done = ("NOTE", "yellow") if promise.remedy else ("PASS", "green")
        word, style = done if promise.kept else ("FAIL", "bold red")
        screen.print(Text.assemble((word, style), "  ", promise.name))
        screen.print(Text(f"      {promise.detail}", "dim" if word == "PASS" else ""))
        if promise.remedy:
            screen.print(Text(f"      To mend: {promise.remedy}"))
    failed = "The checks after the failed one were not run: mend it and check again."
    screen.print(failed if status else last)
    return status


class ProgressLine:
    """Progress of the runs: beside a spinner in a terminal, else a line if none came for a while."""

    def __init__(self, screen: Console, status: Status, clock: Callable[[], float] = time.monotonic) -> None:
        self.screen, self.status, self.due = screen, status, Due(_SILENT_SECONDS, clock)

    def __call__(self, text: str) -> None:
        self.status.update(text)
        if not self.screen.is_terminal and self.due():
            self.screen.print(f"      ... {text}")


def _workload(
    file: Path, function: str, pairs: list[str]
) -> tuple[Workload, Recipe | None, tuple[str, ...], bool | None]:
    """Return workload, recipe and metrics of an experiment, or the workload of a Python file; and, of a
    design that forks its start, True if the rate falls, None without such a design.

    The recipe is that of the first arm that quantises, or the baseline's if none does; None for a file. The
    check then compares it with bf16. InputError with every reason if there is no such workload.
    """
    if file.suffix in (".yaml", ".yml"):
        experiment = load(file)
        design = experiment.keys.design
        recipes = [arm.recipe for arm in experiment.arms] or [experiment.base.arm({}).recipe]
        first = next((recipe for recipe in recipes if not recipe.plain), recipes[0])
        names = tuple(metric.name for metric in experiment.metrics)
        anneals = design.anneal if design and design.trunk == START else None
        return experiment.base.config, first, names, anneals
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    with suppress(OSError, SyntaxError):  # the workload's reader says so
        defined = own_source.functions(file)
        fields = [name for name in defined if own.is_for_quantisers(file, name)]
        if function not in defined and fields:
            why = f"no function {function!r} to train; name one for a quantiser as {file}:{fields[0]}"
            raise InputError(f"{file}: {why}")
    parts = [pair.partition("=") for pair in pairs]
    if unfinished := [f"--config {key}: write key=value" for key, equals, _ in parts if not equals]:
        raise InputError(*unfinished)
    config = {key: scalar(value) for key, _, value in parts}
    values: dict[str, Json] = {"file": str(file.resolve()), "function": function, "config": config}
    try:
        return StartingPoint("python", values, "nvfp4").arm({}).config, None, (), None
    except KnobError as error:
        raise InputError(*[f"{file}: {why}" for _, why in error.reasons]) from None
