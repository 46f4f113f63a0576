"""Grouped products: every expert's y, dx and dw as if it were a layer of its own.

The fault that led here: the scales of the transposed copies were laid out over all tokens, and each expert's
product read them as if they were its own. y and dx were right, every dw was 12 % too small, and two tests let
it through. One group shows nothing, nor does a layer of 128 features or fewer.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ablate.training.operand_errors import sources
from ablate.verification.conformance import inputs
from ablate.verification.conformance.examination import (
    Examination,
    NotApplicableError,
    Property,
    RefusedError,
)
from ablate.verification.conformance.properties.product import (
    NAMES,
    Experts,
    certain_gradient,
    compared,
    judged,
    products_of,
    random,
    results,
    side,
    worst,
)
from ablate.verification.conformance.reference_product import (
    exact_products,
    plain_products,
    quantisers,
)
from ablate.verification.conformance.result import Row

ALIGNED = (64, 128, 64)
UNALIGNED = (48, 80, 16, 112)
RAGGED = (0, 1, 15, 16, 17, 0, 33)
LARGE = (128, 256, 0, 128)
PADDED = (48, 16, 80)
WIDTHS = (96, 144)
"""Outputs that are not a multiple of 128, so that an expert's scales have padding."""
IN, OUT = 160, 256
"""Features beyond 128: the transposed copies then have two tiles of 128 rows of scales."""


def given_experts(
    bench: Examination, wanted: Sequence[int], dy: Tensor | None = None, width: int = OUT
) -> Experts:
    """Return a layer of experts with these numbers of tokens, or the next that the subject takes."""
    bench.function("grouped")
    sizes = [bench.rows(size) if size else 0 for size in wanted]
    tokens, inner, out = sum(sizes), side(bench, IN), side(bench, width)
    if dy is None:
        products = products_of(bench)
        parts = [certain_gradient(bench, products, size, out) for size in sizes if size]
        dy = torch.cat(parts) if parts else torch.zeros(0, out)
    w = torch.stack([0.02 * inputs.normal(out, inner, bench.seed + 40 + e) for e in range(len(sizes))])
    x = inputs.normal(tokens, inner, bench.seed + 30)
    for number, part in enumerate(x.split(sizes)):  # each expert has its own magnitude, and second level
        part *= 2.0 ** (number % 3)
    return _experts(bench, x, w, dy, sizes)


def _experts(bench: Examination, x: Tensor, w: Tensor, dy: Tensor, sizes: list[int]) -> Experts:
    offsets = torch.tensor(sizes).cumsum(0).to(torch.int32)
    return Experts(bench.typed(x), bench.typed(w), bench.typed(dy), offsets, sizes)


def _layers(
    keys: Sequence[str], *wanted: tuple[int, ...], widths: Sequence[int] = (OUT,)
) -> Callable[[Examination], Row]:
    """Return the comparison of results of layers of experts with these numbers of tokens, for each number of
    outputs."""
    return compared(
        lambda bench: [
            ("", given_experts(bench, sizes, width=width)) for sizes in wanted for width in widths
        ],
        *keys,
    )


def _in_fp32(bench: Examination) -> Row:
    """Compare what bf16 numbers give as fp32, rounded to bf16. A subject may refuse fp32."""
    products, rows = products_of(bench), []
    pairs = zip(NAMES, (products.fprop, products.dgrad, products.wgrad), strict=True)
    # What a rotation gives is rounded to the dtype of its input, so that fp32 may differ there.
    keys = [key for key, product in pairs if product.hadamard is None]
    if not keys:
        raise NotApplicableError("the recipe rotates every product")
    given = given_experts(bench, PADDED, width=WIDTHS[0])
    given = given._replace(
        **{name: bench.typed(getattr(given, name), "float32") for name in ("x", "w", "dy")}
    )
    try:
        made = [*results(bench, given)]
    except RefusedError:
        raise NotApplicableError("the subject's grouped takes no fp32") from None
    for where, layer, mine in made:
        exact = exact_products(products, *layer)
        rows += [judged(key, mine[key].bfloat16(), exact[key], where) for key in keys]
    return worst(rows)


def _exact(bench: Examination) -> Row:
    """Compare with the exact product of tensors that no rounding changes, every block of which has another
    scale, to the last addition. This needs no reference: x, w and dy are exact in the format, so that dw is
    dy^T x."""
    products, rows = products_of(bench), []
    bench.function("grouped")
    cast = quantisers(products)
    amax = inputs.exact_amax([*cast.values()])
    if amax is None:
        raise NotApplicableError("no tensor in bf16 is left unchanged by all of the recipe's casts")
    sizes = [bench.rows(size) for size in ALIGNED]
    inner, out = side(bench, IN), side(bench, OUT)

    def tiles(rows: int, columns: int, seed: int) -> Tensor:
        return inputs.permuted_tiles(rows, columns, bench.seed + seed, amax, 7)

    x, dy = (
        torch.cat([tiles(size, wide, 7 * e + wide) for e, size in enumerate(sizes)]) for wide in (inner, out)
    )
    w = torch.stack([tiles(out, inner, 50 + e) for e in range(len(sizes))])
    experts = _experts(bench, x, w, dy, sizes)
    for layer in experts.layers:
        if not all(inputs.keeps(z, *cast[slot]) for slot, z in sources(*layer).items() if slot in cast):
            raise NotApplicableError("no tensor in bf16 is left unchanged by all of the recipe's casts")
    for where, layer, mine in results(bench, experts):
        plain, made = plain_products(*layer), exact_products(products, *layer)
        # Terms that cancel after a rotation leave the roundings of their sum.
        exact = {key: replace(plain[key], magnitudes=made[key].magnitudes) for key in NAMES}
        rows += [judged(key, mine[key], exact[key], where) for key in NAMES]
    return worst(rows)


def _random_experts(bench: Examination) -> Experts:
    tokens = sum(bench.rows(size) for size in ALIGNED)
    return given_experts(bench, ALIGNED, 0.01 * inputs.normal(tokens, side(bench, OUT), bench.seed + 60))


PROPERTIES = (
    Property("grouped_forward", "grouped", _layers(["y"], ALIGNED)),
    Property("grouped_input_gradient", "grouped", _layers(["dx"], ALIGNED)),
    Property("grouped_weight_gradient", "grouped", _layers(["dw"], ALIGNED, LARGE)),
    Property("grouped_unaligned", "grouped", _layers(NAMES, UNALIGNED)),
    Property("grouped_ragged", "grouped", _layers(NAMES, RAGGED)),
    Property("grouped_all_to_one", "grouped", _layers(NAMES, (0, 192, 0))),
    Property("grouped_widths", "grouped", _layers(NAMES, PADDED, widths=WIDTHS)),
    Property("grouped_fp32", "grouped", _in_fp32),
    Property("grouped_layout", "grouped", _exact),
    Property("grouped_random", "grouped", random(_random_experts)),
)
