"""The ledger: the single source of truth of one sweep, in one SQLite file that only the controller writes.

The problem: a sweep's state must survive killed processes. Optuna and MLflow each keep part of it, can lose
it, and disagree after a crash. So they are projections here: both can be deleted and rebuilt from the ledger,
and neither is asked what has been done. The ledger itself can be rebuilt from the trial folders.

An *arm* is one setting of the knobs; a *member* is an arm at a seed; its *trial* is the run with that spec,
shared by all members with the same spec; an *attempt* is one try at a trial; a *record* is one value of a
metric at a step.

    arm = ledger.add_arm("rht=true", {"rht": True}, baseline=1, optuna=None)
    trial = ledger.add_member(arm, seed=0, trial_id="9f3c...", spec="{...}")
    ledger.record(trial, [{"step": 10, "time": 1.7e9, "metrics": {"val/loss": 3.2}}])

Writing a record twice stores it once. Arms and members that an edited experiment no longer has are kept,
marked as not wanted.

Rows come back as frozen objects (ledger_rows). Not here: the tables (ledger_file), digests against damage
(ledger_seals), statistics.
"""

import json
import math
from collections.abc import Iterable, Mapping

from ablate.experiment.roles import Role
from ablate.store.ledger_records import WANTED, RecordQueries
from ablate.store.ledger_rows import (
    ARM_COLUMNS,
    FINISHED,
    MEMBER_COLUMNS,
    TRIAL_COLUMNS,
    ArmRow,
    Member,
    TrialRow,
    member_key,
)
from ablate.store.ledger_seals import RECORDS
from ablate.store.trial_store import Event

_LAST = 1_000_000_000
"""Place behind all arms of a sweep."""


class Ledger(RecordQueries):
    """Ledger of one sweep. `readonly` opens it for a projection or a report, in a thread or process of its
    own. Trials are given by their numbers in this ledger; moments are seconds since 1970."""

    # Arms and members, written

    def unwant(self) -> None:
        """Mark all arms and members as not wanted, until they are added again. Their runs are kept. Arms
        whose runs were not started here stay, behind all others."""
        self.db.execute(f"UPDATE arms SET place = CASE role WHEN 'foreign' THEN {_LAST} + arm END")
        own = "arm IN (SELECT arm FROM arms WHERE role != 'foreign')"
        self.db.execute(f"UPDATE members SET wanted = 0 WHERE {own}")

    def withdraw(self, arm: int) -> None:
        """Mark the members of one arm as not wanted."""
        self.write("UPDATE members SET wanted = 0 WHERE arm = ?", arm)

    def add_arm(
        self,
        name: str,
        knobs: Mapping[str, object],
        baseline: int | None,
        optuna: int | None,
        role: Role = "listed",
        repeats: int | None = None,
        reason: str | None = None,
    ) -> int:
        """Add a wanted arm behind those that are wanted already, and return its number. The arm keeps its
        place if its name is wanted already.

        `baseline` is the number of the arm that it is compared with, None for a baseline; `optuna` its number
        in the study, None if it is not part of one; `repeats` the number of the arm whose trials it shares,
        if a search proposed the same point again (such a point is not an arm of its own); `reason` why a
        refused arm cannot be run.
        """
        place = self.cell("SELECT count(place) FROM arms")
        names = ("knobs", "baseline", "optuna", "role", "repeats", "reason")
        values = json.dumps(knobs), baseline, optuna, role, repeats, reason
        replaced = ", ".join(f"{column} = excluded.{column}" for column in names)
        with self.atomic():
            self._redraw("arms.name = ? AND arms.baseline IS NOT ?", name, baseline)
            sql = (
                f"INSERT INTO arms (name, place, {', '.join(names)}) VALUES (?, ?{', ?' * len(names)})"
                f" ON CONFLICT (name) DO UPDATE SET place = coalesce(place, excluded.place), {replaced}"
            )
            self.query(sql, name, place, *values)
            return self.cell("SELECT arm FROM arms WHERE name = ?", name)

    def add_member(self, arm: int, seed: int, trial_id: str, spec: str) -> int:
        """Record that an arm at a seed is the trial with this id (the hash of `spec`, its resolved spec as
        JSON), and return the trial's number. A member whose spec has changed refers to the new trial from
        then on."""
        with self.atomic():
            self.query("INSERT OR IGNORE INTO trials (id, spec) VALUES (?, ?)", trial_id, spec)
            trial: int = self.cell("SELECT trial FROM trials WHERE id = ?", trial_id)
            if self.cell("SELECT 1 FROM members WHERE arm = ? AND seed = ? AND trial != ?", arm, seed, trial):
                sql = "seed = ?2 AND members.arm IN (SELECT arm FROM arms WHERE arm = ?1 OR baseline = ?1)"
                self._redraw(sql, arm, seed)
            sql = (
                "INSERT INTO members (arm, seed, trial) VALUES (?1, ?2, ?3)"
                " ON CONFLICT (arm, seed) DO UPDATE SET trial = ?3, wanted = 1"
            )
            self.query(sql, arm, seed, trial)
        return trial

    def _redraw(self, condition: str, *values: str | int | None) -> None:
        """Have the MLflow runs of these members replaced: they show another trial, or another gap, than the
        present one. `condition` is in SQL, on members, arms and trials, with parameters `values`."""
        query = (
            "SELECT members.arm, seed, trials.id FROM members JOIN trials USING (trial)"
            f" JOIN arms USING (arm) WHERE {condition}"
        )
        rows = self.db.execute(query, values).fetchall()
        if rows and self.facts.mlflow_parent:
            self._replaced += [(trial, member_key(arm, seed)) for arm, seed, trial in rows]
        self.db.executemany(
            "UPDATE members SET mlflow = NULL, shipped = -1, closed = 0 WHERE arm = ? AND seed = ?",
            [(arm, seed) for arm, seed, _ in rows],
        )

    # Arms and members that the present experiment has

    def arms(self) -> list[ArmRow]:
        """Return the wanted arms, in order, without points that repeat an arm."""
        return self._select_arms("place IS NOT NULL AND repeats IS NULL ORDER BY place")

    def points(self) -> list[ArmRow]:
        """Return the wanted points of the study, in its order, including those that repeat an arm."""
        return self._select_arms("place IS NOT NULL AND optuna IS NOT NULL ORDER BY optuna")

    def point(self, arm: int) -> ArmRow:
        """Return one arm, or one point that repeats an arm, by its number."""
        (point,) = self._select_arms("arm = :arm", arm)
        return point

    def _select_arms(self, condition: str, arm: int | None = None) -> list[ArmRow]:
        query = f"SELECT {ARM_COLUMNS} FROM arms WHERE {condition}"
        return [ArmRow(*row) for row in self.db.execute(query, {"arm": arm})]

    def arm(self, name: str) -> int | None:
        """Return the number of a wanted arm, None if there is none of this name."""
        return self.cell("SELECT arm FROM arms WHERE name = ? AND place IS NOT NULL", name)

    def members(self, arm: int | None = None) -> list[Member]:
        """Return the wanted members by arm and seed, of all arms or of the arm with this number."""
        return self._select_members("" if arm is None else "AND arms.arm = :arm", arm=arm)

    def counterparts(self, arm: int, seed: int) -> list[Member]:
        """Return the members at a seed that a member is a pair with. These are its arm's baseline, or, for a
        member of a baseline, all members that are compared with it. Runs from elsewhere are compared
        unpaired: an equal seed means nothing there."""
        return self._select_members(
            "AND seed = :seed AND (arms.baseline = :arm AND arms.role != 'foreign' OR members.arm ="
            " (SELECT baseline FROM arms WHERE arm = :arm AND role != 'foreign'))",
            arm=arm,
            seed=seed,
        )

    def _select_members(self, condition: str, **values: int | None) -> list[Member]:
        """Return the wanted members that meet a condition in SQL, by arm and seed."""
        query = (
            f"SELECT {MEMBER_COLUMNS} FROM members JOIN arms AS arms USING (arm)"
            " JOIN trials USING (trial) LEFT JOIN arms AS bases ON bases.arm = arms.baseline WHERE wanted"
            f" AND arms.place IS NOT NULL {condition} ORDER BY arms.place, seed"
        )
        return [Member.of(row) for row in self.db.execute(query, values)]

    def arms_of(self, trial: int) -> list[int]:
        """Return the numbers of the study's arms that want a trial, and of the points that repeat them."""
        query = (
            "SELECT arm FROM members JOIN arms USING (arm) WHERE trial = ?1 AND wanted"
            " AND optuna IS NOT NULL UNION SELECT arms.arm FROM members JOIN arms"
            " ON arms.repeats = members.arm WHERE trial = ?1 AND wanted AND place IS NOT NULL"
        )
        return [row["arm"] for row in self.query(query, trial)]

    def own_trials(self, arm: int) -> set[int]:
        """Return the trials that only this arm wants."""
        query = (
            "SELECT trial FROM members WHERE arm = ?1 AND wanted AND trial NOT IN (SELECT trial FROM members"
            " WHERE arm != ?1 AND wanted)"
        )
        return {row["trial"] for row in self.query(query, arm)}

    def studied_seeds(self) -> list[int]:
        """Return every seed on which an arm of the study was ever run, including arms that are no longer
        wanted."""
        query = "SELECT DISTINCT seed FROM members JOIN arms USING (arm) WHERE optuna IS NOT NULL"
        return [row["seed"] for row in self.db.execute(query)]

    def compared_with(self, trial: int) -> list[int]:
        """Return the numbers of the study's arms whose baseline wants a trial."""
        query = (
            "SELECT DISTINCT arms.arm FROM members JOIN arms ON arms.baseline = members.arm WHERE trial = ?"
            " AND wanted AND arms.optuna IS NOT NULL"
        )
        return [row["arm"] for row in self.query(query, trial)]

    def wanted_trials(self) -> list[TrialRow]:
        """Return every trial that is wanted, once."""
        query = f"SELECT {TRIAL_COLUMNS} FROM trials WHERE trial IN ({WANTED}) ORDER BY trial"
        return [TrialRow.of(row) for row in self.db.execute(query)]

    def unfinished(self) -> bool:
        """Return True while the sweep has trials to run, or may still want more of them."""
        if self.facts.ended not in (None, "done"):
            return True
        over = ", ".join(f"'{status}'" for status in (*FINISHED, "pruned"))
        left = f"SELECT 1 FROM trials WHERE trial IN ({WANTED}) AND status NOT IN ({over})"
        return bool(self.cell(f"SELECT EXISTS ({left})"))

    # Trials, attempts, and the records that they add

    def start_attempt(self, trial: int, attempt: int, now: float) -> None:
        """Record that an attempt starts, under the number that the trial store gave it."""
        self.write(
            "INSERT OR REPLACE INTO attempts (trial, attempt, started) VALUES (?, ?, ?)", trial, attempt, now
        )
        self.write("UPDATE trials SET status = 'running' WHERE trial = ?", trial)

    def end_attempt(
        self, trial: int, attempt: int, now: float, outcome: str, reason: str | None = None
    ) -> None:
        """Record the end of an attempt: done, diverged, failed, interrupted, or the ending that was
        ordered."""
        sql = "UPDATE attempts SET ended = ?, outcome = ?, reason = ? WHERE trial = ? AND attempt = ?"
        self.write(sql, now, outcome, reason, trial, attempt)

    def trial(self, trial: int) -> TrialRow:
        query = f"SELECT {TRIAL_COLUMNS} FROM trials WHERE trial = ?"
        return TrialRow.of(self.query(query, trial).fetchone())

    def status(self, trial: int) -> str:
        """Return a trial's status; `settle` lists them."""
        return self.cell("SELECT status FROM trials WHERE trial = ?", trial)

    def attempts_since(self, trial: int, moment: float) -> int:
        """Return the number of attempts of a trial that started at or after a moment (seconds since 1970)."""
        return self.cell("SELECT count(*) FROM attempts WHERE trial = ? AND started >= ?", trial, moment)

    def settle(
        self,
        trial: int,
        status: str,
        reason: str | None = None,
        seconds: float | None = None,
        reused: bool = False,
    ) -> None:
        """Set a trial's status: pending, running, done, diverged, failed, oom, pruned or stopped. `seconds`
        is the time that the trial took, None keeps the present value; `reused` is True if an earlier sweep
        ran it."""
        sql = (
            "UPDATE trials SET status = ?, reason = ?, seconds = coalesce(?, seconds), reused = ?"
            " WHERE trial = ?"
        )
        self.write(sql, status, reason, seconds, reused, trial)
        if status not in FINISHED:
            self.write("UPDATE members SET closed = 0 WHERE trial = ?", trial)

    def note_context_free(self, trial: int, loss: float | None) -> None:
        """Record the validation loss of a model that ignores its input, so that no reader needs the trial's
        files. None: the workload reports none."""
        self.write("INSERT OR REPLACE INTO context_free VALUES (?, ?)", trial, loss)

    def context_free(self) -> dict[int, float | None]:
        """Return what `note_context_free` recorded, by number of the trial."""
        return dict(self.db.execute("SELECT trial, loss FROM context_free").fetchall())

    def requeue(self, now: float) -> int:
        """Make trials pending again that failed, were stopped, or whose controller died; return their
        number."""
        self.write("UPDATE attempts SET ended = ?, outcome = 'orphaned' WHERE ended IS NULL", now)
        judged = "SELECT trial FROM members JOIN arms USING (arm) WHERE role = 'foreign'"
        ended = "status IN ('running', 'failed', 'oom', 'stopped')"
        again = f"SELECT trial FROM trials WHERE {ended} AND trial NOT IN ({judged})"
        self.write(f"UPDATE members SET closed = 0 WHERE trial IN ({again})")
        return self.write(
            f"UPDATE trials SET status = 'pending', reason = NULL WHERE trial IN ({again})"
        ).rowcount

    def forget(self, trial: int) -> None:
        """Delete a trial's records and attempts, so that it is run again from the start."""
        with self.atomic():
            self._drop_records(trial)
            self.query("DELETE FROM attempts WHERE trial = ?", trial)
            sql = (
                "UPDATE trials SET status = 'pending', reason = NULL, seconds = NULL, reused = 0"
                " WHERE trial = ?"
            )
            self.query(sql, trial)

    def renew(self, trial: int, events: Iterable[Event]) -> None:
        """Replace all records of a trial by these events."""
        with self.atomic():
            self._put_in_order("records")
            self._put_in_order("events")
            self._drop_records(trial)
            self.record(trial, events)

    def _put_in_order(self, table: str) -> None:
        """Write the rows of a table again in the order of their keys, if they are in another. A flipped bit
        in a key moves no row. A search by key then misses the rows behind it, which could be neither deleted
        nor replaced. Rows of no trial are dropped."""
        if self.cell(f"PRAGMA integrity_check({table})") == "ok":
            return
        of_trials = "+trial IN (SELECT trial FROM trials)"  # with +, not a search by key
        self.db.execute(f"CREATE TEMP TABLE kept AS SELECT * FROM {table} WHERE {of_trials}")
        self.db.execute(f"DELETE FROM {table}")
        self.db.execute(f"INSERT OR IGNORE INTO {table} SELECT * FROM kept ORDER BY 1, 2, 3")
        self.db.execute("DROP TABLE kept")

    def _drop_records(self, trial: int) -> None:
        """Delete a trial's records, and have the MLflow runs removed that show them. New records have other
        times, so MLflow would show them beside the old ones. Files that were made from this ledger's records
        before belong to an earlier edition."""
        self.db.execute("INSERT OR REPLACE INTO sweep VALUES ('edition', lower(hex(randomblob(16))))")
        self.seal_records(trial, None)
        for table in ("records", "events"):
            self.query(f"DELETE FROM {table} WHERE trial = ?", trial)
        self.discard([(self.trial(trial).id, "")])
        self.query("UPDATE members SET mlflow = NULL, shipped = -1, closed = 0 WHERE trial = ?", trial)

    def record(self, trial: int, events: Iterable[Event]) -> None:
        """Add events of a trial. Existing records stay, so recording twice is recording once."""
        events = list(events)
        texts = [(trial, event["step"], text) for event in events for text in event.get("events", ())]
        rows = [
            (trial, self._name(name), event["step"], None if math.isnan(value) else value, event["time"])
            for event in events
            for name, value in event["metrics"].items()
        ]
        with self.atomic():
            self.seal_records(trial, None)
            self.db.executemany("INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?, ?)", rows)
            self.db.executemany("INSERT OR IGNORE INTO events VALUES (?, ?, ?)", texts)

    def seal_records(self, trial: int, digest: str | None) -> None:
        """Store the digest of all records of a trial. Any later record of the trial removes it, by None."""
        self.write("DELETE FROM row_seals WHERE part = ? AND key = ?", RECORDS, str(trial))
        if digest is not None:
            self.write("INSERT INTO row_seals VALUES (?, ?, ?)", RECORDS, str(trial), digest)

    def records_seal(self, trial: int) -> str | None:
        """Return the digest that a trial's records had when it last ended; None while it runs."""
        return self.cell("SELECT seal FROM row_seals WHERE part = ? AND key = ?", RECORDS, str(trial))

    def _name(self, text: str) -> int:
        """Return the number of a metric's name; a new name is added."""
        if text not in self._names:
            self._names[text] = self.query("INSERT INTO names (text) VALUES (?)", text).lastrowid
        return self._names[text]

    def files_seen(self, trial_id: str, signature: str | None = None) -> str | None:
        """Return the signature (`Store.signature`) that a trial's files had when they were last compared with
        its result, None if they never were. A new `signature` is stored, and returned."""
        if signature is not None:
            self.write("INSERT OR REPLACE INTO compared VALUES (?, ?)", trial_id, signature)
            return signature
        return self.cell("SELECT signature FROM compared WHERE id = ?", trial_id)

    # What MLflow has been sent. It has no seals: `ablate rebuild --sync --force` sends everything again

    def to_ship(self) -> list[Member]:
        """Return the wanted members whose MLflow run exists or is due, and is not complete."""
        return self._select_members(
            "AND NOT closed AND (status != 'pending' OR mlflow IS NOT NULL OR EXISTS (SELECT 1 FROM records"
            " WHERE records.trial = members.trial))"
        )

    def shipped(self, arm: int, seed: int, run: str, step: int, closed: bool) -> None:
        """Record a member's MLflow run, the step up to which it has all records, and True if it is
        complete."""
        sql = "UPDATE members SET mlflow = ?, shipped = ?, closed = ? WHERE arm = ? AND seed = ?"
        self.write(sql, run, step, closed, arm, seed)

    def unshipped(self) -> int:
        """Return the number of members whose MLflow run is not complete."""
        return self.cell("SELECT count(*) FROM members WHERE wanted AND NOT closed")

    def mlflow_runs(self) -> set[str]:
        """Return the ids of all MLflow runs of members."""
        return {run for (run,) in self.db.execute("SELECT mlflow FROM members WHERE mlflow IS NOT NULL")}

    def forget_mlflow(self) -> None:
        """Mark everything as not sent to MLflow, after its database was lost or another server was chosen."""
        self.write("UPDATE members SET mlflow = NULL, shipped = -1, closed = 0")
        self.write("DELETE FROM sweep WHERE key = 'mlflow_parent'")
