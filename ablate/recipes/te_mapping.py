"""A recipe's products as Transformer Engine's objects, or the list of fields that TE cannot compute.

The problem. A recipe here sets six operands independently: format, block, scale, rounding, rotation.
Transformer Engine (TE) is configured by tensor instead. For each of a linear layer's three tensors it makes
two copies in one go, one laid out by rows and one by columns, and each copy is an operand of one product:

    tensor        rowwise copy    columnwise copy
    input         fprop.x         wgrad.x
    weight        fprop.w         dgrad.w
    grad_output   dgrad.g         wgrad.g

Many recipes that can be written here have no counterpart there. To run one of those approximately would
give an answer to a question that nobody asked.

The idea. `refusals` yields every field that TE does not have, with the nearest value that it has; nothing
is rounded to something similar. Without a refusal, `te_recipe` describes the products as `Copies` of three
tensors. If one of TE's own recipe classes makes just these copies, the description is that class and its
arguments (`Builtin`); otherwise it is a quantiser for each tensor (`Custom`).

A small example:

    te_recipe(PRESETS["nvfp4"]().products)      Builtin("NVFP4BlockScaling", (("disable_rht", False), ...))
    te_recipe(Products())                       None: nothing is quantised, so TE is not used
    list(refusals(products))                    ["wgrad.g.bits 4: Transformer Engine draws ..."]

Refused: functions of the user's, elements other than E2M1, E4M3 and E5M2, block sizes and scale formats that
tensor cores do not take, rotations but in wgrad, several options at once (`_together`), and weight rules.

The facts are those of Transformer Engine 2.20.2. This file imports neither torch nor TE;
`transformer_engine.py` turns a description into TE's objects.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Literal, TypeVar

from ablate.numerics.spec import BlockScale, Hadamard, Outer, Quant, Select, argument, tag
from ablate.recipes.changes import as_data, as_word, changes
from ablate.recipes.reasons import Reason, all_of
from ablate.recipes.recipe import (
    DIRECTIONS,
    FORWARD_COPY,
    Dgrad,
    Fprop,
    Product,
    Products,
    Recipe,
    Wgrad,
)

AnyProducts = TypeVar("AnyProducts", bound=Products)
Family = Literal["high", "fp8", "fp8_delayed", "mxfp8", "nvfp4"]
TENSORS = {
    "input": ("fprop.x", "wgrad.x"),
    "weight": ("fprop.w", "dgrad.w"),
    "grad_output": ("dgrad.g", "wgrad.g"),
}
"""Slots of each tensor's rowwise and columnwise copy, keyed by TE's name of the tensor."""
TE_ELEMENTS = {"e2m1": "kFloat4E2M1", "e4m3": "kFloat8E4M3", "e5m2": "kFloat8E5M2"}
"""TE's type of each element that it multiplies."""
MULTIPLE = 32
"""Number that tokens, in-features and out-features must each be a multiple of."""


@dataclass(frozen=True)
class CopyFormat:
    """One copy of a tensor, as the arguments of the TE quantiser that makes it."""

    family: Family = "high"
    element: str = ""
    stochastic: bool = False
    square: bool = False
    """16x16 (NVFP4) or 32x32 (MXFP8) blocks."""
    rotated: bool = False
    signs: bool = True
    """True for a rotation with TE's fixed sign vector; False for one without signs."""
    rows: bool = False
    """One fp32 amax per row instead of one per tensor."""
    chosen: str = ""
    """Criterion of Four Over Six in TE's spelling; empty: none."""
    bound: int = 448
    history: int = 0
    """Number of steps whose largest amax gives the scale, under delayed scaling."""


@dataclass(frozen=True)
class Copies:
    """The two copies of a tensor; see TENSORS for the products that they are operands of."""

    row: CopyFormat
    column: CopyFormat
    requantised: bool = False
    """True if the columnwise copy is made from the quantised rowwise copy."""


@dataclass(frozen=True)
class Builtin:
    """One of TE's own recipes."""

    name: str
    """Name of the class in `transformer_engine.common.recipe`."""
    options: tuple[tuple[str, str | bool | int | None], ...]
    """Arguments that are given to the class; it takes the others at their defaults."""


@dataclass(frozen=True)
class Custom:
    """TE's CustomRecipe: a quantiser for each tensor."""

    input: Copies
    weight: Copies
    grad_output: Copies


Description = Builtin | Custom | None
"""Description of a TE recipe; None: nothing is quantised, and TE is not used."""


def te_recipe(products: Products) -> Description:
    """Return the description of the TE recipe that computes these products.

    Args:
        products: the three products of a layer at one step.

    Returns:
        A `Builtin` if one of TE's own classes computes exactly this, else a `Custom`; None for products that
        quantise nothing.

    Raises:
        ValueError: TE has no such recipe; the message has all of `refusals`.
    """
    if reasons := all_of(refusals(products)):
        raise ValueError(reasons)
    if products.plain:
        return None
    custom = _custom(products)
    return _builtins().get(custom, custom)


def products_of(custom: Custom, like: Products | None = None) -> Products:
    """Return the products that TE's quantisers compute: the inverse of `te_recipe`.

    Args:
        custom: quantisers of three tensors.
        like: products whose GEMM types are taken if nothing is quantised, when TE is not used.
    """
    quants: dict[str, Quant | None] = {}
    for tensor, slots in TENSORS.items():
        copies: Copies = getattr(custom, tensor)
        quants[slots[0]] = _quant(copies.row, requantised=False)
        quants[slots[1]] = _quant(copies.column, copies.requantised)
    rotated = custom.input.column.rotated or custom.grad_output.column.rotated
    signs = "fixed" if custom.input.column.signs and custom.grad_output.column.signs else "none"
    made = Products(
        fprop=Fprop(x=quants["fprop.x"], w=quants["fprop.w"]),
        dgrad=Dgrad(
            g=quants["dgrad.g"],
            w=quants["dgrad.w"],
            dequantised=custom.weight.requantised and quants["dgrad.w"] is None,
        ),
        wgrad=Wgrad(
            g=quants["wgrad.g"],
            x=quants["wgrad.x"],
            hadamard=Hadamard(signs=signs) if rotated else None,
            dequantised=custom.input.requantised and quants["wgrad.x"] is None,
        ),
    )
    if like is None or not made.plain:
        return made
    return Products(
        fprop=made.fprop.model_copy(update={"gemm": like.fprop.gemm}),
        dgrad=made.dgrad.model_copy(update={"gemm": like.dgrad.gemm}),
        wgrad=made.wgrad.model_copy(update={"dw": like.wgrad.dw}),
    )


def _quant(copy: CopyFormat, requantised: bool) -> Quant | None:
    """Return the quantiser of one copy; None for high precision."""
    source: Literal["original", "forward_bf16"] = "forward_bf16" if requantised else "original"
    match copy.family:
        case "high":
            return None
        case "nvfp4":
            return Quant(
                block="16x16" if copy.square else "1x16",
                outer=Outer(granularity="row" if copy.rows else "tensor", bound=float(copy.bound)),
                rounding="stochastic" if copy.stochastic else "nearest",
                select=Select(among="scales", criterion=copy.chosen.lower()) if copy.chosen else None,
                source=source,
            )
        case "mxfp8":
            return Quant(
                element=copy.element,
                block="32x32" if copy.square else "1x32",
                scale=BlockScale(format="e8m0", rounding="ceil"),
                outer=None,
                source=source,
            )
    statistic = f"delayed:{copy.history}" if copy.family == "fp8_delayed" else "amax"
    outer = Outer(bound=1.0, statistic=statistic)
    return Quant(element=copy.element, block=None, scale=None, outer=outer, source=source)


def _custom(products: Products) -> Custom:
    copies = {}
    for tensor, (row, column) in TENSORS.items():
        quant = products.slot(column)
        again = column in FORWARD_COPY and quant is not None and quant.from_forward
        again = again or products.dequantised(column)
        copies[tensor] = Copies(_format(products, row), _format(products, column), again)
    return Custom(**copies)


def canonical(products: AnyProducts) -> AnyProducts:
    """Return the products, or a recipe's, as `products_of` writes them: a forward copy that is exact in bf16
    is taken in bf16, which changes no bit.
    """
    for slot, forward in FORWARD_COPY.items():
        again, copied = products.slot(slot), products.slot(forward)
        if again and again.source == "forward" and copied and _exact_in_bf16(copied):
            name, operand = slot.split(".")
            quant = again.model_copy(update={"source": "forward_bf16"})
            product = getattr(products, name).model_copy(update={operand: quant})
            products = products.model_copy(update={name: product})
    return products


def families(products: Iterable[Products]) -> set[Family]:
    """Return the families of formats that products use; give it `variants(recipe)` for those of a recipe.

    Defined only for products without `refusals`.
    """
    return {_family(quant) for each in products for _, quant in each.quantised()}


def recipe_refusals(recipe: Recipe, weights: bool = True) -> Iterator[str]:
    """Yield every reason why TE cannot train by this recipe, each once.

    Args:
        recipe: the recipe with its layer rules, schedule and weight rules; all products are considered that
            may be in force in any layer at any step.
        weights: False to leave out what is about weight rules.

    Yields:
        Sentences that begin with the path of the field, such as `wgrad.g.bits 4: ...`.
    """
    for name in ("osci_reset", "q_ema", "q_ramping") if weights else ():
        if getattr(recipe.weights, name):
            yield f"weights.{name}: the engine does not see the quantised weights that it looks at"
    if weights and recipe.weights.noise:
        yield "weights.noise: Transformer Engine has no noise on norms; leave it out"
    yield from dict.fromkeys(reason for products in variants(recipe) for reason in refusals(products))


def variants(recipe: Recipe) -> Iterator[Products]:
    """Return all products that may be in force in some layer at some step.

    Phases may overlap in any combination, and a later phase overrides an earlier one; so each phase doubles
    the list.
    """
    states = [[recipe.products, *(rule.use for rule in recipe.layers.rules if rule.use)]]
    for phase in recipe.schedule:
        states.append(
            [
                products.replaced(phase.slots, phase.use or Products())
                for earlier in states
                for products in earlier
            ]
        )
    return iter(dict.fromkeys(products for state in states for products in state))


def refusals(products: Products) -> Iterator[str]:
    """Yield every reason why TE cannot compute these products, each beginning with the field's path.

    If there is none, the quantisers that TE would be given are translated back, and every field that does not
    return is a reason: one that this file does not know is never dropped.
    """
    named = [*_named_refusals(products)]
    yield from named
    if not named:
        # Nothing above knows a field that was added to a recipe since: the way back finds it.
        for path, value, _ in changes(
            as_data(canonical(products)), as_data(products_of(_custom(products), products))
        ):
            yield f"{path} {as_word(value)}: Transformer Engine has nothing that this is translated to"


def _named_refusals(products: Products) -> Iterator[str]:
    for slot, quant in products.quantised():
        own = (f"{path} {word}: Transformer Engine cannot call your function" for path, word in quant.owned)
        yield from (Reason(slot, f".{why}") for why in [*own] or _quant_refusals(slot, quant))
    if products.plain:  # TE does not compute a layer that quantises nothing
        return
    for name in DIRECTIONS["all"]:
        yield from (Reason(name, why) for why in _product_refusals(name, getattr(products, name)))
    yield from _together(products)
    for slot, forward in FORWARD_COPY.items():
        again, copied = products.slot(slot), products.slot(forward)
        if again and again.source == "forward" and copied and not _exact_in_bf16(copied):
            yield (
                f"{slot}.source forward: Transformer Engine rounds the dequantised copy to bf16 before it"
                " quantises it again; write forward_bf16"
            )


def _exact_in_bf16(quant: Quant) -> bool:
    """Return True if code times scale is a number of bf16: with scales that are powers of two alone."""
    return quant.outer is None and quant.scale is not None and quant.scale.format == "e8m0"


def _family(quant: Quant | None) -> Family:
    if quant is None:
        return "high"
    if quant.element == "e2m1":
        return "nvfp4"
    if quant.scale is not None:
        return "mxfp8"
    return "fp8_delayed" if quant.outer and tag(quant.outer.statistic) == "delayed" else "fp8"


def _quant_refusals(slot: str, quant: Quant) -> Iterator[str]:
    """Yield what TE does not have of one operand, each beginning with the field."""
    if quant.element not in TE_ELEMENTS:
        *others, last = TE_ELEMENTS
        yield f"element {quant.element}: Transformer Engine multiplies {', '.join(others)} and {last}"
        return
    refusing = {"nvfp4": _nvfp4_refusals, "mxfp8": _mxfp8_refusals}
    yield from refusing.get(_family(quant), _fp8_refusals)(slot, quant)
    if quant.element != "e2m1" and quant.rounding != "nearest":
        yield f"rounding {quant.rounding}: Transformer Engine rounds FP8 to nearest"
    if quant.transform is not None:
        yield "transform: Transformer Engine takes nothing out of an operand; write null"
    if quant.estimator is not None:
        yield "estimator: Transformer Engine passes the gradient of a cast straight through; write null"
    if quant.range.headroom != 1:
        yield f"range.headroom {quant.range.headroom:g}: Transformer Engine's block scale has none; write 1"
    if quant.range.statistic != "amax" or quant.range.map_to not in (
        None,
        6.0 if quant.element == "e2m1" else None,
    ):
        yield (
            "range: Transformer Engine maps a block's largest magnitude to the element's maximum;"
            " leave statistic and map_to out"
        )
    if quant.range.prescale != 1:
        yield f"range.prescale {quant.range.prescale:g}: Transformer Engine has no such factor; write 1"


def _nvfp4_refusals(slot: str, quant: Quant) -> Iterator[str]:
    if quant.block not in ("1x16", "16x16"):
        yield f"block {quant.block}: Transformer Engine's E2M1 has blocks of 1x16 or 16x16, with E4M3 scales"
    elif quant.scale is not None and quant.scale != BlockScale():
        yield (
            "scale: Transformer Engine's E2M1 has E4M3 block scales, rounded to nearest,"
            f" not {quant.scale.format} by {quant.scale.rounding}"
        )
    elif quant.outer is None:
        yield "outer: NVFP4 has one fp32 scale a tensor; give it one"
    if quant.block == "16x16" and not slot.endswith(".w"):
        yield "block 16x16: Transformer Engine has square blocks for weights alone; use 1x16"
    if quant.outer is not None:
        yield from _outer_refusals(slot, quant.outer, quant.select is not None)
    if quant.rounding not in ("nearest", "stochastic"):
        yield f"rounding {quant.rounding}: Transformer Engine rounds to nearest or stochastically"
    if quant.rounding == "stochastic" and quant.bits != 8:
        yield f"bits {quant.bits}: Transformer Engine draws a number of bits of its own; 8 stands for that"
    if quant.rounding == "stochastic" and slot.endswith(".w"):
        yield (
            "rounding stochastic: Transformer Engine has it for gradients and activations;"
            " use nearest for weights"
        )
    if quant.select and (quant.select.among != "scales" or quant.select.criterion == "absmax"):
        yield "select: Transformer Engine selects among scales, by mse or mae"
    elif quant.select and quant.select.map_to != (6.0, 4.0):
        yield "select.map_to: Transformer Engine maps a block's largest magnitude to 6 or to 4; leave it out"
    if quant.select and slot.endswith(".g"):
        yield "select: Transformer Engine never applies Four Over Six to gradients"


def _outer_refusals(slot: str, outer: Outer, selects: bool) -> Iterator[str]:
    if tag(outer.statistic) == "percentile":
        yield (
            f"outer.statistic {outer.statistic}: Transformer Engine scales by the largest magnitude;"
            " the nearest is amax"
        )
    elif outer.statistic != "amax":
        yield (
            f"outer.statistic {outer.statistic}: Transformer Engine takes an E2M1 tensor's own amax;"
            " the nearest is amax"
        )
    if outer.granularity == "block:128":
        yield "outer.granularity block:128: Transformer Engine has one fp32 scale a tensor; use tensor"
    if tag(outer.granularity) == "rows":
        yield (
            f"outer.granularity {outer.granularity}: Transformer Engine has one fp32 scale a tensor,"
            " or one a row of the forward pass's activations; use tensor"
        )
    if outer.granularity == "row" and slot != "fprop.x":
        yield (
            "outer.granularity row: Transformer Engine scales only the forward pass's activations by rows;"
            " use tensor here"
        )
    if outer.bound != 448 and not (selects and outer.bound == 256):
        yield (f"outer.bound {outer.bound:g}: Transformer Engine has 448, and 256 if it selects among scales")


def _mxfp8_refusals(slot: str, quant: Quant) -> Iterator[str]:
    square = quant.block == "32x32" and slot.endswith(".w")
    if quant.block != "1x32" and not square:
        yield (
            f"block {quant.block}: Transformer Engine's {quant.element} has blocks of 1x32"
            " (weights: 32x32 too), or one scale a tensor"
        )
    if quant.scale is not None and quant.scale.halve_below is not None:
        yield "scale.halve_below: Transformer Engine halves no block scale; leave it out"
    if quant.scale is None or quant.scale.format != "e8m0" or quant.scale.rounding != "ceil":
        yield "scale: MXFP8 has e8m0 block scales, which Transformer Engine rounds by ceil"
    if quant.outer is not None:
        yield "outer: MXFP8 has no scale beside its blocks'; write null"


def _fp8_refusals(slot: str, quant: Quant) -> Iterator[str]:
    outer = quant.outer
    if outer is None or outer.granularity != "tensor" or tag(outer.statistic) not in ("amax", "delayed"):
        yield (
            "outer: Transformer Engine's FP8 has one scale a tensor,"
            " from its present amax (amax) or from earlier steps (delayed:n)"
        )


def _product_refusals(name: str, product: Product) -> Iterator[str]:
    x, w = (getattr(product, operand) for operand in product.operands)
    if (gemm := getattr(product, "gemm", "bf16_out")) != "bf16_out":
        yield f".gemm {gemm}: Transformer Engine's layer returns bf16; write bf16_out"
    if getattr(product, "dw", "bf16") != "bf16":
        yield (
            ".dw fp32: not yet on this engine, whose weight gradients leave the product in bf16"
            " and add up in fp32; write bf16"
        )
    kinds = {_family(x), _family(w)}
    if len(kinds) > 1:
        slots = " and ".join(f"{name}.{operand}" for operand in product.operands)
        yield (
            f": Transformer Engine multiplies two operands of one kind, and {slots} differ:"
            " quantise both alike or neither"
        )
    if product.hadamard is None:
        return
    if name != "wgrad":
        yield ".hadamard: Transformer Engine rotates wgrad alone; write null"
    elif kinds != {"nvfp4"}:
        yield ".hadamard: Transformer Engine rotates NVFP4 operands alone; write null"
    elif product.hadamard.size != 16 or product.hadamard.signs not in ("fixed", "none"):
        yield ".hadamard: Transformer Engine rotates by 16 with its fixed signs, or none"
    elif x.select or w.select:
        yield (
            ".x.select: Transformer Engine has no Four Over Six together with a Hadamard rotation;"
            " leave out one of them"
        )


def _together(products: Products) -> Iterator[str]:
    """Yield what TE does not have in several slots at once, though it has each alone."""
    x, w = products.fprop.x, products.fprop.w
    if x and x.outer and x.outer.granularity == "row" and (x.select or (w and w.block != "1x16")):
        yield "fprop.x.outer.granularity row: Transformer Engine has it with 1x16 weights and without select"
    for name in DIRECTIONS["all"]:
        operands = [getattr(getattr(products, name), operand) for operand in getattr(products, name).operands]
        if all(quant is not None and quant.element == "e5m2" for quant in operands):
            yield f"{name}: tensor cores multiply no e5m2 with e5m2; let one operand be e4m3"
    for slots in TENSORS.values():
        row, column = (products.slot(slot) for slot in slots)
        families_of_both = {_family(row), _family(column)}
        if row and column and families_of_both == {"fp8"} and row.element != column.element:
            yield (
                f"{slots[1]}.element {column.element}: with one scale a tensor"
                f" Transformer Engine has one copy, and {slots[0]} differs"
            )
        if "fp8_delayed" in families_of_both and row != column:
            yield (
                f"{slots[1]}: with delayed scaling both copies of a tensor share one amax history;"
                f" quantise it and {slots[0]} alike"
            )


def _format(products: Products, slot: str) -> CopyFormat:
    quant = products.slot(slot)
    if quant is None:
        return CopyFormat()
    family, rotation = _family(quant), getattr(products, slot.partition(".")[0]).hadamard
    outer = quant.outer or Outer()  # MXFP8 has none, and nothing of it is read below
    if family == "nvfp4":
        return CopyFormat(
            family,
            quant.element,
            stochastic=quant.rounding == "stochastic",
            square=quant.block == "16x16",
            rotated=rotation is not None,
            signs=rotation is None or rotation.signs == "fixed",
            rows=outer.granularity == "row",
            chosen=quant.select.criterion.upper() if quant.select else "",
            bound=int(outer.bound),
        )
    history = int(argument(outer.statistic) or 0) if family == "fp8_delayed" else 0
    return CopyFormat(family, quant.element, square=quant.block == "32x32", history=history)


# --- TE's own recipe classes ----------------------------------------------------------------------

OVERRIDES = (None, "high_precision", "dequantized")
SCOPES = {"none": (), "activations": ("input",), "weights": ("weight",), "all": ("input", "weight")}
"""Tensors that an option of Four Over Six concerns."""
FORMATS = {"E4M3": "e4m3", "HYBRID": "e5m2"}
"""Element of gradients by TE's name of a pair of formats."""
OPTIONS: Mapping[str, Mapping[str, tuple[str | bool | None, ...]]] = {
    "NVFP4BlockScaling": {
        "disable_rht": (True, False),
        "disable_stochastic_rounding": (True, False),
        "disable_2d_quantization": (True, False),
        "row_scaled_activation": (False, True),
        "nvfp4_4over6": (*SCOPES,),
        "nvfp4_4over6_e4m3_use_256": ("all", "none"),
        "nvfp4_4over6_err_mode": ("MAE", "MSE"),
        "backward_override": OVERRIDES,
    },
    "MXFP8BlockScaling": {
        "fp8_format": (*FORMATS,),
        "enable_2d_quantization": (False, True),
        "backward_override": OVERRIDES,
    },
    "Float8CurrentScaling": {
        "fp8_format": (*FORMATS,),
        "use_power_2_scales": (False,),
        "backward_override": OVERRIDES,
    },
}
"""Options of TE's classes, with the values that are written. The first is written if it decides nothing."""


def copies_of(name: str, options: Mapping[str, object]) -> Custom:
    """Return the copies that one of TE's classes makes, DelayedScaling included.

    Args:
        name: name of a class in `transformer_engine.common.recipe`.
        options: all its options in OPTIONS, whose values may be others; of DelayedScaling also `history`, the
            number of steps.
    """
    fp4 = name == "NVFP4BlockScaling"
    kinds: Mapping[str, Family] = {"MXFP8BlockScaling": "mxfp8", "DelayedScaling": "fp8_delayed"}

    def format_of(tensor: str) -> CopyFormat:
        if not fp4:
            square = tensor == "weight" and bool(options.get("enable_2d_quantization"))
            element = FORMATS[str(options["fp8_format"])] if tensor == "grad_output" else "e4m3"
            history = int(str(options.get("history", 0)))
            return CopyFormat(kinds.get(name, "fp8"), element, square=square, history=history)
        chosen = tensor in SCOPES[str(options["nvfp4_4over6"])]
        return CopyFormat(
            "nvfp4",
            "e2m1",
            square=tensor == "weight" and not options["disable_2d_quantization"],
            stochastic=tensor == "grad_output" and not options["disable_stochastic_rounding"],
            chosen=str(options["nvfp4_4over6_err_mode"]) if chosen else "",
            bound=256 if chosen and tensor in SCOPES[str(options["nvfp4_4over6_e4m3_use_256"])] else 448,
        )

    def both(tensor: str) -> Copies:
        copy, override = format_of(tensor), options["backward_override"]
        row = replace(copy, rows=fp4 and tensor == "input" and bool(options["row_scaled_activation"]))
        if override is None:
            return Copies(
                row, replace(copy, rotated=fp4 and tensor != "weight" and not options["disable_rht"])
            )
        forward = tensor != "grad_output"
        return Copies(row if forward else CopyFormat(), CopyFormat(), forward and override == "dequantized")

    return Custom(**{tensor: both(tensor) for tensor in TENSORS})


@cache
def _builtins() -> Mapping[Custom, Builtin]:
    """Return `copies_of`, inverted: the class that makes given copies.

    TE scales activations by rows in a forward pass alone, and without Four Over Six. DelayedScaling is left
    out: it advances its histories with each autocast region, not once a step.
    """
    found: dict[Custom, Builtin] = {}
    for name, values in OPTIONS.items():
        for chosen in product(*values.values()):
            options = dict(zip(values, chosen, strict=True))
            alone = options.get("backward_override") and options.get("nvfp4_4over6") == "none"
            if alone or not options.get("row_scaled_activation"):
                found.setdefault(copies_of(name, options), Builtin(name, tuple(options.items())))
    return found
