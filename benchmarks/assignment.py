"""Assignments of layers beside their controls: is a map of damage worth more than a simple rule?

    python benchmarks/assignment.py FILE map        damage of each layer, errors amplified by 4: forks
    python benchmarks/assignment.py FILE check      assignments and controls, as they are, on other seeds
    python benchmarks/assignment.py FILE table      the table of docs/project/benchmarks.md

Each command continues where it was interrupted; FILE has a line for each fork. At three shares of FLOPs in
FP4, the layers that a map of layers keeps in bf16 are compared with the last layers, both ends and five
random choices of equal share; at a fourth one, the products that a map of blocks and products keeps. The
model has three blocks of width 96; forks have 60 steps.
"""

import argparse
from functools import partial
from math import inf
from pathlib import Path
from typing import NamedTuple

import fork_pool
import numpy as np

import ablate
from ablate.recipes.cells import Cell, What, Where, fp4_share, grid, within
from ablate.recipes.recipe import Recipe
from ablate.results.assignment import Map, Measured, Unit
from ablate.results.assignment.check import ASSIGNED, controls
from ablate.results.intervals import Interval
from ablate.training.workloads.gpt import Gpt

WORKLOAD = Gpt(layers=3, width=96, heads=3, batch=2, steps=300, lr=1e-3, eval_every=300, eval_tokens=32_768)
NVFP4 = ablate.recipe("nvfp4")
POSITION, WINDOW = 200, 60
TIMES = 4.0
CASES: dict[str, tuple[float, Unit]] = {
    "90%": (0.9, "layer"),
    "75%": (0.75, "layer"),
    "50%": (0.5, "layer"),
    "67% by product": (2 / 3, "product"),
}
MAP_SEEDS, CHECK_SEEDS = range(4), range(100, 116)


class Job(NamedTuple):
    """Fork of a recipe at a seed."""

    stage: str
    arm: str
    seed: int


def cells(unit: Unit) -> dict[str, Cell]:
    """Return the cells of a map: every layer, or every product of every block."""
    by: tuple[Where, What] = ("layers", "recipe") if unit == "layer" else ("blocks", "products")
    return grid(NVFP4, WORKLOAD.linear_layers, *by)


def map_arms() -> dict[str, Recipe]:
    """Return the recipes of the maps: bf16, and each cell alone with amplified errors."""
    both = cells("layer") | cells("product")
    alone = {name: within(NVFP4, WORKLOAD.linear_layers, [cell], TIMES) for name, cell in both.items()}
    return {"bf16": ablate.recipe("bf16"), **alone}


def damages(rows: list[dict], stage: str) -> dict[str, dict[int, float]]:
    """Return the damage of each arm by seed: its loss less that of bf16 at the same seed."""
    losses = {(row["arm"], row["seed"]): row["loss"] for row in rows if row["stage"] == stage}
    found: dict[str, dict[int, float]] = {}
    for (arm, seed), loss in losses.items():
        if ("bf16", seed) in losses:
            found.setdefault(arm, {})[seed] = loss - losses["bf16", seed]
    return found


def measured(rows: list[dict], unit: Unit) -> Map:
    """Return the map of the finished forks."""
    found = damages(rows, "map")
    means = {name: float(np.mean([*found[name].values()])) / TIMES**2 for name in cells(unit)}
    parts = (Measured(name, cell, means[name]) for name, cell in cells(unit).items())
    return Map(NVFP4, WORKLOAD.linear_layers, tuple(parts))


def check_arms(rows: list[dict]) -> dict[str, Recipe]:
    """Return bf16, the whole recipe, and at each share the assignment and its controls."""
    arms = {"bf16": ablate.recipe("bf16"), "nvfp4": NVFP4}
    for case, (share, unit) in CASES.items():
        known = measured(rows, unit)
        best = known.assign(share, unit=unit)
        chosen = {ASSIGNED: best.recipe} | controls(known, best, unit)
        arms |= {f"{case}: {name}": recipe for name, recipe in chosen.items()}
    return arms


def work(arms: dict[str, Recipe], trunks: Path, job: Job) -> dict[str, float]:
    """Train one fork and return its loss, in its own precision and in bf16."""
    values = fork_pool.fork(WORKLOAD, arms[job.arm], job.seed, POSITION, WINDOW, trunks)
    return {"loss": values["loss"], "loss_bf16": values["loss_bf16"]}


def half_width(values: np.ndarray) -> float:
    """Return half of the 95 % interval of a mean over seeds."""
    return float(values.std(ddof=1)) * Interval().half_width(len(values))


def table(rows: list[dict]) -> None:
    """Print the maps, and the damage of each choice with its difference from the assignment."""
    found, arms = damages(rows, "check"), check_arms(rows)
    for name, by_seed in damages(rows, "map").items():
        values = np.array([*by_seed.values()])
        print(f"{name}: {values.mean():+.4f} ±{half_width(values):.4f}, {len(values)} seeds")
    for case, (share, unit) in CASES.items():
        known, own = measured(rows, unit), f"{case}: {ASSIGNED}"
        named = {arm: found[arm] for arm in arms if arm.startswith(f"{case}: ")} | {"nvfp4": found["nvfp4"]}
        seeds = sorted(set.intersection(*({*by_seed} for by_seed in named.values())))
        of = {arm: np.array([by_seed[seed] for seed in seeds]) for arm, by_seed in named.items()}
        drawn = [values for arm, values in of.items() if ": random " in arm]
        of[f"mean of {len(drawn)} random"] = np.mean(drawn, 0)
        best = known.assign(share, unit=unit)
        print(f"{case}: {len(seeds)} seeds; predicted {best.damage:.5f}; bf16: {', '.join(best.kept)}")
        for arm, values in of.items():
            against = values - of[own]
            part = f"; {fp4_share(arms[arm], known.layers):.1%}" if arm in arms else ""
            print(
                f"  {arm}: {values.mean():+.5f} ±{half_width(values):.5f}; less the assignment's"
                f" {against.mean():+.5f} ±{half_width(against):.5f}{part}"
            )


def main() -> None:
    """Run a stage, or print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("file", type=Path)
    options.add_argument("stage", choices=["map", "check", "table"])
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--minutes", type=float, default=inf)
    given = options.parse_args()
    rows = fork_pool.rows(given.file)
    if given.stage == "table":
        table(rows)
        return
    arms = map_arms() if given.stage == "map" else check_arms(rows)
    seeds = MAP_SEEDS if given.stage == "map" else CHECK_SEEDS
    _ = WORKLOAD.corpus
    jobs = [Job(given.stage, arm, seed) for seed in seeds for arm in arms]
    trunks = given.file.parent / "trunks"
    left = fork_pool.run(given.file, jobs, partial(work, arms, trunks), given.workers, given.minutes)
    print(f"{left} left")


if __name__ == "__main__":
    main()
