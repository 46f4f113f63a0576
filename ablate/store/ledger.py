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

`Ledger` adds arms and members; its base classes have the other subjects, one file each: the open file and its
transactions (ledger_file), queries for arms and members (ledger_arms), records (ledger_records), trials and
attempts (ledger_trials), what MLflow has been sent (ledger_shipping). Rows come back as frozen objects
(ledger_rows). Not here: the tables (ledger_schema), digests against damage (ledger_seals, ledger_integrity),
statistics.
"""

import json
from collections.abc import Mapping

from ablate.experiment.roles import Role
from ablate.store.ledger_records import RecordQueries
from ablate.store.ledger_rows import member_key
from ablate.store.ledger_shipping import ShippingState
from ablate.store.ledger_trials import TrialStates

_LAST = 1_000_000_000
"""Place behind all arms of a sweep."""


class Ledger(RecordQueries, TrialStates, ShippingState):
    """Ledger of one sweep. `readonly` opens it for a projection or a report, in a thread or process of its
    own."""

    def unwant(self) -> None:
        """Mark all arms and members as not wanted, until they are added again. Their runs are kept. Arms
        whose runs were not started here stay, behind all others."""
        self.db.execute(f"UPDATE arms SET place = CASE role WHEN 'foreign' THEN {_LAST} + arm END")
        own = "arm IN (SELECT arm FROM arms WHERE role != 'foreign')"
        self.db.execute(f"UPDATE members SET wanted = 0 WHERE {own}")

    def withdraw(self, arm: int) -> None:
        """Mark the members of one arm as not wanted."""
        self.db.execute("UPDATE members SET wanted = 0 WHERE arm = ?", (arm,))

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
        place = self.db.execute("SELECT count(place) FROM arms").fetchone()[0]
        values = {
            "knobs": json.dumps(knobs),
            "baseline": baseline,
            "optuna": optuna,
            "role": role,
            "repeats": repeats,
            "reason": reason,
        }
        with self.atomic():
            self._redraw("arms.name = ? AND arms.baseline IS NOT ?", name, baseline)
            self.db.execute(
                f"INSERT INTO arms (name, place, {', '.join(values)}) VALUES (?, ?{', ?' * len(values)})"
                " ON CONFLICT (name) DO UPDATE SET place = coalesce(place, excluded.place), "
                + ", ".join(f"{column} = excluded.{column}" for column in values),
                (name, place, *values.values()),
            )
            query = "SELECT arm FROM arms WHERE name = ?"
            number: int = self.db.execute(query, (name,)).fetchone()["arm"]
        return number

    def add_member(self, arm: int, seed: int, trial_id: str, spec: str) -> int:
        """Record that an arm at a seed is the trial with this id (the hash of `spec`, its resolved spec as
        JSON), and return the trial's number. A member whose spec has changed refers to the new trial from
        then on."""
        with self.atomic():
            self.db.execute("INSERT OR IGNORE INTO trials (id, spec) VALUES (?, ?)", (trial_id, spec))
            query = "SELECT trial FROM trials WHERE id = ?"
            trial: int = self.db.execute(query, (trial_id,)).fetchone()["trial"]
            query = "SELECT 1 FROM members WHERE arm = ? AND seed = ? AND trial != ?"
            if self.db.execute(query, (arm, seed, trial)).fetchone():
                self._redraw(
                    "seed = ?2 AND members.arm IN (SELECT arm FROM arms WHERE arm = ?1 OR baseline = ?1)",
                    arm,
                    seed,
                )
            self.db.execute(
                "INSERT INTO members (arm, seed, trial) VALUES (?1, ?2, ?3)"
                " ON CONFLICT (arm, seed) DO UPDATE SET trial = ?3, wanted = 1",
                (arm, seed, trial),
            )
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
