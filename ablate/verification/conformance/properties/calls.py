"""Calls of a cast: what it returns besides codes and scales, twice, for zeros, NaN and infinities."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS
from ablate.numerics.spec import Outer, Quant
from ablate.verification.conformance import inputs
from ablate.verification.conformance.declared import words_of
from ablate.verification.conformance.examination import (
    Examination,
    NotApplicableError,
    Property,
    compared,
    expanded,
    explained_by_variants,
    judged,
    reference,
)
from ablate.verification.conformance.numbers import FP32_ROUNDINGS, Numbers, far, unequal
from ablate.verification.conformance.properties.casts import byte_scales, equal, poison
from ablate.verification.conformance.result import Outcome, Row, decided
from ablate.verification.conformance.subject import Quantised

REPEATS = 20


def _squares(bench: Examination, quant: Quant) -> dict[str, Tensor]:
    size, seed = bench.size(64, 128, quant), bench.seed
    made = {
        "normal": inputs.normal(*size, seed),
        "spread": inputs.spread(*size, 16, seed),
        "negative": inputs.negative(*size, seed),
        "ties": inputs.element_ties(*size, quant, seed),
    }
    cut = bench.cut_short(quant, ((16, 17), (40, 72), (7, 9)))
    return made | {f"x {list(size)}": inputs.normal(*size, seed) for size in cut}


def _transposed(bench: Examination) -> Row:
    """Compare the cast of W^T with the transposed cast of W, exactly."""
    bench.function("cast_square")
    quant = bench.square
    size = bench.columns(bench.rows(64), quant)
    x = bench.typed(inputs.normal(size, size, bench.seed))
    straight, turned = (
        bench.cast(z, quant, "cast_square").dequantised(quant.tile[1]) for z in (x, x.t().contiguous())
    )
    if straight is None or turned is None:
        raise NotApplicableError("the subject returns no values, nor codes and scales")
    return judged(straight != turned.t(), x, straight, turned.t())


def _round_trip(bench: Examination) -> Row:
    """Compare code x block scale x outer with the values of the subject, or else with those of the recipe,
    up to the roundings of dequantisation."""
    quant = bench.nearest
    x = bench.typed(2.5e-3 * inputs.normal(*bench.size(32, 128, quant), bench.seed))
    got = bench.cast(x, quant)
    if got.codes is None or (got.scales is None and quant.scale is not None):
        raise NotApplicableError("the subject returns values only")
    if got.outer is None and quant.outer is not None and got.values is None:
        raise NotApplicableError("the subject returns neither values nor a second-level factor")
    decoded = got.codes * expanded(got, quant)
    expected = reference(x, quant).values if got.values is None else got.values
    assert expected is not None
    row = judged(far(decoded, expected, got.dtype), x, expected, decoded)
    if row.outcome == Outcome.PASS:
        return row
    if got.values is None:  # of another order of operations, the values are others, too
        pair = compared(x, Numbers(decoded), quant)
        if declared := explained_by_variants(words_of(bench.subject.variants), [pair]):
            return Row("", Outcome.VARIANT, decoded.numel(), 0, detail=f"as declared: {declared}")
        bench.declarable = [pair]
    ratio = (decoded.abs().sum() / expected.abs().sum()).item()
    return replace(row, detail=f"code x scale x outer is {ratio:.3g} times the values")


def repeated(call: Callable[[], Sequence[Tensor | None]], other: Callable[[], object], every: int) -> Row:
    """Return the row of 20 calls, with another one before `every` few of them: exactly the same results."""
    first, differ, cases = call(), 0, 0
    for number in range(REPEATS):
        if number % every == 0:
            other()
        for mine, again in zip(first, call(), strict=True):
            if mine is not None and again is not None:
                differ += int(unequal(mine, again).sum())
                cases += mine.numel()
    return decided(cases, differ)


def _repeats(bench: Examination) -> Row:
    """Compare casts of one tensor, with other tensors between, exactly."""
    quant = bench.nearest
    x = bench.normal(64, 256, quant)
    other = bench.typed(100 * inputs.normal(*bench.size(32, 128, quant), bench.seed + 1))

    def call() -> Sequence[Tensor | None]:
        got = bench.cast(x, quant)
        return got.values, got.codes, got.scales

    return repeated(call, lambda: bench.cast(other, quant), every=4)


def _true_amax(bench: Examination) -> Row:
    """Compare the returned amax exactly, and the second-level factor up to its fp32 roundings. The largest
    magnitude of each tensor is at another place."""
    quant, worst, differ = bench.nearest, "", 0
    if quant.outer is None or quant.outer.granularity != "tensor":
        raise NotApplicableError("the recipe has no amax of the tensor")
    rows, columns = bench.size(48, 192, quant)
    for number in range(REPEATS):
        x = inputs.normal(rows, columns, bench.seed + number)
        x[number * 7 % rows, number * 37 % columns] = -9.0 if number % 2 else 7.5
        x = bench.typed(x)
        got, expected = bench.cast(x, quant), reference(x, quant)
        parts = {"amax": got.amax, "outer": got.outer}
        shown = {what: part for what, part in parts.items() if part is not None and not part.ndim}
        if not shown:
            raise NotApplicableError("the subject returns neither its amax nor one factor of the tensor")
        for what, part in shown.items():
            mine, right = float(part), float(getattr(expected, what))
            if not abs(mine / right - 1) <= (FP32_ROUNDINGS if what == "outer" else 0):
                differ, worst = differ + 1, f"{what} {mine:.6g}, not {right:.6g}"
                break
    return decided(REPEATS, differ, detail=worst)


def _kept(bench: Examination) -> Row:
    """Compare the input after the call with the input before it, exactly."""
    x = bench.normal(32, 128, bench.nearest)
    handed = x.clone().to(bench.subject.device)
    bench.call("cast", handed)
    return judged(handed.cpu() != x, x, x, handed.cpu())


def _padding(bench: Examination) -> Row:
    """Read the scales beyond the tensor's rows, in the 128 x 4 layout: none is NaN, whatever memory held."""
    quant = bench.nearest
    if not bench.subject.swizzled:
        raise NotApplicableError("the subject's scales are not in the layout of tensor cores")
    nans = cases = 0
    for size in ((1, 64), (33, 80), (130, 144)):
        x = bench.normal(*size, quant)
        poison(*x.shape)
        result = bench.call("cast", x)
        if not isinstance(result, Quantised) or result.scales is None:
            raise NotApplicableError("the subject returns values only")
        raw = result.scales.detach().cpu().contiguous().view(torch.uint8)
        nans += int((raw == (0x7F if quant.outer is not None else 0xFF)).sum())
        cases += raw.numel()
    return decided(cases, nans)


def _casts_given(bench: Examination) -> Row:
    """Compare casts with a given amax: codes and scales exactly, values up to their roundings. Blocks exceed
    the amax: their scales would be 448, 449, 464, 480 and more."""
    bench.function("cast_given")
    quant, pairs = bench.nearest, []
    byte_scales(quant)
    if quant.outer is None or quant.outer.granularity != "tensor":
        raise NotApplicableError("the recipe has no amax of the tensor")
    limit = ELEMENTS[quant.element].max * quant.outer.bound
    wanted = torch.tensor([1.0, 1.0, 449 / 448, 464 / 448, 465 / 448, 480 / 448, 2.0, 1e3, 1e30]) * limit
    above = bench.typed(inputs.from_amaxes(wanted, limit, quant, *bench.size(16, 64, quant)))
    random = bench.normal(16, 64, quant)
    amaxes = (float(random.abs().max()), 1.5, 8.0, 1e-3, 1e4)
    for x, amax in ((above, limit), *((random, amax) for amax in amaxes)):
        outer = Outer(statistic=f"static:{amax!r}", bound=quant.outer.bound)
        got = bench.cast(x, quant, "cast_given", amax=torch.tensor(amax))
        if got.values is None and got.outer is not None:  # the factor is a result of the amax as well
            got = replace(got, values=got.dequantised(quant.tile[1]))
        static = quant.model_copy(update={"outer": outer})
        pairs.append(compared(x, got, static, f"amax given as {amax:.6g}"))
    return bench.judged(pairs)


# --- zeros, NaN and infinities -----


def _zero_tensor(bench: Examination) -> Row:
    """Look for values other than zero, and for scales that are not finite."""
    quant, differ, cases, block, detail = bench.nearest, 0, 0, None, ""
    for zero in (0.0, -0.0):
        x = bench.typed(torch.full(bench.size(16, 64, quant), zero))
        got = bench.cast(x, quant)
        values = got.dequantised(quant.tile[1])
        for what, part in (("value", values), ("block scale", got.scales), ("outer factor", got.outer)):
            if part is None:
                continue
            wrong = ~part.isfinite() if what != "value" else part != 0
            count, size = int(wrong.sum()), part.numel()
            differ, cases = differ + count, cases + size
            if not detail and count:
                first = float(part[wrong].flatten()[0])
                detail = f"of a tensor of {zero:g}, {count:,} of {size:,} {what}s are {first:g}"
                if part.shape == x.shape:
                    block = judged(wrong, x, torch.zeros_like(part), part).block
    return decided(cases, differ, block, detail)


def _with(bench: Examination, number: float) -> tuple[Tensor, Numbers, slice, int]:
    """Cast normal numbers, of which one of the second block of row 3 is another one. Return values, numbers,
    the block's columns, and the column: a recipe without blocks has one each."""
    quant, length = bench.nearest, bench.nearest.tile[1]
    x, column = bench.normal(16, 4 * length, quant), length + min(5, length - 1)
    x[3, column] = number
    return *bench.values(x, quant), slice(length, 2 * length), column


def _declarable(bench: Examination, form: str, detail: str, cases: int = 1, differ: int = 1) -> Row:
    """Return the row of a result that holds if its form is declared: one of `declared.FORMS`."""
    if bench.declared_form == form:
        return Row("", Outcome.VARIANT, cases, 0, detail=detail)
    bench.form = form
    return Row("", Outcome.FAIL, cases, differ, detail=detail)


def _nan_visible(bench: Examination) -> Row:
    """Look at the NaN's whole block, and at the tensor: neither may look like finite numbers."""
    values, _, columns, column = _with(bench, math.nan)
    block, value, rest = values[3, columns], float(values[3, column]), values.clone()
    rest[3, columns] = 0
    if bool(rest.isnan().any()) or not bool(block.isfinite().any()):
        form = "tensor" if bool(rest.isnan().any()) else "block"
        outcome = Outcome.VARIANT if bench.declared_form == form else Outcome.PASS
        return Row("", outcome, 1, 0, detail=f"the NaN makes its {form} NaN")
    if not math.isfinite(value):
        return _declarable(bench, "element", "the block of the NaN is finite but for it")
    return _declarable(bench, "saturated" if value else "zero", f"the NaN became {value:.4g}")


def _infinity_visible(bench: Examination) -> Row:
    """Look at the infinity's block: not all of it may be finite, unless the recipe has no second level."""
    values, got, columns, column = _with(bench, math.inf)
    value = float(values[3, column])
    if bench.nearest.outer is None:  # the largest scale of the format is finite, and so is the largest value
        detail = f"inf becomes {value:.4g}"
        if got.scales is not None:  # that of the second block
            detail += f", scale {got.scales[3, 1]:.4g}"
        return Row("", Outcome.REPORT, 1, 0, detail=detail)
    if not bool(values[3, columns].isfinite().all()):
        return decided(1, 0)
    return _declarable(bench, "saturated", f"inf became {value:.4g}")


def _neighbours(bench: Examination) -> Row:
    """Look for scales that are NaN in blocks with amaxes from 6 x 448 to 1e30 beside an infinity."""
    quant = bench.nearest
    if quant.outer is None or quant.scale is None:
        raise NotApplicableError("the recipe has no second level")
    wanted = torch.tensor([448.0, 449.0, 464.0, 465.0, 480.0, 1e4, 1e30]) * 6
    x = inputs.from_amaxes(wanted, 1.0, quant, *bench.size(16, 64, quant))
    x[0, 0] = math.inf
    got = bench.cast(bench.typed(x), quant)
    if got.scales is None:
        raise NotApplicableError("the subject returns no scales")
    nans = got.scales.isnan()
    nans[0, 0] = False
    if not (differ := int(nans.sum())):
        return decided(nans.numel(), 0)
    return _declarable(bench, "nan", f"{differ} scales are NaN beside one infinity", nans.numel(), differ)


PROPERTIES = (
    Property("square_blocks", "cast_square", equal(_squares, "cast_square")),
    Property("square_transpose", "cast_square", _transposed),
    Property("round_trip", "cast", _round_trip),
    Property("repeats", "cast", _repeats),
    Property("true_amax", "cast", _true_amax),
    Property("input_kept", "cast", _kept),
    Property("padding_bytes", "cast", _padding),
    Property("saturated_scales", "cast_given", _casts_given),
    Property("zero_tensor", "cast", _zero_tensor),
    Property("nan_visible", "cast", _nan_visible),
    Property("infinity_visible", "cast", _infinity_visible),
    Property("infinite_neighbours", "cast", _neighbours),
)
