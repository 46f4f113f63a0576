"""Python for torchao and torchtitan, whose training recipes are few: NVFP4, MXFP8 and FP8 by tensor.

torchao's NVFP4 is `nvfp4`: 16x16 weights, gradients rounded stochastically, wgrad rotated by 16. Its layers
draw their own signs unless they are given, so the signs of Transformer Engine are.
"""

from collections.abc import Callable, Iterator, Mapping

from ablate.recipes.changes import as_data, as_word, changes
from ablate.recipes.presets import fp8_current, mxfp8, nvfp4
from ablate.recipes.recipe import Products, Recipe
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
    imports, config, call = _CONFIGS[name]
    blocks = "blocks" if model.depth is None else str(model.depth)
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
        "def convert(model, blocks):" if model.depth is None else f"def convert(model, blocks={blocks}):",
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


def write_torchtitan(recipe: Recipe, model: Model) -> str:
    """Return torchtitan's converter of linear layers; Lost for what it does not compute."""
    _, first, last = _held(recipe, model, "torchtitan", {"nvfp4": nvfp4})
    depth = model.depth
    if depth is None:
        raise Lost(["layers: torchtitan names the blocks that it converts; give --blocks N or --model"])
    fqns = [f"layers.{block}." for block in range(first, depth - last)]
    if not fqns:
        raise Lost(["layers: no block is quantised, and torchtitan would then convert every layer"])
    lines = [
        f'"""torchtitan 0.3 and torchao 0.18: converter of {model.label}."""',
        "",
        "from torchtitan.components.quantization.nvfp4 import NVFP4LinearConverter",
        "",
        "CONVERTER = NVFP4LinearConverter.Config(",
        "    fqns=[",
        *(f'        "{fqn}",' for fqn in fqns),
        "    ],",
        ")",
        '"""One entry of the list of model converters."""',
    ]
    return "\n".join(lines) + "\n"


def _held(
    recipe: Recipe, model: Model, target: str, presets: Mapping[str, Callable[[], Recipe]]
) -> tuple[str, int, int]:
    """Return which of the target's recipes this one is, and the blocks that stay in high precision."""
    reasons = [*unheld(recipe, target)]
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
