"""The bench measures what it names, in a form that machines read; what it measures is no test."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from support.cases import every
from support.commands import here
from support.experiments import ablate

from ablate.engines.hardware import Machine, installed
from ablate.numerics import product
from ablate.recipes import PRESETS
from ablate.verification import linear_layers
from ablate.verification.gpu_peaks import GPUS, known, share
from ablate.verification.linear_layers import NATIVE, Shape, multiplied, refused, shapes_of
from ablate.verification.timing import GROUPS, interleaved, profile

ENGINES = Path(__file__).parents[1] / "engines"
B200 = Machine("2.20.2", native=True, capability=(10, 0))


@pytest.mark.slow
def test_kernels_are_timed_by_operation_shape_dtype_and_back_end(tmp_path):
    done = here(
        "bench",
        "kernels",
        "64x64",
        "32x160",
        "--rounds",
        1,
        "--builds",
        "--json",
        "--png",
        tmp_path / "a.png",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    builds = {line["back end"] for line in found}
    assert {"portable", "reference"} <= builds
    assert len(
        {tuple(line[key] for key in ("operation", "shape", "dtype", "back end")) for line in found}
    ) == len(found)
    assert len(found) == 2 * (8 + 6) * len(builds)  # bf16 is rotated too
    assert all(line[key] > 0 for line in found for key in ("Melem/s", "ms", "copy GB/s", "of memcpy"))
    assert all(line["spread"] >= 0 for line in found)
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_the_kernels_of_a_gpu_are_timed_beside_a_copy_in_its_memory():
    done = ablate("bench", "kernels", "64x64", "--rounds", 1, "--device", "cuda", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {line["back end"] for line in found} == {"triton"}
    assert len(found) == 8 + 6  # bf16 is rotated too
    assert all(line[key] > 0 for line in found for key in ("Melem/s", "copy GB/s", "of memcpy"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_a_step_is_timed_on_a_gpu(tmp_path):
    shape = ("--layers", 1, "--width", 64, "--tokens", 128, "--rounds", 1, "--trace", tmp_path)
    done = ablate("bench", "step", "nvfp4", *shape, "--device", "cuda", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [line["preset"] for line in found] == ["bf16", "nvfp4", "nvfp4, fp32_out"]
    assert all(line["step ms"] > 0 < line["peak MiB"] for line in found)
    assert (tmp_path / "nvfp4.json").exists()


def test_a_step_whose_blocks_all_stay_in_high_precision_is_not_timed_as_its_preset():
    shape = ("--layers", 1, "--width", 64, "--tokens", 128, "--rounds", 1)
    done = here("bench", "step", "nvfp4_paper", *shape, "--json")
    assert done.returncode == 2
    assert "nvfp4_paper" in done.stderr
    assert not done.stdout


TOO_LARGE = {
    "kernels": ["10000000x10000000", "99999999999x99999999999"],
    "linear": ["1000000x1000000x1000000", "99999999999x99999999999x16", "16x16x99999999999999999999"],
    "step": ["--width 1048576", "--tokens 134217600"],
}
"""Sizes beyond any machine's memory, by command; the last two steps are at the limits of their options."""


@every(command=TOO_LARGE)
def test_sizes_larger_than_memory_are_refused_in_a_sentence(command):
    for words in TOO_LARGE[command]:
        asked = ["bf16", "--shape", words] if command == "linear" else words.split()
        done = here("bench", command, *asked, "--device", "cpu", "--rounds", 1)
        assert done.returncode == 2, words
        assert words.removeprefix("--") in done.stderr.replace("--", "")
        assert "larger than the memory of this machine" in done.stderr
        assert len(done.stderr.splitlines()) == 2  # with the line on what starts


@pytest.mark.parametrize("command", ["kernels", "linear"])
def test_an_allocation_that_fails_is_refused_in_a_sentence(command, monkeypatch):
    """On a machine that seems to have the memory."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 80))
    size = TOO_LARGE[command][0]
    asked = ["bf16", "--shape", size] if command == "linear" else [size]
    done = here("bench", command, *asked, "--device", "cpu", "--rounds", 1)
    assert done.returncode == 2
    assert f"{size}: larger than the memory of this machine: " in done.stderr
    assert done.stderr.endswith("; give smaller sizes\n")


@pytest.mark.parametrize("words", ["--width 6400000", "--tokens 128000000000000", "--layers 1025"])
def test_sizes_beyond_the_options_are_refused(words):
    assert here("bench", "step", *words.split()).returncode == 2


@pytest.mark.slow
def test_a_step_is_timed_in_every_preset_there_is_once_each():
    shape = ("--layers", 2, "--width", 64, "--tokens", 128, "--rounds", 1)
    done = here("bench", "step", "--all-presets", *shape, "--json")
    assert done.returncode == 0, done.stderr
    found = [line["preset"] for line in json.loads(done.stdout)]
    assert len(found) == len(PRESETS)
    assert set(found) == PRESETS.keys()


@pytest.mark.slow
def test_a_step_is_timed_in_every_preset_that_is_named_and_in_bf16(tmp_path):
    shape = ("--layers", 1, "--width", 64, "--tokens", 128, "--rounds", 1)
    done = here(
        "bench",
        "step",
        "quartet",
        *shape,
        "--json",
        "--trace",
        tmp_path / "traces",
        "--png",
        tmp_path / "a.png",
    )
    assert done.returncode == 0, done.stderr
    found = {line["preset"]: line for line in json.loads(done.stdout)}
    assert list(found) == ["bf16", "quartet", "quartet, fp32_out"]
    assert found["bf16"]["of bf16"] == 1
    assert found["bf16"]["quantisers"] == 0 < found["quartet"]["quantisers"]
    for line in found.values():
        assert sum(line[group] for group in (*GROUPS, "rest")) == pytest.approx(1)
        assert line["peak MiB"] > 0
    names = {path.name for path in (tmp_path / "traces").iterdir()}
    assert names == {"bf16.json", "quartet.json", "quartet-fp32_out.json"}
    assert all(json.loads(path.read_text())["traceEvents"] for path in (tmp_path / "traces").iterdir())
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_a_layer_is_timed_forward_and_backward(tmp_path):
    done = here(
        "bench",
        "linear",
        "nvfp4",
        "--shape",
        "32x64x48",
        "--shape",
        "32x064x48",
        "--rounds",
        1,
        "--fp32-out",
        "--json",
        "--png",
        tmp_path / "a.png",
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    found = told["lines"]
    assert [line["preset"] for line in found] == ["bf16", "nvfp4", "nvfp4, fp32_out"]
    assert [line["engine"] for line in found] == ["torch", "emulated", "emulated"]
    assert {line["shape"] for line in found} == {"32x64x48"}
    for one in found:
        for way, products in (("forward", 1), ("backward", 2)):
            speed = products * 2 * 32 * 64 * 48 / one[f"{way} ms"] / 1e6
            assert one[f"{way} GFLOP/s"] == pytest.approx(speed)
            assert one[f"{way} of peak"] == pytest.approx(speed / one[f"{way} peak"])
    assert {"cpu", "torch", "threads", "device"} <= set(told["machine"])
    assert "host" not in told["machine"]
    assert re.match(r"torch's own bf16 product of (256|512|1024|2048)x\1x\1", told["of peak"])
    assert done.stderr == "nvfp4, nvfp4, fp32_out: emulated, since there is no GPU with CUDA here\n"
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_the_yardstick_is_as_large_as_this_machine_multiplies_in_a_short_time():
    """The side follows the seconds that a product takes: 2048 on a fast core, less on one that takes long, 256 at least."""
    for speed, side in (
        (1e12, 2048),
        (2 * 2048**3 / 0.2499, 2048),
        (2 * 2048**3 / 0.26, 1024),
        (2e9, 512),
        (1.0, 256),
    ):
        asked = []

        def seconds(size, speed=speed, asked=asked):
            asked.append(size)
            return 2 * size**3 / speed

        assert linear_layers.side("cpu", seconds) == side
        assert max(asked) <= side


def test_the_yardsticks_product_is_the_one_that_layers_compute(monkeypatch):
    """Not `a @ b`, which takes a hundred times as long on a CPU without bf16 instructions."""
    seen, linear = [], torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, w, bias=None: seen.append((x.dtype, x.shape)) or linear(x, w)
    )
    for how in ("bf16", "fp32"):
        with product.multiplying(how):
            linear_layers.matmul(64, "cpu")()
    assert seen == [(torch.bfloat16, (64, 64)), (torch.float32, (64, 64))]


@pytest.mark.slow
def test_a_models_layers_are_those_of_its_block():
    """Check the sizes of Llama 3.1 8B: 218 million weights in a block of 32, 7 of its 8 billion."""
    found = shapes_of("llama-8b", 512)
    assert [(one.name, one.size) for one in found] == [
        ("llama-8b qkv", "512x4096x6144"),
        ("llama-8b out", "512x4096x4096"),
        ("llama-8b gate+up", "512x4096x28672"),
        ("llama-8b down", "512x14336x4096"),
    ]
    assert 32 * sum(one.inputs * one.outputs for one in found) == 6_979_321_856
    twice = ["--model", "qwen3-0.6b"] * 2  # is timed once
    done = here("bench", "linear", "bf16", *twice, "--tokens", 32, "--rounds", 1)
    assert done.returncode == 0, done.stderr
    assert [row.split()[1:3] for row in done.stdout.splitlines()[1:-1]] == [
        ["qkv", "32x1024x4096"],
        ["out", "32x2048x1024"],
        ["gate+up", "32x1024x6144"],
        ["down", "32x3072x1024"],
    ]


@pytest.mark.slow
def test_transformer_engine_is_timed_by_the_same_code_over_the_double_of_its_native_part():
    """Check that the engine computes, forward and backward, and that a line comes of it; the times themselves are not checked."""
    if installed("transformer_engine") != "2.20.2":
        pytest.skip("the double stands in for the native part of Transformer Engine 2.20.2")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(ENGINES.parent.parent), str(ENGINES))),
        "OMP_NUM_THREADS": "1",
    }
    words = [
        "linear",
        "nvfp4",
        "--engine",
        "transformer_engine",
        "--shape",
        "64x96x128",
        "--rounds",
        "1",
        "--json",
    ]
    command = [sys.executable, str(ENGINES / "te_bench.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = json.loads(done.stdout[done.stdout.index("{\n") :])["lines"]
    assert [(one["preset"], one["engine"]) for one in lines] == [
        ("bf16", "torch"),
        ("nvfp4", "transformer_engine"),
    ]
    assert lines[1]["multiplies"] == dict.fromkeys(("fprop", "dgrad", "wgrad"), "fp4")
    assert all(one[f"{way} ms"] > 0 for one in lines for way in ("forward", "backward"))


@pytest.mark.slow
def test_several_engines_are_timed_side_by_side_and_what_one_cannot_run_is_skipped_with_the_reason():
    words = (
        "--engine",
        "scaled_mm,transformer_engine,emulated",
        "--shape",
        "32x64x48",
        "--rounds",
        1,
        "--json",
    )
    done = here("bench", "linear", "fp8_current", "nvfp4", *words)
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)["lines"]
    assert [(one["preset"], one["engine"]) for one in lines] == [
        ("bf16", "torch"),
        ("fp8_current", "scaled_mm"),
        ("fp8_current", "emulated"),
        ("nvfp4", "emulated"),
    ]
    assert lines[1]["multiplies"] == dict.fromkeys(("fprop", "dgrad", "wgrad"), "fp8")
    assert lines[0]["forward casts"] is None
    assert all(one[f"{way} casts"] > 0 for one in lines[1:] for way in ("forward", "backward"))
    skipped = [line.split(": ")[1:3] for line in done.stderr.splitlines() if line.startswith("skipped")]
    assert skipped == [["--engine scaled_mm", "nvfp4"], ["--engine transformer_engine", "fp8_current, nvfp4"]]


@pytest.mark.parametrize(
    ("preset", "engine", "formats"),
    [
        ("nvfp4", "scaled_mm", ["fp4"] * 3),
        ("mxfp4_backward", "scaled_mm", ["bf16", "fp8", "fp8"]),
        ("mxfp4_backward", "scaled_mm:cudnn", ["bf16", "fp4", "fp4"]),
        ("row_scaled", "scaled_mm", ["fp4", "bf16", "bf16"]),
        ("row_scaled", "scaled_mm:cutlass", ["bf16"] * 3),
        ("tetrajet2", "scaled_mm", ["fp32"] * 3),
        ("bf16", "torch", ["bf16"] * 3),
        ("fp32", "torch", ["fp32"] * 3),
        ("nvfp4", "emulated", ["bf16"] * 3),
        ("nvfp4", NATIVE, ["fp4"] * 3),
        ("mxfp8", NATIVE, ["fp8"] * 3),
        ("fp8_current", NATIVE, ["fp8"] * 3),
    ],
)
def test_the_peak_is_of_what_the_hardware_multiplies(preset, engine, formats):
    recipe = PRESETS[preset]()
    assert list(multiplied(recipe.products, engine, recipe.dtype).values()) == formats


def test_the_share_of_a_peak_is_the_time_that_it_would_take_over_that_it_took():
    """By hand: 4 PFLOP at 2 PFLOP/s take 2 s and 9 at 9 take 1 s, together 3; they took 4."""
    assert share({"bf16": 4e15, "fp4": 9e15}, 4.0, {"bf16": 2e15, "fp8": 5e15, "fp4": 9e15}) == pytest.approx(
        0.75
    )
    assert share({"fp32": 1.0}, 1.0, {"bf16": 1.0}) is None


def test_a_line_of_a_layer_that_is_half_fp4_by_hand():
    """8192 x 4096 x 4096 takes 0.2749 TFLOP a product. Forward in FP4 at 9 PFLOP/s: 30.54 us. Backward in bf16, two products at 2.25:
    244.3 us. They took 61.08 and 325.8 us, so 0.5 and 0.75 of the peak, at 4,500 and 1,687.5 TFLOP/s."""
    b200 = known("NVIDIA B200").peaks
    recipe = PRESETS["nvfp4"]()
    forward = recipe.model_copy(update={"dgrad": PRESETS["bf16"]().dgrad, "wgrad": PRESETS["bf16"]().wgrad})
    flops = 2 * 8192 * 4096 * 4096
    assert flops == pytest.approx(0.2749e12, rel=1e-3)
    seconds = (2 * flops / 9e15, 2 * flops / 2.25e15 / 0.75)
    assert seconds == pytest.approx((61.08e-6, 325.8e-6), rel=1e-3)
    found = linear_layers.line(
        Shape("a", 8192, 4096, 4096),
        ("p", NATIVE),
        forward,
        {"forward": seconds[0], "backward": seconds[1]},
        b200,
        ("TFLOP/s", 1e12),
    )
    assert found["multiplies"] == {"fprop": "fp4", "dgrad": "bf16", "wgrad": "bf16"}
    assert (found["forward of peak"], found["backward of peak"]) == pytest.approx((0.5, 0.75))
    assert (found["forward TFLOP/s"], found["backward TFLOP/s"]) == pytest.approx((4500, 1687.5))
    assert (found["forward peak"], found["backward peak"]) == pytest.approx((9000, 2250))


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B300 SXM6 AC", 2250e12),
        ("NVIDIA GeForce RTX 5090", 209.5e12),
        ("NVIDIA L40S", 362.05e12),
        ("NVIDIA L40", 181.05e12),
    ],
)
def test_a_known_gpu_is_known_by_its_drivers_name(name, bf16):
    assert known(name).peaks["bf16"] == bf16


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-80GB MIG 2g.20gb",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
    ],
)
def test_a_slice_of_a_gpu_and_one_with_less_have_no_peak_of_its_own(name):
    assert known(name) is None


@every(gpu=GPUS)
def test_of_a_known_gpu_the_narrower_format_is_the_faster(gpu):
    values = list(gpu.peaks.values())
    assert values == sorted(set(values))


@pytest.mark.parametrize(
    ("preset", "shape", "device", "machine", "why"),
    [
        ("nvfp4", "512x512x512", "cuda", B200, None),
        ("bf16", "40x512x512", "cpu", Machine(), None),
        (
            "nvfp4",
            "512x512x512",
            "cuda",
            Machine("2.20.2", native=True, capability=(9, 0)),
            "this GPU, SM 9.0, does not train NVFP4",
        ),
        ("fp8_current", "512x512x512", "cuda", Machine("2.20.2", native=True, capability=(9, 0)), None),
        ("nvfp4", "512x512x512", "cpu", B200, "this runs on cpu, and Transformer Engine on GPUs"),
        (
            "mxfp4",
            "512x512x512",
            "cuda",
            B200,
            "fprop.x, fprop.w, dgrad.g, dgrad.w, wgrad.g, wgrad.x: block 1x32",
        ),
        ("nvfp4", "512x512x40", "cuda", B200, "512x512x40: Transformer Engine takes multiples of 32"),
    ],
)
def test_transformer_engine_is_taken_where_preset_machine_and_shape_allow(
    preset, shape, device, machine, why
):
    found = refused(PRESETS[preset](), [Shape(shape, *map(int, shape.split("x")))], device, machine)
    assert found is None if why is None else found.why.startswith(why)


def test_a_variable_that_changes_transformer_engines_numbers_is_refused(monkeypatch):
    """As in training: the layer would be timed with other arithmetic than its recipe's."""
    monkeypatch.setenv("NVTE_USE_FAST_MATH", "1")
    asked = [Shape("a", 512, 512, 512)], "cuda", B200
    assert refused(PRESETS["nvfp4"](), *asked).why.startswith("NVTE_USE_FAST_MATH is set")
    assert refused(PRESETS["nvfp4"](), *asked, "emulated") is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("kernels", "64by64"), "64by64: not a shape; give 2 numbers of 16 or more, as in 1024x1024"),
        (("linear", "--shape", "8x64x64"), "8x64x64: not a shape"),
        (
            ("kernels", "--png", "/nowhere/a.png"),
            "--png /nowhere/a.png: must name a file in an existing folder",
        ),
        (("step", "--tokens", "200"), "--tokens 200: give a multiple of 128"),
        (("step", "--width", "100"), "--width 100: give a multiple of 64"),
        (("kernels", "--png", "a.txt"), "--png a.txt: no such format; '"),
        (("step", "--trace", __file__), f"--trace {__file__}: is a file; name a folder"),
        (("linear", "--model", "llama-9b"), "--model llama-9b: no such model; 'llama-8b'"),
        (("linear", "--tokens", "64"), "--tokens needs --model; a --shape includes its tokens"),
        (
            ("linear", "--engine", "transformer_engine"),
            "--engine transformer_engine: nvfp4, mxfp8, fp8_current: there is no GPU with CUDA here; --engine emulated computes it",
        ),
        (("linear", "--engine", "scaled"), "--engine scaled: no such engine; 'scaled_mm'"),
        (
            ("linear", "--engine", "scaled_mm:cudnn", "nvfp4"),
            "--engine scaled_mm:cudnn: nvfp4: FlashInfer is not installed; pip install",
        ),
        (("linear", "--device", "cuda"), "--device cuda: torch sees no GPU with CUDA here; use --device cpu"),
        (("step", "--device", "cuda"), "--device cuda: torch sees no GPU with CUDA here"),
        (("kernels", "--device", "cuda"), "--device cuda: torch sees no GPU with CUDA here"),
    ],
)
def test_what_is_asked_wrongly_is_told_before_anything_is_measured(arguments, said):
    done = here("bench", *arguments)
    assert done.returncode == 2
    told = [line for line in done.stderr.splitlines() if not line.startswith("Starting: ")]
    assert [line.startswith(said) for line in told] == [True]


def test_the_peak_of_a_call_is_that_of_its_tensors():
    seen = profile(lambda: torch.ones(1 << 20).add(1).mul_(2))
    assert seen["peak"] == pytest.approx(8 << 20, rel=0.01)


def test_a_preset_that_is_not_there_is_told():
    done = here("bench", "step", "nvfp5")
    assert done.returncode == 2
    assert done.stderr.startswith("nvfp5: no such preset; 'nvfp4'")


def test_rounds_are_interleaved_and_a_call_runs_once_before_it_is_measured():
    order = []
    found = interleaved(
        {name: lambda name=name: order.append(name) for name in "ab"}, rounds=3, clock=Scripted()
    )
    assert list(found) == ["a", "b"]
    assert "".join(order) == "aabb" * 3


class Scripted:
    """Clock that stands still but for the seconds that a call adds."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def takes(self, *seconds):
        """Return a function whose n-th call takes the n-th of these seconds, and the last one from then on."""
        left = list(seconds)

        def call():
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


def test_a_time_is_the_median_of_the_rounds_and_its_spread_their_quartiles():
    clock = Scripted()
    calls = {
        "a": clock.takes(90, 1, 90, 3, 90, 8),
        "b": clock.takes(5),
    }  # the first run of a round does not count
    found = interleaved(calls, 3, clock=clock)
    assert (found["a"].median, found["a"].iqr) == pytest.approx((3, (8 + 3) / 2 - (1 + 3) / 2))
    assert (found["b"].median, found["b"].iqr) == pytest.approx((5, 0))


def test_what_runs_before_each_call_is_measured_and_subtracted():
    clock, order = Scripted(), []
    wait, work = clock.takes(7), clock.takes(3)
    before, call = lambda: (order.append("before"), wait()), lambda: (order.append("call"), work())
    found = interleaved({"a": call}, 2, before=before, clock=clock)
    assert found["a"].median == pytest.approx(3)
    assert order == ["before", "call", "before", "call", "before", "before"] * 2  # the last two alone


def test_short_calls_are_repeated_within_a_round_for_as_long_as_asked():
    clock, calls = Scripted(), []
    wait = clock.takes(1)

    def call():
        calls.append(1)
        wait()

    found = interleaved({"a": call}, 2, least=7, clock=clock)
    assert found["a"].median == pytest.approx(1)
    assert len(found["a"].times) * found["a"].number_per_run <= len(calls)
    assert len(calls) >= 2 * 7
