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

    `bits` holds one uniform integer in [0, 2^width) an element. The truncation is Transformer Engine's: a bias of at most
    2^-width of a step toward zero. Beyond the largest magnitude it saturates, which is where headroom matters.
    """
    y = y.clamp(-element.max, element.max)
    step = element.step(y)
    y.div_(step)
    lower = y.trunc()
    fraction = (y - lower).abs_()
    up = fraction.mul_(2.0**width).to(bits.dtype) > bits  # as integers: fp32 cannot hold 32 random bits
    return lower.add_(torch.copysign(up.to(torch.float32), y)).mul_(step)


ROUNDINGS = {"nearest": nearest, "stochastic": stochastic}
