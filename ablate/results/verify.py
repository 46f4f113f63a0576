"""Comparison of a sweep's ledger with its own seals and with its trial folders: rows, records, results.

A trial whose result was committed by an earlier version has no digest. Its last step and, where one attempt
ran it, its records are compared, and it counts as unverified. Nothing is written.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ablate.files import Damaged
from ablate.results.ledger import Ledger
from ablate.results.ledger_integrity import flaw, strays, tally
from ablate.results.ledger_rows import Trial
from ablate.results.ledger_seals import is_sealed
from ablate.results.trial_store import Store


@dataclass(frozen=True)
class Mismatch:
    """A trial, or where `trial` is empty something of the sweep itself, that is not what was written, and the
    file that says so."""

    trial: str
    path: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{f'trial {self.trial}: ' if self.trial else ''}{self.why}; {self.remedy}"


@dataclass(frozen=True)
class Verified:
    """How many finished trials were compared, and what was found."""

    trials: int
    verified: int
    unverified: int
    """Of an earlier version, without a digest."""
    absent: int
    """Without a folder to compare with."""
    unsealed: bool
    """The ledger, of an earlier version, has no seals that its rows could be compared with."""
    mismatches: tuple[Mismatch, ...]

    @property
    def sentence(self) -> str:
        """What was verified, for a reader."""
        told = f"{self.verified} of {self.trials} trials verified against their records"
        told += f"; {self.unverified} from an earlier version unverified" if self.unverified else ""
        told += f"; {self.absent} without a folder unverified" if self.absent else ""
        return (
            f"{told}; its ledger, of an earlier version, has no seals: arms and settings unverified"
            if self.unsealed
            else told
        )


def verify(ledger: Ledger, store: Store) -> Verified:
    """Compare all rows of the ledger with their seals, all records with theirs, and all finished trials with
    their folders."""
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


def _compare(ledger: Ledger, store: Store, row: Trial, again: str) -> tuple[str, list[Mismatch]]:
    """Return how far a trial was compared ("" for one that is not finished), and its mismatches."""
    trial, kind, wrong = row.id, "", []
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
        elif kind in ("verified", "unverified") and digest != result.get("records", {}).get("sha256", digest):
            wrong.append(f"its records are not those in {store.folder(trial)}")
    except ValueError as error:
        wrong.append(str(error))
    return kind, [Mismatch(trial, str(ledger.path), f"{ledger.path}: {why}", again) for why in wrong]


def doubted(
    ledger: Ledger, store: Store, row: Trial, result: Mapping[str, Any], events: list[dict[str, Any]]
) -> None:
    """Damaged where a trial of an earlier version, which one attempt ran, is in the ledger with other records
    than in its folder."""
    if "records" not in result and store.attempts(row.id) == 1 and strays(ledger, row.trial, events):
        why = (
            f"its records are not those in {ledger.path}, and its result, of an earlier version, does not"
            " say which are right"
        )
        raise Damaged(store.folder(row.id), why)


def _differs(store: Store, row: Trial, result: Mapping[str, Any]) -> Iterator[str]:
    """Say what the ledger's row of a trial has otherwise than its result."""
    for key in ("status", "reason", "seconds"):
        if getattr(row, key) != result[key]:
            yield (
                f"its {key} is {getattr(row, key)!r}, and {result[key]!r} in"
                f" {store.folder(row.id) / 'result.json'}"
            )
