"""Effects of a search's knobs, with intervals.

They are those of one least-squares fit of the arms' values on all knobs at once: what a value does
while the others stay. A sampler that learns looks where it has found good arms, so the arms are not a random
sample, and a fit of main effects has no interaction; a grid of the few knobs that seem to matter is the
comparison that holds. A fit of all pairs besides covers where it has the arms for it and no three knobs
interact, and else less than this one (experiments/LOG.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from ablate.files import Json
from ablate.results.intervals import ALPHA
from ablate.results.summary import ArmSummary

FEWEST_FREE = 5
"""Fewest degrees of freedom of a fit whose effects are shown."""
_WIDE = 4.0
"""A positive knob whose largest value is this many times its smallest acts by its logarithm."""


@dataclass(frozen=True)
class KnobEffect:
    """Effect of one knob in a search."""

    knob: str
    change: str
    """Change of the knob: `true instead of false`, `per doubling`, `from 0.1 to 0.5`."""
    mean: float
    """Change of the metric."""
    half: float
    """Half of its 95 % t interval."""
    p: float


_Column = tuple[str, list[float]]
"""One column of the fit: the change of its knob, and its values in units of that change."""


def knob_effects(arms: Sequence[ArmSummary]) -> list[KnobEffect]:
    """Return the effects of a search's knobs, those that are surest first: one for each number, and for each
    value of other knobs but the most frequent. Searched arms with a value are fitted; none if they do not
    tell the knobs apart with `FEWEST_FREE` degrees of freedom to spare."""
    searched = [arm for arm in arms if arm.role == "searched" and arm.values and not arm.pruned]
    columns = [
        (knob, *column)
        for knob in dict.fromkeys(knob for arm in searched for knob in arm.knobs)
        for column in _columns([arm.knobs.get(knob) for arm in searched])
    ]
    free = len(searched) - len(columns) - 1
    if not columns or free < FEWEST_FREE:
        return []
    design = np.column_stack([np.ones(len(searched)), *(own for *_, own in columns)])
    if np.linalg.matrix_rank(design) < design.shape[1]:
        return []
    values = np.array([arm.mean for arm in searched])
    inverse = np.linalg.inv(design.T @ design)
    coefficients = inverse @ design.T @ values
    residual = values - design @ coefficients
    errors = np.sqrt(np.diag(inverse) * (residual @ residual) / free)
    quantile = float(special.stdtrit(free, 1 - ALPHA / 2))
    found = []
    for (knob, change, _), mean, error in zip(columns, coefficients[1:], errors[1:], strict=True):
        t = abs(mean) / error if error > 0 else math.inf
        p = 2 * float(special.stdtr(free, -t))
        found.append(KnobEffect(knob, change, float(mean), quantile * float(error), p))
    return sorted(found, key=lambda effect: effect.p)


def _columns(values: Sequence[Json]) -> list[_Column]:
    """Return the columns of a knob; none if it has one value only."""
    numbers = [float(one) for one in values if isinstance(one, int | float) and not isinstance(one, bool)]
    distinct = sorted(set(numbers))
    if len(numbers) == len(values) and len(distinct) > 2:
        low, high = distinct[0], distinct[-1]
        if low > 0 and high >= _WIDE * low:
            return [("per doubling", [math.log2(one) for one in numbers])]
        return [(f"from {low:g} to {high:g}", [(one - low) / (high - low) for one in numbers])]
    texts = [str(one).lower() if isinstance(one, bool) or one is None else str(one) for one in values]
    usual, *others = sorted(set(texts), key=lambda text: (-texts.count(text), text))
    if {usual, *others} == {"true", "false"}:  # the usual question is what the part does
        usual, others = "false", ["true"]
    return [(f"{one} instead of {usual}", [float(text == one) for text in texts]) for one in others]
