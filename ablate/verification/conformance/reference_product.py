"""Products of one linear layer by the reference: y, dx, dw in fp64, and the bound on a right result's error.

Operands are quantised by the reference path, their exact values multiplied in fp64, and the tensor scales
applied outside the sum. What a right implementation may differ by is the order of fp32 additions, the
rounding of the tensor scales, and one rounding of the result to its dtype.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from ablate.numerics.philox import Clock, site
from ablate.numerics.product import alpha
from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.spec import Hadamard, Quant
from ablate.recipes.recipe import DIRECTIONS, FORWARD_COPY, SLOTS, Products
from ablate.training.operand_errors import sources
from ablate.verification.conformance.inputs import to_nearest

PAIRS = {"y": SLOTS[0:2], "dx": SLOTS[2:4], "dw": SLOTS[4:6]}
"""Slots of the two operands of each product."""
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


def quantisers(products: Products) -> dict[str, tuple[Quant, Hadamard | None]]:
    """Return the quantiser of each quantised operand with the rotation of its product, by slot."""
    rotations = {name: getattr(products, name).hadamard for name in DIRECTIONS["all"]}
    return {slot: (quant, rotations[slot.partition(".")[0]]) for slot, quant in products.quantised()}


def rounded_to_nearest(products: Products, slots: Collection[str] = SLOTS) -> Products:
    """Return the products with stochastic rounding replaced by rounding to nearest, in some operands."""
    drawn = (one for one in products.quantised() if one[0] in slots and one[1].rounding == "stochastic")
    return products.changed({slot: to_nearest(quant) for slot, quant in drawn})


def _cast(z: Tensor, how: tuple[Quant, Hadamard | None] | None, seed: int, slot: str) -> Operand:
    if how is None:
        return Operand(z)
    return quantize(z, how[0], rotation=how[1], clock=Clock(seed), where=site("conform", slot))


def operands(products: Products, x: Tensor, w: Tensor, dy: Tensor, seed: int = 0) -> dict[str, Operand]:
    """Quantise x [tokens, in], w [out, in] and dy [tokens, out] for the three products, by slot. The backward
    pass casts x and w, or, if the recipe says so, the forward pass's copies of them in values. The forward
    pass is then taken as not rotated."""
    given, cast = sources(x, w, dy), quantisers(products)
    for slot, forward in FORWARD_COPY.items():
        quant = products.slot(slot)
        if products.dequantised(slot) or (quant is not None and quant.from_forward):
            z, plain = given[forward], products.slot(forward)
            copied = _cast(z, None if plain is None else (plain, None), seed, forward)
            copy = copied.dequantize()[:, : z.shape[1]]
            given[slot] = (copy if quant is not None and quant.source == "forward" else copy.bfloat16()).t()
    return {slot: _cast(z, cast.get(slot), seed, slot) for slot, z in given.items()}


def multiply(a: Operand, b: Operand) -> Exact:
    """Return a b^T in fp64 with its magnitudes; a [M, K], b [N, K], the shorter padded with zeros."""
    width = max(a.values.shape[1], b.values.shape[1])
    left, right = (torch.nn.functional.pad(z.values.double(), (0, width - z.values.shape[1])) for z in (a, b))
    factor = alpha(a, b)
    scale = 1.0 if factor is None else factor.double()
    return Exact(left @ right.t() * scale, left.abs() @ right.abs().t() * scale, (a, b))


def exact_products(products: Products, x: Tensor, w: Tensor, dy: Tensor, seed: int = 0) -> dict[str, Exact]:
    """Return y, dx and dw of one layer by the reference."""
    made = operands(products, x, w, dy, seed)
    return {key: multiply(made[a], made[b]) for key, (a, b) in PAIRS.items()}


def plain_products(x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Exact]:
    """Return y, dx and dw without quantisation, in fp64."""
    return exact_products(Products(), x.double(), w.double(), dy.double())


def gain_and_error(got: Tensor, plain: Tensor) -> tuple[float, float]:
    """Return <got, plain>/<plain, plain> and the relative L2 distance of the two."""
    got, plain = got.double(), plain.double()
    power = float((plain * plain).sum()) or 1.0
    return float((got * plain).sum()) / power, float((got - plain).square().sum() / power) ** 0.5
