"""What is measured in one training moment, by name. Functions of tensors; who asks and when is the loop's business."""

import math
from collections import defaultdict

import psutil
import torch

from ablate.numerics.formats import ELEMENTS
from ablate.numerics.quantize import Operand


def quantisation(operand: Operand) -> dict[str, float]:
    """Errors and censuses of one quantised operand that kept its source.

    `sqnr_db`, `rel_mse`, `cosine`, `magnitude` (1 = unbiased); fractions of elements that were not zero and are now, and
    of scaled elements beyond the grid; of the blocks that are not zero, the fraction whose scale is;
    the fraction of block scales at their bound.
    """
    x, q = operand.source.double(), operand.dequantize().double()
    power, error = x.square().sum().item(), (x - q).square().sum().item()
    inner, q_power = (x * q).sum().item(), q.square().sum().item()
    top = ELEMENTS[operand.quant.element].max
    return {
        "sqnr_db": 10 * math.log10(power / error) if power and error else math.nan,
        "rel_mse": error / power if power else math.nan,
        "cosine": inner / math.sqrt(power * q_power) if power and q_power else math.nan,
        "magnitude": inner / power if power else math.nan,
        "zero_frac": ((q == 0) & (x != 0)).double().mean().item(),
        "saturated_frac": (operand.scaled.abs() > top).double().mean().item(),
        "scale_zero_frac": (operand.block_scale == 0)[operand.block_amax > 0].double().mean().item() if power else 0.0,
        "scale_saturated_frac": (operand.block_scale >= operand.quant.outer.bound).double().mean().item(),
    }


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
                    result[f"quant/{slot}/{layer}/{name}"] = value
                    by_slot[f"quant/{slot}/{name}"].append(value)
        return result | {name: math.fsum(values) / len(values) for name, values in by_slot.items()}


def memory(device: torch.device) -> dict[str, float]:
    """Bytes: what the process holds, and on a GPU the peaks of the allocator."""
    result = {"memory/rss": float(psutil.Process().memory_info().rss)}
    if device.type == "cuda":
        result["memory/peak_allocated"] = float(torch.cuda.max_memory_allocated(device))
        result["memory/peak_reserved"] = float(torch.cuda.max_memory_reserved(device))
    return result
