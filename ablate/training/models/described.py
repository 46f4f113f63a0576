"""The outline of a model of `transformers`, made once and cached, and globs on the names of its layers. Torch-free."""

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ablate.cache import key_of, remembered
from ablate.errors import one_line
from ablate.recipes.layers import Layer
from ablate.training.models import library
from ablate.training.models.source import Outline, Source, fingerprint

_MOST = {"layer": 1024, "block": 1024, "expert": 4096}
"""Largest numbers in fields of a configuration whose names have these words: a model is built of so many modules to be described."""
_LARGEST = 1 << 40
"""Largest number in any other."""
_VERSION = 4
"""Raise by hand when the same model would have another outline."""


def outline(source: Source, vocab: int | None = None) -> Outline:
    """OSError or ValueError in one sentence where there is no such model. `vocab`: of a configuration that names none."""
    if not isinstance(source, str):
        _refuse_giants(source)
    return _outline(source if isinstance(source, str) else json.dumps(dict(source), sort_keys=True), vocab)


def _refuse_giants(fields: Mapping[str, Any]) -> None:
    """ValueError at a number so large that describing the model takes gigabytes."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            _refuse_giants(value)
        elif isinstance(value, int | float):
            most = next((most for word, most in _MOST.items() if word in name), _LARGEST)
            if value > most:
                raise ValueError(f"{name} {value} of the model is too large; it may be {most} at most")


@lru_cache(maxsize=64)
def _outline(source: str, vocab: int | None) -> Outline:
    meant = json.loads(source) if source.startswith("{") else source
    try:
        known = version("transformers")
    except PackageNotFoundError:
        library("transformers")  # says what to install
        raise
    key = key_of("outline", _VERSION, known, fingerprint(meant) or source, vocab)

    def make() -> str:
        library("transformers")
        from ablate.training.models.causal import outlined

        try:
            return json.dumps(outlined(meant, vocab), default=sorted)
        except (OSError, ValueError):
            raise
        except (
            Exception
        ) as error:  # of whatever class: the code of a model's configuration is another library's
            raise ValueError(
                f"transformers cannot describe this model: {type(error).__name__}: {one_line(str(error))[:200]}"
            ) from None

    layers, *rest = json.loads(remembered(key, make))
    return Outline(tuple(Layer(name, block, frozenset(classes)) for name, block, classes in layers), *rest)


def matching(patterns: Sequence[str], layers: Sequence[str]) -> list[str]:
    """The layers whose name, or the end of it, one of the globs matches. ValueError, with the nearest names, where one matches none."""
    found: dict[str, None] = {}
    for pattern in patterns:
        hit = [name for name in layers if fnmatchcase(f".{name}", f"*.{pattern}")]
        if not hit:
            words = sorted({name.rpartition(".")[2] for name in layers})
            near = get_close_matches(pattern, words, 3, 0.4) or words
            raise ValueError(f"{pattern!r} matches no layer; the nearest: {', '.join(near)}")
        found |= dict.fromkeys(hit)
    return list(found)
