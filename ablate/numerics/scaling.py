"""Two-level scaling: an fp32 statistic for the tensor, a small scale for each block. The order of operations is the specification."""

import math
from fractions import Fraction

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS, SCALES
from ablate.numerics.spec import Quant, argument

FLT_MAX = torch.finfo(torch.float32).max


def amax(x: Tensor, block_amax: Tensor, _: None) -> Tensor:
    """The largest magnitude, fp32 scalar."""
    return block_amax.amax()


def percentile(x: Tensor, block_amax: Tensor, p: Fraction) -> Tensor:
    """The order statistic k = ceil(p n) of the magnitudes, no interpolation, fp32 scalar. Blocks above it saturate."""
    k = math.ceil(p * x.numel())
    return x.abs().flatten().kthvalue(k).values.to(torch.float32)


def tensor_statistic(x: Tensor, block_amax: Tensor, quant: Quant) -> Tensor:
    """The outer statistic (fp32 scalar) of the copy `x` that is quantised, its blocks' maxima known; 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    statistic = quant.outer.statistic
    return STATISTICS[statistic.partition(":")[0]](x, block_amax, argument(statistic))


def encode_scale(amax: Tensor, quant: Quant) -> Tensor:
    """S = 6 * bound / amax, at most FLT_MAX; 1 where amax is 0 or infinite (Transformer Engine 2.20)."""
    # A tensor, not a Python number: torch computes `number / tensor` as number * reciprocal, which rounds twice.
    top = torch.full_like(amax, ELEMENTS[quant.element].max * quant.outer.bound)
    scale = (top / amax).clamp(max=FLT_MAX)
    return scale.masked_fill_((amax == 0) | (scale == 0), 1.0)


def block_scales(block_amax: Tensor, scale: Tensor, quant: Quant) -> Tensor:
    """Each block's scale, an fp32 holding a value of the scale format: block_amax * (S * fp32(1/6) * headroom), rounded once.

    `block_amax / 6 * S` would differ in about 0.1 % of cases, at exact ties, which bf16 data hits.
    """
    multiplier = scale * torch.full_like(scale, 1 / ELEMENTS[quant.element].max)
    if quant.range.headroom != 1:
        multiplier = multiplier * quant.range.headroom
    return SCALES[quant.scale.format]((block_amax * multiplier).clamp(max=FLT_MAX))


def element_scales(block_scale: Tensor, scale: Tensor) -> Tensor:
    """What an element is multiplied by before rounding: 1 / (s * (1/S)), at most FLT_MAX (where the block scale is 0)."""
    return (1.0 / (block_scale * (1.0 / scale))).clamp(max=FLT_MAX)


STATISTICS = {"amax": amax, "percentile": percentile}
