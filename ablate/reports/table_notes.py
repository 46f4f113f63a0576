"""Sentences beside a table of arms: explanation, arms that ended early, a caution on emulated formats."""

import math
from collections.abc import Iterable, Iterator, Sequence

from ablate.experiment.roles import BAD
from ablate.results.forked import FEWEST_PARTS, FIFTH, difference_word
from ablate.results.intervals import Interval
from ablate.results.number_text import counted
from ablate.results.summary import ArmSummary
from ablate.results.unpaired import pairing
from ablate.store.ledger import Ledger
from ablate.training.workloads import abilities

NO_MIN_EFFECT = (
    "Without metric.min_effect no number of seeds is named: the effect to be excluded could be arbitrarily"
    " small."
)
"""Note of tables that have undecided comparisons and no smallest effect that matters."""
_MOST_NAMED = 8
"""Largest number of arms that a sentence names."""


def emulated(ledger: Ledger) -> str:
    """Return sentences on what speed and memory are of: an emulation, steps of a user's own code."""
    specs = [member.resolved for member in ledger.members()]
    counted = bool(ledger.rates("throughput/tokens_per_s"))  # code of one's own may state no tokens
    if not (counted or ledger.rates("throughput/step_ms")):
        return ""
    notes = []
    if any(spec.engine == "emulated" for spec in specs):
        what = "tokens/s and memory are those" if counted else "memory is that"
        notes.append(f"{what} of the emulation here, not of hardware that has these formats.")
    if counted and any(abilities(spec.workload).steps_timed for spec in specs):
        notes.append("tokens/s counts the time inside trial.step() alone, without the loading of data.")
    return " ".join(notes)


def smallest_damage(arms: Sequence[ArmSummary]) -> str:
    """Return the sentence on the smallest damage that matters; empty for full runs."""
    margins = {arm.margin for arm in arms if arm.view and arm.margin}
    if not margins:
        return ""
    source = "min_effect"
    for arm in arms:
        if arm.role == "bad" and arm.gap and math.isclose(min(margins), FIFTH * abs(arm.gap.mean)):
            source = f"a fifth of what {arm.name.removeprefix(BAD)} does, which is known to be bad"
    return f"Damage below {min(margins):.2g} counts as none: {source}."


def reading(arms: Sequence[ArmSummary]) -> str:
    """Return sentences that explain a table of these arms: pairing, intervals, seeds needed, a search's
    gaps."""
    counts = {arm.gap.pairs for arm in arms if arm.gap and arm.gap.pairs}
    how = pairing(arm.gap for arm in arms)
    if how == "paired by seed":
        how = (
            f"paired over {counted(counts.pop(), 'seed')}"
            if len(counts) == 1
            else f"{how}, each arm over its own seeds, so compare gaps and not means"
        )
    interval = arms[0].interval if arms else Interval()
    noun = difference_word(arms).capitalize().replace("Gap", "Gaps")
    matters, roles = smallest_damage(arms), {arm.role for arm in arms}
    undecided = [arm for arm in arms if arm.verdict.kind == "undecided"]
    needed = any(arm.verdict.needed for arm in undecided)
    notes = {
        f"{noun} and effects are {how}; ± is half a {interval} of one comparison by itself; verdicts"
        " are corrected by Holm for the number of comparisons in their table.": True,
        f"Intervals leave out the error of the evaluation, which needs {FEWEST_PARTS} batches of"
        " validation data: raise eval_tokens, or lower eval_batch; own code gives their losses to"
        " trial.log_batches.": any(arm.view and math.isnan(arm.view.error) for arm in arms),
        matters: bool(matters),
        "No known-bad arm is resolved here (design.bad), so that nothing can be called equivalent.": not all(
            arm.sees for arm in arms
        ),
        "The sequence is valid at every look, however often seeds are added.": interval.kind == "sequence",
        "Seeds needed: the total number for an 80 % chance of a verdict; in brackets, that number if the"
        " spread of the gap is at either end of its 80 % range.": needed,
        NO_MIN_EFFECT: not needed and any(arm.margin is None for arm in undecided),
        "A number before a colon counts the arms that the search proposed, from 0.": "searched" in roles,
        "Winner on fresh seeds: the search's best arm, rerun on seeds that took no part in choosing it. The"
        " gaps of all other searched arms are exploratory.": "confirmed" in roles,
        "The search chose its best arm by these numbers, so that arm's gap looks better than it is:"
        " rerun it on fresh seeds before you rely on it.": "searched" in roles and "confirmed" not in roles,
    }
    return " ".join(note for note, holds in notes.items() if holds)


def null_warning(arms: Iterable[ArmSummary]) -> str:
    """Return a sentence if the baseline's twin is told from the baseline; empty otherwise."""
    found = [arm for arm in arms if arm.role == "null" and arm.verdict.resolved]
    return (
        f"**The A/A arm is resolved:** {found[0].name} is {found[0].verdict.kind} than {found[0].baseline},"
        " although the two differ in nothing that matters. That happens in 1 sweep of 20 by chance; read the"
        " other verdicts with that in mind, or run more seeds."
        if found
        else ""
    )


def dropped(arms: Iterable[ArmSummary]) -> Iterator[str]:
    """Yield a sentence on pruned arms of a search, and one on refused arms, if there are any."""
    arms = list(arms)
    pruned = [arm.name for arm in arms if arm.pruned]
    refused = [
        f"{arm.name} ({arm.reason})" if arm.reason else arm.name for arm in arms if arm.role == "refused"
    ]
    for title, names in (("Pruned, not run to the end", pruned), ("Refused, cannot be run", refused)):
        if names:
            others = " and others" if len(names) > _MOST_NAMED else ""
            yield f"**{title}:** {'; '.join(names[:_MOST_NAMED])}{others}."
