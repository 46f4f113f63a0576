"""Products of a linear layer: y, dx and dw.

Gradients are rounded stochastically in many recipes, and no two libraries draw the same bits. Two ways
around: an output gradient on which there is nothing to round, so that dx and dw are fixed to the last bit;
and for random gradients the interval that the reference's own draws give.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ablate.numerics.choices import SIGNS
from ablate.numerics.spec import Hadamard, Quant
from ablate.recipes.recipe import Products
from ablate.verification.conformance import inputs
from ablate.verification.conformance.examination import Examination, NotApplicableError, RefusedError
from ablate.verification.conformance.properties.property import Property
from ablate.verification.conformance.reference_product import (
    Exact,
    exact_products,
    gain_and_error,
    plain_products,
)
from ablate.verification.conformance.result import Block, Outcome, Row

BOUND = "the order of fp32 additions, and one rounding of the result"
INTERVAL = "eight standard deviations of the reference's own 12 draws"
REFERENCE_DRAWS, SIGMAS = 12, 8.0
NAMES = ("y", "dx", "dw")
TOKENS, IN, OUT = 96, 160, 144
LONG = (2048,)
CONTRACTIONS = (16, 48, 80, 272, 336, 528, 656, 784, 1104, 1168, 1552, 2320)
"""Terms of a sum: on both sides of multiples of 32 to 512."""


@dataclass(frozen=True)
class Layer:
    """Tensors of one linear layer, in a dtype that the subject takes."""

    x: Tensor
    w: Tensor
    dy: Tensor


Summed = tuple[str, Layer, Tensor, Exact]
"""`y`, `dx` or `dw`; its layer; the subject's result; the reference's."""


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


def judged(name: str, got: Tensor, exact: Exact, where: str = "") -> Row:
    """Return the row of one result beside the reference's."""
    far = exact.far(got)
    if not far.any():
        return Row(name, Outcome.PASS, far.numel())
    row, column = (int(i) for i in far.nonzero()[0])
    block = Block(
        f"{where}row {row}, column {column}",
        (),
        (float(exact.values[row, column]),),
        (float(got[row, column]),),
    )
    gain, error = gain_and_error(got, exact.values)
    detail = f"{where}gain {gain:.4f}, relative L2 distance {error:.4f} from the recipe's result"
    return Row(name, Outcome.FAIL, far.numel(), int(far.sum()), block, detail=detail)


def _one(bench: Examination, name: str, key: str) -> Row:
    bench.function("product")
    given = layer(bench)
    got = call(bench, given.x, given.w, given.dy)
    exact = exact_products(products_of(bench), *_bf16(given))
    return judged(name, got[key], exact[key])


def _bf16(given: Layer) -> tuple[Tensor, Tensor, Tensor]:
    return given.x.bfloat16(), given.w.bfloat16(), given.dy.bfloat16()


def forward_product(bench: Examination) -> Row:
    """Compare y = x w^T of random x and w."""
    return _one(bench, "forward_product", "y")


def input_gradient(bench: Examination) -> Row:
    """Compare dx = dy w for a dy that rounding does not change."""
    return _one(bench, "input_gradient", "dx")


def weight_gradient(bench: Examination) -> Row:
    """Compare dw = dy^T x for a dy that rounding does not change, rotated or not."""
    return _one(bench, "weight_gradient", "dw")


def random_gradients(bench: Examination) -> Row:
    """Compare gain and relative L2 distance of dx and dw, for random dy, with the reference's draws."""
    bench.function("product")
    products = products_of(bench)
    x, w, dy = random_layer(bench)
    got = call(bench, x, w, dy)
    given = (x.bfloat16(), w.bfloat16(), dy.bfloat16())
    row = interval_row("random_gradients", products, given, got)
    if row.outcome == Outcome.FAIL and bench.subject.variants.get("random_gradients") == "nearest":
        made = exact_products(rounded_to_nearest(products), *given)
        if not any(bool(made[key].far(got[key]).any()) for key in ("dx", "dw")):
            return Row("random_gradients", Outcome.VARIANT, 4, detail="as declared: dy rounded to nearest")
    return row


def rounded_to_nearest(products: Products) -> Products:
    """Return the products with dy rounded to nearest, where the recipe rounds it stochastically."""
    for name, quant in (("dgrad", products.dgrad), ("wgrad", products.wgrad)):
        if quant.g is not None and quant.g.rounding == "stochastic":
            certain = quant.g.model_copy(update={"rounding": "nearest", "bits": 8})
            products = products.model_copy(update={name: quant.model_copy(update={"g": certain})})
    return products


def random_layer(bench: Examination) -> tuple[Tensor, Tensor, Tensor]:
    """Return random x, w and dy."""
    tokens, inner, out = (side(bench, wanted) for wanted in (TOKENS, IN, OUT))
    x = bench.typed(inputs.normal(tokens, inner, bench.seed))
    w = bench.typed(0.02 * inputs.normal(out, inner, bench.seed + 1))
    dy = bench.typed(inputs.normal(tokens, out, bench.seed + 9))
    return x, w, dy


def interval_row(
    name: str,
    products: Products,
    given: tuple[Tensor, Tensor, Tensor],
    got: dict[str, Tensor],
    where: str = "",
) -> Row:
    """Compare gain and relative L2 distance from fp64 with the interval of the reference's draws."""
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


def same_weight_codes(bench: Examination) -> Row:
    """Read W out of y and out of dx by unit vectors: both products use the same codes."""
    bench.function("product")
    products = products_of(bench)
    w_quant, wt_quant = products.fprop.w, products.dgrad.w
    turned = products.fprop.hadamard or products.dgrad.hadamard
    if turned or w_quant is None or w_quant != wt_quant or w_quant.tile[0] == 1 or w_quant.draws:
        raise NotApplicableError("the recipe casts W for each product by itself")
    size = side(bench, 128)
    w = bench.typed(0.02 * inputs.normal(size, size, bench.seed + 4))
    unit = bench.typed(torch.eye(size))
    got = call(bench, unit, w, unit)
    forward, backward = got["y"].t().double(), got["dx"].double()
    # Each reads one value; the two may round it to bf16 after another order of the scales.
    differ = (forward - backward).abs() > 2.0**-7 * forward.abs()
    detail = "W differs in the two products" if differ.any() else ""
    outcome = Outcome.FAIL if differ.any() else Outcome.PASS
    return Row("same_weight_codes", outcome, differ.numel(), int(differ.sum()), detail=detail)


def product_strides(bench: Examination) -> Row:
    """Hand in transposed and expanded tensors: the result of their contiguous copies."""
    bench.function("product")
    given = layer(bench)
    views = Layer(given.x.t().contiguous().t(), given.w.t().contiguous().t(), given.dy.t().contiguous().t())
    got = call(bench, views.x, views.w, views.dy)
    exact = exact_products(products_of(bench), *_bf16(given))
    rows = [judged("product_strides", got[key], exact[key], f"{key}: ") for key in NAMES]
    products = products_of(bench)
    if not any(quant.draws for quant, _ in gradient_slots(products)):
        ones = bench.typed(torch.ones(())).expand(given.dy.shape)
        got = call(bench, given.x, given.w, ones)
        exact = exact_products(products, given.x.bfloat16(), given.w.bfloat16(), ones.bfloat16().contiguous())
        rows += [judged("product_strides", got[key], exact[key], f"{key} of dy.expand: ") for key in NAMES]
    return worst("product_strides", rows)


def small_products(bench: Examination) -> Row:
    """Multiply tensors of 1e-20 and of 1e10: nothing underflows or overflows on the way."""
    bench.function("product")
    rows = []
    for size in (1e-20, 1e10):
        given = layer(bench, size)
        if size < 1:  # dw is of size 1e-40, below what bf16 keeps in full, if both are small
            given = Layer(given.x, given.w, layer(bench).dy)
        else:
            given = Layer(given.x, given.w, layer(bench).dy)
        got = call(bench, given.x, given.w, given.dy)
        exact = exact_products(products_of(bench), *_bf16(given))
        rows += [judged("small_products", got[key], exact[key], f"{key} at {size:g}: ") for key in NAMES]
    return worst("small_products", rows)


def product_repeats(bench: Examination) -> Row:
    """Multiply the same tensors 20 times, with other tensors between: the same bits."""
    bench.function("product")
    given, other = layer(bench), layer(bench, 100.0, 5)
    first = call(bench, given.x, given.w, given.dy)
    differ = 0
    for number in range(20):
        if number % 5 == 0:
            call(bench, other.x, other.w, other.dy)
        again = call(bench, given.x, given.w, given.dy)
        differ += sum(int((again[key] != first[key]).sum()) for key in NAMES)
    cases = 20 * sum(first[key].numel() for key in NAMES)
    return Row("product_repeats", Outcome.FAIL if differ else Outcome.PASS, cases, differ)


def summed(bench: Examination, lengths: Sequence[int]) -> Iterator[Summed]:
    """Yield results whose contractions have these lengths: name, layer, the subject's and the reference's."""
    bench.function("product")
    for length in lengths:
        for key, sizes in (("y", (32, length, 32)), ("dx", (32, 32, length)), ("dw", (length, 32, 32))):
            given = layer(bench, sizes=sizes)
            if length in LONG:  # terms of one sign, whose partial sums grow
                given = Layer(given.x.abs(), given.w.abs(), given.dy.abs())
            got = call(bench, given.x, given.w, given.dy)
            yield key, given, got[key], exact_products(products_of(bench), *_bf16(given))[key]


def _of_lengths(bench: Examination, name: str, lengths: Sequence[int]) -> Row:
    rows = [
        judged(name, got, exact, f"{key} of {exact.terms:,} terms: ")
        for key, _, got, exact in summed(bench, lengths)
    ]
    return worst(name, rows)


def long_sums(bench: Examination) -> Row:
    """Sum 2,048 terms of one sign: partial sums that are rounded to bf16 differ by more than fp32's order."""
    return _of_lengths(bench, "long_sums", LONG)


def contraction_sizes(bench: Examination) -> Row:
    """Sum other numbers of terms, most of which leave a part behind whole tiles of 32 to 256."""
    return _of_lengths(bench, "contraction_sizes", CONTRACTIONS)


def worst(name: str, rows: list[Row]) -> Row:
    """Return one row of several: the first that failed, with the cases and differences of all."""
    failed = next((row for row in rows if row.outcome == Outcome.FAIL), rows[0])
    cases, differing = sum(row.cases for row in rows), sum(row.differing for row in rows)
    return Row(name, failed.outcome, cases, differing, failed.block, failed.fault, failed.detail)


PROPERTIES = (
    Property(
        "forward_product",
        "y is the product of the recipe's operands, rounded once.",
        BOUND,
        "product",
        (11, 16),
        forward_product,
    ),
    Property(
        "input_gradient",
        "dx is the product of the recipe's operands, rounded once.",
        BOUND,
        "product",
        (25, 29),
        input_gradient,
    ),
    Property(
        "weight_gradient",
        "dw is the product of the recipe's operands, rotated alike, rounded once.",
        BOUND,
        "product",
        (1, 24, 29),
        weight_gradient,
    ),
    Property(
        "random_gradients",
        "Gain and error of dx and dw against fp64 are those of the recipe.",
        INTERVAL,
        "product",
        (2, 3, 29),
        random_gradients,
    ),
    Property(
        "same_weight_codes",
        "y and dx use one quantised W.",
        "one rounding to bf16 in either",
        "product",
        (25,),
        same_weight_codes,
    ),
    Property(
        "product_strides",
        "Views that are not contiguous give what their copies give.",
        BOUND,
        "product",
        (30,),
        product_strides,
    ),
    Property(
        "small_products",
        "Products of tensors of 1e-20 and of 1e10 are as exact as others.",
        BOUND,
        "product",
        (14, 16),
        small_products,
    ),
    Property(
        "product_repeats",
        "The same tensors give the same bits, 20 times.",
        "exact",
        "product",
        (22,),
        product_repeats,
    ),
    Property(
        "long_sums",
        "Long sums are accumulated in fp32.",
        BOUND,
        "product",
        (16,),
        long_sums,
    ),
    Property(
        "contraction_sizes",
        "Sums of 16 to 2,320 terms are whole, also behind the last tile.",
        BOUND,
        "product",
        (26, 27),
        contraction_sizes,
    ),
)
