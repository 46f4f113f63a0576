"""Recipes: three products of six operands, the layers they apply to, and a schedule. Torch-free."""

from ablate.recipes.knobs import KNOBS, Turn
from ablate.recipes.presets import PRESETS
from ablate.recipes.recipe import SLOTS, Recipe

__all__ = ["KNOBS", "PRESETS", "SLOTS", "Recipe", "Turn"]
