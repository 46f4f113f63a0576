"""A user's command as a process: its lines as they come, its end, and the end of all of its children.

The command runs under a guard (`execution/process_guard.py`) whose standard input this process holds. If this
process ends, even by SIGKILL, the guard ends the command and everything that the command started. Until it
has done so it holds a lock, for which a later attempt of the same trial waits.
"""

import fcntl
import os
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple

from ablate.engines.gpu_access import restored
from ablate.training.out_of_memory import kernel_kills, sign
from ablate.training.own_code.process_environment import in_force
from ablate.training.own_code.user_errors import CommandError, printed

# The guard's file, not its module: the working directory is the user's, whose modules must not replace ours.
_GUARD = Path(__file__).parents[2] / "execution" / "process_guard.py"
_POLL_SECONDS = 0.1
_KEPT_LINES = 400
"""Lines of standard error in which an exception is looked for; torchrun adds many below it."""
_MEMORY_LINES = 50
_MOST_BYTES = 1 << 22
"""Bytes of a batch."""
LONGEST_LINE = 1 << 20
"""Bytes of a line that are kept; the rest of it is dropped."""
_SIGKILL_STATUS = 128 + 9


class Line(NamedTuple):
    """A line that the command wrote to standard output or, if `of_file`, to its file of metrics."""

    text: str
    of_file: bool


class _Splitter:
    """Whole lines of a stream of bytes."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def add(self, chunk: bytearray) -> list[str]:
        """Return the lines that a chunk completes."""
        lines: list[bytearray] = []
        for number, part in enumerate(chunk.split(b"\n")):
            if number:
                lines.append(self._rest)
                self._rest = bytearray()
            self._rest += part[: LONGEST_LINE - len(self._rest)]
        return [line.decode(errors="replace").rstrip("\r") for line in lines]

    def finish(self) -> list[str]:
        """Return the last line, if it has no end."""
        return self.add(bytearray(b"\n")) if self._rest else []


def search_path() -> str:
    """Return PATH with the folder of this Python first, so that `python` and `torchrun` are its own."""
    return os.pathsep.join(filter(None, (str(Path(sys.executable).parent), os.environ.get("PATH"))))


class CommandProcess:
    """A running command; made by `started`."""

    def __init__(self, process: subprocess.Popen[bytes], metrics: BinaryIO) -> None:
        self._process, self._metrics = process, metrics
        self._kills = kernel_kills()
        self._errors: deque[str] = deque(maxlen=_KEPT_LINES)
        """Last lines of standard error that are not empty."""

    def batches(self) -> Iterator[list[Line]]:
        """Yield the lines that have come, in batches, until the command has ended.

        Standard error is copied to that of this process.

        Raises:
            MemoryError: the command ended because memory was out.
            CommandError: it ended by a signal, or with an exit status that is not 0.
        """
        streams = {"output": self._process.stdout, "errors": self._process.stderr}
        splitters = {"output": _Splitter(), "errors": _Splitter(), "metrics": _Splitter()}
        with selectors.DefaultSelector() as selector:
            for name, stream in streams.items():
                assert stream
                selector.register(stream, selectors.EVENT_READ, name)
            over = False
            while not over:
                over = self._process.poll() is not None
                if not over and not selector.get_map():  # both closed, and the command goes on
                    self._wait()
                chunks = self._chunks(selector, 0 if over else _POLL_SECONDS)
                lines = {name: splitter.add(chunks[name]) for name, splitter in splitters.items()}
                if over:
                    lines = {name: lines[name] + splitter.finish() for name, splitter in splitters.items()}
                self._copy(lines["errors"])
                if batch := [
                    *(Line(text, True) for text in lines["metrics"]),
                    *(Line(text, False) for text in lines["output"]),
                ]:
                    yield batch
        self._refuse_failure()

    def _chunks(self, selector: selectors.BaseSelector, seconds: float) -> dict[str, bytearray]:
        """Return what came on each stream: wait at most `seconds` for the first.

        File and streams are read in turn until neither has more. So whatever was written before something in
        this batch is in it too, or in an earlier one.
        """
        chunks = {"output": bytearray(), "errors": bytearray(), "metrics": bytearray()}
        while sum(map(len, chunks.values())) < _MOST_BYTES:
            file = self._metrics.read()
            chunks["metrics"] += file
            ready = selector.select(seconds) if selector.get_map() else []
            seconds = 0
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                chunks[key.data] += chunk
                if not chunk:
                    selector.unregister(key.fileobj)
            if not file and not ready:
                break
        return chunks

    def _wait(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_POLL_SECONDS)

    def _copy(self, lines: Sequence[str]) -> None:
        for line in lines:
            if line.strip():
                self._errors.append(line)
            print(line, file=sys.stderr, flush=True)

    def _refuse_failure(self) -> None:
        status = self._process.returncode
        if status == 0:
            return
        raised = printed(self._errors)
        last = str(raised) if raised else self._errors[-1].strip() if self._errors else ""
        reason = f": {last}" if last else ""
        if memory := sign(list(self._errors)[-_MEMORY_LINES:]):
            raise MemoryError(f"the command ended with exit status {status}: {memory.strip()}")
        if status == _SIGKILL_STATUS and kernel_kills() > self._kills:
            raise MemoryError("out of memory: the kernel killed the command")
        if status > 128:
            raise CommandError(f"the command was killed by signal {status - 128}{reason}")
        raise CommandError(f"the command ended with exit status {status}{reason}", raised)


@contextmanager
def started(
    arguments: Sequence[str], folder: Path, variables: Mapping[str, str | None], metrics: Path, lock: Path
) -> Iterator[CommandProcess]:
    """Run a command inside this context; at its end, the command and all of its children are ended.

    Args:
        arguments: program and arguments.
        folder: working directory.
        variables: environment variables, beside those of this process; None removes one. GPUs that are hidden
            from this process are visible to the command.
        metrics: file to which the command appends lines; it is emptied.
        lock: file that is locked as long as any process of the command may run; waits for an earlier one.
    """
    own = restored(os.environ) | {"PATH": search_path(), "PYTHONUNBUFFERED": "1"}
    environment = in_force(own, variables)
    with ExitStack() as stack:
        held = stack.enter_context(lock.open("wb"))
        fcntl.flock(held, fcntl.LOCK_EX)
        # Emptied only now: the command of an earlier attempt may log until its guard releases the lock.
        file = stack.enter_context(metrics.open("w+b", buffering=0))
        process = subprocess.Popen(
            [sys.executable, "-P", str(_GUARD), *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(held.fileno(),),
            start_new_session=True,
        )
        try:
            yield CommandProcess(process, file)
        finally:
            _close(process.stdin)
            process.wait()
            _close(process.stdout)
            _close(process.stderr)


def _close(stream: IO[bytes] | None) -> None:
    if stream:
        stream.close()
