"""Workload that fine-tunes a causal language model of `transformers`.

It trains all weights or low-rank adapters, with the linear layers under a recipe.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ablate.cache import growing, kept, key_of
from ablate.files import Json, user_path
from ablate.numerics.spec import Spec
from ablate.recipes.recipe import Products, Recipe, Wgrad
from ablate.training.data import without_places
from ablate.training.data.sources import TextSource
from ablate.training.hyperparameters import MOST_SEQUENCES, MOST_STEPS, MOST_WIDTH
from ablate.training.metric_names import FIRST_NONFINITE
from ablate.training.trial_run import Telemetry, TrialRun, beats
from ablate.training.workloads.gpt import Gpt
from ablate.training.workloads.text import Architecture, Fields, Subject, TextWorkload

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ablate.numerics.philox import Clock
    from ablate.training.loop import PreparedRun, Record

_TINY = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_VERSION = 1
"""Version of the base's weights. Raise it by hand if the same `Base` would give other ones: weights kept
under another version are then trained again."""


class Lora(Spec):
    """Low-rank adapters (arXiv 2106.09685): the model's own weights stay fixed, quantised by the recipe."""

    rank: int = Field(8, ge=1, le=MOST_WIDTH)
    alpha: float = Field(16.0, gt=0)
    """Numerator of the factor alpha / rank that the adapters' output is multiplied by."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the adapters' input, in training."""
    targets: tuple[str, ...] = Field(("*",), strict=False, min_length=1)
    """Globs on layer names or their ends (`q_proj`, `mlp.*`); by default all layers of the recipe."""


class Base(Spec):
    """Short pretraining in bf16 that gives an untrained configuration weights to fine-tune."""

    steps: int = Field(300, ge=1, le=MOST_STEPS)
    data: TextSource = "stdlib"
    batch: int = Field(4, ge=1, le=MOST_SEQUENCES)
    lr: float = Field(3e-3, gt=0)
    seed: int = 0


class Finetune(TextWorkload):
    """Model, text, and the choice between training all weights or adapters."""

    VERSION: ClassVar[int] = 1
    METRICS: ClassVar[frozenset[str]] = TextWorkload.METRICS | {"val/perplexity"}
    NAMES: ClassVar[tuple[str, ...]] = ("model",)
    pretrained: ClassVar[bool] = True

    model: Architecture = Field(default_factory=lambda: Fields(_TINY))
    """Folder saved by `transformers`, name on the hub, or fields of a configuration with `model_type`. Its
    weights are then trained by `base`, or drawn from the seed."""
    base: Base | None = None
    lora: Lora | None = None
    """Low-rank adapters to train; null: every weight is trained."""
    save: bool = False
    """Save the trained model, with its adapters merged, in the trial's folder `model`, for `transformers`."""
    lr: float = Field(3e-4, gt=0)

    @property
    def imports(self) -> tuple[str, ...]:
        return ("ablate.training.models.causal", *(["ablate.training.models.adapters"] if self.lora else []))

    def problems(self) -> Iterator[tuple[str, str]]:
        problems = dict(super().problems())
        if "data" not in problems:
            problems |= dict(self.misfits())
        if not {"data", "model"} & problems.keys():
            problems |= dict(self._adapters())
            if isinstance(self.model, str):
                problems |= dict(self._weights(user_path(self.model)))
            elif self.base:
                pretraining = self._pretraining(self.base)
                problems |= {f"base.{field}": why for field, why in pretraining.problems()}
        yield from problems.items()

    def _weights(self, folder: Path) -> Iterator[tuple[str, str]]:
        if self.base:
            why = "is for a configuration without weights, and model names one that has its own"
            yield "base", f"{why}; leave one of them out"
        if folder.exists() and not any(path.suffix in (".safetensors", ".bin") for path in folder.glob("*")):
            why = f"{folder} holds no weights (.safetensors or .bin)"
            yield "model", f"{why}, as transformers' save_pretrained leaves them"

    def contradictions(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().contradictions(recipe)
        rules = [name for name in ("osci_reset", "q_ema", "q_ramping") if getattr(recipe.weights, name)]
        if self.lora and rules:
            yield "lora", f"leaves quantised weights as they are, so weights.{rules[0]} has nothing to act on"

    def computed(self, recipe: Recipe) -> Recipe:
        """Return the recipe without the products that a run never computes: under adapters the layers' own
        weights are frozen, so they have no wgrad."""
        if self.lora is None:
            return recipe
        phases = tuple(phase.changed(use=phase.use and _frozen(phase.use)) for phase in recipe.schedule)
        return recipe.mapped(_frozen).changed(schedule=phases)

    def _adapters(self) -> Iterator[tuple[str, str]]:
        if self.lora is None:
            return
        if find_spec("peft") is None:
            yield "lora", "needs peft, which is not installed: pip install 'ablate-fp4[hf]'"
            return
        from ablate.training.models.described import matching

        try:
            matching(self.lora.targets, self.linears)
        except ValueError as error:
            yield "lora.targets", str(error)

    def identity(self) -> dict[str, Json]:
        fields = super().identity()
        if isinstance(self.model, str):
            del fields["model"]
        if self.base:
            base = self.base.canonical()
            fields["base"] = base | {"data": without_places(base["data"], self.base.data)}
        return fields

    def fingerprint(self) -> str:
        own = super().fingerprint()
        return f"{own}-{self._pretraining(self.base).fingerprint()}" if self.base else own

    def derived(self, metrics: dict[str, float]) -> dict[str, float]:
        perplexity = (
            {"val/perplexity": math.exp(metrics["val/loss"])} if metrics.get("val/loss", 1e3) < 700 else {}
        )
        return super().derived(metrics) | perplexity

    def compute(self, run: TrialRun) -> Iterator[Record]:
        """Train, and yield a Record after every step that measured something. While the base is trained
        first, by this trial or another, yield an empty record of step 0 every few seconds: a trial without
        records is taken for hung."""
        if self.base:
            from ablate.training.distributed import alone
            from ablate.training.loop import Record

            with alone():  # the rank that comes first trains it
                key = self._base_key(self.base, run.device)
                for _ in beats(growing("models", key, partial(self._pretrain, self.base, run.device))):
                    yield Record(0, {})
        yield from super().compute(run)

    def subject(self, recipe: Recipe, clock: Clock, device: torch.device) -> Subject:
        from ablate.engines.products import DTYPES
        from ablate.training.models.causal import build, logits, loss

        source = self._pretrained(self.base, device.type) if self.base else self.model
        model = build(source, self.corpus.vocab, clock.seed, device)
        parts = (partial(part, clock, DTYPES[recipe.dtype]) for part in (loss, logits))
        return Subject(model, *parts)

    def with_adapters(self, model: nn.Module, clock: Clock) -> nn.Module:
        if self.lora is None:
            return model
        from ablate.training.models.adapters import adapt
        from ablate.training.models.described import matching

        lora = self.lora
        names = matching(lora.targets, self.linears)
        return adapt(model, names, lora.rank, lora.alpha, lora.dropout, clock.seed)

    def leave(self, run: PreparedRun, folder: Path) -> None:
        if self.save:
            from ablate.training.models.adapters import save

            save(run.model, folder.parent / "model")

    def _pretraining(self, base: Base) -> Gpt:
        """Return the workload that trains the base. ValueError if the model has weights of its own."""
        if isinstance(self.model, str):
            raise ValueError(f"model {self.model} has weights of its own, so base has nothing to train")
        assert self.outline
        return Gpt(
            model=self.model | {"vocab_size": self.outline.vocab},
            context=self.context,
            steps=base.steps,
            batch=base.batch,
            lr=base.lr,
            data=base.data,
            eval_every=base.steps,
        )

    def _pretrained(self, base: Base, device: str) -> str:
        """Return the folder in the cache of the model with the base's weights, which are trained now if there
        are none."""

        def fill(folder: Path) -> None:
            for _ in self._pretrain(base, device, folder):
                pass

        return str(kept("models", self._base_key(base, device), fill))

    def _base_key(self, base: Base, device: str) -> str:
        import torch

        training = self._pretraining(base)
        return key_of(
            "base",
            _VERSION,
            training.identity(),
            training.fingerprint(),
            base.seed,
            device,
            torch.__version__,
        )

    def _pretrain(self, base: Base, device: str, folder: Path) -> Iterator[Record]:
        """Train the base, save it in a folder, and yield the records of its steps."""
        from ablate.recipes.presets import bf16
        from ablate.training.models.adapters import save

        config = self._pretraining(base)
        run = config.prepare(bf16(), base.seed, device)
        for record in config.train(run, Telemetry(every=0, shadow=0, log=1)):
            if FIRST_NONFINITE in record.metrics:
                raise FloatingPointError(
                    f"the base diverges in its pretraining: {json.dumps(config.identity())}; lower base.lr"
                )
            yield record
        save(run.model, folder)


def _frozen(products: Products) -> Products:
    return products.changed(wgrad=Wgrad())
