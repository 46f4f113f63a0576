"""Wrong computations of the products of a layer, or of a layer of experts, each written down."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ablate.numerics.hadamard import rotate
from ablate.numerics.quantize import Operand
from ablate.numerics.spec import Hadamard, Outer, Quant
from ablate.numerics.stored import SWIZZLE_COLUMNS, SWIZZLE_ROWS
from ablate.recipes.recipe import Products
from ablate.verification.conformance.reference_product import (
    Exact,
    Operands,
    cast,
    kept,
    multiply,
    operands,
    plain_products,
)

Given = tuple[Tensor, Tensor, Tensor]
"""x [tokens, in], w [out, in], dy [tokens, out] of one layer, bf16."""
PAIRS = {"y": ("x", "w"), "dx": ("g", "wt"), "dw": ("gt", "xt")}
SLOTS = {"x": "x", "w": "w", "g": "dy", "wt": "w of dx", "gt": "dy of dw", "xt": "x of dw"}
"""Operand by its field of `Operands`, in words."""


@dataclass(frozen=True)
class Sources:
    """The matrices that the operands are cast from, each with its quantiser and rotation."""

    entries: dict[str, tuple[Tensor, Quant | None, Hadamard | None]]


def sources(products: Products, given: Given) -> Sources:
    """Return what each operand of a layer is cast from, and how."""
    x, w, dy = given
    fprop, dgrad, wgrad = products.fprop, products.dgrad, products.wgrad
    x_kept, w_kept = kept(products, x, w)
    return Sources(
        {
            "x": (x, fprop.x, fprop.hadamard),
            "w": (w, fprop.w, fprop.hadamard),
            "g": (dy, dgrad.g, dgrad.hadamard),
            "wt": (w_kept.t(), dgrad.w, dgrad.hadamard),
            "gt": (dy.t(), wgrad.g, wgrad.hadamard),
            "xt": (x_kept.t(), wgrad.x, wgrad.hadamard),
        }
    )


def products_of_operands(made: Operands) -> dict[str, Exact]:
    """Return y, dx and dw of quantised operands."""
    return {key: multiply(getattr(made, a), getattr(made, b)) for key, (a, b) in PAIRS.items()}


Wrong = Callable[[Products, Given], dict[str, Exact]]


def _changed(
    change: Callable[[str, Tensor, Quant | None, Hadamard | None], Operand | None],
    products: Products,
    given: Given,
) -> dict[str, Exact]:
    """Return the products with the operands that `change` replaces."""
    made = operands(products, *given)
    for name, (z, quant, rotation) in sources(products, given).entries.items():
        if (other := change(name, z, quant, rotation)) is not None:
            made = replace(made, **{name: other})
    return products_of_operands(made)


def _unquantised(
    slot: str, name: str, z: Tensor, quant: Quant | None, rotation: Hadamard | None
) -> Operand | None:
    if name != slot or quant is None:
        return None
    return Operand(z if rotation is None else rotate(z, rotation))


def _unscaled(
    slot: str, name: str, z: Tensor, quant: Quant | None, rotation: Hadamard | None
) -> Operand | None:
    made = cast(z, quant, rotation, 0, name) if name == slot else None
    return None if made is None or made.amax is None else Operand(made.values)


def _turned(
    which: Sequence[str],
    signs: str | None,
    name: str,
    z: Tensor,
    quant: Quant | None,
    rotation: Hadamard | None,
) -> Operand | None:
    """Return an operand of a rotated product without rotation (`signs` None) or with other signs."""
    if name not in which or rotation is None:
        return None
    return cast(z, quant, None if signs is None else Hadamard(size=rotation.size, signs=signs), 0, name)


def _blocked(
    slot: str, block: str, name: str, z: Tensor, quant: Quant | None, rotation: Hadamard | None
) -> Operand | None:
    if name != slot or quant is None or quant.block == block or quant.scale is None:
        return None
    return cast(z, quant.model_copy(update={"block": block}), rotation, 0, name)


def _forward_codes(
    slot: str, name: str, z: Tensor, quant: Quant | None, rotation: Hadamard | None
) -> Operand | None:
    """Return the operand that is the transposed cast of the forward pass."""
    if name != slot or rotation is not None or quant is None:
        return None
    made = cast(z.t(), quant, None, 0, name)
    return (
        replace(made, values=made.values[:, : z.shape[0]].t(), block_scale=None)
        if made.amax is None or not made.amax.ndim
        else None
    )


def _bf16_operands(name: str, z: Tensor, quant: Quant | None, rotation: Hadamard | None) -> Operand | None:
    return Operand(cast(z, quant, rotation, 0, name).dequantize().bfloat16())


def _rounded_twice(products: Products, given: Given) -> dict[str, Exact]:
    """Return the products rounded to bf16 before the tensor scales."""
    made, results = operands(products, *given), {}
    for key, (a, b) in PAIRS.items():
        exact, left, right = multiply(getattr(made, a), getattr(made, b)), getattr(made, a), getattr(made, b)
        bare = multiply(Operand(left.values), Operand(right.values))
        factor = exact.magnitudes.sum() / bare.magnitudes.sum().clamp(min=1e-300)
        results[key] = replace(exact, values=bare.values.float().bfloat16().double() * factor)
    return results


def _times(key: str, factor: float, products: Products, given: Given) -> dict[str, Exact]:
    made = products_of_operands(operands(products, *given))
    return made | {key: replace(made[key], values=made[key].values * factor)}


def _down_to(multiple: int, length: int) -> int:
    return length // multiple * multiple


def _contracted(key: str, kept: Callable[[int], int], products: Products, given: Given) -> dict[str, Exact]:
    """Return the products, one of them summed over the first part of its contraction."""
    made = operands(products, *given)
    left, right = (getattr(made, name) for name in PAIRS[key])
    length = kept(left.values.shape[1])
    parts = (replace(one, values=one.values[:, :length]) for one in (left, right))
    return products_of_operands(made) | {key: multiply(*parts)}


def product_faults() -> Iterator[tuple[str, Wrong]]:
    """Yield wrong computations of one layer."""
    for slot, word in SLOTS.items():
        yield f"tensor scale of {word} left out", partial(_changed, partial(_unscaled, slot))
    for which, words in (
        (("gt", "xt"), "dw without rotation"),
        (("gt",), "dy of dw not rotated, x is"),
        (("xt",), "x of dw not rotated, dy is"),
    ):
        yield words, partial(_changed, partial(_turned, which, None))
    for slot in ("gt", "xt"):
        yield (
            f"other signs in the rotation of {SLOTS[slot]}",
            partial(_changed, partial(_turned, (slot,), "none")),
        )
    yield "other signs in both rotations", partial(_changed, partial(_turned, ("gt", "xt"), "none"))
    for block in ("1x16", "1x32", "16x16", "32x32"):
        yield (
            f"W and W^T from different codes: {block} for dx",
            partial(_changed, partial(_blocked, "wt", block)),
        )
        for slot in ("w", "x", "xt", "g", "gt"):
            yield f"{SLOTS[slot]} in blocks of {block}", partial(_changed, partial(_blocked, slot, block))
    yield "dx from the codes of the forward pass", partial(_changed, partial(_forward_codes, "wt"))
    yield "dw from the codes of the forward pass", partial(_changed, partial(_forward_codes, "xt"))
    for slot, word in SLOTS.items():
        yield f"{word} not quantised", partial(_changed, partial(_unquantised, slot))
    yield "nothing quantised", lambda products, given: plain_products(*given)
    yield "result rounded to bf16 before the tensor scales", _rounded_twice
    yield "operands dequantised to bf16", partial(_changed, _bf16_operands)
    for key in PAIRS:
        yield f"{key} summed over half of the contraction", partial(_contracted, key, lambda n: n // 2)
        for multiple in (32, 64, 128):
            word = f"{key} summed up to a multiple of {multiple} of the contraction"
            yield word, partial(_contracted, key, partial(_down_to, multiple))
        for factor, word in ((0.0, "zero"), (-1.0, "negated"), (2.0, "doubled"), (0.5, "halved")):
            yield f"{key} {word}", partial(_times, key, factor)


PRODUCT_FAULTS = dict(product_faults())


# --- experts --------------------------------------------------------------------------------------

WrongGroups = Callable[[Products, list[Given]], list[dict[str, Exact]]]


def _each(wrong: Wrong, products: Products, experts: list[Given]) -> list[dict[str, Exact]]:
    return [wrong(products, given) if len(given[0]) else plain_products(*given) for given in experts]


def tile_order(grid: Tensor) -> Tensor:
    """Return the entries of a matrix in the order of the 128 x 4 layout; rows and columns padded to it."""
    rows, columns = grid.shape
    tiles = grid.view(rows // SWIZZLE_ROWS, 4, 32, columns // SWIZZLE_COLUMNS, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def packed_scales(made: list[Operand]) -> list[Operand]:
    """Return operands whose scales were laid out over all experts' tokens, and read as each expert's own.

    Args:
        made: The experts' operands [rows, tokens of the expert], with blocks of one row.
    """
    scales = [operand.block_scale[:, 0, :, 0] for operand in made if operand.block_scale is not None]
    if len(scales) != len(made) or any(scale.shape[1] % SWIZZLE_COLUMNS for scale in scales):
        return made
    whole = torch.cat(scales, dim=1)
    places = torch.full((len(whole) + -len(whole) % SWIZZLE_ROWS, whole.shape[1]), whole.numel())
    places[: len(whole)] = torch.arange(whole.numel()).view(whole.shape)
    flat, held = tile_order(places), torch.cat((whole.flatten(), torch.zeros(1)))
    read, start = [], 0
    for operand, scale in zip(made, scales, strict=True):
        own = torch.empty(places.shape[0], scale.shape[1], dtype=torch.int64)
        size = own.numel()
        order = tile_order(torch.arange(size).view(own.shape))
        own.view(-1)[order] = flat[start : start + size]
        other, start = held[own[: len(whole)]], start + size
        length = operand.values.shape[1] // max(1, scale.shape[1])
        spread, swapped = (z.repeat_interleave(length, dim=1) for z in (scale, other))
        codes = torch.where(spread == 0, operand.values.float(), operand.values.float() / spread)
        read.append(replace(operand, values=codes * swapped))
    return read


def _packed(slots: Sequence[str], products: Products, experts: list[Given]) -> list[dict[str, Exact]]:
    made = [operands(products, *given) for given in experts]
    for slot in slots:
        swapped = packed_scales([getattr(one, slot) for one in made])
        made = [replace(one, **{slot: other}) for one, other in zip(made, swapped, strict=True)]
    return [products_of_operands(one) for one in made]


def _across(slots: Sequence[str], products: Products, experts: list[Given]) -> list[dict[str, Exact]]:
    """Cast the transposed copies over all tokens, so that blocks and amax cross the experts' borders."""
    made = [operands(products, *given) for given in experts]
    sizes = [len(given[0]) for given in experts]
    for slot in slots:
        parts = [sources(products, given).entries[slot] for given in experts]
        _, quant, rotation = parts[0]
        z = torch.cat([part[0] for part in parts], dim=1)
        whole = cast(z, quant, rotation, 0, slot)
        pieces = whole.values[:, : sum(sizes)].split(sizes, dim=1)
        made = [
            replace(one, **{slot: replace(whole, values=piece)})
            for one, piece in zip(made, pieces, strict=True)
        ]
    return [products_of_operands(one) for one in made]


def _one_amax(slots: Sequence[str], products: Products, experts: list[Given]) -> list[dict[str, Exact]]:
    """Cast each expert's operands with the amax of all experts."""
    made = [operands(products, *given) for given in experts]
    for slot in slots:
        amaxes = [getattr(one, slot).amax for one in made]
        if any(amax is None or amax.ndim for amax in amaxes):
            continue
        largest = float(max(amaxes))
        for number, given in enumerate(experts):
            z, quant, rotation = sources(products, given).entries[slot]
            if quant is None or quant.outer is None or not largest:
                continue
            outer = Outer(statistic=f"static:{largest!r}", bound=quant.outer.bound)
            other = cast(z, quant.model_copy(update={"outer": outer}), rotation, 0, slot)
            made[number] = replace(made[number], **{slot: other})
    return [products_of_operands(one) for one in made]


def _wrong_level(how: str, slot: str, products: Products, experts: list[Given]) -> list[dict[str, Exact]]:
    """Multiply an operand's codes and block scales by the tensor scale of another part, or another expert.

    Args:
        how: `first`, `last`: each half of the rows has its own amax, and both get that of this half;
            `next`, `before`: the expert whose tensor scale is used.
        slot: Operand.
        products: Recipe.
        experts: x, w and dy of each expert.
    """
    made = [operands(products, *given) for given in experts]
    own = [getattr(one, slot) for one in made]
    if any(one.amax is None or one.amax.ndim for one in own):
        return [products_of_operands(one) for one in made]
    if how in ("next", "before"):
        shift = 1 if how == "next" else -1
        changed = [
            replace(one, amax=other.amax) for one, other in zip(own, own[shift:] + own[:shift], strict=True)
        ]
    else:
        changed = []
        for given in experts:
            z, quant, rotation = sources(products, given).entries[slot]
            high = quant.tile[0] if quant else 1
            if len(z) < 2 or len(z) % (2 * high):
                changed.append(cast(z, quant, rotation, 0, slot))
                continue
            halves = [cast(half, quant, rotation, 0, slot) for half in z.chunk(2)]
            values = torch.cat([half.values for half in halves])
            changed.append(replace(halves[0 if how == "first" else 1], values=values))
    return [
        products_of_operands(replace(one, **{slot: other})) for one, other in zip(made, changed, strict=True)
    ]


def _unpadded_offsets(slot: str, products: Products, experts: list[Given]) -> list[dict[str, Exact]]:
    """Read an operand's swizzled scales, padded for each expert, at offsets of their rows without padding."""
    made = [operands(products, *given) for given in experts]
    own = [getattr(one, slot) for one in made]
    if any(one.block_scale is None or one.quant is None or not one.values.numel() for one in own):
        return [products_of_operands(one) for one in made]
    stored, starts, at = [], [], 0
    for one in own:
        scale = one.block_scale[:, 0, :, 0].repeat_interleave(one.quant.tile[0], 0)
        rows = one.values.shape[0]
        scale = F.pad(scale[:rows], (0, -scale.shape[1] % SWIZZLE_COLUMNS))
        padded = F.pad(scale, (0, 0, 0, -rows % SWIZZLE_ROWS))
        starts.append(at)
        stored.append((tile_order(padded), scale))
        at += scale.numel()
    flat = torch.cat([*(tiles for tiles, _ in stored), torch.zeros(sum(t.numel() for t, _ in stored))])
    changed = []
    for one, (tiles, scale), start in zip(own, stored, starts, strict=True):
        order = tile_order(torch.arange(tiles.numel()).view(-1, scale.shape[1]))
        grid = torch.empty(tiles.numel())
        grid[order] = flat[start : start + tiles.numel()]
        grid = grid.view(-1, scale.shape[1])[: len(scale)]
        width = one.values.shape[1]
        spread, swapped = (z.repeat_interleave(one.quant.tile[1], dim=1)[:, :width] for z in (scale, grid))
        codes = torch.where(spread == 0, 0.0, one.values.float() / spread)
        changed.append(replace(one, values=codes * swapped))
    return [
        products_of_operands(replace(one, **{slot: other})) for one, other in zip(made, changed, strict=True)
    ]


def _regrouped(how: str, products: Products, experts: list[Given]) -> list[dict[str, Exact]]:
    """Multiply tokens with the weights of another expert."""
    weights = [given[1] for given in experts]
    order = weights[1:] + weights[:1] if how == "next" else weights[-1:] + weights[:-1]
    return [
        products_of_operands(operands(products, x, w, dy))
        for (x, _, dy), w in zip(experts, order, strict=True)
    ]


def _truncated(multiple: int, products: Products, experts: list[Given]) -> list[dict[str, Exact]]:
    """Leave out an expert's tokens beyond a multiple."""
    results = []
    for x, w, dy in experts:
        kept = len(x) // multiple * multiple
        one = (
            products_of_operands(operands(products, x[:kept], w, dy[:kept]))
            if kept
            else plain_products(x[:0], w, dy[:0])
        )
        missing = (0, 0, 0, len(x) - kept)
        for key in ("y", "dx"):
            values, magnitudes = (F.pad(z, missing) for z in (one[key].values, one[key].magnitudes))
            one[key] = replace(one[key], values=values, magnitudes=magnitudes)
        results.append(one)
    return results


def grouped_faults() -> Iterator[tuple[str, WrongGroups]]:
    """Yield wrong computations of a layer of experts."""
    columnwise, rowwise = ("gt", "xt"), ("x", "g")
    yield "scales over packed tokens", partial(_packed, columnwise)
    yield "scales of dy of dw over packed tokens", partial(_packed, ("gt",))
    yield "scales of x of dw over packed tokens", partial(_packed, ("xt",))
    yield "blocks across the borders of experts", partial(_across, columnwise)
    yield "one amax for all experts", partial(_one_amax, (*columnwise, *rowwise))
    yield "one amax for all experts' dw operands", partial(_one_amax, columnwise)
    yield "one amax for all experts' tokens", partial(_one_amax, rowwise)
    yield "one amax for all experts' weights", partial(_one_amax, ("w", "wt"))
    yield "one amax for all, weights as well", partial(_one_amax, (*columnwise, *rowwise, "w", "wt"))
    yield "weights of the next expert", partial(_regrouped, "next")
    yield "weights of the expert before", partial(_regrouped, "before")
    for slot, word in SLOTS.items():
        yield f"scales of {word} found at offsets without their padding", partial(_unpadded_offsets, slot)
        for how in ("first", "last"):
            yield (
                f"tensor scale of the {how} half of {word}'s rows used for both halves",
                partial(_wrong_level, how, slot),
            )
        for how in ("next", "before"):
            place = "next expert" if how == "next" else "expert before"
            yield f"tensor scale of {word} from the {place}", partial(_wrong_level, how, slot)
    for multiple in (16, 32, 64, 128):
        yield f"tokens beyond a multiple of {multiple} dropped", partial(_truncated, multiple)
    for name, wrong in PRODUCT_FAULTS.items():
        yield name, partial(_each, wrong)


GROUPED_FAULTS = dict(grouped_faults())
