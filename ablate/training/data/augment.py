"""Which images a step sees, and how they are changed: functions of (images, seed, step, micro-batch) alone, through counter-based bits.

So every arm of a seed sees the same pixels, whatever the number of workers, and no global generator is read.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ablate.numerics.philox import STREAMS, philox
from ablate.training.data.images import Augment, ImageSet

_GREY = (0.299, 0.587, 0.114)
"""How bright red, green and blue look (ITU-R BT.601)."""
_CROP, _FLIP, _JITTER, _RANDAUGMENT = range(4)
"""What is drawn for what: the last word of the counter. RandAugment's operations go on from there."""


def drawn(images: ImageSet, seed: int, step: int, micro_batch: int, count: int) -> Tensor:
    """Which training images, int64 [count], drawn with replacement: the same for every augmentation."""
    counter = torch.zeros(4, count, dtype=torch.int64)
    counter[0] = torch.arange(count)
    counter[1], counter[2] = step, micro_batch
    words = philox(counter, (seed & 0xFFFFFFFF, STREAMS["data"] << 8))
    return (words[0] << 31 | words[1] >> 1) % len(images.train)


def image_batch(
    images: ImageSet, seed: int, step: int, micro_batch: int, count: int, augment: Augment
) -> Tensor:
    """Training images that `drawn` names, cut, turned and coloured as `augment` says; float32 [count, channels, height, width]."""
    batch = _floats(images.train[drawn(images, seed, step, micro_batch, count).numpy()])

    def uniform(purpose: int) -> Tensor:
        """Four numbers in [0, 1) an image; float32 [4, count]."""
        counter = torch.empty(4, count, dtype=torch.int64)
        counter[0] = torch.arange(count)
        counter[1], counter[2], counter[3] = step, micro_batch, purpose
        return (philox(counter, (seed & 0xFFFFFFFF, STREAMS["augmentation"] << 8)) >> 8).float() / (1 << 24)

    if augment.crop_padding:
        batch = _crop(batch, augment.crop_padding, uniform(_CROP))
    if augment.flip:
        batch = torch.where((uniform(_FLIP)[0] < augment.flip).view(-1, 1, 1, 1), batch.flip(-1), batch)
    if augment.randaugment:
        for number in range(augment.randaugment.ops):
            batch = _randaugment(batch, augment.randaugment.magnitude, uniform(_RANDAUGMENT + number))
    if augment.coloured:
        batch = _jitter(batch, augment, uniform(_JITTER))
    return _normalised(batch, images) if augment.normalise else batch


def validation_images(images: ImageSet, count: int, size: int, augment: Augment) -> list[Tensor]:
    """At most `count` validation images, evenly spaced, in batches of at most `size`, normalised where training images are; float32.

    The same for every seed and arm; nothing is drawn. Their classes are those of `validation_places`.
    """
    chosen = validation_places(images, count)
    batches = (_floats(images.val[chosen[i : i + size].numpy()]) for i in range(0, len(chosen), size))
    return [_normalised(batch, images) if augment.normalise else batch for batch in batches]


def validation_places(images: ImageSet, count: int) -> Tensor:
    """Which validation images, int64 [at most count]."""
    count = max(1, min(count, len(images.val)))
    return torch.arange(count) * len(images.val) // count


def _floats(pixels) -> Tensor:
    """uint8 as float32 in [0, 1]."""
    return torch.from_numpy(pixels).float() / 255


def _normalised(batch: Tensor, images: ImageSet) -> Tensor:
    mean, deviation = (
        torch.from_numpy(moment).view(1, -1, 1, 1) for moment in (images.mean, images.deviation)
    )
    return (batch - mean) / deviation


def _crop(batch: Tensor, padding: int, draws: Tensor) -> Tensor:
    """A window of the old size in the image with a black margin of `padding` pixels."""
    count, channels, height, width = batch.shape
    wide = F.pad(batch, (padding,) * 4)
    top, left = (draws[:2] * (2 * padding + 1)).long()
    rows = (top.view(-1, 1) + torch.arange(height)).view(count, 1, height, 1)
    columns = (left.view(-1, 1) + torch.arange(width)).view(count, 1, 1, width)
    return wide[
        torch.arange(count).view(-1, 1, 1, 1), torch.arange(channels).view(1, -1, 1, 1), rows, columns
    ]


# --- colours: each blends with what it would be at strength 0 -------------------------------------


def _grey(batch: Tensor) -> Tensor:
    """[n, 1, height, width]."""
    if batch.shape[1] == 1:
        return batch
    return (batch * torch.tensor(_GREY).view(1, 3, 1, 1)).sum(1, keepdim=True)


def _brightness(batch: Tensor, strength: Tensor) -> Tensor:
    return (batch * strength).clamp(0, 1)


def _contrast(batch: Tensor, strength: Tensor) -> Tensor:
    return torch.lerp(_grey(batch).mean((2, 3), keepdim=True).expand_as(batch), batch, strength).clamp(0, 1)


def _saturation(batch: Tensor, strength: Tensor) -> Tensor:
    return torch.lerp(_grey(batch).expand_as(batch), batch, strength).clamp(0, 1)


def _jitter(batch: Tensor, augment: Augment, draws: Tensor) -> Tensor:
    """Each by a factor in [1 - value, 1 + value], in this order."""
    for draw, change, most in zip(
        draws, (_brightness, _contrast, _saturation), augment.coloured, strict=False
    ):
        if most:
            batch = change(batch, (1 - min(most, 1) + draw * (most + min(most, 1))).view(-1, 1, 1, 1))
    return batch


# --- RandAugment (arXiv 1909.13719): one of these an image, its strength with a random sign where i


def _warped(batch: Tensor, entries: tuple[Tensor | float, ...]) -> Tensor:
    """What the map (xx, xy, x0, yx, yy, y0), in which the image spans [-1, 1], takes its pixels from; black outside."""
    ones = torch.ones(len(batch))
    maps = torch.stack([entry * ones for entry in entries], 1).view(-1, 2, 3)
    return F.grid_sample(
        batch, F.affine_grid(maps, list(batch.shape), align_corners=False), align_corners=False
    )


def _rotate(batch: Tensor, strength: Tensor) -> Tensor:
    turn, ratio = strength * math.radians(30), batch.shape[2] / batch.shape[3]
    return _warped(batch, (turn.cos(), -turn.sin() * ratio, 0.0, turn.sin() / ratio, turn.cos(), 0.0))


def _posterize(batch: Tensor, strength: Tensor) -> Tensor:
    """Keeps 8 to 4 bits of each pixel."""
    step = 2 ** (4 * strength.abs()).round().view(-1, 1, 1, 1)
    return ((batch * 255).round() / step).floor() * step / 255


def _solarize(batch: Tensor, strength: Tensor) -> Tensor:
    """What is brighter than a threshold is inverted."""
    return torch.where(batch > (1 - strength.abs()).view(-1, 1, 1, 1), 1 - batch, batch)


def _blended(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda batch, strength: change(batch, (1 + 0.9 * strength).view(-1, 1, 1, 1))


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "identity": lambda batch, strength: batch,
    "brightness": _blended(_brightness),
    "contrast": _blended(_contrast),
    "saturation": _blended(_saturation),
    "posterize": _posterize,
    "solarize": _solarize,
    "rotate": _rotate,
    "shear_x": lambda batch, strength: _warped(batch, (1.0, 0.3 * strength, 0.0, 0.0, 1.0, 0.0)),
    "shear_y": lambda batch, strength: _warped(batch, (1.0, 0.0, 0.0, 0.3 * strength, 1.0, 0.0)),
    "translate_x": lambda batch, strength: _warped(batch, (1.0, 0.0, 0.9 * strength, 0.0, 1.0, 0.0)),
    "translate_y": lambda batch, strength: _warped(batch, (1.0, 0.0, 0.0, 0.0, 1.0, 0.9 * strength)),
}
"""float32 [n, channels, height, width] and a strength in [-1, 1] an image -> the same shape."""


def _randaugment(batch: Tensor, magnitude: int, draws: Tensor) -> Tensor:
    """One operation an image."""
    choice = (draws[0] * len(OPERATIONS)).long()
    strength = torch.where(draws[1] < 0.5, -1.0, 1.0) * (magnitude / 10)
    changed = batch.clone()
    for number, operation in enumerate(OPERATIONS.values()):
        these = (choice == number).nonzero().squeeze(1)
        if len(these):
            changed[these] = operation(batch[these], strength[these])
    return changed
