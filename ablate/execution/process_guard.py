"""Guard of a command: `python -m ablate.execution.process_guard COMMAND...` ends it when the guard's parent
ends.

When standard input closes, which also happens when the process at its other end is killed, the command's
whole process group is ended. The command runs in a session of its own: Ctrl-C in a terminal reaches the
process that started the guard, not the command.
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
    """Run the command until it ends, or until standard input closes."""
    signal.signal(signal.SIGTERM, _exit)
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        over = os.pidfd_open(process.pid)
        select.select([0, over], [], [])
    finally:
        _end(process)
    sys.exit(process.returncode)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _end(process: subprocess.Popen) -> None:
    """End the process group: by SIGTERM, and after a grace period by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)


if __name__ == "__main__":
    main()
