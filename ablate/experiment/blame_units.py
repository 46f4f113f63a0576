"""Units of a search for a cause: parts of a recipe, each of which acts alone or is left out.

A unit is a cell, layers and operands that are quantised while all others stay in high precision
(`recipes/cells.py`); or a part, fields that the recipe has otherwise than a baseline with a quantised recipe:

    what: parts      rounding, hadamard, scale, outer, block, element, ...; each in all products

Refused: cells beside a quantised baseline, parts beside one in high precision, and units that cannot act
without others.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import get_args

from ablate.experiment.arms import Arm
from ablate.experiment.blame_design import BlameDesign, BlameNames
from ablate.experiment.schema import Blame, ExperimentFile
from ablate.files import Json
from ablate.recipes import Recipe
from ablate.recipes.cells import Cell, What, grid, within
from ablate.recipes.changes import as_data, changes
from ablate.recipes.layers import Layer
from ablate.recipes.recipe import SLOTS

Change = tuple[str, Json]
"""Path of a recipe's field, and its value there."""
_PREFIXES = sorted({*SLOTS, *(slot.partition(".")[0] for slot in SLOTS)}, key=len, reverse=True)


@dataclass(frozen=True)
class Units:
    """Named units of a recipe beside a baseline."""

    names: tuple[str, ...]
    whole: Recipe
    base: Recipe
    layers: tuple[Layer, ...]
    cells: tuple[Cell, ...]
    """Cell of each unit; empty if units are parts."""
    parts: tuple[tuple[Change, ...], ...]
    """Changed fields of each unit; empty if units are cells."""

    def recipe(self, units: frozenset[int]) -> Recipe:
        """Return the recipe in some units alone. ValueError if there is no such recipe."""
        if self.cells:
            return within(self.whole, self.layers, [self.cells[unit] for unit in sorted(units)])
        data = deepcopy(as_data(self.base))
        for unit in sorted(units):
            for path, value in self.parts[unit]:
                *parents, last = path.split(".")
                content: dict[str, Json] = data
                for parent in parents:
                    child = content.setdefault(parent, {})
                    assert isinstance(child, dict), "a path leads through mappings"
                    content = child
                content[last] = value
        return Recipe.model_validate_json(json.dumps(data))

    def impossible(self, design: BlameDesign) -> Iterator[str]:
        """Yield why runs that the search may request cannot be made; the first reason of each unit alone."""
        everything = frozenset(range(len(self.names)))
        alone = (frozenset([unit]) for unit in sorted(everything))
        halves = (run.units for number in range(design.pairs) for run in design.halves(number))
        rests = (
            everything - set(left_out)
            for count in range(1, design.most + 1)
            for left_out in itertools.combinations(sorted(everything), count)
        )
        for units in itertools.chain(alone, halves, itertools.islice(rests, 500)):
            try:
                if units:
                    self.recipe(units)
            except ValueError as error:
                named = ", ".join(self.names[unit] for unit in sorted(units))
                yield f"{named} without the other units is no recipe: {_first_line(error)}"
                return


def _first_line(error: ValueError) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    told = next((line for line in lines if "Value error" in line), lines[-1] if lines else "")
    return told.removeprefix("Value error, ").partition(" [type=")[0]


def units_of(keys: Blame, layers: tuple[Layer, ...], whole: Recipe, base: Recipe) -> Units:
    """Return the units of a search for what causes the gap of `whole`, a recipe, to `base`, its baseline's.
    `layers`: all layers of the model; empty if the workload does not know them. ValueError, which says why,
    if there are no such units."""
    if keys.what == "parts":
        if base.plain:
            raise ValueError(
                "what: parts needs a quantised baseline, such as against: nvfp4, beside a recipe that differs"
                " in fields; beside bf16 search by cells (recipe, products, operands)"
            )
        parts = _parts(whole, base)
        return Units(tuple(parts), whole, base, layers, (), tuple(map(tuple, parts.values())))
    if not base.plain:
        raise ValueError(
            f"what: {keys.what} quantises some cells and leaves the others in high precision, so the baseline"
            " is against: bf16; to search beside a quantised baseline write what: parts"
        )
    if not layers:
        raise ValueError("needs a workload whose layers are known before it runs")
    (what,) = (word for word in get_args(What) if word == keys.what)
    cells = grid(whole, layers, keys.where, what)
    return Units(tuple(cells), whole, base, layers, tuple(cells.values()), ())


def _parts(whole: Recipe, base: Recipe) -> dict[str, list[Change]]:
    """Return the fields in which a recipe differs from another, by the name of the part: the field behind
    product and operand."""
    parts: dict[str, list[Change]] = {}
    for path, value, _ in changes(as_data(whole), as_data(base)):
        prefix = next((f"{each}." for each in _PREFIXES if path.startswith(f"{each}.")), "")
        rest = path.removeprefix(prefix)
        name = path if f"{path}" in SLOTS else rest.partition(".")[0]
        parts.setdefault(name, []).append((path, value))
    return parts


def blamed(file: ExperimentFile, arms: Sequence[Arm]) -> tuple[BlameDesign, Units, BlameNames]:
    """Return the search for a cause that a file with `blame` asks for, its units, and their names. `arms`:
    the recipe's arm, its baseline, and others that are checks. ValueError, which says why, if there are no
    such units."""
    keys = file.blame
    assert keys is not None, "the file has `blame`"
    whole = next((arm for arm in arms if arm.baseline is not None and not arm.outside), None)
    base = next((arm for arm in arms if whole and arm.name == whole.baseline), None)
    if whole is None or base is None:
        raise ValueError("the recipe is that of its baseline, so there is no gap; change recipe or against")
    if whole.content[0] != base.content[0]:
        raise ValueError("against changes the workload too, a part of the gap that no unit has; leave it out")
    units = units_of(keys, whole.layers, whole.recipe, base.recipe)
    design = BlameDesign(len(units.names), file.first_seeds, keys.budget, keys.most, keys.alpha)
    return design, units, BlameNames(units.names, base.name, whole.name)
