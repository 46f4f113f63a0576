"""Faults and what came of each: a line of progress, a line of JSON, and a table of all kinds at the end."""

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from chaos.audit import Finding

OUTCOMES = ("survived", "named", "no difference", "refused", "read")
"""Outcomes of a fault: `survived` of a kill; `named` of a corruption that a command or a log reports, `no difference` of one that none
reports, and that changed no value; `refused` and `read` of a mutant."""
BROKEN = ("lost", "twice", "silent", "wrong")
QUIET = 100
"""Mutants to one line of progress."""


@dataclass
class Fault:
    """Fault that was injected, its effects and its outcome."""

    family: str
    """`kills`, `corruptions`, or the kind of files whose mutant it is."""
    kind: str
    what: str = ""
    """The corrupted file and how, or the number of the mutant."""
    effects: list[str] = field(default_factory=list)
    outcome: str = "survived"
    """One of OUTCOMES."""
    seconds: float | None = None
    """Seconds to the sweep's next record, or until the outcome was known."""
    findings: list[Finding] = field(default_factory=list)
    detail: dict[str, Any] = field(default_factory=dict)
    """Facts for the line of JSON alone."""


class Report:
    """Faults of a run, printed as they come.

    Args:
        planned: Number of faults by family.
        out: Folder for the line of JSON of each fault.
        show: Called with each line of text.
    """

    def __init__(self, planned: dict[str, int], out: Path, show: Callable[[str], None] = print) -> None:
        self.planned, self.show, self._began = planned, show, time.monotonic()
        self.faults: list[Fault] = []
        self.findings: list[Finding] = []
        self._count: Counter[str] = Counter()
        self._file = out / "faults.jsonl"

    def add(self, fault: Fault) -> None:
        """Print a fault and its findings; of mutants without any, one in QUIET."""
        self.faults.append(fault)
        self._count[fault.family] += 1
        number, mutant = self._count[fault.family], fault.outcome in ("refused", "read")
        with self._file.open("a") as file:
            print(json.dumps({"number": number} | asdict(fault), default=str), file=file)
        where = f"{fault.family} {number}/{self.planned.get(fault.family, '?')}"
        if not mutant or fault.findings or number % QUIET == 0:
            effects = "; ".join([fault.what, *fault.effects])
            moment = f"{time.monotonic() - self._began:7.1f} s"
            self.show(f"{moment}  {where}  {fault.kind}: {effects[:300]} -> {fault.outcome}")
        for finding in fault.findings:
            self.broken(where, finding)

    def broken(self, where: str, finding: Finding) -> None:
        """Print a finding, and where it was made."""
        self.findings.append(finding)
        self.show(f"BROKEN {finding.kind}: {where}: {finding.what}")

    def total(self) -> str:
        """Return the sentence that sums up all faults and findings."""
        counts = {kind: sum(one.count for one in self.findings if one.kind == kind) for kind in BROKEN}
        return ", ".join([f"faults {len(self.faults)}", *(f"{kind} {n}" for kind, n in counts.items())])

    def table(self, screen: Console) -> None:
        """Print the kinds of faults with their outcomes and times."""
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("fault", "times", *OUTCOMES, "broken", "median s", "longest s"):
            table.add_column(name, justify="left" if name == "fault" else "right", no_wrap=True)
        kinds: dict[tuple[str, str], list[Fault]] = {}
        for fault in self.faults:
            kinds.setdefault((fault.family, fault.kind), []).append(fault)
        for (family, kind), mine in kinds.items():
            waits = sorted(fault.seconds for fault in mine if fault.seconds is not None)
            times = (f"{waits[len(waits) // 2]:.1f}", f"{waits[-1]:.1f}") if waits else ("-", "-")
            counts = [sum(fault.outcome == name for fault in mine) for name in OUTCOMES]
            cells = [len(mine), *counts, sum(bool(fault.findings) for fault in mine)]
            table.add_row(f"{family}: {kind}", *(str(number or "-") for number in cells), *times)
        screen.print("", table, "")


class Overrun(BaseException):
    """A fault took longer than its time limit. Code under test catches exceptions, but not this one."""


@contextmanager
def limit(seconds: float, timer: int = signal.ITIMER_REAL) -> Iterator[None]:
    """Raise Overrun after so many seconds of a timer: of the clock, or ITIMER_PROF for processor time."""

    def end(*_: object) -> None:
        raise Overrun(f"not over after {seconds:g} s")

    number = signal.SIGALRM if timer == signal.ITIMER_REAL else signal.SIGPROF
    before = signal.signal(number, end)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)
