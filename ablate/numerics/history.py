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
        self.amax: dict[int, Tensor | float] = {}
        """Fp32 scalars; with what they say, a run resumes bit for bit. A CPU's delayed ones are numbers: a thousand small tensors that
        stay among large ones that come and go would split the heap, which then grows with every step."""

    def delayed(self, current: Tensor, clock: Clock, steps: int) -> Tensor:
        """The largest amax of the `steps` steps before this one, over all their micro-batches; `current` where there is none."""
        past = self.before(clock, steps)
        self.note(current, clock, steps)
        return _or(_largest(past), current) if past else current

    def before(self, clock: Clock, steps: int) -> list[Tensor | float]:
        """The amaxes of the `steps` steps before this one, as far as there are any."""
        return [amax for step, amax in self.amax.items() if clock.step - steps <= step < clock.step]

    def note(self, current: Tensor, clock: Clock, steps: int) -> None:
        """Count `current` among this step's, in training; `steps` are how many will be asked for."""
        if clock.stream == "training":
            seen, known = _finite(current), self.amax.get(clock.step)
            largest = seen if known is None else torch.maximum(torch.as_tensor(known, dtype=seen.dtype), seen)
            self.amax[clock.step] = largest.item() if largest.device.type == "cpu" else largest
            self.amax.pop(clock.step - steps - 1, None)

    def held(self, current: Tensor, clock: Clock, steps: int) -> Tensor:
        """The amax of the first call in the current period of `steps` steps, in training; until then, of the last period."""
        period, seen = clock.step - clock.step % steps, _finite(current)
        if clock.stream == "training":
            self.amax = {period: _or(self.amax[period], seen) if period in self.amax else seen}
        return _or(next(iter(self.amax.values()), current), current)


def _largest(past: list[Tensor | float]) -> Tensor:
    return (
        torch.stack(past).amax()
        if isinstance(past[0], Tensor)
        else torch.tensor(max(past), dtype=torch.float32)
    )


def _or(amax: Tensor, other: Tensor) -> Tensor:
    return torch.where(amax == 0, other, amax)


def _finite(amax: Tensor) -> Tensor:
    return torch.where(amax.isfinite(), amax, 0.0)
