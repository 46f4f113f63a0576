"""Promises that only a machine with a GPU could break, on an imaginary GPU, in processes of their own."""

import json
import sys

import pytest
import torch
from regenerate_imaginary_gpu import COUNTED, TABLE
from support.cases import dealt
from support.imaginary_gpu import printed, why_not
from support.imaginary_gpu.fork_cases import FORKS, VISIBLE

from ablate.recipes import PRESETS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "an imaginary GPU can be plugged in"),
]


def test_the_device_is_visible_and_refuses_forks_as_a_real_one():
    results = printed("fork_cases")
    assert results["visible"] == [
        [visible, "1 cuda" if count else "0 None"] for visible, count in VISIBLE.items()
    ]
    for (case, error), (wanted, refusal) in zip(results["forks"], FORKS.items(), strict=True):
        assert case == list(wanted)
        assert refusal in error if refusal else not error, case


def test_the_process_of_the_tests_has_no_imaginary_gpu():
    assert "support.imaginary_gpu.cuda_module" not in sys.modules
    assert torch.accelerator.current_accelerator() is None or torch.version.cuda


RECIPES = json.loads(TABLE.read_text())
"""Counts of the table by recipe: each preset, NVFP4 with altered errors, and some measured steps."""


@pytest.fixture(scope="module")
def steps() -> dict[str, dict]:
    """Counts of a plain training step by half of the recipes, and with `--all` by each."""
    pytest.importorskip("triton")
    return printed("preset_cases", *dealt(RECIPES, 0, 2, seed=0))


def test_every_recipe_takes_a_step_without_mixed_devices(steps):
    assert RECIPES.keys() >= {*PRESETS, *steps}
    assert len(steps) >= len(RECIPES) // 2
    assert {name: step["error"] for name, step in steps.items() if "error" in step} == {}


@pytest.mark.parametrize("part", ["block", "rest"])
def test_no_recipe_asks_more_of_the_device_than_the_table_says(steps, part):
    risen = {
        (name, quantity): (step[part][quantity], RECIPES[name][part][quantity], step["places"][quantity])
        for name, step in steps.items()
        for quantity in COUNTED
        if step[part][quantity] > RECIPES[name][part][quantity]
    }
    assert risen == {}, (
        "lines of ours, the most first; python tests/regenerate_imaginary_gpu.py writes the table"
    )


def test_no_step_computes_with_a_scalar_on_the_cpu(steps):
    assert {name: step["places"]["strays"] for name, step in steps.items() if step["places"]["strays"]} == {}


@pytest.fixture(scope="module")
def runs() -> dict[str, dict]:
    """Errors and strays of whole runs."""
    pytest.importorskip("triton")
    return printed("workload_cases")


def test_every_workload_trains_without_mixed_devices_or_scalars_on_the_cpu(runs):
    assert {name: run["error"] for name, run in runs.items() if run["error"]} == {}
    strays = {
        name: {k: v for k, v in run["strays"].items() if k != "transformers"} for name, run in runs.items()
    }
    assert {name: places for name, places in strays.items() if places} == {}
    few = {"convert", "operands", "split"}  # cases that begin to count anew before their last steps
    assert [name for name, run in runs.items() if run["kernels"] <= (0 if name in few else 100)] == []
