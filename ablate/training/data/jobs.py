"""A tokenisation job: text files or a dataset, the documents that validate, and those that train a BPE."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from ablate.cache import digest, key_of
from ablate.training.data import documents, hub
from ablate.training.data.documents import Piece
from ablate.training.data.sources import HubText
from ablate.training.data.tokenisers import identity

_VERSION = 1
"""Raise by hand when the same text would give other tokens: cached ones are then made again."""
_LONGEST, _SHORTEST = 1 << 16, 1 << 8
"""Bytes of the pieces of a text file; in a short one they are as short as the part that validates."""
_TRAINING_BYTES = 1 << 26
"""Largest number of bytes, from the text's beginning, that a BPE is trained on; more takes memory and changes
few of its tokens."""
_INSTEAD = (
    "without a network there are `data: stdlib`, {text: files}, and {prepared: folder},"
    " which `ablate data prepare hub:NAME --out folder` writes where there is one"
)


@dataclass(frozen=True)
class Job:
    """A text to tokenise, and how."""

    pieces: Callable[[], Iterable[Piece]]
    """Returns the text's pieces; called twice if a BPE is trained."""
    content: tuple[object, ...]
    """Identity of the text: the hash of files, or the commit of a dataset."""
    source: Mapping[str, object]
    """The text as its user named it."""
    tokenizer: str = "bytes"
    val: Callable[[], Iterable[Piece]] | None = None
    """None: whole documents of the text itself are held out."""
    val_fraction: float = 0.01
    shard_tokens: int = 100_000_000
    tokens: int | None = None
    """Number of training tokens to stop after; None: at the end of the text."""
    progress: Callable[[str, int], None] = lambda activity, size: None
    """Called with the present activity and the bytes of text of each step of it."""

    @property
    def key(self) -> str:
        fraction = self.val_fraction if self.val is None else None
        return key_of(
            _VERSION, self.content, identity(self.tokenizer), fraction, self.shard_tokens, self.tokens
        )

    def split(self) -> Iterator[tuple[bool, Piece]]:
        """Yield True for a validation piece or False for a training piece, and the piece.

        Without a validation text, a piece validates if less than `val_fraction` of the text so far does.
        """
        if self.val is not None:
            yield from ((True, piece) for piece in self.val())
            yield from ((False, piece) for piece in self.pieces())
            return
        seen = held = 0
        for piece in self.pieces():
            out = held < self.val_fraction * seen
            seen, held = seen + len(piece.content), held + len(piece.content) * out
            yield out, piece

    def training(self) -> Iterator[Piece]:
        """Yield the pieces that a BPE is trained on: training pieces from the text's beginning."""
        remaining = min(_TRAINING_BYTES, 8 * self.tokens if self.tokens else _TRAINING_BYTES)
        for held, piece in self.split():
            if remaining <= 0:
                return
            if not held:
                remaining -= len(piece.content)
                self.progress("training the tokeniser", len(piece.content))
                yield piece


def of_files(patterns: list[str], val: list[str] | None, column: str, val_fraction: float) -> Job:
    """Return the job for text files, JSON lines or Parquet, and those that validate, by paths or globs.

    Without any, `val_fraction` of the text is held out. OSError if a pattern matches no file, ValueError if a
    file is no text.
    """
    files, held = documents.named(patterns), documents.named(val or [])
    if packed := next((path for path in (*files, *held) if path.suffix in documents.PACKED), None):
        remedy = "" if packed.suffix == ".bin" else "; unpack it first"
        raise ValueError(f"{packed}: a {packed.suffix} file is no text{remedy}")
    size = sum(path.stat().st_size for path in files)
    longest = _LONGEST if held else min(_LONGEST, max(_SHORTEST, int(val_fraction * size)))
    suffixes = [[path.suffix for path in paths] for paths in (files, held)]
    return Job(
        partial(documents.pieces, files, column, longest),
        ("files", column, suffixes, digest(files), digest(held)),
        {"text": patterns} | ({"val": val} if val else {}),
        val=partial(documents.pieces, held, column, longest) if held else None,
        val_fraction=val_fraction,
    )


def of_dataset(dataset: HubText) -> Job:
    """Return the job for a dataset of the hub, or in a local folder. OSError as of `hub.version`."""
    commit = hub.version(dataset.dataset, dataset.revision, _INSTEAD)
    name, column = dataset.dataset, dataset.column

    def pieces(split: str) -> Iterator[Piece]:
        for number, row in enumerate(hub.rows(name, dataset.config, split, commit)):
            place = f"dataset {name}, split {split}, row {number}"
            yield documents.document(row.get(column), place, column, row)

    named = dataset.model_dump(include={"dataset", "config", "split", "val_split", "revision", "column"})
    source = named | {"revision": commit}
    return Job(
        partial(pieces, dataset.split),
        ("dataset", *source.values()),
        source,
        dataset.tokenizer,
        val=partial(pieces, dataset.val_split) if dataset.val_split else None,
        val_fraction=dataset.val_fraction,
        tokens=dataset.tokens,
    )
