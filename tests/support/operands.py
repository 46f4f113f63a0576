"""Operands of quantisers: awkward tensors by kind, settings that can be stored, and equality in every byte."""

import dataclasses

import torch
from torch import Tensor

from ablate.numerics.spec import Outer, Quant, Range, Select
from ablate.numerics.stored import Packed

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def normal(shape, g) -> Tensor:
    """Gaussian."""
    return torch.randn(shape, generator=g)


def scaled(shape, g) -> Tensor:
    """Magnitudes from 1e-30 to 1e30 (`draw` scales them down for fp16)."""
    return normal(shape, g) * 10.0 ** torch.empty(1).uniform_(-30, 30, generator=g).item()


def tiny(shape, g) -> Tensor:
    """Around the smallest normal fp32: S saturates at FLT_MAX, and denormals must not be flushed."""
    return normal(shape, g) * 2.0 ** torch.randint(-145, -110, (1,), generator=g).item()


def outliers(shape, g) -> Tensor:
    """One element in a hundred 10^1 to 10^5 times larger: most block scales become subnormal or zero."""
    hit = torch.rand(shape, generator=g) < 0.01
    return torch.where(hit, 10.0 ** torch.randint(1, 6, (1,), generator=g).item(), 1.0) * normal(shape, g)


def ties(shape, g) -> Tensor:
    """Multiples of a quarter times a power of two, up to 6: halfway points of the element grid and of E4M3."""
    return (
        torch.randint(-24, 25, shape, generator=g)
        * 0.25
        * 2.0 ** torch.randint(-10, 11, (1,), generator=g).item()
    )


def spread(shape, g) -> Tensor:
    """Every row at its own power of two: block scales over the whole of E4M3."""
    return normal(shape, g) * 2.0 ** torch.randint(-14, 1, (shape[0], 1), generator=g)


def zero_rows(shape, g) -> Tensor:
    """Gaussian; the first half of the rows is zero."""
    x = normal(shape, g)
    x[: shape[0] // 2] = 0
    return x


def zero_blocks(shape, g) -> Tensor:
    """Gaussian; half of the 16x16 blocks are zero."""
    keep = torch.rand(shape[0] // 16, shape[1] // 16, generator=g) < 0.5
    return normal(shape, g) * keep.repeat_interleave(16, 0).repeat_interleave(16, 1)


def zero(shape, g) -> Tensor:
    """All zeros."""
    return torch.zeros(shape)


KINDS = {
    kind.__name__: kind
    for kind in (normal, scaled, tiny, outliers, ties, spread, zero_rows, zero_blocks, zero)
}
ROTATED = [kind for kind in KINDS if kind != "tiny"]
"""TE's reference rotates by a product in bf16, which flushes subnormals on a CPU with bf16 instructions; here nothing is flushed."""


def draw(kind: str, dtype: str, seed: int) -> Tensor:
    """A tensor of `kind` whose sides are multiples of 16 up to 128, finite in `dtype`."""
    g = torch.Generator().manual_seed(1000 * seed + 7)
    rows, columns = (16 * torch.randint(1, 9, (2,), generator=g)).tolist()
    x = KINDS[kind]((rows, columns), g)
    if dtype == "fp16" and x.abs().max() > 60000:
        x = x / 2.0 ** torch.ceil(torch.log2(x.abs().max() / 60000)).item()
    return x.to(DTYPES[dtype])


STORABLE = {
    "nvfp4": Quant(),
    "2d": Quant(block="16x16"),
    "stochastic": Quant(rounding="stochastic", range=Range(headroom=17 / 16)),
    "stochastic24": Quant(rounding="stochastic", bits=24),
    "percentile": Quant(outer=Outer(statistic="percentile:0.9")),
    "four-over-six": Quant(select=Select(among="scales"), outer=Outer(bound=256.0)),
    "prescaled": Quant(range=Range(prescale=0.75)),
    "blocks of 32": Quant(block="1x32"),
}


def tensor(rows: int = 32, columns: int = 64, seed: int = 0) -> Tensor:
    """Gaussian bf16; rows from 2^-20 to 1, so that block scales are normal, subnormal and zero."""
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, columns, generator=g) * 2.0 ** torch.randint(-20, 1, (rows, 1), generator=g)
    ).bfloat16()


def same(a: Packed, b: Packed) -> bool:
    """Equal in every byte and every field."""
    for field in dataclasses.fields(a):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(left, Tensor):
            equal = left.dtype == right.dtype and torch.equal(
                left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)
            )
            equal = equal and left.shape == right.shape
        else:
            equal = left == right
        if not equal:
            return False
    return True
