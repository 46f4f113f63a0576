"""Text as tokens: the Python standard library's own source as bytes, or token shards on disk; for training and for validation."""

import glob
import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from ablate.numerics.spec import Spec

_EXCLUDED = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib", "lib2to3", "ensurepip", "turtledemo"}
_VALIDATION_SHARE = 10
_LLM_C = {20240520: np.uint16, 20240801: np.uint32}
"""Magic numbers of llm.c's shard headers (256 int32 words) and the type of the tokens behind them."""
_HEADER = 256 * 4
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16


class Shards(Spec):
    """Token files: llm.c's `.bin` (with a header) or nanoGPT's (raw ids). Paths may be globs."""

    train: str
    val: str
    vocab: int = Field(gt=1, le=1 << 20)
    dtype: Literal["uint16", "uint32"] = "uint16"
    """Type of the ids in files without a header."""
    bytes_per_token: float | None = Field(None, gt=0)
    """Bytes of text a token stands for on average; gives val/bits_per_byte where it is known."""


@dataclass(frozen=True)
class Corpus:
    """Token ids as two flat integer arrays (memory-mapped where they are files)."""

    train: np.ndarray
    val: np.ndarray
    vocab: int
    fingerprint: str
    bytes_per_token: float | None

    def unigram_entropy(self) -> float:
        """Nats per token of the validation text under the training text's token frequencies, add-one smoothed: what
        a model that ignores context reaches."""
        counts = np.bincount(self.train[: 1 << 24], minlength=self.vocab) + 1
        validation = np.bincount(self.val[: 1 << 24], minlength=self.vocab)
        return float(-(validation * np.log(counts / counts.sum())).sum() / validation.sum())


Source = Literal["stdlib"] | Shards


def open_corpus(source: Source) -> Corpus:
    """The corpus; OSError or ValueError in one sentence where a file cannot be read or holds too little."""
    return _stdlib() if source == "stdlib" else _shards(source)


@cache
def _stdlib() -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(_sources(root))
    if not names:
        raise ValueError(f"no source files of the standard library under {root}; use token shards: data: {{train: ..., val: ...}}")
    digest, split = hashlib.sha256(), ([], [])
    for name in names:
        content = (root / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
        split[hashlib.sha256(name.encode()).digest()[0] % _VALIDATION_SHARE == 0].append(content)
    train, val = (np.frombuffer(b"".join(files), dtype=np.uint8) for files in split)
    return Corpus(train, val, 256, digest.hexdigest()[:16], bytes_per_token=1.0)


def _sources(root: Path) -> Iterator[str]:
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in _EXCLUDED]
        yield from ((Path(folder) / name).relative_to(root).as_posix() for name in files if name.endswith(".py"))


@cache
def _shards(source: Shards) -> Corpus:
    digest, arrays = hashlib.sha256(f"{source.vocab}".encode()), []
    for pattern in (source.train, source.val):
        paths = sorted(glob.glob(str(Path(pattern).expanduser())))
        if not paths:
            raise OSError(f"no file matches {pattern!r}")
        parts = [_shard(Path(path), source.dtype) for path in paths]
        for path, part in zip(paths, parts, strict=True):
            for window in _sample(part):
                digest.update(window.tobytes())
                if window.max() >= source.vocab:
                    raise ValueError(f"{path}: token id {window.max()} is beyond the vocabulary of {source.vocab}")
            digest.update(f"{len(part)}/{part.dtype}".encode())
        arrays.append(parts[0] if len(parts) == 1 else np.concatenate(parts))
    return Corpus(*arrays, source.vocab, digest.hexdigest()[:16], source.bytes_per_token)


def _shard(path: Path, dtype: str) -> np.ndarray:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(12)
    header = np.frombuffer(start, dtype=np.int32) if len(start) == 12 else (0,)
    if int(header[0]) in _LLM_C:
        kind = np.dtype(_LLM_C[int(header[0])])
        if size < _HEADER + int(header[2]) * kind.itemsize:
            raise ValueError(f"{path}: truncated: its header promises {int(header[2])} tokens, {size} bytes are there")
        return np.memmap(path, kind, "r", offset=_HEADER, shape=(int(header[2]),))
    kind = np.dtype(dtype)
    if size == 0 or size % kind.itemsize:
        raise ValueError(f"{path}: {size} bytes are not a whole number of {dtype} tokens")
    return np.memmap(path, kind, "r")


def _sample(tokens: np.ndarray) -> list[np.ndarray]:
    """Evenly spaced windows: a shard of many gigabytes is told from another in milliseconds."""
    window = _SAMPLE_BYTES // tokens.itemsize
    starts = np.linspace(0, max(0, len(tokens) - window), min(_SAMPLES, math.ceil(len(tokens) / window)), dtype=np.int64)
    return [tokens[start : start + window] for start in starts]
