"""Where a result came from: code, versions and hardware. Recorded beside every result, never part of a trial's identity."""

import os
import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "numpy", "ray", "optuna", "mlflow", "transformer-engine")
_LARGEST_DIFF = 1 << 20


def environment() -> dict[str, str]:
    """Versions and hardware of this process's machine; where Transformer Engine's kernels were loaded, what multiplies in them too."""
    return _machine() | _kernels()


@cache
def _machine() -> dict[str, str]:
    facts = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": _cpu_model(),
        "cores": str(os.cpu_count()),
    }
    for package in ("ablate-fp4", *_PACKAGES):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _kernels() -> dict[str, str]:
    """`fp4_backend`, and every switch of Transformer Engine that is set. Not remembered: a trial loads TE after its process has begun.

    te.Linear multiplies NVFP4, MXFP8 and FP8 by cuBLASLt alone (2.20.2); its switches to CUTLASS or cuDNN are for grouped products,
    attention and norms.
    """
    library = sys.modules.get("transformer_engine_torch")
    if library is None:
        return {}
    number = library.get_cublasLt_version()
    switches = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NVTE_")}
    return {"fp4_backend": f"cublaslt {number}", **switches}


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def commit(folder: Path) -> tuple[str | None, str]:
    """The commit checked out in `folder` and the uncommitted difference from it; (None, "") outside a repository."""
    head = _git(folder, "rev-parse", "HEAD")
    return (head.strip(), _git(folder, "diff", "HEAD")[:_LARGEST_DIFF]) if head else (None, "")


def _git(folder: Path, *words: str) -> str:
    try:
        return subprocess.run(
            ["git", "-C", folder, *words], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
