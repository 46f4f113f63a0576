"""Declared differences of a subject, `Subject.variants`: their words, and what they excuse.

    variants={"*": "elements S/s, zero block 1", "nan_visible": "zero"}

A word of a cast is a computation (`VARIANTS`) that replaces a step of the recipe's, in all casts of the
subject, whichever property it is declared by; `*` stands for no property in particular. A few properties
have forms of their own, declared by their names. Nothing is excused: what the subject returns has to be what
the declared computation gives.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from ablate.errors import InputError, nearest
from ablate.numerics import rounding
from ablate.numerics.formats import ELEMENTS, SCALES
from ablate.numerics.scaling import FLT_MAX
from ablate.numerics.spec import Quant
from ablate.verification.conformance.computation import (
    RECIPE,
    Computation,
    NoComputationError,
    exact_scale,
    rounded_scale,
    top,
)

ALL = "*"
FORMS = {
    "nan_visible": ("tensor", "block", "element", "saturated", "zero"),
    "infinity_visible": ("saturated",),
    "infinite_neighbours": ("nan",),
    "random_gradients": ("nearest",),
}
"""Forms in which a property may be declared to hold, by its name."""


# --- computations that a word stands for -----


def _per_tensor(amax: Tensor, quant: Quant) -> Tensor:
    """Return amax / 2688, by which some libraries divide."""
    if quant.outer is None:
        raise NoComputationError("no second level")
    return amax / torch.full_like(amax, ELEMENTS[quant.element].max * quant.outer.bound)


def _finite(y: Tensor) -> Tensor:
    return y.nan_to_num(0.0, FLT_MAX, -FLT_MAX)


def _two_roundings(a: Tensor, outer: Tensor, amax: Tensor, quant: Quant) -> Tensor:
    return rounded_scale(a / torch.full_like(a, top(quant)) * outer * quant.range.headroom, quant)


def _divided_scale(a: Tensor, outer: Tensor, amax: Tensor, quant: Quant) -> Tensor:
    return rounded_scale(a / torch.full_like(a, top(quant)) / _per_tensor(amax, quant), quant)


def _reciprocal_amax(amax: Tensor, quant: Quant) -> Tensor:
    """Return S as torch computes a number over a tensor: times the reciprocal, which rounds twice."""
    assert quant.outer is not None
    scale = (ELEMENTS[quant.element].max * quant.outer.bound) * (1.0 / amax)
    return torch.where((amax == 0) | (scale == 0), 1.0, scale.clamp(max=FLT_MAX))


FACTOR_ORDERS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Quant], Tensor]] = {
    "S/s": lambda x, s, outer, amax, quant: x * (outer / s).clamp(max=FLT_MAX),
    "x / (s (1/S))": lambda x, s, outer, amax, quant: _finite(x / (s * (1 / outer))),
    "x / (s/S)": lambda x, s, outer, amax, quant: _finite(x / (s / outer)),
    "x S / s": lambda x, s, outer, amax, quant: _finite(x * outer / s),
    "x ((1/(amax/2688)) / s)": lambda x, s, outer, amax, quant: (
        x * ((1 / _per_tensor(amax, quant)) / s).clamp(max=FLT_MAX)
    ),
    "x / (s amax/2688)": lambda x, s, outer, amax, quant: _finite(x / (_per_tensor(amax, quant) * s)),
    "x (1/(s amax/2688))": lambda x, s, outer, amax, quant: (
        x * (1 / (_per_tensor(amax, quant) * s)).clamp(max=FLT_MAX)
    ),
}
"""Other orders of operations in which elements are scaled."""


def _power_of_two(rule: str, a: Tensor, outer: Tensor, amax: Tensor, quant: Quant) -> Tensor:
    """Return the block scale rounded by a rule to E8M0."""
    assert quant.scale is not None
    exact = exact_scale(a, outer, quant)
    grid = SCALES[quant.scale.format]
    if grid.bits > 8:
        raise NoComputationError("wide scales")
    if grid.mantissa:
        return getattr(rounding, rule)(exact, grid)  # type: ignore[no-any-return]
    fraction, exponent = torch.frexp(exact.double())  # in [1/2, 1)
    up = {"floor": torch.zeros_like(fraction) > 0, "ceil": fraction > 0.5, "nearest": fraction > 0.75}[rule]
    power = (exponent - 1 + up).clamp(-127, 127)
    return torch.where(exact == 0, 2.0**-127, torch.ldexp(torch.ones_like(fraction), power)).float()


def _with(**steps: object) -> Callable[[Computation], Computation]:
    return lambda computation: replace(computation, **steps)  # type: ignore[arg-type]


def _floored(least: float, before: Computation) -> Computation:
    return replace(before, scale=lambda *given: before.scale(*given).clamp(min=least))


def _zero_block(value: float, before: Computation) -> Computation:
    return replace(before, scale=lambda a, *more: torch.where(a == 0, value, before.scale(a, *more)))


_SCALES = {
    "scale (a/6) S": _with(scale=_two_roundings),
    "scale (a/6) / (amax/2688)": _with(scale=_divided_scale),
}
_OUTER = {"S = 2688 (1/amax)": _with(outer=_reciprocal_amax)}
_ELEMENTS = {f"elements {word}": _with(scaled=by) for word, by in FACTOR_ORDERS.items()}
VARIANTS: dict[str, Callable[[Computation], Computation]] = {
    **_SCALES,
    **_OUTER,
    **_ELEMENTS,
    **{f"E8M0 {rule}": _with(scale=partial(_power_of_two, rule)) for rule in ("floor", "ceil", "nearest")},
    "least scale 2^-9": partial(_floored, 2.0**-9),
    "least scale 2^-6": partial(_floored, 2.0**-6),
    "bf16 input": _with(source=lambda x: x.bfloat16().float()),
    "zero block 1": partial(_zero_block, 1.0),
    "zero block smallest": partial(_zero_block, 2.0**-9),
}
"""Legitimate differences by the word that `Subject.variants` takes, as changes of a computation. They are
made in this order: those that build on the scale of another come after it."""


def varied(words: Iterable[str]) -> Computation:
    """Return the recipe's computation with variants, words of `VARIANTS` in their order."""
    computation = RECIPE
    for word in words:
        computation = VARIANTS[word](computation)
    return computation


def suggestions(declared: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yield the words that a row that fails may be excused by: each of `VARIANTS` beside the declared ones,
    and every order of operations, also with a floor of scales, as a first attempt often has them."""
    known, tried = {*declared}, set[tuple[str, ...]]()
    floors = ("", "least scale 2^-6", "least scale 2^-9")
    orders = product(("", *_OUTER), ("", *_SCALES), ("", *_ELEMENTS), floors)
    for words in (*([word] for word in VARIANTS), *orders):
        wanted = known | {*filter(None, words)}
        made = tuple(word for word in VARIANTS if word in wanted)
        if made not in tried and wanted != known:
            tried.add(made)
            yield made


# --- declarations -----


def check(variants: Mapping[str, str], properties: Iterable[str]) -> None:
    """Refuse what declares nothing: InputError if a key is not a property, or a word is unknown."""
    known, problems = {*properties}, []
    for key, value in variants.items():
        if key != ALL and key not in known:
            problems.append(
                f"variants: {key}: no such property; {nearest(key, known)}, and * is the whole subject"
            )
        elif not isinstance(value, str):
            problems.append(f"variants: {key} is a {type(value).__name__}; declare a text of words")
        elif key not in FORMS:
            unknown = [word for word in split(value) if word not in VARIANTS]
            if unknown or not split(value):
                words = ", ".join(f"'{word}'" for word in VARIANTS)
                problems.append(f"variants: {key}: '{', '.join(unknown)}' is no word; the words are {words}")
        elif value not in FORMS[key]:
            words = ", ".join(f"'{word}'" for word in FORMS[key])
            problems.append(f"variants: {key}: '{value}' is no word of this property; it takes {words}")
    if problems:
        raise InputError(*problems)


def split(value: str) -> list[str]:
    """Return the words of one entry of `Subject.variants`."""
    return [word for part in value.split(",") if (word := part.strip())]


def words_of(variants: Mapping[str, str]) -> tuple[str, ...]:
    """Return the declared words of casts, each once, in the order in which they are made."""
    declared = {word for key, value in variants.items() if key not in FORMS for word in split(value)}
    return tuple(word for word in VARIANTS if word in declared)


def hint(key: str, words: Iterable[str]) -> str:
    """Return the sentence that names a declaration, as a user writes it."""
    return f'Declare variants={{"{key}": "{", ".join(words)}"}} if meant.'
