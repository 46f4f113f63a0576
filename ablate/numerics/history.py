"""Amaxes of earlier steps, for delayed and held tensor scales. Evaluation reads them and adds none."""

import torch
from torch import Tensor

from ablate.numerics.philox import Clock


class History:
    """One operand's amax by optimizer step. Repeating a call (recomputed activations) changes nothing.

    An amax of 0 (gradients behind a head that starts at zero) does not predict the next tensor, so the first
    other amax replaces it. A non-finite amax would persist for as many steps, so it counts as 0; it shows in
    the operand's `largest`.
    """

    def __init__(self) -> None:
        self.amax: dict[int, Tensor | float] = {}
        """fp32 scalars by step, saved in checkpoints. Delayed ones of a CPU are Python floats: a thousand
        small tensors that live among large short-lived ones would fragment the heap, which then grows with
        every step."""

    def delayed(self, current: Tensor, clock: Clock, steps: int) -> Tensor:
        """Return the largest amax of the last `steps` steps; `current` if there is none."""
        past = self.before(clock, steps)
        self.note(current, clock, steps)
        return _or(_largest(past), current) if past else current

    def before(self, clock: Clock, steps: int) -> list[Tensor | float]:
        """Return the recorded amaxes of the `steps` steps before this one."""
        return [amax for step, amax in self.amax.items() if clock.step - steps <= step < clock.step]

    def note(self, current: Tensor, clock: Clock, steps: int) -> None:
        """Include `current` in the maximum of this step, in training, and drop steps older than `steps`."""
        if clock.stream == "training":
            largest, earlier = _finite(current), self.amax.get(clock.step)
            if earlier is not None:
                largest = torch.maximum(torch.as_tensor(earlier, dtype=largest.dtype), largest)
            self.amax[clock.step] = largest.item() if largest.device.type == "cpu" else largest
            self.amax.pop(clock.step - steps - 1, None)

    def held(self, current: Tensor, clock: Clock, steps: int) -> Tensor:
        """Return the amax of the first training call in the current period of `steps` steps; before that
        call, that of the last period, or `current` if there is none."""
        period, amax = clock.step - clock.step % steps, _finite(current)
        if clock.stream == "training":
            self.amax = {period: _or(self.amax[period], amax) if period in self.amax else amax}
        return _or(next(iter(self.amax.values()), current), current)


def _largest(past: list[Tensor | float]) -> Tensor:
    tensors = [amax for amax in past if isinstance(amax, Tensor)]
    alike = len(tensors) == len(past)
    return torch.stack(tensors).amax() if alike else torch.tensor(max(past), dtype=torch.float32)


def _or(amax: Tensor, other: Tensor) -> Tensor:
    return torch.where(amax == 0, other, amax)


def _finite(amax: Tensor) -> Tensor:
    return torch.nan_to_num(amax, nan=0.0, posinf=0.0)  # one launch
