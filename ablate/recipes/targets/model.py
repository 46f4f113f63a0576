"""Facts of the user's model that a target may need, and the fields that no target can hold."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ablate.numerics.spec import Spec, own_words
from ablate.recipes.changes import as_data, as_word, changes
from ablate.recipes.experts import Experts
from ablate.recipes.layers import Layer, Match, blocks_in
from ablate.recipes.recipe import DIRECTIONS, Layers, Phase, Products, Recipe, Rule
from ablate.recipes.targets.experts import rules_for_one, unheld_experts

_WRITTEN: Mapping[type[Spec], tuple[str, ...]] = {
    Recipe: (*DIRECTIONS["all"], "dtype", "layers", "weights", "experts", "schedule"),
    Experts: ("padding", "gate_up", "rounding_state", "routing"),
    Layers: ("skip_first", "skip_last", "last_fraction", "rules"),
    Rule: ("match", "use"),
    Match: ("blocks", "name", "within"),
    Phase: ("start", "slots", "use"),
}
"""Fields that targets write or refuse by name. Every other one is refused unless it has its default."""


class Lost(ValueError):
    """A target cannot hold a recipe.

    Attributes:
        reasons: sentences that begin with the path of a field, such as `schedule.0.start decay: ...`, each
            once.
    """

    def __init__(self, *reasons: str) -> None:
        self.reasons = list(dict.fromkeys(reasons))
        super().__init__("; ".join(self.reasons))


@dataclass(frozen=True)
class Model:
    """Known facts of the model that a recipe is written for."""

    label: str = "recipe"
    """Name of the recipe, for comments."""
    blocks: int | None = None
    """Number of its blocks; None if nobody has said so."""
    layers: tuple[Layer, ...] = ()
    """Its linear layers inside blocks; empty if they are not known."""
    by: tuple[str, str] = ("--blocks N or --model", "--model")
    """Options that give the number of blocks, and the layers, for the sentences."""

    @property
    def depth(self) -> int | None:
        """The number of blocks, as given or as counted; None if it is not known."""
        return blocks_in(self.layers) if self.layers else self.blocks


def unheld(
    recipe: Recipe,
    model: Model,
    target: str,
    *,
    schedule: bool = False,
    rules: bool = False,
    routed: bool = False,
    counts: bool = False,
) -> Iterator[str]:
    """Yield the fields beside the products that a target cannot hold.

    Args:
        recipe: the recipe.
        model: facts of the model.
        target: name of the stack, for the sentences.
        schedule: True if the target holds phases that start at a counted step.
        rules: True if the target holds rules for single layers, or does when it knows the model.
        routed: True if the target pads experts with tokens.
        counts: True if the target counts blocks at both ends, and so must know how many a fraction is.

    Raises:
        Lost: an operand calls a function of the user's, which no target has.
    """
    if own := [f"{path} {word}: {target} cannot call your function" for path, word in own_words(recipe)]:
        raise Lost(*own)
    unwritten = [*_unwritten(recipe, target)]
    yield from unwritten
    yield from unheld_experts(recipe, target, routed)
    usual = type(recipe.weights)()
    for name in type(recipe.weights).model_fields:
        if (value := getattr(recipe.weights, name)) != getattr(usual, name):
            shown = value if isinstance(value, str) else "on"
            off = as_word(getattr(usual, name))
            yield f"weights.{name} {shown}: {target} has no such rule; write {off}"
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
    if counts and recipe.layers.last_fraction and model.depth is None:
        yield (
            f"layers.last_fraction {recipe.layers.last_fraction:g}: {target} counts blocks, and their number"
            f" is not known; give {model.by[0]}"
        )
    if rules and not unwritten:  # rules with an unknown field may select other layers
        yield from rules_for_one(recipe, model.layers, target)
    elif not rules:
        for number, rule in enumerate(recipe.layers.rules):
            yield f"layers.rules.{number} {rule.match}: {target} has no rules for single layers; write []"


def skipped(recipe: Recipe, depth: int | None) -> tuple[int, int]:
    """Return how many blocks at the input and at the output the counts leave in high precision.

    Args:
        recipe: the recipe.
        depth: number of the model's blocks. None: a fraction of the blocks counts for nothing.
    """
    counts = recipe.layers
    if not counts.last_fraction or depth is None:
        return counts.skip_first, counts.skip_last
    return counts.skip_first, depth - 1 - max(
        (b for b in range(depth) if counts.quantises(b, depth)), default=-1
    )


def _unwritten(recipe: Recipe, target: str) -> Iterator[str]:
    """Yield the fields around the products that no target knows, such as those added to recipes later."""
    parts: list[tuple[str, type[Spec], Spec]] = [
        ("", Recipe, recipe),
        ("layers.", Layers, recipe.layers),
        ("experts.", Experts, recipe.experts),
    ]
    for number, rule in enumerate(recipe.layers.rules):
        parts.append((f"layers.rules.{number}.", Rule, rule))
        parts.append((f"layers.rules.{number}.match.", Match, rule.match))
    for number, phase in enumerate(recipe.schedule):
        parts.append((f"schedule.{number}.", Phase, phase))
    for path, kind, spec in parts:
        for name, field in type(spec).model_fields.items():
            value = getattr(spec, name)
            if name not in _WRITTEN[kind] and value != field.get_default(call_default_factory=True):
                yield f"{path}{name} {value}: {target} has nothing that this is translated to"


def confirmed(recipe: Recipe, made: Recipe, model: Model, what: str) -> None:
    """Compare a recipe with the one that a target's output stands for.

    Args:
        recipe: the recipe that was to be written.
        made: the recipe read back from what was written.
        model: facts of the model, by which counts and rules are compared layer by layer.
        what: what would stand for another recipe, for the sentences.

    Raises:
        Lost: for each field that differs.
    """
    placed = ("layers", *DIRECTIONS["all"]) if model.layers else ("layers",)
    reasons = [
        f"{path} {as_word(value)}: {what} would stand for {as_word(other)}"
        for path, value, other in changes(as_data(recipe), as_data(made))
        if path.partition(".")[0] not in placed
    ]
    if not _same_layers(recipe, made, model):
        reasons.append(f"layers: {what} would quantise other layers")
    if reasons:
        raise Lost(*reasons)


def _same_layers(recipe: Recipe, made: Recipe, model: Model) -> bool:
    """Return True if both recipes assign every layer the same products."""
    if model.layers:
        return _assigned(recipe, model.layers) == _assigned(made, model.layers)
    return recipe.layers.rules == made.layers.rules and _counts(recipe, model) == _counts(made, model)


def _assigned(recipe: Recipe, layers: Sequence[Layer]) -> dict[str, Products]:
    deciders = recipe.layers.deciders(layers)
    return {name: recipe.decided(decider) or Products() for name, decider in deciders.items()}


def _counts(recipe: Recipe, model: Model) -> object:
    depth = model.depth
    if depth is None:
        return recipe.layers.skip_first, recipe.layers.skip_last, recipe.layers.last_fraction
    return [recipe.layers.quantises(block, depth) for block in range(depth)]
