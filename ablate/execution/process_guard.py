"""`python -m ablate.execution.process_guard COMMAND...`: a command, and all that comes of it, that ends with whoever started it.

Standard input is the lifeline: when it closes, however its other end died, the command's whole process group is ended. It is a session
of its own, so that Ctrl-C in a terminal reaches who started it and nobody else.
"""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from types import FrameType

_GRACE_SECONDS = 5.0


def main() -> None:
    """Run the command until it ends, or until nobody holds the other end any more."""
    signal.signal(signal.SIGTERM, _ended)
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        over = os.pidfd_open(process.pid)
        select.select([0, over], [], [])
    finally:
        _end(process)
    sys.exit(process.returncode)


def _ended(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _end(process: subprocess.Popen) -> None:
    """End the group: politely, and then for good."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)


if __name__ == "__main__":
    main()
