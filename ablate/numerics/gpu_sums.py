"""Sums that telemetry takes on a GPU (kernels/sums.py), each in two launches; nothing here waits."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ablate.numerics.formats import SCALES, element_format
from ablate.numerics.kernels import cuda, forms, general, general_cuda
from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.spec import Quant

NAMES = (
    *("zeros", "saturated", "clipped", "power", "error", "inner", "quantised_power", "fourth", "dead"),
    *("filled", "scales_zero", "scales_saturated", "scales_clipped", "blocks_saturated"),
    *("error_inner", "scale_bias"),
)
"""Numbers of an operand, in the kernel's order: fields of `census.Census`, and <x - q, q>."""


def can_sum(operand: Operand) -> bool:
    """Return True if `of_moves` takes this operand: one as a quantiser for GPUs makes it, of a form whose
    scaled elements follow from its values."""
    quant = operand.quant
    takes = quant is not None and quant.tile[0] <= 32 and forms.on_gpu(quant) and general.can_keep(quant)
    return takes and cuda.can_decode(operand.values, operand.block_scale, operand.amax)


def last_step(quant: Quant) -> float:
    """Return the distance between the two largest grid values; values up to half of it above are rounded."""
    grid = element_format(quant.element)
    return grid.step(torch.tensor([grid.max], dtype=torch.float32)).item()


def of_operand(operand: Operand) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the sums of an operand that kept its source; None if no kernel takes it.

    They are NAMES, fp64; the largest magnitude of each block, fp32; and that over the block's root mean
    square, fp64.
    """
    quant, source, values = operand.quant, operand.source, operand.values
    assert quant is not None
    assert source is not None
    alike = source.shape == values.shape and source.is_contiguous() == values.is_contiguous()
    return _sums(source, operand, quant) if alike and can_sum(operand) and cuda.can_take(source) else None


def _sums(source: Tensor, operand: Operand, quant: Quant) -> tuple[Tensor, Tensor, Tensor]:
    values = operand.values
    bound, reach = 0.0, 0.0
    if quant.scale is not None:
        top = SCALES[quant.scale.format].max
        bound, reach = min(quant.outer.bound if quant.outer else top, top), top * quant.top / operand.divisor
    clipped = element_format(quant.element).max + last_step(quant) / 2
    rows, columns = quant.tile if quant.block else (1, 16)
    tall, broad = -(-values.shape[0] // rows), -(-values.shape[1] // columns)
    blocks = torch.empty(tall * broad, dtype=torch.float32, device=values.device)
    crests = torch.empty_like(blocks, dtype=torch.float64)
    inverse = (1.0 / torch.full((), operand.divisor, dtype=torch.float32)).item()
    sums = launched(source, operand, None, len(NAMES), blocks, crests, inverse, reach, bound, clipped)
    return sums, blocks.view(tall, broad) if values.is_contiguous() else blocks.view(broad, tall).t(), crests


def of_moves(operand: Operand, weights: Tensor) -> Tensor:
    """Return the sum of squares of `product_error.spread`, fp64 [1], for an operand of `can_sum` whose
    elements alone are rounded at random, and fp32 weights [rows, columns]."""
    return launched(None, operand, weights.contiguous(), 1, None, None, 0.0, 0.0, 0.0, 0.0)


def launched(
    source: Tensor | None, operand: Operand, weights: Tensor | None, count: int, *others: Any
) -> Tensor:
    """Return the sums over all programs, fp64 [count]."""
    from ablate.numerics.kernels import sums as device_code

    quant, values, scales = operand.quant, operand.values, operand.block_scale
    assert quant is not None
    *scalars, bound, clipped = others
    # By tiles: a form that is cast by slabs has the same blocks.
    form = replace(general_cuda.described(quant, 0, not values.is_contiguous()), slab=False)
    grid, options = general_cuda.launch((values.t() if form.down else values).shape, (form, None))
    made = torch.empty(grid[0], count, dtype=torch.float64, device=values.device)
    pointers = values, None if scales is None else scales[:, 0, :, 0], operand.amax, weights, made
    constants = bound, clipped, quant.wide, count, form
    options |= {"num_warps": 8}  # fp64 takes two registers
    with torch.cuda.device_of(values):
        device_code.operand_sums[grid](
            source, *pointers, *scalars, operand.divisor, *values.shape, *constants, **options
        )
    return made.sum(0)


def of_product(y: Tensor, exact: Tensor) -> Tensor | None:
    """Return <exact, exact>, <y, exact> and |y - exact|^2, fp64 [3], of a bf16 or fp32 y and an exact one in
    fp32; None if no kernel takes them."""
    if exact.dtype != torch.float32 or not (cuda.can_take(y) and y.is_contiguous() and exact.is_contiguous()):
        return None
    from ablate.numerics.kernels import sums as device_code  # needs Triton

    programs = -(-y.numel() // device_code.SIZE)
    made = torch.empty(programs, 3, dtype=torch.float64, device=y.device)
    with torch.cuda.device_of(y):
        device_code.product_sums[(programs,)](y, exact, made, y.numel(), device_code.SIZE, **cuda.EXACT)
    return made.sum(0)


def _trial(x: Tensor) -> Tensor:
    """Return the first sums of the trial matrix on the device of x, rounded: additions have another order."""
    made = quantize(cuda.trial_matrix(), Quant(), keep="source")
    assert made.source is not None
    tensors = made.values, made.amax, made.block_scale, made.source
    values, amax, scales, source = (None if z is None else z.to(x.device) for z in tensors)
    return _sums(source, Operand(values, Quant(), amax, scales), Quant())[0][:8].to(torch.float32)


cuda.OTHER_TRIALS["summed"] = _trial
