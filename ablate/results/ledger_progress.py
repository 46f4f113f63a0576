"""How far a ledger's trials are: attempts that run, the pace of one, records that a projection lacks.

Functions of an open ledger, as methods of `Ledger` are; each row comes back as a frozen dataclass. For
commands that look at a sweep from outside (status, the faults' checks, MLflow's lag), which must ask as
little of many trials as of few.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ablate.results.ledger import Ledger

_PACE_RECORDS = 10
"""How many of a trial's last records its speed is taken from."""


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
    """Last step that a trial recorded, when (seconds since 1970), and its steps per second; None while too
    few are recorded."""

    step: int = 0
    moment: float = 0.0
    steps_per_s: float | None = None


def running_attempts(ledger: Ledger) -> dict[int, Attempt]:
    """Return the attempts that have not ended, by trial."""
    rows = ledger.db.execute(
        "SELECT trial, attempt, started, ended, outcome, reason FROM attempts WHERE ended IS NULL"
    )
    return {row["trial"]: Attempt(*row) for row in rows}


def last_attempt(ledger: Ledger, trial: int) -> int | None:
    """Return the number of a trial's last attempt, None if it has none."""
    return ledger.db.execute("SELECT max(attempt) FROM attempts WHERE trial = ?", (trial,)).fetchone()[0]


def outcomes(ledger: Ledger) -> dict[str, int]:
    """Return the number of attempts by outcome."""
    return dict(map(tuple, ledger.db.execute("SELECT outcome, count(*) FROM attempts GROUP BY outcome")))


def pace(ledger: Ledger, trial: int, started: float) -> Pace:
    """Return how far a trial is, and its speed over its last records since `started`."""
    # One look into the index a name: a trial's records are ordered by name, then step.
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


def moments(ledger: Ledger) -> int:
    """Return the number of (trial, step) that have a record."""
    return ledger.db.execute("SELECT count(*) FROM (SELECT DISTINCT trial, step FROM records)").fetchone()[0]


def record_count(ledger: Ledger) -> int:
    """Return the number of records."""
    return ledger.db.execute("SELECT count(*) FROM records").fetchone()[0]


def unshipped_records(ledger: Ledger, shown: Callable[[str], bool]) -> int:
    """Return the number of records of metrics that are `shown` which the runs of wanted members in MLflow
    lack."""
    names = [number for number, text in ledger.names().items() if shown(text)]
    members = ledger.db.execute("SELECT trial, shipped FROM members WHERE wanted AND NOT closed").fetchall()
    query = "SELECT count(*) FROM records WHERE trial = ? AND name = ? AND step > ?"
    return sum(
        ledger.db.execute(query, (trial, name, shipped)).fetchone()[0]
        for trial, shipped in members
        for name in names
    )
