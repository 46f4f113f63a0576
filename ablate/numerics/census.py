"""What telemetry needs of one quantised operand: sums and counts over its elements and its blocks, in double precision."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS
from ablate.numerics.kernels import cpu
from ablate.numerics.quantize import Operand, pad
from ablate.numerics.scaling import element_scales, encode_scale
from ablate.numerics.spec import Quant


@dataclass(frozen=True)
class Census:
    """Of x, what was quantised (rotated, padded), and q, its quantised values; y is x scaled, before it is rounded."""

    elements: int
    power: float
    """Sum of x^2; `error` that of (x - q)^2, `inner` of x q, `quantised_power` of q^2, `fourth` of x^4."""
    error: float
    inner: float
    quantised_power: float
    fourth: float
    mean_power: float
    """Sum of x^2 if every row were the mean of all."""
    zeros: int
    """Elements that were not zero and are now; `saturated` those with |y| beyond the grid, `clipped` by over half its last step."""
    saturated: int
    clipped: int
    blocks: Tensor
    """Largest |x| of each block, fp32, in any shape; `block_scaled` its largest |y|, `block_power` its sum of x^2, fp64, alike."""
    block_scaled: Tensor
    block_power: Tensor
    block_elements: int


def last_step(quant: Quant) -> float:
    """The distance between the two largest values of the grid: what lies less than half of it above the last is rounded, not clipped."""
    grid = ELEMENTS[quant.element]
    return grid.step(torch.tensor([grid.max])).item()


def census(operand: Operand) -> Census:
    """The census of an operand that kept its source: from one compiled pass where a compiled quantiser made it."""
    return _reference(operand) if operand.scaled is not None else _compiled(operand)


def _compiled(operand: Operand) -> Census:
    scale = encode_scale(operand.amax, operand.quant)
    sums, blocks, block_power, means = cpu.census(
        operand.source,
        operand.values,
        operand.block_scale,
        operand.amax,
        1.0 / scale,
        1.0 / torch.tensor(operand.divisor),
    )
    scales = element_scales(operand.block_scale, scale)
    rows, columns = operand.quant.tile
    return Census(
        elements=operand.source.numel(),
        mean_power=means.square().sum().item() * operand.source.shape[0],
        blocks=blocks,
        block_scaled=blocks * scales.view(blocks.shape),
        block_power=block_power,
        block_elements=rows * columns,
        **sums,
    )


def _reference(operand: Operand) -> Census:
    x, q, y = operand.source.double(), operand.dequantize().double(), operand.scaled.abs()
    top = ELEMENTS[operand.quant.element].max
    blocks = _blocks(operand, x)
    return Census(
        elements=x.numel(),
        power=x.square().sum().item(),
        error=(x - q).square().sum().item(),
        inner=(x * q).sum().item(),
        quantised_power=q.square().sum().item(),
        fourth=x.square().square().sum().item(),
        mean_power=x.mean(dim=0).square().sum().item() * x.shape[0],
        zeros=((q == 0) & (x != 0)).sum().item(),
        saturated=(y > top).sum().item(),
        clipped=(y > top + last_step(operand.quant) / 2).sum().item(),
        blocks=blocks.abs().amax(dim=(1, 3)),
        block_scaled=_blocks(operand, y).amax(dim=(1, 3)),
        block_power=blocks.square().sum(dim=(1, 3)),
        block_elements=blocks.shape[1] * blocks.shape[3],
    )


def _blocks(operand: Operand, x: Tensor) -> Tensor:
    """[row tiles, rows, column tiles, columns]; 16 elements where the operand has no blocks."""
    rows, columns = operand.quant.tile if operand.quant.block else (1, 16)
    padded = pad(x, rows, columns)
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
