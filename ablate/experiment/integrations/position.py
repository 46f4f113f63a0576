"""Steps and evaluations of a loop that reports its progress by events instead of by `with` blocks.

A callback is called when a step begins and when it ends, so the two ends of `with run.step():` lie in
different functions. `Position` holds the context that is open in between. At most one is open, but for an
evaluation inside a step.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol
from weakref import finalize

from ablate.training.metric_names import parse


class Steps(Protocol):
    """A `Conversion`, or the `Trial` of a sweep."""

    def step(self) -> AbstractContextManager[object]: ...
    def evaluation(self) -> AbstractContextManager[object]: ...


class _Abandoned(Exception):
    """Ends a step that was not completed, so that it does not count."""


_Open = dict[str, AbstractContextManager[object]]
"""The contexts that are open, `step` and `evaluation`. Apart from `Position`, so that they can be left when
that is collected."""


def _leave(contexts: _Open, name: str, error: _Abandoned | None = None) -> None:
    if context := contexts.pop(name, None):
        context.__exit__(type(error) if error else None, error, None)


def _abandon(contexts: _Open) -> None:
    _leave(contexts, "evaluation")
    _leave(contexts, "step", _Abandoned())


class Position:
    """The step or evaluation of a handle that is in progress. One that is open when the process ends, or when
    nothing refers to this object any more, is left then: a generator that the interpreter closes at its exit
    would print errors."""

    def __init__(self, handle: Steps) -> None:
        self._handle, self._open = handle, _Open()
        finalize(self, _abandon, self._open)

    @property
    def in_step(self) -> bool:
        """True from `begin_step` to `end_step`."""
        return "step" in self._open

    @property
    def in_evaluation(self) -> bool:
        """True from `begin_evaluation` to `end_evaluation`."""
        return "evaluation" in self._open

    def begin_step(self) -> None:
        """Begin a step. A step that is still open was not completed, and does not count."""
        self.abandon()
        self._open["step"] = _entered(self._handle.step())

    def end_step(self) -> None:
        """End the step, which counts from now on."""
        _leave(self._open, "step")

    def begin_evaluation(self) -> None:
        """Begin an evaluation, inside a step or not. One that is open ends, with its casts of weights."""
        self.end_evaluation()
        self._open["evaluation"] = _entered(self._handle.evaluation())

    def end_evaluation(self) -> None:
        """End the evaluation, if one is open."""
        _leave(self._open, "evaluation")

    def abandon(self) -> None:
        """End what is open. A step does not count."""
        _abandon(self._open)


def _entered(context: AbstractContextManager[object]) -> AbstractContextManager[object]:
    context.__enter__()
    return context


def logged(metrics: Mapping[str, float], per_layer: bool) -> dict[str, float]:
    """Return the metrics of a `Conversion` that a logger gets: without those of single layers
    (`quant/<slot>/<layer>/<metric>` beside `quant/<slot>/<metric>`), unless wanted."""
    return {name: value for name, value in metrics.items() if per_layer or parse(name).layer is None}
