"""Description of a source of data for people: its name, its location as configured, and its size."""

from typing import Any

from ablate.errors import redact
from ablate.training.data import hub
from ablate.training.data.corpus import Corpus, HubText, Prepared, Shards, Source, Text, open_corpus
from ablate.training.data.images import (
    Cifar10,
    Cifar100,
    Folder,
    HubImages,
    ImageSet,
    ImageSource,
    open_images,
)

_IMAGES = (Cifar10, Cifar100, Folder, HubImages)
_LOCATION = {
    Shards: "train",
    Text: "text",
    Prepared: "prepared",
    Cifar10: "cifar10",
    Cifar100: "cifar100",
    Folder: "folder",
}
"""Field of a local source that has its path."""
KINDS = (str, HubText, HubImages, *_LOCATION)
"""Types of the sources that `facts` describes."""


def facts(source: Source | ImageSource) -> dict[str, Any]:
    """Return a description of a source, in plain values and without passwords.

    Returns:
        `name`; `type` (`local`, `hugging_face` or `package`); `source`, its location; `columns` with their
        types; `counts`.

    Raises:
        OSError, ValueError: the data cannot be opened; see `open_corpus` and `open_images`.
    """
    images = isinstance(source, _IMAGES) or source in ("digits", "photos")
    name, kind, location = _location(source)
    described = _of_images(open_images(source)) if images else _of_corpus(open_corpus(source))
    return {
        "name": redact(name),
        "type": kind,
        "source": {key: redact(value) for key, value in location.items() if value},
    } | described


def _location(source: Source | ImageSource) -> tuple[str, str, dict[str, str | None]]:
    """Return name, type and location of a source."""
    if isinstance(source, str):
        return source, "package", {"name": source}
    if isinstance(source, HubText | HubImages):
        if hub.local(source.dataset):
            return source.dataset, "local", {"uri": source.dataset, "split": source.split}
        commit = hub.version(source.dataset, source.revision, "")
        return (
            source.dataset,
            "hugging_face",
            {"path": source.dataset, "config_name": source.config, "split": source.split, "revision": commit},
        )
    path = getattr(source, _LOCATION[type(source)])
    return path, "local", {"uri": path}


def _of_corpus(corpus: Corpus) -> dict[str, Any]:
    counts = {
        "train tokens": len(corpus.train),
        "validation tokens": len(corpus.val),
        "vocabulary": corpus.vocab,
    }
    if corpus.bytes_per_token:
        counts["bytes per token"] = round(corpus.bytes_per_token, 4)
    return {"columns": {"token": f"integer from 0 to {corpus.vocab - 1}"}, "counts": counts}


def _of_images(images: ImageSet) -> dict[str, Any]:
    channels, height, width = images.shape
    return {
        "columns": {
            "image": f"uint8, {channels} x {height} x {width}",
            "label": f"integer from 0 to {images.classes - 1}",
        },
        "counts": {
            "train images": len(images.train),
            "validation images": len(images.val),
            "classes": images.classes,
        },
    }
