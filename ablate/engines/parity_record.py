"""What comparisons of Transformer Engine with the emulator have been kept on this machine, and what they were of. Torch-free.

`ablate doctor --engine transformer_engine` keeps one; `engine: auto` asks. What was compared is in the record's name: another GPU
generation, another version of TE, of torch, of cuBLAS, of the driver, of the numerics or of the comparison itself finds none.
"""

import json
import os
from pathlib import Path
from typing import Any

from ablate.cache import key_of, root
from ablate.engines.hardware import PARTS, Machine, driver, installed
from ablate.files import write
from ablate.numerics.spec import VERSION

PROTOCOL = 2
"""Raise by hand when a comparison looks at more, so that earlier ones no longer count."""
SWITCHES = ("NVTE_ENABLE_CUTEDSL_BACKEND", "NVTE_DISABLE_NVRTC")
"""Environment variables by which TE takes other kernels for the same casts: what was found of one set holds for that."""
COMMAND = "ablate doctor --engine transformer_engine"
_CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12")
"""The package of the library that multiplies, by the names that it has had; a container may have it without one."""
AGREES, OFF = "agrees", "off"


def subject(machine: Machine) -> dict[str, Any]:
    """What a comparison here is of."""
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


def place(machine: Machine) -> Path:
    """The file that a comparison here is kept in."""
    return root() / "parity" / f"{key_of(subject(machine))}.json"


def keep(document: dict[str, Any], machine: Machine) -> Path:
    """Put a whole comparison where `agreed` finds it. OSError where nothing can be written there."""
    path = place(machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, document)
    return path


def agreed(machine: Machine) -> set[str]:
    """The families of formats that have been found to agree on such a machine; none where nothing was compared, or not all of it."""
    try:
        document = json.loads(place(machine).read_bytes())
        if document["compared"] != subject(machine) or document["fast"]:
            return set()
        return {family for family, verdict in document["families"].items() if verdict == AGREES}
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ):  # none, or half a file, or another program's
        return set()
