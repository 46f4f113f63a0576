"""A recipe as one frozen object: quantised products of a linear layer, layers, and schedule.

The problem: papers describe low-precision training by dozens of flags ("SR on dy in wgrad, RHT on wgrad, last
15 % in bf16"), and libraries spell them as as many options. The idea is to nest them as the computation is
nested. A linear layer with x [T, K], w [N, K] and output gradient dy [T, N] is three products:

    fprop  y  = x w^T     contracts K
    dgrad  dx = dy w      contracts N
    wgrad  dw = dy^T x    contracts T

A product has two operands and perhaps one rotation of both. An operand has a `Quant`, or None if it stays in
bf16. Around the products, `Layers` says which layers differ, and `Phase` says from when on. Example:

    Recipe(wgrad=Wgrad(g=Quant(rounding="stochastic"), x=Quant(), hadamard=Hadamard()))

quantises only wgrad, and in YAML the rounding above is `recipe.wgrad.g.rounding: stochastic`.

Contradictions are refused when a recipe is built: ms_eden without a rotation, an estimator on a backward
operand, a forward copy that does not exist, quantisation of an fp32 model. A recipe never changes the
learning rate.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, Field, model_validator

from ablate.numerics.choices import DTYPES, GEMM_OUTPUTS, SIGNS
from ablate.numerics.spec import Hadamard, Quant, Spec, argument, tag
from ablate.recipes.experts import Experts
from ablate.recipes.layers import Layer, Match, blocks_in, select
from ablate.recipes.weight_noise import Noise

SLOTS = ("fprop.x", "fprop.w", "dgrad.g", "dgrad.w", "wgrad.g", "wgrad.x")
"""The six operands; g is the gradient of the layer's output."""
TOKEN_AXES = {"fprop.x": 0, "dgrad.g": 0, "wgrad.g": 1, "wgrad.x": 1}
"""Dimension of each operand along which the tokens lie (1 is the contraction); a weight has none."""
DIRECTIONS = {"all": ("fprop", "dgrad", "wgrad"), "forward": ("fprop",), "backward": ("dgrad", "wgrad")}
FORWARD_COPY = {"dgrad.w": "fprop.w", "wgrad.x": "fprop.x"}
"""Backward operands that the forward pass has already quantised, with the forward slot."""
if TYPE_CHECKING:  # a type checker does not compute the words
    GemmOutput = str
    Dtype = str
    Direction = str
else:
    GemmOutput = Literal[tuple(GEMM_OUTPUTS)]
    Dtype = Literal[tuple(DTYPES)]
    Direction = Literal[tuple(DIRECTIONS)]


class Product(Spec):
    """Fields of all three products. The rotation is here, so a recipe cannot rotate one operand alone."""

    hadamard: Hadamard | None = None

    @property
    def plain(self) -> bool:
        """True if the product is neither quantised nor rotated, and takes no quantised copy."""
        quantised = self.hadamard is not None or any(
            getattr(self, slot) is not None for slot in self.operands
        )
        return not quantised and not getattr(self, "dequantised", False)

    @property
    def fp4(self) -> bool:
        """True if both operands have four-bit elements, so that a tensor core could multiply them as FP4."""
        quants = (getattr(self, name) for name in self.operands)
        return all(quant is not None and quant.four_bits for quant in quants)

    @property
    def operands(self) -> tuple[str, str]:
        """Names of the two operands; the first has the rows of the output."""
        first, second = (name for name in type(self).model_fields if len(name) == 1)
        return first, second

    def high_precision(self) -> "Product":
        update: dict[str, object] = dict.fromkeys((*self.operands, "hadamard"))
        if getattr(self, "dequantised", False):
            update["dequantised"] = False
        return self.changed(**update)

    @model_validator(mode="after")
    def _rotated_enough(self) -> "Product":
        for name in self.operands:
            quant = getattr(self, name)
            if quant is None or quant.rounding != "ms_eden":
                continue
            if self.hadamard is None or self.hadamard.size < 32:
                raise ValueError(
                    f"{name}.rounding ms_eden needs hadamard.size 32 or more in the same product: "
                    "it corrects rotated groups"
                )
            if self.hadamard.size % quant.tile[1]:
                raise ValueError(
                    f"{name}.block {quant.block} exceeds hadamard.size {self.hadamard.size}: "
                    "ms_eden takes whole blocks"
                )
        return self


class Fprop(Product):
    """y = x w^T, contracting in-features."""

    x: Quant | None = None
    w: Quant | None = None
    gemm: GemmOutput = "bf16_out"


class Backward(Product):
    """Fields of both products of the backward pass."""

    dequantised: bool = False
    """Take w (dgrad) or x (wgrad) as the forward pass quantised it, dequantised; the product is in bf16.
    Transformer Engine: `backward_override="dequantized"`."""

    @model_validator(mode="after")
    def _in_bf16(self) -> "Backward":
        if self.dequantised and (self.hadamard or any(getattr(self, name) for name in self.operands)):
            raise ValueError(
                "dequantised multiplies in bf16, so the product's operands and hadamard must be null; to"
                " quantise the forward copy again, write source: forward on the operand"
            )
        return self


class Dgrad(Backward):
    """dx = dy w, contracting out-features."""

    g: Quant | None = None
    w: Quant | None = None
    gemm: GemmOutput = "bf16_out"


class Wgrad(Backward):
    """dw = dy^T x, contracting tokens. `dw` is the dtype of the GEMM's output; gradients add up in fp32."""

    g: Quant | None = None
    x: Quant | None = None
    dw: Dtype = "bf16"


class Products(Spec):
    """The three products of a linear layer."""

    fprop: Fprop = Fprop()
    dgrad: Dgrad = Dgrad()
    wgrad: Wgrad = Wgrad()

    @property
    def plain(self) -> bool:
        return self.fprop.plain and self.dgrad.plain and self.wgrad.plain

    @property
    def draws(self) -> bool:
        """True if a product draws other random bits in each step."""
        turns = (product.hadamard for product in (self.fprop, self.dgrad, self.wgrad))
        return any(quant.draws for _, quant in self.quantised()) or any(
            turn and not SIGNS[turn.signs].lasting for turn in turns
        )

    def fp4(self, trained: bool = True) -> tuple[int, int]:
        """Return the number of products that multiply FP4 operands, and the number of products, without wgrad
        if the layer's weight is not trained. All products of a layer take the same number of FLOPs."""
        products = (self.fprop, self.dgrad, *([self.wgrad] if trained else []))
        return sum(product.fp4 for product in products), len(products)

    @property
    def backward_needs(self) -> str | None:
        """Name of what the backward pass needs of the forward pass besides x and w; None for nothing."""
        if any(quant and quant.estimator for quant in (self.fprop.x, self.fprop.w)):
            return "the slope of a cast (estimator)"
        if any((quant := self.slot(name)) and quant.from_forward for name in FORWARD_COPY):
            return "a quantised copy (source: forward)"
        if any(self.dequantised(name) for name in FORWARD_COPY):
            return "a quantised copy (dequantised)"
        return None

    def dequantised(self, slot: str) -> bool:
        """Return True if a backward operand is the forward copy, dequantised to bf16."""
        return slot in FORWARD_COPY and getattr(self, slot.partition(".")[0]).dequantised

    def slot(self, name: str) -> Quant | None:
        """Return the quantiser of an operand, one of SLOTS; None if it stays in bf16."""
        product, operand = name.split(".")
        return getattr(getattr(self, product), operand)

    def quantised(self) -> Iterator[tuple[str, Quant]]:
        """Return the quantised operands as pairs of slot and quantiser, in the order of SLOTS."""
        return ((name, quant) for name in SLOTS if (quant := self.slot(name)) is not None)

    def high_precision(self, slots: str = "all") -> "Products":
        """Return the products with those of `slots`, one of DIRECTIONS, in high precision. An operand whose
        forward copy disappears starts from the original."""
        return self.replaced(slots, Products())

    def replaced(self, slots: str, other: "Products") -> "Products":
        """Return these products with those of `slots`, one of DIRECTIONS, taken from `other`. If one of these
        is plain there, the GEMM's output type stays."""
        update = {}
        for name in DIRECTIONS["all"]:
            own, new = getattr(self, name), getattr(other, name)
            update[name] = (
                own if name not in DIRECTIONS[slots] else own.high_precision() if new.plain else new
            )
        return self.changed(**update)._without_lost_copies()

    def with_slots(self, slots: Collection[str], other: "Products") -> "Products":
        """Return these products with some operands, of SLOTS, quantised as in `other`. A product without
        quantised operands is not rotated."""
        made = self.changed({slot: other.slot(slot) for slot in slots})
        for name in {slot.partition(".")[0] for slot in slots}:
            product = getattr(made, name)
            if not any(getattr(product, operand) for operand in product.operands):
                made = made.changed({name: product.high_precision()})
            elif getattr(product, "dequantised", False):
                made = made.changed({f"{name}.dequantised": False})
        return made._without_lost_copies()

    def _without_lost_copies(self) -> "Products":
        """Return the products with operands whose forward copy is missing starting from the original."""
        lost: dict[str, object] = {}
        for slot in (slot for slot, forward in FORWARD_COPY.items() if self.slot(forward) is None):
            if (quant := self.slot(slot)) and quant.from_forward:
                lost[f"{slot}.source"] = "original"
            if self.dequantised(slot):
                lost[f"{slot.partition('.')[0]}.dequantised"] = False
        return self.changed(lost)

    @model_validator(mode="after")
    def _copies_exist(self) -> "Products":
        for slot, forward in FORWARD_COPY.items():
            if self.dequantised(slot) and self.slot(forward) is None:
                raise ValueError(
                    f"{slot.partition('.')[0]}.dequantised: {forward} is not quantised, so there is no copy"
                    " to dequantise"
                )
        return self

    @model_validator(mode="after")
    def _slots_make_sense(self) -> "Products":
        for name, quant in self.quantised():
            if quant.estimator is not None and not name.startswith("fprop"):
                raise ValueError(
                    f"{name}.estimator is the gradient of a forward cast: only fprop.x and fprop.w have one"
                )
            if quant.from_forward and name not in FORWARD_COPY:
                raise ValueError(
                    f"{name}.source {quant.source}: the forward pass has no copy of it; "
                    f"only {' and '.join(FORWARD_COPY)} have one"
                )
            if quant.from_forward and self.slot(FORWARD_COPY[name]) is None:
                raise ValueError(
                    f"{name}.source {quant.source}: {FORWARD_COPY[name]} is not quantised, "
                    "so there is no copy to start from"
                )
        return self


class Rule(Spec):
    """Products of the layers that `match` selects, in place of the recipe's products."""

    match: Match
    """Fields `blocks`, `name`, `within`; or `*.mlp.down`, a glob on names, or `class:Attention`, on
    classes."""
    use: Products | None = None
    """Null: high precision."""


Decider = int | Literal["own", "skipped"]
"""Part of a recipe that decides about a layer: the rule of that number, its own products, or the counts,
which skip the layer."""


class Placement(NamedTuple):
    """The layers of a model about which one part of a recipe decides."""

    decider: Decider
    products: Products | None
    """None: high precision."""
    layers: tuple[Layer, ...]


class Layers(Spec):
    """Layers that differ. Embeddings, norms, the head and attention's QK^T and PV stay in high precision."""

    skip_first: int = Field(0, ge=0)
    """Transformer blocks at the input in high precision."""
    skip_last: int = Field(0, ge=0)
    last_fraction: float = Field(0.0, ge=0, le=1)
    """The last ceil(fraction * blocks) blocks; 0.15 in NVIDIA's recipe."""
    rules: tuple[Rule, ...] = Field((), strict=False)
    """The first rule that matches a layer decides, before the counts above."""

    def quantises(self, block: int, blocks: int) -> bool:
        """Return True if the counts allow a block, counted from 0, of a model of `blocks` blocks to be
        quantised."""
        last = max(self.skip_last, math.ceil(Fraction(repr(self.last_fraction)) * blocks))
        return self.skip_first <= block < blocks - last

    def deciders(self, layers: Sequence[Layer]) -> dict[str, Decider]:
        """Return the decider of each layer of a model by name: the first rule that selects it, else the
        counts."""
        blocks = blocks_in(layers)
        deciders: dict[str, Decider] = {
            layer.name: "own" if self.quantises(layer.block, blocks) else "skipped" for layer in layers
        }
        for number in reversed(range(len(self.rules))):
            deciders |= {layer.name: number for layer in select(self.rules[number].match, layers).layers}
        return deciders


class Run(NamedTuple):
    """Facts of a run that a schedule needs: steps, tokens per step, first step of the decay."""

    steps: int
    tokens_per_step: int = 1
    decay: int | None = None


class Trigger(NamedTuple):
    """Measured condition: the metric falls below the limit; it is checked every `every` steps."""

    metric: str
    limit: float
    every: int


_STARTS = r"step:\d+|tokens:\d+|fraction:(0?\.\d+|0|1|1\.0*|0\.\d*)|decay|noise_ratio:\d*\.?\d+(:0*[1-9]\d*)?"
_EVERY = 50
"""Default number of steps between two checks of a measured condition."""


def _when(value: str) -> str:
    """Return `value` in canonical form, so that one moment has one spelling."""
    if not re.fullmatch(_STARTS, value, re.ASCII):
        raise ValueError(
            "must be 'step:n', 'tokens:n', 'fraction:f' with f in [0, 1], "
            "'decay' (where the learning rate starts to fall), or 'noise_ratio:limit:every' "
            "(once the gradient's norm over its quantisation noise, measured every so many steps, is below)"
        )
    word, *numbers = value.split(":")
    if word == "noise_ratio":
        return f"{word}:{float(numbers[0])!r}:{int(numbers[1]) if numbers[1:] else _EVERY}"
    return ":".join((word, *(repr(float(n) if word == "fraction" else int(n)) for n in numbers)))


class Phase(Spec):
    """Change of the products of `slots` from `start` to the end of the run. Never of the learning rate."""

    start: Annotated[str, AfterValidator(_when)]
    slots: Direction = "all"
    use: Products | None = None
    """Products that the quantised layers then use; null: high precision."""

    @property
    def trigger(self) -> Trigger | None:
        """Measured condition that starts this phase; None if the start is counted."""
        word, *numbers = self.start.split(":")
        return (
            Trigger("grad/noise_ratio", float(numbers[0]), int(numbers[1])) if word == "noise_ratio" else None
        )

    def active(self, step: int, run: Run, tripped: Collection[Trigger] = ()) -> bool:
        """Return True if the phase is active in an optimizer step, counted from 0. Conditions in `tripped`
        have been met, and stay met."""
        if self.trigger:
            return self.trigger in tripped
        number = argument(self.start) or 0
        match tag(self.start):
            case "step":
                return step >= number
            case "tokens":
                return step * run.tokens_per_step >= number
            case "fraction":
                return step >= number * run.steps
        return run.decay is not None and step >= run.decay


class OsciReset(Spec):
    """Reset of weights that keep crossing a rounding threshold to their quantised value.

    TetraJet-v2, arXiv 2510.27527.
    """

    period: int = Field(400, ge=2)
    """Steps between two resets."""
    window: int = Field(50, ge=1)
    """Steps over which the path lengths of w and Q(w) are measured, from the start of a period."""
    threshold: float = Field(8.0, gt=0)
    """Ratio of the two above which a weight is reset."""
    start: float = Field(0.7, ge=0, le=1)
    """Fraction of the run before the first reset (the paper resets in about the last 30 %)."""

    @model_validator(mode="after")
    def _window_fits(self) -> "OsciReset":
        if self.window >= self.period:
            raise ValueError(f"osci_reset.window {self.window} must be shorter than period {self.period}")
        return self


class QEma(Spec):
    """Rounding of each weight to the neighbour nearer to its moving average (TetraJet, arXiv 2502.20853)."""

    decay: float = Field(0.998, gt=0, lt=1)
    start: int = Field(10, ge=0)
    """Optimizer steps before the moving average is used."""


class QRamping(Spec):
    """Rarer updates of oscillating weights, by the mean of their gradients (TetraJet, arXiv 2502.20853)."""

    period: int = Field(400, ge=2)
    """Steps from one measurement of the oscillation to the next."""
    window: int = Field(30, ge=1)
    threshold: float = Field(16.0, gt=0)
    """k1: an oscillation ratio R updates every floor(R / k1) * k2 + 1 steps."""
    slowdown: int = Field(5, ge=1)
    """k2."""
    slowest: int = Field(20, ge=1)
    """Longest wait, in steps."""

    @model_validator(mode="after")
    def _window_fits(self) -> "QRamping":
        if self.window >= self.period:
            raise ValueError(f"q_ramping.window {self.window} must be shorter than period {self.period}")
        return self


class Weights(Spec):
    """Treatment of the master weights of quantised layers; `noise` is on norms."""

    master: Dtype = "fp32"
    """Type that the optimizer keeps all weights in; bf16 rounds to nearest after every step."""
    osci_reset: OsciReset | None = None
    q_ema: QEma | None = None
    q_ramping: QRamping | None = None
    noise: Noise | None = None


class Recipe(Products):
    """Complete recipe. `dtype` is the type of activations and of unquantised operands."""

    LATER: ClassVar[frozenset[str]] = frozenset({"experts"})
    dtype: Dtype = "bf16"
    layers: Layers = Layers()
    weights: Weights = Weights()
    experts: Experts = Experts()
    schedule: tuple[Phase, ...] = Field((), strict=False)
    """Phases; if several are active, the last in this list decides."""

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        if self.dtype == "fp32" and not self.plain:
            raise ValueError("dtype fp32 quantises nothing: the input chain of a quantised operand is bf16")
        for name in ("osci_reset", "q_ema", "q_ramping"):
            if getattr(self.weights, name) and self.fprop.w is None:
                raise ValueError(f"weights.{name} acts on quantised weights, and fprop.w is not quantised")
        weight = self.fprop.w
        if self.weights.q_ema and weight and (weight.rounding != "nearest" or weight.select):
            raise ValueError(
                "weights.q_ema decides how fprop.w is rounded, so it must be rounded to nearest, "
                "without select"
            )
        return self

    @classmethod
    def of(cls, products: Products, **more: Any) -> "Recipe":
        """Return a recipe of these products, without their layers or schedule; `more`: its other fields."""
        return cls(fprop=products.fprop, dgrad=products.dgrad, wgrad=products.wgrad, **more)

    @property
    def plain(self) -> bool:
        """True if nothing is quantised or rotated anywhere, at any time."""
        return super().plain and all(products.plain for products in self.others)

    @property
    def draws(self) -> bool:
        """True if a product, or noise, anywhere, at any time, draws random bits in each step."""
        products = super().draws or any(products.draws for products in self.others)
        return products or self.weights.noise is not None

    @property
    def triggers(self) -> set[Trigger]:
        """Conditions that the schedule needs measured."""
        return {phase.trigger for phase in self.schedule if phase.trigger}

    @property
    def others(self) -> list[Products]:
        """Products of rules and phases, without those in high precision."""
        uses = (*(rule.use for rule in self.layers.rules), *(phase.use for phase in self.schedule))
        return [products for products in uses if products is not None]

    @property
    def products(self) -> Products:
        """The recipe's own products, without layers, weights and schedule."""
        return Products(fprop=self.fprop, dgrad=self.dgrad, wgrad=self.wgrad)

    def at(self, step: int, run: Run, tripped: Collection[Trigger] = ()) -> "Recipe":
        """Return the recipe of one step: products and rules with the active phases applied, and no schedule;
        the recipe itself if no phase is active.

        Args:
            step: Optimizer step, from 0.
            tripped: Measured conditions that have been met.
        """
        phases = [phase for phase in self.schedule if phase.active(step, run, tripped)]
        if not phases:
            return self

        def changed(products: Products) -> Products:
            for phase in phases:
                products = products.replaced(phase.slots, phase.use or Products())
            return products

        return self.mapped(changed).changed(schedule=())

    def mapped(self, change: Callable[[Products], Products]) -> "Recipe":
        """Return the recipe with its products, and those of its rules, as a function changes them."""
        rules = tuple(rule.changed(use=rule.use and change(rule.use)) for rule in self.layers.rules)
        return self.changed({"layers.rules": rules}, **dict(change(self.products)))

    def decided(self, decider: Decider) -> Products | None:
        """Return the products that `decider` assigns; None: high precision."""
        if isinstance(decider, int):
            return self.layers.rules[decider].use
        return self.products if decider == "own" else None

    def placements(self, layers: Sequence[Layer]) -> tuple[Placement, ...]:
        """Return the layers of a model grouped by decider: rules, the recipe's own products, the counts.
        Groups have at least one layer, each with its products, in that order."""
        deciders = self.layers.deciders(layers)
        parts = (*range(len(self.layers.rules)), "own", "skipped")
        placed = ((part, tuple(layer for layer in layers if deciders[layer.name] == part)) for part in parts)
        return tuple(Placement(part, self.decided(part), of_it) for part, of_it in placed if of_it)

    def ever_quantises(self, products: Products | None) -> bool:
        """Return True if layers with these products are quantised in some step."""
        return products is not None and not (
            products.plain and all(phase.use is None or phase.use.plain for phase in self.schedule)
        )
