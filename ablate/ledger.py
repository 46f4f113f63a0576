"""The one truth of a sweep: arms, their members, trials, attempts and records. SQLite; only the controller writes it.

Optuna and MLflow are pictures of it that can be dropped and rebuilt; the ledger itself can be rebuilt from the trial folders.
"""

import json
import math
import sqlite3
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

FINISHED = ("done", "diverged")
"""Statuses of a trial that need never run again."""

OVER = (*FINISHED, "failed", "oom", "pruned", "stopped")
"""Statuses of a trial that does not run any more, for now."""

DATA = "data:"
"""How the key of a fact begins that says, as JSON, what the data of this fingerprint are."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sweep (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS arms (
    arm INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, knobs TEXT NOT NULL, baseline INTEGER REFERENCES arms, optuna INTEGER,
    place INTEGER);
CREATE TABLE IF NOT EXISTS trials (
    trial INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, spec TEXT NOT NULL, status TEXT NOT NULL DEFAULT 'pending',
    reason TEXT, seconds REAL, reused INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS members (
    arm INTEGER REFERENCES arms, seed INTEGER, trial INTEGER NOT NULL REFERENCES trials, mlflow TEXT,
    shipped INTEGER NOT NULL DEFAULT -1,
    closed INTEGER NOT NULL DEFAULT 0, wanted INTEGER NOT NULL DEFAULT 1, PRIMARY KEY (arm, seed)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS members_of_a_trial ON members (trial);
CREATE TABLE IF NOT EXISTS attempts (
    trial INTEGER REFERENCES trials, attempt INTEGER, started REAL, ended REAL, outcome TEXT, reason TEXT,
    PRIMARY KEY (trial, attempt)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS names (name INTEGER PRIMARY KEY, text TEXT UNIQUE NOT NULL);
CREATE TABLE IF NOT EXISTS records (
    trial INTEGER, name INTEGER, step INTEGER, value REAL, time REAL, PRIMARY KEY (trial, name, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (trial INTEGER, step INTEGER, text TEXT, PRIMARY KEY (trial, step, text)) WITHOUT ROWID;
"""
_WANTED = "SELECT DISTINCT trial FROM members WHERE wanted"


class Ledger:
    """One sweep's ledger. `readonly` opens it for a projector or a report, on a thread or in a process of its own."""

    def __init__(self, path: Path, readonly: bool = False) -> None:
        self.path = path
        if readonly:
            self.db = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, isolation_level=None, timeout=60)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.db = sqlite3.connect(path, isolation_level=None, timeout=60)
            self.db.execute("PRAGMA journal_mode = WAL")
            self.db.execute("PRAGMA synchronous = NORMAL")
            self.db.executescript(_SCHEMA)
        self.db.row_factory = sqlite3.Row
        self._names = {row["text"]: row["name"] for row in self.db.execute("SELECT * FROM names")}

    @property
    def name(self) -> str:
        """The sweep's: its folder's."""
        return self.path.absolute().parent.name

    def close(self) -> None:
        """Close the file; the ledger is complete at every moment before."""
        self.db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is written within, or nothing of it; and many writes at the price of one."""
        self.db.execute("BEGIN")
        try:
            yield
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        self.db.execute("COMMIT")

    # The sweep

    def describe(self, **facts: str) -> None:
        """Set facts about the sweep."""
        self.db.executemany("INSERT OR REPLACE INTO sweep VALUES (?, ?)", facts.items())

    def fact(self, key: str) -> str | None:
        """A fact about the sweep, None where it was never set."""
        row = self.db.execute("SELECT value FROM sweep WHERE key = ?", (key,)).fetchone()
        return row and row["value"]

    def identity(self) -> str:
        """What tells this ledger from every other of the same name: 32 hex digits, drawn once."""
        self.db.execute("INSERT OR IGNORE INTO sweep VALUES ('id', ?)", (uuid.uuid4().hex,))
        return self.fact("id")

    # Arms and members

    def unwant(self) -> None:
        """Nothing is wanted any more, until it is added again. What was run stays, and is found again."""
        self.db.execute("UPDATE arms SET place = NULL")
        self.db.execute("UPDATE members SET wanted = 0")

    def add_arm(self, name: str, knobs: Mapping[str, Any], baseline: int | None, optuna: int | None) -> int:
        """Want an arm, behind those wanted already; returns its number. `optuna` is its point in the study, None for none."""
        place = self.db.execute("SELECT count(place) FROM arms").fetchone()[0]
        self.db.execute(
            "INSERT INTO arms (name, knobs, baseline, optuna, place) VALUES (?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET"
            " knobs = excluded.knobs, baseline = excluded.baseline, optuna = excluded.optuna, place = coalesce(place, excluded.place)",
            (name, json.dumps(knobs), baseline, optuna, place),
        )
        return self.db.execute("SELECT arm FROM arms WHERE name = ?", (name,)).fetchone()["arm"]

    def add_member(self, arm: int, seed: int, trial_id: str, spec: str) -> int:
        """Say that `arm` at `seed` is the trial with this id; returns the trial's number. An arm whose spec changed moves on."""
        self.db.execute("INSERT OR IGNORE INTO trials (id, spec) VALUES (?, ?)", (trial_id, spec))
        trial = self.db.execute("SELECT trial FROM trials WHERE id = ?", (trial_id,)).fetchone()["trial"]
        self.db.execute(
            "INSERT INTO members (arm, seed, trial) VALUES (?1, ?2, ?3) ON CONFLICT (arm, seed) DO UPDATE"
            " SET mlflow = iif(trial = ?3, mlflow, NULL), shipped = iif(trial = ?3, shipped, -1),"
            " closed = iif(trial = ?3, closed, 0), trial = ?3, wanted = 1",
            (arm, seed, trial),
        )
        return trial

    def arms(self) -> list[sqlite3.Row]:
        """The arms that are wanted, in order."""
        return self.db.execute("SELECT * FROM arms WHERE place IS NOT NULL ORDER BY place").fetchall()

    def arm(self, name: str) -> int | None:
        """The number of a wanted arm, None where there is none of this name."""
        row = self.db.execute("SELECT arm FROM arms WHERE name = ? AND place IS NOT NULL", (name,)).fetchone()
        return row and row["arm"]

    def members(self, arm: int | None = None) -> list[sqlite3.Row]:
        """The members that are wanted, with their arm's name and knobs and their trial's id and status, by arm and seed; or one arm's."""
        return self.db.execute(
            "SELECT members.*, arms.name, arms.knobs, arms.optuna, arms.baseline, trials.id, trials.status, trials.reason,"
            " trials.spec, trials.reused FROM members JOIN arms USING (arm) JOIN trials USING (trial)"
            f" WHERE wanted AND place IS NOT NULL {'' if arm is None else 'AND arm = :arm'} ORDER BY place, seed",
            {"arm": arm},
        ).fetchall()

    def arms_of(self, trial: int) -> list[int]:
        """The numbers of the arms that want a trial and are points of the study."""
        query = "SELECT DISTINCT arm FROM members JOIN arms USING (arm) WHERE trial = ? AND wanted AND optuna IS NOT NULL"
        return [row["arm"] for row in self.db.execute(query, (trial,))]

    def own_trials(self, arm: int) -> set[int]:
        """The trials that this arm wants and no other."""
        query = (
            "SELECT trial FROM members WHERE arm = ?1 AND wanted AND trial NOT IN (SELECT trial FROM members WHERE arm != ?1 AND wanted)"
        )
        return {row["trial"] for row in self.db.execute(query, (arm,))}

    def studied_seeds(self) -> list[int]:
        """Every seed that an arm of the study was ever run on, wanted now or not."""
        return [row["seed"] for row in self.db.execute("SELECT DISTINCT seed FROM members JOIN arms USING (arm) WHERE optuna IS NOT NULL")]

    def to_ship(self) -> list[sqlite3.Row]:
        """The wanted members whose MLflow run is there or due and not complete: as `members`, and as few as are under way."""
        return self.db.execute(
            "SELECT members.*, arms.name, arms.knobs, arms.optuna, arms.baseline, base.name AS against, trials.id, trials.status,"
            " trials.spec, trials.reused, trials.seconds FROM members JOIN arms USING (arm) JOIN trials USING (trial)"
            " LEFT JOIN arms AS base ON base.arm = arms.baseline"
            " WHERE wanted AND arms.place IS NOT NULL AND NOT closed AND (status != 'pending' OR mlflow IS NOT NULL"
            " OR EXISTS (SELECT 1 FROM records WHERE records.trial = members.trial)) ORDER BY arms.place, seed"
        ).fetchall()

    def counterparts(self, arm: int, seed: int) -> list[sqlite3.Row]:
        """What a member is compared with, at its seed: its arm's baseline, or where it is of a baseline all that are compared with that."""
        return self.db.execute(
            "SELECT members.*, arms.name, arms.baseline, trials.id, trials.status"
            " FROM members JOIN arms USING (arm) JOIN trials USING (trial) WHERE wanted AND place IS NOT NULL AND seed = ?2"
            " AND (arms.baseline = ?1 OR members.arm = (SELECT baseline FROM arms WHERE arm = ?1))",
            (arm, seed),
        ).fetchall()

    def compared_with(self, trial: int) -> list[int]:
        """The numbers of the arms of the study whose baseline wants a trial."""
        query = (
            "SELECT DISTINCT arms.arm FROM members JOIN arms ON arms.baseline = members.arm"
            " WHERE trial = ? AND wanted AND arms.optuna IS NOT NULL"
        )
        return [row["arm"] for row in self.db.execute(query, (trial,))]

    def wanted_trials(self) -> list[sqlite3.Row]:
        """Every trial that is wanted, once."""
        return self.db.execute(f"SELECT * FROM trials WHERE trial IN ({_WANTED}) ORDER BY trial").fetchall()

    # Trials and attempts

    def start_attempt(self, trial: int, attempt: int, now: float) -> None:
        """An attempt begins, under the number that the store gave it."""
        self.db.execute("INSERT OR REPLACE INTO attempts (trial, attempt, started) VALUES (?, ?, ?)", (trial, attempt, now))
        self.db.execute("UPDATE trials SET status = 'running' WHERE trial = ?", (trial,))

    def end_attempt(self, trial: int, attempt: int, now: float, outcome: str, reason: str | None = None) -> None:
        """How an attempt ended: done, diverged, failed, interrupted."""
        self.db.execute(
            "UPDATE attempts SET ended = ?, outcome = ?, reason = ? WHERE trial = ? AND attempt = ?",
            (now, outcome, reason, trial, attempt),
        )

    def status(self, trial: int) -> str:
        """A trial's status: pending, running, done, diverged or failed."""
        return self.db.execute("SELECT status FROM trials WHERE trial = ?", (trial,)).fetchone()["status"]

    def attempts_since(self, trial: int, moment: float) -> int:
        """How many attempts of a trial began after a moment."""
        return self.db.execute("SELECT count(*) FROM attempts WHERE trial = ? AND started >= ?", (trial, moment)).fetchone()[0]

    def settle(self, trial: int, status: str, reason: str | None = None, seconds: float | None = None, reused: bool = False) -> None:
        """Set a trial's status."""
        self.db.execute(
            "UPDATE trials SET status = ?, reason = ?, seconds = coalesce(?, seconds), reused = ? WHERE trial = ?",
            (status, reason, seconds, reused, trial),
        )
        if status not in FINISHED:
            self.db.execute("UPDATE members SET closed = 0 WHERE trial = ?", (trial,))

    def requeue(self, now: float) -> int:
        """Trials that failed, were stopped, or were left running by a controller that is no more, become pending again; how many."""
        self.db.execute("UPDATE attempts SET ended = ?, outcome = 'orphaned' WHERE ended IS NULL", (now,))
        again = "SELECT trial FROM trials WHERE status IN ('running', 'failed', 'oom', 'stopped')"
        self.db.execute(f"UPDATE members SET closed = 0 WHERE trial IN ({again})")
        return self.db.execute(f"UPDATE trials SET status = 'pending', reason = NULL WHERE trial IN ({again})").rowcount

    def forget(self, trial: int) -> None:
        """A trial's records and attempts go: it is run afresh."""
        self.db.execute("INSERT INTO sweep VALUES ('forgotten', '1') ON CONFLICT (key) DO UPDATE SET value = value + 1")
        for table in ("records", "attempts"):
            self.db.execute(f"DELETE FROM {table} WHERE trial = ?", (trial,))
        self.db.execute("UPDATE trials SET status = 'pending', reason = NULL, seconds = NULL, reused = 0 WHERE trial = ?", (trial,))
        self.db.execute("UPDATE members SET mlflow = NULL, shipped = -1, closed = 0 WHERE trial = ?", (trial,))

    # Records

    def record(self, trial: int, events: Iterable[Mapping[str, Any]]) -> None:
        """Add events ({step, time, metrics, perhaps events: what was done, in words}) of a trial. What is there already stays: recording
        twice is recording once."""
        events = list(events)
        told = [(trial, event["step"], text) for event in events for text in event.get("events", ())]
        rows = [
            (trial, self._name(name), event["step"], None if math.isnan(value) else value, event["time"])
            for event in events
            for name, value in event["metrics"].items()
        ]
        with nullcontext() if self.db.in_transaction else self.transaction():
            self.db.executemany("INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?, ?)", rows)
            self.db.executemany("INSERT OR IGNORE INTO events VALUES (?, ?, ?)", told)

    def _name(self, text: str) -> int:
        if text not in self._names:
            self._names[text] = self.db.execute("INSERT INTO names (text) VALUES (?)", (text,)).lastrowid
        return self._names[text]

    def events(self) -> list[sqlite3.Row]:
        """What was done in the course of runs, in words, by arm, seed and step: arm, seed, step, text."""
        if not self.db.execute("SELECT 1 FROM sqlite_master WHERE name = 'events'").fetchone():  # read only, and of an earlier version
            return []
        query = "SELECT arms.name AS arm, seed, step, text FROM events JOIN members USING (trial) JOIN arms USING (arm)"
        return self.db.execute(f"{query} WHERE wanted ORDER BY arm, seed, step").fetchall()

    def records(self, trial: int, after: int = -1) -> Iterator[tuple[int, str, float, float]]:
        """(step, metric, value, time) of a trial's records after step `after`, by step. A NaN was stored as NULL."""
        rows = self.db.execute(
            "SELECT step, text, value, time FROM records JOIN names USING (name) WHERE trial = ? AND step > ? ORDER BY step",
            (trial, after),
        )
        for step, name, value, moment in rows:
            yield step, name, math.nan if value is None else value, moment

    def last_values(self, trial: int) -> dict[str, float]:
        """The last value of every metric of a trial, per-layer series left out."""
        rows = self.db.execute(
            "SELECT text, value, max(step) FROM records JOIN names USING (name) WHERE trial = ? AND text NOT LIKE 'quant/%/%/%'"
            " GROUP BY name",
            (trial,),
        )
        return {name: math.nan if value is None else value for name, value, _ in rows}

    def last_value(self, trial: int, name: str) -> float:
        """The last value of one metric of a trial, NaN where there is none."""
        found = self.last_record(trial, name)
        return found[1] if found else math.nan

    def last_record(self, trial: int, name: str) -> tuple[int, float, float] | None:
        """(step, value, time) of a trial's last record of one metric."""
        query = "SELECT step, value, time FROM records JOIN names USING (name) WHERE trial = ? AND text = ? ORDER BY step DESC LIMIT 1"
        row = self.db.execute(query, (trial, name)).fetchone()
        return row and (row["step"], math.nan if row["value"] is None else row["value"], row["time"])

    def series(self, trial: int, name: str) -> dict[int, float]:
        """One metric of a trial by step."""
        query = "SELECT step, value FROM records JOIN names USING (name) WHERE trial = ? AND text = ? ORDER BY step"
        return {step: math.nan if value is None else value for step, value in self.db.execute(query, (trial, name))}

    def names(self) -> dict[int, str]:
        """The metrics' names by number."""
        return {row["name"]: row["text"] for row in self.db.execute("SELECT * FROM names ORDER BY name")}

    def recorded(self) -> bool:
        """Whether there is any record."""
        return bool(self.db.execute("SELECT EXISTS (SELECT 1 FROM records)").fetchone()[0])

    def finals(self, *patterns: str) -> dict[int, dict[str, float]]:
        """What `last_values` says, of every wanted trial at once and only of metrics whose name is like one of these (SQL's GLOB)."""
        like = " OR ".join("text GLOB ?" for _ in patterns)
        names = self.db.execute(f"SELECT name, text FROM names WHERE text NOT LIKE 'quant/%/%/%' AND ({like})", patterns).fetchall()
        found: dict[int, dict[str, float]] = {trial: {} for (trial,) in self.db.execute(_WANTED)}
        last = f"SELECT trial, value, max(step) FROM records WHERE trial IN ({_WANTED}) AND name = ? GROUP BY trial"
        for name, text in names:
            for trial, value, _ in self.db.execute(last, (name,)):
                found[trial][text] = math.nan if value is None else value
        return found

    def averages(self, metric: str) -> dict[int, float]:
        """The mean of a metric over all records of each wanted trial that has any."""
        return self._over_records("avg", metric)

    def largest(self, metric: str) -> dict[int, float]:
        """The largest value of a metric among all records of each wanted trial that has any."""
        return self._over_records("max", metric)

    def _over_records(self, function: Literal["avg", "max"], metric: str) -> dict[int, float]:
        records = f"FROM records JOIN names USING (name) WHERE trial IN ({_WANTED}) AND text = ?"
        found = self.db.execute(f"SELECT trial, {function}(value) {records} GROUP BY trial", (metric,))
        return {trial: value for trial, value in found if value is not None}

    def spent(self) -> tuple[float, int]:
        """Seconds that the wanted trials took a worker, whoever ran them, and how many of them an earlier sweep had run."""
        query = f"SELECT coalesce(sum(seconds), 0), coalesce(sum(reused), 0) FROM trials WHERE trial IN ({_WANTED})"
        return tuple(self.db.execute(query).fetchone())

    # Projections

    def shipped(self, arm: int, seed: int, run: str, step: int, closed: bool) -> None:
        """The member's MLflow run has everything up to `step`, and all there will be where it is closed."""
        self.db.execute("UPDATE members SET mlflow = ?, shipped = ?, closed = ? WHERE arm = ? AND seed = ?", (run, step, closed, arm, seed))

    def unshipped(self) -> int:
        """Members whose MLflow run is not complete."""
        return self.db.execute("SELECT count(*) FROM members WHERE wanted AND NOT closed").fetchone()[0]

    def mlflow_runs(self) -> set[str]:
        """The MLflow runs that are known to be members'."""
        return {row["mlflow"] for row in self.db.execute("SELECT mlflow FROM members WHERE mlflow IS NOT NULL")}

    def forget_mlflow(self) -> None:
        """Whatever was shipped is gone, or went elsewhere: everything is to be shipped again."""
        self.db.execute("UPDATE members SET mlflow = NULL, shipped = -1, closed = 0")
        self.db.execute("DELETE FROM sweep WHERE key = 'mlflow_parent'")
