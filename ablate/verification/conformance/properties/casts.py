"""Casts to nearest: the codes and scales of the recipe on data of every kind, magnitude and shape."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ablate.numerics.formats import SCALES
from ablate.numerics.spec import Quant
from ablate.verification.conformance import inputs
from ablate.verification.conformance.examination import Examination, NotApplicableError, Property
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


def equal(
    make: Callable[[Examination, Quant], Made],
    function: str = "cast",
    dtype: str = "bfloat16",
    returned: str = "",
) -> Callable[[Examination], Row]:
    """Return the comparison of casts: codes and scales exactly, values up to the roundings of dequantisation.

    `dtype`: that of the tensors; empty: as they are made; `returned`: `codes` or `scales`, which the subject
    has to return.
    """

    def compare(bench: Examination) -> Row:
        if not returned:
            bench.function(function)
        quant = bench.square if function == "cast_square" else bench.nearest
        made = {what: bench.typed(x, dtype) if dtype else x for what, x in make(bench, quant).items()}
        pairs = [bench.pair(x, quant, function, what) for what, x in made.items()]
        if returned and getattr(pairs[0].got, returned) is None:
            raise NotApplicableError("the subject returns values only")
        return bench.judged(pairs)

    return compare


def _sized(
    rows: int, columns: int, make: Callable[[int, int, Quant, int], Tensor], bench: Examination, quant: Quant
) -> Made:
    return {"": make(*bench.size(rows, columns, quant), quant, bench.seed)}


def _random(bench: Examination, quant: Quant) -> Made:
    size, seed = bench.size(64, 256, quant), bench.seed
    return {
        "normal": inputs.normal(*size, seed),
        "spread": inputs.spread(*size, quant.tile[1], seed),
        "outliers": inputs.outliers(*size, seed),
        "negative": inputs.negative(*size, seed),
    }


def _order(make: Callable[[Quant, int, int], list[Tensor]], bench: Examination, quant: Quant) -> Made:
    """Make tensors on which two orders of operations differ."""
    found = make(quant, *bench.size(32, 256, quant))
    if not found:
        raise NotApplicableError("the recipe has no second level, so nothing depends on the order")
    return {f"tensor {number}": x for number, x in enumerate(found)}


def _near_ties(bench: Examination, quant: Quant) -> Made:
    if quant.select is None:
        raise NotApplicableError("the recipe chooses between no candidates")
    found = inputs.near_ties(*bench.size(64, 256, quant), quant, bench.seed)
    return {dtype: bench.typed(x, dtype) for dtype, x in found.items()}


def _small(rows: int, columns: int, quant: Quant, seed: int) -> Tensor:
    return 1e-5 * inputs.spread(rows, columns, quant.tile[1], seed, 10)


def _calls(bench: Examination, quant: Quant) -> Made:
    size, factors = bench.size(32, 128, quant), (1.0, 1000.0, 1e-3, 1.0, 30.0, 1e-6)
    return {f"call {i}": factor * inputs.normal(*size, bench.seed + i) for i, factor in enumerate(factors)}


def _views(bench: Examination, quant: Quant) -> Made:
    rows, columns = bench.size(64, 128, quant)
    whole = bench.typed(inputs.normal(rows, 2 * columns, bench.seed))
    return {
        "transposed view": bench.typed(inputs.normal(columns, rows, bench.seed)).t(),
        "every second column": whole[:, ::2],
        "left half of a matrix": whole[:, :columns],
        "one row expanded": whole[:1, :columns].expand(rows, columns),
    }


def byte_scales(quant: Quant, *, powers: bool = False) -> None:
    """Raise NotApplicableError if scales are not a byte each; `powers`: they may be powers of two."""
    if quant.scale is None:
        raise NotApplicableError("the recipe has no block scales")
    kind = SCALES[quant.scale.format]
    if kind.bits > 8 or not (powers or kind.mantissa):
        others = "" if powers else "powers of two, or "
        raise NotApplicableError(f"the recipe's scales are {others}wider than a byte")


def _of_scales(
    columns: int,
    make: Callable[[Quant, int, int], Tensor],
    bench: Examination,
    quant: Quant,
    powers: bool = False,
) -> Made:
    byte_scales(quant, powers=powers)
    return {"": make(quant, *bench.size(32, columns, quant))}


def _require_powers(quant: Quant) -> None:
    if quant.scale is None or SCALES[quant.scale.format].mantissa:
        raise NotApplicableError("the recipe's scales are no powers of two")


def _thresholds(bench: Examination, quant: Quant) -> Made:
    _require_powers(quant)
    rows, columns = bench.size(64, 512, quant)
    near = torch.tensor([1.5, 1.75, 1.0, 2.0])
    ulps = torch.cat([near * (1 + k * 2.0**-23) for k in (-2, -1, 0, 1, 2)])
    exponents = 2.0 ** torch.tensor([-20.0, -1.0, 0.0, 1.0, 7.0])
    coarse = ((128 + torch.arange(128.0)[:, None]) / 128 * exponents).flatten()
    made = {"bf16": bench.typed(inputs.from_amaxes(coarse, float(coarse.max()), quant, rows, columns))}
    if bench.takes("float32"):
        x = torch.zeros(rows, columns)
        x[:, :: quant.tile[1]] = ulps.repeat(-(-rows // len(ulps)))[:rows, None]
        made["some ulps around a threshold"] = x
    return made


def _extremes(bench: Examination, quant: Quant) -> Made:
    _require_powers(quant)
    exponents = torch.cat((torch.arange(-126, -116), torch.arange(118, 128))).float()
    amaxes = (torch.tensor([1.0, 1.25, 1.5, 1.75, 1.9921875])[:, None] * 2.0**exponents).flatten()
    return {"": inputs.from_amaxes(amaxes, 1.0, quant, *bench.size(16, 128, quant))}


def _ladder(bench: Examination, quant: Quant) -> Made:
    x = inputs.spread(*bench.size(16, 64, quant), quant.tile[1], bench.seed, 3)
    return {
        f"amax 1e{exponent}": (x.double() * 10.0**exponent / x.abs().max()).float()
        for exponent in range(-30, 31)
    }


def _zero_blocks(bench: Examination, quant: Quant) -> Made:
    x = inputs.normal(*bench.size(16, 8 * quant.tile[1], quant), bench.seed)
    x.view(len(x), -1, quant.tile[1])[:, ::2] = 0
    return {"": x}


def _tiny_and_huge(bench: Examination, quant: Quant) -> Made:
    x = inputs.normal(*bench.size(16, 64, quant), bench.seed)
    return {f"{size:g}": size * x for size in (1e-20, 1e-15, 1e15)}


def _every_code(bench: Examination, quant: Quant) -> Made:
    length, points = quant.tile[1], inputs.grid(quant.element)
    signed = torch.cat((points, -points.flip(0)))
    rows, columns = bench.size(4, -(-len(signed) // length) * length * 2, quant)
    line = signed.repeat(-(-columns // len(signed)))[:columns]
    x = torch.stack([line.roll(3 * row) for row in range(rows)])
    x.view(rows, -1, length)[:, :, 0] = points[-1]
    return {"": x}


def _layouts(bench: Examination, quant: Quant) -> Made:
    """Make tensors whose blocks all have other scales."""
    if quant.scale is None:
        raise NotApplicableError("the recipe has no block scales")
    made = {}
    for rows, blocks in ((33, 3), (130, 5), (257, 9)):
        high, wide = bench.size(rows, blocks * quant.tile[1], quant)
        numbers = torch.arange(high * wide // quant.tile[1]).view(high, -1)
        powers = 2.0 ** (numbers * 5 % 13 - 6) * (1 + (numbers % 8) / 8)
        x = inputs.normal(high, wide, bench.seed) * powers.repeat_interleave(quant.tile[1], 1)[:, :wide]
        made[f"{high} x {wide}"] = x
    return made


def _poisoned(bench: Examination) -> Row:
    """Compare as `equal` does, in memory that held NaN before: every element has to be written."""
    quant, pairs = bench.nearest, []
    whole = sorted({bench.size(*shape, quant) for shape in SHAPES})
    for rows, columns in [*whole, *bench.cut_short(quant, CUT_SHORT)]:
        x = bench.typed(inputs.normal(rows, columns, bench.seed + rows))
        poison(rows, columns, bench.subject.device)
        pairs.append(bench.pair(x, quant, where=f"x [{rows}, {columns}]"))
    return bench.judged(pairs)


def poison(rows: int, columns: int, device: str = "cpu") -> None:
    """Fill and free memory of the sizes that a cast allocates, so that what it leaves unwritten is NaN."""
    held: list[Tensor] = []
    for dtype in (torch.float32, torch.bfloat16):
        held += [torch.full((rows, columns), float("nan"), dtype=dtype, device=device) for _ in range(4)]
    for wide in (columns // 2, max(1, columns // 16)):
        held += [torch.full((rows, wide), 0x7F, dtype=torch.uint8, device=device) for _ in range(4)]
    held.clear()


PROPERTIES = (
    Property("random_bf16", "cast", equal(_random)),
    Property("random_fp32", "cast", equal(_random, dtype="float32")),
    Property("element_ties", "cast", equal(partial(_sized, 32, 256, inputs.element_ties))),
    Property("order_of_scale", "cast", equal(partial(_order, inputs.scale_order))),
    Property("order_of_factor", "cast", equal(partial(_order, inputs.factor_order))),
    Property("near_ties_of_choice", "cast", equal(_near_ties, dtype="")),
    Property("stale_scales", "cast", equal(_calls)),
    Property("strides", "cast", equal(_views, dtype="")),
    Property("scale_midpoints", "cast", equal(partial(_of_scales, 256, inputs.scale_midpoints))),
    Property("every_scale", "cast", equal(partial(_of_scales, 256, inputs.every_scale, powers=True))),
    Property("subnormal_scales", "cast", equal(partial(_of_scales, 128, inputs.subnormal_scales))),
    Property("power_of_two_thresholds", "cast", equal(_thresholds, dtype="")),
    Property("power_of_two_extremes", "cast", equal(_extremes)),
    Property("amax_ladder", "cast", equal(_ladder)),
    Property("small_tensor", "cast", equal(partial(_sized, 32, 128, _small))),
    Property("zero_block", "cast", equal(_zero_blocks)),
    Property("smallest_numbers", "cast", equal(_tiny_and_huge)),
    Property("code_bytes", "cast", equal(_every_code, returned="codes")),
    Property("scale_layout", "cast", equal(_layouts, returned="scales")),
    Property("shape_lattice", "cast", _poisoned),
)
