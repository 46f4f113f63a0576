"""What this machine is, and what runs on it: facts of three words, (what, found, what that takes).

It judges nothing, imports no engine.
"""

from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from ablate import provenance
from ablate.engines import ENGINES
from ablate.engines.hardware import PARTS, TRAINS_FP4, installed, this_machine
from ablate.engines.hardware import refusal as refused

Fact = tuple[str, str, str]

NATIVE = "transformer_engine"
"""The engine that calls hardware; its library is never imported here, since without its native part that
raises."""
BF16_FLAGS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512", "avx_ne_convert": "AVX-NE"}


def facts() -> Iterator[Fact]:
    """Processor, memory, libraries, GPUs and engines."""
    found = provenance.environment()
    yield "processor", f"{found['cpu']}, {found['cores']} cores", ""
    memory = psutil.virtual_memory()
    yield "memory", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free", ""
    yield "python, torch", f"{found['python']}, {torch.__version__}", ""
    yield "bf16 on the processor", bf16(), "any; the numbers are the same"
    yield (
        "GPUs",
        f"{torch.cuda.device_count()} with CUDA" if torch.cuda.is_available() else "none with CUDA",
        "",
    )
    for number in range(torch.cuda.device_count()):
        yield from gpu(number)
    yield "transformer-engine", library(), "a native part, for its GPU kernels"
    for name in sorted({*ENGINES} - {"emulated"}):
        reason = refusal(name)
        yield f"engine {name}", f"not available: {reason}" if reason else "runs", ""


def bf16() -> str:
    """Return how the processor multiplies bf16."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    flags = set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())
    native = [name for flag, name in BF16_FLAGS.items() if flag in flags]
    return f"native, by {' and '.join(native)}" if native else "by fp32, slower"


def gpu(number: int) -> Iterator[Fact]:
    """One GPU: name, memory, and the formats that it multiplies."""
    device = torch.cuda.get_device_properties(number)
    name = f"GPU {number}"
    yield name, f"{device.name}, SM {device.major}.{device.minor}, {device.total_memory / 2**30:.0f} GiB", ""
    yield f"{name}, bf16", "yes" if torch.cuda.is_bf16_supported(including_emulation=False) else "no", ""
    yield f"{name}, FP4", fp4((device.major, device.minor)), "SM 10.0 or 10.3 to train"


def fp4(capability: tuple[int, int]) -> str:
    """What a compute capability makes of NVFP4."""
    if capability in TRAINS_FP4:
        return "trains"
    if capability >= (10, 0):
        return "inference only"
    return "no: FP8 at best" if capability >= (8, 9) else "no"


def library() -> str:
    """Transformer Engine's version, and its native part's."""
    main = installed("transformer-engine")
    if main is None:
        return "not installed"
    native = [f"{part} {installed(part)}" for part in PARTS if installed(part)]
    return f"{main}, {' and '.join(native) if native else 'without a native part'}"


def refusal(engine: str) -> str | None:
    """Return why an engine trains no NVFP4 here; None if it does."""
    reason = refused(this_machine(), {"nvfp4"}) if engine == NATIVE else None
    return str(reason) if reason else None
