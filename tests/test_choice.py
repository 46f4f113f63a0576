"""Which engine computes an experiment: what `auto` takes, and every reason for which Transformer Engine is refused, on made-up machines."""

import re
import subprocess
import sys

import pytest
from experiments_for_tests import ablate

from ablate import choice
from ablate.arms import Arm, Base
from ablate.choice import UNPROVEN, Choice, choose
from ablate.engines import hardware
from ablate.engines.hardware import Machine, this_machine
from ablate.experiment import load
from ablate.recipes import PRESETS
from ablate.workloads import WORKLOADS

B200 = Machine("2.20.2", native=True, capability=(10, 0))
BARE = Machine("2.20.2", native=True)
WITHOUT = Machine(capability=(10, 0))
EMPTY = Machine("2.20.2", capability=(10, 0))
OLD = Machine("2.19.1", native=True, capability=(10, 0))
H100 = Machine("2.20.2", native=True, capability=(9, 0))
RTX_SAID = (
    "this GPU, SM 12.0, does not train NVFP4 (Transformer Engine runs NVFP4 inference on it, "
    "and trains FP8 with one scale a tensor); engine"
)
RTX = Machine("2.21.0+cu13", native=True, capability=(12, 0))


def arms(*presets, **values) -> list:
    return [Base("gpt", values, "nvfp4").arm({"recipe": preset}) for preset in presets]


@pytest.mark.parametrize("preset", ["nvfp4", "mxfp8", "fp8_current", "healing", "fp4_all_the_way"])
def test_transformer_engine_is_taken_where_it_is_asked_for_and_computes_all_arms(preset):
    """`auto` leaves it alone until its kernels have been compared with the emulator's numbers."""
    for machine in (B200, Machine("2.22", native=True, capability=(10, 3))):
        assert choose("transformer_engine", arms("bf16", preset), "cuda", machine=machine) == Choice("transformer_engine")
        assert choose("auto", arms("bf16", preset), "cuda", machine=machine) == Choice("emulated", UNPROVEN)


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        (BARE, "there is no GPU with CUDA here; engine: emulated computes the same numbers on any device"),
        (WITHOUT, "Transformer Engine is not installed; pip install"),
        (EMPTY, "Transformer Engine 2.20.2 is here without its native part, as Python alone; pip install"),
        (OLD, "Transformer Engine 2.19.1 is older than 2.20; pip install"),
        (H100, "this GPU, SM 9.0, does not train NVFP4 (FP8 with one scale a tensor it does); engine: emulated"),
        (RTX, RTX_SAID),
        (Machine("2.20.2", native=True, capability=(8, 0)), "this GPU, SM 8.0, does not train NVFP4; engine"),
    ],
)
def test_a_machine_that_cannot_is_said_in_a_sentence_with_the_way_out(machine, why):
    with pytest.raises(ValueError, match=f"^{re.escape(why)}"):
        choose("transformer_engine", arms("bf16", "nvfp4"), "cuda", machine=machine)
    found = choose("auto", arms("bf16", "nvfp4"), "cuda", machine=machine)
    assert found.engine == "emulated"
    assert why.startswith(f"{found.why}; ")


@pytest.mark.parametrize("machine", [H100, RTX])
def test_fp8_with_one_scale_a_tensor_runs_before_and_after_data_centre_blackwell_and_mxfp8_does_not(machine):
    assert choose("transformer_engine", arms("fp8_current"), "cuda", machine=machine).engine == "transformer_engine"
    with pytest.raises(ValueError, match="does not train MXFP8"):
        choose("transformer_engine", arms("mxfp8"), "cuda", machine=machine)


def test_one_arm_that_it_cannot_compute_moves_all_arms_to_the_emulator():
    found = choose("auto", arms("bf16", "nvfp4", "ue5m3"), "cuda", machine=B200)
    assert found.engine == "emulated"
    assert found.why.startswith("arm 'ue5m3': fprop.x.scale")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"width": 80, "heads": 4}, "workload.width is 80, and Transformer Engine takes multiples of 32"),
        ({"batch": 4, "context": 40}, "workload.context is 40, and"),
        ({"width": 64, "heads": 8, "kv_heads": 2}, "the width of workload.kv_heads is 16, and"),
        ({"hidden": 100}, "workload.hidden is 100, and"),
        ({"compile": True}, "workload.compile true: not yet"),
        ({"recompute": True}, "workload.recompute true: not yet"),
        ({"guard": {"policy": "fallback", "fallback": {"precision": "bf16"}}}, "workload.guard.fallback.precision: not yet"),
    ],
)
def test_a_workload_that_it_does_not_take_is_refused_by_the_field(values, why):
    with pytest.raises(ValueError, match="arm 'nvfp4'") as error:
        choose("transformer_engine", arms("nvfp4", **values), "cuda", machine=B200)
    assert why in str(error.value)


def test_arms_that_quantise_nothing_stay_with_the_emulator_unless_asked():
    assert choose("auto", arms("bf16"), "cuda", machine=B200).engine == "emulated"
    assert choose("transformer_engine", arms("bf16", width=80, heads=4), "cuda", machine=B200).engine == "transformer_engine"


def test_a_search_and_a_cpu_and_operands_looked_into_are_not_for_it():
    with pytest.raises(ValueError, match="a search proposes"):
        choose("transformer_engine", arms("nvfp4"), "cuda", search=True, machine=B200)
    with pytest.raises(ValueError, match="device cpu"):
        choose("transformer_engine", arms("nvfp4"), "cpu", machine=B200)
    with pytest.raises(ValueError, match="workload tensors: not yet"):
        choose("transformer_engine", [Base("tensors", {}, "nvfp4").arm({})], "cuda", machine=B200)


@pytest.mark.parametrize("workload", [("mae", {}), ("finetune", {"model": "tests"})])
def test_sizes_that_nobody_knows_yet_are_left_to_the_emulator(workload):
    """Such a trial would otherwise end at its first product."""
    name, values = workload
    config = WORKLOADS[name].model_construct(**values)
    arm = Arm("x", {}, config, PRESETS["nvfp4"]())
    assert choose("auto", [arm], "cuda", machine=B200).why.startswith("arm 'x': workload: not yet on Transformer Engine, since the sizes")


def test_the_emulator_is_what_was_asked_for_wherever():
    assert choose("emulated", arms("ue5m3"), "cuda", machine=B200) == Choice("emulated")


FILE = "schema: 1\nquestion: Is it?\nworkload: {gpt: {steps: 3}}\nablate: {rht: [true, false]}\n"


def test_the_engine_is_in_every_trial_and_so_in_its_id(tmp_path, monkeypatch):
    (tmp_path / "x.yaml").write_text(FILE)
    (tmp_path / "native.yaml").write_text(f"{FILE}engine: transformer_engine\n")
    monkeypatch.setattr(choice, "this_machine", lambda: B200)
    here, there = load(tmp_path / "x.yaml", "cuda"), load(tmp_path / "native.yaml", "cuda")
    specs = [experiment.spec(experiment.arms[0], 0, "cuda") for experiment in (here, there)]
    assert [spec.engine for spec in specs] == ["emulated", "transformer_engine"]
    assert specs[0].id != specs[1].id
    assert load(tmp_path / "x.yaml", "cpu").engine == "emulated"


def test_the_plan_says_why_auto_took_the_emulator(tmp_path):
    (tmp_path / "x.yaml").write_text(FILE)
    done = ablate("plan", tmp_path / "x.yaml", "--device", "cpu", "--state", tmp_path)
    assert done.returncode == 0
    told = " ".join(done.stdout.split())
    assert "Engine: emulated (auto), since this sweep runs on CPUs (device cpu), and Transformer Engine on GPUs." in told
    (tmp_path / "y.yaml").write_text(FILE + "engine: transformer_engine\n")
    done = ablate("plan", tmp_path / "y.yaml", "--device", "cpu", "--state", tmp_path)
    assert done.returncode == 2
    told = " ".join(done.stderr.split())
    assert "engine: 'transformer_engine': this sweep runs on CPUs" in told
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("packages", "library", "native"),
    [
        ({}, None, False),
        ({"transformer-engine": "2.20.2"}, "2.20.2", False),
        ({"transformer-engine": "2.20.2", "transformer-engine-cu13": "2.20.2"}, "2.20.2", False),
        ({"transformer-engine": "2.20.2", "transformer-engine-torch": "2.20.2"}, "2.20.2", True),
    ],
)
def test_the_native_part_is_told_from_the_package_of_python_alone(packages, library, native, monkeypatch):
    monkeypatch.setattr(hardware, "installed", packages.get)
    found = this_machine()
    assert (found.version, found.native) == (library, native)


def test_looking_at_the_machine_imports_no_torch():
    code = "import sys; from ablate.engines.hardware import this_machine; this_machine(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
    assert isinstance(this_machine(), Machine)
