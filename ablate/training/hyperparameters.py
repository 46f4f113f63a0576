"""Hyperparameters of a training run: all that defines it apart from its model and its precision.

They are length, learning rate, optimizer, and the response to divergence. This file does not import torch.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from ablate.numerics.spec import Spec
from ablate.recipes.presets import fp8_current
from ablate.recipes.readings import BF16
from ablate.recipes.recipe import SLOTS, Products, Recipe, Run

MOST_STEPS, MOST_SEQUENCES, MOST_TOKENS = 10**9, 1 << 20, 1 << 40
"""Largest number of steps of a run, of sequences in a batch, and of tokens to train or evaluate on.

Plans of larger runs would take too long to compute.
"""
MOST_LAYERS, MOST_WIDTH = 1024, 1 << 20
"""Largest numbers of blocks and of features of a model: a plan has a name for each layer."""

METRICS = frozenset(
    (
        *("train/recent_loss", "val/loss", "val/loss_bf16", "grad/norm", "nan/activation"),
        *("throughput/step_ms", "throughput/tokens_per_s", "flops/fp4_share"),
    )
)
"""Metrics that the training loop records under every recipe; an experiment can compare arms by them."""
_COUNTS = "counts since the record before, so telemetry.log changes it"
OF_TELEMETRY = {
    "train/loss": "is the mean since the record before, so telemetry.log and guards change it; use"
    " train/recent_loss, the mean of the last 10 steps",
    "nan/loss": f"{_COUNTS}; a run with a loss that is not finite ends as diverged unless a guard skips it",
    "nan/grad": f"{_COUNTS}; use nan/activation, a count of the run",
    "memory/rss": "includes what telemetry keeps for its measurements, of quantised arms alone",
}
"""Metrics that the training loop records under every recipe but that telemetry changes, with the reason why
arms cannot be compared by them."""
FINAL = frozenset(("flops/fp4_share",))
"""Metrics of `METRICS` that only the last record has."""

_SAFER = {"bf16": Products(), "fp8": fp8_current().products}


class Fallback(Spec):
    """Settings that change for the rest of the run each time that a guard falls back."""

    lr: float = Field(0.5, gt=0, le=1)
    """Factor of the learning rate, applied again at each fallback."""
    clip: float = Field(1.0, gt=0, le=1)
    """Factor of `clip`, applied again at each fallback."""
    precision: Literal["bf16", "fp8"] | None = None
    """Precision of the slots and layers below after the first fallback; null: no change. fp8 is that of
    preset fp8_current."""
    slots: tuple[str, ...] = Field(("*",), strict=False, min_length=1)
    """Globs on the six slots: `fprop.*`, `wgrad.g`."""
    layers: tuple[Annotated[str, Field(min_length=1)], ...] = Field(("*",), strict=False, min_length=1)
    """Globs on layer names."""

    @model_validator(mode="after")
    def _names_slots(self) -> "Fallback":
        for pattern in self.slots:
            if not any(fnmatchcase(slot, pattern) for slot in SLOTS):
                raise ValueError(
                    f"guard.fallback.slots {pattern!r} matches none of the slots {', '.join(SLOTS)}"
                )
        if self.precision is None and (self.slots, self.layers) != (("*",), ("*",)):
            raise ValueError(
                "guard.fallback.slots and layers have no effect without guard.fallback.precision: fp8 or bf16"
            )
        return self

    def safer(self, products: Products) -> Products:
        """Return the products that a layer uses after a fallback, from those that the schedule and the layer
        rules put in force: the same if none is quantised, or if the fallback does not change the precision.
        """
        if self.precision is None or products.plain:
            return products
        slots = [slot for slot in SLOTS if any(fnmatchcase(slot, pattern) for pattern in self.slots)]
        return products.with_slots(slots, _SAFER[self.precision])


class Guard(Spec):
    """Conditions under which a step counts as diverging, and the response to it. A loss or gradient that is
    not finite always counts."""

    policy: Literal["stop", "skip", "fallback"] = "stop"
    """`stop` ends the run as diverged; `skip` does not apply the update of that step.

    `fallback` skips the step, makes the changes that `fallback` lists, and continues.
    """
    loss: float | None = Field(None, gt=1)
    """Factor over the running median above which a loss counts as diverging; null: no such limit."""
    norm: float | None = Field(None, gt=1)
    """Factor over the running median above which the gradient norm before clipping counts as diverging."""
    window: int = Field(32, ge=4, le=1 << 20)
    """Number of steps in the running median, before which nothing is compared. A fallback empties it. A
    median of 0 or below limits nothing."""
    limit: int = Field(20, ge=1)
    """Number of interventions after which the next step that diverges ends the run."""
    fallback: Fallback = Fallback()


class Training(Spec):
    """Length, learning rate, optimizer and evaluation of a run.

    Every field is part of a trial's identity, except those that change no bit. The types of the master
    weights (`weights.master`) and of the activations (`dtype`) belong to the recipe.
    """

    SAME_BITS: ClassVar[frozenset[str]] = frozenset({"recompute", "token_budget"})
    """Fields that change how a run is written down or computed, but none of its numbers."""

    steps: int = Field(300, ge=1, le=MOST_STEPS)
    token_budget: int | None = Field(None, ge=1, le=1 << 50)
    """Number of tokens to train on, in place of `steps`: the run has as many steps as cover them."""
    time_budget: float | None = Field(None, gt=0)
    """Seconds spent in steps after which the run ends; the learning-rate schedule ignores it."""
    batch: int = Field(4, ge=1, le=MOST_SEQUENCES)
    """Sequences in a micro-batch."""
    accumulate: int = Field(1, ge=1, le=MOST_SEQUENCES)
    """Micro-batches per optimizer step; gradients are added up in fp32."""
    lr: float = Field(3e-3, gt=0)
    """Peak learning rate."""
    warmup: float = Field(0.05, ge=0, le=1)
    """Fraction of the run over which the learning rate rises linearly."""
    decay: Literal["wsd", "cosine", "linear", "none"] = "wsd"
    """`wsd` stays at the peak and falls linearly at the end; `cosine` and `linear` fall after the warm-up."""
    decay_fraction: float = Field(0.2, ge=0, le=1)
    """Fraction of the run over which `wsd` falls."""
    final_lr: float = Field(0.0, ge=0, le=1)
    """Learning rate of the last step, as a fraction of the peak."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` trains matrices inside blocks, except packed experts, at AdamW's rate; AdamW the rest."""
    optimizer_state: Literal["bf16", "fp32"] = "fp32"
    """Type of the moments between steps; bf16 is emulated by rounding to nearest after every step."""
    weight_decay: float = Field(0.1, ge=0)
    """Weight decay, on matrices only."""
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    momentum: float = Field(0.95, ge=0, lt=1)
    """Momentum of Muon."""
    clip: float | None = Field(1.0, gt=0)
    """Largest gradient norm; null: no clipping."""
    guard: Guard = Guard()
    """Response to a step that diverges."""
    recompute: bool = False
    """Compute a block's activations again in the backward pass: the same bits, more time, less memory."""
    deterministic: bool = True
    """Use deterministic algorithms for attention on a GPU; without them a resumed run has other bits there.
    Compiled models and those of transformers use them for all operations, and fail at one without any."""
    compile: bool = False
    """Use torch.compile around the quantised products, which changes the last bits."""
    eval_every: int = Field(100, ge=1)
    eval_tokens: int = Field(16384, ge=1, le=MOST_TOKENS)
    eval_batch: int = Field(16, ge=1, le=MOST_SEQUENCES)
    """Sequences in a batch of the evaluation."""
    evaluate: tuple[str, ...] = Field((), strict=False)
    """Recipes by which every evaluation also reads the weights: presets, or a preset with `_weights_only`.

    Each is a metric, such as `val/loss@nvfp4`. The training is the same with and without.
    """

    @field_validator("evaluate")
    @classmethod
    def _once_each(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted({*names} - {BF16}))

    @model_validator(mode="after")
    def _steps_cover_the_budget(self) -> "Training":
        if self.token_budget is not None:
            # Tokens are 0 for a shape that `problems` reports.
            steps = -(-self.token_budget // max(1, self.tokens_per_step))
            if steps > MOST_STEPS:
                raise ValueError(
                    f"token_budget {self.token_budget} is {steps} steps; a run has at most {MOST_STEPS}"
                )
            if "steps" in self.model_fields_set and self.steps != steps:
                raise ValueError(
                    f"steps {self.steps} and token_budget {self.token_budget} (which is {steps} steps) "
                    "differ; leave one out"
                )
            object.__setattr__(self, "steps", steps)  # the model is frozen
        return self

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.accumulate

    def evaluations(self, quantised: bool) -> int:
        """Return how often an evaluation passes its tokens through the model."""
        return (2 if quantised else 1) + len(self.evaluate) + bool(self.evaluate)

    @property
    def extents(self) -> dict[str, int]:
        """Sizes that tokens and features of all quantised products are multiples of, by setting."""
        return {}

    @property
    def divisible(self) -> bool:
        """True if the mean loss of a batch is the mean over equal parts of it, so that ranks can share its
        sequences."""
        return False

    @property
    def shardable(self) -> bool:
        """True if only training uses the model, so that each rank may keep a part of it."""
        return False

    def contradictions(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        """Yield (field, reason) for each field that cannot run with an arm's recipe, with its layer rules and
        schedule."""
        unused = [name for name, value in self.guard.fallback if value != getattr(Fallback(), name)]
        if unused and self.guard.policy != "fallback":
            why = f"{self.guard.policy} never falls back, so fallback.{unused[0]} has no effect"
            yield "guard.policy", f"{why}; use policy: fallback"
        if self.compile and (needed := recipe.products.backward_needs):
            yield "compile", f"true keeps x and w alone for the backward pass; needed is {needed}"
        if self.compile and recipe.experts.replays:
            yield "compile", "true leaves no call of torch.topk to replace, which routing: replay does"
        if self.compile and self.recompute:
            yield "recompute", "true has no part in a compiled graph; leave out compile or recompute"
        if self.optimizer == "muon" and recipe.weights.q_ramping:
            yield "optimizer", "muon has not the moments that weights.q_ramping holds back; use adamw"

    def recorded(self, metric: str) -> range:
        """Return the steps before the last at which every trial records a metric of the workload, with any
        telemetry."""
        return range(0) if metric in FINAL else range(self.eval_every, self.steps, self.eval_every)

    @property
    def length(self) -> Run:
        """Length of a run, and the step at which its learning rate begins to fall."""
        return Run(self.steps, self.tokens_per_step, self.decay_start)

    @property
    def decay_start(self) -> int | None:
        """First step whose learning rate is lower than the one before; None if it never falls."""
        start = self._decay_from()
        if start is None:
            return None
        first = max(0, math.floor(start) - 3)  # rounding may shift the step by one
        peak = max(range(first, min(first + 7, self.steps)), key=self.lr_at, default=0)
        later = range(peak + 1, self.steps)  # the rate never rises, but it may stay equal for many steps
        index = bisect_left(later, True, key=lambda step: self.lr_at(step) < self.lr_at(peak))
        return later[index] if index < len(later) else None

    def _decay_from(self) -> float | None:
        if self.decay == "none" or (self.decay == "wsd" and self.decay_fraction == 0):
            return None
        warm = self.warmup * self.steps
        return max(warm, (1 - self.decay_fraction) * self.steps) if self.decay == "wsd" else warm

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, from 0 to `steps` - 1, without the factor of a guard's
        fallbacks."""
        warm = self.warmup * self.steps
        if step < warm:
            return self.lr * (step + 1) / (warm + 1)
        start = self._decay_from()
        if start is None or start >= self.steps:  # a decay too short for a step
            return self.lr
        progress = max(0.0, (step + 1 - start) / (self.steps - start))
        shape = (1 + math.cos(math.pi * progress)) / 2 if self.decay == "cosine" else 1 - progress
        return self.lr * (self.final_lr + (1 - self.final_lr) * shape)
