"""Work of a transformer block's training step on a GPU, by preset and kernel, counted without a GPU.

    python benchmarks/gpu_counts.py [preset ...] > benchmarks/gpu_counts.csv
    python benchmarks/gpu_counts.py --lines nvfp4    # launches, by the line of the package that asks for them

One more block of a gpt of width 2048 in a step of 8,192 tokens, optimizer included: the difference of two
models on the imaginary GPU of the tests. Bytes are those of each operation's arguments and results. Kernels
of the package have the names of kernel_code.json, and elements: those of a copy, of a product or of a
histogram. RMSNorm and attention are counted as the fused kernels that CUDA builds of torch have; this build
decomposes them. `waits` are waits for the device.

Every step reads the number of operands that were not finite, as one that is recorded does. That is one look
for the whole model, so no block has a part of it.
"""

# ruff: noqa: E402    the imaginary GPU is there before torch is imported

import argparse
import csv
import sys
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support.imaginary_gpu import plug_in

plug_in()

import torch
import torch.nn.functional as F
from kernel_code import BUILDS, Build
from support.imaginary_gpu.counting import Counts
from torch import Tensor
from torch.utils import _pytree as pytree
from triton import JITFunction

from ablate.numerics.kernels import cuda
from ablate.recipes import PRESETS
from ablate.verification.bench_runs import stepper

WIDTH, TOKENS = 2048, 8192
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
FIRST_DIGIT = 23
"""Lowest bit of the digit of a histogram that needs none before it."""
BF16 = torch.bfloat16

Work = list[int]
"""Launches, bytes, elements and FLOPs."""


class Kernels(Counts):
    """Counts by kernel, too."""

    def reset(self) -> None:
        """Begin to count anew."""
        super().reset()
        self.named: dict[str, Work] = defaultdict(lambda: [0, 0, 0, 0])

    def add(self, name: str, *work: int) -> None:
        """Add launches, bytes, elements and FLOPs to a kernel that is not among the other ones."""
        self.named[name] = [old + new for old, new in zip(self.named[name], work, strict=True)]

    def fused(self, name: str, launches: int, size: int, flops: int = 0) -> None:
        """Count a fused kernel of torch, which this build of it lacks; one that multiplies has a row."""
        self.kernels[name] += launches
        self.bytes[name] += size
        if flops:
            self.add(name, launches, size, 0, flops)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:  # a question, which no device sees
            return getattr(args[0], "fake_device", args[0].device)
        before = self.bytes.total()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.bytes.total() > before and func.overloadpacket.__name__ in PRODUCTS:
            a, b = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor) and x.ndim >= 2][-2:]
            name = f"product {str(a.dtype)[6:]} {a.shape[-2]}x{a.shape[-1]}x{b.shape[-1]}"
            self.add(name, 1, self.bytes.total() - before, 0, 2 * a.numel() * b.shape[-1])
        return result

    def launched(self, kernel: Any, args: tuple) -> None:
        """Count the launch of a Triton kernel."""
        before = self.bytes.total()
        self.launch(args)
        given = dict(zip(kernel.arg_names, args, strict=False))
        self.add(row_of(kernel, given), 1, self.bytes.total() - before, args[0].numel(), 0)

    def work(self) -> dict[str, Work]:
        """Return the work by kernel."""
        named = dict(self.named)
        launches, size = (sum(each[n] for each in named.values()) for n in (0, 1))
        return named | {
            "other": [self.kernels.total() - launches, self.bytes.total() - size, 0, 0],
            "waits": [self.waits.total(), 0, 0, 0],
        }


def row_of(kernel: Any, given: dict[str, Any]) -> str:
    """Return the kernel's row of kernel_code.json: that which is most like this launch, and does as much."""
    dtype = {BF16: "bf16", torch.int32: "i32"}.get(next(iter(given.values())).dtype, "fp32")

    def unlike(build: Build) -> tuple[int, ...]:
        constants = build.constants
        if "SHIFT" in constants:
            lower = [each["SHIFT"] != FIRST_DIGIT for each in (constants, given)]
            turned = ["signs" not in constants, given.get("signs") is not None]
            return lower[0] != lower[1], turned[0] != turned[1]
        if "out" in given and "SIZE" in given:
            absent = [(name in constants) != (given.get(name) is None) for name in ("base", "slope")]
            return constants.get("ROUNDS") != given.get("ROUNDS"), *absent
        if "limit" in given:
            return ("limit" in constants) != (given["limit"] is None), 0
        if "BACK" in given and ("factor" in constants) != (given["factor"] is None):
            return 1, 0
        copies = [(constants.get(name), given.get(name)) for name in ("FIRST", "OTHER", "FORM")]
        missing = sum((one is None) != (other is None) for one, other in copies)
        fields = [
            vars(one)[name] != value
            for one, other in copies
            if one is not None and other is not None
            for name, value in vars(other).items()
        ]
        return missing, sum(fields), build.dtype != dtype

    own = {name: build for name, build in BUILDS.items() if build.kernel == kernel.__name__}
    return min(own, key=lambda name: unlike(own[name]))


class Attention(torch.autograd.Function):
    """A fused kernel forward and three launches backward; every tensor is read or written once."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, counts: Kernels) -> Tensor:
        batch, heads, length, size = q.shape
        ctx.save_for_backward(q, k, v)
        ctx.counts, ctx.flops = counts, 2 * batch * heads * length * length * size  # causal: half of them
        counts.fused("attention", 1, 4 * q.nbytes, ctx.flops)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        ctx.counts.fused("attention", 3, 10 * q.nbytes, ctx.flops * 5 // 2)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


class Norm(torch.autograd.Function):
    """RMSNorm: one kernel forward, two backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, counts: Kernels) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        counts.fused("norm", 1, 2 * x.nbytes)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.counts.fused("norm", 2, 5 * x.nbytes)
        return torch.empty_like(x), torch.empty_like(weight), None


def counted(preset: str, layers: int) -> Kernels:
    """Return the counts of the second step of a model."""
    with (
        Kernels() as counts,
        patch.object(
            F, "scaled_dot_product_attention", lambda q, k, v, **_: Attention.apply(q, k, v, counts)
        ),
        patch.object(F, "rms_norm", lambda x, shape, weight: Norm.apply(x, weight, counts)),
        patch.object(torch, "get_autocast_gpu_dtype", lambda: BF16),
        patch.object(JITFunction, "run", lambda kernel, *args, **_: counts.launched(kernel, args)),
        patch.object(cuda, "runs_on", lambda device: device.type == "cuda"),  # FakeTensors have no bits
    ):
        training = stepper(PRESETS[preset](), layers, WIDTH, TOKENS, "cuda")
        training.step()
        counts.reset()
        training.step()
        return counts


def block(preset: str) -> tuple[Counter[str], dict[str, Work]]:
    """Return launches by line, and work by kernel, of one more block.

    The smaller model has two if the recipe leaves the last one in high precision, which the difference of a
    model of one would have instead of a quantised one.
    """
    layers = 1 + bool(PRESETS[preset]().layers.last_fraction)
    one, two = counted(preset, layers), counted(preset, layers + 1)
    less, more = one.work(), two.work()
    work = {
        name: [b - a for a, b in zip(less.get(name, [0] * 4), more[name], strict=True)]
        for name in ("other", *sorted(more.keys() - {"other", "waits"}), "waits")
    }
    two.kernels.subtract(one.kernels)
    return two.kernels, {name: each for name, each in work.items() if any(each) or name == "waits"}


def main() -> None:
    """Print the table, or the lines of presets."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("presets", nargs="*", default=list(PRESETS))
    parser.add_argument("--lines", action="store_true", help="print launches by line of the package")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    out = csv.writer(sys.stdout, lineterminator="\n")
    if not options.lines:
        out.writerow(["preset", "kernel", "launches", "bytes", "elements", "flops"])
    for preset in options.presets:
        lines, work = block(preset)
        if options.lines:
            out.writerows([preset, *one] for one in lines.most_common() if one[1])
        else:
            out.writerows([preset, name, *numbers] for name, numbers in work.items())
        sys.stdout.flush()


if __name__ == "__main__":
    main()
