"""A gate that trials of other processes wait at, so that what a test does to them meets them at work however slow the machine is."""

import os
from pathlib import Path

CUSTOM = """
import os, time
from pathlib import Path

_replace = os.replace

def waits(target):
    if target.name not in ("checkpoint.pt", "result.json") or target.name == "checkpoint.pt" and not target.exists():
        return False
    try:
        results = int(Path({gate!r}).read_text())
    except FileNotFoundError:
        return False
    return len(list(target.parent.parent.glob("*/result.json"))) >= results

def replace(source, target, **keys):
    while waits(Path(target)):
        time.sleep(0.02)
    _replace(source, target, **keys)

os.replace = replace
"""


def customised(folder: Path, code: str) -> dict[str, str]:
    """An environment in which every Python runs this code as it starts."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


class Gate:
    """While it is shut and so many results are there, whoever has `environment` leaves no second checkpoint and no result, but waits."""

    def __init__(self, folder: Path, before: str = "") -> None:
        """`before`: code that runs first, of those who have `environment`."""
        self._file = folder / "shut"
        self.environment = customised(folder / "gate", before + CUSTOM.format(gate=str(self._file)))

    def shut(self, results: int = 0) -> None:
        """Shut it; `results`: the trials that are let through."""
        temporary = self._file.with_suffix(".new")
        temporary.write_text(str(results))
        temporary.rename(self._file)

    def open(self) -> None:
        """Let all go on that wait, and all that come."""
        self._file.unlink(missing_ok=True)
