"""Workload that pretrains a decoder-only transformer on text.

Torch is imported when it runs, so that planning stays fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from ablate.files import Json
from ablate.recipes.layers import Layer, located
from ablate.recipes.recipe import Recipe
from ablate.training.models.shape import MixtureOfExperts, TransformerShape
from ablate.training.workloads.text import Subject, TextWorkload

if TYPE_CHECKING:
    import torch

    from ablate.numerics.philox import Clock

_MLPS = {"swiglu": "SwiGLU", "relu2": "SquaredReLU"}
_SHAPE = ("layers", "width", "heads", "kv_heads", "mlp", "hidden", "experts", "rope_theta")
"""Fields that do not apply to a model of `transformers`."""


class Gpt(TransformerShape, TextWorkload):
    """Shape of the model, its data, and the training run."""

    VERSION: ClassVar[int] = 1
    LATER: ClassVar[frozenset[str]] = frozenset({"experts"})
    NAMES: ClassVar[tuple[str, ...]] = ("model",)

    @property
    def linear_layers(self) -> tuple[Layer, ...]:
        """Layers of the given model, or of this package's transformer: four in each block, or two for each
        expert in place of those of the MLP. An expert's counts as many weights as a token is multiplied by on
        average: top_k / count of its elements."""
        if self.model is not None:
            return super().linear_layers
        sizes = self._features
        block = "Block" if self.experts is None else "MixtureBlock"
        around = {name: {"Transformer", "ModuleList", block, "Linear", *self._within(name)} for name in sizes}
        weights = {name: self.width * features for name, features in sizes.items()}
        if self.experts is not None:
            chosen, count = self.experts.top_k, self.experts.count
            weights |= {name: n * chosen // count for name, n in weights.items() if ".experts." in name}
        return located(
            {f"blocks.{number}.{name}": around[name] for number in range(self.layers) for name in sizes},
            weights=lambda name: weights[name.split(".", 2)[2]],
        )

    @property
    def _features(self) -> dict[str, int]:
        """Features, in or out, of each layer of a block that are not the model's width."""
        keys = (self.kv_heads or self.heads) * (self.width // self.heads)
        features = {"attention.qkv": self.width + 2 * keys, "attention.out": self.width}
        gates = 2 if self.mlp == "swiglu" else 1
        if self.experts is None:
            return features | {"mlp.up": gates * self.hidden_width, "mlp.down": self.hidden_width}
        first, width = "gate_up" if gates == 2 else "up", self.expert_width
        for expert in range(self.experts.count):
            features[f"mlp.experts.{expert}.{first}"] = gates * width
            features[f"mlp.experts.{expert}.down"] = width
        shared = self.experts.shared * width
        return features | ({"mlp.shared.up": gates * shared, "mlp.shared.down": shared} if shared else {})

    def _within(self, name: str) -> tuple[str, ...]:
        """Return the classes of the modules of a block that contain a layer, by its name in the block."""
        if name.startswith("attention"):
            return ("Attention",)
        if self.experts is None:
            return (_MLPS[self.mlp],)
        return ("Mixture", *(("Experts", "Expert") if ".experts." in name else (_MLPS[self.mlp],)))

    @property
    def imports(self) -> tuple[str, ...]:
        return () if self.model is None else ("ablate.training.models.causal",)

    def problems(self) -> Iterator[tuple[str, str]]:
        problems = dict(super().problems())
        if "data" not in problems:
            problems |= dict(self._misshapen() if self.model is None else self._shaped_otherwise())
        yield from problems.items()

    def _shaped_otherwise(self) -> Iterator[tuple[str, str]]:
        for name in (name for name in _SHAPE if getattr(self, name) != type(self).model_fields[name].default):
            why = "has no effect on a model of transformers"
            yield name, f"{why}; set that configuration's own field under model"
        yield from self.misfits()

    def _misshapen(self) -> Iterator[tuple[str, str]]:
        if self.width % self.heads:
            yield "heads", f"{self.heads} does not divide width {self.width}"
        elif self.width // self.heads % 2:
            heads = f"{self.heads} heads of width {self.width // self.heads}"
            yield "heads", f"{heads}: rotary positions need an even head width"
        if self.heads % (self.kv_heads or self.heads):
            yield "kv_heads", f"{self.kv_heads} does not divide heads {self.heads}"
        if self.experts is not None:
            yield from self._misrouted(self.experts)

    def _misrouted(self, experts: MixtureOfExperts) -> Iterator[tuple[str, str]]:
        if experts.top_k > experts.count:
            yield "experts.top_k", f"a token cannot be sent to {experts.top_k} of {experts.count} experts"
        if self.hidden is not None and experts.hidden is not None:
            yield "hidden", "has no effect, since experts.hidden sets the width of an expert; leave one out"
        if self.compile:
            why = "true needs equal shapes in all steps, and experts get other numbers of tokens in each"
            yield "compile", f"{why}; leave out compile or experts"

    @property
    def extents(self) -> dict[str, int]:
        """Context, which every batch is a multiple of, and widths of the transformer."""
        if self.model is not None:
            return super().extents
        keys = (self.kv_heads or self.heads) * (self.width // self.heads)
        hidden, where = self.hidden_width, "workload.hidden"
        if self.experts is not None:
            hidden, where = self.expert_width, "workload.experts.hidden"
        widths = {"workload.width": self.width, where: hidden, "the width of workload.kv_heads": keys}
        return {"workload.context": self.context} | widths

    @property
    def divisible(self) -> bool:
        """True for this package's own transformer, but not with a load-balancing loss, a product of means
        over a batch. A model of `transformers` may use dropout, whose masks are drawn for whole batches."""
        return self.model is None and not (self.experts and self.experts.auxiliary)

    @property
    def shardable(self) -> bool:
        """True, since this workload leaves no files at its end, but not with experts."""
        return not self.has_experts

    def identity(self) -> dict[str, Json]:
        fields = super().identity()
        other: tuple[str, ...] = () if self.model is None else _SHAPE
        if isinstance(self.model, str):  # its content is in the fingerprint
            other = (*_SHAPE, "model")
        return {name: value for name, value in fields.items() if name not in other}

    def parameters(self) -> int:
        """Return the number of weights in the blocks' matrices; of all weights of a `transformers` model."""
        if self.model is not None:
            return super().parameters()
        routers = self.experts.count if self.experts else 0
        return self.layers * self.width * (sum(self._features.values()) + routers)

    def cost(self, quantised: bool) -> float:
        if self.model is not None:
            return super().cost(quantised)
        experts = self.experts
        hidden = self.expert_width * (experts.top_k + experts.shared) if experts else self.hidden_width
        elements = self.layers * (8 * self.width + 3 * hidden)
        layers = self.linear_layers
        multiplied = sum(layer.weights for layer in layers)
        return self.seconds(multiplied, elements, len(layers) // 4, quantised)  # four layers a block

    def subject(self, recipe: Recipe, clock: Clock, device: torch.device) -> Subject:
        import torch

        from ablate.engines.products import DTYPES
        from ablate.training.models.transformer import Transformer, initialise, logits

        if self.model is not None:
            from ablate.training.models import causal

            model = causal.build(self.model, self.corpus.vocab, clock.seed, device, weights=False)
            parts = (partial(part, clock, DTYPES[recipe.dtype]) for part in (causal.loss, causal.logits))
            return Subject(model, *parts)
        with torch.device("meta"):
            model = Transformer(self, self.corpus.vocab, DTYPES[recipe.dtype])
        return Subject(initialise(model, clock.seed, device), None, logits)
