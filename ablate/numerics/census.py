"""Sums and counts over the elements and blocks of a quantised operand, in double precision, for telemetry."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ablate.numerics.formats import element_format
from ablate.numerics.kernels import cpu, forms
from ablate.numerics.quantize import Operand, pad
from ablate.numerics.scaling import element_scales, encode_scale
from ablate.numerics.spec import Quant


@dataclass(frozen=True)
class Census:
    """Sums and counts of one operand.

    x is the tensor that was quantised (rotated and padded), q its quantised values, and y the scaled x before
    rounding.
    """

    elements: int
    power: float
    """Sum of x^2. The fields below: `error` of (x - q)^2, `inner` of x q, `quantised_power` of q^2, `fourth`
    of x^4."""
    error: float
    inner: float
    quantised_power: float
    fourth: float
    mean_power: float
    """Sum of x^2 if every row were the mean row."""
    zeros: int
    """Non-zero elements that became zero. `saturated`: |y| is beyond the grid; `clipped`: by over half its
    last step."""
    saturated: int
    clipped: int
    blocks: Tensor
    """Largest |x| of each block, fp32, in any shape. In the same shape: `block_scaled`, its largest |y|, and
    `block_power`, its sum of x^2 in fp64."""
    block_scaled: Tensor
    block_power: Tensor
    block_elements: int


def last_step(quant: Quant) -> float:
    """Return the distance between the two largest grid values.

    A value less than half of it above the largest is rounded rather than clipped.
    """
    grid = element_format(quant.element)
    return grid.step(torch.tensor([grid.max], dtype=torch.float32)).item()


def census(operand: Operand) -> Census:
    """Return the census of an operand that kept its source, in one compiled pass if its form has one."""
    assert operand.quant is not None
    on_cpu = operand.values.device.type == "cpu"
    if operand.scaled is None and on_cpu and forms.nvidia(operand.quant):
        return compiled(operand)
    return reference(operand)


def compiled(operand: Operand) -> Census:
    """Return the census of an operand from the compiled kernels."""
    quant, amax, block_scale, source = operand.quant, operand.amax, operand.block_scale, operand.source
    assert quant is not None
    assert amax is not None
    assert block_scale is not None
    assert source is not None
    scale = encode_scale(amax, quant)
    sums, counts, blocks, block_power, means = cpu.census(
        source,
        operand.values,
        block_scale,
        amax,
        1.0 / scale,
        1.0 / torch.tensor(operand.divisor, dtype=torch.float32),
    )
    scales = element_scales(block_scale, scale)
    rows, columns = quant.tile
    return Census(
        elements=source.numel(),
        power=sums["power"],
        error=sums["error"],
        inner=sums["inner"],
        quantised_power=sums["quantised_power"],
        fourth=sums["fourth"],
        mean_power=means.square().sum().item() * source.shape[0],
        zeros=counts["zeros"],
        saturated=counts["saturated"],
        clipped=counts["clipped"],
        blocks=blocks,
        block_scaled=blocks * scales.view(blocks.shape),
        block_power=block_power,
        block_elements=rows * columns,
    )


def reference(operand: Operand) -> Census:
    """Return the census of an operand by torch's operations."""
    quant, source = operand.quant, operand.source
    assert quant is not None
    assert source is not None
    x, q, y = source.double(), operand.dequantize().double(), operand.rescaled().abs()
    top = element_format(quant.element).max
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
        clipped=(y > top + last_step(quant) / 2).sum().item(),
        blocks=blocks.abs().amax(dim=(1, 3)),
        block_scaled=_blocks(operand, y).amax(dim=(1, 3)),
        block_power=blocks.square().sum(dim=(1, 3)),
        block_elements=blocks.shape[1] * blocks.shape[3],
    )


def _blocks(operand: Operand, x: Tensor) -> Tensor:
    """Return `x` as tiles; groups of 16 elements if the operand has no blocks."""
    rows, columns = operand.quant.tile if operand.quant and operand.quant.block else (1, 16)
    padded = pad(x, rows, columns)
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
