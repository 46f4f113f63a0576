"""Commands of docker/cloud/modal_app.py with a stand-in for Modal, and the real client, if there is one."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support import stand_in_modal
from support.experiments import environment

ROOT = Path(__file__).parents[2]
CLOUD = ROOT / "docker" / "cloud"
APP = CLOUD / "modal_app.py"
modal_app = stand_in_modal.loaded(str(APP))
"""The file, with the stand-in for Modal."""

MODAL = """\
#!/bin/sh
exec PYTHON STAND_IN "$@"
"""
ABLATE = """\
#!/bin/sh
if [ "$1" = sweep ]; then set -- "$@" --check-command true --executor inline --device cpu; fi
exec PYTHON -m ablate "$@"
"""
"""The command in a machine without a GPU: the last of two options counts."""


def provider(folder: Path, ablate: str = ABLATE, **extra: str) -> dict[str, str]:
    """Return the environment in which `modal` is the stand-in, with its volumes and machines in `folder`, and `ablate` a script."""
    (folder / "bin").mkdir(parents=True)
    for name, text in (("modal", MODAL), ("ablate", ablate)):
        path = folder / "bin" / name
        path.write_text(text.replace("PYTHON", sys.executable).replace("STAND_IN", stand_in_modal.__file__))
        path.chmod(0o755)
    found = environment(**extra)
    return found | {
        "PATH": f"{folder / 'bin'}{os.pathsep}{found['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [found.get("PYTHONPATH")])]),
        "STAND_IN": str(folder),
    }


def rent(environ: dict[str, str], folder: Path, *words: Any) -> subprocess.CompletedProcess:
    """Return the result of `modal run docker/cloud/modal_app.py`, run in `folder`."""
    command = ["modal", "run", str(APP), *map(str, words)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environ,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def calls(folder: Path) -> list[dict[str, Any]]:
    """Return what the stand-in was asked for: GPU, time-out, volume and command of each call."""
    path = folder / "calls.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def interpreter(package: str, command: str) -> str:
    """A Python that has the client library: this one, or that of the command on the PATH; skips the test if none has it."""
    if find_spec(package):
        return sys.executable
    found = shutil.which(command)
    beside = Path(found).resolve().parent / "python" if found else None
    if beside is None or not beside.exists():
        pytest.skip(f"{package} is not installed here, and no `{command}` is on the PATH")
    return str(beside)


def asked(python: str, code: str, home: Path, *words: Any) -> Any:
    """The JSON that a program prints last, in an interpreter that has a client library; its home is a folder of the test."""
    kept = {name: value for name, value in environment().items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [python, "-c", code, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=kept | {"HOME": str(home)},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
