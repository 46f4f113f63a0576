"""A wheel holds what its package needs where no checkout is beside it."""

import subprocess
import sys
import zipfile
from pathlib import Path

from ablate.cli.report import NOTEBOOKS

ROOT = Path(__file__).parents[1]


def test_a_wheel_has_the_notebooks_and_every_file_of_the_package(tmp_path):
    """Built by hatchling itself. Here without the compiler of the build, so the quantisers are those that were compiled at installation."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    there = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "ablate").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed >= there | {f"ablate/analysis/{name}.ipynb" for name in NOTEBOOKS}
    assert any(name.endswith(".so") for name in packed)
