"""The bench measures what it names, in a form that machines read; what it measures is no test."""

import json

import pytest
import torch
from experiments_for_tests import ablate

from ablate.measure import GROUPS, medians, profile


def test_kernels_are_timed_by_operation_shape_dtype_and_back_end(tmp_path):
    done = ablate("bench", "kernels", "64x64", "32x160", "--rounds", 1, "--builds", "--json", "--png", tmp_path / "a.png")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    builds = {line["back end"] for line in found}
    assert {"portable", "reference"} <= builds
    assert len({tuple(line[key] for key in ("operation", "shape", "dtype", "back end")) for line in found}) == len(found)
    assert len(found) == 2 * (8 + 6) * len(builds)  # bf16 is rotated too
    assert all(line[key] > 0 for line in found for key in ("Melem/s", "ms", "of memcpy"))
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_a_step_is_timed_in_every_preset_that_is_named_and_in_bf16(tmp_path):
    shape = ("--layers", 1, "--width", 64, "--tokens", 128, "--rounds", 1)
    done = ablate("bench", "step", "quartet", *shape, "--json", "--trace", tmp_path / "traces", "--png", tmp_path / "a.png")
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


def test_a_layer_is_timed_forward_and_backward():
    done = ablate("bench", "linear", "nvfp4", "--shape", "32x64x48", "--rounds", 1, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [line["preset"] for line in found] == ["bf16", "nvfp4", "nvfp4, fp32_out"]
    assert {line["shape"] for line in found} == {"32x64x48"}
    assert all(line["forward ms"] > 0 for line in found)


def test_the_start_of_a_trial_is_timed():
    done = ablate("bench", "start", "--rounds", 1, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["ms"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("kernels", "64by64"), "64by64: not a shape; it takes 2 numbers of 16 or more, as in 1024x1024"),
        (("linear", "--shape", "8x64x64"), "8x64x64: not a shape"),
        (("kernels", "--png", "/nowhere/a.png"), "--png /nowhere/a.png: it must name a file in a folder that exists"),
    ],
)
def test_what_is_asked_wrongly_is_told_before_anything_is_measured(arguments, said):
    done = ablate("bench", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(said)


def test_the_peak_of_a_call_is_that_of_its_tensors():
    seen = profile(lambda: torch.ones(1 << 20).add(1).mul_(2))
    assert seen["peak"] == pytest.approx(8 << 20, rel=0.01)


def test_a_preset_that_is_not_there_is_told():
    done = ablate("bench", "step", "nvfp5")
    assert done.returncode == 2
    assert done.stderr.startswith("nvfp5: no such preset; 'nvfp4'")


def test_rounds_are_interleaved_and_the_first_does_not_count():
    order = []
    assert set(medians({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2)) == {"a", "b"}
    assert order == ["a", "b"] * 3
