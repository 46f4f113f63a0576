"""Common base of workloads that train a model: from a recipe and a seed to records."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ablate.files import Json
from ablate.recipes.layers import Match, select
from ablate.recipes.readings import problems, reading
from ablate.recipes.recipe import Recipe
from ablate.training.data import without_places
from ablate.training.hyperparameters import Training
from ablate.training.metric_names import ENDINGS, LOSS, by_recipe, plain_metric
from ablate.training.workloads.base import Workload

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ablate.numerics.philox import Clock
    from ablate.training.checkpoints import Checkpoints
    from ablate.training.data.batches import Batch
    from ablate.training.loop import PreparedRun, Record, Twin
    from ablate.training.trial_run import Telemetry, TrialRun


class Subject(NamedTuple):
    """Model in high precision, and its training and validation data."""

    model: nn.Module
    batch: Callable[[int, int], Batch]
    validation: list[Batch]
    loss: Callable[..., Tensor] | None = None
    """Function that returns the mean loss, given the model and a batch; None: the model returns it."""
    logits: Callable[..., Tensor] | None = None
    """Function that returns logits [tokens, vocabulary], given the model and a batch whose last tensor holds
    the tokens to predict; None: the model has none."""


class Trained(Training, Workload):
    """Workload that trains a model.

    A subclass defines `data` and `subject`. It may also define metrics derived from a record, and files left
    at the end.
    """

    UNITS: ClassVar[dict[str, str]] = {
        "train/loss": "nats",
        "train/recent_loss": "nats",
        "val/loss": "nats",
        "val/loss_bf16": "nats",
        "val/kl": "nats",
    }

    if TYPE_CHECKING:
        data: Any

    QUANTITIES: ClassVar[tuple[str, ...]] = (LOSS,)
    """Readings of an evaluation by another recipe."""
    forks: ClassVar[bool] = True
    twins: ClassVar[bool] = True
    measures: ClassVar[bool] = True
    resumes: ClassVar[bool] = True
    context_free: ClassVar[bool] = True

    @property
    def training(self) -> Training:
        return self

    @property
    def data_source(self) -> object:
        return self.data

    @property
    def of_readings(self) -> frozenset[str]:
        return frozenset(plain_metric(by_recipe(q, name)) for name in self.evaluate for q in self.QUANTITIES)

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from (("evaluate", reason) for reason in problems(self.evaluate))
        named = [pattern for pattern in self.guard.fallback.layers if pattern != "*"]
        try:
            layers = self.linear_layers if named else ()
        except (OSError, ValueError):  # the model cannot be read, which a subclass reports
            return
        for pattern in named:
            if reason := select(Match(name=pattern), layers).reason:
                yield "guard.fallback.layers", reason

    @abstractmethod
    def subject(self, recipe: Recipe, clock: Clock, device: torch.device) -> Subject:
        """Return model and data, on the device, for the clock's seed; the model's weights are drawn from the
        seed alone. The recipe's `dtype` is that of the activations; the engine applies the rest later. The
        training loop later sets the clock to every step. OSError if the data or the model cannot be read;
        ValueError if they are damaged, or do not fit together."""

    def with_adapters(self, subject: Subject, clock: Clock) -> Subject:
        """Return the subject, whose layers an engine has converted, with modules around these layers
        (adapters), drawn from the clock's seed; by default unchanged."""
        return subject

    def derived(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return metrics derived from those of a record; by default none."""
        return {}

    def leave(self, run: PreparedRun, folder: Path) -> None:
        """Save files for people, in a folder that may not exist, after a run that did not diverge; by default
        none."""

    def compute(self, run: TrialRun) -> Iterator[Record]:
        from ablate.training.distributed import world
        from ablate.training.forked_training import train_forks
        from ablate.training.loop import Twin

        world().begin(self, run.recipe, run.engine)
        if run.forks:
            prepare = partial(self.prepare, seed=run.seed, device=run.device, engine=run.engine)
            yield from self._derived(train_forks(prepare, self, run))
            return
        prepared, stopped = self.prepare(run.recipe, run.seed, run.device, run.engine), False
        twin = Twin.of(run.recipe, run.engine) if run.twin else None
        for record in self.train(prepared, run.telemetry, run.checkpoints, twin):
            yield record
            stopped = not ENDINGS.isdisjoint(record.metrics)
        if run.checkpoints and not stopped:
            self.leave(prepared, run.checkpoints.artifacts)

    def prepare(self, recipe: Recipe, seed: int, device: str, engine: str = "emulated") -> PreparedRun:
        """Return the subject with the recipe applied to the linear layers inside its blocks."""
        import torch

        from ablate.engines import converter
        from ablate.engines.recomputation import recompute
        from ablate.numerics.philox import Clock
        from ablate.training.distributed import shard
        from ablate.training.loop import PreparedRun

        clock = Clock(seed)
        subject = self.subject(recipe, clock, torch.device(device))
        driver = converter(engine)(subject.model, recipe, clock)
        if self.recompute:
            recompute(subject.model, driver)
        subject = self.with_adapters(subject, clock)
        if self.compile:
            from ablate.engines.compiled import compile_model

            compile_model(subject.model, driver)
        shard(subject.model, driver)
        return PreparedRun(
            subject.model,
            driver,
            subject.batch,
            subject.validation,
            subject.loss and partial(subject.loss, subject.model),
            subject.logits and partial(subject.logits, subject.model),
            {name: reading(name) for name in self.evaluate},
        )

    def train(
        self,
        run: PreparedRun,
        telemetry: Telemetry,
        checkpoints: Checkpoints | None = None,
        twin: Twin | None = None,
    ) -> Iterator[Record]:
        """Train the model from `prepare` and yield its records, with derived metrics."""
        from ablate.training.loop import train

        yield from self._derived(train(run, self, telemetry, checkpoints, twin))

    def _derived(self, records: Iterator[Record]) -> Iterator[Record]:
        for record in records:
            record.metrics.update(self.derived(record.metrics))
            yield record

    def identity(self) -> dict[str, Json]:
        """Return the fields that determine the numbers, without the data's paths: the fingerprint stands for
        their content."""
        fields = self.canonical(self.SAME_BITS)
        return {**fields, "data": without_places(fields["data"], self.data)}
