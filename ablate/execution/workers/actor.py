"""The code that runs on a worker: a supervisor behind Ray's calls.

It needs Ray and this package; no tracker, no search, no tables.

On a worker that does not see the controller's state folder, a trial runs in a scratch folder of its node with
the same layout. The controller reads the trial's files from there piece by piece. The scratch folder is
deleted when this process ends, even if it is killed.
"""

import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TypedDict

from ablate import provenance
from ablate.execution.messages import Ended, Forked, Message, TrialRequest
from ablate.execution.process_guard import exit_with_parent
from ablate.execution.supervisor import HEARTBEAT_SECONDS, Supervisor
from ablate.numerics.spec import VERSION
from ablate.store.trial_store import Store
from ablate.version import __version__

PIECE = 32 << 20
"""Bytes of a file that one call transfers."""
_CLEANER = 'exec 3<&0; (cat <&3 >/dev/null; sleep 2; rm -rf "$1") >/dev/null 2>&1 &'
"""Shell command that deletes the scratch folder once the other end of its standard input is closed, two
seconds later: by then the trial's processes have ended too. It runs on its own since Ray ends a worker's
children with the worker, but not theirs."""

CheckpointTimes = dict[str, int]
"""Checkpoints in a scratch folder: modification time in ns by file name, which grows when a file is
replaced."""


class WorkerFacts(TypedDict):
    """Description of a worker. A plain dictionary: another version of this package can read it too."""

    node: str
    """Ray's id of the node."""
    address: str
    port: int
    """Free port there, to which the ranks of a gang connect."""
    versions: dict[str, str]
    compiled: bool
    """True if the compiled quantisers are installed there."""
    sees: bool
    """True if the worker sees the controller's state folder."""


def versions() -> dict[str, str]:
    """Return the versions in which the controller and a worker must agree."""
    import ray

    return {
        "Ray": ray.__version__,
        "Python": sys.version.split()[0],
        "ablate": __version__,
        "ablate's numerics": str(VERSION),
    }


class Actor:
    """One node's part of a trial: the whole trial, or the ranks of a gang that run on this node."""

    def __init__(self) -> None:
        # Ray does not end a busy worker when its process on this node ends. The trial ends with this process.
        exit_with_parent()
        self.supervisor = Supervisor()
        self._queue: queue.SimpleQueue[tuple[Message, CheckpointTimes]] = queue.SimpleQueue()
        self._scratch: Path | None = None
        self._cleaner: subprocess.Popen | None = None
        self._open: dict[str, IO[bytes]] = {}
        self._stopped = False

    def warm(self, device: str) -> None:
        """Start the child process for trials on a class of device, so that the first one need not wait."""
        self.supervisor.warm(device)

    def describe(self, root: str, nonce: str) -> WorkerFacts:
        """Return this worker's node, address, versions, and access to the state folder. `root`: that of the
        controller, in which it has just made the file `nonce`. A worker that finds the file shares the
        folder."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return {
            "node": ray.get_runtime_context().get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "port": port,
            "versions": versions(),
            "compiled": provenance.compiled(),
            "sees": Path(root, nonce).exists(),
        }

    def start(self, request: TrialRequest, remote: bool) -> None:
        """Begin a trial, or this node's part of it, in a thread; `messages` returns what it sends. `remote`:
        the worker does not see the state folder; the trial then runs in a scratch folder."""
        self._stopped = False
        request = replace(request, root=str(self._scratch_folder())) if remote else request
        threading.Thread(target=self._run, args=(request, remote), daemon=True).start()

    def _run(self, request: TrialRequest, remote: bool) -> None:
        """Queue the supervisor's messages, each with the checkpoints that existed before it. A checkpoint is
        listed one message late, after the events that precede it."""
        checkpoints: CheckpointTimes = {}
        folder = Store(Path(request.root)).folder(request.id)
        trunk = folder / f"trunk-{request.attempt}.json" if remote else None
        try:
            for message in self.supervisor.run(request):
                if trunk and trunk.exists():  # before the first event, whose meaning depends on it
                    self._queue.put((Forked(json.loads(trunk.read_text())), {}))
                    trunk = None
                current = self._checkpoints() if remote else {}
                self._queue.put((message, current if isinstance(message, Ended) else checkpoints))
                checkpoints = current
                if self._stopped:  # `stop` was called before there was a process to end
                    self.supervisor.stop()
        except Exception as error:  # the boundary of a thread: the trial fails, and is tried again
            self._queue.put((Ended("failed", f"its supervisor failed: {type(error).__name__}: {error}"), {}))

    def messages(self) -> tuple[list[Message], CheckpointTimes]:
        """Return the messages since the last call, and the checkpoints whose events are among all those
        returned so far. Waits for the first message; returns no messages after a long silence."""
        batch = []
        with suppress(queue.Empty):
            batch.append(self._queue.get(timeout=2 * HEARTBEAT_SECONDS))
            while True:
                batch.append(self._queue.get_nowait())
        return [message for message, _ in batch], batch[-1][1] if batch else {}

    def stop(self) -> None:
        self._stopped = True
        self.supervisor.stop()

    # The scratch folder

    def write_piece(self, name: str, offset: int, piece: bytes) -> None:
        """Append a piece to a file of the scratch folder; offset 0 starts the file anew."""
        path = self._scratch_folder() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab" if offset else "wb") as file:
            file.write(piece)

    def read_piece(self, name: str, offset: int) -> tuple[bytes, int]:
        """Return the next piece of a file, and the file's modification time in ns. Offset 0 opens the file,
        which stays open until its last piece, shorter than PIECE, is read. So a file that is replaced
        meanwhile is still read as it was."""
        if offset == 0:
            self._open[name] = (self._scratch_folder() / name).open("rb")
        file = self._open[name]
        piece = file.read(PIECE)
        modified = os.fstat(file.fileno()).st_mtime_ns
        if len(piece) < PIECE:
            self._open.pop(name).close()
        return piece, modified

    def files(self, trial: str) -> list[str]:
        """Return the names of a trial's logs and artifacts, relative to the scratch folder."""
        root = self._scratch_folder()
        folder = Store(root).folder(trial)
        paths = [*folder.glob("log-*.txt"), *(folder / "artifacts").rglob("*")]
        return [str(path.relative_to(root)) for path in paths if path.is_file()]

    def clear(self) -> None:
        """Empty the scratch folder."""
        for file in self._open.values():
            file.close()
        self._open = {}
        for path in self._scratch.iterdir() if self._scratch else ():
            shutil.rmtree(path, ignore_errors=True)

    def _checkpoints(self) -> CheckpointTimes:
        root, checkpoints = self._scratch_folder(), {}
        for path in (*root.glob("checkpoints/*.pt"), *root.glob("trials/*/checkpoint.pt")):
            with suppress(FileNotFoundError):  # removed meanwhile by its trial, which has ended
                checkpoints[str(path.relative_to(root))] = path.stat().st_mtime_ns
        return checkpoints

    def _scratch_folder(self) -> Path:
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="ablate-scratch-"))
            command = ["sh", "-c", _CLEANER, "sh", str(self._scratch)]
            self._cleaner = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        return self._scratch
