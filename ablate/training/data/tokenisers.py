"""Tokenisers, from text to token ids and back: bytes, or byte-level BPE of the `tokenizers` library.

One is named by a word: `bytes`; `bpe:N`, trained on the text itself to N tokens; the path of a
`tokenizer.json`, or of a folder with one; or a model on the hub.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from ablate.cache import digest
from ablate.errors import first_line
from ablate.files import user_path
from ablate.training.data.documents import Piece
from ablate.training.data.hub import commit_of, tokenizer_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"
SEPARATOR = "<|endoftext|>"
_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "<|begin_of_text|>", "<eos>", "</s>", "<s>", "[SEP]")
"""Tokens that published tokenisers separate documents by; the first in a vocabulary begins each one."""
_SMALLEST = 257
"""Number of tokens of all bytes and the separator."""
_LARGEST = 1 << 20
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_INSTEAD = "without a network there are `bytes`, `bpe:N` and the path of a tokenizer.json"


class Tokeniser(NamedTuple):
    """A tokeniser."""

    word: str
    """The word that names it."""
    vocab: int
    """Number of ids, from 0."""
    separator: int | None
    """Id that begins each document; None: there is none."""
    encode: Callable[[Sequence[Piece]], list[np.ndarray]]
    """Returns a flat array of ids for each piece. ValueError, with the position, if a piece is not UTF-8; or
    if it has a character that the vocabulary lacks, and there is no token for unknown ones."""
    decode: Callable[[np.ndarray], str]
    json: str
    """Content of the `tokenizer.json` of the same tokeniser."""

    @property
    def dtype(self) -> type:
        return np.uint16 if self.vocab <= 1 << 16 else np.uint32


def kind(word: str) -> Literal["bytes", "bpe", "file", "hub"]:
    """Return the kind of tokeniser that a word names. ValueError if it cannot name one."""
    if word == "bytes":
        return "bytes"
    if word.startswith("bpe:"):
        if not (word[4:].isdecimal() and _SMALLEST <= int(word[4:]) <= _LARGEST):
            raise ValueError(
                f"bpe:N takes N tokens, from {_SMALLEST} (all bytes and a separator) to {_LARGEST}"
            )
        return "bpe"
    if word.endswith(".json") or word.startswith((".", "/", "~")) or os.path.exists(word):
        return "file"
    if not _HUB_NAME.fullmatch(word):
        raise ValueError(
            "must be bytes, bpe:N, the path of a tokenizer.json, or the name of a model on the hub"
        )
    return "hub"


def identity(word: str) -> str:
    """Return the identity of a tokeniser's content: equal ones give the same ids for the same text.

    OSError if its file is missing, or the hub cannot be reached.
    """
    match kind(word):
        case "file":
            return digest([_path(word)])
        case "hub":
            return f"{word}@{commit_of('tokenizer', word, _INSTEAD)}"
    return word


def open_tokeniser(word: str, text: Callable[[], Iterable[Piece]]) -> Tokeniser:
    """Open the tokeniser that a word names; `text` is called for the text that `bpe:N` is trained on alone.

    OSError if its file is missing, or the hub cannot be reached. ValueError if its file is damaged, or the
    text is not UTF-8.
    """
    match kind(word):
        case "bytes":
            return _bytes()
        case "bpe":
            return _wrapped(_trained(text(), int(word[4:])), word)
        case "hub":
            return _wrapped(_read(tokenizer_file(word, _INSTEAD)), word)
    return _wrapped(_read(_path(word)), word)


def _path(word: str) -> Path:
    path = user_path(word)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise OSError(f"tokenizer {word}: there is no file {path}")
    return path


def _read(path: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library's only class
        raise ValueError(f"{path}: not a tokenizer.json: {first_line(error)}") from None


def _wrapped(library: "Tokenizer", word: str) -> Tokeniser:
    library.no_truncation()  # a published tokeniser may truncate and pad, as for single sentences
    library.no_padding()
    ids = library.get_vocab(with_added_tokens=True)
    if not ids:
        raise ValueError(f"tokenizer {word}: it has no tokens")
    separator = next((ids[name] for name in _SEPARATORS if name in ids), None)

    def encode(pieces: Sequence[Piece]) -> list[np.ndarray]:
        texts = [_text(piece) for piece in pieces]
        try:
            encodings = library.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library's only class
            raise ValueError(f"tokenizer {word}: it cannot encode the text: {first_line(error)}") from None
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    return Tokeniser(
        word,
        max(ids.values()) + 1,
        separator,
        encode,
        lambda ids: library.decode(ids.tolist(), skip_special_tokens=False),
        library.to_str(),
    )


def _text(piece: Piece) -> str:
    try:
        return piece.content.decode()
    except UnicodeDecodeError as error:
        position = piece.offset + error.start
        raise ValueError(
            f"{piece.name}: byte {position} ({piece.content[error.start]:#x}) is not UTF-8;"
            " `bytes` takes anything"
        ) from None


def _bytes() -> Tokeniser:
    """Return the tokeniser whose ids are the bytes; the separator is 0, a byte of binary files alone."""
    # The library maps each byte to a letter: printable ones to themselves, the others in order from U+0100.
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printed]
    letters = {chr(byte): byte for byte in printed}
    letters |= {chr(0x100 + number): byte for number, byte in enumerate(rest)}
    return Tokeniser(
        "bytes",
        256,
        0,
        lambda pieces: [np.frombuffer(piece.content, dtype=np.uint8) for piece in pieces],
        lambda ids: ids.astype(np.uint8).tobytes().decode(errors="replace"),
        _byte_level(letters, at_words=False).to_str(),
    )


def _byte_level(vocab: dict[str, int] | None, at_words: bool) -> "Tokenizer":
    """Return a BPE of the library on bytes, without merges; it cuts a text at words first, or not at all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    library = Tokenizer(models.BPE() if vocab is None else models.BPE(vocab=vocab, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=at_words)
    library.decoder = decoders.ByteLevel()
    return library


def _trained(text: Iterable[Piece], vocab: int) -> "Tokenizer":
    """Return a trained byte-level BPE: the same for the same text, whatever the number of threads."""
    from tokenizers import pre_tokenizers, trainers

    library = _byte_level(None, at_words=True)
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[SEPARATOR], initial_alphabet=letters, show_progress=False
    )
    library.train_from_iterator(map(_text, text), trainer)
    return library
