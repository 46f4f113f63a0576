"""Arithmetic of the kernels for GPUs, by the bits, and slabs of sixteen rows: device code in Triton."""

import triton
import triton.language as tl

FLT_MAX = tl.constexpr(3.4028234663852886e38)
ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding and subtracting it rounds a small float to the nearest even integer."""

COLUMNS = tl.constexpr(256)
"""Width of a slab."""


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
    """bf16 or fp32 to fp32; int32 are the bits of fp32, which is rounded to bf16 first. By the bits, since
    Triton's interpreter converts subnormal bf16 wrongly."""
    if x.dtype == tl.bfloat16:
        return float_of(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    elif x.dtype == tl.int32:
        return nearest_bf16(float_of(x))
    else:
        return x


@triton.jit
def nearest_bf16(z):
    """Return fp32 rounded to bf16, in fp32. By the bits: Triton's interpreter does not round to even."""
    even = (bits_of(z) + 0x7FFF + (bits_of(z) >> 16 & 1)) & -0x10000
    return tl.where(z == z, float_of(even), z)  # the sum would turn a GPU's own NaN, 0x7FFFFFFF, into -0


@triton.jit
def stored(z, dtype: tl.constexpr, EXACT: tl.constexpr = True):
    """fp32 that is EXACT in bf16, or the NaN of an operation, to bf16 if that is the type in memory; rounded
    if not. By the bits: the interpreter converts neither subnormals nor every NaN."""
    z = z if EXACT else nearest_bf16(z)
    return (bits_of(z) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True) if dtype == tl.bfloat16 else z


@triton.jit
def step_of(y, mantissa: tl.constexpr, emin: tl.constexpr):
    """Return the distance between the neighbours of y >= 0: 2^(max(exponent, emin) - mantissa)."""
    exponent = tl.maximum(bits_of(y) & 0x7F800000, (emin + 127) << 23)
    return float_of(exponent - (mantissa << 23))


@triton.jit
def inverse(power):
    return float_of((254 << 23) - bits_of(power))


# --- a slab of sixteen rows -----------------------------------------------------------------------


@triton.jit
def load_slab(x, slab, column, rows, columns):
    """Sixteen rows of memory, each fp32 of the shape of `column`; zeros beyond the edges."""
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
def rotate(slab, signs, BF16: tl.constexpr):
    """Rotate rows: as `rotated`, with sixteen signs. The result stays in fp32.

    Not `tl.dot` with H: sixteen bf16 of different exponents do not add exactly in fp32, and a tensor core
    adds in an order, and with a width, of its own.
    """
    turned = ()
    for r in tl.static_range(16):
        turned += (float_of(bits_of(slab[r]) ^ ((signs >> r & 1) << 31)),)
    turned = butterfly(butterfly(butterfly(butterfly(turned, 1), 2), 4), 8)
    rounded = ()
    for r in tl.static_range(16):
        rounded += (nearest_bf16(turned[r] * 0.25) if BF16 else turned[r] * 0.25,)
    return rounded


@triton.jit
def place(rows, columns, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """This program's first row and first column in memory: those of a part, HIGH rows and WIDE columns.

    One axis, since the others hold at most 65,535 programs. Both copies of a launch walk along the rows of
    memory, so that the second read of x comes from the cache.
    """
    across = tl.cdiv(columns, WIDE)
    return tl.program_id(0) // across * HIGH, tl.program_id(0) % across * WIDE
