"""Arithmetic on CUDA: what it rounds is off for every arm, and the attention call alone is deterministic.

A CPU runs these tests: the switches belong to the process, and torch's dispatcher shows which operations they cover.
"""

import pytest
import torch
import torch.nn.functional as F
from support.experiments import SHAPE, shards
from torch.utils._python_dispatch import TorchDispatchMode

from ablate.errors import InputError
from ablate.experiment.trial_spec import TrialSpec
from ablate.recipes import PRESETS
from ablate.training import cuda_arithmetic
from ablate.training.workloads.gpt import Gpt


@pytest.fixture(autouse=True)
def _switches():
    """Leave torch's switches as they were."""
    products, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    mode, fill = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction", "allow_tf32")
    before = {name: getattr(products, name) for name in names}
    convolutions = cudnn.allow_tf32, cudnn.deterministic
    yield
    for name, value in before.items():
        setattr(products, name, value)
    cudnn.allow_tf32, cudnn.deterministic = convolutions
    torch.set_deterministic_debug_mode(mode)
    torch.utils.deterministic.fill_uninitialized_memory = fill


class Covered(TorchDispatchMode):
    """Operations that ran with deterministic algorithms, and those that ran without."""

    def __init__(self) -> None:
        super().__init__()
        self.on: set[str] = set()
        self.off: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        (self.on if torch.are_deterministic_algorithms_enabled() else self.off).add(
            func.overloadpacket.__name__
        )
        return func(*args, **(kwargs or {}))


def parts(heads: int = 4, kv_heads: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, count, 8, 16) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_alone_is_deterministic_in_both_passes(kv_heads):
    q, k, v = parts(kv_heads=kv_heads)
    with Covered() as seen:
        y = cuda_arithmetic.attention(q.sin(), k.sin(), v.sin(), causal=True, grouped=kv_heads != 4)
        y.cos().sum().backward()
    kernels = {name for name in seen.on | seen.off if name.startswith("_scaled_dot_product")}
    assert any(name.endswith("backward") for name in kernels)
    assert len(kernels) == 2
    assert kernels <= seen.on
    assert not kernels & seen.off
    assert {"sin", "cos", "sum", "mul"} <= seen.off  # before and after it, in both passes
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_switch_changes_no_value(kv_heads):
    mine, theirs = parts(kv_heads=kv_heads), parts(kv_heads=kv_heads)
    grouped = kv_heads != 4
    y = cuda_arithmetic.attention(*mine, causal=True, grouped=grouped)
    z = F.scaled_dot_product_attention(*theirs, is_causal=True, enable_gqa=grouped)
    for result in (y, z):
        result.square().sum().backward()
    assert torch.equal(y, z)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine, theirs, strict=True))


def test_a_failing_call_leaves_the_switch_off():
    q, k, v = parts()
    with pytest.raises(RuntimeError):
        cuda_arithmetic.attention(q, k[..., :3], v, causal=True, grouped=False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_attention_within_deterministic_algorithms_leaves_them_on():
    torch.set_deterministic_debug_mode("error")
    cuda_arithmetic.attention(*parts(), causal=True, grouped=False).sum().backward()
    assert torch.are_deterministic_algorithms_enabled()


def test_reduced_precision_is_off_before_the_first_product():
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = True
    products.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.utils.deterministic.fill_uninitialized_memory = True
    environment: dict[str, str] = {}
    cuda_arithmetic.configure(environment)
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert not products.allow_bf16_reduced_precision_reduction
    assert not products.allow_fp16_reduced_precision_reduction
    assert not products.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.cuda.is_initialized()


def test_a_workspace_that_repeats_nothing_is_refused_where_bits_are_promised():
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}
    cuda_arithmetic.configure(environment)
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}
    cuda_arithmetic.follow(False, False, environment)
    with pytest.raises(InputError, match="CUBLAS_WORKSPACE_CONFIG=:0:0"):
        cuda_arithmetic.follow(True, False, environment)


@pytest.mark.parametrize(("deterministic", "everywhere"), [(True, False), (True, True), (False, True)])
def test_all_operations_are_deterministic_only_where_attention_is_not_ours(deterministic, everywhere):
    cuda_arithmetic.follow(deterministic, everywhere, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
    assert torch.are_deterministic_algorithms_enabled() == (deterministic and everywhere)


def test_deterministic_counts_on_a_gpu_alone(tmp_path):
    def ids(device: str, **fields: bool) -> tuple[str, str]:
        config = Gpt(**(SHAPE | {"data": shards(tmp_path)} | fields))
        spec = TrialSpec(
            workload="gpt", config=config, recipe=PRESETS["nvfp4"](), seed=0, engine="emulated", device=device
        )
        return spec.id, spec.history(2)

    assert ids("cpu") == ids("cpu", deterministic=False) == ids("cpu", deterministic=True)
    assert ids("cuda") == ids("cuda", deterministic=True)
    assert not set(ids("cuda")) & set(ids("cuda", deterministic=False))
