"""A folder of prepared text: token shards, their tokenizer.json, and data.json, which says what they are. Written once, read anywhere."""

import hashlib
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, ValidationError

from ablate.files import write
from ablate.numerics.spec import Spec
from ablate.training.data import shards
from ablate.training.data.documents import Piece
from ablate.training.data.jobs import Job
from ablate.training.data.shards import Tokens
from ablate.training.data.tokenisers import FILE, Tokeniser, open_tokeniser

ABOUT = "data.json"
_PIECES = 256


class Part(Spec):
    """What the shards of a split hold."""

    tokens: int = Field(ge=1)
    bytes: int
    """Of text."""
    documents: int
    shards: tuple[str, ...] = Field(min_length=1, strict=False)


class About(Spec):
    """What data.json says."""

    format: int = Field(1, ge=1, le=1)
    source: dict[str, Any]
    """What was prepared, as it was named; of a dataset on a hub the commit too."""
    tokenizer: str
    vocab: int = Field(gt=1)
    separator: int | None
    bytes_per_token: float = Field(gt=0)
    """Of the validation text."""
    train: Part
    val: Part
    fingerprint: str
    """Of all tokens."""
    sample: str
    """Of windows of them: whether the shards are those that were written is found out in milliseconds."""


def prepare(folder: Path, job: Job) -> About:
    """Write the shards, the tokeniser and what they are into an empty folder. OSError or ValueError in one sentence."""
    tokeniser = open_tokeniser(job.tokenizer, job.training)
    parts = {
        name: _Part(shards.Writer(folder, name, tokeniser.dtype, job.shard_tokens))
        for name in ("train", "val")
    }
    stream = job.split()
    while batch := list(islice(stream, _PIECES)):
        for (held, piece), ids in zip(batch, tokeniser.encode([piece for _, piece in batch]), strict=True):
            parts["val" if held else "train"].add(
                piece, ids, tokeniser.separator, None if held else job.tokens
            )
        job.progress("writing tokens", sum(len(piece.content) for _, piece in batch))
        if job.tokens and parts["train"].writer.tokens >= job.tokens:
            break
    digest = hashlib.sha256(f"{tokeniser.vocab}".encode())
    for name, part in parts.items():
        digest.update(part.writer.close().encode())
        if not part.writer.tokens:
            raise ValueError(_too_little(name, parts["train"].documents))
    (folder / FILE).write_text(tokeniser.json, encoding="utf-8")
    told = _about(folder, job, tokeniser, parts["train"].told, parts["val"].told, digest.hexdigest()[:16])
    write(folder / ABOUT, told.model_dump(mode="json"))
    return told


def _too_little(name: str, documents: int) -> str:
    if name == "train":
        return "there is no text: the files are empty"
    return f"nothing is left to validate on: the text is {documents} document; give more, or a validation text of its own"


class _Part:
    """One split while it is written."""

    def __init__(self, writer: shards.Writer) -> None:
        self.writer, self.bytes, self.documents = writer, 0, 0

    def add(self, piece: Piece, ids: np.ndarray, separator: int | None, most: int | None) -> None:
        """Append a piece, as far as there are not more than `most` tokens then. What begins a document comes after the separator."""
        if piece.first and separator is not None:
            ids = np.concatenate([[separator], ids])
        self.writer.add(ids[: None if most is None else most - self.writer.tokens])
        self.bytes += len(piece.content)
        self.documents += piece.first

    @property
    def told(self) -> Part:
        """What was written."""
        return Part(
            tokens=self.writer.tokens,
            bytes=self.bytes,
            documents=self.documents,
            shards=tuple(self.writer.names),
        )


def _about(folder: Path, job: Job, tokeniser: Tokeniser, train: Part, val: Part, fingerprint: str) -> About:
    return About(
        source=job.source,
        tokenizer=tokeniser.word,
        vocab=tokeniser.vocab,
        separator=tokeniser.separator,
        bytes_per_token=1.0
        if tokeniser.word == "bytes"
        else val.bytes / val.tokens,  # of bytes the separator is one too
        train=train,
        val=val,
        fingerprint=fingerprint,
        sample=_sampled(folder, (train, val), tokeniser.vocab)[1],
    )


def about(folder: Path) -> About:
    """What a folder says that it holds. OSError or ValueError in one sentence."""
    path = folder / ABOUT
    if not path.is_file():
        raise OSError(
            f"{folder}: no {ABOUT} there; `ablate data prepare TEXT --out {folder}` writes such a folder"
        )
    try:
        return About.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ValueError(
            f"{path}: not as `ablate data prepare` writes it: {where}: {problem['msg']}"
        ) from None


def read(folder: Path) -> tuple[About, Tokens, Tokens]:
    """What a folder holds: all that is said of it, and the ids to train on and to validate on. OSError or ValueError in one sentence."""
    told = about(folder)
    (train, val), sample = _sampled(folder, (told.train, told.val), told.vocab)
    if sample != told.sample or (len(train), len(val)) != (told.train.tokens, told.val.tokens):
        raise ValueError(f"{folder}: its shards are not those that {ABOUT} tells of; prepare the text again")
    return told, train, val


def _sampled(folder: Path, parts: tuple[Part, Part], vocab: int) -> tuple[list[Tokens], str]:
    """The ids of both parts, and the hash of windows of them."""
    digest, found = hashlib.sha256(), []
    for part in parts:
        arrays = []
        for name in part.shards:
            path = folder / name
            if not path.is_file() or path.parent != folder:
                raise OSError(f"{folder}: {name} is missing, of which {ABOUT} tells")
            arrays.append(shards.read(path, "uint16"))
            shards.check_and_digest(arrays[-1], vocab, digest)
        found.append(shards.joined(arrays))
    return found, digest.hexdigest()[:16]
