"""Rotation: orthogonal, along the columns, the same for both operands of a product."""

import math

import torch
from torch import Tensor

from ablate.numerics.hadamard import TE_SIGNS, butterflies
from ablate.verification.conformance import inputs
from ablate.verification.conformance.examination import Examination, RefusedError
from ablate.verification.conformance.properties.property import Property
from ablate.verification.conformance.result import Outcome, Row
from ablate.verification.conformance.stages.places import number_ranges


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
    size = bench.rotation.size
    rows, columns = bench.rows(size), bench.columns(size)
    unit = torch.zeros(rows, columns)
    unit[:size, :size] = torch.eye(size)
    return _rotate(bench, bench.typed(unit))[:size, :size].double()


def orthogonal(bench: Examination) -> Row:
    """Rotate unit vectors: R R^T = I, and each entry is +-1/sqrt(size)."""
    bench.function("rotate")
    size = bench.rotation.size
    matrix = _matrix(bench)
    allowed = 0.0 if size in (4, 16, 64) else 2.0**-7  # 1/sqrt(size) is exact, or rounded to bf16
    gram = matrix @ matrix.t()
    error = (gram - torch.eye(size).double()).abs().nan_to_num(math.inf)
    off, detail = error > allowed, ""
    if off.any():
        row, column = divmod(int(error.argmax()), size)
        detail = f"R R^T is {float(gram[row, column]):.4g} at ({row}, {column}), not {int(row == column)}"
    outcome = Outcome.FAIL if off.any() else Outcome.PASS
    return Row("orthogonal", outcome, off.numel(), int(off.sum()), detail=detail)


def rotation_values(bench: Examination) -> Row:
    """Rotate random data: sums and differences in fp32, rounded once to the dtype of x."""
    bench.function("rotate")
    size = bench.rotation.size
    signs = _matrix(bench)[:, 0].sign().float()
    x = bench.typed(inputs.normal(bench.rows(64), bench.columns(8 * size), bench.seed))
    got = _rotate(bench, x)
    groups = x.float().view(-1, size)
    exact = butterflies((groups * signs).double().float()).view(x.shape)
    sums = groups.abs().sum(1, keepdim=True).expand(-1, size).reshape(x.shape) * size**-0.5
    # Additions in any order err by (size - 1) 2^-24 of the sum of magnitudes; then one rounding to bf16.
    allowed = 2 * (size - 1) * 2.0**-24 * sums
    if x.dtype != torch.float32 or got.dtype != torch.float32:
        allowed = allowed + 2.0**-8 * exact.abs()  # half an ulp is at most that
    differ = (got.float() - exact).abs() > allowed
    wide = x.dtype == torch.bfloat16 and bool((got.float() != got.bfloat16().float()).any())
    detail = "the result is not rounded to bf16, the dtype of x" if wide else ""
    failed = wide or bool(differ.any())
    signed = tuple(int(sign) for sign in signs)
    if not failed and size == len(TE_SIGNS) and bench.rotation.signs == "fixed" and signed != TE_SIGNS:
        detail = "with other signs than Transformer Engine's"
    outcome = Outcome.FAIL if failed else Outcome.PASS
    return Row("rotation_values", outcome, differ.numel(), int(differ.sum()) + int(wide), detail=detail)


def rotation_axis(bench: Examination) -> Row:
    """Rotate one non-zero element: only its own row and group of columns change."""
    bench.function("rotate")
    size = bench.rotation.size
    rows, columns = bench.rows(2 * size), bench.columns(4 * size)
    x = torch.zeros(rows, columns)
    x[3, size + 2] = 4.0
    got = _rotate(bench, bench.typed(x))
    outside = got != 0
    outside[3, size : 2 * size] = False
    detail = f"{int(outside.sum())} elements of other rows or groups changed" if outside.any() else ""
    return Row(
        "rotation_axis",
        Outcome.FAIL if outside.any() else Outcome.PASS,
        got.numel(),
        int(outside.sum()),
        detail=detail,
    )


def rotation_cancels(bench: Examination) -> Row:
    """Multiply two rotated matrices: the product of the matrices themselves."""
    bench.function("rotate")
    size = bench.rotation.size
    rows, columns = bench.rows(16), bench.columns(4 * size)
    generator = torch.Generator().manual_seed(bench.seed)
    a, b = (torch.randint(-3, 4, (rows, columns), generator=generator).float() for _ in range(2))
    turned = [_rotate(bench, bench.typed(z)).double() for z in (a, b)]
    # Small integers: every sum of 16 of them, over 4, is exact in bf16; sizes with an inexact root round.
    allowed = 1e-12 if size in (4, 16) else 2.0**-7 * (a.abs() @ b.abs().t()).max()
    off = (turned[0] @ turned[1].t() - a.double() @ b.double().t()).abs() > allowed
    return Row("rotation_cancels", Outcome.FAIL if off.any() else Outcome.PASS, off.numel(), int(off.sum()))


def rotation_large(bench: Examination) -> Row:
    """Rotate a large tensor whole, and in parts of 64 rows."""
    bench.function("rotate")
    rows, columns = bench.rows(8195), bench.columns(bench.rotation.size)
    x = bench.typed(inputs.normal(rows, columns, bench.seed))
    step = bench.rows(64)
    parts = torch.cat([_rotate(bench, part.clone()) for part in x.split(step)])
    wrong = _rotate(bench, x) != parts
    outcome = Outcome.FAIL if wrong.any() else Outcome.PASS
    detail = f"rows {number_ranges(wrong.any(1))} of {rows}" if wrong.any() else ""
    return Row("rotation_large", outcome, parts.numel(), int(wrong.sum()), detail=detail)


PROPERTIES = (
    Property("orthogonal", "R R^T = I.", "exact for sizes 4, 16 and 64", "rotate", (24,), orthogonal),
    Property(
        "rotation_values",
        "Rotated values are summed in fp32 and rounded once to the dtype of x.",
        "the order of additions, and one rounding",
        "rotate",
        (24,),
        rotation_values,
    ),
    Property(
        "rotation_axis",
        "Groups of columns are rotated, within their row.",
        "exact",
        "rotate",
        (24,),
        rotation_axis,
    ),
    Property(
        "rotation_cancels",
        "(a R)(b R)^T = a b^T.",
        "exact on small integers",
        "rotate",
        (24,),
        rotation_cancels,
    ),
    Property(
        "rotation_large",
        "A large tensor is rotated as its parts are.",
        "exact",
        "rotate",
        (24, 26),
        rotation_large,
    ),
)
