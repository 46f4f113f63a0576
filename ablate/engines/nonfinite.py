"""Count of operands that held a NaN or an infinity, without a wait for a GPU at each of them."""

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
        return int(self.number())
