"""Wrong numbers in words: their share, a constant factor, ranges of places, or other places."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ablate.verification.conformance.result import Wrong

NEAR = 2.0**-20
"""Relative difference of two fp32 numbers that are the same but for their roundings."""
_ROUNDED = 2.0**-7
"""Relative spread of a constant factor of numbers that are rounded to bf16."""
_ALIKE = 0.25
"""Relative spread of a factor that is shown as a range: two block scales of E4M3 round by up to 1/16 each."""
_MOST = (0.02, 0.98)
"""Quantiles of the ratios that a range leaves out: some saturate."""


def share_text(wrong: Tensor) -> str:
    """Return how many numbers of a mask are wrong."""
    count, cases = int(wrong.sum()), wrong.numel()
    share = f"{100 * count / cases:.3g} % of {cases:,}" if count > 20 else f"{count} of {cases:,}"
    return f"{share} wrong"


def wrong_numbers(where: str, wrong: Tensor, source: Tensor, right: Tensor, got: Tensor) -> tuple[Wrong, ...]:
    """Return the wrong numbers of a matrix, with their inputs, all [rows, columns]."""
    return tuple(
        Wrong(where, row, column, *(float(part[row, column]) for part in (source, right, got)))
        for row, column in wrong.nonzero().tolist()
    )


def ratio_text(got: Tensor, right: Tensor) -> str:
    """Return what all wrong numbers, [n] with n at least 1, have in common: zero, NaN, or a factor; '' if
    nothing."""
    for word, hit in (("all zero", got == 0), ("all NaN", got.isnan())):
        if bool(hit.all()):
            return word
    ratio = (got.double() / right.double())[(right != 0) & right.isfinite()]
    if len(ratio) < 2 or not bool(ratio.isfinite().all()):
        return ""
    low, high, middle = float(ratio.min()), float(ratio.max()), float(ratio.median())
    if high - low <= _ROUNDED * abs(middle):
        return f"{middle:.5g} times the recipe's"
    low, high = ratio.quantile(torch.tensor(_MOST, dtype=ratio.dtype)).tolist()
    return f"mostly {low:.4g} to {high:.4g} times the recipe's" if high - low <= _ALIKE * abs(middle) else ""


def number_ranges(hit: Tensor, most: int = 4) -> str:
    """Return the places of a mask [n] as ranges: `0 to 15, 32`."""
    ranges: list[list[int]] = []
    for number in hit.nonzero()[:, 0].tolist():
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    words = [f"{a}" if a == b else f"{a} to {b}" for a, b in ranges[:most]]
    return ", ".join(words) + " ..." * (len(ranges) > most)


def moved(seen: Sequence[tuple[Tensor, Tensor]]) -> str:
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
