"""Combined storage: the journals of all sweeps as one Optuna storage for one dashboard, read-only except for
notes.

It follows the journals while they grow. Each journal counts its studies and trials from 0, so their numbers
are translated. A journal that was made again (its file is another) becomes a new study that replaces the old
one. Notes from the dashboard are appended to the journal that they belong to, in one write.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend

from ablate.execution.search.journal import Operation
from ablate.execution.search.optuna_private import JournalOperation

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

_OF_A_TRIAL = re.compile(r"(dashboard:)(\d+)(:.*)")
"""Dashboard's attribute name for the note of a trial, which it stores with the study."""
_NOTES = re.compile(r"/api/studies/\d+(/\d+)?/note")


@dataclass
class _Book:
    """Position in one journal, and the combined storage's numbers of its studies and trials."""

    path: Path
    file: tuple[int, int]
    """Device and inode; if they change, the journal was made again."""
    offset: int = 0
    names: set[str] = field(default_factory=set)
    studies: dict[int, int] = field(default_factory=dict)
    trials: list[int] = field(default_factory=list)
    created: int = 0


class CombinedStorage(BaseJournalBackend):
    """Journals of a state folder's sweeps, read as one journal."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._books: dict[str, _Book] = {}
        self._logs: list[Operation] = []
        self._studies = self._trials = 0

    def read_logs(self, log_number_from: int) -> list[Operation]:
        """Return the operations from this number on, including those of new sweeps."""
        for path in sorted(self._state.glob("sweeps/*/optuna.log")):
            self._read(path.parent.name, path)
        return self._logs[log_number_from:]

    def append_logs(self, logs: list[Operation]) -> None:
        """Append a note to its journal. PermissionError for any other operation."""
        for log in logs:
            if log["op_code"] != JournalOperation.SET_STUDY_SYSTEM_ATTR:
                raise PermissionError("a sweep's study is written by its sweep alone; notes are welcome")
            book = next(book for book in self._books.values() if log["study_id"] in book.studies.values())
            studies = {here: local for local, here in book.studies.items()}
            line = _renamed(log, studies.__getitem__, book.trials.index)
            with book.path.open("ab", buffering=0) as file:
                file.write((json.dumps(line, separators=(",", ":")) + "\n").encode())

    def _read(self, sweep: str, path: Path) -> None:
        """Read the new complete lines of a journal; start again if its file was replaced."""
        with path.open("rb") as file:
            stat = path.stat()
            known = self._books.get(sweep)
            if known is None or known.file != (stat.st_dev, stat.st_ino) or stat.st_size < known.offset:
                for study in known.studies.values() if known else ():
                    delete = JournalOperation.DELETE_STUDY
                    self._logs.append({"op_code": delete, "worker_id": "", "study_id": study})
                known = self._books[sweep] = _Book(path, (stat.st_dev, stat.st_ino))
            file.seek(known.offset)
            for line in file:
                if not line.endswith(b"\n"):  # still being written, or torn
                    break
                known.offset += len(line)
                self._take(sweep, known, line)

    def _take(self, sweep: str, book: _Book, line: bytes) -> None:
        try:
            log = json.loads(line)
        except ValueError:  # torn by a crash, and written on: Optuna would stop there
            return
        match log["op_code"]:
            case JournalOperation.CREATE_STUDY:
                self._create(sweep, book, log)
                return
            case JournalOperation.CREATE_TRIAL if log["study_id"] in book.studies:
                book.trials.append(self._trials)
                self._trials += 1
            case JournalOperation.DISCARD_TRIALS:
                return
        study, trial = log.get("study_id"), log.get("trial_id")
        if study in book.studies or (trial is not None and trial < len(book.trials)):
            self._logs.append(_renamed(log, book.studies.__getitem__, book.trials.__getitem__))
        if log["op_code"] == JournalOperation.DELETE_STUDY:
            book.studies.pop(study, None)

    def _create(self, sweep: str, book: _Book, log: Operation) -> None:
        """Name the study after its sweep's folder, since a copied folder has a study of the same name."""
        if log["study_name"] in book.names:  # opened again
            return
        book.names.add(log["study_name"])
        book.studies[book.created] = self._studies
        name = sweep if not book.created else f"{sweep}/{log['study_name']}"
        book.created, self._studies = book.created + 1, self._studies + 1
        self._logs.append(log | {"study_name": name})


def _renamed(log: Operation, study: Callable[[int], int], trial: Callable[[int], int]) -> Operation:
    renamed = dict(log)
    if "study_id" in log:
        renamed["study_id"] = study(log["study_id"])
    if "trial_id" in log:
        renamed["trial_id"] = trial(log["trial_id"])
    if "system_attr" in log and "study_id" in log:
        renamed["system_attr"] = {_key(key, trial): value for key, value in log["system_attr"].items()}
    return renamed


def _key(key: str, trial: Callable[[int], int]) -> str:
    of = _OF_A_TRIAL.fullmatch(key)
    return f"{of[1]}{trial(int(of[2]))}{of[3]}" if of else key


def dashboard(state: Path) -> tuple[Callable[..., Iterable[bytes]], Callable[[str], int | None]]:
    """Return Optuna's dashboard over all sweeps as a WSGI application, and a function from a sweep to its
    study's number. The dashboard shows studies and accepts notes; all other requests that write are refused
    with status 403."""
    from optuna_dashboard import wsgi

    storage = JournalStorage(CombinedStorage(state))
    pages = wsgi(storage)

    def application(environ: "WSGIEnvironment", start: "StartResponse") -> Iterable[bytes]:
        reads = environ["REQUEST_METHOD"] in ("GET", "HEAD")
        if reads or (environ["REQUEST_METHOD"] == "PUT" and _NOTES.fullmatch(environ["PATH_INFO"])):
            return pages(environ, start)
        start("403 Forbidden", [("Content-Type", "application/json")])
        return [
            b'{"reason": "These pages show sweeps and take notes; a study is written by its sweep alone."}'
        ]

    def number(sweep: str) -> int | None:
        try:
            return storage.get_study_id_from_name(sweep)
        except KeyError:
            return None

    return application, number
