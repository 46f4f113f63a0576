"""Number formats: the one list of what elements and block scales can be. A line here is all that a new format takes.

A small float is a grid: its values lie `step` apart, and the step doubles with every power of two. E2M1 has one stored bit of mantissa
and its smallest normal at 2^0, so its magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6. From a format's line follow the words that a recipe
accepts, how values are rounded, which operands count as FP4, how many bits they take, and when a product needs fp32 operands. The
magnitudes that the line must give are written out, independently, in tests/oracles/grids.py. Torch is imported only to compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, log2
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A small float: `mantissa` stored bits, smallest normal 2^`emin`, largest magnitude `max`."""

    mantissa: int
    emin: int
    max: float
    bits: int
    """Bits of one value in memory, the sign included if there is one."""
    dtype: str | None = None
    """Torch's name of the type that holds it; None if torch has none."""
    zero: bool = True
    """Whether 0 can be represented."""

    @property
    def significant(self) -> int:
        """Significant bits of a value: those stored, and the leading one."""
        return self.mantissa + 1

    @property
    def top_power(self) -> float:
        """The largest power of two on the grid."""
        return 2.0 ** floor(log2(self.max))

    def step(self, y: Tensor) -> Tensor:
        """The distance between the two neighbours of each value (fp32, any shape): a power of two, so dividing by it is exact."""
        import torch

        exponent = (y.view(torch.int32) & 0x7F800000).clamp_(min=(self.emin + 127) << 23)
        return exponent.sub_(self.mantissa << 23).view(torch.float32)


ELEMENTS = {
    "e2m1": Format(mantissa=1, emin=0, max=6.0, bits=4, dtype="float4_e2m1fn_x2"),
    "e1m2": Format(
        mantissa=2, emin=0, max=1.75, bits=4
    ),  # multiples of 1/4; a power of two more or less is the scale's business
    "int4": Format(mantissa=2, emin=2, max=7.0, bits=4),  # symmetric: -8 is not used
    "e3m0": Format(
        mantissa=0, emin=-2, max=16.0, bits=4
    ),  # 0 and 2^-2 ... 2^4: code 0 is zero, seven powers of two
    "e4m3": Format(
        mantissa=3, emin=-6, max=448.0, bits=8, dtype="float8_e4m3fn"
    ),  # OCP's finite-and-NaN variant
    "e5m2": Format(mantissa=2, emin=-14, max=57344.0, bits=8, dtype="float8_e5m2"),
}
SCALES = {
    "e4m3": ELEMENTS["e4m3"],
    # 1.875 * 2^15: its top exponent is reserved (arXiv 2609.02846, eq. 3).
    "ue5m3": Format(mantissa=3, emin=-14, max=61440.0, bits=8),
    "e8m0": Format(
        mantissa=0, emin=-126, max=2.0**127, bits=8, dtype="float8_e8m0fnu", zero=False
    ),  # its smallest is 2^-127
    "bf16": Format(mantissa=7, emin=-126, max=3.3895313892515355e38, bits=16, dtype="bfloat16"),
    "fp32": Format(mantissa=23, emin=-126, max=3.4028234663852886e38, bits=32, dtype="float32"),
}
