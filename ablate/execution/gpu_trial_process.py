"""Processes of trials on GPUs: fresh interpreters that are used once, and the process that keeps one ready.

The problem. A process that has touched CUDA cannot be forked, and imports of common libraries touch it. So a
trial on a GPU needs an interpreter of its own, whose imports take seconds.

The idea. `main` imports no torch. It keeps one spare interpreter, which has imported what all workloads need
and touches no GPU (`spare`). A request goes to the spare, which computes the trial and exits. The next spare
starts its imports as soon as the trial has begun, so a trial waits for it only if the one before was shorter
than they take. The next request is served once the trial's process and all of its descendants have ended, and
so have left the card.

Messages, logs and the closing of standard input are those of trial_process.py.
"""

import ctypes
import importlib
import os
import signal
import subprocess
import sys
from contextlib import redirect_stdout, suppress

from ablate.execution.messages import Exited, MalformedMessage, TrialRequest, send
from ablate.execution.process_guard import adopt_orphans, end_orphans
from ablate.execution.trial_process import compute, tune_process, wait_for
from ablate.provenance import own_command

_SPARE = own_command("ablate.execution.gpu_trial_process", "spare")
_IMPORTS = (
    "ablate.execution.rank_process",
    "ablate.training.checkpoints",
    "ablate.training.loop",
    "ablate.training.workloads.gpt",
)
"""Imports of a spare. None of them asks for a GPU, and none is a user's module."""


def main() -> None:
    """Serve requests, one trial at a time, until standard input closes."""
    adopt_orphans()
    ready = _start_spare()
    with open(0, "rb", buffering=0, closefd=False) as requests:
        for line in iter(requests.readline, b""):
            try:
                TrialRequest.parse(line)
            except MalformedMessage as error:
                send(sys.stdout.buffer, Exited(1, str(error)))
                continue
            if ready.poll() is not None:  # ended meanwhile, killed for memory
                ready = _start_spare()
            taken = ready
            assert taken.stdin
            with suppress(BrokenPipeError):  # its exit status says why
                taken.stdin.write(line)
            ready = _start_spare()
            status = os.waitstatus_to_exitcode(wait_for(taken.pid))
            taken.stdin.close()
            taken.returncode = status
            end_orphans(keep=(ready.pid,))
            send(sys.stdout.buffer, Exited(status))
    _end(ready)


def _start_spare() -> "subprocess.Popen[bytes]":
    """Start a spare, whose messages go to this process's standard output."""
    return subprocess.Popen(_SPARE, stdin=subprocess.PIPE, bufsize=0)


def _end(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin
    process.stdin.close()
    process.kill()
    process.wait()


def spare() -> None:
    """Import, wait for one request, compute its trial, and exit; exit at once if standard input closes."""
    _die_with_parent()
    import_all()
    tune_process()
    with open(0, "rb", buffering=0, closefd=False) as requests:
        line = requests.readline()
    if not line:
        os._exit(0)
    compute(TrialRequest.parse(line), method="spawn")


def import_all() -> None:
    """Import what all workloads need; no import asks for a GPU."""
    with redirect_stdout(sys.stderr):  # standard output is for messages
        for module in _IMPORTS:
            importlib.import_module(module)


def _die_with_parent() -> None:
    """Let the kernel kill this process with its parent (Linux): before the request nothing else would."""
    parent_death_signal = 1  # linux/prctl.h
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(parent_death_signal, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    spare() if sys.argv[1:] == ["spare"] else main()
