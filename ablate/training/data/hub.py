"""All access to the Hugging Face hub, for sources that name a dataset, tokeniser or model. No telemetry."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

from ablate.cache import digest, key_of, remembered
from ablate.errors import first_line, redact
from ablate.files import below, user_path

_EXTRA = "pip install 'ablate-fp4[hf]'"
_SECONDS = 15.0
"""Time limit of the request for a name's commit, the first request of all."""


def local(dataset: str) -> Path | None:
    """Return the folder that a dataset's name is the path of; None if it is none."""
    path = user_path(dataset)
    return path if path.is_dir() else None


def version(dataset: str, revision: str | None, instead: str) -> str:
    """Return the commit of a dataset, or the digest of a local folder's files and their names, which say what
    split they are.

    The newest commit if `revision` is None; cached for all later calls. OSError, with the alternatives
    without a network (`instead`), if the hub cannot be reached, or has no such dataset or revision.
    """
    if folder := local(dataset):
        files = below(folder)
        return key_of(digest(files), [str(file.relative_to(folder)) for file in files])
    asked = partial(latest_commit, "dataset", dataset, revision, instead)
    return remembered(key_of("dataset", dataset, revision), asked)


def commit_of(kind: Literal["tokenizer", "model"], name: str, instead: str) -> str:
    """Return the commit of a model or its tokeniser on the hub, cached after the first request.

    OSError if the hub cannot be reached, or has no such model.
    """
    return remembered(key_of(kind, name), partial(latest_commit, kind, name, None, instead))


def tokenizer_file(name: str, instead: str) -> Path:
    """Return the path of the downloaded `tokenizer.json` of a model on the hub. OSError if there is none."""
    commit = commit_of("tokenizer", name, instead)
    with _as_os_error(f"tokenizer {name}: its tokenizer.json cannot be fetched"):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, "tokenizer.json", revision=commit))


def rows(dataset: str, config: str | None, split: str, commit: str) -> Iterator[dict[str, object]]:
    """Yield the rows of a split, streamed, at a commit from `version`. OSError if they cannot be read."""
    quiet()
    try:
        import datasets as library
    except ImportError:
        raise OSError(f"dataset {dataset}: the library that reads it is not installed: {_EXTRA}") from None
    library.disable_progress_bars()
    with _as_os_error(f"dataset {dataset}, split {split}: cannot be read"):
        folder = local(dataset)
        yield from library.load_dataset(
            str(folder or dataset), config, split=split, streaming=True, revision=None if folder else commit
        )


def latest_commit(kind: str, name: str, revision: str | None, instead: str) -> str:
    quiet()
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    hub = redact(constants.ENDPOINT)
    request = HfApi().dataset_info if kind == "dataset" else HfApi().model_info
    try:
        return request(name, revision=revision, timeout=_SECONDS).sha or ""
    except RevisionNotFoundError:
        raise OSError(f"{kind} {name}: {hub} has no revision {revision} of it") from None
    except RepositoryNotFoundError:
        raise OSError(
            f"{kind} {name}: {hub} has none of that name, or it is private (HF_TOKEN); {instead}"
        ) from None
    except Exception as error:
        malformed = isinstance(error, HFValidationError)
        why = f"not a name on {hub}" if malformed else f"{hub} cannot be reached"
        raise OSError(f"{kind} {name}: {why} ({redact(first_line(error))}); {instead}") from None


def quiet() -> None:
    """Disable the library's telemetry, even if it has been imported already."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    from huggingface_hub import constants

    constants.HF_HUB_DISABLE_TELEMETRY = True


@contextmanager
def _as_os_error(message: str) -> Iterator[None]:
    """Inside this context, turn any exception of the library into an OSError of one sentence."""
    try:
        yield
    except Exception as error:
        raise OSError(f"{message}: {redact(first_line(error))}") from error
