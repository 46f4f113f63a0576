"""The Python interface: recipes in a training loop of one's own, as the package `ablate` hands them on.

Importing this module imports no torch; the functions do when they are called. docs/use/api.md has examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ablate.engines.linears import Linears
    from ablate.experiment.recipe_source import RecipeSource
    from ablate.files import Json
    from ablate.numerics.spec import Quant
    from ablate.recipes.recipe import Recipe
    from ablate.training.conversion import Conversion
    from ablate.training.metrics import Quantised


def convert(
    model: nn.Module,
    recipe: RecipeSource = "nvfp4",
    *,
    set: Mapping[str, Json] | None = None,
    seed: int = 0,
    steps: int | None = None,
    tokens_per_step: int = 1,
    decay_start: int | None = None,
    blocks: str | None = None,
    filter: Callable[[str, nn.Module], bool] | None = None,
    measure_every: int = 50,
    linears: Linears = (),
) -> Conversion:
    """Make the linear layers inside a model's blocks compute by a recipe, exactly emulated, in place.

    Parameters, their names, state dicts and hooks stay as they are. The output head and all that lies outside
    of the blocks is left alone.

    Args:
        model: any nn.Module, on any device. Its blocks are found by structure: module lists with well-known
            names (`blocks`, `layers`, `h`), other module lists, or siblings of one class.
        recipe: a preset's name (`presets()` lists them), a recipe file (YAML), its content, a `Recipe`,
            or a recipe object of Transformer Engine.
        set: knobs to turn, as in an experiment: `{"sr": False, "recipe.layers.skip_last": 2}`.
        seed: seed of all random bits of the quantisers, and of nothing else.
        steps: optimizer steps of the run, which a schedule by fractions refers to.
        tokens_per_step: tokens of one step, for a schedule by tokens.
        decay_start: first step of the learning rate's decay, for a schedule that begins there.
        blocks: glob on the names of the modules that are the blocks, if structure finds the wrong ones.
        filter: returns False for a layer, or a whole stack of experts, given its name and itself, that is to
            stay in high precision.
        measure_every: steps between measurements of the operands' errors; 0: never.
        linears: subclasses of nn.Linear with a forward of their own that are linear layers, and globs on the
            names of single layers, which take adapters of LoRA too. Each layer is first compared with
            x W^T + b on random input, forward and backward.

    Returns:
        The handle: `step()`, `evaluation()`, `metrics()`, `state_dict()`, `restore()`, `layers`.

    Raises:
        ValueError: the recipe is wrong or does not fit the model, nothing would be converted, or a layer of
            `linears` computes something else. A warning names the largest layers left out if less than half
            of the weights are converted.
    """
    from ablate.training.conversion import convert as converted
    from ablate.training.conversion_options import ConversionOptions
    from ablate.training.own_code.process_environment import acknowledge

    if steps is not None and steps < 1:
        raise ValueError(f"steps is the number of optimizer steps of the run, from 1; here {steps}")
    options = ConversionOptions(
        _resolved(recipe, set),
        seed,
        steps,
        tokens_per_step,
        decay_start,
        blocks,
        filter,
        measure_every,
        linears,
    )
    conversion = converted(model, options)
    acknowledge(options.recipe)
    return conversion


def log(metrics: Mapping[str, object], *, step: int) -> None:
    """Record metrics of a step in a command that a sweep runs (workload `command`).

    In any other process this does nothing, and says so once on standard error. Of several ranks, rank 0 alone
    records.

    Args:
        metrics: names and numbers, such as `{"train/loss": 2.5}`.
        step: number of optimizer steps done, from 1.

    Raises:
        ValueError: a value is no number, a name is empty, or the step is no integer from 1.
    """
    from ablate.training.own_code.process_environment import log as append

    append(metrics, step)


def quantize(
    x: Tensor,
    recipe: RecipeSource | Quant = "nvfp4",
    *,
    slot: str = "fprop.x",
    set: Mapping[str, Json] | None = None,
    seed: int = 0,
    step: int = 0,
    layer: str = "",
) -> Quantised:
    """Quantise one matrix as a recipe quantises an operand, and measure the error.

    Args:
        x: [rows, contraction], bf16, fp16 or fp32, contracted along its last dimension; the other dimensions
            count as rows. These very numbers are cast, and rotated, in the dtype of x. Converted layers round
            to bf16 first: for what they compute, hand in `x.bfloat16()`.
        recipe: as for `convert`, or one operand's format (`ablate.numerics.spec.Quant`), without rotation.
        slot: operand whose format and rotation count: fprop.x, fprop.w, dgrad.g, dgrad.w, wgrad.g or wgrad.x.
        set: knobs to turn first.
        seed, step, layer: what random bits depend on, beside the slot.

    Returns:
        Values, codes, scales and errors.

    Raises:
        TypeError: x has another dtype.
        ValueError: the recipe leaves this operand in high precision, it is not an operand, or x is empty or a
            number.
    """
    from ablate.numerics.spec import Quant
    from ablate.training.metrics import quantised

    spec = recipe if isinstance(recipe, Quant) else _resolved(recipe, set)
    return quantised(x, spec, slot, seed=seed, step=step, layer=layer)


def recipe(
    source: RecipeSource | None = None,
    set: Mapping[str, Json] | None = None,
) -> Recipe:
    """Return a recipe, with knobs turned.

    Args:
        source: as for `convert`. Without one: the recipe of the arm, in a command that a sweep runs (workload
            `command`).
        set: knobs to turn, as for `convert`.

    Raises:
        ValueError: there is no such preset or file, or a field or knob is wrong; with every reason.
    """
    if source is None:
        from ablate.training.own_code.process_environment import recipe as of_environment

        source = of_environment()
    return _resolved(source, set)


def presets() -> dict[str, str]:
    """Return the presets: their names, and what each is."""
    import inspect

    from ablate.recipes import PRESETS

    return {name: (inspect.getdoc(make) or "").partition("\n")[0] for name, make in PRESETS.items()}


def diff(first: RecipeSource, second: RecipeSource) -> dict[str, tuple[object, object]]:
    """Return the fields in which two recipes differ: path, and the value in each; {} for the same recipe."""
    from ablate.recipes.changes import differences

    one, other = (_resolved(source, None).model_dump(mode="json") for source in (first, second))
    return differences(one, other)


def _resolved(source: RecipeSource, knobs: Mapping[str, Json] | None) -> Recipe:
    from ablate.experiment.recipe_source import resolve

    return resolve(source, knobs or {})
