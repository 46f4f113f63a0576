"""The smallest thing that can be reproduced: one workload, one recipe, one seed, one engine. No Ray, no Optuna, no MLflow."""

import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate import provenance
from ablate.execution.messages import Waiting
from ablate.experiment.trial_spec import TrialSpec
from ablate.files import Busy, Damaged, full, write
from ablate.results.trial_store import Store, Tally, line
from ablate.training.alarms import alerts
from ablate.training.metric_names import FIRST_NONFINITE, GUARD_STOPPED

if TYPE_CHECKING:
    from ablate.training.checkpoints import Checkpoints

_LESS = "; a smaller batch with more accumulate, or recompute: true, needs less"


class OutOfMemory(Exception):
    """The trial needs more memory than there is: a result of where it ran, which trying again would not change."""


OUT_OF_MEMORY = 12
"""Exit status of a process whose trial ran out of memory: ENOMEM."""
NO_SPACE = 28
"""Exit status of a process that could write no more: ENOSPC. A status arrives even if its log cannot be written, either."""


class Superseded(Exception):
    """A later attempt holds the trial: this one, cut off for a while, must not write any more."""


def exit_status(work: Callable[[], None]) -> int:
    """Do the work of a process of its own; its exit status. What went wrong goes to standard error, its log, whose end is told."""
    try:
        work()
    except OutOfMemory as error:
        print(error, file=sys.stderr, flush=True)
        return OUT_OF_MEMORY
    except Exception as error:  # the boundary of the process
        with suppress(OSError):
            traceback.print_exc()
            sys.stderr.flush()
        return NO_SPACE if full(error) else 1
    return 0


class Journal:
    """What one attempt records: its events file, and number and digest of all that the trial recorded, by earlier attempts too.

    What an earlier attempt recorded stays as it was, its time included: this one writes it again in its own file, and adds of its own
    records those that are new. So a ledger that heard both attempts, or one of them, holds what the files hold.
    """

    def __init__(self, store: Store, trial: str, attempt: int) -> None:
        self.store, self.trial = store, trial
        self._file = (store.folder(trial) / f"events-{attempt}.jsonl").open("wb")
        self._tally = Tally()
        self._ahead: deque[dict[str, Any]] = deque()
        """What earlier attempts recorded, beyond what this one has recorded so far."""
        self._written: list[dict[str, Any]] = []
        """Written, and not told yet."""

    def begin(self, start: int) -> list[dict[str, Any]]:
        """The records up to the step that this attempt goes on from, by earlier attempts and trunks."""
        try:
            events = list(self.store.events(self.trial))
        except Damaged as error:
            print(f"{error}; it is left out, and computed again", flush=True)
            events = list(self.store.events(self.trial, strict=False))
        before = [event for event in events if event["step"] <= start]
        self._ahead = deque(
            {key: event[key] for key in event if key != "resumed"}
            for event in events
            if event["step"] > start
        )
        for event in before:
            self._tally.add(event)
        return before

    def tell(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """Write an event, and before it what earlier attempts recorded by then; returns all that is to be told."""
        if (
            "resumed" in event and self._ahead and self._ahead[0]["step"] <= event["step"]
        ):  # it is the first that is told
            self._ahead[0]["resumed"] = event["resumed"]
            event = {key: event[key] for key in event if key != "resumed"}
        self._catch_up(event["step"] - 1)
        while self._ahead and self._ahead[0]["step"] == event["step"]:
            old = self._ahead.popleft()
            words = list(dict.fromkeys((*old.get("events", ()), *event.get("events", ()))))
            event = (
                event
                | old
                | {"metrics": event["metrics"] | old["metrics"]}
                | ({"events": words} if words else {})
            )
        self._write(event)
        return self._told()

    def reach(self, step: int) -> dict[str, Any]:
        """Have the disk keep all records up to a step, after which a checkpoint is left; returns their number and digest."""
        self._catch_up(step)
        os.fsync(self._file.fileno())
        return self._tally.sealed()

    def finish(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """What is still to be told, and number and digest of all records."""
        self._catch_up(sys.maxsize)
        return self._told(), self._tally.sealed()

    def recorded(self, trial: str, step: int) -> dict[str, Any] | None:
        """Number and digest of what a trial recorded up to a step; None where that cannot be said."""
        try:
            return Tally(self.store.events(trial, step, strict=False)).sealed()
        except ValueError:
            return None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _catch_up(self, step: int) -> None:
        while self._ahead and self._ahead[0]["step"] <= step:
            self._write(self._ahead.popleft())

    def _write(self, event: dict[str, Any]) -> None:
        self._tally.add(event)
        self._file.write(line(event, self.trial))
        self._file.flush()
        self._written.append(event)

    def _told(self) -> list[dict[str, Any]]:
        told, self._written = self._written, []
        return told


def run(
    spec: TrialSpec,
    store: Store,
    attempt: int,
    telemetry: dict[str, Any],
    fork: Iterable[tuple[int, str]] = (),
    ranks: int = 1,
) -> Iterator[dict[str, Any] | Waiting]:
    """Run the trial from the furthest checkpoint there is, or replay it where it is finished; yields events {step, time, metrics}.

    Those with alarms have `alarms`; the first after a checkpoint has `resumed`, the checkpoint's step; those that were recorded before
    it have `again`. `fork` names the states that other
    trials pass through too, by step: the trial goes on from the furthest that is there, and leaves those that are not. The events up to
    where it goes on come first. Of a trial that several ranks compute, rank 0 calls this.

    Ends when the result is committed. While another process runs the same trial, yields one Waiting, and waits. A non-finite loss
    is a result (`diverged`); an exception is not. Raises OutOfMemory, and Superseded where a later attempt holds the trial.
    """
    with ExitStack() as stack:
        try:
            held = stack.enter_context(store.claim(spec.id, attempt, wait=False))
        except Busy as busy:
            yield Waiting(str(busy))
            held = stack.enter_context(store.claim(spec.id, attempt))
        finished = _replayed(spec, store)
        if finished is not None:
            yield from finished
        else:
            yield from _run(
                spec,
                store,
                attempt,
                telemetry,
                {step: store.shared(name) for step, name in fork},
                held,
                ranks,
            )


def _replayed(spec: TrialSpec, store: Store) -> list[dict[str, Any]] | None:
    """The events of a trial that is finished already; None, and a line in the log where its files are damaged, where it is not."""
    try:
        result = store.result(spec.id)
        return None if result is None else store.proven(spec.id, result)
    except Damaged as error:
        print(f"{error}; the trial is run again", flush=True)
        return None


def _run(
    spec: TrialSpec,
    store: Store,
    attempt: int,
    telemetry: dict[str, Any],
    shared: dict[int, Path],
    held: Callable[[], bool],
    ranks: int,
) -> Iterator[dict[str, Any]]:
    folder = store.folder(spec.id)
    for torn in (
        *folder.glob("*.json.*"),
        *folder.glob("*.pt.*"),
    ):  # by an attempt that was killed while it wrote
        torn.unlink()
    write(folder / "spec.json", spec.content)
    started, facts = time.time(), spec.config.summary()  # before hours are spent: it reads the data
    event: dict[str, Any] = {}
    with closing(Journal(store, spec.id, attempt)) as journal:
        from ablate.training.checkpoints import Checkpoints  # torch: only where a trial runs

        checkpoints = Checkpoints(
            folder / "checkpoint.pt", spec.id, telemetry.get("checkpoint", 60.0), shared, journal
        )
        if trunk := checkpoints.trunk:
            store.fork(spec.id, attempt, trunk)
        # What was recorded before, by the trunk or by earlier attempts, this sweep's ledger may never have heard of.
        yield from (before | {"again": True} for before in journal.begin(checkpoints.start))
        for event in within_memory(_events(spec, telemetry, checkpoints), spec.device):
            _refuse_superseded(held, spec, attempt)
            yield from journal.tell(event)
        _refuse_superseded(held, spec, attempt)
        left, records = journal.finish()
        yield from left
    store.commit(
        spec.id, _result(spec, attempt, started, event) | {"facts": facts, "ranks": ranks, "records": records}
    )
    (folder / "checkpoint.pt").unlink(missing_ok=True)


def _refuse_superseded(held: Callable[[], bool], spec: TrialSpec, attempt: int) -> None:
    if not held():
        raise Superseded(f"attempt {attempt} of trial {spec.id} was superseded by a later one, and ends")


def within_memory(events: Iterator[dict[str, Any]], device: str) -> Iterator[dict[str, Any]]:
    """The events; what torch and Python raise when memory is out, told as OutOfMemory."""
    step = 0
    try:
        for event in events:
            step = event["step"]
            yield event
    except (MemoryError, RuntimeError) as error:  # CUDA's is a RuntimeError of its own, the CPU's a plain one
        first = (str(error).strip() or "no more memory").splitlines()[0]
        if (
            not isinstance(error, MemoryError)
            and "out of memory" not in first
            and "allocate memory" not in first
        ):
            raise
        import torch

        from ablate.training.metrics import memory

        used = max(memory(torch.device(device)).values()) / 1e9
        raise OutOfMemory(f"out of memory after step {step}, {used:.1f} GB in use: {first}{_LESS}") from error


def _events(
    spec: TrialSpec, telemetry: dict[str, Any], checkpoints: "Checkpoints"
) -> Iterator[dict[str, Any]]:
    from ablate.training.loop import Telemetry
    from ablate.training.metrics import ALARMS

    told = False
    for record in spec.config.records(
        spec.recipe, spec.seed, spec.engine, spec.device, Telemetry(**telemetry), checkpoints
    ):
        event = {"step": record.step, "time": time.time(), "metrics": record.metrics}
        if record.verdict:
            event["events"] = [str(record.verdict)]
        if raised := alerts(record.metrics, ALARMS):
            event["alarms"] = [str(alert) for alert in raised]
        if checkpoints.resumed and not told:
            event["resumed"], told = checkpoints.resumed, True
        yield event


def _result(spec: TrialSpec, attempt: int, started: float, last: dict[str, Any]) -> dict[str, Any]:
    diverged = _divergence(last)
    return {
        "id": spec.id,
        "status": "diverged" if diverged else "done",
        "reason": diverged,
        "attempt": attempt,
        "steps": last["step"],
        "seconds": time.time() - started,
        "started": started,
        "environment": provenance.environment(),
    }


def _divergence(last: dict[str, Any]) -> str | None:
    """Why the trial ended as diverged; None where it did not."""
    if FIRST_NONFINITE in last["metrics"]:
        return f"non-finite loss or gradient at step {last['step']}"
    if GUARD_STOPPED in last["metrics"]:
        return f"{last['events'][-1]} at step {last['step']}"
    return None
