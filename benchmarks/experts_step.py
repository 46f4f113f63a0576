"""Time of a step of quantised experts over that of the same experts in bf16: forward and backward pass.

    python benchmarks/experts_step.py --repeats 15

Prints a table with a row for each size: milliseconds in bf16, in NVFP4 by grouped products, and in NVFP4 by a
loop over experts, which telemetry takes, and the median of the ratios of neighbouring repeats. One thread.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from ablate.engines.emulated import convert
from ablate.engines.products import Probe
from ablate.numerics.philox import Clock
from ablate.recipes.presets import PRESETS
from ablate.recipes.recipe import Run
from ablate.training.models.mixture import Experts

SIZES = (
    (8, 128, 128, 1024),
    (8, 256, 256, 2048),
    (8, 512, 512, 4096),
    (64, 128, 64, 1024),
    (64, 256, 128, 4096),
)
"""Experts, width, hidden width of an expert, tokens; each token goes to two experts."""


class Watching(Probe):
    """Probe that looks at nothing."""


def step(preset: str, size: tuple[int, int, int, int], watched: bool = False) -> Callable[[], float]:
    """Return a function that computes one step and returns its seconds.

    Args:
        preset: name of the recipe.
        size: one of SIZES.
        watched: attach a probe, so that the loop over experts computes.
    """
    count, width, hidden, tokens = size
    torch.manual_seed(0)
    model, block = nn.Module(), nn.Module()
    block.experts = Experts(width, hidden, count, 2, gated=True)
    for packed in block.experts.parameters():
        nn.init.normal_(packed, std=packed.shape[-1] ** -0.5)
    model.blocks = nn.ModuleList([block])
    engine = convert(
        model, PRESETS[preset]().model_copy(update={"layers": PRESETS["bf16"]().layers}), Clock(0)
    )
    if watched:
        engine.listen(Watching())
    x = torch.randn(tokens, width, dtype=torch.bfloat16).requires_grad_()
    index = torch.rand(tokens, count).argsort(1)[:, :2]
    weights, dy = torch.rand(tokens, 2), torch.randn(tokens, width, dtype=torch.bfloat16) / tokens
    number = 0

    def run() -> float:
        nonlocal number
        number += 1
        engine.clock.step = number
        x.grad = None
        model.zero_grad()
        begin = time.perf_counter()
        engine.at(number, Run(10**6))
        with engine.still_weights():
            block.experts(x, index, weights).backward(dy)
        return time.perf_counter() - begin

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15, help="Steps of each kind, in turn.")
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print("| experts | width | hidden | tokens | bf16 ms | grouped ms | loop ms | grouped/bf16 | loop/bf16 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for size in SIZES:
        kinds = [step("bf16", size), step("nvfp4", size), step("nvfp4", size, watched=True)]
        for run in kinds:
            run()
        times = [[run() for run in kinds] for _ in range(repeats)]
        high, grouped, loop = (min(each) * 1e3 for each in zip(*times, strict=True))
        ratios = [statistics.median(row[kind] / row[0] for row in times) for kind in (1, 2)]
        cells = [
            *map(str, size),
            *(f"{one:.1f}" for one in (high, grouped, loop)),
            *(f"{r:.2f}" for r in ratios),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
