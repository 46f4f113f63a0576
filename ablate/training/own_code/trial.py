"""`Trial`: what a user's own training function gets from a sweep, and gives back.

The function is called once for each arm and seed. It may be any training loop:

    def train(trial):
        model = trial.convert(Net(trial.config.width))
        optimizer = torch.optim.AdamW(model.parameters(), lr=trial.config.lr)
        trial.checkpoint(model=model, optimizer=optimizer)
        for step, batch in trial.steps(loader(trial.seed)):
            for group in optimizer.param_groups:
                group["lr"] = trial.config.lr * trial.lr_factor
            with trial.step():
                loss = model(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            trial.log({"train/loss": loss.item()})
        with trial.evaluation():
            trial.log({"val/loss": validate(model)})

The function pushes its metrics, and a sweep pulls records. So the function runs in a thread of the trial's
process, and only while the sweep waits for the next record: one of the two at a time, never both.
"""

import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, Protocol, TypedDict, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from ablate.engines.linears import Linears
from ablate.recipes.recipe import Run
from ablate.training.checkpoints import RunState
from ablate.training.conversion import Conversion, ConversionState, convert
from ablate.training.conversion_options import ConversionOptions
from ablate.training.first_nonfinite import Origin
from ablate.training.fork_design import Window, parts_of
from ablate.training.guard import GuardDecision, GuardState, Watch
from ablate.training.loop import Record, move_by_ulp
from ablate.training.metric_names import ENDINGS, FIRST_NONFINITE, GUARD_STOPPED
from ablate.training.metrics import of_machine
from ablate.training.own_code.process_environment import number
from ablate.training.trial_run import BEAT_SECONDS, TrialRun

if TYPE_CHECKING:
    Batch = TypeVar("Batch")


class Stateful(Protocol):
    """Model, optimizer, scheduler, loader: all that a checkpoint can hold."""

    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state: dict[str, object]) -> object: ...


class GeneratorState:
    """A torch.Generator with the methods of an object that a checkpoint can hold."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, object]:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.generator.set_state(state["state"])


class TrialState(TypedDict):
    """Content of a checkpoint."""

    step: int
    objects: dict[str, dict[str, object]]
    """By the names given to `checkpoint`."""
    conversions: list[ConversionState]
    generators: dict[str, Any]
    """States of the global generators of torch, numpy and random."""
    guard: NotRequired[GuardState]


class Stopped(BaseException):
    """The sweep has ended this trial; raised in the user's function at its next call of the trial."""


class Config(dict):
    """The YAML's `config`, whose keys are attributes too: `config.width` and `config["width"]`."""

    def __getattr__(self, name: str) -> object:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"config has no {name!r}; its keys are {', '.join(self) or 'none'}"
            ) from None


class Trial:
    """One run of a user's training function: its recipe, seed and config, and the way of its results.

    Attributes:
        recipe: the arm's recipe.
        seed: the seed of weights, data order and dropout; random numbers must come from it alone. The global
            generators of torch, numpy and random are seeded by it before the function is called.
        config: the YAML's `config`.
        device: torch device to train on.
        max_steps: optimizer steps of the run.
        folder: folder for files of this trial; it may not exist yet.
        start: the file or folder given as `start`; None without one.
        data: the files and folders given as `data`.
    """

    def __init__(
        self,
        trial_run: TrialRun,
        config: Mapping[str, object],
        length: Run,
        emit: Callable[[Record], None],
        folder: Path,
        data: tuple[Path, ...] = (),
        start: Path | None = None,
        saved: TrialState | None = None,
        window: Window | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.recipe, self.seed, self.config = trial_run.recipe, trial_run.seed, Config(config)
        self.device, self.max_steps, self.start = torch.device(trial_run.device), length.steps, start
        self.folder, self.data = folder, data
        self._telemetry, self._checkpoints = trial_run.telemetry, trial_run.checkpoints
        self._run, self._emit = length, emit
        self._conversions: list[Conversion] = []
        self._stateful: dict[str, Stateful] = {}
        self._saved, self._window, self._twin, self._watch = saved, window, trial_run.twin, watch
        if watch and saved and "guard" in saved:
            watch.restore(saved["guard"])
        self._anneals = bool(window and trial_run.forks and trial_run.forks.anneal)
        """True if the rate falls to zero within the window of a forked design that this run trains."""
        self._before = window.begun if window else 0
        """Steps that the trial counts before the first of this run."""
        self._first = saved["step"] - self._before if saved else 0
        self._rates = set[int]()
        """Steps at which the function asked for the learning rate's factor."""
        self._between_done = -1
        self._done = self._first
        self._stopped = False
        self._metrics: dict[str, float] = {}
        self._seconds, self._counted = 0.0, 0
        self._last_record = time.monotonic()
        self._recorded = self._first

    # --- for the user's function ----------------------------------------------------------------------

    @property
    def lr_factor(self) -> float:
        """Factor of the learning rate in the present step: 1 in a full run; in a window it falls to zero.

        Code that multiplies its rate by it in every step can be used in a forked design (`design: {trunk:
        start}`).
        """
        self._rates.add(self._done)
        return 1 - self._done / self.max_steps if self._anneals else 1.0

    @property
    def forked(self) -> bool:
        """True in a window of a forked design: the rate is then constant but for `lr_factor`."""
        return self._window is not None

    def convert(
        self,
        model: nn.Module,
        *,
        blocks: str | None = None,
        filter: Callable[[str, nn.Module], bool] | None = None,
        linears: Linears = (),
    ) -> nn.Module:
        """Apply the arm's recipe to a model in place and return the model; `ablate.convert` explains how."""
        self._conversions.append(
            convert(
                model,
                ConversionOptions(
                    self.recipe, self.seed, *self._run, blocks, filter, self._telemetry.every, linears
                ),
                handle="trial",
            )
        )
        return model

    def steps(self, batches: Iterable["Batch"] | None = None) -> Iterator:
        """Yield (step, batch) for every step that is left; without batches the step alone.

        After an interruption it begins where the last checkpoint was. Batches of the steps before are taken
        and dropped, unless `batches` was given to `checkpoint` and restores its own place. An iterable that
        ends is begun again.

        Args:
            batches: a loader or any other iterable; or a function from the step to its batch.
        """
        if callable(batches):
            for step in self._remaining():
                yield step, batches(step)
            return
        if batches is None:
            yield from self._remaining()
            return
        own_place = any(part is batches for part in self._stateful.values())
        stream = _endless(batches)
        for _ in range(0 if own_place else self._first):
            next(stream)
        for step in self._remaining():
            yield step, next(stream)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside this context, the models compute one optimizer step by the recipe: see `Conversion.step`."""
        self._between()
        if not self._conversions and not self.recipe.plain:
            raise RuntimeError(
                "the arm's recipe has no effect: the training function never called trial.convert(model)"
            )
        begun = time.perf_counter()
        measured = self._telemetry.every > 0 and self._done % self._telemetry.every == 0
        with ExitStack() as stack:
            for conversion in self._conversions:
                stack.enter_context(conversion.step(measure=measured))
            yield
        if not measured:
            self._seconds += time.perf_counter() - begun
            self._counted += 1
        self._done += 1
        if measured:
            for conversion in self._conversions:
                self._metrics |= conversion.metrics()

    @contextmanager
    def evaluation(self, *, high_precision: bool = False, by: str | None = None) -> Iterator[None]:
        """Inside this context, the models are evaluated in the precision of the last step.

        Args:
            high_precision: without quantisation instead.
            by: by the forward pass of another recipe instead, as `Conversion.evaluation` has it.

        Raises:
            ValueError: `by` is no such name, or is given beside `high_precision`.
        """
        with ExitStack() as stack:
            for conversion in self._conversions:
                stack.enter_context(conversion.evaluation(high_precision=high_precision, by=by))
            yield

    def compare_gradient(self, closure: Callable[[], object]) -> None:
        """Record how far quantisation turns the gradient, in the steps that telemetry or the recipe asks for.

        Args:
            closure: computes the loss of the step's batch and calls `backward`; it is not called in other
                steps, so this line may stand in every one, inside `step()`.
        """
        every = self._telemetry.shadow
        due = not self.recipe.plain and every > 0 and self._done % every == 0
        for conversion in self._conversions:
            if due or conversion.wants_gradient:
                self._metrics |= conversion.compare_gradient(closure)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Record metrics of the last step. What is logged until the next step begins belongs to it.

        `train/loss` that is not finite, or too large for `guard_loss`, ends the trial as diverged.

        Raises:
            ValueError: a value is no number, or a name is empty.
        """
        for name, value in metrics.items():
            if not isinstance(name, str) or not name.strip():
                raise ValueError(f"trial.log: {name!r} is no name of a metric")
            self._metrics[name] = number(value, f"trial.log: {name}")
        at = float(max(1, self._done) + self._before)
        verdict: GuardDecision | None = None
        origin: Origin | None = None
        if not math.isfinite(self._metrics.get("train/loss", 0.0)):
            self._metrics[FIRST_NONFINITE] = at
            origin = next(filter(None, map(Conversion.origin, self._conversions)), None)
        elif self._watch and "train/loss" in metrics:
            verdict = self._watch.judge(self._metrics["train/loss"], 0.0)
            self._metrics |= {GUARD_STOPPED: at} if verdict.cause else {}
        if not ENDINGS.isdisjoint(self._metrics):
            self._flush(verdict, origin)
            self._stopped = True  # for a function whose `except:` catches Stopped, too
            raise Stopped

    def log_batches(self, losses: Sequence[float], name: str = "val/loss") -> None:
        """Record the mean loss of an evaluation, given the loss of each validation batch.

        In a forked design the losses also give the error of the evaluation, which all seeds share.

        Args:
            losses: losses of batches of equal size, in the same order each time; 8 or more give an error.
            name: name of the metric: `val/loss`; `val/loss_bf16` for one read in high precision.

        Raises:
            ValueError: there are no losses, or one is no number.
        """
        if not losses:
            raise ValueError(f"trial.log_batches: {name} has no losses; give that of each validation batch")
        values = [number(loss, f"trial.log_batches: a loss of {name}") for loss in losses]
        self.log({name: math.fsum(values) / len(values)})
        self._metrics |= parts_of(values, name) if self.forked else {}

    def checkpoint(self, **objects: Stateful | torch.Generator) -> None:
        """Name the objects whose state a checkpoint holds; if the trial is resumed, load their states now.

        Checkpoints are written between steps. They also hold the state of the recipe, and of the global
        generators of torch, numpy and random.

        Args:
            objects: objects with `state_dict` and `load_state_dict` (model, optimizer, scheduler, loader), or
                a torch.Generator.

        Raises:
            TypeError: an object has no such methods.
            RuntimeError: the checkpoint that the trial resumes from has no object of that name.
        """
        stateful: dict[str, Stateful] = {}
        for name, part in objects.items():
            if isinstance(part, torch.Generator):
                stateful[name] = GeneratorState(part)
            elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
                stateful[name] = part
            else:
                raise TypeError(
                    f"trial.checkpoint: {name} has no state_dict and load_state_dict, and is no"
                    " torch.Generator; take batches from trial.steps(...), which continues their place"
                )
        self._stateful |= stateful
        if self._saved:
            for name, part in stateful.items():
                if name not in self._saved["objects"]:
                    raise RuntimeError(
                        f"trial.checkpoint: the checkpoint has no {name!r}; remove it to start anew"
                    )
                part.load_state_dict(self._saved["objects"][name])

    @property
    def resumed(self) -> bool:
        """True if this run continues from a checkpoint."""
        return self._saved is not None

    # --- for the workload -----------------------------------------------------------------------------

    def finish(self) -> None:
        if self._done == 0:
            raise RuntimeError(
                "the training function took no step: put each step inside `with trial.step():`"
            )
        steps = self._done - self._first
        if self._anneals and len(self._rates) < steps - 1:
            raise RuntimeError(
                f"the training function read trial.lr_factor in {len(self._rates)} of {steps} steps: in a"
                " forked design its learning rate must be multiplied by trial.lr_factor in every step, to"
                " fall to zero"
            )
        for conversion in self._conversions:
            self._metrics["flops/fp4_share"] = conversion.metrics()["flops/fp4_share"]
        self._flush()

    def _remaining(self) -> Iterator[int]:
        for step in range(self._first, self.max_steps):
            self._between()
            yield step
            if self._done <= step:
                raise RuntimeError(f"step {step} was not taken: put it inside `with trial.step():`")

    def _between(self) -> None:
        """Between two steps, once: record, and write a checkpoint if one is due."""
        if self._between_done == self._done:  # by `steps`, before it took the batch
            return
        self._between_done = self._done
        if self._saved and self._done == self._first:
            self._continue()
        elif self._twin and self._done == 0:
            for conversion in self._conversions:
                move_by_ulp([p for p in conversion.model.parameters() if p.requires_grad], self.seed)
        due = self._done % self._telemetry.log == 0 or time.monotonic() - self._last_record > BEAT_SECONDS
        if self._done > self._recorded and (self._metrics or due):
            self._flush()
        checkpoints = self._checkpoints
        if checkpoints and self._stateful and self._done > self._first:
            counted = self._done + self._before
            wanted = checkpoints.wanted(counted)
            if any(wanted):
                checkpoints.leave(counted, cast(RunState, self._state()), wanted)

    def _continue(self) -> None:
        """Restore what the checkpoint has beside the user's objects, before the first step."""
        saved = self._saved
        assert saved is not None
        missing = saved["objects"].keys() - self._stateful.keys()
        if missing or len(self._conversions) != len(saved["conversions"]):
            raise RuntimeError(
                f"the trial continues from a checkpoint of {', '.join(saved['objects'])};"
                " give trial.checkpoint all of them, and convert the same models, before the first step"
            )
        for conversion, state in zip(self._conversions, saved["conversions"], strict=True):
            conversion.load_state_dict(state)
        _restore_generators(saved["generators"])

    def _state(self) -> TrialState:
        state: TrialState = {
            "step": self._done + self._before,
            "objects": {name: part.state_dict() for name, part in self._stateful.items()},
            "conversions": [conversion.state_dict() for conversion in self._conversions],
            "generators": _generators(),
        }
        if self._watch:
            state["guard"] = self._watch.state()
        return state

    def _flush(self, verdict: GuardDecision | None = None, origin: Origin | None = None) -> None:
        """Emit the metrics of the last step, with those that every trial has. Stopped if the trial ended."""
        if self._stopped:
            raise Stopped
        metrics, self._metrics = self._metrics, {}
        if self._counted:
            each = self._seconds / self._counted
            metrics["throughput/step_ms"] = 1000 * each
            if self._run.tokens_per_step > 1:  # 1 is the default: the function states no tokens
                metrics["throughput/tokens_per_s"] = self._run.tokens_per_step / each
            self._seconds, self._counted = 0.0, 0
        metrics["tokens"] = float(self._done * self._run.tokens_per_step)
        for conversion in self._conversions:
            metrics["nan/activation"] = conversion.metrics()["nan/activation"]
        metrics |= of_machine(self.device)
        self._recorded, self._last_record = self._done, time.monotonic()
        self._emit(Record(self._done + self._before, metrics, verdict, origin))


def emitted(work: Callable[[Callable[[Record], None]], None]) -> Iterator[Record]:
    """Run `work(emit)` in a thread, and yield each record as it is emitted. The thread runs only while this
    generator waits: `emit` returns once the next record is asked for. If the generator is closed, `emit`
    raises Stopped."""
    given, taken = threading.Semaphore(0), threading.Semaphore(0)
    records: list[Record] = []
    errors: list[BaseException] = []
    closed = threading.Event()

    def emit(record: Record) -> None:
        if closed.is_set():  # the function has caught Stopped, and nobody takes records any more
            raise Stopped
        records.append(record)
        given.release()
        taken.acquire()
        if closed.is_set():
            raise Stopped

    def body() -> None:
        taken.acquire()
        try:
            if not closed.is_set():
                work(emit)
        except Stopped:
            pass
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)
        finally:
            given.release()

    thread = threading.Thread(target=body, name="training function", daemon=True)
    thread.start()
    try:
        while True:
            taken.release()
            given.acquire()
            if not records:
                break
            yield records.pop()
    finally:
        closed.set()
        taken.release()
        thread.join()
    if errors:
        raise errors[0]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside this context, the global generators of torch, numpy and random begin from a seed."""
    before = _generators()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        _restore_generators(before)


def _generators() -> dict[str, object]:
    version, words, gauss = random.getstate()
    state: Any = np.random.get_state()  # typed as a dictionary or a tuple, by an argument
    kind, keys, position, has_gauss, cached = state
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "random": [version, list(words), gauss],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
    }


def _restore_generators(state: Mapping) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    version, words, gauss = state["random"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))


def _endless(batches: Iterable) -> Iterator:
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise ValueError(
                "trial.steps: the loader has no batches; an iterator cannot be begun again, give the loader"
            )
