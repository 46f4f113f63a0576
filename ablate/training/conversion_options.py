"""Options of `ablate.convert` as one object, for the functions and callbacks that pass them on."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

from ablate.numerics.spec import tag
from ablate.recipes.recipe import Recipe, Run

if TYPE_CHECKING:
    from torch import nn

    from ablate.engines.linears import Linears


class Keywords(TypedDict, total=False):
    """Arguments of `ablate.convert` behind model, recipe and knobs, for callers that pass them on."""

    seed: int
    steps: int | None
    tokens_per_step: int
    decay_start: int | None
    blocks: str | None
    filter: "Callable[[str, nn.Module], bool] | None"
    measure_every: int
    linears: "Linears"


@dataclass(frozen=True)
class ConversionOptions:
    """Options of `ablate.convert`, which explains them, with the recipe as one."""

    recipe: Recipe
    seed: int = 0
    steps: int | None = None
    tokens_per_step: int = 1
    decay_start: int | None = None
    blocks: str | None = None
    filter: "Callable[[str, nn.Module], bool] | None" = None
    measure_every: int = 50
    linears: "Linears" = ()

    @property
    def run(self) -> Run | None:
        """Facts that a schedule needs; None without a number of steps."""
        return None if self.steps is None else Run(self.steps, self.tokens_per_step, self.decay_start)

    def lasting(self, steps: float) -> "ConversionOptions":
        """Return the options for a Trainer that is going to make so many steps, if none were given; not
        positive or infinite: unknown."""
        steps = self.steps or steps
        return replace(self, steps=int(steps) if 0 < steps < math.inf else None)

    def refuse_unknown_length(self) -> None:
        """Raise ValueError if the recipe needs facts of the run that are not given, or a workload's loop."""
        recipe, run = self.recipe, self.run
        for phase in recipe.schedule:
            kind = tag(phase.start)
            lacking = {
                "fraction": "steps" if run is None else None,
                "tokens": "tokens_per_step" if run is None or run.tokens_per_step == 1 else None,
                "decay": "decay_start" if run is None or run.decay is None else None,
            }.get(kind)
            if lacking:
                raise ValueError(
                    f"the recipe's schedule has a phase that starts at {phase.start};"
                    f" give {lacking} to convert"
                )
        if recipe.experts.replays:
            raise ValueError(
                "experts.routing replay: a training loop of your own has no unquantised training to follow;"
                " use free, or train by a workload such as gpt, in forks"
            )
        if recipe.weights.noise:
            raise ValueError(
                "weights.noise: in a training loop of your own it is not in force; leave it out,"
                " or train by a workload such as gpt"
            )
        reset = recipe.weights.osci_reset
        if reset and reset.start > 0 and run is None:
            raise ValueError(
                f"weights.osci_reset starts after a fraction of the run, {reset.start}; give steps to convert"
            )
