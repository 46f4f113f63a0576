"""Verdicts in words. The one place that knows them: terminal, report, notes and tags all call this file.

A table's column shows `verdict_text(verdict, short=True)`, one word, coloured by the kind; `needed_text` is a column of its own, and
`verdict_notes` are footnotes under the table. Where there is no table, `verdict_text(verdict)` has all of it in one line:

    undecided (worse alone, not after Holm's correction); 8 (4 to 66) seeds in all
"""

import math
from collections.abc import Mapping
from typing import Any

from ablate.results.paired_stats import FEWEST_DISTINCT, MOST_SEEDS, Needed, Verdict

REASONS: Mapping[str, str] = {
    "no_pair": "no pair of finished seeds",
    "one_pair": "one seed: no interval",
    "few_values": f"too few distinct values: {{count}}, a verdict takes {FEWEST_DISTINCT}",
    "equal_counts": "equal counts on {count} seeds",
    "nothing_learned": "no answer: nothing was learned",
    "baseline": "baseline",
    "refused": "refused",
    "pruned": "pruned",
}
"""Why there is no verdict, by the reason's code."""
_OWN_WORD = ("baseline", "refused", "pruned")
"""Reasons that stand in a table's column themselves."""
NOT_JUDGED = "not judged"


def verdict_text(verdict: Verdict, short: bool = False) -> str:
    """Return a verdict in words: all of it in a line, or the word for a table's column. Diverged seeds come first in both."""
    own = verdict.reason in _OWN_WORD
    if short:
        word = REASONS[verdict.reason] if own else NOT_JUDGED if verdict.kind == "unjudged" else verdict.kind
        return (
            word
            if not verdict.diverged
            else "diverged"
            if verdict.diverged == verdict.seeds
            else f"diverged; {word}"
        )
    lost = diverged_text(verdict.diverged, verdict.seeds)
    if lost and verdict.diverged == verdict.seeds:
        return lost
    word = "the same numbers" if verdict.kind == "same" else verdict.kind
    notes = _qualifications(verdict)
    if verdict.kind == "unjudged":
        word = REASONS[verdict.reason].format(count=verdict.count)
    text = f"{word} ({'; '.join(notes)})" if notes else word
    text += f"; {needed_text(verdict.needed)} seeds in all" if verdict.needed else ""
    return f"{lost}; on the others: {text}" if lost else text


def verdict_notes(verdict: Verdict) -> list[str]:
    """Return what the short form of a verdict leaves out, but for the seeds that it needs: footnotes of a table."""
    lost = diverged_text(verdict.diverged, verdict.seeds)
    if lost and verdict.diverged == verdict.seeds:
        return [lost]
    notes = [f"{lost}: the verdict is on the others"] if lost else []
    if verdict.reason and verdict.reason not in _OWN_WORD:
        notes.append(REASONS[verdict.reason].format(count=verdict.count))
    if verdict.kind == "same":
        notes.append("the same numbers on every seed")
    return notes + _qualifications(verdict)


def _qualifications(verdict: Verdict) -> list[str]:
    """Return what qualifies the verdict, diverged seeds apart."""
    notes = []
    if verdict.alone:
        notes.append(f"{verdict.alone} alone, not after Holm's correction")
    if verdict.exploratory:
        notes.append("exploratory: chosen by these numbers")
    if verdict.fresh_seeds:
        notes.append(f"on {verdict.fresh_seeds} fresh seeds")
    if verdict.reference is not None:
        notes.append(f"learned nothing, its loss is above {verdict.reference:.2f}")
    return notes


def diverged_text(diverged: int, seeds: int) -> str:
    """Return `diverged on 1 of 4 seeds`; empty if none did."""
    return f"diverged on {diverged} of {seeds:,} seed{'' if seeds == 1 else 's'}" if diverged else ""


def needed_text(needed: Needed | None, ranged: bool = True) -> str:
    """Return `8 (4 to 66)`: the seeds, in all, for a verdict, with their range; empty if none are named."""
    if needed is None:
        return ""
    beyond = f"over {MOST_SEEDS}"
    if needed.count is None or not ranged:
        return str(needed.count or beyond)
    return f"{needed.count} ({needed.low} to {needed.high or beyond})"


def verdict_document(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON has it, with its text; a p-value that there is not is null."""
    needed = verdict.needed
    return {
        "kind": verdict.kind,
        "reason": verdict.reason,
        "p": None if math.isnan(verdict.p) else verdict.p,
        "p_equivalence": None if math.isnan(verdict.p_equivalence) else verdict.p_equivalence,
        "alone": verdict.alone,
        "exploratory": verdict.exploratory,
        "fresh_seeds": verdict.fresh_seeds,
        "diverged": verdict.diverged,
        "seeds_needed": needed
        and {"count": needed.count, "low": needed.low, "high": needed.high, "most_named": MOST_SEEDS},
        "text": verdict_text(verdict),
    }
