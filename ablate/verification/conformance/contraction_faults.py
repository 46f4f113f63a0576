"""Faults of a sum, measured: blocks of the contraction that are counted twice, or left out.

The difference of a product from the recipe's is projected on the partial products of its blocks. Whole
coefficients that give the product to the last addition name the blocks.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ablate.numerics.quantize import Operand
from ablate.verification.conformance.reference_product import Exact, multiply

BLOCKS = (128, 64, 32, 16)


@dataclass(frozen=True)
class Counted:
    """Blocks of a contraction that are not counted once."""

    word: str
    """`parts of 16 of the contraction counted twice`."""
    number: int
    of: int
    """Blocks of the whole contraction."""


def contraction_fault(left: Operand, right: Operand, got: Tensor) -> Counted | None:
    """Return which blocks of a contraction are counted twice or left out; None if that explains nothing.

    Args:
        left: Operand [M, K].
        right: Operand [N, K].
        got: The subject's product, [M, N].
    """
    whole = multiply(left, right)
    length = min(left.values.shape[1], right.values.shape[1])
    difference = (got.double() - whole.values).flatten()
    if not difference.isfinite().all():
        return None
    for size in BLOCKS:
        if length % size or length // size < 2:
            continue
        parts = [
            multiply(*(replace(one, values=one.values[:, start : start + size]) for one in (left, right)))
            for start in range(0, length, size)
        ]
        basis = torch.stack([part.values.flatten() for part in parts], 1)
        solved = torch.linalg.lstsq(basis, difference[:, None]).solution[:, 0]
        times = solved.round()
        if not times.any() or float((solved - times).abs().max()) > 0.1:
            continue
        values = whole.values + (basis @ times).view(whole.values.shape)
        magnitudes = whole.magnitudes + sum(
            abs(float(time)) * part.magnitudes for time, part in zip(times, parts, strict=True)
        )
        if Exact(values, magnitudes, 2 * whole.terms).far(got).any():
            continue
        for time, word in ((1.0, "counted twice"), (-1.0, "left out")):
            if bool(((times == time) | (times == 0)).all()):
                text = f"parts of {size} of the contraction {word}"
                return Counted(text, int((times == time).sum()), len(times))
    return None
