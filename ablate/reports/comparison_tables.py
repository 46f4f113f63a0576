"""Tables of arms, of contrasts and of published figures: their columns, for terminal, report and notes.

Nothing of it needs pandas.
"""

import math
from collections.abc import Sequence
from typing import Any

from ablate.experiment.schema import Metric
from ablate.reports.table import VERDICT, Cell, Column, Table
from ablate.results.contrasts import Contrast
from ablate.results.forked import DIFFERENCES, difference_word
from ablate.results.number_text import interval, number
from ablate.results.paired_stats import MOST_SEEDS, Verdict
from ablate.results.published import Replication, agreement_notes, agreement_text
from ablate.results.summary import ArmSummary
from ablate.results.verdict_text import needed_text, verdict_notes, verdict_text

MOST_ARMS = 24
"""Largest number of arms in a terminal's table."""


def needed_cell(verdict: Verdict) -> Cell:
    needed = verdict.needed
    return None if needed is None else (needed_text(needed), needed.count or MOST_SEEDS + 1)


WORD = Column[Any](VERDICT, lambda row: verdict_text(row.verdict, short=True))
"""Column of the word of each row's verdict."""
NEEDED = Column[Any](
    "seeds\nneeded",
    lambda row: needed_cell(row.verdict),
    short=lambda row: needed_text(row.verdict.needed, ranged=False),
)
"""Column of the seeds that each row's verdict needs."""


def judged(
    name: str,
    rows: Sequence[Any],
    columns: Sequence[Column[Any]],
    caption: str = "",
    classes: Sequence[str] = (),
) -> Table[Any]:
    """Return a table of rows with verdicts, whose notes stand below it."""
    return Table(name, rows, columns, caption, classes, [verdict_notes(row.verdict) for row in rows])


def foremost(arms: list[ArmSummary], metric: Metric, most: int) -> list[ArmSummary]:
    """Return at most about `most` arms, in their order, for a table or figure that a person reads: a search's
    confirmed winner, the best arms by the metric, and beyond that number the baselines of these."""
    if len(arms) <= most:
        return arms
    sign = 1 if metric.direction == "minimize" else -1
    best = sorted(arms, key=lambda arm: (arm.role != "confirmed", not arm.values, sign * arm.mean))[:most]
    shown = {name for arm in best for name in (arm.name, arm.baseline)}
    return [arm for arm in arms if arm.name in shown]


def arm_columns(arms: Sequence[ArmSummary], metric: Metric) -> list[Column[ArmSummary]]:
    """Return the columns of a table of arms: name, mean, seeds, paired gap, quantisation error, tokens/s,
    memory, NaN, verdict, seeds needed."""
    return [
        Column("arm", lambda arm: arm.name),
        Column(metric.name, lambda arm: (number(arm.mean), arm.mean) if arm.values else "-"),
        Column("seeds", _seeds),
        Column(DIFFERENCES[difference_word(arms)], lambda arm: arm.gap and (interval(arm.gap), arm.gap.mean)),
        Column("SQNR dB", lambda arm: arm.sqnr_db, digits=1),
        Column("tokens/s", lambda arm: arm.tokens_per_s),
        Column("memory", lambda arm: arm.memory / 1e6, unit="MB"),
        Column("NaN", lambda arm: arm.nans or math.nan),
        WORD,
        NEEDED,
    ]


def _seeds(arm: ArmSummary) -> Cell:
    count = len(arm.values)
    return (f"{count}" if count == arm.seeds else f"{count} of {arm.seeds}", count)


def summary_table(arms: list[ArmSummary], metric: Metric) -> Table[ArmSummary]:
    """Return a table with one line for each arm, for a terminal. Each baseline is followed by the arms that
    are compared with it, first the confirmed winner of a search; refused arms come last. If there are many
    arms, only the best are shown, and the caption says so."""
    some = sorted(foremost(arms, metric, MOST_ARMS), key=lambda arm: arm.role != "confirmed")
    alone = sorted((arm for arm in some if arm.baseline is None), key=lambda arm: not arm.is_baseline)
    shown = [arm for first in alone for arm in (first, *(arm for arm in some if arm.baseline == first.name))]
    more = f"{len(arms) - len(some):,} more arms, none of them better by {metric.name}"
    caption = more if len(some) < len(arms) else ""
    return judged("arms", shown, arm_columns(shown, metric), caption, [arm.colour for arm in shown])


def contrasts_table(contrasts: Sequence[Contrast]) -> Table[Contrast]:
    """Return a table with one line for each pair of arms that differ in one knob."""
    columns: list[Column[Contrast]] = [
        Column("knob", lambda contrast: contrast.knob),
        Column("turned to", lambda contrast: contrast.change),
        Column("with", lambda contrast: contrast.held),
        Column("effect", lambda contrast: (interval(contrast.effect), contrast.effect.mean)),
        WORD,
        NEEDED,
    ]
    return judged("contrasts", contrasts, columns, "", [contrast.verdict.kind for contrast in contrasts])


def published_table(lines: Sequence[Replication]) -> Table[Replication]:
    """Return the table of published figures and orderings beside the measured ones."""

    def published(line: Replication) -> Cell:
        amount = line.figure.amount
        return line.published if amount is None else (line.published, amount)

    columns: list[Column[Replication]] = [
        Column("arm", lambda line: line.subject),
        Column("metric", lambda line: line.metric),
        Column("published", published),
        Column("measured", lambda line: (line.found, line.measured.mean) if line.measured.pairs else ""),
        Column(VERDICT, lambda line: agreement_text(line, short=True)),
        Column("source", lambda line: line.figure.source),
    ]
    classes = [line.colour for line in lines]
    return Table("published", lines, columns, "", classes, [agreement_notes(line) for line in lines])
