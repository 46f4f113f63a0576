"""Description of a source of data for people: its name, its location as configured, and its size."""

from typing import TypedDict

from ablate.errors import redact
from ablate.training.data import hub, images, sources
from ablate.training.data.corpus import open_corpus
from ablate.training.data.images import Cifar10, Cifar100, Folder, HubImages, ImageSource, open_images
from ablate.training.data.sources import HubText, TextSource

KINDS = (str, *sources.KINDS.values(), *images.KINDS.values())
"""Types of the sources that `facts` describes."""


class DataFacts(TypedDict):
    """Description of a source of data, without passwords, as the ledger stores it."""

    name: str
    type: str
    """`local`, `hugging_face` or `package`."""
    source: dict[str, str]
    """Location of the data."""
    columns: dict[str, str]
    """Types of the columns, as text."""
    counts: dict[str, float]
    """Numbers of tokens or images, of ids or classes, and bytes per token."""


def facts(source: TextSource | ImageSource) -> DataFacts:
    """Return the description of a source, whose data are opened, and tokenised or decoded if not done yet.

    OSError and ValueError as of `open_corpus` and `open_images`.
    """
    name, kind, location = _location(source)
    counts: dict[str, float]
    match source:
        case "digits" | "photos" | Cifar10() | Cifar100() | Folder() | HubImages():
            images = open_images(source)
            form, classes = " x ".join(map(str, images.shape)), images.classes
            columns = {"image": f"uint8, {form}", "label": f"integer from 0 to {classes - 1}"}
            counts = {"train images": len(images.train), "validation images": len(images.val)}
            counts |= {"classes": classes}
        case _:
            corpus = open_corpus(source)
            columns = {"token": f"integer from 0 to {corpus.vocab - 1}"}
            counts = {"train tokens": len(corpus.train), "validation tokens": len(corpus.val)}
            counts |= {"vocabulary": corpus.vocab}
            if corpus.bytes_per_token:
                counts["bytes per token"] = round(corpus.bytes_per_token, 4)
    return {
        "name": redact(name),
        "type": kind,
        "source": {key: redact(value) for key, value in location.items() if value},
        "columns": columns,
        "counts": counts,
    }


def _location(source: TextSource | ImageSource) -> tuple[str, str, dict[str, str | None]]:
    if isinstance(source, str):
        return source, "package", {"name": source}
    if not isinstance(source, HubText | HubImages):
        path = getattr(source, source.PATHS[0])
        return path, "local", {"uri": path}
    if hub.local(source.dataset):
        return source.dataset, "local", {"uri": source.dataset, "split": source.split}
    commit = hub.version(source.dataset, source.revision, "")
    named = {"path": source.dataset, "config_name": source.config, "split": source.split, "revision": commit}
    return source.dataset, "hugging_face", named
