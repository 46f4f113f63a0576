"""Products that an engine `scaled_mm` multiplies on tensor cores, for `ablate plan` and a page of docs."""

from collections.abc import Callable, Iterator

from ablate.engines import SCALED, backend_of, makes_operands, module_name
from ablate.errors import by_key, one_line, some_of
from ablate.experiment.arms import Arm
from ablate.experiment.engine_selection import NATIVE
from ablate.experiment.load import Experiment
from ablate.files import Json
from ablate.recipes import Recipe
from ablate.recipes.gpu_kernels import on_reference
from ablate.recipes.reasons import grouped
from ablate.recipes.scaled_mapping import (
    NAMES,
    Backend,
    Verdict,
    emulated,
    families,
    not_in_fp4,
    parts,
)
from ablate.recipes.targets.experts import multiple
from ablate.recipes.te_mapping import variants

_SHOWN = 3
"""Names of arms that a line shows."""
OF_EXPERTS = "experts: a product for each that has tokens, padded to a multiple of 32 with zeros"


def multiplied(experiment: Experiment) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield names of arms with equal plans and a line for each part of the plan, on an engine `scaled_mm`; on
    Transformer Engine a line on experts alone. Arms that quantise nothing are left out. The emulator yields
    nothing."""
    if module_name(experiment.engine) == SCALED:
        backend = backend_of(experiment.engine)

        def said(arm: Arm) -> tuple[str, ...]:
            experts = bool(arm.config.has_experts and families(arm.recipe, backend))
            return (*lines(arm.recipe, backend), *(OF_EXPERTS,) * experts)

        yield from _alike(experiment, said)
    elif experiment.engine == NATIVE and experiment.base.config.has_experts:
        yield from _alike(experiment, lambda arm: (_padded(arm.recipe),))


def _padded(recipe: Recipe) -> str:
    """Return the rule by which Transformer Engine pads the tokens of experts."""
    multiples = {multiple(products) for products in variants(recipe) if not products.plain}
    return (
        "experts: rows of zeros, which change no amax and no block, fill each one's tokens to a multiple of"
        f" {' or '.join(map(str, sorted(multiples)))} for te.GroupedLinear"
    )


def on_reference_lines(experiment: Experiment, device: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield names of arms and a line on their operands that no GPU kernel makes; nothing for a CPU, or for an
    engine that has quantisers of its own."""
    if device == "cuda" and makes_operands(experiment.engine):
        every = {arm.name: on_reference(arm.recipe) for arm in experiment.arms}
        yield from _alike(experiment, lambda arm: (str(every[arm.name]),) * bool(every[arm.name][0]))


def _alike(
    experiment: Experiment, said: Callable[[Arm], tuple[str, ...]]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield names of arms with equal lines, and the lines. Arms that quantise nothing, and checks beside
    the file's arms, are left out."""
    arms = [arm for arm in experiment.arms if not (arm.recipe.plain or arm.outside)]
    lines = by_key((words_of, repr(one_line(arm.name))) for arm in arms if (words_of := said(arm)))
    yield from ((some_of(names, _SHOWN), words_of) for words_of, names in lines.items())


def library(engine: str) -> str:
    """Return which library multiplies FP4 in an engine `scaled_mm`, as an apposition; empty for others."""
    if module_name(engine) != SCALED:
        return ""
    backend = backend_of(engine)
    return f", FP4 by {'torch (cuBLASLt)' if backend == 'cublaslt' else f'FlashInfer ({backend})'}"


def lines(recipe: Recipe, backend: Backend) -> Iterator[str]:
    """Yield a line for each set of products of a recipe, then one for each field that is in the way."""
    plans = parts(recipe, backend)
    for one in plans:
        yield ", ".join(f"{name} {words(given)}" for name, given in one.items())
    if any(given.parts for one in plans for given in one.values()):
        yield "parts: what a transform takes out of an operand is emulated, and added in fp32"
    yield from (f"eight bits in place of four: {why}" for why in grouped(not_in_fp4(recipe, backend)))
    yield from (f"emulated: {why}" for why in grouped(emulated(recipe, backend)))


def words(given: Verdict) -> str:
    """Return how a product is computed: its family, with `and parts` if some are emulated; or `bf16`."""
    return f"{NAMES[given.family]}{' and parts' * given.parts}" if given.family else given.runs


def as_data(experiment: Experiment) -> list[Json]:
    """Return how the products of each arm are computed, by name; empty for other engines."""
    if module_name(experiment.engine) != SCALED:
        return []
    backend = backend_of(experiment.engine)

    def plan(given: Verdict) -> Json:
        return {"runs": given.runs, "family": given.family, "parts": given.parts, "why": given.why}

    return [
        {
            "arm": arm.name,
            "parts": [
                {name: plan(given) for name, given in one.items()} for one in parts(arm.recipe, backend)
            ],
        }
        for arm in experiment.arms
    ]
