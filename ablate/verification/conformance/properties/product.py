"""Products of a linear layer: y, dx and dw.

Gradients are rounded stochastically in many recipes, and no two libraries draw the same bits. Two ways
around: an output gradient on which there is nothing to round, so that dx and dw are fixed to the last bit;
and for random gradients the interval that the reference's own draws give.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ablate.numerics.choices import SIGNS
from ablate.numerics.spec import Quant
from ablate.recipes.recipe import Products
from ablate.verification.conformance import inputs
from ablate.verification.conformance.examination import (
    Examination,
    NotApplicableError,
    Property,
    RefusedError,
)
from ablate.verification.conformance.examination import judged as of_elements
from ablate.verification.conformance.properties.calls import repeated
from ablate.verification.conformance.reference_product import (
    OPERANDS,
    Exact,
    exact_products,
    gain_and_error,
    plain_products,
    quantisers,
    rounded_to_nearest,
)
from ablate.verification.conformance.result import Outcome, Row, decided
from ablate.verification.conformance.stages import wrong_numbers, wrong_product

REFERENCE_DRAWS, SIGMAS = 12, 8.0
NAMES = ("y", "dx", "dw")
TOKENS, IN, OUT = 96, 160, 144
CONTRACTIONS = (16, 48, 80, 272, 336, 528, 656, 784, 1104, 1168, 1552, 2320)
"""Terms of a sum: on both sides of multiples of 32 to 512."""


class Layer(NamedTuple):
    """Tensors of one linear layer, in a dtype that the subject takes."""

    x: Tensor
    w: Tensor
    dy: Tensor

    @property
    def bf16(self) -> "Layer":
        """The same numbers in bf16."""
        return Layer(*(z.bfloat16() for z in self))


class Experts(NamedTuple):
    """Tensors of a layer of experts."""

    x: Tensor
    w: Tensor
    dy: Tensor
    offsets: Tensor
    """int32."""
    sizes: list[int]
    """Tokens of each expert."""

    @property
    def layers(self) -> list[Layer]:
        """x, w and dy of each expert, in bf16."""
        pieces = zip(self.x.split(self.sizes), self.w, self.dy.split(self.sizes), strict=True)
        return [Layer(*piece).bf16 for piece in pieces]


def products_of(bench: Examination) -> Products:
    """Return the recipe's products. NotApplicableError if the kit has no reference of them."""
    recipe = bench.recipe
    for product in (recipe.fprop, recipe.dgrad, recipe.wgrad):
        quants: list[Quant | None] = [getattr(product, operand) for operand in product.operands]
        if any(quant is not None and (quant.transform or quant.estimator) for quant in quants):
            raise NotApplicableError("the recipe's operands depend on more than x, w and dy")
        if product.hadamard is not None and SIGNS[product.hadamard.signs].drawn:
            raise NotApplicableError("the recipe draws the signs of its rotations")
    if recipe.products.backward_needs and recipe.fprop.hadamard is not None:
        raise NotApplicableError("the backward pass reads copies of the forward pass, which are rotated")
    if recipe.plain:
        raise NotApplicableError("the recipe quantises nothing")
    return recipe.products


def certain_gradient(bench: Examination, products: Products, tokens: int, out: int) -> Tensor:
    """Return a dy [tokens, out] whose rounding draws nothing: random if the recipe is not stochastic.
    NotApplicableError if the recipe leaves no such gradient."""
    cast = quantisers(products)
    slots = {slot: one for slot, one in cast.items() if slot.endswith(".g")}
    if any(quant.draws for slot, (quant, _) in cast.items() if slot not in slots):
        raise NotApplicableError("the recipe rounds x or w stochastically; see random_gradients")
    if not any(quant.draws for quant, _ in slots.values()):
        return 0.01 * inputs.normal(tokens, out, bench.seed + 2)
    if any(quant.draws and quant.rounding != "stochastic" for quant, _ in slots.values()):
        raise NotApplicableError("the recipe draws block scales as well")
    amax = inputs.exact_amax([*slots.values()])
    if amax is not None:
        dy = inputs.permuted_tiles(tokens, out, bench.seed, amax / 64)
        turned = {"dgrad.g": dy, "wgrad.g": dy.t()}
        if all(inputs.keeps(turned[slot], *one) for slot, one in slots.items()):
            return dy
    raise NotApplicableError("no gradient in bf16 is left unchanged by the recipe's rounding")


def side(bench: Examination, wanted: int) -> int:
    """Return a dimension of a layer that the subject takes, as rows and as columns."""
    step = math.lcm(bench.subject.rows, bench.subject.columns or 16)
    return -(-wanted // step) * step


def layer(
    bench: Examination,
    size: float = 1.0,
    seed: int = 0,
    sizes: tuple[int, int, int] = (TOKENS, IN, OUT),
    *,
    certain: bool = True,
) -> Layer:
    """Return a layer with random x and w, and a gradient that is random, or whose rounding draws nothing."""
    bench.function("product")
    tokens, inner, out = (side(bench, wanted) for wanted in sizes)
    dy = inputs.normal(tokens, out, bench.seed + 9)
    if certain:
        dy = certain_gradient(bench, products_of(bench), tokens, out)
    return Layer(
        bench.typed(size * inputs.normal(tokens, inner, bench.seed + seed)),
        bench.typed(0.02 * inputs.normal(out, inner, bench.seed + seed + 1)),
        bench.typed(size * dy),
    )


def call(
    bench: Examination, x: Tensor, w: Tensor, dy: Tensor, name: str = "product", *more: Tensor
) -> dict[str, Tensor]:
    """Call the subject's product. RefusedError if it raises or returns something else than y, dx, dw."""
    result = bench.call(name, x, w, dy, *more)
    shapes = {"y": (len(x), w.shape[-2]), "dx": tuple(x.shape), "dw": tuple(w.shape)}
    if not isinstance(result, tuple | list) or len(result) != len(shapes):
        raise RefusedError(f"{name} returned {type(result).__name__}, not y, dx and dw")
    made = {}
    for key, value in zip(shapes, result, strict=True):
        if not isinstance(value, Tensor) or tuple(value.shape) != shapes[key]:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise RefusedError(f"{name} returned {key} {shape}, not {list(shapes[key])}")
        made[key] = value.detach().cpu()
    return made


def judged(key: str, got: Tensor, exact: Exact, where: str = "") -> Row:
    """Return the row of one result, `y`, `dx` or `dw`: up to the order of fp32 additions, and one rounding.
    `where`: layer or expert in words, with a colon."""
    far = exact.far(got)
    row = of_elements(far, None, exact.values, got, f"{where}{key}: ")
    if row.outcome == Outcome.PASS:
        return row
    gain, error = gain_and_error(got, exact.values)
    return replace(
        row,
        stage=f"product: {key}, {wrong_product(exact, got, OPERANDS[key])}",
        detail=f"{where}{key} has a gain of {gain:.4f} and a relative L2 distance of {error:.4f} from the"
        " recipe's",
        wrong=wrong_numbers(f"{where}{key}", far, torch.full_like(got, math.nan), exact.values, got),
    )


def worst(rows: Sequence[Row]) -> Row:
    """Return one row of several: the first that failed, with the cases and differences of all."""
    failed = next((row for row in rows if row.outcome == Outcome.FAIL), rows[0])
    cases, differing = sum(row.cases for row in rows), sum(row.differing for row in rows)
    wrong = tuple(number for row in rows for number in row.wrong)
    return replace(failed, cases=cases, differing=differing, wrong=wrong)


def results(bench: Examination, given: Layer | Experts) -> Iterator[tuple[str, Layer, dict[str, Tensor]]]:
    """Call the subject; yield the layer, or each expert in words as a layer, with its y, dx and dw."""
    if isinstance(given, Layer):
        yield "", given.bf16, call(bench, *given)
        return
    got = call(bench, given.x, given.w, given.dy, "grouped", given.offsets)
    y, dx = (got[key].split(given.sizes) for key in ("y", "dx"))
    for expert, layer in enumerate(given.layers):
        mine = {"y": y[expert], "dx": dx[expert], "dw": got["dw"][expert]}
        yield f"expert {expert} of {given.sizes[expert]} tokens, ", layer, mine


def compared(
    make: Callable[[Examination], Iterable[tuple[str, Layer | Experts]]], *keys: str
) -> Callable[[Examination], Row]:
    """Return the comparison of results of layers, or of every expert, with the reference's: up to the order
    of fp32 additions, and one rounding."""

    def compare(bench: Examination) -> Row:
        products, rows = products_of(bench), []
        for where, given in make(bench):
            for place, layer, got in results(bench, given):
                # An expert without tokens has zeros.
                exact = exact_products(products, *layer) if len(layer.x) else plain_products(*layer)
                rows += [judged(key, got[key], exact[key], where + place) for key in keys]
        return worst(rows)

    return compare


def _only(key: str) -> Callable[[Examination], Row]:
    """Return the comparison of `y`, `dx` or `dw` of one layer, as `judged` compares. If no operand is shown
    to be wrong, a short contraction may show one."""

    def compare(bench: Examination) -> Row:
        row = compared(lambda bench: [("", layer(bench))], key)(bench)
        if "operand" in row.stage or row.outcome == Outcome.PASS:
            return row
        sizes = {"y": (240, 48, 144), "dx": (240, 144, 48), "dw": (48, 144, 240)}[key]
        given = layer(bench, sizes=sizes)
        exact = exact_products(products_of(bench), *given.bf16)[key]
        try:
            got = call(bench, *given)[key]
        except RefusedError:  # it may not take these sizes
            return row
        text = wrong_product(exact, got, OPERANDS[key]) if exact.far(got).any() else ""
        return replace(row, stage=f"product: {key}, {text}") if "operand" in text else row

    return compare


def random(make: Callable[[Examination], Layer | Experts]) -> Callable[[Examination], Row]:
    """Return the comparison of gain and relative L2 distance of dx and dw, for random dy, with the
    reference's draws."""

    def compare(bench: Examination) -> Row:
        products = products_of(bench)
        made = [*results(bench, make(bench))]
        row = worst([_in_interval(products, layer, got, where) for where, layer, got in made])
        if row.outcome == Outcome.FAIL and bench.declared_form == "nearest":
            nearest = rounded_to_nearest(products, ("dgrad.g", "wgrad.g"))
            exact = [(exact_products(nearest, *layer), got) for _, layer, got in made]
            if not any(bool(right[key].far(got[key]).any()) for right, got in exact for key in ("dx", "dw")):
                return Row("", Outcome.VARIANT, row.cases, detail="as declared: dy rounded to nearest")
        return row

    return compare


def _in_interval(products: Products, given: Layer, got: dict[str, Tensor], where: str) -> Row:
    """Compare gain and relative L2 distance with the reference's draws: eight standard deviations."""
    plain = plain_products(*given)
    drawn = [exact_products(products, *given, seed=seed) for seed in range(REFERENCE_DRAWS)]
    parts, wrong = [], []
    for key in ("dx", "dw"):
        figures = [gain_and_error(one[key].values, plain[key].values) for one in drawn]
        mine = gain_and_error(got[key], plain[key].values)
        for what, value, series in zip(
            ("gain", "relative L2"), mine, zip(*figures, strict=True), strict=True
        ):
            mean = sum(series) / len(series)
            spread = math.sqrt(sum((one - mean) ** 2 for one in series) / (len(series) - 1))
            # Where nothing is drawn: bf16 rounds results, by 2^-9 of each.
            allowed = SIGMAS * spread + 2.0**-9
            parts.append(f"{what} of {key} {value:.4f}")
            if not abs(value - mean) <= allowed:
                wrong.append(f"{where}{what} of {key} {value:.4f}, not {mean:.4f} +- {allowed:.4f}")
    return decided(4, len(wrong), detail="; ".join(wrong) or where + ", ".join(parts))


def _same_codes(bench: Examination) -> Row:
    """Compare W as y and as dx show it if x and dy are unit vectors, up to one rounding to bf16 in either."""
    bench.function("product")
    products = products_of(bench)
    w_quant, wt_quant = products.fprop.w, products.dgrad.w
    turned = products.fprop.hadamard or products.dgrad.hadamard
    if turned or w_quant is None or w_quant != wt_quant or w_quant.tile[0] == 1 or w_quant.draws:
        raise NotApplicableError("the recipe casts W for each product by itself")
    size = side(bench, 128)
    unit = bench.typed(torch.eye(size))
    got = call(bench, unit, bench.typed(0.02 * inputs.normal(size, size, bench.seed + 4)), unit)
    forward, backward = got["y"].t().double(), got["dx"].double()
    # Each reads one value; the two may round it to bf16 after another order of the scales.
    differ = ~((forward - backward).abs() <= 2.0**-7 * forward.abs())
    detail = "W differs in the two products" if differ.any() else ""
    return decided(differ.numel(), int(differ.sum()), detail=detail)


def _views(bench: Examination) -> Iterator[tuple[str, Layer]]:
    given = layer(bench)
    yield "transposed views, ", Layer(*(z.t().contiguous().t() for z in given))
    products = products_of(bench)
    if not any(quant is not None and quant.draws for quant in (products.dgrad.g, products.wgrad.g)):
        yield "dy.expand, ", given._replace(dy=bench.typed(torch.ones(())).expand(given.dy.shape))


def _magnitudes(bench: Examination) -> Iterator[tuple[str, Layer]]:
    """Make tensors of 1e-20 and of 1e10, each with a dy of ordinary size, of which bf16 keeps dw in full."""
    dy = layer(bench).dy
    for size in (1e-20, 1e10):
        yield f"at {size:g}, ", layer(bench, size)._replace(dy=dy)


def _repeats(bench: Examination) -> Row:
    """Compare products of the same tensors, with other tensors between, exactly."""
    given, other = layer(bench), layer(bench, 100.0, 5)
    return repeated(lambda: [*call(bench, *given).values()], lambda: call(bench, *other), every=5)


def _sums(lengths: Sequence[int], positive: bool = False) -> Callable[[Examination], Row]:
    """Return the comparison of sums of several lengths, as `judged` compares; `positive`: terms of one sign,
    whose partial sums grow."""

    def compare(bench: Examination) -> Row:
        rows = []
        for length in lengths:
            for key, sizes in (("y", (32, length, 32)), ("dx", (32, 32, length)), ("dw", (length, 32, 32))):
                given = layer(bench, sizes=sizes)
                given = Layer(*(z.abs() for z in given)) if positive else given
                exact = exact_products(products_of(bench), *given.bf16)[key]
                rows.append(judged(key, call(bench, *given)[key], exact, f"{exact.terms:,} terms, "))
        return worst(rows)

    return compare


PROPERTIES = (
    Property("forward_product", "product", _only("y")),
    Property("input_gradient", "product", _only("dx")),
    Property("weight_gradient", "product", _only("dw")),
    Property("random_gradients", "product", random(lambda bench: layer(bench, certain=False))),
    Property("same_weight_codes", "product", _same_codes),
    Property("product_strides", "product", compared(_views, *NAMES)),
    Property("small_products", "product", compared(_magnitudes, *NAMES)),
    Property("product_repeats", "product", _repeats),
    Property("long_sums", "product", _sums((2048,), positive=True)),
    Property("contraction_sizes", "product", _sums(CONTRACTIONS)),
)
