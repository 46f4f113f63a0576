"""Assignment: the parts of a model to keep in high precision, by a map of the damage of each part.

The problem. Some layers cost most of a recipe's damage, and each that stays in bf16 costs speed. With damage
additive over cells, which choice has the least damage at a given share of FLOPs in FP4? The idea is an
integer programme: one yes or no for each unit (cells that have to be decided together), the sum of damages to
minimise, the FLOPs of products both of whose operands are quantised to bound. Example:

    measured = Map.of(Path("map.csv"), recipe, layers)     cell,damage / block 0,0.0011 / block 1,0.0003
    best = measured.assign(share=0.5)                      block 1 in FP4, block 0 in bf16
    best.recipe                                            a recipe with layer rules
    check.controls(measured, best)                         other choices with as many FLOPs in FP4

A map's damage is often measured with errors amplified by a; at a = 1 it is smaller by a power of a. A
measured damage below zero is noise and counts as zero. Choosing the least of noisy numbers makes the
prediction too good, so an assignment is a proposal until it has been compared with its controls on fresh
seeds. Refused: cells that overlap, and maps of a recipe without a product in FP4.
"""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from ablate.errors import InputError, nearest
from ablate.experiment.mapped_cells import cells
from ablate.experiment.schema import Map as Asked
from ablate.recipes.cells import WHAT, WHERE, Cell, fp4_share, grid, within
from ablate.recipes.layers import Layer, Match, select
from ablate.recipes.recipe import DIRECTIONS, SLOTS, Products, Recipe
from ablate.results.comparisons import Comparisons
from ablate.results.intervals import SINGLE_LOOK
from ablate.results.number_text import around
from ablate.results.paired_stats import FEWEST_DISTINCT
from ablate.results.sensitivity import ALL_PRODUCTS, EXPONENTS, Sensitivity, sensitivity
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Store

Unit = Literal["layer", "product"]
"""Smallest part that is decided: whole layers, which more training stacks take, or single products too."""
Part = tuple[str, str]
"""Layer and product, by their names."""
EXPONENT = 2.0
"""Power of the amplification by which damage grows, unless the map has another."""
_TIE = 1e-7
"""Weight of the share, so that of two choices with equal damage the larger share wins."""


class Measured(NamedTuple):
    """A cell with its damage."""

    name: str
    cell: Cell
    damage: float
    """Damage of the recipe in this cell alone, at its own errors (a = 1), in the metric's unit."""
    values: tuple[float, ...] = ()
    """The same by seed, as measured; empty if only the mean is known."""
    error: float = 0.0
    """Standard error of the evaluation, which all seeds and cells share."""


class Joined(NamedTuple):
    """Cells that are decided together."""

    cells: tuple[Measured, ...]

    @property
    def name(self) -> str:
        """Common beginning of the cells' names: `block 0` for `block 0 fprop.x` and `block 0 dgrad.g`."""
        names = [cell.name for cell in self.cells]
        same = takewhile(lambda letters: len({*letters}) == 1, zip(*names, strict=False))
        return "".join(letters[0] for letters in same).rstrip(" .") or names[0]

    @property
    def damage(self) -> float:
        """Sum of the damages, at least 0."""
        return max(0.0, sum(cell.damage for cell in self.cells))

    @property
    def operands(self) -> set[tuple[str, str]]:
        """Pairs of layer and operand."""
        return {(name, slot) for each in self.cells for name in each.cell.layers for slot in each.cell.slots}


@dataclass(frozen=True)
class Assignment:
    """Choice of the units that are computed by the recipe; the others stay in high precision."""

    recipe: Recipe
    share: float
    """Share of the layers' FLOPs in FP4, in [0, 1]."""
    damage: float
    """Predicted damage: the sum over the units."""
    half: float | None
    """Half-width of the 95 % interval of the sum over seeds; None if the values by seed are not known."""
    kept: tuple[str, ...]
    """Names of the units in high precision."""

    @property
    def predicted(self) -> str:
        """Predicted damage as text, with its interval if there is one."""
        return f"{self.damage:.2g}" if self.half is None else around(self.damage, self.half)


@dataclass(frozen=True)
class Map:
    """Damage of the cells of a recipe in one model."""

    recipe: Recipe
    layers: tuple[Layer, ...]
    """All layers of the model, with their sizes."""
    cells: tuple[Measured, ...]
    doubts: tuple[str, ...] = ()
    """Sentences on how its numbers came about, and on what they do not show."""
    seeds: frozenset[int] = frozenset()
    """Seeds that it was measured on; empty if they are not known."""

    @classmethod
    def of(cls, file: Path, recipe: Recipe, layers: Sequence[Layer]) -> "Map":
        """Return the map that a file of cells holds.

        The file is a CSV with a header, or a JSON list of objects. Fields: `cell`, a name that `cells.grid`
        gives; `damage`; and, if errors were amplified, `times` and `exponent` (2 if it is left out).

        Args:
            file: The file.
            recipe: The recipe that was measured.
            layers: All layers of the model.

        Raises:
            InputError: A line has no such cell or no finite number, cells overlap, or nothing is in FP4.
        """
        known = {
            name: cell
            for where in WHERE
            for what in WHAT
            for name, cell in grid(recipe, layers, where, what).items()
        }
        found, problems = [], []
        for number, line in _lines(file):
            try:
                name = str(line["cell"])
                if name not in known:
                    raise ValueError(f"{name!r} is not a cell; {nearest(name, known)}")
                times = float(line.get("times") or 1)
                exponent = float(line.get("exponent") or EXPONENT)
                damage = float(line["damage"]) / times**exponent
                if not np.isfinite(damage) or times < 1:
                    raise ValueError("damage must be finite and times at least 1")
                found.append(Measured(name, known[name], damage))
            except KeyError as missing:
                problems.append(f"{file}: {number}: has no field {missing}; cell and damage are needed")
            except (TypeError, ValueError) as error:
                problems.append(f"{file}: {number}: {error}")
        if problems:
            raise InputError(*problems)
        return cls(recipe, tuple(layers), tuple(found)).checked(str(file))

    @classmethod
    def of_sweep(cls, sweep: Comparisons, recipe: Recipe, layers: Sequence[Layer]) -> "Map":
        """Return the map that a sweep with `map` measured, its damages pulled towards their product's mean.

        Args:
            sweep: Its comparisons.
            recipe: The recipe that was measured.
            layers: All layers of the model.

        Raises:
            InputError: The sweep maps nothing, or has no two cells with two pairs yet; nothing is in FP4.
        """
        name, asked = sweep.ledger.name, sweep.ledger.facts.map
        if asked is None:
            raise InputError(f"{name}: is not a map; write `map:` in its experiment, or give a CSV of cells")
        found = sensitivity(sweep)
        if found is None:
            raise InputError(f"{name}: no two cells have finished on two seeds; run its sweep to the end")
        if not any(each.resolved for each in found.cells):
            why = f"none of its {len(found.cells)} cells has a damage that is told from zero"
            way = "so there is nothing to choose by; give its file more seeds, or coarser cells"
            raise InputError(f"{name}: {why}, {way}")
        known, measured = _cells(asked, tuple(layers), recipe), []
        for each in found.cells:
            scale = found.times ** EXPONENTS.get(each.product, ALL_PRODUCTS)
            values = tuple(value / scale for value in each.total.values)
            error = each.total.shared_error / scale
            measured.append(Measured(each.name, known[each.name], each.shrunk / scale, values, error))
        seeds = frozenset(member.seed for member in sweep.ledger.members())
        return cls(recipe, tuple(layers), tuple(measured), tuple(_doubts(found)), seeds).checked(name)

    def checked(self, source: str) -> "Map":
        """Return this map; InputError if no programme can be built from it.

        Args:
            source: Name of the map, for the sentences.
        """
        owners: dict[tuple[str, str], str] = {}
        for each in self.cells:
            for part in Joined((each,)).operands:
                other = owners.setdefault(part, each.name)
                if other != each.name:
                    where = " ".join(part)
                    raise InputError(f"{source}: cells {other!r} and {each.name!r} overlap in {where}")
        if not all(layer.weights for layer in self.layers):
            raise InputError(f"{source}: the sizes of the model's layers are not known")
        if not any(self._products(unit) for unit in self.units("product")):
            raise InputError(f"{source}: no cell holds both operands of a product in FP4")
        return self

    def units(self, unit: Unit) -> list[Joined]:
        """Return the cells that are decided together: those that share a layer, or a product of one."""
        joined: list[tuple[set[tuple[str, str]], list[Measured]]] = []
        for each in self.cells:
            parts = {
                (name, slot.partition(".")[0] if unit == "product" else "")
                for name in each.cell.layers
                for slot in each.cell.slots
            }
            same = [group for group in joined if group[0] & parts]
            joined = [group for group in joined if not group[0] & parts]
            cells = [*(cell for group in same for cell in group[1]), each]
            joined.append((parts.union(*(group[0] for group in same)), cells))
        return [Joined(tuple(cells)) for _, cells in joined]

    @cached_property
    def sizes(self) -> dict[Part, float]:
        """Share of the layers' FLOPs of each product that the recipe computes in FP4."""
        total = 3 * sum(layer.weights for layer in self.layers)
        return {
            (layer.name, product): layer.weights / total
            for placed in self.recipe.placements(self.layers)
            for layer in placed.layers
            for product in DIRECTIONS["all"]
            if getattr(placed.products or Products(), product).fp4
        }

    def _products(self, unit: Joined) -> dict[Part, float]:
        """Return the products in FP4 of a unit, with their shares of the FLOPs."""
        operands = unit.operands
        return {
            (layer, product): size
            for (layer, product), size in self.sizes.items()
            if all((layer, slot) in operands for slot in SLOTS if slot.startswith(product))
        }

    def assign(
        self, share: float | None = None, damage: float | None = None, unit: Unit = "layer"
    ) -> Assignment:
        """Return the choice of least damage with a share in FP4 or more, or of largest share within a damage.

        Args:
            share: Least share of the layers' FLOPs in FP4, in [0, 1]; None: `damage` is given.
            damage: Largest predicted damage, in the metric's unit.
            unit: What is decided together.

        Raises:
            InputError: No choice has so large a share.
        """
        units = self.units(unit)
        sizes = np.array([sum(self._products(each).values()) for each in units])
        damages = np.array([each.damage for each in units])
        scale = max(damages.max(), 1e-300)
        if share is not None and share > sizes.sum() + 1e-9:
            raise InputError(
                f"a share of {share:.4g} in FP4 is more than the cells of the map hold, {sizes.sum():.4g}"
            )
        if share is not None:
            cost, bound = damages / scale - _TIE * sizes, LinearConstraint(sizes[None], share - 1e-9, np.inf)
        else:
            assert damage is not None
            cost = -sizes + _TIE * damages / scale
            bound = LinearConstraint(damages[None] / scale, -np.inf, max(0.0, damage) / scale + 1e-9)
        solved = milp(
            cost,
            integrality=np.ones(len(units), int),
            bounds=Bounds(0, 1),
            constraints=bound,
            options={"mip_rel_gap": 0},
        )
        assert solved.success, solved.message
        chosen = [each for each, on, size in zip(units, solved.x > 0.5, sizes, strict=True) if on and size]
        return self.chosen(chosen, units)

    def chosen(self, quantised: Iterable[Joined], units: Iterable[Joined]) -> Assignment:
        """Return the assignment that computes some of all units by the recipe."""
        names = {each.name: each for each in quantised}
        recipe = within(
            self.recipe, self.layers, [cell.cell for each in names.values() for cell in each.cells]
        )
        return Assignment(
            recipe,
            fp4_share(recipe, self.layers),
            sum(each.damage for each in names.values()),
            _half([cell for each in names.values() for cell in each.cells]),
            tuple(each.name for each in units if each.name not in names),
        )

    def frontier(self, unit: Unit = "layer") -> list[Assignment]:
        """Return the choices of least damage at shares from all FLOPs in FP4 down, each once."""
        most = sum(sum(self._products(each).values()) for each in self.units(unit))
        found = {
            (round(each.share, 9), each.kept): each
            for step in range(10, 0, -1)
            for each in [self.assign(min(step / 10, most), unit=unit)]
        }
        return list(found.values())


def recorded_layers(ledger: Ledger, store: Store) -> tuple[Layer, ...]:
    """Return the layers of a model that only the user's code knows, as a finished trial recorded them.

    Args:
        ledger: Ledger of a sweep of such code.
        store: Its trials.

    Raises:
        InputError: No trial of the sweep has recorded any.
    """
    members = ledger.members()
    for member in members:
        if layers := (store.result(member.id) or {}).get("layers"):
            return tuple(Layer(name, block, frozenset(), weights) for name, block, weights in layers)
    more = f"ablate sweep {ledger.facts.file} --seeds {len({member.seed for member in members}) + 1}"
    why = "no finished trial has recorded the layers of the model that your code converts"
    raise InputError(f"{ledger.name}: {why}; a new one does: {more}")


def _cells(asked: Asked, layers: tuple[Layer, ...], recipe: Recipe) -> dict[str, Cell]:
    """Return the cells of a map by name; those of globs hold the layers that each selects."""
    found = dict(cells(asked, layers, recipe))
    if isinstance(asked.layers, tuple):
        every = {glob: select(Match(name=glob), layers).layers for glob in asked.layers}
        for name, cell in found.items():
            names = (layer.name for glob in cell.layers for layer in every[glob])
            found[name] = Cell(tuple(names), cell.slots)
    return found


def _half(cells: Sequence[Measured]) -> float | None:
    """Return the half-width of the 95 % t interval of a sum of cells, by their values by seed.

    Errors of the evaluation add up as they are, since all cells are evaluated on the same data.
    """
    seeds = len(cells[0].values) if cells else 0
    if seeds < FEWEST_DISTINCT or any(len(each.values) != seeds for each in cells):
        return None
    deviation = float(np.array([each.values for each in cells]).sum(axis=0).std(ddof=1))
    shared = sum(each.error for each in cells)
    return SINGLE_LOOK.half_width(seeds) * math.hypot(deviation, math.sqrt(seeds) * shared)


def _doubts(found: Sensitivity) -> Iterator[str]:
    """Yield how a map's damages were scaled down, and which of its cells are not ranked."""
    if found.times > 1:
        powers = ", ".join(f"{power} in {name}" for name, power in EXPONENTS.items())
        yield (
            f"Damage at the recipe's own error is not measured: that at {found.times:g} times the error,"
            f" pulled towards its product's mean, is divided by {found.times:g} to a power ({powers};"
            f" {ALL_PRODUCTS} for all together; in another model 2.1, 0.9 and 1.8)."
        )
    unranked = [name or "all products" for name, each in found.rankings.items() if not each.holds]
    if unranked:
        yield f"Cells are not ranked within {', '.join(unranked)}, so another choice may be as good."


def _lines(file: Path) -> Iterator[tuple[str, Mapping[str, str | float]]]:
    """Yield the lines of a file of cells, each with its place in it; InputError if there are none."""
    try:
        text = file.read_text()
        lines = json.loads(text) if file.suffix == ".json" else [*csv.DictReader(text.splitlines())]
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read as a map: {error}") from None
    if not isinstance(lines, list) or not lines or not all(isinstance(line, dict) for line in lines):
        raise InputError(f"{file}: a map is a CSV with a header cell,damage or a JSON list of such objects")
    for number, line in enumerate(lines):
        yield (f"item {number}" if file.suffix == ".json" else f"line {number + 2}"), line
