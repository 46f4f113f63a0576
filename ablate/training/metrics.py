"""Metrics of a moment of training: errors of operands, noise of gradients, oscillation of weights, memory.

They are functions of tensors; the training loop decides when to measure them. A metric of one operand of one
layer has its function and its entry in operand_metrics.py.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import psutil
import torch
from torch import Tensor, nn

from ablate import provenance
from ablate.engines.expert_layers import loads as loads_of
from ablate.engines.product_errors import ProductError, of_gradients, of_output
from ablate.engines.products import Casting, Kept, Probe
from ablate.engines.ranks import whole
from ablate.engines.routing import Recorder
from ablate.errors import nearest
from ablate.numerics.census import census
from ablate.numerics.formats import element_format
from ablate.numerics.philox import Clock, site
from ablate.numerics.product import MODES, mode
from ablate.numerics.product_error import tiles
from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.spec import Quant
from ablate.recipes.recipe import SLOTS, Products, Recipe
from ablate.training.metric_names import (
    ARITHMETIC,
    FLIPPED,
    PRODUCT_BITS,
    PRODUCTS,
    SQUARED_BIAS,
    TOKENS_FLIPPED,
    TOKENS_MEDIAN,
    TOKENS_MIN,
    VARIANCE,
    Name,
    parse,
)
from ablate.training.operand_metrics import OPERAND_METRICS


class Measurements(dict[str, float]):
    """Measurements by name. Printed are those that belong to no operand, and each operand's SQNR over all
    layers. A model of 100 layers has thousands of others."""

    def __repr__(self) -> str:
        names = {text: parse(text) for text in self}
        shown = [
            text
            for text, name in names.items()
            if name.slot is None or (name.layer is None and name.metric == "sqnr_db")
        ]
        rest = len(self) - len(shown)
        more = [f"and {rest:,} more by operand and layer: sorted(run.metrics()) has their names"] * bool(rest)
        return "\n".join([*(f"{text}: {self[text]:.4g}" for text in shown), *more])


def quantisation(operand: Operand) -> dict[str, float]:
    """Return every metric of `OPERAND_METRICS` of an operand that kept its source; NaN for those that are
    undefined."""
    seen = census(operand)
    return {name: metric.measure(operand, seen) for name, metric in OPERAND_METRICS.items()}


@dataclass(frozen=True)
class Quantised:
    """A matrix, quantised as a recipe quantises an operand (`ablate.quantize`). If the product is rotated,
    all of it is of the rotated matrix."""

    values: Tensor
    """Dequantised values, fp32 [rows, contraction]; the contraction is padded by zeros to whole blocks."""
    codes: Tensor
    """Elements as the format holds them, on its grid: of e2m1 multiples of 0.5 up to 6."""
    scales: Tensor | None
    """Block scales, fp32 [rows / tile rows, contraction / tile columns]; None without block scales."""
    amax: Tensor | None
    """Outer statistic, fp32, a scalar or [rows, 1]; None without an outer scale."""
    errors: Mapping[str, float]
    """Metrics of this operand, as telemetry records them: `sqnr_db`, `zero_frac`, ..."""
    operand: Operand
    """The operand as a product takes it."""


def quantised(
    x: Tensor, spec: Recipe | Quant, slot: str, *, seed: int = 0, step: int = 0, layer: str = ""
) -> Quantised:
    """Quantise one matrix; `ablate.quantize` has the arguments' meaning."""
    if slot not in SLOTS:
        raise ValueError(f"slot {slot!r}: no such operand; {nearest(slot, SLOTS)}")
    if isinstance(spec, Recipe):
        quant, rotation = spec.slot(slot), getattr(spec, slot.partition(".")[0]).hadamard
    else:
        quant, rotation = spec, None
    if quant is None:
        raise ValueError(f"slot {slot!r}: this recipe leaves it in high precision")
    if not x.ndim or not x.numel():
        raise ValueError(f"x of shape {list(x.shape)} is not a matrix: give [rows, contraction], not empty")
    operand = quantize(
        x.reshape(-1, x.shape[-1]),
        quant,
        rotation=rotation,
        clock=Clock(seed, step=step),
        where=site(layer, slot),
        product=site(layer, slot.partition(".")[0]),
        keep=True,
    )
    scales = operand.block_scale
    return Quantised(
        operand.dequantize(),
        operand.codes,
        None if scales is None else scales[:, 0, :, 0],
        operand.amax,
        quantisation(operand),
        operand,
    )


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients of parameters, of all ranks; zeros for one that the loss does not depend on."""
    return [whole(torch.zeros_like(p) if p.grad is None else p.grad) for p in parameters]


def gradient_noise(gradient: Sequence[Tensor], reference: Sequence[Tensor]) -> dict[str, float]:
    """Compare a gradient, tensors in any shapes, with the one that the same batch gives without quantisation.

    Return `grad/cosine_to_bf16`, the cosine of the two, and `grad/noise_ratio`, the reference's norm over
    that of the difference, both computed in fp64; {} if a norm is 0 or not finite. "FP4 All the Way" leaves
    FP4 when the noise ratio falls below sqrt(3) (arXiv 2505.19115).
    """

    def inner(a: Iterable[Tensor], b: Iterable[Tensor]) -> float:
        return math.fsum(
            torch.vdot(x.double().flatten(), y.double().flatten()).item() for x, y in zip(a, b, strict=True)
        )

    norm, reference_norm = math.sqrt(inner(gradient, gradient)), math.sqrt(inner(reference, reference))
    differences = (g - r for g, r in zip(gradient, reference, strict=True))  # one at a time: 4 bytes a weight
    noise = math.sqrt(math.fsum(inner([difference], [difference]) for difference in differences))
    if not all(0 < size < math.inf for size in (norm, reference_norm, noise)):
        return {}
    return {
        "grad/cosine_to_bf16": inner(gradient, reference) / (norm * reference_norm),
        "grad/noise_ratio": reference_norm / noise,
    }


_PART = 1 << 22
"""Elements of a gradient that are in fp64 at the same time: an embedding may have hundreds of millions."""


def gradient_split(draws: Sequence[Sequence[Tensor]], reference: Sequence[Tensor]) -> dict[str, float]:
    """Return variance and squared bias of a gradient under its recipe's random rounding, apart.

    For k independent draws g_i of the gradient of one batch, g without quantisation and d_i = g_i - g, with A
    = sum |d_i|^2 and B = |sum d_i|^2, the estimates are U-statistics, unbiased at every k above 1:

        variance      E|g_i - E g_i|^2   (A - B/k) / (k - 1)
        squared bias  |E g_i - g|^2      (B - A) / (k (k - 1)): the mean of <d_i, d_j> over pairs i, j

    They add up to A/k, the mean squared error. A small squared bias may come out below zero. More draws
    average the variance out of an optimizer's step; nothing averages out the bias.

    Return `grad/variance` and `grad/squared_bias`, both over |g|^2; {} if that or a result is not finite or
    0. A single draw is that of a recipe without random rounding, whose variance is 0.
    """
    k, parts = len(draws), []
    for tensors in zip(reference, *draws, strict=True):
        for exact, *drawn in zip(*(x.flatten().split(_PART) for x in tensors), strict=True):
            own = exact.double()
            differences = torch.stack([each.double() - own for each in drawn])
            energies = differences.square(), differences.sum(0).square(), own.square()
            parts.append(torch.stack([each.sum() for each in energies]))
    sums, total, power = torch.stack(parts).sum(0).cpu().tolist()
    if not (0 < power < math.inf and math.isfinite(sums)):
        return {}
    variance = (sums - total / k) / (k - 1) if k > 1 else 0.0
    return {VARIANCE: variance / power, SQUARED_BIAS: (sums / k - variance) / power}


def _codes(cast: Operand) -> Tensor:
    """Return the codes that a quantiser kept, or those of a GPU's: zeros in a block whose scale is zero."""
    if cast.codes is not None or cast.block_scale is None:
        return cast.values if cast.codes is None else cast.codes
    return (tiles(cast, cast.values) / cast.block_scale).nan_to_num(0.0)


Casts = Mapping[str, tuple[Tensor, Operand]]
"""Weights, fp32 [out, in], and their quantised copies, by layer."""


def keep_casts(casts: Iterable[tuple[str, tuple[Tensor, Operand]]]) -> Casts:
    """Return copies of weights, and of their casts (`Engine.weight_casts`, made one after the other) what
    `oscillation` reads: 8 bytes a weight in fp32."""
    return {name: (weight.clone(), _compact(cast)) for name, (weight, cast) in casts}


def _compact(cast: Operand) -> Operand:
    """Return a cast without its source and with its codes in bf16, if that holds them exactly."""
    quant = cast.quant
    exact = quant is not None and quant.own is None and element_format(quant.element).mantissa < 8
    codes = cast.codes.to(torch.bfloat16) if exact and cast.codes is not None else cast.codes
    return replace(cast, source=None, scaled=None, block_amax=None, codes=codes)


def _length(change: Tensor) -> float:
    return torch.linalg.vector_norm(change, 1, dtype=torch.float64).item()


def oscillation(before: Casts, after: Iterable[tuple[str, tuple[Tensor, Operand]]]) -> dict[str, float]:
    """Return the effect of one optimizer step on quantised weights: `weights/flipped`, the share of elements
    whose code changed, and `weights/oscillation`, sum |dQ(w)| over sum |dw|, left out if no weight changed.

    The casts before the step have kept their codes. `after` has the same layers in the same order; each is
    dropped before the next is made.
    """
    flipped = elements = 0
    way = quantised_way = 0.0
    for (name, (w, cast)), (new_name, (new_w, new_cast)) in zip(before.items(), after, strict=True):
        if name != new_name:
            raise ValueError(f"casts of {name} before the step and of {new_name} after it")
        flipped += (_codes(cast) != _codes(new_cast)).sum().item()
        elements += cast.values.numel()
        way += _length(new_w - w)
        quantised_way += _length(new_cast.dequantize() - cast.dequantize())
    return {"weights/flipped": flipped / elements} | (
        {"weights/oscillation": quantised_way / way} if way else {}
    )


def routes(
    own: Recorder,
    exact: Recorder,
    micro_batches: int = 1,
    sums: Callable[..., Sequence[float]] = lambda *numbers: numbers,
) -> dict[str, float]:
    """Compare the experts of a step's tokens with those of the same batches and weights without quantisation.

    Return `routing/flipped`, the share of pairs of a token and one of its experts that differ, whatever their
    order; `routing/tokens_flipped`, the share of tokens with such a pair in any layer; `routing/load`, the
    largest load of an expert over the mean, of the worst layer; and `routing/tokens_median` and
    `routing/tokens_min`, over the experts of all layers, the tokens of an expert per micro-batch.
    `micro_batches` counts those of all ranks; `sums` returns each number's sum over the ranks.
    """
    if not own.index:
        return {}
    pairs: list[Tensor] = []
    tokens: dict[tuple[int, int, int], Tensor] = {}
    loads: dict[str, Tensor] = {}
    for (micro_batch, name, call), index in own.index.items():
        other = exact.index[micro_batch, name, call]
        flipped = (index.unsqueeze(2) != other.unsqueeze(1)).all(2)
        pairs.append(flipped.flatten())
        batch = micro_batch, call, len(index)
        tokens[batch] = flipped.any(1) | tokens.get(batch, flipped.any(1))
        count = own.engine.experts[name].module.num_experts
        loads[name] = loads_of(index, count) + loads.get(name, 0)
    differing = torch.cat(pairs), torch.cat([*tokens.values()])
    counts = torch.cat([torch.stack([each.sum() for each in differing]), *loads.values()]).tolist()
    of_pairs, of_tokens, every_pair, every_token, *experts = sums(
        *counts[:2], *map(len, differing), *counts[2:]
    )
    layers = torch.tensor(experts, dtype=torch.float64).split([len(load) for load in loads.values()])
    return {
        FLIPPED: of_pairs / every_pair,
        TOKENS_FLIPPED: of_tokens / every_token,
        "routing/load": max((layer.max() / layer.mean()).item() for layer in layers),
        TOKENS_MEDIAN: median(experts) / micro_batches,
        TOKENS_MIN: min(experts) / micro_batches,
    }


PRODUCT_MEANS = ("gain", "rel_l2")
"""Metrics of a product that are also recorded as the mean over layers."""


def product_metrics(error: ProductError) -> dict[str, float]:
    """Return the metrics of one product of one layer: `gain` and `rel_l2`, and of each what the recipe gives
    (`_expected`), half the width of the interval around that (`_margin`), and the distance from it in
    half-widths (`_beyond`)."""
    own, result = error.expected(), dict[str, float]()
    beyond = own.beyond(error.measured)
    for name in PRODUCT_MEANS:
        result[name], result[f"{name}_expected"] = getattr(error.measured, name), getattr(own, name)
        result[f"{name}_margin"], result[f"{name}_beyond"] = getattr(own, f"{name}_margin"), beyond[name]
    return result


class SlotErrors(Probe):
    """Collector of the errors of a step: of every operand, and of every product of its first micro-batch,
    unless `products` is False: their expected errors cost further passes."""

    def __init__(self, products: bool = True) -> None:
        self._products = products
        self._seen: dict[tuple[str, str, str], dict[str, float]] = {}
        self._inputs: dict[str, tuple[Tensor, Tensor]] = {}

    def operand(self, layer: str, slot: str, operand: Operand) -> None:
        self._seen["quant", slot, layer] = quantisation(operand)

    def output(self, layer: Casting, products: Products, x: Tensor, w: Tensor, y: Tensor) -> None:
        """Measure fprop, and keep x and w if the backward pass of the recipe gets copies of them."""
        if not self._measures(layer):
            return
        if products.backward_needs:
            self._inputs[layer.name] = x, w
        self._add(layer, of_output(layer, products, x, w, y))

    def gradients(
        self,
        layer: Casting,
        products: Products,
        kept: Kept,
        dy: Tensor,
        results: tuple[Tensor | None, Tensor | None],
    ) -> None:
        x, w = self._inputs.pop(layer.name, (None, None)) if products.backward_needs else kept[:2]
        if self._measures(layer) and x is not None and w is not None:
            self._add(layer, of_gradients(layer, products, x, w, kept, dy, results))

    def _measures(self, layer: Casting) -> bool:
        return self._products and layer.clock.micro_batch == 0

    def _add(self, layer: Casting, errors: Iterable[ProductError]) -> None:
        for error in errors:
            self._seen[PRODUCTS, error.product, layer.name] = product_metrics(error)

    def metrics(self) -> dict[str, float]:
        """Return `quant/<slot>/<layer>/<name>` and `gemm/<product>/<layer>/<name>` of each layer, and their
        means over layers, without those of what products are expected to be. Undefined values are left out of
        both."""
        result: dict[str, float] = {}
        means: defaultdict[str, list[float]] = defaultdict(list)
        for (family, slot, layer), values in self._seen.items():
            for name, value in values.items():
                if math.isfinite(value) or (family != PRODUCTS and not math.isnan(value)):
                    result[str(Name(family, slot, layer, name))] = value
                    if family != PRODUCTS or name in PRODUCT_MEANS:
                        means[str(Name(family, slot, None, name))].append(value)
        return result | {name: math.fsum(values) / len(values) for name, values in means.items()}


def of_machine(device: torch.device) -> dict[str, float]:
    """Return `memory`, the number of the kind of processor, and on a CPU the bits of what it multiplies for a
    bf16 product (`product.MODES`)."""
    bits = {} if device.type != "cpu" else {PRODUCT_BITS: float(MODES[mode()])}
    return memory(device) | bits | {ARITHMETIC: provenance.arithmetic(device.type)}


def memory(device: torch.device) -> dict[str, float]:
    """Return the bytes that the process holds, and on a GPU the peaks of the allocator, all in bytes."""
    result = {"memory/rss": float(psutil.Process().memory_info().rss)}
    if device.type == "cuda":
        result["memory/peak_allocated"] = float(torch.cuda.max_memory_allocated(device))
        result["memory/peak_reserved"] = float(torch.cuda.max_memory_reserved(device))
    return result
