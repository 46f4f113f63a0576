"""One operand, quantised: the reference, written to be read beside NUMERICS.md. Fast kernels must equal it bit for bit."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ablate.numerics import choices
from ablate.numerics.choices import SIGNS, STATISTICS
from ablate.numerics.formats import ELEMENTS
from ablate.numerics.hadamard import rotate, signs
from ablate.numerics.history import History
from ablate.numerics.kernels import cpu, cuda
from ablate.numerics.partition import Share
from ablate.numerics.philox import GROUP, Clock, random_bits
from ablate.numerics.rounding import ROUNDINGS, toward
from ablate.numerics.scaling import (
    block_amax,
    block_scales,
    block_statistic,
    element_scales,
    encode_scale,
    outer_statistic,
    round_scale,
)
from ablate.numerics.select import Candidate, select
from ablate.numerics.spec import Hadamard, Outer, Quant, argument, tag


@dataclass(frozen=True)
class Operand:
    """An operand as the GEMM takes it: `values` [rows, columns] times an fp32 factor, amax / divisor, that stays outside the GEMM.

    A quantised one holds code times block scale, exact in bf16 (at most 8 significant bits) unless `quant.wide`, then fp32. Folding
    the factor in would round nearly every element. An operand that is not quantised, or has no outer scale, has no amax.
    """

    values: Tensor
    quant: Quant | None = None
    amax: Tensor | None = None
    """fp32, a scalar or [rows, 1]."""
    block_scale: Tensor | None = None
    """fp32 [row tiles, 1, column tiles, 1]; None where there is only an outer scale."""
    largest: Tensor | None = None
    """The largest magnitude of what was quantised, fp32 scalar: not finite where that had a NaN or an infinity."""
    source: Tensor | None = None
    """What was quantised (rotated, padded), kept on request, as are `scaled`, what was rounded, the `codes`, and `block_amax`; a
    compiled quantiser that is asked for the source alone keeps nothing else."""
    scaled: Tensor | None = None
    codes: Tensor | None = None
    block_amax: Tensor | None = None

    @property
    def divisor(self) -> float:
        """Element maximum times scale bound, 6 * 448, times the prescale; 1 where nothing is quantised."""
        if self.quant is None:
            return 1.0
        outer = 1.0 if self.amax is None else ELEMENTS[self.quant.element].max * self.quant.outer.bound
        return outer * self.quant.range.prescale

    def transposed(self) -> "Operand":
        """The operand of the transpose, of square blocks that nothing padded."""
        return Operand(
            self.values.t(), self.quant, self.amax, self.block_scale.permute(2, 1, 0, 3), self.largest
        )

    def dequantize(self) -> Tensor:
        """value(code) * ((s * amax) * fp32(1 / divisor)), left to right, fp32 [rows, columns]."""
        factor = 1.0 / torch.tensor(self.divisor)
        scaled = self.quant is not None and self.block_scale is not None and not self.quant.wide
        if scaled and cpu.can_decode(self.values, self.block_scale, self.amax):
            return cpu.decode(self.values, self.quant.tile, self.block_scale, self.amax, factor)
        values = self.values.to(torch.float32)
        if self.quant is None:
            return values
        if self.block_scale is None or self.quant.wide:
            return values * (factor if self.amax is None else self.amax * factor)
        rows, columns = values.shape
        tile_rows, tile_columns = self.quant.tile
        padded = pad(values, tile_rows, 1).contiguous()
        tiles = padded.view(padded.shape[0] // tile_rows, tile_rows, columns // tile_columns, tile_columns)
        codes = torch.where(self.block_scale == 0, tiles, tiles / self.block_scale)  # zeros keep their sign
        decode = self.block_scale if self.amax is None else self.block_scale * self.amax.reshape(-1, 1, 1, 1)
        return (codes * (decode * factor)).reshape(padded.shape)[:rows]


Keep = bool | Literal["source"]


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
    product: int = 0,
    history: History | None = None,
    target: Tensor | None = None,
    keep: Keep = False,
    share: Share | None = None,
) -> Operand:
    """Quantise `x` [rows, columns] (bf16, fp16 or fp32; the last dimension is the contraction) by `quant`.

    Whatever is drawn comes from `clock`: roundings at the site `where`, the signs of a rotation at the site `product`. `history`
    serves delayed and held statistics; `target` (like x) decides roundings to its own nearest neighbour. The result keeps the padded
    contraction, so two operands of a product padded alike still fit. `keep` what it is made from; a compiled quantiser can keep the
    "source" alone, all that telemetry needs. With `share`, x is one of the parts of a matrix: the result is that part of what the
    whole would give, and every process that has a part calls this.
    Raises TypeError for other dtypes, ValueError for other dimensions, where a draw or a history has no clock, and for a part that
    cuts a block.
    """
    _refuse(x, quant, rotation, clock, history, share)
    known = None if share is None else _known(x, quant, rotation, share)
    alone = share is None or (not draws(quant) and (known is not None or quant.outer is None))
    if alone and target is None and keep is not True:
        fast = _compiled(x, quant, rotation, clock, where, product, history, keep == "source", known)
        if fast:
            return fast
    x, target = (_rotated(z, rotation, clock, product) for z in (x, target))
    tiles, wanted = (_tiles(z, quant) for z in (x, target))
    amaxes = block_amax(tiles)
    amax = known
    if amax is None and quant.outer is not None:
        amax = outer_statistic(x, tiles, amaxes, quant.outer, history, clock, share)
    scale = torch.ones((), device=x.device) if amax is None else encode_scale(amax, quant)
    if quant.select:
        chosen = select(tiles, amaxes, scale, amax, quant)
    else:
        group = rotation.size if rotation else 0
        chosen = _cast(tiles, wanted, amaxes, scale, quant, group, partial(_bits, clock, where, tiles, share))
    return _operand(x, tiles, amaxes, amax, chosen, quant, bool(keep))


def quantize_both(
    x: Tensor,
    first: Quant,
    second: Quant,
    *,
    rotation: Hadamard | None,
    clock: Clock,
    where: tuple[int, int],
    product: int,
) -> tuple[Operand, Operand] | None:
    """`x` and `x.t()`, that rotated, as two calls of `quantize` would give them, from one read; None where that takes two."""
    if not cuda.can_quantize_both(x, first, second, rotation):
        return None
    flips = rotation and signs(rotation, x.device, clock, product)
    copies = cuda.quantize_both(
        x, cuda.Form(first, None, where[0]), cuda.Form(second, flips, where[1]), clock
    )
    both = zip(copies, (first, second), strict=True)
    return tuple(
        Operand(values, quant, amax, block_scale, amax) for (values, amax, block_scale), quant in both
    )


def _compiled(
    x: Tensor,
    quant: Quant,
    rotation: Hadamard | None,
    clock: Clock | None,
    where: int,
    product: int,
    history: History | None,
    keep: bool,
    known: Tensor | None,
) -> Operand | None:
    """The operand from the kernels of x's device; None where they cannot make it. `known`: what counts as its amax, if that is known."""
    on_cpu = cpu.can_quantize(x, quant, rotation) and (known is None or bool(known.isfinite()))
    if not on_cpu and (keep or known is not None or not cuda.can_quantize(x, quant, rotation)):
        return None
    flips = rotation and signs(rotation, x.device, clock, product)
    if on_cpu:
        statistic = _statistic(quant.outer, history, clock) if known is None else known.item()
        made = cpu.quantize(x, quant, flips, clock, where, keep, statistic)
    else:
        values, amax, block_scale = cuda.quantize(x, quant, flips, clock, where)
        made = values, amax, block_scale, amax, None
    if made is None:
        return None
    values, amax, block_scale, largest, source = made
    return Operand(values, quant, amax, block_scale, largest, source)


def _statistic(
    outer: Outer, history: History | None, clock: Clock | None
) -> float | Callable[[Tensor, Tensor], Tensor] | None:
    """What counts as a tensor's amax, for a compiled quantiser; None for the amax itself."""
    if outer.statistic == "amax":
        return None
    if tag(outer.statistic) == "static":
        return float(argument(outer.statistic))
    return lambda x, largest: outer_statistic(x, None, largest, outer, history, clock)


def _known(x: Tensor, quant: Quant, rotation: Hadamard | None, share: Share) -> Tensor | None:
    """The largest magnitude of the whole of which x is a part, where that is its outer statistic and x is not turned first."""
    plain = quant.outer is not None and (quant.outer.granularity, quant.outer.statistic) == ("tensor", "amax")
    return (
        share.largest(x.abs().amax().to(torch.float32)) if plain and rotation is None and x.numel() else None
    )


def _refuse(
    x: Tensor,
    quant: Quant,
    rotation: Hadamard | None,
    clock: Clock | None,
    history: History | None,
    share: Share | None,
) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"quantize takes bf16, fp16 or fp32, not {x.dtype}; convert the tensor first")
    if x.ndim != 2:
        raise ValueError(
            f"quantize takes a matrix, not {x.ndim} dimensions; flatten the leading ones into rows"
        )
    if clock is None and (draws(quant) or (rotation is not None and SIGNS[rotation.signs].drawn)):
        raise ValueError(
            "stochastic rounding and drawn signs take their random bits from a clock: give quantize one"
        )
    if clock is None and history is not None:
        raise ValueError("a history is kept by step: give quantize a clock with it")
    if quant.rounding == "ms_eden" and (rotation is None or rotation.size % quant.tile[1]):
        raise ValueError("rounding ms_eden corrects rotated groups of whole blocks: give quantize a rotation")
    if share is not None and (why := share.misfit(*x.shape, quant, rotation)):
        raise ValueError(f"this part of a matrix cannot be quantised by itself: {why}")


def _cast(
    tiles: Tensor,
    wanted: Tensor | None,
    amaxes: Tensor,
    scale: Tensor,
    quant: Quant,
    group: int,
    draw: Callable[..., Tensor],
) -> Candidate:
    """Scale, round, and correct: one pass without choices. `draw(elements=..., width=...)` gives random bits."""
    block_scale = None
    if quant.scale:
        bits = draw(elements=False, width=24) if quant.scale.rounding == "stochastic" else None
        block_scale = block_scales(block_statistic(tiles, amaxes, quant.range.statistic), scale, quant, bits)
    factor = scale if block_scale is None else element_scales(block_scale, scale)
    scaled = tiles * factor
    if quant.range.prescale != 1:
        scaled = scaled * quant.range.prescale
    element = ELEMENTS[quant.element]
    if wanted is not None:
        codes = toward(scaled, wanted * factor, element)
    else:
        bits = draw(elements=True, width=quant.bits) if quant.rounding == "stochastic" else None
        codes = ROUNDINGS["nearest" if quant.rounding == "ms_eden" else quant.rounding](
            scaled, element, bits, quant.bits
        )
    if quant.rounding == "ms_eden":
        block_scale = ms_eden(scaled, codes, block_scale, group, quant, draw(elements=False, width=24))
    return Candidate(block_scale, scaled, codes)


def _bits(clock: Clock, where: int, tiles: Tensor, share: Share | None, elements: bool, width: int) -> Tensor:
    """Random bits for every element, or for every block scale, shaped to broadcast against the tiles; of a share, its part of them."""
    row_tiles, rows, column_tiles, columns = tiles.shape
    high, wide = (row_tiles * rows, column_tiles * columns) if elements else (row_tiles, column_tiles)
    counts = [1, 1]
    if share:
        counts[share.axis] = share.count
    across = wide * counts[1]
    bits = random_bits(
        clock,
        where,
        high * counts[0],
        across + -across % GROUP,
        width,
        tiles.device,
        purpose=0 if elements else 1,
    )
    own = share.own(bits[:, :across]) if share else bits[:, :across]
    return own.reshape(tiles.shape if elements else (row_tiles, 1, column_tiles, 1))


def lasts(quant: Quant, rotation: Hadamard | None) -> bool:
    """Whether quantising a tensor again gives the same bits, whenever that is: nothing is drawn, nothing comes from earlier steps."""
    earlier = quant.outer is not None and STATISTICS[tag(quant.outer.statistic)].earlier
    return not (draws(quant) or earlier or (rotation is not None and not SIGNS[rotation.signs].lasting))


def draws(quant: Quant) -> bool:
    """Whether quantising takes random bits."""
    return choices.ROUNDINGS[quant.rounding].draws or (
        quant.scale is not None and choices.ROUNDINGS[quant.scale.rounding].draws
    )


def ms_eden(
    scaled: Tensor, codes: Tensor, block_scale: Tensor, group: int, quant: Quant, bits: Tensor
) -> Tensor:
    """Block scales that make a rotated tensor rounded to nearest unbiased on average (Quartet II, arXiv 2601.22813).

    All block scales of a group of `group` elements (one rotation) are multiplied by S = <y, y> / <y, q>, y the scaled elements and q
    their codes, and rounded stochastically.
    """
    y = torch.where(block_scale == 0, 0.0, scaled)
    rows, _, columns, length = y.shape
    grouped = (rows, columns * length // group, group)
    power, inner = (product.reshape(grouped).sum(dim=2) for product in (y * y, y * codes))
    correction = torch.where(inner == 0, 1.0, power / inner).repeat_interleave(group // length, dim=1)
    return round_scale(
        block_scale * correction.view(rows, 1, columns, 1),
        quant.scale.model_copy(update={"rounding": "stochastic"}),
        bits,
    )


def _rotated(z: Tensor | None, rotation: Hadamard | None, clock: Clock | None, product: int) -> Tensor | None:
    if z is None:
        return None
    z = z.contiguous()
    return rotate(pad(z, 1, rotation.size), rotation, clock, product) if rotation else z


def _tiles(x: Tensor | None, quant: Quant) -> Tensor | None:
    """fp32 [row tiles, rows, column tiles, columns]; the contraction padded to whole blocks and whole groups of random bits."""
    if x is None:
        return None
    rows, columns = quant.tile
    padded = pad(x, rows, math.lcm(columns, GROUP)).to(torch.float32)
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


def _operand(
    x: Tensor, tiles: Tensor, amaxes: Tensor, amax: Tensor | None, chosen: Candidate, quant: Quant, keep: bool
) -> Operand:
    values = chosen.codes if chosen.block_scale is None else chosen.codes * chosen.block_scale
    if amax is not None and amax.ndim:
        if quant.outer.granularity == "block:128":
            divisor = torch.tensor(ELEMENTS[quant.element].max * quant.outer.bound)
            values, amax = values * (amax * (1.0 / divisor)), None
        else:
            amax = amax.view(-1, 1)
    shape = (tiles.shape[0] * tiles.shape[1], tiles.shape[2] * tiles.shape[3])
    rows = slice(x.shape[0])
    values = values.to(torch.float32 if quant.wide else torch.bfloat16).view(shape)[rows]
    largest = amaxes.amax() if amaxes.numel() else torch.zeros((), device=x.device)
    operand = Operand(values, quant, amax, chosen.block_scale, largest)
    if not keep:
        return operand
    source, scaled, codes = (z.reshape(shape)[rows] for z in (tiles, chosen.scaled, chosen.codes))
    return replace(operand, source=source, scaled=scaled, codes=codes, block_amax=amaxes)
