"""The controller's end of a trial on a node that does not see the state folder: afterwards the store looks as if it did.

Records come as messages and are written as they come. Files come in pieces through Ray's object store, fetched by a thread: checkpoints
while the trial runs, its log and its artifacts at its end, and then the result is committed. What is given to a worker before it starts:
the trial's last fetched checkpoint, the furthest state that other trials left on its way, and all records up to those, which both are
checked against. The worker tells them again, marked, and they are not written twice.
"""

import json
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

from ablate.execution.messages import Ended, Events, Forked, Message, TrialRequest
from ablate.execution.workers.actor import PIECE, Left
from ablate.files import Busy, Damaged, write
from ablate.results.trial_store import Store, line
from ablate.training.checkpoint_footer import unsealed


class Far(Protocol):
    """A worker's scratch folder, its calls waited for."""

    def give(self, name: str, offset: int, piece: bytes) -> None: ...
    def take(self, name: str, offset: int) -> tuple[bytes, int]: ...
    def files(self, trial: str) -> list[str]: ...
    def clear(self) -> None: ...


class Mirror:
    """One attempt of one trial, as the controller's store keeps it."""

    def __init__(self, request: TrialRequest) -> None:
        self.trial, self.attempt, self._request = request.id, request.attempt, request
        self.store = Store(Path(request.root))
        self.folder = self.store.folder(self.trial)
        self.have: Left = {}
        """The number of each file that was fetched last."""
        self._arrived: dict[str, tuple[int, Path]] = {}
        """Fetched checkpoints whose events have not been told yet."""
        self._stack = ExitStack()
        self._held: Callable[[], bool] | None = None
        self._own = f"trials/{self.trial}/checkpoint.pt"

    # Before it starts

    def claim(self) -> str | None:
        """Hold the trial, which its process would do where it saw the folder; who does, where another one holds it."""
        try:
            self._held = self._stack.enter_context(self.store.claim(self.trial, self.attempt, wait=False))
        except Busy as busy:
            return str(busy)
        return None

    def finished(self) -> list[Message]:
        """Return all messages of a trial that another process has finished meanwhile; else none."""
        try:
            result = self.store.result(self.trial)
            if result is None:
                return []
            return [
                Events(tuple(self.store.proven(self.trial, result))),
                Ended(result["status"], result["reason"], result),
            ]
        except Damaged:  # it is run again
            return []

    def give(self, workers: Iterable[Far]) -> None:
        """Empty each worker's scratch folder, and put there what the trial can go on from. May take long."""
        write(self.folder / "spec.json", json.loads(self._request.spec))
        for torn in (*self.folder.glob("*.json.*"), *self.folder.glob("*.pt.*")):
            torn.unlink()
        shared = [self.store.shared(name) for _, name in sorted(self._request.fork, reverse=True)]
        paths, records = [], {self.trial: list(self.store.events(self.trial, strict=False))}
        for path in (self.store.root / self._own, *[path for path in shared if path.exists()][:1]):
            with suppress(
                FileNotFoundError, Damaged
            ):  # there is none yet, it was removed for want of room, or it is of no use
                about = unsealed(path)
                paths.append(path)
                if about["trial"] != self.trial:
                    records[about["trial"]] = list(
                        self.store.events(about["trial"], about["step"], strict=False)
                    )
        for worker in workers:
            worker.clear()
            for path in paths:
                with suppress(FileNotFoundError):
                    _send(worker, str(path.relative_to(self.store.root)), path)
            for trial, events in records.items():
                content = b"".join(line(event, trial) for event in events)
                for offset in range(0, len(content), PIECE):
                    worker.give(f"trials/{trial}/events-0.jsonl", offset, content[offset : offset + PIECE])
        self.have |= {str(path.relative_to(self.store.root)): 0 for path in shared if path.exists()}

    # While it runs

    def hear(self, message: Message) -> list[Message]:
        """Write what is told into the store; returns what the controller is to be told."""
        if self._held and not self._held():
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

    def wanted(self, left: Left) -> list[str]:
        """Of what the trial has left by now, what is not here yet; and make what is here the store's, where its events are, too."""
        for name, (number, path) in list(self._arrived.items()):
            if left.get(name, 0) >= number:
                path.replace(self.store.root / name)
                del self._arrived[name]
        return [
            name
            for name, number in left.items()
            if self._known(name) and (name not in self.have or 0 < self.have[name] < number)
        ]

    def _known(self, name: str) -> bool:
        """Whether it is the trial's own checkpoint, or a state that it was asked to leave."""
        return name == self._own or name in {f"checkpoints/{shared}.pt" for _, shared in self._request.fork}

    def fetch(self, worker: Far, names: Iterable[str]) -> None:
        """Fetch checkpoints. They count once the events before them have been told. May take long."""
        for name in names:
            path = self.store.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"{path.name}.{os.getpid()}.{self.trial}")
            try:
                self.have[name] = _receive(worker, name, temporary)
            except FileNotFoundError:  # removed meanwhile: its trial is over
                temporary.unlink(missing_ok=True)
                continue
            self._arrived[name] = self.have[name], temporary

    # Its end

    def finish(self, worker: Far, end: Ended, left: Left) -> Ended:
        """Fetch what is left, then commit the result. May take long. Returns the trial's end: a failure where not all records came."""
        names = self.wanted(left)
        self.fetch(worker, [name for name in names if end.result is None or name != self._own])
        self.wanted(left)
        for name in worker.files(self.trial):
            path = self.store.root / name
            if not path.resolve().is_relative_to(self.folder.resolve()):
                raise ValueError(f"{name}: a trial's files lie in its own folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"{path.name}.{os.getpid()}")
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
        """Let go of the trial."""
        for _, path in self._arrived.values():
            path.unlink(missing_ok=True)
        self._arrived = {}
        self._stack.close()


def _send(worker: Far, name: str, path: Path) -> None:
    with path.open("rb") as file:
        offset = 0
        while piece := file.read(PIECE):
            worker.give(name, offset, piece)
            offset += len(piece)


def _receive(worker: Far, name: str, path: Path) -> int:
    """Write a worker's file to a path; returns its number."""
    offset = 0
    with path.open("wb") as file:
        while True:
            piece, number = worker.take(name, offset)
            file.write(piece)
            offset += len(piece)
            if len(piece) < PIECE:
                file.flush()
                os.fsync(file.fileno())
                return number
