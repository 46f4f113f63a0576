"""Equal parts of one matrix on several processes, quantised to the same bits as the whole matrix would be.

Three things in a quantised part depend on the rest of the matrix: the outer statistic (reduced or gathered
here), the random bits (drawn for the whole and cut), and blocks or rotations that cross a boundary (refused
by `misfit`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ablate.numerics.spec import Hadamard, Quant, grain


@dataclass(frozen=True)
class Partition:
    """Division of a matrix into `count` equal parts, one for each process of `group`; this one has part
    `index`. Axis 0 divides the rows, axis 1 the columns (the contraction). `largest` and `gathered` are
    collective: every process of the group calls them in the same order."""

    axis: int
    index: int
    count: int
    group: dist.ProcessGroup | None = None

    def largest(self, amax: Tensor) -> Tensor:
        """Return the elementwise maximum of the non-negative fp32 `amax` of all processes, or NaN."""
        # As integers, since a maximum of floats may lose NaN: the bits are ordered as the numbers are, with
        # NaN above all.
        bits = amax.contiguous().view(torch.int32).clone()
        dist.all_reduce(bits, dist.ReduceOp.MAX, self.group)
        return bits.view(torch.float32)

    def gathered(self, part: Tensor, axis: int | None = None) -> Tensor:
        """Return the parts of all processes, joined along `axis` (default: the divided axis)."""
        return torch.cat(gather(part, self.count, self.group), dim=self.axis if axis is None else axis)

    def local(self, whole: Tensor) -> Tensor:
        """Return this process's part of a matrix that every process holds, as a view."""
        size = whole.shape[self.axis] // self.count
        return whole.narrow(self.axis, self.index * size, size)

    def misfit(self, rows: int, columns: int, quant: Quant, rotation: Hadamard | None) -> str | None:
        """Return why parts of `rows` x `columns` cannot be quantised as the whole is; None if they can."""
        size, step = (rows, columns)[self.axis], grain(quant, rotation, self.axis)
        if size % step:
            lines = ("rows", "columns")[self.axis]
            return f"it has {size} {lines}, no multiple of {step}, and would cut a block"
        if quant.transform is not None:
            return "its transform needs the whole matrix"
        if quant.owned:
            return f"{quant.owned[0][1]} needs the whole matrix"
        if quant.error.permuted:
            return "error.permuted moves errors between all elements of the matrix"
        return None


def gather(part: Tensor, count: int, group: dist.ProcessGroup | None = None) -> Sequence[Tensor]:
    """Return the `part` of each of `count` processes, in the order of their ranks. Collective."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(count)]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts
