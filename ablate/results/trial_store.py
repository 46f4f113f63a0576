"""The trial store: one self-describing folder a trial, shared by every sweep. Results are files; renaming one in is the commit.

trials/<id>/spec.json             what was run: the hash of this is the id
trials/<id>/log-<attempt>.txt     what the trial printed; made first, it gives the attempt its number, whoever asks for the trial
trials/<id>/events-<attempt>.jsonl  one record a line with its checksum, appended as it happens
trials/<id>/lock                  held by the attempt that runs, and names it
trials/<id>/trunk-<attempt>.json  the trial whose records come before this attempt's, and up to which step, where it was forked
trials/<id>/artifacts/            what the trial left for people: pictures
trials/<id>/result.json           there when, and only when, the trial is over and need never run again

Nothing here is trusted because it is there. `result.json` has a digest of itself, and number and digest of the trial's records; each
line of events and each checkpoint has a checksum of its own. Whatever does not match raises `Damaged`, which names the file.
"""

import hashlib
import json
import math
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ablate.files import Damaged, lock, read_json, synced, write
from ablate.training.checkpoint_footer import CHECKPOINT_VERSION, read_footer

_RECORD = struct.Struct("<qdd")
_CRC = b', "crc": "'
_OF_A_RESULT = {"status", "reason", "seconds", "started", "steps"}


class Tally:
    """Number and digest of a trial's records: the same for events files and for ledger rows that hold the same records.

    A metric is a column of (step, value, time) in the order of its steps; the digest is the SHA-256 of all columns' digests, by the
    metrics' names, and of what was done in words. Values count as the ledger keeps them: doubles, every NaN alike, -0.0 as 0.0.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()) -> None:
        self.count = 0
        self._columns: dict[str, Any] = {}
        self._last: dict[str, int] = {}
        self._words: set[tuple[int, str]] = set()
        self._waiting: dict[str, list[tuple[int, float | None, float]]] = {}
        """Rows that were counted one by one and are not in their column's digest yet."""
        for event in events:
            self.add(event)

    def add(self, event: Mapping[str, Any]) -> None:
        """Count an event's records; of a metric that comes twice at one step, the first. ValueError where steps go back."""
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
        """Count what was done, in words, by step."""
        self._words.update(rows)

    def sealed(self) -> dict[str, Any]:
        """Number and digest of all that was counted so far: `count`, `sha256`."""
        for name in list(self._waiting):
            self.column(name, self._waiting.pop(name))
        digests = [[name, column.hexdigest()] for name, column in sorted(self._columns.items())]
        return {"count": self.count, "sha256": _digest([digests, sorted(self._words)])}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def line(event: Mapping[str, Any], trial: str) -> bytes:
    """Return an event as a line of an events file, with a checksum of the event and of its trial's id."""
    text = json.dumps(event).encode()
    return text[:-1] + _CRC + b'%08x"}\n' % _checksum(text, trial)


def parsed(text: bytes, trial: str) -> dict[str, Any]:
    """Return the event of a line of a trial's file. ValueError for a line that is not what was written, or of another trial.

    Lines of earlier versions have no checksum.
    """
    body, mark, crc = text.rpartition(_CRC)
    if mark and crc != b'%08x"}\n' % _checksum(body + b"}", trial):
        raise ValueError("its checksum does not match")
    return as_event(json.loads(body + b"}" if mark else text))


def as_event(content: Any) -> dict[str, Any]:
    """Return content that is an event: an integer `step`, a number `time`, a mapping `metrics`. ValueError for anything else."""
    whole = (
        isinstance(content, dict)
        and isinstance(content.get("metrics"), dict)
        and isinstance(content.get("step"), int)
    )
    if not whole or not isinstance(content.get("time"), int | float):
        raise ValueError("it is no event")
    return content


def _checksum(text: bytes, trial: str) -> int:
    return zlib.crc32(text, zlib.crc32(trial.encode()))


class Store:
    """The folder `trials/` of a state folder."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def folder(self, trial: str) -> Path:
        """Where the trial with this id lives; made when it is first run."""
        return self.root / "trials" / trial

    def result(self, trial: str) -> dict[str, Any] | None:
        """The result of a finished trial, None for one that is not finished. Damaged where it is not what was committed.

        `records` has number and digest of the trial's records; results of earlier versions have none.
        """
        path = self.folder(trial) / "result.json"
        try:
            result = read_json(path)
        except FileNotFoundError:
            return None
        seal = result.pop("sha256", None)
        if seal != _digest(result) and (seal or "records" in result):
            raise Damaged(path, "damaged: its checksum does not match")
        if result.get("id", trial) != trial:
            raise Damaged(path, f"the result of another trial, {result['id']}")
        return result

    def finished(self, trial: str) -> bool:
        """Return True for a trial with a result; one whose result is damaged runs again."""
        try:
            return self.result(trial) is not None
        except Damaged:
            return False

    def artifacts(self, trial: str) -> list[Path]:
        """The files that the trial left for people, by name; none where it left none, or runs elsewhere."""
        return sorted(path for path in (self.folder(trial) / "artifacts").glob("*") if path.is_file())

    def commit(self, trial: str, result: dict[str, Any]) -> None:
        """Make `result` the trial's result: all of it or nothing, also when the power fails. Its events files are on disk before it."""
        for path in (*self._events_files(trial), self.folder(trial)):
            synced(path)
        write(self.folder(trial) / "result.json", result | {"sha256": _digest(result)})

    def begin(self, trial: str) -> int:
        """A new attempt's number, above all there were, in any sweep and by any ledger: its records replace nobody else's."""
        folder = self.folder(trial)
        folder.mkdir(parents=True, exist_ok=True)
        attempt = max(map(_number, folder.glob("log-*.txt")), default=0) + 1
        while True:
            try:
                (folder / f"log-{attempt}.txt").touch(exist_ok=False)
                return attempt
            except FileExistsError:  # two controllers ask at the same moment
                attempt += 1

    def retire(self, trial: str) -> Path | None:
        """Put the trial's folder aside, so that it is run afresh; returns its place in `retired/`, None where there is no folder."""
        return self.put_aside(self.folder(trial)) if self.folder(trial).exists() else None

    def put_aside(self, path: Path) -> Path | None:
        """Move a file or a folder to `retired/`; returns its new path, None where another process was faster."""
        retired = self.root / "retired"
        retired.mkdir(exist_ok=True)
        aside = retired / f"{path.name}-{time.time_ns()}"
        with suppress(FileNotFoundError):
            return path.rename(aside)
        return None

    def shared(self, name: str) -> Path:
        """Where the checkpoint lies that several trials pass through."""
        return self.root / "checkpoints" / f"{name}.pt"

    def checkpoint_step(self, trial: str) -> int:
        """Return the step of the trial's own checkpoint, 0 if there is none that it can go on from. Reads the footer alone."""
        path = self.folder(trial) / "checkpoint.pt"
        with suppress(OSError, ValueError, KeyError, TypeError), path.open("rb") as file:
            about = read_footer(file, path)
            if (about["version"], about["trial"]) == (CHECKPOINT_VERSION, trial):
                return int(about["step"])
        return 0

    def largest_checkpoint(self) -> int:
        """Bytes of the largest checkpoint there is."""
        return max((path.stat().st_size for path in self._checkpoints()), default=0)

    def collect(self, free: int) -> bool:
        """Remove shared checkpoints, those unused for longest first, until the disk has so many bytes free; whether it has.

        Nothing is lost but time: a trial that would have gone on from one starts earlier.
        """
        for path in sorted(self._checkpoints(), key=lambda path: path.stat().st_mtime):
            if shutil.disk_usage(self.root).free >= free:
                break
            path.unlink(missing_ok=True)
        return shutil.disk_usage(self.root).free >= free

    def checkpoints(self) -> list[Path]:
        """The shared checkpoints, and what killed trials wrote of one."""
        return [path for path in (self.root / "checkpoints").glob("*.pt*") if path.is_file()]

    def _checkpoints(self) -> list[Path]:
        return [*(self.root / "checkpoints").glob("*.pt"), *(self.root / "checkpoints").glob("*.pt.damaged")]

    def fork(self, trial: str, attempt: int, trunk: Mapping[str, Any]) -> None:
        """Note that an attempt goes on from the state that the trial `trunk["trial"]` left after `trunk["step"]` steps."""
        write(self.folder(trial) / f"trunk-{attempt}.json", trunk)

    def events(self, trial: str, until: float = math.inf, strict: bool = True) -> Iterator[dict[str, Any]]:
        """What the trial recorded up to a step, by step, its trunks' records included; of a record that several attempts made, the last.

        A last line torn by a crash is left out. Damaged for a line that is not what was written, which is left out where not `strict`.
        """
        layers: dict[int, list[tuple[Path, dict[str, Any]]]] = {}
        self._lay(layers, trial, until, strict)
        for step in sorted(layers):
            yield from (event for _, event in layers[step])

    def _lay(
        self, layers: dict[int, list[tuple[Path, dict[str, Any]]]], trial: str, until: float, strict: bool
    ) -> None:
        """Two trials may each have gone on from a state that the other left, and a trial from one of its own: a trunk counts for what
        lies beyond it alone."""
        for trunk in self._trunks(trial, strict):
            if trunk["step"] < until:
                self._lay(layers, trunk["trial"], trunk["step"], strict)
        for path in self._events_files(trial):
            for event in _lines(path, strict):
                if event["step"] <= until:
                    _put(layers.setdefault(event["step"], []), path, event)

    def _trunks(self, trial: str, strict: bool = True) -> Iterator[dict[str, Any]]:
        for path in sorted(self.folder(trial).glob("trunk-*.json"), key=_number):
            try:
                trunk = read_json(path)
                yield {"trial": str(trunk["trial"]), "step": int(trunk["step"])}
            except (ValueError, TypeError, KeyError) as error:
                if strict:
                    raise (
                        error
                        if isinstance(error, Damaged)
                        else Damaged(path, "damaged: it names no trial and step")
                    ) from None

    def _events_files(self, trial: str) -> list[Path]:
        return sorted(self.folder(trial).glob("events-*.jsonl"), key=_number)

    def attempts(self, trial: str) -> int:
        """How many attempts recorded something of the trial, its trunks' counted as one each."""
        return len(self._events_files(trial)) + len(list(self._trunks(trial, strict=False)))

    def proven(self, trial: str, result: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The events of a finished trial. Damaged where they are not those that its result was committed with.

        A result of an earlier version has no digest: its last step is all that can be compared.
        """
        folder = self.folder(trial)
        if lacking := _OF_A_RESULT - result.keys():
            raise Damaged(folder / "result.json", f"damaged: it has no {', '.join(sorted(lacking))}")
        wanted = result.get("records")
        try:
            events = list(
                self.events(trial, strict=not wanted)
            )  # a damaged line may be one that a later attempt made again
            found = Tally(events).sealed()
            if wanted and found != wanted:
                list(self.events(trial))  # the line that is damaged, if one is
        except (ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
            raise (
                error
                if isinstance(error, Damaged)
                else Damaged(folder, f"its events cannot be read: {error}")
            ) from None
        last = max((event["step"] for event in events), default=0)
        if wanted and found != wanted:
            raise Damaged(
                folder, f"its events hold {_counted(found)}, and its result was made of {_counted(wanted)}"
            )
        if not wanted and last != result["steps"]:
            raise Damaged(
                folder, f"its events end at step {last}, and its result says step {result['steps']}"
            )
        return events

    def signature(self, trial: str) -> str:
        """Changes when a file that says what the trial recorded is written, by size and time: a cheap reason to look at it again."""
        seen: list[Any] = []
        left = [trial]
        done: set[str] = set()
        while left:
            folder = self.folder(name := left.pop())
            done.add(name)
            paths = [path for path in sorted(folder.glob("*")) if path.suffix in (".json", ".jsonl")]
            seen += [
                [name, path.name, (facts := path.stat()).st_size, facts.st_mtime_ns]
                for path in paths
                if path.name != "spec.json"
            ]
            left += [
                trunk["trial"] for trunk in self._trunks(name, strict=False) if trunk["trial"] not in done
            ]
        return _digest(seen)

    def log(self, trial: str, attempt: int) -> Path:
        """What an attempt prints."""
        return self.folder(trial) / f"log-{attempt}.txt"

    def log_tail(self, trial: str, attempt: int, lines: int = 20) -> str:
        """The last lines that an attempt printed."""
        path = self.log(trial, attempt)
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    @contextmanager
    def claim(self, trial: str, attempt: int, wait: bool = True) -> Iterator[Callable[[], bool]]:
        """Hold the trial, waiting while another process does, or raise Busy. The lock ends with the process, however it ends.

        Gives a function: whether this attempt still holds it. One that lost touch with the file system, and wakes up, does not.
        """
        with lock(self.folder(trial) / "lock", wait, attempt) as held:
            yield held


def _lines(path: Path, strict: bool) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            try:
                yield parsed(text, path.parent.name)
            except ValueError as error:
                if strict:
                    raise Damaged(path, f"line {number} is damaged: {error}") from None


def _put(layer: list[tuple[Path, dict[str, Any]]], path: Path, event: dict[str, Any]) -> None:
    """Add an event to those of its step: a later attempt's records replace earlier ones, one attempt's second ones count for nothing."""
    kept, words = [], set(event.get("events", ()))
    for source, old in layer:
        if source == path and old == event:  # the same line, by another way
            return
        if source == path:
            event = event | {
                "metrics": {
                    name: value for name, value in event["metrics"].items() if name not in old["metrics"]
                }
            }
        else:
            old = old | {
                "metrics": {
                    name: value for name, value in old["metrics"].items() if name not in event["metrics"]
                }
            }
        if old["metrics"] or set(old.get("events", ())) - words:
            kept.append((source, old))
    layer[:] = [*kept, (path, event)]


def _counted(sealed: Mapping[str, Any]) -> str:
    return f"{sealed['count']:,} records of digest {str(sealed['sha256'])[:8]}"


def _number(path: Path) -> int:
    """The attempt that a file belongs to."""
    return int(path.stem.partition("-")[2])
