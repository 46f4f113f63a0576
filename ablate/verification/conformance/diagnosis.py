"""Name of the fault that a subject has: the wrong computation that gives what it returned.

Every known fault whose computation can be written down is computed on the inputs of a property that failed,
and compared with what the subject returned: bit for bit for codes and scales, within the roundings of
dequantisation or of the sum for values and products. A match names the fault. Where no computation can be
written down (random draws, unwritten memory), a mark of the differences does.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ablate.verification.conformance import inputs
from ablate.verification.conformance.cast_faults import CAST_FAULTS, HINTS, VARIANTS
from ablate.verification.conformance.declared import entry, split, words_of
from ablate.verification.conformance.examination import (
    Examination,
    NotApplicableError,
    Pair,
    RefusedError,
    explains,
    varied,
)
from ablate.verification.conformance.numbers import UnreadableError
from ablate.verification.conformance.product_faults import GROUPED_FAULTS, PRODUCT_FAULTS, Given
from ablate.verification.conformance.properties import grouped, product
from ablate.verification.conformance.properties.property import Property
from ablate.verification.conformance.properties.stochastic import POSITIONS, draws
from ablate.verification.conformance.reference_product import exact_products, plain_products
from ablate.verification.conformance.result import Outcome, Row

_CASTS = 3
"""Casts that a computation has to explain, of those that differ."""
NEAR = 1e-3
"""Relative difference within which a measured factor is the named one."""
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
    "long_sums": "partial sums of a product rounded, not accumulated in fp32",
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
    hint = _hint(bench, one.name, fault)
    return replace(row, fault=fault, detail="; ".join(filter(None, (row.detail, hint))))


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
    if pairs := bench.failed.get(one.name):
        return cast_fault(bench, pairs)
    if one.name in ("round_trip", "true_amax"):
        return _factor_fault(bench)
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
        return grouped_fault(bench, _SIZES.get(one.name, grouped.ALIGNED))
    return ""


def cast_fault(bench: Examination, pairs: Sequence[Pair]) -> str:
    """Return the fault whose computation gives what the subject returned for these tensors, or ''.

    It also has to be consistent with the casts in which the subject is right: a computation that would differ
    there is not what the subject computes.
    """
    shown = [*pairs[: _CASTS - 1], pairs[-1]] if len(pairs) > _CASTS else pairs
    quant = pairs[0].quant
    right = [
        pair
        for seen in bench.seen.values()
        for pair in seen[:: max(1, len(seen) // 3)]
        if pair.quant == quant and not pair.difference.count
    ]
    if bench.subject.cast is not None and quant == bench.nearest:
        x = inputs.spread(bench.rows(32), bench.columns(128, quant), 16, bench.seed + 77)
        right.append(bench.pair(bench.typed(x), quant))
        right = [pair for pair in right if not pair.difference.count]
    found = bench.cache.setdefault("faults", [])  # what explained an earlier row comes first
    for name in [*found, *CAST_FAULTS]:
        computation = CAST_FAULTS[name]
        if explains(computation, shown) and explains(computation, right, defined=False):
            if name not in found:
                found.insert(0, name)
            return str(name)
    return _unwritten(pairs)


def commonest_fault(bench: Examination, rows: Sequence[Row]) -> str:
    """Return the fault of a cast that explains most of the rows that failed; '' without two such rows."""
    names = {row.fault for row in rows if row.outcome == Outcome.FAIL and row.fault in CAST_FAULTS}
    if len(names) < 2:
        return ""
    failed = [pairs[:_CASTS] for pairs in bench.failed.values()]
    return max(sorted(names), key=lambda name: sum(explains(CAST_FAULTS[name], pairs) for pairs in failed))


def relabelled(bench: Examination, rows: Sequence[Row], likely: str) -> list[Row]:
    """Return the rows, each with the fault that explains most of them if it explains this one, too."""
    if not likely:
        return list(rows)
    computation = CAST_FAULTS[likely]
    whole = {name for name, pairs in bench.failed.items() if explains(computation, pairs)}
    return [replace(row, fault=likely) if row.property in whole else row for row in rows]


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
    diagonal = (matrix @ matrix.t()).diagonal()
    factor = float(diagonal.mean()) ** 0.5
    if float((diagonal - diagonal.mean()).abs().max()) > NEAR:
        return "rotation not orthogonal"
    if abs(factor - 1) > NEAR:
        return f"rotation {factor:.4g} times too large"
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


def _shared_draws(ups: torch.Tensor, position: torch.Tensor, shape: torch.Size, inner: torch.Tensor) -> str:
    """Return the fault of draws that share their random bits, or ''."""
    full = torch.full((len(ups), *shape), float("nan"), dtype=torch.float64)
    full[:, inner] = ups - position
    rows, columns = shape
    for what, one, other in (
        ("for all rows", full[:, :-1], full[:, 1:]),
        ("for the two halves of a tensor", full[:, : rows // 2], full[:, rows // 2 : rows // 2 * 2]),
        ("for all columns", full[:, :, :-1], full[:, :, 1:]),
        ("for all blocks", full[:, :, :-16], full[:, :, 16:]),
        (
            "for the two halves of a row",
            full[:, :, : columns // 2],
            full[:, :, columns // 2 : columns // 2 * 2],
        ),
        ("for different seeds", full[:-1], full[1:]),
    ):
        both = ~(one.isnan() | other.isnan())
        a, b = one[both], other[both]
        if float((a * b).mean() / (a.square().mean() * b.square().mean()).sqrt()) > 0.1:
            return f"equal random bits {what}"
    return ""


# --- products -------------------------------------------------------------------------------------


def product_fault(bench: Examination) -> str:
    """Return the fault whose computation gives the subject's y, dx and dw, or ''."""
    given, products = product.layer(bench), product.products_of(bench)
    got = product.call(bench, given.x, given.w, given.dy)
    tensors: Given = (given.x.bfloat16(), given.w.bfloat16(), given.dy.bfloat16())
    right = exact_products(products, *tensors)
    wrong = [key for key in product.NAMES if right[key].far(got[key]).any()]
    for name, computation in PRODUCT_FAULTS.items():
        made = computation(products, tensors)
        if wrong and not any(made[key].far(got[key]).any() for key in wrong):
            return name
    return ""


def _random_fault(bench: Examination) -> str:
    """Return the fault if dx and dw of a random dy are those of the recipe with nearest rounding; else ''."""
    products, (x, w, dy) = product.products_of(bench), product.random_layer(bench)
    got = product.call(bench, x, w, dy)
    made = exact_products(product.rounded_to_nearest(products), x.bfloat16(), w.bfloat16(), dy.bfloat16())
    nearest = not any(bool(made[key].far(got[key]).any()) for key in ("dx", "dw"))
    return "dy rounded to nearest, not stochastically" if nearest else product_fault(bench)


def grouped_fault(bench: Examination, wanted: tuple[int, ...]) -> str:
    """Return the fault whose computation gives every expert's y, dx and dw, or ''."""
    products = product.products_of(bench)
    sizes = [bench.rows(size) if size else 0 for size in wanted]
    x, w, dy, offsets = grouped.given_experts(bench, sizes)
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
    for name, computation in GROUPED_FAULTS.items():
        made = computation(products, experts)
        if wrong and not any(
            one[key].far(z).any() for key in wrong for one, z in zip(made, parts[key], strict=True)
        ):
            return name
    return ""
