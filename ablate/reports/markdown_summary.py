"""Question, answer and table of arms of a sweep as Markdown, for the description of its run in MLflow."""

from dataclasses import replace

from ablate.reports.comparison_tables import arm_columns, judged
from ablate.reports.foremost import foremost
from ablate.reports.plain_text import markdown_cell
from ablate.results.comparisons import Comparisons
from ablate.results.headline import headline_of
from ablate.results.summary import interval_of, summaries
from ablate.store.ledger import Ledger

_MOST_LINES = 40
"""Largest number of arms in the description, which MLflow limits to 8,000 characters."""


def summary_markdown(ledger: Ledger) -> str:
    """Return the question, its answer and the table of arms as Markdown.

    Args:
        ledger: Ledger of the sweep.
    """
    metric, arms = ledger.facts.metric, summaries(ledger)
    answer = headline_of(Comparisons(ledger))
    shown = foremost(arms, metric, _MOST_LINES)
    name, mean, seeds, gap, *_, verdict, needed = arm_columns(arms, metric)
    gap = replace(gap, name=f"{gap.name}, {interval_of(ledger)}")
    more = f"and {len(arms) - len(shown):,} more arms, none of them better" if shown != arms else ""
    parts = [
        f"**{markdown_cell(answer.question)}**",
        markdown_cell(answer.sentence),
        f"`{answer.command}` ({answer.cost})" if answer.command else "",
        judged("arms", shown, [name, mean, gap, seeds, verdict, needed], more).markdown(),
    ]
    return "\n\n".join(filter(None, parts))
