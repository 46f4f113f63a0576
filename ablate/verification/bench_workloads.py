"""Workloads that `ablate bench` times: quantisers, training steps, forked processes."""

import os
import time
from collections.abc import Callable, Collection, Iterator
from ctypes import CDLL
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ablate.engines.emulated_layer import EmulatedLinear

from ablate.recipes import PRESETS, Recipe


def operations(x: "Tensor") -> dict[str, Callable[["Tensor"], object]]:
    """Return the quantisers to time, by name. `x` decides on the amax given and on rotations."""
    import torch

    from ablate.numerics.philox import Clock
    from ablate.numerics.quantize import quantize
    from ablate.numerics.spec import Hadamard, Outer, Quant

    nearest, square, rotation = Quant(), Quant(block="16x16"), Hadamard()
    given = Quant(outer=Outer(statistic=f"static:{x.abs().max().item()}"))
    drawn = partial(quantize, quant=Quant(rounding="stochastic"), clock=Clock(0))
    quantisers: dict[str, Callable[[Tensor], object]] = {
        "rows, nearest": lambda x: quantize(x, nearest),
        "rows, nearest, amax given": lambda x: quantize(x, given),
        "rows, stochastic": lambda x: drawn(x),
        "columns, nearest": lambda x: quantize(x.t(), nearest),
        "columns, stochastic": lambda x: drawn(x.t()),
        "16x16, nearest": lambda x: quantize(x, square),
    }
    if x.dtype == torch.bfloat16:  # only bf16 is rotated
        quantisers |= {
            "columns, rotated, nearest": lambda x: quantize(x.t(), nearest, rotation=rotation),
            "columns, rotated, stochastic": lambda x: drawn(x.t(), rotation=rotation),
        }
    return quantisers


def back_ends(every: bool, device: "torch.device") -> dict[str, CDLL | None]:
    """Return compiled builds by name: the one in use, with `every` the others that can run, and None for the
    reference. On a GPU: None alone, named after the kernels that run there.
    """
    from ablate.numerics.kernels import builds, cuda

    if device.type == "cuda":
        return {"triton" if cuda.runs_on(device) else "reference": None}
    mine = builds.level()
    levels = list(builds.LEVELS.values())
    others = [*levels[levels.index(mine) + 1 :], "portable"] if mine in levels else []
    return {name: builds.load(builds.path(name)) for name in (mine, *(others if every else []))} | {
        "reference": None
    }


def with_build(build: CDLL | None, call: Callable[[], object]) -> None:
    """Call a function that quantises with this build; None for the reference."""
    from ablate.numerics.kernels import builds

    with builds.using(build):
        call()


def in_both_modes(names: list[str]) -> dict[str, Recipe]:
    """Return the recipes of the presets, and those that quantise also with all products in fp32_out."""
    recipes = {name: PRESETS[name]() for name in names}
    return recipes | {
        f"{name}, fp32_out": fp32_out(recipe) for name, recipe in recipes.items() if not recipe.products.plain
    }


def fp32_out(recipe: Recipe) -> Recipe:
    """Return the recipe with all products in fp32_out."""
    names = {"fprop": "gemm", "dgrad": "gemm", "wgrad": "dw"}
    wide = {"gemm": "fp32_out", "dw": "fp32"}
    return recipe.model_copy(
        update={n: getattr(recipe, n).model_copy(update={f: wide[f]}) for n, f in names.items()}
    )


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
    """Return a training run of a gpt with this recipe."""
    from ablate.recipes.recipe import Run
    from ablate.training.loop import Record, Telemetry
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
    steps: Iterator[Record] = config.train(run, Telemetry(every=never, log=1, shadow=never))
    run.engine.at(0, Run(never), counted=False)
    layers_ = tuple(run.engine.layers.values())
    return Stepper(partial(next, steps), layers_, not all(layer.products.plain for layer in layers_))


def forked(call: Callable[[], object]) -> float:
    """Return the seconds from the fork of a child to the end of `call` in it."""
    read, write = os.pipe()
    began = time.perf_counter()
    if not (pid := os.fork()):
        try:
            call()
            os.write(write, repr(time.perf_counter() - began).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        took = float(answer.read())
    os.waitpid(pid, 0)
    return took
