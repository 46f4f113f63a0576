"""The first sentence of a report: the verdicts of one family of comparisons, all of them, after correction for their number."""

from collections import Counter
from collections.abc import Sequence

from ablate.experiment.roles import CONFIRM
from ablate.results.attribution import Effect
from ablate.results.paired_stats import FEWEST_DISTINCT, Difference, Verdict
from ablate.results.summary import ArmSummary, counted, interval, number
from ablate.results.verdict_text import diverged_text, needed_text

MOST_SAID = 6
"""Comparisons that are stated one by one."""
_RELATIONS = {
    "better": "is better than",
    "worse": "is worse than",
    "equivalent": "is equivalent to",
    "same": "gives the same numbers as",
    "undecided": "is undecided against",
    "unjudged": "is not judged against",
}
"""An arm and its baseline, by the kind of the verdict."""

Said = list[tuple[str, Verdict]]
"""Sentences about comparisons, with their verdicts."""


def of_knobs(effects: Sequence[tuple[Effect, Verdict]], unit: str) -> Said:
    """Return a sentence on every knob's main effect."""
    words = {"same": "the same, number by number", "unjudged": "not judged"}
    mean = ", on average over the other knobs" if len({effect.knobs for effect, _ in effects}) > 1 else ""
    return [
        (
            f"{effect.knobs[0]}: {effect.change} is {words.get(verdict.kind, verdict.kind)}, {amount(effect.effect, unit)}{mean}"
            f"{_seeds(verdict)}",
            verdict,
        )
        for effect, verdict in effects
        if effect.effect.pairs > 1
    ]


def of_arms(arms: Sequence[ArmSummary], unit: str) -> Said:
    """Return a sentence on every arm against its baseline, but for those that a search proposed."""
    return [
        (
            f"{_of_winner(arm, unit) if arm.role == 'confirmed' else _of_arm(arm, unit)}{_seeds(arm.verdict)}",
            arm.verdict,
        )
        for arm in arms
        if arm.gap is not None and arm.gap.pairs > 1 and arm.role != "searched"
    ]


def _of_arm(arm: ArmSummary, unit: str) -> str:
    return f"{arm.name} {_RELATIONS[arm.verdict.kind]} {arm.baseline}, {amount(arm.gap, unit)}{_remarks(arm)}"


def _of_winner(arm: ArmSummary, unit: str) -> str:
    """Return a sentence on a search's winner, run again: whether the search found anything comes first."""
    kind, name = arm.verdict.kind, arm.name.removeprefix(CONFIRM)
    outcome = {"better": "The search found an improvement", "worse": "The search found no improvement"}
    first = outcome.get(kind, "The search's winner is not confirmed")
    on = f"on {counted(arm.gap.pairs, 'fresh seed')}"
    return f"{first}: its best arm, {name}, {_RELATIONS[kind]} {arm.baseline} {on}, {amount(arm.gap, unit)}{_remarks(arm)}"


def _remarks(arm: ArmSummary) -> str:
    diverged = f" (it {diverged_text(len(arm.diverged), arm.seeds)})" if arm.diverged else ""
    idle = "" if arm.learned else " (it learned nothing)"
    return diverged + (" (nothing was learned)" if arm.verdict.reason == "nothing_learned" else idle)


def of_best(searched: Sequence[ArmSummary], again: ArmSummary | None, metric: str, unit: str) -> str:
    """Return a sentence on a search whose winner has no two pairs on fresh seeds. `searched`: from the best on; `again`: its run."""
    best = searched[0]
    gap = "" if best.gap is None or not best.gap.pairs else f", {amount(best.gap, unit)} from {best.baseline}"
    until = "exploratory, until it is run again on fresh seeds (search: {confirm: 5})"
    if again:
        pairs = counted(again.gap.pairs, "pair")
        until = f"not confirmed, since its run on {counted(again.seeds, 'fresh seed')} has {pairs} with its baseline"
    arms = counted(len(searched), "arm")
    return f"The best of {arms} is {best.name}, {metric} {number(best.mean)}{gap}. It was chosen by this number: {until}."


def headline(said: Said) -> str:
    """Return the sentences as one or two. Of many, those that are decided after the correction for all, and how many are not.

    A comparison without a verdict is not called undecided: no number of seeds is promised for it.
    """
    verdicts = [verdict for _, verdict in said]
    if all(verdict.reason == "nothing_learned" for verdict in verdicts):
        return "No answer: in each comparison neither arm's loss is better than that of a model that ignores its input."
    if all(verdict.kind == "unjudged" and verdict.reason != "nothing_learned" for verdict in verdicts):
        return f"No verdict: it takes differences with {FEWEST_DISTINCT} distinct values, and so {FEWEST_DISTINCT} seeds or more."
    if len(said) <= MOST_SAID:
        return f"{'; '.join(text for text, _ in said)}."
    decided = [text for text, verdict in said if verdict.decided]
    more = (
        [f"{counted(len(decided) - MOST_SAID, 'more comparison')} decided"]
        if len(decided) > MOST_SAID
        else []
    )
    sentences = [f"{'; '.join(decided[:MOST_SAID] + more)}."] if decided else []
    total = f"of {len(said)} comparisons"
    counts = Counter(verdict.kind for verdict in verdicts)
    if undecided := counts["undecided"]:
        needed = [verdict.needed for verdict in verdicts if verdict.kind == "undecided"]
        seeds = [its.count for its in needed if its and its.count]
        each = (
            f"; with {max(seeds)} seeds in all each of them has an 80 % chance of a verdict"
            if len(seeds) == undecided
            else ""
        )
        sentences.append(f"{undecided} {total} {'is' if undecided == 1 else 'are'} undecided{each}.")
    if unjudged := counts["unjudged"]:
        sentences.append(f"{unjudged} {total} {'is' if unjudged == 1 else 'are'} not judged.")
    return " ".join(sentences)


def amount(difference: Difference, unit: str) -> str:
    """Return a difference with its interval and its unit."""
    return f"{interval(difference)}{f' {unit}' if unit else ''}"


def _seeds(verdict: Verdict) -> str:
    """Say how many seeds an undecided comparison needs."""
    return f", and takes {needed_text(verdict.needed)} seeds in all" if verdict.needed else ""
