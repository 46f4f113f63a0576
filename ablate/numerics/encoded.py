"""Operands in the bytes that tensor cores read: packed codes, block scales in their tiled layout.

The problem. An emulated operand holds code times block scale in bf16, since any device can multiply that. A
tensor core takes the two apart: codes of four or eight bits, and one byte of scale for 16 or 32 of them, in
tiles of 128x4 (stored.py, `swizzle`).

The idea. The product of a code and its scale is exact in bf16, so dividing by the scale returns the code,
exactly. `encode` writes what `quantize` returned, whichever recipe and kernel made it; `decode` reads it
back. Nothing is rounded here.

    family   codes                              one scale for
    nvfp4    two e2m1 a byte                    16 elements, e4m3
    mxfp4    two e2m1 a byte                    32 elements, e8m0
    mxfp8    one e4m3 or e5m2 a byte            32 elements, e8m0
    fp8      one e4m3 or e5m2 a byte            the operand: none

A block that is a multiple of that length, or square, repeats its scale. An operand without block scales gets
scales of 1. Elements with fewer bits than a code (int4 in e4m3) keep their values. The outer factor is not
among the bytes: `product.alpha` returns it.

A NaN stays one. FP4 has no code for it, so the scale of its block becomes NaN. An infinity, which no
quantiser here returns for a finite statistic, becomes NaN as well.

Refused, with a ValueError: a block that the layout cannot express.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ablate.numerics.kernels import cuda
from ablate.numerics.quantize import Operand
from ablate.numerics.stored import pack, swizzle, unpack, unswizzle

Family = Literal["nvfp4", "mxfp4", "fp8", "mxfp8"]
LENGTHS = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
"""Elements of a block scale, by family."""
SCALE_DTYPES = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.float8_e8m0fnu, "mxfp8": torch.float8_e8m0fnu}
ROWS, COLUMNS = 32, 32
"""Numbers that rows and columns are padded to multiples of, with zeros. cuBLASLt takes multiples of 16 bytes,
thus of 32 FP4 elements along the contraction; CUTLASS also 32 rows of the second operand."""


@dataclass(frozen=True)
class Encoded:
    """Operand [rows, columns] as bytes, both padded to multiples of 32 with zeros."""

    family: Family
    data: Tensor
    """[padded rows, padded columns] of float8_e4m3fn or float8_e5m2, or half as many columns of
    float4_e2m1fn_x2."""
    scales: Tensor | None
    """Flat, in the layout of `stored.swizzle`; None for the family fp8."""
    rows: int
    """Rows before padding."""

    @property
    def columns(self) -> int:
        """Padded number of columns."""
        return self.data.shape[1] * (2 if self.data.dtype == torch.float4_e2m1fn_x2 else 1)

    @property
    def tiled_scales(self) -> Tensor | None:
        """The scales' bytes, uint8, as [rows padded to 128, scales of a row padded to 4], still tiled."""
        if self.scales is None:
            return None
        across = self.columns // LENGTHS[self.family]
        return self.scales.view(torch.uint8).view(-1, across + -across % 4)


def encode(operand: Operand, family: Family, eight: str = "e4m3", columns: int = 0) -> Encoded:
    """Return a quantised operand as bytes of a layout that can hold it (`recipes.scaled_mapping.fit`).

    `eight` is the element of the families fp8 and mxfp8, `e4m3` or `e5m2`; `columns` the least number of
    columns, for an operand that is multiplied by a longer one. ValueError if a block scale stands for a
    number of elements that is not a multiple of the layout's.
    """
    rows, own = operand.values.shape
    width = max(own, columns)
    width += -width % COLUMNS
    tall = rows + -rows % ROWS
    if family in ("nvfp4", "mxfp4") and can_pack(operand.values):
        return packed_by_kernel(operand, family, (tall, width))
    values = F.pad(operand.values.to(torch.float32), (0, width - own, 0, tall - rows)).contiguous()
    if family == "fp8":
        return Encoded(family, _bytes(values, eight), None, rows)
    scales = _scales(operand, family)
    scales = F.pad(scales, (0, width // LENGTHS[family] - scales.shape[1], 0, tall - rows)).contiguous()
    blocks = values.view(tall, -1, LENGTHS[family])
    codes = torch.where(scales.unsqueeze(2) == 0, blocks, blocks / scales.unsqueeze(2)).view(tall, width)
    if family == "mxfp8":
        data = _bytes(codes, eight)
    else:
        data = pack(codes).view(torch.float4_e2m1fn_x2)
        scales = scales.masked_fill(~blocks.isfinite().all(2), torch.nan)  # an FP4 code cannot be NaN
    return Encoded(family, data, swizzle(scales.to(SCALE_DTYPES[family])), rows)


def can_pack(values: Tensor) -> bool:
    """Return True if a kernel packs these values: those of bf16 on an NVIDIA GPU with a suitable Triton."""
    return (
        values.is_cuda
        and values.dtype == torch.bfloat16
        and values.numel() > 0
        and cuda.runs_on(values.device)
    )


def packed_by_kernel(operand: Operand, family: Family, shape: tuple[int, int]) -> Encoded:
    """Return what `encode` returns for bf16 in nvfp4 or mxfp4, in one pass; `shape`: as padded."""
    from ablate.numerics.kernels import packing

    tiles = None if operand.block_scale is None else operand.block_scale[:, 0, :, 0]
    tile = (1, LENGTHS[family]) if tiles is None or operand.quant is None else operand.quant.tile
    if tile[1] % LENGTHS[family]:
        raise ValueError(f"block {tile[0]}x{tile[1]}: {family} has one scale for {LENGTHS[family]} elements")
    codes, scales = packing.pack(
        operand.values, tiles, tile, LENGTHS[family], SCALE_DTYPES[family] == torch.float8_e8m0fnu, shape
    )
    data = codes.view(torch.float4_e2m1fn_x2)
    return Encoded(family, data, scales.view(SCALE_DTYPES[family]), len(operand.values))


def decode(encoded: Encoded) -> Tensor:
    """Return code times block scale, fp32 [padded rows, padded columns], read back from the bytes."""
    if encoded.data.dtype == torch.float4_e2m1fn_x2:
        codes = unpack(encoded.data.view(torch.uint8))
    else:
        codes = encoded.data.to(torch.float32)
    if encoded.scales is None:
        return codes
    length = LENGTHS[encoded.family]
    scales = unswizzle(encoded.scales, len(codes), codes.shape[1] // length).to(torch.float32)
    return codes * scales.repeat_interleave(length, 1)


def _scales(operand: Operand, family: Family) -> Tensor:
    """Return the scale of every block of the layout, fp32 [rows, columns / length]; 1 if there is none."""
    rows, columns = operand.values.shape
    length = LENGTHS[family]
    if operand.block_scale is None:
        across = -(-columns // length)
        return torch.ones(rows, across, dtype=torch.float32, device=operand.values.device)
    assert operand.quant is not None
    tall, wide = operand.quant.tile
    if wide % length:
        raise ValueError(f"block {operand.quant.block}: {family} has one scale for {length} elements")
    tiles = operand.block_scale[:, 0, :, 0]
    tiles = tiles if tall == 1 else tiles.repeat_interleave(tall, 0)[:rows]
    return tiles if wide == length else tiles.repeat_interleave(wide // length, 1)


def _bytes(codes: Tensor, eight: str) -> Tensor:
    return codes.to(torch.float8_e5m2 if eight == "e5m2" else torch.float8_e4m3fn)
