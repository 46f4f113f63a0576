"""Workload without a model: tensors of a named distribution in one linear layer's quantisers and products.

It shows errors that training hides. A captured distribution takes x, w and g from a layer of a short bf16 run
of the gpt workload.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import AfterValidator, Field

from ablate.files import Json
from ablate.recipes.recipe import DIRECTIONS, SLOTS, Recipe
from ablate.training.metric_names import Name, parse
from ablate.training.operand_metrics import OPERAND_METRICS
from ablate.training.trial_run import Telemetry, TrialRun
from ablate.training.workloads.base import Workload
from ablate.training.workloads.gpt import Gpt

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ablate.engines.emulated_layer import EmulatedLinear
    from ablate.numerics.philox import Clock
    from ablate.numerics.quantize import Operand
    from ablate.numerics.spec import Hadamard
    from ablate.training.data.sources import TextSource
    from ablate.training.loop import Record
    from ablate.training.operand_errors import Operands

DISTRIBUTIONS = {
    "gaussian": (),
    "laplace": (),
    "student": (("degrees of freedom", 3),),
    "outliers": (("fraction of elements", 0.001), ("factor", 50)),
    "hot_channels": (("fraction of channels", 0.01), ("factor", 30)),
    "hot_tokens": (("fraction of tokens", 0.0625), ("factor", 5)),
    "stray_tokens": (("fraction of tokens", 0.0625), ("factor", 5)),
    "mean": (("mean over deviation", 4),),
    "captured": (),
}
"""Names of distributions and their arguments with defaults: `student:3`, `outliers:0.001:50`, ..."""


def _distribution(value: str) -> str:
    name, *numbers = value.split(":")
    if name not in DISTRIBUTIONS:
        raise ValueError(
            f"must be one of {', '.join(DISTRIBUTIONS)}, with its numbers behind colons (student:3)"
        )
    arguments = DISTRIBUTIONS[name]
    if len(numbers) > len(arguments) or not all(re.fullmatch(r"\d+(\.\d+)?", number) for number in numbers):
        wanted = ", ".join(f"{what} ({default:g})" for what, default in arguments) or "no numbers"
        raise ValueError(f"{name} takes {wanted}")
    for (what, _), number in zip(arguments, numbers, strict=False):
        if why := _impossible(what, float(number)):
            raise ValueError(f"{name} takes {what} {why}, not {number}")
    return value


def _impossible(what: str, number: float) -> str:
    """Return the numbers that `draw` takes, if it would draw this one as another; empty if it would not."""
    if what == "degrees of freedom":
        return "" if number >= 1 and number.is_integer() else "as a whole number above 0"
    if what == "fraction of elements":
        return "" if number <= 1 else "in [0, 1]"
    if what.startswith("fraction"):  # of channels or tokens: one at least is scaled
        return "" if 0 < number <= 1 else "above 0 and at most 1"
    return ""


Distribution = Annotated[str, AfterValidator(_distribution)]


def gemm_metric(product: str, error: str) -> str:
    return str(Name("gemm", product, None, error))


def _mean_metric(slot: str, figure: str) -> str:
    return str(Name("mean", slot, None, figure))


class Tensors(Workload):
    """Tensors x [tokens, inputs], w [outputs, inputs], g [tokens, outputs] in bf16, drawn from the seed."""

    VERSION: ClassVar[int] = 1
    trains: ClassVar[bool] = False
    METRICS: ClassVar[frozenset[str]] = frozenset(
        (
            *(str(Name("quant", slot, None, error)) for slot in SLOTS for error in OPERAND_METRICS),
            *(
                gemm_metric(product, error)
                for product in DIRECTIONS["all"]
                for error in ("rel_mse", "sqnr_db", "cosine", "gain")
            ),
            *(_mean_metric(slot, figure) for slot in SLOTS for figure in ("rel_mse", "slope")),
            "weights/inconsistency",
        )
    )

    tokens: int = Field(512, ge=1, le=1 << 20)
    inputs: int = Field(512, ge=1, le=1 << 16)
    outputs: int = Field(512, ge=1, le=1 << 16)
    x: Distribution = "gaussian"
    """Distribution of the activations.

    One of gaussian, laplace, student:n, outliers:p:f, hot_channels:p:f, hot_tokens:p:f (the same tokens in x
    and g), stray_tokens:p:f (different tokens in each), mean:r and captured.
    """
    w: Distribution = "gaussian"
    g: Distribution = "gaussian"
    """Gradient of the output."""
    draws: int = Field(1, ge=1, le=4096)
    """Independent draws, whose mean is measured at 1, 4, 16, ...: unbiased rounding errs as 1 / draws."""
    capture: Gpt = Gpt(layers=2, steps=60, lr=1e-3, eval_every=60, eval_tokens=128, eval_batch=1)
    """Run that a captured distribution comes from; it sets the shapes."""
    layer: str = "blocks.1.mlp.down"
    """Layer of that run."""

    @property
    def steps(self) -> int:
        """Number of draws: a step is a draw."""
        return self.draws

    def recorded(self, metric: str) -> range:
        """Return no steps: a trial takes seconds, so pruning it saves nothing."""
        return range(0)

    @property
    def tokens_per_step(self) -> int:
        return self.tokens

    @property
    def captured(self) -> bool:
        """True if a training run is needed."""
        return "captured" in (self.x, self.w, self.g)

    @property
    def data_source(self) -> TextSource | None:
        return self.capture.data if self.captured else None

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.captured:
            yield from ((f"capture.{field}", why) for field, why in self.capture.problems())
            if self.layer not in self.capture.linears:
                layers = ", ".join(self.capture.linears)
                yield "layer", f"{self.layer} is no linear layer of the captured run; it has {layers}"

    def identity(self) -> dict[str, Json]:
        """Return the fields that determine the numbers; those of a captured run only if there is one."""
        content = self.canonical({"capture", "layer"})
        return content | ({"capture": self.capture.identity(), "layer": self.layer} if self.captured else {})

    def fingerprint(self) -> str:
        return self.capture.fingerprint() if self.captured else "drawn"

    def cost(self, quantised: bool) -> float:
        elements = self.tokens * (self.inputs + self.outputs) + self.inputs * self.outputs
        flops = 6 * self.tokens * self.inputs * self.outputs
        training = self.capture.cost(quantised=False) if self.captured else 0
        return 0.5 + training + elements * (1e-6 + 5e-8 * self.draws) + flops / 20e9

    def compute(self, run: TrialRun) -> Iterator[Record]:
        """Yield a Record after 1, 4, 16, ... draws. The first record has all errors of a single draw, each
        record the error of the mean so far, and the last one its slope. Checkpoints are not used, since a
        trial takes seconds."""
        import torch

        from ablate.numerics.philox import Clock
        from ablate.training.loop import Record
        from ablate.training.metrics import SlotErrors
        from ablate.training.operand_errors import sources

        x, w, g = self.tensors(run.seed, torch.device(run.device))
        clock = Clock(run.seed)
        layer = layer_of(run.recipe, w, clock)
        layer.context.probe = errors = SlotErrors(products=False)  # fp64 below
        products = products_of(layer, x, g)
        layer.context.probe = None
        # those of the single layer equal the means over layers
        metrics = {name: value for name, value in errors.metrics().items() if parse(name).layer is None}
        metrics |= product_errors(products, x, w, g) | _inconsistency(layer, w)
        means = _Means(layer, sources(x, w, g))
        for draw in range(self.draws):
            clock.step = draw
            means.add()
            power_of_four = draw & (draw + 1) == 0 and (draw + 1).bit_length() % 2 == 1
            if power_of_four or draw + 1 == self.draws:
                metrics |= means.errors(draw + 1)
                if draw + 1 == self.draws:
                    metrics |= means.slopes()
                yield Record(draw + 1, metrics)
                metrics = {}

    def tensors(self, seed: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return x [tokens, inputs], w [outputs, inputs] and g [tokens, outputs] in bf16, on the device; what
        is drawn is drawn on the CPU."""
        captured = capture(self, seed, device) if self.captured else None
        tokens, inputs, outputs = (self.tokens, self.inputs, self.outputs)
        if captured:
            (tokens, inputs), (outputs, _) = captured["x"].shape, captured["w"].shape
        shapes = {"x": (tokens, inputs), "w": (outputs, inputs), "g": (tokens, outputs)}
        made = []
        for number, (name, shape) in enumerate(shapes.items()):
            distribution = getattr(self, name)
            made.append(
                captured[name]
                if captured is not None and distribution == "captured"
                else draw(distribution, shape, 3 * seed + number).to(device)
            )
        return tuple(made)


def draw(distribution: str, shape: tuple[int, int], seed: int) -> Tensor:
    """Return a tensor of a named distribution, bf16, on the CPU, from the seed alone. The name is of
    `DISTRIBUTIONS`, but not `captured`, with its numbers: `outliers:0.001:50`. The shape is rows (tokens or
    outputs) and channels."""
    import torch

    name, *given = distribution.split(":")
    numbers = [float(number) for number in given] + [
        float(default) for _, default in DISTRIBUTIONS[name][len(given) :]
    ]
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(shape, generator=generator)
    match name:
        case "laplace":
            z = z.sign() * -torch.log1p(-torch.rand(shape, generator=generator))
        case "student":
            powers = [
                torch.randn(shape, generator=generator).square() for _ in range(max(1, round(numbers[0])))
            ]
            z = z / (sum(powers) / len(powers)).sqrt()
        case "outliers":
            z = torch.where(torch.rand(shape, generator=generator) < numbers[0], z * numbers[1], z)
        case "hot_channels" | "stray_tokens" | "hot_tokens":
            dimension = 1 if name == "hot_channels" else 0
            count = max(1, round(numbers[0] * shape[dimension]))
            even = torch.arange(count) * shape[dimension] // count
            hot = (
                even
                if name == "hot_tokens"
                else torch.randperm(shape[dimension], generator=generator)[:count]
            )
            z.index_copy_(dimension, hot, z.index_select(dimension, hot) * numbers[1])
        case "mean":
            z = z + numbers[0] * torch.randn((1, shape[1]), generator=generator)
    return z.to(torch.bfloat16)


def capture(config: Tensors, seed: int, device: torch.device) -> dict[str, Tensor]:
    """Return x and g of the layer `config.layer` in the last step of the bf16 training run `config.capture`,
    and w after it, in bf16, on the device of the run."""
    from ablate.recipes.presets import bf16
    from ablate.training.operand_capture import captured

    seen: dict[str, Tensor] = {}

    def take(step: int, operands: Operands) -> None:
        if operands.layer == config.layer:
            seen.update(x=operands.x, g=operands.dy)

    run = config.capture.prepare(bf16(), seed, str(device))
    with captured(take):
        for _ in config.capture.train(run, Telemetry(every=0, shadow=0, log=10**9)):
            pass
    return seen | {"w": run.model.get_submodule(config.layer).weight.detach().bfloat16()}


def layer_of(recipe: Recipe, w: Tensor, clock: Clock) -> EmulatedLinear:
    """Return a linear layer under a recipe, whose products apply from the start, without layer rules and
    schedule. The weight is `w` [outputs, inputs], in fp32; the layer draws by `clock`."""
    import torch

    from ablate.engines.emulated_layer import EmulatedLinear
    from ablate.engines.products import DTYPES

    linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta")
    linear.weight = torch.nn.Parameter(w.float())
    layer = EmulatedLinear(linear, "tensors", clock, DTYPES[recipe.dtype])
    layer.products = recipe.products
    return layer


def products_of(layer: EmulatedLinear, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Return the three products, of x [tokens, inputs] and the output's gradient g [tokens, outputs], of a
    layer from `layer_of`, by direction: `fprop` (y), `dgrad` (dx) and `wgrad` (dw)."""
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(g)
    return {"fprop": y.detach(), "dgrad": leaf.grad, "wgrad": layer.weight.grad}


def product_errors(products: dict[str, Tensor], x: Tensor, w: Tensor, g: Tensor) -> dict[str, float]:
    """Return the errors of products from `products_of`, against fp64 products of the same bf16 tensors x
    [tokens, inputs], w [outputs, inputs] and g [tokens, outputs]: `gemm/<product>/rel_mse`, `sqnr_db` in dB,
    `cosine` and `gain`; none for a product that is exact or should be zero, and no cosine for one that is."""
    from ablate.numerics.product_error import compare

    x64, w64, g64 = x.double(), w.double(), g.double()
    exact = {"fprop": x64 @ w64.t(), "dgrad": g64 @ w64, "wgrad": g64.t() @ x64}
    result: dict[str, float] = {}
    for name, y in products.items():
        true, y = exact[name], y.double()
        sums = compare(y, true)
        power, error = sums.power, sums.error
        if power and error:
            result[gemm_metric(name, "rel_mse")] = error / power
            result[gemm_metric(name, "sqnr_db")] = (
                10 * math.log10(power / error) if error < math.inf else -math.inf  # the product overflowed
            )
            if made := y.square().sum().item():  # 0 if the recipe casts an operand to zeros
                both = math.sqrt(power) * math.sqrt(made)
                result[gemm_metric(name, "cosine")] = sums.inner / both
            result[gemm_metric(name, "gain")] = sums.gain
    return result


def _inconsistency(layer: EmulatedLinear, w: Tensor) -> dict[str, float]:
    """Return the difference between the forward's and the backward's weights, sum (Q(w) - Q(w^T)^T)^2 / sum
    w^2; {} unless both are quantised and neither is rotated."""
    forward, backward = layer.products.fprop, layer.products.dgrad
    if not (forward.w and backward.w) or forward.hadamard or backward.hadamard:
        return {}
    there = _values(layer.operand(w, "fprop.w", forward.w, None))[: w.shape[0], : w.shape[1]]
    back = _values(layer.operand(w.t(), "dgrad.w", backward.w, None)).t()[: w.shape[0], : w.shape[1]]
    return {
        "weights/inconsistency": ((there - back).double().square().sum() / w.double().square().sum()).item()
    }


def _values(parts: list[Operand]) -> Tensor:
    return sum(part.dequantize() for part in parts)


class _Means:
    """Sums of each stochastically rounded operand over draws, and the error of the mean."""

    def __init__(self, layer: EmulatedLinear, tensors: dict[str, Tensor]) -> None:
        from ablate.numerics.choices import SIGNS

        self.layer, self.tensors = layer, tensors
        """Operands before rotation, by slot."""
        self.slots = [
            slot
            for slot, quant in layer.products.quantised()
            if quant.draws and not ((rotation := self._rotation(slot)) and SIGNS[rotation.signs].drawn)
        ]
        self.sums: dict[str, Tensor] = {}
        self.curves: dict[str, dict[int, float]] = {slot: {} for slot in self.slots}

    def _rotation(self, slot: str) -> Hadamard | None:
        return getattr(self.layer.products, slot.partition(".")[0]).hadamard

    def add(self) -> None:
        for slot in self.slots:
            quant = self.layer.products.slot(slot)
            parts = self.layer.operand(self.tensors[slot], slot, quant, self._rotation(slot))
            values = _values(parts).double()
            self.sums[slot] = values if slot not in self.sums else self.sums[slot] + values

    def errors(self, draws: int) -> dict[str, float]:
        result = {}
        for slot, total in self.sums.items():
            x = self.layer.rotated(self.tensors[slot], slot, self._rotation(slot)).double()
            mean = total[: x.shape[0], : x.shape[1]] / draws
            self.curves[slot][draws] = result[_mean_metric(slot, "rel_mse")] = (
                (x - mean).square().sum() / x.square().sum()
            ).item()
        return result

    def slopes(self) -> dict[str, float]:
        """Return `mean/<slot>/slope`, the slope of log error over log draws: -1 if rounding is unbiased.
        Slots with fewer than three measured numbers of draws, or with an error of 0, are left out."""
        import numpy as np

        curves = {
            slot: curve for slot, curve in self.curves.items() if len(curve) >= 3 and all(curve.values())
        }
        return {
            _mean_metric(slot, "slope"): float(
                np.polyfit(np.log(list(curve)), np.log(list(curve.values())), 1)[0]
            )
            for slot, curve in curves.items()
        }
