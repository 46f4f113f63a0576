"""Trials one by one in this process, without Ray: for debuggers and tests."""

import os
from collections.abc import Generator

from ablate.engines.gpu_access import ORIGINAL, VISIBLE, hidden
from ablate.execution.messages import Ended, Message, TrialRequest
from ablate.execution.supervisor import run_inline


class Inline:
    """Executor of `--executor inline`."""

    slots = 1

    def __init__(self, device: str = "cpu") -> None:
        """`device`: class of device of the trials, `cpu` or `cuda`; on CPUs GPUs are hidden until `close`."""
        from ablate.execution.trial_process import tune_process

        self._before = dict(os.environ)
        if device == "cpu":
            os.environ.update(hidden(os.environ))
        tune_process()
        self.wanted = 0
        """Number of trials that run or wait; not used: one runs at a time."""
        self._running: dict[str, Generator[Message, None, None]] = {}
        self._stopped: list[str] = []

    def submit(self, request: TrialRequest) -> None:
        """Accept a trial; it advances only in `wait`."""
        self._running[request.id] = run_inline(request)

    def wait(self, seconds: float) -> list[tuple[str, Message]]:
        """Return the next message of each accepted trial. `seconds` is not used: each message is computed
        here."""
        answers: list[tuple[str, Message]] = [(trial, Ended("failed", "stopped")) for trial in self._stopped]
        self._stopped = []
        for trial, messages in list(self._running.items()):
            message = next(messages)
            answers.append((trial, message))
            if isinstance(message, Ended):
                del self._running[trial]
        return answers

    def stop(self, trial: str) -> None:
        """End a running trial; `wait` returns its Ended."""
        self._running.pop(trial).close()
        self._stopped.append(trial)

    def resize(self, slots: int) -> None:
        """Do nothing: this executor always has one slot."""

    def close(self) -> None:
        """Drop the trials that run; make GPUs visible again."""
        self._running.clear()
        for name in (VISIBLE, ORIGINAL):
            os.environ.pop(name, None)
        os.environ.update({name: self._before[name] for name in (VISIBLE, ORIGINAL) if name in self._before})
