"""Count of operands that held a NaN or an infinity, without a wait for a GPU at each of them."""

from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor

_MOST_UNREAD = 64
"""Largest magnitudes that are kept before all are looked at: a GPU starts a kernel for one number as slowly
as for many."""


class NonfiniteCount:
    """Number of operands with a NaN or an infinity; `int` of it waits for the device."""

    def __init__(self, number: int = 0) -> None:
        self._number: Tensor | int = number
        self._unread: list[Tensor] = []

    def add(self, largest: Tensor) -> None:
        """Count an operand by its largest magnitude, fp32 scalar, which is NaN if the operand holds one."""
        self._unread.append(largest)
        if len(self._unread) >= _MOST_UNREAD:
            self.number()

    def include(self, other: "NonfiniteCount") -> None:
        """Add another count to this one."""
        self._number = self.number() + other.number()

    def number(self) -> Tensor | int:
        """Return the count, as a tensor on the operands' device once there are any."""
        if self._unread:
            self._number = self._number + (~torch.stack(self._unread).isfinite()).sum()
            self._unread = []
        return self._number

    def __int__(self) -> int:
        return total([self])


def total(counts: Iterable[NonfiniteCount]) -> int:
    """Return the sum of counts on one device, which looks at all of them at once; waits for the device."""
    counts = list(counts)
    unread = [largest for count in counts for largest in count._unread]
    flags = iter((~torch.stack(unread).isfinite()).cpu().tolist() if unread else ())
    numbers = [count._number for count in counts if isinstance(count._number, Tensor)]
    known = iter(torch.stack(numbers).cpu().tolist() if numbers else ())
    for count in counts:
        number = next(known) if isinstance(count._number, Tensor) else count._number
        count._number, count._unread = number + sum(islice(flags, len(count._unread))), []
    return sum(int(count._number) for count in counts)
