"""The trial store: one self-describing folder a trial, shared by every sweep. Results are files; renaming one in is the commit.

trials/<id>/spec.json             what was run: the hash of this is the id
trials/<id>/events-<attempt>.jsonl  one record a line, appended as it happens
trials/<id>/log-<attempt>.txt     what the trial printed
trials/<id>/trunk.json            the trial whose records come before this one's, and up to which step, where it was forked
trials/<id>/result.json           there when, and only when, the trial is over and need never run again
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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

    def commit(self, trial: str, result: dict[str, Any]) -> None:
        """Make `result` the trial's result: all of it or nothing, also when the power fails."""
        write(self.folder(trial) / "result.json", result)

    def shared(self, name: str) -> Path:
        """Where the checkpoint lies that several trials pass through."""
        return self.root / "checkpoints" / f"{name}.pt"

    def trunk(self, trial: str) -> Iterator[dict[str, Any]]:
        """What was recorded before the trial parted from the one that it was forked from; nothing where it was not."""
        path = self.folder(trial) / "trunk.json"
        if path.exists():
            trunk = json.loads(path.read_bytes())
            yield from (event for event in self.events(trunk["trial"]) if event["step"] <= trunk["step"])

    def events(self, trial: str) -> Iterator[dict[str, Any]]:
        """What the trial recorded, its trunk's records first, attempt by attempt. A last line torn by a crash is left out."""
        yield from self.trunk(trial)
        for path in sorted(self.folder(trial).glob("events-*.jsonl"), key=lambda p: int(p.stem.partition("-")[2])):
            with path.open() as lines:
                for line in lines:
                    if line.endswith("\n"):
                        yield json.loads(line)

    def log_tail(self, trial: str, attempt: int, lines: int = 20) -> str:
        """The last lines that an attempt printed."""
        path = self.folder(trial) / f"log-{attempt}.txt"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    @contextmanager
    def claim(self, trial: str) -> Iterator[None]:
        """Hold the trial, waiting while another process does. The lock ends with the process, however it ends."""
        with lock(self.folder(trial) / "lock"):
            yield


def write(path: Path, content: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one: temporary file, fsync, rename."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    with temporary.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Busy(Exception):
    """Another process holds the lock; `holder` says which, as far as it is known."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


@contextmanager
def lock(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold the lock file `path`, which names its holder; while another process does, wait, or raise Busy at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.seek(0)
            raise Busy(file.read().strip() or "unknown") from None
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {os.uname().nodename}")
        file.flush()
        yield
