"""Sums that telemetry takes of quantised operands and of products, for GPUs: device code in Triton, launched
by gpu_sums.py.

Torch's operations take 60 launches and a dozen copies in fp64 for an operand. These kernels read each tensor
once, and each program writes its sums in fp64 to a row of its own, which torch adds in a fixed order. A sum
differs from the reference's in the order of additions alone, but for the scale's part of an error, whose
terms the reference rounds to fp32. Counts, and each block's largest magnitude, are the reference's bits.
"""

import triton
import triton.language as tl

from ablate.numerics.kernels.arithmetic import float_of, magnitude, step_of, to_float
from ablate.numerics.kernels.general_triton import (
    encode,
    factor_of,
    load_tile,
    place_of_tile,
    places,
    scaled,
)

SIZE = 4096
"""Elements of a program of a product."""
CHANGING = ["amax", "factor", "reach", "divisor", "lines"]
"""As in general_triton.py: specialised on, each would be compiled anew."""


@triton.jit
def put(sums, number, value):
    """Store the sum of a tensor."""
    tl.store(sums + number, tl.sum(value.to(tl.float64)))


@triton.jit
def load_blocks(x, first_line, first, lines, length, DOWN: tl.constexpr, FORM: tl.constexpr):
    """Return a tile of x as its blocks."""
    tile = load_tile(x, first_line, first, lines, length, DOWN, FORM)
    return tl.reshape(tile, (FORM.lines // FORM.rows, FORM.rows, FORM.length // FORM.block, FORM.block))


@triton.jit(do_not_specialize=CHANGING)
def operand_sums(
    x, values, scales, amax, weights, sums, blocks, crests, factor, reach, divisor, lines, length,
    BOUND: tl.constexpr, CLIPPED: tl.constexpr, PLAIN: tl.constexpr, COUNT: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Write the numbers of `gpu_sums.NAMES` over a tile, and of each block the largest magnitude of x, and
    that over the root mean square. With `weights`: only the sum of `gpu_sums.of_moves`.

    Args:
        x: quantised tensor, bf16 or fp32 [lines, length]; `values`, code times block scale, lie alike.
        scales: fp32, stored as the values; None without block scales.
        amax: fp32 scalar, or [lines] if FORM has an outer scale for each row; None: 1.
        weights: fp32 [lines, length], stored by rows.
        sums: fp64 [programs, COUNT].
        factor: 1 / the operand's `divisor`, in fp32. `reach`: largest magnitude that the scales' format
            reaches, over amax.
        BOUND: least scale that is saturated. `CLIPPED`: |y| beyond it is clipped. `PLAIN`: values are not
            divided by their scales.
    """
    first_line, first = place_of_tile(lines, length, FORM)
    line = first_line + tl.arange(0, FORM.lines)
    row = first_line // FORM.rows + tl.arange(0, FORM.lines // FORM.rows)
    block = first // FORM.block + tl.arange(0, FORM.length // FORM.block)
    known = (row * FORM.rows < lines)[:, None] & (block * FORM.block < length)[None, :]
    at = places(row, block, tl.cdiv(lines, FORM.rows), tl.cdiv(length, FORM.block), FORM.down)
    value = load_blocks(values, first_line, first, lines, length, FORM.down, FORM)
    outer = tl.full((1, 1), 1.0, tl.float32)
    if FORM.outer == "tensor":
        outer = tl.load(amax) + tl.zeros((1, 1), tl.float32)
    elif FORM.outer == "row":
        outer = tl.load(amax + line, mask=line < lines, other=1.0)[:, None]
    made = tl.full((1, 1), 1.0, tl.float32)
    code = value
    if scales is not None:
        made = tl.load(scales + at, mask=known, other=1.0)
        over = made[:, None, :, None] + tl.zeros_like(value)
        code = tl.where(over == 0, value, tl.div_rn(value, over))
    sums += tl.program_id(0) * COUNT
    if weights is not None:
        step = step_of(float_of(magnitude(code)), FORM.element.mantissa, FORM.element.emin)
        move = step * made[:, None, :, None] * tl.div_rn(outer, divisor)[:, None, :, None]
        weight = load_blocks(weights, first_line, first, lines, length, False, FORM)
        move = move.to(tl.float64) * weight.to(tl.float64)
        put(sums, 0, move * move)
    else:
        z = load_blocks(x, first_line, first, lines, length, FORM.down, FORM)
        most = float_of(tl.max(tl.max(magnitude(z), axis=3), axis=1))
        scale = encode(outer, FORM)
        if scales is not None:
            scale = factor_of(made, scale)
            too_large = most > outer * reach * 1.0625
            put(sums, 10, (made == 0) & (most > 0))
            put(sums, 11, (made >= BOUND) & known)
            put(sums, 12, (made == FORM.scale.top) & too_large & known)
        else:
            for number in tl.static_range(10, 13):
                tl.store(sums + number, 0.0)
        q = value * (outer * factor)[:, None, :, None]
        if scales is not None and not PLAIN:
            q = code * (made * outer * factor)[:, None, :, None]
        size = float_of(magnitude(scaled(z, scale[:, None, :, None], FORM)))
        largest = tl.max(tl.max(size, axis=3), axis=1)
        put(sums, 0, (q == 0) & (z != 0))
        put(sums, 1, size > FORM.element.top)
        put(sums, 2, size > CLIPPED)
        put(sums, 9, (most > 0) & known)
        put(sums, 13, (largest > FORM.element.top) & known)
        exact, cast = z.to(tl.float64), q.to(tl.float64)
        square, error, cast_square = exact * exact, exact - cast, cast * cast
        put(sums, 3, square)
        put(sums, 4, error * error)
        put(sums, 5, exact * cast)
        put(sums, 6, cast_square)
        put(sums, 7, square * square)
        put(sums, 8, tl.where(q == 0, square, 0.0))
        inner = tl.sum(tl.sum(error * cast, axis=3), axis=1)
        squares = tl.sum(tl.sum(cast_square, axis=3), axis=1)
        put(sums, 14, inner)
        put(sums, 15, tl.where(squares > 0, inner * inner / tl.maximum(squares, 1e-300), 0.0))
        mean = tl.sum(tl.sum(square, axis=3), axis=1) / (FORM.rows * FORM.block)
        tl.store(blocks + at, most, mask=known)
        tl.store(crests + at, most.to(tl.float64) / tl.sqrt(mean), mask=known)


@triton.jit
def product_sums(y, exact, sums, count, SIZE: tl.constexpr):
    """Write the sums of `product_error.Sums` of a product y and the exact one, both flat, to fp64 [programs,
    3]."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    own = to_float(tl.load(y + at, mask=inside, other=0.0)).to(tl.float64)
    true = tl.load(exact + at, mask=inside, other=0.0).to(tl.float64)
    sums += tl.program_id(0) * 3
    put(sums, 0, true * true)
    put(sums, 1, own * true)
    put(sums, 2, (own - true) * (own - true))
