"""torchao's training configurations as recipes: `recipe_of_torchao`. This file does not import torchao.

Read are the objects that `quantize_` and `convert_to_float8_training` take: NVFP4TrainingConfig,
MXFP8TrainingOpConfig and Float8LinearConfig, of torchao 0.18. Each has few states that train by a recipe of
this project; every field in another state is named and refused, and so is one that is not known here.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass

from ablate.recipes.presets import fp8_current, mxfp8, nvfp4
from ablate.recipes.recipe import Hadamard, Recipe, Wgrad
from ablate.recipes.targets.torchao import SIGNS

PACKAGE = "torchao"


def is_torchao_config(source: object) -> bool:
    """Return True for a configuration object of torchao."""
    return type(source).__module__.partition(".")[0] == PACKAGE and is_dataclass(source)


def recipe_of_torchao(config: object) -> Recipe:
    """Return the recipe that a training configuration of torchao stands for.

    Args:
        config: an object of one of the classes above.

    Raises:
        ValueError: another class, or fields that have no counterpart here; all are named.
    """
    name = type(config).__name__
    if name not in _READERS:
        raise ValueError(f"{name}: recipes are read from torchao's {', '.join(_READERS)}")
    assert is_dataclass(config)
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return _READERS[name](name, values)


def _refuse(name: str, values: Mapping[str, object], expected: Mapping[str, tuple[str, ...]]) -> None:
    """Raise ValueError for the fields whose text is none of those expected, unknown fields included."""
    wrong = [
        f"{name}.{field} {value}: "
        + (f"read is {' or '.join(expected[field])}" if field in expected else "not known here")
        for field, value in ((field, _word(value)) for field, value in values.items())
        if value not in expected.get(field, ())
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def _word(value: object) -> str:
    """Return a field's value as text: an enumeration's member by its name."""
    return str(getattr(value, "name", value))


_KERNELS = ("AUTO", "EMULATED", "TRITON", "TORCH", "MSLK")
"""Kernels compute the same products; which one runs decides no bit that a recipe describes."""


def _nvfp4(name: str, values: Mapping[str, object]) -> Recipe:
    signs = values.get("rht_sign_vector")
    signs = signs.tolist() if hasattr(signs, "tolist") else signs
    words = {str(SIGNS): "fixed", "None": "per_layer"}
    given = str(tuple(map(int, signs))) if isinstance(signs, list | tuple) else str(signs)
    expected = {
        "kernel_preference": _KERNELS,
        "process_group": ("None",),
        "world_size": ("None", "1"),
        "rht_sign_vector": (str(SIGNS), "None"),
    }
    _refuse(name, {**values, "rht_sign_vector": given}, expected)
    recipe = nvfp4()
    wgrad = Wgrad(g=recipe.wgrad.g, x=recipe.wgrad.x, hadamard=Hadamard(size=16, signs=words[given]))
    return recipe.model_copy(update={"wgrad": wgrad})


def _mxfp8(name: str, values: Mapping[str, object]) -> Recipe:
    expected = {
        "kernel_preference": _KERNELS,
        "out_dtype": ("torch.bfloat16",),
        "wgrad_with_hp": ("False", "True"),
        "scale_calculation_mode": ("RCEIL",),
        "pad_token_groups_for_grouped_mm": ("False", "True"),
    }
    _refuse(name, values, expected)
    recipe = mxfp8()
    if values.get("wgrad_with_hp"):
        return recipe.model_copy(update={"wgrad": recipe.wgrad.high_precision()})
    return recipe


_CASTS = ("input", "weight", "grad_output")
_FORMATS = {"torch.float8_e4m3fn": "e4m3", "torch.float8_e5m2": "e5m2"}


def _float8(name: str, values: Mapping[str, object]) -> Recipe:
    casts = {field: value for field, value in values.items() if field.startswith("cast_config_")}
    own = {f"cast_config_{tensor}" for tensor in _CASTS}
    usual = {f"cast_config_{tensor}{more}" for tensor, more in zip(_CASTS, _AGAIN, strict=True)}
    wrong = [
        f"{name}.{field}: it differs from {field.split('_for_')[0]}, and both copies are alike here"
        for field, value in casts.items()
        if field in usual and value != casts[field.split("_for_")[0]]
    ]
    wrong += [f"{name}.{field}: not known here" for field in casts if field not in own | usual]
    elements = {}
    for tensor in _CASTS:
        cast, field = casts[f"cast_config_{tensor}"], f"{name}.cast_config_{tensor}"
        states = {key: _word(getattr(cast, key, None)) for key in ("scaling_type", "scaling_granularity")}
        if states != {"scaling_type": "DYNAMIC", "scaling_granularity": "TENSORWISE"}:
            wrong.append(f"{field} {', '.join(states.values())}: read is DYNAMIC, TENSORWISE")
        usual_type = "torch.float8_e5m2" if tensor == "grad_output" else "torch.float8_e4m3fn"
        dtype = _word(getattr(cast, "target_dtype", None))
        dtype = usual_type if dtype == "None" else dtype
        if dtype != usual_type:
            wrong.append(f"{field}.target_dtype {dtype}: read is {usual_type}")
        elements[tensor] = _FORMATS.get(dtype, "")
    for product in ("output", "grad_input", "grad_weight"):
        fast = _word(getattr(values.get(f"gemm_config_{product}"), "use_fast_accum", None))
        if fast not in ("True", "False"):
            wrong.append(f"{name}.gemm_config_{product}.use_fast_accum {fast}: True or False")
    expected = {
        "enable_fsdp_float8_all_gather": ("False", "True"),
        "pad_inner_dim": ("False", "True"),
        "emulate": ("False", "True"),
        "force_recompute_fp8_weight_in_bwd": ("False", "True"),
        "round_scales_to_power_of_2": ("False",),
    }
    others = {
        field: value
        for field, value in values.items()
        if not field.startswith(("cast_config_", "gemm_config_"))
    }
    try:
        _refuse(name, others, expected)
    except ValueError as error:
        wrong.append(str(error))
    if wrong:
        raise ValueError("; ".join(wrong))
    return fp8_current()


_AGAIN = ("_for_grad_weight", "_for_grad_input", "_for_grad_weight")
_READERS: dict[str, Callable[[str, Mapping[str, object]], Recipe]] = {
    "NVFP4TrainingConfig": _nvfp4,
    "MXFP8TrainingOpConfig": _mxfp8,
    "Float8LinearConfig": _float8,
}
