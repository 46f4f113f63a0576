"""Promises of docker/, checked without a container engine: its files are read, and the programs that they name are asked."""

import ast
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import support.compose as compose
from support.compose import ROOT

from ablate import __version__

DOCKER = ROOT / "docker"
SECRET = re.compile(r"PASSWORD|SECRET|TOKEN|_KEY\b")
WORDS_OF_A_SERVICE = {
    *(
        "build",
        "cap_drop",
        "command",
        "depends_on",
        "deploy",
        "entrypoint",
        "environment",
        "healthcheck",
        "image",
        "init",
        "networks",
    ),
    *("ports", "profiles", "restart", "scale", "security_opt", "shm_size", "stop_signal", "user", "volumes"),
}
"""The keys of the compose specification that are used here: another one is a slip, or is added with a look at the specification."""
WORDS_OF_A_CHECK = {"test", "interval", "timeout", "retries", "start_period", "disable"}


@dataclass(frozen=True)
class Files:
    """The files of docker/ as they are, or with something broken."""

    compose: str = compose.FILE.read_text()
    example: str = (DOCKER / "env.example").read_text()
    ini: str = (DOCKER / "mlflow_auth.ini").read_text()
    ignored: str = (ROOT / ".dockerignore").read_text()
    images: dict[str, str] = field(
        default_factory=lambda: {path.name: path.read_text() for path in DOCKER.glob("*.Dockerfile")}
    )

    @cached_property
    def raw(self) -> dict[str, Any]:
        """compose.yaml with its variables as they stand."""
        return compose.load(self.compose)

    @cached_property
    def services(self) -> dict[str, dict[str, Any]]:
        """The services as they are where nobody set more than the secrets."""
        secrets = dict.fromkeys(compose.variables(self.raw), "") | compose.environment_file(self.example)
        optional = {name for name in secrets if not SECRET.search(name)} - {"MLFLOW_TRACKING_USERNAME"}
        return compose.filled(self.raw, {name: "x" for name in secrets if name not in optional})["services"]


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """A Dockerfile's instructions, each with its words, continuation lines joined."""
    joined = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    for line in filter(None, map(str.strip, joined.splitlines())):
        word, _, rest = line.partition(" ")
        yield word, rest


def one_shot(service: dict[str, Any]) -> bool:
    return service.get("restart") == "no" and "run" in service.get("profiles", [])


# What is wrong with the files, in words


def unwatched(files: Files) -> Iterator[str]:
    """Services without a health check that are no single command."""
    for name, service in files.services.items():
        check = service.get("healthcheck", {})
        if not (check.get("test") or (one_shot(service) and check.get("disable"))):
            yield f"{name} has no health check"
    for name, text in files.images.items():
        if not any(word == "HEALTHCHECK" for word, _ in instructions(text)):
            yield f"{name} has no health check"


def exposed(files: Files) -> Iterator[str]:
    """Ports that others than this machine may reach where nobody asked for that."""
    for name, service in files.services.items():
        yield from (
            f"{name} publishes {port}"
            for port in service.get("ports", [])
            if not str(port).startswith("127.0.0.1:")
        )
        yield from (
            f"{name} has {key}" for key in ("network_mode", "privileged", "pid", "ipc") if key in service
        )


def floating(files: Files) -> Iterator[str]:
    """Images that may be others tomorrow."""
    for name, service in files.services.items():
        image, own = service["image"], "build" in service
        if not (
            image.endswith(f":{__version__}")
            if own
            else re.search(r":[\w.-]*\d[\w.-]*@sha256:[0-9a-f]{64}$", image)
        ):
            yield f"{name} runs {image}"
    for name, text in files.images.items():
        for word, rest in instructions(text):
            if word == "FROM" and not re.search(r":[\w.-]*\d[\w.-]*@sha256:[0-9a-f]{64}( AS \w+)?$", rest):
                yield f"{name} is made from {rest}"
            if word == "RUN" and re.search(r"pip install(?!.*(--constraint|--no-deps))", rest):
                yield f"{name} installs without pins: {rest}"
    for name, service in files.services.items():
        if "build" in service and service["image"].partition(":")[0] != f"ablate-{_dockerfile(service).stem}":
            yield f"{name} is called {service['image']}"


def told(files: Files) -> Iterator[str]:
    """Secrets that stand in a file, and secrets among the words of a command."""
    for name, service in files.raw["services"].items():
        for key, value in service.get("environment", {}).items():
            if (
                SECRET.search(key)
                and not re.fullmatch(r"\$\{\w+:\?.+\}", str(value))
                and not str(value).startswith("/")
            ):
                yield f"{name}: {key} is not read from the environment"
        words = compose.variables(
            [compose.command(service), service.get("healthcheck", {}), service.get("build", {})]
        )
        yield from (
            f"{name}: {word} is among the words of a command" for word in words if SECRET.search(word)
        )
    for name, text in ({"compose.yaml": files.compose, "mlflow_auth.ini": files.ini} | files.images).items():
        yield from (
            f"{name}: {found} holds a password" for found in re.findall(r"\w+://[^\s:/@]+:[^\s/@]+@\S+", text)
        )
    for name, text in files.images.items():
        yield from (
            f"{name}: {word} {rest}"
            for word, rest in instructions(text)
            if word in ("ENV", "ARG") and SECRET.search(rest)
        )
        yield from (
            f"{name}: {word} {rest}"
            for word, rest in instructions(text)
            if word in ("COPY", "ADD") and ".env" in rest
        )
    yield from (
        f"mlflow_auth.ini: {line}" for line in files.ini.splitlines() if re.match(r"\w*password\s*=", line)
    )
    found = compose.environment_file(files.example)
    yield from (
        f"env.example: {name} has a value" for name, value in found.items() if SECRET.search(name) and value
    )
    for name in ("**/.env", "ablate.toml"):
        if name not in files.ignored.splitlines():
            yield f".dockerignore lets {name.removeprefix('**/')} into the image"


def mighty(files: Files) -> Iterator[str]:
    """Yield the services that run as root, or could become it."""
    for name, text in files.images.items():
        users = [rest for word, rest in instructions(text) if word == "USER"]
        if not users or users[-1].partition(":")[0] in ("root", "0"):
            yield f"{name} runs as {users[-1] if users else 'root'}"
    for name, service in files.services.items():
        if service.get("user", "" if "build" in service else "root").partition(":")[0] in ("root", "0"):
            yield f"{name} runs as root"
        if service.get("cap_drop") != ["ALL"] or "no-new-privileges:true" not in service.get(
            "security_opt", []
        ):
            yield f"{name} may gain privileges"


def absent(files: Files) -> Iterator[str]:
    """Files that are named and are not there, or are kept from the image."""
    kept_out = [line for line in files.ignored.splitlines() if line and not line.startswith("#")]
    for name, text in files.images.items():
        for word, rest in instructions(text):
            sources = shlex.split(rest)[:-1] if word in ("COPY", "ADD") else []
            for source in sources:
                if not (ROOT / source).exists() or any(Path(source).match(pattern) for pattern in kept_out):
                    yield f"{name} copies {source}"
        own = re.findall(r"python (docker/\S+)", text)
        yield from (f"{name} runs {path}" for path in own if not (ROOT / path).exists())
    for name, service in files.services.items():
        if "build" in service and not (ROOT / _dockerfile(service)).exists():
            yield f"{name} is built from {_dockerfile(service)}"
        paths = re.findall(r"/opt/ablate/([\w./-]+)", json.dumps(service))
        yield from (f"{name} names {path}" for path in paths if not (ROOT / path).exists())
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            if not (source in files.raw["volumes"] or (DOCKER / source).exists()):
                yield f"{name} mounts {source}"
        yield from (
            f"{name} is on {network}"
            for network in service["networks"]
            if network not in files.raw["networks"]
        )
        yield from (
            f"{name} waits for {other}"
            for other in service.get("depends_on", {})
            if other not in files.services
        )
    for folder in (
        "analysis",
        "experiments",
        "ablate",
        "docker",
        "LICENSE",
        "README.md",
    ):  # what works only where it is there
        if folder in kept_out:
            yield f".dockerignore keeps {folder} from the image"


def unsaid(files: Files) -> Iterator[str]:
    """Variables that env.example does not have, and those that nobody reads."""
    used, there = compose.variables(files.raw), set(compose.environment_file(files.example))
    commented = set(re.findall(r"^# (\w+)=", files.example, re.M))
    yield from (f"env.example has no {name}" for name in sorted(used - there - commented))
    yield from (f"nothing reads {name}" for name in sorted((there | commented) - used))


def misspelt(files: Files) -> Iterator[str]:
    """Keys that the compose specification has not, as far as they are used here."""
    yield from (
        f"{key}: no such key"
        for key in files.raw
        if key not in ("name", "services", "networks", "volumes") and key[:2] != "x-"
    )
    for name, service in files.services.items():
        yield from (f"{name}.{key}: no such key" for key in service.keys() - WORDS_OF_A_SERVICE)
        yield from (
            f"{name}.healthcheck.{key}: no such key"
            for key in service.get("healthcheck", {}).keys() - WORDS_OF_A_CHECK
        )
        conditions = [how.get("condition") for how in service.get("depends_on", {}).values()]
        yield from (
            f"{name} waits until {one}"
            for one in conditions
            if one not in ("service_healthy", "service_started")
        )


WRONG = {
    ("--artifacts-destination", "--artifact-destination"): "mlflow: No such option",
    ("--include-dashboard", "--include-board"): "ray-head: No such option",
    ("--optuna-port", "--optunaport"): "dashboard: No such option",
    ('--num-cpus, "${WORKER_CPUS:-2}"', "--num-cpus, two"): "ray-worker: 'two' is not a valid integer",
    ("ray, health-check", "ray, healthcheck"): "ray has no command 'healthcheck'",
    ("--username", "--user-name"): "pg_isready has no --user-name",
}
"""Beginning of the reply to each wrong word, by (right word, wrong word)."""


def misworded() -> Files:
    """Return the files with all WRONG words."""
    text = compose.FILE.read_text()
    for old, new in WRONG:
        assert old in text
        text = text.replace(old, new)
    return Files(compose=text)


MISWORDED = misworded()


def commands_of(files: Files) -> dict[str, list[str]]:
    """Return the words of each command of the files by what runs it; SyntaxError if one is wrong Python."""
    commands = {}
    for name, service in files.services.items():
        commands[name] = compose.command(service)
        check = service.get("healthcheck", {}).get("test", ["CMD"])[1:]
        commands |= {f"{name}'s health check": check} if check else {}
    joins = [
        line.partition(" >")[0]
        for line in (DOCKER / "join.sh").read_text().splitlines()
        if line.strip().startswith("ray ")
    ]
    commands |= {f"join.sh, {number}": shlex.split(line) for number, line in enumerate(joins)}
    commands |= {f"{name}'s HEALTHCHECK": json.loads(rest.partition("CMD ")[2]) for name, text in files.images.items()
                 for word, rest in instructions(text) if word == "HEALTHCHECK"}  # fmt: skip
    for words in commands.values():
        if words[0] == "/bin/sh":
            words[:2] = ["ablate"]
        if words[:2] == ["python", "-c"]:
            ast.parse(words[2])
    return commands


@cache
def replies() -> dict[str, list[str]]:
    """Return what mlflow, ray and ablate say of the commands, by compose.yaml: as it is, and with WRONG words. One process asks
    them of both: their imports take seconds."""
    asked = [
        {name: words for name, words in commands_of(files).items() if words[0] in ("mlflow", "ray", "ablate")}
        for files in (Files(), MISWORDED)
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout.splitlines()[-1])
    return dict(zip((Files().compose, MISWORDED.compose), said, strict=True))


def refused(files: Files) -> Iterator[str]:
    """Words that the real programs do not take."""
    for name, service in files.services.items():
        kind = service.get("healthcheck", {}).get("test", ["CMD"])[0]
        yield from [f"{name}: the health check is no CMD"] if kind != "CMD" else []
    commands = commands_of(files)
    yield from replies()[files.compose]
    for program in ("postgres", "pg_isready"):
        if shutil.which(program):
            known = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
            used = {
                word
                for words in commands.values()
                if words[0] == program
                for word in words[1:]
                if re.match(r"--?[a-z]", word)
            }
            yield from (
                f"{program} has no {word}"
                for word in sorted(used)
                if not re.search(rf"(?m)^\s.*(?<![\w-]){word}\b", known)
            )


ASK = """
import json, sys
import click
def program(name):
    if name == "mlflow":
        from mlflow.cli import cli as found
    elif name == "ray":
        from ray.scripts.scripts import cli as found
    else:
        import typer
        from ablate.cli.commands import whole_app
        found = typer.main.get_command(whole_app())
    return found
def mistakes(commands):
    for what, (name, *words) in commands.items():
        found = program(name)
        try:
            while hasattr(found, "commands") and not words[0].startswith("-"):
                found, words = found.commands[words[0]], words[1:]
            found.make_context(found.name, list(words))
        except KeyError as error:
            yield f"{what}: {name} has no command {error}"
        except Exception as error:
            if type(error).__name__ != "Exit":
                yield f"{what}: {getattr(error, 'message', error)}"
print(json.dumps([[*mistakes(commands)] for commands in json.load(sys.stdin)]))
"""


def unpinned(files: Files) -> Iterator[str]:
    """Packages of the images whose version is not constraints.txt's, or that have none there."""
    from packaging.requirements import Requirement

    pins = _pins()
    for line in pins.requirements("server", "hf", "blackwell", "dev"):
        requirement, pin = Requirement(line), pins.constraints().get(pins.name_of(line))
        if pin is None and pins.name_of(line) != "ablate-fp4" and not requirement.extras & {"pytorch"}:
            yield f"constraints.txt has no {requirement.name}"
        elif pin and pin not in requirement.specifier:
            yield f"constraints.txt has {requirement.name} {pin}, and the project wants {requirement.specifier}"
    for name, text in files.images.items():
        for package, version in re.findall(r"\b([\w.-]+)==([\w.]+)", text):
            if pins.constraints().get(pins.name_of(package)) != version:
                yield f"{name} installs {package} {version}"


def _dockerfile(service: dict[str, Any]) -> Path:
    return Path(service["build"]["dockerfile"])


def _pins() -> Any:
    sys.path.insert(0, str(DOCKER))
    try:
        import pins
    finally:
        sys.path.remove(str(DOCKER))
    return pins


CHECKS = (unwatched, exposed, floating, told, mighty, absent, unsaid, misspelt, refused, unpinned)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_nothing_is_wrong_with_the_files(check):
    assert list(check(Files())) == []


def broken(where: str, old: str, new: str) -> Files:
    """The files with one text in the place of another, everywhere in one of them."""
    files = Files()
    text = files.images[where] if where in files.images else getattr(files, where)
    assert old in text
    changed = text.replace(old, new)
    return (
        replace(files, images=files.images | {where: changed})
        if where in files.images
        else replace(files, **{where: changed})
    )


CPU, GPU = "cpu.Dockerfile", "blackwell.Dockerfile"


@pytest.mark.parametrize(
    ("check", "where", "old", "new", "said"),
    [
        (unwatched, "compose", "healthcheck: &node", "x-check: &node", "ray-worker has no health check"),
        (unwatched, "compose", 'restart: "no"', "restart: always", "run has no health check"),
        (unwatched, CPU, "HEALTHCHECK", "LABEL", "cpu.Dockerfile has no health check"),
        (exposed, "compose", "${PUBLISH:-127.0.0.1}:${MLFLOW", "${MLFLOW", "mlflow publishes 5000:5000"),
        (exposed, "compose", "PUBLISH:-127.0.0.1", "PUBLISH:-0.0.0.0", "dashboard publishes 0.0.0.0:8080:8080"),
        (exposed, "compose", "networks: [store]", "network_mode: host", "postgres has network_mode"),
        (floating, "compose", "postgres:18.6-trixie@", "postgres@", "postgres runs postgres@sha256"),
        (floating, "compose", "ablate-cpu:0.1.0", "ablate-cpu:latest", "mlflow runs ablate-cpu:latest"),
        (floating, CPU, "python:3.12.14-slim-trixie@sha256", "python:latest@sha256", "cpu.Dockerfile is made from python:latest"),
        (floating, GPU, "python -m pip install --constraint /opt/constraints.txt", "pip install", "installs without pins"),
        (told, "compose", "RAY_AUTH_TOKEN: \"${", "RAY_AUTH_TOKEN: \"hunter2 ${", "RAY_AUTH_TOKEN is not read from the environment"),
        (told, "compose", "postgresql://ablate@", "postgresql://ablate:hunter2@", "postgresql://ablate:hunter2@"),
        (told, "compose", "--app-name, basic-auth", '--app-name, "${RAY_AUTH_TOKEN}"', "RAY_AUTH_TOKEN is among the words"),
        (told, CPU, 'ARG TORCH_INDEX=""', "ENV MLFLOW_TRACKING_PASSWORD=hunter2", "ENV MLFLOW_TRACKING_PASSWORD"),
        (told, "ini", "auth_cache_ttl", "admin_password = hunter2\nauth_cache_ttl", "admin_password = hunter2"),
        (told, "example", "RAY_AUTH_TOKEN=", "RAY_AUTH_TOKEN=hunter2", "RAY_AUTH_TOKEN has a value"),
        (told, "ignored", "**/.env", "", "lets .env into the image"),
        (told, "ignored", "ablate.toml", "", "lets ablate.toml into the image"),
        (mighty, CPU, "USER ablate", "USER root", "cpu.Dockerfile runs as root"),
        (mighty, "compose", "user: postgres", "user: \"0\"", "postgres runs as root"),
        (mighty, "compose", "cap_drop: [ALL]", "cap_drop: []", "mlflow may gain privileges"),
        (absent, CPU, "COPY docker/pins.py", "COPY docker/pinns.py", "copies docker/pinns.py"),
        (absent, "compose", "docker/mlflow_auth.ini", "docker/auth.ini", "mlflow names docker/auth.ini"),
        (absent, "compose", "docker/cpu.Dockerfile", "docker/Dockerfile", "mlflow is built from docker/Dockerfile"),
        (absent, "ignored", "tests", "analysis", "keeps analysis from the image"),
        (unsaid, "example", "MLFLOW_PORT=5000", "", "env.example has no MLFLOW_PORT"),
        (unsaid, "example", "WORKERS=2", "WORKERS=2\nSPARE=1", "nothing reads SPARE"),
        (misspelt, "compose", "shm_size", "shm_sise", "shm_sise: no such key"),
        (misspelt, "compose", "service_healthy", "healthy", "waits until healthy"),
        (unpinned, GPU, "NVTE_FRAMEWORK=pytorch", "pip install transformer-engine==2.19.0;", "installs transformer-engine 2.19.0"),
    ],
)  # fmt: skip
def test_each_break_is_seen(check, where, old, new, said):
    found = list(check(broken(where, old, new)))
    assert any(said in one for one in found), found


@pytest.mark.slow
def test_words_that_a_program_does_not_take_are_told_each():
    found = list(refused(MISWORDED))
    for said in WRONG.values():
        assert any(said in one for one in found), (said, found)


# Variables


def test_a_missing_secret_is_told_with_what_makes_it():
    with pytest.raises(compose.Missing, match=r"run `make env` once, which writes docker/\.env"):
        compose.filled(Files().raw, {})


def test_make_env_writes_a_random_value_for_each_secret_for_its_owner_alone_and_never_twice(tmp_path):
    paths = [tmp_path / name for name in ("one", "two")]
    for path in paths:
        done = subprocess.run(
            [sys.executable, DOCKER / "new_env.py", path], capture_output=True, text=True, check=True
        )
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = [compose.environment_file(path.read_text()) for path in paths]
    secrets = [name for name in found[0] if SECRET.search(name)]
    assert len(secrets) == 4
    for name in secrets:
        assert re.fullmatch(r"[0-9a-f]{48}", found[0][name])
        assert found[0][name] not in (found[1][name], done.stdout)
    compose.filled(Files().raw, found[0])  # nothing is missing
    again = subprocess.run(
        [sys.executable, DOCKER / "new_env.py", paths[0]], capture_output=True, text=True, check=False
    )
    assert again.returncode == 1
    assert "left as it is" in again.stderr
    assert compose.environment_file(paths[0].read_text()) == found[0]


def test_git_ignores_the_secrets():
    done = subprocess.run(
        ["git", "-C", ROOT, "check-ignore", "docker/.env"], capture_output=True, check=False
    )
    assert done.returncode == 0


def test_the_compose_plugin_reads_the_file(tmp_path):
    if (
        not shutil.which("docker")
        or subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode
    ):
        pytest.skip("there is no `docker compose` here")
    subprocess.run([sys.executable, DOCKER / "new_env.py", tmp_path / "env"], check=True)
    words = [
        "docker",
        "compose",
        "--file",
        compose.FILE,
        "--env-file",
        tmp_path / "env",
        "--profile",
        "*",
        "config",
        "--quiet",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr


# What an image installs


def test_torch_and_its_kin_stay_what_the_image_has_and_all_else_is_pinned(tmp_path):
    pins = _pins()
    theirs = {"torch": "2.14.0a0+b2c75dd062.nv26.09", "triton": "3.8.0", "transformer-engine": "2.19.0"}
    (tmp_path / "kept.txt").write_text("\n".join(f"{name}=={version}" for name, version in theirs.items()))
    found = pins.merged(str(tmp_path / "kept.txt"))
    assert {name: found[name] for name in theirs} == theirs
    assert found["ray"] == pins.constraints()["ray"]
    assert "torchao" not in found  # ours was built against another torch
    assert pins.unchanged(str(tmp_path / "kept.txt"))[0].startswith("torch is ")
    (tmp_path / "ray.txt").write_text(f"ray=={pins.installed('ray')}")
    assert pins.unchanged(str(tmp_path / "ray.txt")) == []


def test_an_image_with_an_older_transformer_engine_is_told_by_the_engines_own_limit(monkeypatch):
    from ablate.engines.hardware import OLDEST

    pins = _pins()
    for version, told in (
        (f"{OLDEST[0]}.{OLDEST[1]}.0+abc", []),
        ("2.9.1", ["Transformer Engine 2.9.1 is older than 2.20"]),
    ):
        monkeypatch.setattr(pins, "installed", lambda name, version=version: version)
        assert pins.too_old() == told
    monkeypatch.setattr(pins, "installed", lambda name: None)
    assert pins.too_old() == ["Transformer Engine is not there"]


def test_an_installation_without_quantisers_or_notebooks_is_incomplete(tmp_path):
    shutil.copytree(
        ROOT / "ablate", tmp_path / "ablate", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    (tmp_path / "docker").mkdir()
    shutil.copy(DOCKER / "pins.py", tmp_path / "docker")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    words = [sys.executable, tmp_path / "docker" / "pins.py", "complete"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 1
    assert "there are no compiled quantisers" in done.stderr
    assert "analysis/ablation.ipynb" in done.stderr
