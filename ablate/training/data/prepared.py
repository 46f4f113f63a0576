"""A folder of prepared text: token shards, their tokenizer.json, and data.json, which describes them.

Written once, and read on any machine.
"""

import hashlib
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from ablate import cache
from ablate.files import write
from ablate.numerics.spec import Spec
from ablate.training.data import shards
from ablate.training.data.jobs import Job
from ablate.training.data.shards import Joined
from ablate.training.data.tokenisers import FILE, open_tokeniser

ABOUT = "data.json"
_PIECES = 256


class SplitAbout(Spec):
    """The shards of a split."""

    tokens: int = Field(ge=1)
    bytes: int = Field(ge=0)
    """Bytes of text."""
    documents: int = Field(ge=0)
    shards: tuple[str, ...] = Field(min_length=1, strict=False)


class About(Spec):
    """The content of data.json."""

    format: int = Field(1, ge=1, le=1)
    source: dict[str, object]
    """The text as its user named it; of a dataset on a hub, its commit too."""
    tokenizer: str
    vocab: int = Field(gt=1)
    separator: int | None
    bytes_per_token: float = Field(gt=0)
    """Mean over the validation text."""
    train: SplitAbout
    val: SplitAbout
    fingerprint: str
    """Hash of all tokens."""
    sample: str
    """Hash of windows of the tokens, by which `read` checks in milliseconds that the shards are unchanged."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.separator is not None and not 0 <= self.separator < self.vocab:
            raise ValueError(f"separator {self.separator} is not one of {self.vocab} tokens")
        if self.bytes_per_token != mean_bytes(self.tokenizer, self.val.bytes, self.val.tokens):
            raise ValueError(f"bytes_per_token {self.bytes_per_token} is not that of val")
        return self


def mean_bytes(tokenizer: str, size: int, tokens: int) -> float:
    """Return the mean bytes of a token of validation text. With `bytes` each is one, the separator too."""
    return 1.0 if tokenizer == "bytes" else size / tokens


def prepare(folder: Path, job: Job) -> About:
    """Tokenise a text into an empty folder, and return the content of its data.json.

    OSError if the text or the tokeniser cannot be read. ValueError if the text is damaged or too short, or
    the tokeniser cannot encode it.
    """
    tokeniser = open_tokeniser(job.tokenizer, job.training)
    train, val = (shards.Writer(folder, name, tokeniser.dtype, job.shard_tokens) for name in ("train", "val"))
    stream = job.split()
    while batch := list(islice(stream, _PIECES)):
        for (held, piece), ids in zip(batch, tokeniser.encode([piece for _, piece in batch]), strict=True):
            writer = val if held else train
            if piece.first and tokeniser.separator is not None:
                ids = np.concatenate([[tokeniser.separator], ids])
            writer.add(ids if held or job.tokens is None else ids[: job.tokens - train.tokens])
            writer.bytes += len(piece.content)
            writer.documents += piece.first
        job.progress("writing tokens", sum(len(piece.content) for _, piece in batch))
        if job.tokens and train.tokens >= job.tokens:
            break
    digest = hashlib.sha256(f"{tokeniser.vocab}".encode())
    for part in (train, val):
        digest.update(part.close().encode())
        if not part.tokens:
            raise ValueError(
                f"nothing is left to validate on: the text is {train.documents} document;"
                " give more, or a validation text of its own"
                if train.tokens
                else "there is no text: the files are empty"
            )
    (folder / FILE).write_text(tokeniser.json, encoding="utf-8")
    parts = [
        SplitAbout(tokens=part.tokens, bytes=part.bytes, documents=part.documents, shards=tuple(part.names))
        for part in (train, val)
    ]
    result = About(
        source=dict(job.source),
        tokenizer=tokeniser.word,
        vocab=tokeniser.vocab,
        separator=tokeniser.separator,
        bytes_per_token=mean_bytes(tokeniser.word, val.bytes, val.tokens),
        train=parts[0],
        val=parts[1],
        fingerprint=digest.hexdigest()[:16],
        sample=_sampled(folder, parts, tokeniser.vocab)[1],
    )
    write(folder / ABOUT, result.model_dump(mode="json"))
    return result


def about(folder: Path) -> About:
    """Return the content of a folder's data.json. OSError if there is none, ValueError if it is damaged."""
    path = folder / ABOUT
    if not path.is_file():
        raise OSError(
            f"{folder}: no {ABOUT} there; `ablate data prepare TEXT --out {folder}` writes such a folder"
        )
    try:
        return About.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"]))
        why = ": ".join(filter(None, (field, problem["msg"].removeprefix("Value error, "))))
        raise ValueError(f"{path}: not as `ablate data prepare` writes it: {why}") from None


def read(folder: Path) -> tuple[About, Joined, Joined]:
    """Return a folder's data.json, its training ids and its validation ids.

    OSError if a file is missing. ValueError if one is damaged, or not a shard that data.json describes.
    """
    described = about(folder)
    parts = described.train, described.val
    texts, sample = _sampled(folder, parts, described.vocab)

    def fingerprint() -> str:
        digest = hashlib.sha256(f"{described.vocab}".encode())
        for text in texts:
            digest.update(text.digest().encode())
        return digest.hexdigest()[:16]

    def key() -> str:  # another one when a shard changes
        content = cache.digest([folder / name for part in parts for name in part.shards])
        return cache.key_of("tokens", described.vocab, [len(part.shards) for part in parts], content)

    if (
        sample != described.sample
        or [*map(len, texts)] != [part.tokens for part in parts]
        or cache.remembered(key(), fingerprint) != described.fingerprint
    ):
        raise ValueError(f"{folder}: its shards are not those that {ABOUT} describes; prepare the text again")
    return described, texts[0], texts[1]


def _sampled(folder: Path, parts: Sequence[SplitAbout], vocab: int) -> tuple[list[Joined], str]:
    digest, texts = hashlib.sha256(), []
    for part in parts:
        paths = [folder / name for name in part.shards]
        for path, name in zip(paths, part.shards, strict=True):
            if not path.is_file() or path.parent != folder:
                raise OSError(f"{folder}: {name} is missing, which {ABOUT} lists")
        texts.append(shards.opened(paths, "uint16", vocab, digest))
    return texts, digest.hexdigest()[:16]
