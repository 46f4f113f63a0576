"""Rotation: orthogonal, along the columns, the same for both operands of a product."""

import math

import torch
from torch import Tensor

from ablate.numerics.hadamard import TE_SIGNS, butterflies
from ablate.verification.conformance.examination import Examination, Property, RefusedError
from ablate.verification.conformance.numbers import unequal
from ablate.verification.conformance.result import Row, decided
from ablate.verification.conformance.stages import number_ranges


def _rotate(bench: Examination, x: Tensor) -> Tensor:
    y = bench.call("rotate", x)
    if not isinstance(y, Tensor):
        y = getattr(y, "values", None)
    if not isinstance(y, Tensor) or y.shape != x.shape:
        shape = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise RefusedError(f"rotate returned {shape} for x {list(x.shape)}")
    return y.detach().cpu()


def _matrix(bench: Examination) -> Tensor:
    """Return the rotation of one group as the subject computes it: row i is the rotated unit vector i."""
    bench.function("rotate")
    size = bench.rotation.size
    unit = torch.zeros(bench.size(size, size))
    unit[:size, :size] = torch.eye(size)
    return _rotate(bench, bench.typed(unit))[:size, :size].double()


def _normal(bench: Examination, rows: int, groups: int) -> Tensor:
    bench.function("rotate")
    return bench.normal(rows, groups * bench.rotation.size)


def _orthogonal(bench: Examination) -> Row:
    """Compare R R^T of rotated unit vectors with I: exactly for sizes 4, 16 and 64."""
    size, matrix = bench.rotation.size, _matrix(bench)
    allowed = 0.0 if size in (4, 16, 64) else 2.0**-7  # 1/sqrt(size) is exact, or rounded to bf16
    gram = matrix @ matrix.t()
    error = (gram - torch.eye(size).double()).abs().nan_to_num(math.inf)
    off, detail = error > allowed, ""
    if off.any():
        row, column = divmod(int(error.argmax()), size)
        detail = f"R R^T is {float(gram[row, column]):.4g} at ({row}, {column}), not {int(row == column)}"
    return decided(off.numel(), int(off.sum()), detail=detail)


def _values(bench: Examination) -> Row:
    """Compare rotated random data: up to the order of fp32 additions, and one rounding to the dtype of x."""
    x, size = _normal(bench, 64, 8), bench.rotation.size
    signs = _matrix(bench)[:, 0].sign().float()
    got = _rotate(bench, x)
    groups = x.float().view(-1, size)
    exact = butterflies((groups * signs).double().float()).view(x.shape)
    sums = groups.abs().sum(1, keepdim=True).expand(-1, size).reshape(x.shape) * size**-0.5
    # Additions in any order err by (size - 1) 2^-24 of the sum of magnitudes; then one rounding to bf16.
    allowed = 2 * (size - 1) * 2.0**-24 * sums
    if x.dtype != torch.float32 or got.dtype != torch.float32:
        allowed = allowed + 2.0**-8 * exact.abs()  # half an ulp is at most that
    differ = ~((got.float() - exact).abs() <= allowed)  # of a NaN, too
    wide = x.dtype == torch.bfloat16 and bool(unequal(got.float(), got.bfloat16().float()).any())
    detail = "the result is not rounded to bf16, the dtype of x" if wide else ""
    failed = wide or bool(differ.any())
    signed = tuple(int(sign) for sign in signs)
    if not failed and size == len(TE_SIGNS) and bench.rotation.signs == "fixed" and signed != TE_SIGNS:
        detail = "with other signs than Transformer Engine's"
    return decided(differ.numel(), int(differ.sum()) + int(wide), detail=detail)


def _axis(bench: Examination) -> Row:
    """Look for changes outside of the own row and group of columns of the one non-zero element."""
    size = bench.rotation.size
    bench.function("rotate")
    x = torch.zeros(bench.size(2 * size, 4 * size))
    x[3, size + 2] = 4.0
    got = _rotate(bench, bench.typed(x))
    outside = got != 0
    outside[3, size : 2 * size] = False
    detail = f"{int(outside.sum())} elements of other rows or groups changed" if outside.any() else ""
    return decided(got.numel(), int(outside.sum()), detail=detail)


def _cancels(bench: Examination) -> Row:
    """Compare the product of two rotated matrices of small integers with that of the matrices: exactly."""
    bench.function("rotate")
    size, generator = bench.rotation.size, torch.Generator().manual_seed(bench.seed)
    shape = bench.size(16, 4 * size)
    a, b = (torch.randint(-3, 4, shape, generator=generator).float() for _ in range(2))
    a, b = bench.typed(a), bench.typed(b)
    turned = [_rotate(bench, z).double() for z in (a, b)]
    # Small integers: every sum of 16 of them, over 4, is exact in bf16; sizes with an inexact root round.
    allowed = 1e-12 if size in (4, 16) else 2.0**-7 * (a.float().abs() @ b.float().abs().t()).max()
    off = ~((turned[0] @ turned[1].t() - a.double() @ b.double().t()).abs() <= allowed)
    return decided(off.numel(), int(off.sum()))


def _in_parts(bench: Examination) -> Row:
    """Compare a large tensor rotated whole with it in parts of 64 rows, exactly."""
    x = _normal(bench, 8195, 1)
    parts = torch.cat([_rotate(bench, part.clone()) for part in x.split(bench.rows(64))])
    wrong = _rotate(bench, x) != parts
    detail = f"rows {number_ranges(wrong.any(1))} of {len(x)}" if wrong.any() else ""
    return decided(parts.numel(), int(wrong.sum()), detail=detail)


PROPERTIES = (
    Property("orthogonal", "rotate", _orthogonal),
    Property("rotation_values", "rotate", _values),
    Property("rotation_axis", "rotate", _axis),
    Property("rotation_cancels", "rotate", _cancels),
    Property("rotation_large", "rotate", _in_parts),
)
