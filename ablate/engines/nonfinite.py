"""Count of operands that held a NaN or an infinity, and the first of them, without a wait for a GPU at each.

Every quantiser computes the largest magnitude of its operand, a scalar on the device. It is kept with its
moment, and some dozens are looked at together. So the step and slot of the first operand that was not finite,
and the magnitudes of the steps before it, are known whenever somebody asks, and cost nothing until then.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ablate.recipes.recipe import SLOTS

_MOST_UNREAD = 64
"""Largest magnitudes that are kept before all are looked at: a GPU starts a kernel for one number as slowly
as for many."""
_RECENT = 96
"""Largest magnitudes of a layer that stay for `recent`: those of 16 steps of one micro-batch."""
_PLACES = (*SLOTS, "output")
_NEVER = 1 << 62


class Magnitude(NamedTuple):
    """Largest magnitude of one operand: its step, its slot, and the fp32 scalar."""

    step: int
    slot: str
    largest: Tensor


class NonfiniteCount:
    """Number of operands with a NaN or an infinity; `int` of it waits for the device."""

    def __init__(self, number: int = 0) -> None:
        self._number: Tensor | int = number
        self._unread: list[Magnitude] = []
        self._first = _NEVER
        """Moment of the first such operand, of those looked at here: step times 8, plus place of the slot."""
        self._on_device: Tensor | None = None
        """The same, of those looked at on the device."""
        self.recent: deque[Magnitude] = deque(maxlen=_RECENT)
        """Magnitudes of the last operands, oldest first."""

    def add(self, largest: Tensor, step: int, slot: str, evaluates: bool = False) -> None:
        """Count an operand by its largest magnitude, fp32 scalar, which is NaN if the operand holds one.

        Args:
            largest: the magnitude.
            step: optimizer step.
            slot: one of SLOTS, or `output` for an engine whose operands are not seen.
            evaluates: True for an operand of an evaluation, which is no part of the step.
        """
        magnitude = Magnitude(step, slot, largest)
        self._unread.append(magnitude)
        if not evaluates:
            self.recent.append(magnitude)
        if len(self._unread) >= _MOST_UNREAD:
            self.number()

    def include(self, other: "NonfiniteCount") -> None:
        """Add another count, of later operands, to this one."""
        self._number = self.number() + other.number()
        self._first = min(self._first, other._first)
        if other._on_device is not None:
            self._note(other._on_device)
        self.recent.extend(other.recent)

    def number(self) -> Tensor | int:
        """Return the count, as a tensor on the operands' device once there are any."""
        if self._unread:
            values = torch.stack([each.largest for each in self._unread])
            bad = ~values.isfinite()
            moments = torch.tensor([_moment(each) for each in self._unread], device=values.device)
            self._number = self._number + bad.sum()
            self._note(torch.where(bad, moments, _NEVER).min())
            self._unread = []
        return self._number

    def _note(self, moment: Tensor) -> None:
        self._on_device = moment if self._on_device is None else torch.minimum(self._on_device, moment)

    @property
    def first(self) -> tuple[int, str] | None:
        """Step and slot of the first operand with a NaN or an infinity; None: there was none. Waits for the
        device."""
        self.number()
        moment = self._first if self._on_device is None else min(self._first, int(self._on_device))
        return None if moment == _NEVER else (moment >> 3, _PLACES[moment & 7])

    def __int__(self) -> int:
        return total([self])


def _moment(magnitude: Magnitude) -> int:
    return magnitude.step << 3 | _PLACES.index(magnitude.slot)


def total(counts: Iterable[NonfiniteCount]) -> int:
    """Return the sum of counts on one device, which looks at all of them at once; waits for the device."""
    counts = list(counts)
    unread = [each.largest for count in counts for each in count._unread]
    flags = iter((~torch.stack(unread).isfinite()).cpu().tolist() if unread else ())
    numbers = [count._number for count in counts if isinstance(count._number, Tensor)]
    known = iter(torch.stack(numbers).cpu().tolist() if numbers else ())
    for count in counts:
        number = next(known) if isinstance(count._number, Tensor) else count._number
        bad = list(islice(flags, len(count._unread)))
        moments = [_moment(each) for each, flag in zip(count._unread, bad, strict=True) if flag]
        count._first = min([count._first, *moments])
        count._number, count._unread = number + sum(bad), []
    return sum(int(count._number) for count in counts)
