"""Packed experts on the engine of Transformer Engine, without a GPU: its own te.GroupedLinear over a double of its native part."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ablate.engines.hardware import installed
from ablate.recipes.targets.experts import FUSED

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
STEP = 2**-7
"""One step of bf16, relative."""


@pytest.fixture(scope="module")
def found():
    """Return the results of the contract's program, which runs for about a quarter of a minute."""
    if installed("transformer_engine") != "2.20.2":
        pytest.skip("the double stands in for the native part of Transformer Engine 2.20.2")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (HERE.parent.parent, HERE.parent, HERE))),
        "OMP_NUM_THREADS": "1",
        FUSED: "1",
    }
    command = [sys.executable, str(HERE / "te_experts.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_recipe_that_maps_is_computed_as_the_emulator_does(found):
    """y, dx and the gradient of each of six experts, one without tokens; their sums may run in another order."""
    assert len(found["each"]) == 18
    assert {name: far for name, far in found["each"].items() if far[0] >= 2e-3 or far[1] >= STEP} == {}


def test_every_layout_of_the_packed_weights_gets_its_gradient(found):
    assert len(found["layouts"]) == 4
    assert {name: far for name, far in found["layouts"].items() if far[0] >= 2e-3 or far[1] >= STEP} == {}


def test_each_experts_rows_are_filled_to_the_multiple_that_te_wants(found):
    """In fprop, dgrad and wgrad: of 0, 1, 15, 16, 17 and 40 rows."""
    assert found["padded"] == {
        "not rotated": [[0, 128, 128, 128, 128, 128]] * 3,
        "mxfp8": [[0, 32, 32, 32, 32, 64]] * 3,
        "fp8_current": [[0, 16, 16, 16, 32, 48]] * 3,
    }


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("one", "layers.rules.0 name *.experts.1.*: Transformer Engine has one module for all experts"),
        ("delayed", "outer.statistic delayed: the engine keeps no amax histories for te.GroupedLinear"),
        ("shared", "experts.rounding_state shared: "),
        ("other", "element int4"),
        ("features", "blocks.0.experts.0.gate_up: 40 to 192 features"),
        ("none in force", "no step of the recipe is in force"),
        ("recipe of another", "Transformer Engine did not apply the recipe in force"),
        ("mixed", "blocks.0.experts.3.gate_up and blocks.0.experts.0.gate_up are quantised differently"),
    ],
)
def test_what_it_does_not_compute_is_refused_by_name(found, case, said):
    assert said in found["refused"][case]
    if case in ("one", "delayed", "shared", "mixed"):
        assert found["refused"][case].endswith("use engine: scaled_mm or emulated")


def test_an_environment_variable_does_not_select_other_kernels(found):
    assert found["observed"]["fused"] is False


def test_a_probe_receives_both_passes_of_each_expert_with_tokens(found):
    observed = found["observed"]
    assert observed["same"] == [True] * 3
    assert observed["outputs"] == observed["dx"] == observed["dw"] == [True] * 5
    assert observed["covered"] == [True] * 15


def test_an_infinite_token_is_counted_in_its_expert_alone(found):
    assert found["counted"] == [0, 0, 0, 0, 0, 1]


def test_a_training_with_a_policy_and_phases_goes_as_the_emulators(found):
    ours, theirs = (found["trained"]["losses"][engine] for engine in ("emulated", "transformer_engine"))
    assert len(ours) == len(theirs) == 6
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-4)
    assert theirs[-1]["train/loss"] != pytest.approx(found["trained"]["high"][-1]["train/loss"], rel=1e-4)
    assert theirs[-1]["flops/fp4_share"] == pytest.approx(1 / 3)
    assert found["trained"]["states"] is True
    assert found["trained"]["layers"] == ["NativeExpert", "NativeLinear"]


def test_a_reading_of_another_recipe_is_emulated(found):
    assert found["read"] == [True] * 3
