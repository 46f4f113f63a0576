"""Faults of a rotation, read from its matrix: entries of the wrong sign or magnitude, another order."""

import torch
from torch import Tensor

from ablate.numerics.hadamard import butterflies

NEAR = 1e-3
"""Relative difference within which a measured number is the named one."""


def matrix_fault(matrix: Tensor) -> str:
    """Return what is wrong with a rotation's matrix, or ''.

    Args:
        matrix: Row i is the rotated unit vector i, fp64 [size, size].
    """
    size = len(matrix)
    if not matrix.isfinite().all():
        return "rotation gives numbers that are not finite"
    units = matrix * size**0.5
    magnitudes = units.abs()
    if not matrix.any():
        return "rotation gives zeros"
    usual = float(magnitudes.median())
    odd = (magnitudes - usual).abs() > NEAR * max(usual, 1.0)
    gram = matrix @ matrix.t()
    factor = float(gram.diagonal().mean()) ** 0.5
    orthogonal = bool((gram - gram.diagonal().mean() * torch.eye(size)).abs().max() <= NEAR * factor**2)
    if orthogonal and abs(factor - 1) > NEAR:
        return f"rotation {factor:.4g} times too large"
    hadamard = butterflies(torch.eye(size)).double() * size**0.5
    signs = (units * hadamard).sum(1).sign()
    signs = torch.where(signs == 0, units[:, 0].sign(), signs)
    own = hadamard * signs[:, None]
    if odd.any():
        if orthogonal:
            return "an orthogonal matrix, but no Hadamard matrix"
        row, column = odd.nonzero()[0].tolist()
        place = f"entry ({row}, {column}) is {float(matrix[row, column]):.4g}"
        return f"rotation not orthogonal: {place}, not +-{size**-0.5:.4g} ({int(odd.sum())} such entries)"
    wrong = units.sign() != own
    if orthogonal:
        return "Hadamard matrix in another order than Sylvester's" if wrong.any() else ""
    if wrong.any() and int(wrong.sum()) <= size * size // 4:
        row, column = wrong.nonzero()[0].tolist()
        return (
            f"rotation not orthogonal: {int(wrong.sum())} entries have the wrong sign, from ({row}, {column})"
        )
    return "rotation not orthogonal"
