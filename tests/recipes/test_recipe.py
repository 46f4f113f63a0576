"""Recipes: the illegal cannot be written, a schedule switches at its step, a layer policy counts blocks, presets say what papers say."""

import pytest
from pydantic import ValidationError

from ablate.numerics.spec import Hadamard, Quant
from ablate.recipes import PRESETS, SLOTS, Recipe
from ablate.recipes.recipe import DIRECTIONS, Fprop, Layers, Phase, Wgrad

NVFP4 = PRESETS["nvfp4"]()
PRODUCTS = DIRECTIONS["all"]
PERCENTS = [0, 7, 10, 14, 15, 28, 29, 50, 55, 56, 85, 99]  # in binary, 0.07 * 100 is above 7


def first_active(start: str, steps: int) -> int | None:
    return next((step for step in range(steps) if Phase(start=start).active(step, steps)), None)


def kept(layers: Layers, blocks: int) -> list[int]:
    return [block for block in range(blocks) if layers.quantises(block, blocks)]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_documented_recipe_that_survives_json(name):
    recipe = PRESETS[name]()
    assert PRESETS[name].__doc__
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    assert hash(PRESETS[name]()) == hash(recipe)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_passes_its_own_validation(name):
    Recipe.model_validate(PRESETS[name]().model_dump())


def test_presets_differ():
    assert len({PRESETS[name]() for name in PRESETS}) == len(PRESETS)


@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_a_baseline_quantises_nothing(name):
    recipe = PRESETS[name]()
    assert recipe.plain
    assert recipe.dtype == name
    assert all(recipe.slot(slot) is None for slot in SLOTS)


def test_nvfp4_is_nvidias_recipe():
    rounding = {slot: NVFP4.slot(slot).rounding for slot in SLOTS}
    blocks = {slot: NVFP4.slot(slot).block for slot in SLOTS}
    assert {slot for slot in SLOTS if rounding[slot] == "stochastic"} == {"dgrad.g", "wgrad.g"}
    assert {slot for slot in SLOTS if blocks[slot] == "16x16"} == {"fprop.w", "dgrad.w"}
    assert NVFP4.wgrad.hadamard == Hadamard(size=16, signs="fixed")
    assert NVFP4.fprop.hadamard is None
    assert NVFP4.dgrad.hadamard is None


def test_nvfp4_paper_keeps_the_last_blocks():
    paper = PRESETS["nvfp4_paper"]()
    assert kept(paper.layers, 20) == list(range(17))
    assert paper.model_copy(update={"layers": Layers()}) == NVFP4


@pytest.mark.parametrize("product", [Fprop, Wgrad])
def test_a_rotation_of_one_operand_alone_cannot_be_written(product):
    with pytest.raises(ValidationError, match=r"x\.hadamard"):
        product(x={"hadamard": {}})


@pytest.mark.parametrize("update", [{"fprop": Fprop(x=Quant())}, {"wgrad": Wgrad(hadamard=Hadamard())}])
def test_fp32_with_a_quantised_or_rotated_product_is_refused(update):
    with pytest.raises(ValidationError, match="fp32 quantises nothing"):
        Recipe(dtype="fp32", **update)


@pytest.mark.parametrize("field", [{"dtype": "fp16"}, {"fprops": {}}, {"fprop": {"x": {"clipp": 1}}}, {"schedule": [{"begin": "step:1"}]}])
def test_an_unknown_word_is_refused(field):
    with pytest.raises(ValidationError):
        Recipe(**field)


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_operand_with_the_outputs_rows_comes_first(product):
    assert getattr(NVFP4, product).operands == {"fprop": ("x", "w"), "dgrad": ("g", "w"), "wgrad": ("g", "x")}[product]


@pytest.mark.parametrize("product", PRODUCTS)
def test_high_precision_drops_quantisation_and_rotation_and_keeps_the_rest(product):
    spec = getattr(NVFP4, product).model_copy(update={"dw": "fp32"} if product == "wgrad" else {"gemm": "fp32_out"})
    high = spec.high_precision()
    assert not spec.plain
    assert high.plain
    assert getattr(high, "dw" if product == "wgrad" else "gemm") in ("fp32", "fp32_out")


@pytest.mark.parametrize(
    ("layers", "blocks", "expected"),
    [
        (Layers(), 3, [0, 1, 2]),
        (Layers(skip_first=1), 4, [1, 2, 3]),
        (Layers(skip_last=2), 4, [0, 1]),
        (Layers(skip_first=1, skip_last=1), 4, [1, 2]),
        (Layers(skip_first=3, skip_last=3), 4, []),
        (Layers(last_fraction=0.15), 12, list(range(10))),  # ceil(1.8) = 2
        (Layers(last_fraction=0.15), 1, []),
        (Layers(last_fraction=0.25, skip_last=2), 4, [0, 1]),  # the larger of the two
        (Layers(last_fraction=1.0), 4, []),
        (Layers(skip_first=10), 4, []),
    ],
)
def test_a_layer_policy_keeps_the_blocks_it_names_in_high_precision(layers, blocks, expected):
    assert kept(layers, blocks) == expected


@pytest.mark.parametrize(
    ("start", "steps", "first"),
    [
        ("step:0", 4, 0),
        ("step:3", 6, 3),
        ("step:6", 6, None),
        ("fraction:0", 4, 0),
        ("fraction:0.5", 6, 3),
        ("fraction:.5", 5, 3),
        ("fraction:0.9", 10, 9),
        ("fraction:1", 4, None),
        ("fraction:1.0", 4, None),
    ],
)
def test_a_phase_starts_at_its_step_or_at_the_first_step_past_its_fraction(start, steps, first):
    assert first_active(start, steps) == first


@pytest.mark.parametrize("percent", PERCENTS)
def test_a_phase_at_n_percent_of_100_steps_starts_at_step_n(percent):
    assert first_active(f"fraction:{percent / 100}", 100) == percent


@pytest.mark.parametrize("percent", PERCENTS)
def test_the_last_n_percent_of_100_blocks_are_n_blocks(percent):
    assert len(kept(Layers(last_fraction=percent / 100), 100)) == 100 - percent


@pytest.mark.parametrize("start", ["step:-1", "step:1.5", "fraction:1.5", "fraction:", "fraction:-0.5", "0.5", "epoch:1", "fraction:.", ""])
def test_an_impossible_start_is_refused(start):
    with pytest.raises(ValidationError, match="must be 'step:n' or 'fraction:f'"):
        Phase(start=start)


@pytest.mark.parametrize("slots", DIRECTIONS)
def test_a_phase_puts_its_products_and_no_others_in_high_precision(slots):
    recipe = NVFP4.model_copy(update={"schedule": (Phase(start="step:2", slots=slots),)})
    assert recipe.at(1, 4) == recipe
    for step in (2, 3):
        now = recipe.at(step, 4)
        assert {name for name in PRODUCTS if getattr(now, name).plain} == set(DIRECTIONS[slots])
        assert all(getattr(now, name) == getattr(NVFP4, name) for name in set(PRODUCTS) - set(DIRECTIONS[slots]))


def test_overlapping_phases_add_up():
    phases = (Phase(start="step:1", slots="forward"), Phase(start="step:2", slots="backward"))
    recipe = NVFP4.model_copy(update={"schedule": phases})
    assert [recipe.at(step, 4).plain for step in range(4)] == [False, False, True, True]
    assert recipe.at(1, 4).fprop.plain
    assert not recipe.at(1, 4).wgrad.plain
