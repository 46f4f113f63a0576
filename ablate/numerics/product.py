"""One matrix product of two operands: exact values in, fp32 accumulation, the tensor scales applied outside, one rounding."""

import torch
from torch import Tensor

from ablate.numerics.quantize import Operand, pad


def alpha(a: Operand, b: Operand) -> Tensor | None:
    """amax_a * amax_b / (36 bound_a bound_b), an fp32 scalar; None when neither operand is quantised."""
    statistics = [o.amax for o in (a, b) if o.amax is not None]
    if not statistics:
        return None
    numerator = torch.stack(statistics).prod()
    return numerator / torch.full_like(numerator, a.divisor * b.divisor)  # a tensor: a GPU may turn `/ number` into `* reciprocal`


def product(a: Operand, b: Operand, out: torch.dtype) -> Tensor:
    """a b^T for a [M, K] and b [N, K], as [M, N] of dtype `out`; accumulated in fp32 and rounded once.

    `out` fp32 keeps the accumulator: what a tensor core holds before its epilogue. On a CPU that takes fp32 operands, at
    about twice the cost, since torch has no bf16 product with fp32 output there. Operands padded to different block lengths
    fit: the shorter is padded with zeros.
    """
    width = max(a.values.shape[1], b.values.shape[1])
    left, right = (pad(o.values, 1, width) for o in (a, b))
    scale = alpha(a, b)
    if out == torch.float32:
        y = _fp32(left, right)
        return y if scale is None else y * scale
    if scale is None:
        return left @ right.t()
    if left.is_cuda:
        return (_fp32(left, right) * scale).to(out)
    # torch.mm would round to bf16 before alpha (26 % of outputs off by one ulp); addmm applies alpha before its one rounding.
    y = left.new_empty(left.shape[0], right.shape[0])
    return torch.addmm(y, left, right.t(), beta=0, alpha=scale.item())


def _fp32(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    return a.to(torch.float32) @ b.to(torch.float32).t()
