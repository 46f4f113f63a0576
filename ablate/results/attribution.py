"""Contribution of each knob: main effects and interactions of a grid, leave-one-out differences and Shapley
shares; the cost of a gap in tokens; and the arms that no other beats in every metric.

Everything is computed by seed first, so each number is a mean of paired differences with an interval.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from ablate.files import Json
from ablate.results.contrasts import is_switch
from ablate.results.intervals import Interval
from ablate.results.paired_stats import Difference, paired_difference
from ablate.results.summary import ArmSummary

_MOST_COMPONENTS = 8
"""Largest number of components that Shapley shares are computed for: they need every subset."""

Cell = tuple[int, ...]
"""A point of a grid: for each knob, the index of its level."""


@dataclass(frozen=True)
class Grid:
    """Arms that are a product of knobs' levels, with the seeds that all of them finished."""

    levels: Mapping[str, tuple[Json, ...]]
    """Values of each knob, the reference first: false for a switch, else the value that the file lists
    first."""
    values: Mapping[Cell, Mapping[int, float]]
    """Value of the metric by point and seed."""
    interval: Interval
    left_out: tuple[int, ...]
    """Seeds that some arm did not finish, or finished without a finite value."""
    margin: float | None = None
    """Smallest effect that matters, in the metric's unit; the smallest over the arms if it is a share of
    several baselines."""
    arms: tuple[ArmSummary, ...] = ()
    """Summaries of the arms."""

    def cells(self, **held: int) -> list[Cell]:
        """Return the points at which the named knobs have the levels with these indices."""
        groups = [self._at.get((knob, level), set()) for knob, level in held.items()]
        first, *others = sorted(groups, key=len) or [self.values.keys()]
        return [cell for cell in first if all(cell in group for group in others)]

    @cached_property
    def _at(self) -> Mapping[tuple[str, int], Set[Cell]]:
        """Points at each level of each knob, in the order of `values`."""
        points: dict[tuple[str, int], dict[Cell, None]] = {}
        for cell in self.values:
            for at in zip(self.levels, cell, strict=True):
                points.setdefault(at, {})[cell] = None
        return {at: cells.keys() for at, cells in points.items()}

    @cached_property
    def whole(self) -> bool:
        """True if all values are counts."""
        return all(value.is_integer() for values in self.values.values() for value in values.values())

    def mean(self, cells: Sequence[Cell]) -> dict[int, float]:
        """Return the mean over these points, by seed."""
        seeds = next(iter(self.values.values()))
        return {seed: math.fsum(self.values[cell][seed] for cell in cells) / len(cells) for seed in seeds}


@dataclass(frozen=True)
class Effect:
    """Main effect of one knob, on average over the others, or interaction of two knobs."""

    knobs: tuple[str, ...]
    change: str
    effect: Difference
    margin: float | None = None
    """Smallest effect that matters, in the metric's unit."""
    given: Mapping[str, Json] = field(default_factory=dict)
    """Values at which other knobs are held."""
    level: str = ""
    """The knob's value as text; empty for two arms and for interactions."""


def grid(arms: Sequence[ArmSummary]) -> Grid | None:
    """Return the listed arms as a complete product of the levels of their knobs, of those with two levels or
    more. None if the arms set different knobs, if a combination of levels is missing, or if no seed is
    finished on all arms."""
    compared = [arm for arm in arms if arm.baseline is not None and arm.role == "listed" and arm.knobs]
    if not compared or len({frozenset(arm.knobs) for arm in compared}) > 1:
        return None
    levels = {
        knob: _levels([arm.knobs[knob] for arm in compared], is_switch(arms, knob))
        for knob in compared[0].knobs
    }
    levels = {knob: values for knob, values in levels.items() if len(values) > 1}
    points = {
        tuple(values.index(arm.knobs[knob]) for knob, values in levels.items()): arm for arm in compared
    }
    if not levels or len(points) != len(compared) or len(points) != math.prod(map(len, levels.values())):
        return None
    seeds = set.intersection(*(set(arm.values) for arm in points.values()))
    wanted = set.union(*(set(arm.given) for arm in points.values()))
    if not seeds:
        return None
    values = {cell: {seed: arm.values[seed] for seed in sorted(seeds)} for cell, arm in points.items()}
    margin = min((arm.margin for arm in compared if arm.margin is not None), default=None)
    return Grid(levels, values, compared[0].interval, tuple(sorted(wanted - seeds)), margin, tuple(compared))


def _levels(values: Sequence[Json], switch: bool) -> tuple[Json, ...]:
    """Return the distinct values in their order; those of a switch false first."""
    distinct = {json.dumps(value): value for value in values}.values()
    return tuple(sorted(distinct, key=bool)) if switch else tuple(distinct)


def main_effects(grid: Grid) -> list[Effect]:
    """Return the effect of each level of each knob against the knob's reference, averaged over other
    knobs."""
    return [effect for knob in grid.levels for effect in held_effects(grid, knob, {})]


def held_effects(grid: Grid, knob: str, given: Mapping[str, Json]) -> list[Effect]:
    """Return the effect of each level of one knob against its reference, with other knobs held at the values
    of `given`, and averaged over the rest."""
    texts = {name: [json.dumps(level) for level in levels] for name, levels in grid.levels.items()}
    held = {name: texts[name].index(json.dumps(value)) for name, value in given.items() if name in texts}
    shown, effects = _named(grid) or grid.levels.get(knob, ()), []
    for level in range(1, len(grid.levels.get(knob, ()))):
        cells = grid.cells(**held, **{knob: level})
        effect = _difference(grid, cells, grid.cells(**held, **{knob: 0}))
        unchanged = _unchanged(grid, cells, [*texts].index(knob))
        effect = replace(effect, whole=grid.whole, runs_equal=unchanged)
        change = _change(shown, level)
        effects.append(Effect((knob,), change, effect, grid.margin, given, shown_value(shown[level])))
    return effects


def _named(grid: Grid) -> list[Json]:
    """Return the names of one knob's arms in place of levels that are lists or mappings; else nothing."""
    levels = next(iter(grid.levels.values()))
    if len(grid.levels) > 1 or not any(isinstance(level, list | dict) for level in levels):
        return []
    (knob,) = grid.levels
    names = {json.dumps(arm.knobs[knob]): arm.name for arm in grid.arms}
    return [names[json.dumps(level)] for level in levels]


def _unchanged(grid: Grid, cells: Sequence[Cell], position: int) -> bool:
    """Return True if every run of these cells equals the run at the reference of one knob, seed by seed."""
    return all(grid.values[cell] == grid.values[_with(cell, position, 0)] for cell in cells)


def interactions(grid: Grid) -> list[Effect]:
    """Return the interaction of every two knobs: the difference between the effects of one knob at two levels
    of the other, averaged over the remaining knobs."""
    effects = []
    for (i, (first, ones)), (j, (second, others)) in itertools.combinations(
        enumerate(grid.levels.items()), 2
    ):
        for one, other in itertools.product(range(1, len(ones)), range(1, len(others))):
            both, neither, alone, rest = (
                grid.mean(grid.cells(**{first: a, second: b}))
                for a, b in ((one, other), (0, 0), (one, 0), (0, other))
            )
            joint, apart = (
                {seed: x[seed] + y[seed] for seed in both} for x, y in ((both, neither), (alone, rest))
            )
            change = f"{_change(ones, one)}; {_change(others, other)}"
            firsts = [cell for b in (0, other) for cell in grid.cells(**{first: one, second: b})]
            seconds = [cell for a in (0, one) for cell in grid.cells(**{first: a, second: other})]
            unchanged = _unchanged(grid, firsts, i) or _unchanged(grid, seconds, j)
            # One side in place of the other if unchanged, without the sums' rounding.
            effect = paired_difference(joint, joint if unchanged else apart, grid.interval)
            effect = replace(effect, whole=grid.whole, runs_equal=unchanged)
            effects.append(Effect((first, second), change, effect, grid.margin))
    return effects


@dataclass(frozen=True)
class Share:
    """Contribution of one component of a recipe."""

    knob: str
    on: str
    """Value of the knob with the component, as JSON."""
    left_out: Difference
    """Whole recipe minus the recipe without the component."""
    shapley: Difference
    """Mean contribution over every order in which the components could be added. The shares of all components
    add up to the effect of the whole recipe."""


def shares(grid: Grid) -> list[Share]:
    """Return leave-one-out differences and Shapley shares of a grid's components, one for each knob. A
    component is present at true, or at the level that the file lists second. Empty unless there are 2 to 8
    knobs, each with two levels."""
    switches = all(len(levels) == 2 for levels in grid.levels.values())
    if not switches or not 1 < len(grid.levels) <= _MOST_COMPONENTS:
        return []
    whole = (1,) * len(grid.levels)
    contributions = []
    for position, (knob, levels) in enumerate(grid.levels.items()):
        shapley = dict.fromkeys(grid.mean([whole]), 0.0)
        for cell in (cell for cell in grid.values if not cell[position]):
            orders = math.factorial(sum(cell)) * math.factorial(len(cell) - sum(cell) - 1)
            weight = orders / math.factorial(len(cell))
            for seed, value in grid.values[_with(cell, position, 1)].items():
                shapley[seed] += weight * (value - grid.values[cell][seed])
        left_out = _difference(grid, [whole], [_with(whole, position, 0)])
        mean = paired_difference(shapley, dict.fromkeys(shapley, 0.0), grid.interval)
        contributions.append(Share(knob, json.dumps(levels[1]), left_out, mean))
    return contributions


def _with(cell: Cell, position: int, level: int) -> Cell:
    return (*cell[:position], level, *cell[position + 1 :])


def shown_value(value: Json) -> str:
    """Return a value as a sentence has it: a text as it is, else JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _change(levels: Sequence[Json], level: int) -> str:
    return f"{json.dumps(levels[level])} instead of {json.dumps(levels[0])}"


def _difference(grid: Grid, cells: Sequence[Cell], others: Sequence[Cell]) -> Difference:
    return paired_difference(grid.mean(cells), grid.mean(others), grid.interval)


# Cost of a gap, and fronts


def extra_tokens(arm: Mapping[int, float], baseline: Mapping[int, float]) -> float:
    """Return the additional tokens that an arm needs to reach the loss at which its baseline ends, as a
    share: 0.1 for 10 % more; NaN if the curves, loss by tokens seen in ascending order, never reach the same
    loss. Points at 0 tokens are left out, since they have no logarithm.

    The curve of the arm that ends better is read twice: the share is its tokens at the baseline's last loss
    over those at the arm's, minus 1, which is negative if the arm ends better. Both are read where the curve
    last falls to a loss, also its own last one, so that an end that rises alike in both is no difference.
    Between two evaluations the loss is assumed to fall with the logarithm of the tokens. If the learning rate
    decays at the end, the share is an upper bound: a shorter run would have decayed sooner.
    """
    arm, baseline = ({t: loss for t, loss in curve.items() if t > 0} for curve in (arm, baseline))
    if not arm or not baseline:
        return math.nan
    own, other = arm[max(arm)], baseline[max(baseline)]
    better = arm if own < other else baseline
    return _reaches(better, other) / _reaches(better, own) - 1


def _reaches(curve: Mapping[int, float], loss: float) -> float:
    """Return the number of tokens after which a curve falls to this loss for the last time; NaN if it never
    does."""
    for (t0, y0), (t1, y1) in reversed(list(itertools.pairwise(sorted(curve.items())))):
        if y1 <= loss <= y0:
            return t1 if y0 == y1 else math.exp(math.log(t0) + (y0 - loss) / (y0 - y1) * math.log(t1 / t0))
    return math.nan


def front(points: Mapping[str, Sequence[float]], signs: Sequence[int]) -> list[str]:
    """Return the names of the points that no other equals or beats in every coordinate. `signs`: 1 for a
    coordinate of which less is better, -1 for more. Points with a coordinate that is not finite are left
    out."""
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
