"""The gradient of the forward cast, where it is not passed straight through: a factor for every element."""

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS
from ablate.numerics.quantize import Operand

_ROUNDED = 1 + 2.0**-20
"""The largest element of a row may land a few ulps above the grid, by the roundings of its scale."""


def clip_mask(operand: Operand) -> Tensor:
    """1 where the scaled element lay inside the grid, 0 where it saturated (QuEST, Quartet: arXiv 2505.14669), fp32."""
    return (operand.scaled.abs() < ELEMENTS[operand.quant.element].max).to(torch.float32)


def dge(operand: Operand) -> Tensor:
    """The slope of Microsoft's differentiable estimator (arXiv 2501.17116, eq. 8): |2t - 1|^(1/k - 1) / k, at most `clip`; fp32.

    t in [0, 1) is the position between the two neighbours of the scaled element; beyond the grid, by more than the roundings of the
    scale, the slope is 0.
    """
    how, element = operand.quant.estimator, ELEMENTS[operand.quant.element]
    magnitude = operand.scaled.abs()
    inside = magnitude.clamp(max=element.max)
    position = inside / element.step(inside)
    slope = (2 * (position - position.floor()) - 1).abs() ** (1 / how.k - 1) / how.k
    return torch.where(magnitude > element.max * _ROUNDED, 0.0, slope.clamp(max=how.clip))


def slope(operand: Operand) -> Tensor:
    """The factor of every element of an operand that kept what was rounded; its quantiser must name an estimator."""
    name = operand.quant.estimator
    return ESTIMATORS[name if isinstance(name, str) else type(name).__name__.lower()](operand)


ESTIMATORS = {function.__name__: function for function in (clip_mask, dge)}
