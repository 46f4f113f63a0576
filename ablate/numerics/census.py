"""Sums and counts over the elements and blocks of a quantised operand, in double precision, for telemetry."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ablate.numerics import gpu_sums
from ablate.numerics.formats import SCALES, element_format
from ablate.numerics.kernels import cpu, forms
from ablate.numerics.quantize import Operand, pad
from ablate.numerics.scaling import element_scales, encode_scale


@dataclass(frozen=True)
class Census:
    """Sums and counts of one operand: x is the tensor that was quantised (rotated and padded), q its
    quantised values, and y the scaled x before rounding."""

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
    """Largest |x| of each block, in any shape."""
    crest: float
    """Median over blocks of largest |x| over root mean square, without blocks of zeros; NaN if all are."""
    filled: int
    """Blocks that are not zero. `blocks_saturated`: some |y| is beyond the grid."""
    blocks_saturated: int
    scales_zero: int
    """Block scales of filled blocks that are zero. `scales_saturated`: at their bound; `scales_clipped`: at
    the format's largest, and should have been larger. All 0 without block scales."""
    scales_saturated: int
    scales_clipped: int
    dead: float
    """Energy of the error in the dead zone, and in scales (`parts_of_error`); the rest of `error` is noise of
    the grid."""
    scale_bias: float


def census(operand: Operand) -> Census:
    """Return the census of an operand that kept its source, in one compiled pass if its form has one."""
    assert operand.quant is not None
    if operand.scaled is not None:
        return reference(operand)
    sums = gpu_sums.of_operand(operand)
    if sums is not None:
        return _on_gpu(operand, *sums)
    on_cpu = operand.values.device.type == "cpu"
    return compiled(operand) if on_cpu and forms.nvidia(operand.quant) else reference(operand)


def _on_gpu(operand: Operand, sums: Tensor, blocks: Tensor, crests: Tensor) -> Census:
    """Return the census from the sums of a GPU, in one wait for it."""
    assert operand.quant is not None
    assert operand.source is not None
    mean = torch.linalg.vector_norm(operand.source.mean(dim=0, dtype=torch.float64))
    *numbers, crest, norm = torch.stack([*sums, crests.nanmedian(), mean]).cpu().tolist()
    fields: dict[str, Any] = dict(zip(gpu_sums.NAMES, numbers, strict=True))
    error_inner = fields.pop("error_inner")
    if not operand.quant.block and fields["quantised_power"]:  # all elements have one scale
        fields["scale_bias"] = error_inner**2 / fields["quantised_power"]
    size = operand.source.numel()
    return Census(size, mean_power=norm**2 * len(operand.source), blocks=blocks, crest=crest, **fields)


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
    totals: dict[str, Any] = sums | counts | parts_of_error(operand)
    scales = element_scales(block_scale, scale)
    rows, columns = quant.tile
    return Census(
        elements=source.numel(),
        mean_power=means.square().sum().item() * source.shape[0],
        **_of_blocks(operand, blocks, blocks * scales.view(blocks.shape), block_power, rows * columns),
        **totals,
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
        clipped=(y > top + gpu_sums.last_step(quant) / 2).sum().item(),
        **_of_blocks(
            operand,
            blocks.abs().amax(dim=(1, 3)),
            _blocks(operand, y).amax(dim=(1, 3)),
            blocks.square().sum(dim=(1, 3)),
            blocks.shape[1] * blocks.shape[3],
        ),
        **parts_of_error(operand),
    )


def _of_blocks(operand: Operand, blocks: Tensor, scaled: Tensor, power: Tensor, size: int) -> dict[str, Any]:
    """Return the fields that count blocks of `size` elements, from the largest |x|, the largest |y| and the
    power of each."""
    quant, scales = operand.quant, operand.block_scale
    assert quant is not None
    fields: dict[str, Any] = {
        "blocks": blocks,
        "crest": (blocks / (power / size).sqrt()).nanmedian().item(),  # NaN for a block of zeros
        "filled": _count(blocks > 0),
        "blocks_saturated": _count(scaled > element_format(quant.element).max),
        **dict.fromkeys(("scales_zero", "scales_saturated", "scales_clipped"), 0),
    }
    if scales is None or quant.scale is None:
        return fields
    amaxes, top = blocks.view(scales.shape), SCALES[quant.scale.format].max
    reach = top * quant.top / operand.divisor
    if operand.amax is not None:  # one value, or one for each row
        reach = reach * operand.amax.reshape(-1, 1, 1, 1)[:: quant.tile[0]]
    too_large = amaxes > reach * (1 + 2**-4)  # half a step of E4M3 above the top rounds to it
    bound = min(quant.outer.bound if quant.outer else math.inf, top)
    return fields | {
        "scales_zero": _count((scales == 0) & (amaxes > 0)),
        "scales_saturated": _count(scales >= bound),
        "scales_clipped": _count((scales == top) & too_large),
    }


def _count(mask: Tensor) -> int:
    return int(mask.count_nonzero())


def parts_of_error(operand: Operand) -> dict[str, Any]:
    """Return two of the three parts of the energy of the error e = x - q, which add up to it exactly.

    The parts are those of arXiv 2605.20402. For every block scale with its block of x and q, or for all of x
    and q where there are none, whatever the outer scales, let a = <x, q> / <q, q> be the factor by which the
    values should have been larger, in least squares. Then

        e = x [q = 0]  +  (a - 1) q  +  (x - a q) [q != 0]
            dead zone     scale bias    noise of the grid

    There are no cross terms: the first part lives on other elements than the others, and the third is
    orthogonal to q in every block by the choice of a. So the three energies sum to |e|^2. The paper measures
    the second part from a scale that is not rounded, which leaves a cross term. Noise without any bias has
    some of its energy in the second part, since a is fitted to it: up to 3/n in Gaussian blocks of n. Keys:
    `dead`, the sum of x^2 over the elements with q = 0; `scale_bias`, the sum over blocks of (a - 1)^2 <q,
    q>.
    """
    assert operand.source is not None
    x, q = operand.source.to(torch.float32), operand.dequantize()
    unit = operand.largest if operand.largest is not None else x.abs().amax()
    unit = torch.where(unit > 0, unit, 1.0).float()  # squares of numbers of any size stay within fp32
    x, q = x / unit, q / unit
    dims: tuple[int, ...] = (1, 3)
    if operand.block_scale is None or operand.quant is None or not operand.quant.block:
        x, q, dims = x.flatten(), q.flatten(), (0,)
    else:
        x, q = _blocks(operand, x), _blocks(operand, q)
    squares = (q * q).sum(dims, dtype=torch.float64)
    inner = ((x - q) * q).sum(dims, dtype=torch.float64)
    bias = torch.where(squares > 0, inner.square() / squares.clamp(min=1e-300), 0.0).sum()
    dead = torch.where(q == 0, x, 0.0).square().sum(dtype=torch.float64)
    energy = unit.double() ** 2
    return {"dead": (dead * energy).item(), "scale_bias": (bias * energy).item()}


def _blocks(operand: Operand, x: Tensor) -> Tensor:
    """Return `x` as tiles; groups of 16 elements if the operand has no blocks."""
    rows, columns = operand.quant.tile if operand.quant and operand.quant.block else (1, 16)
    padded = pad(x, rows, columns)
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
