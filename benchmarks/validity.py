"""Pool of real runs whose truth is known: many seeds of some recipes, of twins and of planted effects.

    python benchmarks/validity.py run --state DIR      # goes on where it was stopped
    python benchmarks/validity.py table --state DIR    # the tables of experiments/LOG.md

The problem. Simulated differences are as normal as their author makes them. Whether intervals, verdicts and
promised numbers of seeds hold for trainings can only be seen on trainings.

The idea. A small model is cheap enough for hundreds of seeds. The mean over all of them is the truth; a sweep
is a subsample of 3, 5 or 8. Every statement that a sweep makes is compared with the truth of the other seeds:

    coverage     intervals that contain it; verdicts with the wrong sign; exaggeration of resolved effects
    twins        disjoint experiments of 3 pairs without any effect: how many are resolved
    planted      bf16 with noise or bias of known size in its gradients: how often it is resolved
    seeds        sweeps that are undecided, continued to the number of seeds that they name
    calibration  widths promised by `ablate calibrate`, and the design that it chooses

A planted arm adds to the gradient g of every weight matrix r |g| n, where n has norm 1: drawn anew in each
step ("noise"), or the same in all steps of a run ("bias").
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from fork_pool import rows, run
from pool_truth import tables
from torch import Tensor, nn

import ablate
from ablate.experiment.forked_design import resolved
from ablate.experiment.schema import Design
from ablate.recipes.recipe import Recipe
from ablate.training.loop import PreparedRun, Telemetry
from ablate.training.metric_names import cell_of, part_of
from ablate.training.trial_run import TrialRun
from ablate.training.workloads.gpt import Gpt

MODEL = {"layers": 2, "width": 32, "heads": 2, "context": 64, "batch": 4, "steps": 100, "lr": 3e-3}
EVALUATION = {"eval_tokens": 8192, "eval_every": 100}
DESIGN = Design(trunk="bf16", positions=3, window=0.15, horizons=(1, 2, 4))
RECIPES: dict[str, tuple[str, dict[str, object]]] = {
    "bf16": ("bf16", {}),
    "mxfp4": ("mxfp4", {}),
    "nvfp4": ("nvfp4", {}),
    "nearest": ("nvfp4", {"sr": False, "rht": False}),
}


@dataclass(frozen=True)
class Planted:
    """Disturbance of the gradients of an arm in bf16."""

    kind: str
    """`noise`: drawn anew in each step; `bias`: the same in all steps of a run."""
    size: float
    """Norm of the disturbance over that of the gradient."""


PLANTED = {
    "noise .1": Planted("noise", 0.1),
    "noise .3": Planted("noise", 0.3),
    "bias .05": Planted("bias", 0.05),
    "bias .1": Planted("bias", 0.1),
    "noise .05": Planted("noise", 0.05),
    "bias .02": Planted("bias", 0.02),
}
"""Sizes whose effect is about one deviation, by 8 seeds: the first four in full runs, the others in forks."""
TWINS = ("bf16 twin", "nvfp4 twin")
SEEDS = {
    "full": {"bf16": 900, "bf16 twin": 900, "nvfp4": 200, "nvfp4 twin": 200}
    | dict.fromkeys(("mxfp4", "nearest", "noise .1", "noise .3", "bias .05", "bias .1"), 200),
    "forks": dict.fromkeys((*RECIPES, "nvfp4 twin", "noise .05", "bias .02"), 96),
}
"""Number of seeds by design and arm; seeds count from 0."""


class Subject(Gpt):
    """The model, whose gradients may be disturbed."""

    def prepare(self, recipe: Recipe, seed: int, device: str, engine: str = "emulated") -> PreparedRun:
        """Return the prepared run; that of a planted arm has disturbed gradients."""
        run = super().prepare(recipe, seed, device, engine)
        planted = _PLANTED.get(id(recipe))
        if planted:
            disturb(run.model, planted, seed)
        return run


_PLANTED: dict[int, Planted] = {}
"""Disturbance of the recipe object of a planted arm: a trunk in bf16 has another object."""


def disturb(model: nn.Module, planted: Planted, seed: int) -> None:
    """Disturb the gradient of every weight matrix of a model from now on.

    Args:
        model: the model.
        planted: kind and size.
        seed: seed of the random draws.
    """
    draws = torch.Generator().manual_seed(seed)

    def disturbed(fixed: Tensor | None, gradient: Tensor) -> Tensor:
        noise = torch.randn(gradient.shape, generator=draws) if fixed is None else fixed
        return gradient + planted.size * gradient.norm() / noise.norm() * noise

    for parameter in model.parameters():
        if parameter.ndim == 2:
            fixed = torch.randn(parameter.shape, generator=draws) if planted.kind == "bias" else None
            parameter.register_hook(lambda gradient, fixed=fixed: disturbed(fixed, gradient))


class Run(NamedTuple):
    """Key of a line of the pool."""

    design: str
    arm: str
    seed: int


def trial(run: Run) -> dict[str, object]:
    """Return the last values of one run of one arm."""
    design, arm, seed = run
    subject = Subject(**MODEL, **EVALUATION)
    name, knobs = RECIPES.get(arm.removesuffix(" twin"), ("bf16", {}))
    recipe = ablate.recipe(name, knobs).model_copy()
    _PLANTED.clear()
    if arm in PLANTED:
        _PLANTED[id(recipe)] = PLANTED[arm]
    records = subject.records(
        TrialRun(
            recipe,
            seed,
            "emulated",
            "cpu",
            Telemetry(every=10**6, shadow=10**6, log=100),
            forks=resolved(DESIGN, subject) if design == "forks" else None,
            twin=arm in TWINS,
        )
    )
    values: dict[str, float] = {}
    for record in records:
        values |= {
            key: value
            for key, value in record.metrics.items()
            if key in ("val/loss", "val/loss_bf16") or cell_of(key) or part_of(key)
        }
    return {"values": values}


def wanted(share: float) -> Iterator[Run]:
    """Yield every run, the first seeds of all arms first."""
    counts = [
        (design, arm, math.ceil(share * count))
        for design, arms in SEEDS.items()
        for arm, count in arms.items()
    ]
    for seed in range(max(count for *_, count in counts)):
        yield from (Run(design, arm, seed) for design, arm, count in counts if seed < count)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the pool or print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--state", type=Path, required=True, help="Folder of pool.jsonl.")
    parser.add_argument("--workers", type=int, default=2, help="Processes. Default: %(default)s.")
    parser.add_argument("--share", type=float, default=1.0, help="Share of the seeds. Default: all.")
    given = parser.parse_args(arguments)
    given.state.mkdir(parents=True, exist_ok=True)
    path = given.state / "pool.jsonl"
    if given.what == "run":
        run(path, wanted(given.share), trial, given.workers)
    else:
        print("\n".join(tables(rows(path), DESIGN, MODEL["steps"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
