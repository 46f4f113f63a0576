"""Live progress of a sweep in a terminal."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ablate.errors import one_line
from ablate.execution.progress import Progress
from ablate.reports.plain_text import duration


class View:
    """Live view in a terminal; elsewhere, one line for each event."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self.console, self.quiet = console, quiet
        self._live: Live | None = None

    @contextmanager
    def open(self) -> Iterator[Self]:
        """Show progress until the block ends."""
        if self.quiet or not self.console.is_terminal:
            yield self
            return
        with Live(console=self.console, refresh_per_second=4, transient=True) as self._live:
            yield self
        self._live = None

    def show(self, progress: Progress) -> None:
        """Update the view."""
        if self.quiet:
            return
        for line in progress.news:
            count = f"[{progress.done}/{progress.total}]"
            self.console.print(Text(f"{count} {line}"), soft_wrap=True)
        if self._live:
            self._live.update(_live(progress))


def _live(progress: Progress) -> Group:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=bool(progress.running), header_style="dim")
    for column in ("running", "seed", "step", "", "train loss", "try"):
        table.add_column(column)
    for running in progress.running:
        bar = ProgressBar(total=running.steps, completed=running.step, width=24)
        loss = "-" if math.isnan(running.loss) else f"{running.loss:.3f}"
        table.add_row(
            one_line(running.name),
            str(running.seed),
            f"{running.step}/{running.steps}",
            bar,
            loss,
            str(running.attempt),
        )
    time_left = f", about {duration(progress.seconds_left)} left" if progress.running else ""
    done = f"{progress.done} of {progress.total} trials done{time_left}"
    status = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(1, progress.total), completed=progress.done, width=40)
    status.add_row(bar, Text.assemble(done, (f"  {progress.mlflow}" if progress.mlflow else "", "yellow")))
    return Group(table, "", status)
