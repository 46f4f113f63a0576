"""First wrong stage of a cast or a product: the one whose input is right, and whose result is not.

A cast is four functions in a row: amax of the tensor, block scales, codes, values. One wrong stage makes all
later ones differ from the recipe's. So stages are compared in their order: as long as none differs, the
subject's own stage before is the recipe's, and the first that differs is where the fault is. It is described
by numbers alone:

    block scale: 41 % of 1,024 wrong, 1.5 times the recipe's, such as 1.5, not 1, ...

A subject that returns values alone has one stage. A product is linear in the terms of its sum, so that a
wrong sum shows its weights: the least squares

    got = c_1 a_1 b_1^T + c_2 a_2 b_2^T + ...      a_k, b_k: columns of the two operands

give c_k = 0 for what is left out, 2 for what is counted twice. If neither a factor nor weights give the
subject's result, an operand is not the recipe's, and least squares with the other operand kept say which one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from ablate.verification.conformance.examination import Pair
from ablate.verification.conformance.numbers import far, over_elements, unequal
from ablate.verification.conformance.reference_product import Exact, gain_and_error
from ablate.verification.conformance.result import Wrong

NEAR = 2.0**-20
"""Relative difference of two fp32 numbers that are the same but for their roundings."""
_SPREAD = 2.0**-7
"""Relative spread of a constant factor of numbers that are rounded to bf16."""
_ALIKE = 0.25
"""Relative spread of a factor that is shown as a range: two block scales of E4M3 round by up to 1/16 each."""
_MOST = (0.02, 0.98)
"""Quantiles of the ratios that a range leaves out: some saturate."""
_MANY = 8
"""Wrong numbers that have to be of one kind for it to be said."""
_MANY_TENSORS = 3
"""The same of amaxes: a tensor has one."""
_CLEAR = 0.05
"""Difference of a weight from 1 that is not measuring noise."""
_ROUNDED = 2.0**-8
"""Relative distance of two results, one of which is rounded to bf16."""


@dataclass(frozen=True)
class Compared:
    """One stage of one cast: numbers of the subject and of the recipe."""

    got: Tensor
    """[rows, columns], [rows, blocks], or [1, 1] of an amax."""
    right: Tensor
    input: Tensor
    """Input element of each; of a block scale or an amax, the element of the largest magnitude."""
    wrong: Tensor
    """bool, of the same shape."""
    partial: Tensor
    """bool: numbers of blocks that are cut short."""
    where: str
    """Tensor in words."""


def first_wrong_stage(pairs: Sequence[Pair]) -> tuple[str, tuple[Wrong, ...]]:
    """Return the first wrong stage of some casts of one quantiser in words, and its wrong numbers; ('', ())
    if no stage differs."""
    finite = [pair for pair in pairs if bool(pair.x.isfinite().all()) and pair.x.numel()]
    for name, stage in STAGES.items():
        compared = [one for pair in finite if (one := stage(pair)) is not None]
        if any(one.wrong.any() for one in compared):
            numbers = (wrong_numbers(one.where, one.wrong, one.input, one.right, one.got) for one in compared)
            return f"{name}: {_described(name, compared)}", tuple(chain(*numbers))
    return "", ()


def _amax(pair: Pair) -> Compared | None:
    """Compare the amax that the returned factor of the second level shows, or else that of the values."""
    got, expected = pair.got, pair.expected
    if expected.amax is None or expected.outer is None or expected.amax.ndim or not expected.amax > 0:
        return None
    outer = got.outer
    if outer is None and got.codes is not None and got.scales is not None and got.values is not None:
        unit = got.codes * over_elements(got.scales, pair.quant.tile[1], pair.x.shape[1])
        shown = (unit != 0) & unit.isfinite() & got.values.isfinite()
        if shown.any() and expected.scales is not None and unequal(got.scales, expected.scales).any():
            outer = (got.values[shown] / unit[shown]).median()
    if outer is None or not bool(outer.isfinite().all()) or bool((outer != outer.flatten()[0]).any()):
        return None
    ratio = outer.flatten()[:1].view(1, 1).double() / expected.outer.double()
    right, x = expected.amax.view(1, 1), pair.x.float().flatten()
    wrong = (ratio - 1).abs() > NEAR
    largest = x[x.abs().argmax()].view(1, 1)
    return Compared((ratio * right).float(), right, largest, wrong, torch.zeros_like(wrong), pair.where)


def _scale(pair: Pair) -> Compared | None:
    got, right, wide = pair.got.scales, pair.expected.scales, pair.quant.tile[1]
    if got is None or right is None:
        return None
    rows, columns = pair.x.shape
    blocks = torch.nn.functional.pad(pair.x.float(), (0, -columns % wide)).view(rows, -1, wide)
    largest = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))[:, :, 0]
    return Compared(got, right, largest, unequal(got, right), _cut(pair)[:, ::wide], pair.where)


def _code(pair: Pair) -> Compared | None:
    got, right, scales = pair.got.codes, pair.expected.codes, pair.expected.scales
    if got is None or right is None:
        return None
    wrong = unequal(got, right)
    if scales is not None:  # under a zero scale every code has the value zero
        spread = over_elements(scales, pair.quant.tile[1], pair.x.shape[1])
        wrong &= (spread != 0) & spread.isfinite()
    return Compared(got, right, pair.x.float(), wrong, _cut(pair), pair.where)


def _value(pair: Pair) -> Compared | None:
    got, right = pair.got, pair.expected.values
    if got.values is None or right is None:
        return None
    wrong = far(got.values, right, got.dtype)
    return Compared(got.values, right, pair.x.float(), wrong, _cut(pair), pair.where)


STAGES: dict[str, Callable[[Pair], Compared | None]] = {
    "amax": _amax,
    "block scale": _scale,
    "code": _code,
    "value": _value,
}
"""Stages of a cast in their order."""


def _cut(pair: Pair) -> Tensor:
    """Return a mask of the elements in blocks that are cut short."""
    columns = pair.x.shape[1]
    return (torch.arange(columns) >= columns // pair.quant.tile[1] * pair.quant.tile[1]).expand(pair.x.shape)


def _described(name: str, compared: Sequence[Compared]) -> str:
    """Return share, factor, kind and an example of the wrong numbers of a stage."""
    got, right, source, wrong, cut = (
        torch.cat([getattr(one, key).flatten() for one in compared])
        for key in ("got", "right", "input", "wrong", "partial")
    )
    texts = [_share_text(wrong), _ratio_text(got[wrong], right[wrong])]
    if name == "block scale":
        texts.append(_moved([(one.got, one.right) for one in compared if one.wrong.any()]))
    negative = "where the largest element is negative" if name in ("amax", "block scale") else "negative"
    many = _MANY_TENSORS if name == "amax" else _MANY
    for kind, mask in ((negative, source < 0), ("in blocks cut short", cut)):
        if bool(mask[wrong].all()) and not bool(mask.all()) and int(wrong.sum()) >= many:
            texts.append(f"all {kind} ({100 * int(wrong.sum()) / int(mask.sum()):.3g} % of those)")
    one = next(each for each in compared if each.wrong.any())
    row, column = one.wrong.nonzero()[0].tolist()
    at = "" if name == "amax" else f" at row {row}, {'block' if name == 'block scale' else 'column'} {column}"
    example = f"such as {float(one.got[row, column]):.6g}, not {float(one.right[row, column]):.6g}, for"
    example += f" {float(one.input[row, column]):.6g}{at}" + f" of {one.where}" * bool(one.where)
    return ", ".join(filter(None, [*texts, example]))


def wrong_product(exact: Exact, got: Tensor, words: tuple[str, str]) -> str:
    """Return what is measured of a product [M, N] with one wrong number at least. `words`: names of its
    operands."""
    wrong = exact.far(got)
    row, column = wrong.nonzero()[0].tolist()
    example = f"such as {float(got[row, column]):.6g}, not {float(exact.values[row, column]):.6g}"
    texts = (_share_text(wrong), _measured(exact, got.double(), wrong, words))
    return ", ".join(filter(None, [*texts, f"{example}, at row {row}, column {column}"]))


def _measured(exact: Exact, target: Tensor, wrong: Tensor, words: tuple[str, str]) -> str:
    """Return a factor, weights of terms, or the wrong operand of a product; '' if none of them gives it."""
    if not bool(target[wrong].isfinite().all()):
        return "not finite"
    if text := _ratio_text(target[wrong], exact.values[wrong]):
        return text
    factor = float((target * exact.values).sum() / exact.values.square().sum().clamp(min=1e-300))
    if abs(factor - 1) > 0.01 and _close(exact.values * factor, target):
        return f"{factor:.4g} times the recipe's"
    a, b = (operand.dequantize().double() for operand in exact.operands)
    length = min(a.shape[1], b.shape[1])
    a, b = a[:, :length], b[:, :length]
    return _wrong_terms(a, b, target) or _wrong_operand(a, b, target, words)


def _close(values: Tensor, target: Tensor) -> bool:
    """Return True if a result is these values, but for its rounding to bf16 and that of measured weights."""
    off, largest = target - values, float(target.abs().max())
    return float(off.norm()) <= _ROUNDED * float(target.norm()) and float(off.abs().max()) <= 0.05 * largest


def _wrong_terms(a: Tensor, b: Tensor, got: Tensor) -> str:
    """Return which terms of the contraction have another weight than 1, or ''; arguments [M, K], [N, K] and
    [M, N]."""
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


def _wrong_operand(a: Tensor, b: Tensor, got: Tensor, words: tuple[str, str]) -> str:
    """Return which operand is not the recipe's, if the other one is, and how far it is off; or ''. The other
    dimension of the result has to be larger than the contraction."""
    fitting = []
    for word, own, other, result in ((words[0], a, b, got), (words[1], b, a, got.t())):
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


def _share_text(wrong: Tensor) -> str:
    count, cases = int(wrong.sum()), wrong.numel()
    share = f"{100 * count / cases:.3g} % of {cases:,}" if count > 20 else f"{count} of {cases:,}"
    return f"{share} wrong"


def wrong_numbers(where: str, wrong: Tensor, source: Tensor, right: Tensor, got: Tensor) -> tuple[Wrong, ...]:
    """Return the wrong numbers of a matrix, with their inputs, all [rows, columns]."""
    return tuple(
        Wrong(where, row, column, *(float(part[row, column]) for part in (source, right, got)))
        for row, column in wrong.nonzero().tolist()
    )


def _ratio_text(got: Tensor, right: Tensor) -> str:
    """Return what all wrong numbers, [n] with n at least 1, have in common: zero, NaN, or a factor; '' if
    nothing."""
    for word, hit in (("all zero", got == 0), ("all NaN", got.isnan())):
        if bool(hit.all()):
            return word
    ratio = got.double() / right.double()  # no factor explains what is 0 in the recipe
    if len(ratio) < 2 or not bool((ratio.isfinite() & right.isfinite()).all()):
        return ""
    low, high, middle = float(ratio.min()), float(ratio.max()), float(ratio.median())
    if high - low <= _SPREAD * abs(middle):
        return f"{middle:.5g} times the recipe's"
    low, high = ratio.quantile(torch.tensor(_MOST, dtype=ratio.dtype)).tolist()
    return f"mostly {low:.4g} to {high:.4g} times the recipe's" if high - low <= _ALIKE * abs(middle) else ""


def number_ranges(hit: Tensor, most: int = 4) -> str:
    """Return the places of a mask [n] as ranges: `0 to 15, 32`."""
    ranges: list[tuple[int, int]] = []
    for number in hit.nonzero()[:, 0].tolist():
        begin = ranges.pop()[0] if ranges and ranges[-1][1] == number - 1 else number
        ranges.append((begin, number))
    words = [f"{a}" if a == b else f"{a} to {b}" for a, b in ranges[:most]]
    return ", ".join(words) + " ..." * (len(ranges) > most)


def _moved(seen: Sequence[tuple[Tensor, Tensor]]) -> str:
    """Return that numbers are the right ones at other places, with one of the places; '' if they are not.
    `seen`: matrices [rows, columns] of the subject and of the recipe that differ."""
    if not all(torch.equal(*(z.flatten().sort().values for z in pair)) for pair in seen):
        return ""
    got, right = max(seen, key=lambda pair: len(pair[1].unique()))
    values, counts = right.unique(return_counts=True)
    text = "the right ones at other places"
    for value in values[counts == 1].tolist():
        here, there = (tuple((z == value).nonzero()[0].tolist()) for z in (got, right))
        if here != there:
            return f"{text}: that of {there} is at {here}"
    return text
