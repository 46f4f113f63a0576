"""Order statistics of magnitudes for GPUs: device code in Triton, launched by cuda.py.

Torch's `kthvalue` selects by one thread block, whatever the size of the tensor, and takes over a second for
a layer's gradient. A magnitude has 15 or 31 bits, which are ordered as the magnitudes are. So the rank is
found digit by digit: `counted` makes a histogram of one digit of those magnitudes that have the digits found
before, and its last program finds the digit of the rank in it. Digits have 8 bits at most, since most values
share few exponents: each program counts in its own memory, and adds to the common bins once. Additions of all
elements to common bins were 25 times slower on an H200.

A NaN counts as larger than infinity, as in `kthvalue`: the statistic is NaN only if its rank falls among the
NaNs. Counts are integers, so no order of additions matters, and nothing waits for the device.
"""

import triton
import triton.language as tl

from ablate.numerics.kernels.arithmetic import (
    COLUMNS,
    largest_of,
    load_slab,
    magnitude,
    place,
    rotate,
)

DIGITS = {2: ((23, 8), (16, 7)), 4: ((23, 8), (16, 7), (8, 8), (0, 8))}
"""Lowest bit and number of bits of each digit of a magnitude, by the bytes of an element."""


@triton.jit
def _joined(parts, COUNT: tl.constexpr):
    """Join a tuple's neighbours along a new last axis."""
    pairs = ()
    for number in tl.static_range(COUNT // 2):
        pairs += (tl.join(parts[2 * number], parts[2 * number + 1]),)
    return pairs


@triton.jit(do_not_specialize=["signs", "ended", "found", "largest", "rank"])
def counted(
    x, signs, counts, ended, found, largest, rank, rows, columns,
    SHIFT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add one digit, WIDTH bits from SHIFT on, of the magnitudes of x [rows, columns] to a histogram, and
    find that of the rank.

    x is bf16, or fp32 without signs; with signs it is rotated first and padded to sixteen rows, and what the
    rotation makes of the padding counts. `counts`, int32 [2**WIDTH], zeros at first: one digit of those with
    the digits found[0] before it. `ended`, int32, zero at first: programs that have ended. `largest`, int32,
    zero at first: receives the bits of the largest magnitude with the first digit.
    """
    FIRST: tl.constexpr = SHIFT + WIDTH == 31
    first_row, first = place(rows, columns, 16, COLUMNS)
    slab = first_row // 16
    column = first + tl.arange(0, COLUMNS)
    loaded = load_slab(x, slab, column, rows, columns)
    height = rows
    if signs is not None:
        loaded = rotate(loaded, signs, True)
        height = tl.cdiv(rows, 16) * 16
    if FIRST:
        tl.atomic_max(largest, tl.max(largest_of(loaded), axis=0))
    else:
        before = tl.load(found)
    others = column * 0
    digits = ()
    for r in tl.static_range(16):
        bits = magnitude(loaded[r])
        inside = (column < columns) & (slab * 16 + r < height)
        if not FIRST:
            inside = inside & (bits >> (SHIFT + WIDTH) == before)
        digits += (tl.where(inside, (bits >> SHIFT) & ((1 << WIDTH) - 1), 0),)
        others += (inside == 0).to(tl.int32)
    all_digits = _joined(_joined(_joined(_joined(digits, 16), 8), 4), 2)[0]
    flat = tl.reshape(all_digits, [16 * COLUMNS], can_reorder=True)
    digit = tl.arange(0, 1 << WIDTH)
    found_here = tl.histogram(flat, 1 << WIDTH) - tl.where(digit == 0, tl.sum(others, axis=0), 0)
    tl.atomic_add(counts + digit, found_here, mask=found_here != 0, sem="relaxed")
    tl.debug_barrier()  # all threads have added, before the one that counts this program releases the sums
    if tl.atomic_add(ended, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        selected(counts, found, rank, SHIFT, WIDTH)


@triton.jit
def selected(counts, found, rank, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """Find the digit of the magnitude of this rank, counted from 1; the last program, which sees all sums.

    `found`, int32 [3]: the digits so far, the rank among the magnitudes that have them, and the bits of the
    smallest of those. After the first digit the rank is that of found[1].
    """
    wanted, before = rank, 0
    if SHIFT + WIDTH < 31:
        wanted = tl.load(found + 1)
        before = tl.load(found)
    count = tl.load(counts + tl.arange(0, 1 << WIDTH))
    passed = tl.cumsum(count, axis=0) < wanted
    digits = (before << WIDTH) | tl.sum(passed.to(tl.int32), axis=0)
    tl.store(found, digits)
    tl.store(found + 1, wanted - tl.sum(tl.where(passed, count, 0), axis=0))
    tl.store(found + 2, digits << SHIFT)
