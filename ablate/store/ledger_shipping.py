"""State of the projection to MLflow: members' runs there, and the step up to which each is complete."""

from ablate.store.ledger_arms import ArmQueries
from ablate.store.ledger_rows import Member


class ShippingState(ArmQueries):
    """Part of `Ledger` on what MLflow has been sent. It has no seals: `ablate rebuild --sync --force`
    sends everything again."""

    def to_ship(self) -> list[Member]:
        """Return the wanted members whose MLflow run exists or is due, and is not complete."""
        return self._select_members(
            "AND NOT closed AND (status != 'pending' OR mlflow IS NOT NULL OR EXISTS (SELECT 1 FROM records"
            " WHERE records.trial = members.trial))"
        )

    def shipped(self, arm: int, seed: int, run: str, step: int, closed: bool) -> None:
        """Record a member's MLflow run, the step up to which it has all records, and True if it is
        complete."""
        self.db.execute(
            "UPDATE members SET mlflow = ?, shipped = ?, closed = ? WHERE arm = ? AND seed = ?",
            (run, step, closed, arm, seed),
        )

    def unshipped(self) -> int:
        """Return the number of members whose MLflow run is not complete."""
        query = "SELECT count(*) FROM members WHERE wanted AND NOT closed"
        count: int = self.db.execute(query).fetchone()[0]
        return count

    def mlflow_runs(self) -> set[str]:
        """Return the ids of all MLflow runs of members."""
        return {run for (run,) in self.db.execute("SELECT mlflow FROM members WHERE mlflow IS NOT NULL")}

    def forget_mlflow(self) -> None:
        """Mark everything as not sent to MLflow, after its database was lost or another server was chosen."""
        self.db.execute("UPDATE members SET mlflow = NULL, shipped = -1, closed = 0")
        self.db.execute("DELETE FROM sweep WHERE key = 'mlflow_parent'")
