"""Wrong product of the recipe's operands, measured: a factor, terms of its sum, an operand.

A product is linear in the terms of its sum, so that a wrong sum shows its weights: the least squares

    got = c_1 a_1 b_1^T + c_2 a_2 b_2^T + ...      a_k, b_k: columns of the two operands

give c_k = 0 for what is left out, 2 for what is counted twice. If neither a factor nor weights give the
subject's result, an operand is not the recipe's, and least squares with the other operand kept say which one.
"""

import torch
from torch import Tensor

from ablate.numerics.quantize import Operand
from ablate.verification.conformance.reference_product import Exact, gain_and_error
from ablate.verification.conformance.stages.places import number_ranges, ratio_text, share_text

_CLEAR = 0.05
"""Difference of a weight from 1 that is not measuring noise."""
_ROUNDED = 2.0**-8
"""Relative distance of two results, one of which is rounded to bf16."""


def wrong_product(exact: Exact, got: Tensor, words: tuple[str, str]) -> str:
    """Return what is measured of a product [M, N] with one wrong number at least. `words`: names of its
    operands."""
    wrong, target = exact.far(got), got.double()
    row, column = wrong.nonzero()[0].tolist()
    example = f"such as {float(got[row, column]):.6g}, not {float(exact.values[row, column]):.6g}"
    texts = [share_text(wrong), _measured(exact, target, wrong, words)]
    return ", ".join(filter(None, [*texts, f"{example}, at row {row}, column {column}"]))


def _measured(exact: Exact, target: Tensor, wrong: Tensor, words: tuple[str, str]) -> str:
    """Return a factor, weights of terms, or the wrong operand of a product; '' if none of them gives it."""
    if not bool(target[wrong].isfinite().all()):
        return "not finite"
    if text := ratio_text(target[wrong], exact.values[wrong]):
        return text
    left, right = exact.operands
    factor = float((target * exact.values).sum() / exact.values.square().sum().clamp(min=1e-300))
    if abs(factor - 1) > 0.01 and _close(exact.values * factor, target):
        return f"{factor:.4g} times the recipe's"
    return wrong_terms(left, right, target) or wrong_operand(left, right, target, words)


def _close(values: Tensor, target: Tensor) -> bool:
    """Return True if a result is these values, but for its rounding to bf16 and that of measured weights."""
    off = target - values
    return float(off.norm()) <= _ROUNDED * float(target.norm()) and float(off.abs().max()) <= 0.05 * float(
        target.abs().max()
    )


def _values(left: Operand, right: Operand) -> tuple[Tensor, Tensor]:
    a, b = left.dequantize().double(), right.dequantize().double()
    length = min(a.shape[1], b.shape[1])
    return a[:, :length], b[:, :length]


def wrong_terms(left: Operand, right: Operand, got: Tensor) -> str:
    """Return which terms of the contraction have another weight than 1, or ''; arguments [M, K], [N, K] and
    [M, N]."""
    (a, b), got = _values(left, right), got.double()
    if not (length := a.shape[1]):
        return ""
    sizes = (size for size in (1, 16, 32, 64, 128) if a.shape[0] * b.shape[0] >= 4 * -(-length // size))
    size = next(sizes, length)  # terms that share a weight, as a small result does not show each
    sums = torch.nn.functional.one_hot(torch.arange(length) // size).double()
    gram = sums.t() @ ((a.t() @ a) * (b.t() @ b)) @ sums
    aimed = sums.t() @ ((a.t() @ got) * b.t()).sum(1)
    live = gram.diagonal() > 1e-12 * gram.diagonal().max()
    if not live.any():
        return ""
    blocks = torch.ones(len(aimed), dtype=torch.float64)
    blocks[live] = torch.linalg.lstsq(gram[live][:, live], aimed[live][:, None]).solution[:, 0]
    weights = sums @ blocks
    odd = (weights - 1).abs() > _CLEAR
    if not odd.any() or not _close((a * weights) @ b.t(), got):
        return ""
    low, high = (round(float(end), 1) + 0.0 for end in (weights[odd].min(), weights[odd].max()))
    weight = f"{low:g}" + f" to {high:g}" * (high > low)
    return f"terms {number_ranges(odd)} of {length} with the weight {weight}"


def wrong_operand(left: Operand, right: Operand, got: Tensor, words: tuple[str, str]) -> str:
    """Return which operand is not the recipe's, if the other one is, and how far it is off; or ''. The other
    dimension of the result has to be larger than the contraction."""
    a, b = _values(left, right)
    fitting = []
    for word, own, other, result in ((words[0], a, b, got.double()), (words[1], b, a, got.double().t())):
        if len(other) <= other.shape[1]:
            continue
        read = torch.linalg.lstsq(other, result.t()).solution.t()
        # What another operand gives leaves the rounding of the results to bf16 alone.
        if float((read @ other.t() - result).norm()) < _ROUNDED * float(result.norm()):
            fitting.append((word, *gain_and_error(read, own)))
    if len(fitting) != 1:
        return ""
    word, gain, error = fitting[0]
    return f"operand {word} is not the recipe's: gain {gain:.3g}, relative L2 distance {error:.2g}"
