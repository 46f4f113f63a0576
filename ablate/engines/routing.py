"""Routes of tokens to experts: recorded to be compared (`recorded`), or to be used again (`Routes`).

The problem. Quantisation changes the input of every router after the first layers, so some tokens go to other
experts. A loss cannot tell that from the rounding of the products.

The idea. `ExpertsForward.routing` receives the experts of every token before they are used. An object there
keeps them, so that two passes over one batch can be compared, token by token:

    with engine.high_precision(), recorded(engine) as exact:
        loss(batch)
    with recorded(engine) as own:
        loss(batch)

`Routes` holds those of a whole training, which another training of the same batches then uses. Their weights
must be those of the present router, or it would get no gradient. So the result of the call of `torch.topk`
that chooses the experts is replaced, within the module that contains the experts, by the present scores of
the recorded ones: whatever a model computes from its scores, it computes from these. The call is learnt while
routes are recorded, as the one whose result reached the experts.

Refused: a router that chooses without `torch.topk`, or changes what it returns; a module of experts that is
called several times in a micro-batch; and the replay of a micro-batch that was not recorded.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ablate.engines.autograd import in_backward
from ablate.engines.emulated import Engine
from ablate.engines.emulated_layer import kept
from ablate.engines.experts import Routing

Key = tuple[int, str, int]
"""Micro-batch, name of a module of experts, and number of its call within the micro-batch."""


class Recorder:
    """Record of the experts of every token, in the calls of one step, whose micro-batches the engine's clock
    numbers. `inner`: by module, what decides where tokens go before they are recorded; None: the router."""

    def __init__(self, engine: Engine, inner: Mapping[str, Routing | None]) -> None:
        self.engine, self.inner = engine, inner
        self.index: dict[Key, Tensor] = {}
        """Experts of each token, int64 [tokens, k]."""

    def route(self, name: str, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the experts that are used, but not those of recomputed activations a second time."""
        if inner := self.inner[name]:
            index, weights = inner.route(name, index, weights)
        if not in_backward():
            micro_batch, call = self.engine.clock.micro_batch, 0
            while (micro_batch, name, call) in self.index:
                call += 1
            self.index[micro_batch, name, call] = index
        return index, weights


@contextmanager
def recorded(engine: Engine) -> Iterator[Recorder]:
    """Inside this context, record the experts of every token."""
    recorder = Recorder(engine, {name: forward.routing for name, forward in engine.experts.items()})
    with kept(engine.experts.values(), "routing"):
        for forward in engine.experts.values():
            forward.routing = recorder
        yield recorder


class Routes:
    """Experts of every token of a training, for another training of the same batches. They are kept in the
    memory of the CPU as int16: 2 bytes for each token, expert of it, layer and step."""

    def __init__(self) -> None:
        self._index: dict[tuple[int, int, str], Tensor] = {}
        """Experts, by step, micro-batch and module."""
        self._call: dict[str, int] = {}
        """Number of the call of `torch.topk`, within the module around the experts, that chooses them."""

    def record(self, engine: Engine, model: nn.Module) -> None:
        """Record the experts of every token that a model trains on from now on."""
        self._attach(engine, model, _Recorded)

    def replay(self, engine: Engine, model: nn.Module) -> None:
        """Send every token that a model trains on from now on to the recorded experts. Evaluations are left
        alone. A call of the model raises ValueError if a token would go elsewhere."""
        self._attach(engine, model, _Replayed)

    def _attach(self, engine: Engine, model: nn.Module, kind: "type[_Recorded | _Replayed]") -> None:
        for name, forward in engine.experts.items():
            parent = model.get_submodule(name.rpartition(".")[0])
            forward.routing = site = kind(engine, name, self._index, self._call)
            parent.forward = site.within(parent.forward)


class _Site:
    """One module of experts, and the calls of `torch.topk` in the module that contains it."""

    def __init__(
        self, engine: Engine, name: str, index: dict[tuple[int, int, str], Tensor], call: dict[str, int]
    ) -> None:
        self.engine, self.name, self.index, self.call = engine, name, index, call
        self.seen: list[Tensor] = []
        """Indices that the calls so far have returned."""

    @property
    def training(self) -> bool:
        """True in a training step, whose routes count."""
        return self.engine.clock.stream != "evaluation"

    @property
    def key(self) -> tuple[int, int, str]:
        """Step, micro-batch and name."""
        clock = self.engine.clock
        return clock.step, clock.micro_batch, self.name

    def within(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward pass of the module around, which follows its calls of `torch.topk`."""

        def followed(*args: Any, **kwargs: Any) -> Any:
            if not self.training:
                return forward(*args, **kwargs)
            self.seen = []
            with _TopK(self):
                return forward(*args, **kwargs)

        return followed

    def chosen(self, scores: Tensor, result: Any) -> Any:
        """Return what a call of `torch.topk` returns."""
        self.seen.append(result.indices)
        return result

    def refusal(self, why: str) -> ValueError:
        """Return the error for a module whose routes cannot be replayed."""
        return ValueError(f"{self.name}: experts.routing replay: {why}; use routing: free")


class _Recorded(_Site):
    def route(self, name: str, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        if not self.training or in_backward():
            return index, weights
        calls = [n for n, each in enumerate(self.seen) if _same(each, index)]
        if not calls or self.call.setdefault(name, calls[-1]) not in calls:
            raise self.refusal("its experts are not the result of one call of torch.topk")
        kept = index.to("cpu", torch.int16)
        if not torch.equal(self.index.setdefault(self.key, kept), kept):
            raise self.refusal("it is called several times in a micro-batch")
        return index, weights


class _Replayed(_Site):
    def recorded(self) -> Tensor:
        if self.key not in self.index:
            step, micro_batch, _ = self.key
            raise self.refusal(f"there are no routes of step {step}, micro-batch {micro_batch}")
        return self.index[self.key]

    def route(self, name: str, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        if self.training and not _same(self.recorded().to(index), index):
            raise self.refusal("it changes the result of torch.topk before the experts receive it")
        return index, weights

    def chosen(self, scores: Tensor, result: Any) -> Any:
        super().chosen(scores, result)
        if len(self.seen) - 1 != self.call.get(self.name):
            return result
        index = self.recorded().to(result.indices).view(result.indices.shape)
        return torch.return_types.topk((scores.gather(-1, index), index))


def _same(one: Tensor, other: Tensor) -> bool:
    return one.numel() == other.numel() and torch.equal(one.reshape(other.shape), other)


class _TopK(TorchFunctionMode):
    """Passes the results of `torch.topk` through a site."""

    def __init__(self, site: _Site) -> None:
        super().__init__()
        self._site = site

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        return self._site.chosen(args[0] if args else (kwargs or {})["input"], result)
