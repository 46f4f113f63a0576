"""Description of a source of data for people: its name, its location as configured, and its size."""

from typing import TypedDict

from ablate.errors import redact
from ablate.training.data import hub
from ablate.training.data.corpus import (
    Corpus,
    HubText,
    PreparedText,
    Shards,
    TextFiles,
    TextSource,
    open_corpus,
)
from ablate.training.data.images import (
    Cifar10,
    Cifar100,
    Folder,
    HubImages,
    ImageSet,
    ImageSource,
    open_images,
)

_LOCATION = {
    Shards: "train",
    TextFiles: "text",
    PreparedText: "prepared",
    Cifar10: "cifar10",
    Cifar100: "cifar100",
    Folder: "folder",
}
"""Field of a local source that has its path."""
KINDS = (str, HubText, HubImages, *_LOCATION)
"""Types of the sources that `facts` describes."""


class Content(TypedDict):
    """Columns and size of a source of data."""

    columns: dict[str, str]
    """Types of the columns, as text."""
    counts: dict[str, float]
    """Numbers of tokens or images, of ids or classes, and bytes per token."""


class DataFacts(Content):
    """Description of a source of data, without passwords."""

    name: str
    type: str
    """`local`, `hugging_face` or `package`."""
    source: dict[str, str]
    """Location of the data."""


def facts(source: TextSource | ImageSource) -> DataFacts:
    """Return the description of a source.

    Args:
        source: a source of text or images. Its data are opened, and tokenised or decoded if they were not
            yet.

    Raises:
        OSError: the data cannot be read; see `open_corpus` and `open_images`.
        ValueError: the data are damaged.
    """
    name, kind, location = _location(source)
    described = _content(source)
    return {
        "name": redact(name),
        "type": kind,
        "source": {key: redact(value) for key, value in location.items() if value},
        **described,
    }


def _location(source: TextSource | ImageSource) -> tuple[str, str, dict[str, str | None]]:
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


def _content(source: TextSource | ImageSource) -> Content:
    match source:
        case "digits" | "photos" | Cifar10() | Cifar100() | Folder() | HubImages():
            return _of_images(open_images(source))
        case _:
            return _of_corpus(open_corpus(source))


def _of_corpus(corpus: Corpus) -> Content:
    counts: dict[str, float] = {
        "train tokens": len(corpus.train),
        "validation tokens": len(corpus.val),
        "vocabulary": corpus.vocab,
    }
    if corpus.bytes_per_token:
        counts["bytes per token"] = round(corpus.bytes_per_token, 4)
    return {"columns": {"token": f"integer from 0 to {corpus.vocab - 1}"}, "counts": counts}


def _of_images(images: ImageSet) -> Content:
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
