"""Terminal output of a sweep: live progress, and the tables of its answer."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ablate.errors import one_line
from ablate.execution.progress import Progress
from ablate.experiment.schema import Metric
from ablate.reports.plain_text import duration, footnotes
from ablate.results.contrasts import Contrast
from ablate.results.forked import DIFFERENCES, difference_word
from ablate.results.number_text import interval, number
from ablate.results.paired_stats import Verdict
from ablate.results.published import Replication, agreement_notes, agreement_text
from ablate.results.summary import ArmSummary, foremost
from ablate.results.verdict_text import needed_text, verdict_notes, verdict_text

MOST_CONTRASTS, MOST_ARMS = 16, 24
"""Maximum number of rows in a table."""
_GAP = 2
"""Spaces between columns."""
_NEEDED = "seeds\nneeded"
_DISPENSABLE = ("memory", "tokens/s", "SQNR dB", "NaN")
"""Columns that are dropped in a narrow terminal, in this order."""
_COLOURS = {
    "better": "green",
    "worse": "red",
    "baseline": "dim",
    "agrees": "green",
    "disagrees": "red",
    "differs": "red",
}


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


def summary_table(arms: Iterable[ArmSummary], metric: Metric, width: int | None = None) -> Table:
    """Return a table with one line for each arm: mean over seeds, paired gap with its interval, quantisation
    error, speed, divergence, verdict, seeds needed.

    Each baseline is followed by the arms that are compared with it, first the confirmed winner of a search;
    refused arms come last. Columns without any measurement are left out. Of many arms only the best are
    shown, and the caption says so. In a terminal of `width` columns, the least important columns that do not
    fit are dropped.
    """
    everything = list(arms)
    arms = sorted(foremost(everything, metric, MOST_ARMS), key=lambda arm: arm.role != "confirmed")
    alone = sorted((arm for arm in arms if arm.baseline is None), key=lambda arm: not arm.is_baseline)
    shown = [arm for first in alone for arm in (first, *(arm for arm in arms if arm.baseline == first.name))]
    columns = {
        "arm": [one_line(arm.name) for arm in shown],
        metric.name: [number(arm.mean) if arm.values else "-" for arm in shown],
        "seeds": [
            f"{len(arm.values)}" if len(arm.values) == arm.seeds else f"{len(arm.values)} of {arm.seeds}"
            for arm in shown
        ],
        DIFFERENCES[difference_word(shown)]: ["" if arm.gap is None else interval(arm.gap) for arm in shown],
        "SQNR dB": ["-" if math.isnan(arm.sqnr_db) else f"{arm.sqnr_db:.1f}" for arm in shown],
        "tokens/s": ["-" if math.isnan(arm.tokens_per_s) else f"{arm.tokens_per_s:,.0f}" for arm in shown],
        "memory": ["-" if math.isnan(arm.memory) else f"{arm.memory / 1e6:,.0f} MB" for arm in shown],
        "NaN": [str(arm.nans or "-") for arm in shown],
    }
    notes = (
        []
        if len(arms) == len(everything)
        else [f"{len(everything) - len(arms):,} more arms, none of them better by {metric.name}"]
    )
    styles = [_COLOURS.get(arm.colour, "") for arm in shown]
    return _judged_table(columns, [arm.verdict for arm in shown], styles, width, notes, left=("arm",))


def contrast_table(contrasts: list[Contrast], width: int | None = None) -> Table | None:
    """Return a table with one line for each pair of arms that differ in one knob; None if there is none."""
    if not contrasts:
        return None
    columns = {
        "knob": [one_line(contrast.knob) for contrast in contrasts],
        "turned to": [one_line(contrast.change) for contrast in contrasts],
        "with": [one_line(contrast.held) for contrast in contrasts],
        "effect": [interval(contrast.effect) for contrast in contrasts],
    }
    verdicts = [contrast.verdict for contrast in contrasts]
    return _judged_table(
        columns, verdicts, [_COLOURS.get(verdict.kind, "") for verdict in verdicts], width, left=(*columns,)
    )


def replication_table(replications: Iterable[Replication]) -> Table:
    """Return a table of published and measured values, with coloured verdicts."""
    lines = list(replications)
    marks, notes = footnotes([agreement_notes(line) for line in lines])
    table = _table(notes)
    for name in ("arm", "metric", "published", "measured", "verdict"):
        table.add_column(name, justify="right" if name in ("published", "measured") else "left")
    table.add_column("source", style="dim")
    for line, mark in zip(lines, marks, strict=True):
        verdict = Text(agreement_text(line, short=True) + mark, style=_COLOURS.get(line.verdict.kind, ""))
        table.add_row(
            one_line(line.subject),
            line.metric,
            line.published,
            line.found,
            verdict,
            one_line(line.figure.source),
        )
    return table


def _judged_table(
    columns: dict[str, list[str]],
    verdicts: Sequence[Verdict],
    styles: Sequence[str],
    width: int | None,
    more: Sequence[str] = (),
    left: tuple[str, ...] = (),
) -> Table:
    """Return a table of columns, followed by verdicts and seeds needed, with their notes and `more` below.

    `styles` holds one style for each verdict; `left` names the columns to align left.
    """
    marks, notes = footnotes([verdict_notes(verdict) for verdict in verdicts])
    needed = [verdict.needed for verdict in verdicts]
    columns |= {
        "verdict": [
            verdict_text(verdict, short=True) + mark for verdict, mark in zip(verdicts, marks, strict=True)
        ],
        _NEEDED: [needed_text(count) for count in needed],
    }
    columns = {name: cells for name, cells in columns.items() if any(cell not in ("", "-") for cell in cells)}
    if _NEEDED in columns and not _fits(columns, width):
        columns[_NEEDED] = [needed_text(count, ranged=False) for count in needed]
    dropped = []
    for name in _DISPENSABLE:
        if name in columns and not _fits(columns, width):
            dropped.append(name)
            del columns[name]
    more = [*more, *([f"{', '.join(dropped)}: in a wider terminal, and in the report"] if dropped else [])]
    table = _table([*notes, *more])
    for name in columns:
        table.add_column(name, justify="left" if name in (*left, "verdict") else "right")
    for row, style in zip(zip(*columns.values(), strict=True), styles, strict=True):
        table.add_row(
            *(Text(cell, style if name == "verdict" else "") for name, cell in zip(columns, row, strict=True))
        )
    return table


def _fits(columns: dict[str, list[str]], width: int | None) -> bool:
    """Return True if no cell has to be wrapped in a terminal of `width` columns."""
    if width is None:
        return True
    widths = [max(cell_len(text) for text in (*name.split("\n"), *cells)) for name, cells in columns.items()]
    return sum(widths) + _GAP * (len(widths) - 1) <= width


def _table(notes: Sequence[str]) -> Table:
    table = Table(header_style="bold", pad_edge=False, box=None, padding=(0, _GAP, 0, 0))
    if notes:
        table.caption, table.caption_justify, table.caption_style = "\n".join(notes), "left", "dim"
    return table
