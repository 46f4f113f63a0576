"""The quantisers of nvfp4.c for GPUs: device code in Triton, launched by cuda.py. Nothing here knows torch.

The arithmetic is that of the reference (scaling.py, rounding.py, philox.py), operation by operation, for
tensors that are not finite too. That takes IEEE division (`div_rn`: a plain `/` is an approximation here),
launches without contraction, and maxima over the bits of magnitudes, where an infinity is above all numbers
and a NaN above infinity, so that a NaN reaches the amax and, through it, all.

Every program takes a slab of sixteen rows of x [rows, columns] in memory, COLUMNS wide, and reads zeros
beyond the edges. Where blocks run down the slab, it is held as a tuple of sixteen rows: maxima, rotations and
bytes are then register to register, in a given order.
"""

import triton
import triton.language as tl

FLT_MAX = tl.constexpr(3.4028234663852886e38)
ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding and subtracting it rounds a small float to the nearest even integer."""

CHANGING = [
    *("amax", "first_amax", "second_amax", "signs"),
    *("key0", "key1", "step", "micro_batch", "where", "first_where", "second_where"),
]
"""Arguments whose values and alignment change from call to call: specialised on, each would be compiled
anew."""


# --- arithmetic -----------------------------------------------------------------------------------


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def magnitude(x):
    """The bits of |x|: they are ordered as the magnitudes are."""
    return bits_of(x) & 0x7FFFFFFF


@triton.jit
def at_most(x, limit):
    """The smaller of the two; a NaN stays one, as in torch's clamp."""
    return tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def to_float(x):
    """bf16 or fp32 to fp32. By the bits, since Triton's interpreter converts subnormal bf16 wrongly."""
    if x.dtype == tl.bfloat16:
        return float_of(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        return x


@triton.jit
def nearest_bf16(z):
    """Return fp32 rounded to bf16, in fp32. By the bits: Triton's interpreter does not round to even."""
    even = (bits_of(z) + 0x7FFF + (bits_of(z) >> 16 & 1)) & -0x10000
    return tl.where(z == z, float_of(even), z)  # the sum would turn a GPU's own NaN, 0x7FFFFFFF, into -0


@triton.jit
def prepare(amax, top, headroom):
    """Return 1 / S, and S / 6 times the headroom, from the amax in memory; `top` is 6 times the bound."""
    largest = tl.load(amax)
    scale = at_most(tl.div_rn(top, largest), FLT_MAX)
    scale = tl.where((largest == 0) | (scale == 0), 1.0, scale)
    return tl.div_rn(1.0, scale), scale * (1.0 / 6.0) * headroom


@triton.jit
def step_of(y, mantissa: tl.constexpr, emin: tl.constexpr):
    """Return the distance between the neighbours of y >= 0: 2^(max(exponent, emin) - mantissa)."""
    exponent = tl.maximum(bits_of(y) & 0x7F800000, (emin + 127) << 23)
    return float_of(exponent - (mantissa << 23))


@triton.jit
def inverse(power):
    return float_of((254 << 23) - bits_of(power))


@triton.jit
def nearest(y, step):
    return ((y * inverse(step) + ROUND) - ROUND) * step


@triton.jit
def stochastic(y, step, random):
    """Round away from zero if floor(256 f) exceeds the random byte, f the position between neighbours."""
    position = y * inverse(step)
    lower = tl.floor(position)
    up = (position - lower) * 256.0 - random.to(tl.float32)
    return (lower + tl.where(up >= 1.0, 1.0, 0.0)) * step


@triton.jit
def block_scales(largest, scaling):
    """Return E4M3 scales and element factors from the bits of the blocks' largest magnitudes."""
    block_scale = at_most(float_of(largest) * scaling[1], 448.0)
    block_scale = nearest(block_scale, step_of(block_scale, 3, -6))
    return block_scale, at_most(tl.div_rn(1.0, block_scale * scaling[0]), FLT_MAX)


@triton.jit
def e2m1(y, random, STOCHASTIC: tl.constexpr):
    size = at_most(float_of(magnitude(y)), 6.0)
    step = step_of(size, 1, 0)
    rounded = stochastic(size, step, random) if STOCHASTIC else nearest(size, step)
    return float_of(bits_of(rounded) | (bits_of(y) & -(2**31)))


@triton.jit
def random_words(group, draw):
    """Return the four Philox4x32-10 words of each group of sixteen elements; byte i is for element i."""
    key0, key1, step, micro_batch, where = draw
    step, micro_batch, where = step.to(tl.uint32), micro_batch.to(tl.uint32), where.to(tl.uint32)
    return tl.philox_impl(
        group.to(tl.uint32), step, micro_batch, where, key0.to(tl.uint32), key1.to(tl.uint32)
    )


# --- a slab of sixteen rows -----------------------------------------------------------------------


@triton.jit
def place(columns, COLUMNS: tl.constexpr):
    """This program's slab and its first column. One axis, since the others hold at most 65,535 programs."""
    across = tl.cdiv(columns, COLUMNS)
    return tl.program_id(0) // across, tl.program_id(0) % across * COLUMNS


@triton.jit
def load_slab(x, slab, column, rows, columns):
    """Sixteen rows, each fp32 of the shape of `column`; zeros beyond the edges."""
    loaded = ()
    for r in tl.static_range(16):
        row = slab * 16 + r
        inside = (column < columns) & (row < rows)
        loaded += (to_float(tl.load(x + row.to(tl.int64) * columns + column, mask=inside, other=0.0)),)
    return loaded


@triton.jit
def largest_of(slab):
    """The bits of the largest magnitude of each column."""
    largest = magnitude(slab[0])
    for r in tl.static_range(1, 16):
        largest = tl.maximum(largest, magnitude(slab[r]))
    return largest


@triton.jit
def butterfly(slab, distance: tl.constexpr):
    turned = ()
    for r in tl.static_range(16):
        if r & distance:
            turned += (slab[r - distance] - slab[r],)
        else:
            turned += (slab[r] + slab[r + distance],)
    return turned


@triton.jit
def rotate(slab, signs):
    """Rotate: signs, butterflies by distance, a quarter, one rounding to bf16, in hadamard.py's order.

    Bit r of `signs` is 1 if row r is negated. The result stays in fp32.

    Not `tl.dot` with H: sixteen bf16 of different exponents do not add exactly in fp32, and a tensor core
    adds in an order, and with a width, of its own.
    """
    turned = ()
    for r in tl.static_range(16):
        turned += (float_of(bits_of(slab[r]) ^ ((signs >> r & 1) << 31)),)
    turned = butterfly(butterfly(butterfly(butterfly(turned, 1), 2), 4), 8)
    rounded = ()
    for r in tl.static_range(16):
        rounded += (nearest_bf16(turned[r] * 0.25),)
    return rounded


# --- the three layouts, for one slab --------------------------------------------------------------


@triton.jit
def rows_of(x, values, scales, rows, columns, scaling, draw, STOCHASTIC: tl.constexpr, COLUMNS: tl.constexpr):
    """Blocks along the rows of a slab."""
    slab, first = place(columns, COLUMNS)
    row = slab * 16 + tl.arange(0, 16)[:, None]
    block = first // 16 + tl.arange(0, COLUMNS // 16)[None, :]
    lane = tl.arange(0, 16)[None, None, :]
    column = block[:, :, None] * 16 + lane
    blocks = tl.cdiv(columns, 16)
    inside = (row[:, :, None] < rows) & (column < columns)
    y = to_float(tl.load(x + row[:, :, None].to(tl.int64) * columns + column, mask=inside, other=0.0))
    block_scale, factor = block_scales(tl.max(magnitude(y), axis=2), scaling)
    known = (row < rows) & (block < blocks)
    tl.store(scales + row.to(tl.int64) * blocks + block, block_scale, mask=known)
    random = lane
    if STOCHASTIC:
        w0, w1, w2, w3 = random_words(row * blocks + block, draw)
        low, high = (
            tl.where(lane < 4, w0[:, :, None], w1[:, :, None]),
            tl.where(lane < 12, w2[:, :, None], w3[:, :, None]),
        )
        random = tl.where(lane < 8, low, high) >> 8 * (lane % 4) & 255
    value = e2m1(y * factor[:, :, None], random, STOCHASTIC) * block_scale[:, :, None]
    at = row[:, :, None].to(tl.int64) * blocks * 16 + column
    tl.store(values + at, value.to(tl.bfloat16), mask=known[:, :, None])


@triton.jit
def columns_of(
    x, values, scales, signs, rows, columns, scaling, draw, STOCHASTIC: tl.constexpr, COLUMNS: tl.constexpr
):
    """Blocks along the columns of a slab, which are rotated first where there are signs."""
    slab, first = place(columns, COLUMNS)
    column = first + tl.arange(0, COLUMNS)
    loaded = load_slab(x, slab, column, rows, columns)
    if signs is not None:
        loaded = rotate(loaded, signs)
    block_scale, factor = block_scales(largest_of(loaded), scaling)
    tl.store(scales + slab.to(tl.int64) * columns + column, block_scale, mask=column < columns)
    if STOCHASTIC:
        # Always zero, which LLVM sees and Triton's layouts do not: the words are then made in the threads
        # that hold the elements.
        zero = magnitude(loaded[0]) >> 31
        words = random_words(column * tl.cdiv(rows, 16) + slab + zero, draw)
    for r in tl.static_range(16):
        random = column
        if STOCHASTIC:
            random = words[r // 4] >> 8 * (r % 4) & 255
        value = e2m1(loaded[r] * factor, random, STOCHASTIC) * block_scale
        tl.store(
            values + (slab * 16 + r).to(tl.int64) * columns + column,
            value.to(tl.bfloat16),
            mask=column < columns,
        )


# --- kernels --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["out", "signs"])
def amaxes(x, signs, out, rows, columns, COLUMNS: tl.constexpr):
    """Find the amax of x [rows, columns], and of x with rotated columns if there are signs, in one read.
    `out` [2], int32 zeros at first: the bits of both."""
    slab, first = place(columns, COLUMNS)
    loaded = load_slab(x, slab, first + tl.arange(0, COLUMNS), rows, columns)
    tl.atomic_max(out, tl.max(largest_of(loaded), axis=0))
    if signs is not None:
        tl.atomic_max(out + 1, tl.max(largest_of(rotate(loaded, signs)), axis=0))


@triton.jit(do_not_specialize=CHANGING)
def by_rows(
    x, values, scales, amax, rows, columns, top, headroom, key0, key1, step, micro_batch, where,
    STOCHASTIC: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantise blocks along rows: values [rows, columns padded to 16], scales [rows, blocks]."""
    scaling, draw = prepare(amax, top, headroom), (key0, key1, step, micro_batch, where)
    rows_of(x, values, scales, rows, columns, scaling, draw, STOCHASTIC, COLUMNS)


@triton.jit(do_not_specialize=CHANGING)
def by_columns(
    x, values, scales, amax, signs, rows, columns, top, headroom, key0, key1, step, micro_batch, where,
    STOCHASTIC: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantise blocks along columns: values [rows padded to 16, columns], scales [blocks, columns]."""
    scaling, draw = prepare(amax, top, headroom), (key0, key1, step, micro_batch, where)
    columns_of(x, values, scales, signs, rows, columns, scaling, draw, STOCHASTIC, COLUMNS)


@triton.jit(do_not_specialize=CHANGING)
def by_both(
    x, first_values, first_scales, second_values, second_scales, first_amax, second_amax, signs,
    rows, columns, first_top, first_headroom, second_top, second_headroom,
    key0, key1, step, micro_batch, first_where, second_where,
    FIRST_STOCHASTIC: tl.constexpr, SECOND_STOCHASTIC: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantise both ways: the second read of x comes from the cache, without exchanges between threads."""
    scaling, draw = (
        prepare(first_amax, first_top, first_headroom),
        (key0, key1, step, micro_batch, first_where),
    )
    rows_of(x, first_values, first_scales, rows, columns, scaling, draw, FIRST_STOCHASTIC, COLUMNS)
    scaling, draw = (
        prepare(second_amax, second_top, second_headroom),
        (key0, key1, step, micro_batch, second_where),
    )
    columns_of(
        x, second_values, second_scales, signs, rows, columns, scaling, draw, SECOND_STOCHASTIC, COLUMNS
    )


@triton.jit(do_not_specialize=CHANGING)
def by_tiles(x, values, scales, amax, rows, columns, top, headroom, COLUMNS: tl.constexpr):
    """Quantise 16x16 tiles to nearest: values padded to 16 both ways, scales [row tiles, column tiles]."""
    slab, first = place(columns, COLUMNS)
    tile = first // 16 + tl.arange(0, COLUMNS // 16)
    column = tile[:, None] * 16 + tl.arange(0, 16)[None, :]
    tiles = tl.cdiv(columns, 16)
    loaded = load_slab(x, slab, column, rows, columns)
    block_scale, factor = block_scales(tl.max(largest_of(loaded), axis=1), prepare(amax, top, headroom))
    tl.store(scales + slab.to(tl.int64) * tiles + tile, block_scale, mask=tile < tiles)
    for r in tl.static_range(16):
        value = e2m1(loaded[r] * factor[:, None], column, False) * block_scale[:, None]
        tl.store(
            values + (slab * 16 + r).to(tl.int64) * tiles * 16 + column,
            value.to(tl.bfloat16),
            mask=(tile < tiles)[:, None],
        )
