"""Verdicts as text. Terminal, report, notes and tags all use this file, so that a verdict reads the same
everywhere.

A column of a table has `verdict_text(verdict, short=True)`, one word, coloured by the kind. `needed_text` is
a column of its own, and `verdict_notes` are footnotes under the table. `verdict_text(verdict)` is a single
line with all of this:

    undecided (worse alone, not after Holm's correction); 8 (4 to 66) seeds in all
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ablate.files import Json, finite
from ablate.results.number_text import counted
from ablate.results.paired_stats import FEWEST_DISTINCT, MOST_SEEDS, Kind, Needed, Reason, Verdict

NO_ANSWER = "No answer:"
NOT_YET = "Not answered yet."


class Words(NamedTuple):
    """Words for a kind of verdict, or for a reason without one."""

    text: str
    """Words in a line; those of a reason may have the number of pairs, `{count}`."""
    short: str = "not judged"
    """Word in a table's column."""
    lead: str = ""
    """First words of an answer, which a decided kind completes; empty for a reason: those of its kind."""
    colour: str = ""
    """Colour in a terminal."""

    def with_count(self, count: int) -> str:
        """Return the words in a line with their number of pairs."""
        return self.text.format(count=count).replace("on 1 seeds", "on 1 seed")


KINDS: Mapping[Kind, Words] = {
    "better": Words("better", "better", "Better", "green"),
    "worse": Words("worse", "worse", "Worse", "red"),
    "equivalent": Words("equivalent", "equivalent", "No difference that matters"),
    "same": Words("the same numbers", "same", "No difference at all"),
    "undecided": Words("undecided", "undecided", NOT_YET),
    "unjudged": Words("not judged", lead="No verdict."),
}
REASONS: Mapping[Reason, Words] = {
    "no_pair": Words("no pair of finished seeds"),
    "one_pair": Words("one seed: no interval"),
    "few_values": Words(
        f"distinct differences by seed: {{count}} of the {FEWEST_DISTINCT} that a verdict needs"
    ),
    "equal_counts": Words("equal counts on {count} seeds"),
    "nothing_learned": Words("no answer: nothing was learned", lead=NO_ANSWER),
    "censored": Words("the target is not reached on {count} seeds of the pair, so there is no gap"),
    "length": Words("runs of unequal length on {count} seeds: no verdict"),
    "copies": Words("runs with the same values count as one, which leaves too few"),
    "baseline": Words("baseline", "baseline"),
    "refused": Words("refused", "refused"),
    "pruned": Words("pruned", "pruned"),
    "horizon": Words("depends on the horizon", "depends on the horizon", "It depends on the horizon."),
    "position": Words("depends on the position", "depends on the position", "It depends on the position."),
    "blind": Words("this design cannot tell", "this design cannot tell", "This design cannot tell."),
    "windows": Words("not the same windows", "not the same windows"),
}


def verdict_text(verdict: Verdict, short: bool = False) -> str:
    """Return a verdict as text, diverged seeds first: `short` the word of a column, else a line with
    everything."""
    words = REASONS[verdict.reason] if verdict.reason else KINDS[verdict.kind]
    if short:
        return short_word(words.short, verdict.diverged, verdict.seeds)
    text = with_notes(words.with_count(verdict.count), _qualifications(verdict))
    text += f"; {needed_text(verdict.needed)} seeds in all" if verdict.needed else ""
    return on_others(text, verdict.diverged, verdict.seeds)


def verdict_notes(verdict: Verdict) -> list[str]:
    """Return footnotes of a table: all that a verdict's short form leaves out, except the seeds it needs."""
    notes = []
    if verdict.reason and REASONS[verdict.reason].short == KINDS["unjudged"].short:
        notes.append(REASONS[verdict.reason].with_count(verdict.count))
    if verdict.kind == "same":
        notes.append(f"{KINDS[verdict.kind].text} on every seed")
    return footnotes(notes + _qualifications(verdict), verdict.diverged, verdict.seeds)


def _qualifications(verdict: Verdict) -> list[str]:
    """Return everything that qualifies the verdict, except diverged seeds."""
    pairs = "1 pair compares" if verdict.mixed == 1 else f"{verdict.mixed} pairs compare"
    notes = {
        f"{verdict.alone} alone, not after Holm's correction": verdict.alone,
        "exploratory: the search chose this arm by the same numbers": verdict.exploratory,
        f"on {verdict.fresh_seeds} fresh seeds": verdict.fresh_seeds,
        f"learned nothing: a model that ignores its input reaches {verdict.reference or 0:.2f}": (
            verdict.reference is not None
        ),
        f"{pairs} two kinds of processors or versions of torch, too": verdict.mixed,
    }
    return [note for note, holds in notes.items() if holds]


# Texts of verdicts, and of agreements with published figures, on arms of which so many of all seeds diverged


def with_notes(word: str, notes: Sequence[str]) -> str:
    return f"{word} ({'; '.join(notes)})" if notes else word


def short_word(word: str, diverged: int, seeds: int) -> str:
    if not diverged:
        return word
    return "diverged" if diverged == seeds else f"diverged; {word}"


def on_others(text: str, diverged: int, seeds: int) -> str:
    lost = f"diverged on {diverged} of {counted(seeds, 'seed')}"
    if not diverged:
        return text
    return lost if diverged == seeds else f"{lost}; on the others: {text}"


def footnotes(notes: Sequence[str], diverged: int, seeds: int) -> list[str]:
    lost = f"diverged on {diverged} of {counted(seeds, 'seed')}"
    if not diverged:
        return [*notes]
    return [lost] if diverged == seeds else [f"{lost}: the verdict is on the other seeds", *notes]


def needed_text(needed: Needed | None, ranged: bool = True) -> str:
    """Return the total number of seeds that a verdict needs as text: `8 (4 to 66)`; `ranged`: with the range.
    None gives an empty text."""
    if needed is None:
        return ""
    beyond = f"over {MOST_SEEDS}"
    if needed.count is None or not ranged:
        return str(needed.count or beyond)
    return f"{needed.count} ({needed.low} to {needed.high or beyond})"


def verdict_document(verdict: Verdict) -> dict[str, Json]:
    """Return a verdict as JSON, with its text. A missing p-value is null."""
    needed = verdict.needed
    return {
        "kind": verdict.kind,
        "reason": verdict.reason,
        "p": finite(verdict.p),
        "p_equivalence": finite(verdict.p_equivalence),
        "alone": verdict.alone,
        "exploratory": verdict.exploratory,
        "fresh_seeds": verdict.fresh_seeds,
        "diverged": verdict.diverged,
        "seeds_needed": None
        if needed is None
        else {"count": needed.count, "low": needed.low, "high": needed.high, "most_named": MOST_SEEDS},
        "text": verdict_text(verdict),
    }
