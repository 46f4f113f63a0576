"""Ranks of one trial: the rank of this process, its part of every step, and the values that ranks exchange.

A process belongs to one trial, as it belongs to one process group: `join` sets the rank once, and `world`
returns it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ablate.engines.emulated import Engine
from ablate.engines.ranks import Divided, in_parts, whole
from ablate.recipes.recipe import Recipe
from ablate.training.hyperparameters import Training
from ablate.training.optimizers import OptimizerState
from ablate.training.rank_layout import Layout

T = TypeVar("T")

_PATIENCE = timedelta(days=1)
"""Longest time that a rank waits for the others. It is long because a rank may wait for another process that
runs the same trial. A rank that dies closes its connections, so the others see that at once."""


class World:
    """All ranks of the trial that this process works on; with one rank, every method is the identity. The
    device is `cpu` or `cuda`. `broadcast`, `sums`, `listed`, `first` and `leave` are collective: all ranks
    call them, in the same order."""

    def __init__(self, layout: Layout, rank: int, device: str) -> None:
        self.layout, self.rank, self.size = layout, rank, layout.ranks
        self.device = torch.device(device)
        self.begun = False
        """True once the ranks are training."""

    def begin(self, config: Training, recipe: Recipe, engine: str) -> None:
        """Start training on all ranks: rank 0 releases the others, which wait in `begins`. ValueError if so
        many ranks cannot train this; see `Layout.misfits`."""
        if self.size > 1 and (why := next(self.layout.misfits(config, recipe, engine), None)):
            raise ValueError(why)
        if self.size > 1 and self.rank == 0 and not self.begun:
            self.broadcast(True)
        self.begun = True

    def begins(self) -> bool:
        """Wait, on a rank other than 0, until rank 0 begins or ends; return True if it begins."""
        self.begun = self.broadcast(False)
        return self.begun

    def broadcast(self, value: T) -> T:
        """Return rank 0's value, which can be pickled, on every rank; that of the others does not count."""
        if self.size == 1:
            return value
        box = [value]
        # By gloo, so that a whole model does not pass through a GPU.
        dist.broadcast_object_list(box, device=torch.device("cpu"))
        return box[0]

    def sums(self, *numbers: float) -> list[float]:
        """Return each number's sum over the ranks, in fp64."""
        if self.size == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def listed(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers, by rank, in fp64; all ranks pass equally many."""
        if self.size == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        everybody = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everybody, mine)
        return [numbers.tolist() for numbers in everybody]

    def first(self, value: T, place: float) -> T:
        """Return the value of the rank with the smallest place, on every rank."""
        if self.size == 1:
            return value
        places, box = self.listed([place]), [value]
        dist.broadcast_object_list(box, src=places.index(min(places)), device=torch.device("cpu"))
        return box[0]

    def leave(self) -> None:
        """Leave the process group; if rank 0 never began, let the waiting ranks end first."""
        if self.size > 1:
            if self.rank == 0 and not self.begun:
                self.broadcast(False)
            dist.barrier()  # a rank that ends first would close its connections to the others
            dist.destroy_process_group()


_world = World(Layout(), 0, "cpu")


def world() -> World:
    """Return the ranks of this process: itself alone, unless `join` was called."""
    return _world


def join(layout: Layout, rank: int, device: str, meeting: str | None = None) -> World:
    """Join a process group and return the world, which `world` returns from now on. The ranks communicate by
    gloo, and on GPUs by NCCL as well. `meeting` is the path of a file, absent at first, through which the
    ranks of one machine find each other; without it, they use the address that torch's environment variables
    give."""
    global _world
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if meeting:
        dist.init_process_group(
            backend, f"file://{meeting}", timeout=_PATIENCE, rank=rank, world_size=layout.ranks
        )
    else:
        dist.init_process_group(backend, timeout=_PATIENCE)
    _world = World(layout, rank, device)
    return _world


def become(world: World) -> World:
    """Make `world` the ranks of this process, which has joined their process group already, and return it."""
    global _world
    _world = world
    return world


@contextmanager
def alone() -> Iterator[None]:
    """Inside this context, compute as a single rank, whatever group the process belongs to."""
    global _world
    before, _world = _world, World(Layout(), 0, _world.device.type)
    try:
        yield
    finally:
        _world = before


class RankPart:
    """This rank's part of every step of one run, which `accumulate` and `batch` of the workload divide."""

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
        """Inside this context, let the engine include the ranks that have the rest of a micro-batch."""
        return self.engine.divided(self._divided) if self._divided else nullcontext()

    def of(self, batch: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's sequences of a micro-batch's tensors, whose first dimension is the sequences."""
        size = len(batch[0]) // self.splits
        return (
            [tensor[self.index * size : (self.index + 1) * size] for tensor in batch]
            if self.splits > 1
            else list(batch)
        )

    def total(self, loss: Tensor, step: int) -> Tensor | float:
        """Return the loss of the whole step, from this rank's part of the mean loss (fp64 scalar); that of
        one rank stays on the device.

        Leave the whole step's gradient in the parameters (sharded ones have it already), and make the amaxes
        of the step, which later steps need, equal on all ranks. Collective.
        """
        if self.world.size == 1:
            return loss
        if not self.world.layout.sharded:
            _add_up([p.grad for p in self.parameters if p.grad is not None])
        if self.several:
            _agree(self.engine.histories(step), step)
        return self.world.sums(loss.item())[0]

    def shares(self, count: int) -> list[int]:
        """Return the numbers of the evaluation's `count` batches that this rank takes. Every rank takes
        equally many, so the last batch may be taken twice: the ranks of a sharded model must call it
        together."""
        return [min(first + self.world.rank, count - 1) for first in range(0, count, self.world.size)]

    def in_order(self, values: Sequence[float], count: int) -> list[float]:
        """Return all ranks' values for the `count` batches of an evaluation, in the order of the batches,
        from this rank's values of the batches that `shares` assigned to it. Collective."""
        lists = self.world.listed(values)
        return [lists[number % self.world.size][number // self.world.size] for number in range(count)]


def shard(model: nn.Module, engine: Engine) -> None:
    """Shard every parameter of a converted model over the ranks, in place, if the layout is sharded.
    Collective. The engine shards the weights of quantised layers, FSDP2 those of all others. Gradients are
    sums over the ranks, since each rank's loss is divided by the number of all micro-batches."""
    here = world()
    if not here.layout.sharded:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(here.device.type, (here.size,))
    own = engine.shard(mesh)
    fully_shard(model, mesh=mesh, ignored_params=own)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor


def _add_up(gradients: Sequence[Tensor]) -> None:
    """Replace each gradient by its sum over the ranks, in its own precision, fp32."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, total in zip(
        gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
    ):
        gradient.copy_(total.view_as(gradient))


def _agree(histories: Sequence[dict[int, Tensor | float]], step: int) -> None:
    """Replace this step's amax in each history by the largest of any rank."""
    if not histories:
        return
    seen = torch.tensor([float(amaxes[step]) for amaxes in histories], dtype=torch.float32)
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    for amaxes, largest in zip(histories, seen, strict=True):
        own = amaxes[step]
        amaxes[step] = largest.to(own.device) if isinstance(own, Tensor) else largest.item()


def clip(parameters: Sequence[nn.Parameter], limit: float) -> Tensor | float:
    """Scale the gradients in place to an L2 norm, of all parameters and ranks together, of `limit` at most
    (infinity: no scaling), and return the norm before. Collective if sharded. The norm of a gradient in one
    piece is a scalar on its device, which is not read here."""
    if not any(in_parts(p) for p in parameters):
        return nn.utils.clip_grad_norm_(parameters, limit)
    mine = nn.utils.get_total_norm([p.grad.to_local() for p in parameters if p.grad is not None]).item()
    norm = math.sqrt(world().sums(mine**2)[0])
    nn.utils.clip_grads_with_norm_(parameters, limit, torch.tensor(norm, device=world().device))
    return norm


# A checkpoint holds whole tensors, so that a run can continue on any number of ranks


def gathered(state: object, kept: bool) -> Any:
    """Return nested dicts and lists, of one structure on all ranks, with every sharded tensor whole, on the
    CPU. Collective. Ranks with `kept` False get None for each sharded tensor. Tensors are gathered one after
    the other, since a sharded model may be larger than one GPU."""
    if in_parts(state):
        full = whole(state)  # ranks that keep nothing take part, too
        return full.cpu() if kept else None
    if isinstance(state, dict):
        return {key: gathered(value, kept) for key, value in state.items()}
    return [gathered(value, kept) for value in state] if isinstance(state, list) else state


def placed(state: dict[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's whole tensors by name, the same on all ranks, each laid out like the tensor of the
    same name in `like`, the model's present state dict: a rank keeps its part of each sharded tensor."""
    return {name: _as(tensor, like.get(name)) for name, tensor in state.items()}


def _as(value: T, like: Tensor | None) -> T:
    """Return a value laid out like a sharded tensor, if it is a tensor of the same shape."""
    if like is None or not in_parts(like) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def placed_optimizer(state: OptimizerState, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Return the whole state, the same on all ranks, of an optimizer over the same parameters, with each
    parameter's moments laid out like the parameter."""
    if "parts" in state:  # the state of a `Joint` optimizer, which is never sharded
        return state
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = {
        number: {name: _as(kept, parameters[number]) for name, kept in its.items()}
        for number, its in state["state"].items()
    }
    return state | {"state": moments}
