"""Types of the fields that take one word of a closed set, some with a number behind it: `percentile:0.999`.

The words stand in the registries (choices.py, formats.py). A field that also takes a function of the user's
lists it beside them (own.py). An unknown word is refused with the known ones and the nearest.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator

from ablate.numerics.choices import (
    BLOCK_STATISTICS,
    BLOCKS,
    CANDIDATES,
    CHANNELS,
    CRITERIA,
    ROUNDINGS,
    SIGNS,
    STATISTICS,
    Tagged,
)
from ablate.numerics.formats import ELEMENTS, SCALES
from ablate.numerics.own import or_own

NEAR = 0.7
"""Similarity (difflib) from which an error suggests a word."""


def tagged(value: str, words: Mapping[str, Tagged]) -> str:
    """Return `value` with its number, if any, in canonical form; ValueError for an unknown word."""
    word, colon, text = value.partition(":")
    entry = words.get(word)
    if entry and entry.number is None and not colon:
        return value
    try:
        if entry and entry.number and entry.least <= entry.number(text) <= entry.most:
            return f"{word}:{entry.number(text)!r}"
    except ValueError:
        pass
    *forms, last = (known.form for known in words.values())
    near = () if entry else get_close_matches(word, words, 1, NEAR)
    raise ValueError(
        f"must be {', '.join(forms)} or {last}{''.join(f'; {known!r} is the nearest' for known in near)}"
    )


def _no_function(value: str) -> str:
    """Raise ValueError: a quantiser of one's own has no words of ours."""
    raise ValueError(f"{value!r} names no function: write FILE.py:FUNCTION or package.module:FUNCTION")


if TYPE_CHECKING:  # a type checker does not compute the words
    Element = str
    ScaleFormat = str
    ElementRounding = str
    ScaleRounding = str
    BlockStatistic = str
    OuterStatistic = str
    Quantiser = str
    Candidates = str
    Criterion = str
    ChannelFormat = str
    Block = str
    SignRule = str
else:
    Element = or_own("element", ELEMENTS, Literal[tuple(ELEMENTS)])
    ScaleFormat = Literal[tuple(SCALES)]
    ElementRounding, ScaleRounding = (
        or_own(field, words, Literal[words])
        for field, words in (
            ("rounding", tuple(word for word, how in ROUNDINGS.items() if how.of_elements)),
            ("scale.rounding", tuple(word for word, how in ROUNDINGS.items() if how.of_scales)),
        )
    )
    BlockStatistic, OuterStatistic = (
        or_own(field, words, Annotated[str, AfterValidator(partial(tagged, words=words))])
        for field, words in (("range.statistic", BLOCK_STATISTICS), ("outer.statistic", STATISTICS))
    )
    Quantiser = or_own("own", (), Annotated[str, AfterValidator(_no_function)])
    Candidates = Literal[tuple(CANDIDATES)]
    Criterion = Literal[CRITERIA]
    ChannelFormat = Literal[tuple(CHANNELS)]
    Block = Literal[BLOCKS]
    SignRule = Literal[tuple(SIGNS)]
