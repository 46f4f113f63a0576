"""The check of an assignment: other choices of equal share, and the experiment that compares them.

A map is noisy, and the choice with the least of noisy numbers looks better than it is. So it is compared, at
its own errors and on seeds that the map has not, with what people do without a map: the last layers or both
ends in high precision; and with random choices, which show what any choice of that share is worth.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ablate.experiment.load import Experiment
from ablate.experiment.yaml_document import with_values
from ablate.files import Json
from ablate.recipes import PRESETS
from ablate.recipes.cells import Cell, within
from ablate.recipes.recipe import DIRECTIONS, SLOTS, Recipe
from ablate.results.assignment import Assignment, Map, Part, Unit

RANDOM = 5
"""Number of random choices among the controls."""
CLOSE = 0.01
"""Largest difference of a control's share of FLOPs in FP4 from the assignment's."""
ASSIGNED, FEWEST = "assignment", 8
"""Name of the assignment's arm, and the smallest number of seeds, of the experiment that checks it."""
_TRIES = 2000
"""Random choices that are drawn at most, to find some of that share."""


def controls(measured: Map, best: Assignment, unit: Unit = "layer", seed: int = 0) -> dict[str, Recipe]:
    """Return other choices with the same share of FLOPs in FP4, within `CLOSE`: the last layers in high
    precision, those at both ends, and random ones, drawn layer by layer (or product by product).

    A layer that would exceed the share is left out in favour of the next one that does not. Random choices
    that are found twice, or are the assignment, count once: there may be fewer than `RANDOM`.

    Args:
        measured: The map.
        best: The assignment.
        unit: What the random choices are drawn from.
        seed: Seed of the draws.
    """
    layers, everything = measured.layers, {*measured.sizes}
    whole = [[(layer.name, product) for product in DIRECTIONS["all"]] for layer in layers]
    inwards = sorted(range(len(whole)), key=lambda number: (min(number, len(whole) - 1 - number), -number))
    orders = {"last layers": whole[::-1], "both ends": [whole[number] for number in inwards]}
    left = {name: everything - _kept(measured, order, best.share) for name, order in orders.items()}
    pool = whole if unit == "layer" else [[part] for parts in whole for part in parts]
    draw = np.random.default_rng(seed)
    for _ in range(_TRIES):
        fp4 = everything - _kept(
            measured, [pool[number] for number in draw.permutation(len(pool))], best.share
        )
        if abs(sum(measured.sizes[part] for part in fp4) - best.share) <= CLOSE and fp4 not in left.values():
            left[f"random {len(left) - len(orders) + 1}"] = fp4
        if len(left) == len(orders) + RANDOM:
            break
    recipes: dict[str, Recipe] = {}
    for name, fp4 in left.items():
        cells = [
            Cell((layer.name,), tuple(slot for slot in SLOTS if (layer.name, slot.split(".")[0]) in fp4))
            for layer in layers
        ]
        recipe = within(measured.recipe, layers, cells)
        if recipe not in (best.recipe, *recipes.values()):
            recipes[name] = recipe
    return recipes


def _kept(measured: Map, order: Sequence[Sequence[Part]], share: float) -> set[Part]:
    """Return the first parts in this order that may be in high precision if the share is to be in FP4."""
    kept: set[Part] = set()
    left = sum(measured.sizes.values())
    for parts in order:
        size = sum(measured.sizes.get(part, 0.0) for part in parts)
        if left - size >= share - CLOSE:
            kept |= {*parts}
            left -= size
    return kept


def check_of(
    experiment: Experiment,
    recipe: Recipe,
    others: Mapping[str, Recipe],
    share: float,
    used: Collection[int] = (),
) -> str:
    """Return the experiment that compares an assignment with its controls, on seeds that the map has not.

    Workload, design and engine are the experiment's; without a design, workloads that can be forked are.

    Args:
        experiment: That of the map, or another on the same model.
        recipe: The assignment's recipe, which has other layers than the experiment's, and else the same.
        others: Recipes of the controls by name.
        share: Share of FLOPs in FP4, for the question.
        used: Seeds that the map has beside the experiment's, as by `--seeds`.
    """
    config, keys = experiment.base.config, experiment.keys
    design = keys.design.model_dump(mode="json", exclude_defaults=True) if keys.design else {}
    whole = f"all in {experiment.base.preset}"
    forked = keys.design or (config.forks and not config.own_code)
    first = max([*experiment.seeds, *used]) + 1
    base = experiment.base.arm({}).recipe
    arms: dict[str, Json] = {
        ASSIGNED: _knobs(recipe, base),
        **{name: _knobs(other, base) for name, other in others.items()},
        "bf16": {"recipe": "bf16"},
        whole: {},
    }
    question = (
        f"With {100 * share:.3g} % of the FLOPs in FP4, is the map's choice of layers better than the last"
        " layers, both ends and random ones?"
    )
    values: dict[str, Json] = {
        "question": question,
        "arms": arms,
        "answer": {"family": "arms"},
        "against": ASSIGNED,
        "seeds": list(range(first, first + max(FEWEST, len(experiment.seeds)))),
        "design": {"horizons": [1], **design, "bad": whole} if forked else None,
        **dict.fromkeys(("ablate", "map", "search", "published", "constraints", "budget", "null")),
    }
    return with_values(experiment.text, values)


def _knobs(recipe: Recipe, base: Recipe) -> dict[str, Json]:
    """Return the knobs that give the base the layers of a recipe."""
    before = layer_fields(base)
    fields = layer_fields(recipe).items()
    return {f"recipe.layers.{name}": value for name, value in fields if value != before[name]}


def layer_fields(recipe: Recipe) -> dict[str, Json]:
    """Return the fields of a recipe's layers as data, without the defaults of the products of its rules."""
    rules: list[Json] = []
    for rule in recipe.layers.rules:
        use = None if rule.use is None else rule.use.model_dump(mode="json", exclude_defaults=True)
        rules.append({"match": rule.match.model_dump(mode="json"), **({} if use is None else {"use": use})})
    return {**recipe.layers.model_dump(mode="json", exclude={"rules"}), "rules": rules}


def file_of(recipe: Recipe) -> Json:
    """Return a recipe file's content: a preset and what differs in its layers, else the whole recipe."""
    for name, preset in PRESETS.items():
        base = preset()
        if recipe.model_copy(update={"layers": base.layers}) == base:
            before = layer_fields(base)
            layers = {key: value for key, value in layer_fields(recipe).items() if value != before[key]}
            return {"from": name, "layers": layers}
    return recipe.model_dump(mode="json")
