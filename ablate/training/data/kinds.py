"""Which kind of source a value of a YAML file is: told by the key that names its place, so that what is wrong with it is told once."""

import glob
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Discriminator

from ablate.numerics.spec import Spec


def _kind_of(words: Collection[str], kinds: Mapping[str, type[Spec]]) -> Callable[[Any], str | None]:
    """A function for a pydantic discriminator: `word` for one of the words, else the first key of `kinds` that the value has."""

    def kind(value: Any) -> str | None:
        if isinstance(value, str):
            return "word" if value in words else None
        if isinstance(value, dict):
            return next((key for key in kinds if key in value), None)
        return next((key for key, spec in kinds.items() if isinstance(value, spec)), None)

    return kind


def either(words: Sequence[str], kinds: Mapping[str, type[Spec]]) -> Discriminator:
    """Of a union whose members are tagged `word`, or by a key of `kinds`: it takes the one that is meant, and says what there is."""
    there = f"must be {' or '.join(words)}, or have one of the keys {', '.join(kinds)}"
    return Discriminator(_kind_of(words, kinds), custom_error_type="source", custom_error_message=there)


def places(source: Any) -> frozenset[str]:
    """The fields of a source that only say where its data lie: its fingerprint stands for them in a trial's identity."""
    return getattr(source, "places", frozenset())


def located(value: Any, folder: Path, strays: dict[str, None]) -> Any:
    """A configuration with its relative paths made absolute: they are relative to `folder`, that of the experiment file.

    A path that is not there but exists relative to the working directory is taken from there, as earlier versions did, and
    added to `strays`. A class names the fields that hold paths: `PATHS` (files, folders, globs) and `NAMES`, which may be names on
    a hub as well and stay as they are unless such a folder exists.
    """
    changed: dict[str, Any] = {}
    for name in type(value).model_fields if isinstance(value, Spec) else ():
        part = getattr(value, name)
        if isinstance(part, Spec):
            other = located(part, folder, strays)
        elif isinstance(part, str) and name in getattr(value, "PATHS", ()):
            other = _absolute(part, folder, strays, False)
        elif isinstance(part, str) and name in getattr(value, "NAMES", ()):
            other = _absolute(part, folder, strays, True)
        else:
            continue
        if other is not part:
            changed[name] = other
    return value.model_copy(update=changed) if changed else value


def _absolute(text: str, folder: Path, strays: dict[str, None], may_be_a_name: bool) -> str:
    if Path(text).expanduser().is_absolute():
        return text
    beside = str(folder / text)
    if _there(beside):
        return beside
    if _there(text):
        strays[text] = None
        return str(Path.cwd() / text)
    return text if may_be_a_name else beside


def _there(path: str) -> bool:
    return next(glob.iglob(path, recursive=True), None) is not None or Path(path).exists()
