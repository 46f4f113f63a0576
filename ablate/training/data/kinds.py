"""The paths of a data source: made absolute, and left out of a trial's identity."""

from pathlib import Path
from typing import TypeVar

from ablate.files import Json
from ablate.numerics.spec import Spec

T = TypeVar("T")


def places(source: object) -> frozenset[str]:
    """Return the fields that only locate a source's data: a trial's id has the data's fingerprint instead.

    They are its paths; all fields of a class with `BY_CONTENT`, which only say how its tokens are made.
    """
    if isinstance(source, Spec) and getattr(source, "BY_CONTENT", False):
        return frozenset(type(source).model_fields)
    return frozenset(getattr(source, "PATHS", ()))


def without_places(fields: Json, source: object) -> Json:
    """Return the JSON data of a source without the fields that only locate it; a built-in name as it is."""
    if not isinstance(fields, dict):
        return fields
    paths = places(source)
    return {name: value for name, value in fields.items() if name not in paths}


def located(value: T, folder: Path) -> T:
    """Return a configuration with paths that are relative to the experiment file's folder made absolute.

    A value that is no `Spec` has no paths. The class of a `Spec` lists its fields of paths: `PATHS` (files,
    folders, globs), and `NAMES`, which may be names on a hub too and stay unless such a folder exists.
    """
    if not isinstance(value, Spec):
        return value
    paths, names = getattr(value, "PATHS", ()), getattr(value, "NAMES", ())
    changed: dict[str, object] = {}
    for name in type(value).model_fields:
        part = getattr(value, name)
        if isinstance(part, Spec):
            changed[name] = located(part, folder)
        elif isinstance(part, str) and name in (*paths, *names):
            beside = _absolute(part, folder)
            # The libraries take a folder in the working directory for the name: name the one beside the file.
            named = name in names and not (Path(beside).exists() or Path(part).exists())
            changed[name] = part if named else beside
        elif isinstance(part, tuple) and name in paths:
            changed[name] = tuple(_absolute(path, folder) for path in part)
    changed = {name: part for name, part in changed.items() if part is not getattr(value, name)}
    return value.model_copy(update=changed) if changed else value


def _absolute(text: str, folder: Path) -> str:
    return text if Path(text).expanduser().is_absolute() else str(folder / text)
