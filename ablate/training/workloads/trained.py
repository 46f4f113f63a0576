"""Common base of workloads that train a model: from a recipe and a seed to records."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ablate.recipes.layers import Match, select
from ablate.recipes.recipe import Recipe
from ablate.training.hyperparameters import Training
from ablate.training.metric_names import ENDINGS

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ablate.numerics.philox import Clock
    from ablate.training.checkpoints import Checkpoints
    from ablate.training.data.batches import Batch
    from ablate.training.loop import Prepared, Record, Telemetry


class Subject(NamedTuple):
    """Model in high precision, and its training and validation data."""

    model: nn.Module
    batch: Callable[[int, int], Batch]
    validation: list[Batch]
    loss: Callable[..., Tensor] | None = None
    """Function that returns the mean loss, given the model and a batch; None: the model returns it."""


class Trained(Training):
    """Workload that trains a model.

    A subclass defines `subject`. It may also define metrics derived from a record, and files left at the end.
    """

    UNITS: ClassVar[dict[str, str]] = {"train/loss": "nats", "val/loss": "nats", "val/loss_bf16": "nats"}

    @property
    def imports(self) -> tuple[str, ...]:
        """Return modules that a trial needs and that take seconds to import; a worker imports them once."""
        return ()

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, reason) for each field that cannot run."""
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
        """Return model and data for the clock's seed; the model's weights are drawn from the seed alone.

        The training loop sets the clock to every step later.
        """

    def dressed(self, subject: Subject, clock: Clock) -> Subject:
        """Return the subject with modules around the converted layers (adapters); by default unchanged."""
        return subject

    def derived(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return metrics derived from those of a record."""
        return {}

    def leave(self, run: Prepared, folder: Path) -> None:
        """Save files for people in `folder`, which may not exist, after a run that did not diverge."""

    def records(
        self,
        recipe: Recipe,
        seed: int,
        engine: str,
        device: str,
        telemetry: Telemetry,
        checkpoints: Checkpoints | None = None,
    ) -> Iterator[Record]:
        """Train, and yield a Record after every step that measured something. All ranks call it."""
        from ablate.training.distributed import world

        world().begin(self, recipe, engine)
        run = self.prepare(recipe, seed, device, engine)
        stopped = False
        for record in self.train(run, telemetry, checkpoints):
            yield record
            stopped = not ENDINGS.isdisjoint(record.metrics)
        if checkpoints and not stopped:
            self.leave(run, checkpoints.artifacts)

    def prepare(self, recipe: Recipe, seed: int, device: str, engine: str = "emulated") -> Prepared:
        """Return the subject with the recipe applied by an engine to the linear layers inside its blocks."""
        import torch

        from ablate.engines import ENGINES
        from ablate.engines.emulated import recompute
        from ablate.numerics.philox import Clock
        from ablate.training.distributed import shard
        from ablate.training.loop import Prepared

        clock = Clock(seed)
        found = self.subject(recipe, clock, torch.device(device))
        driver = import_module(ENGINES[engine]).convert(found.model, recipe, clock)
        if self.recompute:
            recompute(found.model, driver)
        found = self.dressed(found, clock)
        if self.compile:
            from ablate.engines.compiled import compile_model

            compile_model(found.model, driver)
        shard(found.model, driver)
        return Prepared(
            found.model,
            driver,
            found.batch,
            found.validation,
            found.loss and partial(found.loss, found.model),
        )

    def train(
        self, run: Prepared, telemetry: Telemetry, checkpoints: Checkpoints | None = None
    ) -> Iterator[Record]:
        """Train the prepared model and yield its records, with derived metrics."""
        from ablate.training.loop import train

        for record in train(run, self, telemetry, checkpoints):
            record.metrics.update(self.derived(record.metrics))
            yield record

    def identity(self) -> dict[str, Any]:
        """Return the fields that determine the numbers."""
        return self.canonical(self.SAME_BITS)
