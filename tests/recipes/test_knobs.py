"""Short knobs: each sets paths that exist, values it accepts give valid recipes, and the nvfp4 preset is its own knobs' values."""

from typing import Literal, get_args, get_origin

import pytest
from pydantic import ValidationError
from support.cases import every

from ablate.experiment.arms import KnobError, StartingPoint
from ablate.experiment.schema import json_schema
from ablate.numerics.choices import STATISTICS
from ablate.numerics.formats import ELEMENTS
from ablate.recipes import KNOBS, PRESETS, SLOTS, Recipe, Turn
from ablate.recipes.layers import located
from ablate.recipes.recipe import Phase, Run

NVFP4 = PRESETS["nvfp4"]()
GRADIENTS, WEIGHTS = {"dgrad.g", "wgrad.g"}, {"fprop.w", "dgrad.w"}
VALUES = {
    name: list(get_args(knob.type)) for name, knob in KNOBS.items() if get_origin(knob.type) is Literal
} | {
    "rht": [True, False],
    "sr": [True, False],
    "element": [*ELEMENTS],
    "sr_headroom": [1.0, 1.0625, 2.0],
    "weights_2d": [True, False],
    "four_over_six": ["mse", "mae", "absmax", None],
    "amax_percentile": [0.999, 1.0, None],
    "cooldown": [0.0, 0.1, 0.15, 1.0],
    "skip_first": [0, 2],
    "skip_last": [0, 2],
    "weight_noise": [0.01, 0.05, None],
}
NEEDS = {"cooldown_slots": {"cooldown": 0.1}}
"""Knobs without an effect of their own."""
CASES = [(name, value) for name in KNOBS for value in VALUES.get(name, [])]


def set_paths(recipe: Recipe, knobs: dict) -> Recipe:
    """`recipe` with short knobs set, by walking its dump: independent of how experiments apply paths."""
    tree = recipe.model_dump()
    for name, value in knobs.items():
        others = {other: v for other, v in knobs.items() if other in KNOBS}
        for path, leaf in KNOBS[name].paths(KNOBS[name].check(value), Turn(recipe, others)).items():
            *parents, last = path.split(".")
            node = tree
            for parent in parents:
                node = node[parent]
            assert last in node, f"{name} sets {path}, which is not in the recipe"
            node[last] = leaf
    return Recipe.model_validate(tree)


def turned(recipe: Recipe, name: str, value) -> Recipe:
    """One knob turned, together with what it needs."""
    return set_paths(recipe, {name: value, **NEEDS.get(name, {})})


def arm(knobs: dict, preset: str = "nvfp4") -> Recipe:
    """Return the recipe that an experiment makes of the knobs."""
    return StartingPoint("gpt", {"layers": 2}, preset).arm(knobs).recipe


def refused(knobs: dict, preset: str = "nvfp4") -> dict[str | None, str]:
    """Return the reason why an experiment refuses the knobs."""
    with pytest.raises(KnobError) as refusal:
        arm(knobs, preset)
    return dict(refusal.value.reasons)


def test_every_knob_is_tested_here():
    assert set(KNOBS) == set(VALUES)


@every(name=KNOBS)
def test_a_knob_says_what_it_is_for(name):
    assert KNOBS[name].help.endswith(".")
    assert KNOBS[name].values


@every(name__value=CASES)
def test_a_knobs_value_makes_a_valid_recipe_of_nvfp4(name, value):
    assert isinstance(turned(NVFP4, name, value), Recipe)


@every(name=KNOBS)
def test_different_values_make_different_recipes(name):
    recipes = {turned(NVFP4, name, value) for value in VALUES[name]}
    assert len(recipes) == len(VALUES[name])


@every(
    name__value=[
        ("rht", True),
        ("rht_size", 16),
        ("rht_signs", "fixed"),
        ("fprop", "fp4"),
        ("dgrad", "fp4"),
        ("wgrad", "fp4"),
        ("sr", True),
        ("sr_bits", 8),
        ("sr_headroom", 1.0),
        ("weights_2d", True),
        ("block", "1x16"),
        ("element", "e2m1"),
        ("scale_format", "e4m3"),
        ("four_over_six", None),
        ("amax_percentile", None),
        ("cooldown", 0.0),
        ("skip_first", 0),
        ("skip_last", 0),
    ]
)
def test_nvfp4_is_what_its_knobs_say(name, value):
    assert turned(NVFP4, name, value) == NVFP4


@every(
    name__value=[
        ("rht", 1),
        ("rht", "yes"),
        ("sr", None),
        ("skip_first", 1.5),
        ("skip_first", True),
        ("amax_percentile", "high"),
        ("cooldown", "long"),
        ("rht_size", 12),
        ("rht_signs", None),
        ("sr_bits", 12),
        ("block", "16x16"),
        ("block", 16),
        ("element", None),
        ("four_over_six", True),
        ("cooldown_slots", "wgrad"),
    ]
)
def test_a_value_of_another_type_is_refused(name, value):
    with pytest.raises(ValidationError):
        KNOBS[name].check(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("amax_percentile", 1.5),
        ("amax_percentile", 0.0),
        ("cooldown", 1.5),
        ("skip_last", -1),
        ("sr_headroom", 0.0),
        ("sr_headroom", 5.0),
    ],
)
def test_a_value_out_of_range_is_refused(name, value):
    with pytest.raises(ValidationError):
        turned(NVFP4, name, value)


def test_rht_off_leaves_wgrad_unrotated():
    assert turned(NVFP4, "rht", False).wgrad.hadamard is None


def test_sr_off_rounds_every_operand_to_nearest():
    assert {turned(NVFP4, "sr", False).slot(slot).rounding for slot in SLOTS} == {"nearest"}


def test_weights_2d_off_gives_both_weight_copies_1x16_blocks():
    assert {turned(NVFP4, "weights_2d", False).slot(slot).block for slot in SLOTS} == {"1x16"}


def test_amax_percentile_reaches_all_six_operands():
    recipe = turned(NVFP4, "amax_percentile", 0.999)
    assert {recipe.slot(slot).outer.statistic for slot in SLOTS} == {"percentile:0.999"}


@pytest.mark.parametrize(("fraction", "first"), [(0.1, 9), (0.5, 5), (0.3, 7), (1.0, 0), (0.0, None)])
def test_cooldown_is_the_fraction_of_the_run_at_its_end_in_bf16(fraction, first):
    recipe = turned(NVFP4, "cooldown", fraction)
    high = [step for step in range(10) if recipe.at(step, Run(10)).plain]
    assert high == ([] if first is None else list(range(first, 10)))


@every(name=KNOBS)
def test_an_experiment_sets_what_the_knob_sets(name):
    for value in VALUES[name]:
        knobs = {name: value, **NEEDS.get(name, {})}
        if name in ("skip_first", "skip_last") and value == 2:
            assert "nothing is quantised" in refused(knobs)[name]
        else:
            assert arm(knobs) == set_paths(NVFP4, knobs)


# --- together -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("knobs", "rotation"),
    [
        ({"rht": True, "rht_size": 64}, (64, "fixed")),
        ({"rht": True, "rht_signs": "per_step"}, (16, "per_step")),
        ({"rht": True, "rht_size": 32, "rht_signs": "none"}, (32, "none")),
        ({"rht_size": 4, "rht_signs": "per_call"}, (4, "per_call")),
    ],
)
def test_size_and_signs_compose_with_rht_in_any_order(knobs, rotation, order):
    recipe = arm(dict(list(knobs.items())[::order]))
    assert (recipe.wgrad.hadamard.size, recipe.wgrad.hadamard.signs) == rotation
    assert recipe.fprop.hadamard is recipe.dgrad.hadamard is None


def test_rht_brings_the_rotation_to_a_recipe_without_one():
    recipe = arm({"rht": True, "rht_size": 32}, "fp4_all_the_way")
    assert recipe.wgrad.hadamard.size == 32
    assert "hadamard is off (null)" in refused({"rht_size": 32}, "fp4_all_the_way")["rht_size"]


@pytest.mark.parametrize("name", ["rht_size", "rht_signs"])
def test_size_and_signs_of_no_rotation_are_refused(name):
    assert "has no effect with rht false" in refused({"rht": False, name: KNOBS[name].example})[name]


@pytest.mark.parametrize(
    ("knobs", "field", "value"),
    [({"sr_bits": 24}, "bits", 24), ({"sr_headroom": 1.5}, "range.headroom", 1.5)],
)
def test_bits_and_headroom_are_of_the_gradients_alone(knobs, field, value):
    recipe = arm(knobs)
    for slot in SLOTS:
        quant = recipe.slot(slot)
        found = quant.range.headroom if field == "range.headroom" else getattr(quant, field)
        assert (found == value) is (slot in GRADIENTS)
    for slot in set(SLOTS) - GRADIENTS:
        assert recipe.slot(slot) == NVFP4.slot(slot)


def test_random_bits_without_random_rounding_are_refused():
    assert any(
        "no effect with rounding nearest" in why for why in refused({"sr": False, "sr_bits": 24}).values()
    )


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("tiles", "weights"), [(True, "16x16"), (False, "1x64")])
def test_block_and_weights_2d_compose_in_any_order(tiles, weights, order):
    recipe = arm(dict([("block", "1x64"), ("weights_2d", tiles)][::order]))
    assert {slot: recipe.slot(slot).block for slot in SLOTS} == {
        slot: weights if slot in WEIGHTS else "1x64" for slot in SLOTS
    }


def test_block_alone_leaves_weight_tiles():
    recipe = arm({"block": "1x32"})
    assert {slot for slot in SLOTS if recipe.slot(slot).block == "1x32"} == set(SLOTS) - WEIGHTS
    assert {recipe.slot(slot).block for slot in WEIGHTS} == {"16x16"}


@pytest.mark.parametrize("preset", ["mxfp4", "mxfp8", "quartet2", "four_over_six"])
def test_weights_2d_false_changes_nothing_where_weights_have_blocks_of_one_row(preset):
    assert arm({"weights_2d": False}, preset) == PRESETS[preset]()


@pytest.mark.parametrize(("criterion", "bound"), [("mse", 256.0), ("absmax", 256.0), (None, 448.0)])
def test_four_over_six_sets_the_bound_of_x_and_w_and_leaves_gradients(criterion, bound):
    recipe = arm({"four_over_six": criterion})
    for slot in set(SLOTS) - GRADIENTS:
        quant = recipe.slot(slot)
        assert quant.outer.bound == bound
        assert (quant.select and quant.select.criterion) == criterion
    assert all(recipe.slot(slot) == NVFP4.slot(slot) for slot in GRADIENTS)


# --- cooldown -------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", ["all", "forward", "backward"])
def test_a_cooldown_changes_the_slots_that_are_named(slots):
    recipe = arm({"cooldown_slots": slots, "cooldown": 0.25})
    assert recipe.at(2, Run(4)).products == NVFP4.products
    assert recipe.at(3, Run(4)).products == NVFP4.products.high_precision(slots)


@pytest.mark.parametrize("others", [{}, {"cooldown": 0.0}])
def test_slots_of_no_cooldown_are_refused(others):
    assert (
        "has no effect without cooldown" in refused({"cooldown_slots": "forward", **others})["cooldown_slots"]
    )


@pytest.mark.parametrize("preset", ["healing", "fp4_all_the_way"])
def test_a_cooldown_comes_after_the_recipes_own_phases(preset):
    own = PRESETS[preset]()
    assert arm({"cooldown": 0.0}, preset) == own
    assert arm({"cooldown": 0.5}, preset).schedule == (*own.schedule, Phase(start="fraction:0.5"))
    assert arm({"cooldown": 0.5}, preset).at(19, Run(20)).plain


# --- nothing to turn ------------------------------------------------------------------------------


def test_noise_on_weights_needs_no_quantisation():
    """The control of a recipe with noise is bf16 with noise."""
    own = PRESETS["bf16"]()
    assert arm({"weight_noise": 0.01}, "bf16").weights.noise.start == 0.01
    assert arm({"weight_noise": None}, "bf16") == own


@every(preset=["bf16", "fp32"], name__value=[case for case in CASES if case[0] != "weight_noise"])
def test_a_knob_on_a_recipe_that_quantises_nothing_says_so(name, value, preset):
    assert "does not quantise" in " ".join(refused({name: value, **NEEDS.get(name, {})}, preset).values())


@pytest.mark.parametrize("name", ["rht", "sr", "sr_bits", "sr_headroom"])
def test_a_knob_of_the_gradients_on_a_recipe_that_leaves_them_says_so(name):
    assert "does not quantise" in refused({name: KNOBS[name].example}, "row_scaled")[name]


def test_a_knob_of_the_weights_on_a_forward_in_bf16_turns_the_backward_copy():
    recipe = arm({"weights_2d": True}, "mxfp4_backward")
    assert (recipe.fprop.w, recipe.dgrad.w.block) == (None, "16x16")


# --- whole products -------------------------------------------------------------------------------


@every(
    preset=["nvfp4", "mxfp4_amd", "mxfp8_fwd_nvfp4_bwd", "nvfp4_dequantised", "quartet2"],
    name=["fprop", "dgrad", "wgrad"],
)
def test_a_product_turns_to_a_format_and_the_others_stay(preset, name):
    own = PRESETS[preset]()
    formats = {"fp4": PRESETS["nvfp4"](), "fp8": PRESETS["mxfp8"](), "bf16": PRESETS["bf16"]()}
    for how, other in formats.items():
        wanted = getattr(own if how == "fp4" and getattr(own, name).fp4 else other, name)
        lost = name == "fprop" and how == "bf16" and own.backward_needs
        if lost:  # the backward pass quantises, or multiplies, a copy that there would be no more
            assert refused({name: how}, preset)
            continue
        recipe = arm({name: how}, preset)
        assert getattr(recipe, name) == wanted
        assert all(
            getattr(recipe, rest) == getattr(own, rest) for rest in {"fprop", "dgrad", "wgrad"} - {name}
        )


@every(
    product=["fprop", "dgrad", "wgrad"],
    other__value=[
        ("rht", True),
        ("sr", False),
        ("block", "1x32"),
        ("element", "int4"),
        ("weights_2d", False),
        ("backward", "bf16"),
    ],
)
def test_two_short_knobs_that_set_one_product_are_refused(product, other, value):
    """Check that knobs that set nothing there are accepted."""
    paths = KNOBS[other].paths(value, Turn(NVFP4))
    if any(path.startswith(f"{product}.") for path in paths):
        assert refused({product: "bf16", other: value})
    else:
        assert getattr(arm({product: "bf16", other: value}), product).plain


# --- a short knob and a full path -----------------------------------------------------------------


@every(
    short__value__path__content=[
        ("rht", True, "recipe.wgrad.hadamard", None),
        ("rht", True, "recipe.wgrad.hadamard.size", 32),
        ("rht_size", 32, "recipe.wgrad.hadamard", {"size": 16}),
        ("rht_signs", "none", "recipe.wgrad.hadamard.signs", "fixed"),
        ("sr", False, "recipe.dgrad.g.rounding", "nearest"),
        ("sr_bits", 24, "recipe.wgrad.g.bits", 24),
        ("fprop", "bf16", "recipe.fprop.x.element", "int4"),
        ("dgrad", "fp8", "recipe.dgrad.g", None),
        ("wgrad", "bf16", "recipe.wgrad.hadamard.size", 32),
        ("sr_headroom", 1.5, "recipe.wgrad.g.range", {"headroom": 1.5}),
        ("weights_2d", False, "recipe.dgrad.w.block", "1x16"),
        ("block", "1x32", "recipe.fprop.x", None),
        ("element", "int4", "recipe.fprop.x.element", "int4"),
        ("scale_format", "ue5m3", "recipe.wgrad.x.scale.format", "ue5m3"),
        ("four_over_six", "mse", "recipe.fprop.w.outer.bound", 256.0),
        ("amax_percentile", 0.9, "recipe.fprop.w.outer", None),
        ("cooldown", 0.1, "recipe.schedule", []),
        ("skip_first", 1, "recipe.layers.skip_first", 1),
        ("skip_last", 1, "recipe.layers", {"skip_last": 1}),
    ],
    order=[1, -1],
)
def test_a_short_knob_and_a_full_path_on_one_field_are_refused(short, value, path, content, order):
    reasons = refused(dict([(short, value), (path, content)][::order]))
    first, second = ((short, path), (path, short))[order == -1]
    assert f"which {first} sets too; keep one of them" in reasons[second]


def test_a_short_knob_and_a_full_path_on_other_fields_go_together():
    recipe = arm({"rht": False, "recipe.wgrad.g.bits": 24, "recipe.fprop.gemm": "fp32_out"})
    assert (recipe.wgrad.hadamard, recipe.wgrad.g.bits, recipe.fprop.gemm) == (None, 24, "fp32_out")


def test_rules_that_quantise_count_where_every_block_is_kept():
    rules = [{"match": "*.mlp.*", "use": PRESETS["mxfp8"]().products.model_dump(mode="json")}]
    recipe = arm({"skip_last": 2, "recipe.layers.rules": rules})
    layers = located(
        {f"blocks.{block}.{name}": () for block in range(2) for name in ("attention.qkv", "mlp.up")}
    )
    assert [recipe.decided(decider) for decider in recipe.layers.deciders(layers).values()] == [
        None,
        PRESETS["mxfp8"]().products,
    ] * 2
    idle = [{"match": "*.mlp.*", "use": None}]
    assert "nothing is quantised" in refused({"skip_last": 2, "recipe.layers.rules": idle})["skip_last"]


def test_a_mistyped_word_is_refused_with_all_that_would_be_right_and_the_nearest():
    wrong = refused({"element": "e2m1x", "recipe.fprop.x.outer.statistic": "percentil:0.9"})
    assert all(repr(word) in wrong["element"] for word in ELEMENTS)
    assert wrong["element"].endswith("; 'e2m1' is the nearest")
    assert all(entry.form in wrong["recipe.fprop.x.outer.statistic"] for entry in STATISTICS.values())
    assert wrong["recipe.fprop.x.outer.statistic"].endswith("; 'percentile' is the nearest")
    assert "is the nearest" not in refused({"element": "fp64"})["element"]


@pytest.mark.parametrize("name", [name for name, knob in KNOBS.items() if get_origin(knob.type) is Literal])
def test_the_schema_lists_a_knobs_words(name):
    listed, _ = json_schema()["properties"]["ablate"]["properties"][name]["anyOf"]
    assert listed["items"]["enum"] == VALUES[name]
