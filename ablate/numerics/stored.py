"""NVFP4 tensors as a file or a GPU holds them: packed codes, E4M3 block scales, one fp32 amax.

An element takes 4.5 bits instead of the 16 of an emulated operand, in the layouts that cuBLASLt and CUTLASS
read. Nothing is rounded here. Formats that the hardware layout cannot hold are refused: other elements than
E2M1, other block scales than E4M3, other outer scales than one amax for the tensor.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ablate.files import first_error
from ablate.numerics.partition import Partition
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import Operand, pad, quantize
from ablate.numerics.spec import Hadamard, Quant

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by the low three bits of an E2M1 code; the fourth bit is the sign."""
SWIZZLE_ROWS, SWIZZLE_COLUMNS = 128, 4
"""Tile of scales that one tensor-core instruction takes."""
FORMAT, VERSION = "ablate-nvfp4", 1
"""Name of the file format, and version of its fields."""


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


# --- one copy, and the two copies of a tensor -----------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """One quantised copy of a tensor; ValueError if it cannot be stored or its parts do not fit together."""

    codes: Tensor
    """uint8 [rows, padded columns / 2]: the contraction is padded as quantize pads it, the rows are not."""
    scales: Tensor
    """float8_e4m3fn [row tiles, column tiles]: one a tile, so a 16x16 tile's is stored once. `row_scales`
    repeats it."""
    amax: Tensor
    """fp32 scalar: outer statistic of the whole copy, also in a slice. Not finite if the quantised tensor was
    not."""
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

    @property
    def bits_per_element(self) -> float:
        """Bits per element of this copy, padding included; NaN for an empty one."""
        return _bits(self.nbytes, self.rows * self.columns)

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

    def row_scales(self) -> Tensor:
        """Return scales for every row, float8_e4m3fn [rows, column tiles], as GEMMs take them."""
        return (
            self.scales.view(torch.uint8)
            .repeat_interleave(self.quant.tile[0], 0)[: self.rows]
            .view(self.scales.dtype)
        )

    def swizzled_scales(self) -> Tensor:
        """Return `row_scales` in the layout of `swizzle`, flat; ValueError unless blocks are 16 long."""
        if self.quant.tile[1] != 16:
            raise ValueError(
                "cuBLASLt and CUTLASS take one e4m3 scale for 16 elements, "
                f"and block {self.quant.block} has another length"
            )
        return swizzle(self.row_scales())

    def row_slice(self, start: int, stop: int) -> "Packed":
        """Return rows [start, stop) as views; ValueError if they cut a tile or are out of range."""
        step = self.quant.tile[0]
        _check_slice("rows", start, stop, self.rows, step)
        return replace(
            self, codes=self.codes[start:stop], scales=self.scales[start // step : -(-stop // step)]
        )

    def column_slice(self, start: int, stop: int) -> "Packed":
        """Return columns [start, stop) of the contraction as views, the last with its padding; ValueError if
        they cut a tile or a rotated group, or are out of range."""
        tile = self.quant.tile[1]
        _check_slice(
            "columns", start, stop, self.columns, math.lcm(tile, self.rotation.size if self.rotation else 1)
        )
        end = 2 * self.codes.shape[1] if stop == self.columns else stop
        codes, scales = self.codes[:, start // 2 : end // 2], self.scales[:, start // tile : end // tile]
        return replace(self, codes=codes, scales=scales, columns=stop - start)


@dataclass(frozen=True)
class Stored:
    """Tensor x [rows, columns] as NVFP4: row-wise (blocks along columns) and optionally column-wise."""

    row: Packed
    """x, blocks along its columns."""
    column: Packed | None = None
    """x transposed, blocks along the rows of x. It has its own amax, which a rotation changes."""

    def __post_init__(self) -> None:
        if self.column and (self.column.rows, self.column.columns) != (self.row.columns, self.row.rows):
            raise ValueError(
                f"a column-wise copy of {self.column.rows}x{self.column.columns} is not "
                f"{self.row.rows}x{self.row.columns} transposed"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, the block scales and the amaxes of both copies, padding included."""
        return self.row.nbytes + (self.column.nbytes if self.column else 0)

    @property
    def bits_per_element(self) -> float:
        """Bits per element of x in both copies together; NaN for an empty tensor."""
        return _bits(self.nbytes, self.row.rows * self.row.columns)

    def row_slice(self, start: int, stop: int) -> "Stored":
        """Return rows [start, stop) of x in both copies, as views; the amaxes stay those of the whole tensor.
        These rows are the contraction of the column-wise copy. ValueError if they cut a tile or a rotated
        group."""
        return Stored(self.row.row_slice(start, stop), self.column and self.column.column_slice(start, stop))

    def save(self, path: str | Path) -> None:
        """Write the tensor to `path` atomically: a reader sees the old file or the whole new one."""
        document: dict[str, object] = {
            "format": FORMAT,
            "version": VERSION,
            **_flat("row", self.row),
            **_flat("column", self.column),
        }
        document["digest"] = _digest(document)
        temporary = Path(f"{path}.{os.getpid()}")
        with temporary.open("wb") as file:
            with first_error():
                torch.save(document, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def store(
    x: Tensor,
    quant: Quant,
    transposed_quant: Quant | None = None,
    *,
    rotation: Hadamard | None = None,
    clock: Clock | None = None,
    where: tuple[int, int] = (0, 1),
    product: int = 0,
) -> Stored:
    """Quantise x, [rows, columns] in bf16, fp16 or fp32, and its transpose if it has a quantiser too.

    Both copies are quantised from x, never one from the other; with 16x16 blocks, nearest rounding and no
    rotation they hold the same numbers. `rotation` acts on the transposed copy along the rows of x, as in
    wgrad of NVIDIA's recipe; `product` is the draw site of its signs, and `where` has both copies'.
    ValueError if a quantiser cannot be stored, a rotation has no transposed copy, or both copies draw at one
    site.
    """
    if x.ndim != 2:
        raise ValueError(f"store takes a matrix, not {x.ndim} dimensions; flatten the leading ones into rows")
    if rotation and not transposed_quant:
        raise ValueError(
            "the rotation acts on the transposed copy; pass transposed_quant too, or leave the rotation out"
        )
    if where[0] == where[1] and transposed_quant and quant.draws and transposed_quant.draws:
        raise ValueError(
            f"both copies draw random bits at site {where[0]} and would share them; pass two sites in where"
        )
    row = store_one(x, quant, clock=clock, where=where[0])
    if not transposed_quant:
        return Stored(row)
    return Stored(
        row,
        store_one(x.t(), transposed_quant, rotation=rotation, clock=clock, where=where[1], product=product),
    )


def store_one(
    x: Tensor,
    quant: Quant,
    *,
    rotation: Hadamard | None = None,
    clock: Clock | None = None,
    where: int = 0,
    product: int = 0,
    partition: Partition | None = None,
) -> Packed:
    """Quantise one copy of a tensor; the arguments are those of `quantize`.

    The codes are those to which quantize rounded, also under a block scale of zero: Transformer Engine writes
    +-6 there (smaller codes for subnormal inputs), which code times scale would lose. ValueError if the
    quantiser cannot be stored, or the outer statistic would hide a NaN or an infinity; other errors are those
    of `quantize`.
    """
    refuse(quant)
    operand = quantize(
        x, quant, rotation=rotation, clock=clock, where=where, product=product, partition=partition, keep=True
    )
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


def load(path: str | Path, device: torch.device | str = "cpu") -> Stored:
    """Return the tensor that `Stored.save` wrote to `path`, bit for bit; no code from the file is run.

    ValueError with the path and the reason if the file is of another kind or version, truncated or altered;
    OSError if it cannot be read.
    """
    data = Path(path).read_bytes()
    try:
        document = torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises KeyError, EOFError, RuntimeError, OSError and more
        raise ValueError(
            f"{path}: not a file that torch can read, or cut short ({type(error).__name__})"
        ) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{path}: a file of torch, but not a stored NVFP4 tensor")
    if document.get("version") != VERSION:
        raise ValueError(
            f"{path}: version {document.get('version')} of the stored tensor; "
            f"this program reads version {VERSION}"
        )
    if document.pop("digest", None) != _digest(document):
        raise ValueError(f"{path}: altered since it was written (its digest is another)")
    try:
        return Stored(
            _unflat("row", document, device),
            _unflat("column", document, device) if "column.codes" in document else None,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


# --- helpers --------------------------------------------------------------------------------------


def _over_elements(tiles: Tensor, quant: Quant, rows: int) -> Tensor:
    """Repeat the number of each tile over its elements: [rows, padded columns]."""
    tile_rows, tile_columns = quant.tile
    return tiles.repeat_interleave(tile_rows, 0)[:rows].repeat_interleave(tile_columns, 1)


def _bits(nbytes: int, elements: int) -> float:
    return 8 * nbytes / elements if elements else math.nan


def _check_slice(what: str, start: int, stop: int, size: int, step: int) -> None:
    if not 0 <= start <= stop <= size:
        raise ValueError(f"{what} {start}:{stop} are not within 0:{size}")
    if start % step or (stop % step and stop != size):
        raise ValueError(
            f"{what} {start}:{stop} cut a block: start and stop must be multiples of {step} "
            f"(or stop the end, {size})"
        )


def _flat(name: str, packed: Packed | None) -> dict[str, object]:
    """Return a copy as plain entries `row.codes`, `row.quant`, ...; tensors are copied, since torch.save
    writes the whole storage behind a view."""
    if packed is None:
        return {}
    plain = {field.name: getattr(packed, field.name) for field in fields(packed)}
    for key, value in plain.items():
        if isinstance(value, Tensor):
            plain[key] = value.detach().to("cpu", copy=True).contiguous()
    plain["quant"] = packed.quant.model_dump_json()
    plain["rotation"] = packed.rotation.model_dump_json() if packed.rotation else None
    return {f"{name}.{key}": value for key, value in plain.items()}


def _unflat(name: str, document: Mapping[str, Any], device: torch.device | str) -> Packed:
    codes, scales, amax, columns, quant, rotation = (
        document[f"{name}.{field}"] for field in ("codes", "scales", "amax", "columns", "quant", "rotation")
    )
    return Packed(
        codes=codes.to(device),
        scales=scales.to(device),
        amax=amax.to(device),
        columns=columns,
        quant=Quant.model_validate_json(quant),
        rotation=Hadamard.model_validate_json(rotation) if rotation else None,
    )


def _digest(document: Mapping[str, object]) -> str:
    """Return a digest of every entry: torch does not notice a flipped byte."""
    digest = blake2b(digest_size=16)
    for key in sorted(document):
        value = document[key]
        if isinstance(value, Tensor):
            digest.update(f"{key}: {value.dtype} {list(value.shape)}".encode())
            digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(f"{key}: {value!r}".encode())
    return digest.hexdigest()
