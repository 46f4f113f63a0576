"""Communication of a linear layer whose tokens or weight are divided among ranks."""

import sys
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
        """Return the weight in `dtype` for an unquantised layer; its gradient is scattered to the ranks."""
        size = weight.numel() * dtype.itemsize
        self.in_bf16, self.gathered = self.in_bf16 + 2 * weight.numel(), self.gathered + size
        return _Whole.apply(weight.to_local(), dtype, self)

    def scatter(self, dw: Tensor) -> Tensor:
        """Return this rank's rows, fp32 [out / ranks, in], of the sum of all ranks' dw. Collective."""
        dw = dw.to(torch.float32).contiguous()
        rows = dw.new_empty(len(dw) // self.count, dw.shape[1])
        dist.reduce_scatter(rows, list(dw.split(len(rows))), group=self.mesh.get_group())
        return rows


class _Whole(torch.autograd.Function):
    """Autograd function that gathers in the forward pass's precision and sums gradients in fp32."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dtype: torch.dtype, sharded: Sharded) -> Tensor:
        ctx.sharded = sharded
        return sharded.shares["fprop.w"].gathered(part.to(dtype))

    @staticmethod
    @first_order
    def backward(ctx: Any, dw: Tensor) -> tuple[Tensor, None, None]:
        return ctx.sharded.scatter(dw), None, None


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


class GatheredTokens(torch.autograd.Function):
    """Autograd function that returns all ranks' tokens, of which each rank has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, divided: Divided) -> Tensor:
        ctx.divided = divided
        return _all_ranks(tokens, divided)

    @staticmethod
    @first_order
    def backward(ctx: Any, whole: Tensor) -> tuple[Tensor, None]:
        return whole.chunk(ctx.divided.count)[ctx.divided.index], None


class OwnTokens(torch.autograd.Function):
    """Autograd function that returns this rank's tokens, and gathers all ranks' gradients of theirs."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, divided: Divided) -> Tensor:
        ctx.divided = divided
        return whole.chunk(divided.count)[divided.index]

    @staticmethod
    @first_order
    def backward(ctx: Any, own: Tensor) -> tuple[Tensor, None]:
        return _all_ranks(own, ctx.divided), None


class FirstRanks(torch.autograd.Function):
    """Autograd function that returns its argument, whose gradient the first rank alone gets: all ranks have
    computed the same one, and ranks' gradients are added later."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, divided: Divided) -> Tensor:
        ctx.divided = divided
        return parameter.view_as(parameter)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient if ctx.divided.index == 0 else torch.zeros_like(gradient), None


def _all_ranks(tokens: Tensor, divided: Divided) -> Tensor:
    return torch.cat(list(gather(tokens, divided.count, divided.group)))
