"""Record that the quick checks have passed here, so that the next sweep need not repeat them. Torch-free.

The checks compare code with itself and with known answers, so their result follows from the files of this
package, torch, the processor, the GPUs with their driver, and the environment variables that choose
instructions. A record is named by a hash of these, and a day later it no longer counts.
"""

import hashlib
import os
import platform
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import ablate
from ablate.cache import key_of, root
from ablate.files import write

_VALID_SECONDS = 86_400.0
_LIBRARIES = ("torch", "numpy")
_PREFIXES = (
    *("ABLATE_PRODUCTS", "ATEN_", "CUBLAS_", "CUDA_", "CUDNN_", "DNNL_", "KMP_", "LD_", "MKL_", "OMP_"),
    *("ONEDNN_", "OPENBLAS_", "PYTHON", "TORCH"),
)
"""Beginnings of environment variables that may change what is computed, or which code."""


def subject(
    environment: Mapping[str, str] = os.environ, package: Path = Path(ablate.__file__).parent
) -> dict[str, object]:
    """Return all that the result of checks in a process with these environment variables depends on.
    `package`: folder of the code that is checked."""
    return {
        "files": _digest(package),
        "libraries": {name: _installed(name) for name in _LIBRARIES},
        "python": sys.version,
        "path": list(sys.path),  # a copy: Ray puts a folder of its own before the others
        "processor": _processor(),
        "gpus": gpus(),
        "environment": {
            name: environment[name] for name in sorted(environment) if name.startswith(_PREFIXES)
        },
    }


def known(checked: Mapping[str, object]) -> bool:
    """Return True if the checks of a `subject` passed within the last day; False for a time in the future."""
    try:
        return 0 <= time.time() - _record(checked).stat().st_mtime < _VALID_SECONDS
    except OSError:
        return False


def keep(checked: Mapping[str, object]) -> None:
    """Record that they passed. A cache that cannot be written is no error: the next sweep checks again."""
    try:
        path = _record(checked)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, checked)
    except OSError:
        return


def _record(checked: Mapping[str, object]) -> Path:
    return root() / "checks" / f"{key_of(checked)}.json"


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".so")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _installed(name: str) -> list[object]:
    """Return a library's version and place, and the time of its installation."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return []
    record = Path(str(found.locate_file(f"{name}/__init__.py")))
    return [found.version, str(record), record.stat().st_mtime_ns if record.exists() else None]


def gpus(driver: Path = Path("/proc/driver/nvidia")) -> list[str]:
    """Return the version of NVIDIA's driver and the models of the GPUs; empty without one."""
    try:
        lines = (driver / "version").read_text().splitlines()
        for path in sorted(driver.glob("gpus/*/information")):
            lines += path.read_text().splitlines()
    except OSError:
        return []
    return [line for line in lines if line.startswith(("NVRM", "Model", "GPU UUID", "Video BIOS"))]


def _processor() -> list[str]:
    lines = [platform.machine(), platform.processor()]
    try:
        described = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return lines
    return lines + [line for line in described if line.startswith(("model name", "flags", "Features"))]
