"""A masked autoencoder of images (arXiv 2111.06377) as own code of a sweep; `ablate init NAME --images`
copies it.

An encoder gets a quarter of an image's patches, and a decoder predicts the pixels of the others. `Config` has
the keys of `config:` in the YAML; `train`, at the end, is called for each arm and seed. Everything random is
a function of (seed, step, micro-batch): all arms of a seed see the same images, augmentation and masks, and a
resumed run continues with the same bits. The model is that of transformers: `pip install 'ablate-fp4[hf]'`.
"""

import io
import math
import pickle
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError
from torch import Tensor, nn


class Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RandAugment(Keys):
    """RandAugment (arXiv 1909.13719): `ops` of OPERATIONS on every image."""

    ops: int = Field(2, ge=1, le=8)
    magnitude: int = Field(9, ge=0, le=10)
    """10 is 30 degrees, a shear of .3, a shift by .45 of the image, a factor of .1 or 1.9, and 4 bits."""


class Augment(Keys):
    """Changes of training images, in the order of the fields."""

    crop_padding: int = Field(0, ge=0, le=256)
    """Width of a black margin in pixels, added before a window of the old size is cut at random."""
    flip: float = Field(0.5, ge=0, le=1)
    """Probability that an image is mirrored left to right."""
    randaugment: RandAugment | None = None
    brightness: float = Field(0.0, ge=0, le=4)
    """Change by a factor in [1 - value, 1 + value], not below 0; so for the next two."""
    contrast: float = Field(0.0, ge=0, le=4)
    saturation: float = Field(0.0, ge=0, le=4)
    normalise: bool = True
    """Mean 0 and standard deviation 1 in every channel of the training images; the others by the same
    numbers."""


class Stack(Keys):
    """Transformer blocks."""

    layers: int = Field(2, ge=1)
    width: int = Field(64, ge=16)
    heads: int = Field(2, ge=1)
    hidden: int | None = Field(None, ge=16)
    """Width of the MLP; null: 4 times the width."""


class Config(Keys):
    images: Literal["photos", "digits", "cifar10", "cifar100", "folder", "dataset"] = "photos"
    """`photos`, 32x32 in colour, and `digits`, 8x8 in grey, come with scikit-learn. The others are read from
    the folder that `data:` of the workload names: the files of a published CIFAR archive, PNG and JPEG files
    of one size, or a dataset that the library `datasets` reads."""
    column: str = "image"
    """Column of the images, and split that validates, of a dataset; null: every tenth image validates."""
    val_split: str | None = None
    augment: Augment = Augment()
    patch: int = Field(4, ge=1, le=1024)
    """Side of a patch, in pixels."""
    mask_ratio: float = Field(0.75, gt=0, lt=1)
    """Share of the patches that are masked, to the nearest whole patch."""
    norm_pix: bool = False
    """Predict each patch less its mean, divided by its deviation; losses then have another unit."""
    encoder: Stack = Stack(layers=4, width=96, heads=3)
    decoder: Stack = Stack()
    batch: int = Field(16, ge=1)
    """Images of a micro-batch."""
    accumulate: int = Field(1, ge=1)
    """Micro-batches of a step."""
    lr: float = Field(3e-3, gt=0)
    """Peak learning rate: it rises linearly, stays, and falls linearly to 0."""
    warmup: float = Field(0.05, ge=0, le=1)
    """Fractions of the run over which it rises and falls."""
    decay: float = Field(0.2, ge=0, le=1)
    weight_decay: float = Field(0.1, ge=0)
    clip: float | None = Field(1.0, gt=0)
    """Largest gradient norm; null: no clipping."""
    eval_every: int = Field(100, ge=1)
    eval_images: int = Field(256, ge=1)
    eval_batch: int = Field(16, ge=1)

    @model_validator(mode="after")
    def fits(self) -> "Config":
        """Refuse what cannot be used with images of a known size; for others, `train` does once they are
        read. `ablate plan` names the line of each key."""
        if shape := SHAPES.get(self.images):
            empty = np.empty((0, *shape))
            wrong = [
                InitErrorDetails(
                    type=PydanticCustomError("misfit", why), loc=tuple(key.split(".")), input=None
                )
                for key, why in problems(self, ImageSet(empty, empty))
            ]
            if wrong:
                raise ValidationError.from_exception_data("Config", wrong)
        return self


SHAPES = {"photos": (3, 32, 32), "digits": (1, 8, 8), "cifar10": (3, 32, 32), "cifar100": (3, 32, 32)}
"""Channels, height and width of the images whose size is known before they are read."""


# --- images ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageSet:
    """Images uint8 [n, channels, height, width] to train on and to validate."""

    train: np.ndarray
    val: np.ndarray

    @cached_property
    def mean(self) -> Tensor:
        """Mean of each channel of the training images, with white as 1, fp32 [channels, 1, 1]."""
        return torch.from_numpy(self.train.mean((0, 2, 3)) / 255).float().view(-1, 1, 1)

    @cached_property
    def deviation(self) -> Tensor:
        """Standard deviation of each channel, like `mean`; at least .001."""
        return torch.from_numpy(self.train.std((0, 2, 3)) / 255).float().clamp_min(1e-3).view(-1, 1, 1)


@cache
def open_images(
    kind: str, data: tuple[Path, ...] = (), column: str = "image", val_split: str | None = None
) -> ImageSet:
    """Return an image set by the name of its kind, `Config.images`, and the folders under `data:`. OSError if
    a file is missing, ValueError if one is damaged or of another size."""
    if kind in ("photos", "digits"):
        return photos() if kind == "photos" else digits()
    if len(data) != 1:
        raise ValueError(f"images: {kind} are read from one folder; give it under `data:` of the workload")
    if kind in CIFAR:
        return cifar(kind, data[0])
    return folder_of_files(data[0]) if kind == "folder" else dataset(data[0], column, val_split)


def digits() -> ImageSet:
    """Return 1,797 handwritten digits in 17 levels of grey; the last 297 validate."""
    from sklearn.datasets import load_digits

    images = np.rint(load_digits().images[:, None] * (255 / 16)).astype(np.uint8)
    return ImageSet(images[:1500], images[1500:])


def photos() -> ImageSet:
    """Return crops of two photographs, 8 pixels apart, without flat ones (sky, blurred background).

    One region of 64x64 in five validates, in a pattern that reaches every row and column. A crop that
    overlaps both kinds of regions is dropped, so that no training pixel is in a validation image.
    """
    from sklearn.datasets import load_sample_images

    parts: dict[bool, list[np.ndarray]] = {False: [], True: []}
    for photo in load_sample_images().images:
        for top in range(0, photo.shape[0] - 31, 8):
            for left in range(0, photo.shape[1] - 31, 8):
                corners = [(y // 64, x // 64) for y in (top, top + 31) for x in (left, left + 31)]
                held = {(x + 2 * y) % 5 == 0 for y, x in corners}
                crop = photo[top : top + 32, left : left + 32]
                if len(held) == 1 and crop.mean(2).std() >= 8:
                    parts[held.pop()].append(crop.transpose(2, 0, 1))
    return ImageSet(np.stack(parts[False]), np.stack(parts[True]))


def folder_of_files(root: Path) -> ImageSet:
    """Return the PNG and JPEG files below a folder: in `train` and `val` there, or every tenth validates."""
    if not root.is_dir():
        raise OSError(f"{root}: no such folder")

    def below(folder: Path) -> list[Path]:
        return sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".png", ".jpg", ".jpeg"))

    files = below(root)
    train, val = (
        (below(root / part) for part in ("train", "val")) if (root / "train").is_dir() else tenths(files)
    )
    return image_set(str(root), *([(str(path), decoded(path)) for path in part] for part in (train, val)))


def dataset(root: Path, column: str, val_split: str | None) -> ImageSet:
    """Return the images of a local dataset, in a layout that the library `datasets` reads."""
    from datasets import load_dataset

    def read(split: str) -> list[tuple[str, np.ndarray]]:
        images = []
        for number, row in enumerate(load_dataset(str(root), split=split, streaming=True)):
            name = f"{root}, split {split}, row {number}"
            if column not in row or row[column] is None:
                raise ValueError(f"{name}: no image in column {column!r}; there are {', '.join(row)}")
            images.append((name, np.asarray(row[column].convert("RGB")).transpose(2, 0, 1)))
        return images

    return image_set(str(root), *((read("train"), read(val_split)) if val_split else tenths(read("train"))))


def tenths(items: list) -> tuple[list, list]:
    """Return all items but every tenth, and every tenth."""
    return [item for number, item in enumerate(items, 1) if number % 10], items[9::10]


def image_set(root: str, train: list[tuple[str, np.ndarray]], val: list[tuple[str, np.ndarray]]) -> ImageSet:
    """Return images by name as a set; ValueError if there are too few, or sizes differ."""
    if not (train and val):
        counts = f"{len(train)} images to train on and {len(val)} to validate on"
        raise ValueError(f"{root}: {counts}; it takes 10, or a part of its own to validate")
    shape = train[0][1].shape
    for name, image in (*train, *val):
        if image.shape != shape:
            sizes = [f"{width}x{height}" for _, height, width in (image.shape, shape)]
            raise ValueError(f"{name}: is {sizes[0]} pixels, not {sizes[1]}; scale or cut all images first")
    return ImageSet(*(np.stack([image for _, image in part]) for part in (train, val)))


def decoded(path: Path) -> np.ndarray:
    """Return an image file as uint8 [3, height, width]; ValueError if it is damaged."""
    try:
        with warnings.catch_warnings(action="error"), Image.open(path, formats=("PNG", "JPEG")) as image:
            return np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    except (OSError, SyntaxError, ValueError, Warning, Image.DecompressionBombError) as error:
        raise ValueError(f"{path}: not an image that can be read (PNG or JPEG): {error}") from None


# --- CIFAR as published: binary files, or pickles, read without running code in them ----------------

CIFAR = {
    "cifar10": ([f"data_batch_{number}" for number in range(1, 6)], ["test_batch"], {"labels": 10}),
    "cifar100": (["train"], ["test"], {"coarse_labels": 20, "fine_labels": 100}),
}
"""Names of the files to train on and to validate, and the number of classes by name of a label. Labels are
checked, and not used: a file that is not CIFAR's has others."""


def cifar(kind: str, folder: Path) -> ImageSet:
    """Return the images of an archive in a folder, or in the folder that it unpacks into."""
    train, test, classes = CIFAR[kind]
    for inner in (folder, *sorted(folder.glob("cifar-10*"))):
        for end, read in ((".bin", binary), ("", pickled)):
            if (inner / f"{train[0]}{end}").is_file():
                if missing := [
                    f"{name}{end}" for name in train + test if not (inner / f"{name}{end}").is_file()
                ]:
                    raise OSError(f"{inner}: {missing[0]} is missing beside {train[0]}{end}")
                parts = ([read(inner / f"{name}{end}", classes) for name in names] for names in (train, test))
                return ImageSet(*map(np.concatenate, parts))
    raise OSError(
        f"{folder}: no {train[0]}.bin or {train[0]} of {kind} there, as the published archives hold"
    )


def binary(path: Path, classes: dict[str, int]) -> np.ndarray:
    """Return the images of a binary file: for each its labels, a byte each, and 3,072 pixels, red first."""
    content, width = np.fromfile(path, np.uint8), len(classes) + 3072
    if len(content) == 0 or len(content) % width:
        raise ValueError(f"{path}: {len(content)} bytes are not a whole number of images of {width} bytes")
    rows = content.reshape(-1, width)
    check_labels(path, dict(zip(classes, rows.T, strict=False)), classes)
    return rows[:, len(classes) :].reshape(-1, 3, 32, 32)


def pickled(path: Path, classes: dict[str, int]) -> np.ndarray:
    content = unpickle(path.read_bytes(), str(path))
    try:
        items = content.items() if isinstance(content, dict) else ()
        table = {key.decode() if isinstance(key, bytes) else key: value for key, value in items}
        images = table["data"].reshape(-1, 3, 32, 32)
        labels = {name: np.asarray(table[name], dtype=np.int64) for name in classes}
        whole = images.dtype == np.uint8 and all(each.shape == (len(images),) for each in labels.values())
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        whole = False
    if not whole or not len(images):
        held = f"`data`, uint8 of 3,072 columns, and as many {' and '.join(classes)}"
        raise ValueError(f"{path}: not a batch of CIFAR: it must hold {held}")
    check_labels(path, labels, classes)
    return images


def check_labels(path: Path, labels: dict[str, np.ndarray], classes: dict[str, int]) -> None:
    for name, count in classes.items():
        if wrong := [label for label in labels[name].tolist() if not 0 <= label < count]:
            raise ValueError(f"{path}: has a class {wrong[0]}; there are {count}, from 0")


def unpickle(content: bytes, name: str) -> object:
    """Return the content of a pickle of plain values and numpy arrays; ValueError if it is damaged, or names
    anything else, which is not called."""
    try:
        return Plain(io.BytesIO(content), encoding="bytes").load()
    except Refused as error:
        why = f"this pickle would call {error}; only numpy arrays and plain values are read"
        raise ValueError(f"{name}: refused: {why}") from None
    except Exception as error:  # a torn pickle raises nearly anything
        raise ValueError(f"{name}: not a whole pickle ({type(error).__name__}: {error})") from None


class Refused(Exception):
    pass


SAFE: dict[tuple[str, str], Callable[..., object]] = {
    # The empty array that a pickle then fills; of numpy's own class, whatever the pickle names.
    ("numpy.core.multiarray", "_reconstruct"): lambda kind, shape, code: np.ndarray((0,), np.uint8),
    ("numpy._core.multiarray", "_reconstruct"): lambda kind, shape, code: np.ndarray((0,), np.uint8),
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): lambda text, encoding: text.encode(
        "latin-1"
    ),  # bytes that Python 3 wrote for Python 2
}


class Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in SAFE:
            raise Refused(f"{module}.{name}")
        return SAFE[module, name]


# --- the images of a step, and their augmentation -------------------------------------------------


def draws(*key: str | int) -> torch.Generator:
    """Return the generator of a purpose, seed, step and micro-batch."""
    return torch.Generator().manual_seed(random.Random(repr(key)).getrandbits(63))


def drawn(images: ImageSet, seed: int, step: int, micro_batch: int, count: int) -> Tensor:
    """Return the numbers of a batch's images, drawn with replacement; the same for every augmentation."""
    return torch.randint(len(images.train), (count,), generator=draws("images", seed, step, micro_batch))


def image_batch(
    images: ImageSet, seed: int, step: int, micro_batch: int, count: int, augment: Augment
) -> Tensor:
    """Return a batch of augmented training images, fp32 [count, channels, height, width]."""
    batch = floats(images.train[drawn(images, seed, step, micro_batch, count).numpy()])

    def uniform(purpose: str) -> Tensor:
        """Return four numbers in [0, 1) for each image, [4, count]."""
        return torch.rand(count, 4, generator=draws(purpose, seed, step, micro_batch)).t()

    if augment.crop_padding:
        batch = crop(batch, augment.crop_padding, uniform("crop"))
    if augment.flip:
        batch = torch.where((uniform("flip")[0] < augment.flip).view(-1, 1, 1, 1), batch.flip(-1), batch)
    if augment.randaugment:
        for number in range(augment.randaugment.ops):
            batch = randaugment(batch, augment.randaugment.magnitude, uniform(f"operation {number}"))
    jitter = (augment.brightness, augment.contrast, augment.saturation)
    if any(jitter):
        for draw, change, most in zip(
            uniform("colour"), (brightness, contrast, saturation), jitter, strict=False
        ):
            low = 1 - min(most, 1)
            batch = change(batch, (low + draw * (1 + most - low)).view(-1, 1, 1, 1)) if most else batch
    return (batch - images.mean) / images.deviation if augment.normalise else batch


def validation_images(images: ImageSet, count: int, size: int, augment: Augment) -> list[Tensor]:
    """Return evenly spaced validation images in batches of `size`; nothing is drawn, and of `augment` only
    `normalise` applies."""
    batch = floats(images.val[validation_indices(images, count).numpy()])
    return list(((batch - images.mean) / images.deviation if augment.normalise else batch).split(size))


def validation_indices(images: ImageSet, count: int) -> Tensor:
    count = max(1, min(count, len(images.val)))
    return torch.arange(count) * len(images.val) // count


def floats(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(pixels).float() / 255


def crop(batch: Tensor, padding: int, draw: Tensor) -> Tensor:
    """Return a random window of the same size of each image in a black margin."""
    count, channels, height, width = batch.shape
    top, left = (draw[:2] * (2 * padding + 1)).long()
    rows = (top.view(-1, 1) + torch.arange(height)).view(count, 1, height, 1)
    columns = (left.view(-1, 1) + torch.arange(width)).view(count, 1, 1, width)
    image, channel = torch.arange(count).view(-1, 1, 1, 1), torch.arange(channels).view(1, -1, 1, 1)
    return F.pad(batch, (padding,) * 4)[image, channel, rows, columns]


def grey(batch: Tensor) -> Tensor:
    """Return perceived brightness (ITU-R BT.601), [n, 1, height, width]."""
    weights = torch.tensor((0.299, 0.587, 0.114)).view(1, 3, 1, 1)
    return batch if batch.shape[1] == 1 else (batch * weights).sum(1, keepdim=True)


def brightness(batch: Tensor, strength: Tensor) -> Tensor:
    return (batch * strength).clamp(0, 1)


def contrast(batch: Tensor, strength: Tensor) -> Tensor:
    return torch.lerp(grey(batch).mean((2, 3), keepdim=True).expand_as(batch), batch, strength).clamp(0, 1)


def saturation(batch: Tensor, strength: Tensor) -> Tensor:
    return torch.lerp(grey(batch).expand_as(batch), batch, strength).clamp(0, 1)


def warped(batch: Tensor, *entries: Tensor | float) -> Tensor:
    """Resample images at the affine map (xx, xy, x0, yx, yy, y0) of their coordinates, which span [-1, 1];
    black outside."""
    maps = torch.stack([entry * torch.ones(len(batch)) for entry in entries], 1).view(-1, 2, 3)
    return F.grid_sample(
        batch, F.affine_grid(maps, list(batch.shape), align_corners=False), align_corners=False
    )


def rotated(batch: Tensor, strength: Tensor) -> Tensor:
    turn, ratio = strength * math.radians(30), batch.shape[2] / batch.shape[3]
    return warped(batch, turn.cos(), -turn.sin() * ratio, 0.0, turn.sin() / ratio, turn.cos(), 0.0)


def posterized(batch: Tensor, strength: Tensor) -> Tensor:
    """Keep 8 to 4 bits of each pixel."""
    step = 2 ** (4 * strength.abs()).round().view(-1, 1, 1, 1)
    return ((batch * 255).round() / step).floor() * step / 255


def solarized(batch: Tensor, strength: Tensor) -> Tensor:
    """Invert pixels that are brighter than a threshold."""
    return torch.where(batch > (1 - strength.abs()).view(-1, 1, 1, 1), 1 - batch, batch)


def factor(strength: Tensor) -> Tensor:
    return (1 + 0.9 * strength).view(-1, 1, 1, 1)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "identity": lambda batch, strength: batch,
    "brightness": lambda batch, strength: brightness(batch, factor(strength)),
    "contrast": lambda batch, strength: contrast(batch, factor(strength)),
    "saturation": lambda batch, strength: saturation(batch, factor(strength)),
    "posterize": posterized,
    "solarize": solarized,
    "rotate": rotated,
    "shear_x": lambda batch, strength: warped(batch, 1.0, 0.3 * strength, 0.0, 0.0, 1.0, 0.0),
    "shear_y": lambda batch, strength: warped(batch, 1.0, 0.0, 0.0, 0.3 * strength, 1.0, 0.0),
    "translate_x": lambda batch, strength: warped(batch, 1.0, 0.0, 0.9 * strength, 0.0, 1.0, 0.0),
    "translate_y": lambda batch, strength: warped(batch, 1.0, 0.0, 0.0, 0.0, 1.0, 0.9 * strength),
}
"""Functions of images fp32 [n, channels, height, width] and strengths in [-1, 1], [n], to images."""


def randaugment(batch: Tensor, magnitude: int, draw: Tensor) -> Tensor:
    """Apply one random operation to each image, its strength with a random sign."""
    choice = (draw[0] * len(OPERATIONS)).long()
    strength = torch.where(draw[1] < 0.5, -1.0, 1.0) * (magnitude / 10)
    changed = batch.clone()
    for number, operation in enumerate(OPERATIONS.values()):
        chosen = (choice == number).nonzero().squeeze(1)
        if len(chosen):
            changed[chosen] = operation(batch[chosen], strength[chosen])
    return changed


# --- masks and patches ----------------------------------------------------------------------------


def patches_of(config: Config, images: ImageSet) -> int:
    """Return the number of patches of an image."""
    return (images.train.shape[-1] // config.patch) ** 2


def visible_of(config: Config, images: ImageSet) -> int:
    """Return the number of patches of an image that are not masked."""
    return patches_of(config, images) - round(config.mask_ratio * patches_of(config, images))


def mask_order(
    seed: int, step: int, micro_batch: int, images: int, patches: int, purpose: str = "masks"
) -> Tensor:
    """Return a number for every patch, int64 [images, patches], distinct within an image; those with the
    smallest stay visible."""
    return torch.rand(images, patches, generator=draws(purpose, seed, step, micro_batch)).argsort(1)


def masks(order: Tensor, visible: int) -> Tensor:
    """Return the masked patches, bool [images, patches]."""
    return order.argsort(1).argsort(1) >= visible


def validation(config: Config, images: ImageSet) -> list[tuple[Tensor, Tensor]]:
    """Return batches of validation images with masks, the same for every seed and arm."""
    parts = validation_images(images, config.eval_images, config.eval_batch, config.augment)
    patches = patches_of(config, images)
    return [(part, mask_order(0, 0, n, len(part), patches, "validation")) for n, part in enumerate(parts)]


def patchify(images: Tensor, patch: int) -> Tensor:
    """Reshape [n, channels, side, side] to [n, patches, pixels], both row by row, with channels last."""
    n, channels, side, _ = images.shape
    grid = side // patch
    parts = images.reshape(n, channels, grid, patch, grid, patch).permute(0, 2, 4, 3, 5, 1)
    return parts.reshape(n, grid * grid, patch * patch * channels)


def unpatchify(patches: Tensor, patch: int, channels: int) -> Tensor:
    """Invert `patchify`."""
    n, count, _ = patches.shape
    grid = math.isqrt(count)
    parts = patches.view(n, grid, grid, patch, patch, channels).permute(0, 5, 1, 3, 2, 4)
    return parts.reshape(n, channels, grid * patch, grid * patch)


def moments(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of each patch as the model's own loss has them; a flat one has variance
    1e-6."""
    return patches.mean(-1, keepdim=True), (patches.var(-1, keepdim=True) + 1e-6).sqrt()


def blank_loss(config: Config, images: ImageSet) -> float:
    """Return the validation loss of a guess that ignores what the patches show: for each masked patch and
    channel the mean of the image's visible pixels; if the loss is of normalised pixels, the patch's own
    mean."""
    losses = []
    for pixels, order in validation(config, images):
        patches, masked = patchify(pixels, config.patch), masks(order, visible_of(config, images))
        if config.norm_pix:
            mean, deviation = moments(patches)
            error = (patches - mean) / deviation
        else:
            channels = patches.unflatten(-1, (-1, pixels.shape[1]))
            shown = (~masked)[..., None, None].expand_as(channels)
            error = (channels - (channels * shown).sum((1, 2), True) / shown.sum((1, 2), True)).flatten(2)
        losses.append(error[masked].square().mean().item())
    return math.fsum(losses) / len(losses)


def problems(config: Config, images: ImageSet) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each key that cannot be used with these images."""
    channels, height, width = images.train.shape[1:]
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack.width % 4:
            why = "is no multiple of 4: sine and cosine of row and column make up a position"
            yield f"{name}.width", f"{stack.width} {why}"
        if stack.width % stack.heads:
            yield f"{name}.heads", f"{stack.heads} does not divide width {stack.width}"
    if height != width:
        yield "images", f"are {width}x{height} pixels; the model takes square ones"
    elif height % config.patch:
        yield "patch", f"{config.patch} does not divide the side of the images, {height}"
    elif (visible := visible_of(config, images)) in (0, patches_of(config, images)):
        masked = f"masks {'none' if visible else 'all'} of {patches_of(config, images)} patches"
        yield "mask_ratio", f"{config.mask_ratio:g} {masked}; at least one must be masked, and one visible"
    if config.norm_pix and config.patch**2 * channels == 1:
        yield "norm_pix", "a patch of one number has no deviation; take a larger patch"
    if config.augment.saturation and channels == 1:
        yield "augment.saturation", "has no effect on images in grey; leave it out"
    if (padding := config.augment.crop_padding) > min(height, width):
        size = f"{width}x{height}: a window may miss all of one"
        yield "augment.crop_padding", f"{padding} is wider than the images, {size}"


# --- the model ------------------------------------------------------------------------------------


def autoencoder(config: Config, images: ImageSet, seed: int) -> nn.Module:
    """Return the model in fp32, with weights that depend on the seed alone.

    As in the paper: Xavier uniform matrices, biases 0, norms 1, fixed positions. The library draws from a
    global generator, and in transformers 5.23 leaves both position embeddings at zero, so that the decoder
    could not distinguish masked patches.
    """
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    channels, side, _ = images.train.shape[1:]
    shape = ViTMAEConfig(
        hidden_size=config.encoder.width,
        num_hidden_layers=config.encoder.layers,
        num_attention_heads=config.encoder.heads,
        intermediate_size=config.encoder.hidden or 4 * config.encoder.width,
        decoder_hidden_size=config.decoder.width,
        decoder_num_hidden_layers=config.decoder.layers,
        decoder_num_attention_heads=config.decoder.heads,
        decoder_intermediate_size=config.decoder.hidden or 4 * config.decoder.width,
        image_size=side,
        patch_size=config.patch,
        num_channels=channels,
        # The library keeps int(patches * (1 - ratio)) patches, which rounding errors could make one less.
        mask_ratio=1 - (visible_of(config, images) + 0.5) / patches_of(config, images),
        norm_pix_loss=config.norm_pix,
    )
    with torch.device("meta"):
        model = ViTMAEForPreTraining(shape)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        parameter.data.copy_(initial(name, parameter.shape, side // config.patch, generator))
    return model.train()


def initial(name: str, shape: torch.Size, grid: int, generator: torch.Generator) -> Tensor:
    if name.endswith(("position_embeddings", "pos_embed")):
        return positions(grid, shape[-1])
    if name.endswith("token"):
        return torch.randn(shape, generator=generator) * 0.02
    if len(shape) == 1:
        return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
    bound = math.sqrt(6 / (shape[0] + shape.numel() // shape[0]))
    return (2 * torch.rand(shape, generator=generator) - 1) * bound


def positions(grid: int, width: int) -> Tensor:
    """Return position embeddings, fp32 [1, 1 + grid^2, width]: zeros for the class token; then for each
    patch, row by row, sines and cosines of its column and of its row."""
    frequency = 10000.0 ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angles = torch.arange(grid, dtype=torch.float64).outer(frequency)
    axis = torch.cat((angles.sin(), angles.cos()), 1)  # [grid, width / 2]
    table = torch.cat((axis.repeat(grid, 1), axis.repeat_interleave(grid, 0)), 1)
    return torch.cat((torch.zeros(1, width, dtype=torch.float64), table)).float().unsqueeze(0)


# --- pictures -------------------------------------------------------------------------------------


class Reconstruction(NamedTuple):
    """Images as pixels in [0, 1], fp32 [n, channels, side, side]."""

    original: Tensor
    visible: Tensor
    """The original with its masked patches in grey."""
    reconstruction: Tensor
    """The original with its masked patches as predicted."""
    masked: Tensor
    """Patches that were masked, bool [n, patches]."""


@torch.no_grad()
def reconstruct(
    model: nn.Module, config: Config, images: ImageSet, pixels: Tensor, order: Tensor
) -> Reconstruction:
    """Return the reconstruction of a batch. A model of normalised pixels is given each patch's true
    moments."""
    predicted = model(pixel_values=pixels, noise=order).logits.float()
    truth, hidden = patchify(pixels, config.patch), masks(order, visible_of(config, images))
    if config.norm_pix:
        mean, deviation = moments(truth)
        predicted = predicted * deviation + mean

    def whole(patches: Tensor) -> Tensor:
        batch = unpatchify(patches, config.patch, pixels.shape[1]).cpu()
        return (batch * images.deviation + images.mean if config.augment.normalise else batch).clamp(0, 1)

    cover = unpatchify(hidden.unsqueeze(-1).expand_as(truth).float(), config.patch, pixels.shape[1]).cpu()
    original, guess = whole(truth), whole(torch.where(hidden.unsqueeze(-1), predicted, truth))
    return Reconstruction(original, torch.where(cover > 0, 0.5, original), guess, hidden.cpu())


def psnr(parts: Iterable[Reconstruction], patch: int) -> float:
    """Return the peak signal-to-noise ratio of masked pixels in dB, with peak 1; infinite without error."""
    errors = [patchify(part.reconstruction - part.original, patch)[part.masked].flatten() for part in parts]
    error = torch.cat(errors).double().square().mean().item()
    return -10 * math.log10(error) if error else math.inf


def save_pictures(folder: Path, parts: list[Reconstruction], patch: int) -> None:
    """Save `reconstruction.png`, a grid of six images, and `reconstruction.npz`, which the report of a sweep
    shows with the arms side by side: uint8 levels, and each image's ratio in dB."""
    images = [
        Reconstruction(*(field[n : n + 1] for field in part))
        for part in parts
        for n in range(len(part.masked))
    ]
    shown = [images[n * len(images) // 6] for n in range(6)] if len(images) > 6 else images
    kinds = ("original", "visible", "reconstruction")
    rows = [[getattr(image, kind)[0].numpy() for kind in kinds] for image in shown]
    count = shown[0].masked.shape[1]
    labels = ("original", f"visible, {count - int(shown[0].masked.sum())} of {count}", "reconstruction")
    foot = f"{psnr(parts, patch):.1f} dB over masked pixels of {len(images)} images"
    folder.mkdir(parents=True, exist_ok=True)
    montage(folder / "reconstruction.png", labels, rows, foot)
    arrays = {
        kind: levels(np.stack(column)) for kind, column in zip(kinds, zip(*rows, strict=True), strict=True)
    }
    decibels = np.array([psnr([image], patch) for image in shown])
    np.savez_compressed(folder / "reconstruction.npz", decibels=decibels, **arrays)


def levels(image: np.ndarray) -> np.ndarray:
    """Return an image in [0, 1] as uint8 levels."""
    return np.rint(image * 255).astype(np.uint8)


def montage(path: Path, columns: tuple[str, ...], rows: list[list[np.ndarray]], foot: str = "") -> None:
    """Write images fp32 [channels, height, width] in a labelled grid as a PNG, their pixels enlarged to
    squares."""
    height, width = rows[0][0].shape[1:]
    gap, scale, font = 6, max(1, round(128 / max(height, width))), ImageFont.load_default(14)
    line = 14 + 2 * gap
    tall = line + len(rows) * (height * scale + gap) + (line if foot else gap)
    sheet = Image.new("RGB", (gap + len(columns) * (width * scale + gap), tall), (255, 255, 255))
    pen = ImageDraw.Draw(sheet)
    for column, name in enumerate(columns):
        left = gap + column * (width * scale + gap)
        pen.text((left, gap), name, fill=(26, 29, 33), font=font)
        for row, images in enumerate(rows):
            colours = (
                np.broadcast_to(levels(images[column]), (3, height, width)).repeat(scale, 1).repeat(scale, 2)
            )
            tile = Image.fromarray(np.ascontiguousarray(colours.transpose(1, 2, 0)))
            sheet.paste(tile, (left, line + row * (height * scale + gap)))
    pen.text((gap, tall - line + gap), foot, fill=(26, 29, 33), font=font)
    sheet.save(path, optimize=True)


# --- training -------------------------------------------------------------------------------------


def lr_at(config: Config, step: int, steps: int) -> float:
    """Return the learning rate of a step."""
    rise, fall = config.warmup * steps, config.decay * steps
    return config.lr * min(1.0, (step + 1) / (rise + 1), (steps - step - 1) / fall if fall >= 1 else 1.0)


def train(trial, config: Config) -> None:
    """Train the arm's model, record its losses, and save pictures."""
    images = open_images(config.images, trial.data, config.column, config.val_split)
    for key, why in problems(config, images):
        raise ValueError(f"{key}: {why}")
    model = trial.convert(autoencoder(config, images, trial.seed)).to(trial.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]  # not the positions
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    if trial.start:  # each window of a forked design continues the checkpoint
        saved = torch.load(trial.start, weights_only=True, map_location=trial.device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    trial.checkpoint(model=model, optimizer=optimizer)
    held = [(pixels.to(trial.device), order.to(trial.device)) for pixels, order in validation(config, images)]
    blank, patches = blank_loss(config, images), patches_of(config, images)

    def batches(step: int) -> list[tuple[Tensor, Tensor]]:
        """Return the micro-batches of a step."""
        parts = []
        for part in range(config.accumulate):
            pixels = image_batch(images, trial.seed, step, part, config.batch, config.augment)
            order = mask_order(trial.seed, step, part, config.batch, patches)
            parts.append((pixels.to(trial.device), order.to(trial.device)))
        return parts

    def backward(parts: list[tuple[Tensor, Tensor]]) -> float:
        """Add the gradient of the mean loss, and return the loss: squared errors of masked pixels alone."""
        total = torch.zeros((), device=trial.device)
        for pixels, order in parts:
            loss = model(pixel_values=pixels, noise=order).loss / config.accumulate
            loss.backward()
            total += loss.detach()
        return total.item()

    def losses() -> list[float]:
        with torch.no_grad():
            return [model(pixel_values=pixels, noise=order).loss.item() for pixels, order in held]

    for step, parts in trial.steps(batches):
        rate = config.lr if trial.forked else lr_at(config, step, trial.max_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate * trial.lr_factor
        with trial.step():
            trial.compare_gradient(lambda parts=parts: backward(parts))
            loss = backward(parts)
            norm = nn.utils.clip_grad_norm_(trained, config.clip or math.inf)
            optimizer.step()
            optimizer.zero_grad()
        trial.log({"train/loss": loss, "grad/norm": norm.item()})
        if (step + 1) % config.eval_every == 0 or step + 1 == trial.max_steps:
            with trial.evaluation():
                found = losses()
            trial.log_batches(found)
            with trial.evaluation(high_precision=True):
                trial.log_batches(losses(), "val/loss_bf16")
            explained = (
                1 - math.fsum(found) / len(found) / blank if blank else 0.0
            )  # one colour: nothing to explain
            trial.log({"val/explained": explained, "data/context_free_loss": blank})
    if not trial.forked:
        with trial.evaluation():
            parts = [reconstruct(model, config, images, pixels, order) for pixels, order in held]
        save_pictures(trial.folder, parts, config.patch)
