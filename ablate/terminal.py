"""What a person sees while a sweep runs and when it is over. The only file that draws in the terminal."""

import math
from collections.abc import Iterable
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ablate.cli import duration
from ablate.controller import Progress
from ablate.results import ArmSummary, Contrast, interval
from ablate.surface import Metric

_MOST_CONTRASTS = 16
_COLOURS = {"better": "green", "worse": "red", "baseline": "dim"}


class View:
    """A live view on a terminal; on a pipe, one line for each piece of news."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None

    @contextmanager
    def open(self):
        """Show progress until the block ends."""
        if not self.console.is_terminal:
            yield self
            return
        with Live(console=self.console, refresh_per_second=4, transient=True) as self._live:
            yield self
        self._live = None

    def show(self, progress: Progress) -> None:
        """Bring the view up to date."""
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
        table.add_row(running.name, str(running.seed), f"{running.step}/{running.steps}", bar, loss, str(running.attempt))
    left = f", about {duration(progress.seconds_left)} left" if progress.running else ""
    mlflow = f"  [yellow]MLflow is behind: {progress.mlflow}[/]" if progress.mlflow else ""
    status = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(1, progress.total), completed=progress.done, width=40)
    status.add_row(bar, Text.from_markup(f"{progress.done} of {progress.total} trials done{left}{mlflow}"))
    return Group(table, "", status)


def summary_table(arms: Iterable[ArmSummary], metric: Metric) -> Table:
    """One line an arm: mean over seeds, paired gap with its interval, quantisation error, speed, divergence, verdict."""
    table = Table(title_justify="left", header_style="bold", pad_edge=False, box=None, padding=(0, 2, 0, 0))
    table.add_column("arm")
    for name in (metric.name, "seeds", "gap to baseline", "SQNR dB", "tokens/s", "NaN"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for arm in arms:
        total = len(arm.values) + arm.diverged + arm.missing
        table.add_row(
            arm.name,
            f"{arm.mean:.4f}" if arm.values else "-",
            f"{len(arm.values)}" if len(arm.values) == total else f"{len(arm.values)} of {total}",
            "" if arm.gap is None else interval(arm.gap),
            "-" if math.isnan(arm.sqnr_db) else f"{arm.sqnr_db:.1f}",
            "-" if math.isnan(arm.tokens_per_s) else f"{arm.tokens_per_s:,.0f}",
            str(arm.nans),
            Text(arm.verdict, style=_COLOURS.get(arm.verdict, "")),
        )
    return table


def contrast_table(contrasts: list[Contrast]) -> Table | None:
    """One line for each two arms that differ in one knob; None where there are none, or more than anyone reads."""
    if not 0 < len(contrasts) <= _MOST_CONTRASTS:
        return None
    table = Table(header_style="bold", pad_edge=False, box=None, padding=(0, 2, 0, 0))
    for name in ("knob", "turned to", "with", "effect", "verdict"):
        table.add_column(name)
    for contrast in contrasts:
        style = _COLOURS.get(contrast.verdict, "")
        table.add_row(contrast.knob, contrast.change, contrast.held, interval(contrast.effect), Text(contrast.verdict, style=style))
    return table
