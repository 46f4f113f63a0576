"""Quantisers for GPUs over a description of the form, as general.c is one for CPUs: device code in Triton.

The idea: a kernel takes a `general_cuda.Description` of each copy that it makes, a constant of the compiler.
So every `if` on it is decided before the kernel runs, and each form becomes machine code of its own. One
launch makes the copy along the rows of x in memory, that along its columns, or both.

A program takes 4,096 elements, in one of two layouts. A tile is `lines` lines of the form, rows of memory or
(`down`) its columns, and `length` elements of each along the contraction. A slab is sixteen rows of memory,
COLUMNS wide, held as a tuple: where blocks run down the slab, maxima, rotations and bytes are register to
register, which takes half of the instructions. `Description.slab` chooses. Zeros are read beyond the edges.

The arithmetic is that of the reference (scaling.py, rounding.py, select.py, hadamard.py, philox.py),
operation by operation, for tensors that are not finite too. That takes IEEE division (`div_rn`: a plain `/`
is an approximation here), launches without contraction, and maxima over the bits of magnitudes, where an
infinity is above all numbers and a NaN above infinity, so that a NaN reaches the amax and, through it, all.
Sums have the reference's order, which `tl.dot` and a `tl.sum` of more than two do not state. Nothing here
knows torch.
"""

import triton
import triton.language as tl

from ablate.numerics.kernels.arithmetic import (
    COLUMNS,
    FLT_MAX,
    ROUND,
    at_most,
    bits_of,
    float_of,
    inverse,
    largest_of,
    load_slab,
    magnitude,
    nearest_bf16,
    place,
    rotate,
    step_of,
    stored,
    to_float,
)

CHANGING = [
    *(f"{copy}{name}" for copy in ("", "other_") for name in ("outer", "largest", "where", "word0")),
    *(f"{copy}word{word}" for copy in ("", "other_") for word in (1, 2, 3)),
    *("out", "key0", "key1", "step", "micro_batch", "lines", "few"),
]
"""Arguments whose values and alignment change from call to call: specialised on, each would be compiled
anew. If `lines` were known to be a multiple of 16, a tile down memory would hold eight lines in a thread,
whose block scales all threads of a block compute."""


# --- sums and pairs in a given order --------------------------------------------------------------


@triton.jit
def pairs(z, NUMBER: tl.constexpr, DISTANCE: tl.constexpr):
    """Return the elements of z, flat, that have a partner at a distance behind them, and the partners.

    Both are [NUMBER, DISTANCE]; each run of 2 DISTANCE elements of z has DISTANCE pairs.
    """
    return tl.split(tl.permute(tl.reshape(z, (NUMBER, 2, DISTANCE)), (0, 2, 1)))


@triton.jit
def tree_sum(z, NUMBER: tl.constexpr, LEVELS: tl.constexpr):
    """Add 2^LEVELS elements, NUMBER times: the second half to the first, and so on. Returns [NUMBER]."""
    for level in tl.static_range(LEVELS):  # a sum of two has one order
        z = tl.sum(tl.reshape(z, (NUMBER, 2, 1 << LEVELS - 1 - level)), axis=1)
    return tl.reshape(z, (NUMBER,))


@triton.jit
def sum_of_sixteen(z, NUMBER: tl.constexpr):
    """Add sixteen elements, NUMBER times, one by one from the first. Returns [NUMBER]."""
    parts = (tl.reshape(z, (NUMBER, 16)),)
    for level in tl.static_range(4):
        halves = ()
        for number in tl.static_range(1 << level):
            halves += pairs(parts[number], NUMBER, 8 >> level)
        parts = halves
    total = parts[0]
    for number in tl.static_range(1, 16):
        total = total + parts[number]
    return tl.reshape(total, (NUMBER,))


@triton.jit
def rotated(z, words, FORM: tl.constexpr, BF16: tl.constexpr, BACK: tl.constexpr = False):
    """Rotate: signs, butterflies by distance, the factor, one rounding if x is bf16, in hadamard.py's order;
    BACK: the signs last.

    Bit r % 32 of word r // 32 is 1 if element r of a group is negated.
    """
    place = tl.arange(0, FORM.length) % FORM.turn
    low, high = tl.where(place < 32, words[0], words[1]), tl.where(place < 96, words[2], words[3])
    flips = (tl.where(place < 64, low, high) >> place % 32 << 31)[None, :]
    if not BACK:
        z = float_of(bits_of(z) ^ flips)
    z = tl.reshape(z, (FORM.lines * FORM.length,))
    levels: tl.constexpr = FORM.turn_levels
    for level in tl.static_range(levels):
        first, second = pairs(z, FORM.lines * FORM.length >> level + 1, 1 << level)
        both = tl.join(first + second, first - second)
        z = tl.reshape(tl.permute(both, (0, 2, 1)), (FORM.lines * FORM.length,))
    z = tl.reshape(z * FORM.turn_factor, (FORM.lines, FORM.length))
    if BACK:
        z = float_of(bits_of(z) ^ flips)
    return nearest_bf16(z) if BF16 else z


# --- random bits ----------------------------------------------------------------------------------


@triton.jit
def philox(group, draw, purpose):
    """Return the four words of one Philox4x32-10 call for each group of sixteen elements or block scales."""
    key0, key1, step, micro_batch, where = draw
    step, micro_batch, where = step.to(tl.uint32), micro_batch.to(tl.uint32), where.to(tl.uint32)
    return tl.philox_impl(
        group.to(tl.uint32), step, micro_batch, where, key0.to(tl.uint32), key1.to(tl.uint32) | purpose
    )


@triton.jit
def four_words(group, draw, PURPOSE: tl.constexpr):
    """Return the words of one Philox4x32-10 call for each group, with four of them along the last axis."""
    w0, w1, w2, w3 = philox(group, draw, PURPOSE)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (group.shape[0], group.shape[1], 4))


@triton.jit
def element_bits(line, column, width, draw, FORM: tl.constexpr):
    """Return the random bits of each element of the tile, fp32 like the tile: `philox.random_bits`."""
    group = line[:, None] * (width // 16) + (column // 16 + tl.arange(0, FORM.length // 16))[None, :]
    groups: tl.constexpr = FORM.lines * FORM.length // 16
    words = tl.reshape(four_words(group, draw, 0), (groups, 4))
    if FORM.bits == 16:
        more = tl.reshape(four_words(group, draw, 1), (groups, 4))
        words = tl.permute(tl.join(words, more), (0, 2, 1))
    elif FORM.bits == 24:
        second, third = four_words(group, draw, 1), four_words(group, draw, 2)
        last = tl.reshape(four_words(group, draw, 3), (groups, 4))
        even = tl.join(words, tl.reshape(third, (groups, 4)))
        words = tl.permute(tl.join(even, tl.join(tl.reshape(second, (groups, 4)), last)), (0, 2, 3, 1))
    fields: tl.constexpr = 4 if FORM.bits == 8 else 2 if FORM.bits == 16 else 1
    words = tl.reshape(words, (FORM.lines * FORM.length // fields, 1))
    bits = words >> (tl.arange(0, fields) * (32 // fields)).to(tl.uint32)[None, :] & (1 << FORM.bits) - 1
    return tl.reshape(bits.to(tl.int32).to(tl.float32), (FORM.lines, FORM.length))


@triton.jit
def scale_bits(row, column, number, draw):
    """Return 24 random bits for each block scale, fp32 [rows, columns]; `number` of them are in a row."""
    group = row[:, None] * tl.cdiv(number, 16) + (column // 16)[None, :]
    place = column[None, :] % 16
    w0, w1, w2, w3 = philox(group, draw, (place // 4 + 16).to(tl.uint32))
    word = place % 4
    bits = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    return (bits & 0xFFFFFF).to(tl.int32).to(tl.float32)


# --- grids ----------------------------------------------------------------------------------------


@triton.jit
def on_grid(size, random, GRID: tl.constexpr, ROUNDING: tl.constexpr, BITS: tl.constexpr):
    """Round magnitudes to a grid; `random` has BITS bits if that is stochastic."""
    size = at_most(size, GRID.top)
    step = step_of(size, GRID.mantissa, GRID.emin)
    position = size * inverse(step)
    lower = tl.floor(position)
    if ROUNDING == "nearest":
        rounded = (position + ROUND) - ROUND
        if GRID.mantissa == 0:  # of two powers of two, the even code has the even exponent field
            even = ((bits_of(step) >> 23) - 126 - GRID.emin & 1) == 0
            rounded = tl.where((position == 1.5) & even, lower, rounded)
    elif ROUNDING == "stochastic":
        rounded = lower + tl.where((position - lower) * (1 << BITS) - random >= 1.0, 1.0, 0.0)
    elif ROUNDING == "away":
        rounded = lower + tl.where(position - lower >= 0.5, 1.0, 0.0)
    elif ROUNDING == "ceil":
        rounded = lower + tl.where(position > lower, 1.0, 0.0)
    else:
        rounded = lower
    return rounded * step


@triton.jit
def elements(y, random, FORM: tl.constexpr):
    """Round scaled elements to their grid; zero keeps its sign."""
    size = on_grid(float_of(magnitude(y)), random, FORM.element, FORM.rounding, FORM.bits)
    return float_of(bits_of(size) | (bits_of(y) & -(2**31)))


@triton.jit
def block_scale(exact, random, FORM: tl.constexpr, ROUNDING: tl.constexpr):
    """Round block scales to their format, with the format's rule for zero."""
    exact = at_most(exact, FORM.scale.top)
    if FORM.scale_kind == "power":  # the smallest are subnormal, and the largest have subnormal inverses
        exact = tl.where(exact < FORM.least, FORM.least, exact)
        lift = tl.where(exact < 2.0**-60, 2.0**40, tl.where(exact > 2.0**60, 2.0**-40, 1.0))
        rounded = on_grid(exact * lift, random, FORM.scale, ROUNDING, 24) * inverse(lift)
        rounded = at_most(tl.where(rounded < FORM.least, FORM.least, rounded), FORM.scale.top)
    elif FORM.scale_kind == "bf16":
        rounded = nearest_bf16(exact)
    elif FORM.scale_kind == "fp32":
        rounded = exact
    else:
        if FORM.least > 0:
            exact = tl.where(exact < FORM.least, FORM.least, exact)
        rounded = on_grid(exact, random, FORM.scale, ROUNDING, 24)
    return rounded if FORM.zero == 0 else tl.where(rounded == 0, FORM.zero, rounded)


@triton.jit
def encode(amax, FORM: tl.constexpr):
    """Return S of an outer statistic; 1 without one."""
    scale = amax
    if FORM.outer is not None:
        scale = at_most(tl.div_rn(FORM.outer_top, amax), FLT_MAX)
        scale = tl.where((amax == 0) | (scale == 0), 1.0, scale)
    return scale


@triton.jit
def scales_of(largest, scale, chances, FORM: tl.constexpr):
    """Return block scales from the statistics of their blocks and S, in the formats' order of operations."""
    multiplier = scale * FORM.map
    if FORM.headroom != 1:
        multiplier = multiplier * FORM.headroom
    exact = at_most(largest * at_most(multiplier, FLT_MAX), FLT_MAX)
    made = block_scale(exact, chances, FORM, FORM.scale_rounding)
    if FORM.halve > 0:
        half = tl.where(made * 0.5 < FORM.least, FORM.least, made * 0.5)
        made = tl.where(tl.div_rn(exact, made) < FORM.halve, half, made)
    return made


@triton.jit
def factor_of(made, scale):
    """Return the factor of elements before they are rounded, from their block scale and S."""
    return at_most(tl.div_rn(1.0, made * tl.div_rn(1.0, scale)), FLT_MAX)


@triton.jit
def scaled(z, factor, FORM: tl.constexpr):
    """Return what is rounded to the elements' grid."""
    return z * factor if FORM.prescale == 1 else z * factor * FORM.prescale


@triton.jit
def spread(tiles, most, FORM: tl.constexpr):
    """Return the root mean square of blocks of one row, or their standard deviation, times a factor."""
    lift = tl.where(most < 2.0**-50, 2.0**96, tl.where(most > 2.0**50, 2.0**-96, 1.0))
    number: tl.constexpr = FORM.lines * FORM.length // FORM.block
    z = tl.reshape(tiles * lift[:, None, :, None], (number, FORM.block))
    if FORM.statistic == "std":
        z = z - (tree_sum(z, number, FORM.block_levels) * (1 / FORM.block))[:, None]
    mean = tree_sum(z * z, number, FORM.block_levels) * (1 / FORM.block)
    return tl.reshape(tl.sqrt_rn(mean), most.shape) * inverse(lift) * FORM.spread


# --- slabs and tiles ------------------------------------------------------------------------------


@triton.jit
def cast_slab(
    x, values, scales, outer, largest, rows, columns, width, words, draw, FORM: tl.constexpr
):  # fmt: skip
    """Quantise one slab: blocks of sixteen rows, or squares."""
    first_row, first = place(rows, columns, 16, COLUMNS)
    slab, block = first_row // 16, first // FORM.rows + tl.arange(0, COLUMNS // FORM.rows)
    column = block[:, None] * FORM.rows + tl.arange(0, FORM.rows)[None, :]
    loaded = load_slab(x, slab, column, rows, columns)
    if FORM.turn > 0:
        loaded = rotate(loaded, words[0], x.dtype.element_ty != tl.float32)
    most = tl.max(largest_of(loaded), axis=1)
    if largest is not None:
        tl.atomic_max(largest, tl.max(most, axis=0))
    amax = tl.full((1,), 1.0, tl.float32)
    if FORM.outer == "tensor":
        amax = tl.load(outer) + tl.zeros((1,), tl.float32)
    elif FORM.outer == "row":
        amax = tl.load(outer + block, mask=block < columns, other=0.0)
    scale = encode(amax, FORM)
    made = scales_of(float_of(most), scale, most, FORM)
    factor = factor_of(made, scale)[:, None]
    high, wide = (width, columns) if FORM.down else (rows, width)
    across = tl.cdiv(wide, FORM.rows)
    tl.store(scales + slab.to(tl.int64) * across + block, made, mask=(block < across) & (slab * 16 < high))
    if FORM.rounding == "stochastic":
        # Always zero, which LLVM sees and Triton's layouts do not: the words are then made in the threads
        # that hold the elements.
        zero = magnitude(loaded[0]) >> 31
        random = philox(column * (width // 16) + slab + zero, draw, 0)
    for r in tl.static_range(16):
        bits = column
        if FORM.rounding == "stochastic":
            bits = (random[r // 4] >> 8 * (r % 4) & 255).to(tl.float32)
        value = elements(scaled(loaded[r], factor, FORM), bits, FORM) * made[:, None]
        row = slab * 16 + r
        known = (column < wide) & (row < high)
        at = row.to(tl.int64) * wide + column
        tl.store(values + at, stored(value, values.dtype.element_ty, FORM.exact), mask=known)


@triton.jit
def place_of_tile(lines, length, FORM: tl.constexpr):
    """This program's first line, and the first element of each."""
    if FORM.down:
        first, first_line = place(length, lines, FORM.length, FORM.lines)
    else:
        first_line, first = place(lines, length, FORM.lines, FORM.length)
    return first_line, first


@triton.jit
def load_tile(x, first_line, first, lines, length, DOWN: tl.constexpr, FORM: tl.constexpr):
    """A tile of x, fp32 [FORM.lines, FORM.length]; zeros beyond the edges."""
    line, column = first_line + tl.arange(0, FORM.lines), first + tl.arange(0, FORM.length)
    inside = (line < lines)[:, None] & (column < length)[None, :]
    return to_float(tl.load(x + places(line, column, lines, length, DOWN), mask=inside, other=0.0))


@triton.jit
def places(line, column, lines, length, DOWN: tl.constexpr):
    """Return where elements lie in memory, [lines, columns]."""
    if DOWN:
        return column[None, :].to(tl.int64) * lines + line[:, None]
    else:
        return line[:, None].to(tl.int64) * length + column[None, :]


@triton.jit
def cast_tile(
    x, values, scales, outer, largest, lines, length, width, words, draw, FORM: tl.constexpr, place, few
):  # fmt: skip
    """Quantise one tile; of channels, those with a `place` or the others, if FORM.few says so."""
    first_line, first = place_of_tile(lines, length, FORM)
    z = load_tile(x, first_line, first, lines, length, FORM.down, FORM)
    line, column = first_line + tl.arange(0, FORM.lines), first + tl.arange(0, FORM.length)
    if FORM.few is not None:
        channel, channels = (line, lines) if FORM.down else (column, length)
        spot = tl.load(place + channel, mask=channel < channels, other=-1)
        spot = spot[:, None] if FORM.down else spot[None, :]
        taken = tl.where(spot >= 0, z, 0.0)
        z = taken if FORM.few == "kept" else z - taken  # an infinity less itself is a NaN
    if FORM.turn > 0:  # what is left of a tensor is in fp32
        z = rotated(z, words, FORM, x.dtype.element_ty != tl.float32 and FORM.few != "rest")
        z = tl.where((column < tl.cdiv(length, FORM.turn) * FORM.turn)[None, :], z, 0.0)
    high: tl.constexpr = FORM.lines // FORM.rows
    number: tl.constexpr = FORM.length // FORM.block
    tiles = tl.reshape(z, (high, FORM.rows, number, FORM.block))
    most = tl.max(tl.max(magnitude(tiles), axis=3), axis=1)
    if largest is not None:
        tl.atomic_max(largest, tl.max(tl.max(most, axis=1), axis=0))
    row, block = first_line // FORM.rows + tl.arange(0, high), first // FORM.block + tl.arange(0, number)
    amax = tl.full((1, 1), 1.0, tl.float32)
    if FORM.outer == "tensor":
        amax = tl.load(outer) + tl.zeros((1, 1), tl.float32)
    elif FORM.outer == "row":
        amax = tl.load(outer + line, mask=line < lines, other=0.0)[:, None]
    elif FORM.outer == "block":
        amax = float_of(tl.max(most, axis=1))[:, None]
    scale = encode(amax, FORM)
    random = tiles
    if FORM.rounding == "stochastic":
        random = tl.reshape(element_bits(line, first, width, draw, FORM), tiles.shape)
    chances = float_of(most)
    if FORM.scale is not None and (FORM.scale_rounding == "stochastic" or FORM.eden):
        chances = scale_bits(row, block, width // FORM.block, draw)
    if FORM.scale is None:
        codes = elements(tiles * scale[:, None, :, None], random, FORM)
        made = most
    else:
        if FORM.selection is not None:
            codes, made = selected_codes(tiles, most, amax, scale, FORM)
        elif len(FORM.lengths) > 0:
            codes, made = micro_codes(tiles, most, random, chances, FORM)
        else:
            codes, made = scaled_codes(tiles, most, scale, random, chances, FORM)
        if scales is not None:
            at = places(row, block, tl.cdiv(lines, FORM.rows), width // FORM.block, FORM.down)
            known = (row * FORM.rows < lines)[:, None] & (block * FORM.block < width)[None, :]
            tl.store(scales + at, made, mask=known)
        codes = codes * made[:, None, :, None]
    if FORM.outer == "block":
        codes = codes * (amax * FORM.divisor)[:, None, :, None]
    value = tl.reshape(codes, (FORM.lines, FORM.length))
    at = places(line, column, lines, width, FORM.down)
    known = (line < lines)[:, None] & (column < width)[None, :]
    if FORM.few == "kept":  # side by side in each row of memory
        at = (column[None, :] if FORM.down else line[:, None]).to(tl.int64) * few + spot
        known = known & (spot >= 0)
    tl.store(values + at, stored(value, values.dtype.element_ty, FORM.exact), mask=known)


@triton.jit
def scaled_codes(tiles, most, scale, random, chances, FORM: tl.constexpr):
    """Return the codes of a tile, like it, and its block scales, like `most`."""
    largest = float_of(most)
    if FORM.statistic != "amax":
        largest = spread(tiles, largest, FORM)
    made = scales_of(largest, scale, chances, FORM)
    y = scaled(tiles, factor_of(made, scale)[:, None, :, None], FORM)
    codes = elements(y, random, FORM)
    if FORM.eden:
        made = block_scale(made * correction(y, codes, made, FORM), chances, FORM, "stochastic")
    return codes, made


@triton.jit
def correction(y, codes, made, FORM: tl.constexpr):
    """Return MS-EDEN's factor of block scales, like `made`: <y, y> / <y, q> of each rotated group."""
    y = tl.where((made == 0)[:, None, :, None], 0.0, y)
    groups: tl.constexpr = FORM.lines * FORM.length // FORM.turn
    power = tree_sum(y * y, groups, FORM.turn_levels)
    inner = tree_sum(y * codes, groups, FORM.turn_levels)
    factor = tl.where(inner == 0, 1.0, tl.div_rn(power, inner))
    each: tl.constexpr = FORM.turn // FORM.block
    return tl.reshape(tl.broadcast_to(factor[:, None], (groups, each)), made.shape)


@triton.jit
def micro_codes(tiles, most, random, chances, FORM: tl.constexpr):
    """Return codes times the powers of two of sub-blocks, and block scales: see scaling.micro_scales."""
    made = block_scale(nearest_bf16(float_of(most) * FORM.unit), chances, FORM, FORM.scale_rounding)
    reciprocal = nearest_bf16(tl.div_rn(1.0, made))[:, None, :, None]
    y = tl.reshape(float_of(magnitude(tiles)) * reciprocal, (FORM.lines * FORM.length,))
    power = tl.full((FORM.lines * FORM.length,), 1.0, tl.float32)
    for level in tl.static_range(len(FORM.lengths)):
        power = raised(y, power, FORM.lengths[level], 2.0 ** (len(FORM.lengths) - level))
    power = tl.reshape(power, tiles.shape)
    return elements(tiles * (reciprocal * inverse(power)), random, FORM) * power, made


@triton.jit
def raised(y, power, SIZE: tl.constexpr, LIMIT: tl.constexpr):
    """Return the powers of elements, twice as large in sub-blocks of SIZE whose largest y reaches LIMIT."""
    parts = tl.reshape(y * inverse(power), (y.shape[0] // SIZE, SIZE))
    reached = (float_of(tl.max(magnitude(parts), axis=1)) >= LIMIT)[:, None]
    power = tl.where(reached, 2.0, 1.0) * tl.reshape(power, (y.shape[0] // SIZE, SIZE))
    return tl.reshape(power, (y.shape[0],))


@triton.jit
def selected_codes(tiles, most, amax, scale, FORM: tl.constexpr):
    """Return the codes and block scales of the candidate with the smaller error: `select.select`."""
    base = tl.div_rn(float_of(most), 6.0) * scale
    if len(FORM.pair) > 0:
        one = block_scale(base * FORM.pair[0], base, FORM, FORM.scale_rounding)
        two = block_scale(base * FORM.pair[1], base, FORM, FORM.scale_rounding)
    else:
        one = block_scale(base, base, FORM, FORM.scale_rounding)
        two = one
    first = elements(tiles * factor_of(one, scale)[:, None, :, None], tiles, FORM)
    y = tiles * factor_of(two, scale)[:, None, :, None]
    if len(FORM.pair) > 0:
        second = elements(y, tiles, FORM)
    else:
        size = on_grid(float_of(magnitude(y * FORM.to_even)), tiles, FORM.even, "nearest", 8)
        second = float_of(bits_of(size * FORM.from_even) | (bits_of(y) & -(2**31)))
    better = block_error(second, two, tiles, amax, FORM) < block_error(first, one, tiles, amax, FORM)
    return tl.where(better[:, None, :, None], second, first), tl.where(better, two, one)


@triton.jit
def block_error(codes, made, tiles, amax, FORM: tl.constexpr):
    """Return the error of each block of sixteen in the original domain, like `made`."""
    value = codes * made[:, None, :, None]
    if FORM.outer is not None:
        value = tl.div_rn(value * amax[:, None, :, None], FORM.outer_top)
    difference = value - tiles
    if FORM.selection == "absmax":
        error = float_of(tl.max(tl.max(magnitude(difference), axis=3), axis=1))
    else:
        size = difference * difference if FORM.selection == "mse" else float_of(magnitude(difference))
        error = tl.reshape(sum_of_sixteen(size, FORM.lines * FORM.length // 16), made.shape)
    return error


# --- kernels --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=CHANGING)
def amaxes(
    x, out, rows, columns, lines, word0, word1, word2, word3,
    other_word0, other_word1, other_word2, other_word3, FIRST: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    """Find the amaxes of x [rows, columns], of x rotated down its columns by OTHER, and along its rows by
    FIRST: their bits, `out` [3], or [2] without FIRST, int32 zeros at first. `lines` is `columns`."""
    bf16: tl.constexpr = x.dtype.element_ty != tl.float32
    if FIRST is not None:
        amaxes_of_tile(x, out, out + 2, rows, columns, (word0, word1, word2, word3), bf16, FIRST)
    if OTHER is not None:
        plain = out if FIRST is None else None
        if OTHER.slab:
            amaxes_of_slab(x, plain, out + 1, rows, columns, other_word0, bf16)
        else:
            words = other_word0, other_word1, other_word2, other_word3
            amaxes_of_tile(x, plain, out + 1, lines, rows, words, bf16, OTHER)
    elif FIRST is None:
        amaxes_of_slab(x, out, None, rows, columns, word0, bf16)


@triton.jit
def amaxes_of_tile(x, plain, turned, lines, length, words, BF16: tl.constexpr, FORM: tl.constexpr):
    first_line, first = place_of_tile(lines, length, FORM)
    z = load_tile(x, first_line, first, lines, length, FORM.down, FORM)
    if plain is not None:
        tl.atomic_max(plain, tl.max(tl.max(magnitude(z), axis=1), axis=0))
    tl.atomic_max(turned, tl.max(tl.max(magnitude(rotated(z, words, FORM, BF16)), axis=1), axis=0))


@triton.jit
def amaxes_of_slab(x, plain, turned, rows, columns, signs, BF16: tl.constexpr):
    first_row, first = place(rows, columns, 16, COLUMNS)
    loaded = load_slab(x, first_row // 16, first + tl.arange(0, COLUMNS), rows, columns)
    if plain is not None:
        tl.atomic_max(plain, tl.max(largest_of(loaded), axis=0))
    if turned is not None:
        tl.atomic_max(turned, tl.max(largest_of(rotate(loaded, signs, BF16)), axis=0))


@triton.jit(do_not_specialize=["row_amax", *CHANGING])
def row_amaxes(x, row_amax, lines, length, word0, word1, word2, word3, FORM: tl.constexpr):
    """Find the amax of each line of x, rotated by FORM or not: `row_amax` [lines], fp32."""
    first_line, first = tl.program_id(0) * FORM.lines, tl.full((), 0, tl.int32)
    most = tl.full((FORM.lines,), 0, tl.int32)
    for _ in range(0, tl.cdiv(length, FORM.length)):
        z = load_tile(x, first_line, first, lines, length, FORM.down, FORM)
        if FORM.turn > 0:
            z = rotated(z, (word0, word1, word2, word3), FORM, x.dtype.element_ty != tl.float32)
        most = tl.maximum(most, tl.max(magnitude(z), axis=1))
        first += FORM.length
    line = first_line + tl.arange(0, FORM.lines)
    tl.store(row_amax + line, float_of(most), mask=line < lines)


@triton.jit(do_not_specialize=CHANGING)
def cast(
    x, rows, columns, lines,
    values, scales, outer, largest, width, word0, word1, word2, word3, where,
    other_values, other_scales, other_outer, other_largest, other_width,
    other_word0, other_word1, other_word2, other_word3, other_where,
    key0, key1, step, micro_batch, FIRST: tl.constexpr, OTHER: tl.constexpr, place=None, few=0,
):  # fmt: skip
    """Quantise x [rows, columns] along its rows by FIRST, and down its columns by OTHER; None: not.

    `lines` is `columns`. With a `place`, int32 [columns], the copies run in the same direction, of the `few`
    channels that have a place in the one, or -1, and of the others. Of each copy, `width` is the
    contraction's length, padded; `largest`, int32, 0 at first, gets the largest magnitude; `words` are the
    signs of its rotation and `where` is its draw site.
    """
    if FIRST is not None:
        words, draw = (word0, word1, word2, word3), (key0, key1, step, micro_batch, where)
        if FIRST.slab:
            cast_slab(x, values, scales, outer, largest, rows, columns, width, words, draw, FIRST)
        else:
            high, long = (lines, rows) if FIRST.down else (rows, columns)
            cast_tile(x, values, scales, outer, largest, high, long, width, words, draw, FIRST, place, few)
    if OTHER is not None:
        words = other_word0, other_word1, other_word2, other_word3
        draw = key0, key1, step, micro_batch, other_where
        if OTHER.slab:
            cast_slab(
                x, other_values, other_scales, other_outer, other_largest, rows, columns, other_width,
                words, draw, OTHER,
            )  # fmt: skip
        else:
            high, long = (lines, rows) if OTHER.down else (rows, columns)
            cast_tile(
                x, other_values, other_scales, other_outer, other_largest, high, long, other_width,
                words, draw, OTHER, place, few,
            )  # fmt: skip


@triton.jit(do_not_specialize=CHANGING)
def turn(
    x, values, factor, lines, length, width, across, word0, word1, word2, word3,
    FORM: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Rotate x by FORM, to `values` [lines, width], or BACK. With a `factor`, fp32 [lines, across], rotate
    there, multiply, round as x is stored, and rotate BACK."""
    words, bf16 = (word0, word1, word2, word3), x.dtype.element_ty == tl.bfloat16
    first_line, first = place_of_tile(lines, length, FORM)
    z = load_tile(x, first_line, first, lines, length, FORM.down, FORM)
    line, column = first_line + tl.arange(0, FORM.lines), first + tl.arange(0, FORM.length)
    known = (line < lines)[:, None] & (column < width)[None, :]
    if factor is not None:
        at = places(line, column, lines, across, FORM.down)
        z = rotated(z, words, FORM, bf16) * tl.load(factor + at, mask=known, other=0.0)
        z = nearest_bf16(z) if bf16 else z
    z = rotated(z, words, FORM, bf16, BACK)
    at = places(line, column, lines, width, FORM.down)
    tl.store(values + at, stored(z, values.dtype.element_ty), mask=known)
