"""Description of a source of data for people: its name, its location as configured, and its size."""

from typing import TypedDict

from ablate.errors import redact
from ablate.training.data import hub
from ablate.training.data.corpus import open_corpus
from ablate.training.data.sources import HubText, TextSource


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
    """Numbers of tokens and of ids, and bytes per token."""


def facts(source: TextSource) -> DataFacts:
    """Return the description of a source, whose data are opened, and tokenised if not done yet.

    OSError and ValueError as of `open_corpus`.
    """
    name, kind, location = _location(source)
    corpus = open_corpus(source)
    counts = {"train tokens": float(len(corpus.train)), "validation tokens": float(len(corpus.val))}
    counts["vocabulary"] = corpus.vocab
    if corpus.bytes_per_token:
        counts["bytes per token"] = round(corpus.bytes_per_token, 4)
    columns = {"token": f"integer from 0 to {corpus.vocab - 1}"}
    return {
        "name": redact(name),
        "type": kind,
        "source": {key: redact(value) for key, value in location.items() if value},
        "columns": columns,
        "counts": counts,
    }


def _location(source: TextSource) -> tuple[str, str, dict[str, str | None]]:
    if isinstance(source, str):
        return source, "package", {"name": source}
    if not isinstance(source, HubText):
        path = getattr(source, source.PATHS[0])
        return path, "local", {"uri": path}
    if hub.local(source.dataset):
        return source.dataset, "local", {"uri": source.dataset, "split": source.split}
    commit = hub.version(source.dataset, source.revision, "")
    named = {"path": source.dataset, "config_name": source.config, "split": source.split, "revision": commit}
    return source.dataset, "hugging_face", named
