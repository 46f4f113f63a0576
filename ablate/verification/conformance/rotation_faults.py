"""Faults of a rotation, read from its matrix: entries of the wrong sign or magnitude, another order."""

import torch
from torch import Tensor

from ablate.numerics.hadamard import butterflies
from ablate.verification.conformance import inputs
from ablate.verification.conformance.examination import Examination
from ablate.verification.conformance.stages.places import wrong_places

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


def rotation_fault(bench: Examination) -> str:
    """Return the fault that the rotation of unit vectors shows, or ''."""
    size = bench.rotation.size
    unit = torch.zeros(bench.rows(size), bench.columns(size))
    unit[:size, :size] = torch.eye(size)
    matrix = bench.call("rotate", bench.typed(unit)).detach().cpu()[:size, :size].double()
    if fault := matrix_fault(matrix):
        return fault
    x = bench.typed(inputs.normal(bench.rows(16), bench.columns(4 * size), bench.seed))
    turned = bench.call("rotate", x).detach().cpu()
    if x.dtype == torch.bfloat16 and bool((turned.float() != turned.bfloat16().float()).any()):
        return "rotated values not rounded to the dtype of x"
    groups = x.double().view(-1, size)
    off = ((turned.double().view(-1, size) - groups @ matrix) / groups.norm(dim=1, keepdim=True)).abs()
    if not float(off.max()) > 2.0**-9:
        return ""
    if float(off.max()) < 2.0**-5:
        return f"intermediate sums of the rotation rounded: off by up to {float(off.max()):.2g} of |x|"
    return (
        f"not the product with the rotation's matrix{wrong_places([(off > 2.0**-8).view(x.shape)], 'values')}"
    )
