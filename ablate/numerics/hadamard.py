"""Random Hadamard rotations: sign flips, then a Hadamard matrix, on every `size` consecutive elements of the contraction."""

import math
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from ablate.numerics.philox import GROUP, Clock, random_bits
from ablate.numerics.spec import Hadamard

TE_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Transformer Engine's fixed vector (reference_nvfp4.py, get_wgrad_sign_vector)."""


def no_signs(size: int, clock: Clock | None = None, where: int = 0) -> Tensor:
    """Hadamard without sign flips, fp32 [size]."""
    return torch.ones(size)


def fixed_signs(size: int, clock: Clock | None = None, where: int = 0) -> Tensor:
    """Transformer Engine's signs, repeated or cut to `size`, fp32 [size]."""
    return torch.tensor(TE_SIGNS, dtype=torch.float32).repeat(-(-size // 16))[:size]


def per_call(size: int, clock: Clock, where: int) -> Tensor:
    """Signs drawn for this product of this layer, step and micro-batch, fp32 [size]."""
    bits = random_bits(clock, where, 1, -(-size // GROUP) * GROUP, 8, torch.device("cpu"))
    return torch.where(bits[0, :size] < 128, 1.0, -1.0)


def per_step(size: int, clock: Clock, where: int) -> Tensor:
    """Signs that the micro-batches of a step share, fp32 [size]."""
    return per_call(size, replace(clock, micro_batch=0), where)


def per_layer(size: int, clock: Clock, where: int) -> Tensor:
    """Signs drawn once for this product of this layer, the same in training and evaluation, fp32 [size]."""
    return per_call(size, Clock(clock.seed), where)


SIGNS = {"none": no_signs, "fixed": fixed_signs, "per_layer": per_layer, "per_step": per_step, "per_call": per_call}

DRAWN = SIGNS.keys() - {"none", "fixed"}


@cache
def matrix(size: int) -> Tensor:
    """H / sqrt(size), symmetric fp32 [size, size]; H[r, c] = (-1)^popcount(r & c). Its square is I, exactly where size is 4, 16 or 64."""
    h = torch.ones(1, 1)
    while h.shape[0] < size:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h * size**-0.5


@cache
def _fixed(spec: Hadamard, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (SIGNS[spec.signs](spec.size).unsqueeze(1) * matrix(spec.size)).to(device, dtype)


def rotation(spec: Hadamard, dtype: torch.dtype, device: torch.device, clock: Clock | None = None, where: int = 0) -> Tensor:
    """R = diag(signs) H / sqrt(size), [size, size]; drawn signs take a clock and the product's site."""
    if spec.signs not in DRAWN:
        return _fixed(spec, dtype, device)
    return (SIGNS[spec.signs](spec.size, clock, where).unsqueeze(1) * matrix(spec.size)).to(device, dtype)


def rotate(z: Tensor, spec: Hadamard, clock: Clock | None = None, where: int = 0, *, back: bool = False) -> Tensor:
    """z @ R along the last dimension ([rows, columns], `columns` a multiple of `size`), rounded to z's dtype as hardware does.

    `back` undoes it: z @ R^T.
    """
    exact = math.isqrt(spec.size) ** 2 == spec.size  # else 1 / sqrt(size) would be rounded to bf16, and shrink the product
    dtype = z.dtype if exact else torch.float32
    r = rotation(spec, dtype, z.device, clock, where)
    return (z.reshape(-1, spec.size).to(dtype) @ (r.t() if back else r)).to(z.dtype).view(z.shape)
