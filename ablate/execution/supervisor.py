"""Supervisor of one slot: keeps a warm child process, runs one trial at a time in it, and turns every end
into a message.

The problem. A trial may crash the interpreter, be killed by the kernel when memory is out, or hang in a
collective or in a data loader. Whoever runs it must survive all of these, notice them, and report the right
reason: one reason is worth a retry, another (out of memory) is a result.

The idea. The supervisor talks to a child process over two pipes and never runs the trial's code itself. The
child (`trial_process`) has imported torch and forks a process for each trial, so a dead trial costs no
imports. A supervisor yields:

    for message in Supervisor().run(request):
        ...   # Events((...,)), Events((...,)), Heartbeat(), Events((...,)), Ended("done", result={...})

Events arrive in batches of 0.2 s. A Heartbeat comes every 5 s of silence, a Waiting while another process
runs the same trial. The last message is always an Ended. Its status is read from the committed result first,
then from the exit status of the process, and its reason from the exception of the user's code, or else from
the last line of the log.

A trial is hung after a silence longer than `SilenceTimer.limit`, which follows the pace of the trial's own
steps. Its processes then write their stacks into the log and are killed.

Refused: a second trial at the same time, and a child that sends a malformed message: the child is ended and
the trial failed. The supervisor does not retry and does not decide what a failure means. No Ray here:
`workers.actor` puts these messages on the network.
"""

import os
import select
import signal
import statistics
import subprocess
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from ablate.engines.gpu_access import hidden
from ablate.execution.messages import (
    Ended,
    Events,
    Exited,
    Heartbeat,
    MalformedMessage,
    Message,
    PipeMessage,
    Raised,
    RankDied,
    Started,
    TornLine,
    TrialRequest,
    Waiting,
    holds_exit,
    parse_line,
)
from ablate.execution.trial_runner import EDITED, NO_SPACE, OUT_OF_MEMORY, Edited, OutOfMemory, messages
from ablate.experiment.trial_spec import TrialSpec
from ablate.files import Damaged
from ablate.provenance import own_command
from ablate.store.trial_store import Store
from ablate.training.out_of_memory import kernel_kills
from ablate.training.own_code.user_errors import UserError

COMMANDS = {
    "cpu": own_command("ablate.execution.trial_process"),
    "cuda": own_command("ablate.execution.gpu_trial_process"),
}
"""Command of the child process by class of device. It reads requests and prints the messages of their
trials."""
_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
"""Environment variable that makes glibc ask for huge pages, read at the start of a process. A fork copies one
entry for each page, so the fork of a process with torch takes half as long; a user's own setting stays."""
HEARTBEAT_SECONDS = 5.0
"""Time between heartbeats while a trial is silent."""
_BATCH_SECONDS = 0.2
_GRACE_SECONDS = 8.0
"""Time for the child to end after its standard input is closed. A process guard gives its command 5 s of
them."""
_FIRST_FACTOR = 10
"""Factor of the patience before the first record: a trial loads data and compiles until then."""
_STEPS, _GAPS = 20, 3
"""A trial is hung after the time of _STEPS median steps, or of _GAPS times its longest silence, whichever is
longer."""


class SilenceTimer:
    """Timer of a trial's silence, and the limit after which the trial counts as hung."""

    def __init__(self, patience: float) -> None:
        """`patience`: least limit in seconds."""
        self.patience, self._began = patience, time.time()
        self._last, self._longest, self._step = time.monotonic(), 0.0, 0
        self._paces: list[float] = []
        self._waiting = False

    def note(self, message: Events | Waiting) -> None:
        """Note the arrival of a message. After a Waiting the trial may be silent for any time."""
        now = time.monotonic()
        self._waiting = isinstance(message, Waiting)
        for event in message.events[-1:] if isinstance(message, Events) else ():
            if event["time"] < self._began:  # replayed from a trunk or an earlier attempt, at another pace
                continue
            steps, seconds = event["step"] - self._step, now - self._last
            if self._step and steps > 0:
                self._paces.append(seconds / steps)
                self._longest = max(self._longest, seconds)
            self._step = event["step"]
        self._last = now

    @property
    def limit(self) -> float:
        """Seconds of silence after which the trial counts as hung."""
        if not self._step:
            return _FIRST_FACTOR * self.patience
        pace = statistics.median(self._paces) if self._paces else 0.0
        return max(self.patience, _STEPS * pace, _GAPS * self._longest)

    @property
    def silence(self) -> float:
        """Seconds since the last message; 0 while the trial waits for another process."""
        return 0.0 if self._waiting else time.monotonic() - self._last

    @property
    def hung(self) -> bool:
        """True beyond the limit, whose median of all paces is not computed before there is need."""
        return self.silence > self.patience and self.silence > self.limit


class Supervisor:
    """Runner of one trial at a time in a child process of its own."""

    def __init__(self, command: Sequence[str] | None = None, grace: float = _GRACE_SECONDS) -> None:
        """`command`: starts the child; None: that of the trial's class of device (`COMMANDS`). `grace`: time
        for the child to end after its standard input is closed."""
        self._command, self._grace = command, grace
        self._device = ""
        """Class of device of the child's trials."""
        self.child: subprocess.Popen[bytes] | None = None
        self.trial_process: int | None = None
        self._one_rank = True
        """True if that process computes the trial; False if its children, the ranks, do."""

    def run(self, request: TrialRequest) -> Iterator[Message]:
        """Run one trial, or this node's part of it, to its end and yield its messages: Events, Waiting and
        Heartbeat as they come, one Ended at last. The child's death is a message, not an exception."""
        try:
            yield from self._run(request)
        except MalformedMessage as error:  # no later message of this child can be relied on
            self.trial_process = None
            self._bury()
            yield Ended("failed", str(error))

    def _run(self, request: TrialRequest) -> Iterator[Message]:
        self._one_rank = request.ranks == 1
        child, killed = self._send(request), kernel_kills()
        watch, hung, died, raised = SilenceTimer(request.patience), None, None, None
        expects_events = not (request.gang and request.gang.node)  # rank 0, on node 0, sends a gang's events
        assert child.stdout
        for received, over in _batches(child.stdout.fileno()):
            exited = next((message for message in received if isinstance(message, Exited)), None)
            for message in received:
                if isinstance(message, Started):
                    self.trial_process = message.pid
                elif isinstance(message, RankDied):
                    died = message
                elif isinstance(message, Raised):
                    raised = message.error
            events = [
                event for message in received if isinstance(message, Events) for event in message.events
            ]
            forwarded: list[Events | Waiting] = [one for one in received if isinstance(one, Waiting)]
            for message in (*forwarded, *([Events(tuple(events))] if events else [])):
                watch.note(message)
                yield message
            if exited or over:
                self.trial_process = None
                if over:
                    self._bury()
                yield end_of_attempt(request, exited, hung, kernel_kills() > killed, died, raised)
                return
            if expects_events and not hung and watch.hung:
                hung = f"no step for {watch.silence:.0f} s; its stack is in its log; ended"
                _dump_and_kill(self._computing() or [child.pid])
            if not received:
                yield Heartbeat()

    def _computing(self) -> list[int]:
        """Return ids of the processes that compute the trial: its own, or those of its ranks, whose end it
        reports."""
        if self._one_rank or self.trial_process is None:
            return [self.trial_process] if self.trial_process else []
        with suppress(psutil.NoSuchProcess):
            ranks = psutil.Process(self.trial_process).children()
            return [rank.pid for rank in ranks] or [self.trial_process]
        return []

    def _send(self, request: TrialRequest) -> subprocess.Popen[bytes]:
        """Send the request to the child, or to a new one if the child has died since the last trial; return
        it."""
        child = self.warm(request.device)
        assert child.stdin
        try:
            child.stdin.write(request.line())
        except BrokenPipeError:
            self._bury()
            return self._send(request)
        return child

    def _bury(self) -> None:
        """End and forget a child whose pipe is closed. It is dying, but `poll` may not report that for a
        while, and the next request would be sent to it."""
        child, self.child = self.child, None
        assert child
        assert child.stdin
        assert child.stdout
        child.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            # a process guard ends its command first, and must not be killed before
            child.wait(self._grace)
        child.kill()
        child.wait()
        child.stdout.close()

    def warm(self, device: str) -> subprocess.Popen[bytes]:
        """Return the child for trials on a class of device, `cpu` or `cuda`, started if there is none. It
        ends when its standard input closes, at the latest with this process. The child of trials on CPUs sees
        no GPU: torch would start threads for it, and the child could not be forked."""
        if self.child is not None and self._device not in ("", device):
            self._bury()
        if self.child is None or self.child.poll() is not None:
            pipe, environment = subprocess.PIPE, hidden(os.environ) if device == "cpu" else dict(os.environ)
            self.child = subprocess.Popen(
                self._command or COMMANDS[device],
                stdin=pipe,
                stdout=pipe,
                bufsize=0,
                start_new_session=True,
                env={_TUNABLES: _HUGE_PAGES} | environment,
            )
            self._device = device
        return self.child

    def stop(self) -> None:
        """End the running trial, if there is one. Called from another thread than `run`, which yields the
        trial's Ended."""
        for pid in self._computing():
            _kill(pid)

    def close(self) -> None:
        """End the child, and the trial in it."""
        if self.child is not None:
            self._bury()


def _batches(pipe: int) -> Iterator[tuple[list[PipeMessage], bool]]:
    """Yield (messages, True at the end of the pipe): batches of 0.2 s, or an empty list after a silence. A
    line torn by a kill is dropped: it is the last one of a dead child, trial or rank."""
    rest, over = b"", False
    while not over:
        if not _readable(pipe, HEARTBEAT_SECONDS):
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
        received = []
        for line in filter(None, lines):
            with suppress(TornLine):
                received.append(parse_line(line))
        yield received, over


def _readable(pipe: int, seconds: float) -> bool:
    """Return True if data or the end arrive within `seconds`. `select` cannot watch descriptors above 1023;
    `poll` can."""
    watch = select.poll()
    watch.register(pipe, select.POLLIN)
    return bool(watch.poll(seconds * 1000))


def _dump_and_kill(pids: list[int]) -> None:
    """Make the processes write the stacks of their threads into their log, then kill them; a stopped one
    writes none."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    for pid in pids:
        _kill(pid)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # it ended by itself meanwhile, which its parent reports
        os.kill(pid, signal.SIGKILL)


def end_of_attempt(
    request: TrialRequest,
    exited: Exited | None,
    hung: str | None,
    starved: bool,
    died: RankDied | None = None,
    raised: UserError | None = None,
) -> Ended:
    """Return the end of an attempt: its committed result, or why there is none.

    `exited`: exit of the trial's process; None if the pipe ended instead. `hung`: why the supervisor ended
    the trial; None if it did not. `starved`: the kernel has killed a process for lack of memory since the
    trial began. `died`: the one of several ranks that ended first. `raised`: exception of the user's code
    that ended the trial.
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
    if end.status == EDITED:
        return Ended("failed", last, edited=True)
    if end.status == OUT_OF_MEMORY:
        return Ended("oom", last, log=log)
    if end.status == -signal.SIGKILL and starved and not hung:
        return Ended("oom", "out of memory: the kernel killed it", log=log)
    if end.status < 0:
        name = next((one.name for one in signal.Signals if one == -end.status), "a real-time signal")
        killed = f"killed by signal {-end.status} ({name})"
        return Ended("failed", hung or (f"rank {died.rank} was {killed}" if died else killed), log=log)
    disk_full = end.status == NO_SPACE
    if raised and not disk_full:
        return Ended("failed", str(raised), log=raised.report, raised=raised)
    return Ended("failed", last or f"exit status {end.status}", log=log, disk_full=disk_full)


def run_inline(request: TrialRequest) -> Generator[Message, None, None]:
    """Run a trial in this process, for debuggers and tests; yield the same messages as `Supervisor.run`.
    Exceptions other than OutOfMemory pass through."""
    try:
        yield from messages(replace(request, ranks=1), TrialSpec.parse(request.spec))
    except OutOfMemory as error:
        yield Ended("oom", str(error))
    except Edited as error:
        yield Ended("failed", str(error), edited=True)
    else:
        yield end_of_attempt(request, Exited(0), None, False)
