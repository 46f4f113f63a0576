"""What a paper calls a recipe: three products of six operands, where in the model, and until when. Torch-free."""

from ablate.recipes.knobs import KNOBS, Turn
from ablate.recipes.presets import PRESETS
from ablate.recipes.recipe import SLOTS, Recipe

__all__ = ["KNOBS", "PRESETS", "SLOTS", "Recipe", "Turn"]
