"""A wheel holds what its package needs where no checkout is beside it."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.experiments import environment, tiny

from ablate.reports.report_files import NOTEBOOKS

ROOT = Path(__file__).parents[2]


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
    assert packed >= {"ablate/examples/mae.py", "ablate/examples/mae_masking.yaml"}
    assert any(name.endswith(".so") for name in packed)


@pytest.fixture
def elsewhere(tmp_path):
    """Return a folder with an experiment and somebody else's package of this name."""
    tiny(tmp_path, seeds=1)
    (tmp_path / "ablate").mkdir()
    (tmp_path / "ablate" / "__init__.py").write_text("raise ImportError('somebody else')\n")
    return tmp_path


def run_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command as the console script does: the working directory is not where Python looks first."""
    command = [sys.executable, "-P", "-m", "ablate", *words]
    environ = environment(PYTHONPATH=str(ROOT))
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environ, timeout=600, check=False
    )


@pytest.mark.slow
def test_trials_import_this_package_beside_a_folder_of_its_name(elsewhere):
    words = (
        "sweep",
        "tiny.yaml",
        "--executor",
        "inline",
        "--mlflow",
        "none",
        "--no-report",
        "--state",
        "runs",
    )
    done = run_in(elsewhere, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 trials run" in done.stdout


def test_ray_is_refused_beside_a_folder_of_this_name(elsewhere):
    """Its workers look first in the driver's working directory."""
    done = run_in(elsewhere, "sweep", "tiny.yaml", "--executor", "ray", "--state", "runs")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert f"{elsewhere / 'ablate' / '__init__.py'}: Ray's workers would import this module" in done.stderr


def test_another_distribution_of_this_name_is_named(tmp_path):
    info = tmp_path / "ablate-0.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ablate\nVersion: 0.2.3\n")
    done = subprocess.run(
        [sys.executable, "-m", "ablate", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment(PYTHONPATH=f"{ROOT}:{tmp_path}"),
        check=False,
    )
    assert done.returncode == 2
    assert "also has the distribution `ablate` 0.2.3" in done.stderr
