"""The training loop: a generator of records. It knows no tracker, no search and no file."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from ablate.checkpoints import Checkpoints, Standing
from ablate.data.batches import Batch
from ablate.engines.emulated import Engine
from ablate.hyperparameters import Training
from ablate.metrics import SlotErrors, gradient_noise, memory, oscillation
from ablate.numerics.spec import Spec
from ablate.recipes.recipe import Recipe, Run


class Record(NamedTuple):
    """Metrics by name after `step` optimizer steps. `nan/first_step` among them: the run diverged there and ends."""

    step: int
    metrics: dict[str, float]


class Telemetry(Spec):
    """How often what is measured; never part of a trial's identity, since it changes no bit of the training."""

    every: int = Field(50, ge=1)
    """Steps between measurements of quantisation error."""
    shadow: int = Field(100, ge=1)
    """Steps between comparisons of the gradient with the one that the same batch gives without quantisation."""
    log: int = Field(10, ge=1)
    """Steps between records of the training loss."""
    checkpoint: float = Field(60.0, ge=0)
    """Seconds between checkpoints; 0: after every step."""


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

    def state(self) -> dict[str, Any]:
        """What a later attempt goes on from, within an interval."""
        return {"losses": self.losses, "norms": self.norms, "seconds": self.seconds}

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
    checkpoints: Checkpoints | None = None,
) -> Iterator[Record]:
    """Train `model` for `config.steps` steps. `batch(step, micro_batch)` and `validation` give inputs and targets.

    With `checkpoints`, goes on from the one that is there, and leaves one now and then, once the records before it were taken. Ends
    early, after a record with `nan/first_step`, when a loss or a gradient is not finite.
    """
    optimizer = adamw(model, config)
    meter = Meter(tokens_per_step)
    device = next(model.parameters()).device
    run = Run(config.steps, tokens_per_step, config.decay_start)
    standing = Standing(model, optimizer, engine)
    first = 0
    if checkpoints and (state := checkpoints.take()):
        first = standing.restore(state)
        vars(meter).update(state["meter"])
    for step in range(first, config.steps):
        if checkpoints and step > first:
            checkpoints.leave(step, lambda done=step: {**standing.state(done), "meter": meter.state()})
        recipe = engine.at(step, run)
        look = Look(step % telemetry.every == 0 or step == config.steps - 1, _shadows(recipe, step, telemetry, engine))
        start = time.perf_counter()
        loss, norm = _step(model, optimizer, engine, batch, config, step, run, look)
        meter.add(loss, norm, time.perf_counter() - start - look.seconds)
        engine.observe(look.metrics, step)
        done = step + 1
        metrics = look.metrics
        finite = math.isfinite(loss) and math.isfinite(norm)
        evaluates = finite and (done % config.eval_every == 0 or done == config.steps)
        if metrics or evaluates or not finite or done % telemetry.log == 0 or done == config.steps:
            metrics |= meter.metrics(done) | memory(device) | {"nan/activation": float(engine.nonfinite())}
            meter.reset()
        if evaluates:
            metrics |= evaluate(model, engine, recipe, validation)
        if done == config.steps or not finite:
            metrics["flops/fp4_share"] = engine.fp4_share(done)
        if not finite:
            metrics["nan/first_step"] = float(done)
        if metrics:
            yield Record(done, metrics)
        if not finite:
            return


def _shadows(recipe: Recipe, step: int, telemetry: Telemetry, engine: Engine) -> bool:
    """Whether the gradient is compared in this step: for telemetry, or because the schedule waits for it."""
    periods = (telemetry.shadow, *(trigger.every for trigger in engine.recipe.triggers - engine.tripped))
    return not recipe.plain and any(step % period == 0 for period in periods)


@dataclass
class Look:
    """What is measured in one step beside its loss, and what that took."""

    errors: bool
    """Quantisation errors and the oscillation of weights."""
    shadow: bool
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def _step(model, optimizer, engine, batch, config: Training, step: int, run: Run, look: Look) -> tuple[float, float]:
    """One optimizer step; returns its mean loss and the gradient norm before clipping."""
    for group in optimizer.param_groups:
        group["lr"] = config.lr_at(step)
    engine.clock.stream, engine.clock.step = "training", step
    reference = _timed(look, lambda: _shadow(model, optimizer, engine, batch, config, step)) if look.shadow else None
    errors = SlotErrors() if look.errors else None
    engine.listen(errors)
    total = _gradient(model, optimizer, engine, batch, config, step)
    engine.listen(None)
    parameters = list(model.parameters())
    if reference:
        look.metrics |= _timed(look, lambda: gradient_noise([p.grad for p in parameters], reference))
    if errors:
        look.metrics |= errors.metrics()
    norm = nn.utils.clip_grad_norm_(parameters, math.inf if config.clip is None else config.clip).item()
    casts = _timed(look, engine.weight_casts) if look.errors else {}
    engine.weights.before(optimizer, step, run)
    optimizer.step()
    engine.weights.after(optimizer, step, run)
    if casts:
        look.metrics |= _timed(look, lambda: oscillation(casts, engine.weight_casts()))
    return total, norm


def _gradient(model, optimizer, engine, batch, config: Training, step: int) -> float:
    """Leave the step's gradient in the parameters; returns the mean loss."""
    optimizer.zero_grad()
    total = 0.0
    with engine.still_weights():
        for micro_batch in range(config.accumulate):
            engine.clock.micro_batch = micro_batch
            loss = model(*batch(step, micro_batch)) / config.accumulate
            loss.backward()
            total += loss.item()
    return total


def _shadow(model, optimizer, engine, batch, config: Training, step: int) -> list[Tensor]:
    """The gradient that the same step has without quantisation."""
    with engine.high_precision():
        _gradient(model, optimizer, engine, batch, config, step)
    return [p.grad.clone() for p in model.parameters()]


def _timed(look: Look, work: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    result = work()
    look.seconds += time.perf_counter() - start
    return result


@torch.no_grad()
def evaluate(model: nn.Module, engine: Engine, recipe: Recipe, validation: Iterable[Batch]) -> dict[str, float]:
    """`val/loss` in the precision now in force and `val/loss_bf16` with every layer in high precision, in nats."""
    engine.clock.stream = "evaluation"
    own = high = _mean_loss(model, engine, validation)
    if not recipe.plain:
        with engine.high_precision():
            high = _mean_loss(model, engine, validation)
    return {"val/loss": own, "val/loss_bf16": high}


def _mean_loss(model: nn.Module, engine: Engine, validation: Iterable[Batch]) -> float:
    losses = []
    with engine.still_weights():
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
