"""Promises that only a machine with a GPU could break, on an imaginary GPU, in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.imaginary_gpu import environment, why_not
from support.imaginary_gpu.fork_cases import FORKS, VISIBLE

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "an imaginary GPU can be plugged in")


def printed(module: str) -> dict:
    """Return the JSON object that a module of the support package prints in a process with the imaginary GPU."""
    done = subprocess.run(
        [sys.executable, "-m", f"support.imaginary_gpu.{module}"],
        cwd=Path(__file__).parent,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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
