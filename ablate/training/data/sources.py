"""Sources of text as an experiment names them: a word, token shards, text files, a prepared folder, a hub.

Their paths are made absolute (`located`), and left out of a trial's identity (`without_places`).
"""

import os
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Discriminator, Field, Tag

from ablate.files import Json, user_path
from ablate.numerics.spec import Spec
from ablate.training.data.tokenisers import kind

T = TypeVar("T")

Tokenizer = Annotated[str, AfterValidator(lambda word: kind(word) and word)]
"""`bytes`; `bpe:N`, trained on the text itself; the path of a tokenizer.json; a model's name on the hub."""
ValFraction = Annotated[float, Field(gt=0, lt=1)]


class Shards(Spec):
    """Token files: llm.c's `.bin` (with a header) or nanoGPT's (raw ids). Paths may be globs."""

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

    BY_CONTENT: ClassVar[bool] = True
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

    BY_CONTENT: ClassVar[bool] = True
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

    PATHS: ClassVar[tuple[str, ...]] = ("prepared",)
    prepared: str


KINDS: dict[str, type[Spec]] = {
    "train": Shards,
    "text": TextFiles,
    "dataset": HubText,
    "prepared": PreparedText,
}
"""Classes of sources by a field that only they have, which is the tag of their kind."""


def _kind_of(value: object) -> str | None:
    """Return the tag of a source's kind. Since it is decided first, an error in a source is reported for that
    kind alone."""
    if isinstance(value, str):
        return "word" if value in ("stdlib", "prose") else None
    keys = value if isinstance(value, dict) else [key for key in KINDS if isinstance(value, KINDS[key])]
    return next((key for key in KINDS if key in keys), None)


TextSource = Annotated[
    Annotated[Literal["stdlib", "prose"], Tag("word")]
    | Annotated[Shards, Tag("train")]
    | Annotated[TextFiles, Tag("text")]
    | Annotated[HubText, Tag("dataset")]
    | Annotated[PreparedText, Tag("prepared")],
    Discriminator(
        _kind_of,
        custom_error_type="source",
        custom_error_message=f"must be stdlib or prose, or have one of the keys {', '.join(KINDS)}",
    ),
]


def places(source: object) -> frozenset[str]:
    """Return the fields that only locate a source's data: a trial's id has the data's fingerprint instead.

    They are its paths; all fields of a class with `BY_CONTENT`, which only say how its tokens are made.
    """
    if isinstance(source, Spec) and getattr(source, "BY_CONTENT", False):
        return frozenset(type(source).model_fields)
    return frozenset(getattr(source, "PATHS", ()))


def without_places(fields: Json, source: object) -> Json:
    """Return the JSON data of a source without the fields that only locate it; a built-in name as it is."""
    if not isinstance(fields, dict):
        return fields
    paths = places(source)
    return {name: value for name, value in fields.items() if name not in paths}


def located(value: T, folder: Path) -> T:
    """Return a configuration with paths that are relative to the experiment file's folder made absolute.

    A value that is no `Spec` has no paths. The class of a `Spec` lists its fields of paths: `PATHS` (files,
    folders, globs), and `NAMES`, which may be names on a hub too and stay unless such a folder exists.
    """
    if not isinstance(value, Spec):
        return value
    paths, names = getattr(value, "PATHS", ()), getattr(value, "NAMES", ())
    changed: dict[str, object] = {}
    for name in type(value).model_fields:
        part = getattr(value, name)
        if isinstance(part, Spec):
            changed[name] = located(part, folder)
        elif isinstance(part, str) and name in (*paths, *names):
            beside = _absolute(part, folder)
            # The libraries take a folder in the working directory for the name: name the one beside the file.
            named = name in names and not (os.path.exists(beside) or os.path.exists(part))
            changed[name] = part if named else beside
        elif isinstance(part, tuple) and name in paths:
            changed[name] = tuple(_absolute(path, folder) for path in part)
    changed = {name: part for name, part in changed.items() if part is not getattr(value, name)}
    return value.model_copy(update=changed) if changed else value


def _absolute(text: str, folder: Path) -> str:
    return text if user_path(text).is_absolute() else str(folder / text)
