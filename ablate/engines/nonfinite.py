"""Count of operands that held a NaN or an infinity, and the first of them, without a wait for a GPU at each.

Every quantiser computes the largest magnitude of its operand, a scalar on the device. It is kept with its
moment, and some dozens are looked at together. So the step and slot of the first operand that was not finite,
and the magnitudes of the steps before it, are known whenever somebody asks, and cost nothing until then.
"""

from collections import deque
from collections.abc import Iterable
from functools import lru_cache
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
        self._number, self._first = number, _NEVER
        """Number, and moment of the first such operand: step times 8, plus place of the slot."""
        self._on_device: tuple[Tensor, Tensor] | None = None
        """The same, of those looked at on the device."""
        self._unread: list[Magnitude] = []
        self.recent: deque[Magnitude] = deque(maxlen=_RECENT)
        """Magnitudes of the last operands, oldest first."""

    def add(self, largest: Tensor, step: int, slot: str, evaluates: bool = False) -> None:
        """Count an operand by its largest magnitude, fp32 scalar, which is NaN if the operand holds one.
        `slot` is one of SLOTS, or `output` for an engine whose operands are not seen; an operand that
        `evaluates` is not part of the step."""
        magnitude = Magnitude(step, slot, largest)
        self._unread.append(magnitude)
        if not evaluates:
            self.recent.append(magnitude)
        self._look()

    def include(self, other: "NonfiniteCount") -> None:
        """Add another count, of later operands, to this one."""
        self._number, self._first = self._number + other._number, min(self._first, other._first)
        if other._on_device is not None:
            self._note(*other._on_device)
        self._unread += other._unread
        self.recent.extend(other.recent)
        self._look()

    def _look(self) -> None:
        """Look at all magnitudes on the device once there are many, without a wait."""
        if len(self._unread) >= _MOST_UNREAD:
            values = torch.stack([each.largest for each in self._unread])
            bad, begin = ~values.isfinite(), _moment(self._unread[0])
            moments = _on(values.device, tuple(_moment(each) - begin for each in self._unread)) + begin
            self._note(bad.sum(), torch.where(bad, moments, _NEVER).min())
            self._unread = []

    def _note(self, number: Tensor, first: Tensor) -> None:
        if self._on_device is not None:
            number, first = number + self._on_device[0], torch.minimum(first, self._on_device[1])
        self._on_device = number, first

    @property
    def first(self) -> tuple[int, str] | None:
        """Step and slot of the first operand with a NaN or an infinity; None: there was none. Waits for the
        device, unless `total` has looked at all operands."""
        int(self)
        return None if self._first == _NEVER else (self._first >> 3, _PLACES[self._first & 7])

    def __int__(self) -> int:
        return total([self])


def _moment(magnitude: Magnitude) -> int:
    return magnitude.step << 3 | _PLACES.index(magnitude.slot)


@lru_cache(maxsize=1024)
def _on(device: torch.device, moments: tuple[int, ...]) -> Tensor:
    """Return moments after the first of them on a device. The copy waits for a GPU. Training repeats a few
    patterns of slots and steps; each is copied once."""
    return torch.tensor(moments, device=device)


def total(counts: Iterable[NonfiniteCount]) -> int:
    """Return the sum of counts on one device, which looks at all of them at once; waits for the device."""
    counts = list(counts)
    unread = [each.largest for count in counts for each in count._unread]
    flags = iter((~torch.stack(unread).isfinite()).cpu().tolist() if unread else ())
    looked = [each for count in counts for each in count._on_device or ()]
    numbers = iter(torch.stack(looked).cpu().tolist() if looked else ())
    for count in counts:
        number, first = (0, _NEVER) if count._on_device is None else (next(numbers), next(numbers))
        bad = list(islice(flags, len(count._unread)))
        moments = [_moment(each) for each, flag in zip(count._unread, bad, strict=True) if flag]
        count._number += number + sum(bad)
        count._first = min([count._first, first, *moments])
        count._on_device, count._unread = None, []
    return sum(count._number for count in counts)
