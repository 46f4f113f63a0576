"""Common base of workloads that train a model on text: from a recipe and a seed to records."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

from pydantic import AfterValidator, Field

from ablate.files import Json
from ablate.recipes.layers import Layer, Match, select
from ablate.recipes.readings import problems, reading
from ablate.recipes.recipe import Recipe
from ablate.training.data import Corpus, open_corpus, without_places
from ablate.training.data.sources import TextSource
from ablate.training.hyperparameters import METRICS, Training
from ablate.training.metric_names import ENDINGS, QUANTITIES, by_recipe, plain_metric
from ablate.training.workloads.base import Workload

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ablate.numerics.philox import Clock
    from ablate.training.checkpoints import Checkpoints
    from ablate.training.data.batches import Batch
    from ablate.training.loop import PreparedRun, Record, Twin
    from ablate.training.models.source import Outline
    from ablate.training.trial_run import Telemetry, TrialRun


class Fields(dict[str, object]):
    """Fields of a configuration. They are never changed, so they can be hashed and compared by value."""

    def __hash__(self) -> int:  # type: ignore[override]  # a dict has none, since it can change
        return hash(json.dumps(self, sort_keys=True))


Architecture = str | Annotated[dict[str, object], AfterValidator(Fields)]
"""Folder with config.json, name on the hub, or fields of a `transformers` configuration with `model_type`."""


class Subject(NamedTuple):
    """Model in high precision, and functions of the model and a batch."""

    model: nn.Module
    loss: Callable[..., Tensor] | None
    """Returns the mean loss; None: the model does."""
    logits: Callable[..., Tensor]
    """Returns logits [tokens, vocabulary]; the last tensor of the batch holds the tokens to predict."""


class TextWorkload(Training, Workload):
    """Workload that trains a model on windows of a corpus.

    A subclass defines `subject`. It may also define metrics derived from a record, and files left at the end.
    """

    METRICS: ClassVar[frozenset[str]] = METRICS | {"val/bits_per_byte"}
    UNITS: ClassVar[dict[str, str]] = dict.fromkeys(
        ("train/loss", "train/recent_loss", "val/loss", "val/loss_bf16", "val/kl"), "nats"
    )
    forks: ClassVar[bool] = True
    twins: ClassVar[bool] = True
    measures: ClassVar[bool] = True
    resumes: ClassVar[bool] = True
    context_free: ClassVar[bool] = True

    data: TextSource = "stdlib"
    """`stdlib`: source of Python's standard library as bytes; `prose`: 40 kB of English; or your own data.

    Your own data are files, token shards or a dataset (docs/use/data.md).
    """
    context: int = Field(128, ge=2, le=1 << 24)
    """Tokens in a sequence."""
    model: Architecture | None = None
    """Configuration of `transformers` in place of the shape's fields: its fields with `model_type`, a folder
    with config.json, or a name on the hub. Its weights are drawn from the seed."""

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context * self.accumulate

    @property
    def training(self) -> Training:
        return self

    @property
    def data_source(self) -> TextSource:
        return self.data

    @property
    def outline(self) -> Outline | None:
        """Shape of the model of `transformers`, whose vocabulary is the corpus's if its configuration has
        none; None for this package's transformer. OSError if the model cannot be found or read; ValueError if
        it is no model that `transformers` builds or a recipe applies to."""
        from ablate.training.models.described import outline

        return None if self.model is None else outline(self.model, self.corpus.vocab)

    @property
    def linear_layers(self) -> tuple[Layer, ...]:
        return self.outline.layers if self.outline else ()

    @property
    def extents(self) -> dict[str, int]:
        """Context, which every batch is a multiple of, and features of the model's quantised layers."""
        features = self.outline.features.items() if self.outline else ()
        return {"workload.context": self.context} | {
            f"the model's {where}-features": count for where, count in features
        }

    @property
    def of_readings(self) -> frozenset[str]:
        return frozenset(plain_metric(by_recipe(q, name)) for name in self.evaluate for q in QUANTITIES)

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from (("evaluate", reason) for reason in problems(self.evaluate))
        named = [pattern for pattern in self.guard.fallback.layers if pattern != "*"]
        try:
            layers = self.linear_layers if named else ()
        except (OSError, ValueError):  # the model cannot be read, which a subclass reports
            named = []
        for pattern in named:
            if reason := select(Match(name=pattern), layers).reason:
                yield "guard.fallback.layers", reason
        try:
            corpus = self.corpus
        except (OSError, ValueError) as error:
            yield "data", f"cannot be read: {error}"
            return
        shortest = min(len(corpus.train), len(corpus.val))
        if shortest <= self.context + 1:
            yield "context", f"{self.context} is longer than the text: {shortest} tokens"

    def misfits(self) -> Iterator[tuple[str, str]]:
        """Yield (field, reason) for each part of a model of `transformers` that cannot run on the text, which
        must be readable."""
        vocab = self.corpus.vocab
        try:
            outline = self.outline
        except (OSError, ValueError) as error:
            yield "model", str(error)
            return
        if outline and outline.vocab < vocab:
            tokens = f"has {outline.vocab} tokens, and the data's vocabulary has {vocab}"
            yield "model", f"{tokens}: prepare them with its tokenizer"
        if outline and outline.context and outline.context < self.context:
            yield "context", f"{self.context} is longer than the model's positions reach: {outline.context}"

    @property
    def corpus(self) -> Corpus:
        return open_corpus(self.data)

    def fingerprint(self) -> str:
        if not isinstance(self.model, str):
            return self.corpus.fingerprint
        from ablate.training.models.source import fingerprint

        return f"{self.corpus.fingerprint}-{fingerprint(self.model)}"

    def summary(self) -> dict[str, float]:
        return {"data/unigram_entropy": self.corpus.unigram_entropy()}

    def derived(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return bits per byte, from the loss in nats, if the data give the length of a token."""
        if not self.corpus.bytes_per_token or "val/loss" not in metrics:
            return {}
        return {"val/bits_per_byte": metrics["val/loss"] / (math.log(2) * self.corpus.bytes_per_token)}

    @abstractmethod
    def subject(self, recipe: Recipe, clock: Clock, device: torch.device) -> Subject:
        """Return the model, on the device, for the clock's seed; the model's weights are drawn from the
        seed alone. The recipe's `dtype` is that of the activations; the engine applies the rest later. The
        training loop later sets the clock to every step. OSError if the data or the model cannot be read;
        ValueError if they are damaged, or do not fit together."""

    def with_adapters(self, model: nn.Module, clock: Clock) -> nn.Module:
        """Return the model, whose layers an engine has converted, with modules around these layers
        (adapters), drawn from the clock's seed; by default unchanged."""
        return model

    def leave(self, run: PreparedRun, folder: Path) -> None:
        """Save files for people, in a folder that may not exist, after a run that did not diverge; by default
        none."""

    def compute(self, run: TrialRun) -> Iterator[Record]:
        from ablate.training.distributed import world
        from ablate.training.forked_training import train_forks
        from ablate.training.loop import Twin

        world().begin(self, run.recipe, run.engine)
        if run.forks:
            prepare = partial(self.prepare, seed=run.seed, device=run.device, engine=run.engine)
            yield from self._derived(train_forks(prepare, self, run))
            return
        prepared, stopped = self.prepare(run.recipe, run.seed, run.device, run.engine), False
        twin = Twin.of(run.recipe, run.engine) if run.twin else None
        for record in self.train(prepared, run.telemetry, run.checkpoints, twin):
            yield record
            stopped = not ENDINGS.isdisjoint(record.metrics)
        if run.checkpoints and not stopped:
            self.leave(prepared, run.checkpoints.artifacts)

    def prepare(self, recipe: Recipe, seed: int, device: str, engine: str = "emulated") -> PreparedRun:
        import torch

        from ablate.engines import converter
        from ablate.engines.recomputation import recompute
        from ablate.numerics.philox import Clock
        from ablate.training.distributed import shard
        from ablate.training.loop import PreparedRun

        clock = Clock(seed)
        model, loss, logits = self.subject(recipe, clock, torch.device(device))
        driver = converter(engine)(model, recipe, clock)
        if self.recompute:
            recompute(model, driver)
        model = self.with_adapters(model, clock)
        if self.compile:
            from ablate.engines.compiled import compile_model

            compile_model(model, driver)
        shard(model, driver)
        return PreparedRun(
            model,
            driver,
            *self.windows(seed, torch.device(device)),
            loss and partial(loss, model),
            partial(logits, model),
            {name: reading(name) for name in self.evaluate},
        )

    def train(
        self,
        run: PreparedRun,
        telemetry: Telemetry,
        checkpoints: Checkpoints | None = None,
        twin: Twin | None = None,
    ) -> Iterator[Record]:
        from ablate.training.loop import train

        yield from self._derived(train(run, self, telemetry, checkpoints, twin))

    def _derived(self, records: Iterator[Record]) -> Iterator[Record]:
        for record in records:
            record.metrics.update(self.derived(record.metrics))
            yield record

    def identity(self) -> dict[str, Json]:
        fields = self.canonical(self.SAME_BITS)
        return {**fields, "data": without_places(fields["data"], self.data)}

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

    def parameters(self) -> int:
        return self.outline.parameters if self.outline else 0

    def cost(self, quantised: bool) -> float:
        """Return rough seconds of one trial of a `transformers` model on one CPU core, without a base."""
        # A block has 12 n^2 weights, and 16 n activations per token.
        elements = 16 * (self.parameters() * self.blocks / 12) ** 0.5
        return self.seconds(self.parameters(), elements, self.blocks, quantised)

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
