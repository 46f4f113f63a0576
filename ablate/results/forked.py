"""Damage in a forked design: its horizons, its positions, the error of the evaluation, and what follows.

The problem. A window's end shows the damage of one recipe over one stretch of training. It depends on where
the stretch lies and on how long it is: a window sees noise at once and bias late, so that a short one favours
rounding to nearest. And every seed is evaluated on the same text, whose error no number of seeds removes.

The idea. All comparisons are linear in the arms' values: gaps, contrasts, main effects. So each is computed
again with other values in place of the arms' own (`views`): those at one horizon, those of one position, the
growth of the damage per step, and those of each part of the validation data. From these follow the error of
the evaluation, which is added to that of the seeds, and verdicts that name no winner:

    depends on the horizon     resolved with opposite signs at two horizons, or the damage per step grows
    depends on the position    resolved with opposite signs at two positions
    this design cannot tell    equivalence, without a known-bad arm that the same design resolves

Seeds are the only replicates: values are means over positions within a seed before anything is compared.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ablate.experiment.schema import Design
from ablate.results.ledger import Ledger
from ablate.results.paired_stats import Difference, Verdict, p_value
from ablate.training.fork_design import EVALUATED, cell_of

if TYPE_CHECKING:
    from ablate.results.summary import ArmSummary

FEWEST_PARTS = 8
"""Fewest parts of the validation data from which the error of the evaluation is estimated."""
FIFTH = 0.2
"""Share of the known-bad arm's damage that counts as the smallest effect that matters."""
_ALPHA = 0.05

Values = Mapping[int, float]
"""Value of the metric by seed."""


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

    def at(self, window: int) -> dict[int, float]:
        """Return the means over positions at the end of windows of one length, by seed."""
        return _mean([values for cell, values in self.cells.items() if cell.window == window])

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


def _mean(tables: Sequence[Values]) -> dict[int, float]:
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


def design_of(ledger: Ledger) -> Design | None:
    """Return the design of a sweep's forks; None for full runs."""
    text = ledger.fact("design")
    return Design.model_validate_json(text, strict=False) if text else None


def readings_of(members: Iterable[tuple[int, Mapping[str, float]]], reading: str) -> Readings:
    """Return the readings of one arm.

    Args:
        members: seed and last values of each finished trial of the arm.
        reading: `loss` or `loss_bf16`.
    """
    cells: dict[Cell, dict[int, float]] = {}
    parts: dict[int, dict[int, float]] = {}
    for seed, values in members:
        for name, value in values.items():
            if (cell := cell_of(name)) and cell[2] == reading:
                cells.setdefault(Cell(*cell[:2]), {})[seed] = value
            elif name.startswith(f"{EVALUATED}/") and name.endswith(f"/{reading}"):
                parts.setdefault(int(name.split("/")[1]), {})[seed] = value
    return Readings(cells, parts)


def views(
    arms: Sequence["ArmSummary"],
    compute: Callable[[list["ArmSummary"]], Sequence[Difference]],
    count: int,
) -> list[Views | None]:
    """Return every comparison of some arms, seen in other ways; None for each if they are full runs.

    Args:
        arms: arms with their readings.
        compute: returns the comparisons of arms, always in the same order.
        count: number of comparisons.
    """
    readings = [arm.readings for arm in arms]
    known = [each for each in readings if each is not None and each.cells]
    if not known:
        return [None] * count
    windows = known[0].windows

    def computed(values: Callable[[Readings], Values]) -> Sequence[Difference]:
        return compute(
            [replace(arm, values=dict(values(arm.readings))) if arm.readings else arm for arm in arms]
        )

    horizons = {steps: computed(partial(Readings.at, window=steps)) for steps in windows}
    positions = {step: computed(partial(Readings.at_position, position=step)) for step in known[0].positions}
    growth = {steps: computed(partial(Readings.growth, window=steps)) for steps in windows[:-1]}
    parts = [computed(partial(Readings.of_part, number=number)) for number in sorted(known[0].parts)]
    return [
        Views(
            {steps: each[index] for steps, each in horizons.items()},
            {step: each[index] for step, each in positions.items()},
            {steps: each[index] for steps, each in growth.items()},
            _shared_error([each[index].mean for each in parts]),
        )
        for index in range(count)
    ]


def _shared_error(means: Sequence[float]) -> float:
    """Return the standard error of a mean over parts of the validation data."""
    if len(means) < FEWEST_PARTS or not all(map(math.isfinite, means)):
        return math.nan
    return float(np.std(means, ddof=1)) / math.sqrt(len(means))


def sharpened(difference: Difference, view: Views | None) -> Difference:
    """Return a difference whose interval includes the error of the evaluation."""
    if view is None or not view.error > 0:
        return difference
    return difference.with_shared_error(view.error)


def qualified(verdict: Verdict, view: Views | None, sees: bool) -> Verdict:
    """Return the verdict that the other views allow.

    Args:
        verdict: verdict at the longest window.
        view: the comparison, seen in other ways; None for full runs.
        sees: the design resolves its known-bad arm.
    """
    if view is None or verdict.kind not in ("better", "worse", "equivalent", "undecided"):
        return verdict
    if _opposed(view.positions.values()):
        return replace(verdict, kind="unjudged", reason="position", planned=None)
    if _opposed(view.horizons.values()) or _grows(view):
        return replace(verdict, kind="unjudged", reason="horizon", planned=None)
    if verdict.kind == "equivalent" and not sees:
        return replace(verdict, kind="unjudged", reason="blind", planned=None)
    return verdict


def _opposed(differences: Iterable[Difference]) -> bool:
    """Return True if two of some differences are resolved, with opposite signs."""
    signs = {math.copysign(1, each.mean) for each in differences if p_value(each) < _ALPHA}
    return len(signs) == 2


def _grows(view: Views) -> bool:
    """Return True if the damage per step is larger at the longest window than at a shorter one, and resolved
    to be."""
    longest = view.horizons[max(view.horizons)]
    return any(
        p_value(growth) < _ALPHA and (growth.mean > 0) == (longest.mean > 0)
        for growth in view.growth.values()
    )
