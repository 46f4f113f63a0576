"""`ablate check FILE:FUNCTION`: a function that keeps its contract passes every row, each way to break it fails one, and the path from `init` to a verdict is three commands."""

import json
from pathlib import Path

import pytest
import torch
from support.cases import every
from support.commands import here
from support.linears import layer, run

from ablate.errors import InputError
from ablate.experiment.load import load
from ablate.numerics.own import KINDS
from ablate.recipes.recipe import SLOTS, Recipe
from ablate.verification.function_checks import CHECKS, promises, subject

SOURCES = Path(__file__).parents[1] / "support" / "own_numerics"


def outcomes(name: str) -> dict[str, str]:
    """Return PASS, NOTE or FAIL by check."""
    return {
        promise.name: "FAIL" if not promise.kept else "NOTE" if promise.remedy else "PASS"
        for promise in promises(*subject(f"{SOURCES}/functions.py:{name}"))
    }


DRAWN = {"uses the bits that it takes", "is unbiased"}
OF_GRIDS = {"rounds to a neighbour", "differs from rounding to nearest"}
OF_MAPS = {"is symmetric", "leaves its own results alone"}
GOOD = {
    "rounding": ("toward_zero", DRAWN),
    "scale.rounding": ("ceil", {*DRAWN, "is symmetric", "differs from rounding to nearest"}),
    "range.statistic": ("half_amax", DRAWN | OF_GRIDS | OF_MAPS),
    "outer.statistic": ("fixed", DRAWN | OF_GRIDS | OF_MAPS | {"takes empty tensors"}),
    "own": ("as_bf16", DRAWN | OF_GRIDS),
}
"""A function of each field, and the checks that do not apply to it."""


@every(field=GOOD)
def test_a_function_that_keeps_its_contract_passes_every_check_that_applies(field):
    assert GOOD.keys() == KINDS.keys()
    name, others = GOOD[field]
    assert subject(f"{SOURCES}/functions.py:{name}")[0] == field
    assert outcomes(name) == dict.fromkeys(check for check in CHECKS if check not in others) | dict.fromkeys(
        (check for check in CHECKS if check not in others), "PASS"
    )


RECORDER = """import json
from torch import Tensor

def seen(value):
    name = type(value).__name__
    if not isinstance(value, Tensor):
        return [name]
    kind = [name, str(value.dtype), value.device.type, value.is_contiguous(), value.requires_grad]
    return [kind, [*value.shape]]

def record({arguments}):
    raise ValueError(json.dumps({{name: seen(value) for name, value in locals().items()}}))
"""
SIZES = {
    "fprop.x": (0, 2),
    "fprop.w": (1, 2),
    "dgrad.g": (0, 1),
    "dgrad.w": (2, 1),
    "wgrad.g": (1, 0),
    "wgrad.x": (2, 0),
}
"""Rows and columns of each operand, among the numbers of tokens, outputs and inputs of a layer."""


@every(field=KINDS, slot=SLOTS, columns=(64, 50))
def test_a_check_and_a_bf16_layer_pass_the_same_arguments(field, slot, columns, tmp_path):
    """The function's error has what it was given. Columns that fill no whole block change shapes alone."""
    (tmp_path / "recorder.py").write_text(RECORDER.format(arguments=", ".join(KINDS[field].offered)))
    word, (part, _, key) = f"{tmp_path}/recorder.py:record", field.rpartition(".")
    (tried,) = promises(*subject(word))
    product, _, operand = slot.partition(".")
    quant = {part: {key: word}} if part else {key: word}
    sizes = dict(zip(SIZES[slot], (8, columns), strict=True))
    tokens, outputs, inputs = (sizes.get(number, 16) for number in range(3))
    made = layer(Recipe.model_validate({product: {operand: quant}}), torch.ones(outputs, inputs))
    with pytest.raises(InputError) as raised:
        run(made, torch.ones(tokens, inputs).bfloat16(), torch.ones(tokens, outputs))
    checked, passed = (
        json.JSONDecoder().raw_decode(text.partition("ValueError: ")[2])[0]
        for text in (tried.detail, str(raised.value))
    )
    assert passed.keys() == KINDS[field].offered.keys()
    kinds = [kind for kind, *_ in passed.values() if isinstance(kind, list)]
    assert kinds == [["Tensor", "torch.float32", "cpu", True, False]] * len(kinds)
    assert [kind for kind, *_ in checked.values()] == [kind for kind, *_ in passed.values()]
    assert columns != 64 or checked == passed


def test_a_draw_is_found_unbiased_or_said_to_be_biased():
    assert outcomes("stochastic")["is unbiased"] == "PASS"
    assert outcomes("drawn_too_high")["is unbiased"] == "NOTE"


def test_what_a_contract_leaves_open_is_reported():
    assert outcomes("powers_of_two")["rounds to a neighbour"] == "NOTE"
    assert outcomes("always_up")["is symmetric"] == "NOTE"


def test_a_rounding_that_is_nearest_by_mistake_is_found():
    """Neighbours of a neighbour are itself, so a step computed from them is 0 and no bits are used."""
    assert list(outcomes("step_of_zero").items())[-1] == ("uses the bits that it takes", "FAIL")
    assert outcomes("stochastic")["uses the bits that it takes"] == "PASS"
    assert outcomes("away")["differs from rounding to nearest"] == "NOTE"
    assert outcomes("stochastic")["differs from rounding to nearest"] == "PASS"


def test_a_lost_sign_fails():
    assert list(outcomes("without_sign").items())[-1] == ("rounds to a neighbour", "FAIL")


def test_a_grid_is_described():
    assert outcomes("E2M1") == {"is a grid": "PASS", "its values are rounded to themselves": "PASS"}


BROKEN = (
    "raises",
    "too_short",
    "doubles",
    "none",
    "not_a_number",
    "off_grid",
    "in_place",
    "global_draws",
    "negative",
)


@every(name=BROKEN)
def test_each_way_to_break_the_contract_fails_the_first_check(name):
    assert outcomes(name) == {"returns what its field needs": "FAIL"}


def test_numbers_that_come_from_elsewhere_do_not_repeat():
    found = outcomes("counts")
    assert list(found.items())[-1] == ("repeats to the bit", "FAIL")


def test_the_exit_status_is_the_verdict_and_a_wrong_name_is_a_sentence():
    assert here("check", f"{SOURCES}/functions.py:away").returncode == 0
    failed = here("check", f"{SOURCES}/functions.py:raises")
    assert failed.returncode == 1
    assert "rounding functions.py:raises raised KeyError: 'nothing here'" in " ".join(failed.stdout.split())
    wrong = here("check", f"{SOURCES}/functions.py:awayy")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "'away' is the nearest" in wrong.stderr
    with pytest.raises(InputError, match="no such file"):
        subject("/nowhere/mine.py:f")


NAMES = {
    "of_no_field": "rounding: y, grid, bits, width; for scale.rounding: scale, grid",
    "ASSIGNED": "ASSIGNED must be a def at the top level, or a tuple",
    "awayy": "'away' is the nearest",
}


@every(name=NAMES)
def test_a_name_that_is_no_function_of_a_field_is_refused(name):
    with pytest.raises(InputError) as refused:
        subject(f"{SOURCES}/functions.py:{name}")
    assert NAMES[name] in str(refused.value)


def test_a_module_names_a_function_and_a_file_of_roundings_asks_for_one(monkeypatch):
    monkeypatch.chdir(SOURCES)
    assert subject("functions:away")[0] == "rounding"
    asked = here("check", SOURCES / "functions.py")
    assert (asked.returncode, asked.stdout) == (2, "")
    assert "functions.py:away" in asked.stderr


def test_init_writes_a_function_and_an_experiment_that_compares_it(tmp_path):
    here("init", "mine", "--rounding", "--folder", tmp_path, checked=True)
    assert here("check", tmp_path / "mine_rounding.py:mine").returncode == 0
    made = load(tmp_path / "mine.yaml", device="cpu")
    recipes = {arm.recipe.wgrad.g and str(arm.recipe.wgrad.g.rounding).partition("#")[0] for arm in made.arms}
    assert {"nearest", f"{tmp_path}/mine_rounding.py:mine"} <= recipes
    assert made.keys.design
    both = here("init", "other", "--rounding", "--training", "--folder", tmp_path)
    assert both.returncode == 2
    assert "--training and --rounding" in both.stderr
