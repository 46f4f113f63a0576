"""Effect over noise of forks and of full runs: one model, the same arms and seeds, several designs.

    python benchmarks/fork_designs.py run --state DIR      # goes on where it was stopped
    python benchmarks/fork_designs.py table --state DIR

Each design is a sweep of its own, written as an experiment file into DIR and run by `ablate sweep`. The table
is printed from their ledgers. A design is good if it tells a known-bad arm from bf16 with little computation:
mean over standard deviation of the paired differences, divided by the square root of the hours that a seed
takes for that arm, its baseline and the trunk. That is Student's t after one hour.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from ablate.files import Json
from ablate.store.checked_ledger import open_ledger
from ablate.store.ledger import Ledger
from ablate.training.metric_names import cell_of

SEEDS, FEW_SEEDS = 8, 4
MODEL = {"layers": 3, "width": 96, "heads": 3, "context": 64, "batch": 4, "steps": 300, "eval_tokens": 32768}
"""256 tokens a step: the model of METHODS' first measurements and of the shipped demonstrations."""
BAD = "mxfp4"
"""Known-bad arm: its loss is worse in every measurement, by scales of powers of two."""
ARMS: dict[str, dict[str, Json]] = {
    "nvfp4": {"recipe": "nvfp4"},
    "nearest": {"recipe": "nvfp4", "sr": False, "rht": False},
    "no_sr": {"recipe": "nvfp4", "sr": False},
    "no_rht": {"recipe": "nvfp4", "rht": False},
    "no_2d": {"recipe": "nvfp4", "weights_2d": False},
    BAD: {"recipe": "mxfp4"},
}
FEW = ("nvfp4", BAD)
_BACKWARD = ("recipe.dgrad.g", "recipe.dgrad.w", "recipe.wgrad.g", "recipe.wgrad.x")
MORE: dict[str, dict[str, Json]] = {
    "last_bf16": {"recipe": "nvfp4", "skip_last": 1},
    "headroom": {"recipe": "nvfp4", "sr_headroom": 1.0625},
    "signs_per_step": {"recipe": "nvfp4", "rht_signs": "per_step"},
    "block_32": {"recipe": "nvfp4", "block": "1x32"},
    "forward_only": {"recipe": "nvfp4", "rht": False} | dict.fromkeys(_BACKWARD),
    "no_scale_2d_nearest": {"recipe": "nvfp4", "sr": False, "rht": False, "weights_2d": False},
}
"""Further recipes for the calibration line, on fewer seeds."""
ANNEALED: dict[str, Json] = {"trunk": "bf16", "positions": 3, "window": 0.15, "horizons": [1, 2, 4]}
IN_DECAY: dict[str, Json] = {
    "trunk": "bf16",
    "positions": [0.8],
    "window": 0.2,
    "horizons": [1],
    "anneal": False,
}


@dataclass(frozen=True)
class Sweep:
    """One design as an experiment."""

    name: str
    arms: tuple[str, ...]
    lr: float
    design: dict[str, Json] | None
    seeds: int = SEEDS

    def write(self, folder: Path) -> Path:
        """Write the experiment file and return its path."""
        content: dict[str, Any] = {
            "schema": 1,
            "question": f"How sharp is the design {self.name}?",
            "workload": {"gpt": MODEL | {"lr": self.lr, "eval_every": 100}},
            "arms": {name: (ARMS | MORE)[name] for name in self.arms},
            "against": "bf16",
            "null": True,
            "seeds": self.seeds,
            "metric": {"name": "val/loss", "min_effect": 0.001},
            "telemetry": {"every": 100000, "shadow": 100000, "log": 50},
        }
        if self.design:
            content["design"] = self.design
        path = folder / f"{self.name}.yaml"
        path.write_text(json.dumps(content))  # JSON is YAML 1.2
        return path


SWEEPS = (
    Sweep("annealed", tuple(ARMS), 1e-3, ANNEALED),
    Sweep("full", tuple(ARMS), 1e-3, None),
    Sweep("in_decay", tuple(ARMS), 1e-3, IN_DECAY),
    Sweep("annealed_more", tuple(MORE), 1e-3, ANNEALED, FEW_SEEDS),
    Sweep("full_more", tuple(MORE), 1e-3, None, FEW_SEEDS),
    Sweep("annealed_fast", FEW, 3e-3, ANNEALED, FEW_SEEDS),
    Sweep("full_fast", FEW, 3e-3, None, FEW_SEEDS),
    Sweep("in_decay_fast", FEW, 3e-3, IN_DECAY, FEW_SEEDS),
)


def run(state: Path) -> int:
    """Run every design's sweep; return the exit status of the first that fails, or 0."""
    state.mkdir(parents=True, exist_ok=True)
    for sweep in SWEEPS:
        path = sweep.write(state)
        command = [sys.executable, "-m", "ablate.sweep", str(path), "--state", str(state), "--quiet"]
        if status := subprocess.run(command, check=False).returncode:
            return status
    return 0


Readings = dict[tuple[str, int], dict[int, dict[str, float]]]
"""Losses by (cell, horizon in steps; full runs: "", 0), by seed, by reading."""


def readings(ledger: Ledger) -> tuple[dict[str, Readings], dict[str, float]]:
    """Return every arm's losses, and the mean seconds of its trials."""
    lasts = ledger.finals(lambda name: "loss" in str(name))
    arms: dict[str, Readings] = {}
    seconds: dict[str, list[float]] = {}
    for member in ledger.members():
        if member.status != "done":
            continue
        seconds.setdefault(member.name, []).append(member.seconds or math.nan)
        table = arms.setdefault(member.name, {})
        values = lasts[member.trial]
        cells = {metric: cell for metric in values if (cell := cell_of(metric))}
        for metric, (position, window, reading) in cells.items():
            table.setdefault((str(position), window), {}).setdefault(member.seed, {})[reading] = values[
                metric
            ]
        if not cells:
            own = {"loss": values["val/loss"], "loss_bf16": values["val/loss_bf16"]}
            table.setdefault(("", 0), {})[member.seed] = own
    return arms, {name: float(np.mean(each)) for name, each in seconds.items()}


def averaged(table: Readings, window: int) -> dict[int, dict[str, float]]:
    """Return the losses at the end of a window by seed, as means over positions."""
    cells = [by_seed for (_, steps), by_seed in table.items() if steps == window]
    seeds = set.intersection(*(set(by_seed) for by_seed in cells))
    return {
        seed: {name: float(np.mean([cell[seed][name] for cell in cells])) for name in ("loss", "loss_bf16")}
        for seed in sorted(seeds)
    }


def rows(sweep: Sweep, state: Path) -> Iterator[list[str]]:
    """Yield the lines of one design: damage by part, its spread, Student's t, and t after one hour."""
    with closing(open_ledger(state, sweep.name)) as ledger:
        arms, seconds = readings(ledger)
    base = arms.pop("bf16")
    windows = sorted({steps for _, steps in base})
    shares = [steps / sum(windows) if steps else 1.0 for steps in windows]
    for window, share in zip(windows, shares, strict=True):
        for name, table in arms.items():
            own, other = averaged(table, window), averaged(base, window)
            seeds = sorted(own.keys() & other.keys())
            total = np.array([own[seed]["loss"] - other[seed]["loss_bf16"] for seed in seeds])
            learnt = np.array([own[seed]["loss_bf16"] - other[seed]["loss_bf16"] for seed in seeds])
            deviation = float(np.std(total, ddof=1))
            free = len(seeds) - 1
            low, high = (deviation * math.sqrt(free / stats.chi2.ppf(q, free)) for q in (0.975, 0.025))
            # The trunk's seconds are part of the baseline's.
            hours = share * (seconds[name] + seconds["bf16"]) / 3600
            t = float(np.mean(total)) / deviation * math.sqrt(len(seeds))
            after_hour = t / math.sqrt(len(seeds) * hours)
            yield [
                sweep.name,
                str(window or MODEL["steps"]),
                name,
                str(len(seeds)),
                f"{np.mean(total):+.5f}",
                f"{np.mean(learnt):+.5f}",
                f"{np.mean(total) - np.mean(learnt):+.5f}",
                f"{deviation:.5f} ({low:.5f} to {high:.5f})",
                f"{t:+.1f}",
                f"{after_hour:+.1f}",
                f"{3600 * hours:.0f}",
            ]


HEADER = (
    "design",
    "steps",
    "arm",
    "seeds",
    "total",
    "learnt",
    "direct",
    "sd of total (95 %)",
    "t",
    "t/hour",
    "s a seed",
)


def main() -> int:
    """Run the sweeps or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--state", type=Path, required=True)
    given = parser.parse_args()
    if given.what == "run":
        return run(given.state)
    print("| " + " | ".join(HEADER) + " |")
    print("|" + "---|" * len(HEADER))
    for sweep in SWEEPS:
        if (given.state / "sweeps" / sweep.name).exists():
            for row in rows(sweep, given.state):
                print("| " + " | ".join(row) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
