"""The ranks of one trial: which of them this process is, what is its part of every step, and what they must agree on.

A process belongs to one trial, as it belongs to one process group: `join` says so once, and `world` is asked where that matters.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ablate.engines.emulated import Engine
from ablate.engines.ranks import Divided, in_parts, whole
from ablate.recipes.recipe import Recipe
from ablate.training.hyperparameters import Training
from ablate.training.rank_layout import Layout

_PATIENCE = timedelta(days=1)
"""A rank waits for the others while one of them waits for another process that runs the same trial; who died is known at once."""


class World:
    """All ranks of the trial that this process computes, or a part of; alone, every method is the identity."""

    def __init__(self, layout: Layout, rank: int, device: str) -> None:
        self.layout, self.rank, self.size = layout, rank, layout.ranks
        self.device = torch.device(device)
        self.begun = False
        """Whether the ranks are training."""

    def begin(self, config: Training, recipe: Recipe, engine: str) -> None:
        """Rank 0 trains now: the others, which wait in `begins`, do so too. ValueError where so many cannot."""
        if self.size > 1 and (why := next(self.layout.misfits(config, recipe, engine), None)):
            raise ValueError(why)
        if self.size > 1 and self.rank == 0 and not self.begun:
            self.told(True)
        self.begun = True

    def begins(self) -> bool:
        """On a rank other than 0: wait until rank 0 begins, or ends without having had to."""
        self.begun = self.told(None)
        return self.begun

    def told(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(
            box, device=torch.device("cpu")
        )  # by gloo: a whole model need not pass through a GPU
        return box[0]

    def sums(self, *numbers: float) -> list[float]:
        """Each number's sum over the ranks, in fp64."""
        if self.size == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def listed(self, numbers: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers, as many on each, by rank."""
        if self.size == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        everybody = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everybody, mine)
        return [numbers.tolist() for numbers in everybody]

    def leave(self) -> None:
        """Where rank 0 ends without having begun, let the others end; leave the group."""
        if self.size > 1:
            if self.rank == 0 and not self.begun:
                self.told(False)
            dist.barrier()  # who ends first takes its connections from the others
            dist.destroy_process_group()


_world = World(Layout(), 0, "cpu")


def world() -> World:
    """The ranks that this process is one of: it alone, unless `join` said otherwise."""
    return _world


def join(layout: Layout, rank: int, device: str, meeting: str | None = None) -> World:
    """Be rank `rank` of a group that meets by a file, or where environment variables say; it talks by gloo, on GPUs by NCCL too."""
    global _world
    where = {"init_method": f"file://{meeting}", "rank": rank, "world_size": layout.ranks} if meeting else {}
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=_PATIENCE, **where)
    _world = World(layout, rank, device)
    return _world


@contextmanager
def alone() -> Iterator[None]:
    """Inside this context the process trains something for itself, whatever group it belongs to."""
    global _world
    before, _world = _world, World(Layout(), 0, _world.device.type)
    try:
        yield
    finally:
        _world = before


class Part:
    """This rank's part of every step of one run."""

    def __init__(
        self, world: World, config: Training, engine: Engine, parameters: Sequence[nn.Parameter]
    ) -> None:
        self.world, self.engine, self.parameters = world, engine, parameters
        groups = world.layout.groups(config.accumulate)
        self.splits = world.size // groups
        group, self.index = divmod(world.rank, self.splits)
        self.micro_batches = range(group, config.accumulate, groups)
        self.several = groups > 1
        peers = (
            [dist.new_group(list(range(g * self.splits, (g + 1) * self.splits))) for g in range(groups)]
            if self.splits > 1
            else None
        )
        self._divided = peers and Divided(self.index, self.splits, peers[group])

    def divided(self) -> AbstractContextManager:
        """Inside this context the engine knows that other ranks have the rest of a micro-batch, where they do."""
        return self.engine.divided(self._divided) if self._divided else nullcontext()

    def of(self, batch: Sequence[Tensor]) -> list[Tensor]:
        """This rank's sequences of a micro-batch."""
        size = len(batch[0]) // self.splits
        return (
            [tensor[self.index * size : (self.index + 1) * size] for tensor in batch]
            if self.splits > 1
            else list(batch)
        )

    def total(self, loss: float, step: int) -> float:
        """The loss of the whole step; leaves the whole step's gradient in the parameters, and the amaxes that the next steps need."""
        if self.world.size == 1:
            return loss
        if not self.world.layout.sharded:
            _add_up([p.grad for p in self.parameters if p.grad is not None])
        if self.several:
            _agree(self.engine.histories(step), step)
        return self.world.sums(loss)[0]

    def shares(self, count: int) -> list[int]:
        """Which of `count` batches of an evaluation this rank takes: as many as any, the last one twice, since a sharded model's ranks
        must meet in it."""
        return [min(first + self.world.rank, count - 1) for first in range(0, count, self.world.size)]

    def in_order(self, values: Sequence[float], count: int) -> list[float]:
        """Everybody's values for what `shares` gave out, in the order of the batches."""
        lists = self.world.listed(values)
        return [lists[number % self.world.size][number // self.world.size] for number in range(count)]


def shard(model: nn.Module, engine: Engine) -> None:
    """Let each rank keep a part of every parameter, where the ranks were asked to: of quantised layers by the engine, of others by FSDP2.

    Gradients are sums over the ranks, since each rank's loss is divided by the number of all micro-batches.
    """
    here = world()
    if not here.layout.sharded:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(here.device.type, (here.size,))
    own = engine.shard(mesh)
    fully_shard(model, mesh=mesh, ignored_params=own)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)  # gloo knows no sum with a factor


def _add_up(gradients: Sequence[Tensor]) -> None:
    """Make each gradient the sum of every rank's, in its own precision, fp32."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, total in zip(
        gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
    ):
        gradient.copy_(total.view_as(gradient))


def _agree(histories: Sequence[dict[int, Tensor | float]], step: int) -> None:
    """Make the amax of this step in each history the largest that any rank saw."""
    if not histories:
        return
    seen = torch.tensor([float(amaxes[step]) for amaxes in histories], dtype=torch.float32)
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    for amaxes, largest in zip(histories, seen, strict=True):
        amaxes[step] = largest.to(amaxes[step].device) if isinstance(amaxes[step], Tensor) else largest.item()


def clip(parameters: Sequence[nn.Parameter], limit: float) -> float:
    """Scale the gradient so that its norm, of everybody's parts, is at most `limit`; returns the norm it had."""
    if not any(in_parts(p) for p in parameters):
        return nn.utils.clip_grad_norm_(parameters, limit).item()
    mine = nn.utils.get_total_norm([p.grad.to_local() for p in parameters if p.grad is not None]).item()
    norm = math.sqrt(world().sums(mine**2)[0])
    nn.utils.clip_grads_with_norm_(parameters, limit, torch.tensor(norm, device=world().device))
    return norm


# What a checkpoint holds is whole, so that any number of ranks goes on from it


def gathered(state: Any, kept: bool) -> Any:
    """Nested dictionaries and lists with every sharded tensor whole, one after the other, on the CPU; nothing of them where not `kept`.

    All ranks call it, and rank 0 keeps it: a sharded model may be larger than one GPU.
    """
    if in_parts(state):
        full = whole(state)
        return full.cpu() if kept else None
    if isinstance(state, dict):
        return {key: gathered(value, kept) for key, value in state.items()}
    return [gathered(value, kept) for value in state] if isinstance(state, list) else state


def placed(state: dict[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors by name, each laid out as its namesake is."""
    return {name: _as(tensor, like.get(name)) for name, tensor in state.items()}


def _as(tensor: Any, like: Any) -> Any:
    if not in_parts(like) or not isinstance(tensor, Tensor) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def placed_optimizer(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's whole state, each parameter's moments laid out as the parameter is."""
    if "parts" in state:  # of several optimizers, which are never sharded
        return state
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = {
        number: {name: _as(kept, parameters[number]) for name, kept in its.items()}
        for number, its in state["state"].items()
    }
    return state | {"state": moments}
