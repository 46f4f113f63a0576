"""Sources of text as an experiment names them: a word, token shards, text files, a prepared folder, a hub."""

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from ablate.numerics.spec import Spec
from ablate.training.data.tokenisers import kind

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
