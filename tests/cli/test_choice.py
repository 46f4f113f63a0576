"""Tests of the choice of an engine: by `auto`, and every reason for which Transformer Engine is refused, on made-up machines."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from support.commands import here
from support.machines import assuming, install

from ablate.engines import parity_record
from ablate.engines.hardware import PARTS, Machine, this_machine
from ablate.errors import InputError
from ablate.experiment import engine_selection
from ablate.experiment.arms import KnobError, StartingPoint
from ablate.experiment.engine_selection import UNPROVEN, Choice, choose, misfit
from ablate.experiment.load import load
from ablate.numerics.spec import VERSION
from ablate.training.rank_layout import Layout

B200 = Machine("2.20.2", native=True, capability=(10, 0))
BARE = Machine("2.20.2", native=True)
WITHOUT = Machine(capability=(10, 0))
EMPTY = Machine("2.20.2", capability=(10, 0))
OLD = Machine("2.19.1", native=True, capability=(10, 0))
H100 = Machine("2.20.2", native=True, capability=(9, 0))
RTX_SAID = (
    "Transformer Engine accepts NVFP4 on SM 12.0 and documents no training there; "
    "`ablate doctor --engine transformer_engine`"
)
SPARK_SAID = (
    "this GPU, SM 12.1, does not train NVFP4 (it lacks the instruction cvt.e2m1x2; "
    "it trains FP8 with one scale a tensor); engine"
)
RTX = Machine("2.21.0+cu13", native=True, capability=(12, 0))
SPARK = Machine("2.20.2", native=True, capability=(12, 1))


pytestmark = pytest.mark.usefixtures("cache")  # so that no comparison of this machine's counts


def arms(*presets, **values) -> list:
    return [StartingPoint("gpt", values, "nvfp4").arm({"recipe": preset}) for preset in presets]


@pytest.mark.parametrize("preset", ["nvfp4", "mxfp8", "fp8_current", "healing", "fp4_all_the_way"])
def test_transformer_engine_is_taken_where_it_is_asked_for_and_computes_all_arms(preset):
    """`auto` leaves it alone until its kernels have been compared with the emulator's numbers, and names the command for that."""
    for machine in (B200, Machine("2.22", native=True, capability=(10, 3))):
        assert choose("transformer_engine", arms("bf16", preset), "cuda", machine=machine) == Choice(
            "transformer_engine"
        )
        assert choose("auto", arms("bf16", preset), "cuda", machine=machine) == Choice("emulated", UNPROVEN)


# What a kept comparison vouches for

ALL = {"nvfp4": "agrees", "mxfp8": "agrees", "fp8": "agrees"}


def compared(machine=B200, families=ALL, fast=False, **other) -> dict:
    return {
        "compared": parity_record.subject(machine) | other,
        "families": families,
        "fast": fast,
        "verdict": "agrees",
    }


def auto(*presets, machine=B200) -> Choice:
    return choose("auto", arms("bf16", *presets), "cuda", machine=machine)


def test_auto_takes_te_where_a_comparison_on_such_a_machine_found_that_it_agrees():
    assert parity_record.agreed(B200) == set()
    path = parity_record.keep(compared(), B200)
    assert json.loads(path.read_text())["compared"]["capability"] == "10.0"
    assert auto("nvfp4", "mxfp8", "fp8_current") == Choice("transformer_engine")
    assert auto("nvfp4", "ue5m3").why.startswith(
        "arm 'ue5m3': fprop.x, fprop.w, "
    )  # what TE cannot compute stays a reason
    assert choose("auto", arms("nvfp4"), "cpu", machine=B200).engine == "emulated"


def test_a_family_that_was_off_or_was_not_compared_is_left_to_the_emulator():
    parity_record.keep(compared(families={"fp8": "agrees", "mxfp8": "off"}), B200)
    assert auto("fp8_current").engine == "transformer_engine"
    assert auto("mxfp8").why == (
        "the comparison that is kept here does not cover MXFP8 in Transformer Engine; see `ablate doctor --engine transformer_engine`"
    )
    assert "does not cover NVFP4 in" in auto("healing").why  # NVFP4, and FP8 at the end
    assert "does not cover MXFP8 and NVFP4 in" in auto("nvfp4", "mxfp8").why


def test_a_comparison_on_another_gpu_of_another_version_or_a_quick_one_does_not_count(tmp_path, monkeypatch):
    parity_record.keep(compared(fast=True), B200)
    assert auto("nvfp4") == Choice("emulated", UNPROVEN)
    parity_record.keep(compared(), B200)
    others = [replace(B200, capability=(10, 3)), replace(B200, version="2.21.0"), H100]
    assert [parity_record.agreed(machine) for machine in (B200, *others)] == [set(ALL), set(), set(), set()]
    subject = parity_record.subject(B200)
    assert (subject["numerics"], subject["protocol"]) == (VERSION, parity_record.PROTOCOL)
    for field in ("numerics", "protocol"):
        parity_record.keep(compared(**{field: 99}), B200)
        assert auto("nvfp4") == Choice("emulated", UNPROVEN)
    parity_record.keep(compared(), B200)
    with monkeypatch.context() as changed:
        changed.setenv("NVTE_ENABLE_CUTEDSL_BACKEND", "1")  # other kernels
        assert auto("nvfp4") == Choice("emulated", UNPROVEN)
    assert auto("nvfp4") == Choice("transformer_engine")
    for package in ("torch", *PARTS):
        with monkeypatch.context() as changed:
            install(changed, tmp_path / package, {package: "9.9"})
            assert auto("nvfp4") == Choice("emulated", UNPROVEN)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"compared": 1, "fast": false}', "null"])
def test_half_a_file_or_another_one_in_its_place_counts_for_nothing(content):
    path = parity_record.keep(compared(), B200)
    path.write_text(content)
    assert auto("nvfp4") == Choice("emulated", UNPROVEN)


def test_a_copy_of_another_machines_file_counts_for_nothing():
    parity_record.record_path(B200).parent.mkdir(parents=True, exist_ok=True)
    parity_record.record_path(B200).write_text(json.dumps(compared(capability="10.3")))
    assert parity_record.agreed(B200) == set()


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        (BARE, "there is no GPU with CUDA here; engine: emulated computes the recipe on any device"),
        (WITHOUT, "Transformer Engine is not installed; pip install"),
        (EMPTY, "Transformer Engine 2.20.2 is here without its native part, as Python alone; pip install"),
        (OLD, "Transformer Engine 2.19.1 is older than 2.20; pip install"),
        (
            H100,
            "this GPU, SM 9.0, does not train NVFP4 (it trains FP8 with one scale a tensor); engine: emulated",
        ),
        (RTX, RTX_SAID),
        (SPARK, SPARK_SAID),
        (Machine("2.20.2", native=True, capability=(8, 0)), "this GPU, SM 8.0, does not train NVFP4; engine"),
    ],
)
def test_a_machine_that_cannot_is_said_in_a_sentence_with_the_way_out(machine, why):
    with pytest.raises(ValueError, match=f"^{re.escape(why)}"):
        choose("transformer_engine", arms("bf16", "nvfp4"), "cuda", machine=machine)
    found = choose("auto", arms("bf16", "nvfp4"), "cuda", machine=machine)
    assert found.engine == "emulated"
    assert why.startswith(f"{found.why.partition('; scaled_mm would')[0]}; ")


def test_nvfp4_runs_on_a_gpu_that_te_accepts_after_a_comparison_on_it():
    parity_record.keep(compared(RTX), RTX)
    for engine in ("transformer_engine", "auto"):
        assert choose(engine, arms("bf16", "nvfp4"), "cuda", machine=RTX) == Choice("transformer_engine")
    parity_record.keep(compared(RTX, {"nvfp4": "off"}), RTX)
    with pytest.raises(ValueError, match=r"SM 12\.0"):
        choose("transformer_engine", arms("nvfp4"), "cuda", machine=RTX)


@pytest.mark.parametrize("machine", [H100, RTX, SPARK])
def test_fp8_with_one_scale_a_tensor_runs_before_and_after_data_centre_blackwell_and_mxfp8_does_not(machine):
    assert (
        choose("transformer_engine", arms("fp8_current"), "cuda", machine=machine).engine
        == "transformer_engine"
    )
    with pytest.raises(ValueError, match="does not train MXFP8"):
        choose("transformer_engine", arms("mxfp8"), "cuda", machine=machine)


def test_one_arm_that_it_cannot_compute_moves_all_arms_to_the_emulator():
    found = choose("auto", arms("bf16", "nvfp4", "ue5m3"), "cuda", machine=B200)
    assert found.engine == "emulated"
    assert found.why.startswith("arm 'ue5m3': fprop.x, fprop.w, ")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"width": 80, "heads": 4}, "workload.width is 80, and Transformer Engine takes multiples of 32"),
        ({"batch": 4, "context": 40}, "workload.context is 40, and"),
        ({"width": 64, "heads": 8, "kv_heads": 2}, "the width of workload.kv_heads is 16, and"),
        ({"hidden": 100}, "workload.hidden is 100, and"),
        ({"compile": True}, "workload.compile true: not yet"),
        ({"recompute": True}, "workload.recompute true: not yet"),
        ({"experts": {"count": 4, "hidden": 48}}, "workload.experts.hidden is 48, and"),
        (
            {"guard": {"policy": "fallback", "fallback": {"precision": "fp8", "slots": ["fprop.x"]}}},
            "arm 'nvfp4': after workload.guard.fallback fprop: Transformer Engine multiplies two operands of one kind, and fprop.x and",
        ),
    ],
)
def test_a_workload_that_it_does_not_take_is_refused_by_the_field(values, why):
    with pytest.raises(ValueError, match="arm 'nvfp4'") as error:
        choose("transformer_engine", arms("nvfp4", **values), "cuda", machine=B200)
    assert why in str(error.value)


def test_every_field_in_the_way_of_an_arm_is_named():
    (arm,) = arms("ue5m3", width=80, heads=4)
    slots = "fprop.x, fprop.w, dgrad.g, dgrad.w, wgrad.g, wgrad.x"
    wanted = [f"{slots}: scale: ", f"{slots}: outer.statistic hold:50: ", "workload.width is 80"]
    with pytest.raises(ValueError, match="arm 'ue5m3'") as error:
        choose("transformer_engine", [arm], "cuda", machine=B200)
    assert [reason for reason in wanted if reason not in str(error.value)] == []
    assert all(reason in (misfit("transformer_engine", arm, Layout()) or "") for reason in wanted)


def test_arms_that_quantise_nothing_stay_with_the_emulator_unless_asked():
    assert choose("auto", arms("bf16"), "cuda", machine=B200).engine == "emulated"
    assert (
        choose("transformer_engine", arms("bf16", width=80, heads=4), "cuda", machine=B200).engine
        == "transformer_engine"
    )


def test_a_cpu_and_operands_looked_into_are_not_for_it():
    with pytest.raises(ValueError, match="device cpu"):
        choose("transformer_engine", arms("nvfp4"), "cpu", machine=B200)
    with pytest.raises(ValueError, match="workload tensors: not yet"):
        choose("transformer_engine", [StartingPoint("tensors", {}, "nvfp4").arm({})], "cuda", machine=B200)


def test_ranks_that_it_cannot_lay_out_leave_the_emulator_to_do_so():
    parity_record.keep(compared(), B200)
    own, shared = arms("nvfp4", accumulate=2), arms("nvfp4", batch=4)
    assert choose("auto", own, "cuda", layout=Layout(2), machine=B200) == Choice("transformer_engine")
    assert (
        "keeps whole weights" in choose("auto", own, "cuda", layout=Layout(2, sharded=True), machine=B200).why
    )
    assert (
        "does not do; a workload.accumulate that is a multiple of 2"
        in choose("auto", shared, "cuda", layout=Layout(2), machine=B200).why
    )


def test_a_switch_that_changes_its_numbers_is_refused_before_anything_runs(monkeypatch):
    parity_record.keep(compared(), B200)
    monkeypatch.setenv("NVTE_USE_FAST_MATH", "1")
    said = "NVTE_USE_FAST_MATH is set here and changes Transformer Engine's numbers"
    assert said in auto("nvfp4").why
    with pytest.raises(ValueError, match=said):
        choose("transformer_engine", arms("nvfp4"), "cuda", machine=B200)


QWEN3 = {
    **{"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
}


@pytest.mark.parametrize(
    ("workload", "fields", "why"),
    [
        ("finetune", {"model": QWEN3}, None),
        ("gpt", {"model": QWEN3}, None),
        (
            "finetune",
            {"model": QWEN3 | {"intermediate_size": 100}},
            "the model's model.layers.0.mlp.gate_proj out-features is 100, and",
        ),
        ("gpt", {"model": QWEN3, "context": 40}, "workload.context is 40, and"),
    ],
)
def test_the_sizes_of_every_workloads_products_are_known_before_it_runs(workload, fields, why):
    """Such a trial would otherwise end at its first product."""
    arm = StartingPoint(workload, fields, "nvfp4").arm({})
    if why is None:
        assert choose("transformer_engine", [arm], "cuda", machine=B200).engine == "transformer_engine"
    else:
        with pytest.raises(ValueError, match=re.escape(why)):
            choose("transformer_engine", [arm], "cuda", machine=B200)


def test_what_a_guard_falls_back_to_has_to_run_here_too():
    falls_back = arms(
        "nvfp4",
        guard={"policy": "fallback", "fallback": {"precision": "fp8", "slots": ["fprop.*", "dgrad.*"]}},
    )
    assert choose("transformer_engine", falls_back, "cuda", machine=B200).engine == "transformer_engine"
    parity_record.keep(compared(families={"nvfp4": "agrees"}), B200)
    assert choose("auto", falls_back, "cuda", machine=B200).why.startswith(
        "the comparison that is kept here does not cover FP8 in"
    )


def test_the_emulator_is_what_was_asked_for_wherever():
    assert choose("emulated", arms("ue5m3"), "cuda", machine=B200) == Choice("emulated")


MIXTURE = {
    "model_type": "qwen3_moe",
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 64),
    "vocab_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def test_the_plan_names_the_multiple_that_te_pads_experts_to(tmp_path):
    (tmp_path / "x.yaml").write_text(
        FILE.replace("steps: 3", "steps: 3, experts: {count: 4}") + "engine: transformer_engine\n"
    )
    command = "plan", tmp_path / "x.yaml", "--capability", "10.0", "--state", tmp_path
    assert "fill each one's tokens to a multiple of 128 for te.GroupedLinear" in " ".join(
        here(*command).stdout.split()
    )


@pytest.mark.parametrize(
    "fields", [{"experts": {"count": 4}}, {"model": MIXTURE}], ids=["own", "transformers"]
)
def test_a_model_with_experts_runs_on_either_engine_of_tensor_cores(fields):
    arms_with_experts = [StartingPoint("gpt", fields, "nvfp4").arm({})]
    for engine in ("transformer_engine", "scaled_mm"):
        assert choose(engine, arms_with_experts, "cuda", machine=B200) == Choice(engine)
        assert engine_selection.misfit(engine, arms_with_experts[0], Layout()) is None
    assert choose("auto", arms_with_experts, "cuda", machine=B200) == Choice("emulated", UNPROVEN)
    agreed(B200)
    parity_record.keep(compared(families={"nvfp4": "agrees"}), B200)
    assert choose("auto", arms_with_experts, "cuda", machine=B200) == Choice("transformer_engine")


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ({"recipe": "fp8_delayed"}, "outer.statistic delayed"),
        ({"recipe.experts.rounding_state": "shared"}, "experts.rounding_state shared"),
        (
            {"recipe.layers": {"rules": [{"match": {"name": "*.experts.1.*"}, "use": None}]}},
            "layers.rules.0",
        ),
    ],
)
def test_what_te_does_not_compute_of_experts_is_left_to_scaled_mm(recipe, why):
    mixed = [StartingPoint("gpt", {"experts": {"count": 4}}, "nvfp4").arm(recipe)]
    with pytest.raises(ValueError, match=why):
        choose("transformer_engine", mixed, "cuda", machine=B200)
    agreed(B200)
    assert choose("auto", mixed, "cuda", machine=B200).engine == "scaled_mm"


FILE = "schema: 1\nquestion: Is it?\nworkload: {gpt: {steps: 3}}\nablate: {rht: [true, false]}\n"


def test_the_engine_is_in_every_trial_and_so_in_its_id(tmp_path):
    (tmp_path / "x.yaml").write_text(FILE)
    (tmp_path / "native.yaml").write_text(f"{FILE}engine: transformer_engine\n")
    with assuming(B200):
        here, there = load(tmp_path / "x.yaml", "cuda"), load(tmp_path / "native.yaml", "cuda")
    specs = [experiment.spec(experiment.arms[0], 0, "cuda") for experiment in (here, there)]
    assert [spec.engine for spec in specs] == ["emulated", "transformer_engine"]
    assert specs[0].id != specs[1].id
    assert load(tmp_path / "x.yaml", "cpu").engine == "emulated"


SEARCH = """schema: 1
question: Which?
workload: {gpt: {steps: 3}}
search: {trials: 4, sampler: random}
"""


def searched(folder, engine: str, knobs: str, recipe: str = "nvfp4"):
    path = folder / "s.yaml"
    path.write_text(f"{SEARCH}engine: {engine}\nrecipe: {recipe}\nablate: {{{knobs}}}\n")
    with assuming(B200):
        return load(path, "cuda")


def test_a_search_runs_on_it_where_every_value_of_its_knobs_does(tmp_path):
    fine = "rht: [true, false], weights_2d: [true, false], cooldown: {uniform: [0, 0.5]}"
    assert searched(tmp_path, "transformer_engine", fine).engine == "transformer_engine"
    assert searched(tmp_path, "auto", fine).engine_why == UNPROVEN
    parity_record.keep(compared(), B200)
    assert searched(tmp_path, "auto", fine).engine == "transformer_engine"
    other = "rht: [true, false], sr_bits: [8, 16]"
    assert (
        "Transformer Engine draws a number of bits of its own" in searched(tmp_path, "auto", other).engine_why
    )
    with pytest.raises(
        InputError, match=r"arm 'sr_bits=16': dgrad\.g, wgrad\.g: bits 16: Transformer Engine draws"
    ):
        searched(tmp_path, "transformer_engine", other)


def test_a_combination_that_it_cannot_compute_is_refused_when_it_is_drawn(tmp_path):
    """Each of the two values alone is fine: rows need weights in blocks of 1x16."""
    rows, weights = "recipe.fprop.x.outer.granularity", "recipe.fprop.w.block"
    found = searched(
        tmp_path, "transformer_engine", f"{rows}: [tensor, row], {weights}: [1x16, 16x16]", "fp4_all_the_way"
    )
    found.propose({rows: "row", weights: "1x16"})
    found.propose({rows: "tensor", weights: "16x16"})
    with pytest.raises(KnobError, match="Transformer Engine has it with 1x16 weights"):
        found.propose({rows: "row", weights: "16x16"})


def test_the_plan_says_why_auto_took_the_emulator(tmp_path):
    (tmp_path / "x.yaml").write_text(FILE)
    done = here("plan", tmp_path / "x.yaml", "--device", "cpu", "--state", tmp_path)
    assert done.returncode == 0
    told = " ".join(done.stdout.split())
    assert (
        "Engine: emulated (auto), since this sweep runs on CPUs (device cpu), and Transformer Engine on GPUs."
        in told
    )
    (tmp_path / "y.yaml").write_text(FILE + "engine: transformer_engine\n")
    done = here("plan", tmp_path / "y.yaml", "--device", "cpu", "--state", tmp_path)
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
def test_the_native_part_is_told_from_the_package_of_python_alone(
    packages, library, native, tmp_path, monkeypatch
):
    install(monkeypatch, tmp_path, packages, alone=True)
    found = this_machine()
    assert (found.version, found.native) == (library, native)


def test_looking_at_the_machine_imports_no_torch():
    code = "import sys; from ablate.engines.hardware import this_machine; this_machine(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
    assert isinstance(this_machine(), Machine)


# --- the engine of torch's scaled products --------------------------------------------------------

BLACKWELL = Machine(capability=(10, 0), torch="2.13.0")
HOPPER = Machine(capability=(9, 0), torch="2.13.0")
SCALED = {"nvfp4": "agrees", "mxfp4": "agrees", "fp8": "agrees", "mxfp8": "agrees"}


def agreed(machine=BLACKWELL, families=SCALED) -> None:
    document = {"compared": parity_record.subject(machine, "scaled_mm"), "families": families, "fast": False}
    parity_record.keep(document, machine, "scaled_mm")


def test_scaled_mm_is_taken_where_it_is_asked_for_whatever_a_recipe_leaves_to_the_emulator():
    for preset in ("nvfp4", "quartet2", "mxfp4_backward", "ue5m3", "bf16"):
        assert choose("scaled_mm", arms(preset), "cuda", machine=BLACKWELL) == Choice("scaled_mm")
    assert choose("scaled_mm", arms("fp8_current"), "cpu", machine=Machine()) == Choice("scaled_mm")


@pytest.mark.parametrize(
    ("engine", "preset", "machine", "device", "why"),
    [
        ("scaled_mm", "nvfp4", HOPPER, "cuda", "this GPU, SM 9.0, does not multiply NVFP4"),
        ("scaled_mm", "nvfp4", Machine(), "cpu", "torch multiplies NVFP4 on GPUs alone"),
        ("scaled_mm", "nvfp4", Machine(), None, "torch multiplies NVFP4 on GPUs alone"),
        (
            "scaled_mm",
            "mxfp4",
            replace(BLACKWELL, capability=(12, 0)),
            "cuda",
            "SM 12.0, does not multiply MXFP4",
        ),
        ("scaled_mm:cudnn", "nvfp4", BLACKWELL, "cuda", "FlashInfer is not installed"),
        ("scaled_mm", "nvfp4", replace(BLACKWELL, torch="2.9.0"), "cuda", "torch 2.9.0 has no scaled_mm"),
    ],
)
def test_scaled_mm_is_refused_with_the_reason(engine, preset, machine, device, why):
    with pytest.raises(ValueError, match=why):
        choose(engine, arms("bf16", preset), device, machine=machine)


def test_an_arm_that_flashinfer_cannot_write_is_refused_and_a_workload_without_an_engine():
    own = [StartingPoint("gpt", {}, "nvfp4").arm({"recipe.wgrad.dw": "fp32"})]
    machine = replace(BLACKWELL, flashinfer="0.7.2")
    with pytest.raises(ValueError, match=r"wgrad\.dw fp32: FlashInfer"):
        choose("scaled_mm:cutlass", own, "cuda", machine=machine)
    assert engine_selection.misfit("scaled_mm:cutlass", own[0], Layout()).startswith("wgrad.dw fp32")
    assert engine_selection.misfit("scaled_mm", own[0], Layout()) is None
    assert choose("scaled_mm", own, "cuda", machine=machine) == Choice("scaled_mm")
    with pytest.raises(ValueError, match="workload tensors: it is computed by the emulator alone"):
        choose("scaled_mm", [StartingPoint("tensors", {}, "nvfp4").arm({})], "cuda", machine=machine)
    shared = arms("nvfp4", accumulate=1, batch=4)
    with pytest.raises(ValueError, match="FlashInfer writes bf16"):
        choose("scaled_mm:cudnn", shared, "cuda", layout=Layout(2), machine=machine)
    assert choose("scaled_mm", shared, "cuda", layout=Layout(2), machine=machine) == Choice("scaled_mm")


def test_auto_takes_scaled_mm_after_a_kept_comparison_where_transformer_engine_cannot_compute_all_arms():
    own = arms("bf16", "nvfp4", "quartet2", "ue5m3")
    chosen = choose("auto", own, "cuda", machine=BLACKWELL)
    assert chosen.engine == "emulated"
    assert "scaled_mm would multiply NVFP4 on tensor cores" in chosen.why
    assert "scaled_mm" not in choose("auto", arms("bf16", "ue5m3"), "cuda", machine=BLACKWELL).why
    agreed()
    assert choose("auto", own, "cuda", machine=BLACKWELL) == Choice("scaled_mm")
    assert choose("auto", own, "cpu", machine=BLACKWELL).engine == "emulated"
    assert choose("auto", own, "cuda", machine=HOPPER).engine == "emulated"
    assert (
        choose("auto", arms("bf16", "ue5m3"), "cuda", machine=BLACKWELL).engine == "emulated"
    )  # nothing fits
    parity_record.keep(compared(), B200)
    assert choose("auto", arms("nvfp4"), "cuda", machine=B200) == Choice("transformer_engine")


def test_auto_leaves_a_family_that_was_off_to_the_emulator():
    agreed(families=SCALED | {"mxfp8": "off"})
    assert choose("auto", arms("quartet2"), "cuda", machine=BLACKWELL) == Choice("scaled_mm")
    assert choose("auto", arms("mxfp4_backward"), "cuda", machine=BLACKWELL).engine == "emulated"
