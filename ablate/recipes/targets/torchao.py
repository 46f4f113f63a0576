"""Python for torchao and torchtitan, whose training recipes are few: NVFP4, MXFP8 and FP8 by tensor.

torchao's NVFP4 is `nvfp4`: 16x16 weights, gradients rounded stochastically, wgrad rotated by 16. Its layers
draw their own signs unless they are given, so the signs of Transformer Engine are.
"""

from collections.abc import Callable, Iterator, Mapping

from ablate.recipes.changes import as_data, as_word, changes
from ablate.recipes.presets import fp8_current, mxfp8, nvfp4
from ablate.recipes.recipe import Products, Recipe
from ablate.recipes.targets.experts import unreached
from ablate.recipes.targets.model import Lost, Model, skipped, unheld

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""TE's signs of the Hadamard rotation (`numerics.hadamard.TE_SIGNS`, which imports torch)."""
_HELD: Mapping[str, Callable[[], Recipe]] = {"nvfp4": nvfp4, "mxfp8": mxfp8, "fp8_current": fp8_current}
_CONFIGS = {
    "nvfp4": (
        (
            "from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4TrainingConfig",
            "from torchao.quantization import quantize_",
            "from torchao.quantization.quantize_.common import KernelPreference",
        ),
        (
            "CONFIG = NVFP4TrainingConfig(",
            "    kernel_preference=KernelPreference.TRITON,",
            "    process_group=None,",
            "    world_size=None,",
            f"    rht_sign_vector={SIGNS},",
            ")",
        ),
        "quantize_(model, CONFIG, filter_fn=quantised)",
    ),
    "mxfp8": (
        (
            "import torch",
            "from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig",
            "from torchao.prototype.mx_formats.config import ScaleCalculationMode",
            "from torchao.quantization import quantize_",
            "from torchao.quantization.quantize_.common import KernelPreference",
        ),
        (
            "CONFIG = MXFP8TrainingOpConfig(",
            "    kernel_preference=KernelPreference.AUTO,",
            "    out_dtype=torch.bfloat16,",
            "    wgrad_with_hp=False,",
            "    scale_calculation_mode=ScaleCalculationMode.RCEIL,",
            ")",
        ),
        "quantize_(model, CONFIG, filter_fn=quantised)",
    ),
    "fp8_current": (
        ("from torchao.float8 import Float8LinearConfig, convert_to_float8_training",),
        ('CONFIG = Float8LinearConfig.from_recipe_name("tensorwise")',),
        "convert_to_float8_training(model, config=CONFIG, module_filter_fn=quantised)",
    ),
}
"""Imports, configuration and call of each recipe."""


def write(recipe: Recipe, model: Model) -> str:
    """Return Python that converts a model's linear layers by torchao; Lost for what it does not compute."""
    name, first, last = _held(recipe, model, "torchao", _HELD)
    depth = "blocks" if model.depth is None else f"blocks={model.depth}"
    if name is None:
        return (
            f'"""torchao 0.18: {model.label} quantises nothing."""\n\n\ndef convert(model, {depth}):\n'
            '    """Leave the model as it is."""\n'
        )
    imports, config, call = _CONFIGS[name]
    lines = [
        f'"""torchao 0.18: configuration of {model.label}."""',
        "",
        "import re",
        "",
        *imports,
        "",
        f"FIRST, LAST = {first}, {last}",
        '"""Blocks at the input and at the output in high precision."""',
        *config,
        "",
        "",
        f"def convert(model, {depth}):",
        '    """Convert the linear layers inside of numbered blocks, in place."""',
        "",
        "    def quantised(module, name):",
        '        block = re.search(r"(?:^|\\.)(?:blocks|layers|layer|h)\\.(\\d+)\\.", name)',
        '        linear = type(module).__name__ == "Linear"',
        "        return linear and block is not None and FIRST <= int(block[1]) < blocks - LAST",
        "",
        f"    {call}",
    ]
    return "\n".join(lines) + "\n"


OVERRIDE = "quantised"
"""Function of torchtitan's file that `--override.imports` names."""


def torchtitan_blocks(recipe: Recipe, model: Model) -> list[str]:
    """Return what the names of the layers to be converted contain, none for bf16; Lost for other recipes."""
    name, first, last = _held(recipe, model, "torchtitan", {"nvfp4": nvfp4})
    if name is None:
        return []
    if model.depth is None:
        raise Lost([f"layers: torchtitan names the blocks that it converts; give {model.by[0]}"])
    names = [f"layers.{block}." for block in range(first, model.depth - last)]
    if not names:
        raise Lost(["layers: no block is quantised, and torchtitan would then convert every layer"])
    return names


def write_torchtitan(recipe: Recipe, model: Model) -> str:
    """Return torchtitan's converter of linear layers, also as an override; Lost for what it does not compute.

    torchtitan's converter copies four fields of a layer when the model's configuration is made. An override
    runs later, when layers also have their sharding, so it copies all fields (`derive`).
    """
    names = torchtitan_blocks(recipe, model)
    if not names:
        return f'"""torchtitan 0.3: {model.label} quantises nothing."""\n\nCONVERTERS = []\n'
    lines = [
        f'"""torchtitan 0.3 and torchao 0.18: {model.label}.',
        "",
        "In a configuration: model_registry(..., converters=CONVERTERS). On a command line, with the folder",
        f"of this file in PYTHONPATH: --override.imports NAME_OF_THIS_FILE.{OVERRIDE}",
        '"""',
        "",
        "from torchtitan.components.quantization.nvfp4 import NVFP4Linear, NVFP4LinearConverter",
        "from torchtitan.config.override import derive, override",
        "from torchtitan.models.common.linear import Linear",
        "",
        "BLOCKS = [",
        *(f'    "{name}",' for name in names),
        "]",
        "CONVERTERS = [NVFP4LinearConverter.Config(fqns=BLOCKS)]",
        "",
        "",
        '@override(target=Linear.Config, fqns=[f"*{block}*" for block in BLOCKS])',
        f"def {OVERRIDE}(linear):",
        '    """Return the NVFP4 layer in place of a linear layer."""',
        "    return derive(linear, NVFP4Linear.Config)",
    ]
    return "\n".join(lines) + "\n"


def _held(
    recipe: Recipe, model: Model, target: str, presets: Mapping[str, Callable[[], Recipe]]
) -> tuple[str | None, int, int]:
    """Return which of the target's recipes this one is, None for bf16, and the blocks that stay in high
    precision.
    """
    reasons = [
        *unheld(recipe, model, target),
        *unreached(recipe, model.layers, target, "converts linear layers alone"),
    ]
    if recipe.products.plain and not reasons:
        return None, 0, 0
    name = next((name for name, preset in presets.items() if preset().products == recipe.products), None)
    if name is None:
        reasons += _differences(recipe.products, target, presets)
    first = last = 0
    try:
        first, last = skipped(recipe, model, target)
    except Lost as lost:
        reasons += lost.reasons
    if reasons or name is None:
        raise Lost(reasons)
    return name, first, last


def _differences(
    products: Products, target: str, presets: Mapping[str, Callable[[], Recipe]]
) -> Iterator[str]:
    """Yield the fields that differ from the nearest recipe of the target."""
    ours = as_data(products)
    found = {name: [*changes(ours, as_data(preset().products))] for name, preset in presets.items()}
    nearest = min(found, key=lambda name: len(found[name]))
    for path, value, other in found[nearest]:
        yield f"{path} {as_word(value)}: {target}'s nearest recipe, {nearest}, has {as_word(other)}"
