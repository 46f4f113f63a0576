"""Decoding faults, measured: the value that a subject gives each element code, or each block scale.

The codes and scales of the recipe are known, so that a subject's values show the tables it decodes by. A
table is believed only if it gives every value of all casts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ablate.verification.conformance.examination import Pair, expanded
from ablate.verification.conformance.numbers import Numbers, far, over_elements

_SHOWN = 4
"""Entries of a table that a name lists; a table with more wrong entries is not one fault."""
_SAFE = 2.0**-100
"""Magnitude above which a quotient of fp32 numbers is accurate."""


def decode_fault(pairs: Sequence[Pair]) -> str:
    """Return the wrong entries of the table that decodes elements or block scales, or ''."""
    if not pairs or any(pair.got.values is None or pair.expected.codes is None for pair in pairs):
        return ""
    if any(_bytes_differ(pair.got, pair.expected) for pair in pairs):
        return ""
    return _table(pairs, of_scales=False) or _table(pairs, of_scales=True)


def _bytes_differ(got: Numbers, expected: Numbers) -> bool:
    """Return True if stored codes or scales are not the recipe's."""
    for one, other in ((got.codes, expected.codes), (got.scales, expected.scales)):
        if (
            one is not None
            and other is not None
            and not torch.equal(one.nan_to_num(-1), other.nan_to_num(-1))
        ):
            return True
    return False


def _table(pairs: Sequence[Pair], of_scales: bool) -> str:
    """Return the wrong entries of one table, if it gives all values of the pairs."""
    keys, units, values = [], [], []
    for pair in pairs:
        codes, whole = pair.expected.codes, expanded(pair.expected, pair.quant)
        assert codes is not None
        assert pair.got.values is not None
        if of_scales:
            if pair.expected.scales is None:
                return ""
            scale = over_elements(pair.expected.scales, pair.quant.tile[1], codes.shape[1])
            keys.append(scale.flatten())
            units.append((codes * whole / scale).abs().flatten())
        else:
            keys.append(codes.abs().flatten())
            units.append(whole.expand_as(codes).flatten())
        values.append(pair.got.values.abs().flatten())
    key, unit, value = torch.cat(keys), torch.cat(units), torch.cat(values)
    dtype = pairs[0].got.dtype
    known, number = key.unique(return_inverse=True)
    read = torch.stack([_entry(key, unit, value, number == entry) for entry in range(len(known))])
    if far(value, read[number] * unit, dtype).any():
        return ""
    wrong = [
        (float(one), float(other))
        for one, other in zip(known, read, strict=True)
        if bool(far(other[None], one[None], dtype)) and not (one.isnan() and other.isnan())
    ]
    if not 0 < len(wrong) <= _SHOWN:
        return ""
    what = "block scale" if of_scales else "element code"
    return f"{what} " + ", ".join(f"{one:g} decoded as {_word(other)}" for one, other in wrong)


def _entry(key: Tensor, unit: Tensor, value: Tensor, hit: Tensor) -> Tensor:
    """Return the value that one code has, by the median of its elements; the code itself if none shows it."""
    shown = hit & (unit > _SAFE) & unit.isfinite()
    if not shown.any():
        return key[hit][0]
    return (value[shown] / unit[shown]).median()


def _word(value: float) -> str:
    return "NaN" if value != value else f"{value:g}"
