"""Role of an arm in its sweep: the list of roles, and the rule for ledgers of earlier versions, which stored
none."""

from typing import Literal, Protocol

Role = Literal["baseline", "listed", "searched", "refused", "confirmed", "null", "bad"]
"""Added as a baseline, listed in the file, proposed by a sampler, proposed but impossible, rerun of a
search's winner, the baseline's twin, or an arm that is known to be bad."""

NULL = "null: "
"""Name prefix of the baseline's twin. It is for readers; code reads the role."""
BAD = "known bad: "
"""Name prefix of a known-bad arm that was added."""
CONFIRM = "confirm: "
"""Name prefix of the arm that reruns a search's winner on fresh seeds. It is for readers; code reads the
role."""


class Recorded(Protocol):
    """Fields of an arm in a ledger that its role follows from. Rows of arms and of members have them."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> Role | None: ...
    @property
    def optuna(self) -> int | None: ...
    @property
    def baseline(self) -> int | None: ...


def role_of(row: Recorded, searches: bool, members: int) -> Role:
    """Return the role of an arm in a ledger, from its row or from that of one of its members.

    A row without a role was written by an earlier version, which marked the rerun of a winner by the prefix
    alone. `searches`: the sweep is a search; `members`: number of the arm's members.
    """
    if row.role:
        return row.role
    if not searches:
        return "listed"
    if row.optuna is not None:
        return "searched" if members or row.baseline is not None else "refused"
    return "confirmed" if row.name.startswith(CONFIRM) else "baseline"
