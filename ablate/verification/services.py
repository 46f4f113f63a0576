"""Processes that are killed and started again: PostgreSQL, MLflow over it, and the sweep's command with all
that comes of it.

In folders of their own, on 127.0.0.1. Nothing that was not started here is touched.
"""

import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil

from ablate.results.databases import tables
from ablate.results.ledger import Ledger
from ablate.results.ledger_progress import moments, outcomes

_MARK = "ABLATE_FAULT_SUITE"
"""In the environment of everything that comes of a sweep's command: how its processes are told from all
others."""
_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Ray's own, two a node: where the head died before them they ask it for 60 s more, doing nothing, and end
then."""


class Server:
    """A process that is killed and started again: in a session of its own, listening on 127.0.0.1."""

    def __init__(
        self,
        command: list[str],
        log: Path,
        ready: Callable[[], bool],
        user: str | None = None,
        **environment: str,
    ) -> None:
        self._command, self._log, self.ready, self._user = command, log, ready, user
        self._environment = os.environ | environment
        self.process: subprocess.Popen | None = None
        self.due: float | None = None
        """Time to start it again, while it is dead."""
        self.start()

    def start(self) -> None:
        """Start it; it is usable once `ready`."""
        self.due = None
        with self._log.open("a") as log:
            out = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            out |= {"env": self._environment, "user": self._user, "cwd": "/"}
            self.process = subprocess.Popen(self._command, start_new_session=True, **out)

    def tend(self) -> None:
        """Start it again where that is due, or where it gave up, as PostgreSQL does while what it left behind
        still ends.
        """
        if self.process.poll() is not None and time.monotonic() >= (self.due or 0):
            self.start()

    def kill(self, how: signal.Signals, pause: float) -> None:
        """End it, and all that it started, and start it again after a pause."""
        family = [*psutil.Process(self.process.pid).children(recursive=True), self.process]
        for process in family if how == signal.SIGKILL else (self.process,):
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.send_signal(how)
        self.process.wait(30)
        self.due = time.monotonic() + pause

    def close(self) -> None:
        """End it for good."""
        if self.process.poll() is None:
            self.kill(signal.SIGKILL, 0)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def postgres_programs() -> Path | None:
    """The folder of PostgreSQL's programs, None where there are none or Python cannot speak to it."""
    from importlib.util import find_spec

    folders = [path.resolve().parent for path in (shutil.which("initdb"),) if path for path in (Path(path),)]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((f for f in folders if (f / "postgres").exists()), None) if find_spec("psycopg") else None


def postgres(
    programs: Path,
    folder: Path,
    log: Path,
    database: str = "postgres",
    password: str | None = None,
    port: int = 0,
    more: Sequence[str] = (),
) -> tuple[Server, str]:
    """A PostgreSQL in a folder of its own, and its address, without the password; with one, nobody comes in
    without it.

    It refuses to run as root, and is then run as `postgres` or `nobody`. `more`: words of its command.
    """
    user, port = _other_user(), port or free_port()
    folder.mkdir(mode=0o700)
    secret = folder / "password"
    secret.write_text(password or "")
    for path in (folder, secret) if user else ():
        shutil.chown(path, user)
    how = ["-A", "scram-sha-256", "--pwfile", secret] if password else ["-A", "trust"]
    make = [programs / "initdb", "-D", folder / "data", *how, "-U", "ablate", "-E", "UTF8", "--no-sync"]
    with log.open("a") as out:
        subprocess.run(make, user=user, cwd="/", stdout=out, stderr=out, check=True)
    secret.unlink()
    command = [
        programs / "postgres",
        "-D",
        folder / "data",
        "-h",
        "127.0.0.1",
        "-p",
        port,
        "-k",
        folder,
        "-F",
        *more,
    ]
    probe = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
    server = Server(
        [*map(str, command)], log, lambda: subprocess.run(probe, check=False).returncode == 0, user
    )
    return server, f"postgresql://ablate@127.0.0.1:{port}/{database}"


def _other_user() -> str | None:
    import pwd

    known = {entry.pw_name for entry in pwd.getpwall()}
    return None if os.getuid() else next(name for name in ("postgres", "nobody") if name in known)


def mlflow(store: str, folder: Path, log: Path) -> tuple[Server, str]:
    """An MLflow server over a store, and its address."""
    folder.mkdir()
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    command += ["--backend-store-uri", store, "--artifacts-destination", str(folder)]
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    return Server(command, log, lambda: _answers(f"{address}/health"), **quiet), address


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


class Sweep:
    """The sweep's command, started as often as it takes, and every process that came of it."""

    def __init__(
        self, file: Path, state: Path, mlflow: str, executor: str, environment: dict[str, str]
    ) -> None:
        self.folder, self.file, self.mlflow = state / "sweeps" / file.stem, file, mlflow
        self.state, self.log, self._mark = state, state / "output.txt", uuid.uuid4().hex
        state.mkdir(parents=True)
        words = [
            "--state",
            str(state),
            "--mlflow",
            mlflow,
            "--executor",
            executor,
            "--workers",
            "2",
            "--device",
            "cpu",
        ]
        self._command = [
            sys.executable,
            "-m",
            "ablate.sweep",
            str(file),
            *words,
            *(("--no-fork",) if executor == "inline" else ()),
        ]
        kept = {key: value for key, value in os.environ.items() if not key.startswith("ABLATE_")}
        self._environment = kept | {"ABLATE_REPORT": "false"} | environment | {_MARK: self._mark}
        self.starts = 0
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        """The same command, once more."""
        self.starts += 1
        with self.log.open("a") as log:
            out = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.process = subprocess.Popen(
                self._command, env=self._environment, start_new_session=True, **out
            )

    def command(self, *words: str) -> tuple[int, list[str]]:
        """Another command of ours on this state folder; returns its status and the lines that it printed."""
        command = [sys.executable, "-m", "ablate", *words, "--state", str(self.state)]
        done = subprocess.run(
            command,
            env=self._environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        with self.log.open("a") as log:
            print(f"$ {' '.join(words)}", done.stdout, done.stderr, sep="\n", file=log)
        return done.returncode, (done.stdout + done.stderr).splitlines()

    @property
    def done(self) -> bool:
        """True if the command reports that the sweep is done."""
        return self.process.poll() == 0

    def told(self, since: int) -> list[str]:
        """Whole lines that the command printed after so many bytes."""
        with self.log.open("rb") as log:
            log.seek(since)
            return log.read().decode(errors="replace").split("\n")[:-1]

    def last_line(self) -> str:
        """The last line that the command printed."""
        return next((line for line in reversed(self.told(0)) if line.strip()), "nothing was printed")

    def family(self) -> list[psutil.Process]:
        """Every process that lives and came of this sweep, known by the mark in its environment."""
        return [process for process in psutil.process_iter() if _marked(process, self._mark)]

    def victims(self, role: str) -> list[psutil.Process]:
        """Its processes with a role."""
        if role == "controller":
            return [psutil.Process(self.process.pid)] if self.process.poll() is None else []
        return [process for process in self.family() if _role(process) == role]

    def records(self) -> int:
        """Return the number of moments that its ledger has records of."""
        return self._ask(moments, 0)

    def unshipped(self) -> int:
        """Members that MLflow does not show wholly."""
        return self._ask(Ledger.unshipped, 0)

    def outcomes(self) -> dict[str, int]:
        """Return the number of attempts by outcome."""
        return self._ask(outcomes, {})

    def _ask(self, question: Callable[[Ledger], Any], otherwise: Any) -> Any:
        with suppress(sqlite3.DatabaseError):  # there is none yet, no table in it, or it was damaged
            book = Ledger(self.folder / "ledger.db", readonly=True)
            try:
                return question(book)
            finally:
                book.close()
        return otherwise

    def gone(self, seconds: float) -> list[str]:
        """Wait until all its processes are; those that are not, in words, ended here.

        Ray's agents are left to themselves.
        """
        deadline = time.monotonic() + seconds
        while (
            left := [one for one in self.family() if _role(one) not in _AGENTS]
        ) and time.monotonic() < deadline:
            time.sleep(0.05)
        told = []
        for process in left:
            with suppress(psutil.NoSuchProcess):
                told.append(
                    f"{process.name()} ({process.status()}, {_role(process) or process.name()}:"
                    f" {' '.join(process.cmdline()[:4])})"
                )
                process.kill()
        return told

    def close(self) -> None:
        """End what is left of it."""
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process:
            self.process.wait()


def _marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _role(process: psutil.Process) -> str | None:
    with suppress(psutil.Error):
        if process.name().startswith("ray::Actor"):
            return "worker"
        if "ablate.execution.trial_process" in process.cmdline():
            return "trial" if "ablate.execution.trial_process" in process.parent().cmdline() else "child"
        return process.name()
    return None


def trials_in(victim: Any) -> list[psutil.Process]:
    """The trials that end with a process."""
    with suppress(psutil.Error):
        if isinstance(victim, psutil.Process):
            return [process for process in victim.children(recursive=True) if _role(process) == "trial"]
    return []


def mlflow_databases(state: Path) -> list[Path]:
    """Return MLflow's database in a state folder, finished or not."""
    return [path for path in state.glob("mlflow*.db*") if path.stat().st_size]


def table_count(paths: list[Path]) -> int:
    """Return the number of tables of MLflow's database, as far as it can be read."""
    for path in paths:
        with (
            suppress(sqlite3.DatabaseError),
            closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db,
        ):
            return len(tables(db))
    return 0
