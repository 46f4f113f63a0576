"""Short knobs: each sets paths that exist, values it accepts give valid recipes, and the nvfp4 preset is its own knobs' values."""

import pytest
from pydantic import ValidationError

from ablate.recipes import KNOBS, PRESETS, SLOTS, Recipe

VALUES = {
    "rht": [True, False],
    "sr": [True, False],
    "weights_2d": [True, False],
    "amax_percentile": [0.999, 1.0, None],
    "cooldown": [0.0, 0.1, 0.15, 1.0],
    "skip_first": [0, 2],
    "skip_last": [0, 2],
}
CASES = [(name, value) for name in KNOBS for value in VALUES.get(name, [])]


def turned(recipe: Recipe, name: str, value) -> Recipe:
    """`recipe` with a short knob set, by walking its dump: independent of how experiments apply paths."""
    tree = recipe.model_dump()
    for path, leaf in KNOBS[name].paths(KNOBS[name].check(value)).items():
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node[parent]
        assert last in node, f"{name} sets {path}, which is not in the recipe"
        node[last] = leaf
    return Recipe.model_validate(tree)


def test_every_knob_is_tested_here():
    assert set(KNOBS) == set(VALUES)


@pytest.mark.parametrize("name", KNOBS)
def test_a_knob_says_what_it_is_for(name):
    assert KNOBS[name].help.endswith(".")
    assert KNOBS[name].values


@pytest.mark.parametrize(("name", "value"), CASES)
def test_a_knobs_value_makes_a_valid_recipe_of_nvfp4(name, value):
    assert isinstance(turned(PRESETS["nvfp4"](), name, value), Recipe)


@pytest.mark.parametrize("name", KNOBS)
def test_different_values_make_different_recipes(name):
    recipes = {turned(PRESETS["nvfp4"](), name, value) for value in VALUES[name]}
    assert len(recipes) == len(VALUES[name])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rht", True),
        ("sr", True),
        ("weights_2d", True),
        ("amax_percentile", None),
        ("cooldown", 0.0),
        ("skip_first", 0),
        ("skip_last", 0),
    ],
)
def test_nvfp4_is_what_its_knobs_say(name, value):
    assert turned(PRESETS["nvfp4"](), name, value) == PRESETS["nvfp4"]()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rht", 1),
        ("rht", "yes"),
        ("sr", None),
        ("skip_first", 1.5),
        ("skip_first", True),
        ("amax_percentile", "high"),
        ("cooldown", "long"),
    ],
)
def test_a_value_of_another_type_is_refused(name, value):
    with pytest.raises(ValidationError):
        KNOBS[name].check(value)


@pytest.mark.parametrize(("name", "value"), [("amax_percentile", 1.5), ("amax_percentile", 0.0), ("cooldown", 1.5), ("skip_last", -1)])
def test_a_value_out_of_range_is_refused(name, value):
    with pytest.raises(ValidationError):
        turned(PRESETS["nvfp4"](), name, value)


def test_rht_off_leaves_wgrad_unrotated():
    assert turned(PRESETS["nvfp4"](), "rht", False).wgrad.hadamard is None


def test_sr_off_rounds_every_operand_to_nearest():
    assert {turned(PRESETS["nvfp4"](), "sr", False).slot(slot).rounding for slot in SLOTS} == {"nearest"}


def test_weights_2d_off_gives_both_weight_copies_1x16_blocks():
    assert {turned(PRESETS["nvfp4"](), "weights_2d", False).slot(slot).block for slot in SLOTS} == {"1x16"}


def test_amax_percentile_reaches_all_six_operands():
    recipe = turned(PRESETS["nvfp4"](), "amax_percentile", 0.999)
    assert {recipe.slot(slot).outer.statistic for slot in SLOTS} == {"percentile:0.999"}


@pytest.mark.parametrize(("fraction", "first"), [(0.1, 9), (0.5, 5), (0.3, 7), (1.0, 0), (0.0, None)])
def test_cooldown_is_the_fraction_of_the_run_at_its_end_in_bf16(fraction, first):
    recipe = turned(PRESETS["nvfp4"](), "cooldown", fraction)
    high = [step for step in range(10) if recipe.at(step, 10).plain]
    assert high == ([] if first is None else list(range(first, 10)))
