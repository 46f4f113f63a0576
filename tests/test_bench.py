"""The bench measures what it names, in a form that machines read; what it measures is no test."""

import json

from experiments_for_tests import ablate

from ablate.bench import _medians


def test_kernels_are_timed_by_operation_and_dtype_beside_the_reference_and_a_copy():
    done = ablate("bench", "kernels", "--rows", 64, "--columns", 64, "--rounds", 1, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len({(line["operation"], line["dtype"]) for line in found}) == len(found) == 14
    assert all(line[key] > 0 for line in found for key in ("Melem/s", "reference", "copy"))


def test_a_step_is_timed_in_every_preset_that_is_named_and_in_bf16():
    done = ablate("bench", "step", "quartet", "--layers", 1, "--width", 64, "--tokens", 128, "--rounds", 1, "--json")
    assert done.returncode == 0, done.stderr
    found = {line["preset"]: line for line in json.loads(done.stdout)}
    assert list(found) == ["bf16", "quartet"]
    assert found["bf16"]["of bf16"] == 1


def test_a_preset_that_is_not_there_is_told():
    done = ablate("bench", "step", "nvfp5")
    assert done.returncode == 2
    assert done.stderr.startswith("nvfp5: no such preset; 'nvfp4'")


def test_rounds_are_interleaved_and_the_first_two_do_not_count():
    order = []
    assert set(_medians({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=1)) == {"a", "b"}
    assert order == ["a", "b"] * 3
