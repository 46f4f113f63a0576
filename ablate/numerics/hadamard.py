"""Random Hadamard rotations of the operands of a product.

The problem: one outlier among 16 elements sets the scale of its block, and the 15 others are rounded to few
values or to zero. The idea: rotate every `size` consecutive elements of the contraction by an orthogonal
matrix R = diag(signs) H / sqrt(size), with H[r, c] = (-1)^popcount(r & c), which spreads an outlier over its
group. Since R R^T = I, rotating *both* operands of a product leaves the product unchanged: (a R)(b R)^T = a
b^T. A rotation therefore belongs to a product, and a recipe cannot rotate one operand alone.

    [8, 0, 0, 0] rotated by 4 without sign flips is [4, 4, 4, 4].

The signs keep structured data (such as a constant vector, which H alone would turn into one spike) from
lining up with a row of H. Transformer Engine uses one fixed sign vector; other recipes draw signs per layer,
step or call. The rotated values are rounded to the operand's dtype before anything else happens to them, as
on hardware.

A rotation does not lower the error of E2M1 on unstructured data. `rotate` refuses nothing itself: the caller
pads the contraction to a multiple of `size`, and `spec.Hadamard` allows only the sizes 4 to 128. Section 6 of
docs/reference/numerics.md states the order of additions.
"""

from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ablate.numerics import choices
from ablate.numerics.kernels import general, general_cuda
from ablate.numerics.philox import GROUP, Clock, random_bits
from ablate.numerics.spec import Hadamard

TE_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Transformer Engine's fixed vector (reference_nvfp4.py, get_wgrad_sign_vector)."""


def none(size: int, clock: Clock, where: int) -> Tensor:
    """Return ones: the Hadamard matrix without sign flips. fp32 [size]."""
    return torch.ones(size, dtype=torch.float32)


def fixed(size: int, clock: Clock, where: int) -> Tensor:
    """Return Transformer Engine's signs, repeated or cut to `size`. fp32 [size]."""
    return torch.tensor(TE_SIGNS, dtype=torch.float32).repeat(-(-size // 16))[:size]


def per_call(size: int, clock: Clock, where: int) -> Tensor:
    """Draw signs for this product of this layer, step and micro-batch. fp32 [size]."""
    bits = random_bits(clock, where, 1, -(-size // GROUP) * GROUP, 8, torch.device("cpu"))
    return torch.where(bits[0, :size] < 128, 1.0, -1.0).to(torch.float32)


def per_step(size: int, clock: Clock, where: int) -> Tensor:
    """Draw signs that all micro-batches of a step share. fp32 [size]."""
    return per_call(size, replace(clock, micro_batch=0), where)


def per_layer(size: int, clock: Clock, where: int) -> Tensor:
    """Draw signs once for this product of this layer, for training and evaluation. fp32 [size]."""
    return per_call(size, Clock(clock.seed), where)


SIGNS = {function.__name__: function for function in (none, fixed, per_layer, per_step, per_call)}
"""Rules for the signs of a rotation, each a function of its size, the clock and the draw site."""


@cache
def _constant_signs(spec: Hadamard, device: torch.device) -> Tensor:
    return SIGNS[spec.signs](spec.size, Clock(0), 0).to(device)  # these rules draw nothing


def signs(spec: Hadamard, device: torch.device, clock: Clock | None = None, where: int = 0) -> Tensor:
    """Return the signs of a rotation, fp32 [size] of +1 and -1; ValueError if they are drawn and there is no
    clock. `where` is the draw site of the product (`philox.site`)."""
    if not choices.SIGNS[spec.signs].drawn:
        return _constant_signs(spec, device)
    if clock is None:
        raise ValueError(f"signs {spec.signs} are drawn and take their random bits from a clock: pass clock")
    drawn = SIGNS[spec.signs](spec.size, clock, where)
    return drawn if device.type == "cpu" else filled(drawn, device)


_WORD = 32
"""Bits of a word of drawn signs, which are read as a non-negative int64."""


def filled(signs: Tensor, device: torch.device) -> Tensor:
    """Return signs, fp32 [size] of +1 and -1 on the CPU, on a device without a copy, which waits for a GPU:
    as bits of integers filled there."""
    minus = [sign < 0 for sign in signs.tolist()]
    words = torch.empty(-(-len(minus) // _WORD), 1, dtype=torch.int64, device=device)
    for number in range(len(words)):
        bits = minus[number * _WORD : (number + 1) * _WORD]
        words[number].fill_(sum(1 << place for place, bit in enumerate(bits) if bit))
    bits = words >> torch.arange(_WORD, device=device) & 1
    return (1 - 2 * bits).view(-1)[: len(minus)].to(torch.float32)


def rotate(
    z: Tensor, spec: Hadamard, clock: Clock | None = None, where: int = 0, *, back: bool = False
) -> Tensor:
    """Return z R along the last dimension, or z R^T if `back`, rounded to the dtype of `z`, as hardware does.

    `z` is [rows, columns], bf16, fp16 or fp32; zeros are appended up to a multiple of `spec.size` columns.
    `clock` is needed if the signs are drawn; `where` is the draw site of the product. R R^T = I holds exactly
    for sizes 4, 16 and 64, whose factor 1 / sqrt(size) is a power of two.
    """
    if general_cuda.can_rotate(z, spec.size):
        return general_cuda.rotate(z, signs(spec, torch.device("cpu"), clock, where), back)
    flips = signs(spec, z.device, clock, where)
    if general.can_rotate(z):
        return general.rotate(z, flips, back)
    padded = F.pad(z, (0, -z.shape[1] % spec.size))
    blocks = padded.reshape(-1, spec.size).to(torch.float32)
    rotated = butterflies(blocks) if back else butterflies(blocks * flips)
    return (rotated * flips if back else rotated).to(z.dtype).view(padded.shape)


def scale_rotated(
    z: Tensor, factor: Tensor, spec: Hadamard | None, clock: Clock | None = None, where: int = 0
) -> Tensor:
    """Return (z R * factor) R^T, like z and rounded to its dtype at each step; z * factor unless rotated.

    `factor`, fp32, has the rows of z, and at least as many columns as z R. The others are those of `rotate`.
    """
    if (
        spec is not None
        and general_cuda.can_rotate(z, spec.size)
        and (factor.is_contiguous() if z.is_contiguous() else factor.t().is_contiguous())
    ):
        flips = signs(spec, torch.device("cpu"), clock, where)
        return general_cuda.rotate(z, flips, True, factor)[:, : z.shape[1]]
    there = z if spec is None else rotate(z, spec, clock, where)
    width = there.shape[1]
    # Computed in fp32, and rounded once.
    scaled = torch.mul(there, factor[:, :width], out=torch.empty_like(there))
    return scaled if spec is None else rotate(scaled, spec, clock, where, back=True)[:, : z.shape[1]]


def butterflies(z: Tensor) -> Tensor:
    """Return z H / sqrt(size), fp32 [blocks, size], the size a power of two: sums and differences at
    distances 1, 2, 4, ..., then the factor. A matrix product would add in an order that depends on the
    library and the machine; this order is the same everywhere."""
    blocks, size = z.shape
    distance = 1
    while distance < size:
        a, b = z.view(blocks, size // (2 * distance), 2, distance).unbind(2)
        z = torch.stack((a + b, a - b), dim=2).view(blocks, size)
        distance *= 2
    return z * size**-0.5
