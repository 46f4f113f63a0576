"""Evidence block: what a sweep found, in one snippet to paste into a pull request or a paper's appendix."""

from ablate.errors import one_line
from ablate.reports.effect_table import Line, effect_table, lines
from ablate.reports.plain_text import html_text, markdown_cell
from ablate.reports.table import Table
from ablate.results.comparisons import Comparisons
from ablate.results.forked import estimand
from ablate.results.headline import headline_of
from ablate.results.subject import described
from ablate.results.unpaired import pairing
from ablate.store.checked_ledger import unverified
from ablate.store.divergences import divergences
from ablate.store.judged import Judged
from ablate.store.registration import registered_text
from ablate.version import __version__

_MOST_LOST = 3
"""Diverged runs that are listed."""


def facts(sweep: Comparisons) -> dict[str, str]:
    """Return claim, design, registration and origin of a sweep, each as a line of text; first the
    question."""
    answer, ledger, design = headline_of(sweep), sweep.ledger, sweep.ledger.facts.design
    provenance = ledger.facts.provenance
    changed = ledger.facts.uncommitted
    judged, elsewhere = Judged.of(ledger), Judged.alone(ledger)
    lost = [f"{one.member.name}, seed {one.member.seed}: {one}." for one in divergences(ledger)]
    lost[_MOST_LOST:] = [f"And {len(lost) - _MOST_LOST} more."] if lost[_MOST_LOST:] else []
    made = f"ablate {__version__}"
    if not elsewhere:
        made += f", commit {provenance.get('commit') or 'none'}"
        made += f" with {changed} uncommitted lines of diff" if changed else ""
        device = provenance.get("gpu") or provenance.get("cpu") or "?"
        made += f", torch {provenance.get('torch', '?')}, {device}"
    every = {
        "Question": answer.question,
        "Claim": answer.sentence,
        "Design": _design(sweep) + (f" {estimand(design, sweep.arms)}" if design else ""),
        "Interval": f"{sweep.arms[0].interval if sweep.arms else 'interval'} of differences"
        f" {pairing(arm.gap for arm in sweep.arms)}; verdicts corrected by Holm over the comparisons of their"
        " kind",
        "Checks": "; ".join(check.text for check in answer.checks),
        "Diverged": " ".join(lost),
        "Records": unverified(ledger),
        "Registered": registered_text(ledger),
        "Origin": judged.text if judged else "",
        "Command": "" if elsewhere else f"ablate sweep {ledger.facts.file or f'{ledger.name}.yaml'}",
        "Made with": made,
    }
    return {name: text for name, text in every.items() if text}


def _design(sweep: Comparisons) -> str:
    specs = [member.resolved for member in sweep.ledger.members()]
    seeds = sorted({arm.seeds for arm in sweep.arms if arm.role != "refused"}) or [0]
    count = f"{seeds[0]} seeds" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    engines = ", ".join(sorted({spec.engine or "?" for spec in specs}))
    engine = f", engine {engines}" if any(spec.engine for spec in specs) else ""
    return f"{described(specs[0]) if specs else '?'}, {len(sweep.arms)} arms, {count} an arm{engine}."


def table(sweep: Comparisons) -> Table[Line]:
    """Return the comparisons that the question is about, or all if none is named."""
    every = lines(sweep)
    asked = [line for line in every if line.asked] or every
    return effect_table("evidence", asked, sweep, headline_of(sweep).valid)


def markdown(sweep: Comparisons) -> str:
    (_, question), *rest = facts(sweep).items()
    listed = [
        f"- {name}: " + (f"`{one_line(text)}`" if name == "Command" else markdown_cell(text))
        for name, text in rest
    ]
    return "\n".join([f"**{markdown_cell(question)}**", "", *listed, "", table(sweep).markdown(), ""])


def page(sweep: Comparisons) -> str:
    """Return the block as HTML with the drawn intervals, which needs no other file."""
    (_, question), *rest = facts(sweep).items()
    items = "\n".join(f"<dt>{html_text(name)}</dt><dd>{html_text(text)}</dd>" for name, text in rest)
    style = (
        ".ablate .bar { stroke: #555; stroke-width: 2 } .ablate .zero { stroke: #888 } .ablate .margin {"
        " fill: #e9edf1 } .ablate .mean { fill: #fff; stroke: #555 } .ablate .seed { fill: #2f7f86 } .ablate"
        " svg { overflow: visible } .ablate text { font-size: 10px } .ablate td, .ablate th { text-align:"
        " left; padding-right: 1em }"
    )
    return (
        f'<section class="ablate"><style>{style}</style>\n<h3>{html_text(question)}</h3>\n'
        f"<dl>\n{items}\n</dl>\n{table(sweep).html()}\n</section>\n"
    )
