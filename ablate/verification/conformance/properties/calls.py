"""Calls of a cast: what it returns besides codes and scales, twice, for zeros, NaN and infinities."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS
from ablate.numerics.quantize import Outer
from ablate.verification.conformance import inputs
from ablate.verification.conformance.declared import words_of
from ablate.verification.conformance.examination import (
    Examination,
    NotApplicableError,
    Pair,
    expanded,
    explained_by_variants,
    judged,
    reference,
)
from ablate.verification.conformance.numbers import (
    FP32_ROUNDINGS,
    Numbers,
    differences,
    far,
    unequal,
)
from ablate.verification.conformance.properties.casts import byte_scales, equal_casts, poison
from ablate.verification.conformance.properties.property import Property
from ablate.verification.conformance.result import Outcome, Row, decided
from ablate.verification.conformance.subject import Quantised

REPEATS = 20


def _normal(rows: int, columns: int) -> Callable[[Examination], Tensor]:
    """Return inputs of one tensor of normal bf16 numbers of about this size."""
    return lambda bench: bench.normal(rows, columns, bench.nearest)


def _small(bench: Examination) -> Tensor:
    size = bench.rows(32), bench.columns(128, bench.nearest)
    return bench.typed(2.5e-3 * inputs.normal(*size, bench.seed))


def _squares(bench: Examination) -> dict[str, Tensor]:
    quant = bench.square
    rows, columns = bench.rows(64), bench.columns(128, quant)
    made = {
        "normal": inputs.normal(rows, columns, bench.seed),
        "spread": inputs.spread(rows, columns, 16, bench.seed),
        "negative": inputs.negative(rows, columns, bench.seed),
        "ties": inputs.element_ties(rows, columns, quant, bench.seed),
    }
    cut = bench.cut_short(quant, ((16, 17), (40, 72), (7, 9)))
    made |= {f"x {list(size)}": inputs.normal(*size, bench.seed) for size in cut}
    return {what: bench.typed(x) for what, x in made.items()}


def _square(bench: Examination) -> Tensor:
    size = bench.columns(bench.rows(64), bench.square)
    return bench.typed(inputs.normal(size, size, bench.seed))


def _transposed(bench: Examination, one: Property) -> Row:
    """Compare the cast of W^T with the transposed cast of W, exactly."""
    bench.function("cast_square")
    quant, length, x = bench.square, bench.square.tile[1], one.inputs(bench)
    straight = bench.cast(x, quant, "cast_square").dequantised(length)
    turned = bench.cast(x.t().contiguous(), quant, "cast_square").dequantised(length)
    if straight is None or turned is None:
        raise NotApplicableError("the subject returns no values, nor codes and scales")
    return judged(one.name, straight != turned.t(), x, straight, turned.t())


def _round_trip(bench: Examination, one: Property) -> Row:
    """Compare code x block scale x outer with the values of the subject, or else with those of the recipe,
    up to the roundings of dequantisation."""
    quant, x = bench.nearest, one.inputs(bench)
    got = bench.cast(x, quant)
    if got.codes is None or (got.scales is None and quant.scale is not None):
        raise NotApplicableError("the subject returns values only")
    if got.outer is None and quant.outer is not None and got.values is None:
        raise NotApplicableError("the subject returns neither values nor a second-level factor")
    decoded = got.codes * expanded(got, quant)
    expected = reference(x, quant).values if got.values is None else got.values
    assert expected is not None
    row = judged(one.name, far(decoded, expected, got.dtype), x, expected, decoded)
    if row.outcome == Outcome.PASS:
        return row
    if got.values is None:  # of another order of operations, the values are others, too
        right, read = reference(x, quant), Numbers(decoded)
        pair = Pair(x, read, right, quant, differences(read, right, quant.tile[1]))
        if declared := explained_by_variants(words_of(bench.subject.variants), [pair]):
            return Row(one.name, Outcome.VARIANT, decoded.numel(), 0, detail=f"as declared: {declared}")
        bench.declarable[one.name] = [pair]
    ratio = (decoded.abs().sum() / expected.abs().sum()).item()
    return replace(row, detail=f"code x scale x outer is {ratio:.3g} times the values")


def repeated(
    name: str, call: Callable[[], Sequence[Tensor | None]], other: Callable[[], object], every: int
) -> Row:
    """Return the row of 20 calls, with another one before `every` few of them: exactly the same results."""
    first, differ, cases = call(), 0, 0
    for number in range(REPEATS):
        if number % every == 0:
            other()
        for mine, again in zip(first, call(), strict=True):
            if mine is not None and again is not None:
                differ += int(unequal(mine, again).sum())
                cases += mine.numel()
    return decided(name, cases, differ)


def _repeats(bench: Examination, one: Property) -> Row:
    """Compare casts of one tensor, with other tensors between, exactly."""
    quant, x = bench.nearest, one.inputs(bench)
    other = bench.typed(100 * inputs.normal(bench.rows(32), bench.columns(128, quant), bench.seed + 1))

    def call() -> Sequence[Tensor | None]:
        got = bench.cast(x, quant)
        return got.values, got.codes, got.scales

    return repeated(one.name, call, lambda: bench.cast(other, quant), every=4)


def _one_peak(bench: Examination) -> list[Tensor]:
    """Make tensors whose largest magnitude is at another place in each."""
    quant, made = bench.nearest, []
    if quant.outer is None or quant.outer.granularity != "tensor":
        raise NotApplicableError("the recipe has no amax of the tensor")
    rows, columns = bench.rows(48), bench.columns(192, quant)
    for number in range(REPEATS):
        x = inputs.normal(rows, columns, bench.seed + number)
        x[number * 7 % rows, number * 37 % columns] = -9.0 if number % 2 else 7.5
        made.append(bench.typed(x))
    return made


def _true_amax(bench: Examination, one: Property) -> Row:
    """Compare the returned amax exactly, and the second-level factor up to its fp32 roundings."""
    quant, made, worst, differ = bench.nearest, one.inputs(bench), "", 0
    for x in made:
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
    return decided(one.name, len(made), differ, detail=worst)


def _kept(bench: Examination, one: Property) -> Row:
    """Compare the input after the call with the input before it, exactly."""
    x = one.inputs(bench)
    handed = x.clone().to(bench.subject.device)
    bench.call("cast", handed)
    return judged(one.name, handed.cpu() != x, x, x, handed.cpu())


def _padding(bench: Examination, one: Property) -> Row:
    """Read the scales beyond the tensor's rows, in the 128 x 4 layout: none is NaN, whatever memory held."""
    quant = bench.nearest
    if not bench.subject.swizzled:
        raise NotApplicableError("the subject's scales are not in the layout of tensor cores")
    nans = cases = 0
    for x in one.inputs(bench):
        poison(*x.shape)
        result = bench.call("cast", x)
        if not isinstance(result, Quantised) or result.scales is None:
            raise NotApplicableError("the subject returns values only")
        raw = result.scales.detach().cpu().contiguous().view(torch.uint8)
        nans += int((raw == (0x7F if quant.outer is not None else 0xFF)).sum())
        cases += raw.numel()
    return decided(one.name, cases, nans)


def _padded(bench: Examination) -> list[Tensor]:
    return [bench.normal(*size, bench.nearest) for size in ((1, 64), (33, 80), (130, 144))]


# --- a given amax -----


def _given(bench: Examination) -> list[tuple[Tensor, float]]:
    """Make tensors with an amax that blocks exceed: their scales would be 448, 449, 464, 480 and more."""
    quant = byte_scales(bench)
    if quant.outer is None or quant.outer.granularity != "tensor":
        raise NotApplicableError("the recipe has no amax of the tensor")
    limit = ELEMENTS[quant.element].max * quant.outer.bound
    wanted = torch.tensor([1.0, 1.0, 449 / 448, 464 / 448, 465 / 448, 480 / 448, 2.0, 1e3, 1e30]) * limit
    rows, columns = bench.rows(16), bench.columns(64, quant)
    x = bench.typed(inputs.from_amaxes(wanted, limit, quant, rows, columns))
    random = bench.normal(16, 64, quant)
    return [
        (x, limit),
        *((random, amax) for amax in (float(random.abs().max()), 1.5, 8.0, 1e-3, 1e4)),
    ]


def _casts_given(bench: Examination, one: Property) -> Row:
    """Compare casts with a given amax: codes and scales exactly, values up to their roundings."""
    bench.function("cast_given")
    quant, pairs = bench.nearest, []
    for x, amax in one.inputs(bench):
        assert quant.outer is not None
        outer = Outer(statistic=f"static:{amax!r}", bound=quant.outer.bound)
        static = quant.model_copy(update={"outer": outer})
        got = bench.cast(x, quant, "cast_given", amax=torch.tensor(amax))
        if got.values is None and got.outer is not None:  # the factor is a result of the amax as well
            got = replace(got, values=got.dequantised(quant.tile[1]))
        expected = reference(x, static)
        difference = differences(got, expected, quant.tile[1])
        pairs.append(Pair(x, got, expected, static, difference, f"amax given as {amax:.6g}"))
    return bench.judged(one.name, pairs)


# --- zeros, NaN and infinities -----


def _zeros(bench: Examination) -> list[Tensor]:
    size = bench.rows(16), bench.columns(64, bench.nearest)
    return [bench.typed(torch.full(size, zero)) for zero in (0.0, -0.0)]


def _zero_tensor(bench: Examination, one: Property) -> Row:
    """Look for values other than zero, and for scales that are not finite."""
    quant, differ, cases, block, detail = bench.nearest, 0, 0, None, ""
    for x in one.inputs(bench):
        got, zero = bench.cast(x, quant), float(x[0, 0])
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
                if part.shape == x.shape:
                    block = judged(one.name, wrong, x, torch.zeros_like(part), part).block
    return decided(one.name, cases, differ, block, detail)


def _second_block(bench: Examination) -> tuple[slice, int]:
    """Return the columns of the second block, and one of them: a recipe without blocks has one each."""
    length = bench.nearest.tile[1]
    return slice(length, 2 * length), length + min(5, length - 1)


def _with(number: float) -> Callable[[Examination], Tensor]:
    """Return inputs of normal numbers, of which one of the second block of row 3 is another one."""

    def made(bench: Examination) -> Tensor:
        x = bench.normal(16, 4 * bench.nearest.tile[1], bench.nearest)
        x[3, _second_block(bench)[1]] = number
        return x

    return made


def _declarable(
    bench: Examination, one: Property, form: str, detail: str, cases: int = 1, differ: int = 1
) -> Row:
    """Return the row of a result that holds if its form is declared: one of `declared.FORMS`."""
    if bench.subject.variants.get(one.name) == form:
        return Row(one.name, Outcome.VARIANT, cases, 0, detail=detail)
    bench.forms[one.name] = form
    return Row(one.name, Outcome.FAIL, cases, differ, detail=detail)


def _nan_visible(bench: Examination, one: Property) -> Row:
    """Look at the NaN's whole block, and at the tensor: neither may look like finite numbers."""
    (values, _), (columns, column) = bench.values(one.inputs(bench), bench.nearest), _second_block(bench)
    block, value, rest = values[3, columns], float(values[3, column]), values.clone()
    rest[3, columns] = 0
    if bool(rest.isnan().any()) or not bool(block.isfinite().any()):
        form = "tensor" if bool(rest.isnan().any()) else "block"
        outcome = Outcome.VARIANT if bench.subject.variants.get(one.name) == form else Outcome.PASS
        return Row(one.name, outcome, 1, 0, detail=f"the NaN makes its {form} NaN")
    if not math.isfinite(value):
        return _declarable(bench, one, "element", "the block of the NaN is finite but for it")
    return _declarable(bench, one, "saturated" if value else "zero", f"the NaN became {value:.4g}")


def _infinity_visible(bench: Examination, one: Property) -> Row:
    """Look at the infinity's block: not all of it may be finite, unless the recipe has no second level."""
    (values, got), (columns, column) = bench.values(one.inputs(bench), bench.nearest), _second_block(bench)
    value = float(values[3, column])
    if bench.nearest.outer is None:  # the largest scale of the format is finite, and so is the largest value
        detail = f"inf becomes {value:.4g}"
        if got.scales is not None:  # that of the second block
            detail += f", scale {got.scales[3, 1]:.4g}"
        return Row(one.name, Outcome.REPORT, 1, 0, detail=detail)
    if not bool(values[3, columns].isfinite().all()):
        return Row(one.name, Outcome.PASS, 1, 0)
    return _declarable(bench, one, "saturated", f"inf became {value:.4g}")


def _beside_infinity(bench: Examination) -> Tensor:
    """Make blocks with amaxes from 6 x 448 to 1e30 beside an infinity."""
    quant = bench.nearest
    if quant.outer is None or quant.scale is None:
        raise NotApplicableError("the recipe has no second level")
    wanted = torch.tensor([448.0, 449.0, 464.0, 465.0, 480.0, 1e4, 1e30]) * 6
    x = inputs.from_amaxes(wanted, 1.0, quant, bench.rows(16), bench.columns(64, quant))
    x[0, 0] = float("inf")
    return bench.typed(x)


def _neighbours(bench: Examination, one: Property) -> Row:
    """Look for scales that are NaN."""
    got = bench.cast(one.inputs(bench), bench.nearest)
    if got.scales is None:
        raise NotApplicableError("the subject returns no scales")
    nans = got.scales.isnan()
    nans[0, 0] = False
    if not (differ := int(nans.sum())):
        return Row(one.name, Outcome.PASS, nans.numel(), 0)
    detail = f"{differ} scales are NaN beside one infinity"
    return _declarable(bench, one, "nan", detail, nans.numel(), differ)


PROPERTIES = (
    Property("square_blocks", _squares, "cast_square", equal_casts),
    Property("square_transpose", _square, "cast_square", _transposed),
    Property("round_trip", _small, "cast", _round_trip),
    Property("repeats", _normal(64, 256), "cast", _repeats),
    Property("true_amax", _one_peak, "cast", _true_amax),
    Property("input_kept", _normal(32, 128), "cast", _kept),
    Property("padding_bytes", _padded, "cast", _padding),
    Property("saturated_scales", _given, "cast_given", _casts_given),
    Property("zero_tensor", _zeros, "cast", _zero_tensor),
    Property("nan_visible", _with(float("nan")), "cast", _nan_visible),
    Property("infinity_visible", _with(float("inf")), "cast", _infinity_visible),
    Property("infinite_neighbours", _beside_infinity, "cast", _neighbours),
)
