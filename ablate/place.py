"""Where things are on this machine. Nothing about place stands in an experiment; it comes from flags and the environment."""

import os
from pathlib import Path

from ablate.yamlfile import InputError


def writable(state: Path) -> None:
    """Make the state folder; InputError where that, or writing to it, is not possible."""
    try:
        state.mkdir(parents=True, exist_ok=True)
        probe = state / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError([f"--state {state}: not writable ({error.strerror}); name another folder"]) from None


def mlflow_uri(given: str | None, state: Path) -> str | None:
    """MLflow's address: as given, a SQLite store in the state folder, or None for `none`."""
    if given == "none":
        return None
    return given or f"sqlite:///{(state / 'mlflow.db').resolve()}"


def device_class(given: str) -> str:
    """`cpu` or `cuda`; `auto` is cuda where this machine has an NVIDIA GPU. Asks the file system, since importing torch takes seconds."""
    if given != "auto":
        return given
    return "cuda" if Path("/dev/nvidia0").exists() else "cpu"
