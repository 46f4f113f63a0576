"""One examination: a subject, the recipe it should compute, and the calls that properties make.

A property never sees the subject's exceptions: a call that raises, or returns something unreadable, becomes a
`RefusedError` with one sentence, and that a row that failed. Expected numbers come from the reference path of
`ablate.numerics`; if the subject declares variants, also from the computation with these variants.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from ablate.numerics.formats import SCALES
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import Hadamard, Quant
from ablate.recipes import Recipe
from ablate.recipes.recipe import SLOTS
from ablate.verification.conformance import inputs
from ablate.verification.conformance.declared import Computation, NoComputationError, varied, words_of
from ablate.verification.conformance.numbers import (
    FP32_ROUNDINGS,
    TOLERANCES,
    Differences,
    Numbers,
    UnreadableError,
    differences,
    of_operand,
    over_elements,
    read,
)
from ablate.verification.conformance.result import Block, Outcome, Row, decided
from ablate.verification.conformance.subject import FUNCTIONS, Subject

_SHOWN = 120
"""Characters of a subject's own error message that are shown."""


class RefusedError(Exception):
    """A subject's function raised, or returned something unreadable; the message is a sentence."""


class NotApplicableError(Exception):
    """A property needs what this subject or recipe does not have; the message is a sentence."""


@dataclass(frozen=True)
class Pair:
    """One cast: its input, what the subject returned, and what the recipe gives."""

    x: Tensor
    got: Numbers
    expected: Numbers
    quant: Quant
    difference: Differences
    where: str = ""


@dataclass
class Examination:
    """A subject and a recipe, with the quantisers that the recipe has for each of the subject's functions."""

    subject: Subject
    recipe: Recipe
    seed: int = 0
    name: str = ""
    """Property that is examined."""
    failed: list[Pair] = field(default_factory=list)
    """Its casts if it failed, some without a difference: their stages are measured."""
    declarable: list[Pair] = field(default_factory=list)
    """Casts that a declared variant has to explain, if they are not those that failed."""
    form: str = ""
    """Form in which it would hold if it was declared, by `declared.FORMS`."""
    drawn: Any = None
    """Draws that several properties use, once they are made."""
    explaining: list[tuple[str, ...]] = field(default_factory=list)
    """Declarations that explained an earlier property."""
    undeclared: int = 0
    """Number of properties that no declaration explained."""
    refused: list[str] = field(default_factory=list)
    """Function of each property that ended because it raised, or returned something unreadable."""
    answered: set[str] = field(default_factory=set)
    """Functions of the properties that did not end so."""

    def begin(self, name: str) -> None:
        self.name, self.failed, self.declarable, self.form = name, [], [], ""

    @property
    def declared_form(self) -> str | None:
        """Form in which the subject declares that the property holds."""
        return self.subject.variants.get(self.name)

    @property
    def nearest(self) -> Quant:
        """Quantiser of `Subject.cast`: that of the activations, or the first one that rounds to nearest."""
        return self._quant(lambda quant: quant.rounding in ("nearest", "away") and quant.tile[0] == 1)

    @property
    def square(self) -> Quant:
        return self._quant(lambda quant: quant.tile[0] > 1 and not quant.draws)

    @property
    def stochastic(self) -> Quant:
        return self._quant(lambda quant: quant.rounding == "stochastic")

    @property
    def rotation(self) -> Hadamard:
        """Rotation of the recipe. NotApplicableError if it has none."""
        for product in (self.recipe.wgrad, self.recipe.dgrad, self.recipe.fprop):
            if product.hadamard is not None:
                return product.hadamard
        raise NotApplicableError("the recipe rotates nothing")

    def _quant(self, fits: Callable[[Quant], bool]) -> Quant:
        for slot in sorted(SLOTS, key=lambda slot: "xwg".index(slot[-1])):
            quant = self.recipe.products.slot(slot)
            if quant is not None and fits(quant):
                return quant.model_copy(update={"transform": None, "estimator": None, "source": "original"})
        raise NotApplicableError("the recipe has no such cast")

    def rows(self, wanted: int) -> int:
        """Return the number of rows at or above the wanted one that the subject takes."""
        return -(-wanted // self.subject.rows) * self.subject.rows

    def columns(self, wanted: int, quant: Quant | None = None) -> int:
        """Return the number of columns at or above the wanted one: whole blocks that the subject takes."""
        step = math.lcm(self.subject.columns or 1, quant.tile[1] if quant else 16)
        return -(-wanted // step) * step

    def size(self, rows: int, columns: int, quant: Quant | None = None) -> tuple[int, int]:
        """Return numbers of rows and of columns at or above the wanted ones that the subject takes."""
        return self.rows(rows), self.columns(columns, quant)

    def cut_short(self, quant: Quant, shapes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return those shapes, in sizes that the subject takes, whose last block is cut short; [] if it
        declares no such sizes."""
        step = self.subject.columns or quant.tile[1]
        sizes = {(self.rows(rows), -(-columns // step) * step) for rows, columns in shapes}
        return sorted(size for size in sizes if size[1] % quant.tile[1])

    def takes(self, dtype: str) -> bool:
        return dtype in self.subject.dtypes

    def typed(self, x: Tensor, dtype: str = "bfloat16") -> Tensor:
        """Return x rounded to a dtype, in one that the subject takes. NotApplicableError if none holds it."""
        x = x.to(getattr(torch, dtype))
        if self.takes(dtype):
            return x
        if dtype == "bfloat16" and self.takes("float32"):
            return x.float()
        raise NotApplicableError(f"the subject takes {', '.join(self.subject.dtypes)}, not {dtype}")

    def normal(self, rows: int, columns: int, quant: Quant | None = None, seed: int = 0) -> Tensor:
        """Return a tensor of normal bf16 numbers of about this size; `seed` is added to the examination's."""
        return self.typed(inputs.normal(*self.size(rows, columns, quant), self.seed + seed))

    def function(self, name: str) -> Callable[..., Any]:
        """Return one of the subject's functions. NotApplicableError if it has none."""
        function = getattr(self.subject, name)
        if function is None:
            raise NotApplicableError(f"the subject has no {name}({FUNCTIONS[name]})")
        return function  # type: ignore[no-any-return]

    def call(self, name: str, *tensors: Tensor, **more: Any) -> Any:
        """Call one of the subject's functions with tensors on its device; RefusedError if it raises."""
        function = self.function(name)
        handed = [tensor.to(self.subject.device) for tensor in tensors]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return function(*handed, *more.values())
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            shapes = ", ".join(f"{list(z.shape)} {str(z.dtype).removeprefix('torch.')}" for z in tensors)
            said = f"{type(error).__name__}: {lines[0][:_SHOWN]}" if lines[0] else type(error).__name__
            low, advice = said.lower(), ""
            sized = any(word in low for word in ("multiple of", "divisible", "aligned"))
            if self.subject.device == "cpu" and ("cuda" in low or "gpu" in low):
                advice = "; --device cuda hands in tensors on a GPU"
            elif self.subject.rows == 1 and sized:
                advice = "; name the sizes that it takes: Subject(..., rows=128, columns=128)"
            raise RefusedError(f"{name} raises for {shapes}: {said}{advice}") from error

    def cast(self, x: Tensor, quant: Quant, name: str = "cast", **more: Any) -> Numbers:
        """Call a cast and return its numbers; RefusedError if it raises, or returns something unreadable."""
        result = self.call(name, x, **more)
        try:
            return read(result, x.shape[0], x.shape[1], quant, self.subject.swizzled)
        except UnreadableError as error:
            raise RefusedError(f"{name} {error}") from None

    def values(self, x: Tensor, quant: Quant, name: str = "cast", **more: Any) -> tuple[Tensor, Numbers]:
        """Call a cast and return its values, and all of its numbers."""
        got = self.cast(x, quant, name, **more)
        values = got.dequantised(quant.tile[1])
        if values is None:
            raise NotApplicableError("the subject returns codes without a second level")
        return values, got

    def pair(self, x: Tensor, quant: Quant, name: str = "cast", where: str = "", **more: Any) -> Pair:
        """Cast one tensor by the subject and by the recipe, and compare."""
        kept = x.clone()  # the subject may change x, and gets it as it is: a copy of a view is contiguous
        got = self.cast(x, quant, name, **more)
        return compared(kept, got, quant, where)

    def judged(self, pairs: Sequence[Pair]) -> Row:
        """Return the row of some casts: failed if any differs, unless declared variants explain all."""
        cases = sum(pair.difference.cases for pair in pairs)
        wrong = [pair for pair in pairs if pair.difference.count]
        if not wrong:
            return decided(cases, 0)
        if declared := explained_by_variants(words_of(self.subject.variants), wrong):
            return Row("", Outcome.VARIANT, cases, 0, detail=f"as declared: {declared}")
        self.failed = list(pairs)
        detail = "all that differ are ties, one step apart" if all(map(_tied, wrong)) else ""
        return decided(cases, sum(pair.difference.count for pair in wrong), first_block(wrong[0]), detail)


@dataclass(frozen=True)
class Property:
    """Promise of a recipe that can be examined from outside: `properties.PROMISES` has its sentence."""

    name: str
    function: str
    """Function of the subject that is called: a field of `Subject`."""
    compare: Callable[[Examination], Row]
    """Calls the function and compares; its docstring names the tolerance, with its cause."""


def _tied(pair: Pair) -> bool:
    """Return True if the recipe's and the subject's codes are equally near wherever they differ."""
    wrong, expected, got = pair.difference.elements, pair.expected, pair.got
    if pair.difference.blocks.any() or expected.codes is None:
        return False
    factor = expanded(expected, pair.quant)
    codes = got.codes if got.codes is not None else None if got.values is None else got.values / factor
    if codes is None:
        return False
    y = (pair.x.float() / factor)[wrong]
    apart = ((y - codes[wrong]).abs() - (y - expected.codes[wrong]).abs()).abs()
    near = apart <= 4 * TOLERANCES.get(got.dtype, FP32_ROUNDINGS) * y.abs()
    return bool((near & (codes[wrong] != expected.codes[wrong])).all())


def explained_by_variants(words: Sequence[str], pairs: Sequence[Pair]) -> str:
    """Return the fewest words that suffice if the recipe with all gives what the subject gave; else ''."""
    if not words or not explains(varied(words), pairs):
        return ""
    fewer = (some for count in range(1, len(words)) for some in combinations(words, count))
    return ", ".join(next((some for some in fewer if explains(varied(some), pairs)), words))


def explains(computation: Computation, pairs: Sequence[Pair]) -> bool:
    """Return True if a computation is defined for all of these casts, and gives what the subject gave."""
    for pair in pairs:
        try:
            made = computation.run(pair.x, pair.quant)
        except NoComputationError:
            return False
        if differences(pair.got, made, pair.quant.tile[1]).count:
            return False
    return True


def reference(x: Tensor, quant: Quant) -> Numbers:
    """Return the numbers of the recipe's cast: those of the reference path, which keeps every step."""
    return of_operand(quantize(x, quant, keep=True), *x.shape)


def compared(x: Tensor, got: Numbers, quant: Quant, where: str = "") -> Pair:
    expected = reference(x, quant)
    return Pair(x, got, expected, quant, differences(got, expected, quant.tile[1]), where)


def judged(differ: Tensor, x: Tensor | None, expected: Tensor, got: Tensor, where: str = "") -> Row:
    """Return the row of a comparison of two matrices, with the first element that differs. `differ`: mask of
    the elements that differ; `x`: input of each, if it has one; `where`: matrix in words, with a colon."""
    if not differ.any():
        return decided(differ.numel(), 0)
    row, column = differ.nonzero()[0].tolist()
    source, one, other = (() if z is None else (float(z[row, column]),) for z in (x, expected, got))
    block = Block(f"{where}row {row}, column {column}", source, one, other)
    return decided(differ.numel(), int(differ.sum()), block)


def first_block(pair: Pair) -> Block | None:
    """Return the first block of a cast that differs, with both computations; None if nothing differs."""
    length = pair.quant.tile[1]
    place = pair.difference.first(length)
    if place is None:
        return None
    row, block = place
    columns = slice(block * length, min((block + 1) * length, pair.x.shape[1]))

    def part(values: Tensor | None) -> tuple[float, ...]:
        return () if values is None else tuple(values[row, columns].tolist())

    got, expected, x = pair.got, pair.expected, pair.x[row, columns].float()
    values = got.dequantised(length)
    amaxes = [f"block amax {float(x.abs().max()):.6g}"] if pair.quant.block else []
    if expected.amax is not None and pair.quant.outer is not None:
        amax = float(expected.amax.reshape(-1)[row if expected.amax.numel() > 1 else 0])
        amaxes.append(f"tensor amax {amax:.6g}")
    last = f"s {columns.start} to {columns.stop - 1}" if pair.quant.block else f" {columns.start}"
    text = f"row {row}, column{last}"
    return Block(
        f"{pair.where}: {text}" if pair.where else text,
        tuple(x.tolist()),
        part(expected.values),
        part(values if values is not None else got.codes),
        _computed(expected, pair.quant, row, columns, amaxes),
        "" if got.scales is None else _computed(got, pair.quant, row, columns),
    )


def _computed(numbers: Numbers, quant: Quant, row: int, columns: slice, parts: Sequence[str] = ()) -> str:
    """Return the scale and the codes of a block in words, behind other parts."""
    if numbers.scales is not None:
        scale = _scale_text(numbers.scales[row, columns.start // quant.tile[1]], quant)
        parts = [*parts, f"scale {scale}"]
    codes = "" if numbers.codes is None else " ".join(f"{z:g}" for z in numbers.codes[row, columns].tolist())
    return ", ".join(parts) + f"; codes {codes}" * bool(codes)


def _scale_text(scale: Tensor, quant: Quant) -> str:
    name, text = SCALES[quant.scale.format].dtype if quant.scale else None, f"{float(scale):.6g}"
    if name is None or not name.startswith("float8"):
        return text
    stored = scale.to(getattr(torch, name))
    if float(stored) != float(scale):  # NaN, or a number that the format does not have
        return text
    return f"{text} ({int(stored.view(torch.uint8)):#04x})"


def expanded(numbers: Numbers, quant: Quant) -> Tensor:
    """Return the factor of each element's code, block scale x outer, fp32 [rows, columns]."""
    assert numbers.codes is not None
    factor = torch.ones_like(numbers.codes)
    if numbers.scales is not None:
        factor = over_elements(numbers.scales, quant.tile[1], numbers.codes.shape[1])
    return factor if numbers.outer is None else factor * numbers.outer
