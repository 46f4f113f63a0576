"""Speeds of quantisers and of training steps for `ablate bench`, as lines of a table."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import CDLL
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ablate.errors import InputError, first_line
from ablate.recipes import PRESETS, Recipe
from ablate.training.trial_run import Telemetry
from ablate.verification import timing

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ablate.engines.emulated_layer import EmulatedLinear

Line = dict[str, str | float | dict[str, str] | None]
"""Line of the table: values by column."""


@contextmanager
def enough_memory(asked: str, least: int, device: str) -> Iterator[None]:
    """Raise InputError if the block needs more memory than there is.

    `asked`: sizes as they were given; `least`: bytes of its largest tensors. More than are free are not
    tried: Linux would grant them and end a process when they are written.
    """
    import psutil
    import torch

    from ablate.execution.trial_runner import out_of_memory

    free = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    larger = f"{asked}: larger than the memory of this {'GPU' if device == 'cuda' else 'machine'}"
    if least > free:
        raise InputError(
            f"{larger}: at least {least / 2**30:,.1f} GiB are needed, and {free / 2**30:,.1f} GiB are free"
        )
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise InputError(f"{larger}: {first_line(error)}; give smaller sizes") from None


def operations(x: "Tensor") -> dict[str, Callable[[], object]]:
    """Return the quantisers to time, by name. Only bf16 is rotated."""
    import torch

    from ablate.numerics.philox import Clock
    from ablate.numerics.quantize import quantize
    from ablate.numerics.spec import Hadamard, Outer, Quant

    nearest, rotation = Quant(), Hadamard()
    given = Quant(outer=Outer(statistic=f"static:{x.abs().max().item()}"))
    drawn = partial(quantize, quant=Quant(rounding="stochastic"), clock=Clock(0))
    quantisers: dict[str, Callable[[], object]] = {
        "rows, nearest": lambda: quantize(x, nearest),
        "rows, nearest, amax given": lambda: quantize(x, given),
        "rows, stochastic": lambda: drawn(x),
        "columns, nearest": lambda: quantize(x.t(), nearest),
        "columns, stochastic": lambda: drawn(x.t()),
        "16x16, nearest": lambda: quantize(x, Quant(block="16x16")),
    }
    if x.dtype == torch.bfloat16:
        quantisers |= {
            "columns, rotated, nearest": lambda: quantize(x.t(), nearest, rotation=rotation),
            "columns, rotated, stochastic": lambda: drawn(x.t(), rotation=rotation),
        }
    return quantisers


def back_ends(every: bool, device: "torch.device") -> dict[str, CDLL | None]:
    """Return compiled builds by name: the one in use, with `every` the others that can run, and None for the
    reference. On a GPU: None alone, named after the kernels that run there."""
    from ablate.numerics.kernels import builds, cuda

    if device.type == "cuda":
        return {"triton" if cuda.runs_on(device) else "reference": None}
    mine = builds.level()
    levels = list(builds.LEVELS.values())
    others = [*levels[levels.index(mine) + 1 :], "portable"] if mine in levels else []
    used = (mine, *(others if every else []))
    return {name: builds.load(builds.path(name)) for name in used} | {"reference": None}


def quantiser_speeds(
    sizes: Iterable[Sequence[int]], device: str, rounds: int, every: bool = False
) -> list[Line]:
    """Return the speed of each quantiser on `cpu` or `cuda`, beside that of a copy of the tensor: the median
    of interleaved rounds.

    `sizes`: rows and columns of each tensor, which is timed in bf16 and in fp32; `every`: time every compiled
    build that this CPU can run.
    """
    import torch

    from ablate.numerics.kernels import builds

    def built(build: CDLL | None, call: Callable[[], object]) -> None:
        with builds.using(build):
            call()

    lines: list[Line] = []
    for (rows, columns), dtype in itertools.product(sizes, (torch.bfloat16, torch.float32)):
        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        pairs = itertools.product(back_ends(every, x.device).items(), operations(x).items())
        work = {(back_end, name): partial(built, build, call) for (back_end, build), (name, call) in pairs}
        copy = {("", "copy"): partial(torch.empty_like(x).copy_, x)}
        found = timing.on_device(work | copy, rounds, device, least=0.01)
        whole = found.pop(("", "copy")).median
        about = {"shape": f"{rows}x{columns}", "dtype": str(dtype).removeprefix("torch.")}
        lines += [
            {
                "operation": name,
                **about,
                "back end": back_end,
                "ms": 1000 * one.median,
                "spread": one.iqr / one.median,
                "Melem/s": x.numel() / one.median / 1e6,
                "copy GB/s": 2 * x.nbytes / whole / 1e9,
                "of memcpy": whole / one.median,
            }
            for (back_end, name), one in found.items()
        ]
    return lines


def in_both_modes(names: list[str]) -> dict[str, Recipe]:
    """Return the recipes of the presets, and those that quantise also with all products in fp32_out."""
    recipes = {name: PRESETS[name]() for name in names}
    wide = {"fprop.gemm": "fp32_out", "dgrad.gemm": "fp32_out", "wgrad.dw": "fp32"}
    return recipes | {
        f"{name}, fp32_out": recipe.changed(wide)
        for name, recipe in recipes.items()
        if not recipe.products.plain
    }


@dataclass(frozen=True)
class Stepper:
    """Training run of a gpt, without telemetry and evaluation."""

    step: Callable[[], object]
    """Function that runs one training step per call."""
    layers: "Collection[EmulatedLinear]"
    """Layers of the model that a recipe may quantise."""
    quantised: bool
    """True if the recipe quantises one of them in the first step."""


def stepper(
    recipe: Recipe, layers: int, width: int, tokens: int, device: str, compile: bool = False
) -> Stepper:
    from ablate.recipes.recipe import Run
    from ablate.training.loop import Record
    from ablate.training.workloads.gpt import Gpt

    never = 10**6
    config = Gpt(
        layers=layers,
        width=width,
        heads=width // 64,
        context=128,
        batch=tokens // 128,
        steps=never,
        eval_every=never,
        warmup=0,
        decay="none",
        compile=compile,
    )
    run = config.prepare(recipe, 0, device)
    steps: Iterator[Record] = config.train(run, Telemetry(every=0, shadow=0, log=1))
    run.engine.at(0, Run(never), counted=False)
    placed = tuple(run.engine.layers.values())
    return Stepper(partial(next, steps), placed, not all(layer.products.plain for layer in placed))


def steppers(
    recipes: Mapping[str, Recipe], layers: int, width: int, tokens: int, device: str, compiled: bool
) -> dict[str, Stepper]:
    """Return training steps by name, with `compiled` also whole compiled ones; InputError if a preset would
    quantise nothing in so small a model."""
    runs = {name: stepper(recipe, layers, width, tokens, device) for name, recipe in recipes.items()}
    if kept := [name for name, run in runs.items() if not (recipes[name].plain or run.quantised)]:
        raise InputError(
            f"--layers {layers}: {', '.join(kept)} would be timed as bf16, since all blocks of so"
            " small a model are in high precision; use --layers 2 or more"
        )
    for name, recipe in recipes.items() if compiled else ():
        if recipe.products.backward_needs is None:
            runs[f"{name}, compiled"] = stepper(recipe, layers, width, tokens, device, True)
    return runs


def step_speeds(
    steppers: Mapping[str, Stepper], tokens: int, device: str, rounds: int, trace: Path | None = None
) -> list[Line]:
    """Return the speed of each training step on `cpu` or `cuda` (the median of interleaved rounds), its peak
    memory and, on a CPU, its time by operation. `tokens`: those of a step; `trace`: folder for a profiler
    trace of each step."""
    found = timing.interleaved({name: run.step for name, run in steppers.items()}, rounds)
    if trace:
        trace.mkdir(parents=True, exist_ok=True)
    lines: list[Line] = []
    for name, run in steppers.items():
        file, seconds = trace and trace / f"{name.replace(', ', '-')}.json", found[name].median
        line: Line = {"preset": name, "step ms": 1000 * seconds, "spread": found[name].iqr / seconds}
        line |= {"tokens/s": tokens / seconds}
        line |= {f"of {base}": seconds / found[base].median for base in ("bf16", "fp32") if base in found}
        if device == "cuda":
            line["peak MiB"] = timing.cuda_peak(run.step) / 2**20
        if device == "cpu" or file:
            shares = timing.profile(run.step, file, run.layers)
            line |= {"peak MiB": shares.pop("peak") / 2**20} | shares if device == "cpu" else {}
        lines.append(line)
    return lines
