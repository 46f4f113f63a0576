"""Calls of a cast: what it returns besides codes and scales, twice, for zeros, NaN and infinities."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS, SCALES
from ablate.numerics.quantize import Outer
from ablate.verification.conformance import inputs
from ablate.verification.conformance.declared import words_of
from ablate.verification.conformance.examination import (
    Examination,
    NotApplicableError,
    Pair,
    expanded,
    explained_by_variants,
    reference,
)
from ablate.verification.conformance.numbers import FP32_ROUNDINGS, Numbers, differences, far, over_elements
from ablate.verification.conformance.properties.casts import equal_casts, poison
from ablate.verification.conformance.properties.property import Property
from ablate.verification.conformance.result import Block, Outcome, Row
from ablate.verification.conformance.subject import Quantised

REPEATS = 20


def _normal(rows: int, columns: int, factor: float = 1.0) -> Callable[[Examination], Tensor]:
    """Return inputs of one tensor of normal bf16 numbers of about this size."""

    def made(bench: Examination) -> Tensor:
        size = bench.rows(rows), bench.columns(columns, bench.nearest)
        return bench.typed(factor * inputs.normal(*size, bench.seed))

    return made


def _judged(name: str, differ: Tensor, x: Tensor, expected: Tensor, got: Tensor) -> Row:
    """Return the row of an exact comparison of two matrices, with the first element that differs."""
    if not differ.any():
        return Row(name, Outcome.PASS, differ.numel())
    row, column = (int(place) for place in differ.nonzero()[0])
    one, other, source = (float(part[row, column]) for part in (expected, got, x))
    block = Block(f"row {row}, column {column}", (source,), (one,), (other,))
    return Row(name, Outcome.FAIL, differ.numel(), int(differ.sum()), block)


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
    return _judged(one.name, straight != turned.t(), x, straight, turned.t())


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
    differ = far(decoded, expected, got.dtype)
    row = _judged(one.name, differ, x, expected, decoded)
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


def _repeats(bench: Examination, one: Property) -> Row:
    """Compare 20 casts of one tensor, with other tensors between, exactly."""
    quant, x = bench.nearest, one.inputs(bench)
    first = bench.cast(x, quant)
    other = bench.typed(100 * inputs.normal(bench.rows(32), bench.columns(128, quant), bench.seed + 1))
    differ = cases = 0
    for number in range(REPEATS):
        if number % 4 == 0:
            bench.cast(other, quant)
        again = bench.cast(x, quant)
        for mine, two in (
            (first.values, again.values),
            (first.codes, again.codes),
            (first.scales, again.scales),
        ):
            if mine is not None and two is not None:
                differ += int(((mine != two) & ~(mine.isnan() & two.isnan())).sum())
                cases += mine.numel()
    return Row(one.name, Outcome.FAIL if differ else Outcome.PASS, cases, differ)


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
    """Compare the returned amax exactly, or the second-level factor up to its fp32 roundings."""
    quant, made, worst, differ = bench.nearest, one.inputs(bench), "", 0
    for x in made:
        got, expected = bench.cast(x, quant), reference(x, quant)
        if got.amax is None and (got.outer is None or got.outer.ndim):
            raise NotApplicableError("the subject returns neither its amax nor one factor of the tensor")
        what, mine, right = ("outer", got.outer, expected.outer)
        if got.amax is not None:
            what, mine, right = ("amax", got.amax, expected.amax)
        assert mine is not None
        assert right is not None
        if not abs(float(mine) / float(right) - 1) <= (FP32_ROUNDINGS if what == "outer" else 0):
            differ, worst = differ + 1, f"{what} {float(mine):.6g}, not {float(right):.6g}"
    return Row(one.name, Outcome.FAIL if differ else Outcome.PASS, len(made), differ, detail=worst)


def _kept(bench: Examination, one: Property) -> Row:
    """Compare the input after the call with the input before it, exactly."""
    x = one.inputs(bench)
    handed = x.clone().to(bench.subject.device)
    bench.call("cast", handed)
    return _judged(one.name, handed.cpu() != x, x, x, handed.cpu())


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
    return Row(one.name, Outcome.FAIL if nans else Outcome.PASS, cases, nans)


def _padded(bench: Examination) -> list[Tensor]:
    sizes = [
        (bench.rows(rows), bench.columns(wide, bench.nearest))
        for rows, wide in ((1, 64), (33, 80), (130, 144))
    ]
    return [bench.typed(inputs.normal(*size, bench.seed)) for size in sizes]


# --- a given amax -----


def _given(bench: Examination) -> list[tuple[Tensor, float]]:
    """Make tensors with an amax that blocks exceed: their scales would be 448, 449, 464, 480 and more."""
    quant = bench.nearest
    if quant.scale is None:
        raise NotApplicableError("the recipe has no block scales")
    kind = SCALES[quant.scale.format]
    if not kind.mantissa or kind.bits > 8:
        raise NotApplicableError("the recipe's scales are powers of two, or wider than a byte")
    if quant.outer is None or quant.outer.granularity != "tensor":
        raise NotApplicableError("the recipe has no amax of the tensor")
    limit = ELEMENTS[quant.element].max * quant.outer.bound
    wanted = torch.tensor([1.0, 1.0, 449 / 448, 464 / 448, 465 / 448, 480 / 448, 2.0, 1e3, 1e30]) * limit
    rows, columns = bench.rows(16), bench.columns(64, quant)
    x = bench.typed(inputs.from_amaxes(wanted, limit, quant, rows, columns))
    random = bench.typed(inputs.normal(rows, columns, bench.seed))
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
                    row, column = (int(place) for place in wrong.nonzero()[0])
                    block = Block(f"row {row}, column {column}", (zero,), (0.0,), (first,))
    return Row(one.name, Outcome.FAIL if differ else Outcome.PASS, cases, differ, block, detail=detail)


def _with(number: float) -> Callable[[Examination], Tensor]:
    """Return inputs of normal numbers, of which (3, block + 5) is another one."""

    def made(bench: Examination) -> Tensor:
        quant = bench.nearest
        x = inputs.normal(bench.rows(16), bench.columns(4 * quant.tile[1], quant), bench.seed)
        x[3, quant.tile[1] + 5] = number
        return bench.typed(x)

    return made


def _cast_beside(bench: Examination, x: Tensor) -> tuple[Numbers, Tensor, int]:
    """Cast x: what came back, its values, and the length of a block."""
    got, length = bench.cast(x, bench.nearest), bench.nearest.tile[1]
    values = got.dequantised(length)
    if values is None:
        raise NotApplicableError("the subject returns codes without a second level")
    return got, values, length


def _nan_visible(bench: Examination, one: Property) -> Row:
    """Look at the NaN's whole block, and at the tensor: neither may look like finite numbers."""
    _, values, length = _cast_beside(bench, one.inputs(bench))
    block, rest = values[3, length : 2 * length], values.clone()
    rest[3, length : 2 * length] = 0
    form = _form(block, 5, rest)
    declared = bench.subject.variants.get(one.name)
    if form in ("tensor", "block"):
        outcome = Outcome.VARIANT if declared == form else Outcome.PASS
        return Row(one.name, outcome, 1, 0, detail=f"the NaN makes its {form} NaN")
    detail = (
        f"the NaN became {float(block[5]):.4g}"
        if form != "element"
        else "the block of the NaN is finite but for it"
    )
    if declared == form:
        return Row(one.name, Outcome.VARIANT, 1, 0, detail=detail)
    detail += f'; declare variants={{"{one.name}": "{form}"}} if meant'
    return Row(one.name, Outcome.FAIL, 1, 1, detail=detail)


def _form(block: Tensor, place: int, rest: Tensor) -> str:
    if bool(rest.isnan().any()):
        return "tensor"
    if not bool(block.isfinite().any()):
        return "block"
    if not bool(block[place].isfinite()):
        return "element"
    return "zero" if float(block[place]) == 0 else "saturated"


def _infinity_visible(bench: Examination, one: Property) -> Row:
    """Look at the infinity's block: not all of it may be finite, unless the recipe has no second level."""
    got, values, length = _cast_beside(bench, one.inputs(bench))
    value = float(values[3, length + 5])
    if bench.nearest.outer is None:  # the largest scale of the format is finite, and so is the largest value
        scales = None if got.scales is None else over_elements(got.scales, length, values.shape[1])
        detail = f"inf becomes {value:.4g}" + (
            "" if scales is None else f", scale {scales[3, length + 5]:.4g}"
        )
        return Row(one.name, Outcome.REPORT, 1, 0, detail=detail)
    if not bool(torch.isfinite(values[3, length : 2 * length]).all()):
        return Row(one.name, Outcome.PASS, 1, 0)
    if bench.subject.variants.get(one.name) == "saturated":
        return Row(one.name, Outcome.VARIANT, 1, 0, detail=f"inf becomes {value:.4g}")
    detail = f'inf became {value:.4g}; declare variants={{"{one.name}": "saturated"}} if meant'
    return Row(one.name, Outcome.FAIL, 1, 1, detail=detail)


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
    differ = int(nans.sum())
    if not differ:
        return Row(one.name, Outcome.PASS, nans.numel(), 0)
    detail = f"{differ} scales are NaN beside one infinity"
    if bench.subject.variants.get(one.name) == "nan":
        return Row(one.name, Outcome.VARIANT, nans.numel(), 0, detail=detail)
    detail += f'; declare variants={{"{one.name}": "nan"}} if meant'
    return Row(one.name, Outcome.FAIL, nans.numel(), differ, detail=detail)


PROPERTIES = (
    Property(
        "square_blocks",
        "Weights in square blocks get the recipe's codes and scales.",
        _squares,
        "cast_square",
        equal_casts,
    ),
    Property(
        "square_transpose",
        "The cast of W^T is the transposed cast of W.",
        _square,
        "cast_square",
        _transposed,
    ),
    Property(
        "round_trip",
        "Code x block scale x second-level factor is the value.",
        _normal(32, 128, 2.5e-3),
        "cast",
        _round_trip,
    ),
    Property("repeats", "The same input gives the same bits, 20 times.", _normal(64, 256), "cast", _repeats),
    Property(
        "true_amax", "The second level is that of the largest magnitude.", _one_peak, "cast", _true_amax
    ),
    Property("input_kept", "The input is not changed.", _normal(32, 128), "cast", _kept),
    Property("padding_bytes", "Scale bytes that pad the layout are written.", _padded, "cast", _padding),
    Property(
        "saturated_scales",
        "Scales above the maximum become the maximum, never NaN.",
        _given,
        "cast_given",
        _casts_given,
    ),
    Property(
        "zero_tensor", "A zero tensor stays zero, and nothing in it is NaN.", _zeros, "cast", _zero_tensor
    ),
    Property("nan_visible", "A NaN shows in the result.", _with(float("nan")), "cast", _nan_visible),
    Property(
        "infinity_visible",
        "An infinity shows in the result.",
        _with(float("inf")),
        "cast",
        _infinity_visible,
    ),
    Property(
        "infinite_neighbours",
        "Scales beside an infinity saturate; none is NaN.",
        _beside_infinity,
        "cast",
        _neighbours,
    ),
)
