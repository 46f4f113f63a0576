"""Recipes that read trained weights in an evaluation: `nvfp4`, `nvfp4_weights_only`.

A model that was trained under one recipe is served under another. A reading is the forward pass of a preset,
with its own choice of layers, over weights that it did not train; with the ending `_weights_only`, the
activations stay in high precision. Its schedule and its weight rules, which belong to training, have no part.
"""

from collections.abc import Iterator
from functools import partial

from ablate.errors import nearest
from ablate.recipes.presets import PRESETS
from ablate.recipes.recipe import Fprop, Products, Recipe

WEIGHTS_ONLY = "_weights_only"
BF16 = "bf16"
"""Reading that every evaluation has: `val/loss_bf16`."""


def reading(name: str) -> Recipe:
    """Return the recipe of a reading: products of the forward pass alone, and layer rules. ValueError if the
    name is no preset, with or without `_weights_only`, or if its forward pass quantises nothing."""
    preset = name.removesuffix(WEIGHTS_ONLY)
    if preset not in PRESETS:
        raise ValueError(
            f"{name!r}: neither a preset nor a preset with {WEIGHTS_ONLY}; {nearest(preset, PRESETS)}"
        )
    recipe = PRESETS[preset]().mapped(partial(_forward, name=name))
    read = Recipe(fprop=recipe.fprop, layers=recipe.layers)
    if read.plain:
        raise ValueError(f"{name!r}: its forward pass quantises nothing, as {BF16} does; leave it out")
    return read


def _forward(products: Products, name: str) -> Products:
    """Return the forward product alone, without the activations' format if the name says so."""
    fprop = products.fprop
    if name.endswith(WEIGHTS_ONLY):
        fprop = fprop.changed(x=None) if fprop.w else Fprop()
    return Products(fprop=fprop)


def problems(names: tuple[str, ...]) -> Iterator[str]:
    """Yield the reason for each name that is no reading."""
    for name in names:
        if name == BF16:
            continue
        try:
            reading(name)
        except ValueError as error:
            yield str(error)
