"""Selection of the engine that computes an experiment, before anything runs: from its arms and a description
of this machine. Nothing is computed, and torch is not imported.

`choose` selects for all arms at once, `misfit` checks one arm that a search proposed later."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ablate.engines import AUTO, SCALED, backend_of, module_name, parity_record
from ablate.engines.hardware import (
    EMULATE,
    NAMES,
    Machine,
    Refusal,
    refusal,
    scaled_refusal,
    stray_switch,
    this_machine,
    untried,
)
from ablate.experiment.arms import Arm
from ablate.recipes import scaled_mapping
from ablate.recipes.reasons import all_of, grouped
from ablate.recipes.recipe import Products, Recipe
from ablate.recipes.targets.experts import expert_refusals
from ablate.recipes.te_mapping import MULTIPLE, Family, families, recipe_refusals, refusals, variants
from ablate.training.rank_layout import Layout
from ablate.training.workloads.base import Workload

NATIVE = "transformer_engine"
UNPROVEN = (
    f"Transformer Engine's kernels have not been compared with it here; `{parity_record.COMMAND}` does that"
)


@dataclass(frozen=True)
class Choice:
    """Engine of all trials of an experiment (arms are compared on one engine), and the reason why `auto` did
    not select Transformer Engine; empty if there is none, or if another engine of tensor cores computes them.
    """

    engine: str
    why: str = ""


def choose(
    asked: str,
    arms: Iterable[Arm],
    device: str | None,
    *,
    layout: Layout = Layout(),  # noqa: B008 - frozen
    machine: Machine | None = None,
) -> Choice:
    """Return the engine for these arms, and the reason why `auto` did not select Transformer Engine.

    `auto` selects Transformer Engine if it can compute all arms and a comparison found that its kernels agree
    with the emulator: on such a GPU, in these versions, for every family of kernels that the arms need.
    Otherwise it selects `scaled_mm`, on the same condition, if tensor cores can multiply a product of an arm.
    Else the emulator, with the reason why it is not Transformer Engine. ValueError, with the reason, if an
    engine that was asked for by name cannot compute the arms.

    The arms of a search are not known yet: those at the ends of its knobs stand for them, and `misfit` checks
    each arm that it proposes. `device` is a class of device (`cpu` or `cuda`); None: that of this machine.
    `layout` has the ranks that compute a trial. `machine` None: this machine.
    """
    if asked == "emulated":
        return Choice(asked)
    arms = list(arms)
    if module_name(asked) == SCALED:
        if reason := next(_scaled_refusals(asked, arms, device, layout, machine or this_machine()), None):
            raise ValueError(str(reason))
        return Choice(asked)
    if asked == AUTO and all(arm.recipe.plain for arm in arms):
        return Choice("emulated", "no arm quantises anything")
    machine = machine or this_machine()
    reason = next(_refusals(arms, device, layout, machine), None)
    if asked == NATIVE and reason:
        raise ValueError(str(reason))
    why = None if asked == NATIVE else reason.why if reason else _doubt(arms, machine)
    if why is None:
        return Choice(NATIVE)
    needed = _scaled_families(SCALED, arms)
    if device == "cpu" or machine.capability is None or not needed:
        return Choice("emulated", why)
    if next(_scaled_refusals(SCALED, arms, "cuda", layout, machine), None):
        return Choice("emulated", why)
    if needed <= parity_record.agreed(machine, SCALED):
        return Choice(SCALED)
    if reason is None:  # the comparison with Transformer Engine comes first
        return Choice("emulated", why)
    formats = " and ".join(name for family, name in scaled_mapping.NAMES.items() if family in needed)
    return Choice(
        "emulated",
        f"{why}; scaled_mm would multiply {formats} on tensor cores and has not been compared here either:"
        " `ablate doctor --engine scaled_mm` does that, or write engine: scaled_mm",
    )


def _doubt(arms: list[Arm], machine: Machine) -> str | None:
    """Return the reason why `auto` does not select TE's kernels for these arms; None if a comparison on such
    a machine found that they agree with the emulator."""
    agreed, needed = parity_record.agreed(machine), _families(arms)
    if needed <= agreed:
        return None
    missing = " and ".join(NAMES[family] for family in sorted(needed - agreed))
    why = f"the comparison that is kept here does not cover {missing} in Transformer Engine"
    return f"{why}; see `{parity_record.COMMAND}`" if agreed else UNPROVEN


def _scaled_families(engine: str, arms: list[Arm]) -> set[str]:
    """Return the families that tensor cores multiply for these arms, also after a guard fell back."""
    backend = backend_of(engine)
    recipes = [arm.recipe for arm in arms]
    recipes += [Recipe.of(products) for arm in arms for products in _fallen_back(arm)]
    return {family for recipe in recipes for family in scaled_mapping.families(recipe, backend)}


def _scaled_refusals(
    engine: str, arms: list[Arm], device: str | None, layout: Layout, machine: Machine
) -> Iterator[Refusal]:
    where = device or ("cuda" if machine.capability else "cpu")
    if reason := scaled_refusal(machine, where, _scaled_families(engine, arms), backend_of(engine)):
        yield reason
    for arm in arms:
        if why := all_of(_scaled_arm_refusals(engine, arm, layout)):
            yield Refusal(f"arm {arm.name!r}: {why}", EMULATE)


def _scaled_arm_refusals(engine: str, arm: Arm, layout: Layout) -> Iterator[str]:
    yield from scaled_mapping.refusals(arm.recipe, backend_of(engine))
    training = arm.config.training
    if training is None:
        yield f"workload {type(arm.config).__name__.lower()}: it is computed by the emulator alone"
        return
    yield from layout.misfits(training, arm.recipe, engine)
    backend = backend_of(engine)
    fp4 = scaled_mapping.families(arm.recipe, backend) & {*scaled_mapping.FP4}
    if backend in scaled_mapping.FLASHINFER and fp4 and layout.splits(training.accumulate) > 1:
        yield (
            f"{layout.ranks} ranks share a micro-batch and add up wgrad in fp32, and FlashInfer writes bf16;"
            " use engine: scaled_mm, or a workload.accumulate that is a multiple of the ranks"
        )


def _families(arms: list[Arm]) -> set[Family]:
    return families(
        products for arm in arms for products in (*variants(arm.recipe), *_fallen_back(arm))
    ) & set(NAMES)


def _fallen_back(arm: Arm) -> Iterator[Products]:
    """Yield the products that a guard may replace the recipe's products by."""
    training = arm.config.training
    if training and training.guard.policy == "fallback":
        yield from map(training.guard.fallback.safer, variants(arm.recipe))


def misfit(engine: str, arm: Arm, layout: Layout) -> str | None:
    """Return all reasons why the engine of a search cannot compute this arm of it; None if it can."""
    if module_name(engine) == SCALED:
        return all_of(_scaled_arm_refusals(engine, arm, layout)) or None
    return (all_of(_arm_refusals(arm, layout)) or None) if engine == NATIVE else None


def _refusals(arms: list[Arm], device: str | None, layout: Layout, machine: Machine) -> Iterator[Refusal]:
    if device == "cpu":
        yield Refusal("this sweep runs on CPUs (device cpu), and Transformer Engine on GPUs", EMULATE)
    if reason := refusal(machine, ()):
        yield reason
    if stray := stray_switch():
        yield Refusal(
            f"{stray} is set here and changes Transformer Engine's numbers", f"unset it, or {EMULATE}"
        )
    for arm in arms:
        if why := all_of(_arm_refusals(arm, layout)):
            yield Refusal(f"arm {arm.name!r}: {why}", EMULATE)
    if reason := refusal(machine, _families(arms)):
        yield reason
    if unseen := (untried(machine) & _families(arms)) - parity_record.agreed(machine):
        formats = " and ".join(NAMES[family] for family in sorted(unseen))
        gpu = ".".join(map(str, machine.capability or ()))
        yield Refusal(
            f"Transformer Engine accepts {formats} on SM {gpu} and documents no training there",
            f"`{parity_record.COMMAND}` there compares its kernels with the emulator, which allows it",
        )


def _arm_refusals(arm: Arm, layout: Layout) -> Iterator[str]:
    yield from recipe_refusals(arm.recipe)
    yield from (
        f"after workload.guard.fallback {why}"
        for products in _fallen_back(arm)
        for why in grouped(refusals(products))
    )
    yield from _workload_refusals(arm.config, arm.recipe.plain)
    if arm.config.has_experts:
        yield from expert_refusals(arm.recipe, arm.recipe.experts.matrices(arm.config.linear_layers))
    if arm.config.training:
        yield from layout.misfits(arm.config.training, arm.recipe, NATIVE)


def _workload_refusals(config: Workload, plain: bool) -> Iterator[str]:
    training = config.training
    if training is None:
        why = "not yet on Transformer Engine, which does not expose its operands"
        yield f"workload {type(config).__name__.lower()}: {why}"
        return
    if training.compile:
        yield "workload.compile true: not yet on Transformer Engine; leave it out"
    if training.recompute:
        yield "workload.recompute true: not yet on Transformer Engine; leave it out"
    if plain:
        return
    for what, extent in training.extents.items():
        if extent % MULTIPLE:
            yield f"{what} is {extent}, and Transformer Engine takes multiples of {MULTIPLE}"
