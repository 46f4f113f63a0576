"""Python for torchao and torchtitan, whose training recipes are few: NVFP4, MXFP8 and FP8 by tensor.

torchao's NVFP4 is `nvfp4`: 16x16 weights, gradients rounded stochastically, wgrad rotated by 16. Its layers
draw their own signs unless they are given, so the signs of Transformer Engine are. torchtitan 0.3.0 gives its
layers the same signs, which stand in its code; builds before that release drew them.
"""

from collections.abc import Sequence

from ablate.recipes.changes import as_data, as_word, changes
from ablate.recipes.recipe import Recipe
from ablate.recipes.targets.experts import unreached
from ablate.recipes.targets.model import Lost, Model, skipped, unheld
from ablate.recipes.torchao_import import CLASSES, SIGNS

__all__ = ["OVERRIDE", "SIGNS", "torchtitan_blocks", "write", "write_torchtitan"]
_QUANTIZE = "quantize_(model, CONFIG, filter_fn=quantised)"
_KERNELS = """\
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common import KernelPreference
"""
_USES = {
    "NVFP4TrainingConfig": (
        "from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4TrainingConfig\n"
        + _KERNELS,
        _QUANTIZE,
    ),
    "MXFP8TrainingOpConfig": (
        "import torch\nfrom torchao.prototype.moe_training.config import MXFP8TrainingOpConfig\n"
        "from torchao.prototype.mx_formats.config import ScaleCalculationMode\n" + _KERNELS,
        _QUANTIZE,
    ),
    "Float8LinearConfig": (
        "from torchao.float8 import Float8LinearConfig, convert_to_float8_training\n",
        "convert_to_float8_training(model, config=CONFIG, module_filter_fn=quantised)",
    ),
}
"""Imports, and call that converts a model, of each class."""


def write(recipe: Recipe, model: Model) -> str:
    """Return Python that converts a model's linear layers by torchao; Lost for what it does not compute."""
    made, first, last = _held(recipe, model, "torchao", tuple(CLASSES))
    depth = "blocks" if model.depth is None else f"blocks={model.depth}"
    if made is None:
        return (
            f'"""torchao 0.18: {model.label} quantises nothing."""\n\n\ndef convert(model, {depth}):\n'
            '    """Leave the model as it is."""\n'
        )
    name, state = made
    imports, call = _USES[name]
    fields = "".join(f"    {key}={value},\n" for key, value in {**CLASSES[name].written, **state}.items())
    config = f"{name}(\n{fields})" if fields else f'{name}.from_recipe_name("tensorwise")'
    return f'''"""torchao 0.18: configuration of {model.label}."""

import re

{imports}
FIRST, LAST = {first}, {last}
"""Blocks at the input and at the output in high precision."""
CONFIG = {config}


def convert(model, {depth}):
    """Convert the linear layers inside of numbered blocks, in place."""

    def quantised(module, name):
        block = re.search(r"(?:^|\\.)(?:blocks|layers|layer|h)\\.(\\d+)\\.", name)
        linear = type(module).__name__ == "Linear"
        return linear and block is not None and FIRST <= int(block[1]) < blocks - LAST

    {call}
'''


OVERRIDE = "quantised"
"""Function of torchtitan's file that `--override.imports` names."""


def torchtitan_blocks(recipe: Recipe, model: Model) -> list[str]:
    """Return what the names of the layers to be converted contain, none for bf16; Lost for other recipes."""
    made, first, last = _held(recipe, model, "torchtitan", ("NVFP4TrainingConfig",))
    if made is None:
        return []
    if model.depth is None:
        raise Lost(f"layers: torchtitan names the blocks that it converts; give {model.by[0]}")
    names = [f"layers.{block}." for block in range(first, model.depth - last)]
    if not names:
        raise Lost("layers: no block is quantised, and torchtitan would then convert every layer")
    return names


def write_torchtitan(recipe: Recipe, model: Model) -> str:
    """Return torchtitan's converter of linear layers, also as an override; Lost for what it does not compute.

    torchtitan's converter copies four fields of a layer when the model's configuration is made. An override
    runs later, when layers also have their sharding, so it copies all fields (`derive`).
    """
    names = torchtitan_blocks(recipe, model)
    if not names:
        return f'"""torchtitan 0.3: {model.label} quantises nothing."""\n\nCONVERTERS = []\n'
    blocks = "\n".join(f'    "{name}",' for name in names)
    return f'''"""torchtitan 0.3 and torchao 0.18: {model.label}.

In a configuration: model_registry(..., converters=CONVERTERS). On a command line, with the folder
of this file in PYTHONPATH: --override.imports NAME_OF_THIS_FILE.{OVERRIDE}
"""

from torchtitan.components.quantization.nvfp4 import NVFP4Linear, NVFP4LinearConverter
from torchtitan.config.override import derive, override
from torchtitan.models.common.linear import Linear

BLOCKS = [
{blocks}
]
CONVERTERS = [NVFP4LinearConverter.Config(fqns=BLOCKS)]


@override(target=Linear.Config, fqns=[f"*{{block}}*" for block in BLOCKS])
def {OVERRIDE}(linear):
    """Return the NVFP4 layer in place of a linear layer."""
    return derive(linear, NVFP4Linear.Config)
'''


def _held(
    recipe: Recipe, model: Model, target: str, classes: Sequence[str]
) -> tuple[tuple[str, dict[str, str]] | None, int, int]:
    """Return the target's class and those of its fields that make this recipe, None for bf16, and the blocks
    that stay in high precision.
    """
    reasons = [
        *unheld(recipe, model, target, counts=not recipe.products.plain),
        *unreached(recipe, model.layers, target, "converts linear layers alone"),
    ]
    if recipe.products.plain and not reasons:
        return None, 0, 0
    made = (
        (name, state)
        for name in classes
        for state in (CLASSES[name].states() if target == "torchao" else ({},))
        if CLASSES[name].recipe(state).products == recipe.products
    )
    found = next(made, None)
    if found is None:
        ours = as_data(recipe.products)
        near = {name: [*changes(ours, as_data(CLASSES[name].preset().products))] for name in classes}
        name = min(near, key=lambda each: len(near[each]))
        nearest = f"{target}'s nearest recipe, {CLASSES[name].preset.__name__}"
        reasons += [
            f"{path} {as_word(value)}: {nearest}, has {as_word(other)}" for path, value, other in near[name]
        ]
    if reasons:
        raise Lost(*reasons)
    return found, *skipped(recipe, model.depth)
