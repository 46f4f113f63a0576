"""Text as tokens: Python's standard library, token shards, text files, prepared folders, hub datasets."""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import AfterValidator, Field, Tag

from ablate.cache import digest as file_digest
from ablate.cache import kept, root
from ablate.numerics.spec import Spec
from ablate.training.data import documents, jobs, prepared, shards
from ablate.training.data.kinds import either
from ablate.training.data.scikit import scikit_datasets
from ablate.training.data.shards import Tokens
from ablate.training.data.tokenisers import checked

_EXCLUDED = {
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "turtledemo",
}
_VALIDATION_SHARE = 10
_NOTICE_BYTES = 1 << 25
"""Bytes of text after which a notice is printed, since more takes many seconds."""

Tokenizer = Annotated[str, AfterValidator(checked)]
"""`bytes`; `bpe:N`, trained on the text itself; the path of a tokenizer.json; a model's name on the hub."""
ValFraction = Annotated[float, Field(gt=0, lt=1)]


class Shards(Spec):
    """Token files: llm.c's `.bin` (with a header) or nanoGPT's (raw ids). Paths may be globs."""

    places: ClassVar[frozenset[str]] = frozenset({"train", "val"})
    PATHS: ClassVar[tuple[str, ...]] = ("train", "val")
    train: str
    val: str
    vocab: int = Field(gt=1, le=1 << 20)
    dtype: Literal["uint16", "uint32"] = "uint16"
    """Type of the ids in files without a header."""
    bytes_per_token: float | None = Field(None, gt=0)
    """Mean number of bytes of text in a token; if given, val/bits_per_byte is recorded."""


class TextFiles(Spec):
    """Text files, JSON lines or Parquet; paths may be globs. Tokenised when first opened, and kept."""

    places: ClassVar[frozenset[str]] = frozenset({"text", "val", "column", "tokenizer", "val_fraction"})
    PATHS: ClassVar[tuple[str, ...]] = ("text", "val")
    NAMES: ClassVar[tuple[str, ...]] = ("tokenizer",)
    text: str
    val: str | None = None
    """null: a part of the text, whole documents, is held out."""
    column: str = "text"
    """Name of the column of documents in JSON lines or Parquet."""
    tokenizer: Tokenizer = "bytes"
    val_fraction: ValFraction = 0.01


class HubText(Spec):
    """A dataset by its name on the Hugging Face hub, or a local folder in a layout that `datasets` reads.

    Streamed once, and its tokens are kept in the cache.
    """

    places: ClassVar[frozenset[str]] = frozenset(
        {
            "dataset",
            "config",
            "split",
            "val_split",
            "revision",
            "column",
            "tokenizer",
            "tokens",
            "val_fraction",
        }
    )
    NAMES: ClassVar[tuple[str, ...]] = ("dataset", "tokenizer")
    dataset: str
    config: str | None = None
    split: str = "train"
    val_split: str | None = None
    """null: a part of the documents is held out."""
    revision: str | None = None
    """A commit, tag or branch; null: the newest commit when the text is first fetched here."""
    column: str = "text"
    tokenizer: Tokenizer = "bytes"
    tokens: int = Field(10_000_000, ge=1000)
    """Largest number of training tokens."""
    val_fraction: ValFraction = 0.01


class PreparedText(Spec):
    """A folder that `ablate data prepare` wrote."""

    places: ClassVar[frozenset[str]] = frozenset({"prepared"})
    PATHS: ClassVar[tuple[str, ...]] = ("prepared",)
    prepared: str


_KINDS = {"train": Shards, "text": TextFiles, "dataset": HubText, "prepared": PreparedText}
TextSource = Annotated[
    Annotated[Literal["stdlib", "prose"], Tag("word")]
    | Annotated[Shards, Tag("train")]
    | Annotated[TextFiles, Tag("text")]
    | Annotated[HubText, Tag("dataset")]
    | Annotated[PreparedText, Tag("prepared")],
    either(("stdlib", "prose"), _KINDS),
]


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
    """Open a source of text, tokenising it if that has not been done yet.

    Args:
        source: `stdlib`, `prose`, or the description of shards, text files, a dataset or a prepared folder.

    Returns:
        The corpus. That its ids are in [0, vocab) is checked on samples. Cached by source in this process.

    Raises:
        OSError: a file is missing or cannot be read, or the hub cannot be reached.
        ValueError: the content is damaged, is not text, has ids beyond the vocabulary, or is too short.
    """
    match source:
        case "stdlib":
            return _stdlib()
        case "prose":
            return _prose()
        case Shards():
            return _shards(source)
        case TextFiles():
            return _text(source)
        case HubText():
            return _dataset(source)
        case PreparedText():
            return _prepared(source)


@cache
def _stdlib() -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(_sources(root))
    if not names:
        raise ValueError(
            f"no source files of the standard library under {root};"
            " use token shards: data: {train: ..., val: ...}"
        )
    digest = hashlib.sha256()
    split: tuple[list[bytes], list[bytes]] = [], []
    for name in names:
        content = (root / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
        split[hashlib.sha256(name.encode()).digest()[0] % _VALIDATION_SHARE == 0].append(content)
    train, val = (np.frombuffer(b"".join(files), dtype=np.uint8) for files in split)
    return Corpus(train, val, 256, digest.hexdigest()[:16], bytes_per_token=1.0)


@cache
def _prose() -> Corpus:
    """Open scikit-learn's descriptions of its data, 40 kB of English; the last tenth of each validates."""
    root = scikit_datasets() / "descr"
    digest = hashlib.sha256()
    train: list[bytes] = []
    val: list[bytes] = []
    for path in sorted(root.glob("*.rst")):
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
        held = len(content) // _VALIDATION_SHARE
        train.append(content[:-held])
        val.append(content[-held:])
    if not train:
        raise ValueError(f"no description of a data set under {root}; use data: stdlib, or text of yours")
    parts = [np.frombuffer(b"".join(files), dtype=np.uint8) for files in (train, val)]
    return Corpus(parts[0], parts[1], 256, digest.hexdigest()[:16], bytes_per_token=1.0)


def _sources(root: Path) -> Iterator[str]:
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in _EXCLUDED]
        yield from (
            (Path(folder) / name).relative_to(root).as_posix() for name in files if name.endswith(".py")
        )


@cache
def _shards(source: Shards) -> Corpus:
    digest = hashlib.sha256(f"{source.vocab}".encode())

    def opened(pattern: str) -> Tokens:
        parts = [shards.read(path, source.dtype) for path in documents.named([pattern])]
        for part in parts:
            shards.check_and_digest(part, source.vocab, digest)
            if shards.sampled_in_part(part):
                digest.update(file_digest([part.path]).encode())
        return shards.joined(parts)

    train, val = opened(source.train), opened(source.val)
    return Corpus(train, val, source.vocab, digest.hexdigest()[:16], source.bytes_per_token)


@cache
def _text(source: TextFiles) -> Corpus:
    job = jobs.of_files(
        [source.text],
        [source.val] if source.val else None,
        source.column,
        source.val_fraction,
        tokenizer=source.tokenizer,
    )
    return _made(job, f"the text {source.text}")


@cache
def _dataset(source: HubText) -> Corpus:
    return _made(jobs.of_dataset(**source.model_dump()), f"dataset {source.dataset}")


def _made(job: jobs.Job, name: str) -> Corpus:
    """Return the corpus in the cache under the job's key, made if it is not there.

    Prints a notice if that takes long.
    """
    seen = 0

    def progress(activity: str, size: int) -> None:
        nonlocal seen
        if seen <= _NOTICE_BYTES < seen + size:
            print(f"{activity} of {name}, once: the result is kept in {root()}", file=sys.stderr, flush=True)
        seen += size

    def fill(folder: Path) -> None:
        prepared.prepare(folder, replace(job, progress=progress))

    return _folder(kept("corpora", job.key, fill))


@cache
def _prepared(source: PreparedText) -> Corpus:
    return _folder(Path(source.prepared).expanduser())


def _folder(folder: Path) -> Corpus:
    about, train, val = prepared.read(folder)
    return Corpus(train, val, about.vocab, about.fingerprint, about.bytes_per_token)
