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

import ctypes
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
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
from ablate.numerics.quantize import lasts
from ablate.numerics.spec import Hadamard, Quant
from ablate.recipes.layers import Layer, select
from ablate.recipes.recipe import FORWARD_COPY, SLOTS, Products, Recipe, Run

DRAWS = 4
"""Draws of a cast that rounds or rotates at random, two in each half."""
_WAITING = 1 << 24
"""Elements of operands that wait to be cast together: 32 MB."""
_LIBC = ctypes.CDLL(None)
_APART = 1_000_000
"""Steps between two draws: amaxes of earlier steps (`delayed:n`) are those of the same draw."""


def sources(x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Return the tensor [rows, contraction] that each operand is cast from, by slot."""
    return dict(zip(SLOTS, (x, w, dy, w.t(), dy.t(), x.t()), strict=True))


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
    routed: bool = False
    """True for an expert, which another batch may have no token for."""

    def __post_init__(self) -> None:
        for name in ("x", "w", "dy"):
            tensor = getattr(self, name)
            if not tensor.numel() or not tensor.isfinite().all():
                why = "is not finite" if tensor.numel() else "is empty"
                raise InputError(f"{self.layer}: {name} {why}, so its error is not defined")

    @property
    def size(self) -> int:
        return self.x.numel() + self.w.numel() + self.dy.numel()

    def of(self, slot: str) -> Tensor:
        """Return the operand of a slot in bf16 [rows, contraction]."""
        return sources(self.x, self.w, self.dy)[slot]


Batch = list[Operands]
"""Operands of all layers in one batch."""
Stream = Callable[[Callable[[int, Operands], None]], None]
"""Function that calls its argument with the number of a batch and the operands of a layer, batch by batch."""


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

    @property
    def lasts(self) -> bool:
        """True if a call at another step gives the same values."""
        own = self.quant is None or lasts(self.quant, self.rotation)
        return own and (self.copy is None or self.copy.lasts)


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
    """Makes casts, each with the draws and the history of its own."""

    seed: int = 0
    draws: int = DRAWS
    """Number of draws of a cast that draws, even."""
    fixed: bool = False
    """True if weights are the same in all batches, so that casts that last are made once."""
    _lasting: dict[tuple[str, Cast], tuple[float, float]] = field(default_factory=dict)
    _layers: dict[str, EmulatedLinear] = field(default_factory=dict)
    _histories: defaultdict[tuple[str, Cast, int], History] = field(
        default_factory=lambda: defaultdict(History)
    )

    def errors(
        self, batch: int, operands: Operands, wanted: Collection[Cast]
    ) -> dict[Cast, tuple[float, float]]:
        """Return error and bias of each wanted cast of a layer's operands. The batch's number counts as its
        step."""
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

        result = {
            cast: self._lasting[operands.layer, cast]
            for cast in wanted
            if (operands.layer, cast) in self._lasting
        }
        with torch.no_grad():
            for slot in SLOTS:  # one operand's copies at a time: those of a large weight take gigabytes
                new = [cast for cast in wanted if cast.slot == slot and cast not in result]
                true = operands.of(slot).float() if new else None
                for cast in new:
                    result[cast] = self._compared(true, partial(made, cast), cast.draws)
                    if self.fixed and slot.endswith(".w") and cast.lasts:
                        self._lasting[operands.layer, cast] = result[cast]
        return result

    def _compared(self, true: Tensor, made: Callable[[int], Tensor], draws: bool) -> tuple[float, float]:
        count, errors = self.draws if draws else 1, 0.0
        halves: dict[int, Tensor] = {}
        for draw in range(count):
            difference = made(draw) - true
            errors += _power(difference)
            halves[draw % 2] = halves[draw % 2] + difference if draw > 1 else difference
        power = _power(true)
        error = errors / count / power
        if not draws:
            return error, error
        # A square of fp32 underflows below 1e-19.
        inner = (halves[0].double() * halves[1].double()).sum().item()
        return error, inner / (count // 2) ** 2 / power

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
    batches: Sequence[Batch] | Stream,
    layers: Sequence[Layer] = (),
    fixed: bool = False,
    seed: int = 0,
    progress: Callable[[int], None] = lambda count: None,
    titles: Sequence[str] = (),
) -> list[RecipeErrors]:
    """Return the errors of the operands of every recipe, as it is in the first step of a run, in their order,
    over the layers of every batch.

    Batches have the same layers, experts aside; a stream's are cast in groups and not kept. Without `layers`,
    by which layer rules select, every layer has the recipe's products. `fixed` and `seed` are those of a
    `Caster`; `progress` is called with the number of layers cast so far, over all batches; `titles` are the
    recipes' names in errors, by default their numbers. InputError if a rule selects no layer, batches have
    other layers, or an operand is zero everywhere, or cast to numbers that are not finite.
    """
    titles = titles or [f"recipe {number}" for number in range(1, len(recipes) + 1)]
    placed = [_placed(r.at(0, Run(1)), layers, title) for r, title in zip(recipes, titles, strict=True)]
    casting = _Casting(placed, Caster(seed, fixed=fixed), progress, titles)
    if callable(batches):
        batches(casting.add)
    else:
        for number, operands in ((number, each) for number, batch in enumerate(batches) for each in batch):
            casting.add(number, operands)
    casting.cast()
    names = [name for name in casting.errors[0] if all(name in batch for batch in casting.errors)]
    shared = (
        [name for name in batch if name in names or name not in casting.routed] for batch in casting.errors
    )
    if not names or any(own != names for own in shared):
        raise InputError("the batches have other layers: give steps that compute the same ones, in one order")
    # [names, batches, error and bias, recipes, slots]
    every = np.array([[batch[name] for batch in casting.errors] for name in names])
    error, bias = every.transpose(2, 3, 0, 1, 4)
    sizes = {layer.name: layer.weights for layer in layers}  # of an expert, by the tokens that it receives
    work = np.array([sizes.get(name) or casting.sizes[name] for name in names])
    four_bits, passes = [], []
    for products in casting.products:
        own = [products(name) for name in names]
        share = np.array([four / whole for four, whole in (each.fp4() for each in own)])
        four_bits.append(float(share @ work / work.sum()))
        slots = {slot.startswith("fprop") for each in own for slot, _ in each.quantised()}
        passes.append((True in slots, False in slots))
    return [RecipeErrors(*each) for each in zip(recipes, error, bias, four_bits, passes, strict=True)]


@dataclass
class _Casting:
    """Casts of operands that arrive one by one."""

    products: Sequence[Callable[[str], Products]]
    """Functions from a layer's name to its products, by recipe."""
    caster: Caster
    progress: Callable[[int], None]
    titles: Sequence[str]
    errors: list[dict[str, NDArray[np.float64]]] = field(default_factory=lambda: [{}])
    """Error and bias [2, recipes, slots] by layer, of each batch."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Elements of each layer's weight."""
    routed: set[str] = field(default_factory=set)
    """Layers that some batch may have no token for."""
    waiting: list[Operands] = field(default_factory=list)

    def add(self, batch: int, operands: Operands) -> None:
        """Cast a layer's operands, now or with the next ones of its batch."""
        for name in ("x", "w", "dy"):
            if not getattr(operands, name).any():  # it has no relative error
                raise InputError(f"{operands.layer}: {name} is zero everywhere, so its error is not defined")
        if batch == len(self.errors):
            self.cast()  # amaxes of a batch are the history of the next one
            self.errors.append({})
        self.waiting.append(operands)
        if sum(each.size for each in self.waiting) > _WAITING:
            self.cast()

    def cast(self) -> None:
        used = [[casts(products(own.layer)) for products in self.products] for own in self.waiting]
        wanted = [{cast for each in own for cast in each} for own in used]
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a layer is too small to be divided among threads: layers are
        try:
            with ThreadPoolExecutor(threads) as pool:
                found = pool.map(partial(self.caster.errors, len(self.errors) - 1), self.waiting, wanted)
                for operands, errors, own in zip(self.waiting, found, used, strict=True):
                    self._keep(operands, errors, own)
        finally:
            torch.set_num_threads(threads)
        self.waiting.clear()
        if hasattr(_LIBC, "malloc_trim"):  # glibc keeps what each thread freed: gigabytes
            _LIBC.malloc_trim(0)

    def _keep(
        self, operands: Operands, errors: Mapping[Cast, tuple[float, float]], used: Sequence[Sequence[Cast]]
    ) -> None:
        """Keep a layer's errors by recipe. InputError if one is not finite."""
        kept = np.zeros((2, len(used), len(SLOTS)))
        for which, cast in ((which, cast) for which, own in enumerate(used) for cast in own):
            kept[:, which, SLOTS.index(cast.slot)] = errors[cast]
            if not math.isfinite(errors[cast][0]):
                raise InputError(
                    f"{self.titles[which]}: {cast.slot} of {operands.layer} is cast to numbers that are not"
                    " finite: leave this recipe out, or change how it casts that operand, whose largest"
                    f" magnitude is {operands.of(cast.slot).abs().max():.3g}"
                )
        self.errors[-1][operands.layer] = kept
        self.sizes[operands.layer] = operands.w.numel()
        if operands.routed:
            self.routed.add(operands.layer)
        self.progress(sum(map(len, self.errors)))


def _placed(recipe: Recipe, layers: Sequence[Layer], title: str) -> Callable[[str], Products]:
    if not layers:
        return lambda name: recipe.products
    for number, rule in enumerate(recipe.layers.rules):
        if reason := select(rule.match, layers).reason:
            raise InputError(f"{title}: layers.rules.{number}.match: {reason}")
    deciders = recipe.layers.deciders(layers)
    return lambda name: recipe.decided(deciders[name]) or Products()
