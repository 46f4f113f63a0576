"""`ablate doctor`: describe this machine and check its numerics. It changes nothing."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ablate.cli.common import DONE, FAILED, Screen, console, plain_table, print_starting
from ablate.cli.options import JsonOption
from ablate.engines import ENGINES, SCALED, module_name, parity_record
from ablate.engines.hardware import Machine, this_machine
from ablate.errors import InputError, nearest
from ablate.numerics.spec import VERSION
from ablate.reports.plain_text import duration

if TYPE_CHECKING:
    from ablate.verification.check_result import Row
    from ablate.verification.parity import ParityRun

    Groups = Callable[[Callable[[str], None] | None], Iterator[tuple[str, list[Row]]]]

_WIDEST = 132
_STYLES = {True: ("ok", "green"), False: ("OFF", "bold red"), None: ("-", "dim")}


def doctor(
    fast: bool = False,
    as_json: JsonOption = False,
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
    screen = console(as_json)
    rows = _printed(screen, partial(_groups, fast))
    seconds = time.monotonic() - started
    judged = [row for _, row in rows if row.ok is not None]
    off = sum(not row.ok for row in judged)
    screen.document(
        {
            "numerics": VERSION,
            "fast": fast,
            "seconds": round(seconds, 2),
            "ok": not off,
            "rows": [{"group": group, **vars(row)} for group, row in rows],
        }
    )
    more = " `python -m ablate.doctor` runs the other checks." if fast else ""
    agree = (f"All {len(judged)} checks agree:", "bold green")
    verdict = Text.assemble(agree, f" this machine follows numerics version {VERSION}.{more}")
    if off:
        differ = (f"{off} of {len(judged)} checks are off:", "bold red")
        verdict = Text.assemble(differ, f" training here does not follow numerics version {VERSION}.")
    screen.print(verdict, Text(f"({duration(seconds)})", "dim"))
    raise typer.Exit(FAILED if off else DONE)


# --- an engine beside the emulator ----------------------------------------------------------------


def _compare(engine: str, record: Path | None, fast: bool, as_json: bool) -> None:
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
    screen = console(as_json)
    _printed(screen, comparison.groups)
    document = comparison.document()
    written, kept = comparison.write(document, record), ""
    # `auto` selects no other engine on a CPU; a quick comparison never approves an engine, but can reject it.
    if machine.capability is not None and not (fast and comparison.agrees):
        try:
            kept = f"; kept for `engine: auto` in {parity_record.keep(document, machine, document['engine'])}"
        except OSError as error:
            kept = f"; not kept for `engine: auto`: {error}"
    screen.document(document)
    style = "bold green" if comparison.agrees else "bold red"
    screen.print(Text(comparison.verdict(), style), Text(f"({duration(document['seconds'])})", "dim"))
    screen.print(f"Written: {' and '.join(map(str, written))}{kept}")
    raise typer.Exit(DONE if comparison.agrees else FAILED)


def _comparison(engine: str, machine: Machine, fast: bool) -> "ParityRun":
    from ablate.verification import parity

    if module_name(engine) != SCALED:
        if reason := parity.obstacle():
            raise InputError(f"--engine {engine} cannot be compared here: {reason}")
        return parity.ParityRun(machine, parity.bench_of(machine), fast)
    from ablate.verification.parity import scaled

    if reason := scaled.obstacle(engine):
        raise InputError(f"--engine {engine} cannot be compared here: {reason}")
    return scaled.ScaledRun(machine, scaled.bench_of(engine, machine), fast)


# --- this machine's numerics ----------------------------------------------------------------------


def _groups(fast: bool, show: Callable[[str], object] | None) -> Iterator[tuple[str, list["Row"]]]:
    from ablate.verification import checks  # torch

    return checks.by_group(fast, show)


def _printed(screen: Screen, groups: "Groups") -> list[tuple[str, "Row"]]:
    """Print the table of each group once it is checked, and return all rows, each with its group. Column
    widths are the same in all tables, so that columns align."""
    rows: list[tuple[str, Row]] = []
    shown = screen.is_terminal and not screen.quiet
    with screen.status("[dim]torch ...[/]") if shown else nullcontext() as status:
        for group, group_rows in groups(status.update if status else None):
            table = plain_table(style="dim")
            table.width, table.show_header = min(screen.width, _WIDEST), not rows
            for name, ratio in (("", 11), ("measured", 8), ("expected", 8)):
                table.add_column(name, ratio=ratio, overflow="fold")
            table.add_column("", width=3)
            for row in group_rows:
                measured = Text(row.measured, "bold red" if row.ok is False else "")
                table.add_row(Text(row.what), measured, Text(row.expected, "dim"), Text(*_STYLES[row.ok]))
            screen.print(Text(group, "bold"), table, "")
            rows += ((group, row) for row in group_rows)
    return rows


def _end_with_standard_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(FAILED)
