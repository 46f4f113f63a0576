"""Stand-ins for what docker/cloud rents: a program `modal` that runs a request as processes of this machine, and the real clients, if there are any."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.experiments import environment, program

ROOT = Path(__file__).parents[2]
CLOUD = ROOT / "docker" / "cloud"
sys.path.insert(0, str(CLOUD))
import session  # noqa: E402 - a file of that folder


def words_here(command: Sequence[str], home: Path, work: Path) -> list[str]:
    """A step's words in this place of its container: this interpreter, these folders, and a CPU."""
    words = [
        word.replace(session.HOME, str(home)).replace(f"{session.WORK}/", f"{work}/").replace("cuda", "cpu")
        for word in command
    ]
    return [*program(*words[1:]), "--executor", "inline"] if words[0] == "ablate" else words


MODAL = """\
#!{python}
import shutil, sys
from pathlib import Path
sys.path[:0] = {paths!r}
from support.rented import words_here
import session
stores, words = Path({stores!r}), sys.argv[1:]
(stores / "calls.txt").open("a").write(" ".join(words) + "\\n")
if words[:2] == ["volume", "get"]:
    store, part, target = [word for word in words[2:] if word != "--force"]
    shutil.copytree(stores / store / part, Path(target) / part, dirs_exist_ok=True)
    sys.exit(0)
options = dict(zip(words[2::2], words[3::2]))
given, store = Path(options["--given"]), stores / options["--store"]
request = session.Request.parse((given / "request.json").read_text())
shutil.copytree(given / "work", store / "work" / request.run)
work, home = stores / request.run / "work", stores / request.run / "home"
session.take_work(store / "work", request.run, work)
run = session.Session(request, home, store, words=lambda command: words_here(command, home, work), every=0.5)
sys.exit(run.run())
"""
"""A provider on this machine: the real request, session and copies, with commands as processes here."""


def provider(folder: Path) -> dict[str, str]:
    """The environment in which `modal` is the stand-in; its volumes are folders of `folder`."""
    (folder / "bin").mkdir(parents=True)
    path = folder / "bin" / "modal"
    paths = [str(CLOUD), str(ROOT / "tests"), str(ROOT)]
    path.write_text(MODAL.format(python=sys.executable, paths=paths, stores=str(folder)))
    path.chmod(0o755)
    found = environment()
    return found | {
        "PATH": f"{path.parent}{os.pathsep}{found['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [found.get("PYTHONPATH")])]),
    }


def calls(folder: Path) -> list[str]:
    """The command lines that the stand-in has received."""
    path = folder / "calls.txt"
    return path.read_text().splitlines() if path.exists() else []


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
        env=kept | {"HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
