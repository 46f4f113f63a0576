"""Guard of a training run: decides which steps diverge and what happens then.

The problem: low-precision training can diverge. One bad update spoils the weights, and the steps after it
waste time. A fixed limit on the loss is no help, since the usual loss depends on the model and the step.

The idea: judge every step before its update is applied, from its loss and its gradient norm. A value that is
not finite always diverges. If the limits are set, so does a value that is too many times the running median
of the accepted steps. Nothing is compared with the median before its window is full, or with one that is not
above 0, of which no factor is an upper limit.

    guard.window 4, guard.loss 2.0, losses 3.1, 3.0, 2.9, 3.0, 6.5
    median of the first four: 3.0; 6.5 > 2.0 * 3.0, so the fifth step diverges

The policy decides what follows. `stop` ends the run; `skip` leaves out the update; `fallback` leaves it out
and also lowers the learning rate, the clipping or the quantisation for the rest of the run. After
`guard.limit` skipped steps, the next step that diverges ends the run.

The guard undoes no update that was applied, and it does not change weights or optimizer state. A verdict is
data: its kind, the quantity that diverged and by how much, and the settings that change. `str(verdict)` is
the sentence that trials store with a record and that controller and reports show; no code parses it.
"""

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypedDict

from ablate.engines.emulated import Engine
from ablate.training.hyperparameters import Guard


@dataclass(frozen=True)
class Cause:
    """Quantity of a step that diverged, and its value."""

    quantity: Literal["loss", "gradient norm"]
    value: float
    median: float | None = None
    """Running median that the value exceeds by too large a factor; None for a value that is not finite."""
    window: int = 0
    """Number of steps in that median; 0 without one."""

    @property
    def ratio(self) -> float | None:
        return None if self.median is None else self.value / self.median

    def __str__(self) -> str:
        if self.ratio is None:
            return "the loss is not finite" if self.quantity == "loss" else "the gradient is not finite"
        return f"{self.quantity} {self.value:.4g} is {self.ratio:.3g} times the median of {self.window} steps"


@dataclass(frozen=True)
class Change:
    """Settings that hold for the rest of the run after a fallback; None and () stand for those that it does
    not change."""

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
class GuardDecision:
    """Decision on one step: apply its update, skip it, or end the run."""

    kind: Literal["step", "skip", "stop"]
    cause: Cause | None = None
    """Reason why the step diverges; None if it does not."""
    interventions: int = 0
    """Number of steps skipped in the run so far, this one included if it is skipped. A run that ends with a
    number above 0 has reached `guard.limit`."""
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


STEP = GuardDecision("step")


class GuardState(TypedDict):
    losses: list[float]
    """Losses in the running median, oldest first."""
    norms: list[float]
    skipped: int
    fallbacks: int


class Watch:
    """Judge of every step before its update, by `guard` and `clip` of the workload, and counter of
    interventions. A fallback of the precision changes the engine's layers. Of own code, which has no engine
    and updates its weights itself, it judges the loss after the step, to end the run."""

    def __init__(self, guard: Guard, clip: float | None = None, engine: Engine | None = None) -> None:
        self._guard, self._clip, self._engine = guard, clip, engine
        self._losses: deque[float] = deque(maxlen=self._guard.window)
        self._norms: deque[float] = deque(maxlen=self._guard.window)
        self.skipped = 0
        """Number of steps whose update was left out."""
        self.fallbacks = 0
        """Number of fallbacks, each of which changed learning rate, clipping or precision."""

    @property
    def lr(self) -> float:
        return self._guard.fallback.lr**self.fallbacks

    @property
    def clip(self) -> float:
        """Largest gradient norm; infinity without clipping."""
        return math.inf if self._clip is None else self._clip * self._guard.fallback.clip**self.fallbacks

    def judge(self, loss: float, norm: float) -> GuardDecision:
        """Judge a step before its update, from its mean loss (in the unit of the workload) and the norm of
        its gradient before clipping, and carry out the verdict's fallback, if any."""
        cause = self._cause(loss, norm)
        if cause is None:
            self._losses.append(loss)
            self._norms.append(norm)
            return STEP
        if self._guard.policy == "stop" or self.skipped == self._guard.limit:
            return GuardDecision("stop", cause, self.skipped)
        self.skipped += 1
        return GuardDecision(
            "skip", cause, self.skipped, self._fall_back() if self._guard.policy == "fallback" else None
        )

    def _cause(self, loss: float, norm: float) -> Cause | None:
        if not math.isfinite(loss):
            return Cause("loss", loss)
        if not math.isfinite(norm):
            return Cause("gradient norm", norm)
        compared: tuple[tuple[Literal["loss", "gradient norm"], float, deque[float], float | None], ...] = (
            ("loss", loss, self._losses, self._guard.loss),
            ("gradient norm", norm, self._norms, self._guard.norm),
        )
        for quantity, value, past, limit in compared:
            if limit and len(past) == past.maxlen and value > limit * (middle := median(past)) > 0:
                return Cause(quantity, value, middle, past.maxlen)
        return None

    def _fall_back(self) -> Change:
        self.fallbacks += 1
        self._losses.clear()  # compare later steps only with each other, once a new window of them is full
        self._norms.clear()
        fallback = self._guard.fallback
        if fallback.precision and self._engine:
            self._engine.fall_back(fallback.layers, fallback.safer)
        return Change(
            lr=self.lr if fallback.lr < 1 else None,
            clip=self.clip if fallback.clip < 1 and self._clip is not None else None,
            precision=fallback.precision,
            slots=fallback.slots if fallback.precision else (),
            layers=fallback.layers if fallback.precision else (),
        )

    def metrics(self) -> dict[str, float]:
        """Return the number of skipped steps and the learning rate's factor, if the policy changes them."""
        if self._guard.policy == "stop":
            return {}
        return {"nan/steps_skipped": float(self.skipped)} | (
            {"guard/lr": self.lr} if self._guard.policy == "fallback" else {}
        )

    def state(self) -> GuardState:
        return {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "skipped": self.skipped,
            "fallbacks": self.fallbacks,
        }

    def restore(self, state: GuardState) -> None:
        self._losses.extend(state["losses"])
        self._norms.extend(state["norms"])
        self.skipped, self.fallbacks = state["skipped"], state["fallbacks"]
        fallback = self._guard.fallback
        if self.fallbacks and fallback.precision and self._engine:
            self._engine.fall_back(fallback.layers, fallback.safer)
