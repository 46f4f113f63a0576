"""Records of comparisons of an engine with the emulator on this machine. Torch-free.

`ablate doctor --engine NAME` writes a record and `engine: auto` reads it. Its file name is a hash of all that
was compared, so that it no longer counts after a change of GPU generation, of a library that multiplies
(Transformer Engine, torch, cuBLAS, FlashInfer), driver, numerics or the comparison itself.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from ablate.cache import key_of, root
from ablate.engines.hardware import FLASHINFER_PACKAGE, PARTS, Machine, installed
from ablate.files import Json, write
from ablate.numerics.spec import VERSION
from ablate.provenance import driver

PROTOCOL = 2
"""Raise by hand when the comparison covers more, so that earlier records no longer count."""
SWITCHES = ("NVTE_ENABLE_CUTEDSL_BACKEND", "NVTE_DISABLE_NVRTC")
"""Environment variables that select other TE kernels for the same casts; a record holds for one setting."""
NATIVE = "transformer_engine"
COMMAND = f"ablate doctor --engine {NATIVE}"
_CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12")
"""Package names that cuBLAS has had; a container may contain it without a package."""
SCALED_PROTOCOL = 1
"""The same as PROTOCOL, for the comparison of the engines `scaled_mm`."""
AGREES, OFF = "agrees", "off"


def subject(machine: Machine, engine: str = NATIVE) -> dict[str, Json]:
    """Return all that a comparison of an engine on this machine depends on."""
    shared: dict[str, Json] = {
        "capability": ".".join(map(str, machine.capability)) if machine.capability else None,
        "torch": installed("torch"),
        "cublas": next(filter(None, map(installed, _CUBLAS)), None),
        "driver": driver(),
        "numerics": VERSION,
    }
    if engine != NATIVE:
        return shared | {
            "engine": engine,
            "protocol": SCALED_PROTOCOL,
            "flashinfer": installed(FLASHINFER_PACKAGE) if ":" in engine else None,
        }
    return shared | {
        "transformer_engine": machine.version,
        "parts": {part: installed(part) for part in PARTS},
        "protocol": PROTOCOL,
        "switches": {name: os.environ.get(name, "0") for name in SWITCHES},
    }


def record_path(machine: Machine, engine: str = NATIVE) -> Path:
    """Return the path of the record of a comparison of an engine on this machine."""
    return root() / "parity" / f"{key_of(subject(machine, engine))}.json"


def keep(document: Mapping[str, object], machine: Machine, engine: str = NATIVE) -> Path:
    """Write the record of a complete comparison, which `agreed` reads. OSError if it cannot be written."""
    path = record_path(machine, engine)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, document)
    return path


def agreed(machine: Machine, engine: str = NATIVE) -> set[str]:
    """Return the families of formats that agreed in a complete comparison on such a machine; else none."""
    try:
        document = json.loads(record_path(machine, engine).read_bytes())
        if document["compared"] != subject(machine, engine) or document["fast"]:
            return set()
        return {family for family, verdict in document["families"].items() if verdict == AGREES}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no file, or half of one, or not ours
        return set()
