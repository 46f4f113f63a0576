"""Transformer Engine's recipe objects as recipes of this project: `recipe_of`.

The problem. Whoever trains with Transformer Engine (TE) has a recipe already, as an object of one of its
classes. Written again by hand, one default that differs would ask another question.

The idea. Read the object's options, take the products that its class computes by them (te_mapping.py), and
translate these back: what TE would then be given must have the options of the object. So an option that this
file does not know cannot be lost in silence.

    recipe_of(NVFP4BlockScaling(disable_rht=True))     the preset nvfp4 without wgrad's rotation

Refused, with a ValueError: CustomRecipe and Float8BlockScaling, attention in FP8, a margin, scaling factors
of one's own, and options that the emulation has not. This file imports neither torch nor TE.
"""

from typing import Protocol, TypeGuard

from ablate.recipes.recipe import Recipe
from ablate.recipes.te_mapping import (
    FORMATS,
    OPTIONS,
    OVERRIDES,
    SCOPES,
    Builtin,
    products_of,
    te_recipe,
)

PACKAGE = "transformer_engine"
CLASSES = (*OPTIONS, "DelayedScaling")
_DEFAULTS = {key: values[0] for options in OPTIONS.values() for key, values in options.items()}
_DEFAULTS |= {"fp8_format": "HYBRID"}
"""Options of a recipe object that its version of TE lacks have these values."""
_FLAGS = {
    "disable_rht": ("random_hadamard_transform", "fwd_inp", "bwd_grad"),
    "disable_stochastic_rounding": ("stochastic_rounding", "bwd_grad"),
    "disable_2d_quantization": ("fp4_2d_quantization", "fwd_weight"),
}
"""Field, and tensors, of the object's QParams that an option set when the object was made: TE reads those."""


class TERecipe(Protocol):
    """Attributes that all recipe classes of TE have, for type checkers."""

    fp8_dpa: bool
    fp8_mha: bool


def _option(te: TERecipe, name: str, default: object) -> object:
    value = getattr(te, name, default)
    return getattr(value, "name", value)


def _flag(te: TERecipe, name: str) -> bool:
    """Return an option of _FLAGS, as its tensors' quantisers have it."""
    fact, *tensors = _FLAGS[name]
    params = [getattr(te, f"fp4_quant_{tensor}", None) for tensor in tensors]
    flags = {bool(getattr(te, name, False) if each is None else not getattr(each, fact)) for each in params}
    if len(flags) > 1:
        raise ValueError("NVFP4BlockScaling rotates one of wgrad's operands alone, which is no product")
    return flags.pop()


def is_te_recipe(source: object) -> TypeGuard[TERecipe]:
    """Return True for an object of one of TE's classes."""
    return type(source).__module__.partition(".")[0] == PACKAGE


def recipe_of(te: TERecipe) -> Recipe:
    """Return the recipe that an object of one of CLASSES stands for, of TE 2.8 to 2.20; ValueError if the
    emulation has not what it says, or not exactly.
    """
    name = type(te).__name__
    if name not in CLASSES:
        *others, last = CLASSES
        raise ValueError(f"{name}: recipes are read from Transformer Engine's {', '.join(others)} and {last}")
    for option in ("fp8_dpa", "fp8_mha"):
        if getattr(te, option, False):
            raise ValueError(f"{name}.{option}: attention in FP8 is not emulated; leave it out")
    if (margin := getattr(te, "margin", 0)) != 0:
        raise ValueError(f"{name}.margin {margin}: not emulated; leave it at 0")
    values = {key: _option(te, key, default) for key, default in _DEFAULTS.items()}
    if name == "DelayedScaling":
        values["history"] = _history(te)
    if name == "NVFP4BlockScaling":
        for key in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"):
            if values[key] not in SCOPES:
                raise ValueError(f"{name}: a scope of nvfp4_4over6 {values[key]}: one of {', '.join(SCOPES)}")
        values |= {flag: _flag(te, flag) for flag in _FLAGS}
    elif values["fp8_format"] not in FORMATS:
        raise ValueError(f"fp8_format {values['fp8_format']}: {' or '.join(FORMATS)}")
    if (override := values["backward_override"]) not in OVERRIDES:
        raise ValueError(f"{name}.backward_override {override}: None, high_precision or dequantized")
    recipe = Recipe.of(products_of(name, values))
    _check(recipe, values, name)
    return recipe


def _history(te: TERecipe) -> object:
    """Return the number of steps whose amaxes DelayedScaling looks at."""
    algorithm = _option(te, "amax_compute_algo", "max")
    if (
        algorithm not in ("max", "most_recent")
        or getattr(te, "scaling_factor_compute_algo", None) is not None
    ):
        raise ValueError("DelayedScaling with functions of one's own for amax or scale is not emulated")
    length = _option(te, "amax_history_len", 1024)
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"DelayedScaling.amax_history_len {length}: a number of 1 or more")
    return 1 if algorithm == "most_recent" else length


def _check(recipe: Recipe, values: dict[str, object], name: str) -> None:
    """Raise ValueError if the recipe, given back to TE, is another object than it was read from."""
    try:
        description = te_recipe(recipe.products)
    except ValueError as error:
        raise ValueError(f"{name}: the emulation has not this combination of options: {error}") from None
    if name == "DelayedScaling":  # TE's own class advances its histories by autocast region: not used here
        return
    written: dict[str, object] = dict(description.options) if isinstance(description, Builtin) else {}
    idle = {"fp8_format", *_FLAGS} if values["backward_override"] else set()  # gradients are not quantised
    if values["nvfp4_4over6"] == "none":
        idle |= {"nvfp4_4over6_e4m3_use_256", "nvfp4_4over6_err_mode"}
    differ = {key: values[key] for key in written if key not in idle and values[key] != written[key]}
    if differ or not written:
        shown = ", ".join(f"{option}={value}" for option, value in differ.items()) or "its options"
        raise ValueError(f"{name}: {shown} in this combination is not emulated")
