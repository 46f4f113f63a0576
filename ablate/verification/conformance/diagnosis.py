"""Name of the fault that a subject has: the wrong computation that gives what it returned.

Every known fault whose computation can be written down is computed on the inputs of a property that failed,
and compared with what the subject returned: bit for bit for codes and scales, within the roundings of
dequantisation or of the sum for values and products. A match names the fault. Where no computation can be
written down (random draws, unwritten memory), a mark of the differences does.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from ablate.numerics.spec import Quant
from ablate.verification.conformance import inputs
from ablate.verification.conformance.cast_faults import CAST_FAULTS, HINTS, VARIANTS
from ablate.verification.conformance.computation import Computation
from ablate.verification.conformance.declared import entry, split, words_of
from ablate.verification.conformance.decode_tables import decode_fault
from ablate.verification.conformance.draw_faults import MANY, stochastic_fault
from ablate.verification.conformance.examination import (
    Examination,
    NotApplicableError,
    Pair,
    RefusedError,
    explains,
    varied,
    weighed,
)
from ablate.verification.conformance.numbers import UnreadableError
from ablate.verification.conformance.product_diagnosis import (
    grouped_fault,
    long_sum_fault,
    product_fault,
    random_fault,
)
from ablate.verification.conformance.properties import grouped, product
from ablate.verification.conformance.properties.property import Property
from ablate.verification.conformance.result import Outcome, Row
from ablate.verification.conformance.rotation_faults import NEAR, rotation_fault
from ablate.verification.conformance.stages.casts import wrong_stages

_CASTS = 3
"""Casts that a computation has to explain, of those that differ."""
_UNNAMED = 3
"""Properties without a name after which no more known faults are tried on a cast: its stages are measured."""
_ENOUGH = 8
"""Numbers that have to differ for a fault to be named."""
_ABSENT = 0.02
"""Part of the numbers that such a fault changes, in which the subject may be right."""
MARKS = {
    "infinity_visible": "infinity becomes a number",
    "infinite_neighbours": "cast to E4M3 without clamp",
    "padding_bytes": "padding of the scale layout not written",
    "repeats": "amax or memory raced: results change from call to call",
    "product_repeats": "amax or memory raced: results change from call to call",
    "input_kept": "input overwritten",
    "rotation_axis": "groups of rows rotated, not of columns",
    "rotation_large": "rows of a large tensor not rotated as those of a small one",
}
"""Fault of a property that can fail in one way only."""
_MULTIPLES = (16, 32, 64, 128)
_SIZES = {
    "grouped_unaligned": grouped.UNALIGNED,
    "grouped_ragged": grouped.RAGGED,
    "grouped_all_to_one": (0, 192, 0),
}


def diagnosed(bench: Examination, one: Property, row: Row) -> Row:
    """Return a row that failed with its likely fault, if a known one gives what the subject returned."""
    if row.outcome != Outcome.FAIL or row.fault:
        return row
    try:
        fault = _fault(bench, one, row)
    except (NotApplicableError, RefusedError, UnreadableError):
        return row
    except Exception as error:  # what a subject returned may be such that a computation of ours raises
        return replace(row, detail=_unnamed(row, error))
    return replace(row, fault=fault)


def _unnamed(row: Row, error: Exception) -> str:
    """Return the detail of a row whose diagnosis raised."""
    text = f"no name, as the diagnosis raised {type(error).__name__}"
    return "; ".join(filter(None, (row.detail, text)))


def hinted(bench: Examination, row: Row) -> Row:
    """Return a row with the variant that its subject may declare, if its fault can be meant."""
    hint = _hint(bench, row.property, row.fault) if row.outcome == Outcome.FAIL else ""
    return replace(row, detail="; ".join(filter(None, (row.detail, hint)))) if hint else row


def _hint(bench: Examination, name: str, fault: str) -> str:
    """Return what to declare, if the property then holds; else ''."""
    pairs = bench.declarable.get(name) or bench.failed.get(name)
    if not pairs:
        return ""
    declared, hinted = {*words_of(bench.subject.variants)}, {*split(HINTS.get(fault, ""))}
    tried = [declared | hinted, hinted] if hinted else []
    tried += [declared | {word} for word in VARIANTS] if declared else []
    for words in tried:
        if explains(varied(word for word in VARIANTS if word in words), pairs):
            return f"declare {entry(words)} if meant"
    return ""


def _fault(bench: Examination, one: Property, row: Row) -> str:
    if one.name in MARKS:
        return MARKS[one.name]
    if one.name in ("long_sums", "contraction_sizes"):
        lengths = product.LONG if one.name == "long_sums" else product.CONTRACTIONS
        return long_sum_fault(bench, product.summed(bench, lengths))
    if pairs := bench.failed.get(one.name):
        return cast_fault(bench, pairs)
    if one.name in ("round_trip", "true_amax"):
        return _factor_fault(bench)
    if one.name == "zero_tensor":
        zeros = torch.zeros(bench.rows(16), bench.columns(64, bench.nearest))
        pair = bench.pair(bench.typed(zeros), bench.nearest)
        wrong = [one for pairs in bench.failed.values() for one in pairs if one.quant == bench.nearest]
        # Numbers below the smallest normal one of fp32 are not judged by a cast, and show in this row alone.
        if pair.difference.count:
            return cast_fault(bench, [pair]) or wrong_stages([pair])
        return decode_fault(_spread(wrong, 16))
    if one.name == "square_transpose":
        quant, rows = bench.square, bench.rows(64)
        x = bench.typed(inputs.normal(rows, bench.columns(64, quant), bench.seed))
        pair = bench.pair(x, quant, "cast_square")
        return cast_fault(bench, [pair]) if pair.difference.count else ""
    if one.needs == "cast_stochastic":
        return stochastic_fault(bench)
    if one.needs == "rotate":
        return rotation_fault(bench)
    if one.name == "random_gradients":
        return random_fault(bench)
    if one.needs == "product":
        return product_fault(bench)
    if one.needs == "grouped":
        if one.name in ("grouped_widths", "grouped_fp32"):
            return grouped_fault(bench, grouped.PADDED, grouped.WIDTHS[0])
        return grouped_fault(bench, _SIZES.get(one.name, grouped.ALIGNED))
    return ""


def cast_fault(bench: Examination, pairs: Sequence[Pair]) -> str:
    """Return the fault whose computation gives what the subject returned for these tensors, or ''.

    It has to be consistent with every other cast, too: where it would differ from the recipe and the subject
    does not, it is not what the subject computes. A fault of some of the blocks has to give all numbers that
    differ, and may be absent from a few. Of several faults that give the same numbers, the one that explained
    an earlier row is named, or the first, as `CAST_FAULTS` begins with the simplest.
    """
    shown = [*pairs[: _CASTS - 1], pairs[-1]] if len(pairs) > _CASTS else list(pairs)
    shown.sort(key=lambda pair: pair.x.numel())  # small ones rule out most faults
    quant = pairs[0].quant
    others = [pair for seen in bench.seen.values() for pair in _spread(seen) if pair.quant == quant]
    if bench.subject.cast is not None and quant == bench.nearest:
        x = inputs.spread(bench.rows(32), bench.columns(128, quant), 16, bench.seed + 77)
        others.append(bench.pair(bench.typed(x), quant))
    all_wrong = [pair for wrong in bench.failed.values() for pair in wrong if pair.quant == quant] or shown
    if sum(pair.difference.count for pair in [*all_wrong, *shown]) < _ENOUGH:
        return ""
    found: list[str] = bench.cache.setdefault("faults", [])  # what explained an earlier row comes first
    unnamed = bench.cache.setdefault("unnamed", Counter())
    known = [] if unnamed[_kind(pairs[0]).model_dump_json()] >= _UNNAMED else CAST_FAULTS
    for allowed in (0.0, _ABSENT):
        for name in [*found, *known]:
            computation = CAST_FAULTS[name]
            if allowed and ", and " in name:
                continue
            if computation.swizzled not in (None, bench.subject.swizzled):
                continue
            if _fits(computation, shown, others, allowed):
                if name not in found:
                    found.insert(0, name)
                if allowed:
                    bench.cache.setdefault("partial", set()).add(name)
                return name
        if allowed == 0.0 and (decoded := decode_fault(_spread(all_wrong, 16)) or decode_fault(shown)):
            return decoded
    unnamed[_kind(pairs[0]).model_dump_json()] += 1
    return _unwritten(pairs)


def _spread(pairs: Sequence[Pair], number: int = 3) -> Sequence[Pair]:
    return pairs[:: max(1, len(pairs) // number)]


def _fits(computation: Computation, shown: Sequence[Pair], others: Sequence[Pair], allowed: float) -> bool:
    """Return True if a computation gives what differs in `shown`, and is absent from nothing in `others`.

    Args:
        computation: A suspected fault.
        shown: Casts that differ.
        others: All casts.
        allowed: Part of the numbers that it changes, in which the subject may be right; 0: none.
    """
    predicted = absent = 0
    for pair in shown:
        one = weighed(computation, pair)
        if one is None or one.unexplained or (one.unlike and not allowed):
            return False
        predicted, absent = predicted + one.predicted, absent + one.absent
    if allowed and not (predicted >= MANY and absent <= allowed * predicted):
        return False
    seen = [one for pair in others if (one := weighed(computation, pair)) is not None]
    predicted, absent = sum(one.predicted for one in seen), sum(one.absent for one in seen)
    return absent <= allowed * predicted


def commonest_fault(bench: Examination, rows: Sequence[Row]) -> str:
    """Return the fault of a cast that explains most of the rows that failed, or ''."""
    names = {row.fault for row in rows if row.outcome == Outcome.FAIL and row.fault in CAST_FAULTS}
    failed = [pairs[:_CASTS] for pairs in bench.failed.values()]
    return max(
        sorted(names), key=lambda name: sum(_covers(bench, name, pairs) for pairs in failed), default=""
    )


def relabelled(bench: Examination, rows: Sequence[Row], likely: str) -> list[Row]:
    """Return the rows, each with the fault that explains most of them if it explains this one, too."""
    if not likely:
        return list(rows)
    whole = {name for name, pairs in bench.failed.items() if _covers(bench, likely, pairs)}
    return [replace(row, fault=likely) if row.property in whole else row for row in rows]


def supported(bench: Examination, rows: Sequence[Row]) -> list[Row]:
    """Return the rows without the names of casts that another, unknown fault may have caused.

    If no computation explains some casts of a function, what explains only few others of it need not be what
    happens there: data made for one fault are often changed alike by several.
    """
    result = list(rows)
    for quant in {id(pairs[0].quant): pairs[0].quant for pairs in bench.failed.values()}.values():
        own = [name for name, pairs in bench.failed.items() if pairs[0].quant == quant]
        failed = [row for row in rows if row.property in own and row.outcome == Outcome.FAIL]
        counts = Counter(row.fault for row in failed)
        if not counts[""]:
            continue
        weak = {name for name, count in counts.items() if name in CAST_FAULTS and 2 * count <= len(failed)}
        result = [
            replace(row, fault="") if row.property in own and row.fault in weak else row for row in result
        ]
    return result


def measured(bench: Examination, rows: Sequence[Row]) -> list[Row]:
    """Return the rows, those of casts without a name with what is wrong in the stages of their cast."""
    result = list(rows)
    kinds: list[Quant] = []
    for pairs in bench.seen.values():
        kinds += [kind for kind in map(_kind, pairs[:1]) if kind not in kinds]
    for kind in kinds:
        failed = {name: pairs for name, pairs in bench.failed.items() if _kind(pairs[0]) == kind}
        own = {*failed, *({"round_trip", "true_amax"} if kind == bench.nearest else ())}
        unnamed = {row.property for row in result if row.outcome == Outcome.FAIL and not row.fault} & own
        if not unnamed:
            continue
        shown = [pair for pairs in failed.values() for pair in _spread(pairs, 2)]
        others = [pair for pairs in bench.seen.values() for pair in pairs if _kind(pair) == kind]
        right = [pair for pair in others if not pair.difference.count]
        try:
            text = wrong_stages([*shown, *_spread(right, 8)])
        except Exception as error:  # as in `diagnosed`
            result = [
                replace(row, detail=_unnamed(row, error)) if row.property in unnamed else row
                for row in result
            ]
            continue
        result = [replace(row, fault=text) if row.property in unnamed else row for row in result]
    return result


def _kind(pair: Pair) -> Quant:
    """Return the quantiser of a cast; of one with a given amax, the recipe's."""
    quant = pair.quant
    if quant.outer is None or not str(quant.outer.statistic).startswith("static"):
        return quant
    return quant.model_copy(update={"outer": quant.outer.model_copy(update={"statistic": "amax"})})


def _covers(bench: Examination, name: str, pairs: Sequence[Pair]) -> bool:
    """Return True if a fault gives these casts; of a fault of some blocks: all numbers that differ."""
    if name not in bench.cache.get("partial", ()):
        return explains(CAST_FAULTS[name], pairs)
    return all(
        (one := weighed(CAST_FAULTS[name], pair)) is not None and not one.unexplained for pair in pairs
    )


def _factor_fault(bench: Examination) -> str:
    """Return the fault of the factor of the second level that the subject returns, or ''."""
    quant = bench.nearest
    rows, columns = bench.rows(48), bench.columns(128, quant)
    made = [bench.typed(2.5e-3 * inputs.normal(rows, columns, bench.seed + number)) for number in range(8)]
    pairs = [bench.pair(x, quant) for x in made]
    if wrong := [pair for pair in pairs if pair.difference.count]:
        return cast_fault(bench, wrong) or wrong_stages(wrong)
    got, expected = pairs[0].got.outer, pairs[0].expected.outer
    if got is None or expected is None or got.ndim:
        return ""
    if abs(float(got * expected) - 1) < NEAR:
        return "global scale stored as its reciprocal"
    ratio = float(got / expected)
    return f"second-level factor {ratio:.4g} times too large" if abs(ratio - 1) > NEAR else ""


def _unwritten(pairs: Sequence[Pair]) -> str:
    """Return the fault if all differences lie beyond a multiple of rows or columns; else ''."""
    for axis, word in enumerate(("rows", "columns")):
        for multiple in _MULTIPLES:
            tails = [(pair.difference.elements, pair.x.shape[axis] // multiple * multiple) for pair in pairs]
            inside = any(bool(wrong.narrow(axis, 0, kept).any()) for wrong, kept in tails)
            beyond = [wrong.narrow(axis, kept, wrong.shape[axis] - kept) for wrong, kept in tails]
            share = sum(int(part.sum()) for part in beyond) / max(1, sum(part.numel() for part in beyond))
            if any(kept for _, kept in tails) and not inside and share > 0.5:
                return f"{word} beyond a multiple of {multiple} not computed"
    return ""
