"""A model of `transformers` as an experiment names it: its place, what identifies its weights, and its outline. Torch-free."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ablate.cache import digest
from ablate.recipes.layers import Layer
from ablate.training.data.hub import model_commit

Source = str | Mapping[str, Any]
"""A folder, a config.json, a name on the hub; or a configuration's fields, `model_type` among them."""
HINT = "give a folder with config.json, or a small configuration such as {model_type: qwen3, hidden_size: 64, num_hidden_layers: 2}"


class Outline(NamedTuple):
    """Shape of a model, without its weights."""

    layers: tuple[Layer, ...]
    """Those that a recipe applies to."""
    parameters: int
    vocab: int
    context: int | None
    """The longest sequence that its positions reach."""
    covered: float
    """The share of the weights in its matrices, those of embeddings apart, that are in `layers`."""
    left: str | None
    """The name of the largest of the other matrices, where there are any."""
    features: Mapping[str, int]
    """How many features go into `layers` or come out of them: each number once, by one that has it, such as `... mlp.up in`."""


def place(source: str) -> tuple[Path | None, str | None]:
    """Return the folder or file that a name is here; otherwise the commit that it stands for on the hub. OSError if neither exists."""
    path = Path(source).expanduser()
    if path.exists():
        return path, None
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise OSError(f"model {source}: no such folder or file; {HINT}")
    return None, model_commit(source, HINT)


def fingerprint(source: Source) -> str:
    """Return what identifies a model's weights: a digest of its files, or its commit on the hub; empty for one that has none."""
    if not isinstance(source, str):
        return ""
    path, revision = place(source)
    if path is None:
        return revision
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return digest([file for file in files if file.suffix in (".json", ".safetensors", ".bin")])
