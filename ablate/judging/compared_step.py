"""Step at which runs from elsewhere are compared, whose curves may end at different steps.

Twelve runs of 500 steps, of which one has an evaluation at step 550 too, are twelve runs of 500 steps: the
longer one merely continues. Eleven runs of 500 steps and one that stops at 40 are eleven runs and a crash,
which must not drag the others to step 40. So most runs decide: of each arm more than half, of the arms more
than half, and the baseline. A run whose last value is not finite has diverged and does not count.

    step = compared_step(runs, "bf16", "val/loss")    # 500 in both examples
    last_until(run.records["val/loss"], step)         # 500; 40 for the crash, which ended early

Refused: runs of which no step is shared by so many, such as arms that log at steps of their own.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from ablate.errors import InputError
from ablate.judging.run import ForeignRun
from ablate.results.number_text import counted

_MOST_NAMED = 3
"""Largest number of runs that a sentence names."""


def compared_step(runs: Sequence[ForeignRun], against: str, metric: str, at: int | None = None) -> int:
    """Return the last step that more than half of the runs have, in most arms and in the baseline.

    It is `at` if that is given. `against` is the baseline of another ledger if no run has it. InputError if
    there is no such step.
    """
    usable = [run for run in runs if math.isfinite(run.records[metric][max(run.records[metric])])] or runs
    totals = Counter(run.arm for run in usable)
    counts = {arm: Counter[int]() for arm in totals}
    for run in usable:
        counts[run.arm].update(run.records[metric].keys())
    if at is not None and not any(at in run.records[metric] for run in runs):
        near = min((step for count in counts.values() for step in count), key=lambda step: abs(step - at))
        raise InputError(f"--at {at}: no run has {metric} at this step; the nearest is {near}")
    most = {arm: {step for step in count if 2 * count[step] > totals[arm]} for arm, count in counts.items()}
    arms = Counter(step for steps in most.values() for step in steps)
    shared = (step for step in arms if 2 * arms[step] > len(most) and step in most.get(against, arms))
    step = max(shared, default=None) if at is None else at
    if step is None:
        last = "; ".join(f"{arm} at {', '.join(map(str, sorted(counts[arm])[-3:]))}" for arm in [*counts][:3])
        raise InputError(f"{metric}: most runs share no step (last are {last}); log it at the same steps")
    return step


def last_until(steps: Mapping[int, float], step: int) -> int:
    """Return the last of some steps up to a step; -1 if there is none."""
    return max((each for each in steps if each <= step), default=-1)


def longer_text(runs: Sequence[ForeignRun], metric: str, step: int, asked: bool) -> str:
    """Return a sentence on the runs that continue beyond the step that is compared; empty if none does."""
    longer = [run for run in runs if max(run.records[metric]) > step]
    if not longer:
        return ""
    own, arms = Counter(run.arm for run in longer), Counter(run.arm for run in runs)
    whole = [arm for arm in own if own[arm] == arms[arm] > 1]
    named = [f"all {own[arm]} runs of {arm}" for arm in whole]
    named += [run.short_name for run in longer if run.arm not in whole]
    more = " and others" * (len(named) > _MOST_NAMED) + "; the arms had different budgets" * (
        0 < len(whole) < len(arms)
    )
    last = max(max(run.records[metric]) for run in longer)
    why = "as asked" if asked else "the last that most runs have"
    return (
        f"compared at step {step}, {why}: {len(longer)} of {counted(len(runs), 'run')} continued, by up to"
        f" {counted(last - step, 'step')} to step {last}: {', '.join(named[:_MOST_NAMED])}{more}"
    )
