"""Random Hadamard rotations: sign flips, then a Hadamard matrix, on every `size` consecutive elements of the contraction."""

import math
from functools import cache

import torch
from torch import Tensor

from ablate.numerics.spec import Hadamard

TE_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Transformer Engine's fixed vector (reference_nvfp4.py, get_wgrad_sign_vector)."""


def no_signs(size: int) -> Tensor:
    """Hadamard without sign flips, fp32 [size]."""
    return torch.ones(size)


def fixed_signs(size: int) -> Tensor:
    """Transformer Engine's signs, repeated or cut to `size`, fp32 [size]."""
    return torch.tensor(TE_SIGNS, dtype=torch.float32).repeat(-(-size // 16))[:size]


SIGNS = {"none": no_signs, "fixed": fixed_signs}


@cache
def matrix(spec: Hadamard, dtype: torch.dtype, device: torch.device) -> Tensor:
    """R = diag(signs) H / sqrt(size), [size, size]; H[r, c] = (-1)^popcount(r & c). R R^T = I, exactly where size is 4, 16 or 64."""
    h = torch.ones(1, 1)
    while h.shape[0] < spec.size:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return (SIGNS[spec.signs](spec.size).unsqueeze(1) * h * spec.size**-0.5).to(device, dtype)


def rotate(z: Tensor, spec: Hadamard) -> Tensor:
    """z @ R along the last dimension ([rows, columns], `columns` a multiple of `size`), rounded to z's dtype as hardware does."""
    exact = math.isqrt(spec.size) ** 2 == spec.size  # else 1 / sqrt(size) would be rounded to bf16, and shrink the product
    dtype = z.dtype if exact else torch.float32
    return (z.reshape(-1, spec.size).to(dtype) @ matrix(spec, dtype, z.device)).to(z.dtype).view(z.shape)
