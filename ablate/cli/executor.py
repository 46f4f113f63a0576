"""Executor of a sweep, which starts while the command imports its other parts; and its line of progress."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ablate.cli.common import Due, console
from ablate.cli.settings import Settings
from ablate.errors import one_line
from ablate.execution.progress import Executor, Progress, Routine
from ablate.execution.workers import ClusterError, Inline, Pool
from ablate.experiment.schema import Resources
from ablate.reports.plain_text import time_left
from ablate.verification.checkup import Checkup

_EVERY_SECONDS = 60.0
"""Time between two lines of progress where none can be updated in place."""


class StartingExecutor:
    """Executor that starts at `begin`, with the check of the numerics; a call waits for both and returns it.

    Ray takes seconds to start, most of them idle. Meanwhile this process imports Optuna and reads the ledger.
    The thread that starts it lives until `close`: Linux kills Ray's processes once that thread has ended.
    """

    def __init__(
        self, settings: Settings, resources: Resources, checkup: Checkup, connect: Callable[..., Pool] = Pool
    ) -> None:
        """`connect` makes the pool, if trials are to run on Ray."""
        self._settings, self._resources, self._checkup = settings, resources, checkup
        self._connect = connect
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._pool: Future[Pool] | None = None
        self._begun = False

    def begin(self) -> None:
        """Start the check and, on Ray, the workers, unless that was done."""
        if self._begun:
            return
        self._begun = True
        self._checkup.start()
        if (settings := self._settings).executor != "inline":
            gpus, layout = self._resources.gpus_of(settings.device), self._resources.layout(settings.device)
            given = settings.ray, settings.workers, gpus, layout.ranks
            self._pool = self._thread.submit(lambda: self._connect(*given, console().print))

    def __call__(self) -> Executor:
        """Return the executor once the check has passed. Unfit if it has not: the executor is closed;
        ClusterError if Ray cannot be started or reached."""
        self.begin()
        device, ranks = self._settings.device, self._resources.layout(self._settings.device).ranks
        if self._pool is None and ranks > 1:
            console().print(
                f"Executor inline computes each trial on one rank instead of {ranks}: results differ only by"
                " the order of additions."
            )
        executor: Executor = Inline(device) if self._pool is None else self._pool.result()
        try:
            self._checkup.passed()
        except BaseException:
            executor.close()
            raise
        finally:
            self._pool = None  # closed here or by its new owner
        return executor

    def close(self) -> None:
        """Close an executor that nobody has asked for."""
        if self._pool is not None:
            with suppress(ClusterError):
                self._pool.result().close()
            self._pool = None
        self._thread.shutdown()


class View:
    """One line of progress: updated in place in a terminal, elsewhere printed once a minute. Failures,
    warnings and other news that is not routine get a line of their own when they come, routine news with
    `everything`. `clock`: seconds, from any start."""

    def __init__(
        self,
        console: Console,
        quiet: bool = False,
        everything: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console, self.quiet, self.everything, self.clock = console, quiet, everything, clock
        self._live: Live | None = None
        self._shown: tuple[Progress, float] | None = None
        """Live line and the time of its last event: until the next one, its time counts down."""
        self._due = Due(_EVERY_SECONDS, clock)

    @contextmanager
    def open(self) -> Iterator[Self]:
        """Show progress until the block ends."""
        if self.quiet or not self.console.is_terminal or self.console.is_dumb_terminal:
            yield self
            return
        live = partial(Live, console=self.console, refresh_per_second=4, transient=True)
        with live(get_renderable=self._renderable) as self._live:
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
        self._shown = progress, self.clock()
        if self._live is None and self._due():
            self.console.print(self._renderable())

    def _renderable(self) -> Text:
        """Return the state of the sweep in one line: what is cut off in a narrow terminal comes last."""
        if self._shown is None:
            return Text()
        progress, since = self._shown
        failed = f", {progress.failed} failed" if progress.failed else ""
        age = self.clock() - since
        left = f", {time_left(progress.seconds_left - age)}" if progress.running else ""
        running = ", ".join(f"{one_line(run.title)} step {run.step}/{run.steps}" for run in progress.running)
        parts = [f"{progress.done}/{progress.total} runs{failed}{left}", running, progress.mlflow]
        line = "; ".join(one_line(part) for part in parts if part)
        return Text(line, no_wrap=True, overflow="ellipsis")
