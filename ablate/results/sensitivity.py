"""A map of damage: which cells of a recipe it comes from, and how far the map may be believed.

The problem. One cell of a recipe (a block's forward product, say) costs less than the noise between seeds. In
a map each cell is trained alone with its error amplified `times` times, in forks, so that its damage can be
seen; but the largest of many noisy numbers is too large, and a ranking of noise looks like a ranking.

The idea. Beside each cell's damage stand three numbers that say what it is worth:

    ranking      rank correlation of the cells over two disjoint halves of the seeds, within a class of
                 product; below 0.8, or if an F test does not tell the cells apart, the class is not ranked
    shrunk       the damage pulled towards the mean of its class as far as the noise demands (empirical Bayes)
    first        the largest cell, chosen on half of the seeds and measured on the other half

Only cells of one class are ranked with each other: the damage of fprop and wgrad grows with about the square
of `times`, that of dgrad more slowly (experiments/LOG.md, by benchmarks/sensitivity_proof.py).

Source of the shrinkage: B. Efron and C. Morris, "Stein's paradox in statistics", Sci. Am. 236 (1977).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import numpy as np
from scipy import special

from ablate.experiment.mapped_cells import EVERYTHING
from ablate.recipes.recipe import DIRECTIONS
from ablate.results.comparisons import Comparisons
from ablate.results.decomposition import Damage, damages
from ablate.results.intervals import ALPHA
from ablate.results.paired_stats import CHANCE, Difference, Verdict, common, paired_difference
from ablate.results.summary import ArmSummary

AGREEMENT = 0.8
"""Rank correlation of disjoint halves of the seeds from which cells are ranked."""
FEWEST_CELLS, FEWEST_SEEDS = 3, 4
"""Fewest cells and seeds for a ranking."""
_SPLITS, _SEED = 200, 20261128


class Ranking(NamedTuple):
    """Support of an order of cells."""

    agreement: float
    """Rank correlation over two disjoint halves of the seeds, the median of 200 splits; NaN with too few
    cells or seeds."""
    p: float
    """p-value of equal cells: the F test with seeds as blocks."""
    classes: int
    p_leader: float = math.nan
    """p-value of the largest cell being no larger than another: paired t tests against all others, of which
    the largest p-value is multiplied by the number of cells that could have led."""

    @property
    def apart(self) -> bool:
        """True if the cells are told apart."""
        return self.p < ALPHA / self.classes

    @property
    def holds(self) -> bool:
        """True if halves of the seeds agree, and the cells are not equal: among three cells, halves of pure
        noise agree in 6 to 15 % of maps."""
        return self.agreement >= AGREEMENT and self.apart

    @property
    def has_leader(self) -> bool:
        """True if its largest cell is told from all others, ranked or not."""
        return self.p_leader < ALPHA / self.classes


@dataclass(frozen=True)
class MappedCell:
    """One cell of a map."""

    name: str
    group: str
    """Group of layers: a line of the map; empty for the whole model."""
    part: str
    """Group of operands: a column of the map; empty for all."""
    total: Difference
    """Damage at the amplified error."""
    verdict: Verdict
    shrunk: float
    """Damage, pulled towards the mean of its class, in the metric's unit like `total`."""
    parts: Damage | None
    """Direct and learnt damage; None without a reading in high precision."""
    ranked: bool
    """True if its class is ranked alike by disjoint halves of the seeds, or if it is told from all others."""

    @property
    def resolved(self) -> bool:
        """True if its damage is told from zero, corrected for all cells."""
        return self.verdict.resolved

    @property
    def product(self) -> str:
        """Class within which it is ranked: its product; empty if it has all."""
        return self.part.partition(".")[0]


@dataclass(frozen=True)
class Sensitivity:
    """The cells of a sweep with a map, and what their numbers are worth."""

    times: float
    cells: Sequence[MappedCell]
    rankings: Mapping[str, Ranking]
    """By class."""
    first: MappedCell | None
    """Largest cell that is told from all others of its class; None if there is none."""
    fresh: float
    """Damage of the cell that leads on one half of the seeds, measured on the other: mean of many splits."""
    everything: Difference | None
    """Damage with all cells amplified at once."""
    excess: Difference | None
    """Sum of all cells minus `everything`, seed by seed: zero if damage adds up. In one trial blocks fell
    short by 9 % ±6 %."""
    recipe: Difference | None
    """Damage of the recipe itself."""
    smallest: float
    """Damage of a cell that would be resolved with a chance of 80 %, at the amplified error."""

    @property
    def groups(self) -> list[str]:
        """Lines of the map, in the model's order."""
        return list(dict.fromkeys(cell.group for cell in self.cells))

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(cell.part for cell in self.cells))


def sensitivity(sweep: Comparisons) -> Sensitivity | None:
    """Return the map of a sweep; None for another kind of experiment, or before two cells have two pairs."""
    asked = sweep.ledger.facts.map
    if asked is None:
        return None
    arms = {arm.name: arm for arm in sweep.arms if arm.gap is not None and arm.gap.pairs > 1}
    whole, plain = arms.pop(EVERYTHING, None), None
    ours = [arm for arm in arms.values() if arm.role == "listed"]
    if asked.times > 1:
        plain = next((arm for arm in ours if not any(name.startswith("recipe.") for name in arm.knobs)), None)
        ours = [arm for arm in ours if arm is not plain]
    if len(ours) < 2:
        return None
    baseline = next(arm for arm in sweep.arms if arm.name == ours[0].baseline)
    seeds = _shared([baseline, *ours])
    table = np.array([[arm.values[seed] - baseline.values[seed] for seed in seeds] for arm in ours])
    sign = 1 if sweep.metric.direction == "minimize" else -1
    table *= sign  # damage is positive
    places = [_place(arm.name) for arm in ours]
    classes = [part.partition(".")[0] for _, part in places]
    kinds = dict.fromkeys(classes)
    rankings = {each: ranking(table[[c == each for c in classes]], len(kinds)) for each in kinds}
    parts = {each.arm: each for each in damages(sweep.ledger, [baseline, *ours], sweep.metric.name)}
    shrunk = _shrunk(table, classes)
    means = table.mean(axis=1)
    leaders = {
        max((n for n, c in enumerate(classes) if c == each), key=lambda n: means[n])
        for each, one in rankings.items()
        if one.has_leader
    }
    cells = [
        MappedCell(
            arm.name, *place, arm.gap, arm.verdict, sign * float(pulled), parts.get(arm.name),
            rankings[place[1].partition(".")[0]].holds or number in leaders,
        )
        for number, (arm, place, pulled) in enumerate(zip(ours, places, shrunk, strict=True))
        if arm.gap is not None
    ]  # fmt: skip
    first = max((n for n in leaders if cells[n].resolved), key=lambda n: means[n], default=None)
    return Sensitivity(
        asked.times,
        cells,
        rankings,
        None if first is None else cells[first],
        math.nan if first is None else sign * _fresh(table[[c == classes[first] for c in classes]]),
        whole.gap if whole else None,
        _excess(ours, whole, baseline, seeds) if whole else None,
        plain.gap if plain else None,
        _smallest(table),
    )


def _place(name: str) -> tuple[str, str]:
    """Return line and column of a cell by its name: `block 0 fprop.x`."""
    group, _, last = name.rpartition(" ")
    return (group, last) if last.partition(".")[0] in DIRECTIONS["all"] else (name, "")


def _shared(arms: Sequence[ArmSummary]) -> list[int]:
    seeds = set(common(arms[0].values, arms[0].values))
    for first, second in pairwise(arms):
        seeds &= set(common(first.values, second.values))
    return sorted(seeds)


def _halves(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return splits of seeds into disjoint halves, the same for every map with so many."""
    draw = np.random.default_rng([_SEED, count])
    orders = [draw.permutation(count) for _ in range(_SPLITS)]
    return [(order[: count // 2], order[count // 2 : 2 * (count // 2)]) for order in orders]


def ranking(table: np.ndarray, classes: int = 1) -> Ranking:
    """Return how far the order of some cells may be believed, by damage [cells, seeds]. The 5 % are divided
    over `classes` that are ranked apart."""
    cells, seeds = table.shape
    if cells < FEWEST_CELLS or seeds < FEWEST_SEEDS:
        return Ranking(math.nan, math.nan, classes)
    from scipy import stats  # takes most of a second, and few sweeps are maps

    one, two = (
        stats.rankdata(np.stack([table[:, half].mean(axis=1) for half in halves]), axis=1)
        for halves in zip(*_halves(seeds), strict=True)
    )
    centre = (cells + 1) / 2
    norms = np.sqrt(((one - centre) ** 2).sum(axis=1) * ((two - centre) ** 2).sum(axis=1))
    found = ((one - centre) * (two - centre)).sum(axis=1) / np.maximum(norms, 1e-300)
    own, shared = table.mean(axis=1), table.mean(axis=0)
    rest = ((table - own[:, None] - shared + table.mean()) ** 2).sum() / (seeds - 1)
    ratio = seeds * ((own - table.mean()) ** 2).sum() / max(rest, 1e-300)
    p = float(stats.f.sf(ratio, cells - 1, (cells - 1) * (seeds - 1)))
    lead = own.argmax()
    others = stats.ttest_rel(table[lead], np.delete(table, lead, axis=0), axis=1, alternative="greater")
    return Ranking(float(np.median(found)), p, classes, cells * float(np.max(others.pvalue)))


def _shrunk(table: np.ndarray, classes: Sequence[str]) -> np.ndarray:
    """Return the means of damage [cells, seeds], pulled towards the mean of their class, by the share of
    noise in their spread."""
    means, found = table.mean(axis=1), np.empty(len(table))
    errors = table.var(axis=1, ddof=1) / table.shape[1] if table.shape[1] > 1 else np.full(len(table), np.inf)
    for each in dict.fromkeys(classes):
        own = np.array([c == each for c in classes])
        centre = means[own].mean()
        spread = max(0.0, means[own].var(ddof=1) - errors[own].mean()) if own.sum() > 1 else math.inf
        weight = np.ones(own.sum()) if math.isinf(spread) else spread / (spread + errors[own] + 1e-300)
        found[own] = centre + weight * (means[own] - centre)
    return found


def _fresh(table: np.ndarray) -> float:
    """Return the mean damage of the cell that leads on one half of the seeds, on the other half."""
    pairs = [pair for halves in _halves(table.shape[1]) for pair in (halves, halves[::-1])]
    return fmean(table[table[:, one].mean(axis=1).argmax(), two].mean() for one, two in pairs)


def _excess(
    cells: Sequence[ArmSummary], whole: ArmSummary, baseline: ArmSummary, seeds: Sequence[int]
) -> Difference:
    """Return the sum of the cells' damage minus that of all at once."""
    added = {
        seed: math.fsum(arm.values[seed] - baseline.values[seed] for arm in cells)
        for seed in seeds
        if seed in whole.values
    }
    at_once = {seed: whole.values[seed] - baseline.values[seed] for seed in added}
    return paired_difference(added, at_once, cells[0].interval)


def _smallest(table: np.ndarray) -> float:
    """Return the damage that a test at 5 %, divided by the number of cells, finds with a chance of 80 %."""
    cells, seeds = table.shape
    if seeds < FEWEST_SEEDS:
        return math.nan
    error = math.sqrt(float(np.median(table.var(axis=1, ddof=1))) / seeds)
    return error * float(-special.stdtrit(seeds - 1, ALPHA / 2 / cells) + special.ndtri(CHANCE))
