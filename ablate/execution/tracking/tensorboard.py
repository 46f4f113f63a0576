"""Projection of a sweep's ledger into TensorBoard's event files.

Each member (arm and seed) has a folder, which TensorBoard shows as a run, with one event file. A file is
written whole, by TensorBoard's own writer, and its name has the step and the time of its last record. So a
file's name says whether it is up to date, and nothing else is remembered: every file can be deleted. It is
written again once the run has a twentieth more steps, or has ended. TensorBoard keeps 32 bits of a value. For
example, in the state folder:

    tensorboard/rht_sr/rht=true/seed=0/events.out.tfevents.0000000300.1795752000000
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from ablate.errors import InputError
from ablate.execution.tracking import runs
from ablate.execution.tracking.tracker import Tracker
from ablate.files import Json
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import OVER, Member, Pace

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

_PREFIX = "events.out.tfevents."
_UNFINISHED = "unfinished"
"""Name of a file that is being written; TensorBoard reads names with `tfevents` only."""
_GROWTH = 1.05
_LONGEST_NAME = 200


class TensorBoard(Tracker):
    """Event files below `tensorboard/<sweep>/` in the state folder."""

    def __init__(self, state: Path, sweep: str) -> None:
        """Write nothing yet. InputError if TensorBoard is not installed."""
        try:
            import tensorboard.summary.writer.record_writer  # noqa: F401
        except ImportError as error:
            raise InputError(f"tracker 'tensorboard': {error}; `pip install tensorboard`") from None
        self._folder = state / "tensorboard" / sweep
        self._metrics: Sequence[str] = ()
        self._complete: set[tuple[int, int]] = set()

    def refresh(self, ledger: Ledger, finished: bool = False) -> None:
        """Write the event files of members whose records have changed."""
        self._metrics = ledger.facts.metrics
        for member in ledger.members():
            key, over = (member.arm, member.seed), member.status in OVER
            if over and key in self._complete:
                continue
            last = ledger.pace(member.trial, 0.0)
            if last.moment:
                self._update(ledger, member, last, over or finished)
            if over:
                self._complete.add(key)
            else:
                self._complete.discard(key)

    def finish(self, ledger: Ledger, status: str, note: str) -> None:
        """Write the last records of members that have not ended, too."""
        self.refresh(ledger, finished=True)

    def _update(self, ledger: Ledger, member: Member, last: Pace, over: bool) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = self._folder / _folder_name(member.name) / f"seed={member.seed}"
        name = f"{_PREFIX}{last.step:010}.{int(1000 * last.moment)}"
        old = sorted(folder.glob(f"{_PREFIX}*"))
        if [path.name for path in old] == [name]:
            return
        steps = int(old[-1].name.split(".")[3]) if old else 0
        if old and not over and steps <= last.step < _GROWTH * steps:
            return
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / _UNFINISHED).open("wb") as file:
            writer = RecordWriter(file)
            for event in self._events(ledger, member, last.step):
                writer.write(event.SerializeToString())
        (folder / _UNFINISHED).replace(folder / name)
        for path in old:
            if path.name != name:
                path.unlink(missing_ok=True)

    def _events(self, ledger: Ledger, member: Member, last: int) -> "Iterator[Event]":
        """Yield a member's events up to a step: the version of the format, a start that replaces what
        TensorBoard has read from an earlier file, the knobs, and one scalar per record."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        knobs: dict[str, Json] = json.loads(member.knobs)
        plain = {
            key: value if isinstance(value, bool | int | float) else str(value)
            for key, value in knobs.items()
        }
        begun = False
        for step, name, value, moment in ledger.records(member.trial):
            if step > last:
                return
            if not begun:
                begun = True
                yield Event(wall_time=moment, file_version="brain.Event:2")
                yield Event(wall_time=moment, step=0, session_log=SessionLog(status=SessionLog.START))
                knobs_pb = hparams_pb(plain | {"seed": member.seed}, member.key, moment)
                yield Event(wall_time=moment, summary=knobs_pb)
            if runs.shown(name, self._metrics):
                scalar = Summary(value=[Summary.Value(tag=name, simple_value=value)])
                yield Event(wall_time=moment, step=step, summary=scalar)


def _folder_name(arm: str) -> str:
    """Return the name of an arm's folder. Names that differ have folders that differ, none above the sweep's:
    a long one is cut and ends in digits of its hash, and a first dot is escaped."""
    name = quote(arm, safe="=+,. ()[]")
    name = f"%2E{name[1:]}" if name.startswith(".") else name
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}...{hashlib.sha256(arm.encode()).hexdigest()[:6]}"
