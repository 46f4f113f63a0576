"""Replay of dumps: compute what a recipe gives for the operands of a dump, and compare the dumped products.

    for finding in replay(Path("dumps"), PRESETS["nvfp4"]()):
        print(finding.layer, finding.product, finding.right, finding.detail)

For each layer and product the emulator multiplies the dumped x, w and dy by the recipe: once if the product
draws nothing, several times with other random bits if it does. A product is right

- without draws: if its difference from the emulator's is that of another order of additions, at most `SLACK`
  of its norm (the sum of the elements' steps of bf16 is below that);
- with draws: if gain and relative error are in their intervals (numerics/product_error.py), and its squared
  distance from the mean of the draws is that of one more draw, up to `SPREAD` and what the draws show; and if
  it is not the product to nearest. One that is not like four draws is compared with sixteen, whose relative
  errors widen the interval: with heavy tails, a few elements decide how far draws lie apart.

Findings are in the order of the layers' names, numbers in them by size: the first one that is wrong is where
a fault begins. Layers are taken as the recipe's own: leave out those that it keeps in high precision by a
layer rule.

Not modelled: amaxes of earlier steps, which dumps do not have (the present amax stands in), and rotations
whose signs are drawn, unless the dump says by which seed.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ablate.engines.emulated_layer import Redrawn
from ablate.engines.product_errors import draws as draws_of
from ablate.engines.product_errors import slack_of
from ablate.engines.products import Kept, backward, forward
from ablate.numerics.choices import SIGNS
from ablate.numerics.philox import Clock, site
from ablate.numerics.product import product as multiplied
from ablate.numerics.product_error import SLACK, Expected, compare, spread
from ablate.numerics.quantize import Operand
from ablate.recipes import Recipe
from ablate.recipes.recipe import DIRECTIONS, SLOTS, Products
from ablate.verification.conformance.dumps import DumpedLayer, read
from ablate.verification.conformance.result import Outcome, Row

DRAWS, MORE_DRAWS = 4, 16
"""Draws of a product, and of one that is not like those."""
RESULTS = {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}
"""Name of each product's result in a dump."""
OPERANDS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
"""Names of each product's operands in a dump."""
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
        return Row(where, outcome, 1, int(self.right is False), detail=self.detail)


def replay(folder: Path, recipe: Recipe, seed: int | None = None) -> list[Replayed]:
    """Return a finding for each product of each layer of a folder of dumps; InputError if it has no dumps, or
    a file cannot be read. `seed`: the run's, if this package's emulator wrote the dumps: its rotations are
    drawn by it."""
    return [finding for layer in read(folder) for finding in findings(layer, recipe.products, seed)]


def findings(layer: DumpedLayer, products: Products, seed: int | None = None) -> Iterator[Replayed]:
    """Yield the finding on each product of a layer."""
    for product in DIRECTIONS["all"]:
        yield _Product(layer, products, product, seed).finding()


class RedrawnLayer(Redrawn):
    """A layer of `features` (inputs and outputs) that rounds its operands by the random bits of draw
    `number`. By its `name` it draws the signs of rotations; `clock`: moment of its draws."""

    def __init__(
        self, features: tuple[int, int], name: str, products: Products, clock: Clock, number: int
    ) -> None:
        super().__init__(nn.Linear(*features, bias=False, device="meta"), name, clock, torch.bfloat16)
        self.products = products
        self._sites = {slot: site(f"{name}/draw {number}", slot) for slot in SLOTS}


class _Product:
    """One product of one layer of a dump."""

    def __init__(self, layer: DumpedLayer, products: Products, product: str, seed: int | None) -> None:
        self.layer, self.products, self.product, self.seed = layer, products, product, seed
        self.random, self.slack = draws_of(products, product), SLACK

    def finding(self) -> Replayed:
        about = partial(Replayed, self.layer.name, self.product, self.layer.step, self.layer.rank)
        needed = [*OPERANDS[self.product], RESULTS[self.product]]
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
        exact = self.exact()
        self.slack = slack_of(self.products, self.product, exact[0].shape[1])
        draws = self.draws()
        plain = multiplied(Operand(exact[0]), Operand(exact[1]), torch.float32)
        own, drawn = compare(measured, plain), compare(draws[0], plain)
        emulated = self.emulated(0)
        self.result(emulated)
        reach = spread(plain, *emulated.multiplied) if self.random else 0.0
        given = Expected.of(drawn, reach, self.slack)
        if not own.power and not measured.any():
            return about(True, measured=None, detail="zero, as the product of its operands")
        for attempt in range(1 + self.random):
            if attempt:  # by heavy tails, a few elements decide how far draws lie apart
                draws = self.draws(MORE_DRAWS)
                given = given.over([compare(each, plain).rel_l2 for each in draws])
            covered = not own.power or given.covers(own)
            right = covered and self.close(measured, draws) and not self.unrandom(measured, draws)
            if right:
                break
        sentence = (
            "the product of the unquantised operands is zero, so it has no gain; largest magnitude"
            f" {measured.abs().max():.4g}, the recipe's {draws[0].abs().max():.4g}"
        )
        if own.power:
            about = partial(about, measured=(own.gain, own.rel_l2), expected=given)
            sentence = (
                f"gain {own.gain:.4f}, expected {given.gain:.4f} ±{given.gain_margin:.4f}; relative L2"
                f" {own.rel_l2:.4f}, expected {given.rel_l2:.4f} ±{given.rel_l2_margin:.4f}"
            )
        if right:
            return about(True, detail=sentence)
        mean = torch.stack([draw.double() for draw in draws]).mean(0)
        offset = (measured.double() - mean).mean(0)
        if self.product == "fprop" and self.close(measured.double() - offset, draws, measured.norm().item()):
            return about(True, detail=f"{sentence}; y includes a bias")
        shown = ""
        if not (finite := measured.isfinite()).all():
            row, column = (~finite).nonzero()[0].tolist()
            shown = f"not finite at row {row}, column {column}"
        elif tiles := _zero_tiles(measured, mean):
            row, column = (_TILE * place for place in tiles[0])
            shown = f"zeros from row {row}, column {column}, in {len(tiles)} tiles of {_TILE} x {_TILE}"
        elif own.power and covered and not self.random:
            shown = "its elements differ by more than the order of additions"
        elif own.power and covered:
            near = "it is the product rounded to nearest"
            shown = near if self.close(measured, draws) else "its elements are not those of another draw"
        return about(False, detail="; ".join(filter(None, (shown, sentence))))

    def exact(self) -> tuple[Tensor, Tensor]:
        """Return the unquantised operands, bf16 [rows, contraction]."""
        first, second = (self.layer.tensors[name].to(torch.bfloat16) for name in OPERANDS[self.product])
        if self.product == "wgrad":
            return first.t(), second.t()
        return first, second.t() if self.product == "dgrad" else second

    def draws(self, count: int = DRAWS) -> list[Tensor]:
        """Return the emulator's products: one, if the product draws nothing."""
        return [self.result(self.emulated(number)) for number in range(count if self.random else 1)]

    def emulated(self, number: int, products: Products | None = None) -> RedrawnLayer:
        """Return a layer that draws by the bits of one draw."""
        tensors = self.layer.tensors
        out = len(tensors["w"]) if "w" in tensors else tensors["dy"].shape[1]
        inside = tensors["w" if "w" in tensors else "x"].shape[1]
        clock = Clock(self.seed or 0, step=self.layer.step)
        return RedrawnLayer((inside, out), self.layer.name, products or self.products, clock, number)

    def result(self, emulated: RedrawnLayer) -> Tensor:
        tensors, products = self.layer.tensors, emulated.products
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
                start = forward(emulated, products, x, w)[1]
            needs = (self.product == "dgrad", self.product == "wgrad")
            made = backward(emulated, products, start, dy, needs)[needs.index(True)]
        assert made is not None
        return made

    def close(self, measured: Tensor, draws: Sequence[Tensor], rounded: float = 0.0) -> bool:
        """Return True if a product is as far from the emulator's draws as one more draw is. `rounded`: norm
        of what was rounded to bf16 before a bias was taken from it."""
        m, made = measured.double(), [draw.double() for draw in draws]
        if not m.isfinite().all() or _zero_tiles(m, made[0]):
            return False
        if len(made) == 1:
            norm = made[0].norm().item()
            return (m - made[0]).norm().item() <= self.slack * norm + 2.0**-9 * rounded
        others = [torch.stack([y for y in made if y is not own]).mean(0) for own in made]
        each = [_distance(y, mean, len(made) - 1) for y, mean in zip(made, others, strict=True)]
        mean, own = statistics.mean(each), _distance(m, torch.stack(made).mean(0), len(made))
        if len(made) > DRAWS:
            return min(each) - SPREAD * mean <= own <= max(each) + SPREAD * mean
        return abs(own - mean) <= SPREAD * mean + _DEVIATIONS * statistics.stdev(each)

    def unrandom(self, measured: Tensor, draws: Sequence[Tensor]) -> bool:
        """Return True if a product whose recipe draws is the one that rounds to nearest."""
        changed = {
            f"{slot}.rounding": "nearest"
            for slot, quant in self.products.quantised()
            if quant.draws and slot.startswith(self.product)
        }
        if not changed:
            return False
        nearest = self.result(self.emulated(0, self.products.changed(changed))).double()
        far, usual = ((y.double() - nearest).norm().item() for y in (measured, draws[0]))
        return far <= self.slack * nearest.norm().item() < usual / 4


def _distance(y: Tensor, mean: Tensor, count: int) -> float:
    """Return the squared distance from a mean of so many draws, as large as the variance of one draw."""
    return (y - mean).square().sum().item() / (1 + 1 / count)


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
