"""Masked autoencoding of images (arXiv 2111.06377) with the ViT-MAE of transformers.

Masks are drawn by counter. The library does not initialise the weights: it draws from a global generator, and
in transformers 5.23 leaves both position embeddings at zero, so that the decoder could not distinguish masked
patches.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ablate.engines.emulated import Engine
from ablate.training.data.augment import image_batch, validation_images
from ablate.training.data.batches import bits
from ablate.training.data.images import Augment, ImageSet
from ablate.training.models import library
from ablate.training.models.transformer import StackShape

MaskedBatch = tuple[Tensor, Tensor]
"""Images fp32 [n, channels, side, side], and the order int64 [n, patches] of their patches."""
_TRAINING, _VALIDATION = range(2)
"""Purposes of masks: the last word of the counter."""
_TOKEN_DEVIATION = 0.02
_EPSILON = 1e-6
"""Added to the variance of a patch, as in the model's own loss: a patch of one colour has variance 0."""


class MaskedConfig(StackShape, Protocol):
    """Sizes of the autoencoder, those of its encoder first, and its data, as a `Mae` workload has them."""

    @property
    def decoder(self) -> StackShape: ...
    @property
    def patch(self) -> int: ...
    @property
    def patches(self) -> int: ...
    @property
    def visible(self) -> int: ...
    @property
    def norm_pix(self) -> bool: ...
    @property
    def augment(self) -> Augment: ...
    @property
    def batch(self) -> int: ...
    @property
    def eval_tokens(self) -> int: ...
    @property
    def eval_batch(self) -> int: ...


# --- the model ------------------------------------------------------------------------------------


def autoencoder(shape: MaskedConfig, channels: int, side: int, seed: int, device: torch.device) -> nn.Module:
    """Return the model of a `Mae` in fp32, in training mode, with weights that depend on the seed alone.
    `side` is the images' width and height in pixels, a multiple of the patch. ValueError if transformers is
    not installed."""
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
        # The library keeps int(patches * (1 - ratio)) patches, which rounding errors could make one less.
        mask_ratio=1 - (shape.visible + 0.5) / shape.patches,
        norm_pix_loss=shape.norm_pix,
    )
    with torch.device("meta"):
        model = vit.ViTMAEForPreTraining(config)
    return initialise(model.to_empty(device=device), side // shape.patch, seed)


def initialise(model: nn.Module, grid: int, seed: int) -> nn.Module:
    """Draw all weights of a ViT-MAE on the CPU, in order of name, from the seed alone, in place; return the
    model. As in the paper: Xavier uniform matrices, biases 0, norms 1, fixed positions. `grid` is the number
    of patches in a row of an image."""
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
    """Return the position embeddings, fp32 [1, 1 + grid^2, width]: zeros for the class token, then patches,
    row by row. Each has sines and cosines of its column, then of its row. `width` is a multiple of 4."""
    frequency = 10000.0 ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angles = torch.arange(grid, dtype=torch.float64).outer(frequency)
    axis = torch.cat((angles.sin(), angles.cos()), 1)  # [grid, width / 2]
    rows, columns = axis.repeat_interleave(grid, 0), axis.repeat(grid, 1)
    table = torch.cat((columns, rows), 1)
    return torch.cat((torch.zeros(1, width, dtype=torch.float64), table)).float().unsqueeze(0)


def loss(model: nn.Module, images: Tensor, order: Tensor) -> Tensor:
    """Return the mean squared error over the pixels of masked patches, an fp32 scalar. Images are fp32
    [images, channels, side, side]; `order` is from `mask_order`."""
    return model(pixel_values=images, noise=order).loss


# --- what a step sees -----------------------------------------------------------------------------


def mask_order(
    seed: int, step: int, micro_batch: int, images: int, patches: int, purpose: int = _TRAINING
) -> Tensor:
    """Return a number for every patch, int64 [images, patches], distinct within an image; those with the
    smallest stay visible. A function of the arguments alone, so that every arm of a seed sees the same masks.
    `purpose` is the last word of the counter: one for training, another for validation."""
    count = images * patches
    words = bits("masking", seed, step, micro_batch, -(-count // 4), purpose).t().flatten()[:count]
    return words.view(images, patches) * patches + torch.arange(patches)


def batches(
    config: MaskedConfig, images: ImageSet, seed: int, device: torch.device
) -> tuple[Callable[[int, int], MaskedBatch], list[MaskedBatch]]:
    """Return a function from step and micro-batch to a training batch, and the list of validation batches,
    all on `device`. Validation batches are the same for every seed and arm."""

    def batch(step: int, micro_batch: int) -> MaskedBatch:
        pixels = image_batch(images, seed, step, micro_batch, config.batch, config.augment)
        return pixels.to(device), mask_order(seed, step, micro_batch, config.batch, config.patches).to(device)

    return batch, [(pixels.to(device), order.to(device)) for pixels, order in validation(config, images)]


def validation(config: MaskedConfig, images: ImageSet) -> Iterator[MaskedBatch]:
    """Yield batches of validation images with masks, on the CPU, the same for every seed and arm.
    `eval_tokens`, `eval_batch` and the normalisation of `augment` apply."""
    pixels = validation_images(
        images, config.eval_tokens // config.patches, config.eval_batch, config.augment
    )
    for number, part in enumerate(pixels):
        yield part, mask_order(0, 0, number, len(part), config.patches, _VALIDATION)


def masks(order: Tensor, visible: int) -> Tensor:
    """Return the masked patches, bool [images, patches]: all but the `visible` of each image with the
    smallest numbers in `order`, from `mask_order`."""
    return order.argsort(1).argsort(1) >= visible


# --- pixels ---------------------------------------------------------------------------------------


def patchify(images: Tensor, patch: int) -> Tensor:
    """Reshape [n, channels, side, side] to [n, patches, pixels]. Patches are in row-major order; within one,
    pixels are too, with the channels last."""
    n, channels, side, _ = images.shape
    grid = side // patch
    return (
        images.view(n, channels, grid, patch, grid, patch)
        .permute(0, 2, 4, 3, 5, 1)
        .reshape(n, grid * grid, patch * patch * channels)
    )


def unpatchify(patches: Tensor, patch: int, channels: int) -> Tensor:
    """Invert `patchify`."""
    n, count, _ = patches.shape
    grid = math.isqrt(count)
    return (
        patches.view(n, grid, grid, patch, patch, channels)
        .permute(0, 5, 1, 3, 2, 4)
        .reshape(n, channels, grid * patch, grid * patch)
    )


def blank_loss(config: MaskedConfig, images: ImageSet) -> float:
    """Return the validation loss of a trivial prediction, a reference for the model's: for each masked patch
    and channel, the mean of the image's visible pixels; if the loss is of normalised pixels, the patch's own
    mean."""
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
    """The original with its masked patches in grey."""
    reconstruction: Tensor
    """The original with its masked patches as predicted."""
    masked: Tensor
    """Patches that were masked, bool [n, patches]."""


def reconstructions(
    model: nn.Module, engine: Engine, config: MaskedConfig, images: ImageSet, batches: Sequence[MaskedBatch]
) -> list[Reconstruction]:
    """Return the reconstructions, by a converted model from `autoencoder`, of batches on its device, with the
    random draws of an evaluation. The model is in training mode afterwards."""
    engine.clock.stream = "evaluation"
    result = []
    model.eval()
    with engine.still_weights():
        for number, batch in enumerate(batches):
            engine.clock.begin(number)
            result.append(reconstruct(model, config, images, batch))
    model.train()
    return result


@torch.no_grad()
def reconstruct(
    model: nn.Module, config: MaskedConfig, images: ImageSet, batch: MaskedBatch
) -> Reconstruction:
    """Return the reconstruction of a batch on the model's device, by a model in evaluation mode. If the model
    predicts normalised pixels, each patch is given its true mean and deviation."""
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


def _levels(batch: Tensor, config: MaskedConfig, images: ImageSet) -> Tensor:
    """Return images with the normalisation of the data undone, clamped to [0, 1]."""
    if config.augment.normalise:
        mean, deviation = (
            torch.from_numpy(moment).view(1, -1, 1, 1) for moment in (images.mean, images.deviation)
        )
        batch = batch * deviation + mean
    return batch.clamp(0, 1)


def psnr(reconstructions: Iterable[Reconstruction], patch: int) -> float:
    """Return the peak signal-to-noise ratio of masked pixels in dB, with peak 1; infinite without error.
    `patch` is in pixels."""
    squares, count = 0.0, 0
    for part in reconstructions:
        error = patchify(part.reconstruction - part.original, patch)[part.masked]
        squares, count = squares + error.double().square().sum().item(), count + error.numel()
    return -10 * math.log10(squares / count) if squares else math.inf
