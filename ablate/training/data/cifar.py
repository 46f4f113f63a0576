"""CIFAR-10 and CIFAR-100 as published: binary files, or Python pickles, read without running code in them."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_PIXELS = 3 * 32 * 32
_INNER = ("", "cifar-10-batches-bin", "cifar-10-batches-py", "cifar-100-binary", "cifar-100-python")
"""Folders that the published archives unpack into; empty: the files themselves."""


class Layout(NamedTuple):
    """Names of the files of one published archive, and of the labels of an image."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: tuple[str, ...]
    """Labels of an image by their names in a pickle; in a binary file, one byte each before the pixels."""
    binary: bool


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEN = ("labels",)
_HUNDRED = ("coarse_labels", "fine_labels")
LAYOUTS = {
    10: (
        Layout(tuple(f"{name}.bin" for name in _BATCHES), ("test_batch.bin",), _TEN, binary=True),
        Layout(_BATCHES, ("test_batch",), _TEN, binary=False),
    ),
    100: (
        Layout(("train.bin",), ("test.bin",), _HUNDRED, binary=True),
        Layout(("train",), ("test",), _HUNDRED, binary=False),
    ),
}

Part = tuple[np.ndarray, np.ndarray]
"""Images uint8 [n, 3, 32, 32] and labels int64 [n]."""


def read(folder: Path, classes: int, label: str) -> tuple[Part, Part]:
    """Return the training and the test images.

    Args:
        folder: folder of the files, or the one that their archive was unpacked in.
        classes: 10 or 100.
        label: name of the label, one of the layout's `labels`.

    Raises:
        OSError: a file is missing.
        ValueError: a file has another content.
    """
    inner, layout = _find(folder, classes)
    load = _binary if layout.binary else _pickled
    parts = [[load(inner / name, layout, label) for name in names] for names in (layout.train, layout.test)]
    train, test = (
        (np.concatenate([i for i, _ in part]), np.concatenate([k for _, k in part])) for part in parts
    )
    return train, test


def _find(folder: Path, classes: int) -> tuple[Path, Layout]:
    for inner in (folder / name for name in _INNER):
        for layout in LAYOUTS[classes]:
            if (inner / layout.train[0]).is_file():
                missing = [name for name in (*layout.train, *layout.test) if not (inner / name).is_file()]
                if missing:
                    raise OSError(f"{inner}: {missing[0]} is missing beside {layout.train[0]}")
                return inner, layout
    names = " or ".join(layout.train[0] for layout in LAYOUTS[classes])
    raise OSError(f"{folder}: no {names} of CIFAR-{classes} there, as the published archives hold")


def _binary(path: Path, layout: Layout, label: str) -> Part:
    """Read a binary file: for each image its labels, a byte each, and 3,072 pixels, red first."""
    content, width = np.fromfile(path, np.uint8), len(layout.labels) + _PIXELS
    if len(content) == 0 or len(content) % width:
        raise ValueError(f"{path}: {len(content)} bytes are not a whole number of images of {width} bytes")
    rows = content.reshape(-1, width)
    labels = rows[:, layout.labels.index(label)].astype(np.int64)
    return np.ascontiguousarray(rows[:, len(layout.labels) :]).reshape(-1, 3, 32, 32), labels


def _pickled(path: Path, layout: Layout, label: str) -> Part:
    content = unpickle(path.read_bytes(), str(path))
    try:
        table = {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}
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


def unpickle(content: bytes, name: str) -> Any:
    """Return the content of a pickle of plain values and numpy arrays.

    ValueError for a pickle that refers to anything else, before that is called.
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


_SAFE: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _array,
    ("numpy._core.multiarray", "_reconstruct"): _array,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _bytes,
}


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return an object that a pickle may call: numpy's classes, or a replacement defined here."""
        if (module, name) not in _SAFE:
            raise _Refused(f"{module}.{name}")
        return _SAFE[module, name]
