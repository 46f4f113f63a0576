"""A recipe's products as torch's scaled products compute them on tensor cores, or the reason why they cannot.

The problem. A tensor core multiplies elements of a few formats, with block scales of a few formats, and sums
in fp32. A recipe here may ask for more. One field that the hardware lacks must not send a whole model to the
emulator, and must not be replaced by a similar one either.

The idea. Each product of a layer is judged alone. An operand fits if its numbers, code times block scale, can
be written in a layout that tensor cores read, exactly:

    family   elements                 block scales             outer scale
    nvfp4    e2m1                     e4m3 of 16 elements      none, one a tensor, one a row
    mxfp4    e2m1                     e8m0 of 32 elements      none, one a tensor, one a row
    fp8      e4m3, e5m2, smaller      none                     one a tensor, one a row
    mxfp8    e4m3, e5m2, smaller      e8m0 of 32 elements      none, one a tensor, one a row

A smaller element is one whose every value e4m3 has too (e2m1, int4, six bits). A longer or a square block
repeats its scale, and a missing scale is a scale of 1. How scales and codes were found (rounding, rotation,
selection, statistic of the outer scale) does not matter: the operands are the emulator's own. A product runs
on tensor cores if both operands fit in one family, the first of this list that they share. All others are
computed as the emulator computes them, and named with every field in the way.

An operand with a `transform` is a sum of parts: what is taken out of it, and the rest. The product of both
rests is judged like any other; the other parts are multiplied as the emulator does. All add up in fp32.

    plan(PRESETS["nvfp4"]().products)["wgrad"]    Verdict("native", "nvfp4")
    plan(PRESETS["ue5m3"]().products)["fprop"]    Verdict("emulated", None, (Reason("fprop.x", ...), ...))

`refusals` lists what a back end cannot compute at all. Facts: torch 2.13.0 (`torch.nn.functional.scaled_mm`),
FlashInfer 0.7.2 (`mm_fp4`). This file imports neither.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Literal

from ablate.numerics.formats import ELEMENTS
from ablate.numerics.spec import Quant, tag
from ablate.recipes.reasons import Reason
from ablate.recipes.recipe import DIRECTIONS, Product, Products, Recipe
from ablate.recipes.te_mapping import variants

Family = Literal["nvfp4", "mxfp4", "mxfp8", "fp8"]
Backend = Literal["cublaslt", "cudnn", "cutlass"]
Runs = Literal["native", "emulated", "bf16"]
NAMES: dict[Family, str] = {"nvfp4": "NVFP4", "mxfp4": "MXFP4", "fp8": "FP8", "mxfp8": "MXFP8"}
"""The families, in the order in which a product takes the first that fits, with their names in messages."""
FP4: tuple[Family, ...] = ("nvfp4", "mxfp4")
FLASHINFER: tuple[Backend, ...] = ("cudnn", "cutlass")
"""Back ends of FP4 products in FlashInfer. Products of FP8 and MXFP8 are torch's in any case."""
BLOCK: dict[Family, int] = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
"""Elements that share a block scale in the hardware's layout."""
SCALES: dict[str, tuple[Family, ...]] = {"e4m3": ("nvfp4",), "e8m0": ("mxfp4", "mxfp8")}
"""Families by the format of their block scales."""
_ALONG_ROWS = ("tensor", "row", "rows")
"""Words of outer granularities that are constant along the contraction."""


@dataclass(frozen=True)
class Verdict:
    """The way in which one product is computed."""

    runs: Runs
    """`native`: on tensor cores, in `family`; `emulated`: by the emulator; `bf16`: nothing is quantised."""
    family: Family | None = None
    reasons: tuple[Reason, ...] = ()
    """Every field in the way; empty if the product is native."""
    parts: bool = False
    """True if an operand has several parts: those beside the rest are emulated."""
    not_in_fp4: tuple[Reason, ...] = ()
    """Every obstacle to FP4, if both operands fit in it and are multiplied in eight bits."""

    @property
    def why(self) -> str:
        return "; ".join(self.reasons)


def eight_bits(element: str) -> str | None:
    """Return the eight-bit element that has every value of an element, `e4m3` or `e5m2`; None if none has."""
    form, eight = ELEMENTS[element], ELEMENTS["e4m3"]
    if element == "e5m2":
        return element
    smallest, least = form.emin - form.mantissa, eight.emin - eight.mantissa
    return "e4m3" if form.mantissa <= eight.mantissa and smallest >= least and form.max <= eight.max else None


def fit(quant: Quant) -> tuple[tuple[Family, ...], tuple[str, ...]]:
    """Return the families whose layouts hold an operand's numbers exactly, or every field in the way."""
    misfits = tuple(_misfits(quant))
    if misfits:
        return (), misfits
    own: tuple[Family, ...] = tuple(NAMES) if quant.element == "e2m1" else ("fp8", "mxfp8")
    if quant.scale is None:
        return own, ()
    return tuple(family for family in own if family in SCALES[quant.scale.format]), ()


def _misfits(quant: Quant) -> Iterator[str]:
    """Yield every field that keeps an operand's numbers from all layouts, and why."""
    if quant.owned:
        for path, word in quant.owned:
            yield f"{path} {word}: a function of your own is computed by the emulator alone"
        return
    if quant.altered:
        yield "error: an amplified or permuted error is computed by the emulator alone"
        return
    scale, outer, select = quant.scale, quant.outer, quant.select
    along = outer is not None and tag(outer.granularity) not in _ALONG_ROWS
    grids = select is not None and select.among == "grids"
    if quant.element != "e2m1" and eight_bits(quant.element) is None:
        yield f"element {quant.element}: tensor cores multiply e2m1, e4m3 and e5m2"
    elif quant.element != "e2m1" and scale is not None and scale.format == "e4m3":
        yield f"element {quant.element}: tensor cores take e4m3 scales with e2m1 alone"
    if outer is not None and along:
        yield f"outer.granularity {outer.granularity}: it changes along the contraction"
    if grids:
        yield "select.among grids: e2m1 and int4 elements in one operand"
    if scale is None:
        return
    if quant.wide and not along and not grids:
        yield f"scale.format {scale.format}: code times scale has more bits than bf16"
    elif scale.format not in SCALES:
        yield f"scale.format {scale.format}: tensor cores take e4m3 and e8m0"
    if scale.format in SCALES and quant.tile[1] % (length := BLOCK[SCALES[scale.format][0]]):
        yield f"block {quant.block}: an {scale.format} scale is for {length} elements"


@lru_cache(maxsize=4096)
def verdict(a: Quant | None, b: Quant | None, wide: bool, backend: Backend = "cublaslt") -> Verdict:
    """Return how a back end computes the product of two operands, None for bf16, and writes it in fp32 if
    `wide`. Reasons are at `0` or `1` if one operand is in the way, and otherwise at "".
    """
    several = any(quant is not None and has_parts(quant) for quant in (a, b))
    if a is None and b is None:
        return Verdict("bf16", None, (Reason("", ": no operand is quantised"),))
    fits = [((), ()) if quant is None else fit(quant) for quant in (a, b)]
    lone = ": not quantised, and the other operand is"
    reasons = [Reason(at, lone) for at, quant in (("0", a), ("1", b)) if quant is None]
    reasons += [Reason(str(at), f".{why}") for at, (_, misfits) in enumerate(fits) for why in misfits]
    if a is None or b is None or reasons:
        return Verdict("emulated", None, tuple(reasons))
    left, right = (families for families, _ in fits)
    for family in (family for family in NAMES if family in left and family in right):
        obstacles = list(_obstacles(family, a, b, wide or several, backend))
        if not obstacles:
            eight = family not in FP4 and any(four in left and four in right for four in FP4)
            passed = tuple(dict.fromkeys(reasons)) if eight else ()
            return Verdict("native", family, parts=several, not_in_fp4=passed)
        reasons += obstacles
    kinds = (" or ".join(NAMES[family] for family in families) for families in (left, right))
    why = f"tensor cores multiply two operands of one kind, not {' and '.join(kinds)}"
    return Verdict("emulated", None, tuple(dict.fromkeys(reasons)) or (Reason("", f": {why}"),))


def has_parts(quant: Quant) -> bool:
    """Return True if a transform leaves more than one part of an operand."""
    taken = quant.transform
    return taken is not None and bool(
        taken.mean or taken.low_rank or taken.channels or taken.patch or (taken.clamp and taken.residual)
    )


def _obstacles(family: Family, a: Quant, b: Quant, wide: bool, backend: Backend) -> Iterator[Reason]:
    """Yield why a back end cannot multiply in a family, or apply the factor before its one rounding."""
    rows = [quant.outer is not None and tag(quant.outer.granularity) != "tensor" for quant in (a, b)]
    second = eight_bits(b.element)
    if family not in FP4 and eight_bits(a.element) == second == "e5m2":
        yield Reason("", ": tensor cores multiply no e5m2 with e5m2")
    if family == "fp8" and any(rows) and second != "e4m3":
        yield Reason("1", f".element {b.element}: torch's FP8 product by rows takes e4m3 as second operand")
    if family == "mxfp4" and backend == "cutlass":
        yield Reason("", ": FlashInfer multiplies MXFP4 by cudnn alone")
    if family in FP4 and backend in FLASHINFER:
        why = ".outer.granularity: FlashInfer writes bf16, and factors of rows would round it again"
        yield from (Reason(str(number), why) for number, has in enumerate(rows) if has)
        why = ".transform: FlashInfer writes bf16, and the products of parts add up in fp32"
        yield from (Reason(str(number), why) for number, quant in enumerate((a, b)) if has_parts(quant))
    if family != "mxfp4" or backend in FLASHINFER:
        return
    if wide:
        yield Reason("", ": torch's MXFP4 product writes bf16, and fp32 is wanted")
    for number, quant in enumerate((a, b)):
        why = "torch's MXFP4 product writes bf16, and a factor would round it again"
        if quant.outer is not None:
            yield Reason(str(number), f".outer: {why}")
        if quant.range.prescale != 1:
            yield Reason(str(number), f".range.prescale: {why}")


def plan(products: Products, backend: Backend = "cublaslt") -> dict[str, Verdict]:
    """Return how a back end computes each product of a layer, by its name."""
    return {name: _named(name, getattr(products, name), backend) for name in DIRECTIONS["all"]}


def _named(name: str, product: Product, backend: Backend) -> Verdict:
    first, second = product.operands
    given = verdict(getattr(product, first), getattr(product, second), writes_fp32(product), backend)
    at = {"0": f"{name}.{first}", "1": f"{name}.{second}", "": name}

    def named(reasons: tuple[Reason, ...]) -> tuple[Reason, ...]:
        return tuple(Reason(at[reason.at], reason.text) for reason in reasons)

    return replace(given, reasons=named(given.reasons), not_in_fp4=named(given.not_in_fp4))


def writes_fp32(product: Product) -> bool:
    return getattr(product, "gemm", None) == "fp32_out" or getattr(product, "dw", None) == "fp32"


def slots(products: Products, backend: Backend = "cublaslt") -> dict[str, Verdict]:
    """Return how each operand is multiplied, by its slot; both operands of a product have one verdict."""
    return {
        f"{name}.{operand}": given
        for name, given in plan(products, backend).items()
        for operand in getattr(products, name).operands
    }


def parts(recipe: Recipe, backend: Backend = "cublaslt") -> tuple[dict[str, Verdict], ...]:
    """Return the plans of all products that may be in force in some layer at some step, each once.

    The first is that of the recipe's own products.
    """
    plans = [plan(products, backend) for products in variants(recipe)]
    return tuple(one for number, one in enumerate(plans) if one not in plans[:number])


def _verdicts(recipe: Recipe, backend: Backend) -> Iterator[Verdict]:
    return (given for one in parts(recipe, backend) for given in one.values())


def entirely_native(recipe: Recipe, backend: Backend = "cublaslt") -> bool:
    """Return True if the recipe quantises something, and no product of it is ever emulated."""
    runs = {given.runs for given in _verdicts(recipe, backend)}
    return "native" in runs and "emulated" not in runs


def families(recipe: Recipe, backend: Backend = "cublaslt") -> set[Family]:
    """Return the families of formats that a recipe multiplies on tensor cores."""
    return {given.family for given in _verdicts(recipe, backend) if given.family is not None}


def emulated(recipe: Recipe, backend: Backend = "cublaslt") -> tuple[Reason, ...]:
    """Return every field that keeps a product of a recipe from tensor cores, each once."""
    every = (given.reasons for given in _verdicts(recipe, backend) if given.runs == "emulated")
    return tuple(dict.fromkeys(chain.from_iterable(every)))


def not_in_fp4(recipe: Recipe, backend: Backend = "cublaslt") -> tuple[Reason, ...]:
    """Return every obstacle to FP4 of products that fit in it and are multiplied in eight bits, each once."""
    every = (given.not_in_fp4 for given in _verdicts(recipe, backend))
    return tuple(dict.fromkeys(chain.from_iterable(every)))


def refusals(recipe: Recipe, backend: Backend = "cublaslt") -> Iterator[str]:
    """Yield every altered error, and every product whose output type a back end cannot write."""
    every = (pair for products in variants(recipe) for pair in products.quantised())
    for slot in dict.fromkeys(slot for slot, quant in every if quant.altered):
        yield f"{slot}.error: tensor cores multiply the casts themselves; use engine: emulated"
    if backend not in FLASHINFER:
        return
    wanted = dict.fromkeys(
        (name, "dw fp32" if name == "wgrad" else "gemm fp32_out")
        for products in variants(recipe)
        for name in DIRECTIONS["all"]
        if writes_fp32(product := getattr(products, name)) and _named(name, product, backend).family in FP4
    )
    for name, field in wanted:
        other = "dw: bf16" if name == "wgrad" else "gemm: bf16_out"
        yield f"{name}.{field}: FlashInfer's FP4 products write bf16; write {other}, or engine: scaled_mm"
