"""Journal of a study: Optuna's operations, a JSON line each, in a file beside the ledger.

The process that runs the sweep writes it as `StudyJournal`. All others read it as Optuna does, and may
append.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from ablate.files import Json

Operation = dict[str, Any]
"""An operation as Optuna writes it to a journal: {op_code, worker_id, ...}."""
Category = None | bool | int | float | str
WARM = "warm"
"""User attribute of a trial that is an arm of an earlier sweep: that arm's name."""
REPEATS = "repeats"
"""User attribute of a trial that was proposed again: the number of the point that it repeats."""


class StudyJournal(BaseJournalBackend):
    """Optuna's journal file, written by one process: the one that holds the sweep's lock. It takes no lock
    and does not wait for the disk, which is most of an operation's cost, and reads the file once. Operations
    lost in a power failure are written again from the ledger."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unread = _intact(path)
        self._first = 0
        """Number of the first operation that was not read yet."""
        self._held: list[Operation] | None = None
        """Operations within `together` that are not in the file yet; None outside of it."""

    def read_logs(self, log_number_from: int) -> list[Operation]:
        """Return the operations from this number on; earlier ones are not requested again."""
        self._unread, self._first = self._unread[log_number_from - self._first :], log_number_from
        return list(self._unread)

    def append_logs(self, logs: list[Operation]) -> None:
        """Write all operations at once, so that lines appended by a dashboard stay whole."""
        self._unread += logs
        if self._held is None:
            self._write(logs)
        else:
            self._held += logs

    @contextmanager
    def together(self) -> Iterator[None]:
        """Write all operations of the block at its end, in one write. The process sees them at once."""
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            self._write(held)

    def _write(self, logs: list[Operation]) -> None:
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with self._path.open("ab", buffering=0) as file:
            file.write(lines.encode())


def _intact(journal: Path) -> list[Operation]:
    """Return the journal's operations. Cut off everything after a torn line, and remove a lock that a crash
    left."""
    for lock in journal.parent.glob(f"{journal.name}.lock*"):
        lock.unlink()
    journal.touch()
    operations = []
    with journal.open("r+b") as file:
        for line in iter(file.readline, b""):
            try:
                operations.append(json.loads(line if line.endswith(b"\n") else b""))
            except ValueError:
                file.truncate(file.tell() - len(line))
                break
    return operations


# What it holds


def encode(value: Json) -> Category:
    """Convert a value to a category that Optuna accepts: None, bool, int, float or str; other values become
    JSON text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return "json:" + json.dumps(value)


def decode(value: Category) -> Json:
    if isinstance(value, str) and value.startswith("json:"):
        return json.loads(value.removeprefix("json:"))
    return value


def points(journal: Path, name: str) -> list[dict[str, Json]]:
    """Return the knobs of a sweep's own points, by number; none if the journal is missing or unreadable."""
    return [{knob: decode(value) for knob, value in trial.params.items()} for trial in _own(journal, name)]


def given_up(journal: Path, name: str) -> dict[int, int]:
    """Return the step of the last report of each own point that the pruner gave up, by number."""
    return {
        number: max(trial.intermediate_values, default=0)
        for number, trial in enumerate(_own(journal, name))
        if trial.state == TrialState.PRUNED
    }


def opened(
    journal: Path, name: str, backend: Callable[[str], BaseJournalBackend] = JournalFileBackend
) -> tuple[optuna.Study, JournalStorage] | None:
    """Open the study of a sweep and its storage, by default as Optuna does, without repairing or creating
    anything; None if there is none."""
    if not journal.exists():
        return None
    try:
        storage = JournalStorage(backend(str(journal)))
        return optuna.load_study(study_name=name, storage=storage), storage
    except Exception:  # no study of this name, or no journal, which Optuna's replay says in many ways
        return None


def own_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials of a study without those of earlier sweeps."""
    return [trial for trial in study.get_trials(deepcopy=False) if WARM not in trial.user_attrs]


def _own(journal: Path, name: str) -> list[FrozenTrial]:
    loaded = opened(journal, name, lambda path: StudyJournal(Path(path)))
    return own_trials(loaded[0]) if loaded else []
