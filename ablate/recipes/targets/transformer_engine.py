"""Python for Transformer Engine: recipe objects with every argument, and functions that choose among them.

TE's classes take defaults from environment variables when they are imported, and Float8CurrentScaling takes
its quantisers' parameters from them whatever its arguments say. So every argument is written, and those
parameters are set on the object. te_file.py.j2 is the file; this module decides what stands in it.
"""

import json
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product
from pathlib import Path

from ablate.numerics.spec import argument, tag
from ablate.recipes.recipe import Phase, Products, Recipe
from ablate.recipes.targets.experts import has_experts, quantised_expert
from ablate.recipes.targets.megatron import standing_in
from ablate.recipes.targets.model import Lost, Model, confirmed, unheld
from ablate.recipes.te_import import recipe_of
from ablate.recipes.te_mapping import (
    TE_ELEMENTS,
    TENSORS,
    Builtin,
    Custom,
    canonical,
    recipe_refusals,
    te_recipe,
)

_MOST_PHASES = 3
_TEMPLATE = Path(__file__).with_name("te_file.py.j2")


def write(recipe: Recipe, model: Model) -> str:
    """Return Python code that makes the recipe of each layer and step; Lost for what TE does not compute."""
    from jinja2 import StrictUndefined, Template

    reasons = [*unheld(recipe, model, "Transformer Engine", schedule=True, rules=True)]
    reasons += [*recipe_refusals(recipe, weights=False), *_delayed(recipe)]
    if recipe.layers.rules and not model.layers:
        reasons.append(f"layers.rules: the layers that they select are not known; give {model.by[1]}")
    if len(recipe.schedule) > _MOST_PHASES:
        reasons.append(f"schedule: {len(recipe.schedule)} phases; {_MOST_PHASES} at most are written out")
    if reasons:
        raise Lost(*reasons)
    names: dict[Builtin | Custom, str] = {}
    own = _by_phase(recipe.products, recipe.schedule, names)
    rules = [rule.use and _by_phase(rule.use, recipe.schedule, names) for rule in recipe.layers.rules]
    classes = {made.name if isinstance(made, Builtin) else "CustomRecipe" for made in names}
    parameters = {"MMParams", "QParams"} if "Float8CurrentScaling" in classes else set()
    counts, deciders = recipe.layers, recipe.layers.deciders(model.layers) if rules else {}
    share, last = Fraction(repr(counts.last_fraction)), str(counts.skip_last or "")
    if share:
        rounded_up = f"-(-{share.numerator} * blocks // {share.denominator})"
        last = f"max({last}, {rounded_up})" if last else rounded_up
    quantised_experts = quantised_expert(recipe, model.layers) is not None
    text = _TEMPLATE.read_text(encoding="utf-8")
    return Template(
        text, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    ).render(
        label=model.label,
        elements=TE_ELEMENTS,
        tensors=TENSORS,
        objects=names.items(),
        imported=sorted(classes | parameters | {"Format"}),
        starts={tag(phase.start) for phase in recipe.schedule},
        phases=[*map(_condition, recipe.schedule)],
        own=own,
        rules=rules,
        decided=[(repr(name), rule if isinstance(rule, int) else None) for name, rule in deciders.items()],
        shown=[
            (layer.block, json.dumps(layer.name))
            for layer in model.layers
            if layer.block == model.layers[0].block
        ][:2],
        first=f"{counts.skip_first} <= block" if counts.skip_first else "block",
        share=share,
        last=last,
        refuses_experts=quantised_experts or not has_experts(model.layers),
    )


def _by_phase(products: Products, schedule: Sequence[Phase], names: dict[Builtin | Custom, str]) -> str:
    """Return the object of some products, or a mapping to objects from each combination of active phases.

    Later phases override earlier ones. `names` gets the objects that it does not have yet.
    """
    found = {}
    for active in product((False, True), repeat=len(schedule)):
        current = products
        for phase, on in zip(schedule, active, strict=True):
            if on:
                current = current.replaced(phase.slots, phase.use or Products())
        found[active] = _named(current, names)
    if not schedule:
        return found[()]
    return "{" + ", ".join(f"{active!r}: {name}" for active, name in found.items()) + "}"


def _named(products: Products, names: dict[Builtin | Custom, str]) -> str:
    """Return the name of the object that computes these products; `None` if nothing is quantised."""
    description = te_recipe(products)
    if description is None:
        return "None"
    if isinstance(description, Builtin):
        made = recipe_of(standing_in(description.name, dict(description.options)))
        confirmed(Recipe.of(canonical(products)), made, Model(), "Transformer Engine's file")
    return names.setdefault(description, f"RECIPE_{len(names) + 1}" if names else "RECIPE")


def _delayed(recipe: Recipe) -> Iterator[str]:
    for slot, quant in recipe.quantised():
        if quant.outer and tag(quant.outer.statistic) == "delayed":
            yield (
                f"{slot}.outer.statistic {quant.outer.statistic}: TE's DelayedScaling advances its histories"
                " at each autocast region, not once a step, and begins at 1; use amax"
            )
            return


def _condition(phase: Phase) -> str:
    number = Fraction(argument(phase.start) or 0)
    match tag(phase.start):
        case "step":
            return f"step >= {int(number)}"
        case "tokens":
            return f"step * tokens_per_step >= {int(number)}"
        case "fraction":
            return f"step * {number.denominator} >= {number.numerator} * steps"
    return "decay is not None and step >= decay"
