"""The amaxes of earlier steps that a delayed or held tensor scale needs. Evaluation reads them and adds nothing."""

import torch
from torch import Tensor

from ablate.numerics.philox import Clock


class History:
    """One operand's amax by optimizer step. Repeating a call (recomputed activations) changes nothing.

    An amax of 0 says nothing about the next tensor (gradients of a head that starts at zero): the first other one replaces it. Nor
    does one that is not finite, which would last for as many steps: it counts as 0, and shows in the operand's `largest`.
    """

    def __init__(self) -> None:
        self.amax: dict[int, Tensor] = {}
        """Fp32 scalars; with what they say, a run resumes bit for bit."""

    def delayed(self, current: Tensor, clock: Clock, steps: int) -> Tensor:
        """The largest amax of the `steps` steps before this one, over all their micro-batches; `current` where there is none."""
        seen = _finite(current)
        past = [amax for step, amax in self.amax.items() if clock.step - steps <= step < clock.step]
        if clock.stream == "training":
            self.amax[clock.step] = torch.maximum(self.amax.get(clock.step, seen), seen)
            self.amax.pop(clock.step - steps - 1, None)
        return _or(torch.stack(past).amax(), current) if past else current

    def held(self, current: Tensor, clock: Clock, steps: int) -> Tensor:
        """The amax of the first call in the current period of `steps` steps, in training; until then, of the last period."""
        period, seen = clock.step - clock.step % steps, _finite(current)
        if clock.stream == "training":
            self.amax = {period: _or(self.amax[period], seen) if period in self.amax else seen}
        return _or(next(iter(self.amax.values()), current), current)


def _or(amax: Tensor, other: Tensor) -> Tensor:
    return torch.where(amax == 0, other, amax)


def _finite(amax: Tensor) -> Tensor:
    return torch.where(amax.isfinite(), amax, 0.0)
