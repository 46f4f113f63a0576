"""NVFP4 tensors as ranks send them and a GPU holds them: packed codes, E4M3 block scales, one fp32 amax.

An element takes 4.5 bits instead of the 16 of an emulated operand, in the layouts that cuBLASLt and CUTLASS
read. Nothing is rounded here. Formats that the hardware layout cannot hold are refused: other elements than
E2M1, other block scales than E4M3, other outer scales than one amax for the tensor.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ablate.numerics.partition import Partition
from ablate.numerics.quantize import Operand, pad, quantize
from ablate.numerics.spec import Hadamard, Quant

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by the low three bits of an E2M1 code; the fourth bit is the sign."""
SWIZZLE_ROWS, SWIZZLE_COLUMNS = 128, 4
"""Tile of scales that one tensor-core instruction takes."""


# --- codes, two a byte ----------------------------------------------------------------------------


def pack(values: Tensor) -> Tensor:
    """Pack E2M1 values, fp32 [rows, columns], two to a byte: uint8 [rows, columns / 2].

    The even column is the low nibble. A zero keeps its sign, as in the hardware conversion, so -0 and
    negative values that were rounded to zero are code 8. Transformer Engine's reference differs for an input
    of -0, for which it writes 0. E2M1 has no NaN: NaN becomes 6, and the NaN in the block's scale shows it.
    ValueError if the number of columns is odd.
    """
    if values.shape[1] % 2:
        raise ValueError(
            f"pack puts two columns in a byte, and {values.shape[1]} is odd; pad the columns first"
        )
    boundaries = torch.tensor(MAGNITUDES[1:], dtype=torch.float32, device=values.device)
    magnitude = torch.bucketize(values.abs(), boundaries, right=True, out_int32=True).to(torch.uint8)
    codes = magnitude | (values.signbit().to(torch.uint8) << 3)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack(codes: Tensor) -> Tensor:
    """Return the E2M1 values, fp32 [rows, 2 n], of codes, uint8 [rows, n]; code 8 is -0."""
    table = torch.tensor(
        [sign * magnitude for sign in (1.0, -1.0) for magnitude in MAGNITUDES],
        dtype=torch.float32,
        device=codes.device,
    )
    nibbles = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)
    return table[nibbles.to(torch.int32)]


# --- block scales as the tensor cores read them ---------------------------------------------------


def swizzle(scales: Tensor) -> Tensor:
    """Return block scales in the layout of cuBLASLt's VEC16 scales and of CUTLASS, flat.

    `scales` is [rows, columns] of any one-byte dtype. Rows are padded with zero bytes to 128 and columns to
    4. The 128x4 tiles are in row-major order; within a tile the scale of row r and column c is at (r % 32) *
    16 + (r // 32) * 4 + c (cuBLAS, "1D block scaling factors layout"). Raises TypeError for wider dtypes.
    """
    if scales.element_size() != 1:
        raise TypeError(f"swizzle takes scales of one byte, not {scales.dtype}")
    padded = pad(scales.view(torch.uint8), SWIZZLE_ROWS, SWIZZLE_COLUMNS)
    tile_rows, tile_columns = padded.shape[0] // SWIZZLE_ROWS, padded.shape[1] // SWIZZLE_COLUMNS
    return (
        padded.view(tile_rows, 4, 32, tile_columns, 4).permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)
    )


def unswizzle(flat: Tensor, rows: int, columns: int) -> Tensor:
    """Return the scales [rows, columns] that `swizzle` laid out as `flat`; ValueError for a wrong size."""
    tile_rows, tile_columns = -(-rows // SWIZZLE_ROWS), -(-columns // SWIZZLE_COLUMNS)
    size = tile_rows * tile_columns * SWIZZLE_ROWS * SWIZZLE_COLUMNS
    if flat.shape != (size,):
        raise ValueError(
            f"{rows}x{columns} scales take {size} swizzled bytes in one dimension, not {list(flat.shape)}"
        )
    tiles = flat.view(torch.uint8).view(tile_rows, tile_columns, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return (
        tiles.reshape(tile_rows * SWIZZLE_ROWS, tile_columns * SWIZZLE_COLUMNS)[:rows, :columns]
        .contiguous()
        .view(flat.dtype)
    )


# --- one copy of a tensor -------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """One quantised copy of a tensor; ValueError if it cannot be stored or its parts do not fit together."""

    codes: Tensor
    """uint8 [rows, padded columns / 2]: the contraction is padded as quantize pads it, the rows are not."""
    scales: Tensor
    """float8_e4m3fn [row tiles, column tiles]: one a tile, so a 16x16 tile's is stored once."""
    amax: Tensor
    """fp32 scalar: outer statistic of the whole copy. Not finite if the quantised tensor was not."""
    columns: int
    """Elements along the contraction before padding."""
    quant: Quant
    rotation: Hadamard | None = None
    """Rotation applied before quantising. It is not undone, since it cancels in the product."""

    def __post_init__(self) -> None:
        refuse(self.quant)
        rows, width = self.codes.shape[0], 2 * self.codes.shape[1]
        tile_rows, tile_columns = self.quant.tile
        dtypes = (self.codes.dtype, self.scales.dtype, self.amax.dtype)
        if dtypes != (torch.uint8, torch.float8_e4m3fn, torch.float32):
            raise ValueError(
                "codes, scales and amax must be uint8, float8_e4m3fn and float32, "
                f"not {', '.join(map(str, dtypes))}"
            )
        tiles = (-(-rows // tile_rows), width // tile_columns)
        if width % tile_columns or self.scales.shape != tiles or self.amax.ndim or self.columns > width:
            raise ValueError(
                f"codes for {rows}x{width} elements ({self.columns} before padding), "
                f"scales {list(self.scales.shape)} and amax {list(self.amax.shape)} "
                f"do not fit {self.quant.block} tiles"
            )

    @property
    def rows(self) -> int:
        """Rows of the copy, which are never padded."""
        return self.codes.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, the block scales and the amax, padding included."""
        return self.codes.nbytes + self.scales.nbytes + self.amax.nbytes

    def operand(self) -> Operand:
        """Return the copy as the GEMM takes it, with the bits that quantize returned."""
        scales = self.scales.to(torch.float32)
        values = unpack(self.codes) * _over_elements(scales, self.quant, self.rows)
        return Operand(values.to(torch.bfloat16), self.quant, self.amax, scales[:, None, :, None])

    def dequantize(self) -> Tensor:
        """Return value(code) * ((s * amax) * fp32(1 / (6 bound))), fp32 [rows, padded columns].

        docs/reference/numerics.md, section 3. Computed from the codes, so that -6 times a scale of zero is
        -0, as in hardware; `Operand.dequantize` returns 0 there.
        """
        scales = self.scales.to(torch.float32)
        divisor = Operand(self.codes, self.quant, self.amax).divisor
        decode = scales * self.amax * (1.0 / torch.tensor(divisor, dtype=torch.float32))
        return unpack(self.codes) * _over_elements(decode, self.quant, self.rows)


def store_one(x: Tensor, quant: Quant, *, rotation: Hadamard | None = None, **how: Any) -> Packed:
    """Quantise one copy of a tensor; the arguments are those of `quantize`.

    The codes are those to which quantize rounded, also under a block scale of zero: Transformer Engine writes
    +-6 there (smaller codes for subnormal inputs), which code times scale would lose. ValueError if the
    quantiser cannot be stored, or the outer statistic would hide a NaN or an infinity; other errors are those
    of `quantize`.
    """
    refuse(quant)
    operand = quantize(x, quant, rotation=rotation, keep=True, **how)
    amax, largest, block_scale, codes = operand.amax, operand.largest, operand.block_scale, operand.codes
    assert amax is not None
    assert largest is not None
    assert block_scale is not None
    assert codes is not None
    if amax.isfinite() and not largest.isfinite():
        statistic = quant.outer.statistic if quant.outer else "amax"
        raise ValueError(
            f"x holds a NaN or an infinity, but {statistic} is finite: stored, it would look like a number"
        )
    scales = block_scale[:, 0, :, 0].to(torch.float8_e4m3fn)
    return Packed(pack(codes), scales, amax, x.shape[1], quant, rotation)


def gather_packed(part: Packed, partition: Partition) -> Packed:
    """Return the packed matrix of which this process has `part`: the bits of `store_one` of the whole.

    Collective. The parts must have one amax, that of the whole: codes and block scales are sent, and no amax.
    Parts of the contraction, such as those of a transposed copy, arrive one after another and are laid side
    by side, row by row.
    """
    codes = partition.gathered(part.codes)
    scales = partition.gathered(part.scales.view(torch.uint8)).view(torch.float8_e4m3fn)
    columns = part.columns * (partition.count if partition.axis else 1)
    return Packed(codes, scales, part.amax, columns, part.quant, part.rotation)


def refuse(quant: Quant) -> None:
    """Raise ValueError if NVFP4's layout cannot hold what `quant` computes."""
    required = {
        "element": (quant.element, "e2m1"),
        "scale": (quant.scale.format if quant.scale else None, "e4m3"),
        "outer": (quant.outer.granularity if quant.outer else None, "tensor"),
        "select among": ("grids" if quant.select and quant.select.among == "grids" else None, None),
        "transform": (quant.transform, None),
        "own": (quant.own, None),
        "error": (quant.error if quant.altered else None, None),
    }
    other = [f"{name} {value}" for name, (value, only) in required.items() if value != only]
    if other:
        raise ValueError(
            "only NVFP4 can be stored: e2m1 elements, e4m3 block scales, one outer scale a tensor; "
            f"not {', '.join(other)}"
        )


def _over_elements(tiles: Tensor, quant: Quant, rows: int) -> Tensor:
    """Repeat the number of each tile over its elements: [rows, padded columns]."""
    tile_rows, tile_columns = quant.tile
    return tiles.repeat_interleave(tile_rows, 0)[:rows].repeat_interleave(tile_columns, 1)
