"""A converted model trained under DistributedDataParallel: by ranks of a group, and beside them by one process.

`python -m torch.distributed.run --standalone --nproc-per-node N ddp_program.py BACKEND DEVICE [RECIPE]...` trains on N ranks
with a micro-batch each. Exit status 1, with the parameters that differ, unless every rank has the bits of one process with
all micro-batches. Ranks may share a GPU with gloo, while NCCL takes one rank a GPU.
"""

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import ablate

STEPS = 3


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Two blocks between linear layers that no recipe quantises."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 32), nn.Linear(32, 4)
        self.trunk = nn.ModuleList(Block(32) for _ in range(2))

    def forward(self, x):
        x = self.stem(x)
        for block in self.trunk:
            x = block(x)
        return self.head(x)


def batch(step: int, number: int) -> torch.Tensor:
    """Micro-batch of a step, the same on every machine."""
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(100 * step + number))


def trained(
    wrap: Callable[[nn.Module], nn.Module], mine: list[int], recipe: str, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """The weights after training on these micro-batches of every step."""
    torch.manual_seed(0)
    model = Net().to(device)
    run = ablate.convert(model, recipe, seed=3, steps=STEPS, measure_every=2)
    called = wrap(model)
    optimizer = torch.optim.AdamW(called.parameters(), lr=1e-2)
    for step in range(STEPS):
        with run.step():
            for number in mine:
                (called(batch(step, number).to(device)).square().mean() / len(mine)).backward()
            optimizer.step()
            optimizer.zero_grad()
    with run.evaluation(), torch.no_grad():
        called(batch(STEPS, 0).to(device))
    return {name: whole(value).cpu().clone() for name, value in model.state_dict().items()}


def whole(value: torch.Tensor) -> torch.Tensor:
    """A sharded parameter in full."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def data_parallel(model: nn.Module) -> nn.Module:
    """Torch's own wrapper."""
    return nn.parallel.DistributedDataParallel(model)


def compare(backend: str, device: str, recipes: list[str]) -> list[str]:
    """Train each recipe both ways; returns a line for each parameter that differs on this rank."""
    torch.set_num_threads(1)
    if device == "cuda":  # a GPU each, as NCCL wants it; with gloo they may share
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    # Before there is a group: from then on a converted model is one rank of several.
    alone = {recipe: trained(lambda model: model, [*range(ranks)], recipe, device) for recipe in recipes}
    dist.init_process_group(backend)
    lines = []
    for recipe in recipes:
        for name, value in trained(data_parallel, [rank], recipe, device).items():
            if not torch.equal(value, alone[recipe][name]):
                most = (value - alone[recipe][name]).abs().max().item()
                lines.append(f"rank {rank} of {ranks}, {recipe}: {name} differs by up to {most:.3g}")
    dist.barrier()
    dist.destroy_process_group()
    return lines


if __name__ == "__main__":
    different = compare(sys.argv[1], sys.argv[2], sys.argv[3:] or ["nvfp4", "bf16"])
    print(*different, sep="\n")
    sys.exit(bool(different))
