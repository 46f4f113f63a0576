"""What the commands share: exit statuses, and how a user's mistake is told."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from ablate.yamlfile import InputError

DONE, FAILED, BAD_INPUT, BUDGET, INTERRUPTED = 0, 1, 2, 3, 130

_WHERE = "Where"
State = Annotated[
    Path | None,
    typer.Option("--state", help="State folder: trials, ledgers, MLflow store; default: runs. (ABLATE_STATE)", rich_help_panel=_WHERE),
]
Profile = Annotated[
    str | None,
    typer.Option("--profile", help="Which profile of ablate.toml says where things are. (ABLATE_PROFILE)", rich_help_panel=_WHERE),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"] | None, typer.Option(help="Where a trial computes; default: auto.", rich_help_panel=_WHERE)
]
Mlflow = Annotated[
    str | None,
    typer.Option(help="MLflow's address; default: a store in the state folder; none: no MLflow. (ABLATE_MLFLOW)", rich_help_panel=_WHERE),
]
Sweeps = Annotated[list[str] | None, typer.Argument(metavar="[X]...", help="Sweeps, by name or by YAML file; default: all there are.")]
Json = Annotated[bool, typer.Option("--json", help="Print it as JSON, for machines.")]


def run(command: Callable[[], None]) -> None:
    """Run a command line; what the user got wrong is told in a sentence for each, with status 2, and never as a traceback."""
    try:
        command()
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(BAD_INPUT)


def alone(command: Callable[..., Any]) -> None:
    """Run a verb as a program of its own, `python -m ablate.verb`. A crash shows no local variables: one may hold an address's password."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    run(app)


def duration(seconds: float) -> str:
    """`45 s`, `3 min`, `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def console() -> Console:
    """Standard output; wide where it is not a terminal, so that a log keeps its tables whole."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=160)


def program(name: str) -> str:
    """How to call a program of this environment: by name where the shell finds it, else by its path from here."""
    return name if shutil.which(name) else os.path.relpath(Path(sys.executable).parent / name)
