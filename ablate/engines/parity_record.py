"""Records of comparisons of Transformer Engine with the emulator on this machine. Torch-free.

`ablate doctor --engine transformer_engine` writes a record and `engine: auto` reads it. Its file name is a
hash of all that was compared, so that it no longer counts after a change of GPU generation, Transformer
Engine, torch, cuBLAS, driver, numerics or the comparison itself.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from ablate.cache import key_of, root
from ablate.engines.hardware import PARTS, Machine, driver, installed
from ablate.files import Json, write
from ablate.numerics.spec import VERSION

PROTOCOL = 2
"""Raise by hand when the comparison covers more, so that earlier records no longer count."""
SWITCHES = ("NVTE_ENABLE_CUTEDSL_BACKEND", "NVTE_DISABLE_NVRTC")
"""Environment variables that select other TE kernels for the same casts; a record holds for one setting."""
COMMAND = "ablate doctor --engine transformer_engine"
_CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12")
"""Package names that cuBLAS has had; a container may contain it without a package."""
AGREES, OFF = "agrees", "off"


def subject(machine: Machine) -> dict[str, Json]:
    """Return all that a comparison on this machine depends on."""
    return {
        "capability": ".".join(map(str, machine.capability)) if machine.capability else None,
        "transformer_engine": machine.version,
        "parts": {part: installed(part) for part in PARTS},
        "torch": installed("torch"),
        "cublas": next(filter(None, map(installed, _CUBLAS)), None),
        "driver": driver(),
        "numerics": VERSION,
        "protocol": PROTOCOL,
        "switches": {name: os.environ.get(name, "0") for name in SWITCHES},
    }


def record_path(machine: Machine) -> Path:
    """Return the path of the record of a comparison on this machine."""
    return root() / "parity" / f"{key_of(subject(machine))}.json"


def keep(document: Mapping[str, object], machine: Machine) -> Path:
    """Write the record of a complete comparison, which `agreed` reads. OSError if it cannot be written."""
    path = record_path(machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, document)
    return path


def agreed(machine: Machine) -> set[str]:
    """Return the families of formats that agreed in a complete comparison on such a machine; else none."""
    try:
        document = json.loads(record_path(machine).read_bytes())
        if document["compared"] != subject(machine) or document["fast"]:
            return set()
        return {family for family, verdict in document["families"].items() if verdict == AGREES}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no file, or half of one, or not ours
        return set()
