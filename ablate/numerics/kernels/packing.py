"""Packing of quantised operands for FP4 tensor cores: device code in Triton, launched by `pack` below.

`encoded.encode` does the same by a dozen operations of torch, each of which reads and writes the whole
tensor in fp32. This kernel reads the bf16 values once and writes half a byte an element. Its bytes are the
reference's, for numbers that are not finite too.

Every program takes 16 rows and 8 block scales. The two columns of a byte are loaded apart, so nothing is
exchanged between threads.
"""

import torch
import triton
import triton.language as tl

from ablate.numerics.kernels.arithmetic import bits_of, magnitude, to_float

ROWS, BLOCKS = 16, 8
"""Rows and block scales of one program."""


@triton.jit
def code_of(value, scale):
    """Return the E2M1 code of value / scale, which is on the grid: a NaN is the largest code."""
    quotient = tl.where(scale == 0.0, value, tl.div_rn(value, scale))
    size = magnitude(quotient)
    code = (size >= 0x3F000000).to(tl.int32)  # the bits of 0.5, then of 1, 1.5, 2, 3, 4 and 6
    code += (size >= 0x3F800000).to(tl.int32)
    code += (size >= 0x3FC00000).to(tl.int32)
    code += (size >= 0x40000000).to(tl.int32)
    code += (size >= 0x40400000).to(tl.int32)
    code += (size >= 0x40800000).to(tl.int32)
    code += (size >= 0x40C00000).to(tl.int32)
    return code | ((bits_of(quotient) >> 28) & 8)


@triton.jit
def scale_byte(scale, E8M0: tl.constexpr):
    """Return the byte of a scale that its format holds exactly."""
    bits = bits_of(scale)
    if E8M0:
        return tl.where(scale != scale, 255, bits >> 23)
    else:
        small = (scale * 512.0).to(tl.int32)  # subnormals are multiples of 2^-9
        byte = tl.where(bits < 0x3C800000, small, (bits >> 20) - 960)
        return tl.where(scale != scale, 127, byte)


@triton.jit(do_not_specialize=["rows", "columns", "blocks"])
def packed(
    values, scales, codes, scale_bytes, rows, columns, blocks,
    row_stride, column_stride, tile_row_stride, tile_column_stride,
    HAS_SCALES: tl.constexpr, TALL: tl.constexpr, RATIO: tl.constexpr, LENGTH: tl.constexpr,
    E8M0: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write codes [padded rows, blocks * LENGTH / 2] and tiled scales of values [rows, columns]. Scale (r, b)
    of the layout is that of the tile (r / TALL, b / RATIO)."""
    row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    block = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (block < blocks)[None, :]
    own = inside & (block * LENGTH < columns)[None, :]
    if HAS_SCALES:
        place = (row // TALL).to(tl.int64)[:, None] * tile_row_stride + (block // RATIO)[
            None, :
        ] * tile_column_stride
        scale = tl.load(scales + place, mask=own, other=0.0)
    else:
        scale = tl.where(own, 1.0, 0.0)
    pair = tl.arange(0, LENGTH // 2)
    column = block[None, :, None] * LENGTH + 2 * pair[None, None, :]
    start = values + row.to(tl.int64)[:, None, None] * row_stride
    there = (row < rows)[:, None, None] & (block < blocks)[None, :, None]
    even = to_float(tl.load(start + column * column_stride, mask=there & (column < columns), other=0.0))
    odd = to_float(
        tl.load(start + (column + 1) * column_stride, mask=there & (column + 1 < columns), other=0.0)
    )
    byte = code_of(even, scale[:, :, None]) | (code_of(odd, scale[:, :, None]) << 4)
    width = blocks * (LENGTH // 2)
    target = codes + row.to(tl.int64)[:, None, None] * width + (column // 2)
    tl.store(target, byte.to(tl.uint8), mask=there)
    largest = tl.max(tl.maximum(magnitude(even), magnitude(odd)), axis=2)
    written = tl.where(largest >= 0x7F800000, 255 if E8M0 else 127, scale_byte(scale, E8M0))
    across = tl.cdiv(blocks, 4)
    tile = (row // 128)[:, None] * across + (block // 4)[None, :]
    within = ((row % 32) * 16 + (row % 128) // 32 * 4)[:, None] + (block % 4)[None, :]
    tl.store(scale_bytes + tile.to(tl.int64) * 512 + within, written.to(tl.uint8), mask=inside)


def pack(
    values: torch.Tensor,
    block_scale: torch.Tensor | None,
    tile: tuple[int, int],
    length: int,
    e8m0: bool,
    shape: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an operand's codes, uint8 [padded rows, padded columns / 2], and tiled scales, uint8, flat.

    `values` are code times scale, bf16 [rows, columns], in any layout. `block_scale` is fp32 [row tiles,
    column tiles], None for scales of 1, and `tile` the rows and columns of one, the columns a multiple of
    `length`, which is the layout's: 16 or 32. Scales are e8m0, or else e4m3. `shape`: padded rows and
    columns.
    """
    rows, columns = values.shape
    tall, blocks = shape[0], shape[1] // length
    # Zeros: code 0, and scale bytes of 0, in all padding.
    codes = torch.zeros(tall, shape[1] // 2, dtype=torch.uint8, device=values.device)
    padded = (tall + -tall % 128) * (blocks + -blocks % 4)
    scale_bytes = torch.zeros(padded, dtype=torch.uint8, device=values.device)
    scales = values if block_scale is None else block_scale
    strides = (0, 0) if block_scale is None else block_scale.stride()
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(blocks, BLOCKS))
    with torch.cuda.device_of(values):
        packed[grid](
            values, scales, codes, scale_bytes, rows, columns, blocks, *values.stride(), *strides,
            HAS_SCALES=block_scale is not None, TALL=tile[0], RATIO=max(1, tile[1] // length), LENGTH=length,
            E8M0=e8m0, HEIGHT=ROWS, WIDTH=BLOCKS, enable_fp_fusion=False, enable_reflect_ftz=False,
        )  # fmt: skip
    return codes, scale_bytes
