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

import importlib
import os
import subprocess
import sys
from contextlib import redirect_stdout, suppress

from ablate.execution.messages import TrialRequest
from ablate.execution.process_guard import adopt_orphans, die_with_parent, end_orphans
from ablate.execution.trial_process import compute, serve, tune_process, wait_for
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

    def run(request: TrialRequest) -> int:
        nonlocal ready
        if ready.poll() is not None:  # ended meanwhile, killed for memory
            ready = _start_spare()
        taken = ready
        assert taken.stdin
        with suppress(BrokenPipeError):  # its exit status says why
            taken.stdin.write(request.line())
        ready = _start_spare()
        taken.returncode = os.waitstatus_to_exitcode(wait_for(taken.pid))
        taken.stdin.close()
        end_orphans(keep=(ready.pid,))
        return taken.returncode

    serve(run)
    assert ready.stdin
    ready.stdin.close()
    ready.kill()
    ready.wait()


def _start_spare() -> "subprocess.Popen[bytes]":
    """Start a spare, whose messages go to this process's standard output."""
    return subprocess.Popen(_SPARE, stdin=subprocess.PIPE, bufsize=0)


def spare() -> None:
    """Import, wait for one request, compute its trial, and exit; exit at once if standard input closes."""
    die_with_parent()  # before the request nothing else would end it
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


if __name__ == "__main__":
    spare() if sys.argv[1:] == ["spare"] else main()
