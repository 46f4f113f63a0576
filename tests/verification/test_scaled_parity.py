"""The comparison of `scaled_mm` with the emulator: sound over a double of a GPU, wrong with each fault, real in FP8 on a CPU."""

import json

import pytest
import torch
from support.cases import every
from support.commands import here
from support.tensor_cores import FAULTS, Broken, TensorCores

from ablate.engines import hardware
from ablate.engines.hardware import Machine
from ablate.engines.scaled_mm import Native
from ablate.recipes.scaled_mapping import NAMES
from ablate.verification.parity import scaled
from ablate.verification.parity.bench import Bench

B200 = Machine(capability=(10, 0), torch="2.13.0", flashinfer="0.7.2")
RTX = Machine(capability=(12, 0), torch="2.13.0")
H100 = Machine(capability=(9, 0), torch="2.13.0")
CPU = Machine(torch="2.13.0")


def compared(cores: TensorCores, families=tuple(NAMES), engine: str = "scaled_mm") -> scaled.ScaledRun:
    """Run the comparison without its training, in one small shape."""
    bench = Bench(families, torch.device("cpu"), engine, products=((40, 81, 48),))
    backend = engine.partition(":")[2] or "cublaslt"
    one = scaled.ScaledRun(B200, bench, fast=True, native=Native(backend, cores.scaled_mm, cores.mm_fp4))
    for _ in one.groups():
        pass
    return one


def test_tensor_cores_that_compute_what_they_get_agree_in_every_family():
    one = compared(TensorCores())
    assert one.agrees
    assert one.families() == dict.fromkeys(NAMES, "agrees")
    assert len([row for _, _, row in one.rows if row.ok]) > 30
    document = one.document()
    assert document["engine"] == document["compared"]["engine"] == "scaled_mm"
    json.dumps(document)


@every(engine=("scaled_mm:cudnn", "scaled_mm:cutlass"))
def test_flashinfers_back_ends_are_compared_too(engine):
    cores = TensorCores()
    one = compared(cores, ("nvfp4",), engine)
    assert one.agrees
    assert one.document()["compared"]["engine"] == engine
    assert {call.options.get("backend") for call in cores.calls} == {engine.partition(":")[2]}


@every(fault=FAULTS)
def test_a_fault_is_found_in_the_products_and_not_in_the_bytes(fault):
    one = compared(Broken(fault), ("nvfp4",))
    off = {row.what.rpartition(": ")[2] for _, _, row in one.rows if row.ok is False}
    assert off == {"products"}
    assert one.families() == {"nvfp4": "off"}


@pytest.mark.parametrize(
    ("machine", "engine", "families"),
    [
        (B200, "scaled_mm", ("nvfp4", "mxfp4", "fp8", "mxfp8")),
        (B200, "scaled_mm:cutlass", ("nvfp4", "fp8", "mxfp8")),
        (RTX, "scaled_mm", ("nvfp4", "fp8", "mxfp8")),
        (H100, "scaled_mm", ("fp8",)),
        (CPU, "scaled_mm", ("fp8",)),
    ],
)
def test_each_device_is_asked_for_what_it_multiplies(machine, engine, families):
    bench = scaled.bench_of(engine, machine)
    assert bench.families == families
    assert bench.fast_sums == (machine is H100)
    assert bench.engine == engine
    rows = [row.what for row in scaled.ScaledRun(machine, bench).subject()]
    assert {NAMES[family] for family in NAMES if family not in families} <= {*rows}


def test_a_missing_flashinfer_is_an_obstacle():
    assert scaled.obstacle("scaled_mm", CPU) is None
    assert scaled.obstacle("scaled_mm:cudnn", CPU).startswith("FlashInfer is not installed")


@pytest.mark.gpu
@every(engine=("scaled_mm", "scaled_mm:cudnn", "scaled_mm:cutlass"))
def test_this_gpu_computes_what_the_emulator_computes(engine):
    machine = hardware.this_machine()
    if scaled.obstacle(engine, machine):
        return
    one = scaled.ScaledRun(machine, scaled.bench_of(engine, machine), fast=True)
    for _ in one.groups():
        pass
    assert one.agrees, one.verdict()


@pytest.mark.slow
def test_the_doctor_compares_fp8_on_this_machine(tmp_path):
    """The real call, its training included."""
    file = tmp_path / "parity.json"
    done = here("doctor", "--engine", "scaled_mm", "--record", file, "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 0, document["sentence"]
    assert document["families"] == {"fp8": "agrees"}
    assert document["losses"]["fp8_current"]["te"] != document["losses"]["fp8_current"]["bf16"]
    assert json.loads(file.read_text())["compared"]["capability"] is None
