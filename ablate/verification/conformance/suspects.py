"""Suspected faults of a product: each computes what the product would be if the fault were there.

A product that is not the recipe's is compared with all of them, and the nearest one names the fault. A
suspect changes one operand of one product, before it is rotated and quantised or afterwards, in a layer that
is otherwise the emulator's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from ablate.engines.emulated_layer import Redrawn
from ablate.numerics.philox import Clock, site
from ablate.numerics.quantize import Keep, Operand, pad
from ablate.numerics.spec import Hadamard, Quant
from ablate.recipes.recipe import SLOTS, Products

Before = Callable[
    [Tensor, "Quant | None", "Hadamard | None"], tuple[Tensor, "Quant | None", "Hadamard | None"]
]
After = Callable[[Operand, str], Operand]


def _unchanged(
    x: Tensor, quant: Quant | None, rotation: Hadamard | None
) -> tuple[Tensor, Quant | None, Hadamard | None]:
    return x, quant, rotation


@dataclass(frozen=True)
class Suspect:
    """One fault in one place."""

    kind: str
    """Key of `KINDS`."""
    slots: tuple[str, ...]
    """Operands that have it."""
    before: Before = _unchanged
    after: After | None = None
    detail: str = ""


class SuspectLinear(Redrawn):
    """A layer with a fault in some of its operands.

    Args:
        features: inputs and outputs.
        name: name of the layer, by which it draws the signs of rotations.
        products: its products.
        clock: moment of its draws.
        suspect: the fault; None: there is none.
        number: number of the draw, by which operands are rounded.
    """

    def __init__(
        self,
        features: tuple[int, int],
        name: str,
        products: Products,
        clock: Clock,
        suspect: Suspect | None,
        number: int,
    ) -> None:
        super().__init__(nn.Linear(*features, bias=False, device="meta"), name, clock, torch.bfloat16)
        self.products, self.suspect = products, suspect
        self._sites = {slot: site(f"{name}/draw {number}", slot) for slot in SLOTS}

    def operand(
        self, x: Tensor, slot: str, quant: Quant | None, rotation: Hadamard | None, keep: Keep = False
    ) -> list[Operand]:
        """Return the operand with the fault, if the slot has it."""
        if self.suspect is None or slot not in self.suspect.slots:
            return super().operand(x, slot, quant, rotation, keep)
        parts = super().operand(*_placed(self.suspect.before(x, quant, rotation), slot), keep)
        if self.suspect.after is not None:
            parts = [self.suspect.after(parts[0], slot), *parts[1:]]
        return parts


def _placed(
    made: tuple[Tensor, Quant | None, Hadamard | None], slot: str
) -> tuple[Tensor, str, Quant | None, Hadamard | None]:
    x, quant, rotation = made
    return x, slot, quant, rotation


KINDS = {
    "in high precision": "the product was not quantised",
    "outer scale lost": "the factor amax / 2688 of an operand was not applied",
    "another outer scale": "the recipe's product times a factor: an amax of an earlier step or tensor",
    "nibbles swapped": "the two codes of a byte are in the other order",
    "block scales shifted": "each block has the scale of its neighbour",
    "block scales in another layout": "scales in tiles were read as plain ones, or the reverse",
    "block scales tiled over packed tokens": "scales of all experts were tiled as one matrix",
    "rotation missing on one operand": "",
    "rotation missing": "neither operand was rotated",
    "other signs on one operand": "the rotations of the two operands do not cancel",
    "rounded to nearest": "an operand that the recipe rounds at random",
    "rounded at random": "an operand that the recipe rounds to nearest",
    "W and W^T from different codes": "dgrad's weight was quantised in blocks of its own",
    "operand transposed": "",
    "operand of another layer": "",
    "block of zeros": "rows or tiles of the result are zero",
    "not finite": "a NaN or an infinity from finite operands",
    "unknown": "none of the faults that are looked for",
}
"""Faults by name, each with a sentence, the more specific before the more general ones."""


def operands(product: str) -> tuple[str, str]:
    """Return the slots of a product."""
    first, second = {"fprop": ("x", "w"), "dgrad": ("g", "w"), "wgrad": ("g", "x")}[product]
    return f"{product}.{first}", f"{product}.{second}"


def suspects(
    products: Products,
    product: str,
    shapes: dict[str, torch.Size],
    others: Mapping[str, Sequence[tuple[str, Tensor]]],
    packed: After | None,
    signs: Tensor | None,
) -> Iterator[Suspect]:
    """Yield the faults that a product may have.

    Args:
        products: the recipe's products.
        product: `fprop`, `dgrad` or `wgrad`.
        shapes: shape of each slot's operand, [rows, contraction].
        others: names of other layers and their tensors that are like a slot's operand, by slot.
        signs: product of the signs of both rotations, as `relative_signs` finds it; None: they are the same.
        packed: the operand of one expert as `misread_groups` gives it; None: the layer is no expert.
    """
    both = operands(product)
    rotation = getattr(products, product).hadamard
    quantised = [slot for slot in both if products.slot(slot) is not None]
    yield Suspect("in high precision", both, lambda x, quant, rotation: (x, None, None))
    for slot in quantised:
        quant = products.slot(slot)
        assert quant is not None
        if quant.outer is not None:
            yield Suspect("outer scale lost", (slot,), after=_without_outer)
        if quant.four_bits:
            yield Suspect("nibbles swapped", (slot,), after=_swapped)
        if quant.scale is not None:
            for shift in (1, -1):
                yield Suspect("block scales shifted", (slot,), after=partial(_shifted, by=shift))
            for read in (tiled, untiled):
                yield Suspect("block scales in another layout", (slot,), after=partial(_reread, read=read))
        if quant.draws:
            yield Suspect("rounded to nearest", (slot,), rounded("nearest"))
        elif quant.rounding == "nearest":
            yield Suspect("rounded at random", (slot,), rounded("stochastic"))
        if slot == "dgrad.w" and quant.block == "16x16":
            yield Suspect("W and W^T from different codes", (slot,), _in_rows)
    if len(random := [slot for slot in quantised if (quant := products.slot(slot)) and quant.draws]) == 2:
        yield Suspect("rounded to nearest", tuple(random), rounded("nearest"))
    outers = [slot for slot in quantised if products.slot(slot).outer is not None]  # type: ignore[union-attr]
    if len(outers) == 2:
        yield Suspect("outer scale lost", both, after=_without_outer)
    if rotation:
        yield Suspect("rotation missing", both, lambda x, quant, rotation: (x, quant, None))
    for slot in both if rotation else ():
        yield Suspect("rotation missing on one operand", (slot,), lambda x, quant, rotation: (x, quant, None))
    if signs is not None:
        yield Suspect("other signs on one operand", both[:1], _signs(signs))
    for slot in both:
        if shapes[slot][0] == shapes[slot][1]:
            yield Suspect("operand transposed", (slot,), lambda x, quant, rotation: (x.t(), quant, rotation))
        for name, tensor in others.get(slot, ()):
            yield Suspect("operand of another layer", (slot,), _instead(tensor), detail=name)
    if packed is not None and product == "wgrad":
        yield Suspect("block scales tiled over packed tokens", both, after=packed)


def _without_outer(part: Operand, slot: str) -> Operand:
    return replace(part, amax=None)


def _swapped(part: Operand, slot: str) -> Operand:
    values = part.values
    return replace(part, values=values.view(len(values), -1, 2).flip(2).reshape(values.shape))


def scales_of(part: Operand) -> Tensor:
    """Return the block scales of an operand as a hardware layout has them: [rows, blocks], fp32."""
    assert part.block_scale is not None
    assert part.quant is not None
    return part.block_scale[:, 0, :, 0].repeat_interleave(part.quant.tile[0], 0)[: len(part.values)]


def rescaled(part: Operand, scales: Tensor) -> Operand:
    """Return an operand with the same codes and other block scales [rows, blocks]."""
    own = scales_of(part)
    blocks = part.values.to(torch.float32).view(*own.shape, -1)
    codes = torch.where(own[:, :, None] == 0, blocks, blocks / own[:, :, None])
    return replace(part, values=(codes * scales[:, :, None]).view(part.values.shape).to(torch.float32))


def _shifted(part: Operand, slot: str, by: int) -> Operand:
    return rescaled(part, scales_of(part).roll(by, 1))


def _reread(part: Operand, slot: str, read: Callable[[Tensor], Tensor]) -> Operand:
    return rescaled(part, read(scales_of(part)))


def tiled(scales: Tensor) -> Tensor:
    """Return scales [rows, columns] as they are read if tiles of 128 x 4 are taken for plain rows."""
    padded = pad(scales, 128, 4)
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded.shape)[: len(scales), : scales.shape[1]]


def untiled(scales: Tensor) -> Tensor:
    """Return scales [rows, columns] as they are read if plain rows are taken for tiles of 128 x 4."""
    padded = pad(scales, 128, 4)
    tiles = padded.reshape(padded.shape[0] // 128, padded.shape[1] // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded.shape)[: len(scales), : scales.shape[1]]


def misread_groups(scales: Sequence[Tensor], index: int) -> Tensor:
    """Return the scales that an expert's operand gets if all experts' were tiled as one matrix.

    The product reads a buffer of its own for each expert, one behind the other (pytorch/ao b3c77e59a).

    Args:
        scales: scales of each expert's operand, [rows, blocks of its tokens].
        index: number of the expert.
    """
    whole = pad(torch.cat(list(scales), 1), 128, 4)
    flat = whole.view(whole.shape[0] // 128, 4, 32, whole.shape[1] // 4, 4).permute(0, 3, 2, 1, 4).reshape(-1)
    sizes = [pad(each, 128, 4).numel() for each in scales]
    own, begin = pad(scales[index], 128, 4), sum(sizes[:index])
    buffer = torch.zeros(sizes[index])
    read = flat[begin : begin + sizes[index]]
    buffer[: len(read)] = read
    tiles = buffer.view(own.shape[0] // 128, own.shape[1] // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(own.shape)[: len(scales[index]), : scales[index].shape[1]]


def rounded(rounding: str) -> Before:
    """Return the change of an operand to another rounding."""

    def before(
        x: Tensor, quant: Quant | None, rotation: Hadamard | None
    ) -> tuple[Tensor, Quant | None, Hadamard | None]:
        return x, quant and quant.model_copy(update={"rounding": rounding}), rotation

    return before


def _in_rows(
    x: Tensor, quant: Quant | None, rotation: Hadamard | None
) -> tuple[Tensor, Quant | None, Hadamard | None]:
    return x, quant and quant.model_copy(update={"block": "1x16"}), rotation


def relative_signs(m: Tensor, a: Tensor, b: Tensor, size: int) -> Tensor | None:
    """Return the product of the signs by which two operands were rotated, if it is not 1 throughout.

    With R = D H / sqrt(n), R_a R_b^T = D_a D_b: the product is the sum of n products of every n-th column,
    each with a sign, which regression finds.

    Args:
        m: the product [rows, columns], fp64.
        a: unquantised first operand [rows, contraction].
        b: unquantised second operand [columns, contraction].
        size: size of the rotation.
    """
    parts = [(a[:, n::size].double() @ b[:, n::size].double().t()).flatten() for n in range(size)]
    matrix = torch.stack(parts, 1)
    found = torch.linalg.lstsq(matrix.t() @ matrix, matrix.t() @ m.reshape(-1, 1)).solution.flatten()
    signs = torch.where(found < 0, -1.0, 1.0)
    return None if bool((signs > 0).all()) else signs


def _signs(signs: Tensor) -> Before:
    def before(
        x: Tensor, quant: Quant | None, rotation: Hadamard | None
    ) -> tuple[Tensor, Quant | None, Hadamard | None]:
        repeated = signs.repeat(-(-x.shape[1] // len(signs)))[: x.shape[1]]
        return (x * repeated).to(x.dtype), quant, rotation

    return before


def _instead(tensor: Tensor) -> Before:
    return lambda x, quant, rotation: (tensor, quant, rotation)
