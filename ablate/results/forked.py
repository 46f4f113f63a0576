"""Damage in a forked design: its horizons, its positions, the error of the evaluation, and what follows.

The problem. A window's end shows the damage of one recipe over one stretch of training. It depends on where
the stretch lies and on how long it is: a window sees noise at once and bias late, so that a short one favours
rounding to nearest. And every seed is evaluated on the same text, whose error no number of seeds removes.

The idea. All comparisons are linear in the arms' values: gaps, contrasts, main effects. So each is computed
again with other values in place of the arms' own (`views`): those at one horizon, those of one position, the
growth of the damage per step, and those of each part of the validation data. From these follow the error of
the evaluation, which is added to that of the seeds, and verdicts that name no winner:

    depends on the horizon     resolved with opposite signs at two horizons, or the damage per step grows
    depends on the position    resolved with opposite signs at two positions, or a winner that the spread
                               over positions may have made
    this design cannot tell    equivalence, without a known-bad arm that the same design resolves

Seeds are the only replicates: values are means over positions within a seed before anything is compared.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, Self, TypeVar

import numpy as np
from scipy import special

from ablate.experiment.schema import START, Design
from ablate.results.intervals import ALPHA
from ablate.results.paired_stats import Difference, Reason, Verdict, p_value, paired_difference
from ablate.training.metric_names import DAMAGE, cell_of, part_of

FEWEST_PARTS = 8
"""Fewest parts of the validation data from which the error of the evaluation is estimated."""
FIFTH = 0.2
"""Share of the known-bad arm's damage that counts as the smallest effect that matters."""

DIFFERENCES = {"gap": "gap to baseline", DAMAGE: "damage"}
"""Heading of a column of arms minus their baselines: of full runs, and in a forked design."""

Values = Mapping[int, float]
"""Value of the metric by seed."""


class Read(Protocol):
    """Arm of a sweep as `views` needs it."""

    @property
    def readings(self) -> "Readings | None": ...
    def with_values(self, values: Values) -> Self: ...


A = TypeVar("A", bound=Read)


class Cell(NamedTuple):
    """A position and a length of a window, both in steps."""

    position: int
    window: int


@dataclass(frozen=True)
class Readings:
    """Values of one arm of a forked design beside its mean over positions at the longest window."""

    cells: Mapping[Cell, Values]
    parts: Mapping[int, Values]
    """Values of each part of the validation data, means over positions at the longest window."""

    @property
    def windows(self) -> list[int]:
        """Lengths of the windows, ascending."""
        return sorted({cell.window for cell in self.cells})

    @property
    def positions(self) -> list[int]:
        """Positions of the windows, ascending."""
        return sorted({cell.position for cell in self.cells})

    @property
    def shape(self) -> tuple[list[int], list[int]]:
        """Positions and lengths of the windows."""
        return self.positions, self.windows

    def at(self, window: int) -> dict[int, float]:
        """Return the means over positions at the end of windows of one length, by seed."""
        return mean_by_seed([values for cell, values in self.cells.items() if cell.window == window])

    def at_position(self, position: int) -> Values:
        """Return the values at the end of the longest window of one position, by seed."""
        return self.cells.get(Cell(position, self.windows[-1]), {})

    def growth(self, window: int) -> dict[int, float]:
        """Return the values per step at the longest window minus those at a shorter one, by seed."""
        longest = self.windows[-1]
        late, early = self.at(longest), self.at(window)
        return {seed: late[seed] / longest - early[seed] / window for seed in late.keys() & early.keys()}

    def of_part(self, number: int) -> Values:
        """Return the values of one part of the validation data, by seed."""
        return self.parts.get(number, {})


def mean_by_seed(tables: Sequence[Values]) -> dict[int, float]:
    """Return the means of values by seed; seeds that a table lacks are left out."""
    seeds = set.intersection(*(set(table) for table in tables)) if tables else set()
    return {seed: math.fsum(table[seed] for table in tables) / len(tables) for seed in sorted(seeds)}


@dataclass(frozen=True)
class Views:
    """One comparison of a forked design, seen in other ways."""

    horizons: Mapping[int, Difference]
    """By length of the window, in steps, as means over positions."""
    positions: Mapping[int, Difference]
    """By position, at the longest window."""
    growth: Mapping[int, Difference]
    """Damage per step at the longest window minus that at a shorter one, by the shorter one."""
    error: float
    """Standard error of the comparison that all seeds share, since they are evaluated on the same data.

    NaN if there are too few parts of the data to estimate it."""


def difference_word(arms: Iterable[A]) -> str:
    """Return the word for an arm minus its baseline: `gap` of full runs, `damage` in a forked design."""
    return DAMAGE if any(arm.readings and arm.readings.cells for arm in arms) else "gap"


def estimand(design: Design, arms: Iterable[A]) -> str:
    """Return a sentence that says what damage is an estimate of."""
    windows = next((arm.readings.windows for arm in arms if arm.readings and arm.readings.cells), [0])
    past = "the starting weights" if design.trunk == START else f"a {design.trunk} checkpoint"
    rate = ", with a learning rate that falls to zero" if design.anneal else ""
    return (
        f"Damage is the extra loss after {windows[-1]} steps from {past}{rate}. It is the harm of a recipe"
        " given that past, not the gap of full runs. So few steps show noise at once and bias late, which"
        " favours rounding to nearest. Do not decide rounding or rotation by them alone."
    )


def readings_of(members: Iterable[tuple[int, Mapping[str, float]]], reading: str) -> Readings:
    """Return the readings of one arm, by seed and last values of each of its finished trials. `reading`: name
    of the metric among the readings of a window."""
    cells: dict[Cell, dict[int, float]] = {}
    parts: dict[int, dict[int, float]] = {}
    for seed, values in members:
        for name, value in values.items():
            if (cell := cell_of(name)) and cell[2] == reading:
                cells.setdefault(Cell(*cell[:2]), {})[seed] = value
            elif (part := part_of(name)) and part[1] == reading:
                parts.setdefault(part[0], {})[seed] = value
    return Readings(cells, parts)


def views(
    arms: Sequence[A],
    compute: Callable[[list[A]], Sequence[Difference]],
    count: int,
) -> list[Views | None]:
    """Return every comparison of some arms, seen in other ways; None for each if they are full runs.
    `compute` returns the `count` comparisons of arms, always in the same order."""
    readings = [arm.readings for arm in arms]
    known = [each for each in readings if each is not None and each.cells]
    if not known:
        return [None] * count
    windows = known[0].windows

    def computed(values: Callable[[Readings], Values]) -> Sequence[Difference]:
        """Return the comparisons by other values; an arm without a finished trial, or with other windows, has
        none."""
        read = [(arm, arm.readings) for arm in arms]
        found = compute(
            [
                arm.with_values(values(own) if own and own.cells and own.shape == known[0].shape else {})
                for arm, own in read
            ]
        )
        return found or [paired_difference({}, {})] * count

    horizons = {steps: computed(partial(Readings.at, window=steps)) for steps in windows}
    positions = {step: computed(partial(Readings.at_position, position=step)) for step in known[0].positions}
    growth = {steps: computed(partial(Readings.growth, window=steps)) for steps in windows[:-1]}
    parts = [computed(partial(Readings.of_part, number=number)) for number in sorted(known[0].parts)]
    return [
        _sharpened(
            Views(
                {steps: each[index] for steps, each in horizons.items()},
                {step: each[index] for step, each in positions.items()},
                {steps: each[index] for steps, each in growth.items()},
                shared_error([each[index].values for each in parts]),
            )
        )
        for index in range(count)
    ]


def shared_error(parts: Sequence[Sequence[float]]) -> float:
    """Return the standard error of a mean over seeds and parts of the validation data that the choice of the
    data alone causes, by differences [parts, seeds]; NaN if there are too few parts, or seeds that a part
    lacks.

    The variance of the parts' means has noise of single seeds on single parts in it. Seeds' own spread counts
    that already, so it is taken off: with the residual mean square of the two-way table, divided by the
    seeds.
    """
    if len(parts) < FEWEST_PARTS or len({len(each) for each in parts}) > 1 or not parts[0]:
        return math.nan
    table = np.array(parts)
    means = table.mean(axis=1)
    variance = float(np.var(means, ddof=1))
    seeds = table.shape[1]
    if seeds > 1:
        rest = table - means[:, None] - table.mean(axis=0) + table.mean()
        residual = float(np.sum(rest**2)) / ((len(parts) - 1) * (seeds - 1))
        variance = max(0.0, variance - residual / seeds)
    return math.sqrt(variance / len(parts))


def _sharpened(view: Views) -> Views:
    """Return the views with the error of the evaluation in their intervals. It is known at the longest
    windows, as means over positions. A shorter window's is taken to be as large, one position's larger by the
    root of their number, and those of two windows independent: upper bounds."""
    if not view.error > 0:
        return view
    longest = max(view.horizons)
    one = view.error * math.sqrt(len(view.positions))
    return replace(
        view,
        horizons={steps: each.with_shared_error(view.error) for steps, each in view.horizons.items()},
        positions={step: each.with_shared_error(one) for step, each in view.positions.items()},
        growth={
            steps: each.with_shared_error(math.hypot(view.error / longest, view.error / steps))
            for steps, each in view.growth.items()
        },
    )


def sharpened(difference: Difference, view: Views | None) -> Difference:
    """Return a difference whose interval includes the error of the evaluation."""
    if view is None or not view.error > 0:
        return difference
    return difference.with_shared_error(view.error)


def qualified(verdict: Verdict, view: Views | None, sees: bool) -> Verdict:
    """Return what the other views (None: full runs) leave of a verdict at the longest window. `sees`: the
    design resolves its known-bad arm."""
    if view is None or verdict.kind == "same" or verdict.reason:
        return verdict
    reason: Reason | None = None
    if any(not one.pairs for one in (*view.horizons.values(), *view.positions.values())):
        reason = "windows"
    elif _opposed(view.positions) or (verdict.resolved and not _stands(view.positions)):
        reason = "position"
    elif _opposed(view.horizons) or (verdict.resolved and _grows(view)):
        reason = "horizon"
    elif verdict.kind == "equivalent" and not sees:
        reason = "blind"
    return replace(verdict, kind="unjudged", reason=reason, planned=None) if reason else verdict


def _opposed(differences: Mapping[int, Difference]) -> bool:
    """Return True if two of some differences are resolved, with opposite signs. The 5 % are divided by their
    number (Bonferroni)."""
    alpha = ALPHA / len(differences)
    return len({math.copysign(1, each.mean) for each in differences.values() if p_value(each) < alpha}) == 2


def _stands(positions: Mapping[int, Difference]) -> bool:
    """Return True if a resolved effect cannot come from the choice of the positions.

    True if it is resolved with one sign at every position, or if its mean is resolved as one over positions
    that are drawn: the variance of the mean then has that between positions in it, with Satterthwaite's
    degrees of freedom. A single position says nothing about others: True. Effects that are far larger than
    the noise at each of a few positions pass with one sign by chance, so the answer names its positions.
    """
    each = list(positions.values())
    if len(each) < 2 or len({one.pairs for one in each}) > 1 or each[0].pairs < 2:
        return True
    if all(p_value(one) < ALPHA for one in each) and len({one.mean > 0 for one in each}) == 1:
        return True
    table = np.array([one.values for one in each])
    count, seeds = table.shape
    of_positions = float(np.var(table.mean(axis=1), ddof=1)) / count  # with noise of seeds: an upper bound
    of_seeds = float(np.var(table.mean(axis=0), ddof=1)) / seeds
    total = of_seeds + of_positions
    if not total > 0:
        return True
    free = total**2 / (of_seeds**2 / (seeds - 1) + of_positions**2 / (count - 1))
    return 2 * float(special.stdtr(free, -abs(table.mean()) / math.sqrt(total))) < ALPHA


def _grows(view: Views) -> bool:
    """Return True if the damage per step is resolved to be larger at the longest window than at a shorter
    one. The 5 % are divided by the number of shorter ones (Bonferroni)."""
    longest = view.horizons[max(view.horizons)]
    return any(
        p_value(growth) < ALPHA / len(view.growth) and (growth.mean > 0) == (longest.mean > 0)
        for growth in view.growth.values()
    )
