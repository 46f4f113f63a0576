"""torchao's training configurations: one table by which they are read and written. torchao is not imported.

Read are the objects that `quantize_` and `convert_to_float8_training` take: NVFP4TrainingConfig,
MXFP8TrainingOpConfig and Float8LinearConfig, of torchao 0.18. Each has few states that train by a recipe of
this project; every field in another state is named and refused, and so is one that is not known here.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import product

from ablate.recipes.presets import fp8_current, mxfp8, nvfp4
from ablate.recipes.recipe import Hadamard, Recipe

PACKAGE = "torchao"
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""TE's signs of the Hadamard rotation (`numerics.hadamard.TE_SIGNS`, which imports torch)."""
_KERNELS = ("AUTO", "EMULATED", "TRITON", "TORCH", "MSLK")
"""Kernels compute the same products; which one runs decides no bit that a recipe describes."""
_EITHER = ("False", "True")
_CHANGES: Mapping[tuple[str, str], Callable[[Recipe], dict[str, object]]] = {
    ("rht_sign_vector", "None"): lambda recipe: {
        "wgrad": recipe.wgrad.model_copy(update={"hadamard": Hadamard(size=16, signs="per_layer")})
    },
    ("wgrad_with_hp", "True"): lambda recipe: {"wgrad": recipe.wgrad.high_precision()},
}
"""Fields of a recipe by the state of a field that changes them: `Recipe.model_copy` takes them."""


@dataclass(frozen=True)
class Config:
    """A class of torchao: the recipe of its usual states, and all states that are read."""

    preset: Callable[[], Recipe]
    read: Mapping[str, tuple[str, ...]]
    """Values as text, by field; a field of a part is `part.field`. The first has the preset's bits."""
    written: Mapping[str, str]
    """Python of a field's usual value; empty for a configuration that torchao makes by its name."""

    def recipe(self, values: Mapping[str, str]) -> Recipe:
        """Return the recipe that the fields' values stand for."""
        recipe = self.preset()
        for state in values.items():
            if state in _CHANGES:
                recipe = recipe.model_copy(update=_CHANGES[state](recipe))
        return recipe

    def states(self) -> Iterator[dict[str, str]]:
        """Yield all values of the fields that change the recipe, the usual ones first."""
        keys = dict.fromkeys(name for name, _ in _CHANGES if name in self.written)
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
    "Float8LinearConfig": Config(fp8_current, dict(_float8()), {}),
}


def is_torchao_config(source: object) -> bool:
    """Return True for a configuration object of torchao."""
    return type(source).__module__.partition(".")[0] == PACKAGE and is_dataclass(source)


def recipe_of_torchao(config: object) -> Recipe:
    """Return the recipe that a training configuration of torchao stands for.

    Args:
        config: an object of one of CLASSES.

    Raises:
        ValueError: another class, or fields that have no counterpart here; all are named.
    """
    name = type(config).__name__
    if name not in CLASSES:
        raise ValueError(f"{name}: recipes are read from torchao's {', '.join(CLASSES)}")
    read = CLASSES[name].read  # another torchao may lack one of its fields
    values = dict.fromkeys((key for key, _ in _CHANGES if key in read), "missing") | dict(_values(config))
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
    """Yield the fields of a configuration and of its parts, with their values as text."""
    assert is_dataclass(config)
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _values(value, f"{path}{field.name}.")
            continue
        value = value.tolist() if hasattr(value, "tolist") else value
        value = tuple(map(int, value)) if isinstance(value, list | tuple) else value
        yield f"{path}{field.name}", str(getattr(value, "name", value))
