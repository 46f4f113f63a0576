"""The kind of a data source in a YAML file, by the key of its location; and its paths, made absolute.

Since the kind is decided first, an error in a source is reported for that kind alone.
"""

import glob
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Discriminator

from ablate.numerics.spec import Spec


def _kind_of(words: Collection[str], kinds: Mapping[str, type[Spec]]) -> Callable[[Any], str | None]:
    """Return a discriminator's function: `word` for one of the words, else the first key of `kinds` in it."""

    def kind(value: Any) -> str | None:
        if isinstance(value, str):
            return "word" if value in words else None
        if isinstance(value, dict):
            return next((key for key in kinds if key in value), None)
        return next((key for key, spec in kinds.items() if isinstance(value, spec)), None)

    return kind


def either(words: Sequence[str], kinds: Mapping[str, type[Spec]]) -> Discriminator:
    """Return the discriminator of a union of sources, whose error lists all that a source may be.

    Args:
        words: names of built-in sources; their union member is tagged `word`.
        kinds: classes of the other sources, keyed by their tag, a field that only they have.
    """
    message = f"must be {' or '.join(words)}, or have one of the keys {', '.join(kinds)}"
    return Discriminator(_kind_of(words, kinds), custom_error_type="source", custom_error_message=message)


def places(source: Any) -> frozenset[str]:
    """Return the fields that only locate a source's data: a trial's id has the data's fingerprint instead."""
    return getattr(source, "places", frozenset())


def located(value: Any, folder: Path, strays: dict[str, None]) -> Any:
    """Return a configuration with its relative paths made absolute.

    Args:
        value: the configuration. Its class lists its fields of paths: `PATHS` (files, folders, globs), and
            `NAMES`, which may be names on a hub too and stay as they are unless such a folder exists.
        folder: folder of the experiment file, which paths are relative to.
        strays: receives paths that do not exist there but relative to the working directory; those are taken
            from there, as earlier versions did.
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
    if _exists(beside):
        return beside
    if _exists(text):
        strays[text] = None
        return str(Path.cwd() / text)
    return text if may_be_a_name else beside


def _exists(path: str) -> bool:
    return next(glob.iglob(path, recursive=True), None) is not None or Path(path).exists()
