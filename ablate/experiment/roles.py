"""The role of an arm in its sweep: which there are, and how one is inferred where a ledger of an earlier version has none."""

from collections.abc import Mapping
from typing import Any, Literal

Role = Literal["baseline", "listed", "searched", "refused", "confirmed"]
"""Added as a baseline, named by the file, proposed by a sampler, proposed but impossible to run, or a search's winner run again."""

CONFIRM = "confirm: "
"""Name prefix of the arm that reruns a search's winner on fresh seeds. It is for readers: the role says what an arm is."""


def role_of(row: Mapping[str, Any], searches: bool, members: int) -> Role:
    """Return the role of a ledger's arm, or of a member's, with so many members.

    A row without a role is of an earlier version, which named a winner's second run by the prefix.
    """
    if row["role"]:
        return row["role"]
    if not searches:
        return "listed"
    if row["optuna"] is not None:
        return "searched" if members or row["baseline"] is not None else "refused"
    return "confirmed" if row["name"].startswith(CONFIRM) else "baseline"
