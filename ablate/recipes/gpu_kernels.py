"""Operands of a recipe for which a GPU has no compiled quantiser, so that the slow reference makes them.

Torch-free: `ablate plan` prints the result. The kernels themselves ask the same `forms.on_gpu`.
"""

from typing import NamedTuple

from ablate.numerics.kernels import forms
from ablate.recipes.recipe import Recipe
from ablate.recipes.te_mapping import variants


class OnReference(NamedTuple):
    """Operands that the reference makes on a GPU, of all that are quantised."""

    slots: tuple[str, ...]
    quantised: int

    def __str__(self) -> str:
        count = f"{len(self.slots)} of {self.quantised} quantised operands"
        return f"{count} have no GPU kernel and run on the slow reference: {', '.join(self.slots)}"


def on_reference(recipe: Recipe) -> OnReference:
    """Return the operands without a kernel in some layer at some step of the recipe."""
    slots: dict[str, bool] = {}
    for products in variants(recipe):
        for slot, quant in products.quantised():
            # Q-EMA decides the rounding of weights, which no kernel takes.
            nearest = quant.rounding == "nearest" and not quant.from_forward
            moving = recipe.weights.q_ema is not None and slot.endswith(".w") and nearest
            slots[slot] = slots.get(slot, False) or moving or not forms.on_gpu(quant.cast)
    return OnReference(tuple(slot for slot, reference in slots.items() if reference), len(slots))
