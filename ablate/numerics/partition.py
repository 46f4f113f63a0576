"""A matrix of which each of several processes holds an equal part: what it takes to quantise the parts as the whole would be."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ablate.numerics.spec import Hadamard, Quant, grain


@dataclass(frozen=True)
class Share:
    """Part `index` of `count` equal ones, each with a process of `group`: of the rows (`axis` 0) or of the columns, the contraction (1).

    Its methods that ask the others are collective: every process of the group calls them in the same order.
    """

    axis: int
    index: int
    count: int
    group: dist.ProcessGroup | None = None

    def largest(self, amax: Tensor) -> Tensor:
        """The elementwise maximum of everybody's non-negative fp32 `amax`; NaN where anybody's is."""
        bits = (
            amax.contiguous().view(torch.int32).clone()
        )  # ordered as the numbers are, NaN above all: a maximum of floats may lose it
        dist.all_reduce(bits, dist.ReduceOp.MAX, self.group)
        return bits.view(torch.float32)

    def gathered(self, part: Tensor, axis: int | None = None) -> Tensor:
        """Everybody's equally shaped parts, side by side along `axis` (by default the one that is shared out)."""
        return torch.cat(gather(part, self.count, self.group), dim=self.axis if axis is None else axis)

    def own(self, whole: Tensor) -> Tensor:
        """This part of a matrix that everybody has."""
        size = whole.shape[self.axis] // self.count
        return whole.narrow(self.axis, self.index * size, size)

    def misfit(self, rows: int, columns: int, quant: Quant, rotation: Hadamard | None) -> str | None:
        """Why parts of `rows` x `columns` cannot be quantised as the whole is; None where they can."""
        size, step = (rows, columns)[self.axis], grain(quant, rotation, self.axis)
        if size % step:
            return f"it has {size} {('rows', 'columns')[self.axis]}, no multiple of {step}, and would cut a block"
        if quant.transform is not None:
            return "its transform looks at the whole matrix"
        return None


def gather(part: Tensor, count: int, group: dist.ProcessGroup | None = None) -> Sequence[Tensor]:
    """Everybody's equally shaped `part`, in the order of the group's processes."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(count)]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts
