"""The trial's own process: a warm interpreter that forks a child for each trial, and dies with whoever started it.

Standard input carries one TrialRequest a line. Standard output carries, of each, Started, the trial's own messages, and Exited. Torch is
imported once, and so is what a request names as long to import: a trial starts in milliseconds. When standard input closes, the
supervisor is gone: the warm process and the trial in it end at once. At SIGUSR1 a trial writes the stack of its threads into its log.
"""

import faulthandler
import importlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import BinaryIO

from ablate import provenance
from ablate.execution.messages import Exited, MalformedMessage, Started, TrialRequest, message_of, send
from ablate.execution.rank_process import IMPORTS, SHARDING, launch
from ablate.execution.trial_runner import NO_SPACE, exit_status, run
from ablate.experiment.trial_spec import TrialSpec
from ablate.files import full
from ablate.results.trial_store import Store

_POLL_SECONDS = 0.5


def main(parse: Callable[[str], TrialSpec] = TrialSpec.parse) -> None:
    """Serve trials until standard input closes. `parse` reads a spec, in the process that computes the trial."""
    with _ending_early():
        tune_process()
        rehearse()
        provenance.environment()  # asks the file system for every version: once for all trials
    with open(0, "rb", buffering=0, closefd=False) as requests:  # a buffer would be forked with what it holds
        for line in iter(requests.readline, b""):
            send(sys.stdout.buffer, _serve(line, parse))
    os._exit(0)  # at once: torch takes a second to be torn down


def _serve(line: bytes, parse: Callable[[str], TrialSpec]) -> Exited:
    """Run the trial that a line asks for in a fork of this process."""
    try:
        request = TrialRequest.parse(line)
    except MalformedMessage as error:
        return Exited(1, str(error))
    with _ending_early():
        load(request)
    pid = os.fork()
    if pid == 0:
        _trial(request, parse)
    return Exited(os.waitstatus_to_exitcode(_wait(pid)))


@contextmanager
def _ending_early() -> Iterator[None]:
    """Inside this context, which may take seconds, the process ends with its supervisor; after it, one thread alone is left to fork."""
    warm = threading.Event()
    watcher = threading.Thread(target=_end_early, args=(warm,), daemon=True)
    watcher.start()
    yield
    warm.set()
    watcher.join()


def _end_early(warm: threading.Event) -> None:
    """End while this process still warms up, which takes seconds, where the supervisor is gone by then. A request that waits is none."""
    hangup = select.poll()
    hangup.register(0, 0)
    while not warm.is_set():
        if hangup.poll(50):
            os._exit(1)


def tune_process() -> None:
    """One thread a trial, and an allocator that keeps freed memory: glibc's defaults give large tensors back at every free."""
    import ctypes

    import torch

    torch.set_num_threads(1)
    mmap_threshold, trim_threshold = -3, -1  # malloc.h
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, 1 << 31 - 1)


def rehearse() -> None:
    """One step of the smallest model: what torch loads at the first use, a second's worth, every trial forked later finds loaded."""
    from ablate.recipes import PRESETS
    from ablate.training.loop import Telemetry
    from ablate.training.workloads.gpt import Gpt

    smallest = Gpt(layers=1, width=32, heads=1, context=16, batch=1, steps=1, eval_tokens=16, eval_batch=1)
    with suppress(
        OSError, ValueError
    ):  # without the default corpus; the trials, on data of their own, then load it themselves
        list(smallest.records(PRESETS["nvfp4"](), 0, "emulated", "cpu", Telemetry()))


def load(request: TrialRequest) -> None:
    """Import what the trial would take seconds to import: every later trial finds it there. A missing module is the trial's error."""
    several = (IMPORTS if request.ranks > 1 else ()) + (SHARDING if request.sharded else ())
    with redirect_stdout(sys.stderr):  # standard output is for messages
        for module in (*request.imports, *several):
            with suppress(ImportError):
                importlib.import_module(module)


def _wait(pid: int) -> int:
    """Wait for the trial; end it when standard input closes first, since requests never come while a trial runs."""
    over = os.pidfd_open(pid)
    ready, _, _ = select.select([0, over], [], [])
    os.close(over)
    if over not in ready:
        os.kill(pid, 9)
    _, status = os.waitpid(pid, 0)
    if 0 in ready:
        os._exit(1)
    return status


def _supervisor_gone(seconds: float) -> bool:
    """Whether standard input is at its end, waiting that long. Requests never come while a trial runs."""
    return bool(select.select([0], [], [], seconds)[0])


def _trial(request: TrialRequest, parse: Callable[[str], TrialSpec]) -> None:
    """In the forked child: run the trial, its messages to standard output, what it prints to its log; never returns."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    status = 1
    try:
        path = Store(Path(request.root)).log(request.id, request.attempt)
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            os.fdopen(os.dup(1), "wb") as pipe,
            path.open("a") as log,
        ):  # to which nodes that share the folder add
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            faulthandler.register(signal.SIGUSR1, file=log)
            send(pipe, Started(os.getpid()))
            status = exit_status(lambda: _run(request, parse, pipe))
    except OSError as error:  # its log cannot be made
        status = NO_SPACE if full(error) else 1
    finally:
        os._exit(status)


def _run(request: TrialRequest, parse: Callable[[str], TrialSpec], pipe: BinaryIO) -> None:
    if request.ranks > 1:
        if died := launch(request, pipe):
            send(pipe, died)
        return
    for recorded in run(
        parse(request.spec), Store(Path(request.root)), request.attempt, request.telemetry, request.fork
    ):
        send(pipe, message_of(recorded))


def _end_with(parent: int) -> None:
    """Watch the lifeline: the warm process, and through it the supervisor."""
    while os.getppid() == parent and not _supervisor_gone(_POLL_SECONDS):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
