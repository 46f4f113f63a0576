"""Faults of a product of right operands, measured: factors, places, and terms of its sum.

A product is linear in the terms of its sum, so that a wrong sum shows its weights: the least squares

    got = c_1 a_1 b_1^T + c_2 a_2 b_2^T + ...      a_k, b_k: columns of the two operands

give c_k = 0 for what is left out, 2 for what is counted twice. A constant, or a factor for each row, is read
off in the same way. If none of them gives the subject's result, an operand is not the recipe's, and least
squares with the other operand kept say which one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ablate.numerics.quantize import Operand
from ablate.verification.conformance.reference_product import gain_and_error, multiply
from ablate.verification.conformance.stages.places import number_ranges, wrong_places

_CLEAR = 0.05
"""Difference of a weight from 1 that is not measuring noise."""
_ROUNDED = 0.05
"""Limit of |gain - 1| and of the relative L2 distance of sums whose parts are rounded, to bf16 or fp16."""


def wrong_product(left: Operand, right: Operand, got: Tensor, words: tuple[str, str]) -> str:
    """Return what a product of two right operands is instead of a b^T, or ''.

    Args:
        left: Operand [M, K].
        right: Operand [N, K].
        got: The subject's product, [M, N].
        words: Names of the two operands.
    """
    exact = multiply(left, right)
    far = exact.far(got)
    place = wrong_places([far], "results")
    if not bool(got[far].isfinite().all()):
        return f"not finite{place}"
    if bool((got[far] == 0).all()):
        return f"zero{place}"
    if got.shape[0] == got.shape[1] and not exact.far(got.t()).any():
        return "transposed"
    values, target = exact.values, got.double()
    factor = float((target * values).sum() / values.square().sum())
    if abs(factor - 1) > 0.01 and _close(values * factor, got):
        return _factor_word(factor, left, right, words)
    if text := wrong_terms(left, right, got):
        return text
    if place:
        gain, _ = gain_and_error(got[far], exact.values[far])
        return f"wrong{place}, with a gain of {gain:.4g} there"
    for axis, word in ((1, "row"), (0, "column")):
        if got.shape[axis] < 8:
            continue
        ratio = (target * values).sum(axis, keepdim=True) / values.square().sum(axis, keepdim=True)
        odd = ((ratio - 1).abs() > 0.01).flatten()
        if odd.any() and _close(values * ratio, got):
            low, high = float(ratio.min()), float(ratio.max())
            return f"{word}s {number_ranges(odd)} times factors of their own, {low:.4g} to {high:.4g}"
    gain, error = gain_and_error(got, values)
    if abs(gain - 1) < _ROUNDED and error < 0.02:
        return f"partial sums or operands rounded to fewer bits: off by {error:.1e} of the result"
    return ""


def _close(values: Tensor, got: Tensor) -> bool:
    """Return True if a result is these values, but for its rounding to bf16 and that of measured weights."""
    target = got.double()
    off = target - values
    return float(off.norm()) <= 2.0**-8 * float(target.norm()) and float(off.abs().max()) <= 0.05 * float(
        target.abs().max()
    )


def _factor_word(factor: float, left: Operand, right: Operand, words: tuple[str, str]) -> str:
    """Return a factor in words of the operands' second levels."""
    levels: list[float | None] = [
        float(one.amax) / one.divisor if one.amax is not None and not one.amax.ndim else None
        for one in (left, right)
    ]
    for level, word in zip(levels, words, strict=True):
        for power, text in ((-1, "left out"), (1, "applied twice"), (-2, "inverted")):
            if level and abs(factor / level**power - 1) < 0.01:
                return f"second-level factor of {word} {text}"
    first, second = levels
    if first and second:
        for power, text in ((-1, "left out"), (1, "applied twice"), (-2, "inverted")):
            if abs(factor / (first * second) ** power - 1) < 0.01:
                return f"second-level factors of both operands {text}"
        for ratio, one, other in (
            (first / second, words[0], words[1]),
            (second / first, words[1], words[0]),
        ):
            if abs(factor / ratio - 1) < 0.01:
                return f"second-level factor of {one} used for {other} as well"
    return f"{factor:.4g} times as large as it should be"


def wrong_terms(
    left: Operand, right: Operand, got: Tensor, own: slice | None = None, others: str = ""
) -> str:
    """Return which terms of the contraction have another weight than 1, or ''.

    Args:
        left: Operand [M, K].
        right: Operand [N, K].
        got: The subject's product, [M, N].
        own: Terms that belong to the sum; None: all. Others should have the weight 0.
        others: Word of the terms outside.
    """
    a, b = left.dequantize().double(), right.dequantize().double()
    length = min(a.shape[1], b.shape[1])
    a, b = a[:, :length], b[:, :length]
    gram = (a.t() @ a) * (b.t() @ b)
    aimed = ((a.t() @ got.double()) * b.t()).sum(1)
    sizes = (size for size in (1, 16, 32, 64, 128) if a.shape[0] * b.shape[0] >= 4 * -(-length // size))
    size = next(sizes, length)  # terms that share a weight, as a small result does not show each
    first = torch.arange(length) // size
    sums = torch.nn.functional.one_hot(first).double()
    gram, aimed = sums.t() @ gram @ sums, sums.t() @ aimed
    live = gram.diagonal() > 1e-12 * gram.diagonal().max()
    if not live.any():
        return ""
    blocks = torch.ones(len(aimed), dtype=torch.float64)
    blocks[live] = torch.linalg.lstsq(gram[live][:, live], aimed[live][:, None]).solution[:, 0]
    weights, live = blocks[first], live[first]
    if not _close((a * weights) @ b.t(), got):
        return ""
    wanted = torch.zeros(length, dtype=torch.float64)
    wanted[own if own is not None else slice(None)] = 1.0
    odd = ((weights - wanted).abs() > _CLEAR) & live
    if not odd.any():
        return ""
    texts = []
    inside, outside = odd & (wanted == 1), odd & (wanted == 0)
    if inside.any():
        rounded = weights[inside].round().unique()
        value = float(rounded[0])
        sure = len(rounded) == 1 and float((weights[inside] - value).abs().max()) < 0.1
        word = {0.0: "left out", 2.0: "counted twice", -1.0: "subtracted"}.get(
            value, f"counted {value:g} times"
        )
        word = word if sure else f"weighted by {float(weights[inside].median()):.3g}"
        if not sure and "..." in number_ranges(inside):
            return ""  # noise of rounded partial sums
        texts.append(f"terms {number_ranges(inside)} of {int((wanted == 1).sum())} of the contraction {word}")
    if outside.any():
        texts.append(f"{int(outside.sum())} terms of {others} included ({number_ranges(outside)})")
    return " and ".join(texts)


def wrong_operand(left: Operand, right: Operand, got: Tensor, words: tuple[str, str]) -> str:
    """Return which operand is not the recipe's, if the other one is, and how far it is off; or ''.

    Both dimensions of the result have to be larger than the contraction.
    """
    a, b = left.dequantize().double(), right.dequantize().double()
    length = min(a.shape[1], b.shape[1])
    a, b = a[:, :length], b[:, :length]
    made = []
    for word, own, other, result in ((words[0], a, b, got.double()), (words[1], b, a, got.double().t())):
        read = torch.linalg.lstsq(other, result.t()).solution.t()
        values = read @ other.t()
        off = float((values - result).square().sum() / result.square().sum().clamp(min=1e-300)) ** 0.5
        made.append((off, word, own, read))
    # What another operand gives leaves the rounding of the results to bf16 alone.
    fitting = [one for one in made if one[0] < 2.0**-8]
    if len(fitting) != 1:
        return "" if fitting else "neither operand is the recipe's, or the sum is wrong"
    _, word, own, read = fitting[0]
    scale = own.square().mean().sqrt().clamp(min=1e-300)
    wrong = (read - own).abs() > 0.1 * scale
    gain, error = gain_and_error(read, own)
    text = f"operand {word} is not the recipe's{wrong_places([wrong], 'elements')}"
    if wrong.any():
        gain, _ = gain_and_error(read[wrong], own[wrong])
    return (
        f"{text}: {100 * float(wrong.double().mean()):.2g} % of it off, gain {gain:.3g}, distance {error:.2g}"
    )


def failing(experts: Sequence[tuple[int, bool]]) -> str:
    """Return in words which experts fail, of (tokens, failed)."""
    wrong = [size for size, failed in experts if failed]
    right = [size for size, failed in experts if not failed and size]
    if not right:
        return "in every expert"
    numbers = [number for number, (_, failed) in enumerate(experts) if failed]
    for modulus in (128, 64, 32, 16):
        if all(size % modulus for size in wrong) and not any(size % modulus for size in right):
            return f"in experts whose tokens are not a multiple of {modulus}"
    if numbers == list(range(1, len(experts))):
        return "in every expert but the first"
    if numbers == list(range(len(experts) - 1)):
        return "in every expert but the last"
    return (
        f"in {'experts' if len(numbers) > 1 else 'expert'} {', '.join(map(str, numbers))} of {len(experts)}"
    )
