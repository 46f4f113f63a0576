"""Images as arrays: scikit-learn's digits and photographs, CIFAR, folders, hub datasets. Torch-free."""

import hashlib
import io
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import Field, Tag

from ablate.cache import digest, kept, key_of
from ablate.files import below
from ablate.numerics.spec import Spec
from ablate.training.data import cifar
from ablate.training.data.hub import rows, version
from ablate.training.data.kinds import either
from ablate.training.data.scikit import scikit_datasets

T = TypeVar("T")

_VALIDATION_EVERY = 10
_SUFFIXES = (".png", ".jpg", ".jpeg")
_DIGITS_TRAIN = 1500
_CROP, _STRIDE, _REGION = 32, 8, 64
_FLATTEST = 8.0
"""Smallest standard deviation of a crop, in grey levels; less is sky or blurred background."""
_VERSION = 1
"""Raise by hand when the same files would give other arrays: cached ones are then made again."""
_INSTEAD = "without a network there are digits, photos, {cifar10: folder} and {folder: ..., size: n}"
_ARRAYS = ("train", "train_labels", "val", "val_labels")


class Cifar10(Spec):
    """CIFAR-10 as published, as binary files or as Python's pickles; its test images validate."""

    PATHS: ClassVar[tuple[str, ...]] = ("cifar10",)
    cifar10: str
    """The folder."""


class Cifar100(Spec):
    """CIFAR-100 as published."""

    PATHS: ClassVar[tuple[str, ...]] = ("cifar100",)
    cifar100: str
    """The folder."""
    labels: Literal["fine", "coarse"] = "fine"


class Folder(Spec):
    """Image files, PNG or JPEG, all of one size. Each folder inside is a class; files in none are one more.

    Either there are folders `train` and `val`, or every tenth file validates.
    """

    PATHS: ClassVar[tuple[str, ...]] = ("folder",)
    folder: str
    size: int = Field(ge=4, le=1024)
    """Width and height in pixels."""


class HubImages(Spec):
    """A dataset of images by its name on the Hugging Face hub, or a local folder that `datasets` can read."""

    NAMES: ClassVar[tuple[str, ...]] = ("dataset",)
    dataset: str
    """A name on the hub, or a folder; its absolute path is a part of the trial's id, as its content is."""
    config: str | None = None
    split: str = "train"
    val_split: str | None = None
    """null: every tenth image validates."""
    revision: str | None = None
    """A commit, tag or branch; null: the newest commit when the images are first fetched here."""
    image: str = "image"
    label: str | None = "label"
    """Name of the column of classes; null: there is none."""
    size: int = Field(ge=4, le=1024)
    """Width and height in pixels."""
    images: int = Field(10_000, ge=10)
    """Largest number of images taken from each split."""


KINDS = {"cifar10": Cifar10, "cifar100": Cifar100, "folder": Folder, "dataset": HubImages}
ImageSource = Annotated[
    Annotated[Literal["digits", "photos"], Tag("word")]
    | Annotated[Cifar10, Tag("cifar10")]
    | Annotated[Cifar100, Tag("cifar100")]
    | Annotated[Folder, Tag("folder")]
    | Annotated[HubImages, Tag("dataset")],
    either(("digits", "photos"), KINDS),
]


class RandAugment(Spec):
    """RandAugment (arXiv 1909.13719): `ops` operations on every image, drawn from `augment.OPERATIONS`."""

    ops: int = Field(2, ge=1, le=8)
    magnitude: int = Field(9, ge=0, le=10)
    """Strength of the operations. 10 stands for 30 degrees, a shear of .3, a shift by .45 of the image, a
    factor of .1 or 1.9, and 4 bits."""


class Augment(Spec):
    """Augmentation of training images, in the order of the fields."""

    crop_padding: int = Field(0, ge=0, le=256)
    """Width of a black margin in pixels, added before a window of the old size is cut at random."""
    flip: float = Field(0.0, ge=0, le=1)
    """Probability that an image is mirrored left to right."""
    randaugment: RandAugment | None = None
    brightness: float = Field(0.0, ge=0, le=4)
    """Change by a factor in [1 - value, 1 + value], not below 0; so for the next two."""
    contrast: float = Field(0.0, ge=0, le=4)
    saturation: float = Field(0.0, ge=0, le=4)
    normalise: bool = True
    """Subtract the training images' mean from every channel and divide by their standard deviation.

    Validation images too, by the same numbers.
    """

    @property
    def coloured(self) -> tuple[float, float, float] | None:
        """Values of brightness, contrast and saturation; None if all are 0."""
        values = (self.brightness, self.contrast, self.saturation)
        return values if any(values) else None

    def problem(self, shape: tuple[int, int, int]) -> str | None:
        """Return the reason why images [channels, height, width] cannot be augmented so, or None."""
        channels, height, width = shape
        if self.saturation and channels == 1:
            return f"saturation {self.saturation:g} has no effect on images in grey; leave it out"
        if self.crop_padding > min(height, width):
            return (
                f"crop_padding {self.crop_padding} is wider than the images, {width}x{height}:"
                " a window may miss all of one"
            )
        return None


@dataclass(frozen=True)
class ImageSet:
    """Images uint8 [n, channels, height, width] and their classes int64 [n], for training and validation."""

    train: np.ndarray
    train_labels: np.ndarray
    val: np.ndarray
    val_labels: np.ndarray
    classes: int
    fingerprint: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return channels, height and width."""
        return self.train.shape[1:]

    @cached_property
    def mean(self) -> np.ndarray:
        """Return the mean of each channel of the training images, with white as 1; float32 [channels]."""
        return self._moments[0]

    @cached_property
    def deviation(self) -> np.ndarray:
        """Return the standard deviation of each channel, like `mean`; at least .001."""
        return self._moments[1]

    @cached_property
    def _moments(self) -> tuple[np.ndarray, np.ndarray]:
        levels = np.arange(256) / 255
        shares = [
            np.bincount(self.train[:, channel].ravel(), minlength=256) / self.train[:, channel].size
            for channel in range(self.shape[0])
        ]
        means = np.array([(share * levels).sum() for share in shares])
        variances = np.array(
            [(share * (levels - mean) ** 2).sum() for share, mean in zip(shares, means, strict=True)]
        )
        return means.astype(np.float32), np.sqrt(np.maximum(variances, 1e-6)).astype(np.float32)


def open_images(source: ImageSource) -> ImageSet:
    """Open a source of images, decoding and caching them if that has not been done yet.

    Args:
        source: `digits`, `photos`, or the description of CIFAR files, a folder or a dataset.

    Returns:
        The image set. Classes are in [0, classes). Cached by source in this process.

    Raises:
        OSError: a file is missing or cannot be read, or the hub cannot be reached.
        ValueError: a file is no image or of another size, a label is no class, or there are too few images.
    """
    match source:
        case "digits":
            return _digits()
        case "photos":
            return _photos()
        case Cifar10():
            return _cifar10(source)
        case Cifar100():
            return _cifar100(source)
        case Folder():
            return read_folder(source)
        case HubImages():
            return _hub(source)


def _image_set(train: cifar.LabelledImages, val: cifar.LabelledImages, classes: int, name: str) -> ImageSet:
    parts = (*train, *val)
    if not (len(train[0]) and len(val[0])):
        raise ValueError(
            f"{name}: {len(train[0])} images to train on and {len(val[0])} to validate on;"
            " there must be some of both"
        )
    for labels in (train[1], val[1]):
        if labels.min() < 0 or labels.max() >= classes:
            wrong = labels.max() if labels.min() >= 0 else labels.min()
            raise ValueError(f"{name}: has a class {wrong}; there are {classes}, from 0")
    content = hashlib.sha256(f"{classes}".encode())
    for part in parts:
        content.update(f"{part.shape}{part.dtype}".encode() + np.ascontiguousarray(part).data)
    return ImageSet(*parts, classes, content.hexdigest()[:16])


# --- scikit-learn's files, read without importing it ----------------------------------------------


def _scikit(*inner: str) -> Path:
    """Return the path of one of scikit-learn's data files."""
    path = scikit_datasets().joinpath(*inner)
    if not path.is_file():
        raise OSError(f"{path}: no such file; scikit-learn brings it: `pip install scikit-learn`")
    return path


@cache
def _digits() -> ImageSet:
    """Open 1,797 handwritten digits of 8x8 pixels in 17 levels of grey; the last 297 validate."""
    table = np.loadtxt(_scikit("data", "digits.csv.gz"), delimiter=",")
    images = np.rint(table[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = table[:, -1].astype(np.int64)
    first, last = slice(_DIGITS_TRAIN), slice(_DIGITS_TRAIN, None)
    return _image_set((images[first], labels[first]), (images[last], labels[last]), 10, "digits")


@cache
def _photos() -> ImageSet:
    """Open crops of 32x32 pixels, 8 apart, of two photographs in colour; the class is the photograph.

    One region of 64x64 in five validates, in a pattern that reaches every row and column. A crop that
    overlaps both kinds of regions is dropped.
    """
    split: dict[bool, list[np.ndarray]] = {False: [], True: []}
    labels: dict[bool, list[int]] = {False: [], True: []}
    for label, name in enumerate(("china.jpg", "flower.jpg")):
        path = _scikit("images", name)
        photo = _decoded(path.read_bytes(), str(path))
        for top in range(0, photo.shape[1] - _CROP + 1, _STRIDE):
            for left in range(0, photo.shape[2] - _CROP + 1, _STRIDE):
                held = {(((x // _REGION) + 2 * (y // _REGION)) % 5 == 0) for y, x in _corners(top, left)}
                crop = photo[:, top : top + _CROP, left : left + _CROP]
                if len(held) == 1 and crop.mean(0).std() >= _FLATTEST:
                    split[held.copy().pop()].append(crop)
                    labels[held.pop()].append(label)
    train, val = ((np.stack(split[held]), np.array(labels[held])) for held in (False, True))
    return _image_set(train, val, 2, "photos")


def _corners(top: int, left: int) -> list[tuple[int, int]]:
    """Return a crop's corners, which are in all regions that it overlaps, since it is smaller than one."""
    return [(y, x) for y in (top, top + _CROP - 1) for x in (left, left + _CROP - 1)]


# --- files ----------------------------------------------------------------------------------------


@cache
def _cifar10(source: Cifar10) -> ImageSet:
    return _image_set(*cifar.read(Path(source.cifar10).expanduser(), 10, "labels"), 10, source.cifar10)


@cache
def _cifar100(source: Cifar100) -> ImageSet:
    parts = cifar.read(Path(source.cifar100).expanduser(), 100, f"{source.labels}_labels")
    return _image_set(*parts, 100 if source.labels == "fine" else 20, source.cifar100)


@cache
def read_folder(source: Folder) -> ImageSet:
    root = Path(source.folder).expanduser()
    if not root.is_dir():
        raise OSError(f"{root}: no such folder")
    parted = (root / "train").is_dir()
    tops = (root / "train", root / "val") if parted else (root, root)
    train, val = map(_files, tops) if parted else _split(_files(root))
    if not (train and val):
        raise ValueError(
            f"{root}: {len(train) + len(val)} images (.png, .jpg);"
            " it takes 10, or folders train and val with some in each"
        )
    classes = sorted({_class(path, tops[0]) for path in train})

    def part(files: list[Path], top: Path) -> cifar.LabelledImages:
        images = [_square(_decoded(path.read_bytes(), str(path)), source.size, str(path)) for path in files]
        return np.stack(images), np.array([_class_of(path, top, classes) for path in files])

    names = [[path.relative_to(root).as_posix() for path in files] for files in (train, val)]
    key = key_of("folder", _VERSION, source.size, names, classes, digest([*train, *val]))
    return _kept(key, lambda: _image_set(part(train, tops[0]), part(val, tops[1]), len(classes), str(root)))


def _files(root: Path) -> list[Path]:
    return [path for path in below(root) if path.suffix.lower() in _SUFFIXES]


def _split(items: list[T]) -> tuple[list[T], list[T]]:
    """Return all items but every tenth, and every tenth: if sorted by class, a tenth of each class."""
    train = [item for number, item in enumerate(items, 1) if number % _VALIDATION_EVERY]
    return train, items[_VALIDATION_EVERY - 1 :: _VALIDATION_EVERY]


def _class(path: Path, top: Path) -> str:
    """Return the name of an image's folder; an empty string, another class, if that is `top`."""
    return "" if path.parent == top else path.parent.name


def _class_of(path: Path, top: Path, classes: list[str]) -> int:
    name = _class(path, top)
    if name not in classes:
        why = f"is of its class {name!r}" if name else "lies beside the folders of classes, too"
        raise ValueError(f"{path}: no training image {why}")
    return classes.index(name)


def _decoded(content: bytes, name: str) -> np.ndarray:
    """Decode a PNG or JPEG file to uint8 [3, height, width]; ValueError if it is neither, or is damaged."""
    from PIL import Image

    try:
        with (
            warnings.catch_warnings(action="error"),
            Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as image,
        ):
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Warning, Image.DecompressionBombError) as error:
        raise ValueError(f"{name}: not an image that can be read (PNG or JPEG): {error}") from None
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _square(image: np.ndarray, size: int, name: str) -> np.ndarray:
    if image.shape[1:] != (size, size):
        raise ValueError(
            f"{name}: is {image.shape[2]}x{image.shape[1]} pixels, not {size}x{size};"
            " scale or cut all images first"
        )
    return image


def _kept(key: str, make: Callable[[], ImageSet]) -> ImageSet:
    """Return the set in the cache under a key, or make it: decoding 100,000 files takes a minute."""

    def fill(folder: Path) -> None:
        made = make()
        for name in _ARRAYS:
            np.save(folder / f"{name}.npy", getattr(made, name), allow_pickle=False)
        (folder / "about.json").write_text(
            json.dumps({"classes": made.classes, "fingerprint": made.fingerprint})
        )

    folder = kept("images", key, fill)
    arrays = [np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS]
    return ImageSet(*arrays, **json.loads((folder / "about.json").read_bytes()))


# --- datasets of a hub ----------------------------------------------------------------------------


@cache
def _hub(source: HubImages) -> ImageSet:
    commit = version(source.dataset, source.revision, _INSTEAD)
    key = key_of("hub", _VERSION, commit, source.model_dump(mode="json", exclude={"revision"}))

    def make() -> ImageSet:
        images = _fetched(source, source.split, commit)
        parts = (images, _fetched(source, source.val_split, commit)) if source.val_split else _split(images)
        if not all(parts):
            required = (
                "some in both"
                if source.val_split
                else f"at least {_VALIDATION_EVERY}, or a val_split of its own"
            )
            raise ValueError(
                f"dataset {source.dataset}: of its images there are {len(parts[0])} to train on"
                f" and {len(parts[1])} to validate on; it takes {required}"
            )
        train, val = (
            (np.stack([image for image, _ in part]), np.array([label for _, label in part])) for part in parts
        )
        return _image_set(train, val, int(train[1].max()) + 1, f"dataset {source.dataset}")

    return _kept(key, make)


def _fetched(source: HubImages, split: str, commit: str) -> list[tuple[np.ndarray, int]]:
    images = []
    for number, row in enumerate(
        islice(rows(source.dataset, source.config, split, commit, source.image), source.images)
    ):
        name = f"dataset {source.dataset}, split {split}, row {number}"
        label = 0 if source.label is None else row.get(source.label)
        if type(label) is not int:
            raise ValueError(
                f"{name}: no whole number in column {source.label!r};"
                f" there are {', '.join(row)} (label: null for none)"
            )
        image = _square(_decoded(_content(row[source.image], source.image, name), name), source.size, name)
        images.append((image, label))
    return images


def _content(cell: object, column: str, name: str) -> bytes:
    """Return the bytes of the image file that a cell contains, or of the file whose path it contains.

    Args:
        cell: `{"bytes": ..., "path": ...}`, either of which may be None; None for an empty cell.
        column: name of the cell's column, for an error's message.
        name: name of its row, for the same.
    """
    content, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (None, None)
    try:
        return content or Path(path or "").read_bytes()  # OSError for no path: "" is a folder
    except OSError:
        raise ValueError(f"{name}: no image in column {column!r}, nor the path of one") from None
