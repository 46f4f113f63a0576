"""Grouped products: every expert's y, dx and dw as if it were a layer of its own.

The fault that led here: the scales of the transposed copies were laid out over all tokens, and each expert's
product read them as if they were its own. y and dx were right, every dw was 12 % too small, and two tests let
it through. One group shows nothing, nor does a layer of 128 features or fewer.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ablate.recipes.recipe import Products
from ablate.verification.conformance import inputs
from ablate.verification.conformance.examination import Examination, NotApplicableError, RefusedError
from ablate.verification.conformance.properties.product import (
    BOUND,
    INTERVAL,
    NAMES,
    call,
    certain_gradient,
    interval_row,
    judged,
    products_of,
    side,
    worst,
)
from ablate.verification.conformance.properties.property import Property
from ablate.verification.conformance.reference_product import Exact, exact_products, plain_products
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


def _sizes(bench: Examination, wanted: tuple[int, ...]) -> list[int]:
    """Return the experts' tokens, as multiples that the subject takes."""
    return [bench.rows(size) if size else 0 for size in wanted]


def given_experts(
    bench: Examination, sizes: list[int], dy: Tensor | None = None, width: int = OUT, inner: int = IN
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, w, dy and the int32 offsets of a layer of experts with these numbers of tokens."""
    tokens, inner, out = sum(sizes), side(bench, inner), side(bench, width)
    if dy is None:
        products = products_of(bench)
        parts = [certain_gradient(bench, products, size, out) for size in sizes if size]
        dy = torch.cat(parts) if parts else torch.zeros(0, out)
    w = torch.stack([0.02 * inputs.normal(out, inner, bench.seed + 40 + e) for e in range(len(sizes))])
    x = inputs.normal(tokens, inner, bench.seed + 30)
    start = 0
    for number, size in enumerate(sizes):  # experts of other magnitudes: each has its own second level
        x[start : start + size] *= 2.0 ** (number % 3)
        start += size
    offsets = torch.tensor(sizes).cumsum(0).to(torch.int32)
    return bench.typed(x), bench.typed(w), bench.typed(dy), offsets


def experts_of(x: Tensor, w: Tensor, dy: Tensor, sizes: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return x, w and dy of each expert, in bf16."""
    pieces = zip(x.bfloat16().split(sizes), w.bfloat16(), dy.bfloat16().split(sizes), strict=True)
    return [(one, weight, gradient) for one, weight, gradient in pieces]


def _expert_exact(
    products: Products, given: tuple[Tensor, Tensor, Tensor], seed: int = 0
) -> dict[str, Exact]:
    """Return the products of one expert; zeros of an expert without tokens."""
    x, w, dy = given
    if len(x):
        return exact_products(products, x, w, dy, seed)
    return plain_products(x, w, dy)


def _compared(
    bench: Examination,
    name: str,
    wanted: tuple[int, ...],
    keys: tuple[str, ...] = NAMES,
    width: int = OUT,
    dtype: str = "bfloat16",
) -> Row:
    """Compare results of every expert with the reference's. NotApplicableError for a dtype not taken."""
    bench.function("grouped")
    sizes = _sizes(bench, wanted)
    x, w, dy, offsets = given_experts(bench, sizes, width=width)
    x, w, dy = (bench.typed(z, dtype) for z in (x, w, dy))  # the same numbers
    got = call(bench, x, w, dy, "grouped", offsets)
    if dtype != "bfloat16":  # results may be rounded to bf16 all the same: the recipe does not say
        got = {key: value.bfloat16() for key, value in got.items()}
    products, rows, start = products_of(bench), [], 0
    for expert, given in enumerate(experts_of(x, w, dy, sizes)):
        exact = _expert_exact(products, given)
        stop = start + sizes[expert]
        mine = {"y": got["y"][start:stop], "dx": got["dx"][start:stop], "dw": got["dw"][expert]}
        start = stop
        where = f"expert {expert} of {sizes[expert]} tokens, "
        rows += [judged(name, mine[key], exact[key], f"{where}{key}: ") for key in keys]
    return worst(name, rows)


def grouped_forward(bench: Examination) -> Row:
    """Compare y of experts with 64, 128 and 64 tokens."""
    return _compared(bench, "grouped_forward", ALIGNED, ("y",))


def grouped_input_gradient(bench: Examination) -> Row:
    """Compare dx of experts with 64, 128 and 64 tokens."""
    return _compared(bench, "grouped_input_gradient", ALIGNED, ("dx",))


def grouped_weight_gradient(bench: Examination) -> Row:
    """Compare dw of experts with 64, 128 and 64 tokens, and with 128-aligned ones."""
    rows = [_compared(bench, "grouped_weight_gradient", sizes, ("dw",)) for sizes in (ALIGNED, LARGE)]
    return worst("grouped_weight_gradient", rows)


def grouped_unaligned(bench: Examination) -> Row:
    """Compare experts whose tokens are multiples of 16, not of 64."""
    return _compared(bench, "grouped_unaligned", UNALIGNED)


def grouped_ragged(bench: Examination) -> Row:
    """Compare experts of 0, 1, 15, 16, 17, 0 and 33 tokens."""
    return _compared(bench, "grouped_ragged", RAGGED)


def grouped_all_to_one(bench: Examination) -> Row:
    """Compare experts when all tokens go to one."""
    return _compared(bench, "grouped_all_to_one", (0, 192, 0))


def grouped_widths(bench: Examination) -> Row:
    """Compare experts of 96 and of 144 outputs: each expert's rows of scales are padded to 128."""
    rows = [_compared(bench, "grouped_widths", PADDED, width=width) for width in WIDTHS]
    return worst("grouped_widths", rows)


def grouped_fp32(bench: Examination) -> Row:
    """Compare experts whose bf16 numbers are handed in as fp32. A subject may refuse fp32."""
    products = products_of(bench)
    pairs = zip(NAMES, (products.fprop, products.dgrad, products.wgrad), strict=True)
    # What a rotation gives is rounded to the dtype of its input, so that fp32 may differ there.
    keys = tuple(key for key, one in pairs if one.hadamard is None)
    if not keys:
        raise NotApplicableError("the recipe rotates every product")
    try:
        return _compared(bench, "grouped_fp32", PADDED, keys, WIDTHS[0], "float32")
    except RefusedError:
        raise NotApplicableError("the subject's grouped takes no fp32") from None


def grouped_layout(bench: Examination) -> Row:
    """Multiply tensors that no rounding changes, every block with another scale: the exact product.

    This needs no reference: x, w and dy are exact in the format, so that dw is dy^T x to the last addition.
    """
    bench.function("grouped")
    products = products_of(bench)
    recipe = (products.fprop, products.dgrad, products.wgrad)
    slots = [
        (getattr(product, operand), product.hadamard)
        for product in recipe
        for operand in product.operands
        if getattr(product, operand) is not None
    ]
    amax = inputs.exact_amax(slots)
    if amax is None:
        raise NotApplicableError("no tensor in bf16 is left unchanged by all of the recipe's casts")
    sizes = _sizes(bench, ALIGNED)
    inner, out = side(bench, IN), side(bench, OUT)
    x, dy = (
        torch.cat(
            [
                inputs.permuted_tiles(size, wide, bench.seed + 7 * e + wide, amax, 7)
                for e, size in enumerate(sizes)
            ]
        )
        for wide in (inner, out)
    )
    w = torch.stack(
        [inputs.permuted_tiles(out, inner, bench.seed + 50 + e, amax, 7) for e in range(len(sizes))]
    )
    for given in experts_of(x, w, dy, sizes):
        if not _kept(products, *given):
            raise NotApplicableError("no tensor in bf16 is left unchanged by all of the recipe's casts")
    x, w, dy = bench.typed(x), bench.typed(w), bench.typed(dy)
    offsets = torch.tensor(sizes).cumsum(0).to(torch.int32)
    got = call(bench, x, w, dy, "grouped", offsets)
    rows, start = [], 0
    for expert, given in enumerate(experts_of(x, w, dy, sizes)):
        plain, made, stop = plain_products(*given), exact_products(products, *given), start + sizes[expert]
        # Terms that cancel after a rotation leave the roundings of their sum.
        exact = {key: replace(plain[key], magnitudes=made[key].magnitudes) for key in NAMES}
        mine = {"y": got["y"][start:stop], "dx": got["dx"][start:stop], "dw": got["dw"][expert]}
        rows += [
            judged("grouped_layout", mine[key], exact[key], f"expert {expert}, {key}: ") for key in NAMES
        ]
        start = stop
    return worst("grouped_layout", rows)


def _kept(products: Products, x: Tensor, w: Tensor, dy: Tensor) -> bool:
    """Return True if every operand of the three products is left unchanged by its cast."""
    fprop, dgrad, wgrad = products.fprop, products.dgrad, products.wgrad
    pairs = (
        *((x, fprop.x, fprop.hadamard), (w, fprop.w, fprop.hadamard)),
        *((dy, dgrad.g, dgrad.hadamard), (w.t(), dgrad.w, dgrad.hadamard)),
        *((dy.t(), wgrad.g, wgrad.hadamard), (x.t(), wgrad.x, wgrad.hadamard)),
    )
    return all(quant is None or inputs.keeps(z, quant, rotation) for z, quant, rotation in pairs)


def grouped_random(bench: Examination) -> Row:
    """Compare gain and relative L2 distance of each expert's dx and dw, for random dy."""
    bench.function("grouped")
    sizes = _sizes(bench, ALIGNED)
    dy = 0.01 * inputs.normal(sum(sizes), side(bench, OUT), bench.seed + 60)
    x, w, dy, offsets = given_experts(bench, sizes, dy)
    got = call(bench, x, w, dy, "grouped", offsets)
    products, rows, start = products_of(bench), [], 0
    for expert, given in enumerate(experts_of(x, w, dy, sizes)):
        stop = start + sizes[expert]
        mine = {"dx": got["dx"][start:stop], "dw": got["dw"][expert]}
        rows.append(interval_row("grouped_random", products, given, mine, f"expert {expert}: "))
        start = stop
    return worst("grouped_random", rows)


PROPERTIES = (
    Property(
        "grouped_forward",
        "Each expert's y is that of its own layer.",
        BOUND,
        "grouped",
        (26,),
        grouped_forward,
    ),
    Property(
        "grouped_input_gradient",
        "Each expert's dx is that of its own layer.",
        BOUND,
        "grouped",
        (25,),
        grouped_input_gradient,
    ),
    Property(
        "grouped_weight_gradient",
        "Each expert's dw is that of its own layer.",
        BOUND,
        "grouped",
        (1,),
        grouped_weight_gradient,
    ),
    Property(
        "grouped_unaligned",
        "Experts whose tokens are no multiple of 64 are computed alike.",
        BOUND,
        "grouped",
        (26, 27),
        grouped_unaligned,
    ),
    Property(
        "grouped_ragged",
        "Experts of 0, 1, 15, 16, 17 and 33 tokens are computed alike.",
        BOUND,
        "grouped",
        (26, 27),
        grouped_ragged,
    ),
    Property(
        "grouped_all_to_one",
        "Experts without tokens have a dw of zero.",
        BOUND,
        "grouped",
        (26,),
        grouped_all_to_one,
    ),
    Property(
        "grouped_widths",
        "Experts of 96 and of 144 outputs are computed alike.",
        BOUND,
        "grouped",
        (26, 27),
        grouped_widths,
    ),
    Property(
        "grouped_fp32",
        "Experts' numbers in fp32 give what they give in bf16.",
        BOUND,
        "grouped",
        (26, 27),
        grouped_fp32,
    ),
    Property(
        "grouped_layout",
        "Tensors that no rounding changes give the exact product.",
        BOUND,
        "grouped",
        (1, 18),
        grouped_layout,
    ),
    Property(
        "grouped_random",
        "Gain and error of each expert's dx and dw against fp64 are the recipe's.",
        INTERVAL,
        "grouped",
        (1, 2),
        grouped_random,
    ),
)
