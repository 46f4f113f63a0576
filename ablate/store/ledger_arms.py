"""Queries on the arms and members of a ledger. Those that an edited experiment no longer has are left out."""

from ablate.store.ledger_file import LedgerFile
from ablate.store.ledger_records import WANTED
from ablate.store.ledger_rows import (
    ARM_COLUMNS,
    FINISHED,
    MEMBER_COLUMNS,
    TRIAL_COLUMNS,
    ArmRow,
    Member,
    TrialRow,
)


class ArmQueries(LedgerFile):
    """Read-only part of `Ledger`: arms, points of a search, members, and the trials that they want."""

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

    def proposed(self) -> int:
        """Return the number of points that a search has proposed, including those that cannot be run."""
        count: int = self.db.execute(
            "SELECT count(*) FROM arms WHERE place IS NOT NULL AND optuna IS NOT NULL"
        ).fetchone()[0]
        return count

    def arm(self, name: str) -> int | None:
        """Return the number of a wanted arm, None if there is none of this name."""
        row = self.db.execute("SELECT arm FROM arms WHERE name = ? AND place IS NOT NULL", (name,)).fetchone()
        return row and row["arm"]

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
        query = "SELECT DISTINCT seed FROM members JOIN arms USING (arm) WHERE optuna IS NOT NULL"
        return [row["seed"] for row in self.db.execute(query)]

    def compared_with(self, trial: int) -> list[int]:
        """Return the numbers of the study's arms whose baseline wants a trial."""
        query = (
            "SELECT DISTINCT arms.arm FROM members JOIN arms ON arms.baseline = members.arm WHERE trial = ?"
            " AND wanted AND arms.optuna IS NOT NULL"
        )
        return [row["arm"] for row in self.db.execute(query, (trial,))]

    def wanted_trials(self) -> list[TrialRow]:
        """Return every trial that is wanted, once."""
        query = f"SELECT {TRIAL_COLUMNS} FROM trials WHERE trial IN ({WANTED}) ORDER BY trial"
        return [TrialRow.of(row) for row in self.db.execute(query)]

    def unfinished(self) -> bool:
        """Return True while the sweep has trials to run, or may still want more of them."""
        if self.facts.ended not in (None, "done"):
            return True
        over = ", ".join(f"'{status}'" for status in (*FINISHED, "pruned"))
        query = f"SELECT EXISTS (SELECT 1 FROM trials WHERE trial IN ({WANTED}) AND status NOT IN ({over}))"
        return bool(self.db.execute(query).fetchone()[0])
