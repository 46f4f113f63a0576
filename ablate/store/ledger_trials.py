"""Trials of a ledger: their attempts, their statuses, and the records that they add."""

import math
from collections.abc import Iterable

from ablate.store.ledger_file import LedgerFile
from ablate.store.ledger_rows import FINISHED, TRIAL_COLUMNS, TrialRow
from ablate.store.ledger_seals import RECORDS
from ablate.store.trial_store import Event


class TrialStates(LedgerFile):
    """Part of `Ledger` that reads and writes trials, given by their numbers, with their attempts and records.
    Moments are seconds since 1970."""

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
        """Record the end of an attempt: done, diverged, failed, interrupted, or the ending that was
        ordered."""
        self.db.execute(
            "UPDATE attempts SET ended = ?, outcome = ?, reason = ? WHERE trial = ? AND attempt = ?",
            (now, outcome, reason, trial, attempt),
        )

    def trial(self, trial: int) -> TrialRow:
        query = f"SELECT {TRIAL_COLUMNS} FROM trials WHERE trial = ?"
        return TrialRow.of(self.db.execute(query, (trial,)).fetchone())

    def status(self, trial: int) -> str:
        """Return a trial's status; `settle` lists them."""
        row = self.db.execute("SELECT status FROM trials WHERE trial = ?", (trial,)).fetchone()
        status: str = row["status"]
        return status

    def attempts_since(self, trial: int, moment: float) -> int:
        """Return the number of attempts of a trial that started at or after a moment (seconds since 1970)."""
        query = "SELECT count(*) FROM attempts WHERE trial = ? AND started >= ?"
        count: int = self.db.execute(query, (trial, moment)).fetchone()[0]
        return count

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
        self.db.execute(
            "UPDATE trials SET status = ?, reason = ?, seconds = coalesce(?, seconds), reused = ?"
            " WHERE trial = ?",
            (status, reason, seconds, reused, trial),
        )
        if status not in FINISHED:
            self.db.execute("UPDATE members SET closed = 0 WHERE trial = ?", (trial,))

    def note_context_free(self, trial: int, loss: float | None) -> None:
        """Record the validation loss of a model that ignores its input, so that no reader needs the trial's
        files. None: the workload reports none."""
        self.db.execute("INSERT OR REPLACE INTO context_free VALUES (?, ?)", (trial, loss))

    def context_free(self) -> dict[int, float | None]:
        """Return what `note_context_free` recorded, by number of the trial."""
        return dict(self.db.execute("SELECT trial, loss FROM context_free").fetchall())

    def requeue(self, now: float) -> int:
        """Make trials pending again that failed, were stopped, or whose controller died; return their
        number."""
        self.db.execute("UPDATE attempts SET ended = ?, outcome = 'orphaned' WHERE ended IS NULL", (now,))
        judged = "SELECT trial FROM members JOIN arms USING (arm) WHERE role = 'foreign'"
        ended = "status IN ('running', 'failed', 'oom', 'stopped')"
        again = f"SELECT trial FROM trials WHERE {ended} AND trial NOT IN ({judged})"
        self.db.execute(f"UPDATE members SET closed = 0 WHERE trial IN ({again})")
        return self.db.execute(
            f"UPDATE trials SET status = 'pending', reason = NULL WHERE trial IN ({again})"
        ).rowcount

    def forget(self, trial: int) -> None:
        """Delete a trial's records and attempts, so that it is run again from the start."""
        with self.atomic():
            self._drop_records(trial)
            self.db.execute("DELETE FROM attempts WHERE trial = ?", (trial,))
            self.db.execute(
                "UPDATE trials SET status = 'pending', reason = NULL, seconds = NULL, reused = 0"
                " WHERE trial = ?",
                (trial,),
            )

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
        if self.db.execute(f"PRAGMA integrity_check({table})").fetchone()[0] == "ok":
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
            self.db.execute(f"DELETE FROM {table} WHERE trial = ?", (trial,))
        self.discard([(self.trial(trial).id, "")])
        self.db.execute(
            "UPDATE members SET mlflow = NULL, shipped = -1, closed = 0 WHERE trial = ?", (trial,)
        )

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
        self.db.execute("DELETE FROM row_seals WHERE part = ? AND key = ?", (RECORDS, str(trial)))
        if digest is not None:
            self.db.execute("INSERT INTO row_seals VALUES (?, ?, ?)", (RECORDS, str(trial), digest))

    def records_seal(self, trial: int) -> str | None:
        """Return the digest that a trial's records had when it last ended; None while it runs."""
        query = "SELECT seal FROM row_seals WHERE part = ? AND key = ?"
        row = self.db.execute(query, (RECORDS, str(trial))).fetchone()
        return row and row["seal"]

    def _name(self, text: str) -> int:
        """Return the number of a metric's name; a new name is added."""
        if text not in self._names:
            self._names[text] = self.db.execute("INSERT INTO names (text) VALUES (?)", (text,)).lastrowid
        return self._names[text]

    def files_seen(self, trial_id: str, signature: str | None = None) -> str | None:
        """Return the signature (`Store.signature`) that a trial's files had when they were last compared with
        its result, None if they never were. A new `signature` is stored, and returned."""
        if signature is not None:
            self.db.execute("INSERT OR REPLACE INTO compared VALUES (?, ?)", (trial_id, signature))
            return signature
        row = self.db.execute("SELECT signature FROM compared WHERE id = ?", (trial_id,)).fetchone()
        return row and row["signature"]
