"""`ablate ui`: serve MLflow, Optuna's dashboard and the reports of a state folder until Ctrl-C, by default on
127.0.0.1.

MLflow's server is a child process that ends with this one; the other two servers are threads. So no process
remains, however this one ends. Running sweeps are not disturbed: ledgers are only read, and a study is only
written by its sweep.
"""

import signal
import sqlite3
import threading
from collections.abc import Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from http.server import ThreadingHTTPServer
from socketserver import TCPServer, ThreadingMixIn
from typing import Annotated, ClassVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import typer
from rich.console import Console
from rich.text import Text

from ablate.cli.common import console, plain_table
from ablate.cli.options import MlflowFlags, complete_sweeps
from ablate.cli.servers.mlflow import HOST, MlflowServer, Served, bind_first_free
from ablate.cli.servers.reports import ReportHandler, guarded_application, own_names
from ablate.errors import InputError
from ablate.execution.sweep_control import changed
from ablate.store.checked_ledger import folders
from ablate.store.ledger import Ledger

_Port = Annotated[int | None, typer.Option(min=1, max=65535)]


@dataclass(frozen=True)
class Ports:
    """Ports of the three servers; None: the default, or the next free one.

    Args:
        mlflow_port: Port of MLflow; default: 5000, or the next free one.
        optuna_port: Port of Optuna's dashboard; default: 8080, or the next free one.
        reports_port: Port of the reports; default: 8000, or the next free one.
    """

    panel: ClassVar = "Ports"
    mlflow_port: _Port = None
    optuna_port: _Port = None
    reports_port: _Port = None


def ui(
    ports: Ports,
    *,
    host: str = HOST,
    allowed_hosts: Annotated[str, typer.Option(envvar="ABLATE_ALLOWED_HOSTS", show_envvar=False)] = "",
    flags: MlflowFlags,
    sweep: Annotated[str | None, typer.Argument(metavar="[X]", autocompletion=complete_sweeps)] = None,
    wait: bool = False,
) -> None:
    """Serve all sweeps in MLflow, Optuna's dashboard and reports, for this machine only (127.0.0.1), until
    Ctrl-C.

    Args:
        host: Address on which the dashboard and the reports listen, without a password; 127.0.0.1: this
          machine only.
        allowed_hosts: More host names, separated by commas, for the URLs of the dashboard and the reports.
          (ABLATE_ALLOWED_HOSTS)
        sweep: Sweep that the addresses lead to, by name or YAML file; default: the last one that ran.
        wait: Start even if no sweep has run yet, as a service does.
    """
    settings, screen, names = flags.settings(), console(), own_names(host, allowed_hosts)
    state, handler = settings.state, partial(ReportHandler, settings.state, names)
    sweeps = folders(state, [sweep] if sweep else None)
    if not (sweeps or wait):
        command = f"`ablate sweep X.yaml{settings.state_option}` runs an experiment"
        raise InputError(f"{state}: no sweep has been run there yet; {command}")
    name = max(sweeps, key=changed).name if sweeps else None
    optuna = bind_first_free("optuna", ports.optuna_port, lambda port: _WsgiServer((host, port), _Quiet))
    reports = bind_first_free(
        "reports", ports.reports_port, lambda port: ThreadingHTTPServer((host, port), handler)
    )
    mlflow = MlflowServer(settings, ports.mlflow_port)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        with ExitStack() as stack:
            with screen.status("starting ...") if screen.is_terminal else ExitStack():
                stack.callback(mlflow.close)
                hint = "question of each sweep, and its report or figures"
                served = Served("Reports", _serve(reports, stack), hint)
                # Imported here: Optuna and its dashboard take seconds, while MLflow's server starts.
                from ablate.execution.search.combined_storage import dashboard

                application, number = dashboard(state)
                optuna.set_app(guarded_application(application, names))
                address, page, experiment = _serve(optuna, stack), "/note", None
                if name:
                    path = state / "sweeps" / name / "ledger.db"
                    ours = suppress(sqlite3.DatabaseError, InputError)  # InputError: of another version
                    with ours, closing(Ledger(path, readonly=True)) as ledger:
                        experiment = ledger.facts.mlflow_experiment
                        page = "" if ledger.facts.search else page  # importances of a grid say nothing
                    study = number(name)
                    address += "" if study is None else f"dashboard/studies/{study}{page}"
                dashboards = Served("Optuna", address, "the arms as a study: history, importance, gaps")
                servers = [mlflow.served(experiment), dashboards, served]
            _print_addresses(servers, name, screen)
            while True:
                signal.pause()
    except KeyboardInterrupt:
        screen.print("Ended.")


def _serve(server: TCPServer, stack: ExitStack) -> str:
    """Serve from a thread until the stack unwinds, and return the address."""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    host, port = server.server_address[:2]
    return f"http://{host!s}:{port}/"


class _WsgiServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def _print_addresses(servers: Iterable[Served], sweep: str | None, screen: Console) -> None:
    table = plain_table()
    for whole in (False, True, False):  # an address in two lines cannot be opened
        table.add_column(no_wrap=whole, overflow="ignore" if whole else "ellipsis")
    for server in servers:
        address = Text(server.address, overflow="fold") if server.address else Text("not running", "yellow")
        table.add_row(Text(server.name, "bold"), address, Text(server.hint, "dim"))
    named = Text.assemble(
        ("The addresses lead to ", "dim"),
        sweep or "",
        (", and from there to all other sweeps; `ablate ui X` leads to X.", "dim"),
    )
    screen.print(named if sweep else Text("No sweep has run yet: sweeps appear here when they start.", "dim"))
    screen.print(table)
    screen.print("Ctrl-C ends all three.", style="dim")
