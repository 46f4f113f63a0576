"""The trial store: one self-describing folder a trial, shared by every sweep. Results are files; renaming one in is the commit.

trials/<id>/spec.json             what was run: the hash of this is the id
trials/<id>/log-<attempt>.txt     what the trial printed; made first, it gives the attempt its number, whoever asks for the trial
trials/<id>/events-<attempt>.jsonl  one record a line, appended as it happens
trials/<id>/lock                  held by the attempt that runs, and names it
trials/<id>/trunk-<attempt>.json  the trial whose records come before this attempt's, and up to which step, where it was forked
trials/<id>/artifacts/            what the trial left for people: pictures
trials/<id>/result.json           there when, and only when, the trial is over and need never run again
"""

import errno
import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


class Store:
    """The folder `trials/` of a state folder."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def folder(self, trial: str) -> Path:
        """Where the trial with this id lives; made when it is first run."""
        return self.root / "trials" / trial

    def result(self, trial: str) -> dict[str, Any] | None:
        """The result of a finished trial, None for one that is not finished."""
        try:
            return json.loads((self.folder(trial) / "result.json").read_bytes())
        except FileNotFoundError:
            return None

    def artifacts(self, trial: str) -> list[Path]:
        """The files that the trial left for people, by name; none where it left none, or runs elsewhere."""
        return sorted(path for path in (self.folder(trial) / "artifacts").glob("*") if path.is_file())

    def commit(self, trial: str, result: dict[str, Any]) -> None:
        """Make `result` the trial's result: all of it or nothing, also when the power fails."""
        write(self.folder(trial) / "result.json", result)

    def begin(self, trial: str) -> int:
        """A new attempt's number, above all there were, in any sweep and by any ledger: its records replace nobody else's."""
        folder = self.folder(trial)
        folder.mkdir(parents=True, exist_ok=True)
        attempt = max(map(_number, folder.glob("log-*.txt")), default=0) + 1
        while True:
            try:
                (folder / f"log-{attempt}.txt").touch(exist_ok=False)
                return attempt
            except FileExistsError:  # two controllers ask at the same moment
                attempt += 1

    def retire(self, trial: str) -> None:
        """Put the trial's folder aside, so that it is run afresh. It is kept, in `retired/`."""
        if not self.folder(trial).exists():
            return
        retired = self.root / "retired"
        retired.mkdir(exist_ok=True)
        self.folder(trial).rename(retired / f"{trial}-{time.time_ns()}")

    def shared(self, name: str) -> Path:
        """Where the checkpoint lies that several trials pass through."""
        return self.root / "checkpoints" / f"{name}.pt"

    def largest_checkpoint(self) -> int:
        """Bytes of the largest checkpoint there is."""
        return max((path.stat().st_size for path in self._checkpoints()), default=0)

    def collect(self, free: int) -> bool:
        """Remove shared checkpoints, those unused for longest first, until the disk has so many bytes free; whether it has.

        Nothing is lost but time: a trial that would have gone on from one starts earlier.
        """
        for path in sorted(self._checkpoints(), key=lambda path: path.stat().st_mtime):
            if shutil.disk_usage(self.root).free >= free:
                break
            path.unlink(missing_ok=True)
        return shutil.disk_usage(self.root).free >= free

    def _checkpoints(self) -> list[Path]:
        return list((self.root / "checkpoints").glob("*.pt"))

    def fork(self, trial: str, attempt: int, trunk: Mapping[str, Any]) -> None:
        """Note that an attempt goes on from the state that the trial `trunk["trial"]` left after `trunk["step"]` steps."""
        write(self.folder(trial) / f"trunk-{attempt}.json", trunk)

    def events(self, trial: str, until: float = math.inf) -> Iterator[dict[str, Any]]:
        """What the trial recorded up to a step, its trunks' records first, attempt by attempt. A last line torn by a crash is left out.

        Two trials may each have gone on from a state that the other left, and a trial from one of its own: a trunk counts for what
        lies beyond it alone.
        """
        for path in sorted(self.folder(trial).glob("trunk-*.json"), key=_number):
            trunk = json.loads(path.read_bytes())
            if trunk["step"] < until:
                yield from self.events(trunk["trial"], trunk["step"])
        for path in sorted(self.folder(trial).glob("events-*.jsonl"), key=_number):
            with path.open() as lines:
                for line in lines:
                    if line.endswith("\n") and (event := json.loads(line))["step"] <= until:
                        yield event

    def log(self, trial: str, attempt: int) -> Path:
        """What an attempt prints."""
        return self.folder(trial) / f"log-{attempt}.txt"

    def log_tail(self, trial: str, attempt: int, lines: int = 20) -> str:
        """The last lines that an attempt printed."""
        path = self.log(trial, attempt)
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    @contextmanager
    def claim(self, trial: str, attempt: int, wait: bool = True) -> Iterator[Callable[[], bool]]:
        """Hold the trial, waiting while another process does, or raise Busy. The lock ends with the process, however it ends.

        Gives a function: whether this attempt still holds it. One that lost touch with the file system, and wakes up, does not.
        """
        with lock(self.folder(trial) / "lock", wait, f", attempt {attempt}") as held:
            yield held


def _number(path: Path) -> int:
    """The attempt that a file belongs to."""
    return int(path.stem.partition("-")[2])


def write(path: Path, content: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one: temporary file, fsync, rename."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    with temporary.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def full(error: BaseException) -> bool:
    """Whether this is how a full disk shows: in a file, or in SQLite."""
    return (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "disk is full" in str(error)


class Busy(Exception):
    """Another process holds the lock; `holder` says which, as far as it is known."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


@contextmanager
def lock(path: Path, wait: bool = True, note: str = "") -> Iterator[Callable[[], bool]]:
    """Hold the lock file `path`, which names its holder; while another process does, wait, or raise Busy at once.

    Gives a function: whether the file still names this holder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        if wait:
            fcntl.flock(file, fcntl.LOCK_EX)
        elif not _taken(file):
            file.seek(0)
            raise Busy(file.read().strip() or "unknown")
        holder = f"pid {os.getpid()} on {os.uname().nodename}{note}"
        file.truncate(0)
        file.write(holder)
        file.flush()
        yield lambda: path.exists() and path.read_text() == holder


def _taken(file: TextIO) -> bool:
    """Whether the lock could be had without waiting for its holder; who only asks whether it is held has it for an instant."""
    for _ in range(5):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        else:
            return True
    return False
