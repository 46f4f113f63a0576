"""Warm process of one slot: a Python interpreter with torch imported that forks a child process for each
trial.

The problem. Importing torch takes a second or more, and a small trial takes no longer than that. But a trial
needs a process of its own: it may exhaust the memory, crash, hang, or leave global state of a library behind.

The idea. This process does all slow imports once and then forks: a trial starts in milliseconds, in memory
that it shares with its parent until one of them writes. A fork copies only the calling thread, so this
process has no other thread when it forks; that is why helper threads are ended first (`_ending_early`), and
why it serves trials on CPUs alone, with all GPUs hidden from it. Where torch sees a GPU, the step of a small
model that runs here (`rehearse`) would start threads for it. gpu_trial_process.py serves trials on GPUs.

    supervisor -> standard input    one TrialRequest a line
    standard output -> supervisor   {"kind": "started", "pid": 4711}
                                    {"kind": "events", "events": [{"step": 1, "time": ..., "metrics": {...}}]}
                                    {"kind": "exited", "status": 0, "reason": ""}

Everything that a trial prints goes to its log. At SIGUSR1 it writes the stacks of its threads there. When
standard input closes, the supervisor is gone: this process and the trial end at once, so no trial outlives
its sweep. Processes that a trial leaves behind are ended before the next one.

Refused: a line that is no TrialRequest; the answer is Exited with the reason, and the next line is served.
"""

import faulthandler
import gc
import importlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import BinaryIO, NoReturn

from ablate import provenance
from ablate.execution.messages import Exited, MalformedMessage, Raised, Started, TrialRequest, send
from ablate.execution.process_guard import adopt_orphans, end_orphans, exit_with_parent
from ablate.execution.rank_process import IMPORTS, SHARDING, StartMethod, launch
from ablate.execution.trial_runner import NO_SPACE, exit_status, messages
from ablate.experiment.trial_spec import TrialSpec
from ablate.files import full
from ablate.store.trial_store import Store
from ablate.training.trial_run import Telemetry, TrialRun


def main(parse: Callable[[str], TrialSpec] = TrialSpec.parse) -> None:
    """Run trials until standard input closes. `parse` reads a spec's JSON text, in the process that computes
    the trial."""
    adopt_orphans()
    with _ending_early():
        tune_process()
        rehearse()
        provenance.environment()  # reads every version from the file system: once for all trials
        # A trial's collector would write into every object of these imports, and so copy their pages.
        gc.collect()
        gc.freeze()

    def run_fork(request: TrialRequest) -> int:
        several = (IMPORTS if request.ranks > 1 else ()) + (SHARDING if request.sharded else ())
        with _ending_early(), redirect_stdout(sys.stderr):  # standard output is for messages
            for module in (*request.imports, *several):  # slow: once, for this and all later trials
                with suppress(ImportError):  # a missing module is the trial's own error
                    importlib.import_module(module)
        pid = os.fork()
        if pid == 0:
            compute(request, parse)
        status = os.waitstatus_to_exitcode(wait_for(pid))
        end_orphans()
        return status

    serve(run_fork)
    os._exit(0)  # without the teardown of torch, which takes a second


def serve(run: Callable[[TrialRequest], int]) -> None:
    """Run the trial of each request line of standard input, until it closes. `run` returns the exit status of
    the trial's process."""
    with open(0, "rb", buffering=0, closefd=False) as requests:  # a fork would copy the content of a buffer
        for line in iter(requests.readline, b""):
            try:
                request = TrialRequest.parse(line)
            except MalformedMessage as error:
                exited = Exited(1, str(error))
            else:
                exited = Exited(run(request))
            send(sys.stdout.buffer, exited)


@contextmanager
def _ending_early() -> Iterator[None]:
    """End this process with its supervisor while the block runs, which may take seconds. One thread is left
    after it."""
    warm, events = os.eventfd(0), select.poll()
    events.register(0, 0)  # POLLHUP alone: a waiting request does not count
    events.register(warm, select.POLLIN)

    def watch() -> None:
        if warm not in [descriptor for descriptor, _ in events.poll()]:
            os._exit(1)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield
    os.eventfd_write(warm, 1)  # wakes the watcher at once: every trial waits for its end
    watcher.join()
    os.close(warm)


def tune_process() -> None:
    """Set one thread for torch, and make glibc keep freed memory: by default it returns large tensors at
    every free."""
    import ctypes

    import torch

    torch.set_num_threads(1)
    mmap_threshold, trim_threshold = -3, -1  # malloc.h
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, 1 << 31 - 1)


def rehearse() -> None:
    """Run one step of the smallest model: torch loads much at first use, about a second, which forked trials
    then share."""
    from ablate.recipes import PRESETS
    from ablate.training.workloads.gpt import Gpt

    smallest = Gpt(layers=1, width=32, heads=1, context=16, batch=1, steps=1, eval_tokens=16, eval_batch=1)
    # There may be no default corpus. Any other fault is a trial's too, whose log and reason then name it.
    with suppress(Exception):
        list(smallest.records(TrialRun(PRESETS["nvfp4"](), 0, "emulated", "cpu", Telemetry())))


def wait_for(pid: int) -> int:
    """Return the trial's wait status; kill it and exit if standard input closes first. Any event on standard
    input means that it closed: no request comes while a trial runs."""
    over = os.pidfd_open(pid)
    ready, _, _ = select.select([0, over], [], [])
    os.close(over)
    if over not in ready:
        os.kill(pid, 9)
    _, status = os.waitpid(pid, 0)
    if 0 in ready:
        end_orphans()
        os._exit(1)
    return status


def compute(
    request: TrialRequest, parse: Callable[[str], TrialSpec] = TrialSpec.parse, method: StartMethod = "fork"
) -> NoReturn:
    """Run the trial in this process and exit: its messages go to standard output, what it prints to its log.
    The process ends as soon as standard input closes. `parse` as for `main`; `method`: way in which the ranks
    of a trial start."""
    # No request comes while a trial runs: anything on standard input means that it closed.
    exit_with_parent(lambda seconds: bool(select.select([0], [], [], seconds)[0]), end_orphans)
    status = 1
    try:
        path = Store(Path(request.root)).log(request.id, request.attempt)
        path.parent.mkdir(parents=True, exist_ok=True)
        # The log is appended to: all nodes of a gang write into it.
        with os.fdopen(os.dup(1), "wb") as pipe, path.open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            faulthandler.register(signal.SIGUSR1, file=log)
            send(pipe, Started(os.getpid()))
            status = exit_status(
                lambda: _run(request, parse, pipe, method), lambda error: send(pipe, Raised(error))
            )
    except OSError as error:  # its log cannot be created
        status = NO_SPACE if full(error) else 1
    finally:
        os._exit(status)


def _run(
    request: TrialRequest, parse: Callable[[str], TrialSpec], pipe: BinaryIO, method: StartMethod
) -> None:
    if request.ranks > 1:
        if died := launch(request, pipe, method):
            send(pipe, died)
        return
    for message in messages(request, parse(request.spec)):
        send(pipe, message)


if __name__ == "__main__":
    main()
