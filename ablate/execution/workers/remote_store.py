"""The controller's side of a trial on a node that does not see the state folder.

In the end the trial store is as if it did.

Records arrive as messages and are written at once. Files are fetched in pieces through Ray's object store, by
a thread: checkpoints while the trial runs; its logs and artifacts at its end, after which the result is
committed. Before the trial starts, its workers receive the trial's last fetched checkpoint, the furthest
shared checkpoint on its way, and all records up to both, against which the trial checks them. The trial
reports those records again, marked `again`; they are not written twice.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Protocol

from ablate.execution.messages import Ended, Events, Forked, Message, TrialRequest
from ablate.execution.workers.actor import PIECE, CheckpointTimes
from ablate.experiment.recorded_spec import RecordedSpec
from ablate.files import Busy, Damaged, temporary_of, write
from ablate.store.trial_store import Store, line
from ablate.training.checkpoint_footer import unsealed


class ScratchFolder(Protocol):
    """A worker's scratch folder, by blocking calls of its `Actor`."""

    def write_piece(self, name: str, offset: int, piece: bytes) -> None: ...
    def read_piece(self, name: str, offset: int) -> tuple[bytes, int]: ...
    def files(self, trial: str) -> list[str]: ...
    def clear(self) -> None: ...


class RemoteStore:
    """Files of one attempt of a remote trial, copied between the controller's trial store and scratch
    folders."""

    def __init__(self, request: TrialRequest) -> None:
        self.trial, self.attempt, self._request = request.id, request.attempt, request
        self.store = Store(Path(request.root))
        self.folder = self.store.folder(self.trial)
        self.fetched: CheckpointTimes = {}
        """Modification time of each checkpoint when it was last fetched."""
        self._arrived: dict[str, tuple[int, Path]] = {}
        """Fetched checkpoints whose events have not arrived yet: modification time and temporary path by
        name."""
        self._stack = ExitStack()
        self._holds_lock: Callable[[], bool] | None = None
        self._own = f"trials/{self.trial}/checkpoint.pt"

    # Before it starts

    def claim(self) -> str | None:
        """Lock the trial, as its own process does on a node that sees the folder. Return the holder if
        another process has the lock."""
        try:
            claim = self.store.claim(self.trial, self.attempt, wait=False)
            self._holds_lock = self._stack.enter_context(claim)
        except Busy as busy:
            return str(busy)
        return None

    def finished(self) -> list[Message]:
        """Return all messages of a trial that another process has finished meanwhile; else an empty list."""
        try:
            result = self.store.result(self.trial)
            if result is None:
                return []
            events = Events(tuple(self.store.proven(self.trial, result)))
            return [events, Ended(result["status"], result["reason"], result)]
        except Damaged:  # the trial runs again
            return []

    def send_inputs(self, workers: Iterable[ScratchFolder]) -> None:
        """Empty each worker's scratch folder and copy there the checkpoints and records to resume from. Slow:
        call it in a thread."""
        write(self.folder / "spec.json", RecordedSpec.parse(self._request.spec).content)
        for torn in (*self.folder.glob("*.json.*"), *self.folder.glob("*.pt.*")):
            torn.unlink()
        shared = [self.store.shared(name) for _, name in sorted(self._request.fork, reverse=True)]
        paths, records = [], {self.trial: list(self.store.events(self.trial, strict=False))}
        for path in (self.store.root / self._own, *[path for path in shared if path.exists()][:1]):
            # A checkpoint may not exist yet, may have been deleted to free disk space, or may be damaged.
            with suppress(FileNotFoundError, Damaged):
                about = unsealed(path)
                paths.append(path)
                if (trunk := about["trial"]) != self.trial:
                    records[trunk] = list(self.store.events(trunk, about["step"], strict=False))
        for worker in workers:
            worker.clear()
            for path in paths:
                with suppress(FileNotFoundError), path.open("rb") as file:
                    _send(worker, str(path.relative_to(self.store.root)), file)
            for trial, events in records.items():
                content = BytesIO(b"".join(line(event, trial) for event in events))
                _send(worker, f"trials/{trial}/events-0.jsonl", content)
        self.fetched |= {str(path.relative_to(self.store.root)): 0 for path in shared if path.exists()}

    # While it runs

    def record(self, message: Message) -> list[Message]:
        """Write a message's records into the store; return the messages for the controller. PermissionError
        if a later attempt holds the trial."""
        if self._holds_lock and not self._holds_lock():
            raise PermissionError(
                f"attempt {self.attempt} of trial {self.trial} was superseded by a later one, and ends"
            )
        if isinstance(message, Forked):
            self.store.fork(self.trial, self.attempt, message.trunk)
            return []
        if isinstance(message, Events):
            with (self.folder / f"events-{self.attempt}.jsonl").open("ab") as file:
                file.writelines(line(event, self.trial) for event in message.events if "again" not in event)
        return [message]

    def missing(self, available: CheckpointTimes) -> list[str]:
        """Return names of the checkpoints to fetch; move fetched ones into the store once all events before
        them are there. `available`: checkpoints on the worker whose events have arrived."""
        for name, (modified, path) in list(self._arrived.items()):
            if available.get(name, 0) >= modified:
                path.replace(self.store.root / name)
                del self._arrived[name]
        expected = {self._own, *(f"checkpoints/{shared}.pt" for _, shared in self._request.fork)}
        return [
            name
            for name, modified in available.items()
            if name in expected and (name not in self.fetched or 0 < self.fetched[name] < modified)
        ]

    def fetch(self, worker: ScratchFolder, names: Iterable[str]) -> None:
        """Fetch checkpoints into temporary files, which `missing` moves into the store. Slow: call it in a
        thread."""
        for name in names:
            path = self.store.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = temporary_of(path)
            try:
                self.fetched[name] = _receive(worker, name, temporary)
            except FileNotFoundError:  # removed meanwhile by its trial, which has ended
                temporary.unlink(missing_ok=True)
                continue
            self._arrived[name] = self.fetched[name], temporary

    # At its end

    def finish(self, worker: ScratchFolder, end: Ended, available: CheckpointTimes) -> Ended:
        """Fetch the remaining files, then commit the result; return `end`, or a failure if records are
        missing. Slow: call it in a thread."""
        names = self.missing(available)
        self.fetch(worker, [name for name in names if end.result is None or name != self._own])
        self.missing(available)
        for name in worker.files(self.trial):
            path = self.store.root / name
            if not path.resolve().is_relative_to(self.folder.resolve()):
                raise ValueError(f"{name}: a trial's files lie in its own folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = temporary_of(path)
            _receive(worker, name, temporary)
            temporary.replace(path)
        if (result := end.result) is not None:
            try:
                self.store.proven(self.trial, result)
            except Damaged as error:
                end = Ended("failed", str(error))
            else:
                self.store.commit(self.trial, result)
                (self.store.root / self._own).unlink(missing_ok=True)
        worker.clear()
        return end

    def close(self) -> None:
        """Release the lock and delete temporary files."""
        for _, path in self._arrived.values():
            path.unlink(missing_ok=True)
        self._arrived = {}
        self._stack.close()


def _send(worker: ScratchFolder, name: str, file: BinaryIO) -> None:
    offset = 0
    while piece := file.read(PIECE):
        worker.write_piece(name, offset, piece)
        offset += len(piece)


def _receive(worker: ScratchFolder, name: str, path: Path) -> int:
    """Copy a worker's file to a path; return its modification time in ns."""
    offset = 0
    with path.open("wb") as file:
        while True:
            piece, modified = worker.read_piece(name, offset)
            file.write(piece)
            offset += len(piece)
            if len(piece) < PIECE:
                file.flush()
                os.fsync(file.fileno())
                return modified
