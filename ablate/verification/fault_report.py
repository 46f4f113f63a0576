"""Run of the fault injection suite for `ablate bench faults`, and the table of its faults."""

import shutil
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ablate.errors import InputError
from ablate.verification.audit import Finding
from ablate.verification.fault_injection import Suite
from ablate.verification.injections import KINDS


def run(state: Path | None, count: int, seed: int, names: list[str], screen: Console) -> bool:
    """Run the suite and print what happened; whether every promise was kept.

    InputError where the folder is not new.
    """
    if state and state.exists() and any(state.iterdir()):
        raise InputError([f"--state {state}: there is something in it; name a new folder"])
    folder = state or Path(tempfile.mkdtemp(prefix="ablate-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    suite = Suite(
        folder.resolve(), count, seed, names, lambda line: screen.print(line, markup=False, soft_wrap=True)
    )
    try:
        suite.run()
    except TimeoutError as error:
        suite.findings.append(Finding("wrong", str(error)))
        screen.print(f"BROKEN wrong: {error}", markup=False, soft_wrap=True)
    screen.print("", _table(suite), "")
    screen.print(f"seed {seed}", markup=False)
    totals = {
        kind: sum(found.count for found in suite.findings if found.kind == kind)
        for kind in ("lost", "twice", "wrong")
    }
    wrong = f", other promises broken {totals['wrong']}" if totals["wrong"] else ""
    silent = sum(found.count for found in suite.findings if "values differ" in found.what)
    screen.print(
        f"faults {len(suite.blows)}, silent differences {silent}, losses {totals['lost']}, duplicates"
        f" {totals['twice']}{wrong}"
    )
    if suite.findings:
        screen.print(f"The evidence is in {folder}.", soft_wrap=True)
    elif state is None:
        shutil.rmtree(folder)
    return not suite.findings


def _table(suite: Suite) -> Table:
    """Return a table of the kinds of faults: how often each came, and the time to the next record."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("fault")
    for name in (
        "times",
        "survived",
        "found",
        "no difference",
        "broken",
        "median s to the next record",
        "longest",
    ):
        table.add_column(name, justify="right")
    for kind in sorted({blow.kind for blow in suite.blows}, key=KINDS.index):
        mine = [blow for blow in suite.blows if blow.kind == kind]
        waits = sorted(blow.until_next for blow in mine if blow.until_next is not None)
        outcomes = [
            sum(blow.outcome == name for blow in mine)
            for name in ("survived", "found", "no difference", "broken")
        ]
        times = (f"{waits[len(waits) // 2]:.1f}", f"{waits[-1]:.1f}") if waits else ("-", "-")
        table.add_row(kind, str(len(mine)), *(str(number or "-") for number in outcomes), *times)
    steps = [repeat.steps for repeat in suite.repeats] or [0]
    table.add_row(
        "steps done again",
        str(len(suite.repeats)),
        "",
        "",
        "",
        "",
        f"{sorted(steps)[len(steps) // 2]} steps",
        f"{max(steps)} steps",
    )
    return table
