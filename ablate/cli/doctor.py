"""`ablate doctor`: describe this machine and check its numerics. It changes nothing."""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ablate.cli.common import DONE, FAILED, console, print_json, print_starting
from ablate.engines import ENGINES, SCALED, module_name, parity_record
from ablate.engines.hardware import Machine, this_machine
from ablate.errors import InputError, nearest
from ablate.files import finite
from ablate.numerics.spec import VERSION
from ablate.reports.plain_text import duration

if TYPE_CHECKING:
    from ablate.verification.check_result import Row
    from ablate.verification.parity import ParityDocument, ParityRun

_WIDEST = 132
_STYLES = {True: ("ok", "green"), False: ("OFF", "bold red"), None: ("-", "dim")}


def doctor(
    fast: bool = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    engine: str | None = None,
    record: Path | None = None,
    lifeline: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Show what this machine can run, and check its numerics.

    The numerics are compared with published figures, known answers, and Transformer Engine's reference,
    torchao and ml_dtypes if they are installed. With --engine transformer_engine or scaled_mm, compare its
    kernels with the emulator; --fast skips the training runs. Exit status: 0 all checks agree, 1 one does
    not, 2 bad input, or the comparison is impossible here.

    Args:
        fast: Run only the quick checks, as before every sweep.
        as_json: Print JSON instead of tables.
        engine: Compare the kernels of this engine, on this machine, with the emulator instead.
        record: File for the comparison, with a figure next to it; default: parity-<GPU>-<version>.json.
        lifeline: End when standard input closes.
    """
    if lifeline:
        threading.Thread(target=_end_with_standard_input, daemon=True).start()
    if engine is None and record is not None:
        raise InputError(
            "--record needs --engine transformer_engine or scaled_mm: it names the file of that comparison"
        )
    if engine is not None:
        _compare(engine, record, fast, as_json)
    print_starting("importing torch, then checking the numerics", quiet=as_json)
    started = time.monotonic()
    rows: list[tuple[str, Row]] = []
    screen = Console(quiet=True) if as_json else console()
    with nullcontext() if as_json or not screen.is_terminal else screen.status("[dim]torch ...[/]") as status:
        for group, group_rows in _groups(fast, status.update if status else None):
            screen.print(Text(group, "bold"), _table(group_rows, screen.width, header=not rows), "")
            rows += ((group, row) for row in group_rows)
    seconds = time.monotonic() - started
    if as_json:
        print_json(_document(rows, fast, seconds))
    screen.print(_verdict([row for _, row in rows], fast), Text(f"({duration(seconds)})", "dim"))
    raise typer.Exit(FAILED if any(row.ok is False for _, row in rows) else DONE)


# --- an engine beside the emulator ----------------------------------------------------------------


def _compare(engine: str, record: Path | None, fast: bool, as_json: bool) -> None:
    """Compare an engine with the emulator, print and write the result, and exit."""
    comparable = sorted({*ENGINES} - {"emulated"})
    if engine not in comparable:
        why = (
            "is what other engines are compared with; omit --engine"
            if engine == "emulated"
            else f"no such engine; {nearest(engine, comparable)}"
        )
        raise InputError(f"--engine {engine}: {why}")
    folder = (record or Path("here")).absolute().parent
    if not folder.is_dir():
        raise InputError(f"--record {record}: there is no folder {folder}")
    if record is not None and record.suffix == ".png":
        raise InputError(f"--record {record}: must name a JSON file; the figure is written next to it")
    if not os.access(folder, os.W_OK):
        raise InputError(f"--record: {folder} is not writable; name a file in another folder")
    print_starting("importing torch, then comparing the engine with the emulator", quiet=as_json)
    machine = this_machine()
    comparison = _comparison(engine, machine, fast)
    screen = Console(quiet=True) if as_json else console()
    with nullcontext() if as_json or not screen.is_terminal else screen.status("[dim]torch ...[/]") as status:
        for number, (group, group_rows) in enumerate(comparison.groups(status.update if status else None)):
            screen.print(Text(group, "bold"), _table(group_rows, screen.width, header=not number), "")
    document = comparison.document()
    written = _written(comparison, document, record)
    kept = (
        _kept(document, machine) if not fast or not comparison.agrees else ""
    )  # a quick comparison never approves an engine, but can reject it
    if as_json:
        print_json(document)
    style = "bold green" if comparison.agrees else "bold red"
    screen.print(Text(comparison.verdict(), style), Text(f"({duration(document['seconds'])})", "dim"))
    screen.print(f"Written: {' and '.join(map(str, written))}{kept}")
    raise typer.Exit(DONE if comparison.agrees else FAILED)


def _comparison(engine: str, machine: Machine, fast: bool) -> "ParityRun":
    """Return the comparison of an engine. InputError if nothing of it can be compared here."""
    from ablate.verification import parity

    if module_name(engine) != SCALED:
        if reason := parity.obstacle():
            raise InputError(f"--engine {engine} cannot be compared here: {reason}")
        return parity.ParityRun(machine, parity.bench_of(machine), fast)
    from ablate.verification.parity import scaled

    if reason := scaled.obstacle(engine):
        raise InputError(f"--engine {engine} cannot be compared here: {reason}")
    return scaled.ScaledRun(machine, scaled.bench_of(engine, machine), fast)


def _kept(document: "ParityDocument", machine: Machine) -> str:
    """Keep the result for `engine: auto`, and return the end of a sentence about that."""
    if machine.capability is None:
        return ""  # `auto` selects no other engine on a CPU
    try:
        return f"; kept for `engine: auto` in {parity_record.keep(document, machine, document['engine'])}"
    except OSError as error:
        return f"; not kept for `engine: auto`: {error}"


def _written(comparison: "ParityRun", document: "ParityDocument", record: Path | None) -> list[Path]:
    """Write the document and a figure of its losses, and return their paths."""
    compared = document["compared"]
    version = compared.get("transformer_engine") or f"{document['engine']} torch {compared['torch']}"
    parts = (document["environment"].get("gpu", "no-gpu"), version)
    path = record or Path(
        "-".join(["parity", *(re.sub(r"[^\w.]+", "-", str(part)) for part in parts)]) + ".json"
    )
    path.write_text(json.dumps(finite(document), indent=1) + "\n", encoding="utf-8")
    picture = comparison.draw(path.with_suffix(".png"))
    return [path] if picture is None else [path, picture]


# --- this machine's numerics ----------------------------------------------------------------------


def _groups(fast: bool, show: Callable[[str], object] | None) -> Iterator[tuple[str, list["Row"]]]:
    from ablate.verification import checks  # torch

    return checks.by_group(fast, show)


def _table(rows: list["Row"], width: int, header: bool) -> Table:
    """Return a table of rows. Column widths are the same in all tables, so that columns align."""
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        width=min(width, _WIDEST),
        show_header=header,
        header_style="dim",
    )
    for name, ratio in (("", 11), ("measured", 8), ("expected", 8)):
        table.add_column(name, ratio=ratio, overflow="fold")
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
        problem = f" training here does not follow numerics version {VERSION}."
        return Text.assemble((f"{len(off)} of {len(judged)} checks are off:", "bold red"), problem)
    more = " `python -m ablate.doctor` runs the other checks." if fast else ""
    return Text.assemble(
        (f"All {len(judged)} checks agree:", "bold green"),
        f" this machine follows numerics version {VERSION}.{more}",
    )


def _document(rows: list[tuple[str, "Row"]], fast: bool, seconds: float) -> dict[str, object]:
    return {
        "numerics": VERSION,
        "fast": fast,
        "seconds": round(seconds, 2),
        "ok": all(row.ok is not False for _, row in rows),
        "rows": [{"group": group, **vars(row)} for group, row in rows],
    }


def _end_with_standard_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(FAILED)
