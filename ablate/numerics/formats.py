"""Number formats of elements and block scales: the only list of them.

A small float is a grid: neighbouring values are one `step` apart, and the step doubles with every power of
two. E2M1 stores one mantissa bit and its smallest normal is 2^0, so its magnitudes are 0, 0.5, 1, 1.5, 2, 3,
4 and 6.

Everything else follows from a format's entry: the words that a recipe accepts, how values are rounded, which
operands count as FP4, how many bits they take, and when a product needs fp32 operands. To add a format, add
one entry. tests/oracles/grids.py lists the magnitudes of every format independently, and
docs/reference/numerics.md (section 2) shows the same table. Torch is imported only to compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import floor, log2
from typing import TYPE_CHECKING

from ablate.numerics.own import Own

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Format:
    """Small float with `mantissa` stored bits, smallest normal 2^`emin` and largest magnitude `max`."""

    mantissa: int
    emin: int
    max: float
    bits: int
    """Bits of one value in memory, including the sign if there is one."""
    dtype: str | None = None
    """Torch's name of the type that holds it; None if torch has none."""
    zero: bool = True
    """True if the format has a zero. One without has no subnormals either, but for E8M0's 2^-127."""

    @property
    def significant(self) -> int:
        """Significant bits of a value: the stored mantissa and the leading bit."""
        return self.mantissa + 1

    @property
    def top_power(self) -> float:
        """Largest power of two on the grid."""
        return 2.0 ** floor(log2(self.max))

    def step(self, y: Tensor) -> Tensor:
        """Return the distance between the two grid neighbours of each value.

        Args:
            y: fp32 tensor of any shape; the sign is ignored.

        Returns:
            fp32 tensor like `y`. Every entry is a power of two, so dividing by it is exact.
        """
        import torch

        exponent = (y.view(torch.int32) & 0x7F800000).clamp_(min=(self.emin + 127) << 23)
        return exponent.sub_(self.mantissa << 23).view(torch.float32)

    def neighbours(self, magnitude: Tensor) -> tuple[Tensor, Tensor]:
        """Return the grid values at or below and at or above each magnitude; the largest beyond the grid.

        Args:
            magnitude: non-negative fp32 tensor of any shape.

        Returns:
            Two fp32 tensors like `magnitude`; NaN stays NaN.
        """
        inside = magnitude.clamp(max=self.max)
        step = self.step(inside)
        steps = inside / step
        return steps.floor() * step, steps.ceil() * step


@dataclass(frozen=True)
class Levels(Format):
    """Grid of the user's, `own.Own`: any magnitudes, ascending from 0, and the same below 0."""

    values: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: tuple[float, ...]) -> Levels:
        """Return the grid of magnitudes that are fp32 numbers."""
        numerators = [value.as_integer_ratio()[0] for value in values if value]
        significant = max((above // (above & -above)).bit_length() for above in numerators)
        bits = (2 * len(values) - 1).bit_length()
        return cls(mantissa=significant - 1, emin=0, max=values[-1], bits=bits, values=values)

    def step(self, y: Tensor) -> Tensor:
        """Return the distance between the two neighbours, beyond the grid that of the last two."""
        lower, upper = self._around(y.abs())
        return upper - lower

    def neighbours(self, magnitude: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values at or below and at or above each magnitude; see `Format.neighbours`."""
        inside = magnitude.clamp(max=self.max)
        lower, upper = self._around(inside)
        lower = lower.where(inside < upper, upper)
        upper = upper.where(inside > lower, lower)
        odd = inside.isnan()
        return inside.where(odd, lower), inside.where(odd, upper)

    def even(self, magnitude: Tensor) -> Tensor:
        """Return True for each grid value whose code, its place in `values`, is even."""
        import torch

        return torch.searchsorted(self._levels(magnitude), magnitude.contiguous()) % 2 == 0

    def _levels(self, like: Tensor) -> Tensor:
        import torch

        return torch.tensor(self.values, dtype=torch.float32, device=like.device)

    def _around(self, magnitude: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends of the interval, closed below, that each magnitude lies in."""
        import torch

        levels = self._levels(magnitude)
        above = torch.searchsorted(levels, magnitude.contiguous(), right=True).clamp_(1, len(self.values) - 1)
        return levels[above - 1], levels[above]


ELEMENTS = {
    "e2m1": Format(mantissa=1, emin=0, max=6.0, bits=4, dtype="float4_e2m1fn_x2"),
    # Multiples of 1/4. The grid may be shifted by a power of two: the block scale absorbs the factor.
    "e1m2": Format(mantissa=2, emin=0, max=1.75, bits=4),
    # Symmetric: -8 is not used.
    "int4": Format(mantissa=2, emin=2, max=7.0, bits=4),
    # 0 and 2^-2 ... 2^4: code 0 is zero, the other seven codes are powers of two.
    "e3m0": Format(mantissa=0, emin=-2, max=16.0, bits=4),
    # OCP's six-bit elements, without NaN and infinities.
    "e2m3": Format(mantissa=3, emin=0, max=7.5, bits=6),
    "e3m2": Format(mantissa=2, emin=-2, max=28.0, bits=6),
    # OCP's variant with NaN and without infinities.
    "e4m3": Format(mantissa=3, emin=-6, max=448.0, bits=8, dtype="float8_e4m3fn"),
    "e5m2": Format(mantissa=2, emin=-14, max=57344.0, bits=8, dtype="float8_e5m2"),
}
SCALES = {
    "e4m3": ELEMENTS["e4m3"],
    # 1.875 * 2^15: its top exponent is reserved (arXiv 2609.02846, eq. 3).
    "ue5m3": Format(mantissa=3, emin=-14, max=61440.0, bits=8),
    # Its smallest value is 2^-127, which is a subnormal in fp32.
    "e8m0": Format(mantissa=0, emin=-126, max=2.0**127, bits=8, dtype="float8_e8m0fnu", zero=False),
    # HiF4's: codes 0 to 254 are (1 + m/4) * 2^(e - 48), code 255 is NaN; no subnormals.
    "e6m2": Format(mantissa=2, emin=-48, max=49152.0, bits=8, zero=False),
    "bf16": Format(mantissa=7, emin=-126, max=3.3895313892515355e38, bits=16, dtype="bfloat16"),
    "fp32": Format(mantissa=23, emin=-126, max=3.4028234663852886e38, bits=32, dtype="float32"),
}


@lru_cache
def element_format(word: str) -> Format:
    """Return the format of an element: one of ELEMENTS, or the user's own grid (`own.Own`)."""
    return ELEMENTS[word] if word in ELEMENTS else Levels.of(Own(word).values)
