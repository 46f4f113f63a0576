"""Start of the command `ablate`: for a verb with a file of its own, only that file is imported.

The files of all verbs together take half a second more, which every command would wait for.
"""

import sys
from importlib import import_module
from typing import Annotated

import typer

from ablate import __version__
from ablate.cli.common import run

FILES = {
    **{verb: verb for verb in ("sweep", "plan", "calibrate", "report", "status", "ui", "compare")},
    **{verb: verb for verb in ("leaderboard", "sync", "rebuild", "init", "check", "doctor", "stop")},
    **{
        "evidence": "export",
        "export-tables": "export",
        "export-model": "export_model",
        "workers": "stop",
        "collect": "jobs",
        "run-task": "jobs",
    },
}
"""Files of the verbs that are one function, in `ablate.cli`."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Does this part of my low-precision training recipe matter, for my model, and by how much?"""


def new_app() -> typer.Typer:
    """Return the command `ablate` without verbs."""
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(options)
    return app


def main() -> None:
    """Run the command line."""
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    if file := FILES.get(verb):
        app = new_app()
        app.command()(getattr(import_module(f"ablate.cli.{file}"), verb.replace("-", "_")))
    else:
        app = import_module("ablate.cli.app").app
    run(app)
