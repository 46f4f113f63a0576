"""Extremes: tiny and huge tensors, zeros, NaN and infinities."""

import torch
from torch import Tensor

from ablate.verification.conformance import inputs
from ablate.verification.conformance.examination import Examination, NotApplicableError, Pair
from ablate.verification.conformance.numbers import Numbers, over_elements
from ablate.verification.conformance.properties.cast import EXACT
from ablate.verification.conformance.properties.property import Property
from ablate.verification.conformance.result import Block, Outcome, Row


def amax_ladder(bench: Examination) -> Row:
    """Cast tensors with an amax of 1e-30, 1e-29, ..., 1e30."""
    quant = bench.nearest
    x = inputs.spread(bench.rows(16), bench.columns(64, quant), quant.tile[1], bench.seed, 3)
    pairs = []
    for exponent in range(-30, 31):
        scaled = bench.typed((x.double() * 10.0**exponent / x.abs().max()).float())
        pairs.append(bench.pair(scaled, quant, where=f"amax 1e{exponent}"))
    return bench.judged("amax_ladder", pairs)


def small_tensor(bench: Examination) -> Row:
    """Cast gradients of 1e-5, some blocks of which are a thousand times smaller."""
    quant = bench.nearest
    rows, columns = bench.rows(32), bench.columns(128, quant)
    x = 1e-5 * inputs.spread(rows, columns, quant.tile[1], bench.seed, 10)
    return bench.compare("small_tensor", [bench.typed(x)], quant)


def zero_block(bench: Examination) -> Row:
    """Cast a tensor of which every second block is zero."""
    quant = bench.nearest
    length = quant.tile[1]
    rows, columns = bench.rows(16), bench.columns(8 * length, quant)
    x = inputs.normal(rows, columns, bench.seed)
    x.view(rows, -1, length)[:, ::2] = 0
    return bench.compare("zero_block", [bench.typed(x)], quant)


def zero_tensor(bench: Examination) -> Row:
    """Cast a tensor of zeros, of +0 and of -0: zeros, and nothing that is not finite."""
    quant = bench.nearest
    rows, columns = bench.rows(16), bench.columns(64, quant)
    differ, cases, block, detail = 0, 0, None, ""
    for zero in (0.0, -0.0):
        got = bench.cast(bench.typed(torch.full((rows, columns), zero)), quant)
        values = got.dequantised(quant.tile[1])
        for what, part in (("value", values), ("block scale", got.scales), ("outer factor", got.outer)):
            if part is None:
                continue
            wrong = ~part.isfinite() if what != "value" else part != 0
            cases += part.numel()
            differ += int(wrong.sum())
            if not detail and wrong.any():
                first = float(part[wrong].flatten()[0])
                detail = (
                    f"of a tensor of {zero:g}, {int(wrong.sum()):,} of {part.numel():,} {what}s are {first:g}"
                )
                if part.shape == (rows, columns):
                    row, column = (int(place) for place in wrong.nonzero()[0])
                    block = Block(f"row {row}, column {column}", (zero,), (0.0,), (first,))
    return Row("zero_tensor", Outcome.FAIL if differ else Outcome.PASS, cases, differ, block, detail=detail)


def _beside_one(bench: Examination, number: float) -> tuple[Numbers, Tensor, int]:
    """Cast normal numbers, of which (3, block + 5) is another one: what came back, its values, the block."""
    quant = bench.nearest
    length = quant.tile[1]
    x = inputs.normal(bench.rows(16), bench.columns(4 * length, quant), bench.seed)
    x[3, length + 5] = number
    got = bench.cast(bench.typed(x), quant)
    values = got.dequantised(length)
    if values is None:
        raise NotApplicableError("the subject returns codes without a second level")
    return got, values, length


def nan_visible(bench: Examination) -> Row:
    """Cast a tensor with one NaN: its whole block, or the tensor, must not look like finite numbers."""
    _, values, length = _beside_one(bench, float("nan"))
    block, rest = values[3, length : 2 * length], values.clone()
    rest[3, length : 2 * length] = 0
    form = _form(block, 5, rest)
    declared = bench.subject.variants.get("nan_visible")
    if form in ("tensor", "block"):
        outcome = Outcome.VARIANT if declared == form else Outcome.PASS
        return Row("nan_visible", outcome, 1, 0, detail=f"the NaN makes its {form} NaN")
    detail = (
        f"the NaN became {float(block[5]):.4g}" if form != "element" else "its block is finite but for it"
    )
    if declared == form:
        return Row("nan_visible", Outcome.VARIANT, 1, 0, detail=detail)
    detail += f'; declare variants={{"nan_visible": "{form}"}} if meant'
    fault = "NaN becomes a number" if form != "element" else _LONE_NAN
    return Row("nan_visible", Outcome.FAIL, 1, 1, fault=fault, detail=detail)


_LONE_NAN = "NaN ignored by the amax of its block: its scale and the other elements stay finite"


def _form(block: Tensor, place: int, rest: Tensor) -> str:
    if bool(rest.isnan().any()):
        return "tensor"
    if not bool(block.isfinite().any()):
        return "block"
    if not bool(block[place].isfinite()):
        return "element"
    return "zero" if float(block[place]) == 0 else "saturated"


def infinity_visible(bench: Examination) -> Row:
    """Cast a tensor with one infinity: it must not become an ordinary number."""
    got, values, length = _beside_one(bench, float("inf"))
    quant, columns = bench.nearest, values.shape[1]
    value = float(values[3, length + 5])
    if quant.outer is None:  # the largest scale of the format is finite, and so is the largest value
        scales = None if got.scales is None else over_elements(got.scales, length, columns)
        detail = f"inf becomes {value:.4g}" + (
            "" if scales is None else f", scale {scales[3, length + 5]:.4g}"
        )
        return Row("infinity_visible", Outcome.REPORT, 1, 0, detail=detail)
    if not bool(torch.isfinite(values[3, length : 2 * length]).all()):
        return Row("infinity_visible", Outcome.PASS, 1, 0)
    if bench.subject.variants.get("infinity_visible") == "saturated":
        return Row("infinity_visible", Outcome.VARIANT, 1, 0, detail=f"inf becomes {value:.4g}")
    detail = f'inf became {value:.4g}; declare variants={{"infinity_visible": "saturated"}} if meant'
    return Row("infinity_visible", Outcome.FAIL, 1, 1, detail=detail)


def infinite_neighbours(bench: Examination) -> Row:
    """Cast blocks with amaxes from 6 x 448 to 1e30 beside an infinity: their scales are no NaN."""
    quant = bench.nearest
    if quant.outer is None or quant.scale is None:
        raise NotApplicableError("the recipe has no second level")
    rows, columns = bench.rows(16), bench.columns(64, quant)
    wanted = torch.tensor([448.0, 449.0, 464.0, 465.0, 480.0, 1e4, 1e30]) * 6
    x = inputs.from_amaxes(wanted, 1.0, quant, rows, columns)
    x[0, 0] = float("inf")
    got = bench.cast(bench.typed(x), quant)
    if got.scales is None:
        raise NotApplicableError("the subject returns no scales")
    nans = got.scales.isnan()
    nans[0, 0] = False
    differ = int(nans.sum())
    if not differ:
        return Row("infinite_neighbours", Outcome.PASS, nans.numel(), 0)
    detail = f"{differ} scales are NaN beside one infinity"
    if bench.subject.variants.get("infinite_neighbours") == "nan":
        return Row("infinite_neighbours", Outcome.VARIANT, nans.numel(), 0, detail=detail)
    detail += '; declare variants={"infinite_neighbours": "nan"} if meant'
    return Row("infinite_neighbours", Outcome.FAIL, nans.numel(), differ, detail=detail)


def smallest_numbers(bench: Examination) -> Row:
    """Cast a tensor of 1e-20 and read its values back in full."""
    quant = bench.nearest
    rows, columns = bench.rows(16), bench.columns(64, quant)
    pairs: list[Pair] = []
    for size in (1e-20, 1e-15, 1e15):
        x = bench.typed(size * inputs.normal(rows, columns, bench.seed))
        pairs.append(bench.pair(x, quant, where=f"{size:g}"))
    return bench.judged("smallest_numbers", pairs)


PROPERTIES = (
    Property(
        "amax_ladder",
        "Tensors of every magnitude from 1e-30 to 1e30 are cast alike.",
        EXACT,
        "cast",
        (11, 14),
        amax_ladder,
    ),
    Property(
        "small_tensor",
        "Gradients of 1e-5 and below are kept: no floor of scales or of amax.",
        EXACT,
        "cast",
        (14,),
        small_tensor,
    ),
    Property(
        "zero_block",
        "A zero block has the recipe's scale, and the value zero.",
        EXACT,
        "cast",
        (15,),
        zero_block,
    ),
    Property(
        "zero_tensor",
        "A zero tensor stays zero, and nothing in it is NaN.",
        "exact",
        "cast",
        (15,),
        zero_tensor,
    ),
    Property(
        "smallest_numbers",
        "Values of 1e-20 do not underflow in the dequantisation.",
        EXACT,
        "cast",
        (16,),
        smallest_numbers,
    ),
    Property("nan_visible", "A NaN shows in the result.", "exact", "cast", (28,), nan_visible),
    Property(
        "infinity_visible", "An infinity shows in the result.", "exact", "cast", (28,), infinity_visible
    ),
    Property(
        "infinite_neighbours",
        "Scales beside an infinity saturate; none is NaN.",
        "exact",
        "cast",
        (12,),
        infinite_neighbours,
    ),
)
