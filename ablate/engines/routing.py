"""Routes of tokens to experts, recorded: `recorded`.

The problem. Quantisation changes the input of every router after the first layers, so some tokens go to other
experts. A loss cannot tell that from the rounding of the products.

The idea. `ExpertsForward.routing` receives the experts of every token before they are used. An object there
keeps them, so that two passes over one batch can be compared, token by token:

    with engine.high_precision(), recorded(engine) as exact:
        loss(batch)
    with recorded(engine) as own:
        loss(batch)
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ablate.engines.autograd import in_backward
from ablate.engines.emulated import Engine
from ablate.engines.experts import Routing

Key = tuple[int, str, int]
"""Micro-batch, name of a module of experts, and number of its call within the micro-batch."""


class Recorder:
    """Record of the experts of every token, in the calls of one step.

    Args:
        engine: the engine whose clock numbers the micro-batches.
        inner: decides where tokens go before they are recorded; None: they go where the router sends them.
    """

    def __init__(self, engine: Engine, inner: Routing | None = None) -> None:
        self.engine, self.inner = engine, inner
        self.index: dict[Key, Tensor] = {}
        """Experts of each token, int64 [tokens, k]."""

    def route(self, name: str, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the experts that are used, but not those of recomputed activations a second time."""
        if self.inner is not None:
            index, weights = self.inner.route(name, index, weights)
        if not in_backward():
            micro_batch, call = self.engine.clock.micro_batch, 0
            while (micro_batch, name, call) in self.index:
                call += 1
            self.index[micro_batch, name, call] = index
        return index, weights


@contextmanager
def recorded(engine: Engine) -> Iterator[Recorder]:
    """Inside this context, record the experts of every token."""
    before = {name: forward.routing for name, forward in engine.experts.items()}
    recorder = Recorder(engine, next(iter(before.values()), None))
    try:
        for forward in engine.experts.values():
            forward.routing = recorder
        yield recorder
    finally:
        for name, forward in engine.experts.items():
            forward.routing = before[name]
