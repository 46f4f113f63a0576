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
from shlex import quote
from tempfile import NamedTemporaryFile
from typing import Any

from ablate.engines.gpu_access import device_class
from ablate.errors import InputError, as_input_error, nearest, passwords, redact
from ablate.files import make_folder, user_path
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
_NONE = {"ray": "started here", "workers": "one for each core, or for each GPU", "price": "not set"}
"""Text of a key without a value; of the others: none."""
_NAME = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True)
class Settings:
    """Settings of one command, resolved: the options of `SweepFlags`, with the origin of each value.

    `ray`: None: start Ray on this machine. `mlflow`, `tracker`: None: none. `workers`: None: one for each
    core, or for each GPU. `device_note`: reason why this machine's GPU is not used; empty if there is none,
    or if it is used. `notify`: command or URL that receives the first failure and the end of a sweep.
    `origins`: by key: a flag, a variable, a profile or `default`.
    """

    state: Path
    ray: str | None
    mlflow: str | None = field(repr=False)  # an address may hold a password
    tracker: str | None
    workers: int | None
    executor: str
    device: str
    device_note: str
    notify: str | None = field(repr=False)
    price: float | None
    shared_state: bool
    profile: str | None
    origins: Mapping[str, str]

    @property
    def state_option(self) -> str:
        """Option that names the state folder, after a space; empty if it is the default."""
        return "" if self.origins["state"] == "default" else f" --state {quote(str(self.state))}"

    def shown(self) -> dict[str, str]:
        """Return every value as text that is safe to print: without passwords, and of a notification URL only
        scheme and host."""
        values = {key: getattr(self, key) for key in KEYS}
        values["notify"] = self.notify and destination(self.notify)
        return {
            key: _NONE.get(key, "none") if one is None else redact(str(one)) for key, one in values.items()
        }

    def environment(self) -> dict[str, str]:
        """Return environment variables that give a child process the same settings. They are not arguments,
        because every user of a machine can list the arguments of a process."""
        values = {
            ENVIRONMENT["state"]: str(self.state.resolve()),
            ENVIRONMENT["ray"]: self.ray or "local",
            ENVIRONMENT["mlflow"]: self.mlflow or "none",
            ENVIRONMENT["tracker"]: self.tracker or "none",
            ENVIRONMENT["notify"]: self.notify,
            ENVIRONMENT["shared_state"]: "true" if self.shared_state else None,
            PROFILE: self.profile,
        }
        return {name: value for name, value in values.items() if value}


def find_settings(profile: str | None = None, **flags: object) -> Settings:
    """Resolve the settings. `profile`: None for the one that ABLATE_PROFILE names, else `default`; `flags`:
    values of command-line options by key; None: the option was not used. InputError if the profile file or a
    value is wrong; all mistakes of the file are listed at once."""
    name = profile or os.environ.get(PROFILE) or None
    file, table = _profile(name)
    values: dict[str, Any] = {}  # as KEYS checked them, or as typer parsed them
    origins: dict[str, str] = {}
    for key in KEYS:
        variable, origin = ENVIRONMENT.get(key, ""), f"profile {name or 'default'} of {file}"
        if (flag := flags.get(key)) is not None:
            values[key], origins[key] = flag, _FLAGS.get(key, f"--{key}")
        elif os.environ.get(variable):
            values[key], origins[key] = os.environ[variable], variable
        elif key in table:
            values[key], origins[key] = _expand(table[key], f"{key} in {origin}"), origin
        else:
            values[key], origins[key] = _DEFAULTS.get(key), "default"
    values["state"] = state = user_path(values["state"])
    mlflow = values["mlflow"] or url((state / "mlflow.db").resolve())
    values |= {"mlflow": None if mlflow == "none" else mlflow, "device_note": ""}
    if values["device"] != "cpu":
        here = device_class()
        values["device_note"] = here.note(values["device"]) if values["ray"] in (None, "local") else ""
        values["device"] = here.device if values["device"] == "auto" else values["device"]
    shared = str(values["shared_state"]).lower()  # the environment has text
    if shared not in ("true", "false", "1", "0"):
        raise InputError(f"{ENVIRONMENT['shared_state']}={values['shared_state']}: must be true or false")
    values |= {
        "shared_state": shared in ("true", "1"),
        "ray": None if values["ray"] == "local" else values["ray"],
    }
    return Settings(**values, profile=name, origins=origins)


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
    with as_input_error(OSError, ValueError, before=f"{file}: cannot be read: "):
        content = tomllib.loads(file.read_text(encoding="utf-8"))
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


KEYS: dict[str, Callable[[object], str | None]] = {
    "state": _text,
    "ray": _text,
    "mlflow": _text,
    "tracker": _text,
    "workers": _must_be("a whole number from 1", lambda value: type(value) is int and value > 0),
    "executor": _must_be("one of ray, inline", ("ray", "inline").__contains__),
    "device": _must_be("one of auto, cpu, cuda", ("auto", "cpu", "cuda").__contains__),
    "notify": _text,
    "price": _must_be("a number above 0", lambda value: type(value) in (int, float) and 0 < value < math.inf),
    "shared_state": _must_be("true or false", lambda value: isinstance(value, bool)),
}


def _expand(value: object, location: str) -> object:
    """Replace $NAME and ${NAME} in a text by their values in the environment."""
    try:
        return _NAME.sub(lambda m: os.environ[m[1] or m[2]], value) if isinstance(value, str) else value
    except KeyError as missing:
        raise InputError(f"{location}: ${missing.args[0]} is not set in the environment") from None


def writable(state: Path, shared: bool = False) -> str | None:
    """Create the state folder and check that files can be written and locked there; InputError if not. Return
    a note for the user if others can read an existing folder, else None.

    Unless it is `shared`, a new folder is accessible to this user only. The permissions of an existing one
    never change.
    """
    try:
        permissions = make_folder(state, shared)
        with NamedTemporaryFile(dir=state, prefix=".writable.") as file:  # no pid: containers share them
            try:  # flock, as this package locks, and fcntl, as SQLite does
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.lockf(file, fcntl.LOCK_UN)  # over NFS both are one lock
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InputError(
                    f"--state {state}: files cannot be locked there ({error.strerror}), so two processes"
                    " could overwrite each other's results; name a folder on a file system with locks"
                    " (Lustre: mounted with -o flock)"
                ) from None
    except OSError as error:
        raise InputError(f"--state {state}: not writable ({error.strerror}); name another folder") from None
    if not permissions:
        return None
    remedy = f"`chmod 700 {quote(str(state))}` makes it private, --shared-state hides this note"
    return f"other users of this machine can read the state folder {state} ({permissions}): {remedy}."


def destination(hook: str) -> str:
    """Return a notification hook as text that is safe to print: the name of a command, or scheme and host of
    a URL, whose path is often a key."""
    if not hook.startswith(("http://", "https://")):
        return hook.partition(" ")[0]
    scheme, _, rest = redact(hook).partition("://")
    return f"{scheme}://{rest.partition('/')[0]}/..."
