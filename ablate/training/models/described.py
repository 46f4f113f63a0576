"""The cached outline of a model of `transformers`, and globs on the names of its layers. Torch-free."""

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

from ablate.cache import key_of, remembered
from ablate.errors import one_line
from ablate.recipes.layers import Layer
from ablate.training.models import library
from ablate.training.models.source import ModelSource, Outline, fingerprint

_MOST = {"layers": 1024, "n_layer": 1024, "blocks": 1024, "experts": 1 << 14}
"""Largest numbers of modules to build: fields of a configuration whose names, up to `_per_`, end so."""
_LARGEST = 1 << 40
"""Largest value of any other field."""
_VERSION = 4
"""Raise by hand when the same model would have another outline."""


def outline(source: ModelSource, vocab: int | None = None) -> Outline:
    """Return the outline of a model, from the cache if it has been made before. `vocab` is for a
    configuration that gives none. OSError if the model cannot be found or read; ValueError if it is no model
    that `transformers` builds or a recipe applies to, or is too large."""
    if not isinstance(source, str):
        refuse_giants(source)
    return _outline(source if isinstance(source, str) else json.dumps(dict(source), sort_keys=True), vocab)


def refuse_giants(fields: Mapping[str, object]) -> None:
    """Raise ValueError for a number so large that building the model's modules would take gigabytes."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            refuse_giants(value)
        elif isinstance(value, int | float):
            counted = name.partition("_per_")[0]
            most = next((most for end, most in _MOST.items() if counted.endswith(end)), _LARGEST)
            if value > most:
                raise ValueError(f"{name} {value} of the model is too large; it may be {most} at most")


@lru_cache(maxsize=64)
def _outline(source: str, vocab: int | None) -> Outline:
    model = json.loads(source) if source.startswith("{") else source
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        library("transformers")  # raises with the command to install it
        raise
    key = key_of("model outline", _VERSION, installed, fingerprint(model) or source, vocab)

    def make() -> str:
        library("transformers")
        from ablate.training.models.causal import outlined

        try:
            return json.dumps(outlined(model, vocab), default=sorted)
        except (OSError, ValueError):
            raise
        except Exception as error:  # a model's code in transformers may raise any class
            reason = f"{type(error).__name__}: {one_line(str(error))[:200]}"
            raise ValueError(f"transformers cannot describe this model: {reason}") from None

    layers, *rest = json.loads(remembered(key, make))
    return Outline(
        tuple(Layer(name, block, frozenset(classes), size) for name, block, classes, size in layers), *rest
    )


def matching(patterns: Sequence[str], layers: Sequence[str]) -> list[str]:
    """Return the layers whose qualified name, or the end of it, matches one of some globs, such as `q_proj`
    or `layers.0.*`. ValueError, with the nearest names, if a glob matches no layer."""
    selected: dict[str, None] = {}
    for pattern in patterns:
        matches = [name for name in layers if fnmatchcase(f".{name}", f"*.{pattern}")]
        if not matches:
            ends = sorted({name.rpartition(".")[2] for name in layers})
            near = get_close_matches(pattern, ends, 3, 0.4) or ends
            raise ValueError(f"{pattern!r} matches no layer; the nearest: {', '.join(near)}")
        selected |= dict.fromkeys(matches)
    return list(selected)
