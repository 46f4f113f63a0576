"""Dose-response: what each value of an ordered knob does to the gap.

    cooldown    gap to bf16          change from 0        of the gap closed
    0           +0.0105 ±0.0070
    0.1         +0.0063 ±0.0051      -0.0042 ±0.0031      40 %

The share of the gap is given only where the gap of the first value is told from zero by its own interval: a
share of a gap that may be nothing is no number.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from ablate.results.attribution import Grid
from ablate.results.intervals import ALPHA
from ablate.results.number_text import interval
from ablate.results.page import Cell, Table, Text
from ablate.results.paired_stats import Difference, p_value, paired_difference
from ablate.results.summary import ArmSummary

_FEWEST = 3
"""Fewest values of a knob for a dose-response."""


@dataclass(frozen=True)
class Dose:
    """One value of an ordered knob."""

    value: float
    gap: Difference
    """Gap to the baseline, on average over the other knobs."""
    change: Difference | None
    """Its gap minus that of the first value; None for that one."""
    closed: float | None
    """Share of the first value's gap that it closes; None if that gap is not told from zero."""


def doses(grid: Grid | None, baselines: Mapping[str, ArmSummary]) -> dict[str, list[Dose]]:
    """Return the values of each ordered knob of a grid, ascending, with their gaps.

    Args:
        grid: arms that are a product of knobs' levels, or None.
        baselines: every arm by name.

    Returns:
        The doses by knob: of knobs with three numbers or more, if all arms have one baseline.
    """
    if grid is None or len({arm.baseline for arm in grid.arms}) > 1:
        return {}
    base = baselines.get(grid.arms[0].baseline or "") if grid.arms else None
    if base is None:
        return {}
    found = {}
    for knob, levels in grid.levels.items():
        numbers = [one for one in levels if isinstance(one, int | float) and not isinstance(one, bool)]
        if len(numbers) < max(_FEWEST, len(levels)):
            continue
        order = sorted(range(len(levels)), key=numbers.__getitem__)
        means = [grid.mean(grid.cells(**{knob: level})) for level in order]
        gaps = [paired_difference(mean, base.values, grid.interval) for mean in means]
        known = p_value(gaps[0]) < ALPHA
        found[knob] = [
            Dose(
                float(numbers[level]),
                gap,
                paired_difference(mean, means[0], grid.interval) if place else None,
                1 - gap.mean / gaps[0].mean if place and known else None,
            )
            for place, (level, mean, gap) in enumerate(zip(order, means, gaps, strict=True))
        ]
    return found


def parts(found: Mapping[str, list[Dose]]) -> list[Table | Text]:
    """Return a table and a sentence for each ordered knob.

    Args:
        found: doses by knob.
    """
    shown: list[Table | Text] = []
    for knob, values in found.items():
        rows: list[dict[str, Cell]] = [
            {
                knob: (f"{dose.value:g}", dose.value),
                "gap to baseline": (interval(dose.gap), dose.gap.mean),
                f"change from {values[0].value:g}": (interval(dose.change), dose.change.mean)
                if dose.change
                else "",
                "of the gap closed": (f"{100 * dose.closed:.0f} %", dose.closed)
                if dose.closed is not None
                else "",
            }
            for dose in values
        ]
        caption = (
            "Intervals are not corrected. Share: of the mean gap of the first value; its own error is not in"
            " it."
        )
        shown += [Text(sentence(knob, values)), Table(f"doses-{knob.replace('.', '-')}", rows, caption)]
    return shown


def sentence(knob: str, values: list[Dose]) -> str:
    """Return what the doses say in a sentence.

    Args:
        knob: name of the knob.
        values: its doses, ascending.
    """
    first, last = values[0], values[-1]
    if last.closed is None:
        return (
            f"The gap at {knob} {first.value:g}, {interval(first.gap)}, is not told from zero, so that no"
            " share of it can be closed."
        )
    steps = [later.gap.mean - earlier.gap.mean for earlier, later in pairwise(values)]
    steady = "" if all(step <= 0 for step in steps) or all(step >= 0 for step in steps) else ", not steadily"
    verb = "closes" if last.closed >= 0 else "widens"
    told = p_value(last.change) < ALPHA if last.change else False
    doubt = "" if told else "; that change is not told from zero"
    share = f"{abs(100 * last.closed):.0f} %"
    return f"{knob} {last.value:g} {verb} {share} of the gap of {knob} {first.value:g}{steady}{doubt}."
