"""The Hugging Face hub: the only file that may reach it, and it does where a source names a dataset or a tokeniser. No telemetry."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ablate.cache import digest, key_of, remembered
from ablate.errors import redact

_EXTRA = "pip install 'ablate-fp4[hf]'"
_SECONDS = 15.0
"""How long the hub may take to say which commit a name stands for: the first thing that is asked."""


def local(dataset: str) -> Path | None:
    """The folder that a dataset's name is, where it is one."""
    path = Path(dataset).expanduser()
    return path if path.is_dir() else None


def version(dataset: str, revision: str | None, instead: str) -> str:
    """The commit of a dataset, asked once and then known here; of a local folder, what identifies its files' content.

    OSError in one sentence, `instead` saying what there is without a network, where the hub does not say.
    """
    folder = local(dataset)
    if folder:
        return digest([path for path in sorted(folder.rglob("*")) if path.is_file()])
    return remembered(
        key_of("dataset", dataset, revision), lambda: _commit("dataset", dataset, revision, instead)
    )


def tokenizer_commit(name: str, instead: str) -> str:
    """The commit of a model on the hub, asked once and then known here. OSError in one sentence."""
    return remembered(key_of("tokenizer", name), lambda: _commit("tokenizer", name, None, instead))


def tokenizer_file(name: str, instead: str) -> Path:
    """The `tokenizer.json` of a model on the hub, kept by its library. OSError in one sentence."""
    commit = tokenizer_commit(name, instead)
    with _told(f"tokenizer {name}: its tokenizer.json cannot be had"):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, "tokenizer.json", revision=commit))


def model_commit(name: str, instead: str) -> str:
    """The commit of a model on the hub, asked once and then known here. OSError in one sentence."""
    return remembered(key_of("model", name), lambda: _commit("model", name, None, instead))


def rows(
    dataset: str, config: str | None, split: str, commit: str, raw: str | None = None
) -> Iterator[dict[str, Any]]:
    """The rows of a split, streamed; those of the image column `raw` as {bytes, path}. OSError in one sentence where that fails."""
    library = _datasets(dataset)
    with _told(f"dataset {dataset}, split {split}: cannot be read"):
        folder = local(dataset)
        found = library.load_dataset(
            str(folder or dataset), config, split=split, streaming=True, revision=None if folder else commit
        )
        columns = found.column_names or list(next(iter(found), ()))
        if raw and columns and raw not in columns:  # the library would add it, empty
            raise ValueError(f"there is no column {raw!r}; there are {', '.join(columns)}")
        yield from found.cast_column(raw, library.Image(decode=False)) if raw else found


def _commit(kind: str, name: str, revision: str | None, instead: str) -> str:
    quiet()
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    where, ask = redact(constants.ENDPOINT), HfApi().dataset_info if kind == "dataset" else HfApi().model_info
    try:
        return ask(name, revision=revision, timeout=_SECONDS).sha
    except RevisionNotFoundError:
        raise OSError(f"{kind} {name}: {where} has no revision {revision} of it") from None
    except RepositoryNotFoundError:
        raise OSError(
            f"{kind} {name}: {where} has none of that name, or it is private (HF_TOKEN); {instead}"
        ) from None
    except Exception as error:
        raise OSError(
            f"{kind} {name}: {where} was asked for it and cannot be reached ({_first(error)}); {instead}"
        ) from None


def _datasets(dataset: str) -> ModuleType:
    quiet()
    try:
        import datasets
    except ImportError:
        raise OSError(f"dataset {dataset}: the library that reads it is not installed: {_EXTRA}") from None
    datasets.disable_progress_bars()
    return datasets


def quiet() -> None:
    """Say nothing about this machine, also where the library was imported before."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    from huggingface_hub import constants

    constants.HF_HUB_DISABLE_TELEMETRY = True


@contextmanager
def _told(what: str) -> Iterator[None]:
    """What the library raises, of whatever class, as OSError in one sentence."""
    try:
        yield
    except Exception as error:
        raise OSError(f"{what}: {_first(error)}") from error


def _first(error: Exception) -> str:
    """The first line of what a library says, without passwords."""
    return redact((str(error).strip() or type(error).__name__).splitlines()[0])
