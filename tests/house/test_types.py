"""A type error fails `make lint`, in the package's own calls and in those of numpy, scipy and psutil."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ablate.cache import root

ROOT = Path(__file__).parents[2]
WRONG = """\
import numpy as np
import psutil
from scipy import stats

from ablate.errors import nearest


def untyped(word):
    return word


nearest(1, [])
np.zeros(3).no_such_attribute
stats.no_such_distribution
psutil.Process().parent().pid
"""


@pytest.mark.slow
def test_a_deliberate_type_error_fails_the_lint(tmp_path):
    lint = subprocess.run(
        ["make", "--no-print-directory", "-n", "lint"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert lint.stdout.splitlines()[-1].endswith("/mypy")
    (tmp_path / "wrong.py").write_text(WRONG)
    # Types of numpy and scipy take 15 CPU-seconds to read, and are kept for the next run, of whichever checkout.
    command = [sys.executable, "-m", "mypy", "--cache-dir", root() / "mypy", tmp_path / "wrong.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.findall(r"wrong\.py:(\d+): error: .*\[([a-z-]+)\]", done.stdout) == [
        ("8", "no-untyped-def"),
        ("12", "arg-type"),
        ("13", "attr-defined"),
        ("14", "attr-defined"),
        ("15", "union-attr"),
    ]
