"""What a model of `transformers` is, told without torch: where it lies, what identifies it, its outline, which is made once and kept."""

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from ablate.data.cache import digest, key_of, remembered
from ablate.data.hub import model_commit
from ablate.models import library
from ablate.yamlfile import one_line

Source = str | Mapping[str, Any]
"""A folder, a config.json, a name on the hub; or a configuration's fields, `model_type` among them."""
HINT = "give a folder with config.json, or a small configuration such as {model_type: qwen3, hidden_size: 64, num_hidden_layers: 2}"
_MOST = {"layer": 1024, "block": 1024, "expert": 4096}
"""Largest numbers in fields of a configuration whose names have these words: a model is built of so many modules to be described."""
_LARGEST = 1 << 40
"""Largest number in any other."""
_VERSION = 3
"""Raise by hand when the same model would have another outline."""


class Outline(NamedTuple):
    """What a model is, without its weights."""

    blocks: int
    linears: tuple[str, ...]
    """The layers that a recipe applies to."""
    parameters: int
    vocab: int
    context: int | None
    """The longest sequence that its positions reach."""
    covered: float
    """The share of the weights in its matrices, those of embeddings apart, that are in `linears`."""
    left: str | None
    """The name of the largest of the other matrices, where there are any."""
    features: Mapping[str, int]
    """How many features go into `linears` or come out of them: each number once, by one that has it, such as `... mlp.up in`."""


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
        from ablate.models.causal import outlined

        try:
            return json.dumps(outlined(meant, vocab))
        except (OSError, ValueError):
            raise
        except Exception as error:  # of whatever class: the code of a model's configuration is another library's
            raise ValueError(f"transformers cannot describe this model: {type(error).__name__}: {one_line(str(error))[:200]}") from None

    blocks, linears, *rest = json.loads(remembered(key, make))
    return Outline(blocks, tuple(linears), *rest)


def place(source: str) -> tuple[Path | None, str | None]:
    """The folder or file that a name is here; otherwise the commit that it stands for on the hub."""
    path = Path(source).expanduser()
    if path.exists():
        return path, None
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise OSError(f"model {source}: no such folder or file; {HINT}")
    return None, model_commit(source, HINT)


def fingerprint(source: Source) -> str:
    """What identifies a model's weights, where it has some: its files' content, or its commit on the hub; else nothing."""
    if not isinstance(source, str):
        return ""
    path, revision = place(source)
    if path is None:
        return revision
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return digest([file for file in files if file.suffix in (".json", ".safetensors", ".bin")])


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
