"""Device code in Triton, launched by general_cuda.py: what a quantiser rounded, and slopes of casts of it."""

import triton
import triton.language as tl

from ablate.numerics.kernels.arithmetic import at_most, float_of, inverse, magnitude, step_of, to_float
from ablate.numerics.kernels.general_triton import encode, factor_of, scaled

BEYOND = tl.constexpr(1 + 2.0**-20)
"""Tolerance of `dge`: the largest element of a row may lie a few ulps above the grid, because its scale was
rounded."""


@triton.jit(do_not_specialize=["outer", "count"])
def rescaled(
    x, out, scales, outer, rows, columns, count, FORM: tl.constexpr, ESTIMATOR: tl.constexpr
):  # fmt: skip
    """Write what FORM rounds of x [rows, columns], which are whole blocks, or an ESTIMATOR's function of it.

    That of `clip_mask` is its result; that of `dge` the distance from the middle of two neighbours, twice, in
    steps, and infinity beyond the grid. `out` and the block scales are stored as x is.
    """
    at = tl.program_id(0).to(tl.int64) * (FORM.lines * FORM.length) + tl.arange(0, FORM.lines * FORM.length)
    inside = at < count
    number = at.to(tl.int32)  # whose division is cheaper
    row, column = (number % rows, number // rows) if FORM.down else (number // columns, number % columns)
    amax = tl.full((1,), 1.0, tl.float32)
    if FORM.outer == "row":
        amax = tl.load(outer + row // FORM.rows * FORM.rows, mask=inside, other=1.0)
    elif FORM.outer == "tensor":
        amax = tl.load(outer) + tl.zeros((1,), tl.float32)
    factor = encode(amax, FORM)
    if FORM.scale is not None:
        high, across = tl.cdiv(rows, FORM.rows), tl.cdiv(columns, FORM.block)
        down, along = row // FORM.rows, column // FORM.block
        block = along * high + down if FORM.down else down * across + along
        factor = factor_of(tl.load(scales + block, mask=inside, other=1.0), factor)
    y = scaled(to_float(tl.load(x + at, mask=inside, other=0.0)), factor, FORM)
    size = float_of(magnitude(y))
    if ESTIMATOR == "clip_mask":
        y = tl.where(size < FORM.element.top, 1.0, 0.0)
    elif ESTIMATOR == "dge":
        within = at_most(size, FORM.element.top)
        position = within * inverse(step_of(within, FORM.element.mantissa, FORM.element.emin))
        y = float_of(magnitude((position - tl.floor(position)) * 2.0 - 1.0))
        y = tl.where(size > FORM.element.top * BEYOND, float("inf"), y)
    tl.store(out + at, y, mask=inside)
