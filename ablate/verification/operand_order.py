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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ablate.recipes.recipe import Recipe
from ablate.results.intervals import SINGLE_LOOK
from ablate.training.operand_errors import RecipeErrors

MARGIN = 0.05
"""Least difference that counts, in parts of the smaller error."""
FEWEST = 4
"""Fewest layers over which two recipes are ordered: over two or three, an interval of bias, which is noisy,
misses that stochastic rounding has less of it."""


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
    """Return the relation of two recipes that were measured on the same layers and batches. `margin`: least
    difference that counts, in parts of the smaller error."""
    if first.passes != second.passes or first.passes == (False, False):
        return Order.GROUP
    turns = {"dgrad.hadamard": None, "wgrad.hadamard": None}
    if first.recipe.changed(turns) == second.recipe.changed(turns):
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
    """Return the sign of the mean difference over layers; 0 if the difference is not apart from 0, is below
    `least`, or is of fewer than `FEWEST` layers."""
    if len(differences) < FEWEST:
        return 0
    mean = differences.mean()
    half = SINGLE_LOOK.half_width(len(differences)) * differences.std(ddof=1)
    return int(np.sign(mean)) if abs(mean) > half and abs(mean) >= least else 0


GROUPS = {
    (True, True): "forward and backward pass",
    (True, False): "forward pass alone",
    (False, True): "backward pass alone",
    (False, False): "nothing quantised",
}
"""Names of the groups, by the passes that are quantised."""


@dataclass(frozen=True)
class Ranking:
    """Recipes with their errors, and the order of each pair."""

    measured: Mapping[str, RecipeErrors]
    """By name of the recipe."""

    @property
    def groups(self) -> dict[str, list[str]]:
        """Names of the recipes of each group that has any, from the lowest error up."""
        order = sorted(self.measured, key=lambda name: self.measured[name].by_layer().mean())
        made: dict[str, list[str]] = {title: [] for title in GROUPS.values()}
        for name in order:
            made[GROUPS[self.measured[name].passes]].append(name)
        return {title: names for title, names in made.items() if names}

    def pairs(self, names: Sequence[str]) -> dict[tuple[str, str], Order]:
        return {
            (first, second): compare(self.measured[first], self.measured[second])
            for first, second in combinations(names, 2)
        }

    @property
    def before(self) -> list[tuple[Recipe, Recipe]]:
        """The pairs of recipes that are ordered, the first of them before the second."""
        orders = {pair: order for pair, order in self.pairs([*self.measured]).items() if order.decided}
        turned = (pair if order is Order.FIRST else pair[::-1] for pair, order in orders.items())
        return [(self.measured[a].recipe, self.measured[b].recipe) for a, b in turned]

    def document(self) -> dict[str, object]:
        recipes = [
            {
                "recipe": name,
                "group": title,
                "error": errors.by_layer().mean().item(),
                **errors.by_product(),
                "bias": errors.by_layer(bias=True).mean().item(),
                "draws": bool((errors.bias != errors.error).any()),
                "four_bits": errors.four_bits,
            }
            for title, names in self.groups.items()
            for name in names
            for errors in [self.measured[name]]
        ]
        pairs = [
            {"first": first, "second": second, "order": str(order)}
            for names in self.groups.values()
            for (first, second), order in self.pairs(names).items()
        ]
        accuracy = {where: own._asdict() for where, own in MEASURED.items()}
        return {"recipes": recipes, "pairs": pairs, "accuracy": accuracy}


class Accuracy(NamedTuple):
    """Count of pairs of published runs on which the rule's order was that of training."""

    pairs: int
    decided: int
    right: int
    low: float
    """Lower end of the 95 % interval of the share of right pairs, over schemes or publications."""
    high: float

    def __str__(self) -> str:
        share = f"{self.right / self.decided:.2f}, {self.low:.2f} to {self.high:.2f}"
        return (
            f"{self.decided} of {self.pairs} pairs, {self.right} of these right ({share}), and refused"
            f" {self.pairs - self.decided}"
        )


MEASURED = {
    "26 published schemes": Accuracy(102, 92, 82, 0.70, 0.99),
    "those of them that no known fact orders": Accuracy(42, 34, 25, 0.36, 0.97),
    "16 other publications": Accuracy(281, 171, 107, 0.56, 0.86),
}
"""Accuracy by evidence, as benchmarks/rank_evidence.py prints it."""
ACCURACY = (
    "Measured against training, this rule decided "
    + "; ".join(f"on {where} {own}" for where, own in MEASURED.items())
    + " (95 % intervals over schemes or publications). Counterexample: by error, NVIDIA's recipe comes before"
    " TetraJet-v2's without OutControl and local scales, whose published loss is 0.007 nats lower."
)
"""One sentence on accuracy and coverage of the rule, with a counterexample."""
