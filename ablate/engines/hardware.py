"""What this machine has for an engine that calls hardware, found without importing torch; and what each generation of GPUs computes."""

import ctypes
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

OLDEST = (2, 20)
"""The first Transformer Engine whose custom recipes have roles, hybrid quantisers and a stochastic rounding for SM 12.0."""
PARTS = ("transformer-engine-torch", "transformer-engine-cu13", "transformer-engine-cu12")
"""Its native part, as packages: the wheel `transformer-engine` alone is Python that refuses to be imported."""
INSTALL = "pip install --no-build-isolation 'ablate-fp4[blackwell]'"
TRAINS_FP4 = ((10, 0), (10, 3))
"""Compute capabilities whose NVFP4 training Transformer Engine supports."""

NAMES = {"fp8": "FP8", "fp8_delayed": "FP8 with delayed scaling", "mxfp8": "MXFP8", "nvfp4": "NVFP4"}
"""How families of formats are called."""
_MAJOR, _MINOR = 75, 76
"""CUDA's numbers of the attributes COMPUTE_CAPABILITY_MAJOR and _MINOR."""


@dataclass(frozen=True)
class Machine:
    """What decides whether Transformer Engine runs here."""

    version: str | None = None
    """The version of Transformer Engine, None where it is not installed."""
    native: bool = False
    """Whether its native part is there."""
    capability: tuple[int, int] | None = None
    """The first GPU's compute capability, None without a GPU."""


def this_machine() -> Machine:
    """What is here. A few milliseconds without a GPU, and no library but CUDA's driver is loaded."""
    native = installed(PARTS[0]) is not None or find_spec("transformer_engine_torch") is not None
    return Machine(installed("transformer-engine"), native, _capability())


def installed(package: str) -> str | None:
    """The installed version of a package, None where it is not; imports nothing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class Refusal(NamedTuple):
    """Why something cannot run on Transformer Engine, and the way out; each reads on after a colon or a semicolon."""

    why: str
    out: str

    def __str__(self) -> str:
        return f"{self.why}; {self.out}"


EMULATE = "engine: emulated computes the same numbers on any device"


def refusal(machine: Machine, families: Collection[str]) -> Refusal | None:
    """Why formats of these families cannot run on the machine; None where they can."""
    if machine.capability is None:
        return Refusal("there is no GPU with CUDA here", EMULATE)
    if machine.version is None:
        return Refusal("Transformer Engine is not installed", INSTALL)
    if not machine.native:
        return Refusal(
            f"Transformer Engine {machine.version} is here without its native part, as Python alone", INSTALL
        )
    if _number(machine.version) < OLDEST:
        return Refusal(
            f"Transformer Engine {machine.version} is older than {'.'.join(map(str, OLDEST))}", INSTALL
        )
    missing = sorted(
        {
            NAMES[family]
            for family in families
            if family in NAMES and family not in _computes(machine.capability)
        }
    )
    if not missing:
        return None
    gpu = f"SM {machine.capability[0]}.{machine.capability[1]}"
    return Refusal(
        f"this GPU, {gpu}, does not train {' or '.join(missing)}{_instead(machine.capability)}", EMULATE
    )


def _computes(capability: tuple[int, int]) -> set[str]:
    if capability in TRAINS_FP4:
        return {"fp8", "fp8_delayed", "mxfp8", "nvfp4"}
    return {"fp8", "fp8_delayed"} if capability >= (8, 9) else set()


def _instead(capability: tuple[int, int]) -> str:
    if capability >= (12, 0):
        return " (Transformer Engine runs NVFP4 inference on it, and trains FP8 with one scale a tensor)"
    return " (FP8 with one scale a tensor it does)" if capability >= (8, 9) else ""


_STRAYS = (
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
    "NVTE_USE_FAST_MATH",
    "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH",
)
"""The environment variables that change numbers and that no argument overrides: powers of two as scales, approximate reciprocals in
casts, errors of Four Over Six by way of fp16."""


def stray_switch() -> str | None:
    """An environment variable that is set here and changes TE's numbers, whatever a recipe says; None for none."""
    return next((name for name in _STRAYS if os.environ.get(name, "0") != "0"), None)


def driver() -> str | None:
    """The version of NVIDIA's kernel module, None where none is loaded."""
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", path.read_text()) if path.exists() else None
    return found[1] if found else None


def _number(text: str) -> tuple[int, ...]:
    return (
        tuple(int(part) for part in re.match(r"\d+(\.\d+)*", text)[0].split("."))
        if re.match(r"\d", text)
        else (0,)
    )


def _capability() -> tuple[int, int] | None:
    """Asked of the driver itself: it honours CUDA_VISIBLE_DEVICES, as torch does."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, values = ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    wrong = [
        cuda.cuDeviceGetAttribute(ctypes.byref(value), name, device)
        for value, name in zip(values, (_MAJOR, _MINOR), strict=True)
    ]
    return None if any(wrong) else (values[0].value, values[1].value)
