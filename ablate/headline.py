"""The first sentence of a report: the verdicts of one family of comparisons, all of them, after correction for their number."""

from collections.abc import Sequence

from ablate.attribution import Effect
from ablate.results import UNLEARNED, ArmSummary, counted, interval
from ablate.stats import FEWEST_DISTINCT, Difference, Verdict

MOST_SAID = 6
"""Comparisons that are stated one by one."""
_RELATIONS = {
    "better": "is better than",
    "worse": "is worse than",
    "equivalent": "is equivalent to",
    "same": "gives the same numbers as",
    "undecided": "is undecided against",
    "none": "is not judged against",
}
"""An arm and its baseline, by the word of the verdict."""

Said = list[tuple[str, Verdict]]
"""Sentences about comparisons, with their verdicts."""


def of_knobs(effects: Sequence[tuple[Effect, Verdict]], unit: str) -> Said:
    """What is said of every knob's main effect."""
    words = {"same": "the same, number by number", "none": "not judged"}
    mean = ", on average over the other knobs" if len({effect.knobs for effect, _ in effects}) > 1 else ""
    return [
        (
            f"{effect.knobs[0]}: {effect.change} is {words.get(verdict.word, verdict.word)}, {amount(effect.effect, unit)}{mean}"
            f"{_seeds(verdict)}",
            verdict,
        )
        for effect, verdict in effects
        if effect.effect.pairs > 1
    ]


def of_arms(arms: Sequence[ArmSummary], unit: str) -> Said:
    """What is said of every arm against its baseline, but for those that a search proposed."""
    found = []
    for arm in arms:
        if arm.gap is None or arm.gap.pairs < 2 or arm.role == "searched":
            continue
        diverged = f" (it diverged on {len(arm.diverged)} of {counted(arm.seeds, 'seed')})" if arm.diverged else ""
        fresh = f" (on {counted(arm.gap.pairs, 'fresh seed')})" if arm.role == "confirmed" else ""
        idle = " (nothing was learned)" if arm.judged is UNLEARNED else "" if arm.learned else " (it learned nothing)"
        text = f"{arm.name} {_RELATIONS[arm.judged.word]} {arm.baseline}, {amount(arm.gap, unit)}{diverged}{fresh}{idle}"
        found.append((f"{text}{_seeds(arm.judged)}", arm.judged))
    return found


def headline(said: Said) -> str:
    """The sentences as one or two. Of many, those that are decided after the correction for all, and how many are not."""
    if all(verdict is UNLEARNED for _, verdict in said):
        return "No answer: in each comparison neither arm's loss is better than that of a model that ignores its input."
    if all(verdict.word == "none" and verdict is not UNLEARNED for _, verdict in said):
        return f"No verdict: it takes differences with {FEWEST_DISTINCT} distinct values, and so {FEWEST_DISTINCT} seeds or more."
    if len(said) <= MOST_SAID:
        return f"{'; '.join(text for text, _ in said)}."
    decided = [text for text, verdict in said if verdict.decided]
    more = [f"{counted(len(decided) - MOST_SAID, 'more comparison')} decided"] if len(decided) > MOST_SAID else []
    first = f"{'; '.join(decided[:MOST_SAID] + more)}." if decided else ""
    open_ = [verdict for _, verdict in said if not verdict.decided]
    if not open_:
        return first
    needed = [verdict.needed for verdict in open_]
    counts = [its.count for its in needed if its and its.count]
    each = f"; with {max(counts)} seeds in all each of them has an 80 % chance of a verdict" if len(counts) == len(needed) else ""
    return f"{first} {len(open_)} of {len(said)} comparisons {'is' if len(open_) == 1 else 'are'} undecided{each}.".lstrip()


def amount(difference: Difference, unit: str) -> str:
    """A difference with its interval and its unit."""
    return f"{interval(difference)}{f' {unit}' if unit else ''}"


def _seeds(verdict: Verdict) -> str:
    """Say how many seeds an undecided comparison needs."""
    return f", and takes {verdict.needed}" if verdict.needed else ""
