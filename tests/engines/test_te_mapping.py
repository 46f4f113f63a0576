"""Tests of the mapping to Transformer Engine as data: the class of its recipes that a preset is, or the field in the way."""

from types import SimpleNamespace

import pytest

from ablate.numerics.spec import Hadamard, Outer, Quant, Select
from ablate.recipes import KNOBS, PRESETS
from ablate.recipes.reasons import grouped
from ablate.recipes.recipe import SLOTS, Dgrad, Fprop, Layers, Phase, Products, Wgrad
from ablate.recipes.te_mapping import (
    TENSORS,
    Builtin,
    Copies,
    CopyFormat,
    Custom,
    families,
    recipe_refusals,
    refusals,
    te_recipe,
    variants,
)

NVFP4 = {
    "disable_rht": False,
    "disable_stochastic_rounding": False,
    "disable_2d_quantization": False,
    "row_scaled_activation": False,
    "nvfp4_4over6": "none",
    "backward_override": None,
}
HYBRID = {"fp8_format": "HYBRID", "use_power_2_scales": False, "backward_override": None}
MAPPED = {
    "bf16": [None],
    "fp32": [None],
    "fp8_current": [("Float8CurrentScaling", HYBRID)],
    "fp8_delayed": ["custom"],
    "mxfp8": [
        (
            "MXFP8BlockScaling",
            {"fp8_format": "E4M3", "enable_2d_quantization": False, "backward_override": None},
        )
    ],
    "nvfp4": [("NVFP4BlockScaling", NVFP4)],
    "nvfp4_paper": [("NVFP4BlockScaling", NVFP4)],
    "nemotron3_super": [("NVFP4BlockScaling", NVFP4)],
    "fp4_all_the_way": [
        "custom",
        (
            "NVFP4BlockScaling",
            {"disable_rht": True, "disable_2d_quantization": True, "backward_override": "high_precision"},
        ),
    ],
    "healing": [("NVFP4BlockScaling", NVFP4), ("Float8CurrentScaling", HYBRID)],
    "nvfp4_dequantised": [
        ("NVFP4BlockScaling", {"disable_2d_quantization": False, "backward_override": "dequantized"})
    ],
    "mxfp8_fwd_high_precision_bwd": [("MXFP8BlockScaling", {"backward_override": "dequantized"})],
    "nvfp4_row_scaled_fwd_high_precision_bwd": [
        ("NVFP4BlockScaling", {"row_scaled_activation": True, "backward_override": "dequantized"})
    ],
    "nvfp4_1d_weight": ["custom"],
    "mxfp8_fwd_nvfp4_bwd": ["custom"],
    "high_precision_fwd_mxfp8_bwd": ["custom"],
    "nvfp4_row_scaled_fwd_mxfp8_bwd": ["custom"],
}
"""Recipes that each preset is in turn, over its schedule; of TE's own recipes the arguments that matter."""
REFUSED = {
    "mxfp4": "fprop.x.block 1x32: Transformer Engine's E2M1 has blocks of 1x16 or 16x16",
    "mxfp4_backward": "dgrad.g.block 1x32",
    "quartet": "fprop.x.block 1x32",
    "quartet2": "dgrad.g.outer.bound 256",
    "tetrajet2": "weights.osci_reset",
    "four_over_six": "dgrad.g.outer.bound 256",
    "microsoft_fp4": "fprop.x.block None",
    "ufp4": "fprop.x.element int4: Transformer Engine multiplies e2m1, e4m3 and e5m2",
    "ue5m3": "fprop.x.scale: Transformer Engine's E2M1 has E4M3 block scales",
    "mxfp4_amd": "fprop.x.block 1x32",
    "mxfp4_v4": "fprop.x.block 1x32",
    **dict.fromkeys(("mxfp6_e2m3", "mxfp6_e3m2"), "fprop.x.element e"),
    "averis": "fprop.x.transform",
    "metis": "fprop.x.transform",
    "if4": "fprop.x.select",
    "luq": "fprop.x.element int4",
    "hif4": "fprop.x.element e1m2",
    "nvfp4_per_token": "fprop.w.outer.granularity row",
    "nvfp4_per_token_weight_2d": "dgrad.g.outer.granularity row",
    "row_scaled": "fprop.w.outer.granularity row: Transformer Engine scales only the forward pass's activations by rows",
}


def one(**products) -> Products:
    return Products(**products)


def test_every_preset_is_in_one_of_the_two_tables():
    assert set(MAPPED) | set(REFUSED) == set(PRESETS)
    assert not set(MAPPED) & set(REFUSED)


@pytest.mark.parametrize("preset", MAPPED)
def test_a_preset_that_transformer_engine_computes_is_these_recipes_of_its(preset):
    recipe = PRESETS[preset]()
    assert list(recipe_refusals(recipe)) == []
    found = [te_recipe(products) for products in variants(recipe)]
    assert len(found) == len(MAPPED[preset])
    for description, expected in zip(found, MAPPED[preset], strict=True):
        if isinstance(expected, tuple):
            assert isinstance(description, Builtin)
            assert description.name == expected[0]
            assert dict(description.options) | expected[1] == dict(description.options)
        else:
            assert (isinstance(description, Custom) and "custom") or description == expected


@pytest.mark.parametrize("preset", REFUSED)
def test_a_preset_that_it_does_not_compute_is_refused_with_the_field(preset):
    reasons = list(recipe_refusals(PRESETS[preset]()))
    assert reasons[0].startswith(REFUSED[preset])
    assert len(reasons) == len(set(reasons))
    if not preset.startswith("tetrajet2"):
        products = PRESETS[preset]().products
        with pytest.raises(ValueError, match="Transformer Engine") as error:
            te_recipe(products)
        assert all(reason in str(error.value) for reason in grouped(refusals(products)))


@pytest.mark.parametrize(
    ("knobs", "option", "value"),
    [
        ({"rht": False}, "disable_rht", True),
        ({"sr": False}, "disable_stochastic_rounding", True),
        ({"weights_2d": False}, "disable_2d_quantization", True),
        ({"cooldown_slots": "backward", "cooldown": 0.2}, "backward_override", "high_precision"),
    ],
)
def test_the_short_knobs_of_nvfp4_are_arguments_of_its_recipe(knobs, option, value):
    from ablate.experiment.arms import StartingPoint

    recipe = StartingPoint("gpt", {}, "nvfp4").arm(knobs).recipe
    *_, last = map(te_recipe, variants(recipe))
    assert last.name == "NVFP4BlockScaling"
    assert dict(last.options)[option] == value
    assert set(knobs) <= set(KNOBS)


def test_a_copy_in_fp32_is_refused_where_bf16_would_round_it():
    """TE dequantises to the tensor's type before it quantises again; scales that are powers of two lose nothing."""
    for fprop, exact in ((Quant(), False), (PRESETS["mxfp8"]().fprop.w, True)):
        for source in ("forward", "forward_bf16"):
            products = one(fprop=Fprop(x=fprop, w=fprop), dgrad=Dgrad(g=Quant(), w=Quant(source=source)))
            refused = [reason for reason in refusals(products) if "rounds the dequantised copy" in reason]
            assert bool(refused) == (source == "forward" and not exact)


def test_forward_in_bf16_and_backward_in_nvfp4_is_a_recipe_of_single_quantisers():
    nvfp4 = PRESETS["nvfp4"]().products
    found = te_recipe(nvfp4.high_precision("forward"))
    assert isinstance(found, Custom)
    assert (found.input.row.family, found.input.column.family) == ("high", "nvfp4")
    assert (found.weight.row.family, found.weight.column.family) == ("high", "nvfp4")
    assert found.weight.column.square
    assert found.grad_output.row.stochastic
    assert found.input.column.rotated
    assert found.grad_output.column.rotated
    assert not found.grad_output.row.rotated


def test_forward_in_mxfp8_and_backward_in_nvfp4_is_one_too():
    nvfp4, mxfp8 = PRESETS["nvfp4"]().products, PRESETS["mxfp8"]().products
    found = te_recipe(nvfp4.replaced("forward", mxfp8))
    assert isinstance(found, Custom)
    assert found.weight.row.family == "mxfp8"
    assert found.weight.column.family == "nvfp4"


def test_a_rotation_without_signs_is_one_too():
    nvfp4 = PRESETS["nvfp4"]().products
    plain = nvfp4.wgrad.model_copy(update={"hadamard": Hadamard(signs="none")})
    found = te_recipe(nvfp4.model_copy(update={"wgrad": plain}))
    assert isinstance(found, Custom)
    assert not found.input.column.signs


def test_requantising_from_the_forward_copy_is_said():
    again = Quant(source="forward_bf16")
    found = te_recipe(
        one(
            fprop=Fprop(x=Quant(), w=Quant()),
            dgrad=Dgrad(g=Quant(), w=again),
            wgrad=Wgrad(g=Quant(), x=Quant()),
        )
    )
    assert isinstance(found, Custom)
    assert (found.weight.requantised, found.input.requantised) == (True, False)


def test_four_over_six_forward_is_its_own_argument():
    chosen = Quant(select=Select(among="scales", criterion="mse"), outer=Outer(bound=256.0))
    found = dict(te_recipe(one(fprop=Fprop(x=chosen, w=chosen))).options)
    assert (found["nvfp4_4over6"], found["nvfp4_4over6_e4m3_use_256"], found["nvfp4_4over6_err_mode"]) == (
        "all",
        "all",
        "MSE",
    )
    found = dict(te_recipe(one(fprop=Fprop(x=Quant(), w=chosen))).options)
    assert found["nvfp4_4over6"] == "weights"


def test_delayed_scaling_is_a_recipe_of_single_quantisers_with_histories_of_each_tensor():
    found = te_recipe(PRESETS["fp8_delayed"]().products)
    x, g = (CopyFormat("fp8_delayed", element, history=1024) for element in ("e4m3", "e5m2"))
    assert found == Custom(input=Copies(x, x), weight=Copies(x, x), grad_output=Copies(g, g))
    assert families(variants(PRESETS["fp8_delayed"]())) == {"fp8_delayed"}


@pytest.mark.parametrize(
    ("slot", "change"),
    [
        ("wgrad.x", {"outer": {"statistic": "delayed:16"}}),
        ("wgrad.x", {"source": "forward_bf16"}),
        ("dgrad.w", None),
    ],
)
def test_a_tensor_of_which_one_copy_has_another_scale_than_the_delayed_one_is_refused(slot, change):
    content = PRESETS["fp8_delayed"]().products.model_dump()
    product, operand = slot.split(".")
    for key, value in (change or {"outer": {"statistic": "amax"}}).items():
        its = content[product][operand]
        its[key] = its[key] | value if isinstance(value, dict) else value
    reasons = list(refusals(Products.model_validate(content)))
    other = {"wgrad.x": "fprop.x", "dgrad.w": "fprop.w"}[slot]
    why = f"{slot}: with delayed scaling both copies of a tensor share one amax history; quantise it and {other} alike"
    assert why in reasons


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_delayed_scaling_in_one_direction_alone_is_refused(direction):
    reasons = list(refusals(PRESETS["fp8_delayed"]().products.high_precision(direction)))
    assert [reason.partition(":")[0] for reason in reasons] == ["wgrad.x", "dgrad.w"]


CHANGES = {
    "fprop.x.outer.statistic percentile:0.999": ("fprop.x", {"outer": Outer(statistic="percentile:0.999")}),
    "dgrad.g.range.headroom 1.0625": ("dgrad.g", {"range": {"headroom": 17 / 16}}),
    "dgrad.g.bits 24": ("dgrad.g", {"bits": 24}),
    "dgrad.w.rounding stochastic": ("dgrad.w", {"rounding": "stochastic"}),
    "fprop.x.block 16x16": ("fprop.x", {"block": "16x16"}),
    "wgrad.x.transform": ("wgrad.x", {"transform": {"mean": True}}),
    "fprop.w.estimator": ("fprop.w", {"estimator": "clip_mask"}),
    "wgrad.x.outer.granularity row": ("wgrad.x", {"outer": {"granularity": "row"}}),
    "fprop.x.select.map_to": ("fprop.x", {"select": {"among": "scales", "map_to": (6.0, 12.0)}}),
    "fprop.x.outer.granularity rows:16": ("fprop.x", {"outer": {"granularity": "rows:16"}}),
    "dgrad.w.outer.granularity rows:32": ("dgrad.w", {"outer": {"granularity": "rows:32"}}),
    "fprop: Transformer Engine multiplies two operands of one kind": ("fprop.x", None),
}


@pytest.mark.parametrize("begins", CHANGES)
def test_one_field_beyond_transformer_engine_is_refused_by_its_name(begins):
    slot, change = CHANGES[begins]
    product, operand = slot.split(".")
    content = PRESETS["nvfp4"]().products.model_dump()
    if change is None:
        content[product][operand] = None
    else:
        content[product][operand].update(
            {key: getattr(value, "model_dump", lambda value=value: value)() for key, value in change.items()}
        )
    reasons = list(refusals(Products.model_validate(content)))
    assert [reason for reason in reasons if reason.startswith(begins)], reasons


@pytest.mark.parametrize("product", ["fprop", "dgrad"])
def test_a_rotation_outside_wgrad_is_refused(product):
    nvfp4 = PRESETS["nvfp4"]().products
    turned = getattr(nvfp4, product).model_copy(update={"hadamard": Hadamard()})
    assert list(refusals(nvfp4.model_copy(update={product: turned}))) == [
        f"{product}.hadamard: Transformer Engine rotates wgrad alone; write null"
    ]


def test_the_tensors_copies_are_the_six_slots():
    assert sorted(slot for slots in TENSORS.values() for slot in slots) == sorted(SLOTS)


def test_what_a_schedule_turns_to_counts():
    recipe = PRESETS["nvfp4"]()
    later = recipe.model_copy(update={"schedule": (Phase(start="step:9", use=PRESETS["mxfp4"]().products),)})
    assert next(recipe_refusals(later)).startswith("fprop.x.block 1x32")
    assert families(variants(PRESETS["healing"]())) == {"nvfp4", "fp8"}


def test_products_of_many_phases_are_found_without_all_combinations():
    calls = []

    class Counted(Products):
        def replaced(self, slots, other):
            calls.append(slots)
            assert len(calls) < 1000
            return Counted(**dict(super().replaced(slots, other)))

    own, off = Counted(**dict(PRESETS["nvfp4"]().products)), Products()
    phases = [Phase(start=f"step:{n}", slots=("forward", "backward")[n % 2]) for n in range(1, 41)]
    recipe = SimpleNamespace(products=own, layers=Layers(), schedule=phases)
    plain = own.replaced("forward", off), own.replaced("backward", off), own.replaced("all", off)
    assert {*variants(recipe)} == {own, *plain}
