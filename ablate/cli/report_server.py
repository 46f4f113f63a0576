"""Web server of the reports for `ablate ui`, and the check of the Host header that it shares with Optuna's
dashboard.
"""

import html
import ipaddress
import json
import re
import socket
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from socketserver import BaseServer
from urllib.parse import quote
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from ablate.execution.sweep_control import changed, folders
from ablate.results.ledger import Ledger

# The Host header


def own_names(host: str, more: str) -> frozenset[str]:
    """Return the host names of this server: of this machine, of the address it listens on, and those of
    `more`, separated by commas.
    """
    names = ("localhost", socket.gethostname(), socket.getfqdn(), host, *more.split(","))
    return frozenset(name.strip().lower() for name in names if name.strip())


def calls_us(header: str | None, names: frozenset[str]) -> bool:
    """Return True if the Host header of a request names this server.

    A foreign web page can make its own name resolve to 127.0.0.1 (DNS rebinding) and so read from servers on
    this machine. Its requests carry that name. A numeric address cannot be redirected, so it is always
    accepted.
    """
    match = _HOST.fullmatch(header or "")
    if not match:
        return False
    name = match[1] or match[2]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.lower().rstrip(".") in names
    return True


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

    def do_GET(self) -> None:
        """Send a file of a report, or the list of all sweeps."""
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
        """Send the headers of a file of a report."""
        if self._calls_us():
            super().do_HEAD()

    def _calls_us(self) -> bool:
        """Return True if the request names this server; otherwise send status 403."""
        if calls_us(self.headers.get("Host"), self._names):
            return True
        self.send_response(403)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(_FOREIGN)))
        self.end_headers()
        self.wfile.write(_FOREIGN)
        return False

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Sweeps</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 3rem auto; padding: 0 1rem;
       color: #222 }}
li {{ margin: 2rem 0; list-style: none }} ul {{ padding: 0 }} a {{ color: #0173b2 }}
p {{ margin: .5rem 0; padding-left: .7rem; border-left: .2rem solid #0173b2 }}
small {{ color: #595959 }}
img {{ max-width: 24rem; max-height: 12rem; border: 1px solid #ddd; margin: .3rem .3rem 0 0 }}
</style></head><body><h1>Sweeps</h1><ul>
{items}
</ul></body></html>
"""


def index(state: Path) -> str:
    """Return a page of all sweeps, last run first, with their questions and links to their reports or
    figures.
    """
    sweeps = sorted(folders(state, None), key=changed, reverse=True)
    return _PAGE.format(items="\n".join(_item(state, folder) for folder in sweeps))


def _item(state: Path, folder: Path) -> str:
    report, path = state / "reports" / folder.name, quote(folder.name)
    name, question = html.escape(folder.name), html.escape(_question(folder))
    if (report / "index.html").exists():
        figures = "".join(
            _figure(f"{path}/figures/{quote(file.name)}", f"{path}/index.html")
            for file in sorted(report.glob("figures/forest-*.png"))[:1]
        )
        link = f'<a href="{path}/index.html"><b>{name}</b></a>'
        return f"<li>{link}<br>{question}{_answer(report / 'index.json')}<br>{figures}</li>"
    figures = "".join(
        _figure(f"{path}/{quote(file.name)}", f"{path}/{quote(file.name)}")
        for file in sorted(report.glob("*.png"))
    )
    return f"<li><b>{name}</b><br>{question}<br>{figures or '<small>no report, no figures</small>'}</li>"


def _answer(file: Path) -> str:
    """Return the answer of a report, then its runs and date; nothing for reports of earlier versions, without
    that file.
    """
    if not file.exists():
        return ""
    about = json.loads(file.read_text(encoding="utf-8"))
    return f"<p>{html.escape(about['answer'])}</p><small>{html.escape(about['about'])}</small>"


def _figure(source: str, leads_to: str) -> str:
    return f'<a href="{leads_to}"><img src="{source}" alt="{html.escape(Path(source).stem)}"></a>'


def read_fact(folder: Path, key: str) -> str | None:
    """Return a fact of a sweep, or None; sqlite3.DatabaseError if its ledger cannot be read."""
    with closing(Ledger(folder / "ledger.db", readonly=True)) as ledger:
        return ledger.fact(key)


def _question(folder: Path) -> str:
    """Return the question of a sweep, or the reason why its ledger cannot be read."""
    try:
        return read_fact(folder, "question") or ""
    except sqlite3.DatabaseError as error:
        return f"(its ledger cannot be read: {error})"
