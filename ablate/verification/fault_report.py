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
    """Run the suite and print its faults and findings; return True if there are no findings.

    Args:
        state: New folder for the suite; None for a temporary one, removed if there are no findings.
        count: Number of faults.
        seed: Seed of the suite.
        names: Kinds of faults, of KINDS.
        screen: Console to print on.

    Raises:
        InputError: The folder is not empty.
    """
    if state and state.exists() and any(state.iterdir()):
        raise InputError(f"--state {state}: the folder is not empty; name a new one")
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
        kind: sum(finding.count for finding in suite.findings if finding.kind == kind)
        for kind in ("lost", "twice", "wrong")
    }
    wrong = f", other promises broken {totals['wrong']}" if totals["wrong"] else ""
    silent = sum(finding.count for finding in suite.findings if finding.silent)
    screen.print(
        f"faults {len(suite.injected)}, silent differences {silent}, losses {totals['lost']}, duplicates"
        f" {totals['twice']}{wrong}"
    )
    if suite.findings:
        screen.print(f"The evidence is in {folder}.", soft_wrap=True)
    elif state is None:
        shutil.rmtree(folder)
    return not suite.findings


def _table(suite: Suite) -> Table:
    """Return a table of the kinds of faults: number, outcomes, and the time to the next record."""
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
    for kind in sorted({fault.kind for fault in suite.injected}, key=KINDS.index):
        mine = [fault for fault in suite.injected if fault.kind == kind]
        waits = sorted(fault.until_next for fault in mine if fault.until_next is not None)
        outcomes = [
            sum(fault.outcome == name for fault in mine)
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
