"""Order statistics of magnitudes for GPUs: device code in Triton, launched by cuda.py.

Torch's `kthvalue` selects by one thread block, whatever the size of the tensor, and takes over a second for
a layer's gradient. A magnitude has 15 or 31 bits, which are ordered as the magnitudes are. So `counted` makes
a histogram of the upper 15 bits, and `selected` finds the bin that holds the rank. In fp32 a second pair of
calls does the same for the lower 16 bits of the magnitudes in that bin.

A NaN counts as larger than infinity, as in `kthvalue`: the statistic is NaN only if its rank falls among the
NaNs. Counts are integers, so no order of additions matters, and nothing waits for the device.
"""

import triton
import triton.language as tl

from ablate.numerics.kernels.nvfp4 import largest_of, load_slab, magnitude, place, rotate

UPPER, LOWER = 2**15, 2**16
"""Bins of the upper 15 bits of a magnitude, and of the lower 16."""
_CHUNK = tl.constexpr(4096)


@triton.jit(do_not_specialize=["signs", "found", "largest"])
def counted(x, signs, counts, found, largest, rows, columns, SECOND: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the magnitudes of x [rows, columns] to a histogram, rotated first if there are signs.

    A rotated copy is padded to sixteen rows, and what the rotation makes of the padding counts. Zeros, of
    which a tensor may have millions, are added up before they go to their bin.

    Args:
        x: bf16, or fp32 without signs.
        counts: int32, zeros at first: the upper bits, or, if SECOND, the lower bits below the bin found[0].
        largest: int32, zero at first: receives the bits of the largest magnitude, in the first call.
    """
    slab, first = place(columns, COLUMNS)
    column = first + tl.arange(0, COLUMNS)
    loaded = load_slab(x, slab, column, rows, columns)
    height = rows
    if signs is not None:
        loaded = rotate(loaded, signs)
        height = tl.cdiv(rows, 16) * 16
    if not SECOND:
        tl.atomic_max(largest, tl.max(largest_of(loaded), axis=0))
    zeros = column * 0
    for r in tl.static_range(16):
        bits = magnitude(loaded[r])
        inside = (column < columns) & (slab * 16 + r < height)
        bin = bits >> 16
        if SECOND:
            inside = inside & (bin == tl.load(found))
            bin = bits & 0xFFFF
        tl.atomic_add(counts + bin, 1, mask=inside & (bin != 0), sem="relaxed")
        zeros += (inside & (bin == 0)).to(tl.int32)
    tl.atomic_add(counts, tl.sum(zeros, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["rank", "found"])
def selected(counts, found, rank, BINS: tl.constexpr, SECOND: tl.constexpr):
    """Find the bin with the magnitude of this rank, counted from 1; one program.

    `found`, int32 [3]: the bin of the upper bits, the rank within it, and the bits of the magnitude. If
    SECOND, the rank is that of found[1].
    """
    wanted = rank
    if SECOND:
        wanted = tl.load(found + 1)
    offset = tl.arange(0, _CHUNK)
    before, below, place_of = 0, 0, 0
    for chunk in range(BINS // _CHUNK):
        count = tl.load(counts + chunk * _CHUNK + offset)
        passed = before + tl.cumsum(count, axis=0) < wanted
        place_of += tl.sum(passed.to(tl.int32), axis=0)
        below += tl.sum(tl.where(passed, count, 0), axis=0)
        before += tl.sum(count, axis=0)
    if SECOND:
        tl.store(found + 2, (tl.load(found) << 16) | place_of)
    else:
        tl.store(found, place_of)
        tl.store(found + 1, wanted - below)
        tl.store(found + 2, place_of << 16)
