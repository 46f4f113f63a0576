"""One slot's supervisor: owns a warm child process, starts a trial in it, hears it, and outlives its death. No Ray here.

A trial is a request {id, spec, root, attempt, telemetry, fork, patience, ranks, sharded}; on several nodes {gang: {nodes, node, address,
port, local}} says how many, which one this is, where they meet, and how many of the ranks are here. What comes back is a stream of
messages: {"events": [...]} as they happen, {"waits": who} while another process runs the same trial, {"alive": true} now and then in
silence, and one {"end": "done" | "diverged" | "oom" | "failed", "reason": ..., "result": ...} at last.
"""

import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ablate.store import Damaged, Store
from ablate.trial import NO_SPACE, OUT_OF_MEMORY, OutOfMemory, TrialSpec, run

Message = dict[str, Any]
BEAT_SECONDS = 5.0
"""How often a supervisor says in silence that it is there."""
_BATCH_SECONDS = 0.2
_GRACE_SECONDS = 8.0
"""A child has so long to end once its standard input is closed: a lifeline gives what hangs on it five of them."""
_PATIENCE_SECONDS = 60.0
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

    def hear(self, message: Message) -> None:
        """Something was said: events, or that it waits for another process, which may take as long as it likes."""
        now = time.monotonic()
        self._waiting = "waits" in message
        for event in message.get("events", ())[-1:]:
            if event["time"] < self._began:  # replayed from a trunk or an earlier attempt: it tells nothing of this one
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

    def __init__(self) -> None:
        self._child: subprocess.Popen | None = None
        self._trial: int | None = None
        """The process of the trial that runs."""
        self._alone = True
        """Whether that computes it all."""

    def run(self, request: dict[str, Any]) -> Iterator[Message]:
        """Run one trial to its end and yield its messages; the child's death is a message, not an exception."""
        self._alone = request.get("ranks", 1) == 1
        child, killed = self._ask(request), _kernel_kills()
        watch, hung, died = Watch(request.get("patience", _PATIENCE_SECONDS)), None, None
        hears = not request.get("gang", {}).get("node")  # of a gang, the first node's ranks alone tell anything
        for lines, over in _batches(child.stdout.fileno()):
            self._trial = next((line["pid"] for line in lines if "pid" in line), self._trial)
            died = next((line["died"] for line in lines if "died" in line), died)
            for message in _messages(lines):
                watch.hear(message)
                yield message
            exits = [line["exit"] for line in lines if "exit" in line]
            if exits or over:
                self._trial = None
                if over:
                    self._bury()
                rank, status = died or (None, exits[0] if exits else None)
                yield _end(request, status, hung, _kernel_kills() > killed, rank)
                return
            if hears and not hung and watch.silence > watch.limit:
                hung = f"no step for {watch.silence:.0f} s; its stack is in its log; ended"
                _dump_and_kill(self._computing() or [child.pid])
            if not lines:
                yield {"alive": True}

    def _computing(self) -> list[int]:
        """The processes that compute the trial: its own, or its ranks, whose end that one tells."""
        if self._alone or self._trial is None:
            return [self._trial] if self._trial else []
        with suppress(psutil.NoSuchProcess):
            return [rank.pid for rank in psutil.Process(self._trial).children()] or [self._trial]
        return []

    def _ask(self, request: dict[str, Any]) -> subprocess.Popen:
        """Give the request to the child, or to a new one where that has died since it was last heard."""
        child = self._warm()
        try:
            child.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            self._bury()
            return self._ask(request)
        return child

    def _bury(self) -> None:
        """Let go of a child whose pipe is closed. It is dying: `poll` may not tell for a while yet, and would have it asked again."""
        child, self._child = self._child, None
        child.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_SECONDS)  # a lifeline ends what hangs on it; it may not be killed before
        child.kill()
        child.wait()
        child.stdout.close()

    def _warm(self) -> subprocess.Popen:
        """The child, started where it is not there. Its standard input is its lifeline: it ends when this process does."""
        if self._child is None or self._child.poll() is not None:
            command = [sys.executable, "-m", "ablate.child"]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True)
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


def _messages(lines: list[dict[str, Any]]) -> Iterator[Message]:
    events = [line for line in lines if "step" in line]
    yield from (line for line in lines if "waits" in line)
    if events:
        yield {"events": events}


def _batches(pipe: int) -> Iterator[tuple[list[Message], bool]]:
    """Parsed lines as they arrive, gathered for a moment, and whether the pipe is at its end; no lines after a silence.

    A line torn by a kill is dropped: the last one of a dead child, and the last one of a dead trial, which the child ends.
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
            if b'{"exit"' in chunk:
                break
        *lines, rest = (rest + b"".join(chunks)).split(b"\n")
        yield list(_parsed(lines)), over


def _readable(pipe: int, seconds: float) -> bool:
    """Whether there is something to read, or the end, within so many seconds. `select` knows no descriptor above 1023."""
    watch = select.poll()
    watch.register(pipe, select.POLLIN)
    return bool(watch.poll(seconds * 1000))


def _parsed(lines: Iterable[bytes]) -> Iterator[Message]:
    for line in lines:
        with suppress(ValueError):
            yield json.loads(line)


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


def _end(request: dict[str, Any], status: int | None, hung: str | None, starved: bool, rank: int | None = None) -> Message:
    """What the trial's end means: its committed result, or why there is none; `rank`: which of several ended it."""
    store = Store(Path(request["root"]))
    try:
        result = store.result(request["id"])
    except Damaged as error:
        return {"end": "failed", "reason": str(error), "log": ""}
    if result is not None:
        return {"end": result["status"], "reason": result["reason"], "result": result}
    log = store.log_tail(request["id"], request["attempt"])
    last = log.splitlines()[-1] if log else ""
    if status == OUT_OF_MEMORY:
        return {"end": "oom", "reason": last, "log": log}
    if status == -signal.SIGKILL and starved and not hung:
        return {"end": "oom", "reason": "out of memory: the kernel killed it", "log": log}
    if status is None:
        why = "its process died"
    elif status < 0:
        why = hung or f"{'' if rank is None else f'rank {rank} was '}killed by signal {-status} ({signal.Signals(-status).name})"
    else:
        why = last or f"exit status {status}"
    return {"end": "failed", "reason": why, "log": log} | ({"full": True} if status == NO_SPACE else {})


def run_inline(request: dict[str, Any]) -> Iterator[Message]:
    """The same stream of messages from a trial run in this very process: for debuggers and tests. Exceptions pass through."""
    spec, store = TrialSpec.parse(request["spec"]), Store(Path(request["root"]))
    try:
        for event in run(spec, store, request["attempt"], request["telemetry"], request.get("fork", ())):
            yield from _messages([event])
    except OutOfMemory as error:
        yield {"end": "oom", "reason": str(error), "log": ""}
    else:
        yield _end(request, 0, None, False)
