"""Experiment files that were mutated at random are refused at a place, or load; never anything else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fuzz_yaml.py"


@pytest.mark.slow
def test_mutated_experiments_load_or_are_refused_at_a_place(tmp_path):
    """A part of the run that `python benchmarks/fuzz_yaml.py` is, in a process of its own: its peak memory is counted."""
    words = ("--first", "2000", "--count", "80", "--seconds", "60", "--outcomes", tmp_path / "outcomes")
    done = subprocess.run(
        [sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "80 mutants" in done.stdout
    outcomes = [json.loads(line) for line in (tmp_path / "outcomes").read_text().splitlines()]
    assert [one["mutant"] for one in outcomes[-80:]] == [*range(2000, 2080)]
    assert {"problems", "arms"} <= {key for one in outcomes for key in one}
    assert all("arms" in one for one in outcomes[:-80]), "an original is refused"
