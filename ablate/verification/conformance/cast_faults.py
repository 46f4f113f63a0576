"""Wrong computations of a cast, each written down, to be compared with what a subject returned."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS, SCALES
from ablate.numerics.rounding import away, ceil, floor, nearest
from ablate.numerics.scaling import round_scale
from ablate.numerics.spec import Quant
from ablate.numerics.stored import swizzle, unswizzle
from ablate.verification.conformance.computation import (
    LARGEST,
    RECIPE,
    Computation,
    NoComputationError,
    exact_scale,
    rounded_scale,
    top,
)
from ablate.verification.conformance.general_faults import general_faults
from ablate.verification.conformance.selection_faults import selection_faults

FLOORS = (1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 2.0**-9, 2.0**-6, 2.0**-126, 2.0**-24)
"""Constants that implementations put below an amax or a scale."""


def _per_tensor(amax: Tensor, quant: Quant) -> Tensor:
    """Return amax / 2688, by which some libraries divide."""
    if quant.outer is None:
        raise NoComputationError("no second level")
    return amax / torch.full_like(amax, ELEMENTS[quant.element].max * quant.outer.bound)


# --- order of operations --------------------------------------------------------------------------


def _two_roundings(a: Tensor, outer: Tensor, amax: Tensor, quant: Quant) -> Tensor:
    return rounded_scale(a / torch.full_like(a, top(quant)) * outer * quant.range.headroom, quant)


def _divided_scale(a: Tensor, outer: Tensor, amax: Tensor, quant: Quant) -> Tensor:
    return rounded_scale(a / torch.full_like(a, top(quant)) / _per_tensor(amax, quant), quant)


def _quotient(tiles: Tensor, s: Tensor, outer: Tensor, amax: Tensor, quant: Quant) -> Tensor:
    return tiles * (outer / s).clamp(max=LARGEST)


def _division(tiles: Tensor, s: Tensor, outer: Tensor, amax: Tensor, quant: Quant) -> Tensor:
    return (tiles / (s * (1 / outer))).nan_to_num(0.0, LARGEST, -LARGEST)


def _division_by_ratio(tiles: Tensor, s: Tensor, outer: Tensor, amax: Tensor, quant: Quant) -> Tensor:
    return (tiles / (s / outer)).nan_to_num(0.0, LARGEST, -LARGEST)


def _two_steps(tiles: Tensor, s: Tensor, outer: Tensor, amax: Tensor, quant: Quant) -> Tensor:
    return (tiles * outer / s).nan_to_num(0.0, LARGEST, -LARGEST)


def _division_by_product(tiles: Tensor, s: Tensor, outer: Tensor, amax: Tensor, quant: Quant) -> Tensor:
    return (tiles / (_per_tensor(amax, quant) * s)).nan_to_num(0.0, LARGEST, -LARGEST)


def _reciprocal_of_product(tiles: Tensor, s: Tensor, outer: Tensor, amax: Tensor, quant: Quant) -> Tensor:
    return tiles * (1 / (_per_tensor(amax, quant) * s)).clamp(max=LARGEST)


def _reciprocal_amax(amax: Tensor, quant: Quant) -> Tensor:
    """Return S as torch computes a number over a tensor: times the reciprocal, which rounds twice."""
    assert quant.outer is not None
    scale = (ELEMENTS[quant.element].max * quant.outer.bound) * (1.0 / amax)
    return torch.where((amax == 0) | (scale == 0), 1.0, scale.clamp(max=LARGEST))


def _quotient_of_reciprocal(tiles: Tensor, s: Tensor, outer: Tensor, amax: Tensor, quant: Quant) -> Tensor:
    return tiles * ((1 / _per_tensor(amax, quant)) / s).clamp(max=LARGEST)


SCALE_ORDERS = {"": RECIPE.scale, "(a/6) S": _two_roundings, "(a/6) / (amax/2688)": _divided_scale}
FACTOR_ORDERS = {
    "": RECIPE.scaled,
    "S/s": _quotient,
    "x / (s (1/S))": _division,
    "x / (s/S)": _division_by_ratio,
    "x S / s": _two_steps,
    "x ((1/(amax/2688)) / s)": _quotient_of_reciprocal,
    "x / (s amax/2688)": _division_by_product,
    "x (1/(s amax/2688))": _reciprocal_of_product,
}


ORDER = "order of operations: "
OUTER_ORDERS = {"": RECIPE.outer, "S = 2688 (1/amax)": _reciprocal_amax}


def orders() -> Iterator[tuple[str, Computation]]:
    """Yield every order of operations but the recipe's: legitimate variants, which round ties otherwise."""
    for outer, level in OUTER_ORDERS.items():
        for scale, by in SCALE_ORDERS.items():
            for factor, scaled in FACTOR_ORDERS.items():
                parts = [outer, f"scale {scale}" * bool(scale), f"elements {factor}" * bool(factor)]
                if any(parts):
                    name = ORDER + ", ".join(filter(None, parts))
                    yield name, replace(RECIPE, outer=level, scale=by, scaled=scaled)


# --- scales ---------------------------------------------------------------------------------------


def _scale_rounded(rule: str, a: Tensor, outer: Tensor, amax: Tensor, quant: Quant) -> Tensor:
    assert quant.scale is not None
    grid, exact = SCALES[quant.scale.format], exact_scale(a, outer, quant)
    if grid.bits > 8:
        raise NoComputationError("wide scales")
    if not grid.mantissa:
        return _power_of_two(rule, exact)
    rules = {"floor": floor, "ceil": ceil, "nearest": nearest, "away": away}
    if rule not in rules:
        raise NoComputationError(rule)
    return rules[rule](exact, grid)


def _power_of_two(rule: str, exact: Tensor) -> Tensor:
    fraction, exponent = torch.frexp(exact.double())  # in [1/2, 1)
    lower = exponent - 1
    up = {
        "floor": torch.zeros_like(fraction, dtype=torch.bool),
        "ceil": fraction > 0.5,
        "nearest": fraction > 0.75,
        "away": fraction >= 0.75,
        "logarithmic": fraction >= 2**-0.5,
    }.get(rule)
    if up is None:
        raise NoComputationError(rule)
    power = (lower + up).clamp(-127, 127)
    return torch.where(exact == 0, 2.0**-127, torch.ldexp(torch.ones_like(fraction), power)).float()


def _unclamped(a: Tensor, outer: Tensor, amax: Tensor, quant: Quant) -> Tensor:
    assert quant.scale is not None
    name = SCALES[quant.scale.format].dtype
    exact = a * (outer * torch.full_like(outer, 1 / top(quant)))
    if name != "float8_e4m3fn":
        raise NoComputationError("other scales")
    rounded = round_scale(exact, quant.scale)
    return torch.where(exact <= 464, rounded, float("nan"))


def _floored(before: Computation, least: float) -> Computation:
    return replace(
        before, scale=lambda a, outer, amax, quant: before.scale(a, outer, amax, quant).clamp(min=least)
    )


def _zero_block(value: float) -> Callable[[Computation], Computation]:
    def changed(before: Computation) -> Computation:
        return replace(
            before,
            scale=lambda a, outer, amax, quant: torch.where(
                a == 0, value, before.scale(a, outer, amax, quant)
            ),
        )

    return changed


def _flushed(a: Tensor, outer: Tensor, amax: Tensor, quant: Quant) -> Tensor:
    s = RECIPE.scale(a, outer, amax, quant)
    return torch.where(s < 2.0**-6, 0.0, s)


def _smallest_lost(scales: Tensor, quant: Quant) -> Tensor:
    """Decode the smallest scale of the format as zero."""
    assert quant.scale is not None
    grid = SCALES[quant.scale.format]
    smallest = 2.0 ** (grid.emin - (grid.mantissa if grid.zero else 1))
    return torch.where(scales == smallest, 0.0, scales)


def _as_normal(scales: Tensor, quant: Quant) -> Tensor:
    """Decode E4M3 bytes below 8, which are subnormal, as (1 + m/8) 2^-7."""
    mantissa = scales * 2.0**9
    return torch.where((scales < 2.0**-6) & (scales > 0), (1 + mantissa / 8) * 2.0**-7, scales)


def scale_faults() -> Iterator[tuple[str, Computation]]:
    """Yield faults of block scales.

    Other floors, other scales of a zero block, and factors are measured (`stages`); these are also variants.
    """
    words = {
        "floor": "truncated",
        "ceil": "rounded up",
        "nearest": "rounded to nearest even",
        "away": "rounded with ties away",
    }
    for rule, word in (words | {"logarithmic": "rounded at sqrt(2)"}).items():
        yield f"block scale {word}", replace(RECIPE, scale=partial(_scale_rounded, rule))
    yield "cast to E4M3 without clamp", replace(RECIPE, scale=_unclamped)
    yield "subnormal scales flushed to zero", replace(RECIPE, scale=_flushed)
    yield "subnormal scales decoded as normal", replace(RECIPE, stored_scales=_as_normal)
    yield (
        "smallest scale decoded as zero",
        replace(
            RECIPE,
            decode=lambda codes, s, outer, amax, quant: RECIPE.decode(
                codes, _smallest_lost(s, quant), outer, amax, quant
            ),
        ),
    )
    for least in (2.0**-9, 2.0**-6):
        yield f"floor of block scales at {least:.3g}", _floored(RECIPE, least)
    for value, word in ((1.0, "1"), (2.0**-9, "2^-9")):
        yield f"scale of a zero block is {word}", _zero_block(value)(RECIPE)


# --- second level ---------------------------------------------------------------------------------


def _stale(x: Tensor, previous: Tensor | None, quant: Quant) -> Tensor:
    if previous is None:
        raise NoComputationError("no earlier call")
    return previous.float().abs().amax()


def _floored_amax(least: float, x: Tensor, previous: Tensor | None, quant: Quant) -> Tensor:
    return RECIPE.amax(x, previous, quant).clamp(min=least)


def _floored_block(least: float, tiles: Tensor, quant: Quant) -> Tensor:
    return RECIPE.block(tiles, quant).clamp(min=least)


def _one(amax: Tensor, quant: Quant) -> Tensor:
    return torch.ones_like(amax)


def _clamped(least: float | None, most: float | None, amax: Tensor, quant: Quant) -> Tensor:
    return RECIPE.outer(amax, quant).clamp(min=least, max=most)


def _by_outer(codes: Tensor, s: Tensor, outer: Tensor, amax: Tensor | None, quant: Quant) -> Tensor:
    return codes * (s * (1 / outer))


def _no_outer(quant: Quant) -> Quant:
    return quant.model_copy(update={"outer": None})


def _bound(bound: float, quant: Quant) -> Quant:
    if quant.outer is None or quant.outer.bound == bound:
        raise NoComputationError("the same bound")
    return quant.model_copy(update={"outer": quant.outer.model_copy(update={"bound": bound})})


def _as_reciprocal(codes: Tensor, s: Tensor, outer: Tensor, amax: Tensor | None, quant: Quant) -> Tensor:
    return codes * s * outer


def _without_outer(codes: Tensor, s: Tensor, outer: Tensor, amax: Tensor | None, quant: Quant) -> Tensor:
    return codes * s


def _folded(
    dtype: torch.dtype, codes: Tensor, s: Tensor, outer: Tensor, amax: Tensor | None, quant: Quant
) -> Tensor:
    return codes * RECIPE.decode(torch.ones_like(s), s, outer, amax, quant).to(dtype).float()


def outer_faults() -> Iterator[tuple[str, Computation]]:
    """Yield faults of the second level."""
    yield "no tensor scale", replace(RECIPE, quant=_no_outer)
    yield "amax of the call before", replace(RECIPE, amax=_stale)
    for least in FLOORS:
        yield f"floor of the amax at {least:.3g}", replace(RECIPE, amax=partial(_floored_amax, least))
        yield f"floor of block amaxes at {least:.3g}", replace(RECIPE, block=partial(_floored_block, least))
    for most in (1.0, 6.0, 256.0, 448.0, 512.0, 1024.0, 2048.0, 2688.0, 4096.0, 65504.0, 2.0**16, 2.0**20):
        yield (
            f"S clamped to at most {most:g}",
            replace(RECIPE, outer=partial(_clamped, None, most), decode=_by_outer),
        )
        for least in (1 / most, 2.0**-6, 2.0**-9):
            both = partial(_clamped, least, most)
            yield f"S clamped to {least:.3g} and {most:g}", replace(RECIPE, outer=both, decode=_by_outer)
    for bound in (256.0, 448.0, 240.0, 480.0):
        yield f"bound {bound:g} of block scales", replace(RECIPE, quant=partial(_bound, bound))
    yield "global scale stored as its reciprocal", replace(RECIPE, decode=_as_reciprocal)
    yield "global scale left out of the values", replace(RECIPE, decode=_without_outer)
    for dtype in (torch.bfloat16, torch.float16):
        word = str(dtype).removeprefix("torch.")
        yield f"folded scale rounded to {word}", replace(RECIPE, decode=partial(_folded, dtype))


# --- elements and blocks --------------------------------------------------------------


def _bf16_factor(tiles: Tensor, s: Tensor, outer: Tensor, amax: Tensor, quant: Quant) -> Tensor:
    factor = RECIPE.scaled(torch.ones_like(tiles), s, outer, amax, quant).bfloat16().float()
    return (tiles * factor).bfloat16().float()


def _block_of(block: str, quant: Quant) -> Quant:
    if quant.block == block:
        raise NoComputationError("the same block")
    return quant.model_copy(update={"block": block})


def _mapped(value: float | None, quant: Quant) -> Quant:
    return quant.model_copy(update={"range": quant.range.model_copy(update={"map_to": value})})


def element_faults() -> Iterator[tuple[str, Computation]]:
    """Yield faults of elements and blocks."""
    yield "factor and elements in bf16", replace(RECIPE, scaled=_bf16_factor)
    yield "input rounded to bf16", replace(RECIPE, source=lambda x, quant: x.bfloat16().float())
    yield "input rounded to fp16", replace(RECIPE, source=lambda x, quant: x.half().float())
    for block in ("1x8", "1x16", "1x32", "1x64", "1x128", "16x16", "32x32"):
        yield f"blocks of {block}", replace(RECIPE, quant=partial(_block_of, block))
    for value in (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 256.0, 448.0):
        yield f"largest magnitude mapped to {value:g}", replace(RECIPE, quant=partial(_mapped, value))


# --- layout ---------------------------------------------------------------------------------------


def _swapped(codes: Tensor, quant: Quant) -> Tensor:
    if codes.shape[1] % 2:
        raise NoComputationError("odd columns")
    return codes.view(len(codes), -1, 2).flip(2).reshape(codes.shape)


def _reread(how: str, scales: Tensor, quant: Quant) -> Tensor:
    """Return scales that were written in one layout and read in another; as bytes."""
    assert quant.scale is not None
    name, (rows, blocks) = SCALES[quant.scale.format].dtype, scales.shape
    if name is None or not name.startswith("float8"):
        raise NoComputationError("wide scales")
    raw = scales.to(getattr(torch, name)).view(torch.uint8)
    padded = torch.nn.functional.pad(raw, (0, -blocks % 4, 0, -rows % 128))
    size = padded.numel()
    if how == "missing":
        flat = padded.reshape(-1)
    elif how == "unpadded":
        flat = torch.nn.functional.pad(raw.reshape(-1), (0, size - raw.numel()))
    elif how == "columns":
        tiles = (padded.shape[0] // 128, padded.shape[1] // 4)
        flat = swizzle(raw).view(*tiles, -1).transpose(0, 1).reshape(-1)
    elif how in ("stride", "read stride"):
        flat, step = swizzle(raw), 128 * blocks
        held = torch.zeros(size, dtype=torch.uint8)
        for number, tiles in enumerate(flat.split(32 * 4 * padded.shape[1])):
            place = slice(number * step, number * step + len(tiles))
            whole = slice(number * len(tiles), (number + 1) * len(tiles))
            held[place if how == "stride" else whole] = flat[whole if how == "stride" else place]
        flat = held
    elif how == "doubled":
        flat = swizzle(swizzle(raw).view(padded.shape))
    elif how == "transposed":
        turned = padded.t().contiguous() if padded.shape[0] == padded.shape[1] else padded.view(-1, 4, 128)
        flat = turned.transpose(-1, -2).reshape(-1)
    else:  # "added": written in the layout of tensor cores, read row by row
        return swizzle(raw)[: rows * blocks].view(rows, blocks).view(getattr(torch, name)).float()
    return unswizzle(flat.contiguous(), rows, blocks).view(getattr(torch, name)).float()


def _storage_order(x: Tensor, quant: Quant) -> Tensor:
    """Return the elements as they lie in memory, without regard to strides."""
    rows, columns = x.shape
    held = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    if x.is_contiguous() or held < rows * columns:
        raise NoComputationError("a contiguous tensor")
    return x.as_strided((rows, columns), (columns, 1), x.storage_offset()).float()


def _transposed(x: Tensor, quant: Quant) -> Tensor:
    return x.float().t().reshape(x.shape)


def layout_faults() -> Iterator[tuple[str, Computation]]:
    """Yield faults of bytes, layouts and strides."""
    yield "nibbles swapped", replace(RECIPE, stored_codes=_swapped)
    words = {
        "missing": "scales not in the 128 x 4 layout",
        "unpadded": "scales laid out without padding",
        "doubled": "128 x 4 layout applied twice",
        "columns": "tiles of 128 x 4 scales column by column",
        "stride": "tile rows of swizzled scales written at a stride without the columns' padding",
        "read stride": "tile rows of swizzled scales read at a stride without the columns' padding",
        "added": "scales in the 128 x 4 layout, read row by row",
    }
    for how, word in words.items():
        yield word, replace(RECIPE, stored_scales=partial(_reread, how), swizzled=how != "added")
    yield "strides ignored", replace(RECIPE, source=_storage_order)
    yield "input read transposed", replace(RECIPE, source=_transposed)


def combined() -> Iterator[tuple[str, Computation]]:
    """Yield every order of operations with a floor of scales, as a first attempt often has them."""
    for least in (2.0**-6, 2.0**-9):
        for name, computation in orders():
            yield f"floor of block scales at {least:.3g}, and {name}", _floored(computation, least)


def every() -> dict[str, Computation]:
    """Return all wrong computations of a cast by the fault's name, the likeliest first."""
    made: dict[str, Computation] = {}
    for family in (
        outer_faults,
        scale_faults,
        orders,
        element_faults,
        general_faults,
        selection_faults,
        layout_faults,
        combined,
    ):
        made.update(family())
    return made


CAST_FAULTS = every()
"""Wrong computations of a cast, by name."""


# --- legitimate variants --------------------------------------------------------------------------


def _with(**steps: object) -> Callable[[Computation], Computation]:
    return lambda computation: replace(computation, **steps)  # type: ignore[arg-type]


VARIANTS: dict[str, Callable[[Computation], Computation]] = {
    **{f"scale {word}": _with(scale=by) for word, by in SCALE_ORDERS.items() if word},
    **{word: _with(outer=by) for word, by in OUTER_ORDERS.items() if word},
    **{f"elements {word}": _with(scaled=by) for word, by in FACTOR_ORDERS.items() if word},
    **{f"E8M0 {rule}": _with(scale=partial(_scale_rounded, rule)) for rule in ("floor", "ceil", "nearest")},
    "least scale 2^-9": lambda before: _floored(before, 2.0**-9),
    "least scale 2^-6": lambda before: _floored(before, 2.0**-6),
    "bf16 input": _with(source=lambda x, quant: x.bfloat16().float()),
    "zero block 1": _zero_block(1.0),
    "zero block smallest": _zero_block(2.0**-9),
}
"""Legitimate differences by the word that `Subject.variants` takes, as changes of a computation. They are
made in this order: those that build on the scale of another come after it."""
HINTS = {
    **{name: name.removeprefix(ORDER) for name, _ in orders()},
    **{
        f"floor of block scales at {least:.3g}, and {name}": f"{name.removeprefix(ORDER)}, least scale {word}"
        for least, word in ((2.0**-6, "2^-6"), (2.0**-9, "2^-9"))
        for name, _ in orders()
    },
    "block scale rounded up": "E8M0 ceil",
    "block scale truncated": "E8M0 floor",
    "block scale rounded to nearest even": "E8M0 nearest",
    "scale of a zero block is 1": "zero block 1",
    "scale of a zero block is 2^-9": "zero block smallest",
    "floor of block scales at 0.00195": "least scale 2^-9",
    "floor of block scales at 0.0156": "least scale 2^-6",
    "input rounded to bf16": "bf16 input",
}
"""Words of the variants, with commas between, that a fault of this name may be, if it was meant."""
