"""Which engine computes an experiment: decided before anything runs, from its arms and this machine, by words
and numbers alone."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ablate.engines import AUTO, ENGINES, parity_record
from ablate.engines.hardware import EMULATE, NAMES, Machine, Refusal, refusal, stray_switch, this_machine
from ablate.engines.te_mapping import MULTIPLE, families, recipe_refusals, refusals, variants
from ablate.errors import nearest
from ablate.experiment.arms import Arm
from ablate.recipes.recipe import Products
from ablate.training.hyperparameters import Training
from ablate.training.rank_layout import Layout

NATIVE = "transformer_engine"
UNPROVEN = (
    f"Transformer Engine's kernels have not been compared with it here; `{parity_record.COMMAND}` does that"
)


@dataclass(frozen=True)
class Choice:
    """The engine of all trials of an experiment, since arms are compared on one; and why `auto` does not take
    the GPU's."""

    engine: str
    why: str = ""


def check(asked: str) -> None:
    """ValueError where there is no engine of this name."""
    if asked not in (AUTO, *ENGINES):
        raise ValueError(f"no such engine; {nearest(asked, [AUTO, *ENGINES])}")


def choose(
    asked: str,
    arms: Iterable[Arm],
    device: str | None,
    *,
    layout: Layout = Layout(),  # noqa: B008 - frozen
    machine: Machine | None = None,
) -> Choice:
    """The engine that `asked` means for these arms on this class of device (None: what is here), so laid out
    over ranks. The arms of a search are not known yet: those at the ends of its knobs stand for them, and
    `misfit` tells of each that it draws.

    `auto` is the emulator, and says why, unless Transformer Engine can compute all arms and its kernels have
    been found to agree with the emulator: on such a GPU, in these versions, in all that the arms need.
    ValueError, in a sentence, where Transformer Engine was asked for and cannot.
    """
    if asked not in (AUTO, NATIVE):
        return Choice(asked)
    arms = list(arms)
    if asked == AUTO and all(arm.recipe.plain for arm in arms):
        return Choice("emulated", "no arm quantises anything")
    machine = machine or this_machine()
    reason = next(_refusals(arms, device, layout, machine), None)
    if asked == NATIVE and reason:
        raise ValueError(str(reason))
    why = None if asked == NATIVE else reason.why if reason else _doubt(arms, machine)
    return Choice("emulated", why) if why else Choice(NATIVE)


def _doubt(arms: list[Arm], machine: Machine) -> str | None:
    """Why TE's kernels are not trusted with these arms unasked; None where a comparison on such a machine
    found that they agree."""
    agreed, needed = parity_record.agreed(machine), _families(arms)
    if needed <= agreed:
        return None
    missing = " and ".join(NAMES[family] for family in sorted(needed - agreed))
    return (
        f"the comparison that is kept here does not vouch for {missing} in Transformer Engine; see `{parity_record.COMMAND}`"
        if agreed
        else UNPROVEN
    )


def _families(arms: list[Arm]) -> set[str]:
    return families(
        products for arm in arms for products in (*variants(arm.recipe), *_fallen_back(arm))
    ) & set(NAMES)


def _fallen_back(arm: Arm) -> Iterator[Products]:
    """What a guard may make of the recipe's products."""
    if isinstance(arm.config, Training) and arm.config.guard.policy == "fallback":
        yield from map(arm.config.guard.fallback.safer, variants(arm.recipe))


def misfit(engine: str, arm: Arm, layout: Layout) -> str | None:
    """Why an engine that computes a search cannot compute this arm of it."""
    return next(_arm_refusals(arm, layout), None) if engine == NATIVE else None


def _refusals(arms: list[Arm], device: str | None, layout: Layout, machine: Machine) -> Iterator[Refusal]:
    """Why these arms cannot run on Transformer Engine here."""
    if device == "cpu":
        yield Refusal("this sweep runs on CPUs (device cpu), and Transformer Engine on GPUs", EMULATE)
    if reason := refusal(machine, ()):
        yield reason
    if stray := stray_switch():
        yield Refusal(
            f"{stray} is set here and changes Transformer Engine's numbers", f"unset it, or {EMULATE}"
        )
    for arm in arms:
        if why := next(_arm_refusals(arm, layout), None):
            yield Refusal(f"arm {arm.name!r}: {why}", EMULATE)
    if reason := refusal(machine, _families(arms)):
        yield reason


def _arm_refusals(arm: Arm, layout: Layout) -> Iterator[str]:
    yield from recipe_refusals(arm.recipe)
    yield from (
        f"after workload.guard.fallback {why}" for products in _fallen_back(arm) for why in refusals(products)
    )
    yield from _workload_refusals(arm.config, arm.recipe.plain)
    if isinstance(arm.config, Training):
        yield from layout.misfits(arm.config, arm.recipe, NATIVE)


def _workload_refusals(config: Any, plain: bool) -> Iterator[str]:
    """What of a workload this engine does not do, beginning with the field."""
    if not isinstance(config, Training):
        yield f"workload {type(config).__name__.lower()}: not yet on Transformer Engine, which shows no operand"
        return
    if config.compile:
        yield "workload.compile true: not yet on Transformer Engine; leave it out"
    if config.recompute:
        yield "workload.recompute true: not yet on Transformer Engine; leave it out"
    if plain:
        return
    for what, extent in config.extents.items():
        if extent % MULTIPLE:
            yield f"{what} is {extent}, and Transformer Engine takes multiples of {MULTIPLE}"
