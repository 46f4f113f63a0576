"""The design of the demonstration: the cheapest one whose interval is a fifth of a known-bad arm's damage.

    python benchmarks/demo_design.py run --state DIR      # goes on where it was stopped
    python benchmarks/demo_design.py table --state DIR
    python benchmarks/demo_design.py again --state DIR    # rht_sr.yaml on five other sets of seeds

Each model is a sweep of forks on seeds of its own, as `ablate calibrate` runs it; the demonstration's arms
never enter with the seeds that it uses. Of every design that is part of a sweep the table says how many seeds
it takes, and how long two workers need for the 7 arms of the demonstration. `again` says how often its answer
is the same.
"""

import argparse
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML

from ablate.results.calibration import Candidate, from_forks
from ablate.results.comparisons import Comparisons
from ablate.results.headline import headline_of
from ablate.results.number_text import interval
from ablate.results.verdict_text import verdict_text
from ablate.store.checked_ledger import open_ledger

SEEDS = range(900_000, 900_006)
ARMS, WORKERS = 7, 2
BAD = "mxfp4"
BASE = {"heads": 2, "batch": 2, "steps": 300, "lr": 1.0e-3, "eval_every": 50}
MODELS: dict[str, dict[str, Any]] = {
    "2x64": BASE | {"layers": 2, "width": 64},
    "2x64_slow": BASE | {"layers": 2, "width": 64, "lr": 5.0e-4},
    "3x96": BASE | {"layers": 3, "width": 96, "heads": 3},
}
DESIGN = {"trunk": "bf16", "positions": [0.5, 0.7, 0.9], "window": 0.05, "horizons": [1, 2, 4], "bad": BAD}


SHIPPED = Path(__file__).parent.parent / "experiments" / "rht_sr.yaml"
SETS = (100, 200, 300, 400, 500)
"""First seed of each set."""


class Proposal(NamedTuple):
    """A model with a design, and the seeds that it takes."""

    model: str
    one: Candidate
    seeds: int | None
    """None: not even a dozen seeds are enough."""

    @property
    def minutes(self) -> float:
        """Minutes of two workers for the arms of the demonstration."""
        return (self.seeds or 12) * self.one.seconds(ARMS) / WORKERS / 60


def sweep(model: str, folder: Path) -> Path:
    """Write the experiment of a model; return its path."""
    content: dict[str, Any] = {
        "schema": 1,
        "question": f"Which design tells most in two minutes with the model {model}?",
        "workload": {"gpt": MODELS[model]},
        "recipe": "nvfp4",
        "arms": {"nvfp4": {}, "nearest": {"sr": False, "rht": False}},
        "against": "bf16",
        "seeds": list(SEEDS),
        "design": DESIGN,
        "null": True,
        "metric": {"name": "val/loss", "direction": "minimize"},
    }
    path = folder / f"demo_{model}.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML 1.2
    return path


def run(state: Path, models: list[str]) -> int:
    """Run the sweep of each model."""
    state.mkdir(parents=True, exist_ok=True)
    for model in models:
        command = [sys.executable, "-m", "ablate.sweep", str(sweep(model, state)), "--state", str(state)]
        if status := subprocess.run([*command, "--quiet", "--no-report"], check=False).returncode:
            return status
    return 0


def proposals(state: Path) -> list[Proposal]:
    """Return every design of every model that has run, the fastest that is narrow enough first."""
    found = []
    for model, config in MODELS.items():
        if not (state / "sweeps" / f"demo_{model}" / "ledger.db").exists():
            continue
        with closing(open_ledger(state, f"demo_{model}")) as ledger:
            design = ledger.facts.design
            assert design, "a sweep of forks"
            tokens = config["batch"] * config.get("context", 128)
            for one in from_forks(ledger, design, config["steps"], tokens, design.bad or ""):
                enough = (n for n in range(3, 13) if one.half_width(n, True) <= one.goal)
                found.append(Proposal(model, one, next(enough, None)))
    return sorted(found, key=lambda each: (each.seeds is None, each.minutes))


def table(state: Path) -> None:
    """Print the designs."""
    print(
        "| model | design | known-bad arm | deviation (largest) | evaluation | seeds | half-width | minutes |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for model, one, seeds in proposals(state):
        minutes = Proposal(model, one, seeds).minutes
        print(
            f"| {model} | {one.name} | {one.effect:+.4f} ±{one.effect_error:.4f} | {one.deviation:.4f}"
            f" ({one.largest:.4f}) | {one.error:.4f} | {seeds or 'over 12'}"
            f" | {one.half_width(seeds or 12):.4f} | {minutes:.1f} |"
        )


def again(state: Path) -> None:
    """Run the demonstration on other sets of seeds, and print a line for each."""
    state.mkdir(parents=True, exist_ok=True)
    print("| seeds | first words | sr with the rotation | known-bad arm | A/A arm |")
    print("|---|---|---|---|---|")
    for first in SETS:
        content = YAML(typ="safe").load(SHIPPED)
        content["seeds"] = list(range(first, first + content["seeds"]))
        path = state / f"demo_{first}.yaml"
        path.write_text(json.dumps(content))
        command = [sys.executable, "-m", "ablate.sweep", str(path), "--state", str(state), "--no-report"]
        subprocess.run([*command, "--quiet"], check=True, stdout=subprocess.DEVNULL)
        with closing(open_ledger(state, path.stem)) as ledger:
            sweep = Comparisons(ledger)
            ((effect, verdict),) = sweep.asked_effects
            arms = {arm.role: arm for arm in sweep.arms if arm.role in ("bad", "null")}
            words = {role: verdict_text(arm.verdict, short=True) for role, arm in arms.items()}
            print(
                f"| {first} to {first + effect.effect.pairs - 1} | {headline_of(sweep).lead}"
                f" | {interval(effect.effect)}, {verdict_text(verdict, short=True)}"
                f" | {interval(arms['bad'].gap)}, {words['bad']} | {words['null']} |",
                flush=True,
            )


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("run", "table", "again"))
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    if options.what == "run":
        sys.exit(run(options.state, options.models))
    (table if options.what == "table" else again)(options.state)


if __name__ == "__main__":
    main()
