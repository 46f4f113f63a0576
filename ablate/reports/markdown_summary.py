"""Question, answer and table of arms of a sweep as Markdown, for the description of its run in MLflow."""

from ablate.reports.plain_text import footnotes, markdown_cell
from ablate.results.comparisons import Comparisons
from ablate.results.forked import DIFFERENCES, difference_word
from ablate.results.headline import headline_of
from ablate.results.number_text import interval, number
from ablate.results.summary import foremost, interval_of, metric_of, summaries
from ablate.results.verdict_text import needed_text, verdict_notes, verdict_text
from ablate.store.ledger import Ledger

_MOST_LINES = 40
"""Largest number of arms in the description, which MLflow limits to 8,000 characters."""


def summary_markdown(ledger: Ledger) -> str:
    """Return the question, its answer and the table of arms as Markdown.

    Args:
        ledger: Ledger of the sweep.
    """
    metric, arms = metric_of(ledger), summaries(ledger)
    differences = f"{DIFFERENCES[difference_word(arms)]}, {interval_of(ledger)}"
    answer = headline_of(Comparisons(ledger))
    lines = [
        f"**{markdown_cell(answer.question)}**",
        "",
        markdown_cell(answer.sentence),
        "",
        *([f"`{answer.command}` ({answer.cost})", ""] if answer.command else []),
        f"| arm | {markdown_cell(metric.name)} | {differences} | seeds | verdict | seeds needed |",
        "|---|---|---|---|---|---|",
    ]
    shown = foremost(arms, metric, _MOST_LINES)
    marks, notes = footnotes([verdict_notes(arm.verdict) for arm in shown])
    for arm, mark in zip(shown, marks, strict=True):
        gap = "baseline" if arm.gap is None else interval(arm.gap)
        verdict = f"{verdict_text(arm.verdict, short=True)}{mark} | {needed_text(arm.verdict.needed)}"
        lines.append(
            f"| {markdown_cell(arm.name)} | {number(arm.mean)} | {gap} | {len(arm.values)} | {verdict} |"
        )
    lines += ["", *(f"{markdown_cell(note)}  " for note in notes)] if notes else []
    if shown != arms:
        lines += ["", f"and {len(arms) - len(shown):,} more arms, none of them better"]
    return "\n".join(lines)
