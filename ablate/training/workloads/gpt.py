"""Workload that pretrains a decoder-only transformer on text.

Torch is imported when it runs, so that planning stays fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ablate.files import Json
from ablate.recipes.layers import Layer, located
from ablate.recipes.recipe import Recipe
from ablate.training.hyperparameters import MOST_LAYERS, MOST_WIDTH
from ablate.training.workloads.text import Architecture, TextWorkload, extents, misfits, outlined
from ablate.training.workloads.trained import Subject

if TYPE_CHECKING:
    import torch

    from ablate.numerics.philox import Clock
    from ablate.training.models.source import Outline

_LINEARS = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
_AROUND = ("Transformer", "ModuleList", "Block", "Linear")
_MLPS = {"swiglu": "SwiGLU", "relu2": "SquaredReLU"}
_SHAPE = ("layers", "width", "heads", "kv_heads", "mlp", "hidden", "rope_theta")
"""Fields that do not apply to a model of `transformers`."""


class Gpt(TextWorkload):
    """Shape of the model, its data, and the training run."""

    VERSION: ClassVar[int] = 1
    NAMES: ClassVar[tuple[str, ...]] = ("model",)

    model: Architecture | None = None
    """Configuration of `transformers` that replaces the model that the next fields describe.

    It is given as its fields with `model_type`, as a folder with config.json, or as a name on the hub. Its
    weights are drawn from the seed.
    """
    layers: int = Field(4, ge=1, le=MOST_LAYERS)
    width: int = Field(128, ge=16, le=MOST_WIDTH)
    heads: int = Field(4, ge=1, le=MOST_WIDTH)
    kv_heads: int | None = Field(None, ge=1, le=MOST_WIDTH)
    """Key and value heads shared by groups of query heads; null: as many as heads."""
    mlp: Literal["swiglu", "relu2"] = "swiglu"
    hidden: int | None = Field(None, ge=16, le=1 << 48)
    """Width of the MLP; null: 8/3 of the width for swiglu (rounded up to a multiple of 32), 4 for relu2."""
    rope_theta: float = Field(10000.0, gt=1)

    @property
    def hidden_width(self) -> int:
        """Return the MLP's width, computed from the other fields if it is null."""
        if self.hidden is not None:
            return self.hidden
        return -(-8 * self.width // 96) * 32 if self.mlp == "swiglu" else 4 * self.width

    @property
    def outline(self) -> Outline | None:
        """Return the shape of the model of `transformers`; None for this package's transformer."""
        return None if self.model is None else outlined(self.model, self.corpus)

    @property
    def linear_layers(self) -> tuple[Layer, ...]:
        """Return the layers that a recipe applies to.

        They are those of the given model, or four in each block of this package's transformer.
        """
        if outline := self.outline:
            return outline.layers
        kinds = {"attention": "Attention", "mlp": _MLPS[self.mlp]}
        around = {name: {*_AROUND, kinds[name.partition(".")[0]]} for name in _LINEARS}
        return located(
            {
                f"blocks.{block}.{name}": classes
                for block in range(self.layers)
                for name, classes in around.items()
            },
            weights=lambda name: self.width * self._features[name.split(".", 2)[2]],
        )

    @property
    def _features(self) -> dict[str, int]:
        """Return the number of input or output features of each layer that is not the model's width."""
        keys = (self.kv_heads or self.heads) * (self.width // self.heads)
        up = (2 if self.mlp == "swiglu" else 1) * self.hidden_width
        return dict(zip(_LINEARS, (self.width + 2 * keys, self.width, up, self.hidden_width), strict=True))

    @property
    def imports(self) -> tuple[str, ...]:
        """Return the slow modules that a worker imports once."""
        return () if self.model is None else ("ablate.training.models.causal",)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, reason) for each field that cannot run."""
        problems = dict(super().problems())
        if "data" not in problems:
            problems |= dict(self._misshapen() if self.model is None else self._shaped_otherwise(self.model))
        yield from problems.items()

    def _shaped_otherwise(self, model: Architecture) -> Iterator[tuple[str, str]]:
        for name in (name for name in _SHAPE if getattr(self, name) != type(self).model_fields[name].default):
            yield (
                name,
                "has no effect on a model of transformers; set that configuration's own field under model",
            )
        yield from misfits(model, self)

    def _misshapen(self) -> Iterator[tuple[str, str]]:
        if self.width % self.heads:
            yield "heads", f"{self.heads} does not divide width {self.width}"
        elif self.width // self.heads % 2:
            yield (
                "heads",
                f"{self.heads} heads of width {self.width // self.heads}: "
                "rotary positions need an even head width",
            )
        if self.heads % (self.kv_heads or self.heads):
            yield "kv_heads", f"{self.kv_heads} does not divide heads {self.heads}"

    @property
    def extents(self) -> dict[str, int]:
        """Return the context, which every batch is a multiple of, and the widths of the transformer."""
        if self.model is not None:
            return extents(self.model, self)
        keys = (self.kv_heads or self.heads) * (self.width // self.heads)
        widths = {
            "workload.width": self.width,
            "workload.hidden": self.hidden_width,
            "the width of workload.kv_heads": keys,
        }
        return {"workload.context": self.context} | widths

    @property
    def divisible(self) -> bool:
        """Return True for this package's own transformer.

        A model of `transformers` may use dropout, whose masks are drawn for whole batches.
        """
        return self.model is None

    @property
    def shardable(self) -> bool:
        """Return True: this workload leaves no files at its end."""
        return True

    def identity(self) -> dict[str, Json]:
        """Return the fields that determine the numbers."""
        fields = super().identity()
        other = (
            () if self.model is None else (*_SHAPE, *(["model"] if isinstance(self.model, str) else []))
        )  # a model given by path or name is in the fingerprint
        return {name: value for name, value in fields.items() if name not in other}

    def fingerprint(self) -> str:
        """Return the fingerprint of the data, and of a named model's configuration."""
        if not isinstance(self.model, str):
            return super().fingerprint()
        from ablate.training.models.source import fingerprint

        return f"{super().fingerprint()}-{fingerprint(self.model)}"

    def parameters(self) -> int:
        """Return the number of weights in the blocks' matrices; of all weights of a `transformers` model."""
        if outline := self.outline:
            return outline.parameters
        return self.layers * self.width * sum(self._features.values())

    def cost(self, quantised: bool) -> float:
        """Return rough seconds of one trial on one CPU core."""
        elements = self.layers * (8 * self.width + 3 * self.hidden_width)
        if self.model is not None:  # a block with 12 n^2 weights has 16 n activations per token
            elements = 16 * (self.parameters() * self.blocks / 12) ** 0.5
        return self.seconds(self.parameters(), elements, self.blocks, quantised)

    def subject(self, recipe: Recipe, clock: Clock, device: torch.device) -> Subject:
        """Return the transformer and windows of the text."""
        import torch

        from ablate.engines.products import DTYPES
        from ablate.training.models.transformer import Transformer, initialise, logits

        if self.model is not None:
            from ablate.training.models import causal

            model = causal.build(self.model, self.corpus.vocab, clock.seed, device, weights=False)
            return Subject(
                model,
                *self.windows(clock.seed, device),
                *(partial(part, clock, DTYPES[recipe.dtype]) for part in (causal.loss, causal.logits)),
            )
        with torch.device("meta"):
            model = Transformer(self, self.corpus.vocab, DTYPES[recipe.dtype])
        return Subject(
            initialise(model, clock.seed, device), *self.windows(clock.seed, device), logits=logits
        )
