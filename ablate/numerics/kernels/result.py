"""Device code in Triton, launched by cuda.py: products scaled and rounded, operands decoded,
parts taken out, amaxes kept."""

import triton
import triton.language as tl

from ablate.numerics.kernels.arithmetic import FLT_MAX, at_most, nearest_bf16, stored, to_float

SIZE = 4096
"""Elements of a program."""


@triton.jit(do_not_specialize=["first", "second", "base_first", "base_second"])
def scaled(
    y, out, first, second, divisor, base, base_first, base_second, base_divisor, side,
    slope, slope_divisor, limit, count, columns,
    ROUNDS: tl.constexpr, FIRST_BY_ROW: tl.constexpr, SECOND_BY_ROW: tl.constexpr, ALONG: tl.constexpr,
    BASE_FIRST_BY_ROW: tl.constexpr, BASE_SECOND_BY_ROW: tl.constexpr, SIZE: tl.constexpr,
    spots=None, few=0,
):  # fmt: skip
    """Write y times the product's factor, plus `base` times its own if that is not None, rounded once to bf16
    if it ROUNDS. A factor is first * second / divisor in fp32, in this order, as in `product.alpha`.

    y is fp32 [rows, columns], stored without gaps; `out` and `base`, fp32, lie alike. `out` may be y itself.
    `base` may be one row or column, ALONG which it has numbers, and is then multiplied by the `side`, one
    number for each element of the other dimension; None: 1. With `spots`, int32 [columns], it is [rows, few]:
    its column that is added to a column of y, or -1 for zeros. The operands' amaxes, `first` and `second`,
    are fp32 in memory: scalars, or one for each row of y, and for each column; None: 1. `divisor` is the
    product of their divisors; the factor itself without amaxes. With a `slope`, fp32 and like y, the result
    is then multiplied by slope / slope_divisor, at most `limit`, and rounded again.
    """
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    factor = factor_of(first, second, divisor, at, columns, inside, FIRST_BY_ROW, SECOND_BY_ROW)
    product = tl.load(y + at, mask=inside, other=0.0) * factor
    if base is not None:
        place = at % columns if ALONG == "row" else at // columns if ALONG == "column" else at
        there = inside
        if spots is not None:
            spot = tl.load(spots + at % columns, mask=inside, other=-1)
            place, there = at // columns * few + spot, inside & (spot >= 0)
        factor = factor_of(
            base_first, base_second, base_divisor, at, columns, inside, BASE_FIRST_BY_ROW, BASE_SECOND_BY_ROW
        )
        added = tl.load(base + place, mask=there, other=0.0) * factor
        if side is not None:
            across = at // columns if ALONG == "row" else at % columns
            added = to_float(tl.load(side + across, mask=inside, other=0.0)) * added
        product = added + product
    if ROUNDS:
        product = nearest_bf16(product)
    if slope is not None:
        steep = tl.div_rn(tl.load(slope + at, mask=inside, other=0.0), slope_divisor)
        product = product * at_most(steep, limit)
        product = nearest_bf16(product) if ROUNDS else product
    tl.store(out + at, stored(product, out.dtype.element_ty), mask=inside)


@triton.jit
def factor_of(
    first, second, divisor, at, columns, inside, FIRST_BY_ROW: tl.constexpr, SECOND_BY_ROW: tl.constexpr
):
    """Return the factor of a product's elements; one if they have none of their own."""
    factor = tl.full((1,), divisor, tl.float32)
    if first is not None or second is not None:
        numerator = tl.full((1,), 1.0, tl.float32)
        if first is not None:
            numerator = numerator * of_product(first, at // columns, inside, FIRST_BY_ROW)
        if second is not None:
            numerator = numerator * of_product(second, at % columns, inside, SECOND_BY_ROW)
        factor = tl.div_rn(numerator, divisor)
    return factor


@triton.jit
def of_product(amax, number, inside, BY_ROW: tl.constexpr):
    """Return an operand's amax for each element of a product: that of its row there, or the only one."""
    if BY_ROW:
        return tl.load(amax + number, mask=inside, other=1.0)
    else:
        return tl.load(amax)


@triton.jit(do_not_specialize=["amax"])
def decoded(
    values, scales, amax, out, factor, rows, columns, across,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, BY_ROW: tl.constexpr, DOWN: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Write the numbers that an operand stands for: `quantize.Operand.dequantize`.

    Args:
        values: code times block scale [rows, columns], stored by rows, or DOWN by columns; `out` lies alike.
        scales: fp32 [row tiles, `across`], stored as the values; None: the values are not divided by them.
        amax: fp32 scalar or one BY_ROW; None: 1.
        factor: 1 / the operand's divisor.
    """
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < rows.to(tl.int64) * columns
    row, column = (at % rows, at // rows) if DOWN else (at // columns, at % columns)
    value = to_float(tl.load(values + at, mask=inside, other=0.0))
    decode = tl.full((1,), 1.0, tl.float32)
    if scales is not None:
        down, along = row // TILE_ROWS, column // TILE_COLUMNS
        place = along * tl.cdiv(rows, TILE_ROWS) + down if DOWN else down * across + along
        decode = tl.load(scales + place, mask=inside, other=1.0)
        value = tl.where(decode == 0, value, tl.div_rn(value, decode))
    if amax is not None:
        decode = decode * of_product(amax, row, inside, BY_ROW)
    tl.store(out + at, value * (decode * factor), mask=inside)


@triton.jit(do_not_specialize=["limit"])
def parted(x, rest, part, limit, means, count, across, BY_ROW: tl.constexpr, SIZE: tl.constexpr):
    """Write a `part` of x, bf16 or fp32 of `count` elements and `across` in a row of memory, and x less it.

    The part is that of `means`, one for each column of memory or BY_ROW for each row, rounded as `part` is
    stored, which has one number for each; or what lies beyond +-limit, rounded like that (None: not written),
    and then the `rest` is x within it. `rest`, `limit` and `means` are fp32.
    """
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    z = to_float(tl.load(x + at, mask=inside, other=0.0))
    if means is not None:
        place, number = (at // across, at % across) if BY_ROW else (at % across, at // across)
        taken = tl.load(means + place, mask=inside, other=0.0)
        first = inside & (number == 0)
    else:
        most = tl.load(limit)
        within = tl.where(z > most, most, tl.where(z < -most, -most, z))
        within = tl.where(most == most, within, most)
        place, first, taken = at, inside, z - within
    if part is not None:
        if part.dtype.element_ty == tl.bfloat16:
            taken = nearest_bf16(taken)
        tl.store(part + place, stored(taken, part.dtype.element_ty), mask=first)
    if means is not None:
        within = z - taken
    tl.store(rest + at, within, mask=inside)


@triton.jit(do_not_specialize=["current", "past", "entry", "out", "before", "shift", "known"])
def remembered(current, past, entry, out, before, shift, known, STEPS: tl.constexpr, SIZE: tl.constexpr):
    """Write a step's statistic and entry, `out`, and the entries of STEPS steps `before` it, newest first.

    The statistic is the largest of those, and without STEPS that entry, which then stays once it is not zero;
    `current` in place of a zero. `entry` is that of the last step, `shift` steps ago, and `past` those of
    `known` steps before it; None: zeros. A NaN or an infinity counts as zero. One program.
    """
    now = tl.load(current)
    finite = tl.where(now <= FLT_MAX, now, 0.0)
    kept = finite * 0.0
    if entry is not None:
        kept = tl.load(entry)
    if STEPS == 0:
        kept = tl.where(kept == 0, finite, kept)
        largest = kept
    else:
        number = tl.arange(0, SIZE)
        place, inside = number - shift, number < STEPS
        older = tl.where((place == -1) & inside, kept, 0.0)
        if past is not None:
            older += tl.load(past + place, mask=(place >= 0) & (place < known) & inside, other=0.0)
        tl.store(before + number, older, mask=inside)
        largest = tl.max(older, axis=0)
        kept = tl.where(shift == 0, tl.maximum(kept, finite), finite)
    tl.store(out + 1, kept)
    tl.store(out, tl.where(largest == 0, now, largest))


@triton.jit(do_not_specialize=["number"])
def placed(chosen, place, kept, number, SIZE: tl.constexpr):
    """Write the `place` of each channel among `number` distinct chosen ones, int64, in ascending order, -1 of
    others; and the chosen ones in that order, `kept`. A program has SIZE channels."""
    channel = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    before, found = tl.full((SIZE,), 0, tl.int32), tl.full((SIZE,), 0, tl.int32)
    for first in range(0, number, 32):
        index = first + tl.arange(0, 32)
        one = tl.load(chosen + index, mask=index < number, other=2**31 - 1)[None, :]
        before += tl.sum((one < channel[:, None]).to(tl.int32), axis=1)
        found += tl.sum((one == channel[:, None]).to(tl.int32), axis=1)
    tl.store(place + channel, tl.where(found > 0, before, -1))
    tl.store(kept + before, channel.to(tl.int64), mask=found > 0)


@triton.jit
def squared(x, out, count, SIZE: tl.constexpr):
    """Write the squares of x, bf16 or fp32, in fp32, stored as x is."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    z = to_float(tl.load(x + at, mask=at < count, other=0.0))
    tl.store(out + at, z * z, mask=at < count)
