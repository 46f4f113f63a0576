"""Facts of the user's model that a target may need, and the fields that no target can hold."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ablate.files import Json
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
    """A target cannot hold a recipe: `reasons` are sentences that begin with the path of a field, such as
    `schedule.0.start decay: ...`, each once.
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
    """Yield the fields beside the products that a target cannot hold; Lost if an operand calls a function of
    the user's, which no target has.

    A target may hold phases that start at a counted step (`schedule`) and rules for single layers, perhaps
    only when it knows the model (`rules`); pad experts with tokens (`routed`); and count blocks at both ends,
    so that it must know how many a fraction is (`counts`).
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
        start = f"schedule.{number}.start {phase.start}"
        if not schedule:
            why = f"{target} has one configuration for the whole run"
            yield f"{start}: {why}; change it at a checkpoint, and write []"
        elif phase.trigger:
            yield f"{start}: {target} measures no noise; use step:n"
    share = recipe.layers.last_fraction
    if counts and share and model.depth is None:
        why = f"{target} counts blocks, and their number is not known"
        yield f"layers.last_fraction {share:g}: {why}; give {model.by[0]}"
    if rules and not unwritten:  # rules with an unknown field may select other layers
        yield from rules_for_one(recipe, model.layers, target)
    elif not rules:
        for number, rule in enumerate(recipe.layers.rules):
            yield f"layers.rules.{number} {rule.match}: {target} has no rules for single layers; write []"


def skipped(recipe: Recipe, depth: int | None) -> tuple[int, int]:
    """Return how many blocks at the input and at the output the counts leave in high precision; in a model of
    unknown depth a fraction of the blocks counts for nothing.
    """
    counts = recipe.layers
    if not counts.last_fraction or depth is None:
        return counts.skip_first, counts.skip_last
    return counts.skip_first, depth - 1 - max(
        (b for b in range(depth) if counts.quantises(b, depth)), default=-1
    )


def _unwritten(recipe: Recipe, target: str) -> Iterator[str]:
    """Yield the fields around the products that no target knows, such as those added to recipes later."""
    parts: list[tuple[str, Spec]] = [("", recipe), ("layers.", recipe.layers), ("experts.", recipe.experts)]
    for number, rule in enumerate(recipe.layers.rules):
        parts += [(f"layers.rules.{number}.", rule), (f"layers.rules.{number}.match.", rule.match)]
    parts += [(f"schedule.{number}.", phase) for number, phase in enumerate(recipe.schedule)]
    for path, spec in parts:
        written = next(names for kind, names in _WRITTEN.items() if isinstance(spec, kind))
        for name, field in type(spec).model_fields.items():
            value = getattr(spec, name)
            if name not in written and value != field.get_default(call_default_factory=True):
                yield f"{path}{name} {value}: {target} has nothing that this is translated to"


def confirmed(recipe: Recipe, made: Recipe, model: Model, what: str) -> None:
    """Compare the recipe that was to be written with the one that was read back, in this model layer by
    layer; Lost for each field in which `what` was written would stand for another.
    """
    placed = ("layers", *DIRECTIONS["all"]) if model.layers else ("layers",)
    reasons = [
        f"{path} {as_word(value)}: {what} would stand for {as_word(other)}"
        for path, value, other in changes(as_data(recipe), as_data(made))
        if path.partition(".")[0] not in placed
    ]
    if _assigned(recipe, model) != _assigned(made, model):
        reasons.append(f"layers: {what} would quantise other layers")
    if reasons:
        raise Lost(*reasons)


def _assigned(recipe: Recipe, model: Model) -> object:
    """Return the products of every layer; of a model whose layers are not known, the rules and the counts."""
    counts, depth = recipe.layers, model.depth
    if model.layers:
        deciders = counts.deciders(model.layers)
        return {name: recipe.decided(decider) or Products() for name, decider in deciders.items()}
    if depth is None:
        return counts.rules, counts.skip_first, counts.skip_last, counts.last_fraction
    return counts.rules, [counts.quantises(block, depth) for block in range(depth)]


def comparable(one: Recipe, other: Recipe, model: Model) -> tuple[dict[str, Json], dict[str, Json]]:
    """Return both recipes as data in which equal placements of layers are equal. Layers are compared one by
    one if they are known, by block if all rules name blocks, else as they are written."""
    layers, rules = model.layers, (*one.layers.rules, *other.layers.rules)
    by_block = bool(rules) and all({*rule.match.fields} == {"blocks"} for rule in rules)
    if not layers and by_block and model.depth is not None:
        layers = tuple(Layer(f"block {block}", block, frozenset()) for block in range(model.depth))
    if not layers:
        return _counted(one, "the intended recipe", model), _counted(other, "the job", model)
    return _placed(one, layers), _placed(other, layers)


def _placed(recipe: Recipe, layers: Sequence[Layer]) -> dict[str, Json]:
    """Return a recipe with the products of each layer: a word, or all their fields."""
    placed: dict[str, Json] = {}
    for name, decider in recipe.layers.deciders(layers).items():
        products = recipe.decided(decider)
        if products is None or products.plain:
            placed[name] = "high precision"
        elif products == recipe.products:
            placed[name] = "the recipe's products"
        else:
            placed[name] = products.model_dump(mode="json")
    return recipe.model_dump(mode="json", exclude={"layers"}) | {"layers": placed}


def _counted(recipe: Recipe, side: str, model: Model) -> dict[str, Json]:
    """Return a recipe with the numbers of high-precision blocks at both ends; Lost, which names the side, if
    it counts a share of an unknown number."""
    if share := recipe.layers.last_fraction:
        if model.depth is None:
            raise Lost(
                f"layers.last_fraction {share:g}: {side} counts a share of the blocks, and their number is"
                " not known; give --blocks N, --model, or --num-layers among Megatron's arguments"
            )
        first, last = skipped(recipe, model.depth)
        counted = Layers(skip_first=first, skip_last=last, rules=recipe.layers.rules)
        recipe = recipe.model_copy(update={"layers": counted})
    return recipe.model_dump(mode="json")
