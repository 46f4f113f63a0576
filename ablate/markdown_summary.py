"""A sweep's question and table as Markdown: the description of its run in MLflow, and of its report there."""

from ablate.ledger import Ledger
from ablate.plain_text import markdown_cell
from ablate.results import foremost, interval, interval_of, metric_of, number, summaries

_MOST_LINES = 40
"""Of the description in MLflow, which holds 8,000 characters."""


def summary_markdown(ledger: Ledger) -> str:
    """The question and the table as Markdown: the description of the sweep's run in MLflow."""
    metric = metric_of(ledger)
    lines = [
        f"**{ledger.fact('question')}**",
        "",
        f"| arm | {metric.name} | gap to baseline, {interval_of(ledger)} | seeds | verdict |",
        "|---|---|---|---|---|",
    ]
    arms = summaries(ledger)
    shown = foremost(arms, metric, _MOST_LINES)
    for arm in shown:
        gap = "baseline" if arm.gap is None else interval(arm.gap)
        lines.append(f"| {markdown_cell(arm.name)} | {number(arm.mean)} | {gap} | {len(arm.values)} | {arm.verdict} |")
    if shown != arms:
        lines += ["", f"and {len(arms) - len(shown):,} more arms, none of them better"]
    return "\n".join(lines)
