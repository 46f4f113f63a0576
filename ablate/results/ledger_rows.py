"""What the ledger returns: a trial's row as a frozen object, and the statuses that it can have."""

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

FINISHED = ("done", "diverged")
"""Statuses of a trial that need never run again."""

OVER = (*FINISHED, "failed", "oom", "pruned", "stopped")
"""Statuses of a trial that does not run any more, for now."""


@dataclass(frozen=True)
class Trial:
    """A row of table `trials`: one workload, one recipe, one seed, one engine, whichever members it belongs
    to."""

    trial: int
    id: str
    spec: str
    """The resolved spec, as JSON."""
    status: str
    reason: str | None
    seconds: float | None
    reused: bool
    """An earlier sweep ran it."""

    @classmethod
    def of(cls, row: sqlite3.Row) -> "Trial":
        """Return the trial of a row that has these columns."""
        return cls(*(row[field.name] for field in fields(cls)[:-1]), reused=bool(row["reused"]))

    @property
    def finished(self) -> bool:
        """True for a trial that need never run again."""
        return self.status in FINISHED


def key_of(member: Mapping[str, Any]) -> str:
    """Return the key by which a member's run in MLflow is found again."""
    return f"{member['arm']}/{member['seed']}"
