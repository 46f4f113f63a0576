"""Stand-in for Modal: its client as this module, its command `modal run` as this program, its machines as processes of this machine.

What it has in common with Modal is what the tests of docker/cloud rely on: a machine sees what was committed to a volume before it
started, and what it does not commit is lost with it; a machine that is taken away is replaced by one with an empty disk and the same
arguments; a time-out ends it. Folder of everything: the environment's STAND_IN. A file `lose` or `interrupt` there takes the machine
away, without a word or by SIGINT; `time-out` is the end of its time.
"""

import argparse
import contextlib
import importlib.util
import inspect
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def _root() -> Path:
    return Path(os.environ["STAND_IN"])


def is_local() -> bool:
    """Return False on a machine."""
    return "STAND_IN_MACHINE" not in os.environ


class FunctionTimeoutError(Exception):
    """A machine was ended by the time-out."""


class Volume:
    """A folder that outlives machines."""

    def __init__(self, name: str) -> None:
        self.name, self.folder = name, _root() / "volumes" / name

    @staticmethod
    def from_name(name: str, *, create_if_missing: bool = False) -> "Volume":
        volume = Volume(name)
        if create_if_missing and not volume.folder.exists():
            volume.folder.parent.mkdir(exist_ok=True)
            volume._replace(Path(tempfile.mkdtemp(dir=_root())))
        return volume

    def _replace(self, content: Path) -> None:
        """Make a folder the volume's content, at one moment: machines are lost at any."""
        link = content.with_suffix(".link")
        link.symlink_to(content)
        link.replace(self.folder)

    @contextlib.contextmanager
    def batch_upload(self, force: bool = False):
        def put_file(local_file: Any, remote_path: str) -> None:
            with (self.folder / remote_path.lstrip("/")).open("wb" if force else "xb") as file:
                file.write(local_file.read())

        yield SimpleNamespace(put_file=put_file)

    def read_file(self, path: str):
        yield (self.folder / path).read_bytes()

    def remove_file(self, path: str, recursive: bool = False) -> None:
        (self.folder / path).unlink()

    def commit(self) -> None:
        content = Path(tempfile.mkdtemp(dir=_root()))
        shutil.copytree(os.environ["KEPT"], content, dirs_exist_ok=True)
        self._replace(content)


class Image:
    """An image of which nothing is built."""

    @staticmethod
    def from_dockerfile(path: Path, *, context_dir: Path, build_args: dict[str, str]) -> "Image":
        return Image()

    def dockerfile_commands(self, *dockerfile_commands: str) -> "Image":
        return self

    def entrypoint(self, entrypoint_commands: list[str]) -> "Image":
        return self

    def add_local_dir(self, local_path: Path, remote_path: str, *, ignore: list[str]) -> "Image":
        return self


class Function:
    """A function that runs on machines."""

    def __init__(self, raw: Any, options: dict[str, Any]) -> None:
        self.raw, self.options = raw, options

    def with_options(self, *, gpu: str, timeout: int, volumes: dict[str, Volume]) -> "Function":
        return Function(self.raw, self.options | {"gpu": gpu, "timeout": timeout, "volumes": volumes})

    def remote(self, *args: Any) -> Any:
        ((mount, volume),) = self.options["volumes"].items()
        asked = {key: self.options[key] for key in ("gpu", "timeout")} | {
            "volume": volume.name,
            "line": args[2],
        }
        with (_root() / "calls.jsonl").open("a") as file:
            file.write(json.dumps(asked) + "\n")
        while True:
            machine = _root() / f"machine-{len(list(_root().glob('machine-*')))}"
            shutil.copytree(volume.folder, Path(f"{machine}{mount}"))
            (machine / "arguments").write_bytes(pickle.dumps(args))
            paths = {name: f"{machine}{path}" for name, path in self.options["env"].items()}
            environment = os.environ | paths | {"STAND_IN_MACHINE": str(machine)}
            words = [sys.executable, __file__, "machine", inspect.getfile(self.raw), str(machine)]
            if _attended(subprocess.Popen(words, env=environment), self.options["timeout"]):
                return json.loads((machine / "result").read_text())


def _attended(process: subprocess.Popen, timeout: float) -> bool:
    """Wait for a machine; return False if it was taken away."""
    until = time.monotonic() + timeout
    while (status := process.poll()) is None:
        if (_root() / "interrupt").exists():
            (_root() / "interrupt").unlink()
            process.send_signal(signal.SIGINT)
            process.wait()
            return False
        lost, over = (_root() / "lose").exists(), (_root() / "time-out").exists() or time.monotonic() > until
        if lost or over:
            children = subprocess.run(
                ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
            )
            process.kill()
            for child in map(int, children.stdout.split()):
                os.killpg(child, signal.SIGKILL)
            process.wait()
            (_root() / "lose").unlink(missing_ok=True)
            if over:
                raise FunctionTimeoutError
            return False
        time.sleep(0.05)
    if status:
        raise RuntimeError(f"the function ended with status {status}")
    return True


class App:
    """Functions and entry point of a file."""

    def __init__(self, name: str) -> None:
        self.name = name

    def function(self, **options: Any):
        return lambda raw: Function(raw, options)

    def local_entrypoint(self):
        return lambda raw: raw


def loaded(path: str) -> Any:
    """Return the module of a file that imports `modal`, with this one in its place."""
    before = sys.modules.get("modal")
    sys.modules["modal"] = sys.modules[__name__]
    try:
        spec = importlib.util.spec_from_file_location("modal_app", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        del sys.modules["modal"]
        if before is not None:
            sys.modules["modal"] = before
    return module


def main(words: list[str]) -> None:
    """Run `modal run FILE --option value ...`, or, as a machine, the function that was called."""
    module = loaded(words[1])
    if words[0] == "machine":
        machine = Path(words[2])
        status = module.rented.raw(*pickle.loads((machine / "arguments").read_bytes()))
        (machine / "result").write_text(json.dumps(status))
        return
    parser = argparse.ArgumentParser(prog="modal run")
    for name, parameter in inspect.signature(module.main).parameters.items():
        kind = (
            {"action": argparse.BooleanOptionalAction}
            if parameter.annotation is bool
            else {"type": parameter.annotation}
        )
        parser.add_argument(f"--{name}", default=parameter.default, **kind)
    module.main(**vars(parser.parse_args(words[2:])))


if __name__ == "__main__":
    main(sys.argv[1:])
