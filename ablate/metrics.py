"""What is measured in one training moment, by name. Functions of tensors; who asks and when is the loop's business."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import psutil
import torch
from torch import Tensor

from ablate.metric_names import Name, parse
from ablate.numerics.census import Census, census
from ablate.numerics.formats import ELEMENTS, SCALES
from ablate.numerics.quantize import Operand


def quantisation(operand: Operand) -> dict[str, float]:
    """Errors and censuses of one quantised operand that kept its source.

    `sqnr_db`, `rel_mse`, `cosine`, `magnitude` (1 = unbiased); fractions of elements that were not zero and are now, of scaled
    elements beyond the grid (`clipped`: by over half its last step), and of blocks with any beyond; of the blocks that are not zero,
    the fraction whose scale is; the fraction of block scales at their bound, and of those that should have been larger than their
    format allows. Of the source: median `crest` of a block (max over rms), `kurtosis` (3 = Gaussian), `mean_share` of the power that
    lies in the column means, each over the rows.
    """
    seen = census(operand)
    both = math.sqrt(seen.power) * math.sqrt(seen.quantised_power)
    return {
        "sqnr_db": 10 * math.log10(seen.power / seen.error) if seen.power and seen.error else math.nan,
        "rel_mse": seen.error / seen.power if seen.power else math.nan,
        "cosine": seen.inner / both if both else math.nan,
        "magnitude": seen.inner / seen.power if seen.power else math.nan,
        "zero_frac": seen.zeros / seen.elements,
        "saturated_frac": seen.saturated / seen.elements,
        "clipped_frac": seen.clipped / seen.elements,
        "blocks_saturated_frac": _share(seen.block_scaled > ELEMENTS[operand.quant.element].max),
        **_scale_census(operand, seen),
        **_shape(seen),
    }


def _scale_census(operand: Operand, seen: Census) -> dict[str, float]:
    quant, scale = operand.quant, operand.block_scale
    if scale is None:
        return {"scale_zero_frac": 0.0, "scale_saturated_frac": 0.0, "scale_clipped_frac": 0.0}
    top = SCALES[quant.scale.format].max
    bound = min(quant.outer.bound if quant.outer else math.inf, top)
    reach = top * ELEMENTS[quant.element].max / operand.divisor * (1.0 if operand.amax is None else operand.amax.reshape(-1, 1, 1, 1))
    largest = seen.blocks.view(scale.shape)
    clipped = (scale == top) & (largest > reach * (1 + 2**-4))  # half a step of E4M3 above is still nearest
    return {
        "scale_clipped_frac": _share(clipped),
        "scale_zero_frac": _share((scale == 0) & (largest > 0)) / filled if (filled := _share(largest > 0)) else 0.0,
        "scale_saturated_frac": _share(scale >= bound),
    }


def _share(where: Tensor) -> float:
    return where.count_nonzero().item() / where.numel()


def _shape(seen: Census) -> dict[str, float]:
    """How the source is distributed: what makes it hard to quantise."""
    if not seen.power:
        return {}
    crests = seen.blocks / (seen.block_power / seen.block_elements).sqrt()  # NaN for a block of zeros
    return {
        "crest": crests.nanmedian().item(),
        "kurtosis": seen.elements * seen.fourth / seen.power**2,
        "mean_share": seen.mean_power / seen.power,
    }


def gradient_noise(gradient: Sequence[Tensor], reference: Sequence[Tensor]) -> dict[str, float]:
    """The gradient beside the one that the same batch gives without quantisation: `grad/cosine_to_bf16`, and `grad/noise_ratio`,
    the reference's norm over that of the difference (below sqrt(3), "FP4 All the Way" leaves FP4: arXiv 2505.19115)."""

    def inner(a: Iterable[Tensor], b: Iterable[Tensor]) -> float:
        return math.fsum(torch.vdot(x.double().flatten(), y.double().flatten()).item() for x, y in zip(a, b, strict=True))

    norm, reference_norm = math.sqrt(inner(gradient, gradient)), math.sqrt(inner(reference, reference))
    difference = [g - r for g, r in zip(gradient, reference, strict=True)]
    noise = math.sqrt(inner(difference, difference))
    if not all(0 < size < math.inf for size in (norm, reference_norm, noise)):
        return {}
    return {"grad/cosine_to_bf16": inner(gradient, reference) / (norm * reference_norm), "grad/noise_ratio": reference_norm / noise}


Casts = Mapping[str, tuple[Tensor, Operand]]
"""Weights and their quantised copies, by layer."""


def oscillation(before: Casts, after: Casts) -> dict[str, float]:
    """What one optimizer step did to quantised weights: `weights/flipped`, the share of elements whose code changed, and
    `weights/oscillation`, sum |dQ(w)| over sum |dw|."""
    flipped = elements = 0
    way = quantised_way = 0.0
    for name, (w, cast) in before.items():
        new_w, new_cast = after[name]
        flipped += (cast.codes != new_cast.codes).sum().item()
        elements += cast.codes.numel()
        way += (new_w - w).abs().sum(dtype=torch.float64).item()
        quantised_way += (new_cast.dequantize() - cast.dequantize()).abs().sum(dtype=torch.float64).item()
    return {"weights/flipped": flipped / elements} | ({"weights/oscillation": quantised_way / way} if way else {})


_ALARMS = (
    ("scale_clipped_frac", 0.05, "the outer scale saturated {:.0%} of the blocks"),
    ("scale_zero_frac", 0.05, "{:.0%} of the block scales rounded to zero, and their blocks with them"),
    ("clipped_frac", 0.10, "{:.0%} of the elements lay far beyond the grid"),
    ("zero_frac", 0.50, "{:.0%} of the elements rounded to zero"),
)
"""Metric, the most that is usual, and what more of it means. Ordinary training in NVFP4 stays well below (experiments/LOG.md)."""
_FP4_LIMIT = math.sqrt(3)


def alarms(metrics: Mapping[str, float]) -> list[str]:
    """What is wrong in one record's metrics, each with its cause and its place, the worst layer of a slot for all."""
    found = []
    for name, limit, message in _ALARMS:
        worst: dict[str, tuple[float, str]] = {}
        for key, value in metrics.items():
            its = parse(key)
            if its.family == "quant" and its.layer is not None and its.metric == name and value > limit:
                worst[its.slot] = max(worst.get(its.slot, (0.0, "")), (value, its.layer))
        found += [f"{message.format(value)} in {layer} {slot}" for slot, (value, layer) in worst.items()]
    ratio = metrics.get("grad/noise_ratio", math.inf)
    if ratio < _FP4_LIMIT:
        found.append(f"the gradient's norm is {ratio:.2f} times its quantisation noise, below sqrt(3): FP4 may no longer help it")
    return found


class SlotErrors:
    """Collects `quantisation` of every operand of a step: by layer, and averaged over layers for each slot."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], dict[str, float]] = {}

    def __call__(self, layer: str, slot: str, operand: Operand) -> None:
        self._seen[slot, layer] = quantisation(operand)

    def metrics(self) -> dict[str, float]:
        """`quant/<slot>/<layer>/<name>` for each layer and `quant/<slot>/<name>`, their mean over the layers where defined."""
        result, by_slot = {}, defaultdict(list)
        for (slot, layer), values in self._seen.items():
            for name, value in values.items():
                if not math.isnan(value):
                    result[str(Name("quant", slot, layer, name))] = value
                    by_slot[str(Name("quant", slot, None, name))].append(value)
        return result | {name: math.fsum(values) / len(values) for name, values in by_slot.items()}


def memory(device: torch.device) -> dict[str, float]:
    """Bytes: what the process holds, and on a GPU the peaks of the allocator."""
    result = {"memory/rss": float(psutil.Process().memory_info().rss)}
    if device.type == "cuda":
        result["memory/peak_allocated"] = float(torch.cuda.max_memory_allocated(device))
        result["memory/peak_reserved"] = float(torch.cuda.max_memory_reserved(device))
    return result
