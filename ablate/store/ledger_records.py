"""Queries on the records of a ledger: one trial's series, and one number for each of all wanted trials."""

import math
from collections.abc import Callable, Iterator

from ablate.store.ledger_file import LedgerFile
from ablate.store.ledger_rows import Intervention
from ablate.training.metric_names import Name, parse

WANTED = "SELECT DISTINCT trial FROM members WHERE wanted"
"""Query for the trials that the sweep wants."""


class RecordQueries(LedgerFile):
    """Read-only part of `Ledger`: records, and texts on interventions. A NaN is stored as NULL. Trials are
    given by their numbers in this ledger, metrics by their names; times are seconds since 1970."""

    def events(self) -> list[Intervention]:
        """Return the texts on interventions by arm, seed and step."""
        query = (
            "SELECT arms.name AS arm, seed, step, text FROM events JOIN members USING (trial)"
            " JOIN arms USING (arm)"
        )
        rows = self.db.execute(f"{query} WHERE wanted ORDER BY arm, seed, step")
        return [Intervention(*row) for row in rows]

    def records(self, trial: int, after: int = -1) -> Iterator[tuple[int, str, float, float]]:
        """Yield (step, metric, value, time) of a trial's records behind step `after`, by step."""
        rows = self.db.execute(
            "SELECT step, text, value, time FROM records JOIN names USING (name) WHERE trial = ?"
            " AND step > ? ORDER BY step",
            (trial, after),
        )
        for step, name, value, moment in rows:
            yield step, name, math.nan if value is None else value, moment

    def last_values(self, trial: int) -> dict[str, float]:
        """Return the last value of every metric of a trial, without per-layer series."""
        names = {number: text for number, text in self.names().items() if parse(text).layer is None}
        inside = f"trial = ? AND name IN ({','.join(map(str, names))})"
        query = f"SELECT name, value, max(step) FROM records WHERE {inside} GROUP BY name"
        rows = self.db.execute(query, (trial,))
        return {names[number]: math.nan if value is None else value for number, value, _ in rows}

    def last_value(self, trial: int, name: str) -> float:
        """Return the last value of one metric of a trial, NaN if there is none."""
        record = self.last_record(trial, name)
        return record[1] if record else math.nan

    def last_record(self, trial: int, name: str) -> tuple[int, float, float] | None:
        """Return step, value and time of a trial's last record of one metric; None if there is no record."""
        query = (
            "SELECT step, value, time FROM records JOIN names USING (name) WHERE trial = ? AND text = ?"
            " ORDER BY step DESC LIMIT 1"
        )
        row = self.db.execute(query, (trial, name)).fetchone()
        return row and (row["step"], math.nan if row["value"] is None else row["value"], row["time"])

    def series(self, trial: int, name: str) -> dict[int, float]:
        """Return all values of one metric of a trial, by step."""
        query = (
            "SELECT step, value FROM records JOIN names USING (name) WHERE trial = ? AND text = ?"
            " ORDER BY step"
        )
        return {
            step: math.nan if value is None else value
            for step, value in self.db.execute(query, (trial, name))
        }

    def names(self) -> dict[int, str]:
        """Return the names of the metrics, by number."""
        return {row["name"]: row["text"] for row in self.db.execute("SELECT * FROM names ORDER BY name")}

    def recorded(self, trial: int | None = None) -> bool:
        """Return True if there is any record, or any record of one trial."""
        condition = "" if trial is None else "WHERE trial = :trial"
        query = f"SELECT EXISTS (SELECT 1 FROM records {condition})"
        return bool(self.db.execute(query, {"trial": trial}).fetchone()[0])

    def spent(self) -> tuple[float, int]:
        """Return the worker-seconds that the wanted trials took, and how many of them an earlier sweep had
        run."""
        query = (
            "SELECT coalesce(sum(seconds), 0), coalesce(sum(reused), 0) FROM trials"
            f" WHERE trial IN ({WANTED})"
        )
        seconds, reused = self.db.execute(query).fetchone()
        return seconds, reused

    def finals(self, wanted: Callable[[Name], bool]) -> dict[int, dict[str, float]]:
        """Return the last values of every wanted trial, by its number and by metric, without per-layer
        series; `wanted` chooses metrics by their parsed names."""
        parsed = ((number, text, parse(text)) for number, text in self.names().items())
        names = [(number, text) for number, text, name in parsed if name.layer is None and wanted(name)]
        lasts: dict[int, dict[str, float]] = {trial: {} for (trial,) in self.db.execute(WANTED)}
        query = (
            f"SELECT trial, value, max(step) FROM records WHERE trial IN ({WANTED}) AND name = ?"
            " GROUP BY trial"
        )
        for name, text in names:
            for trial, value, _ in self.db.execute(query, (name,)):
                lasts[trial][text] = math.nan if value is None else value
        return lasts

    def rates(self, metric: str) -> dict[int, float]:
        """Return the mean rate over all steps of each wanted trial that recorded one, by the trial's number.
        It is the sum of the steps over the sum of their times. A record's rate covers the steps since the
        record before, so a record of ten steps counts ten times as much as a record of one."""
        rows = self.db.execute(
            "WITH intervals AS (SELECT trial, value, step - lag(step, 1, 0) OVER (PARTITION BY trial"
            f" ORDER BY step) AS steps FROM records JOIN names USING (name) WHERE trial IN ({WANTED})"
            " AND text = ?) SELECT trial, sum(steps) / sum(steps / value) FROM intervals WHERE value > 0"
            " AND steps > 0 GROUP BY trial",
            (metric,),
        )
        return {trial: rate for trial, rate in rows if rate is not None}

    def last_step(self, trial: int) -> int:
        """Return the step of a trial's last record; 0 without one."""
        step: int | None = self.db.execute(
            "SELECT max(step) FROM records WHERE trial = ?", (trial,)
        ).fetchone()[0]
        return step or 0

    def beyond(self, metric: str, limit: float, above: bool) -> list[tuple[str, int, int, float]]:
        """Return (arm, seed, first step, worst value) of the runs with values of a metric beyond a limit:
        above it, or below it if `above` is False. A value at the limit is within."""
        worst, sign = ("max", ">") if above else ("min", "<")
        query = (
            f"SELECT arms.name, seed, min(step), {worst}(value) FROM members JOIN arms USING (arm)"
            " JOIN records USING (trial) WHERE wanted AND records.name = (SELECT name FROM names WHERE"
            f" text = ?) AND value {sign} ? GROUP BY arm, seed"
        )
        return self.db.execute(query, (metric, limit)).fetchall()

    def largest(self, metric: str) -> dict[int, float]:
        """Return the largest value of a metric for each wanted trial that recorded it, by its number."""
        records = f"FROM records JOIN names USING (name) WHERE trial IN ({WANTED}) AND text = ?"
        rows = self.db.execute(f"SELECT trial, max(value) {records} GROUP BY trial", (metric,))
        return {trial: value for trial, value in rows if value is not None}
