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

from ablate.verification.conformance import inputs
from ablate.verification.conformance.cast_faults import CAST_FAULTS, HINTS, VARIANTS
from ablate.verification.conformance.computation import Computation
from ablate.verification.conformance.contraction_faults import contraction_fault
from ablate.verification.conformance.declared import entry, split, words_of
from ablate.verification.conformance.decode_tables import decode_fault
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
from ablate.verification.conformance.product_faults import GROUPED_FAULTS, PAIRS, PRODUCT_FAULTS, Given
from ablate.verification.conformance.properties import grouped, product
from ablate.verification.conformance.properties.property import Property
from ablate.verification.conformance.properties.stochastic import POSITIONS, draws, grid
from ablate.verification.conformance.reference_product import (
    exact_products,
    gain_and_error,
    operands,
    plain_products,
)
from ablate.verification.conformance.result import Outcome, Row
from ablate.verification.conformance.rotation_faults import NEAR, matrix_fault

_CASTS = 3
"""Casts that a computation has to explain, of those that differ."""
_ENOUGH = 8
"""Numbers that have to differ for a fault to be named."""
_MANY = 64
"""Numbers that have to show a fault which part of the blocks have, or which random draws show."""
_ABSENT = 0.02
"""Part of the numbers that such a fault changes, in which the subject may be right."""
_ALIKE = 0.98
"""Share of equal draws at equal positions, above which they share their random bits."""
_ROUNDED = 0.05
"""Limit of |gain - 1| and of the relative L2 distance of sums whose parts are rounded, to bf16 or fp16."""
MARKS = {
    "nan_visible": "NaN becomes a number",
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
    return replace(row, fault=fault)


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
    if one.name == "long_sums":
        return _long_sum_fault(bench)
    if pairs := bench.failed.get(one.name):
        return cast_fault(bench, pairs)
    if one.name in ("round_trip", "true_amax"):
        return _factor_fault(bench)
    if one.name == "zero_tensor":
        zeros = torch.zeros(bench.rows(16), bench.columns(64, bench.nearest))
        pair = bench.pair(bench.typed(zeros), bench.nearest)
        wrong = [one for pairs in bench.failed.values() for one in pairs if one.quant == bench.nearest]
        # Numbers below the smallest normal one of fp32 are not judged by a cast, and show in this row alone.
        return cast_fault(bench, [pair]) if pair.difference.count else decode_fault(_spread(wrong, 16))
    if one.name == "square_transpose":
        quant, rows = bench.square, bench.rows(64)
        x = bench.typed(inputs.normal(rows, bench.columns(64, quant), bench.seed))
        pair = bench.pair(x, quant, "cast_square")
        return cast_fault(bench, [pair]) if pair.difference.count else ""
    if one.needs == "cast_stochastic":
        return stochastic_fault(bench)
    if one.needs == "rotate":
        return _rotation_fault(bench)
    if one.name == "random_gradients":
        return _random_fault(bench)
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
    for allowed in (0.0, _ABSENT):
        for name in [*found, *CAST_FAULTS]:
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
    if allowed and not (predicted >= _MANY and absent <= allowed * predicted):
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
        return cast_fault(bench, wrong)
    got, expected = pairs[0].got.outer, pairs[0].expected.outer
    if got is None or expected is None or got.ndim:
        return ""
    if abs(float(got * expected) - 1) < NEAR:
        return "global scale stored as its reciprocal"
    return f"second-level factor {float(got / expected):.4g} times too large"


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


def _rotation_fault(bench: Examination) -> str:
    """Return the fault that the rotation of unit vectors shows, or ''."""
    size = bench.rotation.size
    unit = torch.zeros(bench.rows(size), bench.columns(size))
    unit[:size, :size] = torch.eye(size)
    matrix = bench.call("rotate", bench.typed(unit)).detach().cpu()[:size, :size].double()
    if fault := matrix_fault(matrix):
        return fault
    x = bench.typed(inputs.normal(bench.rows(16), bench.columns(4 * size), bench.seed))
    turned = bench.call("rotate", x).detach().cpu().float()
    wide = bool((turned != turned.bfloat16().float()).any())
    return "rotated values not rounded to the dtype of x" if x.dtype == torch.bfloat16 and wide else ""


def stochastic_fault(bench: Examination) -> str:
    """Return the fault that the moments of the draws show, or ''."""
    made = draws(bench)
    inner = made.position > 0
    if all(not value[inner].any() for value in made.values):
        return "draws are zero"
    if fault := _neighbour_fault(bench):
        return fault
    ups = torch.stack([drawn[inner] for drawn in made.drawn])
    position = made.position[inner]
    means = torch.tensor([float(ups[:, (position - p).abs() < 1e-6].mean()) for p in POSITIONS])
    wanted = torch.tensor(POSITIONS)
    variance = float((ups - position).square().mean() / (position * (1 - position)).mean())
    near = 0.02
    if variance > 1.5 and bool((means - wanted).abs().mean() < 10 * near):
        return "dither of twice the grid step"
    for name, other in (
        ("rounds up with probability 1 - f", 1 - wanted),
        ("rounds up with probability 1/2", torch.full_like(wanted, 0.5)),
        ("always rounds toward zero", torch.zeros_like(wanted)),
        ("always rounds away from zero", torch.ones_like(wanted)),
    ):
        if bool((means - other).abs().max() < near):
            return name
    if len({tuple(drawn[inner].tolist()) for drawn in made.drawn}) == 1:
        share = float((ups[0] == (position > 0.5)).double().mean())
        return "rounds to nearest, without draws" if share > 0.85 else "the seed has no effect"
    return _shared_draws(ups, position, made.position.shape, inner)


def _neighbour_fault(bench: Examination) -> str:
    """Return the fault if draws that should be the upper neighbour are one multiple of it, or ''."""
    made = draws(bench)
    below, step, position = grid(bench, made.x)
    upper, wrong, ratios = below + step, 0, []
    for drawn, value in zip(made.drawn, made.values, strict=True):
        odd = (
            (position > 0) & ((drawn - drawn.round()).abs() > NEAR)
            | (drawn.round() < 0)
            | (drawn.round() > 1)
        )
        wrong += int(odd.sum())
        ratios.append((value.double() / upper)[odd])
    ratio = torch.cat(ratios)
    if wrong < _MANY or not ratio.isfinite().all() or float((ratio - ratio.median()).abs().max()) > NEAR:
        return ""
    factor = float(ratio.median())
    if abs(factor - 0.5) < NEAR:
        return "carry lost: draws that round up to a power of two come out half as large"
    return f"draws that round up come out {factor:.4g} times as large"


def _shared_draws(ups: torch.Tensor, position: torch.Tensor, shape: torch.Size, inner: torch.Tensor) -> str:
    """Return the fault of draws that share their random bits, or ''.

    Shared bits have to show in the draws themselves: at equal positions, they round alike.
    """
    full = torch.full((len(ups), *shape), float("nan"), dtype=torch.float64)
    full[:, inner] = ups
    places = torch.full(tuple(shape), float("nan"), dtype=torch.float64)
    places[inner] = position
    at = places.expand(len(ups), -1, -1)
    rows, columns = shape
    half, side = rows // 2, columns // 2
    for what, one, other in (
        ("for all rows", (slice(None), slice(None, -1)), (slice(None), slice(1, None))),
        ("for the two halves of a tensor", (slice(None), slice(half)), (slice(None), slice(half, 2 * half))),
        ("for all columns", (..., slice(None, -1)), (..., slice(1, None))),
        ("for all blocks", (..., slice(None, -16)), (..., slice(16, None))),
        ("for the two halves of a row", (..., slice(side)), (..., slice(side, 2 * side))),
        ("for different seeds", (slice(None, -1),), (slice(1, None),)),
    ):
        alike = (at[one] - at[other]).abs() < 1e-6
        if int(alike.sum()) >= _MANY:
            share = float(((full[one] - full[other]).abs()[alike] < 1e-6).double().mean())
            if share > _ALIKE:
                return f"equal random bits {what}"
    return ""


# --- products -------------------------------------------------------------------------------------


def product_fault(bench: Examination) -> str:
    """Return the fault whose computation gives the subject's y, dx and dw, or ''."""
    if "product_fault" not in bench.cache:
        bench.cache["product_fault"] = _product_fault(bench)
    return str(bench.cache["product_fault"])


def _product_fault(bench: Examination) -> str:
    given, products = product.layer(bench), product.products_of(bench)
    got = product.call(bench, given.x, given.w, given.dy)
    tensors: Given = (given.x.bfloat16(), given.w.bfloat16(), given.dy.bfloat16())
    right = exact_products(products, *tensors)
    far = {key: right[key].far(got[key]) for key in product.NAMES}
    wrong = [key for key in product.NAMES if far[key].any()]
    if sum(int(one.sum()) for one in far.values()) < _ENOUGH:
        return ""
    scoped = ""
    for name, computation in PRODUCT_FAULTS.items():
        made = computation(products, tensors)
        unlike = [key for key in product.NAMES if made[key].far(got[key]).any()]
        if not unlike:
            return name
        if not scoped and not set(unlike) & set(wrong):
            scoped = _scoped(name, wrong)
    if scoped:
        return scoped
    cast, parts = operands(products, *tensors), []
    for key in wrong:
        left, other = PAIRS[key]
        parts.append(contraction_fault(getattr(cast, left), getattr(cast, other), got[key]))
    counted = [part for part in parts if part is not None]
    if not counted or len(counted) < len(parts) or len({part.word for part in counted}) > 1:
        return ""
    shares = (f"{key} {part.number} of {part.of}" for key, part in zip(wrong, counted, strict=True))
    return f"{counted[0].word}: {', '.join(shares)}"


def _long_sum_fault(bench: Examination) -> str:
    """Return the fault of long sums alone: rounded partial sums, if gain and error are those of roundings."""
    if fault := product_fault(bench):
        return fault
    for _, got, exact in product.long_products(bench):
        gain, error = gain_and_error(got, exact.values)
        if abs(gain - 1) > _ROUNDED or not error < _ROUNDED:
            return ""
    return "partial sums of a product rounded, not accumulated in fp32"


def _random_fault(bench: Examination) -> str:
    """Return the fault if dx and dw of a random dy are those of the recipe with nearest rounding; else ''."""
    products, (x, w, dy) = product.products_of(bench), product.random_layer(bench)
    got = product.call(bench, x, w, dy)
    made = exact_products(product.rounded_to_nearest(products), x.bfloat16(), w.bfloat16(), dy.bfloat16())
    nearest = not any(bool(made[key].far(got[key]).any()) for key in ("dx", "dw"))
    return "dy rounded to nearest, not stochastically" if nearest else product_fault(bench)


def grouped_fault(bench: Examination, wanted: tuple[int, ...], width: int = grouped.OUT) -> str:
    """Return the fault whose computation gives every expert's y, dx and dw, or ''."""
    products = product.products_of(bench)
    sizes = [bench.rows(size) if size else 0 for size in wanted]
    x, w, dy, offsets = grouped.given_experts(bench, sizes, width=width)
    got = product.call(bench, x, w, dy, "grouped", offsets)
    experts = grouped.experts_of(x, w, dy, sizes)
    parts = {"y": got["y"].split(sizes), "dx": got["dx"].split(sizes), "dw": tuple(got["dw"])}
    right = [exact_products(products, *one) if len(one[0]) else plain_products(*one) for one in experts]
    wrong = [
        key
        for key in product.NAMES
        if any(one[key].far(z).any() for one, z in zip(right, parts[key], strict=True))
    ]
    failed = {
        (key, expert)
        for key in wrong
        for expert, (one, z) in enumerate(zip(right, parts[key], strict=True))
        if one[key].far(z).any()
    }
    if failed and all(key == "dw" and not sizes[expert] for key, expert in failed):
        return "dw of an expert without tokens not written"
    count = sum(int(right[expert][key].far(parts[key][expert]).sum()) for key, expert in failed)
    if count < _ENOUGH:
        return ""
    scoped = ""
    for name, computation in GROUPED_FAULTS.items():
        made = computation(products, experts)
        unlike = [
            key
            for key in product.NAMES
            if any(one[key].far(z).any() for one, z in zip(made, parts[key], strict=True))
        ]
        if not unlike:
            return name
        if not scoped and not set(unlike) & set(wrong):
            scoped = _scoped(name, wrong)
    return scoped


def _scoped(name: str, keys: Sequence[str]) -> str:
    """Return the name of a fault that only some of the products have."""
    return f"{name} in {' and '.join(keys)}"
