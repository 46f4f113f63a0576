"""Workload that pretrains a vision transformer as a masked autoencoder (arXiv 2111.06377).

Torch and transformers are imported when it runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from ablate.numerics.spec import Spec
from ablate.recipes.layers import Layer, located
from ablate.recipes.recipe import Recipe
from ablate.training.data import Augment, ImageSet, ImageSource, open_images
from ablate.training.hyperparameters import METRICS, MOST_LAYERS, MOST_WIDTH
from ablate.training.workloads.trained import Subject, Trained

if TYPE_CHECKING:
    import torch

    from ablate.numerics.philox import Clock
    from ablate.training.loop import PreparedRun

_LINEARS = (
    "attention.q_proj",
    "attention.k_proj",
    "attention.v_proj",
    "attention.o_proj",
    "mlp.fc1",
    "mlp.fc2",
)
_AROUND = ("ViTMAEForPreTraining", "ModuleList", "ViTMAELayer", "Linear")
_SHOWN = 6
"""Rows of the picture that a run saves."""


class Stack(Spec):
    """Stack of transformer blocks."""

    layers: int = Field(2, ge=1, le=MOST_LAYERS)
    width: int = Field(64, ge=16, le=MOST_WIDTH)
    heads: int = Field(2, ge=1, le=MOST_WIDTH)
    hidden: int | None = Field(None, ge=16, le=1 << 48)
    """Width of the MLP; null: 4 times the width."""

    @property
    def hidden_width(self) -> int:
        return 4 * self.width if self.hidden is None else self.hidden

    def weights(self, name: str) -> int:
        return self.width * (self.hidden_width if ".mlp." in name else self.width)

    @property
    def parameters(self) -> int:
        """Number of weights in the blocks' matrices."""
        return self.layers * self.width * (4 * self.width + 2 * self.hidden_width)

    @property
    def elements(self) -> int:
        """Number of elements that one token's pass through the blocks produces."""
        return self.layers * (10 * self.width + 2 * self.hidden_width)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, reason) for each field that cannot run."""
        if self.width % 4:
            yield (
                "width",
                f"{self.width} is no multiple of 4: sine and cosine of row and column make up a position",
            )
        if self.width % self.heads:
            yield "heads", f"{self.heads} does not divide width {self.width}"


class Mae(Trained):
    """Shape of encoder and decoder, the images, their masking, and the training run. Tokens are patches."""

    VERSION: ClassVar[int] = 1
    METRICS: ClassVar[frozenset[str]] = METRICS | {"val/explained"}
    UNITS: ClassVar[dict[str, str]] = {}

    data: ImageSource = "photos"
    """`photos`: crops of 32x32 pixels; `digits`: 8x8, in grey; or CIFAR, a folder, a dataset."""
    augment: Augment = Augment(flip=0.5)
    patch: int = Field(4, ge=1, le=1024)
    """Side of a patch, in pixels."""
    mask_ratio: float = Field(0.75, gt=0, lt=1)
    """Share of the patches that are masked, to the nearest whole patch."""
    norm_pix: bool = False
    """Predict each patch less its mean, divided by its deviation; losses then have another unit."""
    layers: int = Field(4, ge=1, le=MOST_LAYERS)
    """Blocks of the encoder, which gets only the visible patches; the next three fields describe it too."""
    width: int = Field(96, ge=16, le=MOST_WIDTH)
    heads: int = Field(3, ge=1, le=MOST_WIDTH)
    hidden: int | None = Field(None, ge=16, le=1 << 48)
    """Width of the MLP; null: 4 times the width."""
    decoder: Stack = Stack()
    """Stack that predicts the masked patches and is then discarded; its blocks count after the encoder's."""

    @property
    def imports(self) -> tuple[str, ...]:
        return ("transformers.models.vit_mae.modeling_vit_mae",)

    @property
    def encoder(self) -> Stack:
        return Stack(layers=self.layers, width=self.width, heads=self.heads, hidden=self.hidden)

    @property
    def hidden_width(self) -> int:
        return self.encoder.hidden_width

    @property
    def opened(self) -> ImageSet:
        """The images; ValueError, in one sentence, if they cannot be read."""
        try:
            return open_images(self.data)
        except OSError as error:
            raise ValueError(f"cannot be read: {error}") from None

    @property
    def patches(self) -> int:
        """Number of patches of an image."""
        return (self.opened.shape[1] // self.patch) * (self.opened.shape[2] // self.patch)

    @property
    def visible(self) -> int:
        """Number of patches of an image that are not masked."""
        return self.patches - round(self.mask_ratio * self.patches)

    @property
    def tokens_per_step(self) -> int:
        """Number of patches of all images of an optimizer step, masked or not."""
        return self.batch * self.accumulate * self.patches

    @property
    def linear_layers(self) -> tuple[Layer, ...]:
        """Layers that a recipe applies to: the encoder's, then the decoder's."""
        stacks = {
            "vit.layers": ("ViTMAEModel", self.encoder),
            "decoder.decoder_layers": ("ViTMAEDecoder", self.decoder),
        }
        kinds = {"attention": "ViTMAEAttention", "mlp": "ViTMAEMLP"}
        return located(
            {
                f"{stack}.{block}.{name}": {*_AROUND, half, kinds[name.partition(".")[0]]}
                for stack, (half, shape) in stacks.items()
                for block in range(shape.layers)
                for name in _LINEARS
            },
            weights=lambda name: stacks[".".join(name.split(".")[:2])][1].weights(name),
        )

    @property
    def extents(self) -> dict[str, int]:
        """Widths, and numbers of tokens of every batch. Each image has a class token besides its patches: the
        visible ones in the encoder's layers, all in the decoder's."""
        count = max(1, min(self.eval_tokens // self.patches, len(self.opened.val)))
        batches = {"workload.batch": self.batch, "workload.eval_batch": min(self.eval_batch, count)}
        batches |= (
            {"the images left for the last batch of workload.eval_tokens": rest}
            if (rest := count % self.eval_batch)
            else {}
        )
        widths = {
            f"workload.{path}{name}": width
            for path, stack in (("", self.encoder), ("decoder.", self.decoder))
            for name, width in (("width", stack.width), ("hidden", stack.hidden_width))
        }
        tokens = {"visible patches": self.visible, "patches": self.patches}
        return widths | {
            f"{images} times {shown + 1} tokens, {what} and class,": number * (shown + 1)
            for images, number in batches.items()
            for what, shown in tokens.items()
        }

    def problems(self) -> Iterator[tuple[str, str]]:
        if importlib.util.find_spec("transformers") is None:
            yield "data", "the model is transformers', which is not installed: `pip install 'ablate-fp4[hf]'`"
        yield from super().problems()
        yield from self.encoder.problems()
        yield from ((f"decoder.{field}", reason) for field, reason in self.decoder.problems())
        try:
            shape = self.opened.shape
        except ValueError as error:
            yield "data", str(error)
        else:
            yield from self._misfits(*shape)

    def _misfits(self, channels: int, height: int, width: int) -> Iterator[tuple[str, str]]:
        if height != width:
            yield "data", f"are {width}x{height} pixels; the model takes square ones"
        elif height % self.patch:
            yield "patch", f"{self.patch} does not divide the side of the images, {height}"
        elif not 0 < self.visible < self.patches:
            rest = "none" if self.visible else "all"
            yield (
                "mask_ratio",
                f"{self.mask_ratio:g} masks {rest} of {self.patches} patches; "
                "at least one must be masked, and one visible",
            )
        if self.norm_pix and self.patch**2 * channels == 1:
            yield "norm_pix", "a patch of one number has no deviation; take a larger patch"
        if reason := self.augment.problem((channels, height, width)):
            yield "augment", reason

    def fingerprint(self) -> str:
        return self.opened.fingerprint

    def parameters(self) -> int:
        return self.encoder.parameters + self.decoder.parameters

    def cost(self, quantised: bool) -> float:
        """Return rough seconds of one trial on one CPU core, computed as for gpt. The encoder processes only
        the visible patches."""
        evaluated = self.steps // self.eval_every * self.eval_tokens * self.evaluations(quantised)
        images = (self.steps * self.tokens_per_step + evaluated / 3) / self.patches
        passes = ((self.encoder, images * (self.visible + 1)), (self.decoder, images * (self.patches + 1)))
        multiplied = sum(6 * stack.parameters * tokens for stack, tokens in passes)
        elements = sum(stack.elements * tokens for stack, tokens in passes)
        return multiplied / 200e9 + elements * (1e-8 if quantised else 5e-9) + 3e-3 * self.steps * self.blocks

    def summary(self) -> dict[str, float]:
        """Return the loss of a blank guess, to which a loss can be compared: the mean of the visible patches,
        and under norm_pix the patch's own mean."""
        return {"data/blank_loss": _blank_loss(self)}

    def derived(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return `val/explained`, the share of a blank guess's validation loss that the model removes: 1 is a
        perfect reconstruction, 0 no better than a blank guess."""
        blank = _blank_loss(self)  # 0 for images of one colour: there is nothing to explain
        return {"val/explained": 1 - metrics["val/loss"] / blank} if blank and "val/loss" in metrics else {}

    def subject(self, recipe: Recipe, clock: Clock, device: torch.device) -> Subject:
        """Return encoder and decoder, images, and masks that all arms of a seed share."""
        from ablate.training.models.masked import autoencoder, batches, loss

        channels, side, _ = self.opened.shape
        model = autoencoder(self, channels, side, clock.seed, device)
        return Subject(model, *batches(self, self.opened, clock.seed, device), loss)

    def leave(self, run: PreparedRun, folder: Path) -> None:
        """Save `reconstruction.png`: validation images, their visible patches, and reconstructions; and
        `reconstruction.npz`, the same as uint8 levels with each image's ratio in dB."""
        import numpy as np

        from ablate.training.data.montage import levels, montage
        from ablate.training.models.masked import Reconstruction, psnr, reconstructions

        batches = reconstructions(run.model, run.engine, self, self.opened, run.validation)
        images = [
            Reconstruction(*(tensor[n : n + 1] for tensor in part))
            for part in batches
            for n in range(len(part.original))
        ]
        shown = (
            [images[number * len(images) // _SHOWN] for number in range(_SHOWN)]
            if len(images) > _SHOWN
            else images
        )
        foot = f"{psnr(batches, self.patch):.1f} dB over masked pixels of {len(images)} images"
        kinds = ("original", "visible", "reconstruction")
        rows = [[getattr(image, kind)[0].numpy() for kind in kinds] for image in shown]
        folder.mkdir(exist_ok=True)
        montage(
            folder / "reconstruction.png",
            ("original", f"visible, {self.visible} of {self.patches}", "reconstruction"),
            rows,
            foot,
        )
        columns = dict(zip(kinds, zip(*rows, strict=True), strict=True))
        arrays: dict[str, Any] = {kind: levels(np.stack(column)) for kind, column in columns.items()}
        arrays["decibels"] = np.array([psnr([image], self.patch) for image in shown])
        np.savez_compressed(folder / "reconstruction.npz", **arrays)


@cache
def _blank_loss(config: Mae) -> float:
    from ablate.training.models.masked import blank_loss

    return blank_loss(config, config.opened)
