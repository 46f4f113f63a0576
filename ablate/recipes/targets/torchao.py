"""torchao's training configurations, read and written by one table, and torchtitan's converter.

Both train by few recipes: NVFP4, MXFP8 and FP8 by tensor. Read are the objects that `quantize_` and
`convert_to_float8_training` take, of torchao 0.18. Each class has few states that train by a recipe of this
project; every field in another state is named and refused, and so is one that is not known here.

torchao's NVFP4 is `nvfp4`: 16x16 weights, gradients rounded stochastically, wgrad rotated by 16. Its layers
draw their own signs unless they are given, so the signs of Transformer Engine are. torchtitan 0.3.0 gives its
layers the same signs, which stand in its code; builds before that release drew them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import product

from ablate.recipes.changes import as_data, as_word, changes
from ablate.recipes.presets import fp8_current, mxfp8, nvfp4
from ablate.recipes.recipe import Hadamard, Recipe
from ablate.recipes.targets.experts import unreached
from ablate.recipes.targets.model import Lost, Model, skipped, unheld

PACKAGE = "torchao"
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""TE's signs of the Hadamard rotation (`numerics.hadamard.TE_SIGNS`, which imports torch)."""
_KERNELS = ("AUTO", "EMULATED", "TRITON", "TORCH", "MSLK")
"""Kernels compute the same products; which one runs decides no bit that a recipe describes."""
_EITHER = ("False", "True")
_CHANGES: Mapping[tuple[str, str], Mapping[str, object]] = {
    ("rht_sign_vector", "None"): {"wgrad.hadamard": Hadamard(size=16, signs="per_layer")},
    ("wgrad_with_hp", "True"): {"wgrad.g": None, "wgrad.x": None},
}
"""Fields of a recipe by the state of a field that changes them."""
_QUANTIZE = """\
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common import KernelPreference
"""


@dataclass(frozen=True)
class Config:
    """A class of torchao: the recipe of its usual states, and all states that are read."""

    preset: Callable[[], Recipe]
    imports: str
    read: Mapping[str, tuple[str, ...]]
    """Values as text, by field; a field of a part is `part.field`. The first has the preset's bits."""
    written: Mapping[str, str]
    """Python of a field's usual value; empty for a configuration that torchao makes by its name."""
    call: str = "quantize_(model, CONFIG, filter_fn=quantised)"
    """Call that converts a model."""

    def recipe(self, values: Mapping[str, str]) -> Recipe:
        """Return the recipe that the fields' values stand for."""
        recipe = self.preset()
        for state in values.items():
            recipe = recipe.changed(_CHANGES.get(state, {}))
        return recipe

    def states(self) -> Iterator[dict[str, str]]:
        """Yield all values of the fields that change the recipe, the usual ones first."""
        keys = [name for name, _ in _CHANGES if name in self.written]
        for values in product(*(self.read[key] for key in keys)):
            yield dict(zip(keys, values, strict=True))


def _float8() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the states of Float8LinearConfig: both copies of a tensor have one dynamic scale."""
    for tensor, dtype in (("input", "e4m3fn"), ("weight", "e4m3fn"), ("grad_output", "e5m2")):
        for copy in ("", "_for_grad_input" if tensor == "weight" else "_for_grad_weight"):
            cast = f"cast_config_{tensor}{copy}"
            yield f"{cast}.scaling_type", ("DYNAMIC",)
            yield f"{cast}.scaling_granularity", ("TENSORWISE",)
            yield f"{cast}.target_dtype", (f"torch.float8_{dtype}", "None")
    for gemm in ("output", "grad_input", "grad_weight"):
        yield f"gemm_config_{gemm}.use_fast_accum", _EITHER
    for switch in ("enable_fsdp_float8_all_gather", "pad_inner_dim", "emulate"):
        yield switch, _EITHER
    yield "force_recompute_fp8_weight_in_bwd", _EITHER
    yield "round_scales_to_power_of_2", ("False",)


CLASSES: Mapping[str, Config] = {
    "NVFP4TrainingConfig": Config(
        nvfp4,
        "from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4TrainingConfig\n"
        + _QUANTIZE,
        {
            "kernel_preference": _KERNELS,
            "process_group": ("None",),
            "world_size": ("None", "1"),
            "rht_sign_vector": (str(SIGNS), "None"),
        },
        {
            "kernel_preference": "KernelPreference.TRITON",
            "process_group": "None",
            "world_size": "None",
            "rht_sign_vector": str(SIGNS),
        },
    ),
    "MXFP8TrainingOpConfig": Config(
        mxfp8,
        "import torch\nfrom torchao.prototype.moe_training.config import MXFP8TrainingOpConfig\n"
        "from torchao.prototype.mx_formats.config import ScaleCalculationMode\n" + _QUANTIZE,
        {
            "kernel_preference": _KERNELS,
            "out_dtype": ("torch.bfloat16",),
            "wgrad_with_hp": _EITHER,
            "scale_calculation_mode": ("RCEIL",),
            "pad_token_groups_for_grouped_mm": _EITHER,
        },
        {
            "kernel_preference": "KernelPreference.AUTO",
            "out_dtype": "torch.bfloat16",
            "wgrad_with_hp": "False",
            "scale_calculation_mode": "ScaleCalculationMode.RCEIL",
        },
    ),
    "Float8LinearConfig": Config(
        fp8_current,
        "from torchao.float8 import Float8LinearConfig, convert_to_float8_training\n",
        dict(_float8()),
        {},
        "convert_to_float8_training(model, config=CONFIG, module_filter_fn=quantised)",
    ),
}


def is_torchao_config(source: object) -> bool:
    """Return True for a configuration object of torchao."""
    return type(source).__module__.partition(".")[0] == PACKAGE and is_dataclass(source)


def recipe_of_torchao(config: object) -> Recipe:
    """Return the recipe that an object of one of CLASSES stands for; ValueError for another class, or with
    the names of all fields that have no counterpart here.
    """
    name = type(config).__name__
    if name not in CLASSES:
        raise ValueError(f"{name}: recipes are read from torchao's {', '.join(CLASSES)}")
    read = CLASSES[name].read  # another torchao may lack one of its fields
    values = {key: "missing" for key, _ in _CHANGES if key in read} | dict(_values(config))
    wrong = [
        f"{name}.{field} {value}: "
        + (f"read is {' or '.join(read[field])}" if field in read else "not known here")
        for field, value in values.items()
        if value not in read.get(field, ())
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
    return CLASSES[name].recipe(values)


def _values(config: object, path: str = "") -> Iterator[tuple[str, str]]:
    assert is_dataclass(config)
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _values(value, f"{path}{field.name}.")
            continue
        value = value.tolist() if hasattr(value, "tolist") else value
        value = tuple(map(int, value)) if isinstance(value, list | tuple) else value
        yield f"{path}{field.name}", str(getattr(value, "name", value))


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
    made_by = CLASSES[name]
    given = "".join(f"    {key}={value},\n" for key, value in {**made_by.written, **state}.items())
    config = f"{name}(\n{given})" if given else f'{name}.from_recipe_name("tensorwise")'
    return f'''"""torchao 0.18: configuration of {model.label}."""

import re

{made_by.imports}
FIRST, LAST = {first}, {last}
"""Blocks at the input and at the output in high precision."""
CONFIG = {config}


def convert(model, {depth}):
    """Convert the linear layers inside of numbered blocks, in place."""

    def quantised(module, name):
        block = re.search(r"(?:^|\\.)(?:blocks|layers|layer|h)\\.(\\d+)\\.", name)
        linear = type(module).__name__ == "Linear"
        return linear and block is not None and FIRST <= int(block[1]) < blocks - LAST

    {made_by.call}
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
