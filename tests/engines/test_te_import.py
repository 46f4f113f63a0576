"""Transformer Engine's own recipe classes, read as recipes and given back."""

import dataclasses
import importlib
import itertools

import pytest

import ablate
from ablate.recipes import PRESETS
from ablate.recipes.te_import import recipe_of
from ablate.recipes.te_mapping import te_recipe
from ablate.verification.peers import shells


@pytest.fixture(scope="module")
def te():
    with shells("transformer_engine", "common"):
        yield importlib.import_module("transformer_engine.common.recipe")


DEFAULTS = {
    "NVFP4BlockScaling": "nvfp4",
    "MXFP8BlockScaling": "mxfp8",
    "Float8CurrentScaling": "fp8_current",
    "DelayedScaling": "fp8_delayed",
}
SCOPES = ("none", "weights", "activations", "all")
OVERRIDES = (None, "high_precision", "dequantized")
PRODUCTS = {
    "NVFP4BlockScaling": {
        "disable_rht": (False, True),
        "disable_stochastic_rounding": (False, True),
        "disable_2d_quantization": (False, True),
        "row_scaled_activation": (False, True),
        "nvfp4_4over6": SCOPES,
        "nvfp4_4over6_e4m3_use_256": SCOPES,
        "nvfp4_4over6_err_mode": ("MAE", "MSE"),
        "backward_override": OVERRIDES,
    },
    "MXFP8BlockScaling": {
        "fp8_format": ("E4M3", "HYBRID"),
        "enable_2d_quantization": (False, True),
        "backward_override": OVERRIDES,
        "margin": (0, 1),
    },
    "Float8CurrentScaling": {
        "fp8_format": ("E4M3", "HYBRID"),
        "use_power_2_scales": (False, True),
        "backward_override": OVERRIDES,
        "fp8_dpa": (False, True),
    },
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_defaults_of_a_class_are_the_preset(te, name):
    assert recipe_of(getattr(te, name)()) == PRESETS[DEFAULTS[name]]()


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_combination_of_options_comes_back_or_is_refused(te, name):
    """Check that the arguments TE would be given have each option of the object that has an effect."""
    read = refused = 0
    for values in itertools.product(*PRODUCTS[name].values()):
        options = dict(zip(PRODUCTS[name], values, strict=True))
        if "fp8_format" in options:
            options["fp8_format"] = te.Format[options["fp8_format"]]
        given = getattr(te, name)(**options)
        try:
            recipe = recipe_of(given)
        except ValueError:
            refused += 1
            continue
        description = te_recipe(recipe.products)
        back = {
            option: te.Format[value] if option == "fp8_format" else value
            for option, value in description.options
        }
        again = getattr(te, description.name)(**back)
        if options.get("nvfp4_4over6") == "none":
            same = {"nvfp4_4over6_e4m3_use_256", "nvfp4_4over6_err_mode"}
        else:
            same = set()
        if options.get("backward_override"):  # nothing of the backward pass has an effect
            same |= {"disable_rht", "disable_stochastic_rounding", "fp8_format"}
        for field in dataclasses.fields(given):
            if field.name not in same and not field.name.startswith("_"):
                assert getattr(again, field.name) == getattr(given, field.name), (options, field.name)
        read += 1
    assert read >= 4
    assert refused >= 6


def test_what_counts_is_what_transformer_engine_reads(te):
    """It copies the flags into QParams as the object is made, and looks at those."""
    given = te.NVFP4BlockScaling(disable_rht=True)
    given.disable_rht = False
    assert recipe_of(given).wgrad.hadamard is None


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("Float8BlockScaling", {}, "recipes are read from .* NVFP4BlockScaling"),
        ("DelayedScaling", {"amax_compute_algo": max}, "functions of one's own"),
        ("DelayedScaling", {"margin": 1}, r"DelayedScaling\.margin 1"),
        ("Float8CurrentScaling", {"fp8_mha": True, "fp8_dpa": True}, "attention in FP8"),
    ],
)
def test_what_the_emulation_has_not_is_refused_by_name(te, name, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        recipe_of(getattr(te, name)(**options))


def test_the_python_interface_takes_them(te):
    given = te.NVFP4BlockScaling(disable_stochastic_rounding=True)
    assert ablate.recipe(given) == ablate.recipe("nvfp4", set={"sr": False})
    assert ablate.diff(given, "nvfp4").keys() == {"dgrad.g.rounding", "wgrad.g.rounding"}
    short = te.DelayedScaling(amax_history_len=16, fp8_format=te.Format.E4M3)
    assert ablate.recipe(short).wgrad.g.outer.statistic == "delayed:16"
    assert ablate.recipe(short).wgrad.g.element == "e4m3"
