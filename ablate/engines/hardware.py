"""GPU and Transformer Engine of this machine, and the formats that GPU generations compute. Torch-free."""

import ctypes
import os
import re
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple

OLDEST = (2, 20)
"""First version of Transformer Engine whose custom recipes have roles and hybrid quantisers, and that rounds
stochastically on SM 12.0."""
PARTS = ("transformer-engine-torch", "transformer-engine-cu13", "transformer-engine-cu12")
"""Packages of its native part: the wheel `transformer-engine` alone is Python code whose import fails."""
INSTALL = "pip install --no-build-isolation 'ablate-fp4[blackwell]'"
TRAINS_FP4 = ((10, 0), (10, 3))
"""Compute capabilities whose NVFP4 training Transformer Engine documents."""
WITHOUT_CAST = ((12, 1),)
"""Those that lack the instruction `cvt.e2m1x2`, with which Transformer Engine casts to FP4."""

NAMES = {"fp8": "FP8", "fp8_delayed": "FP8 with delayed scaling", "mxfp8": "MXFP8", "nvfp4": "NVFP4"}
"""Names of the families of formats in messages."""
_MAJOR, _MINOR = 75, 76
"""CUDA's numbers of the attributes COMPUTE_CAPABILITY_MAJOR and _MINOR."""


@dataclass(frozen=True)
class Machine:
    """Properties of a machine that decide whether Transformer Engine runs on it."""

    version: str | None = None
    """Version of Transformer Engine; None if it is not installed."""
    native: bool = False
    """True if its native part is installed."""
    capability: tuple[int, int] | None = None
    """Compute capability of the first GPU; None without a GPU."""
    torch: str | None = None
    """Version of torch."""
    flashinfer: str | None = None
    """Version of FlashInfer; None if it is not installed."""


ASSUMED = ContextVar[Machine | None]("assumed", default=None)
"""Machine that `this_machine` returns in this context, such as one to rent; None: the one at hand."""


def this_machine() -> Machine:
    """Return the properties of this machine; takes milliseconds and loads no library but CUDA's driver."""
    if assumed := ASSUMED.get():
        return assumed
    native = installed(PARTS[0]) is not None or find_spec("transformer_engine_torch") is not None
    return Machine(
        installed("transformer-engine"),
        native,
        _capability(),
        installed("torch"),
        installed(FLASHINFER_PACKAGE),
    )


def rented_machine(capability: str) -> Machine:
    """Return the properties of a machine with a GPU of this compute capability, such as `10.0`, with the
    oldest Transformer Engine that the engine takes, and with FlashInfer; it need not be this machine.
    ValueError if the text is not two numbers with a point between them."""
    match = re.fullmatch(r"(\d+)\.(\d+)", capability)
    if match is None:
        raise ValueError(f"{capability!r} is no compute capability; one is 10.0, that of a B200")
    oldest = ".".join(map(str, OLDEST))
    return Machine(oldest, True, (int(match[1]), int(match[2])), flashinfer="assumed")


def installed(package: str) -> str | None:
    """Return the installed version of a package, None if it is not installed; imports nothing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class Refusal(NamedTuple):
    """Reason why something cannot run on Transformer Engine, and a remedy."""

    why: str
    """A clause that follows a colon."""
    out: str
    """A clause that follows a semicolon, or a command."""

    def __str__(self) -> str:
        return f"{self.why}; {self.out}"


EMULATE = "engine: emulated computes the recipe on any device"


def refusal(machine: Machine, families: Collection[str]) -> Refusal | None:
    """Return the reason why a machine cannot train in some families of formats, keys of NAMES; None if it
    can. `high`, the family of unquantised operands, is allowed everywhere."""
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
    lacks = "it lacks the instruction cvt.e2m1x2; " * (machine.capability in WITHOUT_CAST)
    other = f" ({lacks}it trains FP8 with one scale a tensor)" * (machine.capability >= (8, 9))
    return Refusal(f"this GPU, {gpu}, does not train {' or '.join(missing)}{other}", EMULATE)


def untried(machine: Machine) -> set[str]:
    """Return the families that TE accepts on a GPU for which it documents no training: a comparison with the
    emulator on that machine comes first."""
    capability = machine.capability
    return set() if capability is None or capability in TRAINS_FP4 else _computes(capability) & {"nvfp4"}


def _computes(capability: tuple[int, int]) -> set[str]:
    """Return the families that TE 2.20 accepts on a GPU (`_compute_nvfp4_support` and its neighbours)."""
    families = {"fp8", "fp8_delayed"} if capability >= (8, 9) else set()
    if capability >= (10, 0) and capability not in WITHOUT_CAST:
        families.add("nvfp4")
    if (10, 0) <= capability < (12, 0):
        families.add("mxfp8")
    return families


SCALED_TORCH = (2, 10)
"""First version of torch with `torch.nn.functional.scaled_mm`."""
FLASHINFER_PACKAGE = "flashinfer-python"
FLASHINFER_INSTALL = "pip install 'ablate-fp4[flashinfer]'"
SCALED_NAMES = {"nvfp4": "NVFP4", "mxfp4": "MXFP4", "fp8": "FP8", "mxfp8": "MXFP8"}
"""Names of the families that torch's scaled products multiply, in messages."""


def scaled_refusal(
    machine: Machine, device: str, families: Collection[str], backend: str = "cublaslt"
) -> Refusal | None:
    """Return why torch's scaled products cannot multiply families, keys of SCALED_NAMES; None if they can.

    torch 2.13.0 multiplies FP8 on CPUs and from SM 8.9 on; MXFP8 and NVFP4 from SM 10.0 on; MXFP4 on SM 10.0
    and 10.3 alone, by MSLK's kernels. FlashInfer's `mm_fp4` takes SM 10.0, 10.3, 11.0, 12.0 and 12.1.
    `device` is `cpu` or `cuda`; `backend` multiplies FP4 operands.
    """
    if machine.torch is not None and _number(machine.torch) < SCALED_TORCH:
        least = ".".join(map(str, SCALED_TORCH))
        return Refusal(
            f"torch {machine.torch} has no scaled_mm", f"install torch {least} or later, or {EMULATE}"
        )
    four = {"nvfp4", "mxfp4"} & {*families}
    if backend != "cublaslt" and four and machine.flashinfer is None:
        return Refusal("FlashInfer is not installed", FLASHINFER_INSTALL)
    if device != "cuda":
        missing = sorted({*families} - {"fp8"})
        why = f"torch multiplies {_listed(missing)} on GPUs alone, and this runs on a CPU"
        return Refusal(why, EMULATE) if missing else None
    if machine.capability is None:
        return Refusal("there is no GPU with CUDA here", EMULATE)
    missing = sorted({*families} - scaled_families(machine.capability, backend))
    if not missing:
        return None
    gpu = f"SM {machine.capability[0]}.{machine.capability[1]}"
    cudnn = " (FlashInfer's does: engine: scaled_mm:cudnn)" * (
        missing == ["mxfp4"] and "mxfp4" in scaled_families(machine.capability, "cudnn")
    )
    return Refusal(f"this GPU, {gpu}, does not multiply {_listed(missing)}{cudnn}", EMULATE)


def scaled_families(capability: tuple[int, int], backend: str = "cublaslt") -> set[str]:
    """Return the families that torch's scaled products, and a back end's for FP4, multiply on a GPU."""
    if capability < (8, 9):
        return set()
    if capability < (10, 0):
        return {"fp8"}
    mxfp4 = backend == "cudnn" or (backend == "cublaslt" and capability[0] == 10)
    return {"fp8", "mxfp8", "nvfp4", *(["mxfp4"] if mxfp4 else [])}


def _listed(families: Collection[str]) -> str:
    return " and ".join(SCALED_NAMES[family] for family in families)


_STRAYS = (
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
    "NVTE_USE_FAST_MATH",
    "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH",
)
"""Environment variables that change TE's numbers and that no argument overrides: powers of two as scales,
approximate reciprocals in casts, errors of Four Over Six computed in fp16."""


def stray_switch(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a variable of an environment that changes TE's numbers whatever the recipe is, or None."""
    return next((name for name in _STRAYS if environment.get(name, "0") != "0"), None)


def _number(text: str) -> tuple[int, ...]:
    digits = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in digits[0].split(".")) if digits else (0,)


def _capability() -> tuple[int, int] | None:
    """Return the first GPU's compute capability from CUDA's driver, which honours CUDA_VISIBLE_DEVICES."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, values = ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    failures = [
        cuda.cuDeviceGetAttribute(ctypes.byref(value), name, device)
        for value, name in zip(values, (_MAJOR, _MINOR), strict=True)
    ]
    return None if any(failures) else (values[0].value, values[1].value)
