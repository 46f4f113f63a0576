"""Phases of a schedule that no step of a run reaches, known before the run by its length."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from ablate.files import Json
from ablate.numerics.spec import tag
from ablate.recipes import PRESETS
from ablate.recipes.recipe import Phase, Recipe, Run
from ablate.training.workloads.base import Workload


class ResolvedArm(Protocol):
    """Fields of an arm that `unreached` reads. (`arms` imports this file, so `Arm` is not available here.)"""

    @property
    def name(self) -> str: ...
    @property
    def knobs(self) -> Mapping[str, Json]: ...
    @property
    def config(self) -> Workload: ...
    @property
    def recipe(self) -> Recipe: ...


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


def unreached(arms: Iterable[ResolvedArm], preset: str) -> Iterator[tuple[str, str]]:
    """Yield (arm, reason) for phases of presets (`preset` unless an arm names one) that never begin, each
    once.

    Phases that the file itself names are refused instead. With a preset, the arm is correct: the preset has
    no effect there on so short a run.
    """
    shown = set()
    for arm in arms:
        name = str(arm.knobs.get("recipe", preset))
        for phase in PRESETS[name]().schedule if name in PRESETS else ():
            inherited = phase in arm.recipe.schedule
            why = never_begins(phase, arm.config.length) if inherited else None
            if why and (name, why) not in shown:
                shown.add((name, why))
                yield arm.name, f"the phase of preset {name} in arm {arm.name!r}: {why}"


def shortest_cooldown(steps: int) -> float:
    """Return the smallest cooldown that covers one step of a run, as a fraction rounded up."""
    scale = 10 ** (len(str(steps)) + 1)
    return math.ceil(scale / steps) / scale
