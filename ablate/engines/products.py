"""The three products of one call, as functions of a layer that casts: `forward` and `backward`.

The problem: autograd and torch.compile call the same arithmetic in two ways. The idea: two functions that
take the layer, the products in force and tensors, and hold no state; `Call` is their autograd function, and
compiled.py has the operator for torch.compile.

    y, kept = forward(layer, products, x, w)
    dx, dw = backward(layer, products, kept, dy, (True, True))
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ablate.engines.ranks import Divided, DrawArguments, Sharded
from ablate.numerics import choices
from ablate.numerics.estimators import finish, unfinished_slope
from ablate.numerics.hadamard import scale_rotated
from ablate.numerics.kernels.cuda import PLAIN, Finish
from ablate.numerics.philox import Clock
from ablate.numerics.product import first_order, linear
from ablate.numerics.quantize import Keep, Operand
from ablate.numerics.spec import Hadamard, Quant
from ablate.recipes.recipe import FORWARD_COPY, Products

_GEMM_DTYPES = {word: choices.DTYPES[dtype] for word, (dtype, _) in choices.GEMM_OUTPUTS.items()}
DTYPES = {word: getattr(torch, name) for word, name in (choices.DTYPES | _GEMM_DTYPES).items()}


class Probe(Protocol):
    """Receives what the layers of a model compute in a training step, while it is in force."""

    def operand(self, layer: str, slot: str, operand: Operand) -> None:
        """Receive a quantised operand of one of SLOTS, with its source, without a transform's parts."""
        return

    def product(self, layer: str, product: str, result: Tensor) -> None:
        """Receive the result of a product (`fprop`, `dgrad` or `wgrad`) that has quantised operands.

        It is y [tokens, out] without the bias, dx [tokens, in] or dw [out, in], rounded once to the output
        type of the product. With tokens divided among ranks, dw is this rank's part, fp32.
        """
        return

    def output(self, layer: "Casting", products: Products, x: Tensor, w: Tensor, y: Tensor) -> None:
        """Receive a forward pass, with its unquantised operands x [tokens, in] and w [out, in], and y
        [tokens, out] without the bias; the layer's clock is at the call. Not called if ranks divide the
        layer."""
        return

    def gradients(
        self,
        layer: "Casting",
        products: Products,
        kept: "Kept",
        dy: Tensor,
        results: tuple[Tensor | None, Tensor | None],
    ) -> None:
        """Receive a backward pass: the products of the forward pass and what that kept, dy [tokens, out], and
        the results dx [tokens, in] and dw [out, in], None if not needed. The layer's clock is at the call.
        Not called if ranks divide the layer."""
        return


class Observed(Protocol):
    """Probe and division of the tokens among ranks, as products see them."""

    probe: Probe | None
    divided: Divided | None


class Casting(Protocol):
    """A layer, as its products see it: its name, clock and context, and the casts of its operands. The
    methods are those of `EmulatedLinear`, which documents them."""

    name: str
    clock: Clock
    dtype: torch.dtype
    sharded: Sharded | None

    @property
    def context(self) -> "Observed": ...

    @property
    def divided(self) -> Divided | None: ...

    def end_call(self, micro_batch: int) -> None: ...

    def operand(
        self, x: Tensor, slot: str, quant: Quant | None, rotation: Hadamard | None, keep: Keep = False
    ) -> list[Operand]: ...

    def weight_operand(
        self, slot: str, quant: Quant | None, rotation: Hadamard | None, weight: Tensor, keep: Keep = False
    ) -> list[Operand]: ...

    def gradients(
        self, dy: Tensor, products: Products, dx: bool, dw: bool
    ) -> tuple[list[Operand], list[Operand]]: ...

    def multiply(
        self, a: list[Operand], b: list[Operand], out: torch.dtype, finish: Finish = PLAIN
    ) -> Tensor: ...

    def draws_at(self, slot: str) -> DrawArguments: ...

    def whole(self, parts: list[Operand], slot: str, rotation: Hadamard | None, width: int) -> Tensor: ...

    @property
    def emulates(self) -> bool: ...

    def redrawn(self) -> "Redrawing": ...


class Redrawing(Casting, Protocol):
    """A layer that keeps the operands that it multiplied last."""

    multiplied: tuple[list[Operand], list[Operand]]


class Call(torch.autograd.Function):
    """The autograd function of a call: fprop forward, dgrad and wgrad backward, which start from the saved x
    and w, or from their quantised forward copies, and quantise them again for each product."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, layer: Casting, products: Products, micro_batch: int
    ) -> Tensor:
        with layer.clock.within(micro_batch):
            y, kept = forward(layer, products, x, w)
        ctx.save_for_backward(*kept)
        ctx.layer, ctx.products, ctx.dtypes = layer, products, (x.dtype, w.dtype)
        ctx.micro_batch = micro_batch
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # A later forward pass may have begun another micro-batch; and a backward pass called inside of
        # autocast runs under it, which would round fp32 products to bf16.
        with ctx.layer.clock.within(ctx.micro_batch), torch.autocast(dy.device.type, enabled=False):
            dx, dw = backward(ctx.layer, ctx.products, ctx.saved_tensors, dy, ctx.needs_input_grad[:2])
        ctx.layer.end_call(ctx.micro_batch)
        x_dtype, w_dtype = ctx.dtypes
        dx, dw = None if dx is None else dx.to(x_dtype), None if dw is None else dw.to(w_dtype)
        return dx, dw, None, None, None


Kept = Sequence[Tensor | None]
"""Tensors saved for the backward pass: x, w (or their forward copies), and the slopes of their two casts.

`estimators.finish` completes a slope. It is None if its cast passes the gradient straight through.
"""


def forward(layer: Casting, products: Products, x: Tensor, w: Tensor) -> tuple[Tensor, Kept]:
    """Compute fprop: y = x w^T [tokens, out] in the dtype of `x` [tokens, in], and the tensors that
    `backward` needs. w is [out, in]; of a sharded layer, this rank's rows. Products that quantise nothing are
    computed in the layer's dtype."""
    if products.plain:
        return linear(x.to(layer.dtype), w.to(layer.dtype)).to(x.dtype), (x, w, None, None)
    xb, spec = x.to(torch.bfloat16), products.fprop
    keep: dict[str, Keep] = {
        name: "source" if quant is not None and quant.estimator is not None else False
        for name, quant in (("x", spec.x), ("w", spec.w))
    }
    operands = {
        "fprop.x": layer.operand(xb, "fprop.x", spec.x, spec.hadamard, keep["x"]),
        "fprop.w": layer.weight_operand("fprop.w", spec.w, spec.hadamard, w, keep["w"]),
    }
    sources = {"fprop.x": xb, "fprop.w": w}
    for slot, copied in FORWARD_COPY.items():
        if _from_forward(products, slot):
            copy = layer.whole(operands[copied], copied, spec.hadamard, sources[copied].shape[1])
            quant = products.slot(slot)
            exact = quant is not None and quant.source == "forward"
            sources[copied] = copy if exact else copy.to(torch.bfloat16)
    slopes = {
        slot: unfinished_slope(parts[0])
        for slot, parts in operands.items()
        if parts[0].quant and parts[0].quant.estimator
    }
    y = _product(layer, "fprop", operands["fprop.x"], operands["fprop.w"], DTYPES[spec.gemm])
    if probe := _watching(layer):
        probe.output(layer, products, xb, w, y)
    return y.to(x.dtype), (*sources.values(), slopes.get("fprop.x"), slopes.get("fprop.w"))


def backward(
    layer: Casting, products: Products, kept: Kept, dy: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute dgrad and wgrad of the layer and products that `forward` was called with, from the tensors that
    it returned and `dy`, the gradient of the output [tokens, out].

    Return dx [tokens, in] and dw [out, in] in the output types of their products, dw perhaps in fp32 memory;
    None for one not needed.
    For a sharded layer, dw is this rank's rows of the sum over ranks.
    """
    x, w, x_slope, w_slope = kept
    assert x is not None
    assert w is not None
    dx = dw = None
    if products.plain:
        high, x, w = (z.to(layer.dtype) for z in (dy, x, w))
        return linear(high, w.t()) if needs[0] else None, linear(high.t(), x.t()) if needs[1] else None
    dy = dy.to(torch.bfloat16)
    g, gt = layer.gradients(dy, products, *needs)
    if needs[0]:
        spec = products.dgrad
        if _from_forward(products, "dgrad.w"):
            wt = layer.operand(w.t(), "dgrad.w", spec.w, spec.hadamard)
        else:
            wt = layer.weight_operand("dgrad.w", spec.w, spec.hadamard, w)
        dx = _gradient(layer, "dgrad", g, wt, DTYPES[spec.gemm], products, x_slope)
    if needs[1]:
        wgrad = products.wgrad
        xt = layer.operand(x.t(), "wgrad.x", wgrad.x, wgrad.hadamard)
        # Rounded in the memory of the weight's fp32 gradient, unless something else looks at it first.
        wide = w.dtype == torch.float32 and not (layer.sharded or layer.context.probe)
        dw = _gradient(layer, "wgrad", gt, xt, DTYPES[wgrad.dw], products, w_slope, wide)
        dw = layer.sharded.scatter(dw) if layer.sharded else dw
    if probe := _watching(layer):
        probe.gradients(layer, products, kept, dy, (dx, dw))
    return dx, dw


def _watching(layer: Casting) -> Probe | None:
    """Return the probe that receives whole passes: none if ranks divide tokens or weight."""
    return None if layer.context.divided or layer.sharded else layer.context.probe


def _product(
    layer: Casting, name: str, a: list[Operand], b: list[Operand], out: torch.dtype, finish: Finish = PLAIN
) -> Tensor:
    """Return a b^T, rounded once to `out` and finished, after the layer's probe has received it."""
    result = layer.multiply(a, b, out, finish)
    if layer.context.probe is not None:
        layer.context.probe.product(layer.name, name, result)
    return result


def _from_forward(products: Products, slot: str) -> bool:
    """Return True if a backward operand starts from the forward pass's quantised copy."""
    quant = products.slot(slot)
    return products.dequantised(slot) or (quant is not None and quant.from_forward)


def _gradient(
    layer: Casting,
    name: str,
    a: list[Operand],
    b: list[Operand],
    out: torch.dtype,
    products: Products,
    slope: Tensor | None,
    wide: bool = False,
) -> Tensor:
    """Return a product of the backward pass, rounded once to `out`, through the slope of the forward cast.
    The product with the slope is taken in the rotated domain, where the cast was."""
    slot, divided = ("fprop.x", None) if name == "dgrad" else ("fprop.w", layer.divided)
    last, rotation = finish(slope, products.slot(slot), wide), products.fprop.hadamard
    # A probe and a sum over ranks take the product without the slope, and a kernel rotates no result.
    if not divided and (slope is None or (rotation is None and layer.context.probe is None)):
        return _product(layer, name, a, b, out, last)
    total = _product(layer, name, a, b, torch.float32 if divided else out)
    total = divided.total(total, out) if divided else total
    if last.factor is None:
        return total
    return scale_rotated(total, last.factor, rotation, layer.clock, layer.draws_at(slot)["product"])
