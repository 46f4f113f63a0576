"""Number formats as grids: what can be represented, and how far apart neighbours are."""

from dataclasses import dataclass

import torch
from torch import Tensor


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


def e4m3(scale: Tensor) -> Tensor:
    """Round non-negative fp32 to E4M3 (nearest even, subnormals kept), saturating at 448, and back to fp32.

    torch's own cast turns what is out of range into NaN, hence the clamp.
    """
    return scale.clamp(max=448.0).to(torch.float8_e4m3fn).to(torch.float32)


ELEMENTS = {"e2m1": Format(mantissa=1, emin=0, max=6.0)}
SCALES = {"e4m3": e4m3}
