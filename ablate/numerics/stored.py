"""The NVFP4 tensor as a file or a GPU holds it: packed codes, E4M3 block scales, one fp32 amax. It rounds nothing.

4.5 bits an element instead of the 16 of the emulator's operands, and the layouts that cuBLASLt and CUTLASS read. Only what the
hardware's format can say is stored: E2M1 elements, E4M3 block scales and one amax for the tensor. The rest is refused.
"""

import math
import os
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ablate.numerics.partition import Share
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import Operand, draws, pad, quantize
from ablate.numerics.spec import Hadamard, Quant

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the low three bits of an E2M1 code mean; the fourth is the sign."""
SWIZZLE_ROWS, SWIZZLE_COLUMNS = 128, 4
"""The tile of scales that one tensor-core instruction takes."""
FORMAT, VERSION = "ablate-nvfp4", 1
"""What a file calls itself, and the version of its fields."""


# --- codes, two a byte ----------------------------------------------------------------------------


def pack(values: Tensor) -> Tensor:
    """E2M1 values, fp32 [rows, columns], as codes, uint8 [rows, columns / 2]; the even column is the low nibble.

    The values are on the grid already: rounding is quantize's. A zero keeps its sign as the hardware's conversion does, so -0,
    and a negative value that was rounded to zero, is code 8; Transformer Engine's reference agrees but for an input of -0, which it
    calls 0. NaN, which E2M1 lacks, becomes 6: the NaN in its block's scale is what tells. Raises ValueError for an odd column count.
    """
    if values.shape[1] % 2:
        raise ValueError(
            f"pack puts two columns in a byte, and {values.shape[1]} is odd; pad the columns first"
        )
    boundaries = torch.tensor(MAGNITUDES[1:], device=values.device)
    magnitude = torch.bucketize(values.abs(), boundaries, right=True, out_int32=True).to(torch.uint8)
    codes = magnitude | (values.signbit().to(torch.uint8) << 3)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack(codes: Tensor) -> Tensor:
    """Codes, uint8 [rows, n], as the E2M1 values they mean, fp32 [rows, 2 n]; code 8 is -0."""
    table = torch.tensor(
        [sign * magnitude for sign in (1.0, -1.0) for magnitude in MAGNITUDES], device=codes.device
    )
    nibbles = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)
    return table[nibbles.to(torch.int32)]


# --- block scales as the tensor cores read them ---------------------------------------------------


def swizzle(scales: Tensor) -> Tensor:
    """Block scales [rows, columns] of any one-byte dtype in the layout of cuBLASLt's VEC16 scales and of CUTLASS, flat.

    Rows are padded with zero bytes to 128 and columns to 4. The 128x4 tiles follow each other row-major, and in one the scale of
    row r and column c lies at (r % 32) * 16 + (r // 32) * 4 + c (cuBLAS, "1D block scaling factors layout"). Raises TypeError for
    wider dtypes.
    """
    if scales.element_size() != 1:
        raise TypeError(f"swizzle takes scales of one byte, not {scales.dtype}")
    padded = pad(scales.view(torch.uint8), SWIZZLE_ROWS, SWIZZLE_COLUMNS)
    tile_rows, tile_columns = padded.shape[0] // SWIZZLE_ROWS, padded.shape[1] // SWIZZLE_COLUMNS
    return (
        padded.view(tile_rows, 4, 32, tile_columns, 4).permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)
    )


def unswizzle(flat: Tensor, rows: int, columns: int) -> Tensor:
    """The scales [rows, columns] that `swizzle` laid out as `flat`, without the padding. Raises ValueError where the size is another."""
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
    """One quantised copy of a tensor. Raises ValueError where the quant cannot be stored or the parts do not fit each other."""

    codes: Tensor
    """uint8 [rows, padded columns / 2]: the contraction is padded as quantize pads it, the rows are not."""
    scales: Tensor
    """float8_e4m3fn [row tiles, column tiles]: one a tile, so a 16x16 tile's is stored once. `row_scales` repeats it."""
    amax: Tensor
    """fp32 scalar: the outer statistic of the whole copy, also in a slice of it. Not finite where what was quantised was not."""
    columns: int
    """Elements along the contraction before padding."""
    quant: Quant
    rotation: Hadamard | None = None
    """What was applied before quantising; nothing here undoes it, since it cancels in the product."""

    def __post_init__(self) -> None:
        refuse(self.quant)
        rows, width = self.codes.shape[0], 2 * self.codes.shape[1]
        tile_rows, tile_columns = self.quant.tile
        dtypes = (self.codes.dtype, self.scales.dtype, self.amax.dtype)
        if dtypes != (torch.uint8, torch.float8_e4m3fn, torch.float32):
            raise ValueError(
                f"codes, scales and amax must be uint8, float8_e4m3fn and float32, not {', '.join(map(str, dtypes))}"
            )
        tiles = (-(-rows // tile_rows), width // tile_columns)
        if width % tile_columns or self.scales.shape != tiles or self.amax.ndim or self.columns > width:
            raise ValueError(
                f"codes for {rows}x{width} elements ({self.columns} before padding), scales {list(self.scales.shape)} and "
                f"amax {list(self.amax.shape)} do not fit {self.quant.block} tiles"
            )

    @property
    def rows(self) -> int:
        """Rows of the copy; they are never padded."""
        return self.codes.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, the block scales and the amax, padding included."""
        return self.codes.nbytes + self.scales.nbytes + self.amax.nbytes

    @property
    def bits_per_element(self) -> float:
        """Bits that each of the rows x columns elements costs in this copy, padding included; NaN for an empty one."""
        return _bits(self.nbytes, self.rows * self.columns)

    def operand(self) -> Operand:
        """The copy as the GEMM takes it, the same bits that quantize returned."""
        scales = self.scales.to(torch.float32)
        values = unpack(self.codes) * _over_elements(scales, self.quant, self.rows)
        return Operand(values.to(torch.bfloat16), self.quant, self.amax, scales[:, None, :, None])

    def dequantize(self) -> Tensor:
        """value(code) * ((s * amax) * fp32(1 / (6 bound))), left to right, fp32 [rows, padded columns] (NUMERICS section 2).

        Straight from the codes, so that -6 times a scale of zero is -0, as in hardware, where `Operand.dequantize` says 0.
        """
        operand = self.operand()
        decode = operand.block_scale[:, 0, :, 0] * operand.amax * (1.0 / torch.tensor(operand.divisor))
        return unpack(self.codes) * _over_elements(decode, self.quant, self.rows)

    def row_scales(self) -> Tensor:
        """Scales for every row, float8_e4m3fn [rows, column tiles], as Transformer Engine keeps them and a GEMM wants them."""
        return (
            self.scales.view(torch.uint8)
            .repeat_interleave(self.quant.tile[0], 0)[: self.rows]
            .view(self.scales.dtype)
        )

    def swizzled_scales(self) -> Tensor:
        """`row_scales` in the 128x4 layout of cuBLASLt and CUTLASS, flat float8_e4m3fn. Raises ValueError unless blocks are 16 long."""
        if self.quant.tile[1] != 16:
            raise ValueError(
                f"cuBLASLt and CUTLASS take one e4m3 scale for 16 elements, and block {self.quant.block} has another length"
            )
        return swizzle(self.row_scales())

    def row_slice(self, start: int, stop: int) -> "Packed":
        """Rows [start, stop) as views. Raises ValueError where they cut a tile, or leave the copy."""
        step = self.quant.tile[0]
        _check_slice("rows", start, stop, self.rows, step)
        return replace(
            self, codes=self.codes[start:stop], scales=self.scales[start // step : -(-stop // step)]
        )

    def column_slice(self, start: int, stop: int) -> "Packed":
        """Columns [start, stop) of the contraction as views, the last with its padding.

        Raises ValueError where they cut a tile or what one rotation mixes, or leave the copy.
        """
        tile = self.quant.tile[1]
        _check_slice(
            "columns", start, stop, self.columns, math.lcm(tile, self.rotation.size if self.rotation else 1)
        )
        end = 2 * self.codes.shape[1] if stop == self.columns else stop
        codes, scales = self.codes[:, start // 2 : end // 2], self.scales[:, start // tile : end // tile]
        return replace(self, codes=codes, scales=scales, columns=stop - start)


@dataclass(frozen=True)
class Stored:
    """A tensor x [rows, columns] as NVFP4: row-wise for products along its columns, and, where it was asked for, column-wise."""

    row: Packed
    """x, blocks along its columns."""
    column: Packed | None = None
    """x transposed, blocks along the rows of x. Its amax is its own: after a rotation it is another."""

    def __post_init__(self) -> None:
        if self.column and (self.column.rows, self.column.columns) != (self.row.columns, self.row.rows):
            raise ValueError(
                f"a column-wise copy of {self.column.rows}x{self.column.columns} is not {self.row.rows}x{self.row.columns} transposed"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, the block scales and the amaxes of both copies, padding included."""
        return self.row.nbytes + (self.column.nbytes if self.column else 0)

    @property
    def bits_per_element(self) -> float:
        """Bits that each element of x costs, in both copies together; NaN for an empty tensor."""
        return _bits(self.nbytes, self.row.rows * self.row.columns)

    def row_slice(self, start: int, stop: int) -> "Stored":
        """Rows [start, stop) of x in both copies, as views; the amaxes stay those of the whole tensor.

        These rows are the contraction of the column-wise copy. Raises ValueError where they cut a tile or a rotation of either.
        """
        return Stored(self.row.row_slice(start, stop), self.column and self.column.column_slice(start, stop))

    def save(self, path: str | Path) -> None:
        """Write the tensor to `path`: a reader sees what was there before, or all of it."""
        document: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            **_flat("row", self.row),
            **_flat("column", self.column),
        }
        document["digest"] = _digest(document)
        temporary = Path(f"{path}.{os.getpid()}")
        with temporary.open("wb") as file:
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
    """Quantise x [rows, columns] (bf16, fp16 or fp32) by `quant`, and x transposed by `transposed_quant`, in one call.

    `rotation` turns the transposed copy along the rows of x, as NVIDIA's recipe does for wgrad. Both copies are quantised from x,
    never one from the other; with 16x16 blocks, nearest rounding and no rotation they hold the same numbers. What is drawn comes from
    `clock`, exactly as quantize draws it: roundings at the two sites `where` (row-wise, column-wise), signs at the site `product`.
    Raises ValueError for a quant that cannot be stored, a rotation without the copy that it turns, and two draws at one site.
    """
    if x.ndim != 2:
        raise ValueError(f"store takes a matrix, not {x.ndim} dimensions; flatten the leading ones into rows")
    if rotation and not transposed_quant:
        raise ValueError(
            "the rotation turns the transposed copy; give transposed_quant too, or leave the rotation out"
        )
    if where[0] == where[1] and transposed_quant and draws(quant) and draws(transposed_quant):
        raise ValueError(
            f"both copies draw random bits at site {where[0]} and would share them; give two sites in where"
        )
    row = store_one(x, quant, clock=clock, where=where[0])
    if not transposed_quant:
        return Stored(row)
    return Stored(
        row,
        store_one(x.t(), transposed_quant, rotation=rotation, clock=clock, where=where[1], product=product),
    )


def store_one(x: Tensor, quant: Quant, *, rotation: Hadamard | None = None, **options: Any) -> Packed:
    """Quantise one copy of x [rows, columns]; `options` are quantize's own (clock, where, product, history, target), and so are errors.

    The codes are what quantize rounded to, also where the block scale is zero: Transformer Engine writes +-6 there (0 and what is
    between where the input is subnormal), and code times scale no longer tells. Raises ValueError for a quant that cannot be stored,
    and for a NaN or an infinity that the outer statistic does not show: the bytes would hide it.
    """
    refuse(quant)
    operand = quantize(x, quant, rotation=rotation, **options, keep=True)
    if operand.amax.isfinite() and not operand.largest.isfinite():
        raise ValueError(
            f"x holds a NaN or an infinity, and {quant.outer.statistic} is finite: stored, it would look like a number"
        )
    scales = operand.block_scale[:, 0, :, 0].to(torch.float8_e4m3fn)
    return Packed(pack(operand.codes), scales, operand.amax, x.shape[1], quant, rotation)


def gather_packed(part: Packed, share: Share) -> Packed:
    """Return the packed matrix of which `part` is this process's share: what `store_one` makes of the whole.

    Collective. The parts must have one amax, that of the whole: codes and block scales are sent, and no amax. Parts of the
    contraction, such as those of a transposed copy, arrive one after another and are laid side by side, row by row.
    """
    codes = share.gathered(part.codes)
    scales = share.gathered(part.scales.view(torch.uint8)).view(torch.float8_e4m3fn)
    columns = part.columns * (share.count if share.axis else 1)
    return Packed(codes, scales, part.amax, columns, part.quant, part.rotation)


def refuse(quant: Quant) -> None:
    """Raise ValueError where NVFP4's bytes cannot say what `quant` computes."""
    found = {
        "element": (quant.element, "e2m1"),
        "scale": (quant.scale.format if quant.scale else None, "e4m3"),
        "outer": (quant.outer.granularity if quant.outer else None, "tensor"),
        "select among": ("grids" if quant.select and quant.select.among == "grids" else None, None),
        "transform": (quant.transform, None),
    }
    other = [f"{name} {value}" for name, (value, wanted) in found.items() if value != wanted]
    if other:
        raise ValueError(
            f"only NVFP4 can be stored: e2m1 elements, e4m3 block scales, one outer scale a tensor; not {', '.join(other)}"
        )


def load(path: str | Path, device: torch.device | str = "cpu") -> Stored:
    """The tensor that `Stored.save` wrote to `path`, bit for bit, on `device`.

    Runs no code from the file. Raises ValueError, with the path and the reason, for a file of anything else, of another version, cut
    short or altered; OSError where it cannot be read.
    """
    data = Path(path).read_bytes()
    try:
        document = torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises KeyError, EOFError, RuntimeError, OSError and more, depending on where it stumbles
        raise ValueError(
            f"{path}: not a file that torch can read, or cut short ({type(error).__name__})"
        ) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{path}: a file of torch, but not a stored NVFP4 tensor")
    if document.get("version") != VERSION:
        raise ValueError(
            f"{path}: version {document.get('version')} of the stored tensor; this program reads version {VERSION}"
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


# --- behind the curtain ---------------------------------------------------------------------------


def _over_elements(tiles: Tensor, quant: Quant, rows: int) -> Tensor:
    """One number a tile, repeated over the tile's elements: [rows, padded columns]."""
    tile_rows, tile_columns = quant.tile
    return tiles.repeat_interleave(tile_rows, 0)[:rows].repeat_interleave(tile_columns, 1)


def _bits(nbytes: int, elements: int) -> float:
    return 8 * nbytes / elements if elements else math.nan


def _check_slice(what: str, start: int, stop: int, size: int, step: int) -> None:
    if not 0 <= start <= stop <= size:
        raise ValueError(f"{what} {start}:{stop} are not within 0:{size}")
    if start % step or (stop % step and stop != size):
        raise ValueError(
            f"{what} {start}:{stop} cut a block: start and stop must be multiples of {step} (or stop the end, {size})"
        )


def _flat(name: str, packed: Packed | None) -> dict[str, Any]:
    """A copy as plain entries `row.codes`, `row.quant` ...; the tensors are copied, since torch.save writes all that a view looks at."""
    if packed is None:
        return {}
    plain = {field.name: getattr(packed, field.name) for field in fields(packed)}
    for key, value in plain.items():
        if isinstance(value, Tensor):
            plain[key] = value.detach().to("cpu", copy=True).contiguous()
    plain["quant"] = packed.quant.model_dump_json()
    plain["rotation"] = packed.rotation.model_dump_json() if packed.rotation else None
    return {f"{name}.{key}": value for key, value in plain.items()}


def _unflat(name: str, document: dict[str, Any], device: torch.device | str) -> Packed:
    plain = {field.name: document[f"{name}.{field.name}"] for field in fields(Packed)}
    plain = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in plain.items()}
    rotation = Hadamard.model_validate_json(plain["rotation"]) if plain["rotation"] else None
    return Packed(**{**plain, "quant": Quant.model_validate_json(plain["quant"]), "rotation": rotation})


def _digest(document: dict[str, Any]) -> str:
    """Over every entry: torch reads a flipped byte without a word."""
    digest = blake2b(digest_size=16)
    for key in sorted(document):
        value = document[key]
        if isinstance(value, Tensor):
            digest.update(f"{key}: {value.dtype} {list(value.shape)}".encode())
            digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(f"{key}: {value!r}".encode())
    return digest.hexdigest()
