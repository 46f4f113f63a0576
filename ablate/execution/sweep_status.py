"""Progress of a sweep at one moment, from its ledger and its lock. Read-only, without torch."""

import math
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from ablate.errors import InputError
from ablate.execution.sweep_control import changed, holder
from ablate.execution.tracking.mlflow_tracker import behind
from ablate.files import Holder
from ablate.store.checked_ledger import absent, refusal
from ablate.store.divergences import divergences
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import Attempt, Member
from ablate.store.trial_store import Store

_LOG_LINES = 5
AboutOf = Callable[[Path, Ledger], Mapping[str, str]]
"""Function from a sweep's folder and ledger to `lead` and `answer` of its report; empty without one."""


@dataclass(frozen=True)
class RunningTrialStatus:
    """A running trial and its progress."""

    arm: str
    seed: int
    trial: str
    attempt: int
    where: str
    step: int
    steps: int
    steps_per_s: float | None
    tokens_per_s: float | None
    silent_s: float
    """Seconds since the last record, or since the start."""
    seconds_left: float | None


@dataclass(frozen=True)
class Failure:
    """A trial that ended without a result, with the end of its log, or that diverged."""

    arm: str
    seed: int
    trial: str
    status: str
    reason: str
    log: list[str]


@dataclass(frozen=True)
class Status:
    """Progress of one sweep at one moment."""

    name: str
    question: str = ""
    controller: str | None = None
    """Process that runs the sweep; None: no process does."""
    trials: dict[str, int] = field(default_factory=dict)
    running: list[RunningTrialStatus] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    seconds_left: float | None = None
    """Estimate; 0 while it runs longer than estimated."""
    quantisers: str | None = None
    """Sentence if its machine has no compiled quantisers."""
    mlflow_behind: int | None = None
    """Records that MLflow does not have; None if the sweep is not sent to MLflow."""
    quiet_s: float | None = None
    """Seconds since the ledger last changed."""
    answer: str | None = None
    """Answer to its question, of a report that shows its present state; None without one."""
    lead: str | None = None
    """First words of the answer."""
    trouble: str | None = None

    @property
    def total(self) -> int:
        """Number of trials that the sweep wants."""
        return sum(self.trials.values())

    @property
    def over(self) -> int:
        """Number of trials that neither run nor wait."""
        return self.total - self.trials.get("pending", 0) - self.trials.get("running", 0)


def read(folder: Path, store: Store, about_of: AboutOf = lambda folder, ledger: {}) -> Status:
    """Return the status of one sweep, from its ledger and its lock. `about_of` reads the answer from the
    sweep's report."""
    process, path = holder(folder), folder / "ledger.db"
    controller = str(process) if process else None
    trouble = absent(path)
    if trouble and process:
        trouble = "is starting"
    try:
        if not trouble:
            with closing(Ledger(path, readonly=True)) as ledger:
                if why := ledger.flaw():
                    raise sqlite3.DatabaseError(why)
                if why := ledger.lost():
                    raise InputError(refusal(path, why, ledger=ledger))
                return _read(folder, ledger, store, controller, about_of(folder, ledger))
    except InputError as error:
        trouble = str(error)
    except (sqlite3.DatabaseError, ValueError, TypeError, KeyError, RecursionError) as error:
        trouble = refusal(path, str(error))
        if isinstance(error, sqlite3.OperationalError) and "decode" not in str(error):
            trouble = f"{path}: cannot be read: {error}"
            if "no such table" in str(error):  # created but still empty
                trouble = "is starting" if process else absent(path, empty=True) or trouble
    return Status(folder.name, controller=controller, trouble=trouble)


def _read(
    folder: Path, ledger: Ledger, store: Store, controller: str | None, about: Mapping[str, str]
) -> Status:
    now = time.time()
    members = {member.trial: member for member in reversed(ledger.members())}
    attempts = ledger.running_attempts() if controller else {}
    running = [
        _running_trial(ledger, store, member, attempts[trial], now)
        for trial, member in members.items()
        if trial in attempts
    ]
    failed = [member for member in members.values() if member.status in ("failed", "oom", "stopped")]
    diverged = {each.member.trial: each for each in reversed(divergences(ledger))}
    failures = [_failure(ledger, store, member) for member in reversed(failed)]
    for each in reversed(diverged.values()):
        one = each.member
        failures.append(Failure(one.name, one.seed, one.id, "diverged", str(each), []))
    return Status(
        name=folder.name,
        question=ledger.facts.question,
        controller=controller,
        trials=dict(Counter(member.status for member in members.values())),
        running=sorted(running, key=lambda trial: (trial.seed, trial.arm)),
        failures=failures,
        seconds_left=_seconds_left(ledger, now, running) if controller else None,
        quantisers=ledger.facts.provenance.get("quantisers"),
        mlflow_behind=behind(ledger) if ledger.facts.mlflow else None,
        quiet_s=max(0.0, now - changed(folder)),
        answer=about.get("answer"),
        lead=about.get("lead"),
    )


def _running_trial(
    ledger: Ledger, store: Store, member: Member, attempt: Attempt, now: float
) -> RunningTrialStatus:
    steps, speed = member.resolved.steps, ledger.pace(member.trial, attempt.started)
    last = ledger.last_record(member.trial, "throughput/tokens_per_s")
    lock = store.folder(member.id) / "lock"
    process = Holder.parse(lock.read_bytes()) if lock.is_file() else None
    return RunningTrialStatus(
        arm=member.name,
        seed=member.seed,
        trial=member.id,
        attempt=attempt.attempt,
        where=process.process if process else "",
        step=speed.step,
        steps=steps,
        steps_per_s=speed.steps_per_s,
        tokens_per_s=None if last is None or math.isnan(last[1]) else last[1],
        silent_s=max(0.0, now - max(speed.moment, attempt.started)),
        seconds_left=speed.seconds_left(steps),
    )


def _failure(ledger: Ledger, store: Store, member: Member) -> Failure:
    reason, log = member.reason or "", list[str]()
    if member.status != "stopped":
        attempt = ledger.last_attempt(member.trial) or 1
        log = store.log_tail(member.id, attempt, _LOG_LINES + 1).splitlines()
    # Most reasons repeat the last line of the log.
    shown = log[:-1] if log and log[-1] == reason else log[-_LOG_LINES:]
    return Failure(member.name, member.seed, member.id, member.status, reason, shown)


def _seconds_left(ledger: Ledger, now: float, running: Iterable[RunningTrialStatus]) -> float | None:
    """Return the controller's estimate less the time since then, and at least what a running trial needs. The
    controller learns from trials that ended; one that runs may be slower than they were. None while it has no
    estimate."""
    at, seconds = ledger.facts.left
    if seconds is None:
        return None
    return max(0.0, seconds - (now - at), *(trial.seconds_left or 0.0 for trial in running))
