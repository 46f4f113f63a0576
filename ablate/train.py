"""The training loop: a generator of records. It knows no tracker, no search and no file."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from ablate.data.batches import Batch
from ablate.engines.emulated import Engine
from ablate.hyperparameters import Training
from ablate.metrics import SlotErrors, memory
from ablate.numerics.spec import Spec
from ablate.recipes.recipe import Recipe


class Record(NamedTuple):
    """Metrics by name after `step` optimizer steps. `nan/first_step` among them: the run diverged there and ends."""

    step: int
    metrics: dict[str, float]


class Telemetry(Spec):
    """How often what is measured; never part of a trial's identity, since it changes no bit of the training."""

    every: int = 50
    """Steps between measurements of quantisation error."""
    log: int = 10
    """Steps between records of the training loss."""


class Meter:
    """What happened since the last record: losses, gradient norms, non-finite values, time spent in steps."""

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.reset()

    def reset(self) -> None:
        self.losses, self.norms, self.seconds = [], [], 0.0

    def add(self, loss: float, norm: float, seconds: float) -> None:
        self.losses.append(loss)
        self.norms.append(norm)
        self.seconds += seconds

    def metrics(self, step: int) -> dict[str, float]:
        """Means over the interval, counts of non-finite values in it, and its throughput."""
        count = len(self.losses)
        return {
            "train/loss": math.fsum(self.losses) / count if all(map(math.isfinite, self.losses)) else math.nan,
            "grad/norm": self.norms[-1],
            "nan/loss": float(sum(not math.isfinite(x) for x in self.losses)),
            "nan/grad": float(sum(not math.isfinite(x) for x in self.norms)),
            "tokens": float(step * self.tokens_per_step),
            "throughput/step_ms": 1000 * self.seconds / count,
            "throughput/tokens_per_s": count * self.tokens_per_step / self.seconds,
        }


def train(
    model: nn.Module,
    engine: Engine,
    batch: Callable[[int, int], Batch],
    validation: Iterable[Batch],
    config: Training,
    tokens_per_step: int,
    telemetry: Telemetry,
) -> Iterator[Record]:
    """Train `model` for `config.steps` steps. `batch(step, micro_batch)` and `validation` give inputs and targets.

    Ends early, after a record with `nan/first_step`, when a loss or a gradient is not finite.
    """
    optimizer = adamw(model, config)
    meter = Meter(tokens_per_step)
    device = next(model.parameters()).device
    for step in range(config.steps):
        recipe = engine.at(step, config.steps)
        errors = SlotErrors() if step % telemetry.every == 0 or step == config.steps - 1 else None
        engine.listen(errors)
        start = time.perf_counter()
        loss, norm = _step(model, optimizer, engine, batch, config, step)
        meter.add(loss, norm, time.perf_counter() - start)
        engine.listen(None)
        done = step + 1
        metrics = errors.metrics() if errors else {}
        finite = math.isfinite(loss) and math.isfinite(norm)
        evaluates = finite and (done % config.eval_every == 0 or done == config.steps)
        if metrics or evaluates or not finite or done % telemetry.log == 0 or done == config.steps:
            metrics |= meter.metrics(done) | memory(device) | {"nan/activation": float(engine.nonfinite())}
            meter.reset()
        if evaluates:
            metrics |= evaluate(model, engine, recipe, validation)
        if not finite:
            metrics["nan/first_step"] = float(done)
        if metrics:
            yield Record(done, metrics)
        if not finite:
            return


def _step(model, optimizer, engine, batch, config: Training, step: int) -> tuple[float, float]:
    """One optimizer step; returns its mean loss and the gradient norm before clipping."""
    for group in optimizer.param_groups:
        group["lr"] = config.lr_at(step)
    engine.clock.stream, engine.clock.step = "training", step
    optimizer.zero_grad()
    total = 0.0
    for micro_batch in range(config.accumulate):
        engine.clock.micro_batch = micro_batch
        loss = model(*batch(step, micro_batch)) / config.accumulate
        loss.backward()
        total += loss.item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf if config.clip is None else config.clip).item()
    optimizer.step()
    return total, norm


@torch.no_grad()
def evaluate(model: nn.Module, engine: Engine, recipe: Recipe, validation: Iterable[Batch]) -> dict[str, float]:
    """`val/loss` in the precision now in force and `val/loss_bf16` with every layer in high precision, in nats."""
    engine.clock.stream = "evaluation"
    own = high = _mean_loss(model, engine, validation)
    if not recipe.plain:
        engine.everywhere(Recipe(dtype=recipe.dtype))
        high = _mean_loss(model, engine, validation)
    return {"val/loss": own, "val/loss_bf16": high}


def _mean_loss(model: nn.Module, engine: Engine, validation: Iterable[Batch]) -> float:
    losses = []
    for number, batch in enumerate(validation):
        engine.clock.micro_batch = number
        losses.append(model(*batch).item())
    return math.fsum(losses) / len(losses)


def adamw(model: nn.Module, config: Training) -> torch.optim.Optimizer:
    """AdamW with fp32 state, weight decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)
