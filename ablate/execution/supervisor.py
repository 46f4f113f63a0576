"""One slot's supervisor: owns a warm child process, starts a trial in it, reads its messages, and survives its death. No Ray here.

A trial is a `TrialRequest`. What comes back is a stream of messages: Events as they happen, Waiting while another process runs the same
trial, a Heartbeat now and then in silence, and one Ended at last.
"""

import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from ablate.execution.messages import (
    Ended,
    Events,
    Exited,
    Heartbeat,
    MalformedMessage,
    Message,
    PipeMessage,
    RankDied,
    Started,
    TornLine,
    TrialRequest,
    Waiting,
    holds_exit,
    message_of,
    parse_line,
)
from ablate.execution.trial_runner import NO_SPACE, OUT_OF_MEMORY, OutOfMemory, run
from ablate.experiment.trial_spec import TrialSpec
from ablate.files import Damaged
from ablate.results.trial_store import Store

COMMAND = (sys.executable, "-m", "ablate.execution.trial_process")
"""The warm process: reads requests, and prints the messages of their trials."""
BEAT_SECONDS = 5.0
"""How often a supervisor says in silence that it is there."""
_BATCH_SECONDS = 0.2
_GRACE_SECONDS = 8.0
"""A child has so long to end once its standard input is closed: a lifeline gives what hangs on it five of them."""
_FIRST_FACTOR = 10
"""Before its first record a trial loads data and compiles: it may be silent so many times longer."""
_STEPS, _GAPS = 20, 3
"""A trial is hung after the time of so many median steps, or of so many of its longest silences so far, where that is longer."""


class Watch:
    """How long a trial has been silent, and when that is too long."""

    def __init__(self, patience: float) -> None:
        self.patience, self._began = patience, time.time()
        self._last, self._longest, self._step = time.monotonic(), 0.0, 0
        self._paces: list[float] = []
        self._waiting = False

    def hear(self, message: Events | Waiting) -> None:
        """Note that a message came: events, or that the trial waits for another process, which may take as long as it likes."""
        now = time.monotonic()
        self._waiting = isinstance(message, Waiting)
        for event in message.events[-1:] if isinstance(message, Events) else ():
            if (
                event["time"] < self._began
            ):  # replayed from a trunk or an earlier attempt: it tells nothing of this one
                continue
            steps, seconds = event["step"] - self._step, now - self._last
            if self._step and steps > 0:
                self._paces.append(seconds / steps)
                self._longest = max(self._longest, seconds)
            self._step = event["step"]
        self._last = now

    @property
    def limit(self) -> float:
        """Seconds of silence that are too long."""
        if not self._step:
            return _FIRST_FACTOR * self.patience
        pace = statistics.median(self._paces) if self._paces else 0.0
        return max(self.patience, _STEPS * pace, _GAPS * self._longest)

    @property
    def silence(self) -> float:
        """Seconds since something was heard; none while the trial waits for another process."""
        return 0.0 if self._waiting else time.monotonic() - self._last


class Supervisor:
    """Runs one trial at a time in a child process of its own."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        """`command` starts the warm process."""
        self._command = command
        self._child: subprocess.Popen[bytes] | None = None
        self._trial: int | None = None
        """The process of the trial that runs."""
        self._alone = True
        """Whether that computes it all."""

    def run(self, request: TrialRequest) -> Iterator[Message]:
        """Run one trial to its end and yield its messages; the child's death is a message, not an exception."""
        try:
            yield from self._run(request)
        except MalformedMessage as error:  # nothing more that this child says can be relied on
            self._trial = None
            self._bury()
            yield Ended("failed", str(error))

    def _run(self, request: TrialRequest) -> Iterator[Message]:
        self._alone = request.ranks == 1
        child, killed = self._ask(request), _kernel_kills()
        watch, hung, died = Watch(request.patience), None, None
        hears = not (
            request.gang and request.gang.node
        )  # of a gang, the first node's ranks alone tell anything
        assert child.stdout
        for received, over in _batches(child.stdout.fileno()):
            exited = next((message for message in received if isinstance(message, Exited)), None)
            for message in received:
                if isinstance(message, Started):
                    self._trial = message.pid
                elif isinstance(message, RankDied):
                    died = message
            for message in _told(received):
                watch.hear(message)
                yield message
            if exited or over:
                self._trial = None
                if over:
                    self._bury()
                yield _end(request, exited, hung, _kernel_kills() > killed, died)
                return
            if hears and not hung and watch.silence > watch.limit:
                hung = f"no step for {watch.silence:.0f} s; its stack is in its log; ended"
                _dump_and_kill(self._computing() or [child.pid])
            if not received:
                yield Heartbeat()

    def _computing(self) -> list[int]:
        """The processes that compute the trial: its own, or its ranks, whose end that one tells."""
        if self._alone or self._trial is None:
            return [self._trial] if self._trial else []
        with suppress(psutil.NoSuchProcess):
            return [rank.pid for rank in psutil.Process(self._trial).children()] or [self._trial]
        return []

    def _ask(self, request: TrialRequest) -> subprocess.Popen[bytes]:
        """Give the request to the child, or to a new one where that has died since it was last heard."""
        child = self._warm()
        assert child.stdin
        try:
            child.stdin.write(request.line())
        except BrokenPipeError:
            self._bury()
            return self._ask(request)
        return child

    def _bury(self) -> None:
        """Let go of a child whose pipe is closed. It is dying: `poll` may not tell for a while yet, and would have it asked again."""
        child, self._child = self._child, None
        assert child
        assert child.stdin
        assert child.stdout
        child.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_SECONDS)  # a lifeline ends what hangs on it; it may not be killed before
        child.kill()
        child.wait()
        child.stdout.close()

    def _warm(self) -> subprocess.Popen[bytes]:
        """The child, started where it is not there. Its standard input is its lifeline: it ends when this process does."""
        if self._child is None or self._child.poll() is not None:
            pipe = subprocess.PIPE
            self._child = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True
            )
        return self._child

    def warm(self) -> None:
        """Start the child now, so that the first trial need not wait for its imports."""
        self._warm()

    def stop(self) -> None:
        """End the trial that runs, if there is one; called from another thread than `run`, which tells its death."""
        for pid in self._computing():
            _kill(pid)

    def close(self) -> None:
        """End the child, and the trial in it."""
        if self._child is not None:
            self._bury()


def _told(received: Iterable[PipeMessage]) -> Iterator[Events | Waiting]:
    """Yield what the controller is to know, all events as one message."""
    yield from (message for message in received if isinstance(message, Waiting))
    if events := [event for message in received if isinstance(message, Events) for event in message.events]:
        yield Events(tuple(events))


def _batches(pipe: int) -> Iterator[tuple[list[PipeMessage], bool]]:
    """Yield messages as they arrive, gathered for a moment, and whether the pipe is at its end; no messages after a silence.

    A line torn by a kill is dropped: the last one of a dead child, of a dead trial, or of a dead rank.
    """
    rest, over = b"", False
    while not over:
        if not _readable(pipe, BEAT_SECONDS):
            yield [], False
            continue
        deadline, chunks = time.monotonic() + _BATCH_SECONDS, []
        while not over and _readable(pipe, max(0.0, deadline - time.monotonic())):
            chunk = os.read(pipe, 1 << 16)
            chunks.append(chunk)
            over = not chunk
            if holds_exit(chunk):
                break
        *lines, rest = (rest + b"".join(chunks)).split(b"\n")
        yield list(_parsed(lines)), over


def _readable(pipe: int, seconds: float) -> bool:
    """Whether there is something to read, or the end, within so many seconds. `select` knows no descriptor above 1023."""
    watch = select.poll()
    watch.register(pipe, select.POLLIN)
    return bool(watch.poll(seconds * 1000))


def _parsed(lines: Iterable[bytes]) -> Iterator[PipeMessage]:
    for line in filter(None, lines):
        with suppress(TornLine):
            yield parse_line(line)


def _dump_and_kill(pids: list[int]) -> None:
    """Have the processes write the stack of every thread into their log, then end them. A stopped process can only be ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    for pid in pids:
        _kill(pid)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # it ended by itself meanwhile, which its parent tells
        os.kill(pid, signal.SIGKILL)


def _kernel_kills() -> int:
    """How many processes Linux has killed since its start because memory was out; 0 where that is not told."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _end(
    request: TrialRequest,
    exited: Exited | None,
    hung: str | None,
    starved: bool,
    died: RankDied | None = None,
) -> Ended:
    """Return the end of an attempt: its committed result, or why there is none.

    `exited`: None where the pipe ended instead. `hung`: why the supervisor ended it. `starved`: the kernel has killed a process since the
    trial began because memory was out. `died`: which of several ranks ended first.
    """
    store = Store(Path(request.root))
    try:
        result = store.result(request.id)
    except Damaged as error:
        return Ended("failed", str(error))
    if result is not None:
        return Ended(result["status"], result["reason"], result)
    if exited and exited.reason:
        return Ended("failed", exited.reason)
    log = store.log_tail(request.id, request.attempt)
    last = log.splitlines()[-1] if log else ""
    end = died or exited
    if end is None:
        return Ended("failed", "its process died", log=log)
    if end.status == OUT_OF_MEMORY:
        return Ended("oom", last, log=log)
    if end.status == -signal.SIGKILL and starved and not hung:
        return Ended("oom", "out of memory: the kernel killed it", log=log)
    if end.status < 0:
        killed = f"killed by signal {-end.status} ({signal.Signals(-end.status).name})"
        return Ended("failed", hung or (f"rank {died.rank} was {killed}" if died else killed), log=log)
    return Ended("failed", last or f"exit status {end.status}", log=log, disk_full=end.status == NO_SPACE)


def run_inline(request: TrialRequest) -> Generator[Message, None, None]:
    """Yield the same messages from a trial run in this very process: for debuggers and tests. Exceptions pass through."""
    spec, store = TrialSpec.parse(request.spec), Store(Path(request.root))
    try:
        for recorded in run(spec, store, request.attempt, request.telemetry, request.fork):
            yield message_of(recorded)
    except OutOfMemory as error:
        yield Ended("oom", str(error))
    else:
        yield _end(request, Exited(0), None, False)
