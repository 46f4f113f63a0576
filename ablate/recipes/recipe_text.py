"""A recipe in words: its operands, products, layers and schedule, and what differs in two recipes."""

import json
from collections.abc import Iterator, Mapping, Sequence

from ablate.files import Json
from ablate.numerics.choices import CANDIDATES, GEMM_OUTPUTS
from ablate.numerics.own import Own, identified, shown
from ablate.numerics.spec import Quant
from ablate.recipes.cells import fp4_share
from ablate.recipes.changes import changes
from ablate.recipes.layers import Layer
from ablate.recipes.recipe import Dgrad, Fprop, Products, Recipe, Wgrad

EQUATIONS = {"fprop": "y = x w^T", "dgrad": "dx = g w", "wgrad": "dw = g^T x"}
OPERAND = ("operand", "element", "block", "block scale", "outer scale", "rounding", "and")
"""Heads of a table of operands: the name, and `cells`."""


def block_scale(quant: Quant) -> str:
    """Return `e4m3`, `e8m0 floor`, ..."""
    if quant.scale is None:
        return "none"
    how = "" if quant.scale.rounding == "nearest" else f" {shown(quant.scale.rounding)}"
    zero = "" if quant.scale.zero == "zero" else f", zero as {quant.scale.zero}"
    lengths = " and ".join(map(str, quant.scale.micro_exponents or ()))
    return f"{quant.scale.format}{how}{zero}{f', one bit for every {lengths}' if lengths else ''}"


def outer_scale(quant: Quant) -> str:
    """Return `tensor amax to 448`, `none`, ..."""
    outer = quant.outer
    if outer is None:
        return "none"
    return (
        f"{outer.granularity} {shown(outer.statistic)}{'' if quant.scale is None else f' to {outer.bound:g}'}"
    )


def rounding(quant: Quant) -> str:
    """Return `nearest`, `stochastic, 8 bits`, ..."""
    word = quant.own or quant.rounding
    bits = f", {quant.bits} bits" if word == "stochastic" or (isinstance(word, Own) and word.draws) else ""
    return f"{shown(word)}{bits}"


def extras(quant: Quant) -> Iterator[str]:
    """Yield short descriptions of everything else that a quantiser does."""
    if quant.select:
        among = CANDIDATES[quant.select.among].format(*sorted(quant.select.map_to))
        yield f"{among} by {quant.select.criterion}"
    clip_range = quant.range
    if clip_range.statistic != "amax":
        yield f"range {shown(clip_range.statistic)}"
    for name, value, usual in (
        ("to", clip_range.map_to, None),
        ("headroom", clip_range.headroom, 1),
        ("prescale", clip_range.prescale, 1),
        ("scale halved below", quant.scale and quant.scale.halve_below, None),
    ):
        if value != usual:
            yield f"{name} {value:.4g}"
    if quant.from_forward:
        yield "from the forward copy" + (" in bf16" if quant.source == "forward_bf16" else "")
    if quant.transform:
        changed = quant.transform.model_dump(exclude_defaults=True)
        yield "takes out " + ", ".join(
            f"{key} {value}" if value is not True else key for key, value in changed.items()
        )
    if quant.altered:
        yield f"error x {quant.error.times:g}" + ", permuted" * quant.error.permuted
    if slope := quant.estimator:
        yield slope if isinstance(slope, str) else f"DGE k={slope.k:g}, clip {slope.clip:g}"


def cells(quant: Quant | None, dtype: str) -> tuple[str, ...]:
    """Return the properties of an operand, by `OPERAND`; of one that is not quantised its type alone."""
    if quant is None:
        return (dtype,)
    scales = block_scale(quant), outer_scale(quant)
    return (shown(quant.element), quant.block or "-", *scales, rounding(quant), ", ".join(extras(quant)))


def outline(product: Fprop | Dgrad | Wgrad) -> str:
    """Return a description of the rotation and the output type of a product."""
    hadamard = product.hadamard
    turned = (
        "not rotated"
        if hadamard is None
        else f"both operands rotated by {hadamard.size}, signs {hadamard.signs}"
    )
    if getattr(product, "dequantised", False):
        turned = "in bf16, on the forward copy dequantised"
    return (
        f"{turned}; {f'dw in {product.dw}' if isinstance(product, Wgrad) else GEMM_OUTPUTS[product.gemm][1]}"
    )


def rest(recipe: Recipe) -> Iterator[str]:
    """Yield one line for each layer rule, phase and other field that differs from the default."""
    for number, rule in enumerate(recipe.layers.rules):
        yield f"layers.rules.{number}, {rule.match}: {used(rule.use)}"
    for name in ("layers", "weights"):
        spec, usual = getattr(recipe, name), type(getattr(recipe, name))()
        changed = (
            field
            for field in type(spec).model_fields
            if field != "rules" and getattr(spec, field) != getattr(usual, field)
        )
        yield from (f"{name}.{field}: {_word(spec.model_dump(mode='json')[field])}" for field in changed)
    for phase in recipe.schedule:
        yield f"from {phase.start} on, {phase.slots} products: {used(phase.use)}"


def used(products: Products | None) -> str:
    """Return `high precision`, or the element type of each quantised operand."""
    if products is None or products.plain:
        return "high precision"
    return ", ".join(f"{slot} {quant.element}" for slot, quant in products.quantised())


def placements(recipe: Recipe, layers: Sequence[Layer]) -> Iterator[str]:
    """Yield one line for each part of a recipe that selects layers, their number and what they use; then the
    share of FLOPs in FP4, if there is any."""
    counts = recipe.layers.model_dump(exclude={"rules"}, exclude_defaults=True)
    for decider, products, selected in recipe.placements(layers):
        if isinstance(decider, int):
            what = f"layers.rules.{decider}, {recipe.layers.rules[decider].match}"
        else:
            what = (
                "as the recipe says"
                if decider == "own"
                else ", ".join(f"layers.{name} {n:g}" for name, n in counts.items())
            )
        yield f"{what}: {len(selected)} of {len(layers)} layers" + (
            "" if decider == "own" else f", {used(products)}"
        )
    if share := fp4_share(recipe, layers):
        yield f"{100 * share:.3g} % of these layers' FLOPs in FP4"


def differences(one: Mapping[str, Json], other: Mapping[str, Json]) -> Iterator[tuple[str, str, str]]:
    """Yield (path, value, other value) for each difference of two dumps; a disabled part is one line."""
    for path, a, b in changes(one, other):
        if identified(a) != identified(b):
            yield path, _word(a), _word(b)


def _word(value: Json) -> str:
    if value is None:
        return "off"
    if isinstance(value, dict):
        main = ("element", "block", "rounding", "own")
        fields = {key: value[key] for key in main} if "element" in value else value
        return ", ".join(f"{key} {_word(inner)}" for key, inner in fields.items() if inner is not None)
    return shown(value) if isinstance(value, str) else json.dumps(value)
