"""First wrong stage of a cast: the one whose input is right, and whose result is not.

A cast is four functions in a row: amax of the tensor, block scales, codes, values. One wrong stage makes all
later ones differ from the recipe's. So stages are compared in their order: as long as none differs, the
subject's own stage before is the recipe's, and the first that differs is where the fault is. It is described
by numbers alone:

    block scale: 41 % of 1,024 wrong, 1.5 times the recipe's, such as 1.5, not 1, ...

A subject that returns values alone has one stage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from ablate.verification.conformance.examination import Pair
from ablate.verification.conformance.numbers import far, over_elements, unequal
from ablate.verification.conformance.result import Wrong
from ablate.verification.conformance.stages.places import (
    NEAR,
    moved,
    ratio_text,
    share_text,
    wrong_numbers,
)

_MANY = 8
"""Wrong numbers that have to be of one kind for it to be said."""
_MANY_TENSORS = 3
"""The same of amaxes: a tensor has one."""


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


# --- stages -----


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


# --- words -----


def _described(name: str, compared: Sequence[Compared]) -> str:
    """Return share, factor, kind and an example of the wrong numbers of a stage."""
    got, right, source, wrong, cut = (
        torch.cat([getattr(one, key).flatten() for one in compared])
        for key in ("got", "right", "input", "wrong", "partial")
    )
    texts = [share_text(wrong), ratio_text(got[wrong], right[wrong])]
    if name == "block scale":
        texts.append(moved([(one.got, one.right) for one in compared if one.wrong.any()]))
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
