"""Comparison of te.Linear with the emulated layer, forward and backward, with rounding to nearest.

Both round y, dx and dw to bf16 once, after sums of the same exact products. Two numbers may therefore differ
by two effects:

- Order of additions. Each of K additions rounds (a tensor core: truncates) off at most 2^-23 of the sum of
  all magnitudes, M = sum |a| |b|, and there are two sums: 2 K 2^-23 M.
- Rounding to bf16. If a boundary lies between the two sums, the results differ by one step, 2^-7 of the
  value.

The fraction of elements that differ is at most the mean probability of a boundary in between: the usual
effect of the order over the step. With terms of either sign the partial sums are about M / sqrt(K), so that
the usual effect is 2 sqrt(K) 2^-23 M, even if every addition truncates in the same direction.

FP8 on Hopper uses TE's fast mode in fprop, which accumulates with 14 bits: 2^-13 for each 32 products instead
of 2^-23 for each product.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ablate.engines.emulated_layer import EmulatedLinear
from ablate.engines.transformer_engine import Draws, NativeLinear
from ablate.numerics.philox import Clock
from ablate.numerics.spec import Hadamard, Quant
from ablate.recipes.recipe import Products
from ablate.recipes.te_mapping import Family, families
from ablate.verification.check_result import Check, Row
from ablate.verification.parity.bench import Bench, recipes

STEP = 2.0**-7
"""Relative step of bf16 at the lower end of a binade."""


class Sample(NamedTuple):
    """Weight [out, in], input [tokens, in] and output gradient [tokens, out] of one layer, bf16 on the
    device.
    """

    w: Tensor
    x: Tensor
    dy: Tensor


def exact_products(bench: Bench, family: Family) -> Iterator[Check]:
    """Yield a check for each recipe of a family: y, dx and dw over all shapes."""
    for recipe_family, name, products in recipes(bench.families):
        if recipe_family == family:
            yield Check(
                "te.Linear, forward and backward", partial(_compared, bench, name, products), title=name
            )


def _compared(bench: Bench, name: str, products: Products) -> Iterator[Row]:
    worst, shares, limits, worst_case = 0.0, [], [], ""
    for number, shape in enumerate(bench.products):
        sample = draw_sample(shape, number, bench.device)
        ours, theirs = (computed(layer, sample) for layer in pair(sample, products))
        for what, (limit, usual) in reach(bench, sample, products).items():
            a, b = ours[what].double(), theirs[what].double()
            tolerance = STEP * torch.maximum(a.abs(), b.abs()) + limit
            excess = float(
                ((a - b).abs() / tolerance.clamp(min=torch.finfo(torch.float32).tiny))
                .nan_to_num(torch.inf)
                .max()
            )
            shares.append(float((a != b).double().mean()))
            limits.append(float((usual / (STEP / 2 * a.abs()).clamp(min=1e-300)).clamp(max=1).mean()))
            if excess > worst:
                worst, worst_case = excess, f"{what}, {' x '.join(map(str, shape))}"
    crossed = [(share, limit) for share, limit in zip(shares, limits, strict=True) if share > limit]
    share, limit = max(crossed or zip(shares, limits, strict=True))
    summary = f"{worst:.2g} of the tolerance ({worst_case}), {100 * share:.2g} % differ"
    if not worst_case:
        summary = "all alike"
    yield Row(
        f"{name}: y, dx, dw",
        summary,
        f"at most 1, and {100 * limit:.2g} %: the order of additions",
        worst <= 1 and not crossed,
    )


def pair(sample: Sample, products: Products) -> Iterator[EmulatedLinear]:
    """Yield the emulator's layer and TE's, with the same weight and products."""
    for kind in (EmulatedLinear, NativeLinear):
        linear = nn.Linear(sample.w.shape[1], sample.w.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(sample.w.float())
        clock = Clock(0)
        layer = kind(
            linear, "blocks.0.a", clock, torch.bfloat16, *([Draws(clock)] if kind is NativeLinear else [])
        )
        layer.products = products
        yield layer


def computed(layer: EmulatedLinear, sample: Sample) -> dict[str, Tensor]:
    """Return y, dx and dw of a layer; with delayed scaling those of a second step, scaled by the first's
    amax.
    """
    delayed = "fp8_delayed" in families([layer.products])
    for step in range(1 + delayed):
        layer.clock.step = step
        layer.zero_grad()
        x = sample.x.clone().requires_grad_()
        y = layer(x)
        y.backward(sample.dy)
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad}


def reach(bench: Bench, sample: Sample, products: Products) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the largest and the usual effect of the order of additions on each element, fp64."""
    layer = next(pair(sample, products))
    sides = {
        "y": ("fprop", ("x", sample.x), ("w", sample.w)),
        "dx": ("dgrad", ("g", sample.dy), ("w", sample.w.t())),
        "dw": ("wgrad", ("g", sample.dy.t()), ("x", sample.x.t())),
    }
    effects = {}
    for what, (name, *both) in sides.items():
        spec = getattr(products, name)
        a, b = (
            _magnitudes(layer, f"{name}.{operand}", getattr(spec, operand), spec.hadamard, z)
            for operand, z in both
        )
        fast = bench.fast_sums and what == "y" and spec.x is not None and spec.x.scale is None
        steps, cut = (-(-a.shape[1] // 32), 2.0**-13) if fast else (a.shape[1], 2.0**-23)
        magnitudes = a @ b.t()
        effects[what] = 2 * steps * cut * magnitudes, 2 * steps**0.5 * cut * magnitudes
    return effects


def _magnitudes(
    layer: EmulatedLinear, slot: str, quant: Quant | None, rotation: Hadamard | None, x: Tensor
) -> Tensor:
    return sum(part.dequantize() for part in layer.operand(x, slot, quant, rotation)).abs().double()


def draw_sample(shape: tuple[int, int, int], seed: int, device: torch.device) -> Sample:
    """Return normal values at the scale of a trained layer; every sixteenth token is thirty times larger."""
    tokens, inputs, outputs = shape
    g = torch.Generator().manual_seed(seed)
    w, x, dy = (
        torch.randn(size, generator=g) for size in ((outputs, inputs), (tokens, inputs), (tokens, outputs))
    )
    x[::16] *= 30
    return Sample(*(z.bfloat16().to(device) for z in (w * inputs**-0.5, x, dy * 1e-3)))
