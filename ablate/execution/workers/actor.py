"""What runs on a worker: a supervisor behind Ray's calls. It needs Ray and this package; no tracker, no search, no tables.

Where the worker does not see the controller's state folder, its trials run in a scratch folder of this node, laid out like one: what they
leave there is read from outside, piece by piece, and the folder goes when this process ends, however it ends.
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
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from ablate import __version__, numerics
from ablate.execution.messages import Ended, Forked, Message, TrialRequest
from ablate.execution.supervisor import BEAT_SECONDS, Supervisor
from ablate.numerics.spec import VERSION
from ablate.results.trial_store import Store

PIECE = 32 << 20
"""Bytes of a file that cross at once."""
_POLL_SECONDS = 0.5
_CLEANER = 'exec 3<&0; (cat <&3 >/dev/null; sleep 2; rm -rf "$1") >/dev/null 2>&1 &'
"""Waits until nobody holds the other end of its standard input, and for the trial to end by its own lifeline. Ray ends a worker's children
with it, but not theirs."""

Left = dict[str, int]
"""Files that a trial left for others in its scratch folder, by name; a number that grows when one is replaced."""


def versions() -> dict[str, str]:
    """What the two ends of a wire must have in common."""
    import ray

    return {
        "Ray": ray.__version__,
        "Python": sys.version.split()[0],
        "ablate": __version__,
        "ablate's numerics": str(VERSION),
    }


class Actor:
    """One node's part of a trial: all of it, or the ranks of a gang that run here."""

    def __init__(self) -> None:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        self.supervisor = Supervisor()
        self._told: queue.SimpleQueue[tuple[Message, Left]] = queue.SimpleQueue()
        self._scratch: Path | None = None
        self._cleaner: subprocess.Popen | None = None
        self._open: dict[str, IO[bytes]] = {}
        self._stopped = False

    def warm(self) -> None:
        """Be ready for a trial."""
        self.supervisor.warm()

    def look(self, root: str, nonce: str) -> dict[str, Any]:
        """This worker, as the controller wants to know it: where it is, what it has, whether it sees the file `nonce` in the folder."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return {
            "node": ray.get_runtime_context().get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "port": port,  # free now, for the ranks of a gang to meet at
            "versions": versions(),
            "compiled": any(
                Path(numerics.__file__).parent.glob("kernels/*.so")
            ),  # asked without torch, which takes seconds to import
            "sees": Path(root, nonce).exists(),
        }

    def start(self, request: TrialRequest, apart: bool) -> None:
        """Begin a trial, in the controller's state folder or `apart` in a scratch folder; `hear` tells the rest."""
        self._stopped = False
        request = replace(request, root=str(self._own_scratch())) if apart else request
        threading.Thread(target=self._run, args=(request, apart), daemon=True).start()

    def _run(self, request: TrialRequest, apart: bool) -> None:
        """Pass on what the supervisor says. What was left is told one message late: by then the events before it were told, too."""
        left: Left = {}
        trunk = (
            Store(Path(request.root)).folder(request.id) / f"trunk-{request.attempt}.json" if apart else None
        )
        try:
            for message in self.supervisor.run(request):
                if trunk and trunk.exists():  # before the first event, whose meaning depends on it
                    self._told.put((Forked(json.loads(trunk.read_text())), {}))
                    trunk = None
                self._told.put((message, self._left() if isinstance(message, Ended) and apart else left))
                left = self._left() if apart else left
                if self._stopped:  # before there was a process to end
                    self.supervisor.stop()
        except (
            Exception
        ) as error:  # the boundary of a thread: told as the trial's failure, which is tried again
            self._told.put((Ended("failed", f"its supervisor failed: {type(error).__name__}: {error}"), {}))

    def hear(self) -> tuple[list[Message], Left]:
        """What was said since, as soon as there is something; nothing after a long silence."""
        found = []
        with suppress(queue.Empty):
            found.append(self._told.get(timeout=2 * BEAT_SECONDS))
            while True:
                found.append(self._told.get_nowait())
        return [message for message, _ in found], found[-1][1] if found else {}

    def stop(self) -> None:
        """End the trial that runs."""
        self._stopped = True
        self.supervisor.stop()

    # The scratch folder

    def give(self, name: str, offset: int, piece: bytes) -> None:
        """Write a piece of a file."""
        path = self._own_scratch() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab" if offset else "wb") as file:
            file.write(piece)

    def take(self, name: str, offset: int) -> tuple[bytes, int]:
        """A piece of a file, shorter than PIECE at its end, and the file's number. A file that is replaced meanwhile stays as it was."""
        if offset == 0:
            self._open[name] = (self._own_scratch() / name).open("rb")
        file = self._open[name]
        piece = file.read(PIECE)
        number = os.fstat(file.fileno()).st_mtime_ns
        if len(piece) < PIECE:
            self._open.pop(name).close()
        return piece, number

    def files(self, trial: str) -> list[str]:
        """The names of what the trial's folder holds for people: its log and its artifacts."""
        root = self._own_scratch()
        folder = Store(root).folder(trial)
        found = [*folder.glob("log-*.txt"), *(folder / "artifacts").rglob("*")]
        return [str(path.relative_to(root)) for path in found if path.is_file()]

    def clear(self) -> None:
        """Empty the scratch folder."""
        for file in self._open.values():
            file.close()
        self._open = {}
        for path in self._scratch.iterdir() if self._scratch else ():
            shutil.rmtree(path, ignore_errors=True)

    def _left(self) -> Left:
        root, found = self._own_scratch(), {}
        for path in (*root.glob("checkpoints/*.pt"), *root.glob("trials/*/checkpoint.pt")):
            with suppress(FileNotFoundError):  # removed since by its trial, which is over
                found[str(path.relative_to(root))] = path.stat().st_mtime_ns
        return found

    def _own_scratch(self) -> Path:
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="ablate-scratch-"))
            words = ["sh", "-c", _CLEANER, "sh", str(self._scratch)]
            self._cleaner = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
        return self._scratch


def _end_with(parent: int) -> None:
    """End this worker, and through its lifeline the trial, with Ray's process on this node: Ray leaves a busy worker behind."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(1)
