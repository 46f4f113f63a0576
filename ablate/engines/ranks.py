"""Communication of a linear layer whose tokens or weight are divided among ranks."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ablate.numerics.partition import Partition, gather
from ablate.numerics.philox import Clock
from ablate.numerics.product import first_order
from ablate.numerics.quantize import Operand
from ablate.numerics.spec import Hadamard, Quant
from ablate.numerics.stored import gather_packed, refuse, store_one
from ablate.recipes.recipe import TOKEN_AXES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class DrawArguments(TypedDict):
    """Arguments of `quantize` that determine the random bits of an operand."""

    clock: Clock
    where: int
    product: int


def in_parts(tensor: object) -> bool:
    """Return True for a tensor that is divided among ranks, a DTensor. DTensor's module takes a second to
    import; if nothing has imported it, there is no DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def whole(tensor: Tensor) -> Tensor:
    """Return all ranks' rows of a sharded tensor, without its graph; any other tensor as it is. Collective.
    DTensor's own `full_tensor` is not used: it calls torch 2.13's functional collectives, which corrupt
    memory with gloo, once in some hundred thousand calls."""
    if not in_parts(tensor):
        return tensor
    part, mesh, rows = tensor.detach().to_local(), tensor.device_mesh, tensor.shape[0]
    most = -(-rows // mesh.size())  # the last ranks may have fewer
    padded = torch.cat([part, part.new_zeros(most - len(part), *part.shape[1:])])
    return torch.cat(gather(padded, mesh.size(), mesh.get_group()))[:rows]


class Mapped(torch.autograd.Function):
    """Autograd function of two maps of tensors: one of the forward pass, one of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


class Divided:
    """Division of a micro-batch's sequences among the ranks of `group` into `count` parts; every operand's
    tokens are divided alike. This rank has part `index`, from 0."""

    def __init__(self, index: int, count: int, group: dist.ProcessGroup | None) -> None:
        self.index, self.count, self.group = index, count, group
        self.shares = {slot: Partition(axis, index, count, group) for slot, axis in TOKEN_AXES.items()}

    def total(self, dw: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum of all ranks' dw, fp32 [out, in] and overwritten, rounded once to `dtype`, or zeros.
        Collective. The first rank gets the sum and others zeros, since gradients are added later."""
        dw = dw.contiguous()
        dist.all_reduce(dw, group=self.group)
        return dw.to(dtype) if self.index == 0 else torch.zeros_like(dw, dtype=dtype)

    def gathered(self, tokens: Tensor) -> Tensor:
        """Return all ranks' tokens, of which each rank has the whole gradient. Collective."""
        return Mapped.apply(tokens, self._all, self._own)

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's tokens of all; all ranks' gradients of theirs are gathered. Collective."""
        return Mapped.apply(whole, self._own, self._all)

    def first(self, parameter: Tensor) -> Tensor:
        """Return its argument, whose gradient the first rank alone gets: all ranks have computed the same
        one, and ranks' gradients are added later."""
        return Mapped.apply(
            parameter,
            lambda tensor: tensor.view_as(tensor),
            lambda gradient: gradient if self.index == 0 else torch.zeros_like(gradient),
        )

    def _all(self, tokens: Tensor) -> Tensor:
        return torch.cat(list(gather(tokens, self.count, self.group)))

    def _own(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.count)[self.index]


class Sharded:
    """A layer's weight [out, in], as a DTensor of which every rank of `mesh` keeps an equal number of rows.

    It is gathered for each product and freed afterwards: as codes and block scales if the product takes it in
    NVFP4, in bf16 otherwise.
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
        """Bytes of the weight gathered for products so far, and the bytes that bf16 would have taken."""

    def operand(
        self,
        part: Tensor,
        slot: str,
        quant: Quant | None,
        rotation: Hadamard | None,
        draws_at: DrawArguments,
    ) -> Operand | None:
        """Return the weight gathered as codes and block scales; None, on all ranks, if it cannot be
        (`packs`). Collective. `part` is this rank's rows, bf16 [out / ranks, in]; for `dgrad.w` their
        transpose."""
        partition = self.shares[slot]
        if quant is None or not packs(quant, rotation, part, partition):
            return None
        packed = store_one(part, quant, rotation=rotation, partition=partition, **draws_at)
        packed = gather_packed(packed, partition)
        self._count(part, packed.nbytes)
        return packed.operand()

    def numbers(self, part: Tensor, slot: str) -> Tensor:
        """Return the whole weight, unquantised, in the dtype and orientation of this rank's `part`."""
        self._count(part, part.nbytes * self.count)
        return self.shares[slot].gathered(part)

    def _count(self, part: Tensor, gathered: int) -> None:
        self.gathered, self.in_bf16 = self.gathered + gathered, self.in_bf16 + 2 * part.numel() * self.count

    def whole(self, weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Return the weight in `dtype` for an unquantised layer, gathered in that precision; its gradient is
        summed in fp32 and scattered to the ranks."""
        size = weight.numel() * dtype.itemsize
        self.in_bf16, self.gathered = self.in_bf16 + 2 * weight.numel(), self.gathered + size
        gathered = self.shares["fprop.w"].gathered
        return Mapped.apply(weight.to_local(), lambda part: gathered(part.to(dtype)), self.scatter)

    def scatter(self, dw: Tensor) -> Tensor:
        """Return this rank's rows, fp32 [out / ranks, in], of the sum of all ranks' dw. Collective."""
        dw = dw.to(torch.float32).contiguous()
        rows = dw.new_empty(len(dw) // self.count, dw.shape[1])
        dist.reduce_scatter(rows, list(dw.split(len(rows))), group=self.mesh.get_group())
        return rows


def packs(quant: Quant | None, rotation: Hadamard | None, part: Tensor, partition: Partition) -> bool:
    """Return True if a weight can be gathered as the quantised parts of all ranks: not if the cast depends on
    the micro-batch, which differs between ranks, or its statistic has a history or hides a NaN."""
    if quant is None or quant.from_forward or quant.estimator is not None or quant.outer is None:
        return False
    if (
        quant.draws
        or (rotation is not None and rotation.signs == "per_call")
        or quant.outer.statistic != "amax"
    ):
        return False
    try:
        refuse(quant)
    except ValueError:
        return False
    return partition.misfit(part.shape[0], part.shape[1], quant, rotation) is None
