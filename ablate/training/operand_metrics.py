"""Metrics of one quantised operand, which telemetry records of every operand of every layer.

An operand is a tensor that enters a product: the source x (rotated, padded) and its quantised values q. The
training loop measures all metrics of `OPERAND_METRICS` every `telemetry.every` steps. It records each as
`quant/<slot>/<layer>/<metric>`, and its mean over layers as `quant/<slot>/<metric>`. To add one, write a
function of the operand and its census (sums and counts, made in one pass) and enter it at the foot of this
file, with an alarm if some of its values are wrong; docs/project/extending.md has the steps. NaN means that
the metric is undefined for this operand; it is not recorded.

Importing this file does not import torch, since plans read the names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ablate.training.alarms import Alarm
from ablate.training.metric_names import PRODUCTS, each_layer

if TYPE_CHECKING:
    from ablate.numerics.census import Census
    from ablate.numerics.quantize import Operand


def sqnr_db(operand: Operand, seen: Census) -> float:
    """Return the signal to quantisation noise ratio in dB."""
    return 10 * math.log10(seen.power / seen.error) if seen.power and seen.error else math.nan


def rel_mse(operand: Operand, seen: Census) -> float:
    """Return the squared error over the power of x."""
    return seen.error / seen.power if seen.power else math.nan


def cosine(operand: Operand, seen: Census) -> float:
    """Return the cosine of x and q."""
    both = math.sqrt(seen.power) * math.sqrt(seen.quantised_power)
    return seen.inner / both if both else math.nan


def magnitude(operand: Operand, seen: Census) -> float:
    """Return <x, q> / <x, x>; 1 is unbiased."""
    return seen.inner / seen.power if seen.power else math.nan


def scale_clipped_frac(operand: Operand, seen: Census) -> float:
    """Return the fraction of block scales that should have been larger than their format allows."""
    return seen.scales_clipped / seen.blocks.numel()


def scale_zero_frac(operand: Operand, seen: Census) -> float:
    """Return the fraction of nonzero blocks whose scale is zero."""
    share = seen.filled / seen.blocks.numel()
    return seen.scales_zero / seen.blocks.numel() / share if share else 0.0


def scale_saturated_frac(operand: Operand, seen: Census) -> float:
    """Return the fraction of block scales at their bound."""
    return seen.scales_saturated / seen.blocks.numel()


def clipped_frac(operand: Operand, seen: Census) -> float:
    """Return the fraction of scaled elements beyond the grid by more than half its last step."""
    return math.nan if _without_grid(operand) else seen.clipped / seen.elements


def zero_frac(operand: Operand, seen: Census) -> float:
    """Return the fraction of elements that were nonzero and were quantised to zero."""
    return seen.zeros / seen.elements


def saturated_frac(operand: Operand, seen: Census) -> float:
    """Return the fraction of scaled elements beyond the grid."""
    return math.nan if _without_grid(operand) else seen.saturated / seen.elements


def blocks_saturated_frac(operand: Operand, seen: Census) -> float:
    """Return the fraction of blocks with any scaled element beyond the grid."""
    return math.nan if _without_grid(operand) else seen.blocks_saturated / seen.blocks.numel()


def dead_share(operand: Operand, seen: Census) -> float:
    """Return the share of the error's energy in elements that were quantised to zero (`parts_of_error`)."""
    return seen.dead / seen.error if seen.error else math.nan


def scale_share(operand: Operand, seen: Census) -> float:
    """Return the share of the error's energy that other scales would remove (chance: 3/n of n elements)."""
    return seen.scale_bias / seen.error if seen.error else math.nan


def grid_share(operand: Operand, seen: Census) -> float:
    """Return the rest of the error's energy: the distance to the points of the grid."""
    return (seen.error - seen.dead - seen.scale_bias) / seen.error if seen.error else math.nan


def crest(operand: Operand, seen: Census) -> float:
    """Return the median over blocks of largest |x| over root mean square, without blocks of zeros."""
    return seen.crest if seen.power else math.nan


def kurtosis(operand: Operand, seen: Census) -> float:
    """Return the kurtosis of x; 3 is Gaussian."""
    return seen.elements * seen.fourth / seen.power**2 if seen.power else math.nan


def mean_share(operand: Operand, seen: Census) -> float:
    """Return the share of the power of x that lies in the means of its columns, each over the rows."""
    return seen.mean_power / seen.power if seen.power else math.nan


def _without_grid(operand: Operand) -> bool:
    """Return True for an operand that a quantiser of the user's made: its grid is not known."""
    if operand.quant is None:
        raise ValueError("this operand is not quantised, so it has no quantisation error to measure")
    return operand.quant.own is not None


@dataclass(frozen=True)
class OperandMetric:
    """Metric of one operand, and the limit beyond which its value in a single layer is wrong, if any."""

    measure: Callable[[Operand, Census], float]
    alarm: Alarm | None = None


OPERAND_METRICS = {
    "sqnr_db": OperandMetric(sqnr_db),
    "rel_mse": OperandMetric(rel_mse),
    "cosine": OperandMetric(cosine),
    "magnitude": OperandMetric(magnitude),
    "scale_clipped_frac": OperandMetric(
        scale_clipped_frac,
        Alarm(
            each_layer("scale_clipped_frac"), "above", 0.05, "the outer scale saturated {:.0%} of the blocks"
        ),
    ),
    "scale_zero_frac": OperandMetric(
        scale_zero_frac,
        Alarm(
            each_layer("scale_zero_frac"),
            "above",
            0.05,
            "{:.0%} of the block scales rounded to zero, and their blocks with them",
        ),
    ),
    "scale_saturated_frac": OperandMetric(scale_saturated_frac),
    "clipped_frac": OperandMetric(
        clipped_frac,
        Alarm(each_layer("clipped_frac"), "above", 0.10, "{:.0%} of the elements lay far beyond the grid"),
    ),
    "zero_frac": OperandMetric(
        zero_frac, Alarm(each_layer("zero_frac"), "above", 0.50, "{:.0%} of the elements rounded to zero")
    ),
    "saturated_frac": OperandMetric(saturated_frac),
    "blocks_saturated_frac": OperandMetric(blocks_saturated_frac),
    "dead_share": OperandMetric(dead_share),
    "scale_share": OperandMetric(scale_share),
    "grid_share": OperandMetric(grid_share),
    "crest": OperandMetric(crest),
    "kurtosis": OperandMetric(kurtosis),
    "mean_share": OperandMetric(mean_share),
}
"""Metrics of an operand by name. Alarms are checked in this order: causes (scales) before their effects
(elements). Ordinary training in NVFP4 stays well below the limits (experiments/LOG.md)."""

ALARMS = (
    *(metric.alarm for metric in OPERAND_METRICS.values() if metric.alarm),
    Alarm(
        "grad/noise_ratio",
        "below",
        math.sqrt(3),
        "the gradient's norm is {:.2f} times its quantisation noise, "
        "below sqrt(3): FP4 may no longer help it",
    ),
    Alarm(
        each_layer("gain_beyond", PRODUCTS),
        "above",
        1,
        "the product's gain is {:.3g} half-widths of its interval off the recipe's: a factor is lost, or"
        " scales are in another layout",
    ),
    Alarm(
        each_layer("rel_l2_beyond", PRODUCTS),
        "above",
        1,
        "the product's error is {:.3g} half-widths of its interval off the recipe's: codes, scales or"
        " rounding are others",
    ),
    Alarm("nan/activation", "above", 0, "operands with a NaN or an infinity so far: {:.0f}"),
)
"""Alarms of every trial: those of operands, and those of metrics that metrics.py measures."""
