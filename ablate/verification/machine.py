"""Facts about this machine and the engines that run on it, each as (subject, value, requirement).

No fact is right or wrong, and no engine is imported.
"""

from collections.abc import Iterator

import psutil
import torch

from ablate import provenance
from ablate.engines import ENGINES, SCALED, backend_of, module_name
from ablate.engines.gpu_access import device_class
from ablate.engines.hardware import PARTS, TRAINS_FP4, WITHOUT_CAST, installed, scaled_refusal, this_machine
from ablate.engines.hardware import refusal as refused

Fact = tuple[str, str, str]

NATIVE = "transformer_engine"
"""Engine that uses FP4 hardware. Its library is not imported here, since that fails without a native part."""
BF16_FLAGS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512", "avx_ne_convert": "AVX-NE"}


def facts() -> Iterator[Fact]:
    environment = provenance.environment()
    yield "processor", f"{environment['cpu']}, {environment['cores']} cores", ""
    memory = psutil.virtual_memory()
    yield "memory", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free", ""
    yield "python, torch", f"{environment['python']}, {torch.__version__}", ""
    flags = provenance.vector_flags()
    native = " and ".join(name for flag, name in BF16_FLAGS.items() if flag in flags)
    any_order = "any; the two add in other orders, and losses differ slightly"
    yield "bf16 on the processor", f"native, by {native}" if native else "by fp32, slower", any_order
    available = torch.cuda.is_available()
    gpus = f"{torch.cuda.device_count()} with CUDA" if available else "none with CUDA"
    yield "GPUs", gpus, "" if available else device_class().why
    for number in range(torch.cuda.device_count()):
        yield from gpu(number)
    yield "transformer-engine", library(), "a native part, for its GPU kernels"
    for name in sorted({*ENGINES} - {"emulated"}):
        reason = refusal(name)
        yield f"engine {name}", f"not available: {reason}" if reason else "runs", ""


def gpu(number: int) -> Iterator[Fact]:
    device = torch.cuda.get_device_properties(number)
    name = f"GPU {number}"
    yield name, f"{device.name}, SM {device.major}.{device.minor}, {device.total_memory / 2**30:.0f} GiB", ""
    yield f"{name}, bf16", "yes" if torch.cuda.is_bf16_supported(including_emulation=False) else "no", ""
    yield f"{name}, FP4", fp4((device.major, device.minor)), "SM 10.0 or higher to train"


def fp4(capability: tuple[int, int]) -> str:
    if capability in TRAINS_FP4:
        return "trains"
    if capability in WITHOUT_CAST:
        return "inference only: no instruction cvt.e2m1x2"
    if capability >= (10, 0):
        return "trains where a comparison agrees"
    return "no: FP8 at best" if capability >= (8, 9) else "no"


def library() -> str:
    main = installed("transformer-engine")
    if main is None:
        return "not installed"
    native = " and ".join(f"{part} {installed(part)}" for part in PARTS if installed(part))
    return f"{main}, {native or 'without a native part'}"


def refusal(engine: str) -> str | None:
    """Return the reason why an engine cannot train NVFP4 on this machine; None if it can."""
    machine = this_machine()
    if module_name(engine) == SCALED:
        device = "cuda" if machine.capability else "cpu"
        reason = scaled_refusal(machine, device, {"nvfp4"}, backend_of(engine))
    else:
        reason = refused(machine, {"nvfp4"}) if engine == NATIVE else None
    return str(reason) if reason else None
