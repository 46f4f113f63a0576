"""From text to token ids and back: bytes, or byte-level BPE. The only file that knows the `tokenizers` library.

A word names one: `bytes`; `bpe:N`, trained on the text itself to N tokens; a `tokenizer.json`, or a folder with one; a model on the hub.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ablate.cache import digest
from ablate.training.data.documents import Piece
from ablate.training.data.hub import tokenizer_commit, tokenizer_file

FILE = "tokenizer.json"
SEPARATOR = "<|endoftext|>"
_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "<|begin_of_text|>", "<eos>", "</s>", "<s>", "[SEP]")
"""What known tokenisers begin or end a document with; the first that a vocabulary has is put before each."""
_SMALLEST = 257
"""All bytes and the separator."""
_LARGEST = 1 << 20
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_INSTEAD = "without a network there are `bytes`, `bpe:N` and the path of a tokenizer.json"


class Tokeniser(NamedTuple):
    """Ids run from 0 to `vocab` - 1. `separator` begins each document; None: nothing does."""

    word: str
    vocab: int
    separator: int | None
    encode: Callable[[Sequence[Piece]], list[np.ndarray]]
    """A flat array of ids for each piece. ValueError that says where a piece is not UTF-8."""
    decode: Callable[[np.ndarray], str]
    json: str
    """The `tokenizer.json` that does the same."""

    @property
    def dtype(self) -> type:
        """What an id is stored as."""
        return np.uint16 if self.vocab <= 1 << 16 else np.uint32


def kind(word: str) -> Literal["bytes", "bpe", "file", "hub"]:
    """What a word names. ValueError where it can be nothing."""
    if word == "bytes":
        return "bytes"
    if word.startswith("bpe:"):
        if not (word[4:].isdecimal() and _SMALLEST <= int(word[4:]) <= _LARGEST):
            raise ValueError(
                f"bpe:N takes N tokens, from {_SMALLEST} (all bytes and a separator) to {_LARGEST}"
            )
        return "bpe"
    if word.endswith(".json") or word.startswith((".", "/", "~")) or Path(word).exists():
        return "file"
    if not _HUB_NAME.fullmatch(word):
        raise ValueError(
            "must be bytes, bpe:N, the path of a tokenizer.json, or the name of a model on the hub"
        )
    return "hub"


def checked(word: str) -> str:
    """The word, where it can name a tokeniser; ValueError where it cannot."""
    kind(word)
    return word


def identity(word: str) -> str:
    """What identifies the tokeniser's content: two words of one identity give the same ids for the same text."""
    named = kind(word)
    if named == "file":
        return digest([_path(word)])
    return f"{word}@{tokenizer_commit(word, _INSTEAD)}" if named == "hub" else word


def open_tokeniser(word: str, text: Callable[[], Iterable[Piece]]) -> Tokeniser:
    """The tokeniser that a word names, trained on `text()` where it is `bpe:N`. OSError or ValueError in one sentence."""
    named = kind(word)
    if named == "bytes":
        return _bytes()
    if named == "bpe":
        return _of(_trained(text(), int(word[4:])), word)
    path = tokenizer_file(word, _INSTEAD) if named == "hub" else _path(word)
    return _of(_read(path), word)


def _path(word: str) -> Path:
    path = Path(word).expanduser()
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise OSError(f"tokenizer {word}: there is no file {path}")
    return path


def _read(path: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library's only class
        raise ValueError(f"{path}: not a tokenizer.json: {str(error).splitlines()[0]}") from None


def _of(library: Any, word: str) -> Tokeniser:
    library.no_truncation()  # what a published one may do to sentences must not be done to a text
    library.no_padding()
    known = library.get_vocab(with_added_tokens=True)
    separator = next((known[name] for name in _SEPARATORS if name in known), None)

    def encode(pieces: Sequence[Piece]) -> list[np.ndarray]:
        texts = [_text(piece) for piece in pieces]
        return [
            np.array(found.ids, dtype=np.uint32)
            for found in library.encode_batch_fast(texts, add_special_tokens=False)
        ]

    return Tokeniser(
        word,
        max(known.values()) + 1,
        separator,
        encode,
        lambda ids: library.decode(ids.tolist(), skip_special_tokens=False),
        library.to_str(),
    )


def _text(piece: Piece) -> str:
    try:
        return piece.content.decode()
    except UnicodeDecodeError as error:
        where = piece.offset + error.start
        raise ValueError(
            f"{piece.name}: byte {where} ({piece.content[error.start]:#x}) is not UTF-8; `bytes` takes anything"
        ) from None


def _bytes() -> Tokeniser:
    """The ids are the bytes; 0, which no text has, is the separator."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # The library writes each byte as a letter: those that can be printed as themselves, the others, in order, from U+0100 on.
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printed]
    letters = {chr(byte): byte for byte in printed} | {
        chr(0x100 + number): byte for number, byte in enumerate(rest)
    }
    library = Tokenizer(models.BPE(vocab=letters, merges=[]))
    library.pre_tokenizer, library.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoders.ByteLevel(),
    )

    def encode(pieces: Sequence[Piece]) -> list[np.ndarray]:
        return [np.frombuffer(piece.content, dtype=np.uint8) for piece in pieces]

    return Tokeniser(
        "bytes",
        256,
        0,
        encode,
        lambda ids: ids.astype(np.uint8).tobytes().decode(errors="replace"),
        library.to_str(),
    )


def _trained(text: Iterable[Piece], vocab: int) -> Any:
    """A byte-level BPE: the same for the same text, whatever the number of threads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[SEPARATOR], initial_alphabet=letters, show_progress=False
    )
    library.train_from_iterator(map(_text, text), trainer)
    return library
