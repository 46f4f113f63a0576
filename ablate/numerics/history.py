"""Amaxes of earlier steps, for delayed and held tensor scales. Evaluation reads them and adds none."""

import torch
from torch import Tensor

from ablate.numerics.kernels import cuda
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
        self._past: tuple[dict[int, Tensor | float], int, int, Tensor] | None = None
        """On a GPU, `amax` as it was, its last step, the window, and the amaxes of the steps before that one,
        newest first, 0 for one that it lacks."""

    def delayed(self, current: Tensor, clock: Clock, steps: int) -> Tensor:
        """Return the largest amax of the last `steps` steps; `current` if there is none."""
        last = next(reversed(self.amax), clock.step)
        if last <= clock.step and cuda.runs_on(current.device):
            past, entry = self._before(last, steps, current), self._entry(last, current)
            # As long as there were steps, in powers of two, for each of which the kernel is compiled.
            length = 1 << max(0, clock.step - next(iter(self.amax), clock.step) - 1).bit_length()
            made = cuda.remembered(current, past, entry, clock.step - last, min(steps, length))
            if clock.trains:
                self._put(made[1], clock.step, steps)
                self._past = self.amax, clock.step, steps, made[2]
            return made[0]
        past = self.before(clock, steps)
        self.note(current, clock, steps)
        return _or(_largest(past), current) if past else current

    def before(self, clock: Clock, steps: int) -> list[Tensor | float]:
        """Return the recorded amaxes of the `steps` steps before this one."""
        return [amax for step, amax in self.amax.items() if clock.step - steps <= step < clock.step]

    def note(self, current: Tensor, clock: Clock, steps: int) -> None:
        """Include `current` in the maximum of this step, in training, and drop steps older than `steps`."""
        if clock.trains:
            largest, earlier = _finite(current), self.amax.get(clock.step)
            if earlier is not None:
                largest = torch.maximum(torch.as_tensor(earlier, dtype=largest.dtype), largest)
            self._put(largest.item() if largest.device.type == "cpu" else largest, clock.step, steps)

    def _put(self, amax: Tensor | float, step: int, steps: int) -> None:
        self.amax[step] = amax
        while (first := next(iter(self.amax))) < step - steps:  # several, if an expert had no token since
            del self.amax[first]

    def held(self, current: Tensor, clock: Clock, steps: int) -> Tensor:
        """Return the amax of the first training call in the current period of `steps` steps; before that
        call, that of the last period, or `current` if there is none."""
        period = clock.step - clock.step % steps
        if cuda.runs_on(current.device):
            first = period if clock.trains else next(iter(self.amax), period)
            made = cuda.remembered(current, None, self._entry(first, current), 0, 0)
            if clock.trains:
                self.amax = {period: made[1]}
            return made[0]
        amax = _finite(current)
        if clock.trains:
            self.amax = {period: _or(self.amax[period], amax) if period in self.amax else amax}
        return _or(next(iter(self.amax.values()), current), current)

    def _entry(self, step: int, like: Tensor) -> Tensor | None:
        """Return the amax of a step as a tensor like another one; None if there is none."""
        amax = self.amax.get(step)
        return torch.full_like(like, amax) if isinstance(amax, float) else amax

    def _before(self, last: int, steps: int, like: Tensor) -> Tensor | None:
        """Return the amaxes of the `steps` steps before the last one, as `_past` has them; None for zeros."""
        if self._past is not None:
            of, step, window, past = self._past
            if of is self.amax and (step, window) == (last, steps):
                return past
        if len(self.amax) < 2:
            return None
        zero = torch.zeros_like(like)
        first = max(last - steps, next(iter(self.amax)))
        entries = (self._entry(step, like) for step in range(last - 1, first - 1, -1))
        return torch.stack([zero if entry is None else entry for entry in entries])


def _largest(past: list[Tensor | float]) -> Tensor:
    tensors = [amax for amax in past if isinstance(amax, Tensor)]
    alike = len(tensors) == len(past)
    return torch.stack(tensors).amax() if alike else torch.tensor(max(past), dtype=torch.float32)


def _or(amax: Tensor | float, other: Tensor) -> Tensor:
    amax = torch.as_tensor(amax, dtype=other.dtype)  # a float of a CPU, if the operand was delayed before
    return torch.where(amax == 0, other, amax)


def _finite(amax: Tensor) -> Tensor:
    return torch.nan_to_num(amax, nan=0.0, posinf=0.0)  # one launch
