"""Comparison of a sweep's ledger with its own seals and with its trial folders: rows, records, results.

A trial whose result was committed by an earlier version has no digest. Its last step is compared and, if one
attempt ran it, its records; it counts as unverified. Nothing is written.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ablate.files import Damaged
from ablate.results.ledger import Ledger
from ablate.results.ledger_integrity import flaw, strays, tally
from ablate.results.ledger_rows import TrialRow
from ablate.results.ledger_seals import is_sealed
from ablate.results.trial_store import Event, Result, Store


@dataclass(frozen=True)
class Mismatch:
    """Difference between what was written and what is there now."""

    trial: str
    """Id of the trial; empty if the difference is in the sweep's own data."""
    path: str
    """File that differs."""
    why: str
    """Description of the difference."""
    remedy: str
    """Command that repairs it."""

    def __str__(self) -> str:
        return f"{f'trial {self.trial}: ' if self.trial else ''}{self.why}; {self.remedy}"


@dataclass(frozen=True)
class Verified:
    """Result of a comparison."""

    trials: int
    """Number of finished trials."""
    verified: int
    """Number of trials whose records agree with their digests."""
    unverified: int
    """Number of trials of an earlier version, which have no digest."""
    absent: int
    """Number of trials without a folder to compare with."""
    unsealed: bool
    """True if the ledger, of an earlier version, has no seals to compare its rows with."""
    mismatches: tuple[Mismatch, ...]

    @property
    def sentence(self) -> str:
        """Numbers of trials that were and were not verified, as a sentence."""
        text = f"{self.verified} of {self.trials} trials verified against their records"
        if self.unverified:
            text += f"; {self.unverified} from an earlier version unverified"
        if self.absent:
            text += f"; {self.absent} without a folder unverified"
        if self.unsealed:
            text += "; its ledger, of an earlier version, has no seals: arms and settings unverified"
        return text


def verify(ledger: Ledger, store: Store) -> Verified:
    """Compare a ledger with its seals, and all finished trials with their folders.

    Args:
        ledger: Ledger of the sweep.
        store: Trial store of the state folder.
    """
    again = f"`ablate rebuild {ledger.name}.yaml` makes it again from the trial folders"
    why = flaw(ledger)
    mismatches = [Mismatch("", str(ledger.path), f"{ledger.path}: {why}", again)] if why else []
    trials = [] if why else ledger.wanted_trials()
    counts = dict.fromkeys(("verified", "unverified", "absent"), 0)
    for row in trials:
        kind, differences = _compare(ledger, store, row, again)
        mismatches += differences
        if kind and not differences:
            counts[kind] += 1
    finished = sum(row.finished for row in trials)
    return Verified(finished, **counts, unsealed=not is_sealed(ledger.db), mismatches=tuple(mismatches))


def _compare(ledger: Ledger, store: Store, row: TrialRow, again: str) -> tuple[str, list[Mismatch]]:
    """Return how far a trial was compared ("" for one that is not finished), and its mismatches."""
    trial, kind = row.id, ""
    wrong: list[str] = []
    result: Result | None = None
    try:
        if row.finished:
            result = store.result(trial)
            kind = "absent" if result is None else "verified" if "records" in result else "unverified"
            if result is not None:
                doubted(ledger, store, row, result, store.proven(trial, result))
                wrong += _differs(store, row, result)
    except Damaged as error:
        rerun = (
            f"`ablate rebuild {ledger.name}.yaml` puts its folder aside, and the next run of the sweep runs"
            " it again"
        )
        return kind, [Mismatch(trial, str(error.path), str(error), rerun)]
    try:
        digest = tally(ledger, row.trial).sealed()["sha256"]
        if digest != (ledger.records_seal(row.trial) or digest):
            wrong.append("table records: its records are not what was written")
        elif result is not None and digest != result.get("records", {}).get("sha256", digest):
            wrong.append(f"its records are not those in {store.folder(trial)}")
    except ValueError as error:
        wrong.append(str(error))
    return kind, [Mismatch(trial, str(ledger.path), f"{ledger.path}: {why}", again) for why in wrong]


def doubted(ledger: Ledger, store: Store, row: TrialRow, result: Result, events: Iterable[Event]) -> None:
    """Raise Damaged if the ledger and the folder of a trial of an earlier version have different records.

    Only trials that one attempt ran are compared.
    """
    if "records" not in result and store.attempts(row.id) == 1 and strays(ledger, row.trial, events):
        why = (
            f"its records are not those in {ledger.path}, and its result, of an earlier version, does not say"
            " which are right"
        )
        raise Damaged(store.folder(row.id), why)


def _differs(store: Store, row: TrialRow, result: Result) -> Iterator[str]:
    """Yield a sentence on each field of a trial's row that differs from its result."""
    for key in ("status", "reason", "seconds"):
        if getattr(row, key) != result[key]:
            yield (
                f"its {key} is {getattr(row, key)!r}, and {result[key]!r} in"
                f" {store.folder(row.id) / 'result.json'}"
            )
