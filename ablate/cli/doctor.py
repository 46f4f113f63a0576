"""`ablate doctor`: what this machine is, and whether its numerics compute what they say. It repairs nothing."""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ablate.cli.common import DONE, FAILED, console, duration, print_starting
from ablate.engines import ENGINES, parity_record
from ablate.engines.hardware import Machine, this_machine
from ablate.errors import InputError, nearest
from ablate.numerics.spec import VERSION

if TYPE_CHECKING:
    from ablate.verification.check_result import Check, Row
    from ablate.verification.parity import Comparison

_WIDEST = 132
_STYLES = {True: ("ok", "green"), False: ("OFF", "bold red"), None: ("-", "dim")}


def doctor(
    fast: Annotated[
        bool, typer.Option("--fast", help="Only the checks that take a moment, as before every sweep.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON, for machines.")] = False,
    engine: Annotated[
        str | None,
        typer.Option(help="Compare this engine's kernels, on this GPU, with the emulator instead."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Where that comparison is written, its picture beside it; default: parity-<GPU>-<version>.json."
        ),
    ] = None,
    lifeline: Annotated[
        bool, typer.Option("--lifeline", hidden=True, help="End when standard input closes.")
    ] = False,
) -> None:
    """Say what this machine can run, and check that the numerics here compute what they say.

    Figures, ties, known answers, and every public implementation that is installed. With --engine
    transformer_engine: whether its kernels compute what the emulator computes; --fast leaves the training
    out. Exit status: 0 all agree, 1 something is off, 2 bad input, or nothing that could be compared here.
    """
    if lifeline:
        threading.Thread(target=_end_with_standard_input, daemon=True).start()
    if engine is None and record is not None:
        raise InputError(
            ["--record goes with --engine transformer_engine: it says where that comparison is written"]
        )
    if engine is not None:
        _compare(engine, record, fast, as_json)
    print_starting("importing torch, then checking the numerics", quiet=as_json)
    started = time.monotonic()
    rows: list[tuple[str, Row]] = []
    screen = Console(quiet=True) if as_json else console()
    with nullcontext() if as_json or not screen.is_terminal else screen.status("[dim]torch ...[/]") as status:
        for group, found in _groups(fast, status):
            screen.print(Text(group, "bold"), _table(found, screen.width, header=not rows), "")
            rows += ((group, row) for row in found)
    seconds = time.monotonic() - started
    if as_json:
        print(json.dumps(_document(rows, fast, seconds), indent=1))
    screen.print(_verdict([row for _, row in rows], fast), Text(f"({duration(seconds)})", "dim"))
    raise typer.Exit(FAILED if any(row.ok is False for _, row in rows) else DONE)


# --- an engine beside the emulator ----------------------------------------------------------------


def _compare(engine: str, record: Path | None, fast: bool, as_json: bool) -> None:
    """Compare, print, write; ends the command."""
    known = sorted({*ENGINES} - {"emulated"})
    if engine not in known:
        why = (
            "is what others are compared with; leave --engine out"
            if engine == "emulated"
            else f"no such engine; {nearest(engine, known)}"
        )
        raise InputError([f"--engine {engine}: {why}"])
    folder = (record or Path("here")).absolute().parent
    if not folder.is_dir():
        raise InputError([f"--record {record}: there is no folder {folder}"])
    if record is not None and record.suffix == ".png":
        raise InputError([f"--record {record}: is for the document; its picture is put beside it"])
    if not os.access(folder, os.W_OK):
        raise InputError([f"--record: nothing can be written in {folder}; name a file elsewhere"])
    print_starting("importing torch, then comparing the engine with the emulator", quiet=as_json)
    from ablate.verification import parity

    if reason := parity.obstacle():
        raise InputError([f"--engine {engine} cannot be compared here: {reason}"])
    machine = this_machine()
    comparison = parity.Comparison(machine, parity.bench_of(machine), fast)
    screen = Console(quiet=True) if as_json else console()
    with nullcontext() if as_json or not screen.is_terminal else screen.status("[dim]torch ...[/]") as status:
        for number, (group, found) in enumerate(comparison.groups(status)):
            screen.print(Text(group, "bold"), _table(found, screen.width, header=not number), "")
    document = comparison.document()
    written = _written(comparison, document, record)
    kept = (
        _kept(document, machine) if not fast or not comparison.agrees else ""
    )  # a quick one vouches for nothing, but takes back
    if as_json:
        print(json.dumps(document, indent=1))
    style = "bold green" if comparison.agrees else "bold red"
    screen.print(Text(comparison.verdict(), style), Text(f"({duration(document['seconds'])})", "dim"))
    screen.print(f"Written: {' and '.join(map(str, written))}{kept}")
    raise typer.Exit(DONE if comparison.agrees else FAILED)


def _kept(document: dict[str, Any], machine: Machine) -> str:
    """Keep it for `engine: auto`; what is to be said about that."""
    try:
        return f"; kept for `engine: auto` in {parity_record.keep(document, machine)}"
    except OSError as error:
        return f"; not kept for `engine: auto`: {error}"


def _written(comparison: "Comparison", document: dict[str, Any], record: Path | None) -> list[Path]:
    """The document, and the picture of its losses beside it."""
    words = (document["environment"].get("gpu", "no-gpu"), document["compared"]["transformer_engine"])
    path = record or Path(
        "-".join(["parity", *(re.sub(r"[^\w.]+", "-", str(word)) for word in words)]) + ".json"
    )
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    picture = comparison.draw(path.with_suffix(".png"))
    return [path] if picture is None else [path, picture]


# --- this machine's numerics ----------------------------------------------------------------------


def _groups(fast: bool, status: Any) -> Iterator[tuple[str, list["Row"]]]:
    """Each heading with its rows, as soon as they are all there; `status`, if any, says what is being
    checked.
    """
    import torch

    from ablate.verification.checks import CHECKS

    torch.set_num_threads(
        1
    )  # as in a trial; a second thread gains little here, and waits for the core where others use it
    checks = [check for check in CHECKS if check.only != ("full" if fast else "fast")]
    for group in dict.fromkeys(check.group for check in checks):
        found: list[Row] = []
        for check in checks:
            if check.group == group:
                if status:
                    status.update(_doing(check, checks))
                found += check.rows()
        if found:
            yield group, found


def _doing(check: "Check", checks: list["Check"]) -> str:
    return f"[dim]{checks.index(check) + 1} of {len(checks)}[/] {check.group}: {check.name} ..."


def _table(rows: list["Row"], width: int, header: bool) -> Table:
    """Columns are as wide in every table, so that they stand below each other."""
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        width=min(width, _WIDEST),
        show_header=header,
        header_style="dim",
    )
    for name, ratio in (("", 11), ("measured", 8), ("expected", 8)):
        table.add_column(name, ratio=ratio)
    table.add_column("", width=3)
    for row in rows:
        word, style = _STYLES[row.ok]
        table.add_row(
            Text(row.what),
            Text(row.measured, "bold red" if row.ok is False else ""),
            Text(row.expected, "dim"),
            Text(word, style),
        )
    return table


def _verdict(rows: list["Row"], fast: bool) -> Text:
    judged = [row for row in rows if row.ok is not None]
    off = [row for row in judged if not row.ok]
    if off:
        what = f" what is trained here is not what numerics version {VERSION} says."
        return Text.assemble((f"{len(off)} of {len(judged)} checks are off:", "bold red"), what)
    more = " `python -m ablate.doctor` checks the rest." if fast else ""
    return Text.assemble(
        (f"All {len(judged)} checks agree:", "bold green"),
        f" numerics version {VERSION} computes what it says.{more}",
    )


def _document(rows: list[tuple[str, "Row"]], fast: bool, seconds: float) -> dict[str, Any]:
    return {
        "numerics": VERSION,
        "fast": fast,
        "seconds": round(seconds, 2),
        "ok": all(row.ok is not False for _, row in rows),
        "rows": [{"group": group, **vars(row)} for group, row in rows],
    }


# --- beside a sweep -------------------------------------------------------------------------------

COMMAND = (sys.executable, "-m", "ablate.doctor", "--fast", "--json", "--lifeline")
_PATIENCE_SECONDS = 300.0
"""On a machine that is busy with something else it may take long; a check that hangs must not hang a sweep.
"""


class Unfit(Exception):
    """The numerics here are not what they say; says which rows are off, and where to look."""


class Checkup:
    """The fast checks in a process of their own, beside whatever else starts. It ends when this process does,
    or closes it.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start the process, where that has not been done."""
        if self._process is None:
            self._said, self._errors = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115 - `close` closes them
            pipes = {"stdin": subprocess.PIPE, "stdout": self._said, "stderr": self._errors}
            self._process = subprocess.Popen(COMMAND, start_new_session=True, **pipes)

    def passed(self) -> None:
        """Wait for its end; Unfit where something is off, or where there is no end."""
        try:
            status = self._process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise Unfit(
                _complaint([f"the quick check was not over within {duration(_PATIENCE_SECONDS)}"])
            ) from None
        if status != DONE:
            raise Unfit(
                _complaint(_problems(_text(self._said)) or [_last_words(status, _text(self._errors))])
            )

    def close(self) -> None:
        """End the process where it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for file in (self._process.stdin, self._said, self._errors):
                file.close()


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _last_words(status: int, errors: str) -> str:
    lines = errors.strip().splitlines()
    return f"the quick check ended with status {status}{': ' + lines[-1] if lines else ''}"


def _problems(said: str) -> list[str]:
    """A line for each row that is off; none where the doctor did not come to its end."""
    try:
        rows = json.loads(said)["rows"]
    except ValueError:
        return []
    return [
        f"{row['what']}: {row['measured']}; expected {row['expected']}" for row in rows if row["ok"] is False
    ]


def _complaint(problems: list[str]) -> str:
    lines = [
        "The numerics here do not compute what they say, so no trial was started:",
        *(f"  {problem}" for problem in problems),
    ]
    return "\n".join(
        [*lines, "See `python -m ablate.doctor`. Nothing is lost: once it agrees, the same command goes on."]
    )


def _end_with_standard_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(FAILED)
