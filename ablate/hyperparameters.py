"""What a training run is, apart from its model and its precision: length, learning rate, optimizer. Torch-free."""

import math
from typing import Literal

from pydantic import Field

from ablate.numerics.spec import Spec

METRICS = frozenset(
    (
        *("train/loss", "val/loss", "val/loss_bf16", "grad/norm", "nan/loss", "nan/grad", "nan/activation"),
        *("memory/rss", "throughput/step_ms", "throughput/tokens_per_s", "flops/fp4_share"),
    )
)
"""What the training loop records whatever the recipe, and an experiment can therefore compare arms by."""
FINAL = frozenset(("flops/fp4_share",))
"""Those of them that only the last record has."""


class Training(Spec):
    """AdamW with warm-up and decay. Every field is part of a trial's identity."""

    steps: int = Field(300, ge=1)
    batch: int = Field(4, ge=1)
    """Sequences in a micro-batch."""
    accumulate: int = Field(1, ge=1)
    """Micro-batches per optimizer step; gradients add up in fp32."""
    lr: float = Field(3e-3, gt=0)
    """Peak learning rate."""
    warmup: float = Field(0.05, ge=0, le=1)
    """Fraction of the run over which the learning rate rises linearly."""
    decay: Literal["wsd", "cosine", "none"] = "wsd"
    """`wsd` stays at the peak and falls linearly at the end; `cosine` falls from the end of the warm-up."""
    decay_fraction: float = Field(0.2, ge=0, le=1)
    """Fraction of the run over which `wsd` falls."""
    final_lr: float = Field(0.0, ge=0, le=1)
    """Learning rate of the last step over the peak."""
    weight_decay: float = Field(0.1, ge=0)
    """On matrices only."""
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    clip: float | None = Field(1.0, gt=0)
    """Largest gradient norm; null: no clipping."""
    compile: bool = False
    """torch.compile around the quantised products: what surrounds them is fused, so the last bits differ from the eager path's."""
    eval_every: int = Field(100, ge=1)
    eval_tokens: int = Field(16384, ge=1)
    eval_batch: int = Field(16, ge=1)
    """Sequences in a batch of the evaluation."""

    def recorded(self, metric: str) -> range:
        """The steps before the last after which every trial records the metric, whatever its telemetry."""
        return range(0) if metric in FINAL else range(self.eval_every, self.steps, self.eval_every)

    @property
    def decay_start(self) -> int | None:
        """The first step whose learning rate is lower than the one before; None where it never falls."""
        start = self._decay_from()
        if start is None:
            return None
        near = range(max(1, math.floor(start) - 2), self.steps)  # rounding may move it by a step
        return next((step for step in near if self.lr_at(step) < self.lr_at(step - 1)), None)

    def _decay_from(self) -> float | None:
        if self.decay == "none" or (self.decay == "wsd" and self.decay_fraction == 0):
            return None
        warm = self.warmup * self.steps
        return warm if self.decay == "cosine" else max(warm, (1 - self.decay_fraction) * self.steps)

    def lr_at(self, step: int) -> float:
        """The learning rate of step `step` (from 0)."""
        warm = self.warmup * self.steps
        if step < warm:
            return self.lr * (step + 1) / (warm + 1)
        start = self._decay_from()
        if start is None:
            return self.lr
        progress = max(0.0, (step + 1 - start) / (self.steps - start))
        shape = (1 + math.cos(math.pi * progress)) / 2 if self.decay == "cosine" else 1 - progress
        return self.lr * (self.final_lr + (1 - self.final_lr) * shape)
