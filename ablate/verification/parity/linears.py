"""Comparison of te.Linear and te.GroupedLinear with emulated layers, forward and backward, to nearest.

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

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ablate.engines.emulated_layer import EmulatedLinear
from ablate.engines.expert_layers import EmulatedExpert
from ablate.engines.transformer_engine import Draws, NativeExpert, NativeLinear
from ablate.numerics.philox import Clock
from ablate.recipes.recipe import Products
from ablate.recipes.te_mapping import Family, families
from ablate.training.operand_errors import sources
from ablate.verification.check_result import Check, Row
from ablate.verification.conformance.properties.product import Layer
from ablate.verification.conformance.reference_product import PAIRS
from ablate.verification.parity.bench import Bench, recipes

STEP = 2.0**-7
"""Relative step of bf16 at the lower end of a binade."""
EXPERTS = (0, 17, 128, 200)
"""Tokens of each expert that te.GroupedLinear multiplies."""


class Case(NamedTuple):
    """Results of the emulator and of TE: y, dx and dw of one layer, or of one expert."""

    name: str
    sample: Layer
    ours: dict[str, Tensor]
    theirs: dict[str, Tensor]


def exact_products(bench: Bench, family: Family) -> Iterator[Check]:
    """Yield two checks for each recipe of a family: y, dx and dw of layers, and of experts, over all shapes.
    Experts have no delayed scaling on this engine."""
    for recipe_family, name, products in recipes(bench.families):
        if recipe_family != family:
            continue
        check = partial(_compared, bench, products)
        cases = _layers(bench, products)
        yield Check("te.Linear, forward and backward", partial(check, name, cases), title=name)
        if "fp8_delayed" not in families([products]):
            title, cases = f"{name}, experts", _experts(bench, products)
            yield Check("te.GroupedLinear, forward and backward", partial(check, title, cases), title=title)


def _layers(bench: Bench, products: Products) -> Iterator[Case]:
    for number, shape in enumerate(bench.products):
        sample = draw_sample(shape, number, bench.device)
        ours, theirs = (computed(layer, sample) for layer in pair(sample, products))
        yield Case(" x ".join(map(str, shape)), sample, ours, theirs)


def _experts(bench: Bench, products: Products) -> Iterator[Case]:
    for inputs, outputs in sorted({shape[1:] for shape in bench.products}):
        samples = [draw_sample((tokens, inputs, outputs), tokens, bench.device) for tokens in EXPERTS]
        results = (grouped(samples, products, kind) for kind in (EmulatedExpert, NativeExpert))
        for sample, ours, theirs in zip(samples, *results, strict=True):
            yield Case(f"expert of {len(sample.x)} x {inputs} x {outputs}", sample, ours, theirs)


class Sums(NamedTuple):
    """Sums of a product, to which the order of additions makes a difference."""

    magnitudes: Tensor
    """Sum of the magnitudes of the terms of each element, fp64."""
    terms: int
    fast: bool
    """True if they may accumulate with 14 bits."""


class Apart(NamedTuple):
    """Difference of two products of the same operands."""

    excess: float
    """Largest difference, in parts of the tolerance."""
    differing: int
    """Number of elements that differ."""
    share: float
    """Fraction of elements that differ."""
    likely: float
    """Fraction that the order of additions may make differ."""


def apart(ours: Tensor, theirs: Tensor, sums: Sums, step: float = STEP) -> Apart:
    """Return how far two products are apart, whose dtype has a relative `step`."""
    one, other = ours.double(), theirs.double()
    steps, cut = (-(-sums.terms // 32), 2.0**-13) if sums.fast else (sums.terms, 2.0**-23)
    limit = step * torch.maximum(one.abs(), other.abs()) + 2 * steps * cut * sums.magnitudes
    excess = (one - other).abs() / limit.clamp(min=torch.finfo(torch.float32).tiny)
    usual = 2 * steps**0.5 * cut * sums.magnitudes
    likely = (usual / (step / 2 * one.abs()).clamp(min=1e-300)).clamp(max=1).mean()
    differ = int((one != other).sum())
    worst = float(excess.nan_to_num(torch.inf).max())
    return Apart(worst, differ, differ / one.numel(), float(likely))


def _compared(bench: Bench, products: Products, name: str, cases: Iterator[Case]) -> Iterator[Row]:
    worst, seen, worst_case = 0.0, [], ""
    for case, sample, ours, theirs in cases:
        for what, sums in reach(bench, sample, products).items():
            if not ours[what].numel():
                continue
            seen.append(apart(ours[what], theirs[what], sums))
            if seen[-1].excess > worst:
                worst, worst_case = seen[-1].excess, f"{what}, {case}"
    crossed = [one for one in seen if one.share > one.likely]
    share, limit = max((one.share, one.likely) for one in crossed or seen)
    summary = f"{worst:.2g} of the tolerance ({worst_case}), {100 * share:.2g} % differ"
    yield Row(
        f"{name}: y, dx, dw",
        summary if worst_case else "all alike",
        f"at most 1, and {100 * limit:.2g} %: the order of additions",
        worst <= 1 and not crossed,
    )


def pair(sample: Layer, products: Products) -> Iterator[EmulatedLinear]:
    """Yield the emulator's layer and TE's, with the same weight and products."""
    for kind in (EmulatedLinear, NativeLinear):
        linear = nn.Linear(sample.w.shape[1], sample.w.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(sample.w.float())
        clock = Clock(0)
        own = [Draws(clock)] if kind is NativeLinear else []
        layer = kind(linear, "blocks.0.a", clock, torch.bfloat16, *own)
        layer.products = products
        yield layer


def computed(layer: EmulatedLinear, sample: Layer) -> dict[str, Tensor]:
    """Return y, dx and dw of a layer; with delayed scaling those of a second step, scaled by the first's
    amax."""
    delayed = "fp8_delayed" in families([layer.products])
    for step in range(1 + delayed):
        layer.clock.step = step
        layer.zero_grad()
        x = sample.x.clone().requires_grad_()
        y = layer(x)
        y.backward(sample.dy)
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad}


def grouped(
    samples: Sequence[Layer], products: Products, kind: type[EmulatedExpert]
) -> list[dict[str, Tensor]]:
    """Return y, dx and dw of experts, a sample each, whose weights one tensor holds."""
    module, clock = nn.Module(), Clock(0)
    module.is_transposed = False
    module.packed = nn.Parameter(torch.stack([sample.w for sample in samples]).float())
    own = {"draws": Draws(clock)} if kind is NativeExpert else {}
    layers = [
        kind(module, "packed", number, "all", f"blocks.0.a.{number}.up", clock, torch.bfloat16, **own)
        for number in range(len(samples))
    ]
    for layer in layers:
        layer.products = products
    counts = [len(sample.x) for sample in samples]
    x = torch.cat([sample.x for sample in samples]).requires_grad_()
    y = layers[0].group(layers)(x, counts)
    y.backward(torch.cat([sample.dy for sample in samples]))
    each = zip(y.detach().split(counts), x.grad.split(counts), module.packed.grad, strict=True)
    return [dict(zip(("y", "dx", "dw"), of_one, strict=True)) for of_one in each]


def reach(bench: Bench, sample: Layer, products: Products) -> dict[str, Sums]:
    layer, given, sums = next(pair(sample, products)), sources(*sample), {}
    for what, slots in PAIRS.items():
        spec = getattr(products, slots[0].partition(".")[0])
        made = (layer.operand(given[slot], slot, products.slot(slot), spec.hadamard) for slot in slots)
        a, b = (sum(part.dequantize() for part in parts).abs().double() for parts in made)
        fast = bench.fast_sums and what == "y" and spec.x is not None and spec.x.scale is None
        sums[what] = Sums(a @ b.t(), a.shape[1], fast)
    return sums


def draw_sample(shape: tuple[int, int, int], seed: int, device: torch.device) -> Layer:
    """Return normal bf16 values at the scale of a trained layer, for `shape`: tokens, input features, output
    features. Every sixteenth token is thirty times larger."""
    tokens, inputs, outputs = shape
    g, sizes = torch.Generator().manual_seed(seed), ((outputs, inputs), (tokens, inputs), (tokens, outputs))
    w, x, dy = (torch.randn(size, generator=g) for size in sizes)
    x[::16] *= 30
    return Layer(*(z.bfloat16().to(device) for z in (x, w * inputs**-0.5, dy * 1e-3)))
