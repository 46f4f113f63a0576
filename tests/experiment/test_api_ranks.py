"""A converted model under DistributedDataParallel and FSDP2: two ranks compute what one process does of the same micro-batches."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.ddp_program import data_parallel, trained
from support.experiments import environment
from support.ranks import in_ranks
from torch import nn

pytestmark = pytest.mark.slow
RANKS = 2
PROGRAM = Path(__file__).parents[1] / "support" / "ddp_program.py"
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]


def fully_sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.trunk:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def on_this_rank(wrap: Callable[[nn.Module], nn.Module], recipe: str) -> dict[str, np.ndarray]:
    return arrays(trained(wrap, [torch.distributed.get_rank()], recipe))


def arrays(weights: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The weights as another process can send them."""
    return {name: value.numpy() for name, value in weights.items()}


@pytest.mark.parametrize("wrap", [data_parallel, fully_sharded])
@pytest.mark.parametrize("recipe", ["nvfp4", "quartet2", "bf16"])
def test_two_ranks_have_the_weights_of_one_process(wrap, recipe):
    """To the bit: rank r draws the bits of micro-batch r, and halving a loss is exact."""
    expected = arrays(trained(lambda model: model, [0, 1], recipe))
    for found in in_ranks(RANKS, on_this_rank, wrap, recipe):
        assert {name for name in expected if not np.array_equal(found[name], expected[name])} == set()


def test_scales_of_earlier_steps_are_refused_on_several_ranks():
    with pytest.raises(AssertionError, match="which are not shared among 2 ranks"):
        in_ranks(RANKS, on_this_rank, data_parallel, "fp8_delayed")


@pytest.mark.parametrize(
    ("backend", "device", "ranks"),
    [
        ("gloo", "cpu", 2),
        pytest.param("gloo", "cuda", 2, marks=ON_GPU),
        pytest.param("nccl", "cuda", 1, marks=ON_GPU),
    ],
)
def test_ranks_that_torchrun_starts_have_the_weights_of_one_process(backend, device, ranks):
    """On one GPU: two ranks share it by gloo, and NCCL has it for one rank, since it refuses two."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = environment(PYTHONPATH=os.pathsep.join(paths), OMP_NUM_THREADS="1")
    done = subprocess.run(
        [*launcher, str(PROGRAM), backend, device],
        capture_output=True,
        text=True,
        env=environ,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
