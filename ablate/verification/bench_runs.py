"""Measurements of `ablate bench`: speeds of quantisers, training steps and layers, as lines of a table."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ablate.recipes import Recipe
from ablate.verification import linear_layers, timing
from ablate.verification.bench_workloads import Stepper, back_ends, operations, with_build
from ablate.verification.linear_layers import Line


def quantiser_speeds(
    sizes: Iterable[Sequence[int]], device: str, rounds: int, builds: bool = False
) -> list[Line]:
    """Return the speed of each quantiser beside that of a copy of the tensor.

    Args:
        sizes: rows and columns of each tensor, which is timed in bf16 and in fp32.
        device: `cpu` or `cuda`.
        rounds: number of interleaved rounds; the median is reported.
        builds: time every compiled build that this CPU can run.
    """
    import torch

    lines = []
    for (rows, columns), dtype in itertools.product(sizes, (torch.bfloat16, torch.float32)):
        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        work = {
            (back_end, name): partial(with_build, build, partial(call, x))
            for (back_end, build), (name, call) in itertools.product(
                back_ends(builds, x.device).items(), operations(x).items()
            )
        }
        calls = work | {"copy": partial(torch.empty_like(x).copy_, x)}
        seconds = (
            timing.medians_by(timing.CudaStopwatch(), calls, rounds, least=0.02)
            if device == "cuda"
            else timing.medians(calls, rounds, least=0.01)
        )
        about = {"shape": f"{rows}x{columns}", "dtype": str(dtype).removeprefix("torch.")}
        for back_end, name in work:
            spent = seconds[back_end, name]
            speed = {
                "ms": 1000 * spent,
                "Melem/s": x.numel() / spent / 1e6,
                "copy GB/s": 2 * x.nbytes / seconds["copy"] / 1e9,
                "of memcpy": seconds["copy"] / spent,
            }
            lines.append({"operation": name, **about, "back end": back_end, **speed})
    return lines


def step_speeds(
    steppers: Mapping[str, Stepper], tokens: int, device: str, rounds: int, trace: Path | None = None
) -> list[Line]:
    """Return the speed of each training step, its peak memory and, on a CPU, its time by operation.

    Args:
        steppers: training steps by name.
        tokens: tokens of a step.
        device: `cpu` or `cuda`.
        rounds: number of interleaved rounds; the median is reported.
        trace: folder for a profiler trace of each step.
    """
    seconds = timing.medians({name: run.step for name, run in steppers.items()}, rounds)
    if trace:
        trace.mkdir(parents=True, exist_ok=True)
    lines: list[Line] = []
    for name, run in steppers.items():
        file = trace and trace / f"{name.replace(', ', '-')}.json"
        line: Line = {"preset": name, "step ms": 1000 * seconds[name], "tokens/s": tokens / seconds[name]}
        line |= {f"of {base}": seconds[name] / seconds[base] for base in ("bf16", "fp32") if base in seconds}
        lines.append(line)
        if device == "cuda":
            line["peak MiB"] = timing.cuda_peak(run.step) / 2**20
            if file:
                timing.profile(run.step, file, run.layers)
            continue
        shares = timing.profile(run.step, file, run.layers)
        line |= {"peak MiB": shares.pop("peak") / 2**20, **shares}
        energy = timing.joules(run.step)
        if energy is not None:
            line["joules"] = energy
    return lines


@dataclass(frozen=True)
class LayerSpeeds:
    """Speeds of linear layers, and what their fractions of a peak are fractions of."""

    lines: list[Line]
    unit: str
    """`TFLOP/s` or `GFLOP/s`."""
    yardstick: str
    measured: bool
    """True if no peak of this hardware is published, so that torch's bf16 product replaces it."""
    layers_have_names: bool
    """True if a layer is called otherwise than by its size."""


def layer_speeds(
    recipes: Mapping[linear_layers.Case, Recipe],
    shapes: Sequence[linear_layers.Shape],
    device: str,
    weights: str,
    rounds: int,
) -> LayerSpeeds:
    """Return the speed of forward and backward of each layer in each recipe.

    Args:
        recipes: recipes by preset and engine.
        shapes: layers.
        device: `cpu` or `cuda`.
        weights: type of the weights, `bf16` or `fp32`.
        rounds: number of interleaved rounds.
    """
    stick, lines = linear_layers.yardstick(device), []
    clock, least, unit = (
        (timing.CudaStopwatch(), 0.02, ("TFLOP/s", 1e12))
        if device == "cuda"
        else (timing.WallStopwatch(), 0.0, ("GFLOP/s", 1e9))
    )
    beside = {}
    if not stick.peaks:
        side = linear_layers.side(
            device,
            lambda side: sum(timing.stretches({None: linear_layers.matmul(side, device)}, 1, clock)[None]),
        )
        stick = stick._replace(description=linear_layers.measured_yardstick(side, device))
        beside = {None: linear_layers.matmul(side, device)}
    for shape in shapes:
        layers = linear_layers.passes(recipes, shape, device, weights)
        calls = layers.whole | {("casts", *case): call for case, call in layers.casts.items()} | beside
        seconds = timing.stretches(calls, rounds, clock, least)
        peaks = stick.peaks or linear_layers.measured(2 * side**3 / seconds[None][0])
        bf16 = sum(seconds["bf16", linear_layers.PLAIN])
        for (name, by), recipe in recipes.items():
            spent, casts = seconds[name, by], seconds.get(("casts", name, by))
            line = linear_layers.line(shape, name, recipe, by, spent, peaks, unit, casts)
            lines.append(line | {"of bf16": sum(spent) / bf16})
    named = any(shape.name != shape.size for shape in shapes)
    return LayerSpeeds(lines, unit[0], stick.description, not stick.peaks, named)
