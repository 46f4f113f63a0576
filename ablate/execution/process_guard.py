"""Guards that end a process when its parent ends, even if the parent was killed.

A process guards itself with `exit_with_parent`. A command that cannot is started by
`python -m ablate.execution.process_guard COMMAND...`: when standard input closes, which also happens when the
process at its other end is killed, the command's whole process group is ended. The command runs in a session
of its own: Ctrl-C in a terminal reaches the process that started the guard, not the command. Processes that
the command starts in sessions of their own, as torchrun does, become the guard's children when their parent
ends, and are ended too.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.5


def exit_with_parent(closed: Callable[[float], bool] | None = None) -> None:
    """Start a thread that exits this process, with status 1, once its parent has ended.

    Args:
        closed: function that waits for at most the given seconds and returns True if the process has to exit
            although its parent lives; None for no such reason.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            if closed is None:
                time.sleep(_POLL_SECONDS)
            elif closed(_POLL_SECONDS):
                break
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Run the command until it ends, or until standard input closes."""
    signal.signal(signal.SIGTERM, _exit)
    _adopt_orphans()
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        over = os.pidfd_open(process.pid)
        select.select([0, over], [], [])
    finally:
        _end(process)
    sys.exit(process.returncode if process.returncode >= 0 else 128 - process.returncode)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _end(process: subprocess.Popen) -> None:
    """End the process group: by SIGTERM, and after a grace period by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    _kill_orphans()


def _adopt_orphans() -> None:
    """Become the parent of every descendant whose parent ends (Linux)."""
    set_child_subreaper = 36  # linux/prctl.h
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(set_child_subreaper, 1, 0, 0, 0)


def _kill_orphans() -> None:
    """Kill the descendants that are left, and wait for their ends."""
    import psutil  # slow to import: at the end only

    while orphans := psutil.Process().children(recursive=True):
        for orphan in orphans:
            with suppress(psutil.NoSuchProcess):
                orphan.kill()
        if psutil.wait_procs(orphans, _GRACE_SECONDS)[1]:
            break  # in an uninterruptible call of the kernel


if __name__ == "__main__":
    main()
