"""A model of `transformers` as an experiment names it: its files, fingerprint and outline. Torch-free."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ablate.cache import digest, key_of
from ablate.files import user_path
from ablate.recipes.layers import Layer
from ablate.training.data.hub import commit_of

ModelSource = str | Mapping[str, object]
"""A folder, a config.json, a name on the hub; or a configuration's fields, `model_type` among them."""
HINT = (
    "give a folder with config.json,"
    " or a small configuration such as {model_type: qwen3, hidden_size: 64, num_hidden_layers: 2}"
)


class Outline(NamedTuple):
    """Shape of a model, without its weights."""

    layers: tuple[Layer, ...]
    """Layers that a recipe applies to."""
    parameters: int
    vocab: int
    context: int | None
    """Length of the longest sequence that it has positions for; None: no limit."""
    covered: float
    """Share of the weights in its matrices, except embeddings, that are in `layers`."""
    largest_uncovered: str | None
    """Name of the largest of the other matrices, and why it is left; None if there are none."""
    features: Mapping[str, int]
    """Numbers of input and output features of `layers`: each number once, keyed by one that has it
    (`... mlp.up in`)."""


def resolve(source: str) -> tuple[Path | None, str | None]:
    """Return the local folder or file of a name and None, or None and its commit on the hub. OSError if
    neither exists, or the hub cannot be reached."""
    path = user_path(source)
    if path.exists():
        return path, None
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise OSError(f"model {source}: no such folder or file; {HINT}")
    return None, commit_of("model", source, HINT)


def fingerprint(source: ModelSource) -> str:
    """Return a model's identity: the digest of its files, with the names of its weights if there are several,
    since the names say which are loaded; or its commit on the hub; empty for a configuration, which has no
    weights. OSError if the model cannot be found."""
    if not isinstance(source, str):
        return ""
    path, revision = resolve(source)
    if path is None:
        return revision or ""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    weights = [file.name for file in files if file.suffix in (".safetensors", ".bin")]
    content = digest([file for file in files if file.suffix == ".json" or file.name in weights])
    return content if len(weights) < 2 else key_of(content, weights)
