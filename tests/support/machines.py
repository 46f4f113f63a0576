"""Machines and packages that this machine has not: a GPU with Transformer Engine, another version of a library."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ablate.engines.hardware import ASSUMED, Machine


@contextmanager
def assuming(machine: Machine) -> Iterator[None]:
    """Take another machine for this one within the block."""
    token = ASSUMED.set(machine)
    try:
        yield
    finally:
        ASSUMED.reset(token)


def install(patched: pytest.MonkeyPatch, folder: Path, versions: dict[str, str], alone: bool = False) -> None:
    """Make `importlib.metadata` find packages of these versions before all others, or `alone`, without the others."""
    for name, number in versions.items():
        about = folder / f"{name.replace('-', '_')}-{number}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    others = [path for path in sys.path if not (alone and Path(path).name.endswith("-packages"))]
    patched.setattr(sys, "path", [str(folder), *others])
