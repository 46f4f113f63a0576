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
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.5


def exit_with_parent(
    closed: Callable[[float], bool] | None = None, before: Callable[[], None] = lambda: None
) -> None:
    """Start a thread that exits this process, with status 1, once its parent has ended. `before` is called
    before the exit. `closed` waits for at most the given seconds and returns True if the process has to exit
    although its parent lives; None: there is no such reason."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            if closed is None:
                time.sleep(_POLL_SECONDS)
            elif closed(_POLL_SECONDS):
                break
        before()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Run the command until it ends, or until standard input closes."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    adopt_orphans()
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        over = os.pidfd_open(process.pid)
        select.select([0, over], [], [])
    finally:
        _end(process)
    sys.exit(process.returncode if process.returncode >= 0 else 128 - process.returncode)


def _end(process: subprocess.Popen) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    end_orphans()


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent ends (Linux)."""
    set_child_subreaper = 36  # linux/prctl.h
    _prctl(set_child_subreaper, 1)


def die_with_parent() -> None:
    """Let the kernel kill this process with its parent (Linux)."""
    parent_death_signal = 1  # linux/prctl.h
    _prctl(parent_death_signal, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(option, value, 0, 0, 0)


def end_orphans(keep: Collection[int] = ()) -> None:
    """Kill the descendants that are left, and wait for their ends. Guards and their commands are left alone:
    a guard whose standard input has closed ends its command itself, and lets it save its work. `keep`: ids of
    child processes that stay, with their descendants."""
    if not keep:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
    import psutil  # slow to import: only if there is a child

    while orphans := [
        orphan
        for child in psutil.Process().children()
        if child.pid not in keep and not _is_guard(child)
        for orphan in (*child.children(recursive=True), child)
    ]:
        for orphan in orphans:
            with suppress(psutil.NoSuchProcess):
                orphan.kill()
        if psutil.wait_procs(orphans, _GRACE_SECONDS)[1]:
            break  # in an uninterruptible call of the kernel


def _is_guard(process: "psutil.Process") -> bool:
    import psutil

    try:
        return __file__ in process.cmdline()
    except psutil.Error:
        return False


if __name__ == "__main__":
    main()
