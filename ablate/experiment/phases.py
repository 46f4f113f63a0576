"""Phases of a schedule that no step of a run reaches, known before the run by its length."""

import math

from ablate.numerics.spec import tag
from ablate.recipes.recipe import Phase, Run


def never_begins(phase: Phase, run: Run) -> str | None:
    """Return why a phase holds in no step of a run; None if it does, or if that depends on a measurement."""
    last = run.steps - 1
    if phase.trigger:
        every = phase.trigger.every
        if every <= last:
            return None
        right = f"measure it every {last} steps or more often" if last else "give the run two steps or more"
        first = f"{phase.start} is measured first after step {every} of {run.steps}"
        return f"{first}, so the phase never begins; {right}"
    if phase.active(last, run):
        return None
    if tag(phase.start) == "decay":
        return "never begins: the learning rate of this run does not fall"
    scale = 10 ** (len(str(run.steps)) + 1)
    latest = {
        "step": last,
        "tokens": last * run.tokens_per_step,
        "fraction": math.floor(scale * last / run.steps) / scale,
    }[tag(phase.start)]
    right = f"the latest is {tag(phase.start)}:{latest}"
    return f"{phase.start} is not reached in the {run.steps} steps of this run; {right}"


def shortest_cooldown(steps: int) -> float:
    """Return the smallest cooldown that covers one step of a run, as a fraction rounded up."""
    scale = 10 ** (len(str(steps)) + 1)
    return math.ceil(scale / steps) / scale
