"""Transformer Engine's recipe objects as recipes of this project: `recipe_of`.

The problem. Whoever trains with Transformer Engine (TE) has a recipe already, as an object of one of its
classes. Written again by hand, one default that differs would ask another question.

The idea. Read the object's options, change the preset of its class by them, and translate the result back
(te_mapping.py): what TE would then be given must have the options of the object. So an option that this
file does not know cannot be lost in silence.

    recipe_of(NVFP4BlockScaling(disable_rht=True))     the preset nvfp4 without wgrad's rotation

Refused, with a ValueError: CustomRecipe and Float8BlockScaling, attention in FP8, a margin, scaling factors
of one's own, and options that the emulation has not. This file imports neither torch nor TE.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from ablate.numerics.spec import Outer, Quant, Select
from ablate.recipes.presets import fp8_current, fp8_delayed, mxfp8, nvfp4
from ablate.recipes.recipe import Dgrad, Recipe, Wgrad
from ablate.recipes.te_mapping import Builtin, te_recipe

PACKAGE = "transformer_engine"
_SCOPES = {"none": "", "activations": "x", "weights": "w", "all": "xw"}
"""Operands of fprop that an option of Four Over Six concerns."""


class TERecipe(Protocol):
    """Attributes that all recipe classes of TE have, for type checkers."""

    fp8_dpa: bool
    fp8_mha: bool


@dataclass(frozen=True)
class _Options:
    """Options of a TE recipe object; one that its version of TE has not is at its default."""

    te: TERecipe

    def get(self, name: str, default: object) -> object:
        """Return an option: a word for an enumeration's member."""
        value = getattr(self.te, name, default)
        return getattr(value, "name", value)

    def quantised_by(self, tensor: str, fact: str, flag: str) -> bool:
        """Return a fact of a tensor's quantiser. TE reads the one in the object's QParams, which the flag set
        when the object was made.
        """
        params = getattr(self.te, f"fp4_quant_{tensor}", None)
        return bool(getattr(params, fact)) if params is not None else not self.get(f"disable_{flag}", False)


def is_te_recipe(source: object) -> TypeGuard[TERecipe]:
    """Return True for an object of one of TE's classes."""
    return type(source).__module__.partition(".")[0] == PACKAGE


def recipe_of(te: TERecipe) -> Recipe:
    """Return the recipe that a TE recipe object stands for.

    Args:
        te: an object of a class in `transformer_engine.common.recipe`, of TE 2.8 to 2.20.

    Raises:
        ValueError: the emulation has not what the object says, or not exactly.
    """
    name, options = type(te).__name__, _Options(te)
    if name not in _READERS:
        *others, last = _READERS
        raise ValueError(f"{name}: recipes are read from Transformer Engine's {', '.join(others)} and {last}")
    for option in ("fp8_dpa", "fp8_mha"):
        if options.get(option, False):
            raise ValueError(f"{name}.{option}: attention in FP8 is not emulated; leave it out")
    if options.get("margin", 0) != 0:
        raise ValueError(f"{name}.margin {options.get('margin', 0)}: not emulated; leave it at 0")
    recipe = _without_backward(_READERS[name](options), options, name)
    _check(recipe, options, name)
    return recipe


def _nvfp4(options: _Options) -> Recipe:
    given = ("nvfp4_4over6", "none"), ("nvfp4_4over6_e4m3_use_256", "all")
    scopes = [str(options.get(name, default)) for name, default in given]
    if unknown := [scope for scope in scopes if scope not in _SCOPES]:
        raise ValueError(
            f"NVFP4BlockScaling: a scope of nvfp4_4over6 {unknown[0]}: one of {', '.join(_SCOPES)}"
        )
    selects, narrow = (_SCOPES[scope] for scope in scopes)
    criterion = str(options.get("nvfp4_4over6_err_mode", "MAE")).lower()

    def changed(quant: Quant, operand: str, rows: bool) -> Quant:
        outer = Outer(
            granularity="row" if rows else "tensor",
            bound=256.0 if operand in selects and operand in narrow else 448.0,
        )
        select = Select(among="scales", criterion=criterion) if operand in selects else None
        square = operand == "w" and options.quantised_by(
            "fwd_weight", "fp4_2d_quantization", "2d_quantization"
        )
        return quant.model_copy(
            update={"outer": outer, "select": select, "block": "16x16" if square else "1x16"}
        )

    base = nvfp4().products
    assert base.fprop.x is not None
    assert base.fprop.w is not None
    assert base.dgrad.g is not None
    x, w = changed(base.fprop.x, "x", rows=False), changed(base.fprop.w, "w", rows=False)
    by_rows = bool(options.get("row_scaled_activation", False))
    stochastic = options.quantised_by("bwd_grad", "stochastic_rounding", "stochastic_rounding")
    g = base.dgrad.g.model_copy(update={"rounding": "stochastic" if stochastic else "nearest"})
    rotated = [
        options.quantised_by(tensor, "random_hadamard_transform", "rht") for tensor in ("fwd_inp", "bwd_grad")
    ]
    if len(set(rotated)) > 1:
        raise ValueError("NVFP4BlockScaling rotates one of wgrad's operands alone, which is no product")
    forward = base.fprop.model_copy(
        update={"x": changed(base.fprop.x, "x", rows=True) if by_rows else x, "w": w}
    )
    wgrad = Wgrad(g=g, x=x, hadamard=base.wgrad.hadamard if all(rotated) else None)
    return Recipe(fprop=forward, dgrad=Dgrad(g=g, w=w), wgrad=wgrad)


def _mxfp8(options: _Options) -> Recipe:
    recipe = _with_gradients(mxfp8(), options)
    if not options.get("enable_2d_quantization", False):
        return recipe
    square = {"block": "32x32"}
    fprop, dgrad = recipe.fprop, recipe.dgrad
    assert fprop.w is not None
    assert dgrad.w is not None
    return recipe.model_copy(
        update={
            "fprop": fprop.model_copy(update={"w": fprop.w.model_copy(update=square)}),
            "dgrad": dgrad.model_copy(update={"w": dgrad.w.model_copy(update=square)}),
        }
    )


def _fp8_current(options: _Options) -> Recipe:
    return _with_gradients(fp8_current(), options)


def _fp8_delayed(options: _Options) -> Recipe:
    algorithm = options.get("amax_compute_algo", "max")
    if (
        algorithm not in ("max", "most_recent")
        or options.get("scaling_factor_compute_algo", None) is not None
    ):
        raise ValueError("DelayedScaling with functions of one's own for amax or scale is not emulated")
    length = 1 if algorithm == "most_recent" else options.get("amax_history_len", 1024)
    return _with_gradients(fp8_delayed(), options, statistic=f"delayed:{length}")


def _with_gradients(recipe: Recipe, options: _Options, **outer: str) -> Recipe:
    """Return a recipe whose gradients have the object's FP8 format, and whose outer scales are changed."""
    formats = {"E4M3": "e4m3", "HYBRID": "e5m2"}
    word = str(options.get("fp8_format", "HYBRID"))
    if word not in formats:
        raise ValueError(f"fp8_format {word}: E4M3 or HYBRID")

    def changed(slot: str, quant: Quant) -> Quant:
        update: dict[str, object] = {"element": formats[word]} if slot.endswith(".g") else {}
        if outer and quant.outer:
            update["outer"] = quant.outer.model_copy(update=outer)
        return quant.model_copy(update=update)

    products = recipe.products
    for slot, quant in recipe.quantised():
        product, operand = slot.split(".")
        one = getattr(products, product).model_copy(update={operand: changed(slot, quant)})
        products = products.model_copy(update={product: one})
    return recipe.model_copy(
        update={"fprop": products.fprop, "dgrad": products.dgrad, "wgrad": products.wgrad}
    )


def _without_backward(recipe: Recipe, options: _Options, name: str) -> Recipe:
    override = options.get("backward_override", None)
    if override is None:
        return recipe
    if override not in ("high_precision", "dequantized"):
        raise ValueError(f"{name}.backward_override {override}: None, high_precision or dequantized")
    copied = override == "dequantized"
    return recipe.model_copy(update={"dgrad": Dgrad(dequantised=copied), "wgrad": Wgrad(dequantised=copied)})


def _check(recipe: Recipe, options: _Options, name: str) -> None:
    """Raise ValueError if the recipe, given back to TE, is another object than it was read from."""
    try:
        description = te_recipe(recipe.products)
    except ValueError as error:
        raise ValueError(f"{name}: the emulation has not this combination of options: {error}") from None
    if name == "DelayedScaling":  # TE's own class advances its histories by autocast region: not used here
        return
    found: Mapping[str, object] = dict(description.options) if isinstance(description, Builtin) else {}
    idle = {option for option in found if option.startswith("disable_")}  # QParams decide about them
    if options.get("nvfp4_4over6", "none") == "none":
        idle |= {"nvfp4_4over6_e4m3_use_256", "nvfp4_4over6_err_mode"}
    if options.get("backward_override", None):
        idle.add("fp8_format")  # of gradients, which are not quantised
    differ = {
        option: options.get(option, value)
        for option, value in found.items()
        if option not in idle and options.get(option, value) != value
    }
    if differ or not found:
        said = ", ".join(f"{option}={value}" for option, value in differ.items()) or "its options"
        raise ValueError(f"{name}: {said} in this combination is not emulated")


_READERS: dict[str, Callable[[_Options], Recipe]] = {
    "NVFP4BlockScaling": _nvfp4,
    "MXFP8BlockScaling": _mxfp8,
    "Float8CurrentScaling": _fp8_current,
    "DelayedScaling": _fp8_delayed,
}
