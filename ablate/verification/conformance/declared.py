"""Declared differences of a subject, `Subject.variants`: their words, and what they excuse.

    variants={"*": "elements S/s, zero block 1", "nan_visible": "zero"}

A word of a cast is a computation (`VARIANTS`) that replaces a step of the recipe's, in all casts of the
subject, whichever property it is declared by; `*` stands for no property in particular. A few properties
have forms of their own, declared by their names. Nothing is excused: what the subject returns has to be what
the declared computation gives.

The recipe's own steps are those of `ablate.numerics`. A declared variant replaces one of them:

    replace(RECIPE, outer=lambda amax, quant: torch.ones_like(amax))       # no tensor scale
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from ablate.errors import InputError, nearest
from ablate.numerics import rounding
from ablate.numerics.formats import ELEMENTS, SCALES
from ablate.numerics.quantize import pad
from ablate.numerics.scaling import (
    FLT_MAX,
    block_amax,
    block_scales,
    block_statistic,
    element_scales,
    encode_scale,
    round_scale,
)
from ablate.numerics.select import Candidate, block_error
from ablate.numerics.spec import Quant, argument, tag
from ablate.verification.conformance.numbers import Numbers

ALL = "*"
FORMS = {
    "nan_visible": ("tensor", "block", "element", "saturated", "zero"),
    "infinity_visible": ("saturated",),
    "infinite_neighbours": ("nan",),
    "random_gradients": ("nearest",),
}
"""Forms in which a property may be declared to hold, by its name."""


class NoComputationError(Exception):
    """A recipe or input for which a computation is not defined."""


def top(quant: Quant) -> float:
    """Return the element value that a block's largest magnitude is mapped to."""
    return quant.range.map_to or ELEMENTS[quant.element].max


def rounded_scale(exact: Tensor, quant: Quant) -> Tensor:
    assert quant.scale is not None
    return round_scale(exact.clamp(max=FLT_MAX), quant.scale)


def _tensor_amax(x: Tensor, quant: Quant) -> Tensor:
    """Return the largest magnitude of the tensor, or of each row; fp32, broadcasting to tiles."""
    assert quant.outer is not None
    if tag(quant.outer.statistic) == "static":
        return torch.tensor(float(argument(quant.outer.statistic) or 0))
    if quant.outer.granularity == "tensor":
        return x.abs().amax()
    if quant.outer.granularity == "row" and quant.tile[0] == 1:
        return x.abs().amax(dim=1).view(-1, 1, 1, 1)
    raise NoComputationError(f"granularity {quant.outer.granularity}")


def _element(y: Tensor, quant: Quant) -> Tensor:
    rule = rounding.away if quant.rounding == "away" else rounding.nearest
    return rule(y, ELEMENTS[quant.element])


def _decode(codes: Tensor, s: Tensor, outer: Tensor, amax: Tensor | None, quant: Quant) -> Tensor:
    """Return code x ((s x amax) / (6 bound))."""
    divisor = quant.range.prescale
    if amax is None or quant.outer is None:
        return codes * (s / divisor)
    divisor *= ELEMENTS[quant.element].max * quant.outer.bound
    return codes * (s * amax * (1.0 / torch.tensor(divisor)))


@dataclass(frozen=True)
class Computation:
    """Steps of a cast, each a function. Tiles are [row tiles, rows, column tiles, columns], fp32."""

    source: Callable[[Tensor], Tensor] = Tensor.float
    """Elements that are read, fp32 [rows, columns]."""
    outer: Callable[[Tensor, Quant], Tensor] = encode_scale
    """S of the statistic."""
    scale: Callable[[Tensor, Tensor, Tensor, Quant], Tensor] = lambda a, outer, amax, quant: block_scales(
        a, outer, quant
    )
    """Block scale of a block's statistic, S and the tensor's statistic."""
    scaled: Callable[[Tensor, Tensor, Tensor, Tensor, Quant], Tensor] = lambda tiles, s, outer, amax, quant: (
        tiles * element_scales(s, outer)
    )
    """Scaled elements of tiles, block scale, S and the tensor's statistic."""

    def run(self, x: Tensor, quant: Quant) -> Numbers:
        """Cast x [rows, columns], bf16 or fp32; NoComputationError if the recipe has something that these
        steps have not."""
        other = quant.select is not None and quant.select.among != "scales"
        if quant.scale is None or quant.scale.micro_exponents or other:
            raise NoComputationError("no block scales, micro-exponents or other candidates")
        rows, columns = x.shape
        z = self.source(x)
        high, wide = quant.tile
        padded = pad(z, high, wide)
        tiles = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
        amax = None if quant.outer is None else _tensor_amax(z, quant)
        one = torch.ones(())
        outer = one if amax is None else self.outer(amax, quant)
        a = block_statistic(tiles, block_amax(tiles), quant.range.statistic)
        if quant.select is not None:
            s, codes = self._selected(tiles, a, outer, amax, quant)
        else:
            known = one if amax is None else amax
            s = self.scale(a, outer, known, quant)
            y = self.scaled(tiles, s, outer, known, quant)
            codes = _element(y if quant.range.prescale == 1 else y * quant.range.prescale, quant)
        values = _decode(codes, s, outer, amax, quant)
        return Numbers(
            values.reshape(padded.shape)[:rows, :columns],
            codes.reshape(padded.shape)[:rows, :columns],
            s[:, 0, :, 0].repeat_interleave(high, 0)[:rows],
        )

    def _selected(
        self, tiles: Tensor, a: Tensor, outer: Tensor, amax: Tensor | None, quant: Quant
    ) -> tuple[Tensor, Tensor]:
        assert quant.select is not None
        assert quant.scale is not None
        largest = ELEMENTS[quant.element].max
        base = a / torch.full_like(a, largest) * outer
        made = []
        for value in quant.select.map_to:
            s = round_scale(base * torch.full_like(base, largest / value), quant.scale)
            y = self.scaled(tiles, s, outer, torch.ones(()) if amax is None else amax, quant)
            codes = _element(y, quant)
            made.append((s, codes, block_error(Candidate(s, y, codes), tiles, amax, quant)))
        second = made[1][2] < made[0][2]
        return torch.where(second, made[1][0], made[0][0]), torch.where(second, made[1][1], made[0][1])


RECIPE = Computation()
"""The recipe's own steps."""


def _per_tensor(amax: Tensor, quant: Quant) -> Tensor:
    """Return amax / 2688, by which some libraries divide."""
    if quant.outer is None:
        raise NoComputationError("no second level")
    return amax / torch.full_like(amax, ELEMENTS[quant.element].max * quant.outer.bound)


def _finite(y: Tensor) -> Tensor:
    return y.nan_to_num(0.0, FLT_MAX, -FLT_MAX)


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
    exact = (a * (outer * torch.full_like(outer, 1 / top(quant)) * quant.range.headroom)).clamp(max=FLT_MAX)
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
    "scale (a/6) S": _with(
        scale=lambda a, outer, amax, quant: rounded_scale(
            a / torch.full_like(a, top(quant)) * outer * quant.range.headroom, quant
        )
    ),
    "scale (a/6) / (amax/2688)": _with(
        scale=lambda a, outer, amax, quant: rounded_scale(
            a / torch.full_like(a, top(quant)) / _per_tensor(amax, quant), quant
        )
    ),
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
    return [word for part in value.split(",") if (word := part.strip())]


def words_of(variants: Mapping[str, str]) -> tuple[str, ...]:
    """Return the declared words of casts, each once, in the order in which they are made."""
    declared = {word for key, value in variants.items() if key not in FORMS for word in split(value)}
    return tuple(word for word in VARIANTS if word in declared)


def hint(key: str, words: Iterable[str]) -> str:
    """Return the sentence that names a declaration, as a user writes it."""
    return f'Declare variants={{"{key}": "{", ".join(words)}"}} if meant.'
