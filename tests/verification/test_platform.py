"""Tests of the platform's costs: they are measured by rows that can be named; the measuring itself takes half an hour."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "platform_costs.py"


def platform(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=300, check=False
    )


def test_a_row_that_is_not_there_is_refused_in_a_sentence():
    done = platform("coolness")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("coolness: no such row; 'cooldown' is the nearest of ")
