"""Grouped products of all experts of a layer in few calls: `covers`, `forward` and `backward`.

The problem. A layer of 64 experts takes 640 casts and 384 products a step, each of a few thousand numbers. As
calls of separate layers they spend more time in Python than in arithmetic.

The idea. Tokens of all experts lie in one matrix, each expert's padded to whole blocks of 16 rows, and the
weights in another. One call of a compiled kernel for each expert writes into one result, the tensor scales of
all experts are one vector, and each product is written in its place. The numbers are those of
expert_layers.GroupedCall, which is the loop over layers, bit for bit.

Covered: NVIDIA's forms on a CPU, with products that write bf16, in the shape of preset nvfp4 and its variants
(`covers`). All else takes the loop: telemetry, rotations with drawn signs, other formats, and GPUs, where one
launch quantises an operand of all experts before it.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ablate.engines.emulated_layer import EmulatedLinear
from ablate.numerics.choices import SIGNS
from ablate.numerics.hadamard import signs
from ablate.numerics.kernels import builds, cpu, cuda, forms
from ablate.numerics.product import NATIVE_MODE, mode, multiplies_bf16
from ablate.numerics.quantize import Operand
from ablate.numerics.spec import Quant
from ablate.recipes.recipe import SLOTS, Products


class Kept(NamedTuple):
    """Tensors that the backward pass needs: padded rows of x, and weights in bf16 or as values of fprop."""

    rows: Tensor
    weights: Tensor
    amax: Tensor
    """Largest magnitude of each expert's weight, fp32 [experts]."""


def covers(layers: Sequence[EmulatedLinear], rows: Tensor) -> bool:
    """Return True if `forward` and `backward` compute this call."""
    first = layers[0]
    products = first.products
    return (
        rows.device.type == "cpu"
        and _covers(products)
        and first.in_features % 16 == first.out_features % 16 == 0
        and all((layer.products is products or layer.products == products) for layer in layers)
        and all(layer.target is None for layer in layers)
        and mode() == NATIVE_MODE  # a mode that the CPU lacks may add in an order of the operands' layout
        and builds.build() is not None
    )


@lru_cache(maxsize=256)
def _covers(products: Products) -> bool:
    turn = products.wgrad.hadamard
    quants = dict(products.quantised())
    if len(quants) < len(SLOTS) or products.fprop.hadamard or products.dgrad.hadamard:
        return False
    if turn and (turn.size != 16 or SIGNS[turn.signs].drawn):
        return False
    square = {slot: quants[slot].block == "16x16" for slot in SLOTS}
    weights = {"fprop.w", "dgrad.w"}
    return (
        all(_plain(quant) for quant in quants.values())
        and all(slot in weights for slot in SLOTS if square[slot])
        and square["fprop.w"] == square["dgrad.w"]
        and (not square["fprop.w"] or quants["fprop.w"] == quants["dgrad.w"])
        and not any(products.dequantised(slot) for slot in SLOTS)
        and products.fprop.gemm == products.dgrad.gemm == "bf16_out"
    )


def _plain(quant: Quant) -> bool:
    return (
        forms.nvidia(quant)
        and quant.outer is not None
        and quant.outer.statistic == "amax"
        and not quant.from_forward
        and quant.estimator is None
        and quant.transform is None
        and not quant.wide
    )


def forward(
    layers: Sequence[EmulatedLinear], rows: Tensor, weights: Tensor, counts: Sequence[int]
) -> tuple[Tensor, Kept] | None:
    """Compute fprop of all experts: y [rows, out] in the dtype of `rows`, and what `backward` needs; None if
    an operand is not finite. `layers` are one of each expert (`covers` holds), `rows` tokens sorted by expert
    [rows, in], `counts` the rows of each, and the weights [experts, out, in]."""
    quants = dict(layers[0].products.quantised())
    x, w = _padded(rows, counts), weights.to(torch.bfloat16).contiguous()
    cast = _cast(layers, "fprop.x", quants["fprop.x"], x, _spans(counts, 16), counts)
    high, wide = w.shape[1:]
    flat, each = w.view(-1, wide), [(number * high, (number + 1) * high) for number in range(len(layers))]
    used = [count > 0 for count in counts]
    held = _cast(layers, "fprop.w", quants["fprop.w"], flat, each, [high * on for on in used])
    if cast is None or held is None:
        return None
    (left, amax), (right, of_weights) = cast, held
    _observe(layers, "fprop.x", amax, used)
    _observe(layers, "fprop.w", of_weights, used)
    values = right.view(w.shape)
    y = _by_expert(left, values.mT, _factors(amax, of_weights, quants["fprop.x"], quants["fprop.w"]), counts)
    square = quants["fprop.w"].block == "16x16"
    return y.to(rows.dtype), Kept(x, values if square else w, of_weights)


def backward(
    layers: Sequence[EmulatedLinear],
    kept: Kept,
    dy: Tensor,
    counts: Sequence[int],
    needs: Sequence[bool],
    products: Products,
) -> tuple[Tensor | None, Tensor | None] | None:
    """Compute dgrad and wgrad of all experts; None if an operand is not finite.

    Return dx, bf16 [rows, in], and dw [experts, out, in] in its output type; None for one that is not needed.
    `layers`, `counts` and `products` are those of `forward`, `kept` what it kept, and `dy` the gradient of
    its result [rows, out].
    """
    quants = dict(products.quantised())
    places = list(_spans(counts, 16))
    g = _padded(dy, counts)
    experts, high, wide = kept.weights.shape
    dx = dw = None
    seen: list[tuple[str, Tensor]] = []
    if needs[0]:
        cast = _cast(layers, "dgrad.g", quants["dgrad.g"], g, places, counts)
        if cast is None:
            return None
        left, amax = cast
        right, of_weights = kept.weights, kept.amax
        if quants["dgrad.w"].block != "16x16":
            each = [(number * high, (number + 1) * high) for number in range(experts)]
            sizes = [high * (count > 0) for count in counts]
            held = _cast(layers, "dgrad.w", quants["dgrad.w"], right.view(-1, wide), each, sizes, across=True)
            if held is None:
                return None
            right, of_weights = held[0].view(right.shape), held[1]
        seen += ("dgrad.g", amax), ("dgrad.w", of_weights)
        dx = _by_expert(left, right, _factors(amax, of_weights, quants["dgrad.g"], quants["dgrad.w"]), counts)
    if needs[1]:
        turn = products.wgrad.hadamard
        word = None if turn is None else cuda.sign_word(signs(turn, torch.device("cpu")))
        sizes = [end - begin for begin, end in places]
        cast = _cast(layers, "wgrad.g", quants["wgrad.g"], g, places, sizes, across=True, word=word)
        other = _cast(layers, "wgrad.x", quants["wgrad.x"], kept.rows, places, sizes, across=True, word=word)
        if cast is None or other is None:
            return None
        (of_g, amax), (of_x, amaxes) = cast, other
        seen += ("wgrad.g", amax), ("wgrad.x", amaxes)
        alpha = _factors(amax, amaxes, quants["wgrad.g"], quants["wgrad.x"])
        exact = products.wgrad.dw == "fp32"
        left, right = (values.to(torch.float32) if exact else values for values in (of_g, of_x))
        dw, factors = torch.zeros(experts, high, wide, dtype=left.dtype), alpha.tolist()
        for number, (begin, end) in enumerate(places):
            if begin < end and exact:
                torch.mm(left[begin:end].t(), right[begin:end], out=dw[number])
            elif begin < end:
                _multiply(left[begin:end].t(), right[begin:end], factors[number], dw[number])
        if exact:
            dw.mul_(alpha.view(-1, 1, 1))
    for slot, largest in seen:
        _observe(layers, slot, largest, [count > 0 for count in counts])
    return dx, dw


def _spans(counts: Sequence[int], multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Return first row and end of each expert, whose rows are padded to a multiple."""
    return pairwise(accumulate((count + -count % multiple for count in counts), initial=0))


def _padded(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Return rows in bf16, those of each expert padded with zeros to a multiple of 16."""
    if not any(count % 16 for count in counts):
        return rows.to(torch.bfloat16).contiguous()
    sizes = torch.tensor(counts)
    starts = (sizes + -sizes % 16).cumsum(0) - sizes - -sizes % 16 - (sizes.cumsum(0) - sizes)
    places = torch.arange(len(rows)) + starts.repeat_interleave(sizes)
    whole = torch.zeros(sum(count + -count % 16 for count in counts), rows.shape[1], dtype=torch.bfloat16)
    return whole.index_copy_(0, places, rows.to(torch.bfloat16))


def _cast(
    layers: Sequence[EmulatedLinear],
    slot: str,
    quant: Quant,
    memory: Tensor,
    spans: Sequence[tuple[int, int]] | Iterator[tuple[int, int]],
    sizes: Sequence[int],
    across: bool = False,
    word: int | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Quantise each expert's rows; None if one is not finite.

    `memory` is bf16 [rows, columns], contiguous; `spans` are first row and end of each expert, `sizes` how
    many rows to quantise of each, 0 for none. `across`: blocks run down the columns; `word`: signs of a
    rotation down them. Return values, bf16 like `memory`, and each expert's largest magnitude, fp32
    [experts].
    """
    kernel = "tiles" if quant.block == "16x16" else "columns" if across else "rows"
    parts = [
        cpu.Part(begin, size, layer.where(slot))
        for (begin, _), size, layer in zip(spans, sizes, layers, strict=True)
    ]
    return cpu.quantize_parts(memory, kernel, quant, parts, layers[0].clock, word)


def _observe(layers: Sequence[EmulatedLinear], slot: str, amax: Tensor, used: Sequence[bool]) -> None:
    for layer, largest, on in zip(layers, amax.unbind(), used, strict=True):
        if on:
            layer.observed(slot, largest)


def _factors(amax: Tensor, other: Tensor, first: Quant, second: Quant) -> Tensor:
    """Return the factor of each expert's product, fp32 [experts]: `product.alpha` of each."""
    one = torch.ones(())
    divisor = Operand(one, first, one).divisor * Operand(one, second, one).divisor
    numerator = amax * other
    return numerator / torch.full_like(numerator, divisor)


def _by_expert(left: Tensor, right: Tensor, factors: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the products of each expert's padded rows and its matrix of `right` [experts, in, out], bf16."""
    y = torch.empty(sum(counts), right.shape[2], dtype=torch.bfloat16)
    spans = zip(_spans(counts), _spans(counts, 16), right, factors.tolist(), strict=True)
    for (begin, end), (start, _), matrix, factor in spans:
        if begin < end:
            _multiply(left[start : start + end - begin], matrix, factor, y[begin:end])
    return y


def _multiply(left: Tensor, right: Tensor, factor: float, y: Tensor) -> None:
    """Write factor * left right, rounded once, into y, as `product.product` does."""
    if not multiplies_bf16():
        torch.mul(left.to(torch.float32) @ right.to(torch.float32), factor, out=y)
    elif factor == 0:
        y.zero_()
    else:
        torch.addmm(y, left, right, beta=0, alpha=factor, out=y)
