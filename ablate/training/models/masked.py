"""Masked autoencoding of images (arXiv 2111.06377): transformers' ViT-MAE, its weights and its masks by counter, what it reconstructs.

The model is built without its library's initialisation: that draws from a global generator, and in transformers 5.23 leaves both
position embeddings at zero, so that a decoder could not tell one masked patch from another.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ablate.engines.emulated import Engine
from ablate.numerics.philox import STREAMS, philox
from ablate.training.data.augment import image_batch, validation_images
from ablate.training.data.images import ImageSet
from ablate.training.models import library

Batch = tuple[Tensor, Tensor]
"""Images fp32 [n, channels, side, side], and the order int64 [n, patches] in which their patches are kept: the last are masked."""
_TRAINING, _VALIDATION = range(2)
"""What masks are drawn for: the last word of the counter."""
_TOKEN_DEVIATION = 0.02
_EPSILON = 1e-6
"""Added to the variance of a patch, as in the model's own loss: one that is all of one colour has none."""


# --- the model ------------------------------------------------------------------------------------


def autoencoder(shape: Any, channels: int, side: int, seed: int, device: torch.device) -> nn.Module:
    """The model of a `Mae`, its weights drawn from the seed alone. Activations between the layers are fp32."""
    vit = library("transformers.models.vit_mae.modeling_vit_mae")
    config = vit.ViTMAEConfig(
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.hidden_width,
        decoder_hidden_size=shape.decoder.width,
        decoder_num_hidden_layers=shape.decoder.layers,
        decoder_num_attention_heads=shape.decoder.heads,
        decoder_intermediate_size=shape.decoder.hidden_width,
        image_size=side,
        patch_size=shape.patch,
        num_channels=channels,
        # It keeps int(patches * (1 - ratio)), which for some ratios is one less than meant.
        mask_ratio=1 - (shape.visible + 0.5) / shape.patches,
        norm_pix_loss=shape.norm_pix,
    )
    with torch.device("meta"):
        model = vit.ViTMAEForPreTraining(config)
    return initialise(model.to_empty(device=device), side // shape.patch, seed)


def initialise(model: nn.Module, grid: int, seed: int) -> nn.Module:
    """Weights in order of name, drawn on the CPU, as the paper has them: matrices uniform by Xavier, biases 0, norms 1, positions fixed."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        parameter.data.copy_(_initial(name, parameter.shape, grid, generator))
    return model


def _initial(name: str, shape: torch.Size, grid: int, generator: torch.Generator) -> Tensor:
    if name.endswith(("position_embeddings", "pos_embed")):
        return positions(grid, shape[-1])
    if name.endswith("token"):
        return torch.randn(shape, generator=generator) * _TOKEN_DEVIATION
    if len(shape) == 1:
        return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
    bound = math.sqrt(6 / (shape[0] + shape.numel() // shape[0]))
    return (2 * torch.rand(shape, generator=generator) - 1) * bound


def positions(grid: int, width: int) -> Tensor:
    """Sines and cosines of the column, then of the row, of every patch, row by row, behind zeros for the class token;
    fp32 [1, 1 + grid^2, width]. `width` is a multiple of 4."""
    frequency = 10000.0 ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angles = torch.arange(grid, dtype=torch.float64).outer(frequency)
    one = torch.cat((angles.sin(), angles.cos()), 1)  # [grid, width / 2]
    rows, columns = one.repeat_interleave(grid, 0), one.repeat(grid, 1)
    table = torch.cat((columns, rows), 1)
    return torch.cat((torch.zeros(1, width, dtype=torch.float64), table)).float().unsqueeze(0)


def loss(model: nn.Module, images: Tensor, order: Tensor) -> Tensor:
    """The mean squared error over the pixels of masked patches."""
    return model(pixel_values=images, noise=order).loss


# --- what a step sees -----------------------------------------------------------------------------


def mask_order(
    seed: int, step: int, micro_batch: int, images: int, patches: int, purpose: int = _TRAINING
) -> Tensor:
    """A number for every patch, int64 [images, patches], no two of an image alike: patches are kept from the smallest on.

    A function of its arguments alone, so that every arm of a seed sees the same masks.
    """
    count = images * patches
    counter = torch.empty(4, -(-count // 4), dtype=torch.int64)
    torch.arange(counter.shape[1], out=counter[0])
    counter[1], counter[2], counter[3] = step, micro_batch, purpose
    words = philox(counter, (seed & 0xFFFFFFFF, STREAMS["masking"] << 8)).t().flatten()[:count]
    return words.view(images, patches) * patches + torch.arange(patches)


def batches(
    config: Any, images: ImageSet, seed: int, device: torch.device
) -> tuple[Callable[[int, int], Batch], list[Batch]]:
    """Batches on a device: those of training by step and micro-batch, and those of validation, the same for every seed and arm."""

    def batch(step: int, micro_batch: int) -> Batch:
        pixels = image_batch(images, seed, step, micro_batch, config.batch, config.augment)
        return pixels.to(device), mask_order(seed, step, micro_batch, config.batch, config.patches).to(device)

    return batch, [(pixels.to(device), order.to(device)) for pixels, order in validation(config, images)]


def validation(config: Any, images: ImageSet) -> Iterator[Batch]:
    """Validation images, and masks that depend on nothing."""
    pixels = validation_images(
        images, config.eval_tokens // config.patches, config.eval_batch, config.augment
    )
    for number, part in enumerate(pixels):
        yield part, mask_order(0, 0, number, len(part), config.patches, _VALIDATION)


def masks(order: Tensor, visible: int) -> Tensor:
    """bool [images, patches]: which patches are masked."""
    return order.argsort(1).argsort(1) >= visible


# --- pixels ---------------------------------------------------------------------------------------


def patchify(images: Tensor, patch: int) -> Tensor:
    """[n, channels, side, side] as [n, patches, pixels]: patches row by row, in one its rows, then columns, then channels."""
    n, channels, side, _ = images.shape
    grid = side // patch
    return (
        images.view(n, channels, grid, patch, grid, patch)
        .permute(0, 2, 4, 3, 5, 1)
        .reshape(n, grid * grid, patch * patch * channels)
    )


def unpatchify(patches: Tensor, patch: int, channels: int) -> Tensor:
    """What `patchify` was given."""
    n, count, _ = patches.shape
    grid = math.isqrt(count)
    return (
        patches.view(n, grid, grid, patch, patch, channels)
        .permute(0, 5, 1, 3, 2, 4)
        .reshape(n, channels, grid * patch, grid * patch)
    )


def blank_loss(config: Any, images: ImageSet) -> float:
    """The validation loss of who predicts, for every masked patch, the mean of its image's visible pixels, channel by channel; where the
    loss is of normalised pixels, the patch's own mean."""
    losses = []
    for pixels, order in validation(config, images):
        patches, masked = patchify(pixels, config.patch), masks(order, config.visible)
        channels = patches.unflatten(-1, (-1, pixels.shape[1]))
        shown = (~masked)[..., None, None]
        mean = (channels * shown).sum((1, 2), keepdim=True) / (
            shown.sum((1, 2), keepdim=True) * channels.shape[2]
        )
        error = _normalised(patches) if config.norm_pix else (channels - mean).flatten(2)
        losses.append((error.square().mean(-1) * masked).sum().item() / masked.sum().item())
    return math.fsum(losses) / len(losses)


def _normalised(patches: Tensor) -> Tensor:
    return (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + _EPSILON).sqrt()


class Reconstruction(NamedTuple):
    """Images as pixels in [0, 1], fp32 [n, channels, side, side]."""

    original: Tensor
    visible: Tensor
    """Masked patches are grey."""
    reconstruction: Tensor
    """Visible patches are the original's."""
    masked: Tensor
    """Which patches were predicted, bool [n, patches]."""


def reconstructions(
    model: nn.Module, engine: Engine, config: Any, images: ImageSet, batches: Sequence[Batch]
) -> list[Reconstruction]:
    """What the model makes of every batch, drawing as an evaluation does."""
    engine.clock.stream = "evaluation"
    found = []
    model.eval()
    with engine.still_weights():
        for number, batch in enumerate(batches):
            engine.clock.micro_batch = number
            found.append(reconstruct(model, config, images, batch))
    model.train()
    return found


@torch.no_grad()
def reconstruct(model: nn.Module, config: Any, images: ImageSet, batch: Batch) -> Reconstruction:
    """What the model makes of a batch. Where it predicts normalised pixels, each patch has its true mean and deviation back."""
    pixels, order = batch
    predicted = model(pixel_values=pixels, noise=order).logits.float()
    truth, masked = patchify(pixels, config.patch), masks(order, config.visible)
    if config.norm_pix:
        predicted = predicted * (truth.var(-1, keepdim=True) + _EPSILON).sqrt() + truth.mean(-1, keepdim=True)
    hidden = masked.unsqueeze(-1)

    def whole(patches: Tensor) -> Tensor:
        return _levels(unpatchify(patches, config.patch, pixels.shape[1]).cpu(), config, images)

    original, guess = whole(truth), whole(torch.where(hidden, predicted, truth))
    cover = unpatchify(hidden.expand_as(truth).float(), config.patch, pixels.shape[1]).cpu()
    return Reconstruction(original, torch.where(cover > 0, 0.5, original), guess, masked.cpu())


def _levels(batch: Tensor, config: Any, images: ImageSet) -> Tensor:
    """Normalisation undone."""
    if config.augment.normalise:
        mean, deviation = (
            torch.from_numpy(moment).view(1, -1, 1, 1) for moment in (images.mean, images.deviation)
        )
        batch = batch * deviation + mean
    return batch.clamp(0, 1)


def psnr(found: Iterable[Reconstruction], patch: int) -> float:
    """Decibels of white over the root mean squared error of masked pixels; infinite where there is none."""
    squares, count = 0.0, 0
    for part in found:
        error = patchify(part.reconstruction - part.original, patch)[part.masked]
        squares, count = squares + error.double().square().sum().item(), count + error.numel()
    return -10 * math.log10(squares / count) if squares else math.inf
