"""Products of one linear layer by the reference: y, dx, dw in fp64, and the bound on a right result's error.

Operands are quantised by the reference path, their exact values multiplied in fp64, and the tensor scales
applied outside the sum. What a right implementation may differ by is the order of fp32 additions, the
rounding of the tensor scales, and one rounding of the result to its dtype.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ablate.numerics.philox import Clock, site
from ablate.numerics.product import alpha
from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.spec import Hadamard, Quant
from ablate.recipes.recipe import FORWARD_COPY, Products

OPERANDS = {"y": ("x", "w"), "dx": ("dy", "w of dx"), "dw": ("dy of dw", "x of dw")}
"""Operands of each product, in words."""
FACTORS = 8
"""fp32 roundings of the tensor scales, beside those of the sum."""
HALF_ULP = {torch.bfloat16: 8, torch.float16: 11}
"""Significant bits of a result's dtype: half an ulp of y in [2^e, 2^(e+1)) is 2^(e - bits)."""


@dataclass(frozen=True)
class Exact:
    """Result of one product: fp64, with the sum of the magnitudes of its terms."""

    values: Tensor
    magnitudes: Tensor
    operands: tuple[Operand, Operand]
    """[M, K] and [N, K]."""

    @property
    def terms(self) -> int:
        """Length of the contraction."""
        return max(operand.values.shape[1] for operand in self.operands)

    def far(self, got: Tensor) -> Tensor:
        """Return where a result is not what fp32 additions in some order, rounded once, can give."""
        additions = (self.terms + FACTORS) * 2.0**-24 * self.magnitudes + 2.0**-126
        allowed = additions
        if got.dtype in HALF_ULP:
            exponent = torch.floor(torch.log2((self.values.abs() + additions).clamp(min=2.0**-126)))
            allowed = additions + 2.0 ** (exponent - HALF_ULP[got.dtype])
        return ~((got.double() - self.values).abs() <= allowed)


@dataclass(frozen=True)
class Operands:
    """Quantised operands of the three products, each as [rows, contraction]."""

    x: Operand
    w: Operand
    g: Operand
    wt: Operand
    gt: Operand
    xt: Operand


def cast(z: Tensor, quant: Quant | None, rotation: Hadamard | None, seed: int, slot: str) -> Operand:
    """Return one operand of a product, z [rows, contraction]."""
    if quant is None:
        return Operand(z)
    return quantize(z, quant, rotation=rotation, clock=Clock(seed), where=site("conform", slot))


def operands(products: Products, x: Tensor, w: Tensor, dy: Tensor, seed: int = 0) -> Operands:
    """Quantise x [tokens, in], w [out, in] and dy [tokens, out] for the three products."""
    fprop, dgrad, wgrad = products.fprop, products.dgrad, products.wgrad
    x_kept, w_kept = kept(products, x, w, seed)
    return Operands(
        cast(x, fprop.x, fprop.hadamard, seed, "fprop.x"),
        cast(w, fprop.w, fprop.hadamard, seed, "fprop.w"),
        cast(dy, dgrad.g, dgrad.hadamard, seed, "dgrad.g"),
        cast(w_kept.t(), dgrad.w, dgrad.hadamard, seed, "dgrad.w"),
        cast(dy.t(), wgrad.g, wgrad.hadamard, seed, "wgrad.g"),
        cast(x_kept.t(), wgrad.x, wgrad.hadamard, seed, "wgrad.x"),
    )


def kept(products: Products, x: Tensor, w: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return what the backward pass casts for x and w: themselves, or the forward pass's copies in values.

    The forward pass is taken as not rotated.
    """
    made = []
    for z, slot in ((x, "wgrad.x"), (w, "dgrad.w")):
        quant, forward = products.slot(slot), FORWARD_COPY[slot]
        if products.dequantised(slot) or (quant is not None and quant.from_forward):
            copy = cast(z, products.slot(forward), None, seed, forward).dequantize()[:, : z.shape[1]]
            z = copy if quant is not None and quant.source == "forward" else copy.bfloat16()
        made.append(z)
    return made[0], made[1]


def multiply(a: Operand, b: Operand) -> Exact:
    """Return a b^T in fp64 with its magnitudes; a [M, K], b [N, K], the shorter padded with zeros."""
    width = max(a.values.shape[1], b.values.shape[1])
    left, right = (torch.nn.functional.pad(z.values.double(), (0, width - z.values.shape[1])) for z in (a, b))
    factor = alpha(a, b)
    scale = 1.0 if factor is None else factor.double()
    return Exact(left @ right.t() * scale, left.abs() @ right.abs().t() * scale, (a, b))


def exact_products(products: Products, x: Tensor, w: Tensor, dy: Tensor, seed: int = 0) -> dict[str, Exact]:
    """Return y, dx and dw of one layer by the reference."""
    return _multiplied(operands(products, x, w, dy, seed))


def plain_products(x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Exact]:
    """Return y, dx and dw without quantisation, in fp64."""
    return _multiplied(Operands(*(Operand(z.double()) for z in (x, w, dy, w.t(), dy.t(), x.t()))))


def _multiplied(made: Operands) -> dict[str, Exact]:
    return {
        "y": multiply(made.x, made.w),
        "dx": multiply(made.g, made.wt),
        "dw": multiply(made.gt, made.xt),
    }


def gain_and_error(got: Tensor, plain: Tensor) -> tuple[float, float]:
    """Return <got, plain>/<plain, plain> and the relative L2 distance of the two."""
    got, plain = got.double(), plain.double()
    power = float((plain * plain).sum()) or 1.0
    return float((got * plain).sum()) / power, float((got - plain).square().sum() / power) ** 0.5
