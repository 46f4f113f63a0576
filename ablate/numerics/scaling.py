"""Two-level scaling: an fp32 statistic for tensor, row or 128-block, a small scale a block. The order of operations is the specification.

Everything is laid out as tiles, [row tiles, rows, column tiles, columns]; statistics and scales broadcast against that.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS, SCALES, Format
from ablate.numerics.history import History
from ablate.numerics.partition import Share
from ablate.numerics.philox import Clock
from ablate.numerics.rounding import SCALE_ROUNDINGS
from ablate.numerics.spec import BlockScale, Outer, Quant, argument, tag

FLT_MAX = torch.finfo(torch.float32).max
_SMALLEST = 2.0**-127
"""E8M0's code 0, a subnormal in fp32."""


# --- statistics -----------------------------------------------------------------------------------


def block_amax(tiles: Tensor) -> Tensor:
    """The largest magnitude of each block, fp32 [row tiles, 1, column tiles, 1]."""
    return tiles.abs().amax(dim=1, keepdim=True).amax(dim=3, keepdim=True)


def block_rms(tiles: Tensor) -> Tensor:
    """The root mean square of each block."""
    return tiles.square().mean(dim=(1, 3), keepdim=True).sqrt()


def block_std(tiles: Tensor) -> Tensor:
    """The population standard deviation of each block."""
    if not tiles.numel():  # torch warns of them
        return block_amax(tiles)
    return tiles.var(dim=(1, 3), correction=0, keepdim=True).sqrt()


BLOCK_STATISTICS = {
    function.__name__.removeprefix("block_"): function for function in (block_amax, block_rms, block_std)
}


def block_statistic(tiles: Tensor, amaxes: Tensor, statistic: str) -> Tensor:
    """What counts as each block's largest magnitude, its true one (`amaxes`) known."""
    factor = argument(statistic)
    return amaxes if factor is None else BLOCK_STATISTICS[tag(statistic)](tiles) * float(factor)


def amax(
    x: Tensor, amaxes: Tensor, argument: Fraction | None, history: History | None, clock: Clock | None
) -> Tensor:
    """The largest magnitude of each group, fp32: a scalar, or [rows, 1, 1 or groups, 1]."""
    return amaxes.amax() if amaxes.ndim == 1 else amaxes


def percentile(
    x: Tensor, amaxes: Tensor, p: Fraction, history: History | None, clock: Clock | None
) -> Tensor:
    """The order statistic k = ceil(p n) of the magnitudes, no interpolation, fp32. Blocks above it saturate."""
    if amaxes.ndim == 1 and x.dtype == torch.bfloat16 and x.device.type == "cpu":
        return _counted(x, math.ceil(p * x.numel()))
    rows = x.reshape(1, -1) if amaxes.ndim == 1 else x
    value = rows.abs().kthvalue(math.ceil(p * rows.shape[1]), dim=1).values.to(torch.float32)
    return value[0] if amaxes.ndim == 1 else value.view(-1, 1, 1, 1)


def _counted(x: Tensor, k: int) -> Tensor:
    """The k-th smallest magnitude of bf16 `x`, fp32: there are 32,768, ordered as their bits are, so counting beats selecting eightfold."""
    counts = torch.bincount(x.reshape(-1).view(torch.int16) & 0x7FFF, minlength=2**15)
    return torch.searchsorted(counts.cumsum(0), k).to(torch.int16).view(torch.bfloat16).to(torch.float32)


def delayed(
    x: Tensor, amaxes: Tensor, steps: Fraction, history: History | None, clock: Clock | None
) -> Tensor:
    """The largest amax of the `steps` steps before; of this call where there is none yet. Fp32 scalar."""
    current = amaxes.amax()
    return history.delayed(current, clock, int(steps)) if history is not None else current


def hold(x: Tensor, amaxes: Tensor, steps: Fraction, history: History | None, clock: Clock | None) -> Tensor:
    """The amax that was taken first in the current period of `steps` steps. Fp32 scalar."""
    current = amaxes.amax()
    return history.held(current, clock, int(steps)) if history is not None else current


def static(
    x: Tensor, amaxes: Tensor, value: Fraction, history: History | None, clock: Clock | None
) -> Tensor:
    """A given magnitude, fp32 scalar."""
    return torch.tensor(float(value), dtype=torch.float32, device=x.device)


STATISTICS = {function.__name__: function for function in (amax, percentile, delayed, hold, static)}


def outer_statistic(
    x: Tensor,
    tiles: Tensor | None,
    amaxes: Tensor,
    outer: Outer,
    history: History | None,
    clock: Clock | None,
    share: Share | None = None,
) -> Tensor:
    """The outer statistic of the copy `x` that is quantised: fp32 scalar, [rows, 1, 1, 1] or [rows, 1, column tiles, 1].

    0 for an empty tensor. One for the whole tensor needs no `tiles`, and of `amaxes` the largest alone. With `share`, of the whole
    matrix of which x is a part.
    """
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    grouped = amaxes.flatten()
    if outer.granularity == "row":
        grouped = amaxes.amax(dim=2, keepdim=True)
    elif outer.granularity == "block:128":
        blocks = 128 // tiles.shape[3]
        rows, _, columns, _ = amaxes.shape
        whole = torch.nn.functional.pad(amaxes.view(rows, columns), (0, -columns % blocks)).view(
            rows, -1, blocks
        )
        grouped = whole.amax(dim=2).repeat_interleave(blocks, dim=1)[:, :columns].view(rows, 1, columns, 1)
    if share and outer.granularity != "block:128" and (share.axis == 1 or outer.granularity == "tensor"):
        if tag(outer.statistic) == "percentile":
            x = share.gathered(x)
        else:
            grouped = share.largest(grouped.amax(dim=0, keepdim=True) if grouped.ndim == 1 else grouped)
    return STATISTICS[tag(outer.statistic)](x, grouped, argument(outer.statistic), history, clock)


# --- scales ---------------------------------------------------------------------------------------


def encode_scale(amax: Tensor, quant: Quant) -> Tensor:
    """S = 6 * bound / amax, at most FLT_MAX; 1 where amax is 0 or infinite (Transformer Engine 2.20)."""
    # A tensor, not a Python number: torch computes `number / tensor` as number * reciprocal, which rounds twice.
    top = torch.full_like(amax, ELEMENTS[quant.element].max * quant.outer.bound)
    scale = (top / amax).clamp(max=FLT_MAX)
    return scale.masked_fill_((amax == 0) | (scale == 0), 1.0)


def block_scales(largest: Tensor, scale: Tensor, quant: Quant, bits: Tensor | None = None) -> Tensor:
    """Each block's scale, an fp32 holding a value of the scale format: largest * (S * fp32(1/6) * headroom), rounded once.

    `largest / 6 * S` would differ in about 0.1 % of cases, at exact ties, which bf16 data hits. Scales that are rounded
    stochastically take 24 random bits each.
    """
    top = quant.range.map_to or ELEMENTS[quant.element].max
    multiplier = scale * torch.full_like(scale, 1 / top)
    if quant.range.headroom != 1:
        multiplier = multiplier * quant.range.headroom
    return round_scale((largest * multiplier).clamp(max=FLT_MAX), quant.scale, bits)


def round_scale(scale: Tensor, to: BlockScale, bits: Tensor | None = None) -> Tensor:
    """Non-negative fp32 to the scale format, saturating, and its rule for zero; back in fp32."""
    grid = SCALES[to.format]
    if not grid.zero:
        return _power_of_two(scale, to, grid, bits)
    if grid.bits >= 16:
        rounded = scale.clamp(max=grid.max).to(getattr(torch, grid.dtype)).to(torch.float32)
    else:
        rounded = SCALE_ROUNDINGS[to.rounding](scale, grid, bits, 24)
    if to.zero == "zero":
        return rounded
    return torch.where(rounded == 0, 1.0 if to.zero == "one" else 2.0**grid.emin, rounded)


def _power_of_two(scale: Tensor, to: BlockScale, grid: Format, bits: Tensor | None) -> Tensor:
    """E8M0, from 2^-127 to 2^127. Small scales are lifted first, since the smallest ones are subnormal in fp32."""
    lift = torch.where(scale < 2.0**-60, 2.0**40, 1.0)
    rounded = SCALE_ROUNDINGS[to.rounding](scale.clamp(min=_SMALLEST) * lift, grid, bits, 24)
    return (rounded / lift).clamp(_SMALLEST, grid.max)


def element_scales(block_scale: Tensor, scale: Tensor) -> Tensor:
    """What an element is multiplied by before rounding: 1 / (s * (1/S)), at most FLT_MAX (where the block scale is 0)."""
    return (1.0 / (block_scale * (1.0 / scale))).clamp(max=FLT_MAX)
