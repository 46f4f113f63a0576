"""Arms of a map: each cell of the recipe alone with its error amplified, all of them, and the recipe."""

from collections.abc import Mapping

from ablate.errors import Reading
from ablate.experiment.arms import KnobError, Knobs, StartingPoint
from ablate.experiment.schema import Map
from ablate.experiment.yaml_document import Document
from ablate.recipes import Recipe
from ablate.recipes.cells import Cell, amplified, grid, named, within
from ablate.recipes.layers import Layer
from ablate.recipes.recipe import Layers

EVERYTHING = "everything"
"""Name of the arm in which all cells are amplified."""


def cells(asked: Map, layers: tuple[Layer, ...], recipe: Recipe) -> Mapping[str, Cell]:
    """Return the cells of a map of this recipe by name. `layers`: those of the workload's model; empty if
    only the user's own code knows it. ValueError if there are no such cells, or the layers are not known; its
    message then begins with `layers`."""
    if isinstance(asked.layers, tuple):
        if recipe.layers != Layers():
            raise ValueError(
                "layers that are named by globs need a recipe without layer rules of its own; leave them out"
            )
        return named(recipe, asked.layers, asked.operands)
    if not layers:
        raise ValueError(
            f"layers {asked.layers}: the model's layers are known to your own code alone; list globs on their"
            ' names, such as ["model.layers.0.*", "model.layers.1.*"]'
        )
    return grid(recipe, layers, asked.layers, asked.operands)


def cell_knobs(asked: Map, base: StartingPoint, document: Document) -> Reading[dict[str, Knobs]]:
    """Return the knobs of the map's arms by name."""
    try:
        arm = base.arm({})
        found = cells(asked, arm.layers, arm.recipe)
    except KnobError:
        return {base.preset: {}}  # whose problem is found as that arm is built
    except ValueError as error:
        field, _, why = str(error).partition(" ")
        path = ("map", "layers") if field == "layers" else ("map",)
        yield document.problem(path, why if field == "layers" else str(error))
        return {}
    globs, layers = isinstance(asked.layers, tuple), arm.layers
    recipes = {name: within(arm.recipe, layers, [cell], asked.times, globs) for name, cell in found.items()}
    if len(recipes) > 1:
        recipes[EVERYTHING] = amplified(arm.recipe, asked.times)
    if asked.times > 1:
        recipes[base.preset] = arm.recipe
    return {name: _knobs(arm.recipe, recipe) for name, recipe in recipes.items()}


def _knobs(recipe: Recipe, changed: Recipe) -> Knobs:
    return {
        f"recipe.{field}": getattr(changed, field).model_dump(mode="json")
        for field in ("fprop", "dgrad", "wgrad", "layers")
        if getattr(changed, field) != getattr(recipe, field)
    }
