"""Progress of a ledger's trials: attempts that run, the speed of a trial, records that a projection lacks.

Functions of an open ledger, for commands that look at a sweep from outside (status, the checks of fault
injection, MLflow's delay). Their cost must not grow with the number of trials.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ablate.store.ledger import Ledger

_PACE_RECORDS = 10
"""Number of last records that a trial's speed is computed from."""


@dataclass(frozen=True)
class Attempt:
    """A row of table `attempts`: one try at a trial."""

    trial: int
    attempt: int
    started: float
    """Seconds since 1970."""
    ended: float | None
    outcome: str | None
    """done, diverged, failed, interrupted, orphaned, or the ending that was ordered; None while it runs."""
    reason: str | None


@dataclass(frozen=True)
class Pace:
    """Progress and speed of a trial."""

    step: int = 0
    """Last step that was recorded."""
    moment: float = 0.0
    """Time of that record: seconds since 1970."""
    steps_per_s: float | None = None
    """Steps per second; None while there are too few records."""


def running_attempts(ledger: Ledger) -> dict[int, Attempt]:
    """Return the attempts that have not ended, by trial."""
    rows = ledger.db.execute(
        "SELECT trial, attempt, started, ended, outcome, reason FROM attempts WHERE ended IS NULL"
    )
    return {row["trial"]: Attempt(*row) for row in rows}


def last_attempt(ledger: Ledger, trial: int) -> int | None:
    """Return the number of a trial's last attempt, None if it has none."""
    query = "SELECT max(attempt) FROM attempts WHERE trial = ?"
    number: int | None = ledger.db.execute(query, (trial,)).fetchone()[0]
    return number


def pace(ledger: Ledger, trial: int, started: float) -> Pace:
    """Return a trial's progress, and its speed over its last records since `started` (seconds since 1970),
    the start of the attempt."""
    # One index lookup for each name: a trial's records are ordered by name, then step.
    query = (
        "SELECT name, (SELECT max(step) FROM records WHERE trial = ? AND records.name = names.name) AS step"
        " FROM names"
    )
    rows = ledger.db.execute(query, (trial,))
    name, step = max(rows, key=lambda row: -1 if row["step"] is None else row["step"], default=(0, None))
    if step is None:
        return Pace()
    query = (
        "SELECT step, time FROM records WHERE trial = ? AND name = ? AND time >= ? ORDER BY step DESC LIMIT ?"
    )
    recent = [tuple(row) for row in ledger.db.execute(query, (trial, name, started, _PACE_RECORDS))]
    if not recent:
        return Pace(step)
    (last, moment), (first, earlier) = recent[0], recent[-1]
    return Pace(step, moment, (last - first) / (moment - earlier) if moment > earlier else None)


def record_count(ledger: Ledger) -> int:
    count: int = ledger.db.execute("SELECT count(*) FROM records").fetchone()[0]
    return count


def unshipped_records(ledger: Ledger, shown: Callable[[str], bool]) -> int:
    """Return the number of records that the runs of wanted members in MLflow lack. `shown` returns True for
    the name of a metric that MLflow is sent."""
    names = [number for number, text in ledger.names().items() if shown(text)]
    members = ledger.db.execute("SELECT trial, shipped FROM members WHERE wanted AND NOT closed").fetchall()
    query = "SELECT count(*) FROM records WHERE trial = ? AND name = ? AND step > ?"
    return sum(
        ledger.db.execute(query, (trial, name, shipped)).fetchone()[0]
        for trial, shipped in members
        for name in names
    )
