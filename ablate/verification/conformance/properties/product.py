"""Products of a linear layer: y, dx and dw.

Gradients are rounded stochastically in many recipes, and no two libraries draw the same bits. Two ways
around: an output gradient on which there is nothing to round, so that dx and dw are fixed to the last bit;
and for random gradients the interval that the reference's own draws give.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ablate.numerics.choices import SIGNS
from ablate.numerics.spec import Hadamard, Quant
from ablate.recipes.recipe import Products
from ablate.verification.conformance import inputs
from ablate.verification.conformance.examination import Examination, NotApplicableError, RefusedError
from ablate.verification.conformance.properties.property import Property
from ablate.verification.conformance.reference_product import (
    OPERANDS,
    Exact,
    exact_products,
    gain_and_error,
    plain_products,
)
from ablate.verification.conformance.result import Block, Outcome, Row, Wrong
from ablate.verification.conformance.stages.products import wrong_product

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


def products_of(bench: Examination) -> Products:
    """Return the recipe's products. NotApplicableError if the kit has no reference of them."""
    recipe = bench.recipe
    for product in (recipe.fprop, recipe.dgrad, recipe.wgrad):
        for operand in product.operands:
            quant: Quant | None = getattr(product, operand)
            if quant is not None and (quant.transform or quant.estimator):
                raise NotApplicableError("the recipe's operands depend on more than x, w and dy")
        if product.hadamard is not None and SIGNS[product.hadamard.signs].drawn:
            raise NotApplicableError("the recipe draws the signs of its rotations")
    if recipe.products.backward_needs and recipe.fprop.hadamard is not None:
        raise NotApplicableError("the backward pass reads copies of the forward pass, which are rotated")
    if recipe.plain:
        raise NotApplicableError("the recipe quantises nothing")
    return Products(fprop=recipe.fprop, dgrad=recipe.dgrad, wgrad=recipe.wgrad)


def gradient_slots(products: Products) -> list[tuple[Quant, Hadamard | None]]:
    """Return the quantisers of dy, each with the rotation of its product."""
    pairs = ((products.dgrad.g, products.dgrad.hadamard), (products.wgrad.g, products.wgrad.hadamard))
    return [(quant, rotation) for quant, rotation in pairs if quant is not None]


def certain_gradient(bench: Examination, products: Products, tokens: int, out: int) -> Tensor:
    """Return a dy [tokens, out] whose rounding draws nothing: random if the recipe is not stochastic.

    Raises:
        NotApplicableError: the recipe leaves no such gradient.
    """
    slots = gradient_slots(products)
    others = (products.fprop.x, products.fprop.w, products.dgrad.w, products.wgrad.x)
    if any(quant is not None and quant.draws for quant in others):
        raise NotApplicableError("the recipe rounds x or w stochastically; see random_gradients")
    if not any(quant.draws for quant, _ in slots):
        return 0.01 * inputs.normal(tokens, out, bench.seed + 2)
    if any(quant.draws and quant.rounding != "stochastic" for quant, _ in slots):
        raise NotApplicableError("the recipe draws block scales as well")
    amax = inputs.exact_amax(slots)
    if amax is None:
        raise NotApplicableError("no gradient in bf16 is left unchanged by the recipe's rounding")
    dy = inputs.permuted_tiles(tokens, out, bench.seed, amax / 64)
    turned = (
        (products.dgrad.g, products.dgrad.hadamard, dy),
        (products.wgrad.g, products.wgrad.hadamard, dy.t()),
    )
    if not all(quant is None or inputs.keeps(z, quant, rotation) for quant, rotation, z in turned):
        raise NotApplicableError("no gradient in bf16 is left unchanged by the recipe's rounding")
    return dy


def side(bench: Examination, wanted: int) -> int:
    """Return a dimension of a layer that the subject takes, as rows and as columns."""
    step = math.lcm(bench.subject.rows, bench.subject.columns or 16)
    return -(-wanted // step) * step


def layer(
    bench: Examination, size: float = 1.0, seed: int = 0, sizes: tuple[int, int, int] = (TOKENS, IN, OUT)
) -> Layer:
    """Return a layer with random x and w, and a gradient whose rounding draws nothing."""
    bench.function("product")
    tokens, inner, out = (side(bench, wanted) for wanted in sizes)
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


def judged(name: str, key: str, got: Tensor, exact: Exact, where: str = "") -> Row:
    """Return the row of one result: up to the order of fp32 additions, and one rounding.

    Args:
        name: Property.
        key: `y`, `dx` or `dw`.
        got: The subject's result.
        exact: The reference's.
        where: Layer or expert in words, with a colon.
    """
    far = exact.far(got)
    if not far.any():
        return Row(name, Outcome.PASS, far.numel())
    row, column = (int(i) for i in far.nonzero()[0])
    one, other = float(exact.values[row, column]), float(got[row, column])
    block = Block(f"{where}{key}: row {row}, column {column}", (), (one,), (other,))
    gain, error = gain_and_error(got, exact.values)
    wrong = tuple(
        Wrong(f"{where}{key}", i, j, math.nan, float(exact.values[i, j]), float(got[i, j]))
        for i, j in far.nonzero().tolist()
    )
    return Row(
        name,
        Outcome.FAIL,
        far.numel(),
        int(far.sum()),
        block,
        f"product: {key}, {wrong_product(exact, got, OPERANDS[key])}",
        f"{where}{key} has a gain of {gain:.4f} and a relative L2 distance of {error:.4f} from the recipe's",
        wrong,
    )


def worst(name: str, rows: Sequence[Row]) -> Row:
    """Return one row of several: the first that failed, with the cases and differences of all."""
    failed = next((row for row in rows if row.outcome == Outcome.FAIL), rows[0])
    cases, differing = sum(row.cases for row in rows), sum(row.differing for row in rows)
    wrong = tuple(number for row in rows for number in row.wrong)
    return replace(failed, property=name, cases=cases, differing=differing, wrong=wrong)


def _multiplied(bench: Examination, one: Property, given: Layer, where: str = "") -> dict[str, Row]:
    """Return the rows of y, dx and dw of one layer."""
    got, exact = call(bench, *given), exact_products(products_of(bench), *given.bf16)
    return {key: judged(one.name, key, got[key], exact[key], where) for key in NAMES}


def _only(key: str) -> Callable[[Examination, Property], Row]:
    """Return the comparison of `y`, `dx` or `dw` of one layer, as `judged` compares."""

    def compare(bench: Examination, one: Property) -> Row:
        row = _multiplied(bench, one, one.inputs(bench))[key]
        if "operand" in row.stage or row.outcome == Outcome.PASS:
            return row
        return replace(row, stage=_of_operand(bench, key) or row.stage)

    return compare


def _of_operand(bench: Examination, key: str) -> str:
    """Return which operand of a product is not the recipe's, by a short contraction that shows it; or ''."""
    sizes = {"y": (240, 48, 144), "dx": (240, 144, 48), "dw": (48, 144, 240)}[key]
    given = layer(bench, sizes=sizes)
    exact = exact_products(products_of(bench), *given.bf16)[key]
    got = call(bench, *given)[key]
    text = wrong_product(exact, got, OPERANDS[key]) if exact.far(got).any() else ""
    return f"product: {key}, {text}" if "operand" in text else ""


def _all(bench: Examination, one: Property) -> Row:
    """Compare y, dx and dw of several layers, as `judged` compares."""
    rows = [_multiplied(bench, one, given, where) for where, given in one.inputs(bench).items()]
    return worst(one.name, [row for layers in rows for row in layers.values()])


# --- random gradients -----


def random_layer(bench: Examination) -> Layer:
    """Return random x, w and dy."""
    bench.function("product")
    tokens, inner, out = (side(bench, wanted) for wanted in (TOKENS, IN, OUT))
    return Layer(
        bench.typed(inputs.normal(tokens, inner, bench.seed)),
        bench.typed(0.02 * inputs.normal(out, inner, bench.seed + 1)),
        bench.typed(inputs.normal(tokens, out, bench.seed + 9)),
    )


def _random_gradients(bench: Examination, one: Property) -> Row:
    """Compare gain and relative L2 distance of dx and dw, for random dy, with the reference's draws."""
    given, products = one.inputs(bench), products_of(bench)
    got = call(bench, *given)
    row = interval_row(one.name, products, given.bf16, got)
    if row.outcome == Outcome.FAIL and bench.subject.variants.get(one.name) == "nearest":
        made = exact_products(rounded_to_nearest(products), *given.bf16)
        if not any(bool(made[key].far(got[key]).any()) for key in ("dx", "dw")):
            return Row(one.name, Outcome.VARIANT, 4, detail="as declared: dy rounded to nearest")
    return row


def rounded_to_nearest(products: Products) -> Products:
    """Return the products with dy rounded to nearest, where the recipe rounds it stochastically."""
    for name, quant in (("dgrad", products.dgrad), ("wgrad", products.wgrad)):
        if quant.g is not None and quant.g.rounding == "stochastic":
            certain = quant.g.model_copy(update={"rounding": "nearest", "bits": 8})
            products = products.model_copy(update={name: quant.model_copy(update={"g": certain})})
    return products


def interval_row(
    name: str,
    products: Products,
    given: tuple[Tensor, Tensor, Tensor],
    got: dict[str, Tensor],
    where: str = "",
) -> Row:
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
    detail = "; ".join(wrong) if wrong else where + ", ".join(parts)
    return Row(name, Outcome.FAIL if wrong else Outcome.PASS, 4, len(wrong), detail=detail)


# --- other inputs -----


def _weights(bench: Examination) -> Layer:
    """Make a layer whose x and dy are unit vectors, so that y and dx show W."""
    bench.function("product")
    products = products_of(bench)
    w_quant, wt_quant = products.fprop.w, products.dgrad.w
    turned = products.fprop.hadamard or products.dgrad.hadamard
    if turned or w_quant is None or w_quant != wt_quant or w_quant.tile[0] == 1 or w_quant.draws:
        raise NotApplicableError("the recipe casts W for each product by itself")
    size = side(bench, 128)
    unit = bench.typed(torch.eye(size))
    return Layer(unit, bench.typed(0.02 * inputs.normal(size, size, bench.seed + 4)), unit)


def _same_codes(bench: Examination, one: Property) -> Row:
    """Compare W as y and as dx show it, up to one rounding to bf16 in either."""
    got = call(bench, *one.inputs(bench))
    forward, backward = got["y"].t().double(), got["dx"].double()
    # Each reads one value; the two may round it to bf16 after another order of the scales.
    differ = (forward - backward).abs() > 2.0**-7 * forward.abs()
    detail = "W differs in the two products" if differ.any() else ""
    outcome = Outcome.FAIL if differ.any() else Outcome.PASS
    return Row(one.name, outcome, differ.numel(), int(differ.sum()), detail=detail)


def _views(bench: Examination) -> dict[str, Layer]:
    given = layer(bench)
    made = {"transposed views, ": Layer(*(z.t().contiguous().t() for z in given))}
    if not any(quant.draws for quant, _ in gradient_slots(products_of(bench))):
        ones = bench.typed(torch.ones(())).expand(given.dy.shape)
        made["dy.expand, "] = given._replace(dy=ones)
    return made


def _magnitudes(bench: Examination) -> dict[str, Layer]:
    """Make tensors of 1e-20 and of 1e10, each with a dy of ordinary size, of which bf16 keeps dw in full."""
    dy = layer(bench).dy
    return {f"at {size:g}, ": layer(bench, size)._replace(dy=dy) for size in (1e-20, 1e10)}


def _repeats(bench: Examination, one: Property) -> Row:
    """Compare 20 products of the same tensors, with other tensors between, exactly."""
    given, other = one.inputs(bench), layer(bench, 100.0, 5)
    first, differ = call(bench, *given), 0
    for number in range(20):
        if number % 5 == 0:
            call(bench, *other)
        again = call(bench, *given)
        differ += sum(int((again[key] != first[key]).sum()) for key in NAMES)
    cases = 20 * sum(first[key].numel() for key in NAMES)
    return Row(one.name, Outcome.FAIL if differ else Outcome.PASS, cases, differ)


def _lengths(
    lengths: Sequence[int], positive: bool = False
) -> Callable[[Examination], Iterator[tuple[str, Layer]]]:
    """Return inputs whose contractions have these lengths: the product, and its layer; `positive`: terms of
    one sign, whose partial sums grow."""

    def made(bench: Examination) -> Iterator[tuple[str, Layer]]:
        for length in lengths:
            for key, sizes in (("y", (32, length, 32)), ("dx", (32, 32, length)), ("dw", (length, 32, 32))):
                given = layer(bench, sizes=sizes)
                yield key, Layer(*(z.abs() for z in given)) if positive else given

    return made


def _sums(bench: Examination, one: Property) -> Row:
    """Compare sums of several lengths, as `judged` compares."""
    rows = []
    for key, given in one.inputs(bench):
        exact = exact_products(products_of(bench), *given.bf16)[key]
        got = call(bench, *given)[key]
        rows.append(judged(one.name, key, got, exact, f"{exact.terms:,} terms, "))
    return worst(one.name, rows)


PROPERTIES = (
    Property("forward_product", layer, "product", _only("y")),
    Property("input_gradient", layer, "product", _only("dx")),
    Property("weight_gradient", layer, "product", _only("dw")),
    Property("random_gradients", random_layer, "product", _random_gradients),
    Property("same_weight_codes", _weights, "product", _same_codes),
    Property("product_strides", _views, "product", _all),
    Property("small_products", _magnitudes, "product", _all),
    Property("product_repeats", layer, "product", _repeats),
    Property("long_sums", _lengths((2048,), positive=True), "product", _sums),
    Property("contraction_sizes", _lengths(CONTRACTIONS), "product", _sums),
)
