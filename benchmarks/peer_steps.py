"""One training step of the same small GPT under each library's NVFP4 training, with one builder per library.

A builder takes the workload, replaces its linears from outside, and returns a call that trains one step more
and returns its record. Model, weights, batches, loss, clipping and optimizer are ours for all: only the three
products of the linears in the blocks differ.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from peer_entry import Entry
from peer_kernels import FAKE, absent
from torch import Tensor, nn

from ablate.recipes import PRESETS
from ablate.training.loop import Telemetry
from ablate.training.workloads.gpt import Gpt
from ablate.verification import peers

NEVER = 10**6
HADAMARD = "its Hadamard matrix put on the CPU from outside"
Call = Callable[[], Any]
Replace = Callable[[nn.Linear], nn.Module]


def entries() -> list[Entry]:
    """Return ours first, with its two baselines, then every library that trains in NVFP4, if only in part."""
    return [
        Entry(
            "ablate, nvfp4",
            "NVIDIA's recipe: 2D weights, stochastic gradients, wgrad rotated; products in bf16",
            "",
            partial(ours, "nvfp4"),
        ),
        Entry(
            "ablate, nvfp4, compiled",
            "the same with compile: true, which fuses what surrounds the products",
            "",
            compiled,
        ),
        Entry("ablate, bf16", "baseline: nothing quantised", "", partial(ours, "bf16")),
        Entry("ablate, fp32", "baseline: nothing quantised", "", partial(ours, "fp32")),
        Entry(
            "fouroversix",
            f"FourOverSixLinear, static_6: the same recipe, products in fp32; {HADAMARD}",
            "fouroversix",
            fouroversix,
        ),
        Entry(
            "Transformer Engine",
            "its Python reference, quantisers and custom_gemm: the same, but gradients to nearest; "
            "products in fp32, block by block",
            "transformer_engine",
            transformer_engine,
        ),
        Entry(
            "torchao",
            "NVFP4Linear of its NVFP4 training",
            "torchao",
            torchao,
            why="its kernels are Triton's and need a GPU",
        ),
        Entry(
            "compressed-tensors",
            "",
            "compressed-tensors",
            why="no training linear: its fake quantisation passes no gradient",
        ),
        Entry(
            "nvidia-modelopt",
            "",
            "nvidia-modelopt",
            why=f"no training linear: it quantises the forward product only; and {FAKE}",
        ),
        *absent(),
    ]


def shape(layers: int, width: int, tokens: int) -> Gpt:
    """Return the workload: sequences of 128, heads of 64, an MLP of three widths, no warm-up.

    Every dimension is a multiple of 128: torchao refuses others, and fouroversix fails on them when it
    quantises a transpose.
    """
    size = {
        "layers": layers,
        "width": width,
        "heads": width // 64,
        "hidden": 3 * width,
        "context": 128,
        "batch": tokens // 128,
    }
    return Gpt(**size, warmup=0, decay="none", steps=NEVER, eval_every=NEVER)


def ours(preset: str, config: Gpt) -> Call:
    return _stepper(config, preset)


def compiled(config: Gpt) -> Call:
    return _stepper(config.model_copy(update={"compile": True}), "nvfp4")


def _stepper(config: Gpt, preset: str, replace: Replace | None = None) -> Call:
    """Return a call that trains one step more, without telemetry and evaluation."""
    run = config.prepare(PRESETS[preset](), 0, "cpu")
    if replace:
        for name, linear in list(run.model.blocks.named_modules()):
            if isinstance(linear, nn.Linear):
                parent, _, child = name.rpartition(".")
                setattr(run.model.blocks.get_submodule(parent), child, replace(linear))
    steps: Iterator[Any] = config.train(run, Telemetry(every=NEVER, log=1, shadow=NEVER))

    def call() -> Any:
        record = next(steps)
        if "nan/first_step" in record.metrics:
            raise FloatingPointError("a loss or a gradient is not finite")
        return record

    return call


# --- fouroversix ----------------------------------------------------------------------------------


class OneSequence(nn.Module):
    """All tokens as one sequence: fouroversix's backward pass takes a batch of one."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(1, -1, x.shape[-1])).view(*x.shape[:-1], -1)


def fouroversix(config: Gpt) -> Call:
    import fouroversix as library
    from fouroversix.quantize.pytorch import backend

    # As shipped, wgrad fails on a CPU: the back end builds its Hadamard matrix on "cuda" for any tensor.
    if not isinstance(backend.get_rht_matrix, partial):
        backend.get_rht_matrix = partial(backend.get_rht_matrix, device="cpu")
    how = library.ModuleQuantizationConfig(
        scale_rule="static_6", keep_master_weights=True, weight_scale_2d=True
    )
    return _stepper(config, "bf16", lambda linear: OneSequence(library.FourOverSixLinear(linear, how)))


# --- Transformer Engine ---------------------------------------------------------------------------


class ReferenceProducts(torch.autograd.Function):
    """fprop, dgrad and wgrad by Transformer Engine's own dispatch.

    Each tensor is quantised once, in both directions.
    """

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        gemm = peers.te_reference().gemm.custom_gemm
        qx, qw = _rows().quantize(x), _tiles().quantize(w.to(x.dtype))
        ctx.saved = qx, qw
        return gemm(qw, qx, None, out_dtype=x.dtype)[0]

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        gemm = peers.te_reference().gemm.custom_gemm
        (qx, qw), q = ctx.saved, _rows().quantize(dy.contiguous())
        dx = gemm(qw, q, None, out_dtype=dy.dtype, layout="NN", grad=True)[0]
        return dx, gemm(qx, q, None, out_dtype=torch.float32, layout="NT", grad=True)[0]


class ReferenceLinear(nn.Module):
    """A linear without bias on ReferenceProducts; it keeps the parameter of the one it replaces."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return ReferenceProducts.apply(x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


def _rows() -> Any:
    """Activations and gradients: blocks of 1x16, the transpose rotated."""
    return peers.te_quantizer(rht=True)


def _tiles() -> Any:
    """Weights: blocks of 16x16."""
    return peers.te_quantizer((16, 16))


def transformer_engine(config: Gpt) -> Call:
    return _stepper(config, "bf16", ReferenceLinear)


# --- torchao --------------------------------------------------------------------------------------


def torchao(config: Gpt) -> Call:
    from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4Linear

    return _stepper(config, "bf16", NVFP4Linear.from_linear)
