"""The words for one quantised operand and one rotation. It computes nothing and imports no torch, so that planning is instant.

Every class is frozen, hashable and closed: an unknown field or an impossible value is refused when it is built. "Off" is
always None: an operand that is not quantised has no Quant, a product that is not rotated has no Hadamard.
"""

from fractions import Fraction
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

VERSION = 1
"""Raise by hand when a change here or in a kernel changes any bit that a recipe computes: it is part of every trial's id."""


class Spec(BaseModel):
    """A frozen description: strict about types, closed to unknown fields, equal and hashable by value."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, ser_json_inf_nan="constants")


def argument(tagged: str) -> Fraction | None:
    """The number behind the colon of a tagged word, exactly as written: of "percentile:0.07" 7/100, of "amax" None.

    In binary 0.07 * 100 is above 7, and its ceiling 8.
    """
    _, colon, text = tagged.partition(":")
    return Fraction(text) if colon else None


def _statistic(value: str) -> str:
    name, colon, text = value.partition(":")
    if name == "amax" and not colon:
        return value
    try:
        if name == "percentile" and 0 < float(text) <= 1:
            return f"percentile:{float(text)!r}"
    except ValueError:
        pass
    raise ValueError("must be 'amax' or 'percentile:p' with p in (0, 1]")


Statistic = Annotated[str, AfterValidator(_statistic)]


class BlockScale(Spec):
    """The scale that the elements of one block share."""

    format: Literal["e4m3"] = "e4m3"


class Range(Spec):
    """Where a block's largest magnitude lands on the element grid."""

    headroom: float = Field(1.0, gt=0, le=4)
    """Multiplies the block scale: 1 as Transformer Engine does; 17/16 leaves stochastic rounding unbiased (NUMERICS section 3)."""


class Outer(Spec):
    """The second, tensor-wide level of the scaling."""

    granularity: Literal["tensor"] = "tensor"
    statistic: Statistic = "amax"
    """`amax`, or `percentile:p`: the order statistic ceil(p n) of the magnitudes of the copy that is quantised."""
    bound: float = Field(448.0, gt=0, le=448)
    """The largest block scale used; 448 is the maximum of E4M3."""


class Quant(Spec):
    """How one operand of one product is quantised. Blocks run along the contraction (the last dimension)."""

    element: Literal["e2m1"] = "e2m1"
    block: Literal["1x16", "16x16"] = "1x16"
    scale: BlockScale = BlockScale()
    range: Range = Range()
    outer: Outer = Outer()
    rounding: Literal["nearest", "stochastic"] = "nearest"
    bits: Literal[8, 16, 24] = 8
    """Random bits per element under stochastic rounding: P(up) = floor(2^bits f) / 2^bits. TE uses 8; 24 is exact."""

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that share one block scale."""
        rows, columns = self.block.split("x")
        return int(rows), int(columns)


class Hadamard(Spec):
    """A rotation of both operands of a product along the contraction; it cancels in the product."""

    size: Literal[4, 8, 16, 32, 64, 128] = 16
    signs: Literal["none", "fixed"] = "fixed"
    """`fixed`: Transformer Engine's one sign vector for all layers, steps and ranks, repeated to `size`."""
