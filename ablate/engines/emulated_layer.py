"""A linear layer that computes its three products by a recipe, exactly, on any device: `EmulatedLinear`.

In place of one fp32 matrix product, `fprop`, `dgrad` and `wgrad` each get two operands of their own, which are quantised anew,
each by its `Quant`, and multiplied as a tensor core would. The file ends with these products as functions, `forward` and
`backward`, which autograd and torch.compile both use. Which recipe is in force, and in which layers, is decided by the engine
(emulated.py).

Not modelled: the order of fp32 additions inside a tensor core, and the bit-level randomness of its rounding instruction.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ablate.engines.ranks import Divided, Sharded, whole
from ablate.numerics import choices
from ablate.numerics.estimators import slope
from ablate.numerics.hadamard import rotate
from ablate.numerics.history import History
from ablate.numerics.philox import Clock, site
from ablate.numerics.product import first_order, linear, split_product
from ablate.numerics.quantize import Operand, lasts, pad, quantize, quantize_both
from ablate.numerics.spec import Hadamard, Quant
from ablate.numerics.transform import split
from ablate.recipes.recipe import FORWARD_COPY, SLOTS, Products

_GEMM_DTYPES = {word: choices.DTYPES[dtype] for word, (dtype, _) in choices.GEMM_OUTPUTS.items()}
DTYPES = {word: getattr(torch, name) for word, name in (choices.DTYPES | _GEMM_DTYPES).items()}
HIGH = Products()
UNSET = Products()
"""In force in a converted layer until the engine's first step; told apart from `HIGH` by identity."""

Probe = Callable[[str, str, Operand], None]
"""Called with (layer, slot, operand) for every quantised operand while telemetry is on."""


class EmulatedLinear(nn.Linear):
    """An nn.Linear that computes its products by a recipe; shares the parameters of the layer it replaces."""

    def __init__(self, linear: nn.Linear, name: str, clock: Clock, dtype: torch.dtype) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self._adopt(linear)
        self.name, self.clock, self.dtype = name, clock, dtype
        self.products = HIGH
        self.probe: Probe | None = None
        self.nonfinite: Tensor | int = 0
        """Operands so far that held a NaN or an infinity."""
        self.whole_graph: Callable[[Tensor, Tensor], Tensor] | None = None
        """This layer's operator for torch.compile (compiled.py), in place of autograd's function."""
        self.histories = {slot: History() for slot in SLOTS}
        self.target: Tensor | None = None
        """What decides the rounding of the weight's forward cast (Q-EMA), fp32 like the weight."""
        self.casts: dict[str, tuple[tuple, list[Operand]]] | None = None
        """The weight's operands by slot, while it stays as it is; None where nobody promises that."""
        self.divided: Divided | None = None
        """Where other ranks have the rest of its tokens."""
        self.sharded: Sharded | None = None
        """Where they have the rest of its weight."""
        self._sites = {slot: site(name, slot) for slot in SLOTS}
        self._turns = {slot: site(name, slot.partition(".")[0]) for slot in SLOTS}  # both operands turn alike

    def _adopt(self, linear: nn.Linear) -> None:
        """Take over the parameters, the mode, the attributes and the hooks of the layer that is replaced.

        The dictionaries of hooks are the same objects, so that handles of hooks registered before still remove them.
        """
        vars(self).update(vars(linear))
        self._parameters, self._buffers = dict(linear._parameters), dict(linear._buffers)
        for hook in self._load_state_dict_pre_hooks.values():
            if hook.with_module:  # torch keeps a weak reference to the module, which is about to go
                hook.module = weakref.ref(self)

    def require_step(self) -> None:
        """Raise RuntimeError if the engine has put no step of its recipe in force yet."""
        if self.products is UNSET:
            raise RuntimeError(
                f"{self.name}: no step of the recipe is in force, so nothing would be quantised;"
                " call engine.at(step, run) before the model, or use engine.high_precision()"
            )

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out], in x's dtype; the bias is added in high precision. Autocast does not reach in here."""
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return self.forward(x)
        if self.whole_graph is None:
            self.require_step()
        if self.whole_graph is None and self.products.plain:
            bias = None if self.bias is None else self.bias.to(self.dtype)
            weight = (
                self.sharded.whole(self.weight, self.dtype) if self.sharded else self.weight.to(self.dtype)
            )
            return linear(x.to(self.dtype), weight, bias).to(x.dtype)
        rows, weight = (
            x.reshape(-1, self.in_features),
            self.weight.to_local() if self.sharded else self.weight,
        )
        y = (
            self.whole_graph(rows, weight)
            if self.whole_graph
            else _Products.apply(rows, weight, self, self.products)
        )
        y = y if self.bias is None else (y + self.bias).to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def operand(
        self, x: Tensor, slot: str, quant: Quant | None, rotation: Hadamard | None, keep: bool = False
    ) -> list[Operand]:
        """`x` [rows, contraction] in bf16 as the operand `slot` of a product: rotated, quantised, or as it is; in parts that add up."""
        if quant is None:
            return [Operand(self.rotated(x, slot, rotation))]
        parts = split(x, quant, channels=0 if slot.startswith("wgrad") else 1)
        return [self._part(part, slot, how, rotation, quant, keep) for part, how in parts]

    def gradients(
        self, dy: Tensor, products: Products, dx: bool, dw: bool
    ) -> tuple[list[Operand], list[Operand]]:
        """dgrad's operand of dy [tokens, out], and wgrad's of dy^T, where dx and dw are wanted: from one read where a kernel can."""
        rows, columns = products.dgrad, products.wgrad
        apart = (
            rows.hadamard
            or (rows.g and rows.g.transform)
            or (columns.g and columns.g.transform)
            or self.probe
            or self.divided
        )
        if dx and dw and rows.g and columns.g and not apart:
            where = self._sites["dgrad.g"], self._sites["wgrad.g"]
            turn = self._turns["wgrad.g"]
            both = quantize_both(
                dy, rows.g, columns.g, rotation=columns.hadamard, clock=self.clock, where=where, product=turn
            )
            if both:
                self._count(both)
                return [both[0]], [both[1]]
        across = self.operand(dy, "dgrad.g", rows.g, rows.hadamard) if dx else []
        return across, self.operand(dy.t(), "wgrad.g", columns.g, columns.hadamard) if dw else []

    def weight_operand(
        self,
        slot: str,
        quant: Quant | None,
        rotation: Hadamard | None,
        weight: Callable[[], Tensor],
        keep: bool = False,
    ) -> list[Operand]:
        """The weight, which `weight` gives, as the operand `slot`: among `casts` once, but where something is drawn or looked at.

        Of a sharded one, `weight` gives what this rank keeps.
        """
        looked_at = keep or self.probe is not None
        if self.sharded:
            part = weight()
            packed = (
                None if looked_at else self.sharded.operand(part, slot, quant, rotation, self.draws_at(slot))
            )
            return (
                [packed]
                if packed
                else self.operand(self.sharded.numbers(part, slot), slot, quant, rotation, keep)
            )
        looked_at = looked_at or self.casts is None
        if quant is None or looked_at or self._target(slot, quant) is not None or not lasts(quant, rotation):
            return self.operand(weight(), slot, quant, rotation, keep)
        known, parts = self.casts.get(slot, (None, []))
        if known == (quant, rotation):
            self._count(parts)
            return parts
        parts = self._turned(slot, quant, rotation) or self.operand(weight(), slot, quant, rotation)
        self.casts[slot] = (quant, rotation), parts
        return parts

    def _turned(self, slot: str, quant: Quant, rotation: Hadamard | None) -> list[Operand] | None:
        """dgrad's weight from fprop's: unrotated blocks of 16x16 are the same read down and across."""
        known, parts = self.casts.get("fprop.w", (None, []))
        square = quant.block == "16x16" and rotation is None and quant.transform is None
        if (
            slot != "dgrad.w"
            or not square
            or known != (quant, None)
            or parts[0].values.shape != self.weight.shape
        ):
            return None
        self._count(parts)
        return [parts[0].transposed()]

    def _count(self, parts: Iterable[Operand]) -> None:
        for largest in (part.largest for part in parts if part.largest is not None):
            if largest.device.type != "cpu":  # not to be waited for
                self.nonfinite = self.nonfinite + ~largest.isfinite()
            elif not math.isfinite(largest):
                self.nonfinite += 1

    def _part(
        self, x: Tensor, slot: str, how: Quant | None, rotation: Hadamard | None, main: Quant, keep: bool
    ) -> Operand:
        if how is None:
            return Operand(self.rotated(x, slot, rotation))
        result = quantize(
            x,
            how,
            rotation=rotation,
            history=self.histories[slot] if how is main else None,
            target=self._target(slot, how) if how is main else None,
            keep=keep or (self.probe is not None and "source"),
            partition=self.divided.shares.get(slot) if self.divided else None,
            **self.draws_at(slot),
        )
        self._count([result])
        if self.probe is not None and how is main:
            self.probe(self.name, slot, result)
        return result

    def draws_at(self, slot: str) -> dict[str, Any]:
        """When and where an operand of this layer draws random bits, as `quantize` takes it."""
        return {"clock": self.clock, "where": self._sites[slot], "product": self._turns[slot]}

    def _target(self, slot: str, quant: Quant) -> Tensor | None:
        if (
            self.target is None
            or slot not in ("fprop.w", "dgrad.w")
            or quant.rounding != "nearest"
            or quant.source == "forward"
        ):
            return None
        return self.target if slot == "fprop.w" else self.target.t()

    def rotated(self, x: Tensor, slot: str, rotation: Hadamard | None, *, back: bool = False) -> Tensor:
        """`x` padded and rotated as the product of `slot` is, or back."""
        if rotation is None:
            return x
        return rotate(
            pad(x, 1, rotation.size).contiguous(), rotation, self.clock, self._turns[slot], back=back
        )

    def whole(self, parts: list[Operand], slot: str, rotation: Hadamard | None, width: int) -> Tensor:
        """The values of an operand's parts, added up and rotated back, fp32 [rows, width]."""
        padded = width if rotation is None else width + -width % rotation.size
        return self.rotated(sum(part.dequantize()[:, :padded] for part in parts), slot, rotation, back=True)[
            :, :width
        ]

    def weight_cast(self) -> Operand:
        """The weight as fprop would quantise it now (what a transform takes out apart); advances no draw, no history and no count."""
        with self._still():
            self.clock.micro_batch = 0  # each rank has been in another one last
            return self._weight()[0]

    def quantised_weight(self) -> Tensor:
        """The values that fprop would use for the weight now, fp32 [out, in]."""
        with self._still():
            return self.whole(self._weight(), "fprop.w", self.products.fprop.hadamard, self.in_features)

    def _weight(self) -> list[Operand]:
        spec = self.products.fprop
        return self.operand(
            self.whole_weight().to(torch.bfloat16), "fprop.w", spec.w, spec.hadamard, keep=True
        )

    def whole_weight(self) -> Tensor:
        """The weight [out, in] without its graph; of a sharded one, everybody's rows, whoever sharded it."""
        return whole(self.weight.detach())

    @contextmanager
    def _still(self):
        before = self.clock, self.probe, self.nonfinite
        self.clock, self.probe = replace(self.clock, stream="evaluation"), None
        try:
            yield
        finally:
            self.clock, self.probe, self.nonfinite = before


class _Products(torch.autograd.Function):
    """fprop now; dgrad and wgrad from the same bf16 x and w, or from their forward copies, each quantised anew for its product."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, layer: EmulatedLinear, products: Products) -> Tensor:
        y, kept = forward(layer, products, x, w)
        ctx.save_for_backward(*kept)
        ctx.layer, ctx.products, ctx.dtypes = layer, products, (x.dtype, w.dtype)
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy: Tensor):
        dx, dw = backward(ctx.layer, ctx.products, ctx.saved_tensors, dy, ctx.needs_input_grad[:2])
        dtypes = ctx.dtypes
        return None if dx is None else dx.to(dtypes[0]), None if dw is None else dw.to(dtypes[1]), None, None


Kept = Sequence[Tensor | None]
"""What the backward pass needs: x and w, or their forward copies, and the slopes of their casts where those are not passed through."""


def forward(layer: EmulatedLinear, products: Products, x: Tensor, w: Tensor) -> tuple[Tensor, Kept]:
    """y = x w^T for x [tokens, in] and w [out, in], in x's dtype, and what `backward` needs."""
    xb, spec = x.to(torch.bfloat16), products.fprop
    keep = {
        name: quant is not None and quant.estimator is not None
        for name, quant in (("x", spec.x), ("w", spec.w))
    }
    operands = {
        "fprop.x": layer.operand(xb, "fprop.x", spec.x, spec.hadamard, keep["x"]),
        "fprop.w": layer.weight_operand(
            "fprop.w", spec.w, spec.hadamard, lambda: w.to(torch.bfloat16), keep["w"]
        ),
    }
    sources = {"fprop.x": xb, "fprop.w": w}
    for slot, copied in FORWARD_COPY.items():
        if _from_forward(products, slot):
            sources[copied] = layer.whole(operands[copied], copied, spec.hadamard, sources[copied].shape[1])
    slopes = {
        slot: slope(parts[0])
        for slot, parts in operands.items()
        if parts[0].quant and parts[0].quant.estimator
    }
    y = split_product(operands["fprop.x"], operands["fprop.w"], DTYPES[spec.gemm]).to(x.dtype)
    return y, (*sources.values(), slopes.get("fprop.x"), slopes.get("fprop.w"))


def backward(
    layer: EmulatedLinear, products: Products, kept: Kept, dy: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """dx and dw where they are needed, as their products leave them."""
    x, w, x_slope, w_slope = kept
    dy = dy.to(torch.bfloat16)
    dx = dw = None
    g, gt = layer.gradients(dy, products, *needs)
    if needs[0]:
        spec = products.dgrad
        if _from_forward(products, "dgrad.w"):
            wt = layer.operand(w.t(), "dgrad.w", spec.w, spec.hadamard)
        else:
            wt = layer.weight_operand("dgrad.w", spec.w, spec.hadamard, lambda: w.to(torch.bfloat16).t())
        dx = _through(split_product(g, wt, DTYPES[spec.gemm]), x_slope, layer, "fprop.x", products)
    if needs[1]:
        spec = products.wgrad
        xt = layer.operand(x.t(), "wgrad.x", spec.x, spec.hadamard)
        total = split_product(gt, xt, torch.float32 if layer.divided else DTYPES[spec.dw])
        dw = _through(
            layer.divided.total(total, DTYPES[spec.dw]) if layer.divided else total,
            w_slope,
            layer,
            "fprop.w",
            products,
        )
        dw = layer.sharded.scatter(dw) if layer.sharded else dw
    return dx, dw


def _from_forward(products: Products, slot: str) -> bool:
    """Whether a backward operand starts from the forward pass's quantised copy."""
    quant = products.slot(slot)
    return quant is not None and quant.source == "forward"


def _through(
    gradient: Tensor, factor: Tensor | None, layer: EmulatedLinear, slot: str, products: Products
) -> Tensor:
    """The gradient of a cast's input from that of its output, elementwise where the cast was: in the rotated domain."""
    if factor is None:
        return gradient
    rotation, width = products.fprop.hadamard, gradient.shape[1]
    there = layer.rotated(gradient, slot, rotation)
    back = layer.rotated(
        (pad(there, 1, factor.shape[1]) * factor).to(gradient.dtype), slot, rotation, back=True
    )
    return back[:, :width]
