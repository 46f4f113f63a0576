"""Casts to nearest: the codes and scales of the recipe on data of every kind, magnitude and shape."""

from collections.abc import Callable

import torch
from torch import Tensor

from ablate.numerics.formats import SCALES
from ablate.numerics.spec import Quant
from ablate.verification.conformance import inputs
from ablate.verification.conformance.examination import Examination, NotApplicableError
from ablate.verification.conformance.properties.property import Property
from ablate.verification.conformance.result import Row

SHAPES = (
    *((1, 32), (2, 64), (15, 96), (16, 48), (17, 16), (31, 80), (33, 112), (48, 96), (64, 144)),
    *((100, 160), (127, 64), (128, 96), (129, 128), (130, 272), (16, 1040), (257, 32), (3, 528), (128, 192)),
)
"""Rows and columns on both sides of 16, 32, 64 and 128, and of multiples of them."""
CUT_SHORT = (
    *((1, 1), (2, 7), (15, 33), (16, 17), (17, 31), (33, 40), (64, 120), (127, 65), (128, 129), (3, 264)),
)
"""Rows and columns whose last block is cut short, for subjects that take them."""
Made = dict[str, Tensor]
"""Tensors by a word for their place in messages."""


def equal_casts(bench: Examination, one: Property) -> Row:
    """Compare casts: codes and scales exactly, values up to the roundings of dequantisation."""
    bench.function(one.function)
    quant = bench.square if one.function == "cast_square" else bench.nearest
    made: Made = one.inputs(bench)
    return bench.judged(one.name, [bench.pair(x, quant, one.function, what) for what, x in made.items()])


def _sized(
    rows: int, columns: int, make: Callable[[int, int, Quant, int], Tensor]
) -> Callable[[Examination], Made]:
    """Return inputs of one tensor of about this size, made of its rows, columns, quantiser and seed."""

    def made(bench: Examination) -> Made:
        quant = bench.nearest
        return {"": bench.typed(make(bench.rows(rows), bench.columns(columns, quant), quant, bench.seed))}

    return made


def _random(dtype: str) -> Callable[[Examination], Made]:
    def made(bench: Examination) -> Made:
        rows, columns = bench.rows(64), bench.columns(256, bench.nearest)
        return {
            "normal": bench.typed(inputs.normal(rows, columns, bench.seed), dtype),
            "spread": bench.typed(inputs.spread(rows, columns, bench.nearest.tile[1], bench.seed), dtype),
            "outliers": bench.typed(inputs.outliers(rows, columns, bench.seed), dtype),
            "negative": bench.typed(inputs.negative(rows, columns, bench.seed), dtype),
        }

    return made


def _order(make: Callable[[Quant, int, int], list[Tensor]]) -> Callable[[Examination], Made]:
    """Return inputs on which two orders of operations differ."""

    def made(bench: Examination) -> Made:
        quant = bench.nearest
        found = make(quant, bench.rows(32), bench.columns(256, quant))
        if not found:
            raise NotApplicableError("the recipe has no second level, so nothing depends on the order")
        return {f"tensor {number}": bench.typed(x) for number, x in enumerate(found)}

    return made


def _near_ties(bench: Examination) -> Made:
    quant = bench.nearest
    if quant.select is None:
        raise NotApplicableError("the recipe chooses between no candidates")
    found = inputs.near_ties(bench.rows(64), bench.columns(256, quant), quant, bench.seed)
    return {dtype: bench.typed(x, dtype) for dtype, x in found.items()}


def _calls(bench: Examination) -> Made:
    rows, columns = bench.rows(32), bench.columns(128, bench.nearest)
    factors = (1.0, 1000.0, 1e-3, 1.0, 30.0, 1e-6)
    return {
        f"call {i}": bench.typed(factor * inputs.normal(rows, columns, bench.seed + i))
        for i, factor in enumerate(factors)
    }


def _views(bench: Examination) -> Made:
    rows, columns = bench.rows(64), bench.columns(128, bench.nearest)
    whole = bench.typed(inputs.normal(rows, 2 * columns, bench.seed))
    return {
        "transposed view": bench.typed(inputs.normal(columns, rows, bench.seed)).t(),
        "every second column": whole[:, ::2],
        "left half of a matrix": whole[:, :columns],
        "one row expanded": whole[:1, :columns].expand(rows, columns),
    }


# --- block scales -----


def byte_scales(bench: Examination, *, powers: bool = False) -> Quant:
    """Return the quantiser, whose scales are a byte each; `powers`: they may be powers of two.
    NotApplicableError if the recipe has other scales."""
    quant = bench.nearest
    if quant.scale is None:
        raise NotApplicableError("the recipe has no block scales")
    kind = SCALES[quant.scale.format]
    if kind.bits > 8 or not (powers or kind.mantissa):
        others = "" if powers else "powers of two, or "
        raise NotApplicableError(f"the recipe's scales are {others}wider than a byte")
    return quant


def _of_scales(
    columns: int, make: Callable[[Quant, int, int], Tensor], *, powers: bool = False
) -> Callable[[Examination], Made]:
    """Return inputs of one tensor of about this size, for recipes with such scales."""

    def made(bench: Examination) -> Made:
        quant = byte_scales(bench, powers=powers)
        return {"": bench.typed(make(quant, bench.rows(32), bench.columns(columns, quant)))}

    return made


def _powers(bench: Examination) -> Quant:
    quant = bench.nearest
    if quant.scale is None or SCALES[quant.scale.format].mantissa:
        raise NotApplicableError("the recipe's scales are no powers of two")
    return quant


def _thresholds(bench: Examination) -> Made:
    quant = _powers(bench)
    rows, columns = bench.rows(64), bench.columns(512, quant)
    significands = (128 + torch.arange(128.0)) / 128
    near = torch.tensor([1.5, 1.75, 1.0, 2.0])
    ulps = torch.cat([near * (1 + k * 2.0**-23) for k in (-2, -1, 0, 1, 2)])
    exponents = 2.0 ** torch.tensor([-20.0, -1.0, 0.0, 1.0, 7.0])
    coarse = (significands[:, None] * exponents).flatten()
    made = {"bf16": bench.typed(inputs.from_amaxes(coarse, float(coarse.max()), quant, rows, columns))}
    if bench.takes("float32"):
        x = torch.zeros(rows, columns)
        x[:, :: quant.tile[1]] = ulps.repeat(-(-rows // len(ulps)))[:rows, None]
        made["some ulps around a threshold"] = x
    return made


def _extremes(bench: Examination) -> Made:
    quant = _powers(bench)
    exponents = torch.cat((torch.arange(-126, -116), torch.arange(118, 128))).float()
    amaxes = (torch.tensor([1.0, 1.25, 1.5, 1.75, 1.9921875])[:, None] * 2.0**exponents).flatten()
    x = inputs.from_amaxes(amaxes, 1.0, quant, bench.rows(16), bench.columns(128, quant))
    return {"": bench.typed(x)}


# --- magnitudes and shapes -----


def _ladder(bench: Examination) -> Made:
    quant = bench.nearest
    x = inputs.spread(bench.rows(16), bench.columns(64, quant), quant.tile[1], bench.seed, 3)
    return {
        f"amax 1e{exponent}": bench.typed((x.double() * 10.0**exponent / x.abs().max()).float())
        for exponent in range(-30, 31)
    }


def _small(rows: int, columns: int, quant: Quant, seed: int) -> Tensor:
    return 1e-5 * inputs.spread(rows, columns, quant.tile[1], seed, 10)


def _zero_blocks(bench: Examination) -> Made:
    quant = bench.nearest
    x = inputs.normal(bench.rows(16), bench.columns(8 * quant.tile[1], quant), bench.seed)
    x.view(len(x), -1, quant.tile[1])[:, ::2] = 0
    return {"": bench.typed(x)}


def _tiny_and_huge(bench: Examination) -> Made:
    x = inputs.normal(bench.rows(16), bench.columns(64, bench.nearest), bench.seed)
    return {f"{size:g}": bench.typed(size * x) for size in (1e-20, 1e-15, 1e15)}


def _every_code(bench: Examination) -> Made:
    quant = bench.nearest
    length, points = quant.tile[1], inputs.grid(quant.element)
    signed = torch.cat((points, -points.flip(0)))
    rows, columns = bench.rows(4), bench.columns(-(-len(signed) // length) * length * 2, quant)
    line = signed.repeat(-(-columns // len(signed)))[:columns]
    x = torch.stack([line.roll(3 * row) for row in range(rows)])
    x.view(rows, -1, length)[:, :, 0] = points[-1]
    return {"": bench.typed(x)}


def _layouts(bench: Examination) -> Made:
    """Make tensors whose blocks all have other scales."""
    quant, made = bench.nearest, {}
    if quant.scale is None:
        raise NotApplicableError("the recipe has no block scales")
    for rows, blocks in ((33, 3), (130, 5), (257, 9)):
        high, wide = bench.rows(rows), bench.columns(blocks * quant.tile[1], quant)
        x = inputs.normal(high, wide, bench.seed)
        numbers = torch.arange(high * wide // quant.tile[1]).view(high, -1)
        powers = 2.0 ** (numbers * 5 % 13 - 6) * (1 + (numbers % 8) / 8)
        x *= powers.repeat_interleave(quant.tile[1], 1)[:, :wide]
        made[f"{high} x {wide}"] = bench.typed(x)
    return made


def _returned(part: str) -> Callable[[Examination, Property], Row]:
    """Return the comparison of casts, for subjects that return `codes` or `scales`."""

    def compare(bench: Examination, one: Property) -> Row:
        made: Made = one.inputs(bench)
        pairs = [bench.pair(x, bench.nearest, where=what) for what, x in made.items()]
        if getattr(pairs[0].got, part) is None:
            raise NotApplicableError("the subject returns values only")
        return bench.judged(one.name, pairs)

    return compare


def _lattice(bench: Examination) -> list[tuple[int, int]]:
    quant = bench.nearest
    shapes = {(bench.rows(rows), bench.columns(columns, quant)) for rows, columns in SHAPES}
    return [*sorted(shapes), *bench.cut_short(quant, CUT_SHORT)]


def _poisoned(bench: Examination, one: Property) -> Row:
    """Compare as `equal_casts` does, in memory that held NaN before: every element has to be written."""
    pairs = []
    for rows, columns in one.inputs(bench):
        x = bench.typed(inputs.normal(rows, columns, bench.seed + rows))
        poison(rows, columns, bench.subject.device)
        pairs.append(bench.pair(x, bench.nearest, where=f"x [{rows}, {columns}]"))
    return bench.judged(one.name, pairs)


def poison(rows: int, columns: int, device: str = "cpu") -> None:
    """Fill and free memory of the sizes that a cast allocates, so that what it leaves unwritten is NaN."""
    held: list[Tensor] = []
    for dtype in (torch.float32, torch.bfloat16):
        held += [torch.full((rows, columns), float("nan"), dtype=dtype, device=device) for _ in range(4)]
    for wide in (columns // 2, max(1, columns // 16)):
        held += [torch.full((rows, wide), 0x7F, dtype=torch.uint8, device=device) for _ in range(4)]
    held.clear()


PROPERTIES = (
    Property("random_bf16", _random("bfloat16"), "cast", equal_casts),
    Property("random_fp32", _random("float32"), "cast", equal_casts),
    Property("element_ties", _sized(32, 256, inputs.element_ties), "cast", equal_casts),
    Property("order_of_scale", _order(inputs.scale_order), "cast", equal_casts),
    Property("order_of_factor", _order(inputs.factor_order), "cast", equal_casts),
    Property("near_ties_of_choice", _near_ties, "cast", equal_casts),
    Property("stale_scales", _calls, "cast", equal_casts),
    Property("strides", _views, "cast", equal_casts),
    Property("scale_midpoints", _of_scales(256, inputs.scale_midpoints), "cast", equal_casts),
    Property("every_scale", _of_scales(256, inputs.every_scale, powers=True), "cast", equal_casts),
    Property("subnormal_scales", _of_scales(128, inputs.subnormal_scales), "cast", equal_casts),
    Property("power_of_two_thresholds", _thresholds, "cast", equal_casts),
    Property("power_of_two_extremes", _extremes, "cast", equal_casts),
    Property("amax_ladder", _ladder, "cast", equal_casts),
    Property("small_tensor", _sized(32, 128, _small), "cast", equal_casts),
    Property("zero_block", _zero_blocks, "cast", equal_casts),
    Property("smallest_numbers", _tiny_and_huge, "cast", equal_casts),
    Property("code_bytes", _every_code, "cast", _returned("codes")),
    Property("scale_layout", _layouts, "cast", _returned("scales")),
    Property("shape_lattice", _lattice, "cast", _poisoned),
)
