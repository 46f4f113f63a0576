"""Common base of workloads on text: a corpus, windows of it, and metrics derived from its tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import AfterValidator, Field

from ablate.training.data import Corpus, open_corpus
from ablate.training.data.sources import TextSource
from ablate.training.hyperparameters import METRICS
from ablate.training.metric_names import QUANTITIES
from ablate.training.workloads.trained import Trained

if TYPE_CHECKING:
    import torch

    from ablate.training.data.batches import Batch
    from ablate.training.models.source import Outline


class Fields(dict[str, object]):
    """Fields of a configuration. They are never changed, so they can be hashed and compared by value."""

    def __hash__(self) -> int:  # type: ignore[override]  # a dict has none, since it can change
        return hash(json.dumps(self, sort_keys=True))


Architecture = str | Annotated[dict[str, object], AfterValidator(Fields)]
"""Folder with config.json, name on the hub, or fields of a `transformers` configuration with `model_type`."""


class TextWorkload(Trained):
    """Training on windows of a corpus."""

    METRICS: ClassVar[frozenset[str]] = METRICS | {"val/bits_per_byte"}
    QUANTITIES: ClassVar[tuple[str, ...]] = QUANTITIES

    data: TextSource = "stdlib"
    """`stdlib`: source of Python's standard library as bytes; `prose`: 40 kB of English; or your own data.

    Your own data are files, token shards or a dataset (docs/use/data.md).
    """
    context: int = Field(128, ge=2, le=1 << 24)
    """Tokens in a sequence."""

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context * self.accumulate

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        try:
            corpus = self.corpus
        except (OSError, ValueError) as error:
            yield "data", f"cannot be read: {error}"
            return
        shortest = min(len(corpus.train), len(corpus.val))
        if shortest <= self.context + 1:
            yield "context", f"{self.context} is longer than the text: {shortest} tokens"

    @property
    def corpus(self) -> Corpus:
        return open_corpus(self.data)

    def fingerprint(self) -> str:
        return self.corpus.fingerprint

    def summary(self) -> dict[str, float]:
        """Return the corpus's unigram entropy in nats."""
        return {"data/unigram_entropy": self.corpus.unigram_entropy()}

    def derived(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return bits per byte, from the loss in nats, if the data give the length of a token."""
        if not self.corpus.bytes_per_token or "val/loss" not in metrics:
            return {}
        return {"val/bits_per_byte": metrics["val/loss"] / (math.log(2) * self.corpus.bytes_per_token)}

    def windows(self, seed: int, device: torch.device) -> tuple[Callable[[int, int], Batch], list[Batch]]:
        """Return batches on a device: those of training, which depend on the seed, by step and micro-batch,
        and those of validation."""
        from ablate.training.data.batches import training_batch, validation_batches

        corpus = self.corpus

        def on_device(pair: Batch) -> Batch:
            tokens, targets = pair
            return tokens.to(device), targets.to(device)

        def batch(step: int, micro_batch: int) -> Batch:
            return on_device(training_batch(corpus, seed, step, micro_batch, self.batch, self.context))

        return batch, [
            on_device(pair)
            for pair in validation_batches(corpus, self.eval_tokens, self.eval_batch, self.context)
        ]

    def seconds(self, parameters: float, elements: float, blocks: int, quantised: bool) -> float:
        """Return rough seconds of one trial on one CPU core, a sum of three terms: 6 N T flops of N weights
        in matrices, a third of it for tokens that are only evaluated; passes over `elements` activations per
        token, which quantisation multiplies; and the cost of calling operators."""
        evaluated = self.steps // self.eval_every * self.eval_tokens * self.evaluations(quantised)
        tokens = self.steps * self.tokens_per_step + evaluated / 3
        return (
            6 * parameters * tokens / 200e9
            + elements * tokens * (1e-8 if quantised else 5e-9)
            + 2e-3 * self.steps * blocks
        )


def outlined(model: Architecture, corpus: Corpus) -> Outline:
    """Return the outline of a model, whose vocabulary is the corpus's if its configuration has none, from the
    cache if it has been made before. OSError if the model cannot be found or read; ValueError if it is no
    model that `transformers` builds or a recipe applies to."""
    from ablate.training.models.described import outline

    return outline(model, corpus.vocab)


def extents(model: Architecture, config: TextWorkload) -> dict[str, int]:
    """Return the context, which every batch is a multiple of, and the features of a `transformers` model's
    quantised layers."""
    layers = outlined(model, config.corpus).features.items()
    return {"workload.context": config.context} | {
        f"the model's {where}-features": count for where, count in layers
    }


def misfits(model: Architecture, config: TextWorkload) -> Iterator[tuple[str, str]]:
    """Yield (field, reason) for each part of a model of `transformers` that cannot run on the workload's
    text, which must be readable."""
    vocab = config.corpus.vocab
    try:
        outline = outlined(model, config.corpus)
    except (OSError, ValueError) as error:
        yield "model", str(error)
        return
    if outline.vocab < vocab:
        yield (
            "model",
            f"has {outline.vocab} tokens, and the data's vocabulary has {vocab}: "
            "prepare them with its tokenizer",
        )
    if outline.context and outline.context < config.context:
        yield "context", f"{config.context} is longer than the model's positions reach: {outline.context}"
