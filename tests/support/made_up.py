"""Ledgers that no run wrote, with every kind of arm that a figure meets: seeds that diverged, arms that a search proposed, layers."""

import json
import math
from pathlib import Path

import numpy as np

from ablate.experiment.schema import Metric
from ablate.store.ledger import Ledger

LOSS = Metric(name="val/loss", min_effect=0.01)
SPEED = Metric(name="throughput/tokens_per_s", direction="maximize")
SPEC = json.dumps({"workload": {"gpt": {"layers": 2, "width": 64, "heads": 2, "context": 32, "batch": 4}}})
LAYERS = [
    f"blocks.{block}.{part}" for block in range(3) for part in ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
]
SLOTS = ("fprop.x", "dgrad.g", "wgrad.x")


def member(
    ledger: Ledger, arm: int, seed: int, events: list[dict], status: str = "done", spec: str = SPEC
) -> None:
    """One run of an arm, with {step: metrics} as its records."""
    trial = ledger.add_member(arm, seed, f"{arm}/{seed}", spec)
    ledger.record(trial, [{"step": step, "time": 0.0, "metrics": metrics} for step, metrics in events])
    ledger.settle(trial, status)


def events(
    seed: int,
    gap: float,
    loss: float,
    steps: list[int],
    draw: np.random.Generator,
    quantised: bool,
    speed: float,
) -> list:
    """Return records like those of a run of gpt: a loss that falls, errors of operands by layer if it is quantised."""
    found = []
    for step in steps:
        level = 3.2 + 2 * math.exp(-step / 150) + 0.05 * math.sin(seed * 2.1) + draw.normal(0, 0.003)
        metrics = {
            "val/loss": level + gap * (1 - math.exp(-step / 200)),
            "throughput/tokens_per_s": speed * draw.normal(1, 0.02),
        }
        metrics |= {"nan/loss": 0.0, "nan/grad": 0.0, "nan/activation": 0.0}
        if quantised:
            metrics |= _operands(step, loss, draw)
        found.append((step, metrics))
    return found


def _operands(step: int, loss: float, draw: np.random.Generator) -> dict[str, float]:
    found = {}
    for number, slot in enumerate(SLOTS):
        by_layer = {
            layer: 20 - loss - number / 2 - 0.2 * place - step / 500 + draw.normal(0, 0.2)
            for place, layer in enumerate(LAYERS)
        }
        found |= {f"quant/{slot}/{layer}/sqnr_db": value for layer, value in by_layer.items()}
        found[f"quant/{slot}/sqnr_db"] = float(np.mean(list(by_layer.values())))
        found[f"quant/{slot}/rel_mse"] = 0.009 * (1 + loss / 10 + 0.05 * draw.random())
        found[f"quant/{slot}/magnitude"] = 1 - 0.002 * loss + draw.normal(0, 0.0005)
        found[f"quant/{slot}/zero_frac"] = 0.05 + 0.02 * number + step / 20000 + 0.01 * loss * draw.random()
        found[f"quant/{slot}/saturated_frac"] = 0.002 * loss * draw.random()
    return found


def grid(path: Path, seeds: int = 3, steps: int = 6, only: int | None = None) -> Ledger:
    """A baseline and four arms, of which one diverges on its last seed and has one that is missing; `only` so many arms."""
    ledger = Ledger(path / "grid" / "ledger.db")
    ledger.describe(
        metric=LOSS.model_dump_json(),
        question="Does stochastic rounding of the gradient still pay once wgrad is rotated?",
    )
    draw = np.random.default_rng(0)
    base = ledger.add_arm("bf16", {}, None, None)
    when = [int(step) for step in np.linspace(0, 1000, steps)]
    for seed in range(seeds):
        member(ledger, base, seed, events(seed, 0.0, 0.0, when, draw, False, 9000))
    points = [(rht, sr) for rht in (True, False) for sr in (True, False)]
    for place, (rht, sr) in enumerate(points[:only]):
        gap = 0.008 + 0.015 * (not rht) + 0.004 * (not sr) + 0.02 * (not sr) * (not rht)
        arm = ledger.add_arm(f"rht={json.dumps(rht)} sr={json.dumps(sr)}", {"rht": rht, "sr": sr}, base, None)
        for seed in range(seeds):
            if place == 3 and seed == seeds - 1 and seeds > 1:
                bad = {"nan/loss": 3.0, "nan/grad": 12.0, "nan/first_step": 600.0, "val/loss": math.nan}
                short = [step for step in when if step < 600]
                member(
                    ledger,
                    arm,
                    seed,
                    [*events(seed, gap, 3, short, draw, True, 5000), (600, bad)],
                    "diverged",
                )
            elif place == 2 and seed == seeds - 1 and seeds > 2:
                member(ledger, arm, seed, [], "failed")
            else:
                member(ledger, arm, seed, events(seed, gap, place, when, draw, True, 5000 + 500 * place))
    return ledger


def search(path: Path, count: int = 24) -> Ledger:
    """A baseline and so many arms that a sampler proposed, over a log range, whole numbers, choices and a knob that not all have."""
    ledger = Ledger(path / "search" / "ledger.db")
    ledger.describe(metric=LOSS.model_dump_json(), search="{}", question="Which learning rate?")
    draw = np.random.default_rng(1)
    base = ledger.add_arm("bf16", {}, None, None, "baseline")
    for seed in range(2):
        member(
            ledger, base, seed, [(100, {"val/loss": 3.0 + 0.02 * seed, "throughput/tokens_per_s": 9000.0})]
        )
    for place in range(count):
        rate, blocks = float(f"{10 ** draw.uniform(-4, -2):.3g}"), int(draw.integers(0, 5))
        rounding = str(draw.choice(["nearest", "stochastic", "four_over_six"]))
        knobs = {"workload.lr": rate, "recipe.layers.keep_last": blocks, "recipe.wgrad.g.rounding": rounding}
        knobs |= {"sr_bits": int(draw.choice([8, 16, 24]))} if rounding == "stochastic" else {}
        arm = ledger.add_arm(
            " ".join(f"{knob.split('.')[-1]}={value}" for knob, value in knobs.items()),
            knobs,
            base,
            place,
            "searched",
        )
        value = (
            3.02 + 0.1 * (math.log10(rate) + 2.8) ** 2 - 0.005 * blocks - 0.02 * (rounding == "stochastic")
        )
        for seed in range(2):
            metrics = {
                "val/loss": value + 0.02 * seed + draw.normal(0, 0.003),
                "throughput/tokens_per_s": 5000 - 300 * blocks + draw.normal(0, 50),
            }
            lost = rate > 0.008
            member(
                ledger,
                arm,
                seed,
                [(40, {"nan/first_step": 40.0})] if lost else [(100, metrics)],
                "diverged" if lost else "done",
            )
    return ledger
