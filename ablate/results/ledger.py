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
marked as not wanted. Not here: the tables (ledger_schema), digests against damage (ledger_seals,
ledger_integrity), statistics.
"""

import json
import math
import sqlite3
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ablate.experiment.roles import Role
from ablate.results import databases, ledger_schema, ledger_seals
from ablate.results.ledger_records import WANTED, RecordQueries
from ablate.results.ledger_rows import FINISHED, Trial, key_of
from ablate.results.ledger_shipping import ShippingState

DATA = "data:"
"""Prefix of the key of a fact that describes, as JSON, the data with a fingerprint."""

_DISCARDED = "mlflow_discarded"
"""Key of a fact: MLflow runs to remove, as a JSON list of [trial's id, milliseconds, member's key or ""].

Only runs that began before that moment are removed.
"""


class Ledger(RecordQueries, ShippingState):
    """Ledger of one sweep. `readonly` opens it for a projection or a report, in a thread or process of its
    own."""

    def __init__(self, path: Path, readonly: bool = False, mounts: str | None = None) -> None:
        """Open the ledger; create the file unless `readonly`.

        Args:
            path: File of the ledger.
            readonly: True to open it for reading only.
            mounts: Text of a mounts table, which decides the journal mode; default: this machine's.
        """
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
        """The table of arms, with all columns: an earlier version's ledger that is only read keeps its
        own."""
        self._replaced: list[tuple[str, str]] = []
        """Trials and members whose runs in MLflow are to be removed, until the transaction ends."""
        self._names = {row["text"]: row["name"] for row in self.db.execute("SELECT * FROM names")}

    @property
    def name(self) -> str:
        """Name of the sweep: that of its folder."""
        return self.path.absolute().parent.name

    def close(self) -> None:
        """Close the file. The ledger is complete at every moment before."""
        self.db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the writes within the block as one transaction: all or none are stored."""
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
        """Return a new transaction, or a null context within an open one."""
        return nullcontext() if self.db.in_transaction else self.transaction()

    # The sweep

    def describe(self, **facts: str) -> None:
        """Set facts about the sweep."""
        with self._atomic():
            self.db.executemany("INSERT OR REPLACE INTO sweep VALUES (?, ?)", facts.items())

    def fact(self, key: str) -> str | None:
        """Return a fact about the sweep, None if it was never set."""
        row = self.db.execute("SELECT value FROM sweep WHERE key = ?", (key,)).fetchone()
        return row and row["value"]

    def identity(self) -> str:
        """Return the ledger's unique id: 32 hexadecimal digits, drawn once. Ledgers of the same name differ
        in it."""
        if self.fact("id") is None:
            self.describe(id=uuid.uuid4().hex)
        return self.fact("id")

    # Arms and members

    def unwant(self) -> None:
        """Mark all arms and members as not wanted, until they are added again. Their runs are kept."""
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
        """Add a wanted arm behind those that are wanted already, and return its number.

        Args:
            name: Unique name of the arm.
            knobs: Its settings.
            baseline: Number of the arm that it is compared with, None for a baseline.
            optuna: Its number in the study, None if it is not part of one.
            role: Its role in the sweep.
            repeats: Number of the arm whose trials it shares, if a search proposed the same point again. Such
                a point is not an arm of its own.
            reason: Reason why a refused arm cannot be run.
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
        """Record that `arm` at `seed` is the trial with this id, and return the trial's number.

        A member whose spec has changed refers to the new trial from then on.
        """
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
            (
                "INSERT INTO members (arm, seed, trial) VALUES (?1, ?2, ?3) ON CONFLICT (arm, seed) DO UPDATE"
                " SET trial = ?3, wanted = 1"
            ),
            (arm, seed, trial),
        )
        return trial

    def _redraw(self, which: str, *words: Any) -> None:
        """Have MLflow's runs of these members replaced: they show another trial, or another gap, than the
        present one."""
        query = (
            "SELECT members.arm, seed, trials.id FROM members JOIN trials USING (trial) JOIN arms USING"
            f" (arm) WHERE {which}"
        )
        rows = self.db.execute(query, words).fetchall()
        if rows and self.fact("mlflow_parent"):
            self._replaced += [(row["id"], key_of(row)) for row in rows]
        members = [(row["arm"], row["seed"]) for row in rows]
        self.db.executemany(
            "UPDATE members SET mlflow = NULL, shipped = -1, closed = 0 WHERE arm = ? AND seed = ?", members
        )

    def move_arm(self, arm: int, place: int) -> None:
        """Set an arm's position in the order of wanted arms."""
        self.db.execute("UPDATE arms SET place = ? WHERE arm = ?", (place, arm))

    def arms(self) -> list[sqlite3.Row]:
        """Return the wanted arms, in order, without points that repeat an arm."""
        wanted = "place IS NOT NULL AND repeats IS NULL"
        return self.db.execute(f"SELECT * FROM {self._arms} WHERE {wanted} ORDER BY place").fetchall()

    def points(self) -> list[sqlite3.Row]:
        """Return the wanted points of the study, in its order, including those that repeat an arm."""
        wanted = "place IS NOT NULL AND optuna IS NOT NULL"
        return self.db.execute(f"SELECT * FROM {self._arms} WHERE {wanted} ORDER BY optuna").fetchall()

    def point(self, arm: int) -> sqlite3.Row:
        """Return one arm, or one point that repeats an arm, by its number."""
        return self.db.execute(f"SELECT * FROM {self._arms} WHERE arm = ?", (arm,)).fetchone()

    def proposed(self) -> int:
        """Return the number of points that a search has proposed, including those that cannot be run."""
        return self.db.execute(
            "SELECT count(*) FROM arms WHERE place IS NOT NULL AND optuna IS NOT NULL"
        ).fetchone()[0]

    def arm(self, name: str) -> int | None:
        """Return the number of a wanted arm, None if there is none of this name."""
        row = self.db.execute("SELECT arm FROM arms WHERE name = ? AND place IS NOT NULL", (name,)).fetchone()
        return row and row["arm"]

    def members(self, arm: int | None = None) -> list[sqlite3.Row]:
        """Return the wanted members by arm and seed, of all arms or of one.

        Each row has the name and knobs of its arm and the id and status of its trial.
        """
        return self.db.execute(
            "SELECT members.*, arms.name, arms.knobs, arms.optuna, arms.baseline, arms.role, trials.id,"
            " trials.status, trials.reason,"
            f" trials.spec, trials.reused FROM members JOIN {self._arms} AS arms USING (arm) JOIN trials"
            " USING (trial)"
            f" WHERE wanted AND place IS NOT NULL {'' if arm is None else 'AND arm = :arm'} ORDER BY place,"
            " seed",
            {"arm": arm},
        ).fetchall()

    def arms_of(self, trial: int) -> list[int]:
        """Return the numbers of the study's arms that want a trial, and of the points that repeat them."""
        query = (
            "SELECT arm FROM members JOIN arms USING (arm) WHERE trial = ?1 AND wanted AND optuna IS NOT NULL"
            " UNION SELECT arms.arm FROM members JOIN arms ON arms.repeats = members.arm"
            " WHERE trial = ?1 AND wanted AND place IS NOT NULL"
        )
        return [row["arm"] for row in self.db.execute(query, (trial,))]

    def own_trials(self, arm: int) -> set[int]:
        """Return the trials that only this arm wants."""
        query = (
            "SELECT trial FROM members WHERE arm = ?1 AND wanted AND trial NOT IN (SELECT trial FROM members"
            " WHERE arm != ?1 AND wanted)"
        )
        return {row["trial"] for row in self.db.execute(query, (arm,))}

    def studied_seeds(self) -> list[int]:
        """Return every seed on which an arm of the study was ever run, including arms that are no longer
        wanted."""
        return [
            row["seed"]
            for row in self.db.execute(
                "SELECT DISTINCT seed FROM members JOIN arms USING (arm) WHERE optuna IS NOT NULL"
            )
        ]

    def counterparts(self, arm: int, seed: int) -> list[sqlite3.Row]:
        """Return the members at a seed that a member is compared with.

        These are its arm's baseline, or, for a member of a baseline, all members that are compared with it.
        """
        return self.db.execute(
            "SELECT members.*, arms.name, arms.baseline, trials.id, trials.status"
            " FROM members JOIN arms USING (arm) JOIN trials USING (trial) WHERE wanted AND place IS NOT"
            " NULL AND seed = ?2"
            " AND (arms.baseline = ?1 OR members.arm = (SELECT baseline FROM arms WHERE arm = ?1))",
            (arm, seed),
        ).fetchall()

    def compared_with(self, trial: int) -> list[int]:
        """Return the numbers of the study's arms whose baseline wants a trial."""
        query = (
            "SELECT DISTINCT arms.arm FROM members JOIN arms ON arms.baseline = members.arm"
            " WHERE trial = ? AND wanted AND arms.optuna IS NOT NULL"
        )
        return [row["arm"] for row in self.db.execute(query, (trial,))]

    def wanted_trials(self) -> list[Trial]:
        """Return every trial that is wanted, once."""
        rows = self.db.execute(f"SELECT * FROM trials WHERE trial IN ({WANTED}) ORDER BY trial")
        return [Trial.of(row) for row in rows]

    def unfinished(self) -> bool:
        """Return True while the sweep has trials to run, or may still want more of them."""
        if self.fact("ended") not in (None, "done"):
            return True
        over = ", ".join(f"'{status}'" for status in (*FINISHED, "pruned"))
        query = f"SELECT EXISTS (SELECT 1 FROM trials WHERE trial IN ({WANTED}) AND status NOT IN ({over}))"
        return bool(self.db.execute(query).fetchone()[0])

    # Trials and attempts

    def start_attempt(self, trial: int, attempt: int, now: float) -> None:
        """Record that an attempt starts, under the number that the trial store gave it."""
        self.db.execute(
            "INSERT OR REPLACE INTO attempts (trial, attempt, started) VALUES (?, ?, ?)",
            (trial, attempt, now),
        )
        self.db.execute("UPDATE trials SET status = 'running' WHERE trial = ?", (trial,))

    def end_attempt(
        self, trial: int, attempt: int, now: float, outcome: str, reason: str | None = None
    ) -> None:
        """Record how an attempt ended: done, diverged, failed, interrupted."""
        self.db.execute(
            "UPDATE attempts SET ended = ?, outcome = ?, reason = ? WHERE trial = ? AND attempt = ?",
            (now, outcome, reason, trial, attempt),
        )

    def trial(self, trial: int) -> Trial:
        """Return a trial's row."""
        return Trial.of(self.db.execute("SELECT * FROM trials WHERE trial = ?", (trial,)).fetchone())

    def status(self, trial: int) -> str:
        """Return a trial's status: pending, running, done, diverged or failed."""
        return self.db.execute("SELECT status FROM trials WHERE trial = ?", (trial,)).fetchone()["status"]

    def attempts_since(self, trial: int, moment: float) -> int:
        """Return the number of attempts of a trial that started at or after a moment (seconds since 1970)."""
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
            (
                "UPDATE trials SET status = ?, reason = ?, seconds = coalesce(?, seconds), reused = ? WHERE"
                " trial = ?"
            ),
            (status, reason, seconds, reused, trial),
        )
        if status not in FINISHED:
            self.db.execute("UPDATE members SET closed = 0 WHERE trial = ?", (trial,))

    def requeue(self, now: float) -> int:
        """Make trials pending again that failed, were stopped, or whose controller died; return their
        number."""
        self.db.execute("UPDATE attempts SET ended = ?, outcome = 'orphaned' WHERE ended IS NULL", (now,))
        again = "SELECT trial FROM trials WHERE status IN ('running', 'failed', 'oom', 'stopped')"
        self.db.execute(f"UPDATE members SET closed = 0 WHERE trial IN ({again})")
        return self.db.execute(
            f"UPDATE trials SET status = 'pending', reason = NULL WHERE trial IN ({again})"
        ).rowcount

    def forget(self, trial: int) -> None:
        """Delete a trial's records and attempts, so that it is run again from the start."""
        with self._atomic():
            self._drop_records(trial)
            self.db.execute("DELETE FROM attempts WHERE trial = ?", (trial,))
            self.db.execute(
                (
                    "UPDATE trials SET status = 'pending', reason = NULL, seconds = NULL, reused = 0 WHERE"
                    " trial = ?"
                ),
                (trial,),
            )

    def renew(self, trial: int, events: Iterable[Mapping[str, Any]]) -> None:
        """Replace all records of a trial by these events."""
        with self._atomic():
            self._drop_records(trial)
            self.record(trial, events)

    def _drop_records(self, trial: int) -> None:
        """Delete a trial's records, and have the MLflow runs removed that show them.

        New records have other times, so MLflow would show them beside the old ones. Files that were made from
        this ledger's records before belong to an earlier edition.
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
        """Record that MLflow's present runs of these trials are to be removed.

        Args:
            runs: Trial's id and member's key; the key "" stands for all members of the trial.
        """
        now = int(time.time() * 1000)
        self.describe(
            **{_DISCARDED: json.dumps([*self.discarded(), *((trial, now, member) for trial, member in runs)])}
        )

    def discarded(self, gone: Collection[tuple[str, int, str]] = ()) -> list[tuple[str, int, str]]:
        """Return the runs that `discard` recorded, without those in `gone`.

        Each is a trial's id, the moment (milliseconds) before which the runs began, and a member's key.
        """
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
        """Add events of a trial. Existing records stay, so recording twice is recording once.

        Args:
            trial: Number of the trial.
            events: Mappings with `step`, `time` (seconds since 1970), `metrics`, and optionally `events`:
                texts on interventions at this step.
        """
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
        """Store the digest of all records of a trial. Any later record of the trial removes it."""
        ledger_seals.seal_records(self.db, trial, digest)

    def records_seal(self, trial: int) -> str | None:
        """Return the digest that a trial's records had when it last ended.

        None while the trial runs, or if an earlier version wrote the records.
        """
        return ledger_seals.records_seal(self.db, trial)

    def _name(self, text: str) -> int:
        if text not in self._names:
            self._names[text] = self.db.execute("INSERT INTO names (text) VALUES (?)", (text,)).lastrowid
        return self._names[text]

    # Files that were compared

    def files_seen(self, trial_id: str, signature: str | None = None) -> str | None:
        """Return the signature that a trial's files had when they were last compared with its result.

        `signature`: a new one to store.
        """
        if signature is not None:
            self.db.execute("INSERT OR REPLACE INTO compared VALUES (?, ?)", (trial_id, signature))
            return signature
        row = self.db.execute("SELECT signature FROM compared WHERE id = ?", (trial_id,)).fetchone()
        return row and row["signature"]
