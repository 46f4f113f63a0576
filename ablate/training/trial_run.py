"""Arguments of one trial's computation, which travel together from a trial's spec to the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ablate.recipes.recipe import Recipe

if TYPE_CHECKING:
    from ablate.training.checkpoints import Checkpoints
    from ablate.training.fork_design import Forks
    from ablate.training.loop import Telemetry


@dataclass(frozen=True)
class TrialRun:
    """All that a workload computes a trial's records from, beside its own fields."""

    recipe: Recipe
    """Recipe of the trial; of a forked one, that of its windows."""
    seed: int
    """Seed of weights, data order and rounding."""
    engine: str
    """Name of an engine of `engines.ENGINES`."""
    device: str
    """`cpu` or `cuda`."""
    telemetry: Telemetry
    """Intervals between measurements."""
    checkpoints: Checkpoints | None = None
    """The trial's checkpoint files, on rank 0; None: the run starts at step 0 and writes none."""
    forks: Forks | None = None
    """Windows to train from a trunk; None: one run of all steps."""
    twin: bool = False
    """True for a second run of the same recipe and seed (`loop.Twin`)."""
