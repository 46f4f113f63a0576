"""Counts of a training step of a tiny gpt by each recipe, or its error: of one block, and of the rest, as JSON.

Recipes are the presets, NVFP4 with errors that are amplified or permuted, and some in a step that telemetry
measures.
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import torch

from ablate.recipes import PRESETS, Recipe
from ablate.recipes.recipe import Layers
from ablate.training.loop import Loop, Telemetry
from support.corpus import write_shards
from support.gpt_runs import gpt
from support.imaginary_gpu.counting import Counts

COUNTS = Counts()
PLAIN = Telemetry(every=0, shadow=0, log=1000)
MEASURING = Telemetry(every=2, shadow=0, log=1000)
MEASURED = ", measured"
"""End of the name of a recipe's step that telemetry measures."""


def quantised_everywhere(recipe: Recipe) -> Recipe:
    """Return a recipe without the rules that keep some layers in bf16: the first and last blocks, attention."""
    return recipe.model_copy(update={"layers": Layers()})


def altered(error: dict) -> Recipe:
    """Return NVFP4 with an `error` in each of its operands."""
    document = PRESETS["nvfp4"]().model_dump(mode="json")
    for slot, _ in PRESETS["nvfp4"]().quantised():
        product, operand = slot.split(".")
        document[product][operand]["error"] = error
    return Recipe.model_validate(document)


RECIPES: dict[str, Callable[[], Recipe]] = {
    **PRESETS,
    "nvfp4, errors times 4": lambda: altered({"times": 4}),
    "nvfp4, errors permuted": lambda: altered({"permuted": True}),
    **{name + MEASURED: PRESETS[name] for name in ("nvfp4", "mxfp4", "fp8_current")},
}


def remembers(recipe: Recipe) -> bool:
    """Return True if a statistic of some operand depends on the steps before."""
    return any(name in repr(recipe) for name in ("delayed:", "hold:"))


def step(recipe: Recipe, shards: str, layers: int, telemetry: Telemetry = PLAIN) -> dict[str, Counter]:
    """Return the counts by place of the second step of a run."""
    workload = gpt(shards, layers=layers, width=64, context=32, eval_every=1000)
    with COUNTS:
        run = workload.prepare(recipe, 0, "cuda")
        loop = Loop(run, workload, telemetry)
        with nullcontext() if remembers(recipe) else run.engine.high_precision():
            loop.step(1)  # makes the optimizer's state, which is all that others need of it
        COUNTS.reset()
        loop.step(2)
    return COUNTS.by_place()


@cache
def rest(dtype: str, shards: str) -> dict[str, Counter]:
    """Return the counts of a step outside its blocks, from two models without quantisation."""
    recipe = PRESETS["bf16" if dtype == "bf16" else "fp32"]()
    one, two = (step(recipe, shards, layers) for layers in (1, 2))
    outside = {name: one[name].copy() for name in one}
    for name, counter in outside.items():
        counter.subtract(two[name])
        counter.update(one[name])
    return outside


def counted(name: str, shards: str) -> dict:
    """Return the counts of a block, that of the only layer, and of the rest of a step."""
    recipe = quantised_everywhere(RECIPES[name]())
    outside = rest(recipe.dtype, shards)
    whole = step(recipe, shards, 1, MEASURING if name.endswith(MEASURED) else PLAIN)
    return {
        "block": {name: whole[name].total() - outside[name].total() for name in whole},
        "rest": {name: outside[name].total() for name in whole},
        "places": {name: dict(counter.most_common(8)) for name, counter in whole.items()},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.get_autocast_gpu_dtype = lambda: torch.bfloat16
    torch.version.cuda = "13.0"  # a build for CUDA, as the choice of kernels asks
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        shards = write_shards(Path(folder))
        for recipe in sys.argv[1:] or RECIPES:
            try:
                results[recipe] = counted(recipe, shards)
            except Exception as error:  # of whatever class: the test says which recipe fails
                results[recipe] = {"error": f"{type(error).__name__}: {error}"[:300]}
    print(json.dumps(results))
