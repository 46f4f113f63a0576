"""Arguments of one trial's computation, which travel together from a trial's spec to the training loop."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from ablate.numerics.spec import Spec
from ablate.recipes.recipe import Recipe

if TYPE_CHECKING:
    from ablate.training.checkpoints import Checkpoints
    from ablate.training.fork_design import Forks

BEAT_SECONDS = 5.0
"""Longest time between two records of a trial that works, empty ones included: a silent one is taken for
hung."""


def beats(work: Iterable[object]) -> Iterator[None]:
    """Do work, item by item, and yield each time that an empty record is due."""
    beat = time.monotonic()
    for _ in work:
        if time.monotonic() - beat >= BEAT_SECONDS:
            beat = time.monotonic()
            yield


class Telemetry(Spec):
    """Intervals of records and checkpoints, and what is kept. They are not part of a trial's identity."""

    every: int = Field(50, ge=0)
    """Steps between measurements of quantisation error, the first step's and the last's too; 0: none."""
    shadow: int = Field(100, ge=0)
    """Steps between comparisons of the gradient with the one of an unquantised step; 0: none."""
    log: int = Field(10, ge=1)
    """Steps between records of the training loss, which is the mean over them."""
    checkpoint: float = Field(60.0, ge=0)
    """Least seconds between checkpoints. They take 5 % of a trial's time at most; 0: after every step."""
    keep_weights: bool = False
    """Keep the weights of each trial that does not diverge in its folder, as `weights.safetensors`; of a
    reused trial only if it was run so."""


@dataclass(frozen=True)
class TrialRun:
    """All that a workload computes a trial's records from, beside its own fields."""

    recipe: Recipe
    """Recipe of the trial; of a forked one, that of its windows."""
    seed: int
    """Seed of weights, data order and rounding."""
    engine: str
    device: str
    """`cpu` or `cuda`."""
    telemetry: Telemetry
    checkpoints: Checkpoints | None = None
    """The trial's checkpoint files, on rank 0; None: the run starts at step 0 and writes none."""
    forks: Forks | None = None
    """Windows to train from a trunk; None: one run of all steps."""
    twin: bool = False
    """True for a second run of the same recipe and seed (`loop.Twin`)."""
