"""Time that reading a large experiment takes, for figures.py.

`reading.py FOLDER ARMS SEEDS ANSWER` makes a ledger of arms x seeds runs, reads it, and writes the seconds to
the file ANSWER.
"""

import json
import math
import sys
import time
from pathlib import Path

from ablate.cli.report import make
from ablate.store.ledger import Ledger
from ablate.store.records import frame

STEPS = range(10, 1001, 10)
SLOTS = ("fprop.x", "fprop.w", "dgrad.g", "dgrad.w", "wgrad.g", "wgrad.x")
LAYERED = [f"quant/{slot}/blocks.{layer}.mlp.up/sqnr_db" for slot in SLOTS for layer in range(15)]
PLAIN = [
    "train/loss",
    "val/loss",
    "grad/norm",
    "throughput/tokens_per_s",
    *(f"quant/{slot}/sqnr_db" for slot in SLOTS),
]
METRICS = [*PLAIN, *LAYERED]
SPEC = json.dumps({"workload": {"gpt": {}}, "data": "drawn"})


def fill(path: Path, arms: int, seeds: int) -> None:
    """Fill a ledger with a grid of arms over a knob; each run has every metric at every step."""
    ledger = Ledger(path)
    ledger.identity()
    metric = '{"name": "val/loss", "min_effect": 0.01}'
    ledger.describe(name=path.parent.name, question="How long does reading take?", metric=metric, search="")
    base = None
    for arm in range(arms + 1):
        number = ledger.add_arm("bf16" if base is None else f"lr={arm}", {"workload.lr": arm}, base, None)
        for seed in range(seeds):
            trial = ledger.add_member(number, seed, f"{arm}/{seed}", SPEC)
            level = 3 + 0.1 * math.sin(seed) + 0.001 * arm + 0.002 * math.sin(7 * arm + seed)
            events = [
                {"step": step, "time": float(step), "metrics": dict.fromkeys(METRICS, level + 10 / step)}
                for step in STEPS
            ]
            ledger.record(trial, events)
            ledger.settle(trial, "done", seconds=1.0)
        base = number if base is None else base
    ledger.close()


def main(folder: Path, arms: int, seeds: int, answer: Path) -> None:
    """Measure, and write the figures to a file."""
    path = folder / "sweeps" / "large" / "ledger.db"
    fill(path, arms, seeds)
    ledger = Ledger(path, readonly=True)
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        rows = len(frame(ledger))
        seconds.append(time.perf_counter() - started)
    ledger.close()
    started = time.perf_counter()
    make(folder, "large")
    figures = {"runs": (arms + 1) * seeds, "rows": rows, "first_s": seconds[0], "again_s": seconds[1]}
    answer.write_text(json.dumps(figures | {"report_s": time.perf_counter() - started}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
