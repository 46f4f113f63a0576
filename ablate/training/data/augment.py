"""The images of a step and their augmentation: functions of (images, seed, step, micro-batch) alone.

Random bits are drawn by counter, never from a global generator, so that every arm of a seed sees the same
pixels, whatever the number of workers.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ablate.training.data.batches import bits, indices
from ablate.training.data.images import Augment, ImageSet

_GREY = (0.299, 0.587, 0.114)
"""Perceived brightness of red, green and blue (ITU-R BT.601)."""
_CROP, _FLIP, _JITTER, _RANDAUGMENT = range(4)
"""Purposes of draws: the last word of the counter. RandAugment's operations count on from the last."""


def drawn(images: ImageSet, seed: int, step: int, micro_batch: int, count: int) -> Tensor:
    """Return the numbers of a batch's training images, drawn with replacement.

    They are the same for every augmentation.

    Args:
        images: the image set.
        seed: the trial's seed.
        step: optimizer step.
        micro_batch: number of the micro-batch in the step.
        count: number of images.

    Returns:
        Indices into `images.train`, int64 [count].
    """
    return indices(seed, step, micro_batch, count, len(images.train))


def image_batch(
    images: ImageSet, seed: int, step: int, micro_batch: int, count: int, augment: Augment
) -> Tensor:
    """Return a batch of augmented training images.

    Args:
        images: the image set.
        seed: the trial's seed.
        step: optimizer step.
        micro_batch: number of the micro-batch in the step.
        count: number of images.
        augment: the augmentation.

    Returns:
        The images that `drawn` selects, float32 [count, channels, height, width].
    """
    batch = _floats(images.train[drawn(images, seed, step, micro_batch, count).numpy()])

    def uniform(purpose: int) -> Tensor:
        """Return four numbers in [0, 1) for each image, float32 [4, count]."""
        words = bits("augmentation", seed, step, micro_batch, count, purpose)
        return (words >> 8).float() / (1 << 24)

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
    """Return validation images in batches, float32 [batch, channels, height, width]; nothing is drawn.

    They are the same for every seed and arm, and are those of `validation_indices`.

    Args:
        images: the image set.
        count: largest number of images.
        size: largest number of images in a batch.
        augment: the augmentation, of which only `normalise` applies.
    """
    chosen = validation_indices(images, count)
    batches = (_floats(images.val[chosen[i : i + size].numpy()]) for i in range(0, len(chosen), size))
    return [_normalised(batch, images) if augment.normalise else batch for batch in batches]


def validation_indices(images: ImageSet, count: int) -> Tensor:
    """Return the numbers of evenly spaced validation images.

    Args:
        images: the image set.
        count: largest number of images.

    Returns:
        Indices into `images.val`, int64 [at least 1, at most count].
    """
    count = max(1, min(count, len(images.val)))
    return torch.arange(count) * len(images.val) // count


def _floats(pixels: np.ndarray) -> Tensor:
    """Return uint8 pixels as float32 in [0, 1]."""
    return torch.from_numpy(pixels).float() / 255


def _normalised(batch: Tensor, images: ImageSet) -> Tensor:
    mean, deviation = (
        torch.from_numpy(moment).view(1, -1, 1, 1) for moment in (images.mean, images.deviation)
    )
    return (batch - mean) / deviation


def _crop(batch: Tensor, padding: int, draws: Tensor) -> Tensor:
    """Return a random window of the same size of each image, padded with `padding` black pixels."""
    count, channels, height, width = batch.shape
    padded = F.pad(batch, (padding,) * 4)
    top, left = (draws[:2] * (2 * padding + 1)).long()
    rows = (top.view(-1, 1) + torch.arange(height)).view(count, 1, height, 1)
    columns = (left.view(-1, 1) + torch.arange(width)).view(count, 1, 1, width)
    return padded[
        torch.arange(count).view(-1, 1, 1, 1), torch.arange(channels).view(1, -1, 1, 1), rows, columns
    ]


# --- colours: each blends the image with its version at strength 0 --------------------------------


def _grey(batch: Tensor) -> Tensor:
    """Return images in grey, [n, 1, height, width]."""
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
    """Change brightness, contrast, saturation, in this order, by factors in [1 - value, 1 + value]."""
    strengths = augment.coloured or ()
    for draw, change, most in zip(draws, (_brightness, _contrast, _saturation), strengths, strict=False):
        if most:
            batch = change(batch, (1 - min(most, 1) + draw * (most + min(most, 1))).view(-1, 1, 1, 1))
    return batch


# --- RandAugment (arXiv 1909.13719): one operation an image, its strength with a random sign ------


def _warped(batch: Tensor, entries: tuple[Tensor | float, ...]) -> Tensor:
    """Resample images at the affine map (xx, xy, x0, yx, yy, y0) of their coordinates, which span [-1, 1].

    Pixels from outside an image are black.
    """
    ones = torch.ones(len(batch))
    maps = torch.stack([entry * ones for entry in entries], 1).view(-1, 2, 3)
    return F.grid_sample(
        batch, F.affine_grid(maps, list(batch.shape), align_corners=False), align_corners=False
    )


def _rotate(batch: Tensor, strength: Tensor) -> Tensor:
    turn, ratio = strength * math.radians(30), batch.shape[2] / batch.shape[3]
    return _warped(batch, (turn.cos(), -turn.sin() * ratio, 0.0, turn.sin() / ratio, turn.cos(), 0.0))


def _posterize(batch: Tensor, strength: Tensor) -> Tensor:
    """Keep 8 to 4 bits of each pixel."""
    step = 2 ** (4 * strength.abs()).round().view(-1, 1, 1, 1)
    return ((batch * 255).round() / step).floor() * step / 255


def _solarize(batch: Tensor, strength: Tensor) -> Tensor:
    """Invert pixels that are brighter than a threshold."""
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
"""Functions of images float32 [n, channels, height, width] and strengths in [-1, 1], [n], to images."""


def _randaugment(batch: Tensor, magnitude: int, draws: Tensor) -> Tensor:
    """Apply one random operation to each image."""
    choice = (draws[0] * len(OPERATIONS)).long()
    strength = torch.where(draws[1] < 0.5, -1.0, 1.0) * (magnitude / 10)
    changed = batch.clone()
    for number, operation in enumerate(OPERATIONS.values()):
        chosen = (choice == number).nonzero().squeeze(1)
        if len(chosen):
            changed[chosen] = operation(batch[chosen], strength[chosen])
    return changed
