"""What is taken out of an operand before it is quantised: parts that add up to it, each with a quantiser of its own or none."""

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from ablate.numerics.choices import CHANNELS
from ablate.numerics.philox import GROUP, Clock, random_bits
from ablate.numerics.spec import Quant, Transform

CHANNEL_FORMATS = {word: fields and Quant.model_validate(fields) for word, fields in CHANNELS.items()}
_ITERATIONS = 4
"""Of the subspace iteration; a spectrum worth splitting off has converged by then."""


def split(x: Tensor, quant: Quant, channels: int) -> list[tuple[Tensor, Quant | None]]:
    """`x` [rows, columns] as parts that sum to it, what is left for `quant` first. `channels` is the dimension of the features."""
    if quant.transform is None:
        return [(x, quant)]
    rest, taken = x.to(torch.float32), []
    for take, how in _steps(quant.transform, channels):
        part = take(rest).to(x.dtype)
        rest = rest - part
        taken.append((part, how))
    if quant.transform.clamp is not None:
        limit = quantile(rest, quant.transform.clamp)
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
    """Every channel's mean over tokens, in x's shape (as Metis and Averis split it, arXiv 2509.00404 and 2603.10444)."""
    return x.mean(dim=1 - channels, keepdim=True).expand_as(x)


def low_rank(x: Tensor, rank: int) -> Tensor:
    """The leading `rank` components of x's singular value decomposition, by subspace iteration from a fixed start.

    Metis (arXiv 2509.00404) also quantises the factors; here they keep the operand's own precision.
    """
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
    """x with all but the `fraction` of channels that have the largest L2 norm set to zero; at least one channel is kept."""
    norms = x.square().sum(dim=1 - channels)
    kept = torch.zeros_like(norms, dtype=torch.bool)
    count = max(1, round(fraction * norms.numel()))
    kept[norms.topk(min(count, norms.numel())).indices] = True
    return torch.where(kept.unsqueeze(1 - channels), x, 0.0)


def quantile(x: Tensor, q: float) -> Tensor:
    """The order statistic ceil(q n) of the magnitudes. Microsoft's code takes one quantile of each sign (arXiv 2501.17116)."""
    flat = x.abs().flatten()
    return (
        flat.kthvalue(math.ceil(Fraction(repr(q)) * flat.numel())).values if flat.numel() else x.new_zeros(())
    )
