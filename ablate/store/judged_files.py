"""Files of runs that were not started here, which give them back to a ledger that lost them.

The problem: no experiment file names these runs, and the logs that they were read from may be gone. If they
are in the ledger alone, they are lost with it.

The idea: each of them is a finished trial of the trial store, with spec, events and result, under the hash of
its content. `sweeps/<name>/judged.json` has what an experiment file has for other trials, arms and members,
and the origin of the runs. `keep` makes ledger and files agree:

    keep(ledger, store)    # in the transaction of `ablate judge`: the files are written before it ends
    keep(empty, store)     # of a new ledger, in a sweep's folder: it has the arms again
    keep(altered, store)   # records that differ from their seal are read again from the folder of the run

Refused: a run that is whole neither in the ledger nor in its folder. The message names it.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from ablate.cache import key_of
from ablate.errors import InputError
from ablate.files import Damaged, read_json, write
from ablate.store.judged import FOREIGN
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import Member
from ablate.store.trial_store import Event, Store

_AGAIN = "move judged.json away to continue without judged runs, and add them with `ablate judge` again"


@dataclass(frozen=True)
class JudgedFile:
    """Content of `judged.json`."""

    alone: bool
    """True if no experiment made the ledger."""
    origin: str
    runs: list[list[str | int | None]]
    """Arm, its baseline, seed and trial of each run."""

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return the content of the file in a sweep's folder; None without one; Damaged if it was changed."""
        path = folder / "judged.json"
        try:
            content = read_json(path)
            if content.pop("sha256", None) != key_of(content):
                raise Damaged(path, "damaged: its checksum does not match")
            return cls(**content)
        except FileNotFoundError:
            return None
        except (OSError, TypeError) as error:
            raise Damaged(path, f"cannot be read: {error}") from None

    def write(self, folder: Path) -> None:
        """Write the file into a sweep's folder, completely or not at all."""
        write(folder / "judged.json", asdict(self) | {"sha256": key_of(asdict(self))})


def kept_alone(folder: Path) -> JudgedFile | None:
    """Return the content of the file if it says that all runs of the folder's ledger are from elsewhere."""
    with suppress(Damaged):
        if (kept := JudgedFile.read(folder)) and kept.alone:
            return kept
    return None


def keep(ledger: Ledger, store: Store) -> list[str]:
    """Make a ledger, open for writing, and the files of its judged runs agree; return sentences on what was
    restored. InputError if a run is whole nowhere, or the ledger lost the runs and the file that names them
    is damaged."""
    folder, news, kept = ledger.path.absolute().parent, list[str](), None
    lost = ledger.facts.judged is None
    try:
        try:
            kept = JudgedFile.read(folder)
        except Damaged as error:
            if lost:
                raise
            news.append(f"{error}; it is written again from the ledger")
        if lost and kept is None:
            return []
        with ledger.atomic():
            if lost and kept:
                _restore(ledger, store, kept)
                news.append(f"{len(kept.runs)} judged runs were missing; read again from their folders")
            members = [row for row in ledger.members() if row.resolved.workload == FOREIGN]
            said = [line for member in members for line in _agree(ledger, store, member)]
            runs: list[list[str | int | None]] = [[m.name, m.against, m.seed, m.id] for m in members]
            now = JudgedFile(ledger.facts.text is None, ledger.facts.judged or "", runs)
            if now != kept:
                now.write(folder)
            return news + ([] if lost else said)
    except Damaged as error:
        raise InputError(f"{error}; {_AGAIN}") from None


def _restore(ledger: Ledger, store: Store, kept: JudgedFile) -> None:
    """Add arms and members of the file to a ledger that has none of them, without records."""
    for arm, against, seed, trial in kept.runs:
        base, found = ledger.arm(str(against)), store.result(str(trial))
        if base is None or found is None:
            lacking = f"{arm} is compared with {against}, no arm any more" if found else "it is missing"
            raise Damaged(store.folder(str(trial)), lacking)
        number = ledger.add_arm(str(arm), {}, base, None, "foreign")
        ledger.add_member(number, int(seed or 0), str(trial), json.dumps(found["spec"]))
    ledger.facts.judged = kept.origin


def _agree(ledger: Ledger, store: Store, member: Member) -> list[str]:
    """Make ledger and folder of a run agree, and return a sentence on what was damaged; Damaged if the run is
    whole in neither."""
    folder, damage, events = store.folder(member.id), "missing", list[Event]()
    try:
        if found := store.result(member.id):
            events = store.proven(member.id, found)
    except Damaged as error:
        found, damage = None, str(error)
    records = ledger.digest(member.trial)
    whole = records is not None and records == ledger.records_seal(member.trial)
    if found:
        row = (found["status"], found["reason"])
        if not whole or records != found["records"]["sha256"] or (member.status, member.reason) != row:
            ledger.renew(member.trial, events)
            ledger.settle(member.trial, *row)
            ledger.seal_records(member.trial, found["records"]["sha256"])
        return [] if whole else [f"trial {member.id}: its records were damaged; read again from {folder}"]
    if not whole:
        why = f"run {member.seed} of {member.name} is whole neither here nor in the ledger ({damage})"
        raise Damaged(folder, why)
    aside = store.retire(member.id)
    _write(ledger, store, member)
    return [f"{damage}; it is kept as {aside}, and written again from the ledger"] if aside else []


def _write(ledger: Ledger, store: Store, member: Member) -> None:
    by_step: dict[int, Event] = {}
    for step, name, value, moment in ledger.records(member.trial):
        by_step.setdefault(step, {"step": step, "time": moment, "metrics": {}})["metrics"][name] = value
    about = {"status": member.status, "reason": member.reason, "seconds": member.seconds}
    events, spec = [*by_step.values()], json.loads(member.spec)
    about |= {"started": events[0]["time"], "steps": events[-1]["step"], "spec": spec}
    store.add(member.id, spec, events, about)
