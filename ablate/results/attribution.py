"""What each knob contributes: main effects and interactions of a grid, leave-one-out, Shapley shares, what a
gap costs in tokens, and which arms no other beats in every metric. All by seed first, so that each is a mean
of paired numbers with an interval."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ablate.results.contrasts import is_switch
from ablate.results.intervals import Interval
from ablate.results.paired_stats import Difference, paired_difference
from ablate.results.summary import ArmSummary

_MOST_COMPONENTS = 8
"""Shapley shares look at every subset."""

Cell = tuple[int, ...]
"""A point of a grid: for each knob, the place of its level."""


@dataclass(frozen=True)
class Grid:
    """Arms that are a product of knobs' levels, with the seeds that all of them finished."""

    levels: Mapping[str, tuple[Any, ...]]
    """By knob, the reference first: false of true and false alone, else what the file lists first."""
    values: Mapping[Cell, Mapping[int, float]]
    interval: Interval
    left_out: tuple[int, ...]
    """Seeds that some arm did not finish, or finished without a finite value."""
    margin: float | None = None
    """The smallest effect that matters: the smallest over the arms, where it is a share of several
    baselines."""
    arms: tuple[ArmSummary, ...] = ()

    def cells(self, **held: int) -> list[Cell]:
        """The points at which the named knobs are at these levels."""
        names = list(self.levels)
        return [
            cell
            for cell in self.values
            if all(cell[names.index(knob)] == level for knob, level in held.items())
        ]

    def mean(self, cells: Sequence[Cell]) -> dict[int, float]:
        """By seed, the mean over these points."""
        seeds = next(iter(self.values.values()))
        return {seed: math.fsum(self.values[cell][seed] for cell in cells) / len(cells) for seed in seeds}


@dataclass(frozen=True)
class Effect:
    """What turning one knob does on average over the others, or how much more two do together than apart."""

    knobs: tuple[str, ...]
    change: str
    effect: Difference
    margin: float | None = None
    """The smallest effect that matters, in the metric's unit."""


def grid(arms: Sequence[ArmSummary]) -> Grid | None:
    """The arms that turn the same knobs, where they are a whole product of two levels or more each and share
    a seed; None else."""
    compared = [arm for arm in arms if arm.baseline is not None and arm.role == "listed" and arm.knobs]
    if not compared or len({frozenset(arm.knobs) for arm in compared}) > 1:
        return None
    levels = {
        knob: _levels([arm.knobs[knob] for arm in compared], is_switch(arms, knob))
        for knob in compared[0].knobs
    }
    levels = {knob: found for knob, found in levels.items() if len(found) > 1}
    points = {tuple(found.index(arm.knobs[knob]) for knob, found in levels.items()): arm for arm in compared}
    if not levels or len(points) != len(compared) or len(points) != math.prod(map(len, levels.values())):
        return None
    seeds = set.intersection(*(set(arm.values) for arm in points.values()))
    wanted = set.union(*(set(arm.given) for arm in points.values()))
    if not seeds:
        return None
    values = {cell: {seed: arm.values[seed] for seed in sorted(seeds)} for cell, arm in points.items()}
    margin = min((arm.margin for arm in compared if arm.margin is not None), default=None)
    return Grid(levels, values, compared[0].interval, tuple(sorted(wanted - seeds)), margin, tuple(compared))


def _levels(values: Sequence[Any], switch: bool) -> tuple[Any, ...]:
    """Return the distinct values in their order; those of a switch false first."""
    known = {json.dumps(value): value for value in values}
    return tuple(sorted(known.values())) if switch else tuple(known.values())


def main_effects(grid: Grid) -> list[Effect]:
    """Each level of each knob instead of the knob's reference, on average over the other knobs."""
    found = []
    for place, (knob, levels) in enumerate(grid.levels.items()):
        for level in range(1, len(levels)):
            cells = grid.cells(**{knob: level})
            effect = _difference(grid, cells, grid.cells(**{knob: 0}))
            found.append(
                Effect(
                    (knob,),
                    _change(levels, level),
                    _of_runs(grid, effect, _unchanged(grid, cells, place)),
                    grid.margin,
                )
            )
    return found


def _unchanged(grid: Grid, cells: Sequence[Cell], place: int) -> bool:
    """Return True if every run of these cells equals that at the reference of the knob at this place, seed by
    seed."""
    return all(grid.values[cell] == grid.values[_with(cell, place, 0)] for cell in cells)


def _of_runs(grid: Grid, effect: Difference, unchanged: bool) -> Difference:
    """The effect on averages, with what it takes from the runs: whether they are counts, and whether zeros
    mean equal runs."""
    whole = all(value.is_integer() for values in grid.values.values() for value in values.values())
    return replace(effect, whole=whole, runs_equal=unchanged)


def interactions(grid: Grid) -> list[Effect]:
    """For every two knobs, how much the effect of one depends on the other: the difference of its effects, on
    average over the rest."""
    found = []
    for (at, (first, ones)), (place, (second, others)) in itertools.combinations(
        enumerate(grid.levels.items()), 2
    ):
        for one, other in itertools.product(range(1, len(ones)), range(1, len(others))):
            apart = [
                grid.mean(grid.cells(**{first: a, second: b}))
                for a, b in ((one, other), (0, 0), (one, 0), (0, other))
            ]
            both, neither, alone, rest = apart
            by_seed = {seed: both[seed] + neither[seed] - alone[seed] - rest[seed] for seed in both}
            change = f"{_change(ones, one)}; {_change(others, other)}"
            firsts = [cell for b in (0, other) for cell in grid.cells(**{first: one, second: b})]
            seconds = [cell for a in (0, one) for cell in grid.cells(**{first: a, second: other})]
            unchanged = _unchanged(grid, firsts, at) or _unchanged(grid, seconds, place)
            by_seed = dict.fromkeys(by_seed, 0.0) if unchanged else by_seed  # without the sums' rounding
            effect = _of_runs(grid, _from_zero(by_seed, grid.interval), unchanged)
            found.append(Effect((first, second), change, effect, grid.margin))
    return found


@dataclass(frozen=True)
class Share:
    """What one component of a recipe is worth."""

    knob: str
    on: str
    left_out: Difference
    """The whole recipe minus the one without it."""
    shapley: Difference
    """Its mean contribution over every order in which the components could be added; these add up to the
    whole recipe's."""


def shares(grid: Grid) -> list[Share]:
    """Leave-one-out and Shapley shares, where every knob has two levels; on is true, or the level listed
    second."""
    if (
        any(len(levels) != 2 for levels in grid.levels.values())
        or not 1 < len(grid.levels) <= _MOST_COMPONENTS
    ):
        return []
    whole = (1,) * len(grid.levels)
    found = []
    for place, (knob, levels) in enumerate(grid.levels.items()):
        shapley = dict.fromkeys(grid.mean([whole]), 0.0)
        for cell in (cell for cell in grid.values if not cell[place]):
            weight = (
                math.factorial(sum(cell))
                * math.factorial(len(cell) - sum(cell) - 1)
                / math.factorial(len(cell))
            )
            for seed, value in grid.values[_with(cell, place, 1)].items():
                shapley[seed] += weight * (value - grid.values[cell][seed])
        left_out = _difference(grid, [whole], [_with(whole, place, 0)])
        found.append(Share(knob, json.dumps(levels[1]), left_out, _from_zero(shapley, grid.interval)))
    return found


def _with(cell: Cell, place: int, level: int) -> Cell:
    return (*cell[:place], level, *cell[place + 1 :])


def _change(levels: Sequence[Any], level: int) -> str:
    return f"{json.dumps(levels[level])} instead of {json.dumps(levels[0])}"


def _difference(grid: Grid, cells: Sequence[Cell], others: Sequence[Cell]) -> Difference:
    return paired_difference(grid.mean(cells), grid.mean(others), grid.interval)


def _from_zero(by_seed: Mapping[int, float], interval: Interval) -> Difference:
    return paired_difference(by_seed, dict.fromkeys(by_seed, 0.0), interval)


# What a gap costs


def extra_tokens(arm: Mapping[int, float], baseline: Mapping[int, float]) -> float:
    """The share of tokens more that the arm needs to be where the baseline ends; curves are losses by tokens
    seen, in ascending order.

    An arm that ends worse stands where the baseline stood after fewer tokens, T': T / T' - 1. One that ends
    better was at the baseline's end after T'' of its own: T'' / T - 1, below 0. Between two evaluations the
    loss is taken to fall with the logarithm of the tokens. NaN where the curves never meet. Learning rates
    that decay at the end make it an upper bound: a shorter run would have decayed sooner.
    """
    if not arm or not baseline:
        return math.nan
    tokens = min(max(arm), max(baseline))
    ends = arm[max(arm)], baseline[max(baseline)]
    if ends[0] >= ends[1]:
        reached = _reaches(baseline, ends[0])
        return tokens / reached - 1
    return _reaches(arm, ends[1]) / tokens - 1


def _reaches(curve: Mapping[int, float], loss: float) -> float:
    """After how many tokens a curve is at this loss for the last time."""
    for (t0, y0), (t1, y1) in reversed(list(itertools.pairwise(sorted(curve.items())))):
        if y1 <= loss <= y0:
            return t1 if y0 == y1 else math.exp(math.log(t0) + (y0 - loss) / (y0 - y1) * math.log(t1 / t0))
    return math.nan


def front(points: Mapping[str, Sequence[float]], signs: Sequence[int]) -> list[str]:
    """The names of the points that no other equals or beats in every coordinate; a sign is 1 where less is
    better, -1 where more is."""
    signed = {
        name: [sign * value for sign, value in zip(signs, point, strict=True)]
        for name, point in points.items()
    }
    finite = {name: point for name, point in signed.items() if all(map(math.isfinite, point))}

    def beaten(point: list[float]) -> bool:
        return any(
            other != point and all(a <= b for a, b in zip(other, point, strict=True))
            for other in finite.values()
        )

    return [name for name, point in finite.items() if not beaten(point)]
