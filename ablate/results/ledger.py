"""The one truth of a sweep: arms, their members, trials, attempts and records. SQLite; only the controller writes it.

Optuna and MLflow are pictures of it that can be dropped and rebuilt; the ledger itself can be rebuilt from the trial folders.
"""

import json
import math
import sqlite3
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ablate.experiment.roles import Role
from ablate.results import databases, ledger_schema, ledger_seals
from ablate.results.ledger_rows import FINISHED, Trial, key_of
from ablate.training.metric_names import Name, parse

DATA = "data:"
"""How the key of a fact begins that says, as JSON, what the data of this fingerprint are."""

_DISCARDED = "mlflow_discarded"
"""Fact: [trial's id, milliseconds, member's key or ""] as a JSON list: runs of MLflow that began before then are to be removed."""
_WANTED = "SELECT DISTINCT trial FROM members WHERE wanted"


class Ledger:
    """One sweep's ledger. `readonly` opens it for a projector or a report, on a thread or in a process of its own."""

    def __init__(self, path: Path, readonly: bool = False, mounts: str | None = None) -> None:
        """`mounts`: the text of a mounts table, which decides the journal mode; default: this machine's."""
        self.path = path
        if readonly:
            self.db = databases.open_readonly(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.db = sqlite3.connect(path, isolation_level=None, timeout=60)
            databases.set_journal(self.db, path, mounts)
            ledger_schema.create(self.db)
        self.db.row_factory = sqlite3.Row
        missing = ledger_schema.missing_columns(self.db)
        unknown = ", ".join(f"NULL AS {column}" for column in missing)
        self._arms = f"(SELECT *, {unknown} FROM arms)" if missing else "arms"
        """The table of arms, with all columns: an earlier version's ledger that is only read keeps its own."""
        self._replaced: list[tuple[str, str]] = []
        """Trials and members whose runs in MLflow are to be removed, until the transaction ends."""
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
            if self._replaced:
                self.discard(self._replaced)
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        finally:
            self._replaced = []
        self.db.execute("COMMIT")

    def _atomic(self) -> Any:
        """A transaction, or the one that is open already."""
        return nullcontext() if self.db.in_transaction else self.transaction()

    # The sweep

    def describe(self, **facts: str) -> None:
        """Set facts about the sweep."""
        with self._atomic():
            self.db.executemany("INSERT OR REPLACE INTO sweep VALUES (?, ?)", facts.items())

    def fact(self, key: str) -> str | None:
        """A fact about the sweep, None where it was never set."""
        row = self.db.execute("SELECT value FROM sweep WHERE key = ?", (key,)).fetchone()
        return row and row["value"]

    def identity(self) -> str:
        """What tells this ledger from every other of the same name: 32 hex digits, drawn once."""
        if self.fact("id") is None:
            self.describe(id=uuid.uuid4().hex)
        return self.fact("id")

    # Arms and members

    def unwant(self) -> None:
        """Nothing is wanted any more, until it is added again. What was run stays, and is found again."""
        self.db.execute("UPDATE arms SET place = NULL")
        self.db.execute("UPDATE members SET wanted = 0")

    def add_arm(
        self,
        name: str,
        knobs: Mapping[str, Any],
        baseline: int | None,
        optuna: int | None,
        role: Role | None = None,
        repeats: int | None = None,
        reason: str | None = None,
    ) -> int:
        """Want an arm, behind those wanted already; returns its number.

        `optuna` is its point in the study, None for none. `repeats` is the arm that has the trials of a point proposed
        again, which is no arm of its own; `reason` says why a refused one cannot be run.
        """
        place = self.db.execute("SELECT count(place) FROM arms").fetchone()[0]
        given = {"knobs": json.dumps(knobs), "baseline": baseline, "optuna": optuna}
        given |= {"role": role, "repeats": repeats, "reason": reason}
        with self._atomic():
            self._redraw("arms.name = ? AND arms.baseline IS NOT ?", name, baseline)
            return self._add_arm(name, place, given)

    def _add_arm(self, name: str, place: int, given: Mapping[str, Any]) -> int:
        self.db.execute(
            f"INSERT INTO arms (name, place, {', '.join(given)}) VALUES (?, ?{', ?' * len(given)})"
            " ON CONFLICT (name) DO UPDATE SET place = coalesce(place, excluded.place), "
            + ", ".join(f"{column} = excluded.{column}" for column in given),
            (name, place, *given.values()),
        )
        return self.db.execute("SELECT arm FROM arms WHERE name = ?", (name,)).fetchone()["arm"]

    def add_member(self, arm: int, seed: int, trial_id: str, spec: str) -> int:
        """Say that `arm` at `seed` is the trial with this id; returns the trial's number. An arm whose spec changed moves on."""
        with self._atomic():
            return self._add_member(arm, seed, trial_id, spec)

    def _add_member(self, arm: int, seed: int, trial_id: str, spec: str) -> int:
        self.db.execute("INSERT OR IGNORE INTO trials (id, spec) VALUES (?, ?)", (trial_id, spec))
        trial = self.db.execute("SELECT trial FROM trials WHERE id = ?", (trial_id,)).fetchone()["trial"]
        if self.db.execute(
            "SELECT 1 FROM members WHERE arm = ? AND seed = ? AND trial != ?", (arm, seed, trial)
        ).fetchone():
            self._redraw(
                "seed = ?2 AND members.arm IN (SELECT arm FROM arms WHERE arm = ?1 OR baseline = ?1)",
                arm,
                seed,
            )
        self.db.execute(
            "INSERT INTO members (arm, seed, trial) VALUES (?1, ?2, ?3) ON CONFLICT (arm, seed) DO UPDATE SET trial = ?3, wanted = 1",
            (arm, seed, trial),
        )
        return trial

    def _redraw(self, which: str, *words: Any) -> None:
        """Have MLflow's runs of members removed and made anew: they show another trial, or a gap to another one, than is meant now."""
        query = f"SELECT members.arm, seed, trials.id FROM members JOIN trials USING (trial) JOIN arms USING (arm) WHERE {which}"
        rows = self.db.execute(query, words).fetchall()
        if rows and self.fact("mlflow_parent"):
            self._replaced += [(row["id"], key_of(row)) for row in rows]
        members = [(row["arm"], row["seed"]) for row in rows]
        self.db.executemany(
            "UPDATE members SET mlflow = NULL, shipped = -1, closed = 0 WHERE arm = ? AND seed = ?", members
        )

    def move_arm(self, arm: int, place: int) -> None:
        """Put an arm at this place in the order of those that are wanted."""
        self.db.execute("UPDATE arms SET place = ? WHERE arm = ?", (place, arm))

    def arms(self) -> list[sqlite3.Row]:
        """The arms that are wanted, in order. Points that repeat an arm are none."""
        wanted = "place IS NOT NULL AND repeats IS NULL"
        return self.db.execute(f"SELECT * FROM {self._arms} WHERE {wanted} ORDER BY place").fetchall()

    def points(self) -> list[sqlite3.Row]:
        """The points of the study that are wanted, in its order, those too that repeat an arm."""
        wanted = "place IS NOT NULL AND optuna IS NOT NULL"
        return self.db.execute(f"SELECT * FROM {self._arms} WHERE {wanted} ORDER BY optuna").fetchall()

    def point(self, arm: int) -> sqlite3.Row:
        """One arm, or one point that repeats an arm, by its number."""
        return self.db.execute(f"SELECT * FROM {self._arms} WHERE arm = ?", (arm,)).fetchone()

    def proposed(self) -> int:
        """Points that a search has proposed, those too that cannot be run."""
        return self.db.execute(
            "SELECT count(*) FROM arms WHERE place IS NOT NULL AND optuna IS NOT NULL"
        ).fetchone()[0]

    def arm(self, name: str) -> int | None:
        """The number of a wanted arm, None where there is none of this name."""
        row = self.db.execute("SELECT arm FROM arms WHERE name = ? AND place IS NOT NULL", (name,)).fetchone()
        return row and row["arm"]

    def members(self, arm: int | None = None) -> list[sqlite3.Row]:
        """The members that are wanted, with their arm's name and knobs and their trial's id and status, by arm and seed; or one arm's."""
        return self.db.execute(
            "SELECT members.*, arms.name, arms.knobs, arms.optuna, arms.baseline, arms.role, trials.id, trials.status, trials.reason,"
            f" trials.spec, trials.reused FROM members JOIN {self._arms} AS arms USING (arm) JOIN trials USING (trial)"
            f" WHERE wanted AND place IS NOT NULL {'' if arm is None else 'AND arm = :arm'} ORDER BY place, seed",
            {"arm": arm},
        ).fetchall()

    def arms_of(self, trial: int) -> list[int]:
        """The numbers of the arms that want a trial and are points of the study, and of points that repeat them."""
        query = (
            "SELECT arm FROM members JOIN arms USING (arm) WHERE trial = ?1 AND wanted AND optuna IS NOT NULL"
            " UNION SELECT arms.arm FROM members JOIN arms ON arms.repeats = members.arm"
            " WHERE trial = ?1 AND wanted AND place IS NOT NULL"
        )
        return [row["arm"] for row in self.db.execute(query, (trial,))]

    def own_trials(self, arm: int) -> set[int]:
        """The trials that this arm wants and no other."""
        query = "SELECT trial FROM members WHERE arm = ?1 AND wanted AND trial NOT IN (SELECT trial FROM members WHERE arm != ?1 AND wanted)"
        return {row["trial"] for row in self.db.execute(query, (arm,))}

    def studied_seeds(self) -> list[int]:
        """Every seed that an arm of the study was ever run on, wanted now or not."""
        return [
            row["seed"]
            for row in self.db.execute(
                "SELECT DISTINCT seed FROM members JOIN arms USING (arm) WHERE optuna IS NOT NULL"
            )
        ]

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

    def wanted_trials(self) -> list[Trial]:
        """Return every trial that is wanted, once."""
        rows = self.db.execute(f"SELECT * FROM trials WHERE trial IN ({_WANTED}) ORDER BY trial")
        return [Trial.of(row) for row in rows]

    def unfinished(self) -> bool:
        """Return True while the sweep has trials to run, or may still want more of them."""
        if self.fact("ended") not in (None, "done"):
            return True
        over = ", ".join(f"'{status}'" for status in (*FINISHED, "pruned"))
        query = f"SELECT EXISTS (SELECT 1 FROM trials WHERE trial IN ({_WANTED}) AND status NOT IN ({over}))"
        return bool(self.db.execute(query).fetchone()[0])

    # Trials and attempts

    def start_attempt(self, trial: int, attempt: int, now: float) -> None:
        """An attempt begins, under the number that the store gave it."""
        self.db.execute(
            "INSERT OR REPLACE INTO attempts (trial, attempt, started) VALUES (?, ?, ?)",
            (trial, attempt, now),
        )
        self.db.execute("UPDATE trials SET status = 'running' WHERE trial = ?", (trial,))

    def end_attempt(
        self, trial: int, attempt: int, now: float, outcome: str, reason: str | None = None
    ) -> None:
        """How an attempt ended: done, diverged, failed, interrupted."""
        self.db.execute(
            "UPDATE attempts SET ended = ?, outcome = ?, reason = ? WHERE trial = ? AND attempt = ?",
            (now, outcome, reason, trial, attempt),
        )

    def trial(self, trial: int) -> Trial:
        """Return a trial's row."""
        return Trial.of(self.db.execute("SELECT * FROM trials WHERE trial = ?", (trial,)).fetchone())

    def status(self, trial: int) -> str:
        """A trial's status: pending, running, done, diverged or failed."""
        return self.db.execute("SELECT status FROM trials WHERE trial = ?", (trial,)).fetchone()["status"]

    def attempts_since(self, trial: int, moment: float) -> int:
        """How many attempts of a trial began after a moment."""
        return self.db.execute(
            "SELECT count(*) FROM attempts WHERE trial = ? AND started >= ?", (trial, moment)
        ).fetchone()[0]

    def settle(
        self,
        trial: int,
        status: str,
        reason: str | None = None,
        seconds: float | None = None,
        reused: bool = False,
    ) -> None:
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
        return self.db.execute(
            f"UPDATE trials SET status = 'pending', reason = NULL WHERE trial IN ({again})"
        ).rowcount

    def forget(self, trial: int) -> None:
        """A trial's records and attempts go: it is run afresh."""
        with self._atomic():
            self._drop_records(trial)
            self.db.execute("DELETE FROM attempts WHERE trial = ?", (trial,))
            self.db.execute(
                "UPDATE trials SET status = 'pending', reason = NULL, seconds = NULL, reused = 0 WHERE trial = ?",
                (trial,),
            )

    def renew(self, trial: int, events: Iterable[Mapping[str, Any]]) -> None:
        """Put these events in place of all that is recorded of a trial."""
        with self._atomic():
            self._drop_records(trial)
            self.record(trial, events)

    def _drop_records(self, trial: int) -> None:
        """A trial's records go, and the runs in MLflow that show them: the next ones have other times, and would stand beside them.

        What was read of this ledger before is of another edition.
        """
        self.db.execute("INSERT OR REPLACE INTO sweep VALUES ('edition', lower(hex(randomblob(16))))")
        ledger_seals.seal_records(self.db, trial, None)
        for table in ("records", "events"):
            self.db.execute(f"DELETE FROM {table} WHERE trial = ?", (trial,))
        self.discard([(self.trial(trial).id, "")])
        self.db.execute(
            "UPDATE members SET mlflow = NULL, shipped = -1, closed = 0 WHERE trial = ?", (trial,)
        )

    def discard(self, runs: Iterable[tuple[str, str]]) -> None:
        """Note that MLflow's present runs of these trials are to be removed: those of one member by its key, or of all by ""."""
        now = int(time.time() * 1000)
        self.describe(
            **{_DISCARDED: json.dumps([*self.discarded(), *((trial, now, member) for trial, member in runs)])}
        )

    def discarded(self, gone: Collection[tuple[str, int, str]] = ()) -> list[tuple[str, int, str]]:
        """Return what `discard` noted: trial, moment (milliseconds) before which the runs began, member's key; less those in `gone`."""
        noted = [
            (trial, moment, *(member or [""]))
            for trial, moment, *member in json.loads(self.fact(_DISCARDED) or "[]")
        ]
        if gone and {*gone} & {*noted}:
            noted = [one for one in noted if one not in gone]
            self.describe(**{_DISCARDED: json.dumps(noted)})
        return noted

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
        with self._atomic():
            ledger_seals.seal_records(self.db, trial, None)
            self.db.executemany("INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?, ?)", rows)
            self.db.executemany("INSERT OR IGNORE INTO events VALUES (?, ?, ?)", told)

    def seal_records(self, trial: int, digest: str) -> None:
        """Keep the digest of all that is recorded of a trial, which any further record of it removes."""
        ledger_seals.seal_records(self.db, trial, digest)

    def records_seal(self, trial: int) -> str | None:
        """Return the digest that a trial's records had when it last ended; None while it runs, or if an earlier version wrote them."""
        return ledger_seals.records_seal(self.db, trial)

    def _name(self, text: str) -> int:
        if text not in self._names:
            self._names[text] = self.db.execute("INSERT INTO names (text) VALUES (?)", (text,)).lastrowid
        return self._names[text]

    def events(self) -> list[sqlite3.Row]:
        """What was done in the course of runs, in words, by arm, seed and step: arm, seed, step, text."""
        if not ledger_schema.has_table(self.db, "events"):
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
        names = {number: text for number, text in self.names().items() if parse(text).layer is None}
        inside = f"trial = ? AND name IN ({','.join(map(str, names))})"
        query = f"SELECT name, value, max(step) FROM records WHERE {inside} GROUP BY name"
        rows = self.db.execute(query, (trial,))
        return {names[number]: math.nan if value is None else value for number, value, _ in rows}

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
        return {
            step: math.nan if value is None else value
            for step, value in self.db.execute(query, (trial, name))
        }

    def names(self) -> dict[int, str]:
        """The metrics' names by number."""
        return {row["name"]: row["text"] for row in self.db.execute("SELECT * FROM names ORDER BY name")}

    def recorded(self, trial: int | None = None) -> bool:
        """Return True where there is any record, or any of this trial."""
        which = "" if trial is None else "WHERE trial = :trial"
        return bool(
            self.db.execute(f"SELECT EXISTS (SELECT 1 FROM records {which})", {"trial": trial}).fetchone()[0]
        )

    def finals(self, wanted: Callable[[Name], bool]) -> dict[int, dict[str, float]]:
        """Return the last values of every wanted trial, of the metrics whose name is `wanted`; no per-layer series."""
        parsed = ((number, text, parse(text)) for number, text in self.names().items())
        names = [(number, text) for number, text, name in parsed if name.layer is None and wanted(name)]
        found: dict[int, dict[str, float]] = {trial: {} for (trial,) in self.db.execute(_WANTED)}
        last = f"SELECT trial, value, max(step) FROM records WHERE trial IN ({_WANTED}) AND name = ? GROUP BY trial"
        for name, text in names:
            for trial, value, _ in self.db.execute(last, (name,)):
                found[trial][text] = math.nan if value is None else value
        return found

    def rates(self, metric: str) -> dict[int, float]:
        """The rate over all steps of each wanted trial that recorded one, the sum of its steps over the sum of their times.

        A record's rate is that of the steps since the record before, so one of ten steps counts ten times one of a single step.
        """
        found = self.db.execute(
            "WITH intervals AS (SELECT trial, value, step - lag(step, 1, 0) OVER (PARTITION BY trial ORDER BY step) AS steps"
            f" FROM records JOIN names USING (name) WHERE trial IN ({_WANTED}) AND text = ?)"
            " SELECT trial, sum(steps) / sum(steps / value) FROM intervals WHERE value > 0 AND steps > 0 GROUP BY trial",
            (metric,),
        )
        return {trial: value for trial, value in found if value is not None}

    def largest(self, metric: str) -> dict[int, float]:
        """The largest value of a metric among all records of each wanted trial that has any."""
        records = f"FROM records JOIN names USING (name) WHERE trial IN ({_WANTED}) AND text = ?"
        found = self.db.execute(f"SELECT trial, max(value) {records} GROUP BY trial", (metric,))
        return {trial: value for trial, value in found if value is not None}

    def spent(self) -> tuple[float, int]:
        """Seconds that the wanted trials took a worker, whoever ran them, and how many of them an earlier sweep had run."""
        query = f"SELECT coalesce(sum(seconds), 0), coalesce(sum(reused), 0) FROM trials WHERE trial IN ({_WANTED})"
        return tuple(self.db.execute(query).fetchone())

    # Files that were compared

    def files_seen(self, trial_id: str, signature: str | None = None) -> str | None:
        """The signature of a trial's files when their content was last compared with its result; set where one is given."""
        if signature is not None:
            self.db.execute("INSERT OR REPLACE INTO compared VALUES (?, ?)", (trial_id, signature))
            return signature
        row = self.db.execute("SELECT signature FROM compared WHERE id = ?", (trial_id,)).fetchone()
        return row and row["signature"]

    # Projections

    def shipped(self, arm: int, seed: int, run: str, step: int, closed: bool) -> None:
        """The member's MLflow run has everything up to `step`, and all there will be where it is closed."""
        self.db.execute(
            "UPDATE members SET mlflow = ?, shipped = ?, closed = ? WHERE arm = ? AND seed = ?",
            (run, step, closed, arm, seed),
        )

    def unshipped(self) -> int:
        """Members whose MLflow run is not complete."""
        return self.db.execute("SELECT count(*) FROM members WHERE wanted AND NOT closed").fetchone()[0]

    def mlflow_runs(self) -> set[str]:
        """The MLflow runs that are known to be members'."""
        return {
            row["mlflow"] for row in self.db.execute("SELECT mlflow FROM members WHERE mlflow IS NOT NULL")
        }

    def forget_mlflow(self) -> None:
        """Whatever was shipped is gone, or went elsewhere: everything is to be shipped again."""
        self.db.execute("UPDATE members SET mlflow = NULL, shipped = -1, closed = 0")
        self.db.execute("DELETE FROM sweep WHERE key = 'mlflow_parent'")
