"""Footer of a checkpoint: its metadata, and the digest of the bytes before it.

A checkpoint is a file that torch wrote, and `torch.load` verifies no digest: training would continue from a
flipped bit. `seal` appends a JSON object and a fixed trailer, with which torch can still open the file;
`unsealed` reads them back and verifies every byte.
"""

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Mapping
from io import BufferedRandom
from pathlib import Path
from typing import Any, BinaryIO

from ablate.files import Damaged

_FOOTER = struct.Struct("<II8s")
_MAGIC = b"ablate-1"
CHECKPOINT_VERSION = 4
"""Version of the content of checkpoints; those of another version are not read."""


def seal(file: BufferedRandom, about: Mapping[str, Any]) -> None:
    """Append the footer to a checkpoint that was just written: `about`, its size and its SHA-256."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    text = json.dumps(
        {**about, "size": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    ).encode()
    file.seek(0, os.SEEK_END)
    file.write(text + _FOOTER.pack(len(text), zlib.crc32(text), _MAGIC))


def unsealed(path: Path) -> dict[str, Any]:
    """Return the footer of a checkpoint after verifying the file's bytes.

    Damaged if the bytes are not those that were written, or if there is no footer.
    """
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


def read_footer(file: BinaryIO, path: Path) -> dict[str, Any]:
    """Return the footer of a checkpoint without reading its content.

    Damaged if there is no footer, or if the footer belongs to a file of another size.
    """
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - _FOOTER.size))
    footer = file.read()
    if len(footer) < _FOOTER.size or not footer.endswith(_MAGIC):
        raise Damaged(path, "without a digest: cut short, damaged, or of an earlier version")
    length, crc, _ = _FOOTER.unpack(footer)
    file.seek(max(0, end - _FOOTER.size - length))
    text = file.read(length)
    if zlib.crc32(text) != crc:
        raise Damaged(path, "damaged: its footer is not what was written")
    about = json.loads(text)
    if about["size"] + length + _FOOTER.size != end:
        raise Damaged(path, "damaged: its bytes are not those that were written")
    return about
