"""Order of recipes by the errors of their operands, and what it does not decide: `ablate rank`.

    compare(first, second)    # Order.FIRST: the first has the lower error, and its bias is not higher

The rule was fixed before its accuracy was measured (benchmarks/rank_evidence.py). Recipes stand in groups by
the passes that they quantise, forward, backward or both: an error of the forward pass is in the model that is
evaluated, one of the backward pass only on the way there. Within a group, two recipes are compared layer by
layer. A difference counts if its 95 % t interval over layers excludes 0 and it is at least `MARGIN` of the
smaller error. The rounding that errs less may be the one whose error does not average out, so a lower error
with a higher bias decides nothing. Neither does a rotation of dgrad or wgrad alone: it changes the shape of
an error more than its sum.
"""

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ablate.recipes.recipe import Recipe
from ablate.results.intervals import SINGLE_LOOK
from ablate.training.operand_errors import RecipeErrors

MARGIN = 0.05
"""Least difference that counts, in parts of the smaller error."""


class Order(StrEnum):
    """Relation of two recipes."""

    FIRST = "first"
    """The first has the lower error, and its bias is not higher."""
    SECOND = "second"
    CLOSE = "close"
    """Too close to call."""
    BIAS = "bias"
    """One has the lower error and the higher bias: training decides."""
    ROTATION = "rotation"
    """They differ in the rotation of a gradient's product alone."""
    GROUP = "group"
    """They quantise other passes."""

    @property
    def decided(self) -> bool:
        """True if one comes before the other."""
        return self in (Order.FIRST, Order.SECOND)


def compare(first: RecipeErrors, second: RecipeErrors, margin: float = MARGIN) -> Order:
    """Return the relation of two recipes that were measured on the same layers and batches.

    Args:
        first: one recipe's errors.
        second: the other's.
        margin: least difference that counts, in parts of the smaller error.
    """
    if first.passes != second.passes or first.passes == (False, False):
        return Order.GROUP
    if _unrotated(first.recipe) == _unrotated(second.recipe):
        return Order.CLOSE if first.recipe == second.recipe else Order.ROTATION
    least = margin * min(first.by_layer().mean(), second.by_layer().mean())
    error = _sign(first.by_layer() - second.by_layer(), least)
    if not error:
        return Order.CLOSE
    bias = _sign(first.by_layer(bias=True) - second.by_layer(bias=True), least)
    if error * bias < 0:
        return Order.BIAS
    return Order.FIRST if error < 0 else Order.SECOND


def _sign(differences: NDArray[np.float64], least: float) -> int:
    """Return the sign of the mean difference over layers; 0 if it is not apart from 0 or below `least`."""
    mean, half = differences.mean(), 0.0
    if len(differences) > 1:
        half = SINGLE_LOOK.half_width(len(differences)) * differences.std(ddof=1)
    return int(np.sign(mean)) if abs(mean) > half and abs(mean) >= least else 0


def _unrotated(recipe: Recipe) -> Recipe:
    """Return a recipe without the rotations of its backward products."""
    changed = {
        name: getattr(recipe, name).model_copy(update={"hadamard": None}) for name in ("dgrad", "wgrad")
    }
    return recipe.model_copy(update=changed)


def groups(measured: Sequence[RecipeErrors]) -> list[list[int]]:
    """Return the recipes' numbers by group, each from the lowest error up: both passes, forward, backward,
    nothing quantised."""
    order = sorted(range(len(measured)), key=lambda number: measured[number].by_layer().mean())
    kinds = ((True, True), (True, False), (False, True), (False, False))
    made = ([number for number in order if measured[number].passes == kind] for kind in kinds)
    return [group for group in made if group]
