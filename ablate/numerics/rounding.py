"""From a scaled value to one of its two neighbours on a grid. Randomness comes in as bits, never from a generator."""

import torch
from torch import Tensor

from ablate.numerics.formats import Format


def nearest(y: Tensor, grid: Format, bits: Tensor | None = None, width: int = 0) -> Tensor:
    """Round fp32 to the nearest neighbour, ties to the even code; beyond the largest magnitude, to it."""
    y = y.clamp(-grid.max, grid.max)
    step = grid.step(y)
    y.div_(step)
    rounded = y.round()
    if grid.mantissa == 0:  # between two powers of two: the even code is the one with the even exponent field
        even = (step.view(torch.int32) >> 23) - 126 - grid.emin & 1 == 0
        rounded = torch.where((y.abs() == 1.5) & even, y.trunc(), rounded)
    return rounded.mul_(step)


def away(y: Tensor, grid: Format, bits: Tensor | None = None, width: int = 0) -> Tensor:
    """Round fp32 to the nearest neighbour, ties away from zero, as Quartet II's Triton kernels do (arXiv 2601.22813)."""
    magnitude = y.abs().clamp_(max=grid.max)
    step = grid.step(magnitude)
    magnitude.div_(step)
    lower = magnitude.floor()
    return lower.add_(magnitude.sub_(lower) >= 0.5).mul_(step).copysign_(y)


def stochastic(y: Tensor, grid: Format, bits: Tensor, width: int) -> Tensor:
    """Round fp32 away from zero with probability floor(2^width f) / 2^width, f the position between the two neighbours.

    `bits` holds one uniform integer in [0, 2^width) an element, as fp32. The truncation is Transformer Engine's: a bias of at most
    2^-width of a step toward zero. Beyond the largest magnitude it saturates, which is where headroom matters.
    """
    magnitude = y.abs().clamp_(max=grid.max)
    step = grid.step(magnitude)
    magnitude.div_(step)
    lower = magnitude.floor()
    # 1 where floor(2^width f) > bits, else 0. The difference is exact wherever its floor is in doubt.
    up = magnitude.sub_(lower).mul_(2.0**width).sub_(bits).floor_().clamp_(0, 1)
    rounded = lower.add_(up).mul_(step)
    sign = y.view(torch.int32) & -(2**31)
    return rounded.view(torch.int32).bitwise_or_(sign).view(torch.float32)


def floor(y: Tensor, grid: Format, bits: Tensor | None = None, width: int = 0) -> Tensor:
    """Round fp32 to the neighbour toward zero."""
    y = y.clamp(-grid.max, grid.max)
    step = grid.step(y)
    return y.div_(step).trunc_().mul_(step)


def ceil(y: Tensor, grid: Format, bits: Tensor | None = None, width: int = 0) -> Tensor:
    """Round non-negative fp32 to the neighbour away from zero; beyond the largest magnitude, to it."""
    y = y.clamp(max=grid.max)
    step = grid.step(y)
    return y.div_(step).ceil_().mul_(step)


def toward(y: Tensor, target: Tensor, grid: Format) -> Tensor:
    """Round fp32 to that of its two neighbours which `target`, on the same scale, is nearer to; ties away from zero (TetraJet's Q-EMA)."""
    magnitude = y.abs()
    lower, upper = floor(magnitude, grid), ceil(magnitude, grid)
    sign = torch.where(y < 0, -1.0, 1.0)
    return sign * torch.where(target * sign >= (lower + upper) / 2, upper, lower)


ROUNDINGS = {function.__name__: function for function in (nearest, away, stochastic)}
"""Of elements."""
SCALE_ROUNDINGS = ROUNDINGS | {function.__name__: function for function in (floor, ceil)}
"""Of block scales, which are never negative."""
