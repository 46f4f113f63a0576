"""Answer of a sweep in a terminal: tables of arms, effects and published figures, and the headline."""

import math
from collections.abc import Iterable, Sequence
from statistics import median

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ablate.cli.plan import expected_width
from ablate.cli.settings import Settings
from ablate.errors import one_line
from ablate.experiment.load import Experiment
from ablate.experiment.schema import Metric
from ablate.reports.plain_text import footnotes
from ablate.reports.table_notes import emulated, reading
from ablate.results.comparisons import Comparisons
from ablate.results.contrasts import Contrast, contrasts
from ablate.results.forked import DIFFERENCES, difference_word, estimand
from ablate.results.headline import Headline, headline_of
from ablate.results.number_text import interval, number
from ablate.results.paired_stats import Verdict
from ablate.results.published import Replication, agreement_notes, agreement_text, replications
from ablate.results.summary import ArmSummary, foremost, summaries
from ablate.results.unmet_phases import never_began
from ablate.results.verdict_text import needed_text, verdict_notes, verdict_text
from ablate.store.ledger import Ledger

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
_FLOORS = {
    "data/unigram_entropy": "A model that ignores context reaches {:.2f}.",
    "data/blank_loss": "With the masks of the data, predicting the mean of the visible values gives {:.2f}.",
}
"""Sentences below a table of losses, with the loss of a trivial model, by name of a fact about the data."""


def print_answer(experiment: Experiment, settings: Settings, screen: Console) -> None:
    """Print the answer and what to do next, the table of arms, the effect of each knob, and how to read
    them.
    """
    # Not compared with its seals: this process wrote it, and compared all that was there before.
    ledger = Ledger(settings.state / "sweeps" / experiment.name / "ledger.db", readonly=True)
    compared = Comparisons(ledger)
    for metric in experiment.metrics:
        main = metric == compared.metric
        arms = [*compared.arms] if main else summaries(ledger, metric)
        if experiment.keys.search:
            sign = 1 if metric.direction == "minimize" else -1
            arms.sort(key=lambda arm: (arm.baseline is not None, not arm.values, sign * arm.mean))
        screen.print(summary_table(arms, metric, screen.width), "")
        found = compared.contrasts if main else contrasts(arms, metric, MOST_CONTRASTS)
        table = contrast_table(found, screen.width)
        if table and len(found) <= MOST_CONTRASTS:
            screen.print(table, "")
    if experiment.keys.published:
        screen.print(replication_table(replications(ledger, experiment.keys.published)), "")
    if came := _width_that_came(experiment, settings, arms):
        screen.print(Text(came))
    screen.print(how_to_read(experiment, arms), emulated(ledger))
    for line in never_began(ledger):
        screen.print(Text(line.replace("**", "")))
    screen.print("")
    print_headline(headline_of(compared), screen, settings.state_option)
    ledger.close()


def print_headline(answer: Headline, screen: Console, state_option: str = "") -> None:
    """Print question, answer, checks that did not pass, and the command that settles it.

    Args:
        answer: the sweep's answer.
        screen: the terminal.
        state_option: option that the command needs for this state folder.
    """
    style = "green" if answer.answered else "red" if not answer.valid else "yellow"
    screen.print(Text(answer.question, "bold"))
    screen.print(Text.assemble((answer.lead, f"bold {style}"), " " if answer.lead else "", answer.text))
    for remark in answer.checks:
        if remark.kind in ("warning", "failed"):
            screen.print(Text(f"{'Failed' if remark.kind == 'failed' else 'Mind'}: {remark.text}.", "yellow"))
    if answer.simplest:
        screen.print(Text(answer.simplest))
    if answer.command:
        screen.print(Text(f"{answer.cost[0].upper()}{answer.cost[1:]}:"))
        screen.print(f"  {answer.command}{state_option}", soft_wrap=True, markup=False)
    elif answer.settling:
        screen.print(Text(answer.settling.text))


def _width_that_came(experiment: Experiment, settings: Settings, arms: list[ArmSummary]) -> str:
    """Return the half-width that a calibration expected beside the one that came; empty without a
    calibration.
    """
    if not (expected := expected_width(experiment, settings.state)):
        return ""
    widths = [
        arm.gap.high - arm.gap.mean for arm in arms if arm.gap and arm.gap.has_interval and arm.role != "null"
    ]
    return (
        f"Half-width: {median(widths):.2g} came (median of the arms), expected was {expected}."
        if widths
        else ""
    )


def how_to_read(experiment: Experiment, arms: list[ArmSummary]) -> str:
    """Return a few sentences that explain the table."""

    facts = experiment.base.config.summary() if experiment.metric.name == "val/loss" else {}
    floors = [_FLOORS[name].format(value) for name, value in facts.items() if name in _FLOORS]
    meaning = [estimand(experiment.keys.design, arms)] if experiment.keys.design else []
    return " ".join((*meaning, reading(arms), *floors))


# The tables


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
