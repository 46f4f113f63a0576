"""Compile the imaginary device, and load it before torch is imported.

A device must be registered before torch counts its devices for the first time. The library is compiled once
and kept under the hash of its source and of torch's version.
"""

import ctypes
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

SOURCE = Path(__file__).with_name("device.cpp")
ON_PATH = Path(__file__).with_name("on_path")
"""Folder of a sitecustomize.py that plugs the device in."""
COMPILER = "g++"


def why_not() -> str:
    """Return the reason why the device cannot be plugged in here; empty if it can."""
    if shutil.which(COMPILER) is None:
        return f"no {COMPILER}, which compiles the imaginary GPU"
    if "cpu" not in version("torch"):
        return "torch has CUDA of its own, whose devices an imaginary one would hide"
    return ""


def plug_in() -> None:
    """Give this process the device `cuda:0`, when it imports torch; one that never does pays nothing.

    Raises:
        RuntimeError: torch was imported already.
    """
    if "torch" in sys.modules:
        raise RuntimeError("plug the imaginary GPU in before torch is imported")
    sys.meta_path.insert(0, _AtTorch())


def environment() -> dict[str, str]:
    """Return this process's environment, changed so that a child process has the device."""
    library()  # here, and not by several children at the same time
    path = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ON_PATH), *([path] if path else [])])}


def printed(module: str, *words: str) -> dict:
    """Return the JSON object that a module of this package prints, given these words, in a process with the imaginary GPU."""
    done = subprocess.run(
        [sys.executable, "-m", f"support.imaginary_gpu.{module}", *words],
        cwd=Path(__file__).parents[2],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def library() -> Path:
    """Return the compiled library, which is compiled if there is none of this source and this torch."""
    key = hashlib.sha256(SOURCE.read_bytes() + version("torch").encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir(), f"ablate-imaginary-gpu-{os.getuid()}", f"{key}.so")
    if not path.exists():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")
        include, libraries = _torch() / "include", _torch() / "lib"
        command = [COMPILER, "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{include}"]
        command += [f"-I{include}/torch/csrc/api/include", str(SOURCE), "-o", str(own)]
        subprocess.run([*command, f"-L{libraries}", "-lc10", "-ltorch_cpu"], check=True)
        own.rename(path)  # complete, even if another process compiles it too
    return path


def _torch() -> Path:
    """Return torch's folder, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _load() -> ctypes.CDLL:
    """Register the device with the torch that is about to be imported; return the library."""
    compiled = library()
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch() / "lib" / name), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(compiled), ctypes.RTLD_GLOBAL)


class _AtTorch:
    """Finder that loads the device before torch's own code runs, and `torch.cuda` for it afterwards."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """Return torch's own spec, with these two steps around its execution."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        assert spec is not None
        assert spec.loader is not None
        loader, execute = spec.loader, spec.loader.exec_module

        def around(module: ModuleType) -> None:
            device = _load()
            execute(module)
            from support.imaginary_gpu.cuda_module import imitate

            imitate(device)

        loader.exec_module = around
        return spec
