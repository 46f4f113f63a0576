"""Group search for the units of a recipe that cause a gap: its runs, as they are declared before any of them.

    design = BlameDesign(units=12, seeds=(0, 1, 2, 3, 4, 5), budget=60)
    design.pairs           # 15 pairs of runs to search with
    design.halves(0)       # the first pair: a random half of the units, and the other half
    design.problem         # None: there can be such a search

`results/blame.py` has the search itself, and says why it is made so.
"""

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import count, islice
from typing import Literal, NamedTuple

ROUND = 4
"""Pairs of a round, one on each of as many seeds."""
FEWEST_PAIRS = 4
FEWEST_SEEDS = 3
"""Smallest number of seeds for the proof."""


class GroupRun(NamedTuple):
    """One run: the units that are quantised, the others being as in the baseline, and the seed."""

    units: frozenset[int]
    seed: int


_MOST_NAMED = 4
"""Largest number of units that an arm's name lists."""
Stage = Literal["gap", "search", "proof", "rest", "over"]


@dataclass(frozen=True)
class BlameDesign:
    """Search that is declared before anything runs."""

    units: int
    seeds: tuple[int, ...]
    """Seeds of gap, proof and rest."""
    budget: int
    """Largest number of runs."""
    most: int = 2
    """Largest number of candidates that are proved."""
    alpha: float = 0.05
    """Chance that any unit is named that does no damage beyond `margin`."""
    margin: float = 0.0
    """Damage up to which a unit is no culprit, in the metric's unit."""

    @property
    def searches(self) -> bool:
        """Return False if there are so few units that each is a candidate."""
        return self.units > self.most

    @property
    def pairs(self) -> int:
        """Largest number of pairs in the search."""
        return max(0, self.budget - self.least) // 2 if self.searches else 0

    @property
    def least(self) -> int:
        """Runs of gap, proof and rest."""
        return (3 + min(self.most, self.units)) * len(self.seeds)

    @property
    def runs(self) -> int:
        """Largest number of runs."""
        return self.least + 2 * self.pairs

    @cached_property
    def search_seeds(self) -> tuple[int, ...]:
        """Seeds of the search, none of which is in the proof."""
        return tuple(islice((seed for seed in count() if seed not in self.seeds), ROUND))

    @property
    def problem(self) -> str | None:
        """Return the reason why there can be no such search; None if there can."""
        if self.units < 2:
            return "one unit alone carries all of the gap; name finer units"
        if len(self.seeds) < FEWEST_SEEDS:
            return "the proof needs 3 seeds or more, 6 for a divergence"
        if self.searches and self.pairs < FEWEST_PAIRS:
            needed = self.least + 2 * FEWEST_PAIRS
            return f"leaves {self.pairs} pairs of runs to search with; give {needed} or more"
        if not self.searches and self.budget < self.least:
            return f"does not pay for the proof of {self.units} units; give {self.least} or more"
        return None

    def halves(self, number: int) -> tuple[GroupRun, GroupRun]:
        """Return the two runs of a pair: a random half of the units, and the others."""
        one, other = _halves(self.units, number)
        seed = self.search_seeds[number % ROUND]
        return GroupRun(one, seed), GroupRun(other, seed)


@lru_cache(maxsize=4096)
def _halves(units: int, number: int) -> tuple[frozenset[int], frozenset[int]]:
    """Return a random half of some units and the others, by digests: equal in every version."""
    order = sorted(range(units), key=lambda unit: sha256(f"{units}, {number}, {unit}".encode()).digest())
    cut = (units + number % 2) // 2
    return frozenset(order[:cut]), frozenset(order[cut:])


@dataclass(frozen=True)
class BlameNames:
    """Names of units and arms, by which a ledger's runs are found again."""

    units: tuple[str, ...]
    baseline: str
    whole: str
    """Arm of the whole recipe."""

    def arm(self, stage: Stage, units: frozenset[int]) -> str:
        """Return the name of the arm that quantises some units in a stage of the search."""
        if stage == "gap":
            return self.whole if units else self.baseline
        if stage == "rest":
            return f"without {self._listed(frozenset(range(len(self.units))) - units)}"
        return f"{'only' if stage == 'proof' else 'half:'} {self._listed(units)}"

    def _listed(self, units: frozenset[int]) -> str:
        names = [self.units[unit] for unit in sorted(units)]
        if len(names) <= _MOST_NAMED:
            return ", ".join(names)
        digest = sha256(json.dumps(names).encode()).hexdigest()[:6]
        return f"{', '.join(names[:_MOST_NAMED])} and {len(names) - _MOST_NAMED} more ({digest})"
