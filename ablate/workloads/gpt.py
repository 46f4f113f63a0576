"""Pretrain a decoder-only transformer on text. Torch is imported when it runs, so that planning stays instant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from ablate.data import open_corpus
from ablate.data.corpus import Shards, Source
from ablate.hyperparameters import METRICS, Training
from ablate.recipes.recipe import Recipe

if TYPE_CHECKING:
    import torch

    from ablate.checkpoints import Checkpoints
    from ablate.data.batches import Batch
    from ablate.engines.emulated import Engine
    from ablate.train import Record, Telemetry
    from ablate.transformer import Transformer


_LINEARS = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")


class Prepared(NamedTuple):
    """A model with a recipe applied, and its data."""

    model: Transformer
    engine: Engine
    batch: Callable[[int, int], Batch]
    validation: list[Batch]


class Gpt(Training):
    """Shape of the model, its data, and the training run."""

    VERSION: ClassVar[int] = 1
    METRICS: ClassVar[frozenset[str]] = METRICS | {"val/bits_per_byte"}

    data: Source = "stdlib"
    """`stdlib`: the Python standard library's source as bytes. Or token shards: {train: glob, val: glob, vocab: n}."""
    layers: int = Field(4, ge=1)
    width: int = Field(128, ge=16)
    heads: int = Field(4, ge=1)
    kv_heads: int | None = Field(None, ge=1)
    """Key and value heads shared by groups of query heads; null: as many as heads."""
    mlp: Literal["swiglu", "relu2"] = "swiglu"
    hidden: int | None = Field(None, ge=16)
    """Width of the MLP; null: 8/3 of the width for swiglu (rounded up to 32), 4 for relu2."""
    context: int = Field(128, ge=2)
    rope_theta: float = Field(10000.0, gt=1)

    @property
    def hidden_width(self) -> int:
        """The MLP's width, resolved."""
        if self.hidden is not None:
            return self.hidden
        return -(-8 * self.width // 96) * 32 if self.mlp == "swiglu" else 4 * self.width

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees."""
        return self.batch * self.context * self.accumulate

    @property
    def blocks(self) -> int:
        """Transformer blocks: what a layer policy counts."""
        return self.layers

    @property
    def linears(self) -> tuple[str, ...]:
        """The layers that a recipe applies to, by qualified name: what a layer rule is matched against."""
        return tuple(f"blocks.{block}.{name}" for block in range(self.layers) for name in _LINEARS)

    def problems(self) -> Iterator[tuple[str, str]]:
        """(field, reason) for what cannot run."""
        if self.width % self.heads:
            yield "heads", f"{self.heads} does not divide width {self.width}"
        elif self.width // self.heads % 2:
            yield "heads", f"{self.heads} heads of width {self.width // self.heads}: rotary positions need an even head width"
        if self.heads % (self.kv_heads or self.heads):
            yield "kv_heads", f"{self.kv_heads} does not divide heads {self.heads}"
        try:
            corpus = open_corpus(self.data)
        except (OSError, ValueError) as error:
            yield "data", f"cannot be read: {error}"
            return
        shortest = min(len(corpus.train), len(corpus.val))
        if shortest <= self.context + 1:
            yield "context", f"{self.context} is longer than the text: {shortest} tokens"

    def identity(self) -> dict[str, Any]:
        """The fields that determine the numbers: all but the places of the data, which its fingerprint stands for."""
        known = {"data": {"train", "val"}} if isinstance(self.data, Shards) else {}
        return self.model_dump(mode="json", exclude=known if self.compile else known | {"compile": True})

    def fingerprint(self) -> str:
        """What identifies the data's content."""
        return open_corpus(self.data).fingerprint

    def parameters(self) -> int:
        """Weights in the blocks' matrices."""
        kv = (self.kv_heads or self.heads) * (self.width // self.heads)
        up = (2 if self.mlp == "swiglu" else 1) * self.hidden_width
        return self.layers * self.width * (2 * self.width + 2 * kv + up + self.hidden_width)

    def cost(self, quantised: bool) -> float:
        """Rough seconds of one trial on one CPU core: 6 N T flops, a third of it for tokens that are only evaluated, element-wise
        passes that quantisation multiplies, and what calling operators takes."""
        evaluated = self.steps // self.eval_every * self.eval_tokens * (2 if quantised else 1)
        tokens = self.steps * self.tokens_per_step + evaluated / 3
        elements = tokens * self.layers * (8 * self.width + 3 * self.hidden_width)
        return 6 * self.parameters() * tokens / 200e9 + elements * (1e-8 if quantised else 5e-9) + 2e-3 * self.steps * self.layers

    def summary(self) -> dict[str, float]:
        """Facts about the data that put a loss in proportion: the corpus's unigram entropy in nats."""
        return {"data/unigram_entropy": open_corpus(self.data).unigram_entropy()}

    def records(
        self, recipe: Recipe, seed: int, engine: str, device: str, telemetry: Telemetry, checkpoints: Checkpoints | None = None
    ) -> Iterator[Record]:
        """Train, and yield a Record after every step that measured something."""
        return self.train(self.prepare(recipe, seed, device), telemetry, checkpoints)

    def prepare(self, recipe: Recipe, seed: int, device: str) -> Prepared:
        """The model and its data for one seed, with the recipe applied."""
        import torch

        from ablate.data.batches import training_batch, validation_batches
        from ablate.engines.emulated import DTYPES, convert
        from ablate.numerics.philox import Clock
        from ablate.transformer import Transformer, initialise

        corpus, where = open_corpus(self.data), torch.device(device)
        with torch.device("meta"):
            model = Transformer(self, corpus.vocab, DTYPES[recipe.dtype])
        engine = convert(initialise(model, seed, where), recipe, Clock(seed))
        if self.compile:
            from ablate.engines.compiled import compile_model

            compile_model(model, engine)

        def batch(step: int, micro_batch: int) -> tuple[torch.Tensor, ...]:
            pair = training_batch(corpus, seed, step, micro_batch, self.batch, self.context)
            return tuple(tensor.to(where) for tensor in pair)

        validation = [
            tuple(tensor.to(where) for tensor in pair)
            for pair in validation_batches(corpus, self.eval_tokens, self.eval_batch, self.context)
        ]
        return Prepared(model, engine, batch, validation)

    def train(self, run: Prepared, telemetry: Telemetry, checkpoints: Checkpoints | None = None) -> Iterator[Record]:
        """Train what was prepared; bits per byte beside nats where the data say how long a token is."""
        from ablate.train import Record, train

        bytes_per_token = open_corpus(self.data).bytes_per_token
        setting = self, self.tokens_per_step, telemetry, checkpoints
        for record in train(run.model, run.engine, run.batch, run.validation, *setting):
            if bytes_per_token and "val/loss" in record.metrics:
                record.metrics["val/bits_per_byte"] = record.metrics["val/loss"] / (math.log(2) * bytes_per_token)
            yield Record(*record)
