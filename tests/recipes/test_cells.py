"""A recipe in some cells alone quantises exactly those operands of those layers."""

import random
from typing import get_args

import pytest

from ablate.recipes import PRESETS
from ablate.recipes.cells import Cell, What, Where, grid, within
from ablate.recipes.layers import located
from ablate.recipes.recipe import SLOTS, Recipe

KINDS = ("attn.qkv", "attn.proj", "mlp.up", "mlp.down")
LAYERS = located({f"blocks.{block}.{kind}": ["Linear"] for block in range(4) for kind in KINDS})
QUANTISING = [name for name, preset in PRESETS.items() if not preset().plain]


def quantised(recipe):
    """Return each pair of a layer and an operand that a recipe quantises."""
    return {
        (layer.name, slot)
        for placed in recipe.placements(LAYERS)
        for layer in placed.layers
        for slot, _ in (placed.products.quantised() if placed.products else ())
    }


def pairs(cells):
    return {(name, slot) for cell in cells for name in cell.layers for slot in cell.slots}


@pytest.mark.parametrize("preset", QUANTISING)
def test_a_recipe_within_cells_quantises_those_and_no_other(preset):
    recipe, draw = PRESETS[preset](), random.Random(7)
    everything = quantised(recipe)
    for _ in range(8):
        where, what = draw.choice(get_args(Where)), draw.choice(get_args(What))
        cells = grid(recipe, LAYERS, where, what)
        assert pairs(cells.values()) >= everything
        chosen = draw.sample(sorted(cells), draw.randint(1, len(cells)))
        inside = within(recipe, LAYERS, [cells[name] for name in chosen])
        assert quantised(inside) == everything & pairs(cells[name] for name in chosen)
        assert Recipe.model_validate_json(inside.model_dump_json()) == inside


def test_all_cells_together_are_the_recipe_itself():
    recipe = PRESETS["nvfp4"]()
    assert within(recipe, LAYERS, grid(recipe, LAYERS, "layers", "operands").values()) == recipe


@pytest.mark.parametrize(("rules", "where", "names"), [
    (0, "blocks", ["block 1"]), (2, "kinds", ["mlp.up"]), (0, "blocks", ["block 0", "block 1"]),
    (2, "blocks", ["block 0", "block 2"]), (3, "layers", ["blocks.0.mlp.up", "blocks.1.attn.qkv"]),
    (1, "kinds", ["mlp.up", "mlp.down", "attn.proj"]), (2, "layers", ["blocks.0.mlp.up", "blocks.1.mlp.up"]),
])  # fmt: skip
def test_layers_are_selected_by_the_shortest_rules(rules, where, names):
    """Without any, where only whole blocks at the ends stay in high precision."""
    recipe = PRESETS["nvfp4"]()
    cells = grid(recipe, LAYERS, where, "recipe")
    inside = within(recipe, LAYERS, [cells[name] for name in names])
    assert len(inside.layers.rules) == rules
    assert quantised(inside) == pairs(cells[name] for name in names)


@pytest.mark.parametrize("seed", range(20))
def test_any_choice_of_layers_has_rules_for_it_alone(seed):
    recipe, draw = PRESETS["nvfp4"](), random.Random(seed)
    chosen = draw.sample(LAYERS, draw.randint(1, len(LAYERS)))
    inside = within(recipe, LAYERS, [Cell(tuple(layer.name for layer in chosen), SLOTS)])
    assert quantised(inside) == {(layer.name, slot) for layer in chosen for slot in SLOTS}
    assert len(inside.layers.rules) <= min(len(chosen) + 1, len(LAYERS) - len(chosen))


def test_a_lost_forward_copy_becomes_a_cast_of_the_original():
    recipe = PRESETS["nvfp4"]()
    wgrad = recipe.wgrad.model_copy(update={"x": recipe.wgrad.x.model_copy(update={"source": "forward"})})
    recipe = recipe.model_copy(update={"wgrad": wgrad})
    alone = within(recipe, LAYERS, [Cell(("blocks.0.mlp.up",), ("wgrad.x",))])
    assert alone.layers.rules[0].use.wgrad.x.source == "original"


def test_a_plain_recipe_has_no_cell():
    with pytest.raises(ValueError, match="no layer"):
        grid(PRESETS["bf16"](), LAYERS, "model", "recipe")
    assert set(SLOTS) == {slot for cell in grid(PRESETS["nvfp4"](), LAYERS, "model", "products").values()
                          for slot in cell.slots}  # fmt: skip
