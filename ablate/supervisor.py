"""One slot's supervisor: owns a warm child process, starts a trial in it, hears it, and outlives its death. No Ray here.

A trial is a request {id, spec, root, attempt, telemetry, fork}; what comes back is a stream of messages: {"events": [...]} as they
happen, then one {"end": "done" | "diverged" | "failed", "reason": ..., "result": ...}.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ablate.store import Store
from ablate.trial import TrialSpec, run

Message = dict[str, Any]
_BATCH_SECONDS = 0.2


class Supervisor:
    """Runs one trial at a time in a child process of its own."""

    def __init__(self) -> None:
        self._child: subprocess.Popen | None = None

    def run(self, request: dict[str, Any]) -> Iterator[Message]:
        """Run one trial to its end and yield its messages; the child's death is a message, not an exception."""
        child = self._warm()
        child.stdin.write(json.dumps(request).encode() + b"\n")
        child.stdin.flush()
        for lines, over in _batches(child.stdout.fileno()):
            events = [line for line in lines if "exit" not in line]
            if events:
                yield {"events": events}
            exits = [line["exit"] for line in lines if "exit" in line]
            if exits or over:
                yield _end(request, exits[0] if exits else None)
                return

    def _warm(self) -> subprocess.Popen:
        """The child, started where it is not there. Its standard input is its lifeline: it ends when this process does."""
        if self._child is None or self._child.poll() is not None:
            command = [sys.executable, "-m", "ablate.child"]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True)
        return self._child

    def warm(self) -> None:
        """Start the child now, so that the first trial need not wait for its imports."""
        self._warm()

    def close(self) -> None:
        """End the child, and the trial in it."""
        if self._child is not None:
            self._child.stdin.close()
            self._child.wait(timeout=10)
            self._child.stdout.close()


def _batches(pipe: int) -> Iterator[tuple[list[Message], bool]]:
    """Parsed lines as they arrive, gathered for a moment, and whether the pipe is at its end. A torn last line is dropped."""
    rest, over = b"", False
    while not over:
        select.select([pipe], [], [])
        deadline, chunks = time.monotonic() + _BATCH_SECONDS, []
        while not over and select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            chunk = os.read(pipe, 1 << 16)
            chunks.append(chunk)
            over = not chunk
            if b'{"exit"' in chunk:
                break
        *lines, rest = (rest + b"".join(chunks)).split(b"\n")
        yield [json.loads(line) for line in lines], over


def _end(request: dict[str, Any], status: int | None) -> Message:
    """What the trial's end means: its committed result, or why there is none."""
    store = Store(Path(request["root"]))
    result = store.result(request["id"])
    if result is not None:
        return {"end": result["status"], "reason": result["reason"], "result": result}
    log = store.log_tail(request["id"], request["attempt"])
    if status is None:
        why = "its process died"
    elif status < 0:
        why = f"killed by signal {-status} ({signal.Signals(-status).name})"
    else:
        why = log.splitlines()[-1] if log else f"exit status {status}"
    return {"end": "failed", "reason": why, "log": log}


def run_inline(request: dict[str, Any]) -> Iterator[Message]:
    """The same stream of messages from a trial run in this very process: for debuggers and tests. Exceptions pass through."""
    spec, store = TrialSpec.parse(request["spec"]), Store(Path(request["root"]))
    for event in run(spec, store, request["attempt"], request["telemetry"], request.get("fork", ())):
        yield {"events": [event]}
    yield _end(request, 0)
