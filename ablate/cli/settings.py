"""Where things are: a flag, else the environment, else a profile, else a default. Nothing about place stands in an experiment.

A profile is a table of `ablate.toml` in the current folder, or else of `~/.config/ablate.toml`. `[profile.default]` is in force where
none is named. `$NAME` in a value is read from the environment; a password that stands in the file is refused.

    [profile.cluster]
    state = "/shared/runs"
    ray = "ray://head:10001"
    mlflow = "postgresql://ablate:$PGPASSWORD@db/mlflow"
"""

import fcntl
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ablate.errors import InputError, nearest, passwords, redact
from ablate.files import make_folder
from ablate.results.databases import url

FILE = "ablate.toml"
ENVIRONMENT = {
    "state": "ABLATE_STATE",
    "ray": "ABLATE_RAY_ADDRESS",
    "mlflow": "ABLATE_MLFLOW",
    "notify": "ABLATE_NOTIFY",
    "shared_state": "ABLATE_SHARED_STATE",
}
PROFILE = "ABLATE_PROFILE"
_FLAGS = {"ray": "--address", "shared_state": "--shared-state"}
_DEFAULTS = {"state": "runs", "executor": "ray", "device": "auto", "priority": 0, "shared_state": False}
_NAME = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True)
class Place:
    """What is in force. `ray` None: Ray is started here; `mlflow` None: no MLflow; `price`: of a GPU- or core-hour.

    `priority`: among the sweeps on a Ray cluster.
    """

    state: Path
    ray: str | None
    mlflow: str | None = field(repr=False)  # an address may hold a password
    workers: int | None
    executor: str
    device: str
    notify: str | None = field(repr=False)
    price: float | None
    priority: int
    shared_state: bool
    """Whether a state folder that is made here is open to others as far as the umask allows; else it is this user's alone."""
    profile: str | None
    origins: Mapping[str, str]
    """Where each value comes from, by its key."""

    def shown(self) -> dict[str, str]:
        """Every value as it may be printed: without passwords, and of a URL to call only where it leads, since its path is often a key."""
        nothing = {
            "ray": "started here",
            "mlflow": "none",
            "workers": "one a core, or one a GPU",
            "notify": "none",
            "price": "not known",
        }
        values = {key: getattr(self, key) for key in KEYS}
        texts = {key: nothing[key] if value is None else redact(str(value)) for key, value in values.items()}
        return texts | ({"notify": destination(self.notify)} if self.notify else {})

    def environment(self) -> dict[str, str]:
        """What tells another process of this machine the same addresses: out of sight of those who list processes."""
        values = {
            "state": str(self.state.resolve()),
            "ray": self.ray or "local",
            "mlflow": self.mlflow or "none",
            "notify": self.notify,
        }
        found = {ENVIRONMENT[key]: value for key, value in values.items() if value}
        found |= {ENVIRONMENT["shared_state"]: "true"} if self.shared_state else {}
        return found | ({PROFILE: self.profile} if self.profile else {})


def find(profile: str | None = None, **flags: Any) -> Place:
    """What is in force, given the flags that were used (None: not used). InputError where the file or a value is wrong."""
    name = profile or os.environ.get(PROFILE) or None
    file, table = _profile(name)
    values, origins = {}, {}
    for key in KEYS:
        values[key], origins[key] = _first(
            key, flags.get(key), table, f"profile {name or 'default'} of {file}"
        )
    state = Path(values["state"]).expanduser()
    values |= {
        "state": state,
        "mlflow": mlflow_uri(values["mlflow"], state),
        "device": device_class(values["device"]),
    }
    values["shared_state"] = _truth(values["shared_state"])
    values["ray"] = None if values["ray"] == "local" else values["ray"]
    return Place(**values, profile=name, origins=origins)


def _first(key: str, flag: Any, table: Mapping[str, Any], where: str) -> tuple[Any, str]:
    """A value, and where it comes from."""
    variable = ENVIRONMENT.get(key, "")
    if flag is not None:
        return flag, _FLAGS.get(key, f"--{key}")
    if os.environ.get(variable):
        return os.environ[variable], variable
    if key in table:
        return _expand(table[key], f"{key} in {where}"), where
    return _DEFAULTS.get(key), "default"


def _profile(name: str | None) -> tuple[Path, dict[str, Any]]:
    """The file that is in force, and its table of this name; all that is wrong with the file is told at once."""
    file = next((path for path in (Path(FILE), Path.home() / ".config" / FILE) if path.exists()), None)
    if file is None:
        if name:
            raise InputError(
                [
                    f"profile {name}: there is no {FILE}, here or in {Path.home() / '.config'}, that could hold [profile.{name}]"
                ]
            )
        return Path(FILE), {}
    profiles = _read(file)
    if name and name not in profiles:
        raise InputError([f"{file}: no profile {name!r}; {nearest(name, profiles)}"])
    return file, profiles.get(name or "default", {})


def _read(file: Path) -> dict[str, dict[str, Any]]:
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError([f"{file}: cannot be read: {error}"]) from None
    profiles = content.pop("profile", {})
    problems = [f"{file}: {key}: no such key; everything stands below [profile.NAME]" for key in content]
    if not isinstance(profiles, dict) or not all(isinstance(table, dict) for table in profiles.values()):
        raise InputError([f"{file}: profile: must be tables, [profile.NAME]"])
    for name, table in profiles.items():
        for key, value in table.items():
            why = KEYS[key](value) if key in KEYS else f"no such key; {nearest(key, KEYS)}"
            problems += [f"{file}: profile.{name}.{key}: {why}"] if why else []
    if problems:
        raise InputError(problems)
    return profiles


# What a value of the file may be: a function says what is wrong with it, None where nothing is


def _text(value: Any) -> str | None:
    if not isinstance(value, str) or not value:
        return "must be text"
    if any(not _NAME.fullmatch(password) for password in passwords(value)):
        return (
            "a password has no place in this file: write $NAME in its stead, and set NAME in the environment"
        )
    return None


def _workers(value: Any) -> str | None:
    return None if type(value) is int and value > 0 else f"{value!r}: must be a whole number from 1"


def _price(value: Any) -> str | None:
    return (
        None
        if type(value) in (int, float) and 0 < value < float("inf")
        else f"{value!r}: must be a number above 0"
    )


def _priority(value: Any) -> str | None:
    return None if type(value) is int else f"{value!r}: must be a whole number; higher goes first"


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else f"{value!r}: must be true or false"


def _one_of(*choices: str) -> Callable[[Any], str | None]:
    return lambda value: None if value in choices else f"{value!r}: must be one of {', '.join(choices)}"


KEYS: dict[str, Callable[[Any], str | None]] = {
    "state": _text,
    "ray": _text,
    "mlflow": _text,
    "workers": _workers,
    "executor": _one_of("ray", "inline"),
    "device": _one_of("auto", "cpu", "cuda"),
    "notify": _text,
    "price": _price,
    "priority": _priority,
    "shared_state": _boolean,
}


def _expand(value: Any, where: str) -> Any:
    """The value with $NAME and ${NAME} from the environment."""
    if not isinstance(value, str):
        return value
    names = [found[1] or found[2] for found in _NAME.finditer(value)]
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise InputError([f"{where}: ${missing[0]} is not set in the environment"])
    return _NAME.sub(lambda found: os.environ[found[1] or found[2]], value)


# The values themselves


def _truth(value: bool | str) -> bool:
    """Return a switch that the environment may set as text; InputError for other text than true and false."""
    if isinstance(value, bool):
        return value
    if value.lower() not in ("true", "false", "1", "0"):
        raise InputError([f"{ENVIRONMENT['shared_state']}={value}: must be true or false"])
    return value.lower() in ("true", "1")


def writable(state: Path, shared: bool = False) -> str | None:
    """Make the state folder, for this user alone unless `shared`; InputError where that, or writing to it, is not possible.

    Returns what to tell the user: that others can read a folder that was there. Its rights are not changed.
    """
    try:
        rights = make_folder(state, shared)
        probe = state / f".writable.{os.getpid()}"
        probe.touch()
        try:
            _lock(probe)
        finally:
            probe.unlink()
    except OSError as error:
        raise InputError([f"--state {state}: not writable ({error.strerror}); name another folder"]) from None
    right = f"`chmod 700 {state}` keeps it to yourself, --shared-state ends this note"
    return (
        f"other users of this machine can read the state folder {state} ({rights}): {right}."
        if rights
        else None
    )


def _lock(probe: Path) -> None:
    """Lock a file in both ways that are used here, by flock and (SQLite) by fcntl; InputError if the file system has no locks."""
    try:
        with probe.open("a") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_UN)  # over NFS both are one lock
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        why = f"files cannot be locked there ({error.strerror}), and two processes would overwrite each other's results"
        right = "name a folder on a file system with locks (Lustre: mounted with -o flock)"
        raise InputError([f"--state {probe.parent}: {why}; {right}"]) from None


def mlflow_uri(given: str | None, state: Path) -> str | None:
    """MLflow's address: as given, a SQLite store in the state folder, or None for `none`."""
    if given == "none":
        return None
    return given or url((state / "mlflow.db").resolve())


def device_class(given: str) -> str:
    """`cpu` or `cuda`; `auto` is cuda where this machine has an NVIDIA GPU. Asks the file system, since importing torch takes seconds."""
    if given != "auto":
        return given
    return "cuda" if Path("/dev/nvidia0").exists() else "cpu"


def destination(hook: str) -> str:
    """A hook as it may be printed: a command's first word, a URL's scheme and host."""
    if not hook.startswith(("http://", "https://")):
        return hook.partition(" ")[0]
    scheme, _, rest = redact(hook).partition("://")
    return f"{scheme}://{rest.partition('/')[0]}/..."
