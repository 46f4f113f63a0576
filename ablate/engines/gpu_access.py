"""Access of processes to NVIDIA GPUs: hide them, find them, explain why CUDA does not start. Torch-free.

The problem. A process in which torch sees a GPU starts threads for it at its first backward pass, and cannot
be forked afterwards, although it computes on the CPU alone. And a GPU that is there, but cannot be used, must
not silently turn into a CPU.

The idea. Processes that compute CPU trials get an environment without GPUs (`hidden`), which keeps the
original setting for a user's own commands (`restored`). `device_class` returns the class of device of this
machine, with a note if its GPU is not used, and `start` starts CUDA itself.
"""

import ctypes
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ablate.errors import InputError
from ablate.provenance import driver

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORIGINAL = "ABLATE_CUDA_VISIBLE_DEVICES"
"""Variable that holds the original CUDA_VISIBLE_DEVICES as JSON (null: it was not set) while it is hidden."""
CPU_TRIAL = (
    "this trial runs on the CPU, where no GPU is visible; run the sweep with --device cuda (YAML:"
    " resources: {gpus: 1}), or move the code's tensors to trial.device"
)
NO_GPU = (
    "there is no NVIDIA GPU (no /dev/nvidia0); in a container pass it on (docker run --gpus all), and see"
    " whether nvidia-smi works there"
)
_NONE_VISIBLE = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs."""
_CHECK_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Variable that makes `torch.cuda.is_available` read the environment before it asks CUDA's driver."""
_NEEDS_GPU = (
    "No CUDA GPUs are available",
    "no CUDA-capable device is detected",
    "Torch not compiled with CUDA enabled",
    "Found no NVIDIA driver",
)
"""Parts of the messages by which torch says that code asked for a GPU and there is none."""


def hidden(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which no GPU is visible, and which keeps the original setting."""
    if ORIGINAL in environment:
        return dict(environment)
    return {**environment, VISIBLE: "", ORIGINAL: json.dumps(environment.get(VISIBLE))}


def restored(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment as it was before `hidden`; one in which nothing was hidden stays as it is."""
    visible = dict(environment)
    if (original := visible.pop(ORIGINAL, None)) is None:
        return visible
    del visible[VISIBLE]
    value = json.loads(original)
    return visible if value is None else visible | {VISIBLE: value}


@contextmanager
def without_gpus() -> Iterator[None]:
    """Inside this context, imports see no GPU, so that they start no CUDA context.

    transformers imports torchao, whose modules ask for the GPU's capability: half a gigabyte of its memory in
    each process, and one that uses it in exclusive mode. Once CUDA has started, nothing is hidden.
    """
    before = {name: os.environ.get(name) for name in (VISIBLE, _CHECK_BY_NVML)}
    os.environ.update({VISIBLE: "", _CHECK_BY_NVML: "1"})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def asks_for_gpu(error: BaseException) -> bool:
    """Return True if torch raised this error because code asked for a GPU and none is visible."""
    return isinstance(error, RuntimeError | AssertionError) and any(part in str(error) for part in _NEEDS_GPU)


class Place(NamedTuple):
    """Class of device of this machine."""

    device: str
    """`cpu` or `cuda`."""
    why: str = ""
    """Reason why no GPU is used, as a clause; empty if one is."""
    present: bool = True
    """True if there is a GPU."""

    def note(self, asked: str = "auto") -> str:
        """Return a note for a user who asked for `auto`, `cpu` or `cuda`; empty if there is none."""
        if asked == "cuda" and self.why:
            return f"trials on a GPU cannot run on this machine: {self.why}"
        if asked == "auto" and self.present and self.why:
            return f"a GPU is here, and trials run on the CPU: {self.why}"
        return ""


def device_class(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Place:
    """Return `cuda` if this machine has an NVIDIA GPU that this Python's torch can use, else `cpu`. The tests
    are files below `root` and a call of CUDA's driver, since importing torch takes seconds."""
    devices = sorted((root / "dev").glob("nvidia[0-9]*")) or sorted((root / "dev").glob("dxg"))
    if not devices:
        return Place("cpu", NO_GPU, present=False)
    if environment.get(VISIBLE) in _NONE_VISIBLE:
        return Place("cpu", f"{VISIBLE} hides it")
    why = torch_problem(torch_cuda(), driver_cuda())
    return Place("cpu", why) if why else Place("cuda")


def visible_gpus(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """Return the number of this machine's GPUs, without those that CUDA_VISIBLE_DEVICES hides."""
    devices, visible = len([*(root / "dev").glob("nvidia[0-9]*")]), environment.get(VISIBLE)
    if visible is None:
        return devices
    return 0 if visible in _NONE_VISIBLE else min(devices, len(visible.split(",")))


def torch_problem(cuda: str | None, supported: tuple[int, int] | None) -> str | None:
    """Return why this torch cannot use a GPU; None if nothing speaks against it. `cuda`: torch's CUDA
    version, such as `13.0`, None if built for CPUs; `supported`: the driver's, None if it cannot be
    loaded."""
    if cuda is None:
        return "torch is built for CPUs; install a build for CUDA (pytorch.org, Get Started)"
    if supported is None:
        return (
            "CUDA's driver library libcuda.so.1 cannot be loaded; install NVIDIA's driver, in a container"
            " pass the GPU on (docker run --gpus all), on WSL update the driver of Windows"
        )
    if int(cuda.partition(".")[0]) > supported[0]:
        kernel = driver()
        version = f" {kernel}" if kernel else ""
        return (
            f"the NVIDIA driver{version} supports CUDA {supported[0]}.{supported[1]}, and torch is built for"
            f" CUDA {cuda}; update the driver, or install a torch for CUDA {supported[0]}"
        )
    return None


def torch_cuda() -> str | None:
    """Return the CUDA version of the installed torch, without importing it; None: it is for CPUs."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    text = Path(found.origin).with_name("version.py").read_text()
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def driver_cuda() -> tuple[int, int] | None:
    """Return the CUDA version that NVIDIA's driver supports, None without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    return None if cuda.cuDriverGetVersion(ctypes.byref(number)) else divmod(number.value // 10, 100)


def start(index: int | None = None) -> None:
    """Start CUDA in this process, on one of the GPUs that it sees, or on the current one for None; InputError
    if it cannot start: the text says why and what would be right."""
    import torch

    try:
        torch.cuda.init()
        if index is not None:
            torch.cuda.set_device(index)
        torch.empty(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        why = torch_problem(torch_cuda(), driver_cuda()) or explained(str(error))
        raise InputError(f"CUDA does not start here: {why}") from None


def explained(message: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the reason behind an error message of torch's start of CUDA, with a remedy."""
    text, value = " ".join(message.split()), environment.get(VISIBLE)
    if "busy or unavailable" in text:
        return (
            "the GPU is busy: another process holds it in exclusive mode. End that process, run one trial a"
            " GPU (resources: {gpus: 1}), or allow several (nvidia-smi -c DEFAULT)"
        )
    if "out of memory" in text:
        return "the GPU has no memory left: other processes hold it (nvidia-smi lists them)"
    if "invalid device ordinal" in text:
        return (
            f"this rank's GPU is not among those that {VISIBLE}={value} shows (a process sees one MIG"
            " instance at most); start fewer ranks on this node"
        )
    if value is not None and any(part in text for part in ("No CUDA GPUs", "no CUDA-capable")):
        return (
            f"{VISIBLE}={value} names no GPU of this machine; nvidia-smi -L lists their indices, and the"
            " UUIDs of GPUs (GPU-...) and MIG instances (MIG-...)"
        )
    return text
