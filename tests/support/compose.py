"""docker/compose.yaml as data: read, its variables filled in, and its services turned into processes of this machine."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ruamel.yaml import YAML

from support.clusters import FEW_VERBS, LEAN
from support.gates import customised
from support.services import Server, free_port

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker" / "compose.yaml"
_VARIABLE = re.compile(
    r"\$(?:(?P<escaped>\$)|(?P<plain>\w+)|\{(?P<name>\w+)(?:(?P<how>:?[-?+])(?P<word>[^}]*))?\})"
)


class Missing(Exception):
    """A variable that must be set is not; says what the file says of it."""


def load(text: str) -> dict[str, Any]:
    """The file's content, merge keys resolved, variables as they stand."""
    return YAML(typ="safe", pure=True).load(text)


def strings(value: Any) -> Iterator[str]:
    """Every text in a structure, keys included."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from strings(key)
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)
    elif isinstance(value, str):
        yield value


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The structure with every text changed."""
    if isinstance(value, Mapping):
        return {key: mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [mapped(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value


def variables(content: Any) -> set[str]:
    """The names of all variables that a structure reads."""
    found = (match for text in strings(content) for match in _VARIABLE.finditer(text))
    return {match["plain"] or match["name"] for match in found if not match["escaped"]}


def filled(content: Any, environment: Mapping[str, str]) -> Any:
    """The structure as compose sees it, by the compose specification's interpolation. Missing where a variable must be set and is not."""

    def value(match: re.Match) -> str:
        if match["escaped"]:
            return "$"
        name, how, word = match["plain"] or match["name"], match["how"] or "", match["word"] or ""
        found = environment.get(name)
        there = bool(found) if how.startswith(":") else found is not None
        if how.endswith("?") and not there:
            raise Missing(f"{name}: {word}")
        if how.endswith("+"):
            return word if there else ""
        return (found or "") if there or not how.endswith("-") else word

    return mapped(content, lambda text: _VARIABLE.sub(value, text))


def environment_file(text: str) -> dict[str, str]:
    """An .env file's values by name."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def command(service: Mapping[str, Any]) -> list[str]:
    """The words that a container of the service runs."""
    return [*service.get("entrypoint", []), *service.get("command", [])]


class Machine:
    """A machine on which the services are processes: names of hosts, ports and folders of the containers, and what they are here."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.services = filled(load(FILE.read_text()), environment)["services"]
        ports = {number: free_port() for number in (5432, 5000, 8080, 8000, 6379)}
        self.addresses = {"mlflow": f"http://127.0.0.1:{ports[5000]}", "ray": f"127.0.0.1:{ports[6379]}"}
        self.addresses |= {
            "optuna": f"http://127.0.0.1:{ports[8080]}",
            "reports": f"http://127.0.0.1:{ports[8000]}",
        }
        self.port = ports[5432]
        for name in ("state", "artifacts", "work"):
            (folder / name).mkdir()
        self._path = customised(folder / "few verbs", FEW_VERBS)["PYTHONPATH"]
        self._here = {r"\b(postgres|mlflow|ray-head):(?=\d)": "127.0.0.1:", r"^0\.0\.0\.0$": "127.0.0.1"}
        self._here |= {rf"\b{number}\b": str(port) for number, port in ports.items()}
        self._here |= {rf"(?<![\w/])/{name}\b": str(folder / name) for name in ("state", "artifacts", "work")}
        self._here |= {r"/opt/ablate\b": str(ROOT), r"socket\.gethostname\(\)": "'127.0.0.1'"}

    def here(self, text: str) -> str:
        """A text of the file as it reads on this machine."""
        for there, here in self._here.items():
            text = re.sub(there, here, text)
        return text

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of a service's process beside that of every process here."""
        found = mapped(self.services[name].get("environment", {}), self.here)
        if "MLFLOW_AUTH_CONFIG_PATH" in found:  # the file names a host, too
            copy = self.folder / "mlflow_auth.ini"
            copy.write_text(self.here(Path(found["MLFLOW_AUTH_CONFIG_PATH"]).read_text()))
            found["MLFLOW_AUTH_CONFIG_PATH"] = str(copy)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return found | {"PATH": path, "PYTHONPATH": f"{ROOT}{os.pathsep}{self._path}"}

    def words(self, name: str, **more: int) -> list[str]:
        """A service's command line here. `more`: ports that two copies of it cannot share on one machine."""
        replaced = [
            re.sub(r"\b6380\b", str(more.get("node", 6380)), self.here(word))
            for word in command(self.services[name])
        ]
        if replaced[:2] == ["ray", "start"]:  # a container's own address is asked of its network
            replaced += ["--node-ip-address", "127.0.0.1", "--temp-dir", str(self.folder / "ray"), *LEAN]
        return replaced

    def healthy(self, name: str, **more: int) -> bool:
        """Return the result of the service's own health check."""
        kind, *words = mapped(self.services[name]["healthcheck"]["test"], self.here)
        assert kind == "CMD"
        words = [re.sub(r"\b6380\b", str(more.get("node", 6380)), word) for word in words]
        environment = os.environ | self.environment(name)
        return (
            subprocess.run(words, env=environment, capture_output=True, timeout=60, check=False).returncode
            == 0
        )

    def start(
        self, name: str, log: str = "", extra: Mapping[str, str] = MappingProxyType({}), **more: int
    ) -> Server:
        """The service as a process, `extra` in its environment; `ready` asks its health check."""
        path = self.folder / f"{log or name}.log"
        words, environment = self.words(name, **more), self.environment(name) | extra
        words[0] = next(
            str(folder / words[0])
            for folder in map(Path, environment["PATH"].split(os.pathsep))
            if (folder / words[0]).exists()
        )
        return Server(words, path, lambda: self.healthy(name, **more), **environment)

    def run(self, *words: Any) -> list[str]:
        """The words of `docker compose run --rm run ...` here."""
        entrypoint = [self.here(word) for word in self.services["run"]["entrypoint"]]
        return [*entrypoint, *map(str, words)]
