"""A linear layer that computes its three products by a recipe, exactly, on any device: `EmulatedLinear`.

The problem. To train a linear layer takes three matrix products, here for x [tokens, in], w [out, in] and
the gradient dy [tokens, out] of the layer's output:

    fprop   y  = x w^T      operands fprop.x and fprop.w      contraction over in
    dgrad   dx = dy w       operands dgrad.g and dgrad.w      contraction over out
    wgrad   dw = dy^T x     operands wgrad.g and wgrad.x      contraction over tokens

Each tensor takes part in two products, and quantisation blocks lie along the contraction. So one tensor is
quantised twice, along different axes and perhaps with different rounding, and the forward and backward pass
see different values of the same weight. Casting x and w once and leaving the rest to autograd misses that.

The idea. Quantise each of the six operands separately, by the `Quant` of its slot, to values that bf16
holds exactly. Multiply those with fp32 accumulation, apply the tensors' scales to the result, and round once
to the product's output type (numerics/product.py). On a CPU this gives what a tensor core gives, except for
the order of the fp32 additions.

What autograd does. It does not differentiate through the casts. `products.Call` is an autograd function: its
forward pass saves x and w before quantisation (or their quantised copies, for operands with `source:
forward`), and its backward pass quantises them again for dgrad and wgrad. So a cast passes the gradient
straight through, unless its `Quant` names an `estimator`, whose slope then multiplies the gradient.

A small example, one layer whose gradients are rounded stochastically:

    layer = EmulatedLinear(nn.Linear(64, 32), "blocks.0.mlp.up", Clock(seed=0), torch.bfloat16)
    layer.products = PRESETS["nvfp4"]().products     # the engine does this at each step
    x = torch.randn(16, 64, requires_grad=True)
    layer(x).sum().backward()                        # six casts; layer.weight.grad is fp32

The products are two functions in products.py, which autograd and torch.compile share. The engine
(emulated.py) decides which recipe is in force in which layer.

Refused: a call of a converted layer before the engine's first step (RuntimeError), and second derivatives.
Not modelled: the order of fp32 additions inside a tensor core, and the random bits that a GPU's own rounding
instruction draws.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from ablate.engines.following import Replacement
from ablate.engines.linears import features
from ablate.engines.nonfinite import NonfiniteCount
from ablate.engines.products import Call, Probe
from ablate.engines.ranks import Divided, DrawArguments, Sharded, whole
from ablate.engines.weight_casts import WeightCasts
from ablate.errors import OutsideStepError, OwnFunctionError
from ablate.numerics.hadamard import rotate
from ablate.numerics.history import History
from ablate.numerics.kernels.cuda import PLAIN, Finish
from ablate.numerics.philox import Clock, site
from ablate.numerics.product import linear, split_product, with_few
from ablate.numerics.quantize import Keep, Operand, lasts, quantize, quantize_both, quantize_channels
from ablate.numerics.spec import Hadamard, Quant
from ablate.numerics.transform import Part, patch, split
from ablate.recipes.recipe import SLOTS, Products

HIGH = Products()


def work_of(layer: nn.Module) -> int:
    """Return the elements of a layer's weight that a token is multiplied by, on average."""
    return layer.work if isinstance(layer, EmulatedLinear) else math.prod(features(layer))


@contextmanager
def kept(objects: Iterable[object], *names: str) -> Iterator[None]:
    """Inside this context objects may get other attributes of these names; they have their own afterwards."""
    before = [(each, {name: getattr(each, name) for name in names}) for each in objects]
    try:
        yield
    finally:
        for each, values in before:
            for name, value in values.items():
                setattr(each, name, value)


class NotInForce(Products):
    """Products of a converted layer outside of every step: a call of the layer raises an error. Without it,
    such a call would compute in high precision, and nothing would say so."""

    remedy: str = "call engine.at(step, run) before the model, or use engine.high_precision()"
    """End of the error's sentence."""


UNSET = NotInForce()
"""In force in a converted layer until the engine's first step."""


@dataclass
class Context:
    """Observers and division of the work that all layers of an engine have."""

    probe: Probe | None = None
    """Receives every quantised operand and every product while telemetry is on."""
    divided: Divided | None = None
    """Division of the tokens among ranks; None if this rank has all of them."""
    called: Callable[["EmulatedLinear"], int] | None = None
    """Called with the layer at the beginning of each of its forward passes, in place of `Clock.called`."""
    returned: Callable[["EmulatedLinear", int], None] | None = None
    """Called at the end of each of its backward passes, with the micro-batch."""
    grouped: Callable[[Sequence["EmulatedLinear"], Tensor, Sequence[int], Tensor], None] | None = None
    """Called after a grouped product of packed experts, whose layers are not called themselves, with the
    layers, the rows [rows, in], the number of rows of each layer, and the output [rows, out]."""

    def __deepcopy__(self, memo: object) -> "Context":
        """Return the context of a copied layer, whose operands are not the training's."""
        return replace(self, probe=None, grouped=None)


class EmulatedLinear(Replacement):
    """An nn.Linear that computes its products by a recipe and shares the parameters of the layer it replaces.

    The parameters, hooks and attributes of `linear` are taken over, not copied. The qualified name in the
    model and the clock, which all layers of an engine share, determine every random bit that the layer draws.
    Products that are not quantised are in `dtype`.
    """

    shared = frozenset({"clock", "_sites", "_turns"})
    dropped = frozenset({"whole_graph", "compiled"})
    emulates: ClassVar[bool] = True
    """False if something else multiplies or quantises, whose products are compared with the emulator's."""
    dtype = torch.bfloat16  # on the class, to hide a property of the class that the layer replaces

    def __init__(self, linear: nn.Module, name: str, clock: Clock, dtype: torch.dtype) -> None:
        super().__init__(linear)
        self.name, self.clock, self.dtype = name, clock, dtype
        self.context = Context()
        self.products = HIGH
        self.begun = False
        """True once a forward pass has begun."""
        self.emulated = False
        """True while the emulation computes this layer, whatever its engine."""
        self.target = None
        """Values that decide the rounding of the weight's forward cast (Q-EMA), fp32 like the weight."""
        self.histories = {slot: History() for slot in SLOTS}
        self.nonfinite = NonfiniteCount()
        """Number of operands so far that held a NaN or an infinity."""
        self.casts = WeightCasts()
        self.made: dict[str, Operand] = {}
        """Operands of this call that were quantised together with those of other layers, by slot."""
        self.sharded: Sharded | None = None
        """Division of the weight among ranks; None if this rank has all of it."""
        self.whole_graph: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
        """This layer's operator for torch.compile (compiled.py), used instead of the autograd function."""
        self.compiled: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
        """Operator that stands for this layer in code that torch.compile traces; None: it is not traced."""
        self.quantize = quantize
        """Quantiser; a profiler replaces it by one that records its name."""
        self._sites = {slot: site(name, slot) for slot in SLOTS}
        # One site for both operands of a product: their rotations must cancel in it.
        self._turns = {slot: site(name, slot.partition(".")[0]) for slot in SLOTS}

    @property
    def owner(self) -> nn.Parameter:
        """The parameter that an optimizer updates, of which the weight is all, or a view."""
        return self.weight

    def part(self, like: Tensor) -> Tensor:
        """Return this layer's part of a tensor like `owner`, such as a gradient or a moment; a view."""
        return like

    @property
    def work(self) -> int:
        """Elements of the weight that a token is multiplied by, on average."""
        return self.in_features * self.out_features

    @property
    def divided(self) -> Divided | None:
        """Division of the layer's tokens among ranks; None if this rank quantises all of them."""
        return self.context.divided

    def redrawn(self) -> "Redrawn":
        """Return an emulated layer that rounds by other random bits, for calls at the same moment. It has the
        products in force, rotates by the same signs, and begins with the same amax histories. It has no
        weight, no probe, and leaves this layer as it is."""
        bare = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        other = Redrawn(bare, self.name, self.clock, self.dtype)
        other.products, other.target = self.products, self.target
        for slot, history in self.histories.items():
            other.histories[slot].amax = dict(history.amax)
        other._sites = {slot: site(f"{self.name}/redrawn", slot) for slot in SLOTS}
        return other

    def plain(self) -> nn.Module:
        """Return a layer of the class that this one replaced, with its parameters, hooks and attributes."""
        bare = nn.Linear(1, 1, device="meta")
        return self.plain_but(
            vars(EmulatedLinear(bare, "", self.clock, self.dtype)).keys() - vars(bare).keys()
        )

    def begin_call(self) -> int:
        """Begin a forward pass: report it to `called`, and return the micro-batch that it belongs to;
        OutsideStepError if no step of the recipe is in force."""
        self.follow()
        if isinstance(self.products, NotInForce):
            raise OutsideStepError(
                f"{self.name}: no step of the recipe is in force, so nothing would be quantised;"
                f" {self.products.remedy}"
            )
        self.begun = True
        called = self.context.called
        return self.clock.called(self.name) if called is None else called(self)

    def end_call(self, micro_batch: int) -> None:
        """End the backward pass of a call: report it to `returned`."""
        if self.context.returned is not None:
            self.context.returned(self, micro_batch)

    def forward(self, x: Tensor) -> Tensor:
        """Return x w^T + bias, [..., in] to [..., out], in the dtype of `x`; autocast is disabled inside. The
        bias is added in high precision. RuntimeError if the engine has put no step in force yet."""
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return self.forward(x)
        whole_graph = self.compiled if torch.compiler.is_compiling() and self.compiled else self.whole_graph
        micro_batch = self.begin_call() if whole_graph is None else 0
        if whole_graph is None and self.products.plain:
            bias = None if self.bias is None else self.bias.to(self.dtype)
            weight = (
                self.sharded.whole(self.weight, self.dtype) if self.sharded else self.weight.to(self.dtype)
            )
            return linear(x.to(self.dtype), weight, bias).to(x.dtype)
        rows, weight = (
            x.reshape(-1, self.in_features),
            self.weight.to_local() if self.sharded else self.weight,
        )
        if whole_graph:
            y = whole_graph(rows, weight, self.bias)
        else:
            y = Call.apply(rows, weight, self, self.products, micro_batch)
            y = y if self.bias is None else (y + self.bias).to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def operand(
        self,
        x: Tensor,
        slot: str,
        quant: Quant | None,
        rotation: Hadamard | None,
        keep: Keep = False,
        rounded: bool = False,
    ) -> list[Operand]:
        """Return `x`, bf16 [rows, contraction], as the operand `slot` of a product: rotated and quantised.

        Return parts that sum to the operand: one, or more if `quant.transform` takes something out of it.
        `quant` None leaves it in bf16; `keep` "source" is enough for an estimator's slope. With `rounded`, x
        of another dtype is rounded to bf16 first.
        """
        if rounded and (x.dtype != torch.float32 or quant is None or quant.transform):
            x, rounded = x.to(torch.bfloat16), False
        if quant is None:
            return [Operand(self.rotated(x, slot, rotation))]
        if slot in self.made:
            self._count(slot, [self.made[slot]])
            return [self.made[slot]]
        channels = 0 if slot.startswith("wgrad") else 1
        looked_at = keep or self.context.probe or self.divided or self._target(slot, quant) is not None
        draws = self.draws_at(slot)
        apart = quant.transform and not looked_at
        if apart and (both := quantize_channels(x, quant, channels, rotation, **draws)):
            self._count(slot, both)
            return both
        parts = split(x, quant, channels)
        operands = [self._part(part, slot, rotation, quant, keep, rounded) for part in parts]
        if quant.transform and quant.transform.patch:
            became = self.whole(operands[:1], slot, rotation, x.shape[1])
            parts.append(patch(parts[0].values, became, quant.transform.patch, channels, x.dtype))
            operands.append(self._part(parts[-1], slot, rotation, quant, keep))
        # A rotation mixes what lies along the contraction: channels or tokens.
        mixed = 1 if rotation else None
        for number, (_, _, kept, equal) in enumerate(parts):
            nonzero = None if kept is None or channels == mixed else (channels, kept)
            same = 1 - channels if equal and 1 - channels != mixed else None
            operands[number] = replace(operands[number], nonzero=nonzero, equal=same)
        return operands

    def gradients(
        self, dy: Tensor, products: Products, dx: bool, dw: bool
    ) -> tuple[list[Operand], list[Operand]]:
        """Return dgrad's operand of `dy`, bf16 [tokens, out], and wgrad's of its transpose; one kernel makes
        both if it can. A list is empty if its gradient is not needed (`dx`, `dw`)."""
        rows, columns = products.dgrad, products.wgrad
        apart = (
            (rows.g and rows.g.transform)
            or (columns.g and columns.g.transform)
            or self.context.probe
            or self.divided
            or self.made
        )
        if dx and dw and rows.g and columns.g and not apart:
            slots = "dgrad.g", "wgrad.g"
            both = quantize_both(
                dy,
                (rows.g, columns.g),
                rotations=(rows.hadamard, columns.hadamard),
                clock=self.clock,
                where=(self._sites[slots[0]], self._sites[slots[1]]),
                products=(self._turns[slots[0]], self._turns[slots[1]]),
                histories=(self.histories[slots[0]], self.histories[slots[1]]),
            )
            if both:
                self._count("dgrad.g", both[:1])
                self._count("wgrad.g", both[1:])
                return [both[0]], [both[1]]
        across = self.operand(dy, "dgrad.g", rows.g, rows.hadamard) if dx else []
        return across, self.operand(dy.t(), "wgrad.g", columns.g, columns.hadamard) if dw else []

    def weight_operand(
        self,
        slot: str,
        quant: Quant | None,
        rotation: Hadamard | None,
        weight: Tensor,
        keep: Keep = False,
    ) -> list[Operand]:
        """Return the weight as the operand `fprop.w` or `dgrad.w`, from the cache `casts` if possible.

        A cast may not be reused if it draws random bits or depends on a history, or if `keep` or a probe asks
        for its input. The weight is that of this call [out, in], in any dtype; of a sharded one, this rank's
        rows. It may be another tensor than `self.weight`: a functional call brings its own. `quant` and
        `keep` are as in `operand`.
        """
        inspected = keep or self.context.probe is not None
        reusable = (
            quant is not None
            and self.sharded is None
            and not inspected
            and self._target(slot, quant) is None
            and lasts(quant, rotation)
        )
        if quant is not None and reusable and (parts := self.casts.find(slot, quant, rotation, weight)):
            self._count(slot, parts)
            return parts
        w = weight.detach() if slot == "fprop.w" else weight.detach().t()
        if self.sharded:
            w = w.to(torch.bfloat16)
            if not inspected and (
                packed := self.sharded.operand(w, slot, quant, rotation, self.draws_at(slot))
            ):
                return [packed]
            w = self.sharded.numbers(w, slot)
        parts = self.operand(w, slot, quant, rotation, keep, True)
        if quant is not None and reusable:
            self.casts.add(slot, quant, rotation, weight, parts)
        return parts

    def multiply(
        self, a: list[Operand], b: list[Operand], out: torch.dtype, finish: Finish = PLAIN
    ) -> Tensor:
        """Return the product a b^T of two operands, each given as its parts, rounded once to `out`,
        and finished."""
        return split_product(a, b, out, finish=finish)

    def _count(self, slot: str, parts: Iterable[Operand]) -> None:
        for largest in (part.largest for part in parts if part.largest is not None):
            self.observed(slot, largest)

    def _part(
        self, part: Part, slot: str, rotation: Hadamard | None, main: Quant, keep: Keep, rounded: bool = False
    ) -> Operand:
        x, how = part.values, part.quant
        if how is None:
            return Operand(self.rotated(x, slot, rotation))
        try:
            result = self.quantize(
                x,
                how,
                rotation=rotation,
                history=self.histories[slot] if how is main else None,
                target=self._target(slot, how) if how is main else None,
                keep=keep or (self.context.probe is not None and "source"),
                partition=self.divided.shares.get(slot) if self.divided else None,
                rounded=rounded,
                **self.draws_at(slot),
            )
        except OwnFunctionError as error:
            raise error.within(f"{slot} of {self.name or 'the model'}") from error
        self._count(slot, [result])
        if self.context.probe is not None and how is main and x.numel():
            self.context.probe.operand(self.name, slot, result.cast or result)
        return result

    def where(self, slot: str) -> int:
        """Return the draw site of an operand."""
        return self._sites[slot]

    def observed(self, slot: str, largest: Tensor) -> None:
        """Count an operand by its largest magnitude, fp32 scalar."""
        self.nonfinite.add(largest, self.clock.step, slot, self.clock.stream == "evaluation")

    def draws_at(self, slot: str) -> DrawArguments:
        """Return the clock and sites that determine an operand's random bits, as keywords of `quantize`."""
        return {"clock": self.clock, "where": self._sites[slot], "product": self._turns[slot]}

    def _target(self, slot: str, quant: Quant) -> Tensor | None:
        if (
            self.target is None
            or slot not in ("fprop.w", "dgrad.w")
            or quant.rounding != "nearest"
            or quant.from_forward
        ):
            return None
        return self.target if slot == "fprop.w" else self.target.t()

    def rotated(self, x: Tensor, slot: str, rotation: Hadamard | None, *, back: bool = False) -> Tensor:
        """Return `x` padded and rotated as the product of `slot` requires; with `back`, rotated back."""
        if rotation is None:
            return x
        return rotate(x, rotation, self.clock, self._turns[slot], back=back)

    def whole(self, parts: list[Operand], slot: str, rotation: Hadamard | None, width: int) -> Tensor:
        """Return the sum of an operand's dequantised parts, rotated back, fp32 [rows, width]."""
        padded = width if rotation is None else width + -width % rotation.size
        if parts[-1].few and parts[-1].nonzero and parts[-1].nonzero[0] == 1:  # no rotation mixed them
            return with_few(*parts)[:, :width]
        first, *others = (part.dequantize()[:, :padded] for part in parts)
        return self.rotated(sum(others, first), slot, rotation, back=True)[:, :width]

    def weight_cast(self) -> Operand:
        """Return the weight as fprop would quantise it now, without what a transform takes out of it. Its
        error is not amplified or permuted. Advances no draw, history or count."""
        with self._unobserved():
            self.clock.micro_batch = 0  # it differs between ranks, which must draw the same bits here
            return self._weight()[0]

    def quantised_weight(self) -> Tensor:
        """Return the quantised weight that fprop would use now, its error not amplified, fp32 [out, in]."""
        with self._unobserved():
            return self.whole(self._weight(), "fprop.w", self.products.fprop.hadamard, self.in_features)

    def _weight(self) -> list[Operand]:
        spec = self.products.fprop
        quant = None if spec.w is None else spec.w.cast
        w = self.whole_weight().to(torch.bfloat16)
        # A GPU's kernels keep no codes, which follow from values that are exact.
        keep: Keep = "source" if w.is_cuda and quant is not None and not quant.wide else True
        return self.operand(w, "fprop.w", quant, spec.hadamard, keep)

    def whole_weight(self) -> Tensor:
        """Return the weight [out, in] without its graph; if it is sharded, gathered from all ranks."""
        return whole(self.weight.detach())

    @contextmanager
    def _unobserved(self) -> Iterator[None]:
        """Inside this context casts draw from a copy of the clock, and no probe or count sees them."""
        with kept([self], "clock", "context", "nonfinite"):
            self.clock = replace(self.clock, stream="evaluation")
            self.context = replace(self.context, probe=None)
            self.nonfinite = NonfiniteCount()
            yield


class Redrawn(EmulatedLinear):
    """A layer that keeps the operands that it multiplied last, each as its parts."""

    multiplied: tuple[list[Operand], list[Operand]]

    def multiply(
        self, a: list[Operand], b: list[Operand], out: torch.dtype, finish: Finish = PLAIN
    ) -> Tensor:
        """Return the product a b^T of two operands, each given as its parts, rounded once to `out`."""
        self.multiplied = a, b
        return super().multiply(a, b, out, finish)
