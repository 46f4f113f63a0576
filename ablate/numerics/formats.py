"""Number formats as grids: what can be represented, and how far apart neighbours are."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ablate.numerics.spec import SCALE_MAX


@dataclass(frozen=True)
class Format:
    """A small float: `mantissa` stored bits, smallest normal 2^`emin`, largest magnitude `max`."""

    mantissa: int
    emin: int
    max: float

    def step(self, y: Tensor) -> Tensor:
        """The distance between the two neighbours of each value (fp32, any shape): a power of two, so dividing by it is exact."""
        exponent = (y.view(torch.int32) & 0x7F800000).clamp_(min=(self.emin + 127) << 23)
        return exponent.sub_(self.mantissa << 23).view(torch.float32)


ELEMENTS = {
    "e2m1": Format(mantissa=1, emin=0, max=6.0),
    "e1m2": Format(mantissa=2, emin=0, max=1.75),  # multiples of 1/4; a power of two more or less is the scale's business
    "int4": Format(mantissa=2, emin=2, max=7.0),  # symmetric: -8 is not used
    "e3m0": Format(mantissa=0, emin=-2, max=16.0),  # 0 and 2^-2 ... 2^4: code 0 is zero, seven powers of two
    "e4m3": Format(mantissa=3, emin=-6, max=448.0),  # OCP's finite-and-NaN variant
    "e5m2": Format(mantissa=2, emin=-14, max=57344.0),
}
SCALES = {
    "e4m3": ELEMENTS["e4m3"],
    "ue5m3": Format(mantissa=3, emin=-14, max=SCALE_MAX["ue5m3"]),
    "e8m0": Format(mantissa=0, emin=-126, max=SCALE_MAX["e8m0"]),
    "bf16": Format(mantissa=7, emin=-126, max=SCALE_MAX["bf16"]),
    "fp32": Format(mantissa=23, emin=-126, max=SCALE_MAX["fp32"]),
}
