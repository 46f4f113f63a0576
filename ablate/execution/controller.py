"""One process, one loop: what is wanted, what is done, what runs next. The only writer of the ledger.

It draws nothing and prints nothing: it yields a Progress whenever something happened, and ends with an Outcome.
"""

import json
import math
import shutil
import sqlite3
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ablate import provenance
from ablate.errors import one_line
from ablate.execution import sweep_control
from ablate.execution.messages import Ended, Event, Events, Message, Notice, TrialRequest, Waiting
from ablate.execution.progress import Executor, Outcome, Progress, Running, RunOptions, Status
from ablate.execution.scheduler import Scheduler, Work
from ablate.execution.study_points import GivenUp
from ablate.experiment.arms import KnobError
from ablate.experiment.load import Experiment
from ablate.files import full
from ablate.results.ledger import Ledger
from ablate.results.trial_store import Store
from ablate.training.metric_names import ENDINGS

_WAIT_SECONDS = 0.2
_MLFLOW_GRACE_SECONDS = 30.0
_INTERRUPT_GRACE_SECONDS = 10.0
_SPARE_BYTES = 512 << 20
"""No trial starts while the disk has less room than this, beside room for a checkpoint a slot."""


class Controller:
    """One run of one experiment against its state folder."""

    def __init__(
        self,
        experiment: Experiment,
        state: Path,
        device: str,
        connect: Callable[[], Executor],
        mlflow: str | None,
        options: RunOptions | None = None,
    ) -> None:
        options = options or RunOptions()
        self.experiment, self.state, self.options = experiment, state, options
        self.folder = state / "sweeps" / experiment.name
        self.store, self.ledger = Store(state), Ledger(self.folder / "ledger.db")
        self._connect, self._mlflow = connect, mlflow
        self._layout = experiment.resources.layout(device)
        self._started = time.time()
        fresh = self._started if options.fresh else None
        self.scheduler = Scheduler(experiment, self.ledger, self.store, device, options.fork, fresh)
        self.projections: Any = None
        self._running: dict[str, Running] = {}
        self._news: list[str] = []
        self._ran, self._confirmed = 0, False
        self._extended: tuple[int, int, int] | None = None
        """Trials run and points proposed when `_extend` last looked."""
        self._slot_seconds = 0.0
        self._slots = 1
        self._halt: tuple[Literal["stopped", "disk"], str] | None = None
        """Why nothing more is started: told to stop, or the disk is full."""

    # One run

    def run(self) -> Iterator[Progress | Outcome]:
        """Do what is missing. Ctrl-C, or closing the generator, leaves everything resumable."""
        executor = None
        status: Status | Literal["killed"] = "killed"
        try:
            self._want()
            yield self._progress()
            self._extend()
            self.projections = self._draw()
            if self.projections.warmed:
                self._say(self.projections.warmed)
            if self._work_left():
                executor = self._connect()
                yield from self._loop(executor)
            status = self._status()
            if status in ("done", "failed"):
                self.scheduler.tidy()
            self.ledger.describe(ended=status)
            ending = {"failed": "FAILED", "stopped": "KILLED"}.get(status, "FINISHED")
            if behind := self.projections.finish(ending, _MLFLOW_GRACE_SECONDS):
                self._say(behind)
            yield self._progress()
            yield self._outcome(status)
        except (OSError, sqlite3.OperationalError) as error:
            if not full(error, self.state):
                raise
            status = "disk"  # nothing more can be written: what was left running is settled by the next run
            self._stop_for_space("some of it")
            yield self._outcome(status)
        finally:
            if executor:
                executor.close()
            if status == "killed":
                self._interrupted()
            self.ledger.close()

    def adopt(self, points: Sequence[Mapping[str, Any]] = (), given_up: Mapping[int, int] = {}) -> list[str]:
        """Only take over what the trial folders have, running nothing; returns what is worth a line. The ledger is closed then.

        `points`: what a search had proposed, and `given_up`: the step at which its pruner gave up which of them, for a
        ledger that does not have either any more. Without the latter the points would run again, and what follows from
        them (more seeds, a winner that is confirmed) would be missing until they had.
        """
        self._want(points)
        for point in self.ledger.points():
            if point["optuna"] in given_up:
                self.scheduler.give_up(point["arm"], given_up[point["optuna"]])
        self._extend()
        self.ledger.close()
        return self._news + self.scheduler.news

    def _want(self, points: Sequence[Mapping[str, Any]] = ()) -> None:
        requeued = self.ledger.requeue(time.time())
        self._describe()
        sweep_control.take(self.folder)  # orders to a controller that is no more
        for line in self.scheduler.everything(self.options.accept_version, points):
            self._say(line)
        if requeued:
            self._say(f"{requeued} trials were left unfinished and go on")

    def _draw(self) -> Any:
        from ablate.execution.projections import (
            Projections,
        )  # Optuna and pandas: only once the first line is on the screen

        return Projections(
            self.experiment, self.ledger, self.state, self.folder, self._mlflow, busy=self._work_left()
        )

    def _loop(self, executor: Executor) -> Iterator[Progress]:
        self.projections.refresh()  # or a study that was drawn again would ask while every point looks as if it still ran
        while self._running or self._work_left():
            self._obey(executor)
            executor.wanted = self._wanted()
            self._slots = executor.slots
            while (
                len(self._running) < executor.slots and self._may_start(executor) and (work := self._next())
            ):
                self._submit(executor, work)
                yield self._progress()
            if not self._running and (
                executor.slots or not self._may_start(executor)
            ):  # without a slot, its turn is to come
                if not self.scheduler:
                    self._extend()  # the last points that were proposed may all repeat earlier ones
                    if self.scheduler:
                        continue
                return
            for trial_id, message in executor.wait(_WAIT_SECONDS):
                self._hear(executor, trial_id, message)
            self._extend()
            self.projections.refresh()
            yield self._progress()

    def _extend(self) -> None:
        """Want more where the answer so far calls for it; looks once after each change."""
        now = self._ran, self.scheduler.proposed, len(self._running)
        if self.scheduler or self._halt or self._extended == now:
            return
        self._extended, search = now, self.experiment.search
        if self.experiment.growth:
            self._news += self.scheduler.grow()
        elif (
            search
            and search.confirm
            and not self._confirmed
            and not self._running
            and self.scheduler.asks_left <= 0
        ):
            self._confirmed = True
            self._news += self.scheduler.confirm()

    def _work_left(self) -> bool:
        return not self._halt and not self._spent() and bool(self.scheduler or self.scheduler.asks_left > 0)

    def _wanted(self) -> int:
        """Trials that run, wait, or may still be proposed."""
        return (
            len(self._running)
            + len(self.scheduler)
            + max(0, self.scheduler.asks_left) * len(self.experiment.seeds)
        )

    def _spent(self) -> bool:
        """Whether the budget of this run is used up."""
        budget, now = self.experiment.budget, time.time()
        if budget.trials is not None and self._ran + len(self._running) >= budget.trials:
            return True
        if budget.hours is not None and now - self._started >= 3600 * budget.hours:
            return True
        used = self._slot_seconds + sum(now - running.started for running in self._running.values())
        return (
            budget.cost is not None
            and self.options.price is not None
            and used / 3600 * self.options.price >= budget.cost
        )

    def _status(self) -> Status:
        if self._halt:
            return self._halt[0]
        if self.scheduler or self.scheduler.asks_left > 0:
            return "budget"
        return "failed" if self._failures() else "done"

    def _outcome(self, status: Status) -> Outcome:
        why = self._halt[1] if self._halt else ""
        if status == "budget":
            left = f"{self.scheduler.count['pending']} trials are not run"
            if self.scheduler.asks_left > 0:
                left += f" and {self.scheduler.asks_left} arms not proposed"
            why = f"Partial: the budget is reached, and {left}. The same command goes on."
        return Outcome(
            status, self._ran, len(self.scheduler.reused), self._failures(), time.time() - self._started, why
        )

    def _failures(self) -> int:
        return sum(self.scheduler.count[status] for status in ("failed", "oom", "stopped"))

    def _describe(self) -> None:
        commit, diff = provenance.commit(Path.cwd())
        self.ledger.describe(
            **{
                "name": self.experiment.name,
                "question": self.experiment.question,
                "interval": self.experiment.growth.interval if self.experiment.growth else "t",
                "ended": "",
                "search": self.experiment.search.sampler if self.experiment.search else "",
                "metric": self.experiment.metric.model_dump_json(),
                "metrics": json.dumps([metric.name for metric in self.experiment.metrics]),
                "compared": json.dumps([metric.model_dump() for metric in self.experiment.metrics]),
                "published": json.dumps([figure.model_dump() for figure in self.experiment.published]),
                "experiment.yaml": self.experiment.text,
                "provenance.json": json.dumps({"commit": commit, **provenance.environment()}, indent=1),
                "uncommitted.diff": diff,
            }
        )

    # What may start

    def _may_start(self, executor: Executor) -> bool:
        if self._halt or self._spent():
            return False
        need = _SPARE_BYTES + self.store.largest_checkpoint() * executor.slots
        if shutil.disk_usage(self.state).free >= need or self.store.collect(need):
            return True
        free = shutil.disk_usage(self.state).free
        self._stop_for_space(f"{(need - free) / 1e9:.1f} GB")
        return False

    def _stop_for_space(self, amount: str) -> None:
        """Start nothing more: the disk is full, or nearly."""
        if not self._halt:
            self._halt = (
                "disk",
                f"The disk of {self.state} is full: free {amount}, then run the same command again. Nothing is lost.",
            )

    def _next(self) -> Work | None:
        while not self.scheduler and self.scheduler.asks_left > 0:
            number, knobs = self.projections.study.ask()
            try:
                self.projections.due(self.scheduler.propose(knobs, number))
            except KnobError as error:
                self.projections.study.refuse(number, str(error))
                self._say(f"point {number} cannot be run: {error}")
        return self.scheduler.next(
            {name for running in self._running.values() for _, name in running.request.fork}
        )

    def _submit(self, executor: Executor, work: Work) -> None:
        if self.scheduler.adopt(work.trial, work.spec.id):  # another sweep was faster
            self.projections.settled(work.trial)
            return
        attempt = self.scheduler.start(work.trial, work.spec.id, time.time())
        request = TrialRequest(
            id=work.spec.id,
            spec=work.spec.wire,
            root=str(self.state.resolve()),
            attempt=attempt,
            telemetry=self.experiment.telemetry.model_dump(),
            fork=tuple(self.scheduler.points(work.spec)),
            patience=self.experiment.patience,
            ranks=self._layout.ranks,
            sharded=self._layout.sharded,
            imports=work.spec.config.imports,
        )
        estimate = work.part * self.scheduler.clock.pace.seconds(work.load)
        self._running[work.spec.id] = Running(
            one_line(work.arm.name),
            work.seed,
            work.trial,
            attempt,
            time.time(),
            work.spec.config.steps,
            estimate,
            request,
            work,
        )
        executor.submit(request)

    # What is ordered

    def _obey(self, executor: Executor) -> None:
        """Carry out what `ablate stop` and `ablate workers` ask for."""
        for order in sweep_control.take(self.folder):
            if "workers" in order:
                executor.resize(order["workers"])
                self._say(f"{executor.slots} trials at once from now on")
            elif order["stop"] == "sweep":
                self._halt = "stopped", "Stopped as ordered. Nothing is lost: the same command goes on."
                self._end_trials(executor, lambda work: True, "stopped", "stopped by hand")
            else:
                reason = "its arm was stopped by hand" if order["stop"] == "arm" else "stopped by hand"
                self._end_trials(executor, partial(_ordered, order), "stopped", reason)

    def _end_trials(
        self, executor: Executor, meant: Callable[[Work], bool], status: str, reason: str
    ) -> None:
        """End the trials in flight that are meant; those that wait are not run. All keep what they recorded."""
        for trial_id, running in self._running.items():
            if meant(running.work) and not running.ending:
                running.ending = status, reason
                executor.stop(trial_id)
        for work in self.scheduler.drop(meant) if not self._halt else ():
            self.scheduler.settle(work.trial, status, reason)
            self.projections.settled(work.trial)

    def _prune(self, executor: Executor, trial: int) -> None:
        """End what the pruner gives up after what this trial has shown, but for trials that other arms want, too."""
        for arm, decision in self.projections.judge(trial).items():
            own = self.ledger.own_trials(arm)
            self._end_trials(executor, partial(_among, own), "pruned", decision.reason)

    # What is heard

    def _hear(self, executor: Executor, trial_id: str, message: Message) -> None:
        if isinstance(message, Notice):
            self._say(message.text)
            return
        running = self._running[trial_id]
        if isinstance(message, Events):
            self._record(running, message.events)
            self._prune(executor, running.trial)
        elif isinstance(message, Waiting):
            self._say(
                f"{running.name} seed={running.seed}: waits for {message.holder}, which runs the same trial"
            )
        elif isinstance(message, Ended):
            self._end(executor, trial_id, running, message)
            self._prune(executor, running.trial)

    def _record(self, running: Running, events: Sequence[Event]) -> None:
        self.ledger.record(running.trial, events)
        last = events[-1]
        running.step = last["step"]
        running.loss = last["metrics"].get("train/loss", running.loss)
        resumed = next((event["resumed"] for event in events if "resumed" in event), None)
        if resumed:
            running.begun = resumed
            self._say(f"{running.name} seed={running.seed}: goes on from step {resumed}")
        self._warn(running, events)

    def _end(self, executor: Executor, trial_id: str, running: Running, end: Ended) -> None:
        if end.result is not None:
            if self.store.result(trial_id) is None:  # a worker that shares no file system
                self.store.commit(trial_id, end.result)
            if why := self.scheduler.confirm_records(running.trial, trial_id, end.result):
                end = Ended("failed", why)
        outcome: str = end.status
        reason = end.reason
        if running.ending and end.result is None:
            outcome, reason = running.ending
        self.ledger.end_attempt(running.trial, running.attempt, time.time(), outcome, reason)
        self._slot_seconds += time.time() - running.started
        del self._running[trial_id]
        if outcome == "failed":
            self._failed(executor, trial_id, running, end)
        elif end.result is not None:
            self._finished(trial_id, running, outcome, reason, end.result)
        else:
            self._give_up(running, outcome, reason, end.log if outcome == "oom" else "")

    def _finished(
        self, trial_id: str, running: Running, outcome: str, reason: str | None, result: dict[str, Any]
    ) -> None:
        self._ran += 1
        if outcome == "done" and running.steps > running.begun:
            self.scheduler.clock.pace.learn(
                running.work.load, result["seconds"] * running.steps / (running.steps - running.begun)
            )
        self.scheduler.settle(running.trial, outcome, reason, result["seconds"])
        self.projections.settled(running.trial)
        final = self.ledger.last_value(running.trial, self.experiment.metric.name)
        ending = (
            f"diverged: {reason}" if outcome == "diverged" else f"{self.experiment.metric.name} {final:.5g}"
        )
        self._say(f"{running.name} seed={running.seed}: {ending} ({result['seconds']:.0f} s)")

    def _failed(self, executor: Executor, trial_id: str, running: Running, end: Ended) -> None:
        if end.disk_full:
            self._stop_for_space("some of it")
            self.scheduler.settle(running.trial, "pending")
            return
        tries = self.ledger.attempts_since(running.trial, self._started)
        if tries <= self.experiment.retry and not self._halt:
            self._say(
                f"{running.name} seed={running.seed}: {end.reason}; retry {tries}/{self.experiment.retry}"
            )
            attempt = self.scheduler.start(running.trial, trial_id, time.time())
            request = replace(running.request, attempt=attempt)
            self._running[trial_id] = replace(
                running, attempt=attempt, started=time.time(), begun=0, step=0, loss=math.nan, request=request
            )
            executor.submit(request)
            return
        self._give_up(running, "failed", end.reason, end.log)

    def _give_up(self, running: Running, status: str, reason: str | None, log: str) -> None:
        """A trial without a result, not to be tried again in this run."""
        self.scheduler.settle(running.trial, status, reason)
        self.projections.settled(running.trial)
        lines = "".join(f"\n    {line}" for line in log.splitlines())
        shown = str(GivenUp.parse(reason) or reason) if status == "pruned" and reason else reason
        why = status if not shown else shown if shown.startswith(status) else f"{status}: {shown}"
        self._say(f"{running.name} seed={running.seed}: {why}{lines}")

    def _warn(self, running: Running, events: Sequence[Event]) -> None:
        """Tell the first thing that a trial's guard did, and its first alarms, and that there are more."""
        for event in events:
            if event.get("events") and not running.guarded and not ENDINGS & event["metrics"].keys():
                running.guarded = True
                self._say(
                    f"{running.name} seed={running.seed} step {event['step']}: {event['events'][0]}; more of it in the report"
                )
            if event.get("alarms") and not running.warned:
                running.warned = True
                more = f" (and {len(event['alarms']) - 1} more)" if event["alarms"][1:] else ""
                self._say(
                    f"{running.name} seed={running.seed} step {event['step']}: alarm: {event['alarms'][0]}{more}"
                )

    def _interrupted(self) -> None:
        now = time.time()
        for running in self._running.values():
            self.ledger.end_attempt(running.trial, running.attempt, now, "interrupted")
            self.scheduler.settle(running.trial, "pending")
        if self.projections:
            self.projections.finish("KILLED", _INTERRUPT_GRACE_SECONDS)

    # Telling

    def _say(self, line: str) -> None:
        self._news.append(line)

    def _progress(self) -> Progress:
        count = self.scheduler.count
        total = count.total()
        news, self._news, self.scheduler.news = (*self._news, *self.scheduler.news), [], []
        trouble = self.projections.trouble if self.projections else None
        done = total - count["pending"] - count["running"]
        left = self.scheduler.seconds_left(self._running.values(), self._slots, self._confirmed)
        return Progress(done, total, self._failures(), tuple(self._running.values()), news, trouble, left)


def _ordered(order: Mapping[str, Any], work: Work) -> bool:
    """Return True if an order to stop an arm or a trial is about this work."""
    return work.arm.name == order["name"] if order["stop"] == "arm" else work.spec.id == order["id"]


def _among(trials: Container[int], work: Work) -> bool:
    return work.trial in trials
