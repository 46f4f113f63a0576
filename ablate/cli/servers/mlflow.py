"""MLflow's server for `ablate ui`, as a child process, and the choice of free ports."""

import errno
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
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

Server = TypeVar("Server")


@dataclass(frozen=True)
class Served:
    """One of the three servers: its name, its address and a hint at its content. If `address` is None, the
    server does not run, and `hint` says why."""

    name: str
    address: str | None
    hint: str


def bind_first_free(name: str, given: int | None, bind: Callable[[int], Server]) -> Server:
    """Return the server that `bind` creates on the given port or, without one, on the first free port from
    the default on; InputError if there is none."""
    first = given or DEFAULT_PORTS[name]
    why = "another process listens on this port; name another port, or omit the option to take a free one"
    for port in range(first, min(first + (1 if given else _PORTS_TRIED), 65536)):
        try:
            return bind(port)
        except (OSError, UnicodeError) as error:
            if getattr(error, "errno", None) != errno.EADDRINUSE:  # a foreign address, a reserved port
                why = f"this machine cannot listen there ({error}); name another port or --host"
                break
    raise InputError(f"--{name}-port {first}: {why}")


class MlflowServer:
    """MLflow's server for a local store: a child process that ends with this one. A remote MLflow is only
    named."""

    def __init__(self, settings: Settings, given: int | None) -> None:
        self._uri, self._given, self._port = settings.mlflow or "", given, 0
        self._remote = self._uri.startswith(("http://", "https://"))
        self._process: subprocess.Popen[bytes] | None = None
        self._artifacts = settings.state.resolve() / "artifacts"
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._problem, path = "", path_of(settings.mlflow)
        if settings.mlflow is None:
            self._problem = f"no MLflow is set ({settings.origins['mlflow']})"
        elif path is not None and not path.exists():  # MLflow would create an empty one
            command = f"ablate rebuild --sync{settings.state_option}"
            self._problem = f"there is no {path}; `{command}` creates it from all sweeps"
        elif not self._remote:
            self._launch()

    def _launch(self) -> None:
        """Start the server on the next port that is free now; it binds the port seconds later."""
        self._port = bind_first_free("mlflow", self._given, self._next_free)
        # Without the last option, MLflow creates a folder in the current one.
        options = ["--host", HOST, "--port", str(self._port), "--workers", "1"]
        options += ["--artifacts-destination", str(self._artifacts)]
        # An environment variable, because the address may hold a password and every user can list the
        # arguments of a process.
        variables = {
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_BACKEND_STORE_URI": self._uri,
        }
        guard = [sys.executable, "-m", "ablate.execution.process_guard"]
        self._process = subprocess.Popen(
            [*guard, sys.executable, "-m", "mlflow", "server", *options],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=os.environ | variables,
            start_new_session=True,
        )

    def _next_free(self, port: int) -> int:
        """Return the port; OSError if a process listens on it, or if the server has tried it."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
        if port <= self._port:
            raise OSError(errno.EADDRINUSE, "tried before")
        return port

    def served(self, experiment: str | None) -> Served:
        """Wait until the server answers; return its address, or that of the page of `experiment`."""
        if self._process:
            self._problem = self._wait(self._process)
        if self._problem:
            return Served("MLflow", None, self._problem)
        address = redact(self._uri) if self._remote else f"http://{HOST}:{self._port}"
        hint = "runs of the arms, best first; select some, then Compare"
        return Served("MLflow", page(address, experiment) if experiment else address, hint)

    def _wait(self, process: "subprocess.Popen[bytes]") -> str:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if process.poll() is not None:
                self._log.seek(0)
                if b"address already in use" not in self._log.read():
                    return f"its server ended at once: {self._error_line()}"
                self.close()  # another process bound the port first
                self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
                self._launch()
                assert self._process
                process = self._process
            if self._answers(process):
                return ""
            time.sleep(_POLL_SECONDS)
        return f"its server does not answer: {self._error_line()}"

    def _answers(self, process: "subprocess.Popen[bytes]") -> bool:
        """Return True if the server answers, and not another process on the same port."""
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self._port}/health", timeout=2) as answer:
                children = psutil.Process(process.pid).children(recursive=True)
                connections = [each for child in children for each in child.net_connections("tcp")]
                ports = {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
                return answer.status == 200 and self._port in ports
        except urllib.error.HTTPError as error:
            error.close()
        except (OSError, HTTPException, psutil.Error):
            pass
        return False

    def _error_line(self) -> str:
        """Return the line of the log that most likely names the error, without passwords."""
        self._log.seek(0)
        lines = list(filter(None, map(str.strip, self._log.read().decode(errors="replace").splitlines())))
        errors = [line for line in lines if "error" in line.lower() or "exception" in line.lower()]
        return redact((errors or lines or ["its log is empty"])[-1], self._uri)

    def close(self) -> None:
        """End the server by closing its standard input, and wait until it is gone."""
        if self._process:
            if self._process.stdin:
                self._process.stdin.close()
            self._process.wait()
        self._log.close()
