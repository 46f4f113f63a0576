"""The controller over many logical slots in one process, for figures.py.

Trials run in turn, one record at a time, and write their folders. Ray's actors for 64 slots, each with a warm
process that holds torch, would take 16 GB; their cost is the row of a smaller run.

Arguments: folder, arms, seeds, slots, MLflow (yes or no), and the file that takes the figures.
"""

import json
import resource
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sweeps import grid, say

from ablate.execution.controller import Controller
from ablate.execution.messages import Ended, Message, TrialRequest
from ablate.execution.progress import Outcome
from ablate.execution.supervisor import run_inline
from ablate.experiment.load import load


class Slots:
    """Executor of many slots without Ray: each wait runs the next trial in turn up to its next record."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._running: deque[tuple[str, Iterator[Message]]] = deque()

    def submit(self, request: TrialRequest) -> None:
        """Add a trial to those that run in turn."""
        self._running.append((request.id, run_inline(request)))

    def wait(self, seconds: float) -> list[tuple[str, Message]]:
        """Return the next message of the trial that is next in turn."""
        trial, messages = self._running.popleft()
        message = next(messages)
        if not isinstance(message, Ended):
            self._running.append((trial, messages))
        return [(trial, message)]

    def stop(self, trial: str) -> None:
        """Do nothing: these sweeps stop no trial."""

    def resize(self, slots: int) -> None:
        """Do nothing: the number of slots is fixed."""

    def close(self) -> None:
        """Drop the trials that are running."""
        self._running.clear()


def main(folder: Path, arms: int, seeds: int, slots: int, mlflow: str | None) -> dict[str, Any]:
    """Run the sweep and return its figures.

    `done` lists, for each trial, the number done by then, the seconds since the start, and the processor
    seconds of the controller's thread; `before_mb` and `peak_mb` are the process's peak memory.
    """
    import torch

    torch.set_num_threads(1)
    experiment = load(grid(folder, "many", arms, seeds))
    controller = Controller(experiment, folder, "cpu", lambda: Slots(slots), mlflow)
    before = peak_mb()
    started = time.perf_counter()
    done: list[tuple[int, float, float]] = []
    for step in controller.run():
        if isinstance(step, Outcome):
            outcome = step
        elif not done or step.done > done[-1][0]:
            done.append((step.done, time.perf_counter() - started, time.thread_time()))
            if step.done % 500 == 0:
                say(f"  {step.done:,} of {step.total:,} after {done[-1][1]:.0f} s, {peak_mb():.0f} MB")
    assert outcome.status == "done"
    return {
        "trials": outcome.ran,
        "seconds": outcome.seconds,
        "done": done,
        "before_mb": before,
        "peak_mb": peak_mb(),
    }


def peak_mb() -> float:
    """Return the peak memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    folder, count, repeats, width, drawn, answer = sys.argv[1:]
    store = f"sqlite:///{Path(folder) / 'mlflow.db'}" if drawn == "yes" else None
    Path(answer).write_text(json.dumps(main(Path(folder), int(count), int(repeats), int(width), store)))
