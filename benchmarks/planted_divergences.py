"""Planted divergences: in how many of 20 is the first value that was not finite named at its place?

    python benchmarks/planted_divergences.py --seed 4027        # a minute; writes planted_divergences.csv

Each fault is drawn with its layer, step, size and recipe, and planted in a training of a small gpt of 3
blocks; those in data, in a loop of one's own. A case is right if the run ends at the step where the fault
acts or later, and the place that the run's result names, or for faults that only scale a tensor the first
operand that grew, is that of the fault by the rule of its kind (`KINDS`).
"""

import argparse
import csv
import math
import random
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import ablate
from ablate.recipes import PRESETS
from ablate.training.first_nonfinite import Origin
from ablate.training.loop import Telemetry, train
from ablate.training.workloads.gpt import Gpt

ROWS = Path(__file__).with_suffix(".csv")
CASES, STEPS, BLOCKS = 20, 24, 3
LAYERS = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
RECIPES = ("nvfp4", "mxfp4", "fp8_current", "bf16")


class Case(NamedTuple):
    """One planted fault."""

    kind: str
    layer: str
    step: int
    """Step, from 0, at which it acts."""
    size: float
    recipe: str


Plant = Callable[[Any, Case], Any]
Right = Callable[[Origin, Case], bool]


def acts(run: Any, case: Case) -> bool:
    """Return True in the step of the fault, but not in evaluations."""
    return run.engine.clock.step == case.step and run.engine.clock.stream == "training"


def spoiled(x: Tensor, value: float) -> Tensor:
    """Return a copy of which one element is `value`."""
    x = x.clone()
    x.view(-1)[x.numel() // 3] = value
    return x


def at_input(change: Callable[[Tensor, Case], Tensor]) -> Plant:
    """Return a fault of a layer's input."""

    def plant(run: Any, case: Case) -> None:
        def hook(_: nn.Module, args: tuple[Tensor]) -> Any:
            return (change(args[0], case),) if acts(run, case) else None

        run.model.get_submodule(case.layer).register_forward_pre_hook(hook)

    return plant


def at_output(change: Callable[[Tensor, Case], Tensor]) -> Plant:
    """Return a fault of a layer's output."""

    def plant(run: Any, case: Case) -> None:
        def hook(_: nn.Module, args: object, y: Tensor) -> Any:
            return change(y, case) if acts(run, case) else None

        run.model.get_submodule(case.layer).register_forward_hook(hook)

    return plant


def at_gradient(change: Callable[[Tensor, Case], Tensor]) -> Plant:
    """Return a fault of the gradient of a layer's output."""

    def plant(run: Any, case: Case) -> None:
        def hook(_: nn.Module, args: object, y: Tensor) -> None:
            if acts(run, case):
                y.register_hook(lambda gradient: change(gradient, case))

        run.model.get_submodule(case.layer).register_forward_hook(hook)

    return plant


def at_update(change: Callable[[nn.Parameter, Any, Case], None]) -> Plant:
    """Return a fault of what the update before the step leaves."""

    def plant(run: Any, case: Case) -> Any:
        def hook(optimizer: Any, *_: object) -> None:
            after = run.engine.clock.step - (case.step - 1)
            if after == 0 or (after > 0 and change is of_scale):
                with torch.no_grad():
                    change(run.model.get_submodule(case.layer).weight, optimizer, case)

        return register_optimizer_step_post_hook(hook)

    return plant


def of_moment(weight: nn.Parameter, optimizer: Any, case: Case) -> None:
    """Spoil a second moment, so that the next update spoils the weight."""
    optimizer.state[weight]["exp_avg_sq"].view(-1)[7] = math.nan


def of_weight(weight: nn.Parameter, optimizer: Any, case: Case) -> None:
    """Spoil a weight, as an update would that overflows."""
    weight.view(-1)[7] = math.inf


def of_scale(weight: nn.Parameter, optimizer: Any, case: Case) -> None:
    """Multiply a layer's weight by 10,000, after this update and all that follow."""
    weight *= 1e4


def overflowing(run: Any, case: Case) -> Any:
    """Make the weight and the input of a layer so large that its product overflows; both are finite."""
    at_input(lambda x, case: x.sign() * 3e38)(run, case)

    def hundred(weight: nn.Parameter, optimizer: Any, case: Case) -> None:
        weight.fill_(100.0)

    return at_update(hundred)(run, case)


def named(*kinds: str) -> Right:
    """Return the rule that the place is the fault's layer, or something of it, of one of these kinds."""
    return lambda origin, case: origin.kind in kinds and case.layer in origin.name


def grew(origin: Origin, case: Case) -> bool:
    """Return True if the place, or the first operand that grew, is the fault's layer."""
    names = [origin.name, *(each.name for each in origin.grew[:1])]
    return any(case.layer in name for name in names)


def weights_grew(origin: Origin, case: Case) -> bool:
    """Return True if the place is a parameter, or if weights grew first."""
    return origin.kind == "parameter" or (bool(origin.grew) and origin.grew[0].slot == "fprop.w")


KINDS: dict[str, tuple[Plant | None, Right]] = {
    "NaN in an operand": (at_input(lambda x, case: spoiled(x, math.nan)), named("input")),
    "infinity in an output": (at_output(lambda x, case: spoiled(x, math.inf)), named("output")),
    "NaN in a gradient": (at_gradient(lambda x, case: spoiled(x, math.nan)), named("gradient")),
    "exploding gradient": (at_gradient(lambda x, case: x * case.size), grew),
    "overflow of a product": (overflowing, named("product", "output")),
    "scale of a layer": (at_update(of_scale), grew),
    "weight by the update": (at_update(of_weight), named("parameter")),
    "moment of the optimizer": (at_update(of_moment), named("parameter")),
    "learning rate": (None, weights_grew),
    "infinity in data": (None, lambda origin, case: origin.kind == "data"),
}
"""Planting of each kind, and the answer that is right for it."""


def drawn(seed: int) -> list[Case]:
    """Return all kinds twice, in a random order, with everything else drawn."""
    draws, cases = random.Random(seed), []
    for kind in list(KINDS) * (CASES // len(KINDS)):
        recipe = draws.choice(RECIPES)
        if kind in ("learning rate", "exploding gradient", "scale of a layer"):
            recipe = draws.choice(RECIPES[:3])  # what grew is known of quantised operands alone
        layer = f"blocks.{draws.randrange(BLOCKS)}.{draws.choice(LAYERS)}"
        cases.append(Case(kind, layer, draws.randrange(3, 16), 10 ** draws.uniform(24, 30), recipe))
    draws.shuffle(cases)
    return cases


def origin_of(case: Case, data: dict[str, Any]) -> Origin | None:
    """Train with the fault; return the first value that was not finite."""
    if case.kind == "infinity in data":
        return in_own_loop(case)
    faster = {"lr": case.size, "warmup": 0.0} if case.kind == "learning rate" else {"lr": 1e-3}
    workload = Gpt(
        data=data, layers=BLOCKS, width=64, heads=4, context=32, batch=4, steps=STEPS, eval_every=1000,
        eval_tokens=128, clip=None, **faster,
    )  # fmt: skip
    run = workload.prepare(PRESETS[case.recipe](), 0, "cpu")
    plant = KINDS[case.kind][0]
    with (plant(run, case) if plant else None) or nullcontext():
        *_, last = train(run, workload, Telemetry(every=10, shadow=10**6, log=10))
    return last.origin


def in_own_loop(case: Case) -> Origin | None:
    """Train an MLP with `ablate.convert` on data of which one number is infinite at the step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(BLOCKS)))
    run = ablate.convert(model, "nvfp4", blocks="*", seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    draws = torch.Generator().manual_seed(case.step)

    for step in range(STEPS):
        x = torch.randn(32, 64, generator=draws)
        x = spoiled(x, math.inf) if step == case.step else x
        with run.step():
            found = model(x).square().mean()
            found.backward()
            if not found.isfinite():
                return run.first_nonfinite(lambda x=x: model(x).square().mean().backward())
            optimizer.step()
            optimizer.zero_grad()
    return None


def main() -> None:
    """Run all cases, and write a row for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=4027)
    seed = parser.parse_args().seed
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(seed).integers(0, 64, 20_000).astype(np.uint16)
        files = {name: f"{folder}/{name}.bin" for name in ("train", "val")}
        for path in files.values():
            tokens.tofile(path)
        for case in drawn(seed):
            origin = origin_of(case, files | {"vocab": 64})
            right = origin is not None and KINDS[case.kind][1](origin, case)
            rows.append(
                case._asdict()
                | {"size": f"{case.size:.3g}", "found_at": origin and origin.step - 1, "right": int(right),
                   "named": str(origin)}
            )  # fmt: skip
            print(int(right), *list(case), origin, flush=True)
    with ROWS.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"seed {seed}: {sum(row['right'] for row in rows)} of {len(rows)} named right")


if __name__ == "__main__":
    main()
