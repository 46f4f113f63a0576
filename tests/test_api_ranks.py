"""A converted model under DistributedDataParallel and FSDP2: two ranks compute what one process does of the same micro-batches."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.ranks import in_ranks
from torch import nn

import ablate

pytestmark = pytest.mark.slow
STEPS, RANKS = 3, 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
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
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(100 * step + number))


def trained(wrap: Callable[[nn.Module], nn.Module], mine: list[int], recipe: str) -> dict[str, np.ndarray]:
    """The weights after training on these micro-batches of every step."""
    torch.manual_seed(0)
    model = Net()
    run = ablate.convert(model, recipe, seed=3, steps=STEPS, measure_every=2)
    called = wrap(model)
    optimizer = torch.optim.AdamW(called.parameters(), lr=1e-2)
    for step in range(STEPS):
        with run.step():
            for number in mine:
                (called(batch(step, number)).square().mean() / len(mine)).backward()
            optimizer.step()
            optimizer.zero_grad()
    with run.evaluation(), torch.no_grad():
        called(batch(STEPS, 0))
    return {name: whole(value).numpy().copy() for name, value in model.state_dict().items()}


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def data_parallel(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fully_sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.trunk:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def on_this_rank(wrap: Callable[[nn.Module], nn.Module], recipe: str) -> dict[str, np.ndarray]:
    return trained(wrap, [torch.distributed.get_rank()], recipe)


@pytest.mark.parametrize("wrap", [data_parallel, fully_sharded])
@pytest.mark.parametrize("recipe", ["nvfp4", "quartet2", "bf16"])
def test_two_ranks_have_the_weights_of_one_process(wrap, recipe):
    """To the bit: rank r draws the bits of micro-batch r, and halving a loss is exact."""
    expected = trained(lambda model: model, [0, 1], recipe)
    for found in in_ranks(RANKS, on_this_rank, wrap, recipe):
        assert {name for name in expected if not np.array_equal(found[name], expected[name])} == set()


def test_scales_of_earlier_steps_are_refused_on_several_ranks():
    with pytest.raises(AssertionError, match="which are not shared among 2 ranks"):
        in_ranks(RANKS, on_this_rank, data_parallel, "fp8_delayed")
