"""`ablate ui`: MLflow's pages, Optuna's dashboard and the reports of a state folder, until Ctrl-C, on
127.0.0.1 unless asked.

MLflow's server is a process of its own at the end of a lifeline; the other two are threads of this one. So
nothing is left behind, however this process ends, and nothing is ended that was not started here. What runs
is not disturbed: ledgers are read, and a study is written by its sweep alone.
"""

import html
import ipaddress
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import IO, Annotated, Any
from urllib.parse import quote
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import psutil
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ablate.cli.common import DONE, Mlflow, Profile, State, console
from ablate.cli.settings import Settings, find_settings
from ablate.errors import InputError, redact
from ablate.execution.sweep_control import changed, folders
from ablate.execution.tracking import page
from ablate.results.databases import path_of
from ablate.results.ledger import Ledger

HOST = "127.0.0.1"
_USUAL = {"mlflow": 5000, "optuna": 8080, "reports": 8000}
_PORTS_TRIED = 100
_START_SECONDS = 90.0
_LOOK_SECONDS = 0.1
_TAKEN = "address already in use"
_PORT = {"min": 1, "max": 65535, "rich_help_panel": "Ports"}


@dataclass(frozen=True)
class Shown:
    """One of the three: where it is, what to look at there. `address` None: it is not there, and `hint` says
    why.
    """

    name: str
    address: str | None
    hint: str


def ui(
    sweep: Annotated[
        str | None,
        typer.Argument(
            metavar="[X]",
            help="The sweep whose pages are named, by name or YAML file; default: the one run last.",
        ),
    ] = None,
    mlflow_port: Annotated[
        int | None, typer.Option(help="Of MLflow; default: 5000, or the next that is free.", **_PORT)
    ] = None,
    optuna_port: Annotated[
        int | None, typer.Option(help="Of Optuna's dashboard; default: 8080, or the next.", **_PORT)
    ] = None,
    reports_port: Annotated[
        int | None, typer.Option(help="Of the reports; default: 8000, or the next.", **_PORT)
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Where Optuna's dashboard and the reports listen, which ask for no password: 127.0.0.1, this machine alone."
        ),
    ] = HOST,
    allowed_hosts: Annotated[
        str,
        typer.Option(
            envvar="ABLATE_ALLOWED_HOSTS",
            show_envvar=False,
            help="Names, with commas, by which browsers may call the dashboard and the reports, beside this machine's own. "
            "(ABLATE_ALLOWED_HOSTS)",
        ),
    ] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Start before any sweep does: for a service.")] = False,
    state: State = None,
    profile: Profile = None,
    mlflow: Mlflow = None,
) -> None:
    """Show all sweeps in MLflow's pages, Optuna's dashboard and reports, here alone (127.0.0.1), until
    Ctrl-C.
    """
    settings, screen = find_settings(profile, state=state, mlflow=mlflow), console()
    name = _chosen(settings.state, sweep, wait)
    names = own_names(host, allowed_hosts)
    optuna = _bound("optuna", optuna_port, lambda port: _Wsgi((host, port), _Silent))
    reports = _bound(
        "reports",
        reports_port,
        lambda port: ThreadingHTTPServer((host, port), partial(_Reports, settings.state, names)),
    )
    pages = _Pages(settings, mlflow_port)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        with ExitStack() as stack:
            with screen.status("starting ...") if screen.is_terminal else ExitStack():
                stack.callback(pages.close)
                _serve(reports, stack)
                shown = _start(settings.state, name, pages, optuna, names, stack)
                shown.append(
                    Shown("Reports", _address(reports), "each sweep's question, and its report or pictures")
                )
            _tell(shown, name, screen)
            while True:
                signal.pause()
    except KeyboardInterrupt:
        screen.print("Ended.")
    raise typer.Exit(DONE)


def _chosen(state: Path, word: str | None, wait: bool) -> str | None:
    """The name of the sweep that was asked for, or of the one whose ledger changed last; None where there is
    none yet.
    """
    known = folders(state, [word] if word else None)
    if not (known or wait):
        raise InputError(
            [f"{state}: nothing has been run there yet; `ablate sweep X.yaml` runs an experiment"]
        )
    return max(known, key=changed).name if known else None


def _ports(name: str, given: int | None) -> Iterable[int]:
    """The port that was asked for, or the usual one and those after it."""
    first = given or _USUAL[name]
    return range(first, min(first + (1 if given else _PORTS_TRIED), 65536))


def _bound(name: str, given: int | None, bind: Callable[[int], Any]) -> Any:
    """What listens on the first of these ports that is free."""
    for port in _ports(name, given):
        with suppress(OSError):
            return bind(port)
    raise _taken(name, given or _USUAL[name])


def _taken(name: str, port: int) -> InputError:
    return InputError(
        [
            f"--{name}-port {port}: somebody listens there already; name another, or none, and a free one is taken"
        ]
    )


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


# Starting


def _start(
    state: Path, sweep: str | None, pages: "_Pages", optuna: "_Wsgi", names: frozenset[str], stack: ExitStack
) -> list[Shown]:
    """Start MLflow's pages and Optuna's dashboard beside each other, and say where they are once they answer."""
    from ablate.execution.search import (
        dashboard,
    )  # Optuna and its dashboard take seconds to import: MLflow's server starts meanwhile

    application, number = dashboard(state)
    optuna.set_app(_guarded(application, names))
    _serve(optuna, stack)
    study, experiment = number(sweep) if sweep else None, None
    with suppress(sqlite3.DatabaseError):
        experiment = _fact(state / "sweeps" / sweep, "mlflow_experiment") if sweep else None
    where = _address(optuna) if study is None else f"{_address(optuna)}dashboard/studies/{study}"
    return [pages.shown(experiment), Shown("Optuna", where, "the arms as a study: history, importance, gaps")]


def _serve(server: Any, stack: ExitStack) -> None:
    """Serve from a thread until the stack unwinds."""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stack.callback(server.server_close)
    stack.callback(server.shutdown)


def _address(server: Any) -> str:
    host, port = server.server_address[:2]
    return f"http://{host}:{port}/"


class _Pages:
    """MLflow's server, where one is needed: a process that ends with this one."""

    def __init__(self, settings: Settings, given: int | None) -> None:
        self._uri, self._given, self._ports, self._process = (
            settings.mlflow,
            given,
            iter(_ports("mlflow", given)),
            None,
        )
        self._artifacts = settings.state.resolve() / "artifacts"
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._why = self._missing(settings)
        if self._why is None and not self._remote:
            self._launch()

    def _launch(self) -> None:
        """Start it on the next port that is free at this moment: it binds it itself, seconds later."""
        self._port = next((port for port in self._ports if _free(port)), 0)
        if not self._port:
            raise _taken("mlflow", self._given or _USUAL["mlflow"])
        words = ["--host", HOST, "--port", str(self._port), "--workers", "1"]
        words += ["--artifacts-destination", str(self._artifacts)]  # or it would make a folder here
        command = [
            sys.executable,
            "-m",
            "ablate.execution.process_guard",
            sys.executable,
            "-m",
            "mlflow",
            "server",
            *words,
        ]
        # The store's address may hold a password, which anyone could read among a process's words.
        quiet = {
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_BACKEND_STORE_URI": self._uri,
        }
        output = {"stdout": self._log, "stderr": subprocess.STDOUT}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=os.environ | quiet, start_new_session=True, **output
        )

    @property
    def _remote(self) -> bool:
        return bool(self._uri) and self._uri.startswith(("http://", "https://"))

    def _missing(self, settings: Settings) -> str | None:
        """Why there is nothing to serve."""
        if self._uri is None:
            return f"none is named ({settings.origins['mlflow']})"
        path = path_of(self._uri)
        if path is not None and not path.exists():  # MLflow would make it
            return f"there is no {path}; `ablate sync` draws every sweep in it"
        return None

    def shown(self, experiment: str | None) -> Shown:
        """Where it is, once it answers."""
        if self._why is None and self._process:
            self._why = self._trouble()
        if self._why is not None:
            return Shown("MLflow", None, self._why)
        address = redact(self._uri) if self._remote else f"http://{HOST}:{self._port}"
        hint = "the arms' runs, best first; tick some, then Compare"
        return Shown("MLflow", page(address, experiment) if experiment else address, hint)

    def _trouble(self) -> str | None:
        """Wait until it answers; why it does not."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                if _TAKEN not in self._said():
                    return f"its server ended at once: {self._last_words()}"
                self._again()
            if self._listens():
                return None
            time.sleep(_LOOK_SECONDS)
        return f"its server does not answer: {self._last_words()}"

    def _again(self) -> None:
        """Somebody was faster."""
        self._process.stdin.close()
        self._log.seek(0)
        self._log.truncate()
        self._launch()

    def _listens(self) -> bool:
        """Whether it answers, and it is not somebody else who does."""
        with (
            suppress(OSError, psutil.Error),
            urllib.request.urlopen(f"http://{HOST}:{self._port}/health", timeout=2) as answer,
        ):
            family = psutil.Process(self._process.pid).children(recursive=True)
            ours = {
                end.laddr.port
                for one in family
                for end in one.net_connections("tcp")
                if end.status == psutil.CONN_LISTEN
            }
            return answer.status == 200 and self._port in ours
        return False

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _last_words(self) -> str:
        """What the log says went wrong, without a password."""
        lines = [line.strip() for line in self._said().splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line.lower() or "exception" in line.lower()]
        return redact((telling or lines or ["it said nothing"])[-1], self._uri)

    def close(self) -> None:
        """Let go of its lifeline, and wait until it is gone."""
        if self._process:
            self._process.stdin.close()
            self._process.wait()
        self._log.close()


# Who may call


def own_names(host: str, more: str) -> frozenset[str]:
    """Return the names by which a browser may call a server here: this machine's, where it listens, and those
    of a list with commas.
    """
    words = ("localhost", socket.gethostname(), socket.getfqdn(), host, *more.split(","))
    return frozenset(word.strip().lower() for word in words if word.strip())


def calls_us(header: str | None, names: frozenset[str]) -> bool:
    """Return True if a request's Host header names this server.

    A page of the internet can have its own name resolve to 127.0.0.1 (DNS rebinding), and then reads what
    listens there as if it were its own: its requests carry its name. An address in numbers cannot be pointed
    elsewhere, so that it is always right.
    """
    found = _HOST.fullmatch(header or "")
    if not found:
        return False
    name = found[1] or found[2]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.lower().rstrip(".") in names
    return True


_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]/?#@\s]+))(?::\d+)?")
_FOREIGN = (
    b"This server does not answer to the name in the address: `ablate ui --allowed-hosts NAME` adds one.\n"
)


def _guarded(
    application: Callable[..., Iterable[bytes]], names: frozenset[str]
) -> Callable[..., Iterable[bytes]]:
    """Return the WSGI application, which answers requests for other servers' names by 403."""

    def guarded(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if calls_us(environ.get("HTTP_HOST"), names):
            return application(environ, start)
        start("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [_FOREIGN]

    return guarded


class _Wsgi(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


# Reports


class _Reports(SimpleHTTPRequestHandler):
    """The `reports/` folder, and before it a page that lists the sweeps."""

    def __init__(self, state: Path, names: frozenset[str], *args: Any) -> None:
        self._state, self._names = state, names
        super().__init__(*args, directory=str(state / "reports"))

    def do_GET(self) -> None:
        """A file of a report, or the list of all of them."""
        if not self._calls_us():
            return
        if self.path.partition("?")[0] not in ("/", "/index.html"):
            super().do_GET()
            return
        body = index(self._state).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        """The headers of a file of a report."""
        if self._calls_us():
            super().do_HEAD()

    def _calls_us(self) -> bool:
        """Return True if the request names this server; answer it by 403 otherwise."""
        if calls_us(self.headers.get("Host"), self._names):
            return True
        self.send_response(403)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(_FOREIGN)))
        self.end_headers()
        self.wfile.write(_FOREIGN)
        return False

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Sweeps</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 3rem auto; padding: 0 1rem; color: #222 }}
li {{ margin: 2rem 0; list-style: none }} ul {{ padding: 0 }} a {{ color: #0173b2 }}
p {{ margin: .5rem 0; padding-left: .7rem; border-left: .2rem solid #0173b2 }}
small {{ color: #595959 }} img {{ max-width: 24rem; max-height: 12rem; border: 1px solid #ddd; margin: .3rem .3rem 0 0 }}
</style></head><body><h1>Sweeps</h1><ul>
{items}
</ul></body></html>
"""


def index(state: Path) -> str:
    """A page of all sweeps with their questions, the one run last first; each leads to its report, or to its
    pictures where it has none.
    """
    known = sorted(folders(state, None), key=changed, reverse=True)
    return _PAGE.format(items="\n".join(_item(state, folder) for folder in known))


def _item(state: Path, folder: Path) -> str:
    report, where = state / "reports" / folder.name, quote(folder.name)
    name, question = html.escape(folder.name), html.escape(_question(folder))
    if (report / "index.html").exists():
        forests = sorted(report.glob("figures/forest-*.png"))[:1]
        pictures = "".join(
            _picture(f"{where}/figures/{quote(path.name)}", f"{where}/index.html") for path in forests
        )
        return f'<li><a href="{where}/index.html"><b>{name}</b></a><br>{question}{_answer(report / "index.json")}<br>{pictures}</li>'
    pictures = "".join(
        _picture(f"{where}/{quote(path.name)}", f"{where}/{quote(path.name)}")
        for path in sorted(report.glob("*.png"))
    )
    rest = pictures or "<small>no report, no pictures</small>"
    return f"<li><b>{name}</b><br>{question}<br>{rest}</li>"


def _answer(file: Path) -> str:
    """Return the answer of a report, then its runs and its date; empty for a report of an earlier version,
    which has no such file.
    """
    if not file.exists():
        return ""
    about = json.loads(file.read_text(encoding="utf-8"))
    return f"<p>{html.escape(about['answer'])}</p><small>{html.escape(about['about'])}</small>"


def _picture(source: str, leads_to: str) -> str:
    return f'<a href="{leads_to}"><img src="{source}" alt="{html.escape(Path(source).stem)}"></a>'


def _fact(folder: Path, key: str) -> str | None:
    """A fact of a sweep, None where it has none. sqlite3.DatabaseError where its ledger cannot be read."""
    with closing(Ledger(folder / "ledger.db", readonly=True)) as ledger:
        return ledger.fact(key)


def _question(folder: Path) -> str:
    """A sweep's question; that its ledger cannot be read is worth a line too."""
    try:
        return _fact(folder, "question") or ""
    except sqlite3.DatabaseError as error:
        return f"(its ledger cannot be read: {error})"


# Telling


def _tell(shown: Iterable[Shown], sweep: str | None, screen: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for one in shown:
        address = Text(one.address, overflow="fold") if one.address else Text("not running", "yellow")
        table.add_row(Text(one.name, "bold"), address, Text(one.hint, "dim"))
    named = Text.assemble(
        ("The addresses name ", "dim"),
        sweep or "",
        (", and lead to every other sweep; `ablate ui X` names X.", "dim"),
    )
    screen.print(
        named if sweep else Text("Nothing has been run yet: sweeps appear here as they begin.", "dim")
    )
    screen.print(table)
    screen.print("Ctrl-C ends all three.", style="dim")
