"""From a scaled value to one of its two neighbours on the element grid. Randomness comes in as bits, never from a generator."""

import torch
from torch import Tensor

from ablate.numerics.formats import Format


def nearest(y: Tensor, element: Format, bits: Tensor | None = None, width: int = 0) -> Tensor:
    """Round fp32 to the nearest neighbour, ties to the even code; beyond the largest magnitude, to it."""
    y = y.clamp(-element.max, element.max)
    step = element.step(y)
    return y.div_(step).round_().mul_(step)


def stochastic(y: Tensor, element: Format, bits: Tensor, width: int) -> Tensor:
    """Round fp32 away from zero with probability floor(2^width f) / 2^width, f the position between the two neighbours.

    `bits` holds one uniform integer in [0, 2^width) an element, as fp32. The truncation is Transformer Engine's: a bias of at most
    2^-width of a step toward zero. Beyond the largest magnitude it saturates, which is where headroom matters.
    """
    magnitude = y.abs().clamp_(max=element.max)
    step = element.step(magnitude)
    magnitude.div_(step)
    lower = magnitude.floor()
    # 1 where floor(2^width f) > bits, else 0. The difference is exact wherever its floor is in doubt.
    up = magnitude.sub_(lower).mul_(2.0**width).sub_(bits).floor_().clamp_(0, 1)
    rounded = lower.add_(up).mul_(step)
    sign = y.view(torch.int32) & -(2**31)
    return rounded.view(torch.int32).bitwise_or_(sign).view(torch.float32)


ROUNDINGS = {"nearest": nearest, "stochastic": stochastic}
