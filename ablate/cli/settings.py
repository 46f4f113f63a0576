"""Settings of this machine and user: addresses, folders, devices, workers.

An experiment file describes only the experiment, so that it runs unchanged on a laptop and on a cluster. The
settings come from, in this order, a flag, the environment, a profile, a default.

A profile is a table of `ablate.toml` in the current folder or, if there is none, of `~/.config/ablate.toml`.
Without a name, `[profile.default]` applies. `$NAME` in a value is read from the environment. A password in
the file is refused.

    [profile.cluster]
    state = "/shared/runs"
    ray = "ray://head:10001"
    mlflow = "postgresql://ablate:$PGPASSWORD@db/mlflow"
"""

import fcntl
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ablate.engines.gpu_access import device_class
from ablate.errors import InputError, nearest, passwords, redact
from ablate.files import make_folder
from ablate.store.databases import url

FILE = "ablate.toml"
ENVIRONMENT = {
    "state": "ABLATE_STATE",
    "ray": "ABLATE_RAY_ADDRESS",
    "mlflow": "ABLATE_MLFLOW",
    "tracker": "ABLATE_TRACKER",
    "notify": "ABLATE_NOTIFY",
    "shared_state": "ABLATE_SHARED_STATE",
}
PROFILE = "ABLATE_PROFILE"
_FLAGS = {"ray": "--address", "shared_state": "--shared-state"}
_DEFAULTS = {"state": "runs", "executor": "ray", "device": "auto", "shared_state": False}
_NAME = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True)
class Settings:
    """Settings of one command, resolved, with the origin of each value."""

    state: Path
    """State folder."""
    ray: str | None
    """Address of a Ray cluster; None: start Ray on this machine."""
    mlflow: str | None = field(repr=False)  # an address may hold a password
    """Address of MLflow; None: no MLflow."""
    tracker: str | None
    """Trackers beside MLflow: names or `module:class`, separated by commas; None: none."""
    workers: int | None
    """Trials at once; None: one for each core, or for each GPU."""
    executor: str
    """`ray` or `inline`."""
    device: str
    """`cpu` or `cuda`."""
    device_note: str
    """Reason why this machine's GPU is not used; empty if there is none, or if it is used."""
    notify: str | None = field(repr=False)
    """Command or URL that receives the first failure and the end of a sweep."""
    price: float | None
    """Cost of one worker-hour, in the currency of `budget.cost`."""
    shared_state: bool
    """If True, a new state folder gets the permissions that the umask leaves; otherwise only this user can
    enter it.
    """
    profile: str | None
    """Name of the profile, if one was named."""
    origins: Mapping[str, str]
    """Origin of each value, by key: a flag, a variable, a profile or `default`."""

    @property
    def state_option(self) -> str:
        """Option that names the state folder, after a space; empty if it is the default."""
        return "" if self.origins["state"] == "default" else f" --state {self.state}"

    def shown(self) -> dict[str, str]:
        """Return every value as text that is safe to print: without passwords, and of a notification URL only
        scheme and host."""
        defaults = {
            "ray": "started here",
            "mlflow": "none",
            "tracker": "none",
            "workers": "one for each core, or for each GPU",
            "notify": "none",
            "price": "not set",
        }
        values = {key: getattr(self, key) for key in KEYS}
        texts = {key: defaults[key] if value is None else redact(str(value)) for key, value in values.items()}
        return texts | ({"notify": destination(self.notify)} if self.notify else {})

    def environment(self) -> dict[str, str]:
        """Return environment variables that give a child process the same settings. They are not arguments,
        because every user of a machine can list the arguments of a process."""
        values = {
            "state": str(self.state.resolve()),
            "ray": self.ray or "local",
            "mlflow": self.mlflow or "none",
            "tracker": self.tracker or "none",
            "notify": self.notify,
        }
        variables = {ENVIRONMENT[key]: value for key, value in values.items() if value}
        variables |= {ENVIRONMENT["shared_state"]: "true"} if self.shared_state else {}
        return variables | ({PROFILE: self.profile} if self.profile else {})


def find_settings(profile: str | None = None, **flags: object) -> Settings:
    """Resolve the settings. `profile`: None for the one that ABLATE_PROFILE names, else `default`; `flags`:
    values of command-line options by key; None: the option was not used. InputError if the profile file or a
    value is wrong; all mistakes of the file are listed at once."""
    name = profile or os.environ.get(PROFILE) or None
    file, table = _profile(name)
    values: dict[str, Any] = {}  # as KEYS checked them, or as typer parsed them
    origins: dict[str, str] = {}
    for key in KEYS:
        origin = f"profile {name or 'default'} of {file}"
        values[key], origins[key] = _resolve(key, flags.get(key), table, origin)
    state = Path(values["state"]).expanduser()
    values |= {"state": state, "mlflow": mlflow_uri(values["mlflow"], state)}
    values["device_note"] = ""
    if values["device"] != "cpu":
        here = device_class()
        values["device_note"] = here.note(values["device"]) if values["ray"] in (None, "local") else ""
        values["device"] = here.device if values["device"] == "auto" else values["device"]
    values["shared_state"] = _parse_boolean(values["shared_state"])
    values["ray"] = None if values["ray"] == "local" else values["ray"]
    return Settings(**values, profile=name, origins=origins)


def _resolve(key: str, flag: object, table: Mapping[str, object], origin: str) -> tuple[object, str]:
    """Return a value and its origin; `origin` describes the profile that `table` is."""
    variable = ENVIRONMENT.get(key, "")
    if flag is not None:
        return flag, _FLAGS.get(key, f"--{key}")
    if os.environ.get(variable):
        return os.environ[variable], variable
    if key in table:
        return _expand(table[key], f"{key} in {origin}"), origin
    return _DEFAULTS.get(key), "default"


def _profile(name: str | None) -> tuple[Path, dict[str, object]]:
    """Return the profile file that applies and its table of this name; an InputError lists all mistakes of
    the file."""
    file = next((path for path in (Path(FILE), Path.home() / ".config" / FILE) if path.exists()), None)
    if file is None:
        if name:
            folders = f"the current folder or {Path.home() / '.config'}"
            raise InputError(
                f"profile {name}: there is no {FILE} in {folders}; create one with a table [profile.{name}]"
            )
        return Path(FILE), {}
    profiles = _read(file)
    if name and name not in profiles:
        raise InputError(f"{file}: no profile {name!r}; {nearest(name, profiles)}")
    return file, profiles.get(name or "default", {})


def _read(file: Path) -> dict[str, dict[str, object]]:
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from None
    profiles = content.pop("profile", {})
    problems = [
        f"{file}: {key}: no such key at the top level; put settings below [profile.NAME]" for key in content
    ]
    if not isinstance(profiles, dict) or not all(isinstance(table, dict) for table in profiles.values()):
        raise InputError(f"{file}: profile: must hold tables, [profile.NAME]")
    for name, table in profiles.items():
        for key, value in table.items():
            why = KEYS[key](value) if key in KEYS else f"no such key; {nearest(key, KEYS)}"
            problems += [f"{file}: profile.{name}.{key}: {why}"] if why else []
    if problems:
        raise InputError(*problems)
    return profiles


# Validators of the values in the file: each returns a description of the mistake, or None


def _text(value: object) -> str | None:
    if not isinstance(value, str) or not value:
        return "must be text"
    if any(not _NAME.fullmatch(password) for password in passwords(value)):
        return "must not contain a password: write $NAME instead, and set NAME in the environment"
    return None


def _must_be(what: str, holds: Callable[[Any], bool]) -> Callable[[object], str | None]:
    return lambda value: None if holds(value) else f"{value!r}: must be {what}"


def _one_of(*choices: str) -> Callable[[object], str | None]:
    return _must_be(f"one of {', '.join(choices)}", lambda value: value in choices)


KEYS: dict[str, Callable[[object], str | None]] = {
    "state": _text,
    "ray": _text,
    "mlflow": _text,
    "tracker": _text,
    "workers": _must_be("a whole number from 1", lambda value: type(value) is int and value > 0),
    "executor": _one_of("ray", "inline"),
    "device": _one_of("auto", "cpu", "cuda"),
    "notify": _text,
    "price": _must_be("a number above 0", lambda value: type(value) in (int, float) and 0 < value < math.inf),
    "shared_state": _must_be("true or false", lambda value: isinstance(value, bool)),
}


def _expand(value: object, location: str) -> object:
    """Replace $NAME and ${NAME} in a text by their values in the environment."""
    if not isinstance(value, str):
        return value
    names = [match[1] or match[2] for match in _NAME.finditer(value)]
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise InputError(f"{location}: ${missing[0]} is not set in the environment")
    return _NAME.sub(lambda match: os.environ[match[1] or match[2]], value)


# Derived values


def _parse_boolean(value: bool | str) -> bool:
    """Return a switch that the environment may set as text; InputError unless it is true, false, 1 or 0."""
    if isinstance(value, bool):
        return value
    if value.lower() not in ("true", "false", "1", "0"):
        raise InputError(f"{ENVIRONMENT['shared_state']}={value}: must be true or false")
    return value.lower() in ("true", "1")


def writable(state: Path, shared: bool = False) -> str | None:
    """Create the state folder and check that files can be written and locked there; InputError if not. Return
    a note for the user if others can read an existing folder, else None.

    Unless it is `shared`, a new folder is accessible to this user only. The permissions of an existing one
    never change.
    """
    try:
        permissions = make_folder(state, shared)
        probe = state / f".writable.{os.getpid()}"
        probe.touch()
        try:
            _lock(probe)
        finally:
            probe.unlink()
    except OSError as error:
        raise InputError(f"--state {state}: not writable ({error.strerror}); name another folder") from None
    if not permissions:
        return None
    remedy = f"`chmod 700 {state}` makes it private, --shared-state hides this note"
    return f"other users of this machine can read the state folder {state} ({permissions}): {remedy}."


def _lock(probe: Path) -> None:
    """Lock a file by flock, as this package does, and by fcntl, as SQLite does; InputError if the file system
    has no locks."""
    try:
        with probe.open("a") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_UN)  # over NFS both are one lock
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        why = (
            f"files cannot be locked there ({error.strerror}), "
            "so two processes could overwrite each other's results"
        )
        remedy = "name a folder on a file system with locks (Lustre: mounted with -o flock)"
        raise InputError(f"--state {probe.parent}: {why}; {remedy}") from None


def mlflow_uri(given: str | None, state: Path) -> str | None:
    """Return MLflow's address: as given, a SQLite store in the state folder by default, None for `none`."""
    if given == "none":
        return None
    return given or url((state / "mlflow.db").resolve())


def destination(hook: str) -> str:
    """Return a notification hook as text that is safe to print: the name of a command, or scheme and host of
    a URL, whose path is often a key."""
    if not hook.startswith(("http://", "https://")):
        return hook.partition(" ")[0]
    scheme, _, rest = redact(hook).partition("://")
    return f"{scheme}://{rest.partition('/')[0]}/..."
