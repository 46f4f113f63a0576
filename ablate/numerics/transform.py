"""Split of an operand before quantisation into parts that sum to it, each with its own quantiser or none."""

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from ablate.numerics.choices import CHANNELS
from ablate.numerics.philox import GROUP, Clock, random_bits
from ablate.numerics.scaling import order_statistic
from ablate.numerics.spec import Quant, Transform

CHANNEL_FORMATS = {
    word: Quant.model_validate(fields) if fields else None for word, fields in CHANNELS.items()
}
_ITERATIONS = 4
"""Steps of the subspace iteration, enough for a spectrum that is worth splitting off."""


def split(x: Tensor, quant: Quant, channels: int) -> list[tuple[Tensor, Quant | None]]:
    """Split `x` into parts that sum to it.

    Args:
        x: [rows, columns], bf16, fp16 or fp32.
        quant: Quantiser of the operand, with its transform.
        channels: Dimension of the features: 1 if tokens are rows, 0 if they are columns.

    Returns:
        Parts with their quantisers (None: kept in the dtype of `x`). The first is the rest, which `quant`
        quantises.
    """
    if quant.transform is None:
        return [(x, quant)]
    rest, taken = x.to(torch.float32), []
    for take, part_quant in _steps(quant.transform, channels):
        part = take(rest).to(x.dtype)
        rest = rest - part
        taken.append((part, part_quant))
    if quant.transform.clamp is not None:
        limit = quantile(rest if taken else x, quant.transform.clamp)
        clamped = rest.clamp(-limit, limit)
        if quant.transform.residual:
            taken.append(((rest - clamped).to(x.dtype), None))
        rest = clamped
    return [(rest, quant), *taken]


def _steps(transform: Transform, channels: int) -> Iterator[tuple[Callable[[Tensor], Tensor], Quant | None]]:
    if transform.mean:
        yield partial(mean, channels=channels), None
    if transform.low_rank:
        yield partial(low_rank, rank=transform.low_rank), None
    if transform.channels:
        yield (
            partial(top_channels, fraction=transform.channels, channels=channels),
            CHANNEL_FORMATS[transform.channels_in],
        )


def mean(x: Tensor, channels: int) -> Tensor:
    """Return every channel's mean over tokens, in the shape of x (arXiv 2509.00404 and 2603.10444)."""
    return x.mean(dim=1 - channels, keepdim=True).expand_as(x)


def low_rank(x: Tensor, rank: int) -> Tensor:
    """Return the leading `rank` singular components of x, by subspace iteration from a fixed start.

    Not modelled: Metis (arXiv 2509.00404) also quantises the factors; here they keep the operand's precision.
    """
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


def top_channels(x: Tensor, fraction: float, channels: int) -> Tensor:
    """Return x with only the `fraction` of channels of largest L2 norm, at least one; the others are zero."""
    return torch.where(_largest(x, fraction, channels), x, 0.0)


def patch(x: Tensor, quantised: Tensor, fraction: float, channels: int) -> Tensor:
    """Return what quantisation lost of the `fraction` of channels of largest L2 norm, zero in the others.

    Added to the quantised operand, it makes those channels as exact as the dtype of `x` (Hot-Channel Patch,
    arXiv 2602.02047, from its abstract). Not modelled: how the paper scores channels, one set of channels for
    both operands of a product, and a set that stays for some steps; here each operand and call has its own.

    Args:
        x: what was quantised, [rows, columns], bf16, fp16 or fp32.
        quantised: what it became, fp32 like `x`, not rotated.
        fraction: share of the channels, at least one.
        channels: dimension of the features: 1 if tokens are rows, 0 if they are columns.

    Returns:
        Tensor like `x`, rounded once.
    """
    rest = x.to(torch.float32)
    return torch.where(_largest(rest, fraction, channels), rest - quantised, 0.0).to(x.dtype)


def _largest(x: Tensor, fraction: float, channels: int) -> Tensor:
    """Return True for the channels of largest L2 norm, at least one, so that it broadcasts to x."""
    norms = x.square().sum(dim=1 - channels)
    kept = torch.zeros_like(norms, dtype=torch.bool)
    count = max(1, round(fraction * norms.numel()))
    kept[norms.topk(min(count, norms.numel())).indices] = True
    return kept.unsqueeze(1 - channels)


def quantile(x: Tensor, q: float) -> Tensor:
    """Return the order statistic ceil(q n) of the n magnitudes.

    Not modelled: the code of arXiv 2501.17116 takes one quantile of each sign.
    """
    if not x.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return order_statistic(x, math.ceil(Fraction(repr(q)) * x.numel()))
