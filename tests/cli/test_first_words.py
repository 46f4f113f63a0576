"""A command says at once what is waited for: before torch, Ray or a notebook is imported. No clock: the imports are made to fail."""

import subprocess
import sys

import pytest
from support.experiments import environment, write

HEAVY = ("torch", "ray", "mlflow", "optuna", "nbclient", "transformers")
PROGRAM = f"import sys; sys.modules |= dict.fromkeys({HEAVY}); from ablate.__main__ import main; main()"
"""The command line, where importing any of HEAVY raises."""


def run(*words: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", PROGRAM, *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=300, check=False
    )


@pytest.mark.parametrize("words", ["doctor", "doctor --fast", "bench kernels", "bench step", "bench linear"])
def test_a_command_says_what_it_waits_for_before_it_imports_torch(words):
    done = run(*words.split())
    first, *rest = done.stderr.splitlines()
    assert first.startswith("Starting: importing torch")
    assert any("import of torch halted" in line for line in (*rest, *done.stdout.splitlines()))


def test_a_sweep_says_what_it_waits_for_before_it_imports_anything_heavy(tmp_path):
    done = run(
        "sweep", write(tmp_path, workload={"idle": {}}), "--state", tmp_path / "state", "--executor", "inline"
    )
    assert done.returncode != 0
    first, *rest = done.stderr.splitlines()
    assert first.startswith("Starting: ")
    assert any("halted; None in sys.modules" in line for line in rest)


def test_output_for_machines_has_no_such_line():
    done = run("doctor", "--fast", "--json")
    assert "Starting: " not in done.stdout + done.stderr
