"""The trial store: one self-describing folder for each trial, shared by all sweeps.

The problem: a trial is killed at any moment, is wanted by several sweeps at once, and must not be run twice.
So its results are files, and one rename is the commit: `result.json` exists if and only if the trial is over
and need never run again. Everything else in the folder may be incomplete.

  trials/<id>/spec.json               the resolved spec; its hash is the id
  trials/<id>/log-<attempt>.txt       output of an attempt; created first, which reserves the attempt's number
  trials/<id>/events-<attempt>.jsonl  one event per line with its checksum, appended during the run
  trials/<id>/lock                    held by the attempt that runs, and names it
  trials/<id>/trunk-<attempt>.json    trial and step that a forked attempt started from
  trials/<id>/artifacts/              files for people: pictures
  trials/<id>/weights.safetensors     weights after the last step, if `telemetry.keep_weights` asks for them
  trials/<id>/result.json             status, reason, seconds, steps, digest of the records

For example, `store.begin(id)` returns 1, the run appends to events-1.jsonl and is killed; `begin` then
returns 2, and of the steps that both attempts recorded, the later attempt's records count.

Refused: files are never trusted because they exist. `result.json` has a digest of itself and of the trial's
records, and each line and each checkpoint has its own checksum. A mismatch raises `Damaged`, which names the
file.
"""

import hashlib
import json
import math
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, TypedDict

from ablate.files import Damaged, Json, lock, read_json, synced, write
from ablate.training.checkpoint_footer import CHECKPOINT_VERSION, read_footer

_RECORD = struct.Struct("<qdd")
_CRC = b', "crc": "'
_LOG_LINE, _LOG_TAIL = 500, 1 << 20
"""Characters of a line of a log, and bytes of its end, that are shown."""
_RESULT_KEYS = {"id", "status", "reason", "seconds", "started", "steps", "records"}

Event = dict[str, Any]
"""Records of a trial at one step: `step`, `time` (seconds since 1970), `metrics` (value by name), and
optionally `events` (texts on interventions), `resumed` (step that the attempt resumed from), `origin` (the
first value that was not finite) and `layers` ([name, block, elements] of each converted layer)."""
Result = dict[str, Any]
"""Content of a finished trial's result.json: at least `id`, `status`, `reason`, `seconds`, `started`, `steps`
and `records`, number and digest of the trial's records."""


class Trunk(TypedDict):
    """Trial and step whose state an attempt started from."""

    trial: str
    step: int


class Tally:
    """Number and digest of a trial's records, equal for events files and ledger rows that hold the same
    records.

    A metric is a column of (step, value, time) in the order of its steps. The digest is the SHA-256 of all
    columns' digests, by the metrics' names, and of the texts on interventions. Values count as the ledger
    stores them: doubles, with all NaNs equal and -0.0 as 0.0.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.count = 0
        self._columns: dict[str, hashlib._Hash] = {}
        self._last: dict[str, int] = {}
        self._words: set[tuple[int, str]] = set()
        self._waiting: dict[str, list[tuple[int, float | None, float]]] = {}
        """Rows that were counted one by one and are not in the digest of their column yet."""
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Count an event's records. If a metric comes twice at one step, the first counts. ValueError if a
        metric's step is smaller than its last one."""
        step, moment = event["step"], event["time"]
        for name, value in event["metrics"].items():
            last = self._last.get(name, -1)
            if step > last:
                self._last[name] = step
                self._waiting.setdefault(name, []).append((step, value, moment))
            elif step < last:
                raise ValueError(
                    f"{name} is recorded at step {step} after step {last}: steps must not go back"
                )
        self._words.update((step, text) for text in event.get("events", ()))

    def column(self, name: str, rows: Iterable[tuple[int, float | None, float]]) -> None:
        """Count a metric's next (step, value, time); None is a NaN."""
        packed = [
            _RECORD.pack(step, math.nan if value is None or value != value else value + 0.0, moment)
            for step, value, moment in rows
        ]
        self.count += len(packed)
        self._columns.setdefault(name, hashlib.sha256()).update(b"".join(packed))

    def words(self, rows: Iterable[tuple[int, str]]) -> None:
        """Count texts on interventions, by step."""
        self._words.update(rows)

    def sealed(self) -> dict[str, Json]:
        """Return number and digest of all that was counted so far: `count`, `sha256`."""
        for name in list(self._waiting):
            self.column(name, self._waiting.pop(name))
        digests = [[name, column.hexdigest()] for name, column in sorted(self._columns.items())]
        return {"count": self.count, "sha256": _digest([digests, sorted(self._words)])}


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def line(event: Event, trial: str) -> bytes:
    """Return an event as a line of an events file, with a checksum of the event and of its trial's id."""
    text = json.dumps(event).encode()
    return text[:-1] + _CRC + b'%08x"}\n' % _checksum(text, trial)


def parsed(text: bytes, trial: str) -> Event:
    """Return the event of a line of a trial's file. ValueError if the line is not what was written, or
    belongs to another trial."""
    body, mark, crc = text.rpartition(_CRC)
    if not mark or crc != b'%08x"}\n' % _checksum(body + b"}", trial):
        raise ValueError("its checksum does not match")
    return as_event(json.loads(body + b"}"))


def as_event(content: object) -> Event:
    """Return `content` if it is an event: an integer `step`, a number `time`, a mapping `metrics`; else
    ValueError."""
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("metrics"), dict)
        or not isinstance(content.get("step"), int)
        or not isinstance(content.get("time"), int | float)
    ):
        raise ValueError("it is no event")
    "".join(content["metrics"]).encode()  # a ValueError for a lone surrogate, which SQLite cannot store
    return content


def _checksum(text: bytes, trial: str) -> int:
    return zlib.crc32(text, zlib.crc32(trial.encode()))


def _sizes(paths: Iterable[Path]) -> dict[Path, int]:
    """Return the sizes of files, the least recently used first, without those that are gone: another sweep of
    the state folder removes checkpoints, too."""
    found = []
    for path in paths:
        with suppress(FileNotFoundError):
            about = path.stat()
            found.append((about.st_mtime, path, about.st_size))
    return {path: size for _, path, size in sorted(found)}


class Store:
    """Trial store of a state folder."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def folder(self, trial: str) -> Path:
        """Return the folder of a trial. It is created when the trial first runs."""
        return self.root / "trials" / trial

    def result(self, trial: str) -> Result | None:
        """Return the result of a finished trial, None for one that is not finished; Damaged if the file is
        not what was committed."""
        path = self.folder(trial) / "result.json"
        try:
            result = read_json(path)
        except FileNotFoundError:
            return None
        if result.pop("sha256", None) != _digest(result):
            raise Damaged(path, "damaged: its checksum does not match")
        if result.get("id", trial) != trial:
            raise Damaged(path, f"the result of another trial, {result['id']}")
        return result

    def finished(self, trial: str) -> bool:
        """Return True for a trial with a valid result. A trial whose result is damaged runs again."""
        with suppress(Damaged):
            return self.result(trial) is not None
        return False

    def artifacts(self, trial: str) -> list[Path]:
        """Return the files that the trial saved for people, by name; empty if it saved none, or runs
        elsewhere. Links are left out: what they lead to may lie outside."""
        folder = self.folder(trial) / "artifacts"
        files = [] if folder.is_symlink() else folder.glob("*")
        return sorted(path for path in files if path.is_file() and not path.is_symlink())

    def weights(self, trial: str) -> Path:
        """Return the path of the weights that a trial keeps after its last step, if it keeps them."""
        return self.folder(trial) / "weights.safetensors"

    def kept_weights(self, trial: str) -> dict[str, Json] | None:
        """Return `bytes` and `sha256` of the weights that a trial keeps; None if it keeps none."""
        path = self.weights(trial)
        if not path.exists():
            return None
        with path.open("rb") as file:
            return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}

    def commit(self, trial: str, result: Result) -> None:
        """Store the result (without a checksum) of a finished trial, completely or not at all, also if the
        power fails. The trial's events files are synced to disk first."""
        for path in (*self._events_files(trial), self.folder(trial)):
            synced(path)
        write(self.folder(trial) / "result.json", result | {"sha256": _digest(result)})

    def store_again(self, trial: str, other: str, spec: Mapping[str, Json]) -> None:
        """Store a finished trial under another id, too, with the resolved spec of that id. The result names
        the trial that it was run as. Damaged if the trial is not what was written."""
        result = self.result(trial)
        assert result is not None
        self.add(other, spec, self.proven(trial, result), result | {"run_as": trial})

    def add(self, trial: str, spec: Mapping[str, Json], events: Sequence[Event], about: Result) -> None:
        """Store a finished trial that was not run here; `about` is its result, without id and records."""
        attempt = self.begin(trial)
        write(self.folder(trial) / "spec.json", spec)
        content = b"".join(line(event, trial) for event in events)
        (self.folder(trial) / f"events-{attempt}.jsonl").write_bytes(content)
        self.commit(trial, about | {"id": trial, "records": Tally(events).sealed()})

    def begin(self, trial: str) -> int:
        """Return a new attempt's number, larger than all before it in any sweep, and create its log file. The
        number is unique even if two controllers ask at once, so no attempt replaces another's records."""
        folder = self.folder(trial)
        folder.mkdir(parents=True, exist_ok=True)
        attempt = self.last_attempt(trial) + 1
        while True:
            try:
                (folder / f"log-{attempt}.txt").touch(exist_ok=False)
                return attempt
            except FileExistsError:  # two controllers ask at the same moment
                attempt += 1

    def last_attempt(self, trial: str) -> int:
        """Return the number of the latest attempt that has begun; 0 if none has."""
        logs = self._by_attempt(trial, "log-*.txt")
        return max((int(path.stem.partition("-")[2]) for path in logs), default=0)

    def retire(self, trial: str) -> Path | None:
        """Move the trial's folder to `retired/`, so that the trial is run again from the start. Return its
        new path, None if there was no folder."""
        return self.put_aside(self.folder(trial)) if self.folder(trial).exists() else None

    def put_aside(self, path: Path) -> Path | None:
        """Move a file or a folder to `retired/`. Return its new path, None if another process moved it
        first."""
        retired = self.root / "retired"
        retired.mkdir(exist_ok=True)
        aside = retired / f"{path.name}-{time.time_ns()}"
        with suppress(FileNotFoundError):
            return path.rename(aside)
        return None

    def shared(self, name: str) -> Path:
        """Return the path of a checkpoint that several trials can start from."""
        return self.root / "checkpoints" / f"{name}.pt"

    def checkpoint_step(self, trial: str) -> int:
        """Return the step of the trial's own checkpoint, 0 if there is none that it can resume from. Only the
        footer is read."""
        path = self.folder(trial) / "checkpoint.pt"
        with suppress(OSError, ValueError, KeyError, TypeError), path.open("rb") as file:
            about = read_footer(file, path)
            if (about["version"], about["trial"]) == (CHECKPOINT_VERSION, trial):
                return int(about["step"])
        return 0

    def largest_checkpoint(self) -> int:
        """Return the size in bytes of the largest shared checkpoint."""
        return max(_sizes(self._checkpoints()).values(), default=0)

    def collect(self, free: int) -> bool:
        """Delete shared checkpoints, the least recently used first, until the disk has `free` bytes free;
        return True if it has. Only time is lost: a trial that would have started from one starts earlier."""
        for path in _sizes(self._checkpoints()):
            if shutil.disk_usage(self.root).free >= free:
                break
            path.unlink(missing_ok=True)
        return shutil.disk_usage(self.root).free >= free

    def trim(self, names: Collection[str], share: float) -> None:
        """Delete the least recently used of the shared checkpoints `names` until they take at most `share` of
        the disk's free space."""
        sizes = _sizes(map(self.shared, names))
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total <= share * shutil.disk_usage(self.root).free:
                return
            path.unlink(missing_ok=True)
            total -= size

    def checkpoints(self) -> list[Path]:
        """Return the shared checkpoints, including partial files of killed trials."""
        return [path for path in (self.root / "checkpoints").glob("*.pt*") if path.is_file()]

    def _checkpoints(self) -> list[Path]:
        return [*(self.root / "checkpoints").glob("*.pt"), *(self.root / "checkpoints").glob("*.pt.damaged")]

    def fork(self, trial: str, attempt: int, trunk: Mapping[str, Json]) -> None:
        """Record that an attempt starts from the state of trial `trunk["trial"]` after `trunk["step"]`
        steps."""
        write(self.folder(trial) / f"trunk-{attempt}.json", trunk)

    def events(self, trial: str, until: float = math.inf, strict: bool = True) -> Iterator[Event]:
        """Yield the trial's events through step `until`, by step, including those of its trunks. If
        several attempts made a record, the last counts. A last line torn by a crash is left out. A line that
        is not what was written raises Damaged, or is skipped without `strict`."""
        layers: dict[int, list[tuple[Path, Event]]] = {}
        self._lay(layers, trial, until, strict)
        for step in sorted(layers):
            yield from (event for _, event in layers[step])

    def _lay(
        self, layers: dict[int, list[tuple[Path, Event]]], trial: str, until: float, strict: bool
    ) -> None:
        """Collect the events of a trial and of its trunks in `layers`, by step. Two trials may each have
        started from a state of the other, and a trial from one of its own, so each trunk is read up to its
        own step alone."""
        for trunk in self._trunks(trial, strict):
            if trunk["step"] < until:
                self._lay(layers, trunk["trial"], trunk["step"], strict)
        for path in self._events_files(trial):
            for event in _lines(path, strict):
                if event["step"] <= until:
                    _put(layers.setdefault(event["step"], []), path, event)

    def _trunks(self, trial: str, strict: bool = True) -> Iterator[Trunk]:
        for path in self._by_attempt(trial, "trunk-*.json"):
            try:
                trunk = read_json(path)
                yield {"trial": str(trunk["trial"]), "step": int(trunk["step"])}
            except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
                if strict and isinstance(error, Damaged):
                    raise
                if strict:
                    raise Damaged(path, "damaged: it names no trial and step") from None

    def _events_files(self, trial: str) -> list[Path]:
        return self._by_attempt(trial, "events-*.jsonl")

    def _by_attempt(self, trial: str, pattern: str) -> list[Path]:
        """Return a trial's files of one kind in the order of their attempts, without those under a name that
        no attempt gives."""
        stems = ((path.stem.partition("-")[2], path) for path in self.folder(trial).glob(pattern))
        digits = [(text, path) for text, path in stems if text.isascii() and text.isdigit()]
        return [path for _, path in sorted((int(text), path) for text, path in digits if len(text) < 10)]

    def attempts(self, trial: str) -> int:
        """Return the number of attempts that recorded something of the trial, plus one for each of its
        trunks."""
        return len(self._events_files(trial)) + len(list(self._trunks(trial, strict=False)))

    def proven(self, trial: str, result: Result) -> list[Event]:
        """Return the events of a finished trial, after comparing them with the digest in its result. Damaged
        if they are not those that the result was committed with."""
        folder = self.folder(trial)
        if lacking := _RESULT_KEYS - result.keys():
            raise Damaged(folder / "result.json", f"damaged: it has no {', '.join(sorted(lacking))}")
        wanted = result["records"]
        try:
            # A damaged line may be one that a later attempt made again.
            events = list(self.events(trial, strict=False))
            counted = Tally(events).sealed()
            if counted != wanted:
                list(self.events(trial))  # raises an error that names the damaged line, if there is one
        except (ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
            if isinstance(error, Damaged):
                raise
            raise Damaged(folder, f"its events cannot be read: {error}") from None
        if counted != wanted:
            raise Damaged(
                folder, f"its events hold {_counted(counted)}, and its result was made of {_counted(wanted)}"
            )
        return events

    def signature(self, trial: str) -> str:
        """Return a digest of size and times of the trial's files. It changes if any of them is written, even
        if its time of modification (mtime) is restored, since that of its change (ctime) cannot be."""
        files: list[tuple[str, str, int, int, int]] = []
        waiting = [trial]
        done: set[str] = set()
        while waiting:
            folder = self.folder(name := waiting.pop())
            done.add(name)
            paths = [path for path in sorted(folder.glob("*")) if path.suffix in (".json", ".jsonl")]
            files += [
                (name, path.name, (facts := path.stat()).st_size, facts.st_mtime_ns, facts.st_ctime_ns)
                for path in paths
                if path.name != "spec.json" and path.exists()
            ]
            waiting += [
                trunk["trial"] for trunk in self._trunks(name, strict=False) if trunk["trial"] not in done
            ]
        return _digest(files)

    def log(self, trial: str, attempt: int) -> Path:
        """Return the path of an attempt's log."""
        return self.folder(trial) / f"log-{attempt}.txt"

    def log_tail(self, trial: str, attempt: int, lines: int = 20) -> str:
        """Return the last lines that an attempt printed, the long ones cut."""
        path = self.log(trial, attempt)
        if not path.exists():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_TAIL))
            last = file.read().decode(errors="replace").splitlines()[-lines:]
        return "\n".join(f"{text[:_LOG_LINE]} ..." if len(text) > _LOG_LINE else text for text in last)

    def claim(
        self, trial: str, attempt: int, wait: bool = True
    ) -> AbstractContextManager[Callable[[], bool]]:
        """Hold the trial's lock within the block. The lock ends with the process, however it ends. If another
        process holds it, wait, or raise Busy without `wait`. Yields a function that returns True while this
        attempt still holds the lock: an attempt that lost contact with the file system may have lost it."""
        return lock(self.folder(trial) / "lock", wait, attempt)


def _lines(path: Path, strict: bool) -> Iterator[Event]:
    if not path.is_file():
        if strict:
            raise Damaged(path, "a folder or a link that leads nowhere, not a file")
        return
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            try:
                yield parsed(text, path.parent.name)
            except ValueError as error:
                if strict:
                    raise Damaged(path, f"line {number} is damaged: {error}") from None


def _put(layer: list[tuple[Path, Event]], path: Path, event: Event) -> None:
    """Add an event to those of its step. A later attempt's records replace earlier ones; of one attempt, the
    first record of a metric counts."""
    kept: list[tuple[Path, Event]] = []
    texts = set(event.get("events", ()))
    for source, old in layer:
        if source == path and old == event:  # the same line, reached through another trunk
            return
        if source == path:
            event = _without(event, old["metrics"])
        else:
            old = _without(old, event["metrics"])
        if old["metrics"] or set(old.get("events", ())) - texts:
            kept.append((source, old))
    layer[:] = [*kept, (path, event)]


def _without(event: Event, names: Collection[str]) -> Event:
    return event | {"metrics": {name: at for name, at in event["metrics"].items() if name not in names}}


def _counted(sealed: Mapping[str, Json]) -> str:
    return f"{sealed['count']:,} records of digest {str(sealed['sha256'])[:8]}"
