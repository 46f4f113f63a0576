"""Ledgers that tests fill by hand: arms with chosen losses."""

import json
import math

from ablate.results.paired_stats import judge

SPEC = json.dumps({"workload": {"gpt": {"batch": 2, "context": 16}}, "seed": 0, "data": "abc"})
BASE = {0: 3.00, 1: 3.10, 2: 3.20, 3: 3.05}
WORSE = {seed: value + 0.1 + 0.001 * seed for seed, value in BASE.items()}
ALIKE = {seed: value + 0.0001 * (-1) ** seed * (1 + seed) for seed, value in BASE.items()}
LOOSE = {seed: value + 0.2 * (-1) ** seed * (1 + 0.1 * seed) for seed, value in BASE.items()}


def add(
    book,
    name: str,
    losses: dict,
    baseline: int | None = 1,
    knobs: dict | None = None,
    status="done",
    optuna=None,
    role=None,
    recipe: dict | None = None,
) -> int:
    role = role or ("listed" if optuna is None else "searched")
    arm = book.add_arm(name, {name: True} if knobs is None else knobs, baseline, optuna, role)
    spec = SPEC if recipe is None else json.dumps(json.loads(SPEC) | {"recipe": recipe})
    for seed, loss in losses.items():
        trial = book.add_member(arm, seed, f"{name}/{seed}", spec)
        steps = ((10, loss + 0.4), (20, loss + 0.2), (40, loss))
        book.record(
            trial, [{"step": step, "time": 0.0, "metrics": {"val/loss": value}} for step, value in steps]
        )
        book.settle(trial, status, seconds=3600.0)
    return arm


def noisy(book, count: int) -> None:
    """Arms without an effect."""
    for number in range(count):
        add(
            book,
            f"noise {number}",
            {seed: value + 0.1 * math.sin(7 * seed + number) for seed, value in BASE.items()},
        )


def whole_grid(book) -> None:
    """Two knobs: sr costs .1, rht nothing, and each arm's gap to the baseline is drowned in the baseline's own noise."""
    add(
        book,
        "bf16",
        {seed: value + 0.3 * math.sin(5 * seed) for seed, value in BASE.items()},
        None,
        knobs={"recipe": "bf16"},
    )
    for place, (rht, sr) in enumerate(((True, True), (True, False), (False, True), (False, False))):
        losses = {seed: value + 0.1 * sr + 0.002 * math.sin(3 * seed + place) for seed, value in BASE.items()}
        add(book, f"rht={rht} sr={sr}", losses, knobs={"rht": rht, "sr": sr})


def learn(book, floor: float) -> None:
    """As if the runs' workload had said what a model reaches that ignores its input."""
    for member in book.members():
        book.note_context_free(member.trial, floor)


def decided(difference, margin: float | None) -> bool:
    """Return True if the only comparison of a table needs no more seeds."""
    return judge([(difference, margin)], True, plan=False)[0].decided
