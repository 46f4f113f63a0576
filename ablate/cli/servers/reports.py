"""Web server of the reports for `ablate ui`, and the check of the Host header, which Optuna's dashboard
shares."""

import io
import ipaddress
import re
import socket
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from socketserver import BaseServer
from typing import Any, BinaryIO
from urllib.parse import quote, unquote
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from ablate.errors import InputError
from ablate.execution.sweep_control import changed, folders, holder
from ablate.reports.plain_text import html_text
from ablate.reports.report_about import about
from ablate.store.ledger import Ledger

# The Host header


def own_names(host: str, more: str) -> frozenset[str]:
    """Return the host names of this server: of this machine, of the address it listens on, and those of
    `more`, separated by commas."""
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

    def send_head(self) -> io.BytesIO | BinaryIO | None:
        """Send status 404 for a path outside of the folder or of no file (`/name/%00`); else as the base
        class does."""
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
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Sweeps</title><style>
:root {{ color-scheme: light dark; --ink: #1a1d21; --soft: #5c6570; --line: #d9dee3; --paper: #fff;
  --good: #0b6e4f; --open: #7a5c1e; --bad: #a4262c; --accent: #0072b2 }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6e9ec; --soft: #9aa4ae; --line: #2c343b;
  --paper: #12171b; --good: #5fc49b; --open: #d2b16a; --bad: #ef8a8f; --accent: #6db6e8 }} }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper) }}
a {{ color: var(--accent) }} table {{ border-collapse: collapse; width: 100% }}
th, td {{ text-align: left; vertical-align: top; padding: .5rem .8rem .5rem 0;
  border-bottom: 1px solid var(--line) }}
thead th {{ font-size: .85rem; color: var(--soft) }} tbody th {{ font-weight: inherit }}
small {{ color: var(--soft) }} p {{ margin: .2rem 0 }}
a:focus-visible, input:focus-visible {{ outline: 2px solid var(--accent); outline-offset: 2px }}
input {{ font: inherit; padding: .25rem .6rem; width: 24rem; max-width: 100%; margin: 0 0 1rem }}
.chip {{ border: 1px solid; border-radius: 1rem; padding: 0 .6rem; font-size: .82rem; white-space: nowrap }}
.answered {{ color: var(--good) }} .open {{ color: var(--open) }} .none, .failed {{ color: var(--bad) }}
.running {{ color: var(--accent) }} .unknown {{ color: var(--soft) }}
@media (max-width: 46rem) {{ thead {{ display: none }}
  td, tbody th {{ display: block; border: 0; padding: .1rem 0 }}
  tr {{ display: block; border-bottom: 1px solid var(--line); padding: .6rem 0 }} }}
</style></head><body><main><h1>Sweeps</h1>
<input type="search" id="filter" placeholder="Show sweeps with these words" aria-label="Filter" hidden>
<table><thead><tr><th scope="col">sweep</th><th scope="col">question and answer</th>
<th scope="col">verdict</th><th scope="col">runs</th></tr></thead>
<tbody>
{items}
</tbody></table></main>
<script>
const box = document.getElementById("filter");
box.hidden = false;
box.oninput = () => {{
  const words = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
  for (const row of document.querySelectorAll("tbody tr")) {{
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
  }}
}};
</script></body></html>
"""
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
    return _PAGE.format(items="\n".join(_item(state, folder) for folder in sweeps))


def _item(state: Path, folder: Path) -> str:
    report, path = state / "reports" / folder.name, quote(folder.name)
    name, (question, counts) = html_text(folder.name), _facts(folder)
    found = about(report)
    title = (
        f'<a href="{path}/index.html"><b>{name}</b></a>'
        if (report / "index.html").exists()
        else f"<b>{name}</b>"
    )
    kind = "running" if holder(folder) else _kind(found, counts)
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


def _kind(found: Mapping[str, Any], counts: Counter[str]) -> str:
    """Return the class of the chip of a sweep that does not run; "unknown" without a report."""
    if counts["failed"] + counts["oom"] and not counts["done"] + counts["diverged"]:
        return "failed"
    if "answered" not in found:
        return "unknown"
    return "answered" if found["answered"] else "open" if found["valid"] else "none"


def _facts(folder: Path) -> tuple[str, Counter[str]]:
    """Return a sweep's question and its runs by status, or the reason why its ledger cannot be read."""
    try:
        with closing(Ledger(folder / "ledger.db", readonly=True)) as ledger:
            counts = Counter(member.status for member in ledger.members())
            question = ledger.facts.question
    except (sqlite3.DatabaseError, InputError) as error:
        return f"(its ledger cannot be read: {error})", Counter()
    return question, counts
