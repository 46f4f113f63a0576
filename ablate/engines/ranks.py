"""A linear layer whose tokens, or whose weight, several ranks share: what they must ask each other, and nothing else."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ablate.numerics.partition import Partition, gather
from ablate.numerics.product import first_order
from ablate.numerics.quantize import Operand, draws
from ablate.numerics.spec import Hadamard, Quant
from ablate.numerics.stored import gather_packed, refuse, store_one
from ablate.recipes.recipe import TOKEN_AXES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def in_parts(tensor: Any) -> bool:
    """Whether ranks have parts of it (a DTensor, whose module takes a second to import, and is there where something made one)."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def whole(tensor: Tensor) -> Tensor:
    """Everybody's rows of a sharded tensor, without its graph; another one as it is. All ranks call it.

    Not by its own `full_tensor`: what that asks the other ranks by, torch 2.13's functional collectives, corrupts memory where it goes
    through gloo, once in some hundred thousand calls.
    """
    if not in_parts(tensor):
        return tensor
    part, mesh, rows = tensor.detach().to_local(), tensor.device_mesh, tensor.shape[0]
    most = -(-rows // mesh.size())  # the last ranks may have fewer
    padded = torch.cat([part, part.new_zeros(most - len(part), *part.shape[1:])])
    return torch.cat(gather(padded, mesh.size(), mesh.get_group()))[:rows]


class Divided:
    """The sequences of one micro-batch are shared out: this rank has part `index` of `count`, each operand's tokens alike."""

    def __init__(self, index: int, count: int, group: dist.ProcessGroup | None) -> None:
        self.index, self.group = index, group
        self.shares = {slot: Partition(axis, index, count, group) for slot, axis in TOKEN_AXES.items()}

    def total(self, dw: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum of everybody's fp32 [out, in], rounded once to `dtype`; zeros on all ranks but the first, whose gradients add up."""
        dw = dw.contiguous()
        dist.all_reduce(dw, group=self.group)
        return dw.to(dtype) if self.index == 0 else torch.zeros_like(dw, dtype=dtype)


class Sharded:
    """A layer's weight [out, in] of which every rank keeps as many rows. It is gathered for each product and forgotten after it.

    Where a product takes it in NVFP4, codes and block scales are gathered, in bf16 otherwise.
    """

    def __init__(self, layer: nn.Linear, mesh: "DeviceMesh") -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        rank, count, group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
        layer.weight = nn.Parameter(
            distribute_tensor(layer.weight.data, mesh, [Shard(0)], src_data_rank=None),
            layer.weight.requires_grad,
        )
        self.mesh, self.count = mesh, count
        self.shares = {
            "fprop.w": Partition(0, rank, count, group),
            "dgrad.w": Partition(1, rank, count, group),
        }
        self.gathered, self.in_bf16 = 0, 0
        """Bytes of the weight that products have asked for so far, and what they would have been in bf16."""

    def operand(
        self,
        part: Tensor,
        slot: str,
        quant: Quant | None,
        rotation: Hadamard | None,
        draws_at: Mapping[str, Any],
    ) -> Operand | None:
        """Return the weight as the operand `slot`, gathered as codes and block scales; None where only its numbers can be gathered.

        `part` is what this rank keeps, bf16 [out / ranks, in], or that transposed. `draws_at` is quantize's clock, where and product.
        """
        partition = self.shares[slot]
        if not packs(quant, rotation, part, partition):
            return None
        packed = store_one(part, quant, rotation=rotation, partition=partition, **draws_at)
        packed = gather_packed(packed, partition)
        self._count(part, packed.nbytes)
        return packed.operand()

    def numbers(self, part: Tensor, slot: str) -> Tensor:
        """Return the whole weight as the operand `slot` has it, in the dtype of `part`, which is what this rank keeps."""
        self._count(part, part.nbytes * self.count)
        return self.shares[slot].gathered(part)

    def _count(self, part: Tensor, gathered: int) -> None:
        self.gathered, self.in_bf16 = self.gathered + gathered, self.in_bf16 + 2 * part.numel() * self.count

    def whole(self, weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`, for a layer that is not quantised; its gradient finds the way back to the parts."""
        size = weight.numel() * dtype.itemsize
        self.in_bf16, self.gathered = self.in_bf16 + 2 * weight.numel(), self.gathered + size
        return _Whole.apply(weight.to_local(), dtype, self)

    def scatter(self, dw: Tensor) -> Tensor:
        """This rank's rows of the sum of everybody's dw [out, in], fp32."""
        dw = dw.to(torch.float32).contiguous()
        rows = dw.new_empty(len(dw) // self.count, dw.shape[1])
        dist.reduce_scatter(rows, list(dw.split(len(rows))), group=self.mesh.get_group())
        return rows


class _Whole(torch.autograd.Function):
    """A gather in the forward pass's precision, whose backward pass adds up in fp32."""

    @staticmethod
    def forward(ctx, part: Tensor, dtype: torch.dtype, sharded: Sharded) -> Tensor:
        ctx.sharded = sharded
        return sharded.shares["fprop.w"].gathered(part.to(dtype))

    @staticmethod
    @first_order
    def backward(ctx, dw: Tensor):
        return ctx.sharded.scatter(dw), None, None


def packs(quant: Quant | None, rotation: Hadamard | None, part: Tensor, partition: Partition) -> bool:
    """Whether a weight can be gathered as what each rank has quantised of it.

    Not where the cast depends on the micro-batch, which is another on every rank, nor where its statistic has a history, or hides a NaN.
    """
    if quant is None or quant.source == "forward" or quant.estimator is not None or quant.outer is None:
        return False
    if (
        draws(quant)
        or (rotation is not None and rotation.signs == "per_call")
        or quant.outer.statistic != "amax"
    ):
        return False
    try:
        refuse(quant)
    except ValueError:
        return False
    return partition.misfit(*part.shape, quant, rotation) is None
