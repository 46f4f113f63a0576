"""MLflow's server for `ablate ui`, as a child process, and the choice of free ports."""

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TypeVar

import psutil

from ablate.cli.settings import Settings
from ablate.errors import InputError, redact
from ablate.execution.tracking.runs import page
from ablate.store.databases import path_of

HOST = "127.0.0.1"
DEFAULT_PORTS = {"mlflow": 5000, "optuna": 8080, "reports": 8000}
_PORTS_TRIED = 100
_START_SECONDS = 90.0
_POLL_SECONDS = 0.1
_IN_USE = "address already in use"

Server = TypeVar("Server")


@dataclass(frozen=True)
class Served:
    """One of the three servers: its name, its address and a hint at its content. If `address` is None, the
    server does not run, and `hint` says why."""

    name: str
    address: str | None
    hint: str


def candidate_ports(name: str, given: int | None) -> Iterable[int]:
    """Return the given port, or the default one and those after it."""
    first = given or DEFAULT_PORTS[name]
    return range(first, min(first + (1 if given else _PORTS_TRIED), 65536))


def bind_first_free(name: str, given: int | None, bind: Callable[[int], Server]) -> Server:
    """Return the server that `bind` creates on the first free port; InputError if there is none."""
    for port in candidate_ports(name, given):
        with suppress(OSError):
            return bind(port)
    raise _port_in_use(name, given or DEFAULT_PORTS[name])


def _port_in_use(name: str, port: int) -> InputError:
    remedy = "name another port, or omit the option to take a free one"
    return InputError(f"--{name}-port {port}: another process listens on this port; {remedy}")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


class MlflowServer:
    """MLflow's server for a local store: a child process that ends with this one. A remote MLflow is only
    named."""

    def __init__(self, settings: Settings, given: int | None) -> None:
        self._uri, self._given = settings.mlflow, given
        self._ports = iter(candidate_ports("mlflow", given))
        self._process: subprocess.Popen | None = None
        self._artifacts = settings.state.resolve() / "artifacts"
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._problem = self._missing_store(settings)
        if self._problem is None and not self._remote:
            self._launch()

    def _launch(self) -> None:
        """Start the server on the next port that is free now; it binds the port seconds later."""
        self._port = next((port for port in self._ports if _free(port)), 0)
        if not self._port:
            raise _port_in_use("mlflow", self._given or DEFAULT_PORTS["mlflow"])
        options = ["--host", HOST, "--port", str(self._port), "--workers", "1"]
        # Without this option, MLflow creates a folder in the current one.
        options += ["--artifacts-destination", str(self._artifacts)]
        server = [sys.executable, "-m", "mlflow", "server", *options]
        # An environment variable, because the address may hold a password and every user can list the
        # arguments of a process.
        variables = {
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_BACKEND_STORE_URI": self._uri or "",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ablate.execution.process_guard", *server],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=os.environ | variables,
            start_new_session=True,
        )

    @property
    def _remote(self) -> bool:
        return (self._uri or "").startswith(("http://", "https://"))

    def _missing_store(self, settings: Settings) -> str | None:
        """Return the reason why there is nothing to serve, or None."""
        if self._uri is None:
            return f"no MLflow is set ({settings.origins['mlflow']})"
        path = path_of(self._uri)
        if path is not None and not path.exists():  # MLflow would create an empty one
            return f"there is no {path}; `ablate rebuild --sync` creates it from all sweeps"
        return None

    def served(self, experiment: str | None) -> Served:
        """Wait until the server answers; return its address, or that of the page of `experiment`."""
        if self._problem is None and self._process:
            self._problem = self._wait()
        if self._problem is not None:
            return Served("MLflow", None, self._problem)
        address = redact(self._uri) if self._uri and self._remote else f"http://{HOST}:{self._port}"
        hint = "runs of the arms, best first; select some, then Compare"
        return Served("MLflow", page(address, experiment) if experiment else address, hint)

    @property
    def _server(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            raise RuntimeError("MLflow's server has not been started")
        return self._process

    def _wait(self) -> str | None:
        """Wait until the server answers; return the reason if it does not."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._server.poll() is not None:
                if _IN_USE not in self._output():
                    return f"its server ended at once: {self._error_line()}"
                self._restart()
            if self._answers():
                return None
            time.sleep(_POLL_SECONDS)
        return f"its server does not answer: {self._error_line()}"

    def _close_input(self) -> None:
        if self._server.stdin:
            self._server.stdin.close()

    def _restart(self) -> None:
        """Start again on the next port, since another process bound this one first."""
        self._close_input()
        self._log.seek(0)
        self._log.truncate()
        self._launch()

    def _answers(self) -> bool:
        """Return True if the server answers, and not another process on the same port."""
        with (
            suppress(OSError, psutil.Error),
            urllib.request.urlopen(f"http://{HOST}:{self._port}/health", timeout=2) as answer,
        ):
            processes = psutil.Process(self._server.pid).children(recursive=True)
            ports = {
                connection.laddr.port
                for process in processes
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            }
            return answer.status == 200 and self._port in ports
        return False

    def _output(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _error_line(self) -> str:
        """Return the line of the log that most likely names the error, without passwords."""
        lines = [line.strip() for line in self._output().splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower() or "exception" in line.lower()]
        return redact((errors or lines or ["its log is empty"])[-1], self._uri)

    def close(self) -> None:
        """End the server by closing its standard input, and wait until it is gone."""
        if self._process:
            self._close_input()
            self._process.wait()
        self._log.close()
