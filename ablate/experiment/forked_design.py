"""Resolve `design` of an experiment file for one arm: after which steps windows begin, and how long they are.

    design: {trunk: bf16, positions: 3, window: 0.15, horizons: [1, 2, 4]}

With 300 steps, of which the last 60 decay, windows of 45, 90 and 180 steps begin after steps 120, 180, 239.
"""

from collections.abc import Iterator
from math import ceil

from ablate.experiment.schema import START, Design
from ablate.recipes import PRESETS, Recipe
from ablate.training.fork_design import Forks
from ablate.training.workloads.base import Workload

CALIBRATION, FULL_CALIBRATION = "_calibration", "_calibration_full"
"""Suffixes of the names of a calibration's two sweeps: in forks, and in full runs."""
FEWEST_SEEDS = 3
"""Smallest number of seeds of a calibration."""
_FIRST, _LAST = 0.4, 0.8
"""Shares of the trunk between which positions lie, unless its warm-up ends later or its decay begins
earlier."""


def resolved(design: Design, config: Workload) -> Forks:
    """Return the windows of the trials of an arm, whose workload `config` can be forked. ValueError, whose
    message begins with the field, if there is no such design for a run of so few steps."""
    windows = tuple(max(1, round(design.window * config.steps)) * times for times in design.horizons)
    if design.trunk == START:
        return Forks(trunk=None, positions=(0,), windows=windows, anneal=design.anneal)
    positions = _positions(design, config)
    if len(set(positions)) < len(positions) or not positions[0]:
        raise ValueError(
            f"design.positions {list(positions)} are not different steps of {config.steps}; "
            "give fewer positions, or workload.steps more"
        )
    return Forks(trunk=PRESETS[design.trunk](), positions=positions, windows=windows, anneal=design.anneal)


def _positions(design: Design, config: Workload) -> tuple[int, ...]:
    if not isinstance(design.positions, int):
        return tuple(round(share * config.steps) for share in design.positions)
    first, last = _FIRST * config.steps, _LAST * config.steps
    if training := config.training:
        first = max(first, ceil(training.warmup * training.steps))
        if training.decay == "wsd" and training.decay_start is not None:
            last = max(first, training.decay_start - 1)
    if design.positions == 1:
        return (round((first + last) / 2),)
    step = (last - first) / (design.positions - 1)
    return tuple(round(first + number * step) for number in range(design.positions))


def misfits(design: Design, config: Workload, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (field, reason) for each reason why an arm cannot be run in a forked design."""
    if not config.forks:
        yield "design", "forks need a workload that trains from a checkpoint: gpt, finetune or python"
        return
    if config.own_code and design.trunk != START:
        yield (
            "design.trunk",
            f"{design.trunk} would be trained by your own code, which begins where it wants; write trunk:"
            " start, and the checkpoint that it goes on from as workload.start",
        )
        return
    if config.own_code and not config.own_checkpoint:
        yield (
            "workload.start",
            "is missing: trunk: start goes on from your checkpoint, whose content is part of what a trial is;"
            " give its file or folder as start, and load trial.start",
        )
        return
    if config.own_code and recipe.experts.replays:
        yield (
            "recipe.experts.routing",
            "replay follows an unquantised training of the same trial, which code of your own does not run;"
            " use free",
        )
    if config.training and config.training.time_budget is not None:
        yield (
            "workload.time_budget",
            "ends a run by its seconds, and windows have a fixed length; leave it out",
        )
    if recipe.schedule:
        yield (
            "recipe.schedule",
            f"phases ({recipe.schedule[0].start}) belong to a full run, and windows have no such moment; "
            "leave out the phases, or the design",
        )
    try:
        resolved(design, config)
    except ValueError as error:
        field, _, why = str(error).partition(" ")
        yield field, why
