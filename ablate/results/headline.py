"""First sentence of a report: the verdicts of one family of comparisons, corrected for their number."""

from collections import Counter
from collections.abc import Sequence

from ablate.experiment.roles import CONFIRM
from ablate.results.attribution import Effect
from ablate.results.number_text import counted, interval, number
from ablate.results.paired_stats import FEWEST_DISTINCT, Difference, Verdict
from ablate.results.summary import ArmSummary
from ablate.results.verdict_text import REASONS, diverged_text, needed_text

MOST_STATED = 6
"""Largest number of comparisons that are stated one by one."""
_RELATIONS = {
    "better": "is better than",
    "worse": "is worse than",
    "equivalent": "is equivalent to",
    "same": "gives the same numbers as",
    "undecided": "is undecided against",
    "unjudged": "is not judged against",
}
"""Words between an arm and its baseline, by the kind of the verdict."""
_UNJUDGED = {
    "horizon": "is not ranked (that depends on the horizon) against",
    "position": "is not ranked (that depends on the position) against",
    "blind": "cannot be told from (no known-bad arm is resolved)",
}
"""The same, by the reason why a forked design names no winner."""

Statements = list[tuple[str, Verdict]]
"""Sentences about comparisons, with their verdicts."""


def of_knobs(effects: Sequence[tuple[Effect, Verdict]], unit: str, averaged: bool) -> Statements:
    """Return a sentence on every knob's main effect; `averaged`: other knobs were turned beside it."""
    mean = ", on average over the other knobs" if averaged else ""
    return [
        (
            f"{effect.knobs[0]}: {effect.change} {_relation(verdict)},"
            f" {amount(effect.effect, unit)}{mean}{_seeds(verdict)}",
            verdict,
        )
        for effect, verdict in effects
        if effect.effect.pairs > 1
    ]


def _relation(verdict: Verdict) -> str:
    """Return the words between an effect and its amount."""
    if verdict.reason in _UNJUDGED:
        return REASONS[verdict.reason]
    kinds = {"same": "the same, number by number", "unjudged": "not judged"}
    return f"is {kinds.get(verdict.kind, verdict.kind)}"


def of_arms(arms: Sequence[ArmSummary], unit: str) -> Statements:
    """Return a sentence on every arm against its baseline, except those that a search proposed."""
    statements = []
    for arm in arms:
        if arm.gap is not None and arm.gap.pairs > 1 and arm.role not in ("searched", "null"):
            sentence = (_of_winner if arm.role == "confirmed" else _of_arm)(arm, arm.gap, unit)
            statements.append((f"{sentence}{_seeds(arm.verdict)}", arm.verdict))
    return statements


def _of_arm(arm: ArmSummary, gap: Difference, unit: str) -> str:
    """Return a sentence on an arm and its baseline."""
    relation = _UNJUDGED.get(arm.verdict.reason or "", _RELATIONS[arm.verdict.kind])
    return f"{arm.name} {relation} {arm.baseline}, {amount(gap, unit)}{_remarks(arm)}"


def _of_winner(arm: ArmSummary, gap: Difference, unit: str) -> str:
    """Return a sentence on a search's winner that was rerun on fresh seeds. It begins with the search's
    success or failure."""
    kind, name = arm.verdict.kind, arm.name.removeprefix(CONFIRM)
    outcomes = {"better": "The search found an improvement", "worse": "The search found no improvement"}
    outcome = outcomes.get(kind, "The search's winner is not confirmed")
    relation = f"{_RELATIONS[kind]} {arm.baseline} on {counted(gap.pairs, 'fresh seed')}"
    return f"{outcome}: its best arm, {name}, {relation}, {amount(gap, unit)}{_remarks(arm)}"


def _remarks(arm: ArmSummary) -> str:
    """Return remarks in parentheses on an arm that diverged on some seeds, or learned nothing."""
    diverged = f" (it {diverged_text(len(arm.diverged), arm.seeds)})" if arm.diverged else ""
    idle = "" if arm.learned else " (it learned nothing)"
    return diverged + (" (nothing was learned)" if arm.verdict.reason == "nothing_learned" else idle)


def of_best(searched: Sequence[ArmSummary], again: ArmSummary | None, metric: str, unit: str) -> str:
    """Return a sentence on a search whose winner has fewer than two pairs on fresh seeds.

    `searched`: its arms, the best first. `again`: the winner's rerun on fresh seeds, if there is one.
    """
    best = searched[0]
    gap = "" if best.gap is None or not best.gap.pairs else f", {amount(best.gap, unit)} from {best.baseline}"
    status = "exploratory until the arm is rerun on fresh seeds (search: {confirm: 5})"
    if again:
        pairs = counted(again.gap.pairs if again.gap else 0, "pair")
        status = (
            f"not confirmed, because its rerun on {counted(again.seeds, 'fresh seed')} has only {pairs} with"
            " its baseline"
        )
    arms = counted(len(searched), "arm")
    return (
        f"The best of {arms} is {best.name}, {metric} {number(best.mean)}{gap}. The search chose it by this"
        f" number, so the result is {status}."
    )


def headline(statements: Statements) -> str:
    """Return the sentences as one or two.

    Of many comparisons, those are stated that are decided after the correction for all; the others are
    counted. A comparison without a verdict is not called undecided: no number of seeds is promised for it.
    """
    verdicts = [verdict for _, verdict in statements]
    if all(verdict.reason == "nothing_learned" for verdict in verdicts):
        return (
            "No answer: in each comparison, neither arm has a lower loss than a model that ignores its input."
        )
    if all(verdict.kind == "unjudged" and verdict.reason != "nothing_learned" for verdict in verdicts):
        return (
            f"No verdict: a comparison needs {FEWEST_DISTINCT} or more seeds whose differences have at least"
            f" {FEWEST_DISTINCT} distinct values."
        )
    if len(statements) <= MOST_STATED:
        return f"{'; '.join(text for text, _ in statements)}."
    decided = [text for text, verdict in statements if verdict.decided]
    more = len(decided) - MOST_STATED
    decided = decided[:MOST_STATED] + ([f"{counted(more, 'more comparison')} decided"] if more > 0 else [])
    sentences = [f"{'; '.join(decided)}."] if decided else []
    total = f"of {len(statements)} comparisons"
    counts = Counter(verdict.kind for verdict in verdicts)
    if undecided := counts["undecided"]:
        needed = [verdict.needed for verdict in verdicts if verdict.kind == "undecided"]
        seeds = [each.count for each in needed if each and each.count]
        chance = (
            f"; with {max(seeds)} seeds in all each of them has an 80 % chance of a verdict"
            if len(seeds) == undecided
            else ""
        )
        sentences.append(f"{undecided} {total} {'is' if undecided == 1 else 'are'} undecided{chance}.")
    if unjudged := counts["unjudged"]:
        sentences.append(f"{unjudged} {total} {'is' if unjudged == 1 else 'are'} not judged.")
    return " ".join(sentences)


def amount(difference: Difference, unit: str) -> str:
    """Return a difference with its interval and its unit."""
    return f"{interval(difference)}{f' {unit}' if unit else ''}"


def _seeds(verdict: Verdict) -> str:
    """Return the seeds that an undecided comparison needs, as a clause."""
    return f", and needs {needed_text(verdict.needed)} seeds in all for a verdict" if verdict.needed else ""
