"""The command `ablate`: the table of its verbs, and its start.

The file of a verb is imported when the verb is asked for: all of them together take seconds, which every
command would wait for. The help of the whole has names and lines of help from the table.
"""

import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ablate.cli.common import run
from ablate.cli.option_groups import App
from ablate.version import __version__

VERBS: dict[str, dict[str, tuple[str, str]]] = {
    "Every day": {
        "init": ("init", "Write a commented experiment to start from."),
        "check": ("check", "Check a training function, or a rounding of your own."),
        "plan": ("plan", "Show arms, trials, time and cost; run nothing."),
        "sweep": ("sweep", "Run or continue an experiment, and answer its question."),
        "status": ("status", "Show running trials, speed, time left and failures."),
        "report": ("report", "Write the report, with tables and figures."),
        "ui": ("ui", "Serve MLflow, Optuna's dashboard and reports here."),
        "recipe": ("recipe", "Show, diff, export, import, audit recipes."),
    },
    "Results": {
        "rank": ("rank", "Order recipes by the errors of operands, untrained."),
        "judge": ("judge", "Judge runs that were not started here."),
        "show": ("show", "Show all arms, one sweep's claim, or what differs in two."),
    },
    "Running sweeps": {
        "calibrate": ("calibrate", "Find the design that tells most per hour."),
        "stop": ("stop", "Stop a sweep or a part of it; change its workers."),
        "rebuild": ("rebuild", "Rebuild a damaged ledger, or MLflow's copy of ledgers."),
    },
    "Machine and files": {
        "doctor": ("doctor", "Show what this machine can run; check its numerics."),
        "conform": ("conform", "Find out if a quantiser computes a recipe."),
        "bench": ("bench", "Time quantisers, layers and training steps."),
        "data": ("data", "Prepare text for training, or describe a source."),
    },
    "": {
        "run-task": ("jobs", "Run the next trials of a job array."),
        "collect": ("jobs", "Adopt the finished trials of a job array."),
    },
}
"""File in `ablate.cli` and line of help of each verb, by heading; those under "" are not listed. The function
has the verb's name; a group of verbs is the file's `app`."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Does this part of my low-precision recipe matter for my model? By how much?"""


class _Verbs(TyperGroup):
    """All verbs. Their help fits a terminal of 24 lines."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print options, question and verbs, a line each, without the frames that typer draws; like typer to
        standard output, also if no verb is given. Its caller ends the last line."""
        lines = ["Usage: ablate [--version] [--install-completion] [-h] COMMAND [ARGS]...", options.__doc__]
        for heading, verbs in VERBS.items():
            if heading:
                lines += [typer.style(heading, bold=True)]
                lines += [f"  {verb:11}{about}" for verb, (_, about) in verbs.items()]
        typer.echo("\n".join(map(str, lines)), nl=False)


def _new_app() -> typer.Typer:
    app = App(
        cls=_Verbs,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(options)
    return app


def _add(app: typer.Typer, verb: str, file: str, **shown: Any) -> None:
    module = import_module(f"ablate.cli.{file}")
    if function := getattr(module, verb.replace("-", "_"), None):
        app.command(verb, **shown)(function)
    else:
        app.add_typer(module.app, name=verb, **shown)


def _all(add: Callable[..., object]) -> typer.Typer:
    """Return the command with all verbs, each added by `add` with its file, heading and line of help."""
    app = _new_app()
    for heading, verbs in VERBS.items():
        for verb, (file, about) in verbs.items():
            add(app, verb, file, short_help=about, hidden=not heading)
    return app


@cache
def whole_app() -> typer.Typer:
    """Return the command with all its verbs."""
    return _all(_add)


def main() -> None:
    files = {verb: file for verbs in VERBS.values() for verb, (file, _) in verbs.items()}
    # The first word after the command, also of the line that a shell wants completed.
    typed = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS")
    words = typed.split() if typed and "_ABLATE_COMPLETE" in os.environ else sys.argv
    verb = words[1] if len(words) > 1 else ""
    if verb not in files and verb != "--version":
        # Names and lines of help of verbs, none of which runs: their files are not imported.
        run(_all(lambda app, verb, file, **shown: app.command(verb, **shown)(lambda: None)))
        return
    app = _new_app()
    if verb in files:
        _add(app, verb, files[verb])
    run(app)
