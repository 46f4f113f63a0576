"""Question, answer and arms of a sweep as Markdown, for its run in MLflow and its study in Optuna."""

from dataclasses import replace

from ablate.reports.comparison_tables import arm_columns, foremost, judged
from ablate.reports.effect_table import effect_table, lines
from ablate.reports.plain_text import markdown_cell
from ablate.results.comparisons import Comparisons
from ablate.results.headline import headline_of
from ablate.results.summary import interval_of, summaries
from ablate.store.ledger import Ledger

_MOST_LINES = 40
"""Largest number of arms in the description, which MLflow limits to 8,000 characters, and of effects."""


def summary_markdown(ledger: Ledger) -> str:
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


def study_markdown(ledger: Ledger) -> str:
    """Return the summary with the effects of knobs, since Optuna's importance says nothing of few arms, and
    with a line on Optuna's best trial."""
    sweep = Comparisons(ledger)
    arms = {arm.name for arm in sweep.arms}  # whose gaps the summary has
    effects = [line for line in lines(sweep) if line.label not in arms][:_MOST_LINES]
    end = "lowest" if sweep.metric.direction == "minimize" else "highest"
    best = (
        f"Optuna's best trial has the {end} mean {sweep.metric.name}. That is not a verdict: see its gap,"
        " with the interval. Optuna's importance of few arms is noise; the effects and gaps here are not."
    )
    parts = [
        summary_markdown(ledger),
        effect_table("effects", effects, sweep).markdown() if effects else "",
        best if len(ledger.facts.all_metrics) == 1 else "",  # of several objectives, Optuna has no best
    ]
    return "\n\n".join(filter(None, parts))
