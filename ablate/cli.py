"""What the commands share: exit statuses, and how a user's mistake is told."""

import sys
from collections.abc import Callable

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
