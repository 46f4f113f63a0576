"""Failures of a sweep's trials: which are one bug that repeats, and when no other trial is worth its time.

The problem. A trial that died with its worker is worth a retry. A bug in the user's code is not: it raises
the same exception at the same line in every attempt of every trial, and a night is spent on nothing.

The rule is cautious. An exception repeats if its type and the innermost line of the user's code were those of
an earlier attempt, of the same trial or of another. Only then it is not tried again. Errors of memory,
network and devices never count as such (`UserError.transient`). A contract that a function of a quantiser
breaks is broken at every attempt (`UserError.certain`): there is no second one.

    failures = Failures()
    failures.repeats(error)             # False: the first attempt; it is tried again
    failures.repeats(error)             # True: the second one, here or in another trial
    failures.settled(trial, error)      # the trial has failed for good
    failures.hopeless(ledger, 0)        # True once no comparison can come of what is left

A sweep is hopeless once one exception has failed two trials, or the only one, and every baseline, or every
arm that is compared with one, has a trial that failed so and none that succeeded. An arm that alone is broken
therefore does not end the others.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

from ablate.results.number_text import counted
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import Member
from ablate.training.own_code.user_errors import UserError

_POINTS = 5
"""Points of a search that have to fail before its others are given up, too."""

Identity = tuple[str, str, int]


class Failures:
    """Exceptions of the user's code in the attempts of one run of a sweep."""

    def __init__(self) -> None:
        self._attempts: Counter[Identity] = Counter()
        self._trials: defaultdict[Identity, set[int]] = defaultdict(set)
        """Numbers of the trials that failed for good, by the exception that ended them."""
        self._errors: dict[Identity, UserError] = {}

    def repeats(self, error: UserError) -> bool:
        """Note the exception that ended an attempt; return True if another would end by the same."""
        if error.transient:
            return False
        self._attempts[error.identity] += 1
        return error.certain or self._attempts[error.identity] > 1

    def settled(self, trial: int, error: UserError) -> bool:
        """Note that a trial (by its number) failed for good; return True if it is the first that failed by
        this exception, that of its last attempt."""
        first = error.identity not in self._errors
        self._errors.setdefault(error.identity, error)
        self._trials[error.identity].add(trial)
        return first

    @property
    def cause(self) -> UserError | None:
        """Exception that most trials failed by; None if none failed by an exception of the user's code."""
        if not self._errors:
            return None
        return self._errors[max(self._errors, key=lambda identity: len(self._trials[identity]))]

    def hopeless(self, ledger: Ledger, proposals: int) -> bool:
        """Return True if every baseline, or every arm that is compared, failed by one repeated exception.
        `proposals`: number of arms that a search may still propose."""
        members = ledger.members()
        baselines = {member.baseline for member in members} - {None}
        compared = {member.arm for member in members if member.role != "null"} - baselines
        if proposals > 0 and len(compared) < _POINTS:
            compared = set()
        most = len({member.trial for member in members})
        repeated = [
            trials
            for identity, trials in self._trials.items()
            if len(trials) >= min(2, most) and self._attempts[identity] > 1
        ]
        groups = [arms for arms in (baselines, compared) if arms]
        return any(
            all(_failed(members, arm, trials) for arm in arms) for trials in repeated for arms in groups
        )


def _failed(members: Iterable[Member], arm: int | None, trials: set[int]) -> bool:
    """Return True if one of these trials is the arm's, and none of the arm's trials is done or was pruned."""
    own = [member for member in members if member.arm == arm]
    return any(m.trial in trials for m in own) and not any(m.status in ("done", "pruned") for m in own)


def divergence(ledger: Ledger) -> str:
    """Return how many runs diverged, and how many of those are baselines'; empty if none did."""
    compared = {arm.baseline for arm in ledger.arms() if arm.baseline is not None}
    members = ledger.members()
    diverged = [member for member in members if member.status == "diverged"]
    if not diverged:
        return ""
    baselines = sorted({member.name for member in members if member.arm in compared})
    text = f"{len(diverged)} of {counted(len(members), 'run')} diverged"
    if baselines:
        own = sum(member.arm in compared for member in diverged)
        text += f", {own or 'none'} of them of {'the baseline' if len(baselines) == 1 else 'a baseline'}"
        text += f" {baselines[0]}" * (len(baselines) == 1)
    return f"{text}."


def lost_baselines(ledger: Ledger) -> tuple[list[str], int]:
    """Return the baselines that diverged on every seed, and the number of all baselines."""
    compared = {arm.baseline for arm in ledger.arms() if arm.baseline is not None}
    statuses: dict[str, set[str]] = {}
    for member in ledger.members():
        if member.arm in compared:
            statuses.setdefault(member.name, set()).add(member.status)
    return [name for name, seen in statuses.items() if seen == {"diverged"}], len(statuses)
