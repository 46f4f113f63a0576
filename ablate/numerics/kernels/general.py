"""Quantiser for CPU tensors of every form but NVIDIA's, compiled from general.c, and the rotation of rows.

One kernel takes a description of the form: any grid of elements, block scales of any format and rounding,
exponents of sub-blocks, outer scales of a tensor, some rows or 128 elements, a choice between two scales or
two grids, and MS-EDEN. `covers` says what is left to the reference.
"""

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ablate.numerics.choices import IN_KERNELS
from ablate.numerics.formats import ELEMENTS, SCALES, Format
from ablate.numerics.kernels import builds
from ablate.numerics.kernels.builds import Form, Grid, Turn
from ablate.numerics.kernels.cpu import Made
from ablate.numerics.kernels.forms import covers
from ablate.numerics.philox import GROUP, Clock, philox_key
from ablate.numerics.scaling import round_scale
from ablate.numerics.spec import Quant, argument, tag

ROUNDINGS, STATISTICS = IN_KERNELS["rounding"], IN_KERNELS["statistic"]
OUTERS = (None, *IN_KERNELS["granularity"])
CRITERIA = (None, *IN_KERNELS["criterion"])
"""Numbers of words in general.c: their places in the registries."""
_GRID, _POWER_OF_TWO, _BF16, _FP32 = range(4)


def can_keep(quant: Quant) -> bool:
    """Return True if a census can tell the scaled elements from the finished operand.

    MS-EDEN changes the block scales afterwards, the outer scale of 128 elements ends up in the values, and
    sub-blocks with exponents, like blocks on another grid, have scaled elements that are not kept.
    """
    return (
        quant.rounding != "ms_eden"
        and (quant.outer is None or quant.outer.granularity != "block:128")
        and (quant.scale is None or quant.scale.micro_exponents is None)
        and (quant.select is None or quant.select.among == "scales")
    )


def can_quantize(x: Tensor, quant: Quant) -> bool:
    """Return True if `quantize` can compute this: a known form, a CPU tensor of bf16 or fp32."""
    return (
        covers(quant)
        and x.device.type == "cpu"
        and x.dtype in (torch.bfloat16, torch.float32)
        and x.numel() > 0
        and builds.build() is not None
    )


def quantize(
    x: Tensor,
    quant: Quant,
    rotated: int,
    clock: Clock | None,
    where: int,
    keep: bool = False,
    statistic: float | Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Made | None:
    """Quantise x, [rows, columns] in bf16 or fp32, which is rotated already; `covers` accepts the quantiser.

    `rotated` is the size of its rotation, which MS-EDEN needs; 0: none. The clock is needed for what is
    drawn; `keep` keeps the quantised tensor in the result, for a census; `statistic` is as in `cpu.quantize`.
    None is returned if the reference must make the operand: something on the way is not finite, or `keep`
    asks for a tensor that was padded or has no census here (`can_keep`).
    """
    x = by_rows(x)
    rows, columns = x.shape
    tile_rows, tile_columns = quant.tile
    width = columns + -columns % math.lcm(tile_columns, GROUP)
    if keep and (width != columns or rows % tile_rows or not can_keep(quant)):
        return None
    kernels, form = builds.built(), described(quant, rotated)
    form.bf16 = x.dtype == torch.bfloat16
    whole = None
    if quant.outer is not None and quant.outer.granularity == "tensor":
        if statistic is None or callable(statistic):
            whole = torch.tensor(kernels.largest(x.data_ptr(), x.numel(), form.bf16), dtype=torch.float32)
            if callable(statistic) and whole.isfinite():
                whole = statistic(x, whole)
        else:
            whole = torch.tensor(statistic, dtype=torch.float32)
        if not whole.isfinite():
            return None
        form.amax = whole.item()
    if clock is not None:
        form.key[:], form.clock[:] = philox_key(clock), (clock.step, clock.micro_batch, where)
    values = torch.empty(rows, width, dtype=torch.float32 if quant.wide else torch.bfloat16)
    scales = torch.empty(
        -(-rows // tile_rows), width // tile_columns if quant.scale else 1, dtype=torch.float32
    )
    by_row = torch.empty(rows, 1, dtype=torch.float32)
    pointers = (values.data_ptr(), scales.data_ptr(), by_row.data_ptr())
    if not kernels.quantize(x.data_ptr(), rows, columns, width, form, *pointers):
        return None
    per_row = (
        quant.outer is not None and quant.outer.rows is not None and quant.outer.granularity != "block:128"
    )
    return Made(
        values,
        by_row if per_row else whole,
        scales[:, None, :, None] if quant.scale else None,
        torch.tensor(form.largest, dtype=torch.float32),
        x if keep else None,
    )


def described(quant: Quant, rotated: int) -> Form:
    """Return the description of a form that `covers` accepts, without what changes from call to call.
    `rotated` is the size of the rotation of its operand, 0 for none."""
    return Form.from_buffer_copy(_form(quant, rotated))


@cache
def _form(quant: Quant, group: int) -> bytes:
    element, scale = ELEMENTS[quant.element], quant.scale
    rounding = "nearest" if quant.rounding == "ms_eden" else quant.rounding
    form = Form(
        element=_grid(element, rounding),
        bits=quant.bits if rounding == "stochastic" else 8,
        map=1 / (quant.range.map_to or element.max),
        headroom=quant.range.headroom,
        prescale=quant.range.prescale,
        statistic=STATISTICS.index(tag(quant.range.statistic)),
        spread=float(argument(quant.range.statistic) or 1),
        outer=OUTERS.index(quant.outer and tag(quant.outer.granularity)),
        outer_rows=(quant.outer.rows if quant.outer else None) or 0,
        selection=CRITERIA.index(quant.select and quant.select.criterion),
        group=group if quant.rounding == "ms_eden" else 0,
        wide=quant.wide,
    )
    if quant.outer is not None:
        form.outer_top = element.max * quant.outer.bound
        form.divisor = 1 / torch.tensor(form.outer_top, dtype=torch.float32).item()
    if quant.select is not None:
        form.pair[:] = [element.max / value for value in quant.select.map_to]
        form.grids = quant.select.among == "grids"
    if scale is not None:
        to = SCALES[scale.format]
        form.halve = scale.halve_below or 0
        form.scale, (form.tile_rows, form.tile_columns) = _grid(to, scale.rounding), quant.tile
        form.scale_format = (
            (_GRID if to.zero or to.mantissa else _POWER_OF_TWO)
            if to.bits == 8
            else _BF16
            if to.bits == 16
            else _FP32
        )
        form.smallest = 2.0**to.emin if not to.zero and to.mantissa else 0
        lengths = scale.micro_exponents or ()
        form.levels, form.lengths[: len(lengths)] = len(lengths), lengths
        form.unit = torch.tensor(1 / quant.top).to(torch.bfloat16).item()
        form.zero = round_scale(torch.zeros(1), scale, torch.zeros(1)).item()
    return bytes(form)


def _grid(grid: Format, rounding: str) -> Grid:
    return Grid(grid.mantissa, grid.emin, grid.max, ROUNDINGS.index(rounding))


def can_rotate(z: Tensor) -> bool:
    """Return True if `rotate` can compute this: a CPU matrix of bf16 or fp32."""
    return (
        z.device.type == "cpu"
        and z.ndim == 2
        and z.dtype in (torch.bfloat16, torch.float32)
        and z.numel() > 0
        and builds.build() is not None
    )


def rotate(z: Tensor, signs: Tensor, back: bool = False) -> Tensor:
    """Return z R, or z R^T if `back`, along the columns, padded with zeros to a multiple of the size. z is
    [rows, columns], bf16 or fp32; signs are fp32 [size] of +1 and -1, the size a power of two, 4 to 128."""
    z, size = by_rows(z), signs.shape[0]
    rows, columns = z.shape
    width = columns + -columns % size
    out = torch.empty(rows, width, dtype=z.dtype)
    flips = (signs if size >= 16 else signs.repeat(16 // size)).contiguous()  # whole vectors
    turn = Turn(size**-0.5, size, back, z.dtype == torch.bfloat16)
    builds.built().rotate_rows(z.data_ptr(), rows, columns, width, turn, flips.data_ptr(), out.data_ptr())
    return out


def by_rows(x: Tensor) -> Tensor:
    """Return a bf16 or fp32 matrix stored by rows: itself, or a copy, made six times as fast as torch's."""
    if x.is_contiguous() or not x.t().is_contiguous():
        return x.contiguous()
    columns, rows = x.shape  # of the memory, transposed
    out = torch.empty(columns, rows, dtype=x.dtype)
    builds.built().transpose_whole(x.data_ptr(), rows, columns, out.data_ptr(), x.dtype == torch.bfloat16)
    return out
