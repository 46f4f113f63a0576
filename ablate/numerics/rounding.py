"""Rounding of scaled values to a small grid: nearest, stochastic, and the variants that papers use.

The problem: a scaled element such as 2.6 lies between two values of the E2M1 grid, 2 and 3. Each function
here picks one of the two. `nearest` picks 3. `stochastic` picks 3 with probability 0.6, so the result is
right on average, which matters where rounding errors are summed over many tokens or steps. All functions
divide by the grid's step (a power of two, hence exact), round to an integer, and multiply by the step again.
They are written for one grid at a time and never look at a block or a scale.

    >>> from ablate.numerics.formats import ELEMENTS
    >>> nearest(torch.tensor([2.6, 2.5, 7.0, -0.2]), ELEMENTS["e2m1"])
    tensor([ 3.,  2.,  6., -0.])

Ties of `nearest` go to the even code, as IEEE 754 and NVIDIA's conversion do; magnitudes beyond the grid
saturate. Random bits are an argument, never taken from a generator, so that a draw depends only on where and
when it happens (philox.py). The exact rules are section 4 of docs/reference/numerics.md. Not modelled: how
the hardware instruction `cvt.rs` uses its random bits, which is not published.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ablate.numerics.formats import Format, Levels


def nearest(y: Tensor, grid: Format, bits: Tensor | None = None, width: int = 0) -> Tensor:
    """Round to the nearest neighbour, ties to the even code, saturating at the largest magnitude.

    Args:
        y: fp32 values of any shape, already scaled.
        bits, width: Ignored; all roundings have the same signature.

    Returns:
        fp32 tensor like `y` on the grid. NaN stays NaN, and zero keeps its sign.
    """
    if isinstance(grid, Levels):
        return _of_levels(y, grid, lambda f, lower: (f > 0.5) | ((f == 0.5) & ~grid.even(lower)))
    y = y.clamp(-grid.max, grid.max)
    step = grid.step(y)
    y.div_(step)
    rounded = y.round()
    if grid.mantissa == 0:  # between two powers of two, the even code is the one with the even exponent field
        even = (step.view(torch.int32) >> 23) - 126 - grid.emin & 1 == 0
        rounded = torch.where((y.abs() == 1.5) & even, y.trunc(), rounded)
    return rounded.mul_(step)


def away(y: Tensor, grid: Format, bits: Tensor | None = None, width: int = 0) -> Tensor:
    """Round scaled fp32 of any shape to the nearest neighbour, ties away from zero, saturating at the largest
    magnitude. Quartet II's Triton kernels round like this (arXiv 2601.22813)."""
    if isinstance(grid, Levels):
        return _of_levels(y, grid, lambda f, lower: f >= 0.5)
    magnitude = y.abs().clamp_(max=grid.max)
    step = grid.step(magnitude)
    magnitude.div_(step)
    lower = magnitude.floor()
    return lower.add_(magnitude.sub_(lower) >= 0.5).mul_(step).copysign_(y)


def stochastic(y: Tensor, grid: Format, bits: Tensor, width: int) -> Tensor:
    """Round away from zero with probability floor(2^width f) / 2^width, else toward zero.

    f in [0, 1) is the position of the magnitude of `y`, scaled fp32 of any shape, between its two neighbours.
    The floor is Transformer Engine's: the result is biased by at most 2^-width of a step toward zero.
    Magnitudes beyond the grid saturate, which biases them too; the headroom of the block scale
    (docs/reference/numerics.md, section 3) exists to avoid that. `bits` are uniform integers in [0, 2^width),
    one for each element, as fp32 that broadcasts to `y`; `width` is 8, 16 or 24. Zero keeps its sign.
    """
    if isinstance(grid, Levels):
        return _of_levels(y, grid, lambda f, lower: (f * 2.0**width).floor() > bits)
    magnitude = y.abs().clamp_(max=grid.max)
    step = grid.step(magnitude)
    magnitude.div_(step)
    lower = magnitude.floor()
    # 1 if floor(2^width f) > bits, else 0. The difference is exact wherever its floor could go either way.
    up = magnitude.sub_(lower).mul_(2.0**width).sub_(bits).floor_().clamp_(0, 1)
    rounded = lower.add_(up).mul_(step)
    sign = y.view(torch.int32) & -(2**31)
    return rounded.view(torch.int32).bitwise_or_(sign).view(torch.float32)


def floor(y: Tensor, grid: Format, bits: Tensor | None = None, width: int = 0) -> Tensor:
    """Round fp32 of any shape to the neighbour toward zero, saturating at the largest magnitude."""
    y = y.clamp(-grid.max, grid.max)
    step = grid.step(y)
    return y.div_(step).trunc_().mul_(step)


def ceil(y: Tensor, grid: Format, bits: Tensor | None = None, width: int = 0) -> Tensor:
    """Round non-negative fp32 of any shape away from zero, saturating at the largest magnitude."""
    y = y.clamp(max=grid.max)
    step = grid.step(y)
    return y.div_(step).ceil_().mul_(step)


def _of_levels(y: Tensor, grid: Levels, up: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Round to a neighbour on any grid: to the upper one where `up(f, lower)`, with f as in `stochastic`.

    f is computed in fp64, where the difference of two fp32 numbers of like size is exact.
    """
    lower, upper = grid.neighbours(y.abs())
    below, above = lower.double(), upper.double()
    f = ((y.abs().clamp(max=grid.max).double() - below) / (above - below)).nan_to_num(0.0)
    return torch.where(up(f, lower), upper, lower).copysign(y)


def toward(y: Tensor, target: Tensor, grid: Format) -> Tensor:
    """Round scaled fp32 of any shape to the neighbour that is nearer to `target`, ties away from zero.
    TetraJet's Q-EMA rounds weights like this (arXiv 2502.20853): `target`, fp32 on the same scale, is a
    weight's moving average."""
    magnitude = y.abs()
    lower, upper = grid.neighbours(magnitude)
    sign = torch.where(y < 0, -1.0, 1.0).to(y.dtype)
    return sign * torch.where(target * sign >= (lower + upper) / 2, upper, lower)


ROUNDINGS = {function.__name__: function for function in (nearest, away, stochastic)}
"""Roundings of elements."""
SCALE_ROUNDINGS = ROUNDINGS | {function.__name__: function for function in (floor, ceil)}
"""Roundings of block scales, which are never negative."""
