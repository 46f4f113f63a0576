"""Ray clusters of one machine for tests: heads and nodes as processes, each ended with its family; nodes that do not see a folder."""

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.experiments import environment, gone, until
from support.gates import Gate, customised
from support.services import free_port, trials_in

STARTS_RAY = [
    pytest.mark.slow,
    pytest.mark.services,
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning",
        "ignore::FutureWarning",
        "ignore::UserWarning",
        "ignore::ResourceWarning",
    ),
]
"""Marks of a file of tests that start Ray, whose libraries warn."""
OPEN = {"RAY_AUTH_MODE": "disabled"}
LEAN = ("--include-log-monitor", "false")
"""Without who brings workers' output to a driver, which none here shows: it takes a second to start, as does who would start machines."""
FEW_VERBS = """
import sys
sys.modules |= dict.fromkeys(["ray.serve.scripts", "ray.util.state.state_cli", "ray.dashboard.modules.job.cli"])
"""
"""Code after which Ray's command line has no verbs of these modules: their imports take two thirds of the start of `ray start`."""
_HIDDEN = 'mount -t tmpfs none "$1" && shift && exec "$@"'


def can_hide() -> bool:
    """Return True if this user may give a process a view of the file system of its own."""
    words = ["unshare", "-m", "sh", "-c", _HIDDEN, "sh", tempfile.gettempdir(), "true"]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(words, capture_output=True, check=False).returncode == 0
    )


def raylets_of(family: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return Ray's own process of a node among its descendants, of which others may end meanwhile."""
    found = []
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            if member.name() == "raylet":
                found.append(member)
    return found


def leave(process: subprocess.Popen) -> None:
    """Have a node leave its cluster, which knows so at once; then end all that came of it."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    raylets = raylets_of(family)
    for raylet in raylets:
        raylet.terminate()
    psutil.wait_procs(raylets, timeout=10)
    end_family(process, family)


def end_family(process: subprocess.Popen, known: Iterable[psutil.Process] = ()) -> None:
    """Kill a process and all that came of it."""
    family = (
        [process, *psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
    )
    for member in (*family, *known):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            member.kill()
    process.wait(30)


@contextlib.contextmanager
def ray_start(
    words: str, hide: Path | None = None, before: str = "", **extra: str
) -> Iterator[subprocess.Popen]:
    """`ray start WORDS --block` as a process. `hide`: a folder that is empty for it and its children; `before`: Python that runs first."""
    folder = Path(tempfile.mkdtemp(prefix="ah"))  # short, for the sake of socket paths
    listed = [
        "ray",
        "start",
        "--block",
        "--node-ip-address",
        "127.0.0.1",
        "--object-store-memory",
        str(100 << 20),
        *LEAN,
        *words.split(),
    ]
    listed += ["--temp-dir", str(folder), "--no-monitor"] if "--head" in listed else []
    code = f"{before}\n{FEW_VERBS}\nfrom ray.scripts.scripts import main\nsys.argv = {listed}\nmain()"
    command = [sys.executable, "-c", code]
    command = ["unshare", "-m", "sh", "-c", _HIDDEN, "sh", str(hide), *command] if hide else command
    said = folder / "output.txt"
    with said.open("w") as log:
        process = subprocess.Popen(
            command, env=environment(**extra), stdout=log, stderr=log, start_new_session=True
        )
    try:
        until(lambda: "Ray runtime started" in said.read_text() or process.poll() is not None)
        assert process.poll() is None, said.read_text()
        yield process
    finally:
        leave(process)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def head(words: str = "", **keys: Any) -> Iterator[str]:
    """A head without CPUs; its address."""
    number = free_port()
    with ray_start(f"--head --port {number} --num-cpus 0 --include-dashboard false {words}", **keys):
        yield f"127.0.0.1:{number}"


@contextlib.contextmanager
def node(
    address: str, cpus: int = 1, hide: Path | None = None, before: str = "", **extra: str
) -> Iterator[subprocess.Popen]:
    """A node of the cluster at an address."""
    with ray_start(f"--address {address} --num-cpus {cpus}", hide, before, **extra) as process:
        yield process


class Pair:
    """Two nodes of one CPU each, which do not see the folder `hidden`, cannot import some modules, leave their temporary files in
    `scratch`, and wait at `gate`. A test may end one; `complete` starts another."""

    def __init__(self, address: str, folder: Path, hidden: Path, without: Iterable[str] = ()) -> None:
        self.address, self.hidden, self.scratch = address, hidden, folder / "scratch"
        self.scratch.mkdir()
        self.gate = Gate(folder, blocking(*without))
        self.environment = self.gate.environment | {"TMPDIR": str(self.scratch)} | OPEN
        self.nodes: list[subprocess.Popen] = []
        self._stack = contextlib.ExitStack()

    def complete(self) -> None:
        """Start as many nodes as are missing. One that cannot hide a folder hides none."""
        hide = self.hidden if can_hide() else None
        while len(self.nodes) < 2:
            self.nodes.append(self._stack.enter_context(node(self.address, 1, hide, **self.environment)))

    def lose(self, lost: subprocess.Popen) -> None:
        """Kill Ray's process of a node: its trial ends by itself. Then end what is left of the node."""
        family = psutil.Process(lost.pid).children(recursive=True)
        trials = trials_in(psutil.Process(lost.pid))
        for raylet in raylets_of(family):
            raylet.kill()
        until(lambda: gone(trials))
        end_family(lost, family)
        self.nodes.remove(lost)

    def close(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def nodes(address: str, *each: dict[str, Any]) -> Iterator[list[subprocess.Popen]]:
    """Several nodes: what `node` is told of each. One after the other, since Ray takes those of one address that start at once for one."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(node(address, **keys)) for keys in each]


def blocking(*modules: str) -> str:
    """Code after which these modules cannot be imported."""
    return (
        "import importlib.machinery, sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {modules!r}:\n"
        "            return importlib.machinery.ModuleSpec(name, self)\n"
        "    def create_module(self, spec):\n"
        "        pass\n"
        "    def exec_module(self, module):\n"
        "        raise ModuleNotFoundError(f'No module named {module.__name__!r}')\n"
        "sys.meta_path.insert(0, Blocker())\n"
    )


def blocker(folder: Path, *modules: str) -> dict[str, str]:
    """An environment in which these modules cannot be imported."""
    return customised(folder, blocking(*modules))
