"""Linear layers of `ablate bench linear`: shapes of real models, forward and backward, by every engine.

It decides which engine computes a preset on this machine, builds the layers, measures them, and turns seconds
into lines of the table.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ablate import provenance
from ablate.engines import AUTO, SCALED, backend_of, converter, makes_operands, module_name
from ablate.engines.hardware import Machine, Refusal, refusal, scaled_refusal, stray_switch, this_machine
from ablate.errors import InputError
from ablate.numerics.choices import DTYPES
from ablate.recipes import Recipe, scaled_mapping
from ablate.recipes.reasons import all_of
from ablate.recipes.recipe import DIRECTIONS, Product, Products, Run
from ablate.recipes.te_mapping import MULTIPLE, families, recipe_refusals, variants
from ablate.verification import timing
from ablate.verification.bench_runs import Line
from ablate.verification.gpu_peaks import Peaks, known, share

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ablate.engines.emulated_layer import EmulatedLinear
    from ablate.numerics.quantize import Operand

EMULATED, NATIVE, PLAIN = "emulated", "transformer_engine", "torch"
"""Engine of a line; PLAIN if nothing is quantised, so that both engines call torch."""
GPU = "cuda"
"""Device class that Transformer Engine runs on."""
SIDES = {"cpu": (256, 2048), "cuda": (8192, 8192)}
"""Smallest and largest side of the square bf16 product that replaces an unpublished peak, by device class."""
_PRODUCT_SECONDS = 0.25
"""Time limit of one product: the side is doubled while twice the side is expected to stay below the limit."""
TOKENS = {"cpu": 512, "cuda": 8192}
"""Default tokens of `--model`, by device class: seconds on a CPU, enough to fill a GPU."""


MODELS = {
    "llama-8b": (4096, 32, 8, 14336),
    "llama-70b": (8192, 64, 8, 28672),
    "llama-405b": (16384, 128, 8, 53248),
    "qwen3-0.6b": (1024, 16, 8, 3072),
    "qwen3-1.7b": (2048, 16, 8, 6144),
    "qwen3-4b": (2560, 32, 8, 9728),
    "qwen3-8b": (4096, 32, 8, 12288),
    "qwen3-14b": (5120, 40, 8, 17408),
    "qwen3-32b": (5120, 64, 8, 25600),
}
"""Width, heads, heads of keys and hidden width of a block, from the published configurations of Llama 3.1 and
the dense models of Qwen 3."""
_HEAD = 128
"""Features of a head, in all of MODELS."""


class Shape(NamedTuple):
    """Name and size of a layer: tokens, input features, output features."""

    name: str
    tokens: int
    inputs: int
    outputs: int

    @property
    def size(self) -> str:
        """Size as written on the command line: `TOKENSxINxOUT`."""
        return f"{self.tokens}x{self.inputs}x{self.outputs}"

    @property
    def bytes(self) -> int:
        """Bytes of its bf16 input and output and of its fp32 weight, each with a gradient."""
        return 4 * self.tokens * (self.inputs + self.outputs) + 8 * self.inputs * self.outputs

    @property
    def flops(self) -> float:
        """Floating-point operations of one of its three products; all three have the same number."""
        return 2.0 * self.tokens * self.inputs * self.outputs


def shapes_of(model: str, tokens: int) -> list[Shape]:
    """Return the four linear layers of a model's block, with layers that share an input fused into one."""
    width, heads, kv_heads, hidden = MODELS[model]
    queries, keys = _HEAD * heads, _HEAD * kv_heads
    widths = {"qkv": (width, queries + 2 * keys), "out": (queries, width)}
    widths |= {"gate+up": (width, 2 * hidden), "down": (hidden, width)}
    return [Shape(f"{model} {name}", tokens, *pair) for name, pair in widths.items()]


def refused(
    recipe: Recipe, shapes: Sequence[Shape], device: str, machine: Machine, engine: str = NATIVE
) -> Refusal | None:
    """Return the reason why an engine cannot compute a recipe at these shapes on this machine. None if it
    can, or if nothing is quantised."""
    other = "--engine emulated computes it on any device"
    if recipe.plain or engine == EMULATED:
        return None
    if module_name(engine) == SCALED:
        backend = backend_of(engine)
        if why := all_of(scaled_mapping.refusals(recipe, backend)):
            return Refusal(why, other)
        reason = scaled_refusal(machine, device, scaled_mapping.families(recipe, backend), backend)
        return reason and Refusal(reason.why, reason.out if reason.out.startswith("pip") else other)
    if reason := refusal(machine, families(variants(recipe))):
        return Refusal(reason.why, reason.out if reason.out.startswith("pip") else other)
    if device != GPU:
        return Refusal(f"this runs on {device}, and Transformer Engine on GPUs", other)
    if why := all_of(recipe_refusals(recipe)):
        return Refusal(why, other)
    if stray := stray_switch():
        return Refusal(f"{stray} is set here and changes Transformer Engine's numbers", other)
    odd = next((shape for shape in shapes if any(extent % MULTIPLE for extent in shape[1:])), None)
    return odd and Refusal(f"{odd.size}: Transformer Engine takes multiples of {MULTIPLE}", other)


Case = tuple[str, str]
"""Names of a recipe and of the engine that computes it."""


def cases(
    engines: Sequence[str], recipes: Mapping[str, Recipe], shapes: Sequence[Shape], device: str
) -> tuple[dict[Case, Recipe], list[str]]:
    """Return the recipes to time, by their names and engines, and remarks: why `auto` uses the emulator, and
    what each of several engines skips. InputError if `auto` does not stand alone, if the one given engine
    cannot run a recipe, or if nothing is left of several."""
    auto, here = AUTO in engines, this_machine()
    if auto and len(engines) > 1:
        raise InputError(f"--engine {','.join(engines)}: auto stands alone")
    chosen = {name: [PLAIN] * recipe.plain for name, recipe in recipes.items()}
    refusals: dict[tuple[str, Refusal], list[str]] = defaultdict(list)
    for engine in engines:
        by = NATIVE if auto else engine
        for name, recipe in recipes.items():
            reason = refused(recipe, shapes, device, here, by)
            if reason:
                refusals[engine, reason].append(name)
            if not recipe.plain and (auto or not reason):
                chosen[name].append(EMULATED if reason else by)
    made = {(name, by): recipes[name] for name, each in chosen.items() for by in each}
    named = [(engine, ", ".join(names), reason) for (engine, reason), names in refusals.items()]
    if auto:
        return made, [f"{names}: emulated, since {reason.why}" for _, names, reason in named]
    skipped = [f"--engine {engine}: {names}: {reason}" for engine, names, reason in named]
    if skipped and (len(engines) == 1 or not any(by in engines for _, by in made)):
        raise InputError(*skipped)
    return made, [f"skipped: {line}" for line in skipped]


def multiplied(products: Products, engine: str, dtype: str) -> dict[str, str]:
    """Return the format in which each of the three products is multiplied, by its name. The emulator
    multiplies in its storage type, the others in the format of the operands if they fit."""
    formats = {}
    for name in DIRECTIONS["all"]:
        product: Product = getattr(products, name)
        quants = [getattr(product, operand) for operand in product.operands]
        if engine == NATIVE and all(quants):
            formats[name] = "fp4" if product.fp4 else "fp8"
        else:
            wide = dtype == "fp32" or any(quant and quant.wide for quant in quants)
            formats[name] = "fp32" if wide else "bf16"
    if module_name(engine) == SCALED:
        for name, given in scaled_mapping.plan(products, backend_of(engine)).items():
            if given.family:
                formats[name] = "fp4" if given.family in scaled_mapping.FP4 else "fp8"
    return formats


Call = Callable[[], object]
Unit = tuple[str, float]
"""Name of a unit of speed, and its FLOP/s."""


def layer_calls(
    recipes: Mapping[Case, Recipe], shape: Shape, device: str, weights: str
) -> dict[tuple[str, Case], Call]:
    """Return the passes of a layer of this shape by their name and case: `forward`, and `both`, that is
    forward and backward; and of engines that show them the operands alone, `forward casts` and
    `backward casts`, made as for the products.

    All layers have the same weight, of type `weights`, and the same bf16 input and gradient.
    """
    import torch

    generator = torch.Generator(device).manual_seed(0)
    _, tokens, inputs, outputs = shape
    normal = partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
    x, dy = normal(tokens, inputs), normal(tokens, outputs)
    bare = torch.nn.Linear(inputs, outputs, bias=False, device="meta")
    weight = torch.empty(outputs, inputs, device=device, dtype=getattr(torch, DTYPES[weights]))
    bare.weight = torch.nn.Parameter(weight.normal_(0, 0.02, generator=generator))
    calls: dict[tuple[str, Case], Call] = {}
    for case, recipe in recipes.items():
        layer = _layer(bare, recipe, case[1])
        made = _passes(layer, x.detach().requires_grad_(), dy)
        if makes_operands(case[1]) and not recipe.plain:
            made |= _casts(layer, x, dy)
        calls |= {(name, case): call for name, call in made.items()}
    return calls


def _layer(bare: "nn.Linear", recipe: Recipe, engine: str) -> "EmulatedLinear":
    """Return the layer that the engine makes of a linear layer in a block, with the same parameters."""
    from torch import nn

    from ablate.numerics.philox import Clock

    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"linear": bare})])})
    everywhere = Recipe.of(recipe.products, dtype=recipe.dtype)  # not where its rules and schedule have it
    made = converter(EMULATED if engine == PLAIN else engine)(model, everywhere, Clock(0))
    made.at(0, Run(1), counted=False)
    return made.layers["blocks.0.linear"]


def _passes(layer: "EmulatedLinear", x: "Tensor", dy: "Tensor") -> dict[str, Call]:
    def both() -> None:
        x.grad = layer.weight.grad = None
        layer(x).backward(dy)

    return {"forward": lambda: layer(x), "both": both}


def _casts(layer: "EmulatedLinear", x: "Tensor", dy: "Tensor") -> dict[str, Call]:
    """Return functions that make the operands of the three products, and multiply nothing; on an engine
    `scaled_mm` also their bytes. An operand that starts from the forward pass's quantised copy is made from
    the original, which takes as long."""
    import torch

    from ablate.engines.products import DTYPES
    from ablate.engines.scaled_mm import ScaledLinear

    products = layer.products
    forward, rows, columns = products.fprop, products.dgrad, products.wgrad

    def encode(a: "list[Operand]", b: "list[Operand]", out: str) -> None:
        if isinstance(layer, ScaledLinear) and (family := layer.family_of(a, b, DTYPES[out])):
            layer.encoded(a[0], b[0], family)

    @torch.no_grad()
    def forward_casts() -> None:
        a = layer.operand(x, "fprop.x", forward.x, forward.hadamard)
        b = layer.weight_operand("fprop.w", forward.w, forward.hadamard, layer.weight)
        encode(a, b, forward.gemm)

    @torch.no_grad()
    def backward_casts() -> None:
        g, gt = layer.gradients(dy, products, True, True)
        wt = layer.weight_operand("dgrad.w", rows.w, rows.hadamard, layer.weight)
        xt = layer.operand(x.t(), "wgrad.x", columns.x, columns.hadamard)
        encode(g, wt, rows.gemm)
        encode(gt, xt, columns.dw)

    return {"forward casts": forward_casts, "backward casts": backward_casts}


def matmul(side: int, device: str) -> Call:
    """Return torch's square bf16 product a b^T, as a layer computes it: the yardstick if no peak is known.
    Without bf16 instructions the operands are converted to fp32, as in the layers: oneDNN's bf16 product then
    takes several times as long, and a hundred times in the layout a b."""
    import torch

    from ablate.numerics.product import linear

    generator = torch.Generator(device).manual_seed(0)
    normal = partial(torch.randn, side, side, generator=generator, device=device, dtype=torch.bfloat16)
    a, b = normal(), normal()
    return lambda: linear(a, b)


def side(device: str, seconds: Callable[[int], float]) -> int:
    """Return the side of the yardstick's product: the largest whose measured `seconds` stay below the time
    limit."""
    size, largest = SIDES[device]
    while size < largest and 8 * seconds(size) <= _PRODUCT_SECONDS:
        size *= 2
    return size


WAYS = {"forward": ("fprop",), "backward": ("dgrad", "wgrad")}
"""Products of each pass."""


def line(
    shape: Shape,
    case: Case,
    recipe: Recipe,
    seconds: Mapping[str, float],
    peaks: Peaks,
    unit: tuple[str, float],
) -> Line:
    """Return a line of the table, by column.

    `case`: names of the recipe and of the engine that computed it; `seconds`: measured, of the `forward` and
    the `backward` pass; and of the operands alone, `forward casts` and `backward casts`, if the engine shows
    them and there are any; `peaks`: reference speeds, FLOP/s by format; `unit`: name of the unit of speed,
    and its FLOP/s.
    """
    formats = multiplied(recipe.products, case[1], recipe.dtype)
    ways: dict[str, Line] = {}
    for way, products in WAYS.items():
        spent, casts = seconds[way], seconds.get(f"{way} casts")
        multiplied_in = Counter(formats[product] for product in products)
        flops = {form: shape.flops * count for form, count in multiplied_in.items()}
        whole, ideal = sum(flops.values()), share(flops, 1.0, peaks)
        ways[way] = {
            "ms": 1000 * spent,
            unit[0]: whole / spent / unit[1],
            "of peak": share(flops, spent, peaks),
            "casts": None if casts is None else casts / spent,
            "peak": whole / ideal / unit[1] if ideal else None,
        }
    about: Line = {"shape": shape.name, "size": shape.size, "preset": case[0], "engine": case[1]}
    columns = {f"{way} {column}": ways[way][column] for column in ways["forward"] for way in WAYS}
    return about | columns | {"multiplies": formats}


class LayerSpeeds(NamedTuple):
    """Speeds of linear layers, and what their fractions of a peak are fractions of."""

    lines: list[Line]
    unit: str
    """`TFLOP/s` or `GFLOP/s`."""
    yardstick: str
    reached: list[float]
    """Measured speeds of torch's bf16 product, if it replaces a peak that is not published."""


def layer_speeds(
    recipes: Mapping[Case, Recipe], shapes: Sequence[Shape], device: str, weights: str, rounds: int
) -> LayerSpeeds:
    """Return the speed of forward and backward of each layer in each recipe. The backward pass takes the
    seconds of both passes less those of the forward pass. `weights`: type of the weights, `bf16` or
    `fp32`."""
    import torch

    from ablate.numerics.product import multiplies_bf16

    gpu = known(torch.cuda.get_device_name()) if device == "cuda" else None
    beside: dict[tuple[str, Case], Call] = {}
    yard = ("yardstick", ("", ""))
    if gpu:
        peaks, description = gpu.peaks, f"the dense peak of the format that is multiplied ({gpu.source})"
    else:
        length = side(device, lambda size: timing.on_device({"": matmul(size, device)}, 1, device)[""].median)
        beside = {yard: matmul(length, device)}
        slow = ", by way of fp32 operands since this CPU has no bf16 instructions"
        by = "" if device == "cuda" or multiplies_bf16() else slow
        size = "x".join([str(length)] * 3)
        description = f"torch's own bf16 product of {size}{by}, measured in turn with the layers"
    unit = ("TFLOP/s", 1e12) if device == "cuda" else ("GFLOP/s", 1e9)
    lines: list[Line] = []
    reached: list[float] = []
    for shape in shapes:
        found = timing.on_device(layer_calls(recipes, shape, device, weights) | beside, rounds, device)
        if beside:
            speed = 2 * length**3 / found[yard].median
            peaks = dict.fromkeys(("bf16", "fp8", "fp4", "fp32"), speed)
            reached.append(speed / unit[1])
        for case, recipe in recipes.items():
            seconds = {name: one.median for (name, of), one in found.items() if of == case}
            seconds["backward"] = max(seconds["both"] - seconds["forward"], 1e-9)
            both, plain = found["both", case], found["both", ("bf16", PLAIN)]
            more: Line = {"of bf16": both.median / plain.median, "spread": both.iqr / both.median}
            lines.append(line(shape, case, recipe, seconds, peaks, unit) | more)
    return LayerSpeeds(lines, unit[0], description, reached)


def machine(device: str) -> dict[str, object]:
    """Return the machine of a measurement: processor, versions, and for a GPU its name and capability."""
    import torch

    facts: dict[str, object] = {**provenance.environment()}
    del facts["host"]
    facts |= {"device": device, "threads": torch.get_num_threads()}
    if device == "cuda":
        facts["gpu memory GiB"] = torch.cuda.get_device_properties(0).total_memory / 2**30
    return facts
