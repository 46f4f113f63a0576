"""Quantisers of parts of a matrix, such as the rows of each expert: device code in Triton.

The idea: a part is a matrix of its own that lies in a larger one. The second axis of the grid counts parts,
and each program moves the pointers of general_triton.py's kernels to its part, which then compute what they
compute of a whole matrix. A part's first row, rows, draw sites and signs come from a table in memory: as
arguments, they would be one launch for each part. Programs that a short part does not need end at once.

Outputs have room to spare, so that a part's place follows from its number and its first row alone: in units
of SIZE rows, parts before it with `begin` rows need at most begin // SIZE + part.
"""

import triton
import triton.language as tl

from ablate.numerics.kernels import general_triton
from ablate.numerics.kernels.general_triton import amaxes, cast, row_amaxes

ENTRIES = tl.constexpr(14)
"""Numbers of a part in the table: first row, rows, programs of the amaxes and of the cast, and of each copy
the draw site and four words of signs."""
CHANGING = ["table", "row_amax", *general_triton.CHANGING]


@triton.jit
def draws(table, COPY: tl.constexpr):
    """Return the draw site of a copy of a part, and the words of its signs."""
    at = table + tl.program_id(1) * ENTRIES + (4 + 5 * COPY)
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def outputs(values, scales, outer, largest, begin, rows, columns, FORM: tl.constexpr):
    """Return where a copy of a part is written, and the padded length of its contraction."""
    part = tl.program_id(1).to(tl.int64)
    width = tl.cdiv(rows if FORM.down else columns, FORM.whole) * FORM.whole
    first = (begin // FORM.whole + part) * FORM.whole if FORM.down else begin.to(tl.int64)
    across = columns if FORM.down else width
    values += first * across
    if scales is not None:
        if FORM.down:
            scales += first // FORM.block * tl.cdiv(columns, FORM.rows)
        else:
            scales += (begin // FORM.rows + part) * (width // FORM.block)
    if outer is not None:  # of a tensor, they are those of `amaxes_of_parts`
        outer += 3 * part if FORM.outer == "tensor" else part * columns if FORM.down else begin
    if largest is not None:
        largest += part
    return values, scales, outer, largest, width


@triton.jit(do_not_specialize=CHANGING)
def amaxes_of_parts(x, table, out, columns, FIRST: tl.constexpr, OTHER: tl.constexpr):
    """Find what `amaxes` finds, of each part: `out` [parts, 3], int32 zeros at first."""
    at = table + tl.program_id(1) * ENTRIES
    begin, rows = tl.load(at), tl.load(at + 1)
    if tl.program_id(0) < tl.load(at + 2):
        _, a0, a1, a2, a3 = draws(table, 0)
        _, b0, b1, b2, b3 = draws(table, 1)
        x += begin.to(tl.int64) * columns
        out += 3 * tl.program_id(1)
        amaxes(x, out, rows, columns, columns, a0, a1, a2, a3, b0, b1, b2, b3, FIRST, OTHER)


@triton.jit(do_not_specialize=CHANGING)
def row_amaxes_of_parts(x, table, row_amax, columns, COPY: tl.constexpr, FORM: tl.constexpr):
    """Find what `row_amaxes` finds, of a copy of each part: [rows] of x, or FORM.down [parts, columns]."""
    at = table + tl.program_id(1) * ENTRIES
    begin, rows = tl.load(at), tl.load(at + 1)
    _, w0, w1, w2, w3 = draws(table, COPY)
    lines, length = (columns, rows) if FORM.down else (rows, columns)
    if tl.program_id(0) * FORM.lines < lines:
        x += begin.to(tl.int64) * columns
        row_amax += tl.program_id(1).to(tl.int64) * columns if FORM.down else begin
        row_amaxes(x, row_amax, lines, length, w0, w1, w2, w3, FORM)


@triton.jit(do_not_specialize=CHANGING)
def cast_parts(
    x, table, columns, values, scales, outer, largest, other_values, other_scales, other_outer, other_largest,
    key0, key1, step, micro_batch, FIRST: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    """Quantise each part of x as `cast` quantises a matrix. `largest` is int32 [parts], 0 at first."""
    at = table + tl.program_id(1) * ENTRIES
    begin, rows = tl.load(at), tl.load(at + 1)
    if tl.program_id(0) < tl.load(at + 3):
        width, other_width = columns, columns
        if FIRST is not None:
            values, scales, outer, largest, width = outputs(
                values, scales, outer, largest, begin, rows, columns, FIRST
            )
        if OTHER is not None:
            other_values, other_scales, other_outer, other_largest, other_width = outputs(
                other_values, other_scales, other_outer, other_largest, begin, rows, columns, OTHER
            )
        a, a0, a1, a2, a3 = draws(table, 0)
        b, b0, b1, b2, b3 = draws(table, 1)
        cast(
            x + begin.to(tl.int64) * columns, rows, columns, columns,
            values, scales, outer, largest, width, a0, a1, a2, a3, a,
            other_values, other_scales, other_outer, other_largest, other_width, b0, b1, b2, b3, b,
            key0, key1, step, micro_batch, FIRST, OTHER,
        )  # fmt: skip
