"""One emulated linear layer for tests: inputs drawn by an explicit seed, one forward and backward pass, and what the probe saw."""

import torch
from torch import Tensor, nn

from ablate.engines.emulated_layer import EmulatedLinear
from ablate.engines.products import DTYPES, Probe
from ablate.numerics.philox import Clock
from ablate.recipes import PRESETS, Recipe

ANYWHERE = [name for name, make in PRESETS.items() if not make().layers.rules]
"""Presets for any model; the rules of the others select layers by class, and a rule that selects none is refused."""


def drawn(*shape: int, seed: int, outliers: bool = False) -> Tensor:
    """fp32 that holds bf16 values; with outliers, one token in 16 is 30 times larger."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g)
    if outliers:
        x[:: shape[0] // 2] *= 30
    return x.bfloat16().float()


def layer(
    recipe: Recipe, weight: Tensor, bias: Tensor | None = None, clock: Clock | None = None
) -> EmulatedLinear:
    """A layer of this weight [out, in] under the recipe's own products."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight.data.copy_(weight)
    if bias is not None:
        linear.bias.data.copy_(bias)
    emulated = EmulatedLinear(linear, "blocks.0.linear", clock or Clock(0), DTYPES[recipe.dtype])
    emulated.products = recipe.products
    return emulated


def run(module: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(dy.to(y.dtype))
    return y.detach(), x.grad, module.weight.grad


def exact(recipe: Recipe) -> Recipe:
    """The same recipe with every product left in fp32, so that only quantisation and the order of additions round."""
    return recipe.model_copy(
        update={
            "fprop": recipe.fprop.model_copy(update={"gemm": "fp32_out"}),
            "dgrad": recipe.dgrad.model_copy(update={"gemm": "fp32_out"}),
            "wgrad": recipe.wgrad.model_copy(update={"dw": "fp32"}),
        }
    )


class Each(Probe):
    """A probe that calls a function with (layer, slot, operand) for every operand."""

    def __init__(self, operand) -> None:
        self.operand = operand


class Watch(Probe):
    """A probe that keeps every operand by slot, and the result of every product by its name."""

    def __init__(self) -> None:
        self.seen, self.results = {}, {}

    def operand(self, layer, slot, operand) -> None:
        self.seen[slot] = operand

    def product(self, layer, product, result) -> None:
        self.results[product] = result
