"""Linear layers whose three products are quantised exactly, anywhere. Applied from outside: names and state dicts stay.

Not modelled: the order of fp32 additions inside a tensor core, and the bit-level randomness of its rounding instruction.
"""

import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ablate.numerics.hadamard import rotate
from ablate.numerics.philox import Clock, site
from ablate.numerics.product import product
from ablate.numerics.quantize import Operand, pad, quantize
from ablate.numerics.spec import Hadamard, Quant
from ablate.recipes.recipe import SLOTS, Recipe

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "bf16_out": torch.bfloat16, "fp32_out": torch.float32}
_BLOCK = re.compile(r"(?:^|\.)(?:blocks|layers|h)\.(\d+)\.")

Probe = Callable[[str, str, Operand], None]
"""Called with (layer, slot, operand) for every quantised operand while telemetry is on."""


class EmulatedLinear(nn.Linear):
    """An nn.Linear that computes its products by a recipe; shares the parameters of the layer it replaces."""

    def __init__(self, linear: nn.Linear, name: str, clock: Clock) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.name, self.clock = name, clock
        self.recipe = Recipe()
        self.probe: Probe | None = None
        self.nonfinite: Tensor | int = 0
        """Operands so far whose amax was NaN or infinite."""
        self._sites = {slot: site(name, slot) for slot in SLOTS}

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out], in x's dtype; the bias is added in high precision."""
        dtype = DTYPES[self.recipe.dtype]
        if self.recipe.plain:
            bias = None if self.bias is None else self.bias.to(dtype)
            return F.linear(x.to(dtype), self.weight.to(dtype), bias).to(x.dtype)
        y = _Products.apply(x.reshape(-1, self.in_features), self.weight, self, self.recipe)
        y = y if self.bias is None else (y + self.bias).to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def operand(self, x: Tensor, slot: str, quant: Quant | None, rotation: Hadamard | None) -> Operand:
        """`x` [rows, contraction] in bf16 as the operand `slot` of a product: rotated, quantised, or as it is."""
        if quant is None:
            return Operand(rotate(pad(x, 1, rotation.size), rotation) if rotation else x)
        keep = self.probe is not None
        result = quantize(x, quant, rotation=rotation, clock=self.clock, where=self._sites[slot], keep=keep)
        self.nonfinite = self.nonfinite + ~result.amax.isfinite()
        if keep:
            self.probe(self.name, slot, result)
        return result


class _Products(torch.autograd.Function):
    """fprop now; dgrad and wgrad from the same bf16 x and w, each operand quantised anew for its own product."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, layer: EmulatedLinear, recipe: Recipe) -> Tensor:
        xb, wb = x.to(torch.bfloat16), w.to(torch.bfloat16)
        ctx.save_for_backward(xb, wb)
        ctx.layer, ctx.recipe, ctx.dtypes = layer, recipe, (x.dtype, w.dtype)
        return _product(layer, recipe, "fprop", xb, wb, DTYPES[recipe.fprop.gemm]).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):
        xb, wb = ctx.saved_tensors
        layer, recipe = ctx.layer, ctx.recipe
        x_dtype, w_dtype = ctx.dtypes
        dy = dy.to(torch.bfloat16)
        dx = _product(layer, recipe, "dgrad", dy, wb.t(), DTYPES[recipe.dgrad.gemm]) if ctx.needs_input_grad[0] else None
        dw = _product(layer, recipe, "wgrad", dy.t(), xb.t(), DTYPES[recipe.wgrad.dw]) if ctx.needs_input_grad[1] else None
        return None if dx is None else dx.to(x_dtype), None if dw is None else dw.to(w_dtype), None, None


def _product(layer: EmulatedLinear, recipe: Recipe, name: str, a: Tensor, b: Tensor, out: torch.dtype) -> Tensor:
    spec = getattr(recipe, name)
    first, second = (
        layer.operand(tensor, f"{name}.{slot}", getattr(spec, slot), spec.hadamard)
        for tensor, slot in zip((a, b), spec.operands, strict=True)
    )
    return product(first, second, out)


class Engine:
    """A model's linear layers under one recipe: follows its schedule, and collects what the quantisers saw."""

    def __init__(self, model: nn.Module, recipe: Recipe, clock: Clock) -> None:
        self.recipe, self.clock = recipe, clock
        self.layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, EmulatedLinear)}
        blocks = 1 + max((block_of(name) for name in self.layers), default=-1)
        self.quantised = {name for name in self.layers if recipe.layers.quantises(block_of(name), blocks)}

    def at(self, step: int, steps: int) -> Recipe:
        """Put the recipe of step `step` (from 0) of `steps` in force, and return it."""
        recipe = self.recipe.at(step, steps)
        high = Recipe(dtype=recipe.dtype)
        for name, layer in self.layers.items():
            layer.recipe = recipe if name in self.quantised else high
        return recipe

    def everywhere(self, recipe: Recipe) -> None:
        """Put one recipe in force in all layers (validation in bf16), until the next `at`."""
        for layer in self.layers.values():
            layer.recipe = recipe

    def nonfinite(self) -> int:
        """Operands so far, over all layers, whose amax was NaN or infinite."""
        return int(sum(layer.nonfinite for layer in self.layers.values()))

    def listen(self, probe: Probe | None) -> None:
        """Call `probe` for every operand quantised from now on; None stops it."""
        for layer in self.layers.values():
            layer.probe = probe


def block_of(name: str) -> int:
    """The transformer block that a qualified name lies in, -1 for none."""
    match = _BLOCK.search(name)
    return int(match[1]) if match else -1


def convert(model: nn.Module, recipe: Recipe, clock: Clock) -> Engine:
    """Replace every nn.Linear inside a transformer block, in place, and return the engine that drives them.

    Parameter names, values and state dicts stay as they are; linears outside the blocks (the output head) are left alone.
    """
    for name, linear in list(model.named_modules()):
        if type(linear) is nn.Linear and block_of(name) >= 0:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, EmulatedLinear(linear, name, clock))
    return Engine(model, recipe, clock)
