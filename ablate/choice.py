"""Which engine computes an experiment: decided before anything runs, from its arms and this machine, by words and numbers alone."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ablate.arms import Arm
from ablate.engines import AUTO, ENGINES
from ablate.engines.hardware import EMULATE, Machine, Refusal, refusal, this_machine
from ablate.engines.te_mapping import MULTIPLE, families, recipe_refusals
from ablate.hyperparameters import Training
from ablate.yamlfile import nearest

NATIVE = "transformer_engine"
UNPROVEN = "Transformer Engine's kernels, which `engine: transformer_engine` takes, have not been compared with it on a GPU yet"


@dataclass(frozen=True)
class Choice:
    """The engine of all trials of an experiment, since arms are compared on one; and why `auto` does not take the GPU's."""

    engine: str
    why: str = ""


def check(asked: str) -> None:
    """ValueError where there is no engine of this name."""
    if asked not in (AUTO, *ENGINES):
        raise ValueError(f"no such engine; {nearest(asked, [AUTO, *ENGINES])}")


def choose(asked: str, arms: Iterable[Arm], device: str | None, *, search: bool = False, machine: Machine | None = None) -> Choice:
    """The engine that `asked` means for these arms on this class of device (None: what is here).

    `auto` is the emulator, and says why: also where Transformer Engine could compute all arms, as long as its kernels have not been
    compared with it. ValueError, in a sentence, where Transformer Engine was asked for and cannot.
    """
    if asked not in (AUTO, NATIVE):
        return Choice(asked)
    arms = list(arms)
    if asked == AUTO and all(arm.recipe.plain for arm in arms) and not search:
        return Choice("emulated", "no arm quantises anything")
    reason = next(_refusals(arms, device, search, machine or this_machine()), None)
    if asked == NATIVE and reason:
        raise ValueError(str(reason))
    return Choice(NATIVE) if asked == NATIVE else Choice("emulated", reason.why if reason else UNPROVEN)


def _refusals(arms: list[Arm], device: str | None, search: bool, machine: Machine) -> Iterator[Refusal]:
    """Why these arms cannot run on Transformer Engine here."""
    if device == "cpu":
        yield Refusal("this sweep runs on CPUs (device cpu), and Transformer Engine on GPUs", EMULATE)
    if reason := refusal(machine, ()):
        yield reason
    if search:
        yield Refusal("a search proposes recipes that nobody has looked at; not yet on Transformer Engine", EMULATE)
    for arm in arms:
        if why := next(recipe_refusals(arm.recipe), None) or next(_workload_refusals(arm.config, arm.recipe.plain), None):
            yield Refusal(f"arm {arm.name!r}: {why}", EMULATE)
    if reason := refusal(machine, set().union(*(families(arm.recipe) for arm in arms))):
        yield reason


def _workload_refusals(config: Any, plain: bool) -> Iterator[str]:
    """What of a workload this engine does not do, beginning with the field."""
    if not isinstance(config, Training):
        yield f"workload {type(config).__name__.lower()}: not yet on Transformer Engine, which shows no operand"
        return
    if config.compile:
        yield "workload.compile true: not yet on Transformer Engine; leave it out"
    if config.recompute:
        yield "workload.recompute true: not yet on Transformer Engine; leave it out"
    if config.guard.policy == "fallback" and config.guard.fallback.precision:
        yield "workload.guard.fallback.precision: not yet on Transformer Engine; leave it out"
    if plain:
        return
    if config.extents is None:
        yield "workload: not yet on Transformer Engine, since the sizes of its products are known only when its model is there"
        return
    for what, extent in config.extents.items():
        if extent % MULTIPLE:
            yield f"{what} is {extent}, and Transformer Engine takes multiples of {MULTIPLE}"
