"""The guard of a training run: which steps count as diverging, and what becomes of them."""

import math
from collections import deque
from statistics import median
from typing import Any, Literal

from ablate.engines.emulated import Engine
from ablate.hyperparameters import Training

Verdict = Literal["step", "skip", "stop"]


class Watch:
    """Judges every step before it is taken, and remembers what was done."""

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

    def judge(self, loss: float, norm: float) -> tuple[Verdict, str | None]:
        """What is to be done with a step of this loss and gradient norm, and why, where it diverges."""
        why = self._trouble(loss, norm)
        if why is None:
            self._losses.append(loss)
            self._norms.append(norm)
            return "step", None
        if self._guard.policy == "stop":
            return "stop", why
        if self.skipped == self._guard.limit:
            return "stop", f"{why}, after {self.skipped} interventions (guard.limit)"
        self.skipped += 1
        return "skip", f"{why}; step skipped{self._fall_back()}"

    def _trouble(self, loss: float, norm: float) -> str | None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return "the loss is not finite" if not math.isfinite(loss) else "the gradient is not finite"
        for what, value, past, most in (
            ("loss", loss, self._losses, self._guard.loss),
            ("gradient norm", norm, self._norms, self._guard.norm),
        ):
            if most and len(past) == past.maxlen and value > most * median(past):
                return f"{what} {value:.4g} is {value / median(past):.3g} times the median of {past.maxlen} steps"
        return None

    def _fall_back(self) -> str:
        if self._guard.policy != "fallback":
            return ""
        self.fallbacks += 1
        self._losses.clear()  # what comes is to be measured by itself, and given as many steps to recover
        self._norms.clear()
        fallback = self._guard.fallback
        words = [f"learning rate times {self.lr:.3g}"] if fallback.lr < 1 else []
        words += [f"clip {self.clip:.3g}"] if fallback.clip < 1 and self._clip is not None else []
        if fallback.precision:
            self._engine.fall_back(fallback.layers, fallback.safer)
            words.append(f"{', '.join(fallback.slots)} of {', '.join(fallback.layers)} in {fallback.precision}")
        return f"; from here on {', '.join(words)}" if words else ""

    def metrics(self) -> dict[str, float]:
        """Where steps may be skipped, how many were; and what the learning rate is multiplied by, where that may change."""
        if self._guard.policy == "stop":
            return {}
        return {"nan/steps_skipped": float(self.skipped)} | ({"guard/lr": self.lr} if self._guard.policy == "fallback" else {})

    def state(self) -> dict[str, Any]:
        """What a later attempt goes on from."""
        return {"losses": list(self._losses), "norms": list(self._norms), "skipped": self.skipped, "fallbacks": self.fallbacks}

    def restore(self, state: dict[str, Any]) -> None:
        """As `state` told it."""
        self._losses.extend(state["losses"])
        self._norms.extend(state["norms"])
        self.skipped, self.fallbacks = state["skipped"], state["fallbacks"]
        fallback = self._guard.fallback
        if self.fallbacks and fallback.precision:
            self._engine.fall_back(fallback.layers, fallback.safer)
