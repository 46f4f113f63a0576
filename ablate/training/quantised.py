"""One matrix, quantised as a recipe quantises an operand, with its errors: `ablate.quantize`."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ablate.errors import nearest
from ablate.numerics.philox import Clock, site
from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.spec import Quant
from ablate.recipes.recipe import SLOTS, Recipe
from ablate.training.metrics import quantisation


@dataclass(frozen=True)
class Quantised:
    """A quantised matrix. If the product is rotated, all of it is of the rotated matrix."""

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
