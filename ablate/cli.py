"""What the commands share: exit statuses, and how a user's mistake is told."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from ablate.yamlfile import InputError

DONE, FAILED, BAD_INPUT, BUDGET, INTERRUPTED = 0, 1, 2, 3, 130


def run(command: Callable[[], None]) -> None:
    """Run a command line; what the user got wrong is told in a sentence for each, with status 2, and never as a traceback."""
    try:
        command()
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(BAD_INPUT)


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
