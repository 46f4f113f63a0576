"""Products that an engine `scaled_mm` multiplies on tensor cores, for `ablate plan` and for a page."""

from collections.abc import Callable, Iterable, Iterator

from ablate.engines import SCALED, backend_of, makes_operands, module_name
from ablate.errors import one_line
from ablate.experiment.arms import Arm
from ablate.experiment.engine_selection import NATIVE
from ablate.experiment.load import Experiment
from ablate.files import Json
from ablate.recipes import PRESETS, Recipe
from ablate.recipes.gpu_kernels import on_reference
from ablate.recipes.reasons import grouped
from ablate.recipes.recipe import SLOTS
from ablate.recipes.scaled_mapping import (
    NAMES,
    Backend,
    Verdict,
    emulated,
    entirely_native,
    families,
    not_in_fp4,
    parts,
)
from ablate.recipes.targets.experts import multiple
from ablate.recipes.te_mapping import recipe_refusals, variants

_SHOWN = 3
"""Names of arms that a line shows."""
OF_EXPERTS = "experts: a product for each that has tokens, padded to a multiple of 32 with zeros"
_BACKENDS: tuple[Backend, ...] = ("cublaslt", "cudnn", "cutlass")


def multiplied(experiment: Experiment) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield names of arms with equal plans and a line for each part of the plan, on an engine `scaled_mm`; on
    Transformer Engine a line on experts alone.

    Arms that quantise nothing are left out. The emulator yields nothing.
    """
    if module_name(experiment.engine) == SCALED:
        backend = backend_of(experiment.engine)
        yield from _alike(experiment, lambda arm: (*lines(arm.recipe, backend), *_of_experts(arm, backend)))
    elif experiment.engine == NATIVE and experiment.base.config.has_experts:
        yield from _alike(experiment, lambda arm: (_padded(arm.recipe),))


def _of_experts(arm: Arm, backend: Backend) -> tuple[str, ...]:
    """Return a line on the products of experts, if an arm has some on tensor cores."""
    return (OF_EXPERTS,) * bool(arm.config.has_experts and families(arm.recipe, backend))


def _padded(recipe: Recipe) -> str:
    """Return the rule by which Transformer Engine pads the tokens of experts."""
    multiples = {multiple(products) for products in variants(recipe) if not products.plain}
    return (
        "experts: rows of zeros, which change no amax and no block, fill each one's tokens to a multiple of"
        f" {' or '.join(map(str, sorted(multiples)))} for te.GroupedLinear"
    )


def on_reference_lines(experiment: Experiment, device: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield names of arms and a line on their operands that no GPU kernel makes; nothing for a CPU, or for an
    engine that has quantisers of its own.
    """
    if device == "cuda" and makes_operands(experiment.engine):
        yield from _alike(
            experiment, lambda arm: (str(on_reference(arm.recipe)),) * bool(on_reference(arm.recipe)[0])
        )


def _alike(
    experiment: Experiment, said: Callable[[Arm], tuple[str, ...]]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield names of arms with equal lines, and the lines. Arms that quantise nothing, and checks beside
    the file's arms, are left out."""
    arms: dict[tuple[str, ...], list[str]] = {}
    for arm in experiment.arms:
        if not (arm.recipe.plain or arm.outside) and (words_of := said(arm)):
            arms.setdefault(words_of, []).append(one_line(arm.name))
    for words_of, names in arms.items():
        more = f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
        yield ", ".join(map(repr, names[:_SHOWN])) + more, words_of


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
    return [
        {
            "arm": arm.name,
            "parts": [
                {
                    name: {"runs": given.runs, "family": given.family, "parts": given.parts, "why": given.why}
                    for name, given in one.items()
                }
                for one in parts(arm.recipe, backend)
            ],
        }
        for arm in experiment.arms
    ]


# --- the page of docs -----------------------------------------------------------------------------

HEADING = "## Every preset"
"""Heading of the generated part of docs/run/tensor_cores.md, which is its end."""
_PREFACE = f"""\
{HEADING}

This part is generated (`make pages`). It says in which format `scaled_mm` multiplies the operands of each
preset, or which fields the hardware lacks. "And parts": what a `transform` takes out of an operand is
emulated. A preset whose schedule changes its products has several rows. `ablate plan` prints the same for an
experiment.
"""


def presets() -> str:
    """Return the generated part of docs/run/tensor_cores.md, from its heading to the end of the page."""
    quantised = {name: make() for name, make in PRESETS.items() if not make().plain}
    return "\n".join([_PREFACE, *_counts(quantised), "", *_rows(quantised), ""])


def _counts(quantised: dict[str, Recipe]) -> Iterator[str]:
    by_te = [name for name, recipe in quantised.items() if not any(recipe_refusals(recipe))]
    yield f"Of {len(PRESETS)} presets {len(quantised)} quantise something.\n"
    yield "| engine | presets whose quantised products are all on tensor cores | some of them | none |"
    yield "|---|---|---|---|"
    yield f"| `transformer_engine` | {len(by_te)} | | {len(quantised) - len(by_te)} |"
    for backend in _BACKENDS:
        whole = [name for name, recipe in quantised.items() if entirely_native(recipe, backend)]
        some = [
            name
            for name, recipe in quantised.items()
            if name not in whole and _runs(recipe, backend) >= {"native", "emulated"}
        ]
        name = SCALED if backend == "cublaslt" else f"{SCALED}:{backend}"
        yield f"| `{name}` | {len(whole)} | {len(some)} | {len(quantised) - len(whole) - len(some)} |"


def _runs(recipe: Recipe, backend: Backend) -> set[str]:
    return {given.runs for one in parts(recipe, backend) for given in one.values()}


def _rows(quantised: dict[str, Recipe]) -> Iterator[str]:
    yield f"| preset | {' | '.join(f'`{slot}`' for slot in SLOTS)} | emulated because | TE |"
    yield f"|---|{'---|' * len(SLOTS)}---|---|"
    for name, recipe in quantised.items():
        by_te = "no" if any(recipe_refusals(recipe)) else "yes"
        for number, one in enumerate(parts(recipe)):
            title = f"`{name}`" if number == 0 else f"`{name}`, later"
            cells = [words(one[slot.partition(".")[0]]) for slot in SLOTS]
            yield f"| {title} | {' | '.join(cells)} | {_reasons(one.values())} | {by_te} |"


def _reasons(given: Iterable[Verdict]) -> str:
    reasons = (reason for one in given if one.runs == "emulated" for reason in one.reasons)
    return "; ".join(grouped(reasons)).replace("|", "/")
