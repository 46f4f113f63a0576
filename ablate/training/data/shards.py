"""Token files: read and write llm.c's `.bin`, which have a header; read nanoGPT's, which are raw ids."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, TypeAlias

import numpy as np

from ablate.cache import digest as file_digest

_LLM_C = {20240520: np.uint16, 20240801: np.uint32}
"""Types of tokens by the magic number of the shard's header (256 int32 words), as in llm.c."""
_VERSIONS = {20240520: 1, 20240801: 7}
_HEADER = 256 * 4
_MOST = (1 << 31) - 1
"""Largest number of tokens in a file that its header can count."""
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16
_BLOCK = 1 << 20
"""Tokens that are hashed at once."""
_MAPPED = 64
"""Number of files mapped at once: each takes a file descriptor, and a process may have only 1,024."""


@dataclass(frozen=True)
class Shard:
    """The ids of one file, mapped, never loaded whole."""

    path: Path
    dtype: np.dtype
    offset: int
    count: int
    written: int
    """Time of the last change in ns, so that a new file of the same path is another shard."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, window: slice) -> np.ndarray:
        return _mapped(self)[window]


@lru_cache(_MAPPED)
def _mapped(shard: Shard) -> np.ndarray:
    return np.memmap(shard.path, shard.dtype, "r", offset=shard.offset, shape=(shard.count,))


class Joined:
    """Ids of one or more files as one text, read in windows, since they may be larger than memory."""

    def __init__(self, parts: Sequence[Shard]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])
        self.dtype = np.result_type(*(part.dtype for part in parts))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)

    def digest(self) -> str:
        """Return what `Writer.close` returned for these ids: the hash of them all, 64 hex digits."""
        digest = hashlib.sha256(self.dtype.name.encode())
        for start in range(0, len(self), _BLOCK):
            digest.update(self[start : start + _BLOCK].tobytes())
        return digest.hexdigest()

    def __getitem__(self, window: slice) -> np.ndarray:
        start, stop, _ = window.indices(len(self))
        windows = []
        for number in range(int(np.searchsorted(self._ends, start, side="right")), len(self._parts)):
            part, first = self._parts[number], int(self._ends[number]) - len(self._parts[number])
            if first >= stop:
                break
            # `astype` copies, so that the window keeps no file open.
            windows.append(part[max(0, start - first) : stop - first].astype(self.dtype))
        return windows[0] if len(windows) == 1 else np.concatenate(windows or [np.empty(0, self.dtype)])


Tokens: TypeAlias = np.ndarray | Joined
"""Ids of a text: `len` and slices, which are arrays."""


def read(path: Path, dtype: str) -> Shard:
    """Open a token file; `dtype` (`uint16` or `uint32`) is the type of the ids of one without a header.

    OSError if it cannot be read, ValueError if it is truncated, or its header is wrong.
    """
    stat = path.stat()
    size = stat.st_size
    with path.open("rb") as file:
        start = file.read(12)
    header = np.frombuffer(start, dtype=np.int32) if len(start) == 12 else np.zeros(3, dtype=np.int32)
    if int(header[0]) in _LLM_C:
        kind = np.dtype(_LLM_C[int(header[0])])
        if header[2] < 0:  # a count beyond 32 bits has overflowed
            raise ValueError(
                f"{path}: its header counts {header[2]} tokens: damaged, or written with more than"
                f" the {_MOST:,} tokens that such a header can count; write smaller shards"
            )
        if size < _HEADER + int(header[2]) * kind.itemsize:
            raise ValueError(
                f"{path}: truncated: its header counts {int(header[2])} tokens, and the file has {size} bytes"
            )
        return Shard(path, kind, _HEADER, int(header[2]), stat.st_mtime_ns)
    kind = np.dtype(dtype)
    if size == 0 or size % kind.itemsize:
        raise ValueError(f"{path}: {size} bytes are not a whole number of {dtype} tokens")
    return Shard(path, kind, 0, size // kind.itemsize, stat.st_mtime_ns)


def opened(
    paths: Sequence[Path], dtype: str, vocab: int, digest: "hashlib._Hash", whole: bool = False
) -> Joined:
    """Open token files as one text, and add evenly spaced windows of each to a digest, in milliseconds.

    With `whole`, add the hash of all bytes of a file too large for its windows to cover it; the cache keeps
    that hash until the file changes. OSError and ValueError as of `read`; ValueError if an id in one of the
    windows is beyond the vocabulary.
    """
    parts = [read(path, dtype) for path in paths]
    for part in parts:
        size = _SAMPLE_BYTES // part.dtype.itemsize
        count = min(_SAMPLES, math.ceil(len(part) / size))
        for start in np.linspace(0, max(0, len(part) - size), count, dtype=np.int64):
            window = part[start : start + size]
            digest.update(window.tobytes())
            if window.max() >= vocab:
                raise ValueError(f"{part.path}: token id {window.max()} is beyond the vocabulary of {vocab}")
        digest.update(f"{len(part)}/{part.dtype}".encode())
        if whole and len(part) * part.dtype.itemsize > _SAMPLES * _SAMPLE_BYTES:
            digest.update(file_digest([part.path]).encode())
    return Joined(parts)


class Writer:
    """Writer of np.uint16 or np.uint32 ids into shards `<name>_000000.bin`, ..., of `most` tokens at most."""

    def __init__(self, folder: Path, name: str, dtype: type, most: int) -> None:
        self.tokens = self.bytes = self.documents = 0
        """Number of ids so far, and of the bytes and documents that they stand for, which its user counts."""
        self.names: list[str] = []
        self._folder, self._name, self._dtype, self._most = folder, name, np.dtype(dtype), most
        self._digest = hashlib.sha256(self._dtype.name.encode())
        self._file: IO[bytes] | None = None
        self._room = 0

    def add(self, ids: np.ndarray) -> None:
        ids = ids.astype(self._dtype)
        self._digest.update(ids.data)
        self.tokens += len(ids)
        while len(ids):
            if self._file is None:
                self.names.append(f"{self._name}_{len(self.names):06}.bin")
                self._file = (self._folder / self.names[-1]).open("wb")
                self._file.write(bytes(_HEADER))
                self._room = self._most
            part, ids = ids[: self._room], ids[self._room :]
            self._file.write(part.data)
            self._room -= len(part)
            if not self._room:
                self._end()

    def close(self) -> str:
        """End the last file, and return the hash of all ids, 64 hex digits."""
        self._end()
        return self._digest.hexdigest()

    def _end(self) -> None:
        """Complete the present file with its header, written last so that an incomplete file has none."""
        if self._file is None:
            return
        header = np.zeros(256, dtype=np.int32)
        magic = next(magic for magic, dtype in _LLM_C.items() if self._dtype == dtype)
        header[:3] = magic, _VERSIONS[magic], self._most - self._room
        self._file.seek(0)
        self._file.write(header.tobytes())
        self._file.close()
        self._file = None
