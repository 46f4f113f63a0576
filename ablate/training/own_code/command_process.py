"""A user's command as a process: its lines as they come, its end, and the end of all of its children.

The command runs under a guard (`execution/process_guard.py`) whose standard input this process holds. If this
process ends, even by SIGKILL, the guard ends the command and everything that the command started. Until it
has done so it holds a lock, for which a later attempt of the same trial waits.

The command writes into files, not into pipes: what it has written when this process is killed, and while the
guard ends it, would be lost in a pipe, although the command may continue behind it from a checkpoint of its
own. Each run has a folder, and a later attempt reads those of all runs before its own.

    command/runs/1/{output,errors,metrics}    standard output, standard error, and the file of metrics
"""

import fcntl
import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from ablate.engines.gpu_access import restored
from ablate.training.out_of_memory import kernel_kills, sign
from ablate.training.own_code.process_environment import METRICS, in_force
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
_FILES = ("metrics", "output", "errors")
"""Files of a run in the order in which they are read."""
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
        lines: list[bytearray] = []
        for number, part in enumerate(chunk.split(b"\n")):
            if number:
                lines.append(self._rest)
                self._rest = bytearray()
            self._rest += part[: LONGEST_LINE - len(self._rest)]
        return [line.decode(errors="replace").rstrip("\r") for line in lines]

    def finish(self, whole: bool) -> list[str]:
        """Return the last line, if it has no end; unless `whole`, only if it is JSON, whose end is seen."""
        return self.add(bytearray(b"\n")) if self._rest and (whole or self._rest.endswith(b"}")) else []


class Output:
    """Lines that a run of a command has written into its folder, in batches. `stack` closes the files."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._files = {
            # Made if missing: an attempt that was killed may have left an empty folder.
            name: stack.enter_context((folder / name).open("a+b", buffering=0))
            for name in _FILES
        }
        for file in self._files.values():
            file.seek(0)
        self._splitters = {name: _Splitter() for name in _FILES}

    def batch(self) -> dict[str, list[str]] | None:
        """Return the next lines by file; None if nothing was written since the last call. The files are read
        in turn until none has more. So whatever was written before something in this batch is in it too, or
        in an earlier one."""
        chunks = {name: bytearray() for name in _FILES}
        while sum(map(len, chunks.values())) < _MOST_BYTES:
            parts = {
                name: file.read(-1 if name == "metrics" else 1 << 16) or b""
                for name, file in self._files.items()
            }
            if not any(parts.values()):
                break
            for name, part in parts.items():
                chunks[name] += part
        if not any(chunks.values()):
            return None
        return {name: splitter.add(chunks[name]) for name, splitter in self._splitters.items()}

    def finish(self, whole: bool) -> dict[str, list[str]]:
        """Return the last lines, if they have no end; unless `whole`, only those that are not cut."""
        return {name: splitter.finish(whole) for name, splitter in self._splitters.items()}


def _lines(texts: Mapping[str, Sequence[str]]) -> list[Line]:
    return [Line(text, name == "metrics") for name in ("metrics", "output") for text in texts[name]]


def search_path() -> str:
    """Return PATH with the folder of this Python first, so that `python` and `torchrun` are its own."""
    return os.pathsep.join(filter(None, (str(Path(sys.executable).parent), os.environ.get("PATH"))))


class CommandProcess:
    """A running command; made by `started`."""

    def __init__(self, process: subprocess.Popen[bytes], output: Output) -> None:
        self._process, self._output = process, output
        self._kills = kernel_kills()
        self._errors: deque[str] = deque(maxlen=_KEPT_LINES)
        """Last lines of standard error that are not empty."""

    def batches(self) -> Iterator[list[Line]]:
        """Yield the lines that have come, in batches, until the command has ended; copy standard error to
        that of this process. MemoryError if the command ended because memory was out; CommandError if it
        ended by a signal, or with an exit status that is not 0."""
        ended = os.pidfd_open(self._process.pid)
        try:
            over = False
            while True:
                if (texts := self._output.batch()) is None:
                    if over:
                        break
                    over = bool(select.select([ended], [], [], _POLL_SECONDS)[0])
                    continue
                yield self._taken(texts)
        finally:
            os.close(ended)
        status = self._process.wait()
        yield self._taken(self._output.finish(status == 0))
        self._refuse_failure(status)

    def _taken(self, texts: Mapping[str, Sequence[str]]) -> list[Line]:
        for line in texts["errors"]:
            if line.strip():
                self._errors.append(line)
            print(line, file=sys.stderr, flush=True)
        return _lines(texts)

    def _refuse_failure(self, status: int) -> None:
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
def held(own: Path) -> Iterator[int]:
    """Hold the lock of a trial's command inside this context, and yield its file descriptor. It waits for the
    command of an earlier attempt, which may log until its guard has ended it."""
    with (own / "lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def earlier(own: Path) -> Iterator[Iterator[list[Line]]]:
    """Yield the batches of lines of each run in the folder of a trial's command, the first run first."""
    for number in _runs(own):
        with ExitStack() as stack:
            output = Output(own / "runs" / str(number), stack)
            yield map(_lines, (*iter(output.batch, None), output.finish(False)))


def _runs(own: Path) -> list[int]:
    return sorted(int(folder.name) for folder in (own / "runs").glob("*") if folder.name.isdecimal())


@contextmanager
def started(
    arguments: Sequence[str], folder: Path, variables: Mapping[str, str | None], own: Path, lock: int
) -> Iterator[CommandProcess]:
    """Run a command in a working folder inside this context; at its end, the command and all of its children
    are ended. `variables` are set beside the environment of this process; None removes one. GPUs that are
    hidden from this process are visible to the command. The folder of the run is made in `own`. `lock`, the
    descriptor of `held`, stays locked as long as any process of the command may run."""
    run = own / "runs" / str(max(_runs(own), default=0) + 1)
    run.mkdir(parents=True)
    environment = restored(os.environ) | {"PATH": search_path(), "PYTHONUNBUFFERED": "1"}
    environment = in_force(environment, {**variables, METRICS: str(run / "metrics")})
    with ExitStack() as stack:
        written = {name: stack.enter_context((run / name).open("ab")) for name in _FILES}
        process = subprocess.Popen(
            [sys.executable, "-P", str(_GUARD), *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=written["output"],
            stderr=written["errors"],
            pass_fds=(lock,),
            start_new_session=True,
        )
        assert process.stdin
        try:
            yield CommandProcess(process, Output(run, stack))
        finally:
            process.stdin.close()
            process.wait()
