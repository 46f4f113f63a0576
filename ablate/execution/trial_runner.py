"""Run of one trial: one workload, one recipe, one seed, one engine. No Ray, no Optuna, no MLflow."""

import os
import shutil
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ablate import provenance
from ablate.engines import gpu_access
from ablate.errors import InputError, first_line
from ablate.execution.messages import Event, Events, TelemetrySettings, TrialRequest, Waiting
from ablate.experiment.trial_spec import TrialSpec
from ablate.files import Busy, Damaged, Json, full, write
from ablate.store.trial_store import Result, Store, Tally, line
from ablate.training.alarms import alerts
from ablate.training.metric_names import FIRST_NONFINITE, GUARD_STOPPED, NAMING, recordable
from ablate.training.operand_metrics import ALARMS
from ablate.training.own_code.user_errors import UserError, described
from ablate.training.trial_run import Telemetry
from ablate.training.workloads import CONTEXT_FREE

if TYPE_CHECKING:
    from ablate.training.checkpoints import Checkpoints

_LESS = "; a smaller batch with more accumulate, or recompute: true, needs less"


class OutOfMemory(Exception):
    """The trial needs more memory than there is, which a retry on the same machine would not change."""


OUT_OF_MEMORY = 12
"""Exit status of a process whose trial ran out of memory: ENOMEM."""
EDITED = 11
"""Exit status of a process whose trial's code or data were edited while it ran: EAGAIN."""
NO_SPACE = 28
"""Exit status of a process that found the disk full: ENOSPC. It arrives even if the log cannot be written."""


class Edited(Exception):
    """Code or data of the trial were edited while it ran, so that its numbers are those of neither."""


class Superseded(Exception):
    """A later attempt holds the trial: this one must not write any more."""


def start_cuda(index: int | None = None) -> None:
    """Start CUDA in this process with the arithmetic of every arm; see `gpu_access.start`."""
    from ablate.training import cuda_arithmetic

    cuda_arithmetic.configure()
    gpu_access.start(index)


def exit_status(work: Callable[[], None], raised: Callable[[UserError], None] = lambda error: None) -> int:
    """Run the work of a process and return its exit status. An error goes to standard error, which is the
    log; `raised` is called with an exception of the user's code."""
    try:
        work()
    except (OutOfMemory, Edited) as error:
        print(error, file=sys.stderr, flush=True)
        return OUT_OF_MEMORY if isinstance(error, OutOfMemory) else EDITED
    except Exception as error:  # the boundary of the process
        users, sentence = described(error), isinstance(error, InputError)
        if users:
            raised(users)
        with suppress(OSError):
            if sentence:
                print(error, file=sys.stderr)
            else:
                traceback.print_exc()
            if users and not sentence:
                print(f"\nIn the trial's own code:\n{users.report}", file=sys.stderr)
            sys.stderr.flush()
        return NO_SPACE if full(error) else 2 if sentence else 1
    return 0


class EventsFile:
    """Events file of one attempt, with number and digest of all records of the trial, those of earlier
    attempts included.

    A record of an earlier attempt stays as it was, its time included: this attempt writes it again in its own
    file, and adds only new records of its own. So a ledger that received both attempts, or one of them,
    agrees with the files.
    """

    def __init__(self, store: Store, trial: str, attempt: int) -> None:
        self.store, self.trial = store, trial
        self._file = (store.folder(trial) / f"events-{attempt}.jsonl").open("wb")
        self._tally = Tally()
        self._step = 0
        """Last step of the records so far."""
        self._ahead: deque[Event] = deque()
        """Records of earlier attempts, beyond the last record of this one."""
        self._written: list[Event] = []
        """Records that are written and not yet returned."""

    def begin(self, start: int) -> list[Event]:
        """Return the records up to step `start`, from which this attempt resumes, of earlier attempts and
        trunks."""
        try:
            events = list(self.store.events(self.trial))
        except Damaged as error:
            print(f"{error}; it is left out, and computed again", flush=True)
            events = list(self.store.events(self.trial, strict=False))
        before = [event for event in events if event["step"] <= start]
        ahead = (event for event in events if event["step"] > start)
        self._ahead = deque({key: event[key] for key in event if key != "resumed"} for event in ahead)
        for event in before:
            self._note(event)
        return before

    def add(self, event: Event) -> list[Event]:
        """Write an event, after the records of earlier attempts up to its step; return all records written
        since the last call."""
        # The first record after a checkpoint carries `resumed`.
        if "resumed" in event and self._ahead and self._ahead[0]["step"] <= event["step"]:
            self._ahead[0]["resumed"] = event["resumed"]
            event = {key: event[key] for key in event if key != "resumed"}
        self._catch_up(event["step"] - 1)
        while self._ahead and self._ahead[0]["step"] == event["step"]:
            old = self._ahead.popleft()
            texts = list(dict.fromkeys((*old.get("events", ()), *event.get("events", ()))))
            event = event | old | {"metrics": event["metrics"] | old["metrics"]}
            event |= {"events": texts} if texts else {}
        self._write(event)
        return self._take_written()

    def reach(self, step: int) -> dict[str, Json] | None:
        """Flush all records up to a step to disk, before a checkpoint is written; return their number and
        digest. The step may lie before the last record: a trial whose trunk's states are gone trains the
        trunk again."""
        self._catch_up(step)
        os.fsync(self._file.fileno())
        return self._tally.sealed() if step >= self._step else self.recorded(self.trial, step)

    def finish(self) -> tuple[list[Event], dict[str, Json]]:
        """Return the remaining records, and number and digest of all."""
        self._catch_up(sys.maxsize)
        return self._take_written(), self._tally.sealed()

    def recorded(self, trial: str, step: int) -> dict[str, Json] | None:
        """Return number and digest of a trial's records up to a step; None if they are damaged."""
        with suppress(ValueError):
            return Tally(self.store.events(trial, step, strict=False)).sealed()
        return None

    def close(self) -> None:
        self._file.close()

    def _catch_up(self, step: int) -> None:
        while self._ahead and self._ahead[0]["step"] <= step:
            self._write(self._ahead.popleft())

    def _note(self, event: Event) -> None:
        self._tally.add(event)
        self._step = event["step"]

    def _write(self, event: Event) -> None:
        self._note(event)
        self._file.write(line(event, self.trial))
        self._file.flush()
        self._written.append(event)

    def _take_written(self) -> list[Event]:
        written, self._written = self._written, []
        return written


def run(
    spec: TrialSpec,
    store: Store,
    attempt: int,
    telemetry: TelemetrySettings,
    fork: Iterable[tuple[int, str]] = (),
    ranks: int = 1,
) -> Iterator[Event | Waiting]:
    """Run a trial from its furthest checkpoint, or replay it if it is finished; end when its result is
    committed. A non-finite loss is a result (`diverged`). With several ranks, rank 0 alone calls this.

    `attempt` is the number of this one; a later attempt supersedes it. `telemetry` has arguments of
    `Telemetry`. `fork` has (step, name) of each shared checkpoint: the trial resumes from the furthest that
    exists, and writes the others. `ranks`: processes that compute the trial.

    Yields events {step, time, metrics}, and a Waiting once while another process runs the same trial. Events
    recorded before the step to resume from come first, with `again`; the first after it has `resumed`, that
    step. An event with alarms has `alarms`.

    Raises Edited if code or data of the trial changed while it ran, and deletes its records and checkpoints;
    OutOfMemory if the trial needs more memory than there is; Superseded if a later attempt holds the trial.
    """
    with ExitStack() as stack:
        try:
            held = stack.enter_context(store.claim(spec.id, attempt, wait=False))
        except Busy as busy:
            yield Waiting(str(busy))
            held = stack.enter_context(store.claim(spec.id, attempt))
        shared = {step: store.shared(name) for step, name in fork}
        finished = _replayed(spec, store)
        yield from (
            _run(spec, store, attempt, telemetry, shared, held, ranks) if finished is None else finished
        )


def messages(request: TrialRequest, spec: TrialSpec) -> Iterator[Events | Waiting]:
    """Run the trial of a request, whose parsed spec is given; yield what `run` yields as messages."""
    store = Store(Path(request.root))
    for recorded in run(spec, store, request.attempt, request.telemetry, request.fork, request.ranks):
        yield recorded if isinstance(recorded, Waiting) else Events((recorded,))


def _replayed(spec: TrialSpec, store: Store) -> list[Event] | None:
    """Return the events of a finished trial; None if it is not finished or its files are damaged, which the
    log notes."""
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
    telemetry: TelemetrySettings,
    shared: dict[int, Path],
    held: Callable[[], bool],
    ranks: int,
) -> Iterator[Event]:
    folder = store.folder(spec.id)
    for pattern in ("*.json.*", "*.pt.*", "*.safetensors*"):  # of an attempt that was killed while it wrote
        for torn in folder.glob(pattern):
            torn.unlink()
    write(folder / "spec.json", spec.content)
    if spec.device == "cuda" and spec.config.in_process:
        start_cuda()
    started, facts = time.time(), spec.config.summary()  # before hours are spent: it reads the data
    event: Event = {}
    with closing(EventsFile(store, spec.id, attempt)) as journal, ExitStack() as stack:
        from ablate.numerics import product  # torch: only where a trial runs
        from ablate.training.checkpoints import Checkpoints

        products = product.mode() if spec.device == "cpu" else None
        seconds = telemetry.get("checkpoint", 60.0)
        checkpoints = Checkpoints(folder / "checkpoint.pt", spec.id, seconds, shared, journal, products)
        if ranks > 1 and checkpoints.products != products:
            begun = f"trial {spec.id} began with products in {checkpoints.products}"
            remedy = f"set {product.MODE_VARIABLE}={checkpoints.products} for all of them"
            raise InputError(f"{begun}, and its {ranks} ranks would multiply in {products}; {remedy}")
        stack.enter_context(product.multiplying(checkpoints.products or product.mode()))
        if trunk := checkpoints.trunk:
            store.fork(spec.id, attempt, trunk)
        # This sweep's ledger may not have the records of the trunk and of earlier attempts.
        yield from (before | {"again": True} for before in journal.begin(checkpoints.start))
        for event in within_memory(_events(spec, telemetry, checkpoints), spec.device):
            _refuse_superseded(held, spec, attempt)
            yield from journal.add(event)
        _refuse_superseded(held, spec, attempt)
        remaining, records = journal.finish()
        yield from remaining
    _refuse_edited(spec, folder)
    facts |= {name: value for name, value in event["metrics"].items() if name in CONTEXT_FREE}  # of own code
    about = {"facts": facts, "ranks": ranks, "records": records}
    if kept := store.kept_weights(spec.id):
        about["weights"] = kept
    store.commit(spec.id, _result(spec, attempt, started, event) | about)
    (folder / "checkpoint.pt").unlink(missing_ok=True)


def _refuse_superseded(held: Callable[[], bool], spec: TrialSpec, attempt: int) -> None:
    if not held():
        raise Superseded(f"attempt {attempt} of trial {spec.id} was superseded by a later one, and ends")


def _refuse_edited(spec: TrialSpec, folder: Path) -> None:
    """Delete what the trial wrote and raise Edited if its code or data are no longer those of its id. Code is
    read while a trial runs: modules that a function imports late, files that it opens."""
    if spec.unchanged:
        return
    for path in (*folder.glob("events-*.jsonl"), *folder.glob("checkpoint*"), *folder.glob("command")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    raise Edited(
        "its code or data were edited while it ran: its numbers are discarded, and the same command runs"
        " the edited code"
    )


def out_of_memory(error: Exception) -> bool:
    """Return True for an error of torch or Python by which it has less memory than a tensor needs."""
    causes = ("out of memory", "allocate memory", "size calculation overflowed", "multiplication overflow")
    return isinstance(error, MemoryError) or any(cause in str(error) for cause in causes)


def within_memory(events: Iterator[Event], device: str) -> Iterator[Event]:
    """Yield the events. OutOfMemory if torch or Python ran out of memory; InputError if an operation of the
    model has no deterministic implementation."""
    step = 0
    try:
        for event in events:
            step = event["step"]
            yield event
    except (MemoryError, RuntimeError) as error:  # CUDA's is a RuntimeError of its own, the CPU's a plain one
        first = first_line(error)
        if "deterministic implementation" in first:
            raise InputError(f"{first} On a GPU, set the workload's deterministic: false") from error
        if not out_of_memory(error):
            raise
        import torch

        from ablate.training.metrics import memory

        used = max(memory(torch.device(device)).values()) / 1e9
        raise OutOfMemory(f"out of memory after step {step}, {used:.1f} GB in use: {first}{_LESS}") from error


def _events(spec: TrialSpec, telemetry: TelemetrySettings, checkpoints: "Checkpoints") -> Iterator[Event]:
    marked, refused = False, set[str]()
    for record in spec.records(Telemetry.model_validate(telemetry), checkpoints):
        metrics = {name: value for name, value in record.metrics.items() if recordable(name)}
        for name in sorted(record.metrics.keys() - metrics.keys() - refused):
            refused.add(name)
            print(f"step {record.step}: metric {name[:100]!a} is left out: {NAMING}", flush=True)
        event = {"step": record.step, "time": time.time(), "metrics": metrics}
        origin = record.origin
        if record.verdict:
            event["events"] = [f"{record.verdict}{f': {origin.place}' if origin else ''}"]
        if origin:
            event["origin"] = origin.document()
        if raised := alerts(record.metrics, ALARMS):
            event["alarms"] = [str(alert) for alert in raised]
        if checkpoints.resumed and not marked:
            event["resumed"], marked = checkpoints.resumed, True
        yield event


def _result(spec: TrialSpec, attempt: int, started: float, last: Event) -> Result:
    diverged = None
    if FIRST_NONFINITE in last["metrics"]:
        origin = f": {last['origin']['text']}" if "origin" in last else ""
        diverged = f"non-finite loss or gradient at step {last['step']}{origin}"
    elif GUARD_STOPPED in last["metrics"]:
        diverged = f"{last['events'][-1]} at step {last['step']}"
    return {
        "id": spec.id,
        "status": "diverged" if diverged else "done",
        "reason": diverged,
        "attempt": attempt,
        "steps": last["step"],
        "seconds": time.time() - started,
        "started": started,
        "environment": provenance.environment(),
    } | ({"origin": last["origin"]} if diverged and "origin" in last else {})
