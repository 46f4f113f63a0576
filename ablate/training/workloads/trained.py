"""What every workload that trains a model has in common: from a recipe and a seed to records."""

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
    """A model in high precision, and what it is trained on."""

    model: nn.Module
    batch: Callable[[int, int], Batch]
    validation: list[Batch]
    loss: Callable[..., Tensor] | None = None
    """The mean loss, of the model and a batch; None: the model gives it itself."""


class Trained(Training):
    """A workload that trains. A subclass says what: `subject`; and may say what follows from a record or is left at the end."""

    UNITS: ClassVar[dict[str, str]] = {"train/loss": "nats", "val/loss": "nats", "val/loss_bf16": "nats"}

    @property
    def imports(self) -> tuple[str, ...]:
        """Modules that take seconds to import and that a trial needs: a worker imports them once."""
        return ()

    def problems(self) -> Iterator[tuple[str, str]]:
        """(field, reason) for what cannot run."""
        named = [pattern for pattern in self.guard.fallback.layers if pattern != "*"]
        try:
            layers = self.linear_layers if named else ()
        except (OSError, ValueError):  # of a model that is not there, which is told for itself
            return
        for pattern in named:
            if reason := select(Match(name=pattern), layers).reason:
                yield "guard.fallback.layers", reason

    @abstractmethod
    def subject(self, recipe: Recipe, clock: Clock, device: torch.device) -> Subject:
        """Model and data for the clock's seed, the model's weights drawn from it alone. The clock will be set to every moment."""

    def dressed(self, subject: Subject, clock: Clock) -> Subject:
        """The subject with what comes around layers that a recipe drives already (adapters); by default as it is."""
        return subject

    def derived(self, metrics: dict[str, float]) -> dict[str, float]:
        """Metrics that follow from a record's own."""
        return {}

    def leave(self, run: Prepared, folder: Path) -> None:
        """Files for people, left in `folder`, which may not be there yet, at the end of a run that did not diverge."""

    def records(
        self,
        recipe: Recipe,
        seed: int,
        engine: str,
        device: str,
        telemetry: Telemetry,
        checkpoints: Checkpoints | None = None,
    ) -> Iterator[Record]:
        """Train, and yield a Record after every step that measured something. Of several ranks, all call it."""
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
        """The subject with the recipe applied, by an engine, to the linear layers inside its blocks."""
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
        """Train what was prepared."""
        from ablate.training.loop import train

        for record in train(run, self, telemetry, checkpoints):
            record.metrics.update(self.derived(record.metrics))
            yield record

    def identity(self) -> dict[str, Any]:
        """The fields that determine the numbers."""
        return self.canonical(self.SAME_BITS)
