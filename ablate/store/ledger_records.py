"""Queries on the records of a ledger: one trial's series, one number for each of all wanted trials, what a
trial that runs has recorded so far, and digests against damage."""

import math
import sqlite3
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import groupby
from operator import itemgetter

from ablate.store.ledger_file import LedgerFile
from ablate.store.ledger_rows import Attempt, Intervention, Pace
from ablate.store.trial_store import Event, Tally
from ablate.training.metric_names import Name, parse

WANTED = "SELECT DISTINCT trial FROM members WHERE wanted"
"""Query for the trials that the sweep wants."""
_NAMED = "FROM records JOIN names USING (name)"
_PACE_RECORDS = 10
"""Number of last records that a trial's speed is computed from."""


def _number(cell: float | None) -> float:
    return math.nan if cell is None else cell


class RecordQueries(LedgerFile):
    """Read-only part of `Ledger`: records, and texts on interventions. A NaN is stored as NULL. Trials are
    given by their numbers in this ledger, metrics by their names; times are seconds since 1970."""

    def events(self) -> list[Intervention]:
        """Return the texts on interventions by arm, seed and step."""
        tables = "events JOIN members USING (trial) JOIN arms USING (arm)"
        query = (
            f"SELECT arms.name AS arm, seed, step, text FROM {tables} WHERE wanted ORDER BY arm, seed, step"
        )
        return [Intervention(*row) for row in self.db.execute(query)]

    def records(self, trial: int, after: int = -1) -> Iterator[tuple[int, str, float, float]]:
        """Yield (step, metric, value, time) of a trial's records behind step `after`, by step."""
        query = f"SELECT step, text, value, time {_NAMED} WHERE trial = ? AND step > ? ORDER BY step"
        for step, name, value, moment in self.query(query, trial, after):
            yield step, name, _number(value), moment

    def last_values(self, trial: int) -> dict[str, float]:
        """Return the last value of every metric of a trial, without per-layer series."""
        names = {number: text for number, text in self.names().items() if parse(text).layer is None}
        inside = f"trial = ? AND name IN ({','.join(map(str, names))})"
        query = f"SELECT name, value, max(step) FROM records WHERE {inside} GROUP BY name"
        rows = self.query(query, trial)
        return {names[number]: _number(value) for number, value, _ in rows}

    def last_value(self, trial: int, name: str) -> float:
        """Return the last value of one metric of a trial, NaN if there is none."""
        record = self.last_record(trial, name)
        return record[1] if record else math.nan

    def last_record(self, trial: int, name: str) -> tuple[int, float, float] | None:
        """Return step, value and time of a trial's last record of one metric; None if there is no record."""
        query = f"SELECT step, value, time {_NAMED} WHERE trial = ? AND text = ? ORDER BY step DESC LIMIT 1"
        row = self.query(query, trial, name).fetchone()
        return row and (row["step"], _number(row["value"]), row["time"])

    def series(self, trial: int, name: str) -> dict[int, float]:
        """Return all values of one metric of a trial, by step."""
        query = f"SELECT step, value {_NAMED} WHERE trial = ? AND text = ? ORDER BY step"
        return {step: _number(value) for step, value in self.query(query, trial, name)}

    def names(self) -> dict[int, str]:
        """Return the names of the metrics, by number."""
        return {row["name"]: row["text"] for row in self.db.execute("SELECT * FROM names ORDER BY name")}

    def recorded(self, trial: int | None = None) -> bool:
        """Return True if there is any record, or any record of one trial."""
        condition, values = ("", ()) if trial is None else ("WHERE trial = ?", (trial,))
        return bool(self.cell(f"SELECT EXISTS (SELECT 1 FROM records {condition})", *values))

    def raw_records(
        self, trials: Iterable[int], names: Iterable[int], null: float
    ) -> Iterator[tuple[int, int, int, float]]:
        """Yield (trial, number of the metric, step, value) of these trials and metrics, given by their
        numbers; `null` in place of NaN. No Python object is made a row, so ten million take seconds."""
        inside = [
            f"{column} IN ({','.join(map(str, numbers))})"
            for column, numbers in (("trial", trials), ("name", names))
        ]
        cursor = self.db.cursor()
        cursor.row_factory = None
        return cursor.execute(
            f"SELECT trial, name, step, ifnull(value, ?) FROM records WHERE {' AND '.join(inside)}", (null,)
        )

    def spent(self) -> tuple[float, int]:
        """Return the worker-seconds that the wanted trials took, and how many of them an earlier sweep had
        run."""
        sums = "SELECT coalesce(sum(seconds), 0), coalesce(sum(reused), 0) FROM trials"
        seconds, reused = self.db.execute(f"{sums} WHERE trial IN ({WANTED})").fetchone()
        return seconds, reused

    def finals(self, wanted: Callable[[Name], bool]) -> dict[int, dict[str, float]]:
        """Return the last values of every wanted trial, by its number and by metric, without per-layer
        series; `wanted` chooses metrics by their parsed names."""
        parsed = ((number, text, parse(text)) for number, text in self.names().items())
        names = [(number, text) for number, text, name in parsed if name.layer is None and wanted(name)]
        lasts: dict[int, dict[str, float]] = {trial: {} for (trial,) in self.db.execute(WANTED)}
        inside = f"trial IN ({WANTED}) AND name = ? GROUP BY trial"
        for name, text in names:
            rows = self.query(f"SELECT trial, value, max(step) FROM records WHERE {inside}", name)
            for trial, value, _ in rows:
                lasts[trial][text] = _number(value)
        return lasts

    def rates(self, metric: str) -> dict[int, float]:
        """Return the mean rate over all steps of each wanted trial that recorded one, by the trial's number.
        It is the sum of the steps over the sum of their times. A record's rate covers the steps since the
        record before, so a record of ten steps counts ten times as much as a record of one."""
        sql = (
            "WITH intervals AS (SELECT trial, value, step - lag(step, 1, 0) OVER (PARTITION BY trial"
            f" ORDER BY step) AS steps {_NAMED} WHERE trial IN ({WANTED})"
            " AND text = ?) SELECT trial, sum(steps) / sum(steps / value) FROM intervals WHERE value > 0"
            " AND steps > 0 GROUP BY trial"
        )
        rows = self.query(sql, metric)
        return {trial: rate for trial, rate in rows if rate is not None}

    def last_step(self, trial: int) -> int:
        """Return the step of a trial's last record; 0 without one."""
        return self.cell("SELECT max(step) FROM records WHERE trial = ?", trial) or 0

    def beyond(self, metric: str, limit: float, above: bool) -> list[tuple[str, int, int, float]]:
        """Return (arm, seed, first step, worst value) of the runs with values of a metric beyond a limit:
        above it, or below it if `above` is False. A value at the limit is within."""
        worst, sign = ("max", ">") if above else ("min", "<")
        query = (
            f"SELECT arms.name, seed, min(step), {worst}(value) FROM members JOIN arms USING (arm)"
            " JOIN records USING (trial) WHERE wanted AND records.name = (SELECT name FROM names WHERE"
            f" text = ?) AND value {sign} ? GROUP BY arm, seed"
        )
        return self.query(query, metric, limit).fetchall()

    def largest(self, metric: str) -> dict[int, float]:
        """Return the largest value of a metric for each wanted trial that recorded it, by its number."""
        records = f"{_NAMED} WHERE trial IN ({WANTED}) AND text = ?"
        rows = self.query(f"SELECT trial, max(value) {records} GROUP BY trial", metric)
        return {trial: value for trial, value in rows if value is not None}

    # Progress, for commands that look at a sweep from outside: its cost must not grow with the trials

    def running_attempts(self) -> dict[int, Attempt]:
        """Return the attempts that have not ended, by trial."""
        rows = self.db.execute("SELECT trial, attempt, started FROM attempts WHERE ended IS NULL")
        return {trial: Attempt(attempt, started) for trial, attempt, started in rows}

    def last_attempt(self, trial: int) -> int | None:
        """Return the number of a trial's last attempt, None if it has none."""
        return self.cell("SELECT max(attempt) FROM attempts WHERE trial = ?", trial)

    def pace(self, trial: int, started: float) -> Pace:
        """Return a trial's progress, and its speed over its last records since `started`, the start of the
        attempt."""
        # One index lookup for each name: a trial's records are ordered by name, then step.
        last_of_name = "SELECT max(step) FROM records WHERE trial = ? AND records.name = names.name"
        query = f"SELECT name, ({last_of_name}) AS step FROM names ORDER BY step DESC, name LIMIT 1"
        name, step = self.query(query, trial).fetchone() or (0, None)
        if step is None:
            return Pace()
        since = "FROM records WHERE trial = ? AND name = ? AND time >= ? ORDER BY step DESC LIMIT ?"
        key = trial, name, started, _PACE_RECORDS
        recent = [tuple(row) for row in self.db.execute(f"SELECT step, time {since}", key)]
        if not recent:
            return Pace(step)
        (last, moment), (first, earlier) = recent[0], recent[-1]
        return Pace(step, moment, (last - first) / (moment - earlier) if moment > earlier else None)

    def record_count(self) -> int:
        return self.cell("SELECT count(*) FROM records")

    def unshipped_records(self, shown: Callable[[str], bool]) -> int:
        """Return the number of records that the runs of wanted members in MLflow lack. `shown` returns True
        for the name of a metric that MLflow is sent."""
        names = [number for number, text in self.names().items() if shown(text)]
        members = self.db.execute("SELECT trial, shipped FROM members WHERE wanted AND NOT closed").fetchall()
        query = "SELECT count(*) FROM records WHERE trial = ? AND name = ? AND step > ?"
        return sum(self.cell(query, trial, name, shipped) for trial, shipped in members for name in names)

    # Digests of records; the callers decide what to do about a difference

    def tally(self, trial: int) -> Tally:
        """Return number and digest of a trial's records. ValueError if a cell has a value of another type
        than its column, so that the records cannot be read."""
        result, cursor = Tally(), self.db.cursor()
        cursor.row_factory = None
        names = self.names()
        # A search by key takes any row between two of the trial for one of it, so its own cell is compared.
        # BETWEEN, since of `trial = ?` SQLite puts the value in the place of the cell.
        own = "WHERE trial BETWEEN ? AND ? AND +trial = ?"
        key = (trial, trial, trial)
        rows = cursor.execute(
            f"SELECT name, step, value, time FROM records {own} ORDER BY trial, name, step", key
        )
        try:
            for name, cells in groupby(rows, key=itemgetter(0)):
                result.column(names[name], ((step, value, moment) for _, step, value, moment in cells))
        except (TypeError, KeyError, struct.error, sqlite3.OperationalError) as error:
            raise ValueError(f"a cell of its records cannot be read: {error}") from None
        try:
            result.words(cursor.execute(f"SELECT step, text FROM events {own}", key).fetchall())
        except sqlite3.OperationalError as error:
            raise ValueError(f"a cell of its events cannot be read: {error}") from None
        return result

    def digest(self, trial: int) -> str | None:
        """Return the digest of a trial's records, as a seal has it; None if one cannot be read."""
        with suppress(ValueError):
            return str(self.tally(trial).sealed()["sha256"])
        return None

    def strays(self, trial: int, events: Iterable[Event]) -> bool:
        """Return True if a record of the trial is not among these events."""
        recorded = {
            (event["step"], name): (None if math.isnan(value) else value, event["time"])
            for event in events
            for name, value in event["metrics"].items()
        }
        rows = self.query(
            "SELECT step, text, value, time FROM records LEFT JOIN names USING (name) WHERE trial = ?", trial
        )
        return any(recorded.get((step, name)) != (value, moment) for step, name, value, moment in rows)
