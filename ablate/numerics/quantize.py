"""Quantisation of one operand of a product: the reference that every compiled kernel must equal bit for bit.

The problem: a matrix product on FP4 tensor cores takes 4-bit codes and block scales. To measure what a recipe
costs on hardware that has no such cores, this module computes exactly the numbers that they would multiply,
and keeps them in bf16.

The idea, in five steps (docs/reference/numerics.md, sections 3 to 10): rotate the operand if the product is
rotated; take the outer statistic; compute one scale for each block; multiply the elements by their factor and
round them to the element grid; multiply the codes by their block scales. A code times an E4M3 scale has at
most 6 significant bits, so the last step is exact in bf16, and a bf16 product with fp32 accumulation gives
what the tensor core gives, up to the order of additions. The remaining factor, amax / 2688, is kept apart
(`Operand.amax`) and applied outside the product; multiplied into the values, it would round nearly every one
of them.

    >>> x = torch.tensor([[6.0, 3.0, 0.4] + 13 * [0.0]])
    >>> quantize(x, Quant()).dequantize()[0, :3]
    tensor([6.0000, 3.0000, 0.5000])

The module refuses dtypes other than bf16, fp16 and fp32, tensors that are not matrices, random draws without
a clock, and a part of a matrix that cuts a block. It does not refuse NaN or infinities: they show in
`Operand.largest`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ablate.numerics import on_gpu, own_calls
from ablate.numerics.choices import SIGNS
from ablate.numerics.formats import element_format
from ablate.numerics.hadamard import rotate, signs
from ablate.numerics.history import History
from ablate.numerics.kernels import cpu, cuda, forms, general, general_cuda
from ablate.numerics.own import Own
from ablate.numerics.partition import Partition
from ablate.numerics.philox import GROUP, Clock, random_bits
from ablate.numerics.rounding import ROUNDINGS, toward
from ablate.numerics.scaling import (
    block_amax,
    block_scales,
    block_statistic,
    element_scales,
    encode_scale,
    micro_scales,
    outer_statistic,
    round_scale,
    tree_sum,
)
from ablate.numerics.select import Candidate, select
from ablate.numerics.spec import Error, Hadamard, Outer, Quant, argument, rounding_of, statistic_of, tag


@dataclass(frozen=True)
class Operand:
    """Operand as the GEMM takes it: `values` [rows, columns], with an fp32 factor amax / divisor kept apart.

    The values of a quantised operand are code times block scale: bf16, in which they are exact (at most 8
    significant bits), or fp32 if `quant.wide`. An operand that is not quantised, or has no outer scale, has
    no amax.
    """

    values: Tensor
    quant: Quant | None = None
    amax: Tensor | None = None
    """fp32, a scalar or [rows, 1]."""
    block_scale: Tensor | None = None
    """fp32 [row tiles, 1, column tiles, 1]; None if there is only an outer scale."""
    largest: Tensor | None = None
    """Largest magnitude of the quantised tensor, fp32 scalar; not finite if the tensor has a NaN or an
    infinity."""
    source: Tensor | None = None
    """Tensor that was quantised (rotated and padded). It is kept on request, as are `scaled` (the input of
    the rounding), `codes` (times the powers of two of micro-exponents) and `block_amax`; a compiled quantiser
    that is asked for the source alone keeps nothing else."""
    scaled: Tensor | None = None
    codes: Tensor | None = None
    block_amax: Tensor | None = None
    nonzero: tuple[int, Tensor] | None = None
    """Dimension and ascending indices of the rows (0) or columns (1) that are not zero; None: any may be."""
    equal: int | None = None
    """0: all rows are the same; 1: all columns are; None: neither is known."""
    few: tuple[Tensor, int] | None = None
    """If `values` has only the rows or columns of `nonzero`: the place of each among them, int32, or -1, and
    the number of all; None: it has all."""
    cast: "Operand | None" = None
    """Quantised operand whose error was changed (`Quant.error`); the values are then in fp32 and no codes."""

    @property
    def divisor(self) -> float:
        """Element maximum times scale bound (6 * 448) times prescale; 1 without quantisation."""
        if self.quant is None:
            return 1.0
        if self.amax is None or self.quant.outer is None:
            return self.quant.range.prescale
        return element_format(self.quant.element).max * self.quant.outer.bound * self.quant.range.prescale

    @property
    def shape(self) -> list[int]:
        """Rows and columns, with those that are not in memory if there are `few`."""
        whole = enumerate(self.values.shape)
        few, dimension = self.few, self.nonzero and self.nonzero[0]
        return [few[1] if few and at == dimension else length for at, length in whole]

    @property
    def dense(self) -> Tensor:
        """All values, with zeros that are not in memory."""
        if self.few is None or self.nonzero is None:
            return self.values
        return self.values.new_zeros(self.shape).index_copy_(*self.nonzero, self.values)

    def transposed(self) -> "Operand":
        """Return the operand of the transpose. Only valid for square blocks without padding, with one outer
        scale or none."""
        assert self.block_scale is not None
        return Operand(
            self.values.t(), self.quant, self.amax, self.block_scale.permute(2, 1, 0, 3), self.largest
        )

    def on_device(self, estimator: str = "") -> Tensor | None:
        """Return `rescaled`, or what a GPU's kernel makes of it for an estimator; None if no kernel can."""
        if self.source is None or self.scaled is not None or self.quant is None:
            return None
        if not cuda.can_decode(self.source, self.block_scale, self.amax):
            return None
        return general_cuda.rescaled(self.source, self.quant, self.block_scale, self.amax, estimator)

    def rescaled(self) -> Tensor:
        """Return the input of the rounding, fp32 like `source`, which was kept; a kernel keeps nothing else.

        Of MS-EDEN, which changes the block scales afterwards, and of an outer scale of 128 elements, which
        ends up in the values, no kernel makes an operand that keeps its source.
        """
        if self.scaled is not None:
            return self.scaled
        if (made := self.on_device()) is not None:
            return made
        assert self.quant is not None
        assert self.source is not None
        one = torch.ones((), dtype=torch.float32, device=self.source.device)
        scale = one if self.amax is None else encode_scale(self._amax_of_tiles(self.amax), self.quant)
        factor = scale if self.block_scale is None else element_scales(self.block_scale, scale)
        (rows, columns), (high, wide) = self.source.shape, self.quant.tile
        scaled = self.source.to(torch.float32).view(rows // high, high, columns // wide, wide) * factor
        if self.quant.range.prescale != 1:
            scaled = scaled * self.quant.range.prescale
        return scaled.view(rows, columns)

    def _amax_of_tiles(self, amax: Tensor) -> Tensor:
        """Return the outer statistic so that it broadcasts to the block scales: that of each row of tiles."""
        assert self.quant is not None
        return amax.reshape(-1)[:: self.quant.tile[0]].view(-1, 1, 1, 1)

    def dequantize(self) -> Tensor:
        """Return value(code) * ((s * amax) * fp32(1 / divisor)), left to right, fp32 [rows, columns]."""
        if self.quant is None or (self.amax is None and self.divisor == 1):
            return self.dense.to(torch.float32)  # exact: dividing by a scale and multiplying by it undo it
        plain = self.block_scale is None or self.quant.wide
        if cuda.can_decode(self.values, scales := None if plain else self.block_scale, self.amax):
            inverse = (1.0 / torch.full((), self.divisor, dtype=torch.float32)).item()
            return cuda.decode(self.values, self.quant.tile, scales, self.amax, inverse)
        factor = 1.0 / torch.full((), self.divisor, dtype=torch.float32, device=self.values.device)
        if plain or self.block_scale is None:
            return self.values.to(torch.float32) * (factor if self.amax is None else self.amax * factor)
        if cpu.can_decode(self.values, self.block_scale, self.amax):
            return cpu.decode(self.values, self.quant.tile, self.block_scale, self.amax, factor)
        values = self.values.to(torch.float32)
        rows, columns = values.shape
        tile_rows, tile_columns = self.quant.tile
        padded = pad(values, tile_rows, 1).contiguous()
        tiles = padded.view(padded.shape[0] // tile_rows, tile_rows, columns // tile_columns, tile_columns)
        codes = torch.where(self.block_scale == 0, tiles, tiles / self.block_scale)  # zeros keep their sign
        decode = self.block_scale if self.amax is None else self.block_scale * self._amax_of_tiles(self.amax)
        return (codes * (decode * factor)).reshape(padded.shape)[:rows]


Keep = bool | Literal["source"]


def pad(x: Tensor, rows: int, columns: int) -> Tensor:
    """Append zero rows and columns up to the next multiples. Zeros change no amax and no product."""
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
    partition: Partition | None = None,
    rounded: bool = False,
) -> Operand:
    """Quantise one operand of a product: `x`, [rows, contraction] in bf16, fp16 or fp32.

    `clock` and the draw site `where` (`philox.site`) place the random bits of the roundings, and `product`,
    the same for both operands, those of the signs of the rotation. `history` has the earlier amaxes of this
    operand, for the statistics `delayed` and `hold`. `target`, like `x`: each element is rounded to the
    neighbour nearer to it (Q-EMA), in place of `quant.rounding`. `keep` True keeps all intermediate tensors
    in the result; "source" keeps the quantised tensor, which telemetry needs. `partition` is given if `x` is
    one part of a matrix; the result is then that part of the whole matrix's (collective). `rounded`: x, fp32,
    is rounded to bf16 before, in the same launch if a GPU's kernel quantises it.

    The values are [rows, columns]: the contraction, along which blocks run, padded to a multiple of the
    rotation's size, to whole blocks and to groups of 16. TypeError if `x` has another dtype; ValueError if it
    is not a matrix, a draw or a history has no clock, ms_eden has no rotation, or the part cuts a block.
    """
    _refuse(x, quant, rotation, clock, history, partition)
    alone = target is None and partition is None and not (keep or quant.altered)
    if rounded and not (alone and forms.on_gpu(quant) and cuda.can_take(x)):
        x, rounded = x.to(torch.bfloat16), False
    if quant.altered:
        plain = quant.cast
        options: dict[str, Any] = {"history": history, "target": target, "keep": keep, "partition": partition}
        cast = quantize(x, plain, rotation=rotation, clock=clock, where=where, product=product, **options)
        return _with_error(cast, _rotated(x, rotation, clock, product), quant.error, clock, where)
    reduced = None if partition is None else _reduced_amax(x, quant, rotation, partition)
    independent = partition is None or (not quant.draws and (reduced is not None or quant.outer is None))
    if independent and target is None and keep is not True:
        only = keep == "source"
        compiled = _compiled(x, quant, rotation, clock, where, product, history, only, reduced, rounded)
        if compiled:
            return compiled
    x = x.to(torch.bfloat16) if rounded else x
    x, target = (_rotated(z, rotation, clock, product) for z in (x, target))
    if isinstance(quant.own, Own):
        return _by_users_quantiser(x, quant, quant.own, clock, where, bool(keep))
    tiles, target_tiles = (_tiles(z, quant) for z in (x, target))
    amaxes = block_amax(tiles)
    amax = reduced
    if amax is None and quant.outer is not None:
        amax = outer_statistic(x, tiles, amaxes, quant.outer, history, clock, partition)
    scale = (
        torch.ones((), dtype=torch.float32, device=x.device) if amax is None else encode_scale(amax, quant)
    )
    if quant.select:
        chosen = select(tiles, amaxes, scale, amax, quant)
    else:
        group = rotation.size if rotation else 0
        draw = partial(_bits, clock, where, tiles, partition)  # called only if `_refuse` has seen a clock
        chosen = _cast(tiles, target_tiles, amaxes, scale, quant, group, draw)
    return _operand(x, tiles, amaxes, amax, chosen, quant, bool(keep))


def quantize_both(
    x: Tensor,
    quants: tuple[Quant, Quant],
    *,
    rotations: tuple[Hadamard | None, Hadamard | None],
    clock: Clock,
    where: tuple[int, int],
    products: tuple[int, int],
    histories: tuple[History | None, History | None],
) -> tuple[Operand, Operand] | None:
    """Quantise `x` and `x.t()` in one read, to the bits of `quantize`; None if no kernel can.

    `x` is [rows, columns], bf16 or fp32, on a GPU. The other arguments are those of `quantize` for each.
    """
    made = on_gpu.quantize_both(x, quants, rotations, clock, where, products, histories, quantize)
    if made is None:
        return None
    one, other = (Operand(copy.values, quant, *copy[1:]) for copy, quant in zip(made, quants, strict=True))
    return one, other


def quantize_channels(
    x: Tensor, quant: Quant, channels: int, rotation: Hadamard | None, clock: Clock, where: int, product: int
) -> list[Operand] | None:
    """Quantise what `transform.split` makes of `x` by a transform of channels alone: the rest, and those
    channels, of which the operand has `few`. None if no kernel can. The arguments are those of `split` and
    `quantize`."""
    made = on_gpu.quantize_channels(x, quant, channels, rotation, (clock, where, product), quantize)
    if made is None:
        return None
    (rest, few), form, place, kept = made
    part = Operand(few.values, form, *few[1:], nonzero=(channels, kept))
    return [Operand(rest.values, quant, *rest[1:]), replace(part, few=(place, rest.values.shape[channels]))]


def _compiled(
    x: Tensor,
    quant: Quant,
    rotation: Hadamard | None,
    clock: Clock | None,
    where: int,
    product: int,
    history: History | None,
    keep: bool,
    reduced: Tensor | None,
    rounded: bool,
) -> Operand | None:
    """Return the operand from the kernels of x's device; None if they cannot make it. `reduced` is the amax
    of the whole matrix if `x` is a part of it."""
    if forms.on_gpu(quant) and cuda.can_take(x):
        on_device = on_gpu.quantize(
            x, quant, rotation, clock, where, product, history, keep, reduced, rounded, quantize
        )
        return on_device and Operand(on_device.values, quant, *on_device[1:])
    if x.device.type != "cpu" or (reduced is not None and not reduced.isfinite()):
        return None  # the device is asked before the number, which a GPU would have to be waited for
    nvidia = cpu.can_quantize(x, quant, rotation)
    if not nvidia and not general.can_quantize(x, quant):
        return None
    statistic = _statistic(quant.outer, history, clock) if reduced is None else reduced.item()
    if nvidia:
        flips = rotation and signs(rotation, x.device, clock, product)
        made = cpu.quantize(x, quant, flips, clock, where, keep, statistic)
    else:
        turned, size = (rotate(x, rotation, clock, product), rotation.size) if rotation else (x, 0)
        made = general.quantize(turned, quant, size, clock, where, keep, statistic)
    return made and Operand(made.values, quant, *made[1:])


def _statistic(
    outer: Outer | None, history: History | None, clock: Clock | None
) -> float | Callable[[Tensor, Tensor], Tensor] | None:
    """Return the outer statistic as a compiled quantiser takes it; None for amax, which it computes."""
    if outer is None or outer.statistic == "amax":
        return None
    if tag(outer.statistic) == "static":
        return float(argument(outer.statistic) or 0)
    return lambda x, largest: outer_statistic(x, None, largest, outer, history, clock)


def _reduced_amax(x: Tensor, quant: Quant, rotation: Hadamard | None, partition: Partition) -> Tensor | None:
    """Return the amax of the whole matrix if that is its outer statistic and x is not rotated; else None."""
    plain = quant.outer is not None and (quant.outer.granularity, quant.outer.statistic) == ("tensor", "amax")
    return (
        partition.largest(x.abs().amax().to(torch.float32))
        if plain and rotation is None and x.numel()
        else None
    )


def _refuse(
    x: Tensor,
    quant: Quant,
    rotation: Hadamard | None,
    clock: Clock | None,
    history: History | None,
    partition: Partition | None,
) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"quantize takes bf16, fp16 or fp32, not {x.dtype}; convert the tensor first")
    if x.ndim != 2:
        raise ValueError(
            f"quantize takes a matrix, not {x.ndim} dimensions; flatten the leading ones into rows"
        )
    if clock is None and (quant.draws or (rotation is not None and SIGNS[rotation.signs].drawn)):
        raise ValueError(
            "stochastic rounding and drawn signs take their random bits from a clock: pass clock to quantize"
        )
    if clock is None and history is not None:
        raise ValueError("a history is kept by step: pass clock to quantize with it")
    if quant.rounding == "ms_eden" and (rotation is None or rotation.size % quant.tile[1]):
        raise ValueError(
            "rounding ms_eden corrects rotated groups of whole blocks: pass rotation to quantize"
        )
    if partition is not None and (why := partition.misfit(x.shape[0], x.shape[1], quant, rotation)):
        raise ValueError(f"this part of a matrix cannot be quantised by itself: {why}")


def _cast(
    tiles: Tensor,
    target_tiles: Tensor | None,
    amaxes: Tensor,
    scale: Tensor,
    quant: Quant,
    group: int,
    draw: Callable[..., Tensor],
) -> Candidate:
    """Scale, round and correct, without a selection. `draw(elements=..., width=...)` returns random bits."""
    block_scale = power = None
    factor = scale
    if quant.scale:
        bits = draw(elements=False, width=24) if rounding_of(quant.scale.rounding).draws else None
        if quant.scale.micro_exponents:
            block_scale, factor, power = micro_scales(tiles, amaxes, quant, bits)
        else:
            largest = block_statistic(tiles, amaxes, quant.range.statistic)
            block_scale = block_scales(largest, scale, quant, bits, tiles)
            factor = element_scales(block_scale, scale)
    scaled = _scaled(tiles, factor, quant)
    element = element_format(quant.element)
    if target_tiles is not None:
        codes = toward(scaled, _scaled(target_tiles, factor, quant), element)
    elif isinstance(quant.rounding, Own):
        bits = draw(elements=True, width=quant.bits) if quant.rounding.draws else None
        codes = own_calls.rounded(quant.rounding, scaled, element, bits, quant.bits)
    else:
        bits = draw(elements=True, width=quant.bits) if quant.rounding == "stochastic" else None
        codes = ROUNDINGS["nearest" if quant.rounding == "ms_eden" else quant.rounding](
            scaled, element, bits, quant.bits
        )
    if quant.rounding == "ms_eden":
        block_scale = ms_eden(scaled, codes, block_scale, group, quant, draw(elements=False, width=24))
    return Candidate(block_scale, scaled, codes if power is None else codes * power)


def _with_error(cast: Operand, source: Tensor, error: Error, clock: Clock | None, where: int) -> Operand:
    """Return a quantised operand with its error amplified or permuted; `source` is what was quantised [rows,
    columns]: rotated, and without the padding of blocks."""
    rows, columns = source.shape
    difference = cast.dequantize()[:, :columns] - source
    if error.permuted:
        assert clock is not None
        width = columns + -columns % GROUP
        bits = random_bits(clock, where, rows, width, 16, source.device, purpose=3)[:, :columns].reshape(-1)
        if bits.is_cuda:
            order = bits.argsort(stable=True)
        else:  # NumPy sorts integers of 16 bits by their digits, 20 times as fast, into the same order
            order = torch.from_numpy(np.argsort(bits.numpy().astype(np.uint16), kind="stable"))
        difference = difference.reshape(-1)[order].view(rows, columns)
    # Two roundings, since a fused multiplication and addition would round once on some devices.
    return Operand(difference.mul_(error.times).add_(source), largest=cast.largest, cast=cast)


def _by_users_quantiser(
    x: Tensor, quant: Quant, word: Own, clock: Clock | None, where: int, keep: bool
) -> Operand:
    rows, columns = x.shape
    source, bits = x.to(torch.float32), None
    if word.draws:
        tiles = source.new_empty(rows, 1, columns + -columns % GROUP, 1)
        bits = _bits(clock, where, tiles, None, elements=True, width=quant.bits)[:, 0, :columns, 0]
    values = own_calls.quantised(word, source, bits, quant.bits)
    largest = source.abs().amax() if source.numel() else source.new_zeros(())
    operand = Operand(values, quant, largest=largest)
    return replace(operand, source=source, scaled=source, codes=values) if keep else operand


def _scaled(tiles: Tensor, factor: Tensor, quant: Quant) -> Tensor:
    scaled = tiles * factor
    return scaled if quant.range.prescale == 1 else scaled * quant.range.prescale


def _bits(
    clock: Clock | None,
    where: int,
    tiles: Tensor,
    partition: Partition | None,
    elements: bool,
    width: int,
) -> Tensor:
    """Return random bits for every element, or for every block scale, shaped to broadcast against the tiles;
    for a part of a matrix drawn for the whole and cut, so that they do not depend on the number of parts."""
    assert clock is not None
    row_tiles, rows, column_tiles, columns = tiles.shape
    high, wide = (row_tiles * rows, column_tiles * columns) if elements else (row_tiles, column_tiles)
    counts = [1, 1]
    if partition:
        counts[partition.axis] = partition.count
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
    local = partition.local(bits[:, :across]) if partition else bits[:, :across]
    return local.reshape(tiles.shape if elements else (row_tiles, 1, column_tiles, 1))


def lasts(quant: Quant, rotation: Hadamard | None) -> bool:
    """Return True if quantising a tensor again gives the same bits at any step: nothing is drawn anew, and no
    statistic depends on earlier steps."""
    earlier = quant.outer is not None and statistic_of(quant.outer.statistic).earlier
    return not (quant.draws or earlier or (rotation is not None and not SIGNS[rotation.signs].lasting))


def ms_eden(
    scaled: Tensor, codes: Tensor, block_scale: Tensor, group: int, quant: Quant, bits: Tensor
) -> Tensor:
    """Correct block scales so that a rotated tensor rounded to nearest is unbiased on average.

    Quartet II (arXiv 2601.22813): all block scales of one rotated group are multiplied by <y, y> / <y, q>,
    with y the scaled elements and q their codes, fp32 [rows, 1, column tiles, columns], and then rounded
    stochastically by `bits`, 24 for each block scale as fp32. The factor is 1 if <y, q> is 0. `block_scale`,
    fp32 [rows, 1, column tiles, 1], are the scales by which y was scaled, and `group` is the number of
    elements of one rotation, a multiple of the block length.
    """
    assert quant.scale is not None
    y = torch.where(block_scale == 0, 0.0, scaled)
    rows, _, columns, length = y.shape
    grouped = (rows, columns * length // group, group)
    power, inner = (tree_sum(product.reshape(grouped)) for product in (y * y, y * codes))
    correction = torch.where(inner == 0, 1.0, power / inner).repeat_interleave(group // length, dim=1)
    return round_scale(
        block_scale * correction.view(rows, 1, columns, 1),
        quant.scale.changed(rounding="stochastic"),
        bits,
    )


def _rotated(z: Tensor | None, rotation: Hadamard | None, clock: Clock | None, product: int) -> Tensor | None:
    if z is None:
        return None
    return rotate(z, rotation, clock, product) if rotation else z.contiguous()


def _tiles(x: Tensor | None, quant: Quant) -> Tensor | None:
    """Return `x` as fp32 tiles, the contraction padded to whole blocks and whole groups of random bits."""
    if x is None:
        return None
    rows, columns = quant.tile
    padded = pad(x, rows, math.lcm(columns, GROUP)).to(torch.float32)
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


def _operand(
    x: Tensor, tiles: Tensor, amaxes: Tensor, amax: Tensor | None, chosen: Candidate, quant: Quant, keep: bool
) -> Operand:
    values = chosen.codes if chosen.block_scale is None else chosen.codes * chosen.block_scale
    if amax is not None and amax.ndim and quant.outer is not None:
        if quant.outer.granularity == "block:128":
            divisor = torch.full_like(amax, element_format(quant.element).max * quant.outer.bound)
            values, amax = values * (amax * (1.0 / divisor)), None
        else:
            amax = amax.view(-1).repeat_interleave(quant.tile[0])[: x.shape[0], None]
    shape = (tiles.shape[0] * tiles.shape[1], tiles.shape[2] * tiles.shape[3])
    rows = slice(x.shape[0])
    values = values.to(torch.float32 if quant.wide else torch.bfloat16).view(shape)[rows]
    largest = amaxes.amax() if amaxes.numel() else torch.zeros((), dtype=torch.float32, device=x.device)
    operand = Operand(values, quant, amax, chosen.block_scale, largest)
    if not keep:
        return operand
    source, scaled, codes = (z.reshape(shape)[rows] for z in (tiles, chosen.scaled, chosen.codes))
    return replace(operand, source=source, scaled=scaled, codes=codes, block_amax=amaxes)
