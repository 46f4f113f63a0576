"""Event loop of one sweep. It is one process and one thread, and the only writer of the sweep's ledger.

The problem: trials run for hours on workers that may die, and orders, results and records arrive at any time.
The idea: everything that happens is a message to one loop, which writes it to the ledger before it acts on
it. A controller that is killed therefore loses nothing; the same command continues from the ledger and the
trial folders.

Each round of the loop carries out orders (`ablate stop`), starts trials while there are slots, waits for
messages, records them, and asks for more trials if seeds grow or a search proposes points.

    for step in Controller(experiment, Path("runs"), "cpu", Inline, mlflow=None).run():
        print(step)  # Progress after each event; at the end one Outcome

It starts no trial if the budget is spent, the disk is nearly full, or the sweep was stopped. It prints
nothing.
"""

import math
import shutil
import sqlite3
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from ablate.errors import one_line
from ablate.execution import sweep_control
from ablate.execution.failures import Failures, divergence, lost_baselines
from ablate.execution.messages import Ended, Event, Events, Message, Notice, TrialRequest, Waiting
from ablate.execution.planned_code import PlannedCode, edited_error
from ablate.execution.progress import Executor, Outcome, Progress, Routine, Running, RunOptions, Status
from ablate.execution.scheduler import Scheduler
from ablate.execution.study_points import GivenUp
from ablate.execution.sweep_facts import describe, register_design, require_metrics
from ablate.execution.time_model import TimeModel
from ablate.execution.trial_queue import Work
from ablate.experiment.arms import KnobError
from ablate.experiment.load import Experiment
from ablate.experiment.roles import CONFIRM, WINNER
from ablate.files import Json, full
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Result, Store
from ablate.training.metric_names import ENDINGS
from ablate.training.workloads import context_free

if TYPE_CHECKING:
    from ablate.execution.projections import Projections

_WAIT_SECONDS = 0.2
_INTERRUPT_GRACE_SECONDS = 10.0


class Controller:
    """One run of one experiment, with its results in a state folder."""

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
        self._layout = experiment.keys.resources.layout(device)
        self._started = time.time()
        fresh = self._started if options.fresh else None
        self.scheduler = Scheduler(experiment, self.ledger, self.store, device, options.fork, fresh)
        if options.paces:
            self._pace.recall(options.paces.read())
        self._projections: Projections | None = None
        self._running: dict[str, Running] = {}
        self.news: list[str] = []
        self._ran, self._confirmed = 0, False
        self._extended: tuple[int, int, int] | None = None
        """Trials run, points proposed and trials in flight when `_extend` last looked."""
        self._slot_seconds = 0.0
        self._slots = 1
        self._failures, self._discards = Failures(), False
        self._code = PlannedCode(experiment.arms)
        self._halt: tuple[Literal["stopped", "disk", "failed"], str] | None = None
        """Status and sentence that explain why no more trials start: the sweep was stopped, the disk is full,
        or all trials fail by the same exception."""

    # The run

    def run(self) -> Generator[Progress | Outcome, None, None]:
        """Run the missing trials; yield a Progress after every event, and one Outcome at the end. After
        Ctrl-C, or if the generator is closed, the next run resumes everything.

        InputError if finished trials come from other versions of the code, an earlier sweep that is named is
        missing, code or data are edited meanwhile, or a trial has not logged what is compared. OSError or
        sqlite3.OperationalError if files cannot be written for a reason other than a full disk.
        """
        executor = None
        status: Status | Literal["killed"] = "killed"
        try:
            self._want()
            yield self._progress()
            self._extend()
            from ablate.execution.projections import Projections  # imports Optuna: after the first line

            self._projections = Projections(
                self.experiment,
                self.ledger,
                self.state,
                self.folder,
                self._mlflow,
                busy=self._work_left(),
                describe=self.options.describe,
                trackers=self.options.trackers,
            )
            if self.projections.warmed:
                self._say(self.projections.warmed)
            if aside := self.projections.study.damaged:
                self._say(f"The study's journal was damaged: it is kept as {aside}, and made from the ledger")
            if self._work_left():
                executor = self._connect()
                yield from self._loop(executor)
            status = self._status()
            self._release()
            if status in ("done", "failed") and not self._halt:
                self.scheduler.queue.tidy()
            self.ledger.facts.ended = status
            if self.options.paces:
                self.options.paces.keep(self._pace.learnt)
            ending = {"failed": "FAILED", "stopped": "KILLED"}.get(status, "FINISHED")
            if behind := self.projections.finish(ending, self.options.grace):
                self._say(behind)
            yield self._progress()
            yield self._outcome(status)
        except (OSError, sqlite3.OperationalError) as error:
            if not full(error, self.state):
                raise
            status = "disk"  # nothing can be written: the next run settles the running trials
            self._stop_for_space("some of it")
            yield self._outcome(status)
        finally:
            if executor:
                executor.close()
            if status == "killed":
                self._release()
                if self._projections:
                    self._projections.finish("KILLED", _INTERRUPT_GRACE_SECONDS)
            self.ledger.close()

    def adopt(self, points: Sequence[Mapping[str, Json]] = (), given_up: Mapping[int, int] = {}) -> list[str]:
        """Reuse the results in the trial folders without running anything, and close the ledger; return lines
        of news for the user. InputError as `run`.

        For a ledger that lost them: `points` are the knobs that a search had proposed, `given_up` the step at
        which the pruner ended a point, by the point's number. Without these decisions those points would run
        again, and more seeds or a winner to confirm would be missing until then.
        """
        self._want(points)
        for point in self.ledger.points():
            if point.optuna is not None and point.optuna in given_up:
                self.scheduler.give_up(point.arm, given_up[point.optuna])
        self._extend()
        self.ledger.close()
        return self.news + self.scheduler.news

    def stages(self) -> list[list[TrialRequest]]:
        """Return requests for the missing trials without running any, and close the ledger. InputError as
        `run`. The trials of a stage may run at the same time; those of the next one start from states that
        they leave. The number of the attempt is 0: a task takes the next one when it begins."""
        self._want()
        stages: list[list[TrialRequest]] = []
        while self.scheduler.queue:
            coming: set[str] = set()
            stage = []
            while work := self.scheduler.queue.next(coming):
                stage.append(self._request(work, 0))
                coming |= {name for _, name in stage[-1].fork}
            stages.append(stage)
        self.ledger.close()
        return stages

    @property
    def projections(self) -> "Projections":
        """Projections of this run's ledger. RuntimeError before `run` has made them."""
        if self._projections is None:
            raise RuntimeError("the controller has no projections before it runs")
        return self._projections

    @property
    def _pace(self) -> TimeModel:
        """Estimated seconds of trials, learnt from those that have run."""
        return self.scheduler.queue.countdown.pace

    def _want(self, points: Sequence[Mapping[str, Json]] = ()) -> None:
        if why := self.ledger.lost():
            self._say(f"The ledger: {why}; they are read again from the trial folders")
        requeued = self.ledger.requeue(time.time())
        describe(self.ledger, self.experiment, self.scheduler.device)
        register_design(self.ledger, self.experiment, self.store, self.scheduler.device)
        sweep_control.take(self.folder)  # discard orders to an earlier controller
        self.news += self.scheduler.everything(self.options.accept_version, points, self.options.same_code)
        if done := next((member for member in self.ledger.members() if member.status == "done"), None):
            require_metrics(self.experiment, self.ledger, done.trial, f"{done.name} seed={done.seed}")
        if requeued:
            self._say(f"{requeued} trials were left unfinished and go on")

    def _loop(self, executor: Executor) -> Iterator[Progress]:
        # A study made again shows every point as running until it is refreshed, and would ask for more.
        self.projections.refresh()
        while self._running or self._work_left():
            self._obey(executor)
            if edited := self._code.edited():
                self._end_edited(edited)
            proposed = max(0, self.scheduler.asks_left) * len(self.experiment.seeds)
            executor.wanted = len(self._running) + len(self.scheduler.queue) + proposed
            self._slots = executor.slots
            while len(self._running) < executor.slots and self._may_start(executor):
                if not (work := self._next()):
                    break
                self._submit(executor, work)
                yield self._progress()
            # Without a slot the sweep waits for nodes that others use.
            if not self._running and (executor.slots or not self._may_start(executor)):
                if not self.scheduler.queue:
                    self._extend()  # the last proposed points may all repeat earlier ones
                    if self.scheduler.queue:
                        continue
                return
            for trial_id, message in executor.wait(_WAIT_SECONDS):
                self._receive(executor, trial_id, message)
            if self._halt and self._halt[0] == "failed":
                return
            self._extend()
            self.projections.refresh()
            yield self._progress()

    def _extend(self) -> None:
        """Request more seeds, or the confirmation of a winner, if the results so far call for it; once after
        each change."""
        now = self._ran, self.scheduler.proposed, len(self._running)
        if self.scheduler.queue or self._halt or self._extended == now:
            return
        self._extended, search = now, self.experiment.keys.search
        if self.experiment.keys.growth or self.experiment.keys.blame:
            self.news += map(Routine, (*self.scheduler.grow(), *self.scheduler.blame()))
        elif search and search.confirm and self.scheduler.asks_left <= 0 and not self._running:
            self.news += [] if self._confirmed else self.scheduler.confirm()
            self._confirmed = True
        if self.scheduler.same_code:
            self.news += self.scheduler.same_code.news()

    def _work_left(self) -> bool:
        wanted = bool(self.scheduler.queue or self.scheduler.asks_left > 0)
        return wanted and not (self._halt or self._spent())

    def _spent(self) -> bool:
        budget, now = self.experiment.keys.budget, time.time()
        if budget.trials is not None and self._ran + len(self._running) >= budget.trials:
            return True
        if budget.hours is not None and now - self._started >= 3600 * budget.hours:
            return True
        if budget.cost is None or self.options.price is None:
            return False
        used = self._slot_seconds + sum(now - running.started for running in self._running.values())
        return used / 3600 * self.options.price >= budget.cost

    def _status(self) -> Status:
        if self._halt:
            return self._halt[0]
        if self.scheduler.queue or self.scheduler.asks_left > 0:
            return "budget"
        lost, baselines = lost_baselines(self.ledger)
        return "failed" if self._failed_trials() or (lost and len(lost) == baselines) else "done"

    def _outcome(self, status: Status) -> Outcome:
        why = self._halt[1] if self._halt else ""
        lost, _ = lost_baselines(self.ledger)
        if lost and not why:
            why = (
                f"{', '.join(lost)} diverged on every seed, so nothing can be compared with it. What its"
                " arms change is not the cause: lower the learning rate, or clip gradients."
            )
        if status == "budget":
            rest = f"{self.scheduler.count['pending']} trials are not run"
            if self.scheduler.asks_left > 0:
                rest += f" and {self.scheduler.asks_left} arms not proposed"
            why = f"Partial: the budget is reached, and {rest}. The same command goes on."
        cause, seconds = self._failures.cause, time.time() - self._started
        reused, failed = len(self.scheduler.reused), self._failed_trials()
        diverged = divergence(self.ledger)
        return Outcome(status, self._ran, reused, failed, seconds, why, str(cause or ""), diverged)

    def _failed_trials(self) -> int:
        return sum(self.scheduler.count[status] for status in ("failed", "oom", "stopped"))

    # Starting trials

    def _may_start(self, executor: Executor) -> bool:
        if self._halt or self._spent():
            return False
        need = self.options.spare + self.store.largest_checkpoint() * executor.slots
        if shutil.disk_usage(self.state).free >= need or self.store.collect(need):
            return True
        free = shutil.disk_usage(self.state).free
        self._stop_for_space(f"{(need - free) / 1e9:.1f} GB")
        return False

    def _stop_for_space(self, amount: str) -> None:
        """Start no more trials, because the disk is full or nearly full. `amount`: space to free, for the
        message."""
        if not self._halt:
            remedy = f"free {amount}, then run the same command again. Nothing is lost."
            self._halt = "disk", f"The disk of {self.state} is full: {remedy}"

    def _next(self) -> Work | None:
        while not self.scheduler.queue and self.scheduler.asks_left > 0:
            number, knobs = self.projections.study.ask()
            try:
                self.projections.due(self.scheduler.propose(knobs, number))
            except KnobError as error:
                self.projections.study.refuse(number, str(error))
                self._say(f"point {number} cannot be run: {error}")
        coming = {name for running in self._running.values() for _, name in running.request.fork}
        return self.scheduler.queue.next(coming)

    def _submit(self, executor: Executor, work: Work) -> None:
        if self.scheduler.adopt(work.trial, work.spec.id):  # another sweep has finished it meanwhile
            self.projections.settled(work.trial)
            return
        attempt = self.scheduler.start(work.trial, work.spec.id, time.time())
        request = self._request(work, attempt)
        name, now = one_line(work.arm.name).replace(CONFIRM, WINNER), time.time()
        self._running[work.spec.id] = Running(
            name, work.seed, work.trial, attempt, now, work.spec.steps, request, work
        )
        self.ledger.move_log()
        executor.submit(request)

    def _request(self, work: Work, attempt: int) -> TrialRequest:
        return TrialRequest(
            id=work.spec.id,
            spec=work.spec.wire,
            root=str(self.state.resolve()),
            attempt=attempt,
            telemetry=self.experiment.keys.telemetry.model_dump(),
            fork=tuple(self.scheduler.queue.fork_points(work.spec)),
            patience=self.experiment.keys.patience,
            ranks=self._layout.ranks,
            sharded=self._layout.sharded,
            imports=work.spec.config.imports,
        )

    # Orders

    def _obey(self, executor: Executor) -> None:
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
        self, executor: Executor, matches: Callable[[Work], bool], status: str, reason: str
    ) -> None:
        """End the matching trials in flight and drop those that wait. All keep their records."""
        for trial_id, running in self._running.items():
            if matches(running.work) and not running.ending:
                running.ending = status, reason
                executor.stop(trial_id)
        for work in self.scheduler.queue.drop(matches) if not self._halt else ():
            self.scheduler.settle(work.trial, status, reason)
            self.projections.settled(work.trial)

    def _prune(self, executor: Executor, trial: int) -> None:
        """End the arms that the pruner gives up after this trial's values, except for trials that other arms
        need."""
        for arm, decision in self.projections.judge(trial).items():
            own = self.ledger.own_trials(arm)
            self._end_trials(executor, lambda work: work.trial in own, "pruned", decision.reason)  # noqa: B023

    # Messages

    def _receive(self, executor: Executor, trial_id: str, message: Message) -> None:
        if isinstance(message, Notice):
            self._say(message.text)
            return
        running = self._running[trial_id]
        if isinstance(message, Events):
            self._record(running, message.events)
            self._prune(executor, running.trial)
        elif isinstance(message, Waiting):
            self._say(f"{running.title}: waits for {message.holder}, which runs the same trial")
        elif isinstance(message, Ended):
            self._end(executor, trial_id, running, message)
            self._prune(executor, running.trial)
            self.ledger.move_log()

    def _record(self, running: Running, events: Sequence[Event]) -> None:
        self.ledger.record(running.trial, events)
        last = events[-1]
        running.step = last["step"]
        running.loss = last["metrics"].get("train/loss", running.loss)
        resumed = next((event["resumed"] for event in events if "resumed" in event), None)
        if resumed:
            running.begun = resumed
            self._say(f"{running.title}: goes on from step {resumed}", True)
        self._warn(running, events)

    def _end(self, executor: Executor, trial_id: str, running: Running, end: Ended) -> None:
        if end.result is not None:
            if self.store.result(trial_id) is None:  # the worker shares no file system with us
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
        self, trial_id: str, running: Running, outcome: str, reason: str | None, result: Result
    ) -> None:
        self._ran += 1
        if outcome == "done" and running.steps > running.begun:
            seconds = result["seconds"] * running.steps / (running.steps - running.begun)
            self._pace.learn(running.work.load, seconds)
        if outcome == "done":
            self.scheduler.ledger.note_context_free(running.trial, context_free(result))
        self.scheduler.settle(running.trial, outcome, reason, result["seconds"])
        self.projections.settled(running.trial)
        if outcome == "done":
            require_metrics(self.experiment, self.ledger, running.trial, running.title)
        metric = self.experiment.metric.name
        ending = f"diverged: {reason}"
        if outcome != "diverged":
            ending = f"{metric} {self.ledger.last_value(running.trial, metric):.5g}"
        self._say(f"{running.title}: {ending} ({result['seconds']:.0f} s)", outcome != "diverged")

    def _failed(self, executor: Executor, trial_id: str, running: Running, end: Ended) -> None:
        if end.disk_full:
            self._stop_for_space("some of it")
            self.scheduler.settle(running.trial, "pending")
            return
        if end.edited:
            self.ledger.forget(running.trial)
            self.scheduler.settle(running.trial, "pending")
            self._end_edited(self._code.edited(now=True))
        repeats = end.raised is not None and self._failures.repeats(end.raised)
        tries = self.ledger.attempts_since(running.trial, self._started)
        if tries <= self.experiment.keys.retry and not self._halt and not repeats:
            self._say(f"{running.title}: {end.reason}; retry {tries}/{self.experiment.keys.retry}")
            attempt = self.scheduler.start(running.trial, trial_id, time.time())
            request = replace(running.request, attempt=attempt)
            self._running[trial_id] = replace(
                running, attempt=attempt, started=time.time(), begun=0, step=0, loss=math.nan, request=request
            )
            executor.submit(request)
            return
        new = not end.raised or self._failures.settled(running.trial, end.raised)
        self._give_up(running, "failed", end.reason, end.log if new else "")
        hopeless = end.raised and self._failures.hopeless(self.ledger, self.scheduler.asks_left)
        if hopeless and not self._halt:
            why = "trials fail by the same exception, and without them nothing can be compared"
            remedy = "Nothing is lost: correct the code, and the same command continues."
            self._halt = "failed", f"Stopped: {why}. {remedy}"

    def _end_edited(self, files: Iterable[Path]) -> NoReturn:
        self._discards = True
        raise edited_error(self.experiment.name, files, len(self._running))

    def _give_up(self, running: Running, status: str, reason: str | None, log: str) -> None:
        """Settle a trial that has no result and is not tried again in this run."""
        self.scheduler.settle(running.trial, status, reason)
        self.projections.settled(running.trial)
        lines = "".join(f"\n    {line}" for line in log.splitlines() if line != reason)
        shown = str(GivenUp.parse(reason) or reason) if status == "pruned" and reason else reason
        why = status if not shown else shown if shown.startswith(status) else f"{status}: {shown}"
        self._say(f"{running.title}: {why}{lines}", status == "pruned")

    def _warn(self, running: Running, events: Sequence[Event]) -> None:
        """Report the first action of a trial's guard and its first alarm, with the number of others."""
        for event in events:
            if event.get("events") and not running.guarded and not ENDINGS & event["metrics"].keys():
                running.guarded = True
                action = event["events"][0]
                self._say(f"{running.title} step {event['step']}: {action}; more of it in the report")
            if event.get("alarms") and not running.warned:
                running.warned = True
                more = f" (and {len(event['alarms']) - 1} more)" if event["alarms"][1:] else ""
                self._say(f"{running.title} step {event['step']}: alarm: {event['alarms'][0]}{more}")

    def _release(self) -> None:
        """Let the next run continue the trials in flight, or begin them again if their code was edited."""
        for trial_id, running in self._running.items():
            self.ledger.end_attempt(running.trial, running.attempt, time.time(), "interrupted")
            self.scheduler.settle(running.trial, "pending")
            if self._discards:
                self.scheduler.discard(running.trial, trial_id)
        self._running = {}

    # Reporting

    def _say(self, line: str, routine: bool = False) -> None:
        self.news.append(Routine(line) if routine else line)

    def _progress(self) -> Progress:
        count, total = self.scheduler.count, self.scheduler.count.total()
        news, self.news, self.scheduler.news = (*self.news, *self.scheduler.news), [], []
        trouble = self._projections.trouble if self._projections else None
        done, running = total - count["pending"] - count["running"], tuple(self._running.values())
        timed, asks = [each.timed for each in running], self.scheduler.asks_left
        seconds_left = self.scheduler.queue.seconds_left(timed, self._slots, asks, self._confirmed)
        return Progress(done, total, self._failed_trials(), running, news, trouble, seconds_left)


def _ordered(order: sweep_control.Order, work: Work) -> bool:
    return work.arm.name == order["name"] if order["stop"] == "arm" else work.spec.id == order["id"]
