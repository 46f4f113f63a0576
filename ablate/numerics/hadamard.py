"""Random Hadamard rotations: sign flips, then a Hadamard matrix, on every `size` consecutive elements of the contraction."""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from ablate.numerics import choices
from ablate.numerics.philox import GROUP, Clock, random_bits
from ablate.numerics.spec import Hadamard

TE_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Transformer Engine's fixed vector (reference_nvfp4.py, get_wgrad_sign_vector)."""


def none(size: int, clock: Clock | None = None, where: int = 0) -> Tensor:
    """Hadamard without sign flips, fp32 [size]."""
    return torch.ones(size)


def fixed(size: int, clock: Clock | None = None, where: int = 0) -> Tensor:
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


SIGNS = {function.__name__: function for function in (none, fixed, per_layer, per_step, per_call)}


@cache
def _known(spec: Hadamard, device: torch.device) -> Tensor:
    return SIGNS[spec.signs](spec.size).to(device)


def signs(spec: Hadamard, device: torch.device, clock: Clock | None = None, where: int = 0) -> Tensor:
    """The signs of a rotation, fp32 [size]; those that are drawn take a clock and the product's site."""
    return (
        SIGNS[spec.signs](spec.size, clock, where).to(device)
        if choices.SIGNS[spec.signs].drawn
        else _known(spec, device)
    )


def rotate(
    z: Tensor, spec: Hadamard, clock: Clock | None = None, where: int = 0, *, back: bool = False
) -> Tensor:
    """z @ R along the last dimension ([rows, columns], `columns` a multiple of `size`), rounded to z's dtype as hardware does.

    R = diag(signs) H / sqrt(size) with H[r, c] = (-1)^popcount(r & c), so R R^T = I, exactly where size is 4, 16 or 64. `back` undoes
    it: z @ R^T.
    """
    blocks = z.reshape(-1, spec.size).to(torch.float32)
    flips = signs(spec, z.device, clock, where)
    turned = butterflies(blocks) if back else butterflies(blocks * flips)
    return (turned * flips if back else turned).to(z.dtype).view(z.shape)


def butterflies(z: Tensor) -> Tensor:
    """z @ H / sqrt(size) for fp32 [blocks, size]: sums and differences at distances 1, 2, 4, ..., then the factor.

    A matrix product would add in an order of the library's and the machine's choosing; this one is the same everywhere.
    """
    blocks, size = z.shape
    distance = 1
    while distance < size:
        a, b = z.view(blocks, size // (2 * distance), 2, distance).unbind(2)
        z = torch.stack((a + b, a - b), dim=2).view(blocks, size)
        distance *= 2
    return z * size**-0.5
