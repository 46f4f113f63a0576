"""Split of an operand before quantisation into parts that sum to it, each with its own quantiser or none."""

import math
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from ablate.numerics.choices import CHANNELS
from ablate.numerics.kernels import cuda
from ablate.numerics.philox import GROUP, Clock, random_bits
from ablate.numerics.scaling import order_statistic
from ablate.numerics.spec import Quant, Transform

CHANNEL_FORMATS = {
    word: Quant.model_validate(fields) if fields else None for word, fields in CHANNELS.items()
}
_ITERATIONS = 4
"""Steps of the subspace iteration, enough for a spectrum that is worth splitting off."""


class Part(NamedTuple):
    """One of the parts that an operand is split into."""

    values: Tensor
    """In the shape of the operand."""
    quant: Quant | None
    """None: kept in the dtype of the operand."""
    kept: Tensor | None = None
    """Indices of the channels that are not zero, ascending; None: any may be."""
    equal: bool = False
    """True if all tokens are the same."""


def split(x: Tensor, quant: Quant, channels: int) -> list[Part]:
    """Split `x`, [rows, columns] in bf16, fp16 or fp32, into parts that sum to it, but for what `clamp` cuts
    off without `residual`. The first is the rest, which `quant` quantises. `channels` is the dimension of the
    features: 1 if tokens are rows, 0 if they are columns."""
    if quant.transform is None:
        return [Part(x, quant)]
    transform, taken = quant.transform, []
    whole = transform.low_rank or transform.channels or not cuda.can_take(x)  # else a kernel reads x as it is
    rest = x.to(torch.float32) if whole else x

    def take(part: Tensor, part_quant: Quant | None, kept: Tensor | None = None) -> None:
        nonlocal rest
        taken.append(Part(part.to(x.dtype), part_quant, kept))
        rest = rest - taken[-1].values

    if transform.mean:
        means = mean(rest, channels)
        means = means[:1] if channels else means[:, :1]  # one token is converted, not all
        if cuda.can_take(rest):
            rest, part = cuda.parted(rest, x.dtype, means=means)
        else:
            part = means.to(x.dtype)
            rest = rest - part
        taken.append(Part(part.expand_as(rest), None, None, True))
    if transform.low_rank:
        take(low_rank(rest, transform.low_rank), None)
    if transform.channels:
        kept = largest_channels(rest, transform.channels, channels)
        take(only(rest, kept, channels), CHANNEL_FORMATS[transform.channels_in], kept)
    if transform.clamp is not None:
        limit = quantile(rest if taken else x, transform.clamp)
        if cuda.can_take(rest):
            rest, *parts = cuda.parted(rest, x.dtype, limit, keep=transform.residual)
        else:
            clamped = rest.clamp(-limit, limit)
            parts = [(rest - clamped).to(x.dtype)] * transform.residual
            rest = clamped
        taken += [Part(part, None) for part in parts]
    return [Part(rest.to(torch.float32), quant), *taken]


def mean(x: Tensor, channels: int) -> Tensor:
    """Return every channel's mean over tokens, in the shape of x (arXiv 2509.00404 and 2603.10444)."""
    return x.mean(dim=1 - channels, keepdim=True, dtype=torch.float32).expand_as(x)


def low_rank(x: Tensor, rank: int) -> Tensor:
    """Return the leading `rank` singular components of x, by subspace iteration from a fixed start. Not
    modelled: Metis (arXiv 2509.00404) also quantises the factors; here they keep the operand's precision."""
    x = x.contiguous()  # the order of additions follows the layout
    rank = min(rank, *x.shape)
    if not x.numel() or not x.isfinite().all():
        return torch.zeros_like(x)
    start = (
        random_bits(Clock(0), 0, rank, x.shape[0] + -x.shape[0] % GROUP, 16, x.device)[:, : x.shape[0]]
        - 2.0**15
    )
    basis = start.t()
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(x @ (x.t() @ torch.linalg.qr(basis).Q)).Q
    return basis @ (basis.t() @ x)


def largest_channels(x: Tensor, fraction: float, channels: int) -> Tensor:
    """Return the indices of the `fraction` of channels of largest L2 norm, at least one, ascending."""
    return strongest(x, fraction, channels).sort().values


def channels_alone(spec: Transform | None) -> Quant | None:
    """Return the form of the channels that a transform takes out of an operand, if it takes nothing else."""
    if spec is None or not spec.channels:
        return None
    alone = Transform(channels=spec.channels, channels_in=spec.channels_in)
    return CHANNEL_FORMATS[spec.channels_in] if spec == alone else None


def strongest(x: Tensor, fraction: float, channels: int) -> Tensor:
    """Return the indices of `largest_channels` in any order."""
    squares = cuda.squared(x) if cuda.can_take(x) else x.to(torch.float32).square()
    norms = squares.sum(dim=1 - channels)
    count = max(1, round(fraction * norms.numel()))
    return norms.topk(min(count, norms.numel())).indices


def only(x: Tensor, kept: Tensor, channels: int) -> Tensor:
    """Return x with only the channels `kept`; the others are zero."""
    return torch.zeros_like(x).index_copy(channels, kept, x.index_select(channels, kept))


def patch(x: Tensor, quantised: Tensor, fraction: float, channels: int, dtype: torch.dtype) -> Part:
    """Return what quantisation lost of the `fraction` of channels (at least one) of largest L2 norm; else 0.

    Added to the quantised operand, it makes those channels as exact as the dtype of `x` (Hot-Channel Patch,
    arXiv 2602.02047, from its abstract). Not modelled: how the paper scores channels, one set of channels for
    both operands of a product, and a set that stays for some steps; here each operand and call has its own.
    `x` is what was quantised, fp32 [rows, columns], and `quantised` what it became, fp32 like `x`, not
    rotated; `channels` is as in `split`, and the part is rounded to `dtype`.
    """
    kept = largest_channels(x, fraction, channels)
    return Part(only(x - quantised, kept, channels).to(dtype), None, kept)


def quantile(x: Tensor, q: float) -> Tensor:
    """Return the order statistic ceil(q n) of the n magnitudes, fp32, 0 if there are none. Not modelled: the
    code of arXiv 2501.17116 takes one quantile of each sign."""
    if not x.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return order_statistic(x, math.ceil(Fraction(repr(q)) * x.numel()))
