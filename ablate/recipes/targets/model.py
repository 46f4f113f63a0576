"""Facts of the user's model that a target may need, and the fields that no target can hold."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ablate.recipes.layers import Layer, blocks_in
from ablate.recipes.recipe import Recipe, Weights


class Lost(ValueError):
    """A target cannot hold a recipe.

    Attributes:
        reasons: sentences that begin with the path of a field, such as `schedule.0.start decay: ...`.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = list(reasons)


@dataclass(frozen=True)
class Model:
    """Known facts of the model that a recipe is written for."""

    label: str = "recipe"
    """Name of the recipe, for comments."""
    blocks: int | None = None
    """Number of its blocks; None if nobody has said so."""
    layers: tuple[Layer, ...] = ()
    """Its linear layers inside blocks; empty if they are not known."""

    @property
    def depth(self) -> int | None:
        """The number of blocks, as given or as counted; None if it is not known."""
        return blocks_in(self.layers) if self.layers else self.blocks


def unheld(recipe: Recipe, target: str, schedule: bool = False, rules: bool = False) -> Iterator[str]:
    """Yield the fields beside the products that a target cannot hold.

    Args:
        recipe: the recipe.
        target: name of the stack, for the sentences.
        schedule: True if the target holds phases that start at a counted step.
        rules: True if the target holds rules for single layers.
    """
    usual = Weights()
    for name in Weights.model_fields:
        if (value := getattr(recipe.weights, name)) != getattr(usual, name):
            shown = value if isinstance(value, str) else "on"
            yield f"weights.{name} {shown}: {target} has no such rule; write {_off(usual, name)}"
    if recipe.dtype != "bf16":
        yield f"dtype {recipe.dtype}: {target} takes the type of activations from the model; write bf16"
    for number, phase in enumerate(recipe.schedule):
        if not schedule:
            yield (
                f"schedule.{number}.start {phase.start}: {target} has one configuration for the whole run;"
                " change it at a checkpoint, and write []"
            )
        elif phase.trigger:
            yield f"schedule.{number}.start {phase.start}: {target} measures no noise; use step:n"
    if not rules:
        for number, rule in enumerate(recipe.layers.rules):
            yield f"layers.rules.{number} {rule.match}: {target} has no rules for single layers; write []"


def skipped(recipe: Recipe, model: Model, target: str) -> tuple[int, int]:
    """Return how many blocks at the input and at the output the counts leave in high precision.

    Raises:
        Lost: a fraction of the blocks is asked for, and their number is not known.
    """
    counts, depth = recipe.layers, model.depth
    if not counts.last_fraction:
        return counts.skip_first, counts.skip_last
    if depth is None:
        raise Lost(
            [
                f"layers.last_fraction {counts.last_fraction:g}: {target} counts blocks, and their number"
                " is not known; give --blocks N or --model"
            ]
        )
    quantised = [counts.quantises(block, depth) for block in range(depth)]
    return counts.skip_first, depth - 1 - max((b for b in range(depth) if quantised[b]), default=-1)


def _off(usual: Weights, name: str) -> str:
    value = getattr(usual, name)
    return "null" if value is None else str(value)
