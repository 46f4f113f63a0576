"""The guard of a training run: which steps count as diverging, and what is done about them.

The guard judges every step before its update is applied, from the step's loss and gradient norm. A verdict is data: its kind,
the quantity that diverged and by how much, and what changes for the rest of the run. `str(verdict)` is the sentence that trials
store with a record and that controller and reports show; no code reads it back.
"""

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from ablate.engines.emulated import Engine
from ablate.training.hyperparameters import Training


@dataclass(frozen=True)
class Cause:
    """The quantity of a step that diverged."""

    quantity: Literal["loss", "gradient norm"]
    value: float
    median: float | None = None
    """Running median that the value is too many times of; None for a value that is not finite."""
    window: int = 0
    """Steps of that median."""

    @property
    def ratio(self) -> float | None:
        """The value over the running median."""
        return None if self.median is None else self.value / self.median

    def __str__(self) -> str:
        if self.ratio is None:
            return "the loss is not finite" if self.quantity == "loss" else "the gradient is not finite"
        return f"{self.quantity} {self.value:.4g} is {self.ratio:.3g} times the median of {self.window} steps"


@dataclass(frozen=True)
class Change:
    """Settings that hold for the rest of the run after a fallback; None and () for those that the fallback leaves alone."""

    lr: float | None = None
    """Factor of the learning rate."""
    clip: float | None = None
    precision: str | None = None
    slots: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [] if self.lr is None else [f"learning rate times {self.lr:.3g}"]
        parts += [] if self.clip is None else [f"clip {self.clip:.3g}"]
        parts += (
            [f"{', '.join(self.slots)} of {', '.join(self.layers)} in {self.precision}"]
            if self.precision
            else []
        )
        return ", ".join(parts)


@dataclass(frozen=True)
class Verdict:
    """Decision on one step: apply its update, skip it, or end the run."""

    kind: Literal["step", "skip", "stop"]
    cause: Cause | None = None
    """None for a step that does not diverge."""
    interventions: int = 0
    """Steps skipped in the run so far, this one included. A run that ends with some has reached `guard.limit`."""
    change: Change | None = None

    def __str__(self) -> str:
        if self.cause is None:
            return ""
        if self.kind == "stop":
            return (
                f"{self.cause}, after {self.interventions} interventions (guard.limit)"
                if self.interventions
                else str(self.cause)
            )
        changed = str(self.change or "")
        return f"{self.cause}; step skipped" + (f"; from here on {changed}" if changed else "")


STEP = Verdict("step")


class Watch:
    """Judges every step before its update, and counts interventions."""

    def __init__(self, config: Training, engine: Engine) -> None:
        self._guard, self._clip, self._engine = config.guard, config.clip, engine
        self._losses: deque[float] = deque(maxlen=self._guard.window)
        self._norms: deque[float] = deque(maxlen=self._guard.window)
        self.skipped = 0
        """Steps whose update was left out."""
        self.fallbacks = 0
        """How often learning rate, clipping or precision were changed."""

    @property
    def lr(self) -> float:
        """What the learning rate is multiplied by."""
        return self._guard.fallback.lr**self.fallbacks

    @property
    def clip(self) -> float:
        """The largest gradient norm."""
        return math.inf if self._clip is None else self._clip * self._guard.fallback.clip**self.fallbacks

    def judge(self, loss: float, norm: float) -> Verdict:
        """Decide on a step of this loss and gradient norm, and carry out the fallback of one that is skipped."""
        cause = self._cause(loss, norm)
        if cause is None:
            self._losses.append(loss)
            self._norms.append(norm)
            return STEP
        if self._guard.policy == "stop" or self.skipped == self._guard.limit:
            return Verdict("stop", cause, self.skipped)
        self.skipped += 1
        return Verdict(
            "skip", cause, self.skipped, self._fall_back() if self._guard.policy == "fallback" else None
        )

    def _cause(self, loss: float, norm: float) -> Cause | None:
        """Return what diverges in a step; None for nothing."""
        if not math.isfinite(loss):
            return Cause("loss", loss)
        if not math.isfinite(norm):
            return Cause("gradient norm", norm)
        for quantity, value, past, limit in (
            ("loss", loss, self._losses, self._guard.loss),
            ("gradient norm", norm, self._norms, self._guard.norm),
        ):
            if limit and len(past) == past.maxlen and value > limit * median(past):
                return Cause(quantity, value, median(past), past.maxlen)
        return None

    def _fall_back(self) -> Change:
        self.fallbacks += 1
        self._losses.clear()  # later steps are compared with each other alone, and have as many steps to recover
        self._norms.clear()
        fallback = self._guard.fallback
        if fallback.precision:
            self._engine.fall_back(fallback.layers, fallback.safer)
        return Change(
            lr=self.lr if fallback.lr < 1 else None,
            clip=self.clip if fallback.clip < 1 and self._clip is not None else None,
            precision=fallback.precision,
            slots=fallback.slots if fallback.precision else (),
            layers=fallback.layers if fallback.precision else (),
        )

    def metrics(self) -> dict[str, float]:
        """Where steps may be skipped, how many were; and what the learning rate is multiplied by, where that may change."""
        if self._guard.policy == "stop":
            return {}
        return {"nan/steps_skipped": float(self.skipped)} | (
            {"guard/lr": self.lr} if self._guard.policy == "fallback" else {}
        )

    def state(self) -> dict[str, Any]:
        """What a later attempt goes on from."""
        return {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "skipped": self.skipped,
            "fallbacks": self.fallbacks,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """As `state` told it."""
        self._losses.extend(state["losses"])
        self._norms.extend(state["norms"])
        self.skipped, self.fallbacks = state["skipped"], state["fallbacks"]
        fallback = self._guard.fallback
        if self.fallbacks and fallback.precision:
            self._engine.fall_back(fallback.layers, fallback.safer)
