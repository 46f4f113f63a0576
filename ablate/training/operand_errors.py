"""Errors of a model's quantised operands on some batches, by recipe, without training: `ablate rank`.

The problem. A recipe replaces each operand t of a product by another tensor q. How far is q from t, and how
much of that remains on average over the recipe's random draws? Telemetry measures one recipe as it trains;
to compare many, all of them have to see the same t.

The idea. Train or load the model in bf16 and keep x, w and dy of every linear layer on a few batches
(operand_capture.py). Then cast each of them by every recipe. Recipes share most of their casts, such as the
activations in fprop, so a `Cast` is made once for all recipes that have it.

    error   |q - t|^2 / |t|^2, mean over draws
    bias    <b1, b2> / |t|^2, where b1 and b2 are the means of q - t over two halves of the draws

t is the operand in bf16, before a rotation, and q is rotated back. The draws of two halves are independent,
so bias estimates |E q - t|^2 / |t|^2 without the noise of the draws, and may come out below 0. A cast that
draws nothing has its error as bias. An operand made from the forward pass's quantised copy is compared with
t too, so the error of the copy counts.

Each packed expert is a layer. Refused: operands that are not finite, and layers that lack x, w or dy. Not
modelled: weights pulled towards a target (Q-EMA), schedules after their first step, more than one call of a
layer in a batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ablate.engines.emulated_layer import EmulatedLinear
from ablate.errors import InputError
from ablate.numerics.choices import SIGNS
from ablate.numerics.history import History
from ablate.numerics.philox import Clock
from ablate.numerics.spec import Hadamard, Quant
from ablate.recipes.layers import Layer, select
from ablate.recipes.recipe import FORWARD_COPY, SLOTS, Products, Recipe, Run

DRAWS = 4
"""Draws of a cast that rounds or rotates at random, two in each half."""
_APART = 1_000_000
"""Steps between two draws: amaxes of earlier steps (`delayed:n`) are those of the same draw."""


@dataclass(frozen=True)
class Operands:
    """Tensors of one layer in one batch, bf16 matrices."""

    layer: str
    x: Tensor
    """Input [tokens, in]."""
    w: Tensor
    """Weight [out, in]."""
    dy: Tensor
    """Gradient of the output [tokens, out]."""

    def __post_init__(self) -> None:
        for name in ("x", "w", "dy"):
            tensor = getattr(self, name)
            if not tensor.numel() or not tensor.isfinite().all():
                why = "is not finite" if tensor.numel() else "is empty"
                raise InputError(f"{self.layer}: {name} {why}, so its error is not defined")

    def refuse_zeros(self) -> None:
        """Raise InputError if a tensor is zero everywhere: it has no relative error."""
        for name in ("x", "w", "dy"):
            if not getattr(self, name).any():
                raise InputError(f"{self.layer}: {name} is zero everywhere, so its error is not defined")

    def of(self, slot: str) -> Tensor:
        """Return the operand of a slot in bf16 [rows, contraction]."""
        product, name = slot.split(".")
        tensor = {"x": self.x, "w": self.w, "g": self.dy}[name]
        return tensor.t() if product == "wgrad" or slot == "dgrad.w" else tensor


Batch = list[Operands]
"""Operands of all layers in one batch."""


class Cast(NamedTuple):
    """Way in which an operand of a slot is quantised."""

    slot: str
    quant: Quant | None
    """None: the forward copy itself, rounded to bf16."""
    rotation: Hadamard | None = None
    copy: Cast | None = None
    """Forward cast that it starts from."""

    @property
    def draws(self) -> bool:
        """True if another call gives other values."""
        turns = self.rotation is not None and not SIGNS[self.rotation.signs].lasting
        return turns or bool(self.quant and self.quant.draws) or bool(self.copy and self.copy.draws)


def casts(products: Products) -> tuple[Cast, ...]:
    """Return the casts of a layer's operands, without those that stay in bf16."""
    made: dict[str, Cast] = {}
    for slot in SLOTS:
        quant, copy = products.slot(slot), made.get(FORWARD_COPY.get(slot, ""))
        if products.dequantised(slot):
            made[slot] = Cast(slot, None, None, copy)
        elif quant is not None:
            rotation = getattr(products, slot.partition(".")[0]).hadamard
            made[slot] = Cast(slot, quant, rotation, copy if quant.from_forward else None)
    return tuple(made.values())


@dataclass
class Caster:
    """Makes casts, each with the draws and the history of its own.

    Args:
        seed: seed of the draws.
        draws: number of draws of a cast that draws, even.
    """

    seed: int = 0
    draws: int = DRAWS
    _layers: dict[str, EmulatedLinear] = field(default_factory=dict)
    _histories: defaultdict[tuple[str, Cast, int], History] = field(
        default_factory=lambda: defaultdict(History)
    )

    def errors(
        self, batch: int, operands: Operands, wanted: Collection[Cast]
    ) -> dict[Cast, tuple[float, float]]:
        """Return error and bias of each cast of a layer's operands.

        Args:
            batch: number of the batch, which counts as its step.
            operands: the layer's tensors.
            wanted: the casts.
        """
        copied = {cast.copy for cast in wanted}
        copies: dict[tuple[Cast, int], Tensor] = {}

        def made(cast: Cast, draw: int) -> Tensor:
            draw = draw if cast.draws else 0
            if (result := copies.get((cast, draw))) is None:
                source = made(cast.copy, draw) if cast.copy else operands.of(cast.slot)
                result = self._made(operands.layer, source, cast, batch, draw)
                if cast in copied:
                    copies[cast, draw] = result
            return result

        result = {}
        true = {slot: operands.of(slot).float() for slot in {cast.slot for cast in wanted}}
        powers = {slot: _power(tensor) for slot, tensor in true.items()}
        with torch.no_grad():
            for cast in wanted:
                draws, power = range(self.draws if cast.draws else 1), powers[cast.slot]
                errors = [made(cast, draw) - true[cast.slot] for draw in draws]
                error = bias = sum(map(_power, errors)) / len(errors) / power
                if cast.draws:
                    first, second = (sum(errors[half + 2 :: 2], errors[half]) for half in (0, 1))
                    bias = _inner(first, second) / (self.draws // 2) ** 2 / power
                result[cast] = error, bias
        return result

    def _made(self, name: str, source: Tensor, cast: Cast, batch: int, draw: int) -> Tensor:
        """Return an operand as its product receives it, rotated back, fp32 [rows, contraction]."""
        slot, quant, rotation, copy = cast
        if copy is not None:
            source = source if quant and quant.source == "forward" else source.to(torch.bfloat16)
            source = source.t()
        if quant is None:
            return source.float()
        if name not in self._layers:
            bare = nn.Linear(1, 1, bias=False, device="meta")
            self._layers[name] = EmulatedLinear(bare, name, Clock(self.seed), torch.bfloat16)
        layer = self._layers[name]
        layer.clock.step = draw * _APART + batch
        layer.histories[slot] = self._histories[name, cast, draw]
        parts = layer.operand(source, slot, quant, rotation)
        return layer.whole(parts, slot, rotation, source.shape[1])


def _inner(a: Tensor, b: Tensor) -> float:
    return (a.double() * b.double()).sum().item()  # a square of fp32 underflows below 1e-19


def _power(a: Tensor) -> float:
    """Return <a, a>, in a third of the time."""
    return torch.linalg.vector_norm(a, dtype=torch.float64).item() ** 2


@dataclass(frozen=True)
class RecipeErrors:
    """Errors of one recipe's operands."""

    recipe: Recipe
    error: NDArray[np.float64]
    """By layer, batch and slot (`SLOTS`); 0 in bf16."""
    bias: NDArray[np.float64]
    """The same."""
    four_bits: float
    """Share of the layers' FLOPs whose two operands have four bits."""
    passes: tuple[bool, bool]
    """True for the forward and for the backward pass if an operand of it is quantised in any layer."""

    def by_layer(self, bias: bool = False) -> NDArray[np.float64]:
        """Return error or bias of each layer, summed over the operands, mean over the batches."""
        total: NDArray[np.float64] = (self.bias if bias else self.error).sum(axis=2).mean(axis=1)
        return total

    def by_product(self) -> dict[str, float]:
        """Return the error of each product, mean over layers and batches."""
        means = self.error.mean(axis=(0, 1)).reshape(3, 2).sum(axis=1)
        return dict(zip(("fprop", "dgrad", "wgrad"), means.tolist(), strict=True))


def measure(
    recipes: Sequence[Recipe],
    batches: Sequence[Batch],
    layers: Sequence[Layer] = (),
    seed: int = 0,
    progress: Callable[[float], None] = lambda share: None,
    titles: Sequence[str] = (),
) -> list[RecipeErrors]:
    """Return the errors of the operands of every recipe, in their order.

    Args:
        recipes: the recipes, as they are in the first step of a run.
        batches: the same layers in each.
        layers: the model's layers, by which layer rules select; none: every layer has the recipe's products.
        seed: seed of the draws.
        progress: called with the finished share of the work.
        titles: names of the recipes in errors; none: their numbers.

    Raises:
        InputError: a rule selects no layer, batches have other layers, an operand is zero everywhere, or is
            cast to numbers that are not finite.
    """
    names = [operands.layer for operands in batches[0]]
    if any([operands.layer for operands in batch] != names for batch in batches):
        raise InputError("the batches have other layers: give steps that compute the same ones, in one order")
    for operands in (each for batch in batches for each in batch):
        operands.refuse_zeros()
    places = [_placed(recipe.at(0, Run(1)), names, layers) for recipe in recipes]
    shape = len(names), len(batches), len(SLOTS)
    error, bias = (np.zeros((len(recipes), *shape)) for _ in range(2))
    caster = Caster(seed)
    used = [[casts(products[name]) for products in places] for name in names]
    wanted = [{cast for each in own for cast in each} for own in used]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a layer is too small to be divided among threads: layers are
    try:
        with ThreadPoolExecutor(threads) as pool:
            for number, batch in enumerate(batches):
                found = pool.map(partial(caster.errors, number), batch, wanted)
                for place, (errors, own) in enumerate(zip(found, used, strict=True)):
                    for which, cast in ((which, cast) for which, each in enumerate(own) for cast in each):
                        where = which, place, number, SLOTS.index(cast.slot)
                        error[where], bias[where] = errors[cast]
                    progress((number * len(names) + place + 1) / (len(names) * len(batches)))
    finally:
        torch.set_num_threads(threads)
    if not np.isfinite(error).all():
        which, place, number, slot = np.argwhere(~np.isfinite(error))[0]
        largest = batches[number][place].of(SLOTS[slot]).abs().max()
        title = titles[which] if titles else f"recipe {which + 1}"
        raise InputError(
            f"{title}: {SLOTS[slot]} of {names[place]} is cast to numbers that are not finite: leave this"
            " recipe out, or change how it casts that operand, whose largest magnitude is"
            f" {largest:.3g}"
        )
    sizes = {layer.name: layer.weights for layer in layers}  # of an expert, by the tokens that it receives
    work = np.array([sizes.get(operands.layer) or operands.w.numel() for operands in batches[0]])
    shares = (
        np.array([products[name].fp4()[0] / products[name].fp4()[1] for name in names]) for products in places
    )
    four_bits = [float(share @ work / work.sum()) for share in shares]
    passes = []
    for products in places:
        slots = {slot.startswith("fprop") for each in products.values() for slot, _ in each.quantised()}
        passes.append((True in slots, False in slots))
    return [RecipeErrors(*each) for each in zip(recipes, error, bias, four_bits, passes, strict=True)]


def _placed(recipe: Recipe, names: Sequence[str], layers: Sequence[Layer]) -> dict[str, Products]:
    """Return the products of each layer."""
    if not layers:
        return dict.fromkeys(names, recipe.products)
    for rule in recipe.layers.rules:
        if reason := select(rule.match, layers).reason:
            raise InputError(f"recipe.layers.rules.match: {reason}")
    deciders = recipe.layers.deciders(layers)
    return {name: recipe.decided(deciders[name]) or Products() for name in names}
