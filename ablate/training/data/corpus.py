"""Text as tokens: opens each source of text as a `Corpus`, tokenising it if that has not been done yet, and
describes it for people (`facts`)."""

import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypedDict

import numpy as np

from ablate.cache import kept, root
from ablate.errors import redact
from ablate.files import user_path
from ablate.training.data import documents, hub, jobs, prepared, shards
from ablate.training.data.shards import Tokens
from ablate.training.data.sources import HubText, PreparedText, Shards, TextFiles, TextSource

_EXCLUDED = {
    *("test", "tests", "site-packages", "dist-packages", "__pycache__"),
    *("idlelib", "lib2to3", "ensurepip", "turtledemo"),
}
_VALIDATION_SHARE = 10
_NOTICE_BYTES = 1 << 25
"""Bytes of text after which a notice is printed, since more takes many seconds."""


@dataclass(frozen=True)
class Corpus:
    """Token ids as two flat integer arrays, memory-mapped if they are in files."""

    train: Tokens
    val: Tokens
    vocab: int
    fingerprint: str
    bytes_per_token: float | None

    def unigram_entropy(self) -> float:
        """Return the loss of a model that ignores context, in nats per token.

        It is the cross-entropy of the validation text under the training text's token frequencies with
        add-one smoothing, both from their first 2^24 tokens. ValueError for an id beyond the vocabulary.
        """
        counts = np.bincount(self.train[: 1 << 24], minlength=self.vocab) + 1
        validation = np.bincount(self.val[: 1 << 24], minlength=self.vocab)
        largest = max(len(counts), len(validation)) - 1
        if largest >= self.vocab:
            raise ValueError(f"token id {largest} in the data is beyond the vocabulary of {self.vocab}")
        return float(-(validation * np.log(counts / counts.sum())).sum() / validation.sum())


def open_corpus(source: TextSource) -> Corpus:
    """Open a source of text, tokenising it if that has not been done yet. Cached by source in this process.

    That ids are in [0, vocab) is checked on samples. OSError if a file is missing or cannot be read, or the
    hub cannot be reached; ValueError if the content is damaged, is not text, has ids beyond the vocabulary,
    or is too short.
    """
    return _opened(source)  # whose cache would hide the type of the source from the type checker


@cache
def _opened(source: TextSource) -> Corpus:
    match source:
        case "stdlib":
            library = Path(sysconfig.get_paths()["stdlib"])
            instead = "use token shards: data: {train: ..., val: ...}"
            missing = f"no source files of the standard library under {library}; {instead}"
            return _of_bytes(_stdlib(library), missing)
        case "prose":
            folder = scikit_datasets() / "descr"
            missing = f"no description of a data set under {folder}; use data: stdlib, or text of yours"
            return _of_bytes(_prose(folder), missing)
        case Shards():
            digest = hashlib.sha256(f"{source.vocab}".encode())
            train, val = (
                shards.opened(documents.named([pattern]), source.dtype, source.vocab, digest, whole=True)
                for pattern in (source.train, source.val)
            )
            return Corpus(train, val, source.vocab, digest.hexdigest()[:16], source.bytes_per_token)
        case TextFiles():
            held = [source.val] if source.val else None
            job = jobs.of_files([source.text], held, source.column, source.val_fraction)
            return _made(replace(job, tokenizer=source.tokenizer), f"the text {source.text}")
        case HubText():
            return _made(jobs.of_dataset(source), f"dataset {source.dataset}")
        case PreparedText():
            return _of_folder(user_path(source.prepared))


def _of_bytes(files: Iterable[tuple[str, bytes, int]], missing: str) -> Corpus:
    """Return files as a corpus of bytes: name and content of each, and how many of its first bytes train.

    The others validate. ValueError with the message `missing` if there is no file.
    """
    digest = hashlib.sha256()
    parts: tuple[list[bytes], list[bytes]] = [], []
    for name, content, trained in files:
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
        parts[0].append(content[:trained])
        parts[1].append(content[trained:])
    if not parts[0]:
        raise ValueError(missing)
    train, val = (np.frombuffer(b"".join(part), dtype=np.uint8) for part in parts)
    return Corpus(train, val, 256, digest.hexdigest()[:16], bytes_per_token=1.0)


def _stdlib(library: Path) -> Iterator[tuple[str, bytes, int]]:
    """Yield the source files of Python's standard library, of which every tenth validates."""
    names: list[str] = []
    for folder, inner, files in os.walk(library):
        inner[:] = [name for name in inner if name not in _EXCLUDED]
        paths = (Path(folder, name) for name in files if name.endswith(".py"))
        names += [path.relative_to(library).as_posix() for path in paths]
    for name in sorted(names):
        content = (library / name).read_bytes()
        held = hashlib.sha256(name.encode()).digest()[0] % _VALIDATION_SHARE == 0
        yield name, content, 0 if held else len(content)


def scikit_datasets() -> Path:
    """Return scikit-learn's folder of data files, without importing it, which takes seconds. OSError if it is
    not installed."""
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise OSError("scikit-learn is not installed, which brings this data: `pip install scikit-learn`")
    return Path(package.submodule_search_locations[0], "datasets")


def _prose(folder: Path) -> Iterator[tuple[str, bytes, int]]:
    """Yield scikit-learn's descriptions of its data, 40 kB of English; the last tenth of each validates."""
    for path in sorted(folder.glob("*.rst")):
        content = path.read_bytes()
        yield path.name, content, len(content) - len(content) // _VALIDATION_SHARE


def _made(job: jobs.Job, name: str) -> Corpus:
    """Return the corpus in the cache under the job's key; make it if it is absent, with a notice if slow."""
    seen = 0

    def progress(activity: str, size: int) -> None:
        nonlocal seen
        if seen <= _NOTICE_BYTES < seen + size:
            print(f"{activity} of {name}, once: the result is kept in {root()}", file=sys.stderr, flush=True)
        seen += size

    def fill(folder: Path) -> None:
        prepared.prepare(folder, replace(job, progress=progress))

    return _of_folder(kept("corpora", job.key, fill))


def _of_folder(folder: Path) -> Corpus:
    about, train, val = prepared.read(folder)
    return Corpus(train, val, about.vocab, about.fingerprint, about.bytes_per_token)


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
