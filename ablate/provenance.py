"""Provenance of a result: code, versions, hardware. It stands beside a result and is not part of a trial's
identity."""

import hashlib
import os
import platform
import re
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "numpy", "ray", "optuna", "mlflow", "transformer-engine", "flashinfer-python")
_LARGEST_DIFF = 1 << 20
QUANTISERS = Path(__file__).parent / "numerics" / "kernels"
"""Folder of the compiled quantisers."""
NOT_COMPILED = (
    "no compiled quantisers: the slow reference computes the same numbers; install ablate-fp4 again, with a"
    " network, which provides a compiler"
)


def own_command(module: str, *words: str) -> list[str]:
    """Return the command that runs a module of this package, whatever lies in the working directory. With
    `-m` alone Python looks there first, and may find somebody else's folder `ablate`. A checkout that is not
    installed is found nowhere else."""
    beside = Path.cwd() == Path(__file__).parents[1]
    return [sys.executable, *([] if beside else ["-P"]), "-m", module, *words]


def other_distribution() -> str | None:
    """Return a sentence on another distribution whose package has this one's name; None if there is none."""
    try:
        found = version("ablate")
    except PackageNotFoundError:
        return None
    return (
        f"this environment also has the distribution `ablate` {found}, whose files lie in the same folder as"
        " those of ablate-fp4: `pip uninstall ablate ablate-fp4`, then `pip install ablate-fp4`"
    )


def other_package(folder: Path) -> Path | None:
    """Return the file of somebody else's module `ablate` in a folder; None if there is none."""
    here = Path(__file__).parent.resolve()
    for file in (folder / "ablate" / "__init__.py", folder / "ablate.py"):
        if file.is_file() and file.parent.resolve() != here:
            return file
    return None


def compiled() -> bool:
    """Return True if compiled quantisers are installed; looked for without torch, which takes seconds."""
    return any(QUANTISERS.glob("*.so"))


def environment() -> dict[str, str]:
    """Return versions and hardware of this process, and the FP4 back end if Transformer Engine is loaded."""
    return _machine() | _instructions() | _gpu() | _kernels()


@cache
def _machine() -> dict[str, str]:
    facts = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": cpu_model(),
        "cores": str(os.cpu_count()),
    }
    for package in ("ablate-fp4", *_PACKAGES):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    return facts


_ROUNDING = ("ATEN_CPU_CAPABILITY", "MKL_CBWR")
"""Environment variables by which torch and MKL add in another order on the same CPU."""
_VECTOR = ("avx", "amx", "fma", "sve", "sme", "asimd", "bf16", "i8mm")
"""Beginnings of the names of instructions by which libraries choose their routines."""


def arithmetic(device: str) -> float:
    """Return a number that differs between processors, and versions of torch, which may compute other bits.

    It is 48 bits of a hash, since a trial records numbers: of torch's version, and of a GPU's model and
    capability, or of the instructions that torch uses on a CPU and the variables in `_ROUNDING`.
    """
    if device == "cuda":
        gpu = _gpu()
        kind = [gpu.get("gpu", ""), gpu.get("capability", "")]
    else:
        kind = [*_instructions().values()]
    return _kind([*kind, _machine().get("torch", "")])


def processor(device: str) -> float:
    """Return a number like that of `arithmetic` for another process on this machine, such as a command.

    Nothing is loaded for it: for a GPU it stands for the models of all that the driver has, for a CPU for its
    vector instructions and the variables in `_ROUNDING`. The torch of the command may be another one.
    """
    if device == "cuda":
        files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        kind = sorted({line for file in files for line in file.read_text().splitlines() if "Model" in line})
    else:
        kind = [*vector_flags(), *_restrictions().values()]
    return _kind([*kind, _machine().get("torch", "")])


def _kind(facts: list[str]) -> float:
    return float(int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:6], "big"))


@cache
def vector_flags() -> tuple[str, ...]:
    """Return the names of this CPU's vector and matrix instructions as Linux lists them, and its machine."""
    flags = {word for word in _cpuinfo("flags", "Features").split() if word.startswith(_VECTOR)}
    return (platform.machine(), *sorted(flags))


def _instructions() -> dict[str, str]:
    """Return the instructions that torch uses on this CPU, once torch is loaded, and what restricts them."""
    torch = sys.modules.get("torch")
    facts = {} if torch is None else {"simd": str(torch.backends.cpu.get_cpu_capability())}
    return facts | _restrictions()


def _restrictions() -> dict[str, str]:
    return {name: f"{name}={os.environ[name]}" for name in _ROUNDING if os.environ.get(name)}


def _gpu() -> dict[str, str]:
    """Return model, compute capability, driver and CUDA version of the GPU on which this process computes.
    Empty unless CUDA has started here: to ask for these would start it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "driver": driver(),
        "cuda": torch.version.cuda,
    }
    return {name: value for name, value in facts.items() if value}


def _kernels() -> dict[str, str]:
    """Return `fp4_backend` and every environment variable of Transformer Engine that is set.

    Not cached, since a trial loads Transformer Engine after its process has started. te.Linear multiplies
    NVFP4, MXFP8 and FP8 with cuBLASLt only (version 2.20.2); its switches to CUTLASS or cuDNN concern grouped
    products, attention and norms.
    """
    library = sys.modules.get("transformer_engine_torch")
    if library is None:
        return {}
    number = library.get_cublasLt_version()
    switches = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NVTE_")}
    return {"fp4_backend": f"cublaslt {number}", **switches}


def driver() -> str | None:
    """Return the version of NVIDIA's kernel module, None if it is not loaded."""
    path = Path("/proc/driver/nvidia/version")
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", path.read_text()) if path.exists() else None
    return match[1] if match else None


def cpu_model() -> str:
    """Return the name of this machine's processor."""
    return _cpuinfo("model name") or platform.machine()


def _cpuinfo(*names: str) -> str:
    """Return the first value that Linux lists of the processor under one of these names, or nothing."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")


def commit(folder: Path) -> tuple[str | None, str]:
    """Return the commit of `folder` and the uncommitted diff, cut at 1 MiB; (None, "") outside a
    repository."""
    head = _git(folder, "rev-parse", "HEAD")
    return (head.strip(), _git(folder, "diff", "HEAD")[:_LARGEST_DIFF]) if head else (None, "")


def _git(folder: Path, *arguments: str) -> str:
    try:
        return subprocess.run(
            ["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
