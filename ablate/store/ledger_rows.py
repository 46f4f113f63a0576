"""Rows of a ledger as frozen objects, each with one parser, and the statuses that a trial can have.

SQLite returns tuples. The order of their columns is defined here alone: each query selects `ARM_COLUMNS`,
`MEMBER_COLUMNS` or `TRIAL_COLUMNS`, which are the fields of the class in their order, and `of` parses a row.
"""

import sqlite3
from dataclasses import dataclass, fields

from ablate.experiment.recorded_spec import RecordedSpec
from ablate.experiment.roles import Role

FINISHED = ("done", "diverged")
"""Statuses of a trial that need never run again."""

OVER = (*FINISHED, "failed", "oom", "pruned", "stopped")
"""Statuses of a trial that does not run any more, for now."""


@dataclass(frozen=True)
class ArmRow:
    """A row of table `arms`: one setting of the knobs, or one point of a search that repeats an arm."""

    arm: int
    """Number of the arm in this ledger."""
    name: str
    knobs: str
    """Its settings: a JSON object."""
    baseline: int | None
    """Number of the arm that it is compared with, None for a baseline."""
    optuna: int | None
    """Its number in the study, None if it is not part of one."""
    place: int | None
    """Position among the wanted arms, None if it is not wanted."""
    role: Role
    repeats: int | None
    """Number of the arm whose trials it shares, if a search proposed the same point again."""
    reason: str | None
    """Reason why a refused arm cannot be run."""


@dataclass(frozen=True)
class Member:
    """An arm at a seed, with the trial that it refers to: tables `members`, `arms` and `trials` joined. Their
    columns have the meaning that they have in `ArmRow` and `TrialRow`."""

    arm: int
    seed: int
    trial: int
    mlflow: str | None
    """Id of its run in MLflow, None if there is none yet."""
    shipped: int
    """Last step that MLflow has been sent; -1 for none."""
    name: str
    knobs: str
    optuna: int | None
    baseline: int | None
    role: Role
    against: str | None
    """Name of the arm that its arm is compared with, None for a baseline."""
    id: str
    spec: str
    status: str
    reason: str | None
    """Reason for the status."""
    seconds: float | None
    closed: bool
    """True if its run in MLflow is complete."""
    reused: bool

    @classmethod
    def of(cls, row: sqlite3.Row) -> "Member":
        """Return the member of a row with the columns `MEMBER_COLUMNS`."""
        return cls(*row[:-2], *map(bool, row[-2:]))

    @property
    def resolved(self) -> RecordedSpec:
        """Resolved spec of its trial."""
        return RecordedSpec.parse(self.spec)

    @property
    def key(self) -> str:
        """Key by which its run in MLflow is found again."""
        return member_key(self.arm, self.seed)


@dataclass(frozen=True)
class TrialRow:
    """A row of table `trials`: one workload, one recipe, one seed, one engine, shared by all members with
    this spec."""

    trial: int
    """Number of the trial in this ledger."""
    id: str
    """Hash of the spec."""
    spec: str
    """The resolved spec: a JSON object."""
    status: str
    reason: str | None
    seconds: float | None
    """Seconds that it took; None until it ends."""
    reused: bool
    """True if an earlier sweep ran it."""

    @classmethod
    def of(cls, row: sqlite3.Row) -> "TrialRow":
        """Return the trial of a row with the columns `TRIAL_COLUMNS`."""
        return cls(*row[:-1], *map(bool, row[-1:]))

    @property
    def finished(self) -> bool:
        """True for a trial that need never run again."""
        return self.status in FINISHED


@dataclass(frozen=True)
class Intervention:
    """A text on what a guard did in one member's run."""

    arm: str
    """Name of the arm."""
    seed: int
    step: int
    text: str


@dataclass(frozen=True)
class Attempt:
    """One try at a trial, which runs."""

    attempt: int
    started: float
    """Seconds since 1970."""


@dataclass(frozen=True)
class Pace:
    """Progress and speed of a trial."""

    step: int = 0
    """Last step that was recorded."""
    moment: float = 0.0
    """Time of that record: seconds since 1970."""
    steps_per_s: float | None = None
    """Steps per second; None while there are too few records."""

    def seconds_left(self, steps: int) -> float | None:
        """Return the seconds from the last record to a step at this speed; None while it is unknown."""
        return max(0, steps - self.step) / self.steps_per_s if self.steps_per_s else None


ARM_COLUMNS = ", ".join(field.name for field in fields(ArmRow))
"""Columns of a query for arms."""
TRIAL_COLUMNS = ", ".join(field.name for field in fields(TrialRow))
"""Columns of a query for trials."""
MEMBER_COLUMNS = (
    "members.arm, seed, members.trial, mlflow, shipped, arms.name, arms.knobs, arms.optuna, arms.baseline,"
    " arms.role, bases.name, id, spec, status, trials.reason, seconds, closed, reused"
)
"""Columns of a query for members, over tables named members, arms, trials and bases (the arms' baselines)."""


def member_key(arm: int, seed: int) -> str:
    """Return the key by which the MLflow run of an arm at a seed is found again."""
    return f"{arm}/{seed}"
