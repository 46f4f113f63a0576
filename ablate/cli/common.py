"""What the commands share: exit statuses, and how a user's mistake is told."""

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ablate.errors import InputError, printable
from ablate.files import ensure_home

DONE, FAILED, BAD_INPUT, BUDGET, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 130, 143

_WHERE = "Where"
State = Annotated[
    Path | None,
    typer.Option(
        "--state",
        help="State folder: trials, ledgers, MLflow store; default: runs. (ABLATE_STATE)",
        rich_help_panel=_WHERE,
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help="Which profile of ablate.toml says where things are. (ABLATE_PROFILE)",
        rich_help_panel=_WHERE,
    ),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option(help="Where a trial computes; default: auto.", rich_help_panel=_WHERE),
]
Mlflow = Annotated[
    str | None,
    typer.Option(
        help="MLflow's address; default: a store in the state folder; none: no MLflow. (ABLATE_MLFLOW)",
        rich_help_panel=_WHERE,
    ),
]
Sweeps = Annotated[
    list[str] | None,
    typer.Argument(metavar="[X]...", help="Sweeps, by name or by YAML file; default: all there are."),
]
Json = Annotated[bool, typer.Option("--json", help="Print it as JSON, for machines.")]


def run(command: Callable[[], None]) -> None:
    """Run a command line; what the user got wrong is told in a sentence for each, with status 2, and never as a traceback."""
    if note := ensure_home():
        print(note, file=sys.stderr)
    try:
        command()
    except InputError as error:
        print(printable(str(error)), file=sys.stderr)
        sys.exit(BAD_INPUT)


class Terminated(KeyboardInterrupt):
    """SIGTERM, by which SLURM, Docker and systemd end a command: as Ctrl-C, with an exit status of its own."""


@contextmanager
def heed_sigterm() -> Iterator[None]:
    """Raise Terminated at the first SIGTERM within the block, and let those after it pass: they would cut the clean end short."""

    def end(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # which alone may set a handler
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def interruption(error: KeyboardInterrupt) -> tuple[int, str]:
    """Return the exit status and the word for a command that a signal ended."""
    return (TERMINATED, "Ended by SIGTERM") if isinstance(error, Terminated) else (INTERRUPTED, "Interrupted")


def alone(command: Callable[..., Any]) -> None:
    """Run a verb as a program of its own, `python -m ablate.sweep`. A crash shows no local variables, which may hold a password."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    run(app)


def starting(what: str, unless: bool = False) -> None:
    """Print what is waited for, before it is imported or started: on a slow machine the first result takes a minute.

    It goes to standard error at once. `unless`: the output is for machines, and nothing is printed.
    """
    if not unless:
        print(f"Starting: {what} ...", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """`45 s`, `3 min`, `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Screen(Console):
    """A console on which text is text: no markup, no emoji codes, and no character that drives a terminal.

    Whoever names an arm or writes a question would otherwise write markup. Styles are given by rich's Text.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of what is printed. Control codes are segments of their own; within text they are shown as escapes."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def console() -> Screen:
    """Standard output; wide where it is not a terminal, so that a log keeps its tables whole."""
    found = Screen()
    return found if found.is_terminal else Screen(width=160)


def program(name: str) -> str:
    """How to call a program of this environment: by name where the shell finds it, else by its path from here."""
    return name if shutil.which(name) else os.path.relpath(Path(sys.executable).parent / name)
