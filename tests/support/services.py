"""Processes that are killed and started again: PostgreSQL, MLflow, and a sweep's command with its descendants.

They use folders of their own, and listen on 127.0.0.1 only. Processes that were not started here are never touched.
"""

import os
import pwd
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
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar
from urllib.error import HTTPError

import psutil

from ablate.provenance import own_command
from ablate.store.databases import tables
from ablate.store.ledger import Ledger

MARK = "ABLATE_FAULT_SUITE"
"""Environment variable that identifies the descendants of a sweep's command."""
_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Ray's two agents per node. If the head died first, they poll it for 60 s, then end by themselves."""
_TRIAL = "ablate.execution.trial_process"

T = TypeVar("T")


def _spawn(command: Sequence[str], log: Path, **options: object) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, with its output at the end of a log."""
    with log.open("a") as out:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, **options
        )


class Server:
    """Server process that can be killed and started again."""

    def __init__(
        self,
        command: list[str],
        log: Path,
        ready: Callable[[], bool],
        user: str | None = None,
        **environment: str,
    ) -> None:
        self.log, self.ready = log, ready
        self._start = lambda: _spawn(command, log, env=os.environ | environment, user=user, cwd="/")
        self.process = self._start()
        """The process, which is usable when `ready` returns True."""
        self.due = 0.0
        """Time, on the monotonic clock, at which it may be started again."""

    def restart_if_due(self) -> None:
        """Start the process again if it ended and its pause is over.

        PostgreSQL may need several starts: it exits while processes of the killed server are still ending.
        """
        if self.process.poll() is not None and time.monotonic() >= self.due:
            self.process = self._start()

    def kill(self, how: signal.Signals, pause: float) -> None:
        """Send a signal, SIGKILL to descendants too; `restart_if_due` starts it after the pause."""
        descendants = psutil.Process(self.process.pid).children(recursive=True)
        for process in descendants if how == signal.SIGKILL else ():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(how)
        with suppress(ProcessLookupError):
            self.process.send_signal(how)
        self.process.wait(30)
        self.due = time.monotonic() + pause

    def close(self) -> None:
        """End the process."""
        if self.process.poll() is None:
            self.kill(signal.SIGKILL, 0)


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def postgres_programs() -> Path | None:
    """Return the folder of PostgreSQL's programs; None if they, or psycopg, are not installed."""
    initdb = shutil.which("initdb")
    folders = [Path(initdb).resolve().parent] if initdb else []
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
    """Start a PostgreSQL server; return it and its address, without the password.

    PostgreSQL does not run as root: then it is started as `postgres` or `nobody`.

    Args:
        programs: Folder of `initdb` and `postgres`.
        folder: New folder for its data and its socket.
        log: File for its output.
        database: Database in the address.
        password: Password that connections need; None lets all local connections in.
        port: Port; 0 for a free one.
        more: Further arguments of its command.
    """
    users = {entry.pw_name for entry in pwd.getpwall()}
    user = None if os.getuid() else next(name for name in ("postgres", "nobody") if name in users)
    port, secret = port or free_port(), folder / "password"
    folder.mkdir(mode=0o700)
    secret.write_text(password or "")
    for path in (folder, secret) if user else ():
        shutil.chown(path, user)
    access = ["-A", "scram-sha-256", "--pwfile", str(secret)] if password else ["-A", "trust"]
    make = [str(programs / "initdb"), "-D", str(folder / "data"), *access]
    make += ["-U", "ablate", "-E", "UTF8", "--no-sync"]
    with log.open("a") as out:
        subprocess.run(make, user=user, cwd="/", stdout=out, stderr=out, check=True)
    secret.unlink()
    words = f"-h 127.0.0.1 -p {port} -k {folder} -F".split()
    command = [str(programs / "postgres"), "-D", str(folder / "data"), *words, *more]
    probe = [str(programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port)]
    server = Server(command, log, lambda: subprocess.run(probe, check=False).returncode == 0, user)
    return server, f"postgresql://ablate@127.0.0.1:{port}/{database}"


def mlflow(store: str, folder: Path, log: Path, port: int | None = None) -> tuple[Server, str]:
    """Start an MLflow server with a store and a new folder for artifacts; return it and its address.

    `port` is one of 127.0.0.1; None takes a free one.
    """
    folder.mkdir()
    port = port or free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, *f"-m mlflow server --host 127.0.0.1 --port {port} --workers 1".split()]
    command += ["--backend-store-uri", store, "--artifacts-destination", str(folder)]
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    return Server(command, log, lambda: _answers(f"{address}/health"), **quiet), address


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=2) as answer:
            return answer.status == 200
    except HTTPError as error:
        error.close()  # left to the garbage collector, it warns in whatever test runs by then
    except OSError:
        pass
    return False


class SweepCommand:
    """Command of a sweep that can be started again, with all of its descendants."""

    def __init__(
        self, file: Path, state: Path, mlflow: str, executor: str, environment: dict[str, str]
    ) -> None:
        self.folder, self.file, self.mlflow = state / "sweeps" / file.stem, file, mlflow
        self.state, self.log, self._mark = state, state / "output.txt", uuid.uuid4().hex
        state.mkdir(parents=True)
        options = ["--state", str(state), "--mlflow", mlflow, "--executor", executor]
        options += ["--workers", "2", "--device", "cpu", *(["--no-fork"] if executor == "inline" else ())]
        self._command = [*own_command("ablate.sweep", str(file)), *options]
        kept = {
            name: value
            for name, value in os.environ.items()
            if name == "ABLATE_CACHE" or not name.startswith("ABLATE_")
        }
        self._environment = kept | {"ABLATE_REPORT": "false"} | environment | {MARK: self._mark}
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process that was started last; RuntimeError before the first start."""
        if self._process is None:
            raise RuntimeError(f"the command of {self.file} has not been started")
        return self._process

    def start(self) -> None:
        """Start the command, again if it ended."""
        self.starts += 1
        self._process = _spawn(self._command, self.log, env=self._environment)

    def command(self, *words: str) -> tuple[int, list[str]]:
        """Run another `ablate` command on this state folder; return its exit status and its lines."""
        command = own_command("ablate", *words, "--state", str(self.state))
        options = {"env": self._environment, "stdin": subprocess.DEVNULL}
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        with self.log.open("a") as log:
            print(f"$ {' '.join(words)}", done.stdout, done.stderr, sep="\n", file=log)
        return done.returncode, (done.stdout + done.stderr).splitlines()

    @property
    def done(self) -> bool:
        """True if the command reports that the sweep is done."""
        return self.process.poll() == 0

    def output_since(self, since: int) -> list[str]:
        """Return the complete lines that the command printed after its first `since` bytes."""
        with self.log.open("rb") as log:
            log.seek(since)
            return log.read().decode(errors="replace").split("\n")[:-1]

    def last_line(self) -> str:
        """Return the last line that the command printed."""
        return next((line for line in reversed(self.output_since(0)) if line.strip()), "nothing was printed")

    def family(self) -> list[psutil.Process]:
        """Return the running descendants of this command, by the mark in their environment."""
        return [process for process in psutil.process_iter() if _marked(process, self._mark)]

    def victims(self, role: str) -> list[psutil.Process]:
        """Return its processes with a role: controller, worker, trial, child, or a process name."""
        if role == "controller":
            return [psutil.Process(self.process.pid)] if self.process.poll() is None else []
        return [process for process in self.family() if _role(process) == role]

    def records(self) -> int:
        """Return the number of (trial, step) in its ledger that have a record."""
        query = "SELECT count(*) FROM (SELECT DISTINCT trial, step FROM records)"
        return self._ask(lambda book: book.db.execute(query).fetchone()[0], 0)

    def unshipped(self) -> int:
        """Return the number of members that are not completely in MLflow."""
        return self._ask(Ledger.unshipped, 0)

    def outcomes(self) -> dict[str, int]:
        """Return the number of attempts by outcome."""
        query = "SELECT outcome, count(*) FROM attempts GROUP BY outcome"
        return self._ask(lambda book: dict(book.db.execute(query)), {})

    def _ask(self, question: Callable[[Ledger], T], otherwise: T) -> T:
        path = self.folder / "ledger.db"
        # No ledger yet, no tables yet, or a damaged file.
        with suppress(sqlite3.DatabaseError), closing(Ledger(path, readonly=True)) as book:
            return question(book)
        return otherwise

    def await_end(self, seconds: float) -> list[str]:
        """Wait until all its processes have ended; kill those that have not, and return their descriptions.

        Ray's agents are not waited for.
        """
        deadline = time.monotonic() + seconds
        while (
            survivors := [process for process in self.family() if _role(process) not in _AGENTS]
        ) and time.monotonic() < deadline:
            time.sleep(0.05)
        descriptions = []
        for process in survivors:
            with suppress(psutil.NoSuchProcess):
                words = " ".join(process.cmdline()[:4])
                descriptions.append(f"{process.name()} ({process.status()}, {_role(process)}: {words})")
                process.kill()
        return descriptions

    def close(self) -> None:
        """Kill all of its processes."""
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self._process:
            self._process.wait()


def _marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _role(process: psutil.Process) -> str | None:
    with suppress(psutil.Error):
        if process.name().startswith("ray::Actor"):
            return "worker"
        if _TRIAL in process.cmdline():
            parent = process.parent()  # None once it has ended
            return "trial" if parent and _TRIAL in parent.cmdline() else "child"
        return process.name()
    return None


def trials_in(victim: Server | psutil.Process) -> list[psutil.Process]:
    """Return the trials that end with a process."""
    with suppress(psutil.Error):
        if isinstance(victim, psutil.Process):
            return [process for process in victim.children(recursive=True) if _role(process) == "trial"]
    return []


def mlflow_databases(state: Path) -> list[Path]:
    """Return the files of MLflow's database in a state folder, complete or not."""
    return [path for path in state.glob("mlflow*.db*") if path.stat().st_size]


def table_count(paths: list[Path]) -> int:
    """Return the number of tables of MLflow's database; 0 if it cannot be read."""
    for path in paths:
        with (
            suppress(sqlite3.DatabaseError),
            closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db,
        ):
            return len(tables(db))
    return 0
