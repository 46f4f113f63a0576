"""Progress of a running sweep: one line."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ablate.errors import one_line
from ablate.execution.progress import Progress, Routine
from ablate.reports.plain_text import duration

_EVERY_SECONDS = 60.0
"""Time between two lines of progress where none can be updated in place."""


class View:
    """One line of progress: updated in place in a terminal, elsewhere printed once a minute.

    Failures, warnings and other news that is not routine get a line of their own when they come.

    Args:
        console: where to print.
        quiet: print nothing.
        everything: print routine news, too.
        clock: seconds, from any start.
    """

    def __init__(
        self,
        console: Console,
        quiet: bool = False,
        everything: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console, self.quiet, self.everything, self.clock = console, quiet, everything, clock
        self._live: Live | None = None
        self._due = clock() + _EVERY_SECONDS

    @contextmanager
    def open(self) -> Iterator[Self]:
        """Show progress until the block ends."""
        if self.quiet or not self.console.is_terminal or self.console.is_dumb_terminal:
            yield self
            return
        with Live(console=self.console, refresh_per_second=4, transient=True) as self._live:
            yield self
        self._live = None

    def show(self, progress: Progress) -> None:
        """Print the news and update the line of progress."""
        if self.quiet:
            return
        for line in progress.news:
            if self.everything or not isinstance(line, Routine):
                text = Text(f"[{progress.done}/{progress.total}] {line}")
                self.console.print(text, soft_wrap=self._live is None)  # a log has an event in one line
        if self._live:
            self._live.update(Text(progress_line(progress), no_wrap=True, overflow="ellipsis"))
        elif self.clock() >= self._due:
            self._due = self.clock() + _EVERY_SECONDS
            self.console.print(Text(progress_line(progress), no_wrap=True, overflow="ellipsis"))


def progress_line(progress: Progress) -> str:
    """Return the state of a sweep in one line: what is cut off in a narrow terminal comes last."""
    failed = f", {progress.failed} failed" if progress.failed else ""
    left = f", about {duration(progress.seconds_left)} left" if progress.running else ""
    running = ", ".join(f"{one_line(run.title)} step {run.step}/{run.steps}" for run in progress.running)
    parts = [f"{progress.done}/{progress.total} runs{failed}{left}", running, progress.mlflow]
    return "; ".join(one_line(part) for part in parts if part)
