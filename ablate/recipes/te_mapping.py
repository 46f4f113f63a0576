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
is rounded to something similar. Without a refusal, `te_recipe` describes the products. If one of TE's own
recipe classes computes just these, the description is that class and its arguments (`Builtin`); otherwise it
is a quantiser for each copy of each tensor (`Custom`).

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
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Literal

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

Family = Literal["high", "fp8", "fp8_delayed", "mxfp8", "nvfp4"]
TENSORS = {
    "input": ("fprop.x", "wgrad.x"),
    "weight": ("fprop.w", "dgrad.w"),
    "grad_output": ("dgrad.g", "wgrad.g"),
}
"""Slots of each tensor's rowwise and columnwise copy, keyed by TE's name of the tensor."""
TE_ELEMENTS = {"e2m1": "kFloat4E2M1", "e4m3": "kFloat8E4M3", "e5m2": "kFloat8E5M2"}
"""TE's type of each element that it multiplies."""
_TE = "Transformer Engine"
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
    """Return the TE recipe that computes the products of a layer at one step: a `Builtin` if one of TE's own
    classes computes exactly this, else a `Custom`; ValueError with all of `refusals` if TE has none.
    """
    if reasons := all_of(refusals(products)):
        raise ValueError(reasons)
    if products.plain:
        return None
    if builtin := _builtins().get(_read(canonical(products))):
        return builtin
    copies = {}
    for tensor, (row, column) in TENSORS.items():
        quant = products.slot(column)
        again = column in FORWARD_COPY and quant is not None and quant.from_forward
        again = again or products.dequantised(column)
        copies[tensor] = Copies(_format(products, row), _format(products, column), again)
    return Custom(**copies)


def _read(products: Products) -> Products:
    """Return products with those fields of theirs alone that this file reads."""
    changed: dict[str, object] = {
        "wgrad.hadamard": (turn := products.wgrad.hadamard) and Hadamard(size=turn.size, signs=turn.signs),
        "dgrad.dequantised": products.dgrad.dequantised,
        "wgrad.dequantised": products.wgrad.dequantised,
    }
    for slot, quant in products.quantised():
        scale, select = quant.scale, quant.select
        if outer := quant.outer:
            outer = Outer(granularity=outer.granularity, statistic=outer.statistic, bound=outer.bound)
        changed[slot] = Quant(
            element=quant.element,
            block=quant.block,
            scale=scale and BlockScale(format=scale.format, rounding=scale.rounding),
            outer=outer,
            rounding=quant.rounding,
            bits=quant.bits,
            select=select and Select(among=select.among, criterion=select.criterion),
            source=quant.source,
        )
    return Products().changed(changed)


def canonical(products: Products) -> Products:
    """Return the products as `products_of` has them: a forward copy that is exact in bf16
    is taken in bf16, which changes no bit.
    """
    for slot, forward in FORWARD_COPY.items():
        again, copied = products.slot(slot), products.slot(forward)
        if again and again.source == "forward" and copied and _exact_in_bf16(copied):
            products = products.changed({f"{slot}.source": "forward_bf16"})
    return products


def families(products: Iterable[Products]) -> set[Family]:
    """Return the families of formats of products without `refusals`; of a recipe, give it its `variants`."""
    return {_family(quant) for each in products for _, quant in each.quantised()}


def recipe_refusals(recipe: Recipe, weights: bool = True) -> Iterator[str]:
    """Yield every reason why TE cannot train by this recipe in some layer at some step, each once, with the
    field's path first: `wgrad.g.bits 4: ...`. Without `weights`, what is about weight rules is left out.
    """
    for name in ("osci_reset", "q_ema", "q_ramping") if weights else ():
        if getattr(recipe.weights, name):
            yield f"weights.{name}: the engine does not see the quantised weights that it looks at"
    if weights and recipe.weights.noise:
        yield "weights.noise: Transformer Engine has no noise on norms; leave it out"
    yield from dict.fromkeys(reason for products in variants(recipe) for reason in refusals(products))


def variants(recipe: Recipe) -> Iterator[Products]:
    """Return all products that may be in force in some layer at some step, each once.

    Phases may overlap in any combination, and a later phase overrides an earlier one.
    """
    states = [recipe.products, *(rule.use for rule in recipe.layers.rules if rule.use)]
    for phase in recipe.schedule:
        states += [products.replaced(phase.slots, phase.use or Products()) for products in states]
        states = [*dict.fromkeys(states)]  # else each phase doubles the list
    return iter(dict.fromkeys(states))


def refusals(products: Products) -> Iterator[str]:
    """Yield every reason why TE cannot compute these products, each beginning with the field's path.

    If there is none, every field that this file does not read is a reason, unless it has its default: one
    that it does not know is never dropped.
    """
    if named := [*_named_refusals(products)]:
        yield from named
        return
    ours, unused = canonical(products), ("gemm", "dw") if products.plain else ()
    for path, value, _ in changes(as_data(ours), as_data(_read(ours))):
        if path.rpartition(".")[2] not in unused:  # TE does not compute a layer that quantises nothing
            yield f"{path} {as_word(value)}: {_TE} has nothing that this is translated to"


def _named_refusals(products: Products) -> Iterator[str]:
    for slot, quant in products.quantised():
        own = (f"{path} {word}: {_TE} cannot call your function" for path, word in quant.owned)
        yield from (Reason(slot, f".{why}") for why in [*own] or _quant_refusals(slot, quant))
    if products.plain:  # TE does not compute a layer that quantises nothing
        return
    for name in DIRECTIONS["all"]:
        yield from (Reason(name, why) for why in _product_refusals(name, getattr(products, name)))
    yield from _together(products)
    for slot, forward in FORWARD_COPY.items():
        again, copied = products.slot(slot), products.slot(forward)
        if again and again.source == "forward" and copied and not _exact_in_bf16(copied):
            why = f"{_TE} rounds the dequantised copy to bf16 before it quantises it again"
            yield f"{slot}.source forward: {why}; write forward_bf16"


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
        yield f"element {quant.element}: {_TE} multiplies {', '.join(others)} and {last}"
        return
    four, limits = quant.element == "e2m1", quant.range
    refusing = {"nvfp4": _nvfp4_refusals, "mxfp8": _mxfp8_refusals}
    yield from refusing.get(_family(quant), _fp8_refusals)(slot, quant)
    if not four and quant.rounding != "nearest":
        yield f"rounding {quant.rounding}: {_TE} rounds FP8 to nearest"
    if quant.transform is not None:
        yield f"transform: {_TE} takes nothing out of an operand; write null"
    if quant.estimator is not None:
        yield f"estimator: {_TE} passes the gradient of a cast straight through; write null"
    if limits.headroom != 1:
        yield f"range.headroom {limits.headroom:g}: {_TE}'s block scale has none; write 1"
    if limits.statistic != "amax" or limits.map_to not in (None, 6.0 if four else None):
        yield (
            f"range: {_TE} maps a block's largest magnitude to the element's maximum;"
            " leave statistic and map_to out"
        )
    if limits.prescale != 1:
        yield f"range.prescale {limits.prescale:g}: {_TE} has no such factor; write 1"


def _nvfp4_refusals(slot: str, quant: Quant) -> Iterator[str]:
    weight, scale, outer, select = slot.endswith(".w"), quant.scale, quant.outer, quant.select
    if quant.block not in ("1x16", "16x16"):
        yield f"block {quant.block}: {_TE}'s E2M1 has blocks of 1x16 or 16x16, with E4M3 scales"
    elif scale is not None and scale != BlockScale():
        had = f"{scale.format} by {scale.rounding}"
        yield f"scale: {_TE}'s E2M1 has E4M3 block scales, rounded to nearest, not {had}"
    elif outer is None:
        yield "outer: NVFP4 has one fp32 scale a tensor; give it one"
    if quant.block == "16x16" and not weight:
        yield f"block 16x16: {_TE} has square blocks for weights alone; use 1x16"
    if outer is not None:
        yield from _outer_refusals(slot, outer, select is not None)
    if quant.rounding not in ("nearest", "stochastic"):
        yield f"rounding {quant.rounding}: {_TE} rounds to nearest or stochastically"
    if quant.rounding == "stochastic" and quant.bits != 8:
        yield f"bits {quant.bits}: {_TE} draws a number of bits of its own; 8 stands for that"
    if quant.rounding == "stochastic" and weight:
        yield f"rounding stochastic: {_TE} has it for gradients and activations; use nearest for weights"
    if select and (select.among != "scales" or select.criterion == "absmax"):
        yield f"select: {_TE} selects among scales, by mse or mae"
    elif select and select.map_to != (6.0, 4.0):
        yield f"select.map_to: {_TE} maps a block's largest magnitude to 6 or to 4; leave it out"
    if select and slot.endswith(".g"):
        yield f"select: {_TE} never applies Four Over Six to gradients"


def _outer_refusals(slot: str, outer: Outer, selects: bool) -> Iterator[str]:
    statistic, granularity = f"outer.statistic {outer.statistic}", f"outer.granularity {outer.granularity}"
    if tag(outer.statistic) == "percentile":
        yield f"{statistic}: {_TE} scales by the largest magnitude; the nearest is amax"
    elif outer.statistic != "amax":
        yield f"{statistic}: {_TE} takes an E2M1 tensor's own amax; the nearest is amax"
    if outer.granularity == "block:128":
        yield f"{granularity}: {_TE} has one fp32 scale a tensor; use tensor"
    if tag(outer.granularity) == "rows":
        some = "or one a row of the forward pass's activations"
        yield f"{granularity}: {_TE} has one fp32 scale a tensor, {some}; use tensor"
    if outer.granularity == "row" and slot != "fprop.x":
        yield f"{granularity}: {_TE} scales only the forward pass's activations by rows; use tensor here"
    if outer.bound != 448 and not (selects and outer.bound == 256):
        yield f"outer.bound {outer.bound:g}: {_TE} has 448, and 256 if it selects among scales"


def _mxfp8_refusals(slot: str, quant: Quant) -> Iterator[str]:
    scale = quant.scale
    if quant.block != "1x32" and not (quant.block == "32x32" and slot.endswith(".w")):
        has = f"{_TE}'s {quant.element} has blocks of 1x32 (weights: 32x32 too)"
        yield f"block {quant.block}: {has}, or one scale a tensor"
    if scale is not None and scale.halve_below is not None:
        yield f"scale.halve_below: {_TE} halves no block scale; leave it out"
    if scale is None or scale.format != "e8m0" or scale.rounding != "ceil":
        yield f"scale: MXFP8 has e8m0 block scales, which {_TE} rounds by ceil"
    if quant.outer is not None:
        yield "outer: MXFP8 has no scale beside its blocks'; write null"


def _fp8_refusals(slot: str, quant: Quant) -> Iterator[str]:
    outer = quant.outer
    if outer is None or outer.granularity != "tensor" or tag(outer.statistic) not in ("amax", "delayed"):
        yield (
            f"outer: {_TE}'s FP8 has one scale a tensor, from its present amax (amax) or from earlier steps"
            " (delayed:n)"
        )


def _product_refusals(name: str, product: Product) -> Iterator[str]:
    x, w = (getattr(product, operand) for operand in product.operands)
    if (gemm := getattr(product, "gemm", "bf16_out")) != "bf16_out":
        yield f".gemm {gemm}: {_TE}'s layer returns bf16; write bf16_out"
    if getattr(product, "dw", "bf16") != "bf16":
        yield (
            ".dw fp32: not yet on this engine, whose weight gradients leave the product in bf16"
            " and add up in fp32; write bf16"
        )
    kinds, hadamard = {_family(x), _family(w)}, product.hadamard
    if len(kinds) > 1:
        slots = " and ".join(f"{name}.{operand}" for operand in product.operands)
        why = f"{_TE} multiplies two operands of one kind, and {slots} differ"
        yield f": {why}: quantise both alike or neither"
    if hadamard is None:
        return
    if name != "wgrad":
        yield f".hadamard: {_TE} rotates wgrad alone; write null"
    elif kinds != {"nvfp4"}:
        yield f".hadamard: {_TE} rotates NVFP4 operands alone; write null"
    elif hadamard.size != 16 or hadamard.signs not in ("fixed", "none"):
        yield f".hadamard: {_TE} rotates by 16 with its fixed signs, or none"
    elif x.select or w.select:
        why = f"{_TE} has no Four Over Six together with a Hadamard rotation"
        yield f".x.select: {why}; leave out one of them"


def _together(products: Products) -> Iterator[str]:
    """Yield what TE does not have in several slots at once, though it has each alone."""
    x, w = products.fprop.x, products.fprop.w
    if x and x.outer and x.outer.granularity == "row" and (x.select or (w and w.block != "1x16")):
        yield f"fprop.x.outer.granularity row: {_TE} has it with 1x16 weights and without select"
    for name in DIRECTIONS["all"]:
        operands = [getattr(getattr(products, name), operand) for operand in getattr(products, name).operands]
        if all(quant is not None and quant.element == "e5m2" for quant in operands):
            yield f"{name}: tensor cores multiply no e5m2 with e5m2; let one operand be e4m3"
    for first, second in TENSORS.values():
        row, column = products.slot(first), products.slot(second)
        kinds = {_family(row), _family(column)}
        if row and column and kinds == {"fp8"} and row.element != column.element:
            had = f"{second}.element {column.element}"
            yield f"{had}: with one scale a tensor {_TE} has one copy, and {first} differs"
        if "fp8_delayed" in kinds and row != column:
            why = "with delayed scaling both copies of a tensor share one amax history"
            yield f"{second}: {why}; quantise it and {first} alike"


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


def products_of(name: str, options: Mapping[str, object]) -> Products:
    """Return the products that one of TE's classes computes by all its options in OPTIONS, whose values may
    be others, and DelayedScaling by `fp8_format` and `history`, the number of steps.
    """
    fp4 = name == "NVFP4BlockScaling"

    def quant(tensor: str) -> Quant:
        weight, gradient = tensor == "weight", tensor == "grad_output"
        if fp4:
            chosen = tensor in SCOPES[str(options["nvfp4_4over6"])]
            low = chosen and tensor in SCOPES[str(options["nvfp4_4over6_e4m3_use_256"])]
            stochastic = gradient and not options["disable_stochastic_rounding"]
            criterion = str(options["nvfp4_4over6_err_mode"]).lower()
            return Quant(
                block="16x16" if weight and not options["disable_2d_quantization"] else "1x16",
                outer=Outer(bound=256.0 if low else 448.0),
                rounding="stochastic" if stochastic else "nearest",
                select=Select(among="scales", criterion=criterion) if chosen else None,
            )
        element = FORMATS[str(options["fp8_format"])] if gradient else "e4m3"
        if name == "MXFP8BlockScaling":
            block = "32x32" if weight and options.get("enable_2d_quantization") else "1x32"
            scale = BlockScale(format="e8m0", rounding="ceil")
            return Quant(element=element, block=block, scale=scale, outer=None)
        statistic = f"delayed:{options['history']}" if name == "DelayedScaling" else "amax"
        return Quant(element=element, block=None, scale=None, outer=Outer(bound=1.0, statistic=statistic))

    x, w, g = map(quant, TENSORS)
    rows = x.changed({"outer.granularity": "row"}) if fp4 and options["row_scaled_activation"] else x
    if (override := options["backward_override"]) is not None:
        again = override == "dequantized"
        dgrad, wgrad = Dgrad(dequantised=again), Wgrad(dequantised=again)
    else:
        rotation = Hadamard() if fp4 and not options["disable_rht"] else None
        dgrad, wgrad = Dgrad(g=g, w=w), Wgrad(g=g, x=x, hadamard=rotation)
    return Products(fprop=Fprop(x=rows, w=w), dgrad=dgrad, wgrad=wgrad)


@cache
def _builtins() -> Mapping[Products, Builtin]:
    """Return `products_of`, inverted: the class that computes given products.

    TE scales activations by rows in a forward pass alone, and without Four Over Six. DelayedScaling is left
    out: it advances its histories with each autocast region, not once a step.
    """
    found: dict[Products, Builtin] = {}
    for name, values in OPTIONS.items():
        for chosen in product(*values.values()):
            options = dict(zip(values, chosen, strict=True))
            alone = options.get("backward_override") and options.get("nvfp4_4over6") == "none"
            if alone or not options.get("row_scaled_activation"):
                found.setdefault(products_of(name, options), Builtin(name, tuple(options.items())))
    return found
