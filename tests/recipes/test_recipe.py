"""Recipes: a schedule switches at its step, and a layer policy counts blocks and reads names."""

import pytest
from support.cases import every

from ablate.recipes import PRESETS, Recipe
from ablate.recipes.layers import located
from ablate.recipes.recipe import DIRECTIONS, Layers, Phase, Products, Rule, Run

NVFP4 = PRESETS["nvfp4"]()
PRODUCTS = DIRECTIONS["all"]
PERCENTS = [0, 7, 10, 14, 15, 28, 29, 50, 55, 56, 85, 99]  # in binary, 0.07 * 100 is above 7


def first_active(start: str, steps: int) -> int | None:
    return next((step for step in range(steps) if Phase(start=start).active(step, Run(steps))), None)


def kept(layers: Layers, blocks: int) -> list[int]:
    return [block for block in range(blocks) if layers.quantises(block, blocks)]


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_operand_with_the_outputs_rows_comes_first(product):
    assert (
        getattr(NVFP4, product).operands
        == {"fprop": ("x", "w"), "dgrad": ("g", "w"), "wgrad": ("g", "x")}[product]
    )


@pytest.mark.parametrize("product", PRODUCTS)
def test_high_precision_drops_quantisation_and_rotation_and_keeps_the_rest(product):
    spec = getattr(NVFP4, product).model_copy(
        update={"dw": "fp32"} if product == "wgrad" else {"gemm": "fp32_out"}
    )
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


@every(percent=PERCENTS)
def test_a_phase_at_n_percent_of_100_steps_starts_at_step_n(percent):
    assert first_active(f"fraction:{percent / 100}", 100) == percent


@every(percent=PERCENTS)
def test_the_last_n_percent_of_100_blocks_are_n_blocks(percent):
    assert len(kept(Layers(last_fraction=percent / 100), 100)) == 100 - percent


@pytest.mark.parametrize("slots", DIRECTIONS)
def test_a_phase_puts_its_products_and_no_others_in_high_precision(slots):
    recipe = NVFP4.model_copy(update={"schedule": (Phase(start="step:2", slots=slots),)})
    assert recipe.at(1, Run(4)) == recipe
    for step in (2, 3):
        now = recipe.at(step, Run(4))
        assert {name for name in PRODUCTS if getattr(now, name).plain} == set(DIRECTIONS[slots])
        assert all(
            getattr(now, name) == getattr(NVFP4, name) for name in set(PRODUCTS) - set(DIRECTIONS[slots])
        )


def test_overlapping_phases_add_up():
    phases = (Phase(start="step:1", slots="forward"), Phase(start="step:2", slots="backward"))
    recipe = NVFP4.model_copy(update={"schedule": phases})
    assert [recipe.at(step, Run(4)).plain for step in range(4)] == [False, False, True, True]
    assert recipe.at(1, Run(4)).fprop.plain
    assert not recipe.at(1, Run(4)).wgrad.plain


# --- when a phase starts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "first"),
    [("tokens:0", 0), ("tokens:1", 1), ("tokens:640", 10), ("tokens:641", 11), ("tokens:64000", None)],
)
def test_a_phase_by_tokens_starts_once_that_many_were_seen(start, first):
    run = Run(20, tokens_per_step=64)
    assert next((step for step in range(20) if Phase(start=start).active(step, run)), None) == first


def test_a_phase_by_decay_starts_where_the_learning_rate_starts_to_fall():
    phase = Phase(start="decay")
    assert [step for step in range(10) if phase.active(step, Run(10, decay=7))] == [7, 8, 9]
    assert not any(phase.active(step, Run(10, decay=None)) for step in range(10))


def test_a_measured_phase_starts_when_its_trigger_has_tripped_and_at_no_step():
    phase = Phase(start="noise_ratio:1.5:20")
    trigger = phase.trigger
    assert (trigger.metric, trigger.limit, trigger.every) == ("grad/noise_ratio", 1.5, 20)
    assert not any(phase.active(step, Run(10)) for step in range(10))
    assert all(phase.active(step, Run(10), {trigger}) for step in range(10))
    assert not phase.active(0, Run(10), {Phase(start="noise_ratio:1.4:20").trigger})


def test_a_recipe_names_the_triggers_that_it_waits_for():
    starts = ("noise_ratio:1.5", "step:3", "noise_ratio:2", "noise_ratio:1.50:50")
    recipe = NVFP4.model_copy(update={"schedule": tuple(Phase(start=start) for start in starts)})
    assert {(trigger.limit, trigger.every) for trigger in recipe.triggers} == {(1.5, 50), (2.0, 50)}


def test_a_phase_can_use_other_products_for_some_slots():
    other = PRESETS["mxfp8"]().products
    recipe = NVFP4.model_copy(update={"schedule": (Phase(start="step:2", slots="backward", use=other),)})
    now = recipe.at(2, Run(4))
    assert now.fprop == NVFP4.fprop
    assert (now.dgrad, now.wgrad) == (other.dgrad, other.wgrad)


def test_of_two_phases_on_the_same_slots_the_later_in_the_list_decides():
    fp8, mx = (PRESETS[name]().products for name in ("fp8_current", "mxfp8"))
    phases = (Phase(start="step:1", use=fp8), Phase(start="step:0", use=mx))
    recipe = NVFP4.model_copy(update={"schedule": phases})
    assert {recipe.at(step, Run(4)).products for step in range(4)} == {mx}
    back = NVFP4.model_copy(update={"schedule": (*phases, Phase(start="step:3", use=NVFP4.products))})
    assert back.at(3, Run(4)).products == NVFP4.products


def test_high_precision_keeps_the_gemm_modes_of_the_recipe():
    recipe = NVFP4.model_copy(
        update={
            "fprop": NVFP4.fprop.model_copy(update={"gemm": "fp32_out"}),
            "wgrad": NVFP4.wgrad.model_copy(update={"dw": "fp32"}),
            "schedule": (Phase(start="step:1"),),
        }
    )
    now = recipe.at(1, Run(2))
    assert (now.plain, now.fprop.gemm, now.dgrad.gemm, now.wgrad.dw) == (True, "fp32_out", "bf16_out", "fp32")


@pytest.mark.parametrize("name", ["quartet", "quartet2", "tetrajet2"])
def test_where_the_forward_copies_are_gone_the_originals_are_quantised(name):
    recipe = PRESETS[name]().model_copy(update={"schedule": (Phase(start="step:1", slots="forward"),)})
    before, now = recipe.at(0, Run(2)), recipe.at(1, Run(2))
    assert {slot for slot, quant in before.quantised() if quant.source == "forward"} == {"dgrad.w", "wgrad.x"}
    for slot in ("dgrad.w", "wgrad.x"):
        assert now.slot(slot) == before.slot(slot).model_copy(update={"source": "original"})
    assert now.dgrad.hadamard == before.dgrad.hadamard


# --- which layers ---------------------------------------------------------------------------------


def rule(match: str, use=None) -> Rule:
    return Rule(match=match, use=use)


LAYERS = located(
    {f"blocks.{block}.{name}": () for block in range(4) for name in ("attention.qkv", "mlp.up", "mlp.down")}
)


def decided(recipe: Recipe) -> dict[str, Products | None]:
    """Return the products that each layer of a model of four blocks uses."""
    return {name: recipe.decided(decider) for name, decider in recipe.layers.deciders(LAYERS).items()}


def with_layers(**fields) -> Recipe:
    return NVFP4.model_copy(update={"layers": Layers(**fields)})


def test_the_first_rule_that_selects_a_layer_decides():
    fp8, mx = (PRESETS[name]().products for name in ("fp8_current", "mxfp8"))
    found = decided(with_layers(rules=(rule("*.down", fp8), rule("blocks.0.*", mx), rule("*.up"))))
    assert found["blocks.0.mlp.down"] == fp8
    assert found["blocks.0.mlp.up"] == mx
    assert found["blocks.1.mlp.up"] is None
    assert found["blocks.1.attention.qkv"] == NVFP4.products


def test_a_rule_decides_before_the_counts():
    fp8 = PRESETS["fp8_current"]().products
    found = decided(with_layers(skip_first=1, skip_last=1, rules=(rule("*.down", fp8), rule("*.qkv"))))
    assert [found[f"blocks.{b}.mlp.down"] for b in range(4)] == [fp8] * 4
    assert [found[f"blocks.{b}.attention.qkv"] for b in range(4)] == [None] * 4
    own = NVFP4.products
    assert [found[f"blocks.{b}.mlp.up"] for b in range(4)] == [None, own, own, None]


def test_placements_are_every_layer_once_by_what_decides():
    placements = with_layers(
        skip_last=1, rules=(rule("*.down"), rule("blocks.3.*.down"), rule("*.qkv"))
    ).placements(LAYERS)
    assert [(placement.decider, len(placement.layers)) for placement in placements] == [
        (0, 4),
        (2, 4),
        ("own", 3),
        ("skipped", 1),
    ]
    assert {layer for placement in placements for layer in placement.layers} == set(LAYERS)


@every(fraction=[0.01, 0.15, 0.25, 0.3, 0.56, 0.99], blocks=[1, 7, 20, 100])
def test_a_rule_on_the_last_blocks_is_the_count_of_them(fraction, blocks):
    layers = located({f"blocks.{block}.mlp.up": () for block in range(blocks)})
    by_rule, by_count = (
        {name for name, decider in policy.deciders(layers).items() if decider != "own"}
        for policy in (
            Layers(rules=(Rule(match={"blocks": f"last:{fraction}"}),)),
            Layers(last_fraction=fraction),
        )
    )
    assert by_rule == by_count


@pytest.mark.parametrize("slots", DIRECTIONS)
def test_a_phase_changes_what_rules_use_as_well(slots):
    fp8 = PRESETS["fp8_current"]().products
    recipe = with_layers(skip_last=1, rules=(rule("*.down", fp8), rule("*.qkv")))
    recipe = recipe.model_copy(update={"schedule": (Phase(start="step:1", slots=slots),)})
    now = decided(recipe.at(1, Run(2)))
    assert now["blocks.0.mlp.down"] == fp8.high_precision(slots)
    assert now["blocks.0.attention.qkv"] is None
    assert now["blocks.0.mlp.up"] == NVFP4.products.high_precision(slots)
    assert now["blocks.3.mlp.up"] is None
    assert recipe.at(0, Run(2)) == recipe


def test_products_that_a_phase_replaces_are_quantised_some_time():
    later = Recipe(schedule=(Phase(start="step:1", use=NVFP4.products),))
    assert [later.ever_quantises(products) for products in (None, Products(), NVFP4.products)] == [
        False,
        True,
        True,
    ]
    assert [NVFP4.ever_quantises(products) for products in (None, Products(), NVFP4.products)] == [
        False,
        False,
        True,
    ]


def test_a_recipe_is_plain_only_where_no_rule_and_no_phase_quantises():
    own = NVFP4.products
    assert Recipe(layers=Layers(rules=(rule("*"),)), schedule=(Phase(start="step:1"),)).plain
    assert not Recipe(layers=Layers(rules=(rule("*", own),))).plain
    assert not Recipe(schedule=(Phase(start="step:1", use=own),)).plain
    assert Recipe(schedule=(Phase(start="step:1", use=own), Phase(start="step:2"))).at(2, Run(3)).plain
