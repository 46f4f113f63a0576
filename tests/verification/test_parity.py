"""The comparison of Transformer Engine with the emulator: all of it over a double of TE's native part, in a process of its own.

What that shows is that rows, verdicts and records say what was found; of kernels it shows nothing.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.cases import dealt
from support.commands import here
from support.machines import assuming

from ablate import provenance
from ablate.engines import hardware
from ablate.engines.hardware import Machine, installed
from ablate.recipes import PRESETS
from ablate.recipes.te_mapping import recipe_refusals
from ablate.reports.figures.parity import overlay
from ablate.verification import parity
from ablate.verification.conformance.reference_product import rounded_to_nearest
from ablate.verification.parity.bench import Bench, recipes
from ablate.verification.parity.training import ENDS, TWINS, Curves, TwinProducts, twins

pytestmark = pytest.mark.slow

HERE = Path(__file__).parents[1] / "engines"
B200 = Machine("2.20.2", native=True, capability=(10, 0))
H100 = Machine("2.20.2", native=True, capability=(9, 0))
RTX = Machine("2.20.2", native=True, capability=(12, 0))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the results of the program, half a minute later."""
    if installed("transformer_engine") != "2.20.2":
        pytest.skip("the double stands in for the native part of Transformer Engine 2.20.2")
    here = tmp_path_factory.mktemp("parity")
    paths = os.pathsep.join((str(HERE.parent.parent), str(HERE)))
    environment = os.environ | {
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "ABLATE_CACHE": str(here / "cache"),
    }
    (here / "work").mkdir()
    command = [sys.executable, str(HERE / "te_parity.py"), str(here / "work"), *FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]) | {"work": here / "work"}


def document(found, name: str) -> dict:
    return json.loads((found["work"] / name).read_text())


# Sound


def test_a_sound_engine_agrees_in_every_row_and_says_so(found):
    run = found["whole"]["agrees"]
    assert run["status"] == 0, run["said"]
    said = " ".join(run["said"].split())
    assert (
        "Transformer Engine 2.20.2 on this machine computes what the emulator computes in NVFP4 and MXFP8 and FP8: all 96 checks"
        in said
    )
    written = document(found, "parity-no-gpu-2.20.2.json")
    assert written["verdict"] == "agrees"
    assert written["families"] == {"nvfp4": "agrees", "mxfp8": "agrees", "fp8": "agrees"}
    assert [row for row in written["rows"] if row["ok"] is False] == []
    assert (found["work"] / "parity-no-gpu-2.20.2.png").read_bytes().startswith(b"\x89PNG")


def test_a_record_says_what_was_compared_with_what_and_every_loss(found):
    written = document(found, "parity-no-gpu-2.20.2.json")
    assert (
        written["compared"] | {"capability": "10.0", "transformer_engine": "2.20.2", "protocol": 2}
        == written["compared"]
    )
    assert {"numerics", "torch", "parts"} < set(written["compared"])
    assert written["environment"]["fp4_backend"] == "cublaslt 130200"
    assert set(written["losses"]) == {"nvfp4", "mxfp8", "fp8_current"}
    for runs in written["losses"].values():
        assert set(runs) == {"te", "emulated", "bf16", *TWINS}
        assert {len(losses) for losses in runs.values()} == {6}
        assert runs["bf16"] != runs["emulated"]


def test_every_preset_that_te_computes_is_among_the_layers(found):
    computed = {
        name for name, make in PRESETS.items() if not list(recipe_refusals(make())) and not make().plain
    }
    covered = {products for _, _, products in recipes(("nvfp4", "mxfp8", "fp8"))}
    assert all(rounded_to_nearest(PRESETS[name]().products) in covered for name in computed)
    rows = [row["what"] for row in document(found, "parity-no-gpu-2.20.2.json")["rows"]]
    layers = [what.removesuffix(": y, dx, dw") for what in rows if what.endswith(": y, dx, dw")]
    grouped = [name for name in layers if name.endswith(", experts")]
    assert len(layers) - len(grouped) == len(covered) == 24
    assert len(grouped) == 23  # all but delayed scaling


def test_what_is_read_is_what_te_own_storage_holds_whatever_its_padding(found):
    """TE's storage classes, in the shapes that its own quantisers ask for, filled by hand: that kernels fill them so is not shown."""
    assert found["storage"] == {"nvfp4": True, "mxfp8": True, "fp8": True, "fp8 with its transpose": True}


# Wrong in one thing: the row that names it is off, and no row that has nothing to do with it


def turned(*parts: str) -> list[str]:
    return [f"NVFP4, columnwise rotated: {part}" for part in parts]


ALONE = {
    "nothing": [],
    "a weight's block scale one code off": [
        "NVFP4, 16x16 weights: block scales",
        "NVFP4, Four Over Six 16x16: block scales",
    ],
    "a weight's code one off": ["NVFP4, 16x16 weights: codes", "NVFP4, Four Over Six 16x16: codes"],
    "a rotation's sign flipped": turned("codes", "block scales", "amax"),
    "one set of bits for both copies": ["stochastic: the two copies are independent"],
    "one bit for two neighbours": ["stochastic: adjacent elements are independent"],
    "draws that no seed determines": ["stochastic: what one seed draws again"],
    "a draw that is neither neighbour": ["stochastic: neither neighbour"],
}
"""Faults with all rows that are off."""
AMONG = {
    "an MXFP8 scale rounded down": ("MXFP8 E4M3: block scales",),
    "an FP8 scale of a power of two": ("FP8 E4M3, one scale a tensor: scale",),
    "a delayed amax half as large again": ("fp8_delayed: y, dx, dw",),
    "draws that go up too often": ("stochastic, rowwise: share rounded up",),
    "draws that go up too seldom": ("stochastic, rowwise: share rounded up",),
    "to nearest in the place of draws": ("stochastic, columnwise, rotated: share rounded up",),
    "draws that never change": ("stochastic: one draw and the next are independent",),
    "dgrad of the wrong sign, in training": ("nvfp4: losses of 6 steps", "nvfp4: losses of steps 1 to 5"),
    "weights in rows, in training": ("nvfp4: gradients from one state",),
    "y rounded twice": ("nvfp4: y, dx, dw",),
    "dgrad a hundredth larger": ("nvfp4 backward alone: y, dx, dw",),
    "a rotation of one side of wgrad that is not the other's": ("nvfp4: y, dx, dw",),
    "an expert's dw added to another's": ("nvfp4, experts: y, dx, dw",),
}
"""Faults that show in several rows, with those that name them."""
SOUND = {
    "an expert's dw added to another's": lambda row: ", experts: " not in row,
    "dgrad a hundredth larger": lambda row: row == "nvfp4 forward alone: y, dx, dw",
    "a rotation of one side of wgrad that is not the other's": lambda row: (
        row == "nvfp4 without rotation: y, dx, dw"
    ),
}
"""Rows that a fault leaves alone."""
FAULTS = ["nothing", *dealt([*ALONE, *AMONG][1:], 0, 3)]
"""Each costs the program a second or two: the other two thirds run with `--all`."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_off_in_the_rows_that_name_it_and_in_none_that_it_leaves_alone(fault, found):
    off = found["wrong"][fault]
    if fault in ALONE:
        assert off == ALONE[fault]
    else:
        assert {*AMONG[fault]} <= {*off}
        assert not [row for row in off if fault in SOUND and SOUND[fault](row)]


# The record, and who trusts it


def test_a_fault_ends_with_status_1_names_its_family_and_its_first_row(found):
    run = found["whole"]["off"]
    assert run["status"] == 1
    said = " ".join(run["said"].split())
    assert "does not compute what the emulator computes in NVFP4:" in said
    assert "first NVFP4, columnwise rotated: codes:" in said
    assert document(found, "off.json")["families"] == {"nvfp4": "off", "mxfp8": "agrees", "fp8": "agrees"}


def test_auto_takes_te_once_all_has_been_found_to_agree_and_not_before(found):
    auto = {name: found["whole"][name]["auto"] for name in ("fast", "off", "agrees", "fast and off")}
    assert found["whole"]["before"] == auto["fast"] == {"engine": "emulated", "why": auto["fast"]["why"]}
    assert "`ablate doctor --engine transformer_engine`" in auto["fast"]["why"]
    assert "does not cover NVFP4" in auto["off"]["why"]
    assert auto["agrees"] == {"engine": "transformer_engine", "why": ""}
    assert auto["fast and off"]["engine"] == "emulated"


def test_a_quick_comparison_trains_nothing_and_vouches_for_nothing(found):
    run = found["whole"]["fast"]
    assert run["status"] == 0
    assert run["kept"] is False
    assert run["files"] == ["fast.json"]
    assert document(found, "fast.json")["losses"] == {}
    assert "`engine: auto` stays with the emulator" in " ".join(run["said"].split())


def test_json_is_the_document_and_nothing_else(found):
    run = found["whole"]["fast and off"]
    assert run["status"] == 1
    assert json.loads(run["said"]) == document(found, "again.json")


def test_a_trial_records_what_multiplied_and_every_switch_that_was_set(found):
    assert found["trial"]["fp4_backend"] == "cublaslt 130200"
    assert found["trial"]["NVTE_DEBUG"] == "0"
    assert "fp4_backend" not in provenance.environment()  # here nothing of TE was loaded


# What is asked of a machine


@pytest.mark.parametrize(
    ("machine", "families", "fast"),
    [(B200, ("nvfp4", "mxfp8", "fp8"), False), (H100, ("fp8",), True), (RTX, ("nvfp4", "fp8"), False)],
)
def test_each_gpu_is_asked_for_what_it_computes_and_the_rest_is_left_out_with_the_reason(
    machine, families, fast
):
    bench = parity.bench_of(machine)
    assert (bench.families, bench.fast_sums) == (families, fast)
    assert bench.steps == 200
    rows = {row.what: row.measured for row in parity.ParityRun(machine, bench).subject()}
    assert {name for name in ("NVFP4", "MXFP8") if "left out: this GPU, SM" in rows.get(name, "")} == (
        {"NVFP4", "MXFP8"} - {family.upper() for family in families}
    )


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        (Machine("2.20.2", native=True), "there is no GPU with CUDA here"),
        (Machine(capability=(10, 0)), "Transformer Engine is not installed; pip install"),
        (Machine("2.20.2", capability=(10, 0)), "Transformer Engine 2.20.2 is here without its native part"),
        (Machine("2.19.1", native=True, capability=(10, 0)), "Transformer Engine 2.19.1 is older than 2.20"),
        (Machine("2.20.2", native=True, capability=(8, 0)), "this GPU, SM 8.0, does not train FP8"),
    ],
)
def test_where_nothing_can_be_compared_a_sentence_says_why(machine, why):
    with assuming(machine):
        assert parity.obstacle().startswith(why)
        assert "\n" not in parity.obstacle()


@pytest.fixture
def on_b200() -> Iterator[None]:
    with assuming(B200):
        yield


@pytest.mark.usefixtures("on_b200")
def test_a_driver_that_torch_cannot_use_and_a_stray_switch_are_told_too(monkeypatch):
    monkeypatch.setenv("NVTE_USE_FAST_MATH", "1")
    assert parity.obstacle() == "NVTE_USE_FAST_MATH is set and changes Transformer Engine's numbers; unset it"
    monkeypatch.delenv("NVTE_USE_FAST_MATH")

    def too_old():
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040). Please update.\nMore"
        )

    monkeypatch.setattr(torch.cuda, "init", too_old)
    assert (
        parity.obstacle()
        == "torch finds no usable GPU: The NVIDIA driver on your system is too old (found version 11040). Please update"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--engine", "transformer_engine"), "--engine transformer_engine cannot be compared here: "),
        (
            ("--engine", "emulated"),
            "--engine emulated: is what other engines are compared with; omit --engine",
        ),
        (
            ("--engine", "transformer_engin"),
            "--engine transformer_engin: no such engine; 'transformer_engine' is the nearest",
        ),
        (("--record", "x.json"), "--record needs --engine transformer_engine"),
        (
            ("--engine", "transformer_engine", "--record", "no/where/x.json"),
            "--record no/where/x.json: there is no folder",
        ),
        (
            ("--engine", "transformer_engine", "--record", "x.png"),
            "--record x.png: must name a JSON file; the figure is written next to it",
        ),
    ],
)
def test_the_command_refuses_in_a_sentence_with_status_2(words, why):
    if hardware.this_machine().capability:
        pytest.skip("here is a GPU")
    done = here("doctor", *words)
    assert done.returncode == 2
    told = [line for line in done.stderr.splitlines() if not line.startswith("Starting: ")]
    assert [line.startswith(why) for line in told] == [True], done.stderr
    assert done.stdout == ""


# The yardstick


def test_another_order_adds_the_same_terms():
    for twin in twins(ENDS).values():
        for width in (32, 33):
            assert sorted(twin.order(width).tolist()) == list(range(width))
    assert [twin.factor for twin in twins(ENDS).values()] == [1.0, 1 + 2**-20, 1 - 2**-20]


def test_a_twin_is_its_layer_but_for_last_bits():
    from ablate.verification.parity.linears import computed, draw_sample, pair

    sample = draw_sample((64, 512, 96), 3, torch.device("cpu"))
    for preset in ("nvfp4", "mxfp8", "fp8_current"):
        differ = []
        for twin in twins(ENDS).values():
            plain, other = (
                next(pair(sample, rounded_to_nearest(PRESETS[preset]().products))) for _ in range(2)
            )
            other.whole_graph = TwinProducts(other, twin)
            for a, b in zip(computed(plain, sample).values(), computed(other, sample).values(), strict=True):
                differ.append(float((a != b).double().mean()))
                assert torch.allclose(a.double(), b.double(), rtol=2**-7, atol=1e-5 * float(a.abs().max()))
        assert max(differ) < 0.01
        assert max(differ) > 0  # somewhere a last bit did fall the other way


def test_distances_and_the_yardsticks_are_means():
    runs = {"emulated": [4.0, 3.0], "te": [4.0, 3.5], "bf16": [4.0, 2.0]} | {
        twin: [4.0, 3.1] for twin in TWINS
    }
    gradients = {"te": [0.02, 0.3], "bf16": [0.1, 0.1]} | {
        twin: [0.01 * n, 0.1] for n, twin in enumerate(TWINS)
    }
    found = Curves("nvfp4", runs, gradients)
    assert found.distance("te") == 0.25
    assert found.yardstick == pytest.approx(0.05)
    assert found.excess("te") == pytest.approx((1 + 3) / 2)
    assert Curves("nvfp4", runs | {"te": [4.0]}, gradients).distance("te") == torch.inf
    assert Curves("nvfp4", {run: [4.0, 3.0] for run in runs}, gradients).yardstick == 2**-20


def test_the_picture_has_every_run_of_every_recipe(tmp_path):
    runs = {"te": [4.0, 3.5], "emulated": [4.0, 3.4], "bf16": [4.0, 3.3], "backwards": [4.0, 3.45]}
    picture = overlay({"nvfp4": runs, "mxfp8": runs})
    assert set(picture.data["run"]) == set(runs)
    assert len(picture.figure.axes) == 4
    assert picture.write(tmp_path / "x.png").stat().st_size > 10_000
    assert overlay({}) is None


def test_a_bench_covers_sizes_with_and_without_whole_tiles_of_128():
    bench = Bench((), torch.device("cpu"))
    assert all(size % 32 == 0 for shape in (*bench.shapes, *bench.products) for size in shape)
    assert any(size % 128 for shape in bench.shapes for size in shape)
    assert any(all(size % 128 == 0 for size in shape) for shape in bench.shapes)
