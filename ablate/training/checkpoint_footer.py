"""Footer of a checkpoint: its metadata, and the digest of the bytes before it.

A checkpoint is a file that torch wrote, and `torch.load` verifies no digest: training would continue from a
flipped bit. `SealedWriter` appends a JSON object and a fixed trailer, with which torch can still open the
file; `unsealed` reads them back and verifies every byte.
"""

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NotRequired, TypedDict

from ablate.files import Damaged

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FOOTER = struct.Struct("<II8s")
_MAGIC = b"ablate-1"
CHECKPOINT_VERSION = 1
"""Version of the content of checkpoints; those of another version are not read."""


class Footer(TypedDict):
    """Metadata of a checkpoint file, as its footer's JSON object holds them. A footer of another version may
    lack keys: check `version` before any other key."""

    version: int
    """`CHECKPOINT_VERSION` of the code that wrote the file."""
    trial: str
    step: int
    """Number of optimizer steps that the state was saved after."""
    records: Mapping[str, object] | None
    """Number and digest of the trial's records up to that step; None if no records were kept."""
    state: NotRequired[str]
    """Name of the file, in a state that several trials share; the trial's own checkpoint has none."""
    size: int
    """Bytes of the file before the footer."""
    sha256: str
    """SHA-256 of those bytes, 64 hex digits."""


class SealedWriter:
    """File, empty when given, that hashes what is written to it, so that sealing a checkpoint need not read
    it again. torch writes a checkpoint from its beginning to its end and never seeks."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest, self._size = file, hashlib.sha256(), 0

    def write(self, data: "Buffer") -> int:
        self._digest.update(data)
        written = self._file.write(data)
        self._size += written
        return written

    def flush(self) -> None:
        self._file.flush()

    def seal(self, about: Mapping[str, object]) -> None:
        """Append the footer to the content, which is complete. `about` has the keys of `Footer` without
        `size` and `sha256`, which were counted while writing."""
        text = json.dumps({**about, "size": self._size, "sha256": self._digest.hexdigest()}).encode()
        self._file.write(text + _FOOTER.pack(len(text), zlib.crc32(text), _MAGIC))


def unsealed(path: Path) -> Footer:
    """Return the footer of a checkpoint after verifying the file's bytes. Damaged if they are not those that
    were written, or there is no footer; OSError if the file cannot be read."""
    with path.open("rb") as file:
        about = read_footer(file, path)
        digest, rest = hashlib.sha256(), about["size"]
        file.seek(0)
        while rest and (piece := file.read(min(rest, 1 << 24))):
            digest.update(piece)
            rest -= len(piece)
    if digest.hexdigest() != about["sha256"]:
        raise Damaged(path, "damaged: its bytes are not those that were written")
    return about


def read_footer(file: BinaryIO, path: Path) -> Footer:
    """Return the footer of a checkpoint, open for reading, without reading its content; the file's position
    changes. Damaged if there is no footer, or it belongs to a file of another size; `path` is for that
    message."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - _FOOTER.size))
    footer = file.read()
    if len(footer) < _FOOTER.size or not footer.endswith(_MAGIC):
        raise Damaged(path, "without a digest: cut short or damaged")
    length, crc, _ = _FOOTER.unpack(footer)
    file.seek(max(0, end - _FOOTER.size - length))
    text = file.read(length)
    if zlib.crc32(text) != crc:
        raise Damaged(path, "damaged: its footer is not what was written")
    about: Footer = json.loads(text)
    if about["size"] + length + _FOOTER.size != end:
        raise Damaged(path, "damaged: its bytes are not those that were written")
    return about
