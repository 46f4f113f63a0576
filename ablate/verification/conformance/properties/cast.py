"""Casts to nearest: the same codes and scales as the recipe on data of every kind."""

from dataclasses import replace

from torch import Tensor

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
from ablate.verification.conformance.numbers import FP32_ROUNDINGS, Numbers, differences, far
from ablate.verification.conformance.properties.property import Property
from ablate.verification.conformance.result import Block, Outcome, Row

EXACT = "codes and scales exactly; values up to the roundings of dequantisation"
ROWS, COLUMNS = 64, 256
REPEATS = 20


def _data(bench: Examination, dtype: str) -> list[Tensor]:
    quant = bench.nearest
    rows, columns = bench.rows(ROWS), bench.columns(COLUMNS, quant)
    made = (
        inputs.normal(rows, columns, bench.seed),
        inputs.spread(rows, columns, quant.tile[1], bench.seed),
        inputs.outliers(rows, columns, bench.seed),
        inputs.negative(rows, columns, bench.seed),
    )
    return [bench.typed(x, dtype) for x in made]


def random_bf16(bench: Examination) -> Row:
    """Cast normal numbers, blocks over many binades and outliers, in bf16."""
    return bench.compare("random_bf16", _data(bench, "bfloat16"), bench.nearest)


def random_fp32(bench: Examination) -> Row:
    """Cast fp32 numbers, of which nearly none is a bf16 number."""
    return bench.compare("random_fp32", _data(bench, "float32"), bench.nearest)


def element_ties(bench: Examination) -> Row:
    """Cast values halfway between two elements, with scales that are powers of two."""
    quant = bench.nearest
    rows, columns = bench.rows(32), bench.columns(256, quant)
    x = inputs.element_ties(rows, columns, quant, bench.seed)
    return bench.compare("element_ties", [bench.typed(x)], quant)


def order_of_scale(bench: Examination) -> Row:
    """Cast bf16 data on which a (S/6) and (a/6) S round to different scales."""
    quant = bench.nearest
    made = inputs.scale_order(quant, bench.rows(32), bench.columns(256, quant))
    if not made:
        raise NotApplicableError("the recipe has no second level, so nothing depends on the order")
    row = bench.compare("order_of_scale", [bench.typed(x) for x in made], quant)
    return _with_order(row, "s = e4m3(a (S (1/6)))")


def order_of_factor(bench: Examination) -> Row:
    """Cast bf16 data on which 1/(s (1/S)), S/s and division by s (A/2688) give different codes."""
    quant = bench.nearest
    made = inputs.factor_order(quant, bench.rows(32), bench.columns(256, quant))
    if not made:
        raise NotApplicableError("the recipe has no second level, so nothing depends on the order")
    row = bench.compare("order_of_factor", [bench.typed(x) for x in made], quant)
    return _with_order(row, "elements x (1/(s (1/S)))")


def _with_order(row: Row, order: str) -> Row:
    """Return a row that failed with the order of the recipe's operations in its detail."""
    if row.outcome != Outcome.FAIL:
        return row
    text = f"recipe: {order}, docs/reference/numerics.md section 3"
    return replace(row, detail="; ".join(filter(None, (text, row.detail))))


def near_ties_of_choice(bench: Examination) -> Row:
    """Cast blocks whose two candidates (6 and 4) have nearly equal errors."""
    quant = bench.nearest
    if quant.select is None:
        raise NotApplicableError("the recipe chooses between no candidates")
    rows, columns = bench.rows(64), bench.columns(256, quant)
    x = inputs.near_ties(rows, columns, quant, bench.seed)
    return bench.compare("near_ties_of_choice", [bench.typed(x, dtype) for dtype, x in x.items()], quant)


def square_blocks(bench: Examination) -> Row:
    """Cast weights in square blocks."""
    bench.function("cast_square")
    quant = bench.square
    rows, columns = bench.rows(64), bench.columns(128, quant)
    made = [inputs.normal(rows, columns, bench.seed), inputs.spread(rows, columns, 16, bench.seed)]
    made.append(inputs.negative(rows, columns, bench.seed))
    made.append(inputs.element_ties(rows, columns, quant, bench.seed))
    made += [
        inputs.normal(*size, bench.seed) for size in bench.cut_short(quant, ((16, 17), (40, 72), (7, 9)))
    ]
    return bench.compare("square_blocks", [bench.typed(x) for x in made], quant, "cast_square")


def square_transpose(bench: Examination) -> Row:
    """Compare the cast of W^T in square blocks with the transposed cast of W."""
    bench.function("cast_square")
    quant, length = bench.square, bench.square.tile[1]
    size = bench.columns(bench.rows(64), quant)
    x = bench.typed(inputs.normal(size, size, bench.seed))
    straight = bench.cast(x, quant, "cast_square").dequantised(length)
    turned = bench.cast(x.t().contiguous(), quant, "cast_square").dequantised(length)
    if straight is None or turned is None:
        raise NotApplicableError("the subject returns no values, nor codes and scales")
    differ = straight != turned.t()
    outcome = Outcome.FAIL if differ.any() else Outcome.PASS
    return Row(
        "square_transpose",
        outcome,
        straight.numel(),
        int(differ.sum()),
        _first(differ, x, straight, turned.t()),
    )


def _first(differ: Tensor, x: Tensor, expected: Tensor, got: Tensor) -> Block | None:
    """Return the first element in which two matrices differ; None if there is none."""
    if not differ.any():
        return None
    row, column = (int(place) for place in differ.nonzero()[0])
    one, other, source = (float(part[row, column]) for part in (expected, got, x))
    return Block(f"row {row}, column {column}", (source,), (one,), (other,))


def round_trip(bench: Examination) -> Row:
    """Compare code x block scale x outer with the values of the subject, or else with those of the recipe."""
    quant = bench.nearest
    x = bench.typed(2.5e-3 * inputs.normal(bench.rows(32), bench.columns(128, quant), bench.seed))
    got = bench.cast(x, quant)
    if got.codes is None or (got.scales is None and quant.scale is not None):
        raise NotApplicableError("the subject returns values only")
    if got.outer is None and quant.outer is not None and got.values is None:
        raise NotApplicableError("the subject returns neither values nor a second-level factor")
    decoded = got.codes * expanded(got, quant)
    expected = reference(x, quant).values if got.values is None else got.values
    assert expected is not None
    differ = far(decoded, expected, got.dtype)
    if differ.any() and got.values is None:  # of another order of operations, the values are others, too
        read = Numbers(decoded)
        pair = Pair(
            x, read, reference(x, quant), quant, differences(read, reference(x, quant), quant.tile[1])
        )
        if declared := explained_by_variants(words_of(bench.subject.variants), [pair]):
            return Row("round_trip", Outcome.VARIANT, decoded.numel(), 0, detail=f"as declared: {declared}")
        bench.declarable["round_trip"] = [pair]
    outcome = Outcome.FAIL if differ.any() else Outcome.PASS
    ratio = (decoded.abs().sum() / expected.abs().sum()).item()
    detail = f"code x scale x outer is {ratio:.3g} times the values" if differ.any() else ""
    block = Block("row 0", (), tuple(expected[0, :4].tolist()), tuple(decoded[0, :4].tolist()))
    return Row(
        "round_trip",
        outcome,
        decoded.numel(),
        int(differ.sum()),
        block if differ.any() else None,
        detail=detail,
    )


def repeats(bench: Examination) -> Row:
    """Cast one tensor 20 times, with other tensors between."""
    quant = bench.nearest
    x = bench.typed(inputs.normal(bench.rows(64), bench.columns(256, quant), bench.seed))
    first = bench.cast(x, quant)
    other = bench.typed(100 * inputs.normal(bench.rows(32), bench.columns(128, quant), bench.seed + 1))
    differ = cases = 0
    for number in range(REPEATS):
        if number % 4 == 0:
            bench.cast(other, quant)
        again = bench.cast(x, quant)
        for one, two in (
            (first.values, again.values),
            (first.codes, again.codes),
            (first.scales, again.scales),
        ):
            if one is not None and two is not None:
                differ += int(((one != two) & ~(one.isnan() & two.isnan())).sum())
                cases += one.numel()
    return Row("repeats", Outcome.FAIL if differ else Outcome.PASS, cases, differ)


def stale_scales(bench: Examination) -> Row:
    """Cast tensors of other magnitudes in turn: each has its own scale."""
    quant = bench.nearest
    rows, columns = bench.rows(32), bench.columns(128, quant)
    factors = (1.0, 1000.0, 1e-3, 1.0, 30.0, 1e-6)
    made = [bench.typed(f * inputs.normal(rows, columns, bench.seed + i)) for i, f in enumerate(factors)]
    pairs = [bench.pair(x, quant, where=f"call {number}") for number, x in enumerate(made)]
    return bench.judged("stale_scales", pairs)


def true_amax(bench: Examination) -> Row:
    """Compare the amax that the subject returns, or its second-level factor, with the largest magnitude."""
    quant = bench.nearest
    if quant.outer is None or quant.outer.granularity != "tensor":
        raise NotApplicableError("the recipe has no amax of the tensor")
    rows, columns = bench.rows(48), bench.columns(192, quant)
    differ, cases, worst = 0, 0, ""
    for number in range(REPEATS):
        x = inputs.normal(rows, columns, bench.seed + number)
        x[number * 7 % rows, number * 37 % columns] = -9.0 if number % 2 else 7.5
        x = bench.typed(x)
        got, expected = bench.cast(x, quant), reference(x, quant)
        if got.amax is None and (got.outer is None or got.outer.ndim):
            raise NotApplicableError("the subject returns neither its amax nor one factor of the tensor")
        cases += 1
        assert expected.amax is not None
        assert expected.outer is not None
        if got.amax is not None and got.amax != expected.amax:
            differ, worst = differ + 1, f"amax {float(got.amax):.6g}, not {float(expected.amax):.6g}"
        elif got.outer is not None and got.outer.ndim == 0:
            off = abs(float(got.outer) / float(expected.outer) - 1)
            if not off <= FP32_ROUNDINGS:
                differ += 1
                worst = f"outer {float(got.outer):.6g}, not {float(expected.outer):.6g}"
    return Row("true_amax", Outcome.FAIL if differ else Outcome.PASS, cases, differ, detail=worst)


def input_kept(bench: Examination) -> Row:
    """Compare the input after the call with the input before it."""
    quant = bench.nearest
    x = bench.typed(inputs.normal(bench.rows(32), bench.columns(128, quant), bench.seed))
    handed = x.clone().to(bench.subject.device)
    bench.call("cast", handed)
    differ = handed.cpu() != x
    outcome = Outcome.FAIL if differ.any() else Outcome.PASS
    return Row("input_kept", outcome, x.numel(), int(differ.sum()), _first(differ, x, x, handed.cpu()))


def strides(bench: Examination) -> Row:
    """Cast transposed, sliced and expanded views: the same result as for their contiguous copies."""
    quant = bench.nearest
    rows, columns = bench.rows(64), bench.columns(128, quant)
    whole = inputs.normal(rows, 2 * columns, bench.seed)
    views = {
        "transposed view": bench.typed(inputs.normal(columns, rows, bench.seed)).t(),
        "every second column": bench.typed(whole)[:, ::2],
        "left half of a matrix": bench.typed(whole)[:, :columns],
        "one row expanded": bench.typed(whole)[:1, :columns].expand(rows, columns),
    }
    pairs = []
    for what, view in views.items():
        got, expected = bench.cast(view, quant), reference(view, quant)
        pairs.append(Pair(view, got, expected, quant, differences(got, expected, quant.tile[1]), what))
    return bench.judged("strides", pairs)


PROPERTIES = (
    Property(
        "random_bf16",
        "Random bf16 data gets the recipe's codes and scales.",
        EXACT,
        "cast",
        (7, 10, 22),
        random_bf16,
    ),
    Property(
        "random_fp32",
        "Random fp32 data gets the recipe's codes and scales.",
        EXACT,
        "cast",
        (8,),
        random_fp32,
    ),
    Property(
        "element_ties",
        "Elements halfway between two codes go to the even one.",
        EXACT,
        "cast",
        (7,),
        element_ties,
    ),
    Property(
        "order_of_scale", "The block scale is a (S/6), in this order.", EXACT, "cast", (7,), order_of_scale
    ),
    Property(
        "order_of_factor",
        "The element factor is 1/(s (1/S)), in this order.",
        EXACT,
        "cast",
        (8,),
        order_of_factor,
    ),
    Property(
        "near_ties_of_choice",
        "Of two candidates, the one with the smaller error in the recipe's order of additions wins.",
        EXACT,
        "cast",
        (9,),
        near_ties_of_choice,
    ),
    Property(
        "square_blocks",
        "Weights in square blocks get the recipe's codes and scales.",
        EXACT,
        "cast_square",
        (25,),
        square_blocks,
    ),
    Property(
        "square_transpose",
        "The cast of W^T is the transposed cast of W.",
        "exact",
        "cast_square",
        (25,),
        square_transpose,
    ),
    Property(
        "round_trip",
        "Code x block scale x second-level factor is the value.",
        EXACT,
        "cast",
        (17,),
        round_trip,
    ),
    Property("repeats", "The same input gives the same bits, 20 times.", "exact", "cast", (22,), repeats),
    Property("stale_scales", "Each call computes its own scales.", EXACT, "cast", (23,), stale_scales),
    Property(
        "true_amax",
        "The second level is that of the largest magnitude.",
        "exact; of a factor, its fp32 roundings",
        "cast",
        (22,),
        true_amax,
    ),
    Property("input_kept", "The input is not changed.", "exact", "cast", (), input_kept),
    Property(
        "strides", "Views that are not contiguous give what their copies give.", EXACT, "cast", (30,), strides
    ),
)
