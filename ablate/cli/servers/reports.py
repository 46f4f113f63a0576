"""Web server of the reports for `ablate ui`, and the check of the Host header, which Optuna's dashboard
shares."""

import io
import ipaddress
import re
import socket
import sqlite3
from collections import Counter
from collections.abc import Iterable
from contextlib import closing, suppress
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from socketserver import BaseServer
from typing import BinaryIO
from urllib.parse import quote, unquote
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from ablate.cli.common import filled
from ablate.errors import InputError
from ablate.execution.sweep_control import changed, holder
from ablate.reports.plain_text import html_text
from ablate.reports.report_about import about
from ablate.store.checked_ledger import folders
from ablate.store.ledger import Ledger

# The Host header


def own_names(host: str, more: str) -> frozenset[str]:
    """Return the host names of this server: of this machine, of the address it listens on, and those of
    `more`, separated by commas; without the dot that may end a full name."""
    names = ("localhost", socket.gethostname(), socket.getfqdn(), host, *more.split(","))
    return frozenset(stripped for name in names if (stripped := name.strip().lower().rstrip(".")))


def calls_us(header: str | None, names: frozenset[str]) -> bool:
    """Return True if the Host header of a request names this server.

    A foreign web page can make its own name resolve to 127.0.0.1 (DNS rebinding) and so read from servers on
    this machine. Its requests carry that name. A numeric address cannot be redirected, so it is always
    accepted.
    """
    if not (match := _HOST.fullmatch(header or "")):
        return False
    name = match[1] or match[2]
    with suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return name.lower().rstrip(".") in names


_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]/?#@\s]+))(?::\d+)?")
_FOREIGN = b"The host name in the address is not allowed: `ablate ui --allowed-hosts NAME` adds a name.\n"


def guarded_application(application: WSGIApplication, names: frozenset[str]) -> WSGIApplication:
    """Wrap a WSGI application so that requests under other host names get status 403."""

    def guarded(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if calls_us(environ.get("HTTP_HOST"), names):
            return application(environ, start)
        start("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [_FOREIGN]

    return guarded


# Reports


class ReportHandler(SimpleHTTPRequestHandler):
    """Request handler for the `reports/` folder, with a list of all sweeps as its index page."""

    def __init__(
        self,
        state: Path,
        names: frozenset[str],
        request: socket.socket,
        client_address: tuple[str, int],
        server: BaseServer,
    ) -> None:
        self._state, self._names = state, names
        super().__init__(request, client_address, server, directory=str(state / "reports"))

    def send_head(self) -> io.BytesIO | BinaryIO | None:
        """Send the status and headers that GET and HEAD have in common, and return the body: of the list of
        all sweeps or a file of a report. Status 403 if the request does not name this server, 404 for a path
        outside of the folder or of no file (`/name/%00`)."""
        if not calls_us(self.headers.get("Host"), self._names):
            return self._head(HTTPStatus.FORBIDDEN, "plain", _FOREIGN)
        if self.path.partition("?")[0] in ("/", "/index.html"):
            return self._head(HTTPStatus.OK, "html", index(self._state).encode())
        with suppress(ValueError, OSError, RuntimeError):  # RuntimeError: links in a circle
            if self._inside():
                return super().send_head()
        self.send_error(HTTPStatus.NOT_FOUND)
        return None

    def _inside(self) -> bool:
        """Return True if the path is plain and leads to something in the folder, links followed. The base
        class drops `..` from what it opens, but not from where it redirects to: a browser would take
        `/\\host/..` for the address of another server."""
        path = unquote(self.path.partition("?")[0].partition("#")[0], errors="surrogatepass")
        _, *parts = path.removesuffix("/").split("/")
        if not path.startswith("/") or "\\" in path or {"", ".", ".."} & {*parts}:
            return False
        file, folder = Path(self.translate_path(self.path)), Path(self.directory).resolve()
        files = [file, *(file / name for name in ("index.html", "index.htm"))]  # sent for a folder
        return all(each.resolve().is_relative_to(folder) for each in files)

    def _head(self, status: HTTPStatus, kind: str, body: bytes) -> io.BytesIO:
        self.send_response(status)
        self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return io.BytesIO(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


_CHIPS = {
    "answered": "answered",
    "open": "not answered yet",
    "none": "no answer",
    "failed": "failed",
    "running": "running",
    "unknown": "no report",
}
"""Text of a sweep's chip by its class."""


def index(state: Path) -> str:
    """Return a page of all sweeps: running ones first, then the last that were run, with question, answer,
    verdict and runs."""
    sweeps = sorted(folders(state, None), key=changed, reverse=True)
    sweeps.sort(key=lambda folder: holder(folder) is None)
    return filled("sweeps.html", items="\n".join(_item(state, folder) for folder in sweeps))


def _item(state: Path, folder: Path) -> str:
    report, path = state / "reports" / folder.name, quote(folder.name)
    name, (question, counts) = html_text(folder.name), _facts(folder)
    found = about(report)
    title = f"<b>{name}</b>"
    if (report / "index.html").exists():
        title = f'<a href="{path}/index.html">{title}</a>'
    if holder(folder):
        kind = "running"
    elif counts["failed"] + counts["oom"] and not counts["done"] + counts["diverged"]:
        kind = "failed"
    elif "answered" not in found:
        kind = "unknown"
    else:
        kind = "answered" if found["answered"] else "open" if found["valid"] else "none"
    # What an earlier report says is not about the runs of now.
    answer = f"<p>{html_text(found['answer'])}</p>" if found.get("answer") and kind != "running" else ""
    total, over = counts.total(), counts.total() - counts["pending"] - counts["running"]
    chip = f"{_CHIPS[kind]}, {over} of {total}" if kind == "running" and total else _CHIPS[kind]
    runs = ", ".join(f"{count} {status}" for status, count in counts.items())
    when = f"<br><small>{html_text(found['about'])}</small>" if found.get("about") else ""
    return (
        f'<tr><th scope="row">{title}</th><td>{html_text(question)}{answer}{when}</td>'
        f'<td><span class="chip {kind}">{chip}</span></td><td>{html_text(runs)}</td></tr>'
    )


def _facts(folder: Path) -> tuple[str, Counter[str]]:
    try:
        with closing(Ledger(folder / "ledger.db", readonly=True)) as ledger:
            counts = Counter(member.status for member in ledger.members())
            question = str(ledger.facts.question)  # a changed bit makes a text bytes
    except (sqlite3.DatabaseError, InputError) as error:
        return f"(its ledger cannot be read: {error})", Counter()
    return question, counts
