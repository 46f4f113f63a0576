"""Replay of dumps: compute what a recipe gives for the operands of a dump, and compare the dumped products.

    for finding in replay(Path("dumps"), PRESETS["nvfp4"]()):
        print(finding.layer, finding.product, finding.fault or "right", finding.detail)

For each layer and product the emulator multiplies the dumped x, w and dy by the recipe: once if the product
draws nothing, several times with other random bits if it does. A product is right

- without draws: if its difference from the emulator's is that of another order of additions, at most `SLACK`
  of its norm (the sum of the elements' steps of bf16 is below that);
- with draws: if gain and relative error are in their intervals (numerics/product_error.py), and its squared
  distance from the mean of the draws is that of one more draw, up to `SPREAD` and what the draws show; and if
  it is not the product to nearest. One that is not like four draws is compared with sixteen, whose relative
  errors widen the interval: with heavy tails, a few elements decide how far draws lie apart.

What is wrong is compared with the faults of suspects.py; the nearest one, if it explains the product, names
it. Layers are taken as the recipe's own: leave out those that it keeps in high precision by a layer rule.

Not modelled: amaxes of earlier steps, which dumps do not have (the present amax stands in), and rotations
whose signs are drawn, unless the dump says by which seed.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ablate.engines.product_errors import draws as draws_of
from ablate.engines.product_errors import slack_of
from ablate.engines.products import Kept, backward, forward
from ablate.numerics.choices import SIGNS
from ablate.numerics.formats import SCALES
from ablate.numerics.philox import Clock
from ablate.numerics.product import product as multiplied
from ablate.numerics.product_error import SLACK, Expected, compared, spread, steps
from ablate.numerics.quantize import Operand
from ablate.numerics.stored import unpack, unswizzle
from ablate.recipes import Recipe
from ablate.recipes.recipe import DIRECTIONS, Products
from ablate.verification.conformance.dumps import DumpedLayer, read
from ablate.verification.conformance.result import Outcome, Row
from ablate.verification.conformance.suspects import (
    KINDS,
    After,
    Suspect,
    SuspectLinear,
    misread_groups,
    operands,
    relative_signs,
    rescaled,
    rounded,
    scales_of,
    suspects,
)

DRAWS, MORE_DRAWS = 4, 16
"""Draws of a product, and of one that is not like those."""
RESULTS = {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}
"""Name of each product's result in a dump."""
_TILE = 16
"""Rows and columns of a block of zeros that is looked for."""
SPREAD = 0.2
"""Part of the variance of the draws by which the distance from their mean may always differ."""
_DEVIATIONS = 8
"""Standard deviations of the draws' own distances by which it may differ as well."""


@dataclass(frozen=True)
class Replayed:
    """Finding on one product of one layer of a dump."""

    layer: str
    product: str
    step: int
    rank: int
    right: bool | None
    """None: the dump does not have what is needed."""
    fault: str = ""
    """Key of `KINDS`, if the product is wrong."""
    place: str = ""
    """Operands that have the fault, or rows and columns."""
    measured: tuple[float, float] | None = None
    """Gain and relative error."""
    expected: Expected | None = None
    detail: str = ""
    """One sentence."""

    @property
    def row(self) -> Row:
        """Return the finding as a row of the conformance kit."""
        outcome = {True: Outcome.PASS, False: Outcome.FAIL, None: Outcome.NOT_APPLICABLE}[self.right]
        where = f"{self.layer} {self.product}, step {self.step}, rank {self.rank}"
        fault = "" if self.fault == "unknown" else self.fault
        return Row(where, outcome, 1, int(self.right is False), fault=fault, detail=self.detail)


def replay(folder: Path, recipe: Recipe, seed: int | None = None) -> list[Replayed]:
    """Return a finding for each product of each layer of a folder of dumps.

    Args:
        folder: dumps, as dumps.py reads them.
        recipe: recipe that the layers should compute.
        seed: seed of the run, if this package's emulator wrote the dumps: its rotations are drawn by it.

    Raises:
        InputError: the folder has no dumps, or a file cannot be read.
    """
    layers = read(folder)
    return [finding for layer in layers for finding in findings(layer, recipe.products, layers, seed)]


def findings(
    layer: DumpedLayer, products: Products, layers: Sequence[DumpedLayer] = (), seed: int | None = None
) -> Iterator[Replayed]:
    """Yield the finding on each product of a layer; `layers` are all of its dump."""
    for product in DIRECTIONS["all"]:
        one = _Product(layer, products, product, layers, seed)
        yield from (one.stored(slot) for slot in operands(product) if f"{slot}.codes" in layer.tensors)
        yield one.finding()


class _Product:
    """One product of one layer of a dump."""

    def __init__(
        self,
        layer: DumpedLayer,
        products: Products,
        product: str,
        layers: Sequence[DumpedLayer],
        seed: int | None,
    ) -> None:
        self.layer, self.products, self.product, self.seed = layer, products, product, seed
        self.like = [
            other
            for other in layers
            if (other.step, other.rank) == (layer.step, layer.rank) and other.name != layer.name
        ]
        self.random, self.slack = draws_of(products, product), SLACK

    def finding(self) -> Replayed:
        """Return the finding."""
        about = partial(Replayed, self.layer.name, self.product, self.layer.step, self.layer.rank)
        needed = [*_sources(self.product), RESULTS[self.product]]
        if self.products.backward_needs and self.product != "fprop":
            needed = ["x", "w", *needed]
        if missing := [name for name in dict.fromkeys(needed) if name not in self.layer.tensors]:
            return about(None, detail=f"the dump has no {' and no '.join(missing)}")
        for name in needed:
            if not self.layer.tensors[name].numel():
                return about(None, detail=f"{name} is empty")
            if name != RESULTS[self.product] and not self.layer.tensors[name].isfinite().all():
                return about(None, detail=f"{name} is not finite, and so is no product of it")
        rotation = getattr(self.products, self.product).hadamard
        if rotation and SIGNS[rotation.signs].drawn and self.seed is None:
            return about(None, detail="the rotation's signs are drawn, and their seed is not known")
        measured = self.layer.tensors[RESULTS[self.product]]
        draws = self.draws(None)
        self.slack = slack_of(self.products, self.product, self.exact()[0].shape[1])
        exact = self.exact()
        own, drawn = compared([measured, draws[0]], *exact)
        emulated = self.emulated(None, 0)
        self.result(emulated, 0)
        plain = multiplied(Operand(exact[0]), Operand(exact[1]), torch.float32)
        reach = spread(plain, *emulated.multiplied) if self.random else 0.0
        given = Expected.of(drawn, reach, self.slack)
        values = (own.gain, own.rel_l2)
        if not own.power and not measured.any():
            return about(True, measured=None, detail="zero, as the product of its operands")
        right = given.covers(own) and self.close(measured, draws) and not self.unrandom(measured, draws)
        if self.random and not right:  # by heavy tails, a few elements decide how far draws lie apart
            draws = self.draws(None, MORE_DRAWS)
            given = given.over([each.rel_l2 for each in compared(draws, *exact)])
            right = given.covers(own) and self.close(measured, draws) and not self.unrandom(measured, draws)
        sentence = (
            f"gain {own.gain:.4f}, expected {given.gain:.4f} ±{given.gain_margin:.4f}; relative L2"
            f" {own.rel_l2:.4f}, expected {given.rel_l2:.4f} ±{given.rel_l2_margin:.4f}"
        )
        if right:
            return about(True, measured=values, expected=given, detail=sentence)
        mean = torch.stack([draw.double() for draw in draws]).mean(0)
        offset = (measured.double() - mean).mean(0)
        if self.product == "fprop" and self.close(measured.double() - offset, draws, measured.norm().item()):
            return about(True, measured=values, expected=given, detail=f"{sentence}; y includes a bias")
        kind, place = self.cause(measured, mean, draws)
        if given.covers(own):
            near = "it is the product rounded to nearest" if self.close(measured, draws) else self.distance()
            sentence = f"{near}; {sentence}"
        return about(False, kind, place, values, given, f"{kind}{place and f' ({place})'}: {sentence}")

    def distance(self) -> str:
        """Return what is wrong with a product whose gain and relative error are right."""
        if self.random:
            return "its elements are not those of another draw, though gain and relative L2 are"
        return "its elements differ by more than the order of additions"

    def stored(self, slot: str) -> Replayed:
        """Return the finding on the codes and scales of an operand that the dump has."""
        about = partial(Replayed, self.layer.name, slot, self.layer.step, self.layer.rank)
        quant, rotation = self.products.slot(slot), getattr(self.products, self.product).hadamard
        name = {"x": "x", "w": "w", "g": "dy"}[slot[-1]]
        if quant is None or self.products.backward_needs:
            return about(None, detail="the recipe has no codes of its own for this operand")
        if name not in self.layer.tensors:
            return about(None, detail=f"the dump has no {name}")
        clean = self.emulated(None, 0)
        source = self.source(slot)
        own = clean.operand(source, slot, quant, rotation)[0]
        try:
            got = decoded(self.layer.tensors, slot, own)
        except ValueError as error:
            return about(False, "unknown", slot, detail=str(error))
        values = own.dequantize().double()
        if quant.draws:
            turned = clean.rotated(source, slot, rotation).double()
            turned = torch.nn.functional.pad(turned, (0, values.shape[1] - turned.shape[1]))
            reach = steps(own).double() * (1 + 2.0**-6)
            differ, nearest = ~((got - turned).abs() <= reach), got
            nearest = clean.operand(source, slot, quant.model_copy(update={"rounding": "nearest"}), rotation)[
                0
            ]
            same = bool((nearest.dequantize().double() - got).abs().max() <= 2.0**-20 * values.abs().max())
        else:
            differ, same = ~((got - values).abs() <= 2.0**-20 * values.abs().max()), False
        wrong = int(differ.sum()) + int(same)
        counted = f"{int(differ.sum())} of {differ.numel()} elements are not those of the recipe"
        if not wrong:
            return about(True, detail=counted)
        best, kind, detail = math.inf, "unknown", ""
        signs = None
        shapes = {each: self.source(each).shape for each in operands(self.product)}
        for suspect in suspects(self.products, self.product, shapes, {}, self.packed(), signs):
            if slot not in suspect.slots or suspect.kind in ("in high precision", "outer scale lost"):
                continue
            made = self.emulated(suspect, 0).operand(source, slot, quant, rotation)[0]
            far = (decoded_values(made) - got).square().sum().item()
            if far < best:
                best, kind, detail = far, suspect.kind, suspect.detail
        if best > 0.5 * (values - got).square().sum().item():
            kind = "unknown"
        return about(False, kind, slot, detail=f"{kind}: {counted}{detail and f' ({detail})'}")

    def exact(self) -> tuple[Tensor, Tensor]:
        """Return the unquantised operands, bf16 [rows, contraction]."""
        first, second = (self.source(slot) for slot in operands(self.product))
        return first, second

    def source(self, slot: str, layer: DumpedLayer | None = None) -> Tensor:
        """Return the tensor of a slot before rotation, with the contraction as its last dimension."""
        name = {"x": "x", "w": "w", "g": "dy"}[slot[-1]]
        tensor = (layer or self.layer).tensors[name].to(torch.bfloat16)
        return tensor.t() if self.product == "wgrad" or slot == "dgrad.w" else tensor

    def draws(self, suspect: Suspect | None, count: int = DRAWS) -> list[Tensor]:
        """Return the emulator's products, with a fault or without."""
        drawn = self.random or (suspect is not None and suspect.kind == "rounded at random")
        return [
            self.result(self.emulated(suspect, number), number) for number in range(count if drawn else 1)
        ]

    def emulated(self, suspect: Suspect | None, number: int) -> SuspectLinear:
        """Return a layer that draws by the bits of one draw."""
        w, tensors = self.layer.tensors.get("w"), self.layer.tensors
        out = len(w) if w is not None else tensors["dy"].shape[1]
        inside = (w if w is not None else tensors["x"]).shape[1]
        clock = Clock(self.seed or 0, step=self.layer.step)
        return SuspectLinear((inside, out), self.layer.name, self.products, clock, suspect, number)

    def result(self, emulated: SuspectLinear, number: int) -> Tensor:
        """Return the product that a layer computes."""
        tensors, products = self.layer.tensors, self.products
        x, w = (tensors[name].to(torch.bfloat16) if name in tensors else None for name in ("x", "w"))
        with torch.no_grad():
            if self.product == "fprop":
                assert x is not None
                assert w is not None
                return forward(emulated, products, x, w)[0]
            dy = tensors["dy"].to(torch.bfloat16)
            # A tensor that the product does not read may be missing from the dump.
            x = dy.new_empty(len(dy), emulated.in_features) if x is None else x
            w = dy.new_empty(emulated.out_features, emulated.in_features) if w is None else w
            start: Kept = (x, w, None, None)
            if products.backward_needs:
                start = forward(self.emulated(None, number), products, x, w)[1]
            needs = (self.product == "dgrad", self.product == "wgrad")
            made = backward(emulated, products, start, dy, needs)[needs.index(True)]
        assert made is not None
        return made

    def close(self, measured: Tensor, draws: Sequence[Tensor], rounded: float = 0.0) -> bool:
        """Return True if a product is as far from the draws as one more draw is.

        Args:
            measured: the product.
            draws: the emulator's.
            rounded: norm of what was rounded to bf16 before a bias was taken from it.
        """
        m, made = measured.double(), [draw.double() for draw in draws]
        if not m.isfinite().all():
            return False
        if len(made) == 1:
            norm = made[0].norm().item()
            return (m - made[0]).norm().item() <= self.slack * norm + 2.0**-9 * rounded and not _zero_tiles(
                m, made[0]
            )
        if _zero_tiles(m, made[0]):
            return False
        others = [torch.stack([y for y in made if y is not own]).mean(0) for own in made]
        each = [_distance(y, mean, len(made) - 1) for y, mean in zip(made, others, strict=True)]
        mean, own = statistics.mean(each), _distance(m, torch.stack(made).mean(0), len(made))
        if len(made) > DRAWS:
            return min(each) - SPREAD * mean <= own <= max(each) + SPREAD * mean
        return abs(own - mean) <= SPREAD * mean + _DEVIATIONS * statistics.stdev(each)

    def unrandom(self, measured: Tensor, draws: Sequence[Tensor]) -> bool:
        """Return True if a product whose recipe draws is the one that rounds to nearest."""
        random = [slot for slot in operands(self.product) if (q := self.products.slot(slot)) and q.draws]
        if not random:
            return False
        suspect = Suspect("rounded to nearest", tuple(random), rounded("nearest"))
        nearest = self.result(self.emulated(suspect, 0), 0).double()
        far, usual = ((y.double() - nearest).norm().item() for y in (measured, draws[0]))
        return far <= self.slack * nearest.norm().item() < usual / 4

    def cause(self, measured: Tensor, mean: Tensor, draws: Sequence[Tensor]) -> tuple[str, str]:
        """Return the kind of fault of a product that is wrong, and its place."""
        m = measured.double()
        if not m.isfinite().all():
            row, column = (~m.isfinite()).nonzero()[0].tolist()
            return "not finite", f"row {row}, column {column}"
        if tiles := _zero_tiles(m, mean):
            row, column = (_TILE * place for place in tiles[0])
            return "block of zeros", f"rows from {row}, columns from {column}, {len(tiles)} blocks"
        candidates: list[tuple[float, str, str, list[Tensor]]] = []
        factor = (m * mean).sum().item() / (mean.square().sum().item() or 1.0)
        if abs(factor - 1) > 2 * SLACK:
            scaled = [draw.double() * factor for draw in draws]
            candidates.append((_far(m, scaled), "another outer scale", f"factor {factor:.4g}", scaled))
        for suspect in self.suspects(m):
            made = [draw.double() for draw in self.draws(suspect)]
            place = f"{' and '.join(suspect.slots)}{suspect.detail and f': {suspect.detail}'}"
            candidates.append((_far(m, made), suspect.kind, place, made))
        finite = [each for each in candidates if math.isfinite(each[0])]
        if not finite:
            return "unknown", ""
        nearest = min(far for far, *_ in finite)
        order = [*KINDS]
        near = [each for each in finite if each[0] <= 1.02 * nearest + 1e-9 * m.square().sum().item()]
        far, kind, place, made = min(near, key=lambda each: (order.index(each[1]), each[0]))
        explained = self.close(m, made) or far <= 0.5 * _far(m, [draw.double() for draw in draws])
        return (kind, place) if explained else ("unknown", "")

    def suspects(self, m: Tensor) -> Iterator[Suspect]:
        """Yield the faults that the product may have."""
        slots = operands(self.product)
        shapes = {slot: self.source(slot).shape for slot in slots}
        others: dict[str, list[tuple[str, Tensor]]] = {slot: [] for slot in slots}
        for other in self.like:
            for number, slot in enumerate(slots):
                if {"x": "x", "w": "w", "g": "dy"}[slot[-1]] not in other.tensors:
                    continue
                tensor = self.source(slot, other)
                if tensor.shape == shapes[slot]:
                    pair = [self.source(each) for each in slots]
                    pair[number] = tensor
                    rough = pair[0].double() @ pair[1].double().t()
                    if (m * rough).sum() > 0.5 * m.norm() * rough.norm():
                        others[slot].append((other.name, tensor))
        rotation = getattr(self.products, self.product).hadamard
        signs = relative_signs(m, *self.exact(), rotation.size) if rotation else None
        yield from suspects(self.products, self.product, shapes, others, self.packed(), signs)

    def packed(self) -> After | None:
        """Return wgrad's operands as of an expert whose scales are tiled over the tokens of all; None if the
        layer is no expert."""
        group = self.layer.group
        if self.product != "wgrad" or group is None:
            return None
        experts = sorted(
            (
                other
                for other in (self.layer, *self.like)
                if other.group and other.group[0] == group[0] and {"x", "dy"} <= other.tensors.keys()
            ),
            key=lambda other: other.group[1] if other.group else 0,
        )
        if len(experts) < 2 or any(self.products.slot(slot) is None for slot in operands("wgrad")):
            return None
        index = experts.index(self.layer)

        def after(part: Operand, slot: str) -> Operand:
            plain = self.emulated(None, 0)
            spec = self.products.wgrad
            scales = [
                scales_of(
                    plain.operand(self.source(slot, other), slot, self.products.slot(slot), spec.hadamard)[0]
                )
                for other in experts
            ]
            if len({len(each) for each in scales}) > 1:
                return part
            return rescaled(part, misread_groups(scales, index))

        return after


def _sources(product: str) -> tuple[str, str]:
    """Return the names of a product's operands in a dump."""
    first, second = ({"x": "x", "w": "w", "g": "dy"}[slot[-1]] for slot in operands(product))
    return first, second


def _distance(y: Tensor, mean: Tensor, count: int) -> float:
    """Return the squared distance from a mean of so many draws, as large as the variance of one draw."""
    return (y - mean).square().sum().item() / (1 + 1 / count)


def _far(m: Tensor, made: Sequence[Tensor]) -> float:
    """Return the squared distance of a product from the mean of draws."""
    mean = torch.stack(list(made)).mean(0)
    many = len(made) > 1
    return ((m - mean).square().sum() / (1 + 1 / len(made) if many else 1)).item()


def _zero_tiles(m: Tensor, other: Tensor) -> list[tuple[int, int]]:
    """Return the tiles of 16 x 16, by number, that are zero in `m` and nowhere zero in `other`."""
    rows, columns = (size // _TILE for size in m.shape)
    if not rows or not columns:
        return []
    zero, filled = (
        z[: rows * _TILE, : columns * _TILE].view(rows, _TILE, columns, _TILE) for z in (m == 0, other != 0)
    )
    found = zero.all(3).all(1) & (filled.double().mean((1, 3)) > 0.5)
    return [(int(row), int(column)) for row, column in found.nonzero().tolist()]


def decoded(tensors: Mapping[str, Tensor], slot: str, like: Operand) -> Tensor:
    """Return the values of an operand that a dump has as codes, scales and outer scale, fp64.

    Args:
        tensors: tensors of the dump.
        slot: the operand.
        like: the emulator's operand, which has its shape and format.

    Raises:
        ValueError: shapes or dtypes are not those of the format, or scales are missing.
    """
    rows, columns = like.values.shape
    codes = tensors[f"{slot}.codes"]
    if codes.ndim != 2 or not (codes.dtype == torch.uint8 or codes.is_floating_point()):
        raise ValueError(
            f"{slot}.codes are {codes.dtype} {list(codes.shape)}; bytes of two codes are read, or fp8"
        )
    wide = unpack(codes) if codes.dtype == torch.uint8 else codes.to(torch.float32)
    if wide.shape[0] != rows or wide.shape[1] < columns:
        raise ValueError(f"{slot}.codes hold {list(wide.shape)} elements, and {rows} x {columns} are needed")
    values = wide[:, :columns].double()
    if like.block_scale is not None:
        across = like.block_scale.shape[2]
        scales = tensors.get(f"{slot}.scales")
        if scales is None:
            raise ValueError(f"the dump has {slot}.codes and no {slot}.scales")
        if not (scales.dtype == torch.uint8 or scales.is_floating_point()):
            raise ValueError(
                f"{slot}.scales are {scales.dtype}, and bytes or floating-point numbers are read"
            )
        if scales.dtype == torch.uint8:
            assert like.quant is not None
            assert like.quant.scale is not None
            name = like.quant.scale.format
            form = SCALES[name]
            if form.bits != 8 or form.dtype is None:
                raise ValueError(f"{slot}.scales are bytes, and torch has no {name}; dump numbers")
            scales = scales.view(getattr(torch, form.dtype))
        if scales.ndim == 1:
            scales = unswizzle(scales, rows, across)
        tall = rows // scales.shape[0] if scales.ndim == 2 and scales.shape[0] else 0
        if not tall or scales.shape != (rows // tall, across):
            raise ValueError(f"{slot}.scales are {list(scales.shape)}, and {rows} x {across} are needed")
        over = scales.to(torch.float32).double().repeat_interleave(tall, 0)
        values = values * over.repeat_interleave(columns // across, 1)
    for name in ("factor", "amax"):
        if (one := tensors.get(f"{slot}.{name}")) is not None and one.numel() != 1:
            raise ValueError(f"{slot}.{name} has {one.numel()} numbers, and one is read")
    if f"{slot}.factor" in tensors:
        return values * tensors[f"{slot}.factor"].double()
    amax = tensors.get(f"{slot}.amax")
    return values * ((1.0 if amax is None else amax.double()) / like.divisor)


def decoded_values(operand: Operand) -> Tensor:
    """Return the values of an emulated operand, fp64, from its values as a product takes them."""
    amax = 1.0 if operand.amax is None else operand.amax.double()
    return operand.values.double() * amax / operand.divisor
