"""One linear layer at the shapes of real models, forward and backward, by either engine: what `ablate bench
linear` measures.

It measures nothing itself: it says which engine computes a preset here, builds the layers, and makes lines of
the seconds that they took.
"""

import csv
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ablate import provenance
from ablate.engines.hardware import Machine, Refusal, refusal
from ablate.engines.te_mapping import MULTIPLE, families, recipe_refusals, variants
from ablate.numerics.choices import DTYPES
from ablate.recipes import Recipe
from ablate.recipes.recipe import DIRECTIONS, Products
from ablate.verification.gpu_peaks import Peaks, known, share

EMULATED, NATIVE, PLAIN = "emulated", "transformer_engine", "torch"
"""Who computes a line; PLAIN: nothing is quantised, so that both engines call torch."""
GPU = "cuda"
"""The class of device that Transformer Engine computes on."""
YARDSTICK = {"cpu": 2048, "cuda": 8192}
"""Largest side of the square bf16 product that stands for a peak that nobody has printed, by class of
device."""
_SMALLEST_SIDE, _PRODUCT_SECONDS = 256, 0.25
"""Smallest side on a CPU, and how long one product may take: a side is doubled while twice the side is
expected to stay below."""
TOKENS = {"cpu": 512, "cuda": 8192}
"""Of a model's layers, where none are given: what takes seconds on a CPU, and fills a GPU."""
_BACKWARD = ("dgrad", "wgrad")
_SMI = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")


class Block(NamedTuple):
    """A transformer block's widths, as the model's published configuration has them."""

    width: int
    heads: int
    kv_heads: int
    hidden: int
    head: int = 128


MODELS = {
    "llama-8b": Block(4096, 32, 8, 14336),
    "llama-70b": Block(8192, 64, 8, 28672),
    "llama-405b": Block(16384, 128, 8, 53248),
    "qwen3-0.6b": Block(1024, 16, 8, 3072),
    "qwen3-1.7b": Block(2048, 16, 8, 6144),
    "qwen3-4b": Block(2560, 32, 8, 9728),
    "qwen3-8b": Block(4096, 32, 8, 12288),
    "qwen3-14b": Block(5120, 40, 8, 17408),
    "qwen3-32b": Block(5120, 64, 8, 25600),
}
"""Llama 3.1 and Qwen 3, the dense ones."""


class Shape(NamedTuple):
    """A layer's size, and what it is called."""

    name: str
    tokens: int
    inputs: int
    outputs: int

    @property
    def size(self) -> str:
        """As it is written on the command line."""
        return f"{self.tokens}x{self.inputs}x{self.outputs}"

    @property
    def flops(self) -> float:
        """Of one of its three products, each of which multiplies and adds as often."""
        return 2.0 * self.tokens * self.inputs * self.outputs


def shapes_of(model: str, tokens: int) -> list[Shape]:
    """The four linear layers of a model's block, those that share an input as one: what a fused
    implementation multiplies.
    """
    block = MODELS[model]
    keys = block.head * block.kv_heads
    out = block.head * block.heads
    widths = {
        "qkv": (block.width, out + 2 * keys),
        "out": (out, block.width),
        "gate+up": (block.width, 2 * block.hidden),
        "down": (block.hidden, block.width),
    }
    return [Shape(f"{model} {name}", tokens, *pair) for name, pair in widths.items()]


# --- who computes ---------------------------------------------------------------------------------


def refused(recipe: Recipe, shapes: Sequence[Shape], device: str, machine: Machine) -> Refusal | None:
    """Return why Transformer Engine cannot compute layers of these shapes by a recipe here; None where it
    can, or nothing is quantised.
    """
    other = "--engine emulated computes it on any device"
    if recipe.plain:
        return None
    if reason := refusal(machine, families(variants(recipe))):
        return Refusal(reason.why, reason.out if reason.out.startswith("pip") else other)
    if device != GPU:
        return Refusal(f"this runs on {device}, and Transformer Engine on GPUs", other)
    if reason := next(recipe_refusals(recipe), None):
        return Refusal(reason, other)
    odd = next((shape for shape in shapes if any(extent % MULTIPLE for extent in shape[1:])), None)
    return odd and Refusal(f"{odd.size}: Transformer Engine takes multiples of {MULTIPLE}", other)


def multiplied(products: Products, engine: str, dtype: str) -> dict[str, str]:
    """The format in which each of the three products is multiplied: of the emulator that of the numbers it
    holds, of TE the operands'.
    """
    return {name: _format(getattr(products, name), engine, dtype) for name in DIRECTIONS["all"]}


def _format(product: Any, engine: str, dtype: str) -> str:
    quants = [getattr(product, operand) for operand in product.operands]
    if engine == NATIVE and all(quants):
        return "fp4" if product.fp4 else "fp8"
    return "fp32" if dtype == "fp32" or any(quant and quant.wide for quant in quants) else "bf16"


# --- what is measured -----------------------------------------------------------------------------


Passes = Callable[[Callable[[], None]], None]
"""Computes a forward and a backward pass, and calls its argument before, between and after the two."""


def passes(
    recipes: Mapping[str, tuple[Recipe, str]], shape: Shape, device: str, weights: str
) -> dict[str, Passes]:
    """A layer of this shape for each recipe and the engine that computes it, all with the same fp32 or bf16
    weight, x and dy.
    """
    import torch

    generator = torch.Generator(device).manual_seed(0)
    _, tokens, inputs, outputs = shape
    x, dy = (
        torch.randn(tokens, n, generator=generator, device=device, dtype=torch.bfloat16)
        for n in (inputs, outputs)
    )
    bare = torch.nn.Linear(inputs, outputs, bias=False, device="meta")
    weight = torch.empty(outputs, inputs, device=device, dtype=getattr(torch, DTYPES[weights]))
    bare.weight = torch.nn.Parameter(weight.normal_(0, 0.02, generator=generator))
    return {
        name: _passes(_layer(bare, recipe, engine), x.requires_grad_(), dy)
        for name, (recipe, engine) in recipes.items()
    }


def _layer(bare: Any, recipe: Recipe, engine: str) -> Any:
    from ablate.engines.emulated_layer import DTYPES, EmulatedLinear
    from ablate.numerics.philox import Clock

    clock = Clock(0)
    if engine == NATIVE:
        from ablate.engines.transformer_engine import Draws, NativeLinear

        layer = NativeLinear(bare, "linear", clock, DTYPES[recipe.dtype], Draws(clock))
    else:
        layer = EmulatedLinear(bare, "linear", clock, DTYPES[recipe.dtype])
    layer.products = recipe.products
    return layer


def _passes(layer: Any, x: Any, dy: Any) -> Passes:
    def both(mark: Callable[[], None]) -> None:
        x.grad = layer.weight.grad = None
        mark()
        y = layer(x)
        mark()
        y.backward(dy)
        mark()

    return both


def matmul(side: int, device: str) -> Passes:
    """torch's own square product of bf16 operands, the yardstick where no peak is known, as a layer computes
    it: a b^T.

    Without bf16 instructions it goes by way of fp32 operands, as the layers do: oneDNN's bf16 product then
    takes several times as long, and of a b, in the other layout, a hundred times.
    """
    import torch

    from ablate.numerics.product import linear

    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(side, side, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(2)
    )

    def product(mark: Callable[[], None]) -> None:
        mark()
        linear(a, b)
        mark()

    return product


def side(device: str, seconds: Callable[[int], float]) -> int:
    """The side of the yardstick's product: the largest that is short on this machine.

    `seconds` times the product of a side.
    """
    found = YARDSTICK[device]
    if device == GPU:
        return found
    tried = min(_SMALLEST_SIDE, found)
    while tried < found and 8 * seconds(tried) <= _PRODUCT_SECONDS:
        tried *= 2
    return tried


# --- what is told ---------------------------------------------------------------------------------


class Yardstick(NamedTuple):
    """Reference of a share: the peaks that NVIDIA prints for this GPU; else none, and one is measured."""

    peaks: Peaks
    said: str


def yardstick(device: str) -> Yardstick:
    """The peaks of the device that is here; none, of a CPU and of a GPU that is not in the table."""
    if device == GPU:
        import torch

        gpu = known(torch.cuda.get_device_name())
        if gpu:
            return Yardstick(gpu.peaks, f"the dense peak of the format that is multiplied ({gpu.source})")
    return Yardstick({}, "")


def measured_yardstick(side: int, device: str) -> str:
    """What a share is of where no peak is known: the product that is measured."""
    from ablate.numerics.product import multiplies_bf16

    by = (
        ""
        if device == GPU or multiplies_bf16()
        else ", by way of fp32 operands since this CPU has no bf16 instructions"
    )
    return f"torch's own bf16 product of {side}x{side}x{side}{by}, measured in turn with the layers"


def measured(speed: float) -> Peaks:
    """One speed in FLOP/s as the yardstick of every format."""
    return dict.fromkeys(("bf16", "fp8", "fp4", "fp32"), speed)


def line(
    shape: Shape,
    preset: str,
    recipe: Recipe,
    engine: str,
    seconds: tuple[float, float],
    peaks: Peaks,
    unit: tuple[str, float],
) -> dict[str, Any]:
    """What a layer's seconds forward and backward mean; `unit`: a name and the FLOP/s that it is."""
    formats = multiplied(recipe.products, engine, recipe.dtype)
    found: dict[str, Any] = {"shape": shape.name, "size": shape.size, "preset": preset, "engine": engine}
    parts = zip(("forward", "backward"), (("fprop",), _BACKWARD), seconds, strict=True)
    told = [
        (way, _sums(shape.flops, [formats[name] for name in names]), spent) for way, names, spent in parts
    ]
    found |= {f"{way} ms": 1000 * spent for way, _, spent in told}
    found |= {f"{way} {unit[0]}": sum(flops.values()) / spent / unit[1] for way, flops, spent in told}
    found |= {f"{way} of peak": share(flops, spent, peaks) for way, flops, spent in told}
    ideals = {way: share(flops, 1.0, peaks) for way, flops, _ in told}
    tops = {
        f"{way} peak": sum(flops.values()) / ideals[way] / unit[1] if ideals[way] else None
        for way, flops, _ in told
    }
    return found | {"multiplies": formats} | tops


def _sums(flops: float, formats: Sequence[str]) -> dict[str, float]:
    return {name: flops * formats.count(name) for name in dict.fromkeys(formats)}


def machine(device: str) -> dict[str, Any]:
    """What this ran on: processor, versions; of a GPU its name, capability, driver and, where nvidia-smi
    tells, its clocks just now.
    """
    import torch

    found = {name: fact for name, fact in provenance.environment().items() if name != "host"}
    found |= {"device": device, "threads": torch.get_num_threads()}
    if device == GPU:
        gpu = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "gpu memory GiB": gpu.total_memory / 2**30,
        }
        found |= {"cuda": torch.version.cuda} | dict(_smi(f"GPU-{gpu.uuid}"))
    return found


def _smi(uuid: str) -> Iterator[tuple[str, str]]:
    """Return what nvidia-smi reports of a GPU; empty without one."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader", "-i", uuid]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return
    yield from zip(_SMI, next(csv.reader(told.splitlines(), skipinitialspace=True), ()), strict=False)
