"""CIFAR-10 and CIFAR-100 as published: binary files, or Python pickles, read without running code in them."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

_PIXELS = 3 * 32 * 32
_INNER = ("", "cifar-10-batches-bin", "cifar-10-batches-py", "cifar-100-binary", "cifar-100-python")
"""Folders that the published archives unpack into; empty: the files themselves."""


class CifarArchive(NamedTuple):
    """Names of the files of one published archive, and of the labels of an image."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: tuple[str, ...]
    """Labels of an image by their names in a pickle; in a binary file, one byte each before the pixels."""
    binary: bool


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEN = ("labels",)
_HUNDRED = ("coarse_labels", "fine_labels")
ARCHIVES = {
    10: (
        CifarArchive(tuple(f"{name}.bin" for name in _BATCHES), ("test_batch.bin",), _TEN, binary=True),
        CifarArchive(_BATCHES, ("test_batch",), _TEN, binary=False),
    ),
    100: (
        CifarArchive(("train.bin",), ("test.bin",), _HUNDRED, binary=True),
        CifarArchive(("train",), ("test",), _HUNDRED, binary=False),
    ),
}

LabelledImages = tuple[np.ndarray, np.ndarray]
"""Images uint8 [n, 3, 32, 32] and labels int64 [n]."""


def read(folder: Path, classes: int, label: str) -> tuple[LabelledImages, LabelledImages]:
    """Return the training and the test images.

    Args:
        folder: folder of the files, or the one that their archive was unpacked in.
        classes: 10 or 100.
        label: name of the label, one of the archive's `labels`.

    Raises:
        OSError: a file is missing.
        ValueError: a file has another content.
    """
    inner, archive = _find(folder, classes)
    load = _binary if archive.binary else _pickled
    parts = [
        [load(inner / name, archive, label) for name in names] for names in (archive.train, archive.test)
    ]
    train, test = (
        (np.concatenate([i for i, _ in part]), np.concatenate([k for _, k in part])) for part in parts
    )
    return train, test


def _find(folder: Path, classes: int) -> tuple[Path, CifarArchive]:
    for inner in (folder / name for name in _INNER):
        for archive in ARCHIVES[classes]:
            if (inner / archive.train[0]).is_file():
                missing = [name for name in (*archive.train, *archive.test) if not (inner / name).is_file()]
                if missing:
                    raise OSError(f"{inner}: {missing[0]} is missing beside {archive.train[0]}")
                return inner, archive
    names = " or ".join(archive.train[0] for archive in ARCHIVES[classes])
    raise OSError(f"{folder}: no {names} of CIFAR-{classes} there, as the published archives hold")


def _binary(path: Path, archive: CifarArchive, label: str) -> LabelledImages:
    """Read a binary file: for each image its labels, a byte each, and 3,072 pixels, red first."""
    content, width = np.fromfile(path, np.uint8), len(archive.labels) + _PIXELS
    if len(content) == 0 or len(content) % width:
        raise ValueError(f"{path}: {len(content)} bytes are not a whole number of images of {width} bytes")
    rows = content.reshape(-1, width)
    labels = rows[:, archive.labels.index(label)].astype(np.int64)
    return np.ascontiguousarray(rows[:, len(archive.labels) :]).reshape(-1, 3, 32, 32), labels


def _pickled(path: Path, archive: CifarArchive, label: str) -> LabelledImages:
    content = unpickle(path.read_bytes(), str(path))
    try:
        items = content.items() if isinstance(content, dict) else ()
        table = {key.decode() if isinstance(key, bytes) else key: value for key, value in items}
        pixels, labels = table["data"], np.asarray(table[label], dtype=np.int64)
        images = pixels.reshape(-1, 3, 32, 32)
        whole = pixels.dtype == np.uint8 and labels.shape == (len(images),) and len(images) > 0
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise ValueError(
            f"{path}: not a batch of CIFAR:"
            f" it must hold `data`, uint8 of 3,072 columns, and as many `{label}`"
        )
    return images, labels


def unpickle(content: bytes, name: str) -> object:
    """Return the content of a pickle of plain values and numpy arrays.

    Args:
        content: the bytes of the pickle.
        name: name of its file, for an error's message.

    Raises:
        ValueError: the pickle is damaged, or refers to anything else, which is not called.
    """
    try:
        return _Plain(io.BytesIO(content), encoding="bytes").load()
    except _Refused as error:
        raise ValueError(
            f"{name}: refused: this pickle would call {error}; only numpy arrays and plain values are read"
        ) from None
    except Exception as error:  # a torn pickle raises nearly anything
        raise ValueError(f"{name}: not a whole pickle ({type(error).__name__}: {error})") from None


class _Refused(Exception):
    pass


def _array(kind: type, shape: tuple[int, ...], code: bytes) -> np.ndarray:
    """Return the empty array that a pickle then fills; of numpy's own class, whatever the pickle names."""
    return np.ndarray((0,), np.uint8)


def _bytes(text: str, encoding: str) -> bytes:
    """Return the bytes that Python 3 pickled for Python 2 as latin-1 text."""
    return text.encode("latin-1")


_SAFE: dict[tuple[str, str], Callable[..., object]] = {
    ("numpy.core.multiarray", "_reconstruct"): _array,
    ("numpy._core.multiarray", "_reconstruct"): _array,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _bytes,
}


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        """Return an object that a pickle may call: numpy's classes, or a replacement defined here."""
        if (module, name) not in _SAFE:
            raise _Refused(f"{module}.{name}")
        return _SAFE[module, name]
