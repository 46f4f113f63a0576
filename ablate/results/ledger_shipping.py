"""State of the projection to MLflow: which members' runs exist there, and up to which step they are
complete."""

import sqlite3


class ShippingState:
    """Part of `Ledger` on what MLflow has been sent. It has no seals: `ablate sync --rebuild` sends
    everything again."""

    db: sqlite3.Connection

    def to_ship(self) -> list[sqlite3.Row]:
        """Return the wanted members whose MLflow run exists or is due, and is not complete."""
        return self.db.execute(
            "SELECT members.*, arms.name, arms.knobs, arms.optuna, arms.baseline, base.name AS against,"
            " trials.id, trials.status,"
            " trials.spec, trials.reused, trials.seconds FROM members JOIN arms USING (arm) JOIN trials"
            " USING (trial)"
            " LEFT JOIN arms AS base ON base.arm = arms.baseline"
            " WHERE wanted AND arms.place IS NOT NULL AND NOT closed AND (status != 'pending' OR mlflow IS"
            " NOT NULL"
            " OR EXISTS (SELECT 1 FROM records WHERE records.trial = members.trial)) ORDER BY arms.place,"
            " seed"
        ).fetchall()

    def shipped(self, arm: int, seed: int, run: str, step: int, closed: bool) -> None:
        """Record that a member's MLflow run has everything up to `step`, and that it is complete if
        `closed`."""
        self.db.execute(
            "UPDATE members SET mlflow = ?, shipped = ?, closed = ? WHERE arm = ? AND seed = ?",
            (run, step, closed, arm, seed),
        )

    def unshipped(self) -> int:
        """Return the number of members whose MLflow run is not complete."""
        return self.db.execute("SELECT count(*) FROM members WHERE wanted AND NOT closed").fetchone()[0]

    def mlflow_runs(self) -> set[str]:
        """Return the ids of all MLflow runs of members."""
        return {
            row["mlflow"] for row in self.db.execute("SELECT mlflow FROM members WHERE mlflow IS NOT NULL")
        }

    def forget_mlflow(self) -> None:
        """Mark everything as not sent to MLflow, after its database was lost or another server was chosen."""
        self.db.execute("UPDATE members SET mlflow = NULL, shipped = -1, closed = 0")
        self.db.execute("DELETE FROM sweep WHERE key = 'mlflow_parent'")
