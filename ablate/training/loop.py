"""Training loop: a generator that takes optimizer steps and yields records of what it measured.

The problem: two precisions can be compared only if their runs are equal in everything else. The run must also
survive an interruption without a change of a bit, and telemetry must not alter the training that it measures.

The idea: `train` is a plain generator. A step computes the gradient of its micro-batches, clips it, lets the
guard judge loss and gradient norm, and applies the update only if the guard accepts them. Batches and
rounding bits are drawn by counter from seed, step and micro-batch, so an attempt that continues from a
checkpoint draws the same ones. Telemetry works inside a few steps: it receives their quantised operands, and
it computes their gradient again without quantisation. Throughput is the rate of the other steps.

    run = workload.prepare(recipe, seed=0, device="cpu")
    for record in train(run, workload, Telemetry(log=10)):
        print(record.step, record.metrics.get("train/loss"))

The caller stores the records: this file imports no tracker and no search, and it opens no file. Checkpoints
are written by the object that the caller passes. A run that the guard stops ends with a record that says so;
it raises no error.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ablate.engines import makes_operands
from ablate.engines.emulated_layer import kept
from ablate.engines.exempt import refuse_bypassed
from ablate.engines.ranks import whole
from ablate.engines.routing import Recorder, recorded
from ablate.engines.weight_noise import NormNoise
from ablate.recipes.recipe import Recipe
from ablate.training import cuda_arithmetic
from ablate.training.checkpoints import Checkpoints, Readings, RunState
from ablate.training.distributed import RankPart, clip, gathered, placed, placed_optimizer, world
from ablate.training.evaluation import Evaluation, PreparedRun, evaluate
from ablate.training.first_nonfinite import Finder, Origin
from ablate.training.fork_design import Forks, Window
from ablate.training.guard import GuardDecision, Watch
from ablate.training.hyperparameters import Training
from ablate.training.metric_names import ENDINGS, FIRST_NONFINITE, GUARD_STOPPED, IMBALANCE, plain_metric
from ablate.training.metrics import (
    SlotErrors,
    gradient_noise,
    gradient_split,
    gradients,
    keep_casts,
    of_machine,
    oscillation,
    routes,
)
from ablate.training.models.transformer import Attention, Transformer
from ablate.training.optimizers import optimizer
from ablate.training.trial_run import Telemetry

T = TypeVar("T")


class Record(NamedTuple):
    """Metrics by name after `step` optimizer steps. `nan/first_step` or `guard/stopped` among them means that
    the run diverged at this step and ends."""

    step: int
    metrics: dict[str, float]
    verdict: GuardDecision | None = None
    """The guard's decision on this step, if it diverged."""
    origin: Origin | None = None
    """First value that was not finite, if that ended the run or was the guard's first intervention."""


RECENT = 10
"""Steps whose mean loss is `train/recent_loss`."""


class Meter:
    """Statistics of an interval of steps: losses, gradient norms, non-finite values and time spent.

    Intervals end at steps that all arms of an experiment share (multiples of `log`, evaluations) and at
    events of the guard. They do not end at the steps that telemetry measures: the mean of a single step among
    means of ten would look like a spike. Measured steps are slower, since telemetry works inside them, so
    rates count only the other steps. In an interval without other steps, rates count the measured ones.

    The length of an interval depends on telemetry and on the guard, so no mean over one is a result of the
    trial. That is the mean loss of the last `RECENT` steps, whichever intervals they are in.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.recent: list[float] = []
        """Losses of the last `RECENT` steps, across intervals."""
        self.reset()

    def reset(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.seconds = 0.0
        self.unmeasured, self.unmeasured_seconds = 0, 0.0

    def add(self, loss: float, norm: float, seconds: float, measured: bool = False) -> None:
        """Add a step: its mean loss, in the unit of the workload, the norm of its gradient before clipping,
        and its wall-clock seconds without those that telemetry took. `measured`: telemetry worked inside it.
        """
        self.losses.append(loss)
        self.recent = [*self.recent, loss][-RECENT:]
        self.norms.append(norm)
        self.seconds += seconds
        if not measured:
            self.unmeasured += 1
            self.unmeasured_seconds += seconds

    def state(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "tokens_per_step"}

    def restore(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)

    def latest(self, step: int) -> dict[str, float]:
        """Return the metrics of the last step alone, for a record within an interval, after `step` steps."""
        return {"grad/norm": self.norms[-1], "tokens": float(step * self.tokens_per_step)}

    def result(self) -> dict[str, float]:
        """Return the mean loss of the last `RECENT` steps, or of all if there are fewer."""
        return {"train/recent_loss": _mean(self.recent)}

    def metrics(self, step: int) -> dict[str, float]:
        """Return means over the interval, counts of its non-finite values, and its throughput, after `step`
        steps."""
        mixed = self.unmeasured == 0
        count, seconds = (
            (len(self.losses), self.seconds) if mixed else (self.unmeasured, self.unmeasured_seconds)
        )
        return {
            "train/loss": _mean(self.losses),
            "grad/norm": self.norms[-1],
            "nan/loss": float(sum(not math.isfinite(x) for x in self.losses)),
            "nan/grad": float(sum(not math.isfinite(x) for x in self.norms)),
            "tokens": float(step * self.tokens_per_step),
            "throughput/step_ms": 1000 * seconds / count,
            "throughput/tokens_per_s": count * self.tokens_per_step / seconds,
        }


def _mean(losses: list[float]) -> float:
    """Return the mean of losses; NaN if one is not finite."""
    return math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan


class Twin(NamedTuple):
    """Difference between a run and its twin of the same recipe: other random numbers, or other weights. A
    twin shows how far two runs drift apart that differ in nothing that matters."""

    stream: bool
    """True to draw the rounding from another stream; False to move each starting weight by one ulp, with a
    random sign."""

    @classmethod
    def of(cls, recipe: Recipe, engine: str) -> "Twin":
        """Return the difference for a recipe: other draws where it draws by the clock, else other weights."""
        return cls(recipe.draws and makes_operands(engine))


def move_by_ulp(parameters: Iterable[nn.Parameter], seed: int) -> None:
    """Move weights in place to the next number of their type, up or down by a random sign. Collective. All
    weights of fp32 are moved. An ulp of bf16 is large, so there it is one weight of each parameter."""
    draws = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        own = whole(parameter.data)
        ends = torch.where(torch.rand(own.shape, generator=draws) < 0.5, math.inf, -math.inf).to(own)
        moved = torch.nextafter(own, ends)
        if own.dtype != torch.float32:
            one = int(torch.randint(own.numel(), (), generator=draws))
            others = torch.arange(own.numel(), device=own.device).view_as(own) != one
            moved = torch.where(others, own, moved)
        parameter.data.copy_(placed({"": moved}, {"": parameter.data})[""])


def train(
    run: PreparedRun,
    config: Training,
    telemetry: Telemetry,
    checkpoints: Checkpoints | None = None,
    twin: Twin | None = None,
) -> Iterator[Record]:
    """Train for `config.steps` steps, or until the time budget is spent, and yield a record after each step
    that measured something. The model is trained in place. OSError if a checkpoint cannot be written.

    With `checkpoints`, continue from the checkpoint that exists, if any, and write new ones at intervals. A
    checkpoint is written only after the caller took the records before it. The run ends early, after a record
    with `nan/first_step` or `guard/stopped`, if the guard stops it. All ranks of a trial call this function;
    only rank 0 has checkpoints, and only its records count.
    """
    loop, ranks = Loop(run, config, telemetry, twin=twin), world()
    first = loop.restore(ranks.broadcast(checkpoints.take() if checkpoints else None))
    if twin and not twin.stream and first == 0:
        loop.move_weights()
    for record in loop.records(first, config.steps, partial(loop.leave, checkpoints=checkpoints)):
        if record:
            yield record
        if loop.over and telemetry.keep_weights and record and ENDINGS.isdisjoint(record.metrics):
            state = loop.state(record.step)
            if checkpoints:
                checkpoints.keep_weights(state)


class Loop:
    """State of one training run: its optimizer, its guard, and the measurements since the last record.
    `window` is the part of a forked trial that it trains, with the forks' design; None: the whole run."""

    def __init__(
        self,
        run: PreparedRun,
        config: Training,
        telemetry: Telemetry,
        window: tuple[Forks, Window] | None = None,
        twin: Twin | None = None,
    ) -> None:
        self.run, self.config, self.telemetry, self.window = run, config, telemetry, window
        self.last = window[1].position + window[1].steps if window else config.steps
        """Step after the last, by the clock of the run."""
        self.counted = window[1].begun - window[1].position if window else 0
        """Steps that the trial counts before the run's step 0."""
        self.stream = "twin" if twin and twin.stream else "training"
        self.evaluated: Evaluation | None = None
        """Last evaluation."""
        self.loss = run.loss or run.model
        self.parameters = [p for p in run.model.parameters() if p.requires_grad]
        self.world = world()
        self.part = RankPart(self.world, config, run.engine, self.parameters)
        """This rank's part of every step."""
        self.parts = config.accumulate * self.part.splits
        """Losses whose mean is that of a step: of each micro-batch on each rank that shares it."""
        self.device = next(run.model.parameters()).device
        if self.device.type == "cuda":
            cuda_arithmetic.configure()
            own = any(isinstance(module, Attention) for module in run.model.modules())
            cuda_arithmetic.follow(config.deterministic, everywhere=config.compile or not own)
        self.optimizer = optimizer(run.model, config)
        self.watch = Watch(config.guard, config.clip, run.engine)
        self.meter = Meter(config.tokens_per_step)
        self.plan = config.length
        noise = run.engine.recipe.weights.noise
        self.noise = noise and NormNoise(noise, run.model, run.engine.layers, run.engine.clock)
        self.spent = 0.0
        """Seconds spent in steps so far."""
        self.measured: list[dict[str, float]] = []
        """Metrics of the last two steps that telemetry measured."""
        self.imbalance: Tensor | None = None
        """This rank's part of the last step's mean load-balancing loss; None if the model trains none."""
        self.over = False

    def state(self, step: int) -> RunState:
        """Return everything that the steps after the first `step` steps depend on. All ranks call it; on
        others than rank 0, sharded tensors are None."""
        parts = (self.run.model.state_dict(), self.optimizer.state_dict(), self.run.engine.state())
        model, moments, engine = (gathered(part, self.world.rank == 0) for part in parts)
        state: RunState = {
            "step": step,
            "model": model,
            "optimizer": moments,
            "engine": engine,
            "meter": self.meter.state(),
            "guard": self.watch.state(),
            "spent": self.spent,
        }
        layers = state["engine"]["layers"].values()
        for its, count in zip(layers, self.world.sums(*(its["nonfinite"] for its in layers)), strict=True):
            its["nonfinite"] = int(count)
        return state

    def restore(self, state: RunState | None) -> int:
        """Restore what `state` returned on any number of ranks, if anything, and return the first step to
        take. All ranks call it, with the same state."""
        if state is None:
            return 0
        self.meter.restore(state["meter"])
        self.watch.restore(state["guard"])
        self.spent = state["spent"]
        if self.world.rank:  # the checkpoint has the sum over all ranks: only rank 0 continues from it
            for its in state["engine"]["layers"].values():
                its["nonfinite"] = 0
        self.restore_weights(state)
        self.run.engine.restore(state["engine"], state["step"])
        return state["step"]

    def restore_weights(self, state: RunState) -> None:
        """Restore model and optimizer from the state of a run under any recipe, whose own state stays out."""
        model = self.run.model
        model.load_state_dict(placed(state["model"], model.state_dict()))
        self.optimizer.load_state_dict(placed_optimizer(state["optimizer"], self.optimizer))

    def leave(self, step: int, checkpoints: Checkpoints | None, readings: Readings | None = None) -> None:
        """Write the checkpoints that are wanted after `step` steps, with the readings of a forked trial's
        earlier windows. Collective."""
        step += self.counted
        wanted = self.world.broadcast(checkpoints.wanted(step) if checkpoints else (False, False))
        if any(wanted):
            state = self.state(step)
            if readings is not None:
                state["readings"] = readings
            if checkpoints:
                checkpoints.leave(step, state, wanted)

    def move_weights(self) -> None:
        move_by_ulp(self.parameters, self.run.engine.clock.seed)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, without the factor of a guard's fallbacks."""
        own = self.config.lr_at(step)
        if self.window is None:
            return own
        forks, window = self.window
        return forks.rate(self.config.lr_at(window.position), step, window, own)

    def records(self, first: int, end: int, leave: Callable[[int], object]) -> Iterator[Record | None]:
        """Take the steps from `first` on until `end`, or the end of the run, and yield what `step` returns.
        `leave` is called between two steps, after the caller took the record of the first."""
        for step in range(first, end):
            if step > first:
                leave(step)
            yield self.step(step)
            if self.over:
                return

    def step(self, step: int) -> Record | None:
        """Take one step and return its record; None if there is nothing to record."""
        engine, telemetry = self.run.engine, self.telemetry
        recipe = engine.at(step, self.plan)
        every, shadow = telemetry.every, telemetry.shadow
        measured = every > 0 and (step % every == 0 or step == self.last - 1)
        compared = (shadow > 0 and step % shadow == 0) or bool(engine.due(step))
        look = Look(measured, compared and not recipe.plain)
        start = time.perf_counter()
        loss, norm = self.world.broadcast(self._gradient_of(step, look))
        verdict, origin = self.watch.judge(loss, norm), None
        if verdict.kind == "step":
            self._update(step, look)
        elif not math.isfinite(loss + norm) and (verdict.kind == "stop" or verdict.interventions == 1):
            origin = _timed(look, lambda: self._origin(step, loss, look.metrics))
        seconds = time.perf_counter() - start - look.seconds
        self.meter.add(loss, norm, seconds, look.errors or look.shadow)
        self.spent += seconds
        engine.observe(self.world.broadcast(look.metrics) if engine.recipe.triggers else look.metrics, step)
        if look.errors:
            self.measured = [*self.measured[-1:], dict(look.metrics)]
        record = self._record(step + 1, recipe, look.metrics, verdict)
        return record and record._replace(origin=origin)

    def _origin(self, step: int, total: float, metrics: dict[str, float]) -> Origin:
        """Return the first value of a step that is not finite, by computing the step, whose update has not
        been applied, again. Collective. `total` is its loss, `metrics` what telemetry measured in it."""
        ranks, done = self.world, step + self.counted
        finder = Finder(self.run.model, self.run.engine, operations=ranks.size == 1)
        finder.state(done, self.optimizer)
        with finder, kept([self], "loss"):
            self.loss = finder.checked(self.loss)
            self.gradient(step)
        if math.isfinite(total):
            finder.norm()
        origin = finder.origin(done + 1, [*self.measured, metrics] if metrics else self.measured)
        return ranks.first(origin, math.inf if finder.found is None else finder.checks)

    def _record(
        self, done: int, recipe: Recipe, metrics: dict[str, float], verdict: GuardDecision
    ) -> Record | None:
        config, stopped, diverges = self.config, verdict.kind == "stop", verdict.cause is not None
        budget = config.time_budget is not None and self.world.broadcast(self.spent >= config.time_budget)
        self.over = stopped or budget or done == self.last
        evaluates = not stopped and (self.over or (not self.window and done % config.eval_every == 0))
        closes = evaluates or diverges or self.over or done % self.telemetry.log == 0
        if metrics or closes:
            metrics |= self.meter.metrics(done) if closes else self.meter.latest(done)
            metrics |= of_machine(self.device) | self._seen(done) | self.watch.metrics()
        if evaluates or self.over:
            metrics |= self.meter.result()
        if closes:
            self.meter.reset()
        if evaluates:
            self.evaluated = evaluate(self.run, recipe, self.part)
            each = self.evaluated.items()
            metrics |= {plain_metric(name): math.fsum(values) / len(values) for name, values in each}
        if self.over:
            metrics["flops/fp4_share"] = self.run.engine.fp4_share()
        if stopped and verdict.cause:
            ending = FIRST_NONFINITE if verdict.cause.ratio is None else GUARD_STOPPED
            metrics[ending] = float(done + self.counted)
        return Record(done + self.counted, metrics, verdict if diverges else None) if metrics else None

    def _seen(self, done: int) -> dict[str, float]:
        """Return the engine's counts so far, non-finite activations and bytes of gathered weights, and the
        load-balancing loss of the last step."""
        metrics = {"nan/activation": self.world.sums(self.run.engine.nonfinite())[0]}
        if self.imbalance is not None:
            metrics[IMBALANCE] = self.world.sums(self.imbalance.item())[0]
        gathered, in_bf16 = self.run.engine.traffic()
        if in_bf16:
            metrics |= {"comm/gather_bytes": gathered / done, "comm/gather_saved": 1 - gathered / in_bf16}
        return metrics

    def _gradient_of(self, step: int, look: "Look") -> tuple[float, float]:
        """Leave the step's clipped gradient in the parameters; return the mean loss, and the norm before
        clipping."""
        engine = self.run.engine
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step) * self.watch.lr
        engine.clock.stream, engine.clock.step = self.stream, step
        reference = _timed(look, lambda: self._shadow(step)) if look.shadow else None
        redrawn = _timed(look, lambda: self._redrawn(step)) if look.shadow else []
        errors = SlotErrors() if look.errors else None
        exact = _timed(look, lambda: self._routed(step)) if look.errors and engine.experts else None
        engine.listen(errors)
        with recorded(engine) if exact else nullcontext() as own:
            total = self.gradient(step)
        engine.listen(None)
        if exact and own:
            look.metrics |= routes(own, exact, self.config.accumulate, self.world.sums)
        if reference:
            drawn = gradients(self.parameters)
            look.metrics |= _timed(look, lambda: gradient_noise(drawn, reference))
            look.metrics |= _timed(look, lambda: gradient_split([drawn, *redrawn], reference))
        if errors:
            look.metrics |= errors.metrics()
        norm = clip(self.parameters, self.watch.clip)
        if isinstance(total, Tensor) and isinstance(norm, Tensor):  # copied from the device together
            total, norm = torch.stack((total, norm.to(total))).cpu().tolist()
        return float(total), float(norm)

    def _update(self, step: int, look: "Look") -> None:
        """Apply the optimizer's step and the recipe's weight rules before and after it."""
        engine = self.run.engine
        refuse_bypassed(engine.layers.values())
        casts = _timed(look, lambda: keep_casts(engine.weight_casts())) if look.errors else {}
        engine.weights.before(self.optimizer, step, self.plan)
        self.optimizer.step()
        engine.weights.after(self.optimizer, step, self.plan)
        if casts:
            look.metrics |= _timed(look, lambda: oscillation(casts, engine.weight_casts()))

    def gradient(self, step: int) -> Tensor | float:
        """Leave the step's gradient in the parameters and return the mean loss, fp64 on the device; a number
        if there are several ranks. Nothing waits for the device before all micro-batches are launched."""
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        model, self.imbalance = self.run.model, None
        with self.run.engine.still_weights(), self.part.divided():
            for loss in self._losses(step):
                loss.backward()
                total += loss.detach().to(total).view(())
                if isinstance(model, Transformer) and model.imbalance is not None:
                    own = model.imbalance.to(total) / self.parts
                    self.imbalance = own if self.imbalance is None else self.imbalance + own
        return self.part.total(total, step)

    def _losses(self, step: int) -> Iterator[Tensor]:
        """Yield this rank's shares of the mean loss; the noise of a micro-batch is there until the next."""
        for micro_batch in self.part.micro_batches:
            self.run.engine.clock.begin(micro_batch)
            with self.noise.added(self.plan.steps) if self.noise else nullcontext():
                yield self.loss(*self.part.of(self.run.batch(step, micro_batch))) / self.parts

    def _shadow(self, step: int) -> list[Tensor]:
        with self.run.engine.high_precision():
            self.gradient(step)
        return [gradient.clone() for gradient in gradients(self.parameters)]

    def _routed(self, step: int) -> Recorder:
        engine = self.run.engine
        with torch.no_grad(), engine.again(), engine.high_precision(), recorded(engine) as routed:
            list(self._losses(step))
        return routed

    def _redrawn(self, step: int) -> list[list[Tensor]]:
        """Return another draw of the step's gradient, a list of one; none if its recipe draws nothing. Of
        products that another engine than the emulated one draws, nothing is drawn again."""
        engine = self.run.engine
        if not (engine.recipe.draws and all(layer.emulates for layer in engine.layers.values())):
            return []
        with kept([engine.clock], "redraw"), engine.again():
            engine.clock.redraw = True
            self.gradient(step)
        return [[gradient.clone() for gradient in gradients(self.parameters)]]


@dataclass
class Look:
    """Measurements of one step beside its loss, and the seconds that they took."""

    errors: bool
    """True to measure quantisation errors and the oscillation of weights."""
    shadow: bool
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def _timed(look: Look, work: Callable[[], T]) -> T:
    """Return what `work` returns, and add the seconds that it took to the telemetry's."""
    start = time.perf_counter()
    result = work()
    look.seconds += time.perf_counter() - start
    return result
