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
from ablate.plain_text import one_line
from ablate.published import Replication
from ablate.results import ArmSummary, Contrast, foremost, interval, number
from ablate.surface import Metric

MOST_CONTRASTS, MOST_ARMS = 16, 24
"""What a person reads."""
_COLOURS = {"better": "green", "worse": "red", "baseline": "dim", "agrees": "green", "disagrees": "red", "differs": "red"}


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
        table.add_row(one_line(running.name), str(running.seed), f"{running.step}/{running.steps}", bar, loss, str(running.attempt))
    left = f", about {duration(progress.seconds_left)} left" if progress.running else ""
    done = f"{progress.done} of {progress.total} trials done{left}"
    status = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(1, progress.total), completed=progress.done, width=40)
    status.add_row(bar, Text.assemble(done, (f"  {progress.mlflow}" if progress.mlflow else "", "yellow")))
    return Group(table, "", status)


def summary_table(arms: Iterable[ArmSummary], metric: Metric) -> Table:
    """One line an arm: mean over seeds, paired gap with its interval, quantisation error, speed, divergence, verdict.

    Each baseline is followed by what is compared with it, first a search's winner run again; refused arms come last.
    Columns in which nothing was measured are left out, and of many arms all but the best, which is said.
    """
    everything = list(arms)
    arms = sorted(foremost(everything, metric, MOST_ARMS), key=lambda arm: arm.role != "confirmed")
    alone = sorted((arm for arm in arms if arm.baseline is None), key=lambda arm: not arm.is_baseline)
    rows = [
        (_cells(arm, metric), _COLOURS.get(arm.colour, ""))
        for first in alone
        for arm in (first, *(arm for arm in arms if arm.baseline == first.name))
    ]
    names = [name for name in rows[0][0] if any(row[name] != "-" for row, _ in rows)] if rows else []
    table = _table()
    for name in names:
        table.add_column(name, justify="left" if name in ("arm", "verdict") else "right")
    for row, style in rows:
        verdict = Text(row["verdict"], style=style)
        table.add_row(*(row[name] for name in names if name != "verdict"), verdict)
    if len(arms) < len(everything):
        table.caption = f"{len(everything) - len(arms):,} more arms, none of them better by {metric.name}"
    return table


def _cells(arm: ArmSummary, metric: Metric) -> dict[str, str]:
    return {
        "arm": one_line(arm.name),
        metric.name: number(arm.mean) if arm.values else "-",
        "seeds": f"{len(arm.values)}" if len(arm.values) == arm.seeds else f"{len(arm.values)} of {arm.seeds}",
        "gap to baseline": "" if arm.gap is None else interval(arm.gap),
        "SQNR dB": "-" if math.isnan(arm.sqnr_db) else f"{arm.sqnr_db:.1f}",
        "tokens/s": "-" if math.isnan(arm.tokens_per_s) else f"{arm.tokens_per_s:,.0f}",
        "memory": "-" if math.isnan(arm.memory) else f"{arm.memory / 1e6:,.0f} MB",
        "NaN": str(arm.nans),
        "verdict": arm.verdict,
    }


def contrast_table(contrasts: list[Contrast]) -> Table | None:
    """One line for each two arms that differ in one knob; None where there are none."""
    if not contrasts:
        return None
    table = _table("knob", "turned to", "with", "effect", "verdict")
    for contrast in contrasts:
        said = Text(contrast.verdict, style=_COLOURS.get(contrast.judged.word, ""))
        table.add_row(one_line(contrast.knob), one_line(contrast.change), one_line(contrast.held), interval(contrast.effect), said)
    return table


def replication_table(replications: Iterable[Replication]) -> Table:
    """Published beside measured, with a verdict."""
    table = _table("arm", "metric", right=("published", "measured"), last="verdict")
    table.add_column("source", style="dim")
    for line in replications:
        said = Text(line.verdict, style=_COLOURS.get(line.verdict.partition(" ")[0].rstrip(":;"), ""))
        table.add_row(one_line(line.subject), line.metric, line.published, line.found, said, one_line(line.figure.source))
    return table


def _table(*names: str, right: tuple[str, ...] = (), last: str | None = None) -> Table:
    table = Table(title_justify="left", caption_justify="left", header_style="bold", pad_edge=False, box=None, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    if last:
        table.add_column(last)
    return table
