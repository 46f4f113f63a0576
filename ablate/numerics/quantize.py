"""One operand, quantised: the reference, written to be read beside NUMERICS.md. Fast kernels must equal it bit for bit."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ablate.numerics.formats import ELEMENTS
from ablate.numerics.hadamard import rotate
from ablate.numerics.philox import GROUP, Clock, random_bits
from ablate.numerics.rounding import ROUNDINGS
from ablate.numerics.scaling import block_scales, element_scales, encode_scale, tensor_statistic
from ablate.numerics.spec import Hadamard, Quant


@dataclass(frozen=True)
class Operand:
    """An operand as the GEMM takes it: `values` [rows, columns] times a scalar, amax / divisor, that stays outside the GEMM.

    A quantised one holds code times block scale, at most 6 significant bits, hence exact in bf16. Folding the scalar in would
    round nearly every element. An operand that is not quantised has no amax.
    """

    values: Tensor
    quant: Quant | None = None
    amax: Tensor | None = None
    block_scale: Tensor | None = None
    """fp32 [row tiles, 1, column tiles, 1]."""
    source: Tensor | None = None
    """What was quantised (rotated, padded), kept for telemetry on request, as are `scaled`, what was rounded, and `block_amax`."""
    scaled: Tensor | None = None
    block_amax: Tensor | None = None

    @property
    def divisor(self) -> float:
        """Element maximum times scale bound, 6 * 448; 1 where nothing is quantised."""
        return 1.0 if self.quant is None else ELEMENTS[self.quant.element].max * self.quant.outer.bound

    def dequantize(self) -> Tensor:
        """value(code) * ((s * amax) * fp32(1 / divisor)), left to right, fp32 [rows, columns]."""
        values = self.values.to(torch.float32)
        if self.quant is None:
            return values
        rows, columns = values.shape
        tile_rows, tile_columns = self.quant.tile
        tiles = pad(values, tile_rows, 1).view(-1, tile_rows, columns // tile_columns, tile_columns)
        codes = torch.where(self.block_scale == 0, 0.0, tiles / self.block_scale)
        decode = self.block_scale * self.amax * (1.0 / torch.tensor(self.divisor))
        return (codes * decode).view(-1, columns)[:rows]


def pad(x: Tensor, rows: int, columns: int) -> Tensor:
    """Zero rows and columns up to the next multiples: zeros change no amax and add nothing to a product."""
    extra_rows, extra_columns = -x.shape[0] % rows, -x.shape[1] % columns
    return F.pad(x, (0, extra_columns, 0, extra_rows)) if extra_rows or extra_columns else x


def quantize(
    x: Tensor,
    quant: Quant,
    *,
    rotation: Hadamard | None = None,
    clock: Clock | None = None,
    where: int = 0,
    keep: bool = False,
) -> Operand:
    """Quantise `x` [rows, columns] (bf16, fp16 or fp32; the last dimension is the contraction) by `quant`.

    Stochastic rounding draws from `clock` at the site `where`. The result keeps the padded contraction, so two operands of a
    product padded alike still fit. `keep` also returns what telemetry needs. Raises TypeError for other dtypes.
    """
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"quantize takes bf16, fp16 or fp32, not {x.dtype}; convert the tensor first")
    x = x.contiguous()
    if rotation:
        x = rotate(pad(x, 1, rotation.size), rotation)
    tile_rows, tile_columns = quant.tile
    padded = pad(x, tile_rows, max(tile_columns, GROUP)).to(torch.float32)
    tiles = padded.view(padded.shape[0] // tile_rows, tile_rows, padded.shape[1] // tile_columns, tile_columns)
    block_amax = tiles.abs().amax(dim=1, keepdim=True).amax(dim=3, keepdim=True)
    statistic = tensor_statistic(x, block_amax, quant)
    scale = encode_scale(statistic, quant)
    block_scale = block_scales(block_amax, scale, quant)
    scaled = tiles * element_scales(block_scale, scale)
    bits = None
    if quant.rounding == "stochastic":
        bits = random_bits(clock, where, *padded.shape, quant.bits, x.device).view(tiles.shape)
    codes = ROUNDINGS[quant.rounding](scaled, ELEMENTS[quant.element], bits, quant.bits)
    values = codes.mul_(block_scale).to(torch.bfloat16).view(padded.shape)[: x.shape[0]]
    operand = Operand(values, quant, statistic, block_scale)
    if not keep:
        return operand
    rows = slice(x.shape[0])
    return replace(operand, source=padded[rows], scaled=scaled.view(padded.shape)[rows], block_amax=block_amax)
