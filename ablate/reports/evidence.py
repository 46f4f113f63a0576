"""Texts on what a sweep found: an evidence block for a pull request or a paper's appendix, and notes for its
run in MLflow and its study in Optuna."""

from dataclasses import replace
from shlex import quote

from ablate.errors import one_line
from ablate.reports.comparison_tables import arm_columns, foremost, judged
from ablate.reports.effect_table import Line, effect_table, lines
from ablate.reports.plain_text import html_text, markdown_cell
from ablate.reports.table import Table
from ablate.results.comparisons import Comparisons
from ablate.results.forked import estimand
from ablate.results.headline import Headline, headline_of
from ablate.results.subject import described, seeds_text
from ablate.results.summary import interval_of
from ablate.results.unpaired import pairing
from ablate.store.checked_ledger import state_option, unverified
from ablate.store.divergences import divergences
from ablate.store.judged import Judged
from ablate.store.ledger import Ledger
from ablate.store.registration import registered_text
from ablate.version import __version__

_MOST_LOST = 3
"""Diverged runs that are listed."""
_MOST_LINES = 40
"""Largest number of arms in a note, which MLflow limits to 8,000 characters, and of effects."""


def _facts(sweep: Comparisons, answer: Headline) -> dict[str, str]:
    """Return claim, design, registration and origin of a sweep, each as a line of text."""
    ledger, design = sweep.ledger, sweep.ledger.facts.design
    provenance, changed = ledger.facts.provenance, ledger.facts.uncommitted
    origin, elsewhere = Judged.of(ledger), Judged.alone(ledger)
    lost = [f"{one.member.name}, seed {one.member.seed}: {one}." for one in divergences(ledger)]
    lost[_MOST_LOST:] = [f"And {len(lost) - _MOST_LOST} more."] if lost[_MOST_LOST:] else []
    made = f"ablate {__version__}"
    if not elsewhere:
        made += f", commit {provenance.get('commit') or 'none'}"
        made += f" with {changed} uncommitted lines of diff" if changed else ""
        device = provenance.get("gpu") or provenance.get("cpu") or "?"
        made += f", torch {provenance.get('torch', '?')}, {device}"
    specs, seeds = [member.resolved for member in ledger.members()], seeds_text(ledger, sweep.arms)
    engines = ", ".join(sorted({spec.engine or "?" for spec in specs}))
    engine = f", engine {engines}" if any(spec.engine for spec in specs) else ""
    run = f"{described(specs[0]) if specs else '?'}, {len(sweep.arms)} arms, {seeds}{engine}."
    file = quote(ledger.facts.file or f"{ledger.name}.yaml")
    every = {
        "Claim": answer.sentence,
        "Design": run + (f" {estimand(design, sweep.arms)}" if design else ""),
        "Interval": f"{sweep.arms[0].interval if sweep.arms else 'interval'} of differences"
        f" {pairing(arm.gap for arm in sweep.arms)}; verdicts corrected by Holm over the comparisons of their"
        " kind",
        "Checks": "; ".join(check.text for check in answer.checks),
        "Diverged": " ".join(lost),
        "Records": unverified(ledger),
        "Registered": registered_text(ledger),
        "Origin": origin.text if origin else "",
        "Command": "" if elsewhere else f"ablate sweep {file}{state_option(ledger.path.parent)}",
        "Made with": made,
    }
    return {name: text for name, text in every.items() if text}


def _table(sweep: Comparisons, answer: Headline) -> Table[Line]:
    """Return the comparisons that the question is about, or all if none is named."""
    every = lines(sweep)
    asked = [line for line in every if line.asked] or every
    return effect_table("evidence", asked, sweep, answer.valid)


def markdown(sweep: Comparisons) -> str:
    answer = headline_of(sweep)
    listed = [
        f"- {name}: " + (f"`{one_line(text)}`" if name == "Command" else markdown_cell(text))
        for name, text in _facts(sweep, answer).items()
    ]
    question, table = f"**{markdown_cell(answer.question)}**", _table(sweep, answer).markdown()
    return "\n".join([question, "", *listed, "", table, ""])


def page(sweep: Comparisons) -> str:
    """Return the block as HTML with the drawn intervals, which needs no other file."""
    answer = headline_of(sweep)
    facts = _facts(sweep, answer)
    items = "\n".join(f"<dt>{html_text(name)}</dt><dd>{html_text(text)}</dd>" for name, text in facts.items())
    style = (
        ".ablate .bar { stroke: #555; stroke-width: 2 } .ablate .zero { stroke: #888 } .ablate .margin {"
        " fill: #e9edf1 } .ablate .mean { fill: #fff; stroke: #555 } .ablate .seed { fill: #2f7f86 } .ablate"
        " svg { overflow: visible } .ablate text { font-size: 10px } .ablate td, .ablate th { text-align:"
        " left; padding-right: 1em }"
    )
    return (
        f'<section class="ablate"><style>{style}</style>\n<h3>{html_text(answer.question)}</h3>\n'
        f"<dl>\n{items}\n</dl>\n{_table(sweep, answer).html()}\n</section>\n"
    )


# Notes


def summary_markdown(ledger: Ledger) -> str:
    """Return question, answer and arms of a sweep."""
    return _summary(Comparisons(ledger))


def _summary(sweep: Comparisons) -> str:
    answer, metric, arms = headline_of(sweep), sweep.metric, sweep.arms_by_metric[0]
    shown = foremost(arms, metric, _MOST_LINES)
    name, mean, seeds, gap, *_, verdict, needed = arm_columns(arms, metric)
    gap = replace(gap, name=f"{gap.name}, {interval_of(sweep.ledger)}")
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
        _summary(sweep),
        effect_table("effects", effects, sweep).markdown() if effects else "",
        best if len(sweep.metrics) == 1 else "",  # of several objectives, Optuna has no best
    ]
    return "\n\n".join(filter(None, parts))
