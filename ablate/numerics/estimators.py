"""Gradients of the forward cast other than straight-through: a factor for every element of the gradient."""

import torch
from torch import Tensor

from ablate.numerics.formats import element_format
from ablate.numerics.kernels.cuda import Finish
from ablate.numerics.quantize import Operand
from ablate.numerics.spec import Dge, Quant

_ROUNDED = 1 + 2.0**-20
"""Tolerance: the largest element of a row may lie a few ulps above the grid, because its scale was
rounded."""


def clip_mask(operand: Operand) -> Tensor:
    """Return 1 for scaled elements inside the grid, 0 for saturated ones, fp32 (arXiv 2505.14669)."""
    if (mask := operand.on_device("clip_mask")) is not None:
        return mask
    quant, scaled = _kept(operand)
    return (scaled.abs() < element_format(quant.element).max).to(torch.float32)


def dge(operand: Operand) -> Tensor:
    """Return the slope of Microsoft's differentiable estimator before `finish`: |2t - 1|^(1/k - 1); fp32.

    Source: arXiv 2501.17116, eq. 8. t in [0, 1) is the position of the scaled element between its two
    neighbours. Beyond the grid, by more than the rounding of the scale explains, the slope is 0.
    """
    assert operand.quant is not None
    estimator = operand.quant.estimator
    assert isinstance(estimator, Dge)
    power = 1 / estimator.k - 1
    # Beyond the grid the distance is infinite, a power of which is 0 unless the exponent is.
    if power < 0 and (distance := operand.on_device("dge")) is not None:
        return distance**power
    quant, scaled = _kept(operand)
    element = element_format(quant.element)
    magnitude = scaled.abs()
    inside = magnitude.clamp(max=element.max)
    position = inside / element.step(inside)
    slope = (2 * (position - position.floor()) - 1).abs() ** power
    return torch.where(magnitude > element.max * _ROUNDED, 0.0, slope)


def _kept(operand: Operand) -> tuple[Quant, Tensor]:
    """Return the quantiser and the scaled elements of an operand that kept its source."""
    assert operand.quant is not None
    return operand.quant, operand.rescaled()


def unfinished_slope(operand: Operand) -> Tensor:
    """Return what `finish` makes the slope of, fp32 like the operand's scaled elements. The operand kept its
    source, and its quantiser names an estimator."""
    assert operand.quant is not None
    name = operand.quant.estimator
    return ESTIMATORS[name if isinstance(name, str) else type(name).__name__.lower()](operand)


def finish(unfinished: Tensor | None, quant: Quant | None, wide: bool = False) -> Finish:
    """Return the last steps of a product that is the gradient of a cast by `quant`: `dge` divides its slopes
    by k and limits them to `clip`. None: the gradient passes straight through. `wide` is that of `Finish`."""
    estimator = quant.estimator if quant else None
    limits = (estimator.k, estimator.clip) if isinstance(estimator, Dge) else ()
    return Finish(wide, unfinished, *limits)


def slope(operand: Operand) -> Tensor:
    """Return the factor of every element of the gradient of a cast, fp32 like its scaled elements."""
    factor = finish(unfinished_slope(operand), operand.quant).factor
    assert factor is not None
    return factor


ESTIMATORS = {function.__name__: function for function in (clip_mask, dge)}
