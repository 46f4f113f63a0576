"""One process, one loop: what is wanted, what is done, what runs next. The only writer of the ledger.

It draws nothing and prints nothing: it yields a Progress whenever something happened, and ends with an Outcome.
"""

import itertools
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from ablate import provenance
from ablate.arms import Arm, KnobError, label
from ablate.experiment import Experiment
from ablate.forks import Family
from ablate.ledger import FINISHED, Ledger
from ablate.store import Store
from ablate.trial import TrialSpec

_WAIT_SECONDS = 0.2
_MLFLOW_GRACE_SECONDS = 30.0
_INTERRUPT_GRACE_SECONDS = 10.0


class Executor(Protocol):
    """Where trials run; see workers.py."""

    slots: int

    def submit(self, request: dict[str, Any]) -> None: ...
    def wait(self, seconds: float) -> list[tuple[str, dict[str, Any]]]: ...
    def close(self) -> None: ...


@dataclass
class Running:
    """A trial in flight, as the live view shows it."""

    name: str
    seed: int
    trial: int
    attempt: int
    started: float
    steps: int
    estimate: float
    step: int = 0
    loss: float = math.nan
    warned: bool = False
    """Whether its first alarm was told."""
    request: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """The state of the sweep after something happened; `news` says what, where it is worth a line."""

    done: int
    total: int
    running: tuple[Running, ...]
    news: tuple[str, ...]
    mlflow: str | None
    seconds_left: float


@dataclass(frozen=True)
class Outcome:
    """How a run of the sweep ended."""

    status: Literal["done", "failed", "budget"]
    ran: int
    reused: int
    failed: int
    seconds: float


class Controller:
    """One run of one experiment against its state folder."""

    def __init__(
        self, experiment: Experiment, state: Path, device: str, connect: Callable[[], Executor], mlflow: str | None, fork: bool = True
    ) -> None:
        self.experiment, self.state, self.device = experiment, state, device
        self._family = Family()
        self._fork = fork
        self.folder = state / "sweeps" / experiment.name
        self.store, self.ledger = Store(state), Ledger(self.folder / "ledger.db")
        self._connect, self._mlflow = connect, mlflow
        self.pictures: Any = None
        self._queue: deque[tuple[int, Arm, int, str]] = deque()
        self._running: dict[str, Running] = {}
        self._news: list[str] = []
        self._ran = 0
        self._reused: set[str] = set()
        self._actual = self._estimated = 0.0
        self._started = time.time()

    # One run

    def run(self) -> Iterator[Progress | Outcome]:
        """Do what is missing. Ctrl-C, or closing the generator, leaves everything resumable."""
        requeued = self.ledger.requeue(time.time())
        self._describe()
        self._want_all()
        if requeued:
            self._say(f"{requeued} trials were left unfinished and go on")
        executor = None
        status = "killed"
        try:
            yield self._progress()
            self.pictures = self._draw()
            if self._work_left():
                executor = self._connect()
                yield from self._loop(executor)
            status = self._status()
            self._tidy()
            behind = self.pictures.finish("FAILED" if status == "failed" else "FINISHED", _MLFLOW_GRACE_SECONDS)
            if behind:
                self._say(behind)
            yield self._progress()
            yield Outcome(status, self._ran, len(self._reused), self._count("failed"), time.time() - self._started)
        finally:
            if executor:
                executor.close()
            if status == "killed":
                self._interrupted()
            self.ledger.close()

    def _draw(self) -> Any:
        from ablate.pictures import Pictures  # Optuna and pandas: only once the first line is on the screen

        return Pictures(self.experiment, self.ledger, self.state, self.folder, self._mlflow, busy=self._work_left())

    def _loop(self, executor: Executor) -> Iterator[Progress]:
        while self._running or self._work_left():
            while len(self._running) < executor.slots and not self._spent() and (member := self._next()):
                self._submit(executor, *member)
                yield self._progress()
            if not self._running:
                return
            for trial_id, message in executor.wait(_WAIT_SECONDS):
                self._hear(executor, trial_id, message)
            self.pictures.refresh()
            yield self._progress()

    def _work_left(self) -> bool:
        return not self._spent() and bool(self._queue or self._asks_left())

    def _spent(self) -> bool:
        budget = self.experiment.budget
        hours = (time.time() - self._started) / 3600
        started = self._ran + len(self._running)
        return (budget.trials is not None and started >= budget.trials) or (budget.hours is not None and hours >= budget.hours)

    def _status(self) -> Literal["done", "failed", "budget"]:
        if self._queue or self._asks_left():
            return "budget"
        return "failed" if self._count("failed") else "done"

    def _count(self, status: str) -> int:
        return sum(member["status"] == status for member in self.ledger.members())

    # What is wanted

    def _describe(self) -> None:
        commit, diff = provenance.commit(Path.cwd())
        self.ledger.describe(
            **{
                "name": self.experiment.name,
                "question": self.experiment.question,
                "metric": self.experiment.metric.model_dump_json(),
                "metrics": json.dumps([metric.name for metric in self.experiment.metrics]),
                "experiment.yaml": self.experiment.text,
                "provenance.json": json.dumps({"commit": commit, **provenance.environment()}, indent=1),
                "uncommitted.diff": diff,
            }
        )

    def _want_all(self) -> None:
        """Want what the file names now; what an earlier version of it named stays in the ledger, out of the answer."""
        proposed = [json.loads(arm["knobs"]) for arm in self.ledger.arms() if arm["optuna"] is not None]
        self.ledger.unwant()
        numbers = itertools.count()
        for arm in self.experiment.arms:
            self._want(arm, None if arm.name in self.experiment.added or self.experiment.search else next(numbers))
        if self.experiment.search:
            for knobs in proposed:
                self._propose(knobs, next(numbers))
        # Pairs complete early; of trials that begin alike, the one that others follow furthest goes first.
        seeds = self.experiment.seeds
        self._queue = deque(sorted(self._queue, key=lambda item: (seeds.index(item[2]), -sum(dict(self._points(item[1], item[2]))))))

    def _want(self, arm: Arm, optuna: int | None = None) -> None:
        """Put an arm with all its seeds into the ledger; adopt what is finished, queue what is not."""
        number = self.ledger.add_arm(arm.name, arm.knobs, self._arm_number(arm.baseline), optuna)
        for seed in self.experiment.seeds:
            spec = self.experiment.spec(arm, seed, self.device)
            self._family.add(spec)
            trial = self.ledger.add_member(number, seed, spec.id, spec.wire)
            known = spec.id in self._running or any(queued[0] == trial for queued in self._queue)
            if not known and not self._adopt(trial, spec.id):
                self._queue.append((trial, arm, seed, spec.id))
        self._queue = deque(sorted(self._queue, key=lambda item: self.experiment.seeds.index(item[2])))  # pairs complete early

    def _arm_number(self, name: str | None) -> int | None:
        """A baseline's number in the ledger; arms are named in any order, so it may have to be made room for first."""
        if name is None:
            return None
        known = next((arm["arm"] for arm in self.ledger.arms() if arm["name"] == name), None)
        if known is not None:
            return known
        baseline = next(arm for arm in self.experiment.arms if arm.name == name)
        return self.ledger.add_arm(name, baseline.knobs, None, None)

    def _adopt(self, trial: int, trial_id: str) -> bool:
        """Take over a result that the store has, from this sweep or any other; whether there was one."""
        result = self.store.result(trial_id)
        if result is None:
            return False
        status = self.ledger.status(trial)
        if status not in FINISHED:
            self.ledger.record(trial, self.store.events(trial_id))
            self.ledger.settle(trial, result["status"], result["reason"], result["seconds"], reused=True)
        self._reused.add(trial_id)
        return True

    # The search

    def _asks_left(self) -> int:
        search = self.experiment.search
        return search.trials - sum(arm["optuna"] is not None for arm in self.ledger.arms()) if search else 0

    def _next(self) -> tuple[int, Arm, int, str] | None:
        while not self._queue and self._asks_left() > 0:
            number, knobs = self.pictures.study.ask()
            why = self._propose(knobs, number)
            if why:
                self.pictures.study.refuse(number, why)
                self._say(f"point {number} cannot be run: {why}")
        ready = next((item for item in self._queue if self._ready(*item[1:3])), None)
        if ready:
            self._queue.remove(ready)
        return ready

    def _ready(self, arm: Arm, seed: int) -> bool:
        """Whether a trial need not wait: a running one will leave nothing that lies further on its way than what is there."""
        coming = {name for running in self._running.values() for _, name in running.request["fork"]}
        for _, name in self._points(arm, seed):
            if self.store.shared(name).exists():
                return True
            if name in coming:
                return False
        return True

    def _points(self, arm: Arm, seed: int) -> list[tuple[int, str]]:
        """The states on a trial's way that others pass through too, furthest first. Records before them are as often as telemetry says."""
        return self._named(self.experiment.spec(arm, seed, self.device)) if self._fork else []

    def _named(self, spec: TrialSpec) -> list[tuple[int, str]]:
        often = self.experiment.telemetry
        cadence = f"{often.every}-{often.shadow}-{often.log}"
        return [(step, f"{name}-{cadence}") for step, name in self._family.points(spec)]

    def _tidy(self) -> None:
        """Remove the shared checkpoints of this sweep, which every trial that wanted one has read."""
        for spec in self._family:
            for _, name in self._named(spec):
                self.store.shared(name).unlink(missing_ok=True)

    def _propose(self, knobs: dict[str, Any], number: int) -> str | None:
        """Want a searched arm and its baseline; why not, where its knobs contradict each other: an arm without members."""
        rounded = {knob: float(f"{value:.3g}") if isinstance(value, float) else value for knob, value in knobs.items()}
        name = f"{number}: {label(rounded)}"  # the number keeps it unique
        try:
            arm, baseline = self.experiment.propose(knobs)
        except KnobError as error:
            self.ledger.add_arm(name, knobs, None, number)
            return str(error)
        self._want(baseline)
        self._want(replace(arm, name=name), number)
        return None

    # Trials

    def _submit(self, executor: Executor, trial: int, arm: Arm, seed: int, trial_id: str) -> None:
        if self._adopt(trial, trial_id):  # another sweep was faster
            return
        attempt = self.ledger.start_attempt(trial, time.time())
        request = {
            "id": trial_id,
            "spec": self.experiment.spec(arm, seed, self.device).wire,
            "root": str(self.state.resolve()),
            "attempt": attempt,
            "telemetry": self.experiment.telemetry.model_dump(),
            "fork": self._points(arm, seed),
        }
        self._running[trial_id] = Running(arm.name, seed, trial, attempt, time.time(), arm.config.steps, _estimate(arm), request=request)
        executor.submit(request)

    def _hear(self, executor: Executor, trial_id: str, message: dict[str, Any]) -> None:
        running = self._running[trial_id]
        if "events" in message:
            self.ledger.record(running.trial, message["events"])
            last = message["events"][-1]
            running.step = last["step"]
            running.loss = last["metrics"].get("train/loss", running.loss)
            resumed = next((event["resumed"] for event in message["events"] if "resumed" in event), None)
            if resumed:
                self._say(f"{running.name} seed={running.seed}: goes on from step {resumed}")
            self._warn(running, message["events"])
            return
        outcome, reason = message["end"], message.get("reason")
        self.ledger.end_attempt(running.trial, running.attempt, time.time(), outcome, reason)
        del self._running[trial_id]
        if outcome == "failed":
            self._failed(executor, trial_id, running, message)
            return
        if self.store.result(trial_id) is None:  # a worker that shares no file system
            self.store.commit(trial_id, message["result"])
        self._ran += 1
        self._actual += time.time() - running.started
        self._estimated += running.estimate
        self.ledger.settle(running.trial, outcome, reason, message["result"]["seconds"])
        final = self.ledger.last_values(running.trial).get(self.experiment.metric.name, math.nan)
        ending = f"diverged: {reason}" if outcome == "diverged" else f"{self.experiment.metric.name} {final:.5g}"
        self._say(f"{running.name} seed={running.seed}: {ending} ({message['result']['seconds']:.0f} s)")

    def _warn(self, running: Running, events: list[dict[str, Any]]) -> None:
        """Tell a trial's first alarms, and that there are more."""
        for event in events:
            if event.get("alarms") and not running.warned:
                running.warned = True
                more = f" (and {len(event['alarms']) - 1} more)" if event["alarms"][1:] else ""
                self._say(f"{running.name} seed={running.seed} step {event['step']}: alarm: {event['alarms'][0]}{more}")

    def _failed(self, executor: Executor, trial_id: str, running: Running, message: dict[str, Any]) -> None:
        reason = message["reason"]
        tries = self.ledger.attempts_since(running.trial, self._started)
        if tries <= self.experiment.retry:
            self._say(f"{running.name} seed={running.seed}: {reason}; retry {tries}/{self.experiment.retry}")
            request = running.request | {"attempt": self.ledger.start_attempt(running.trial, time.time())}
            self._running[trial_id] = replace(
                running, attempt=request["attempt"], started=time.time(), step=0, loss=math.nan, request=request
            )
            executor.submit(request)
            return
        self.ledger.settle(running.trial, "failed", reason)
        log = "".join(f"\n    {line}" for line in message.get("log", "").splitlines())
        self._say(f"{running.name} seed={running.seed}: failed: {reason}{log}")

    def _interrupted(self) -> None:
        now = time.time()
        for running in self._running.values():
            self.ledger.end_attempt(running.trial, running.attempt, now, "interrupted")
            self.ledger.settle(running.trial, "pending")
        if self.pictures:
            self.pictures.finish("KILLED", _INTERRUPT_GRACE_SECONDS)

    # Telling

    def _say(self, line: str) -> None:
        self._news.append(line)

    def _progress(self) -> Progress:
        members = self.ledger.members()
        unfinished = {member["trial"] for member in members if member["status"] in ("pending", "running")}
        total = len({member["trial"] for member in members})
        news, self._news = tuple(self._news), []
        trouble = self.pictures.trouble if self.pictures else None
        return Progress(total - len(unfinished), total, tuple(self._running.values()), news, trouble, self._seconds_left())

    def _seconds_left(self) -> float:
        """The workloads' own estimates for what is missing, scaled by how far off they were for the trials that ran."""
        scale = self._actual / self._estimated if self._estimated else 1.0
        waiting = sum(_estimate(arm) for _, arm, _, _ in self._queue)
        if self._asks_left() > 0:
            waiting += self._asks_left() * len(self.experiment.seeds) * self.experiment.base.config.cost(quantised=True)
        now = time.time()
        running = sum(max(0.0, scale * item.estimate - (now - item.started)) for item in self._running.values())
        return (scale * waiting + running) / max(1, len(self._running))


def _estimate(arm: Arm) -> float:
    return arm.config.cost(not arm.recipe.plain)
