"""Conversion of a model that is not there yet: a callback gets its arguments before the model and its run."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ablate.experiment import python_api
from ablate.recipes.recipe import Recipe
from ablate.training.conversion import Conversion


@dataclass(frozen=True)
class PlannedConversion:
    """Arguments of `ablate.convert` that a callback keeps until training begins."""

    recipe: Recipe
    seed: int
    steps: int | None
    """Optimizer steps of the run; None: as many as the Trainer is going to make."""
    tokens_per_step: int
    decay_start: int | None
    blocks: str | None
    filter: Callable[[str, nn.Module], bool] | None
    measure_every: int

    def convert(self, model: nn.Module, steps: float) -> Conversion:
        """Convert a model and return its handle.

        Args:
            model: the model, converted in place.
            steps: optimizer steps that the Trainer is going to make, for a callback that was given none; not
                positive or infinite if they are unknown.

        Raises:
            ValueError: as `ablate.convert` does.
        """
        steps = self.steps or steps
        return python_api.convert(
            model,
            self.recipe,
            seed=self.seed,
            steps=int(steps) if 0 < steps < float("inf") else None,
            tokens_per_step=self.tokens_per_step,
            decay_start=self.decay_start,
            blocks=self.blocks,
            filter=self.filter,
            measure_every=self.measure_every,
        )
