"""Long enumerations of cases in chunks, whose results are kept, so that a killed run loses one chunk."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ablate.cache import key_of
from ablate.errors import InputError
from ablate.files import Busy, Damaged, lock, read_json, write
from ablate.reports.plain_text import duration
from ablate.verification.check_result import Row


@dataclass(frozen=True)
class Tally:
    """Cases of a chunk, those in which something differs, and the first of these in words."""

    cases: int
    differences: int = 0
    first: str = ""
    seconds: float = 0.0
    """CPU time."""

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.cases + other.cases,
            self.differences + other.differences,
            self.first or other.first,
            self.seconds + other.seconds,
        )

    def row(self, what: str) -> Row:
        """Return a row that passes if nothing differs and there is at least one case."""
        measured = f"{self.differences:,} of {self.cases:,} differ, {duration(self.seconds)} of CPU time"
        if self.first:
            measured += f"; the first: {self.first}"
        return Row(what, measured, "0 differ", self.cases > 0 and self.differences == 0)


class Part(NamedTuple):
    """Enumeration of one kind: heading and text of its row, and its chunks by name."""

    group: str
    what: str
    chunks: Mapping[str, Callable[[], Tally]]


class Record:
    """Tallies by part and chunk, in a file that is written anew after each chunk.

    The file has a hash of its content, so that one that was edited or torn is refused.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tallies: dict[str, Tally] = {}
        if not path.exists():
            return
        try:
            content = read_json(path)
            chunks = content["chunks"]
            if content["seal"] != key_of(chunks):
                raise Damaged(path, "its content is not what was written to it")
            self._tallies = {name: Tally(*values) for name, values in chunks.items()}
        except (Damaged, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: cannot be trusted ({error}); delete it to enumerate anew") from None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from the file within the block; InputError if one has it."""
        try:
            with lock(self.path.with_suffix(".lock"), wait=False):
                yield
        except Busy as busy:
            raise InputError(f"{self.path}: {busy} enumerates already; wait until it ends") from None
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written ({error.strerror})") from None

    def of(self, part: str, chunk: str, count: Callable[[], Tally]) -> Tally:
        """Return the tally of a chunk, counted now if the file does not have it."""
        name = f"{part}: {chunk}"
        if name not in self._tallies:
            started = time.process_time()
            tally = replace(count(), seconds=round(time.process_time() - started, 3))
            self._tallies[name] = tally
            chunks = {name: [*vars(tally).values()] for name, tally in self._tallies.items()}
            write(self.path, {"chunks": chunks, "seal": key_of(chunks)})
        return self._tallies[name]


def rows_of(
    parts: Sequence[Part], record: Record, show: Callable[[str], object] | None = None
) -> Iterator[tuple[str, list[Row]]]:
    """Yield each heading with its rows once they are complete.

    Args:
        parts: Enumerations; those of a heading are neighbours.
        record: Where tallies are kept.
        show: Receives the progress, as text in rich's markup.
    """
    with record.held():
        for group in dict.fromkeys(part.group for part in parts):
            yield group, [_row(part, record, show) for part in parts if part.group == group]


def _row(part: Part, record: Record, show: Callable[[str], object] | None) -> Row:
    """Count what the record lacks. An exception becomes a row that failed, unless the record caused it."""
    tally = Tally(0)
    for number, (name, count) in enumerate(part.chunks.items(), 1):
        if show:
            progress = f"chunk {number} of {len(part.chunks)}, {tally.cases:,} cases"
            show(f"[dim]{part.group}: {part.what}[/] {progress} ...")
        try:
            tally += record.of(part.what, name, count)
        except (InputError, OSError):
            raise
        except Exception as error:
            return Row(part.what, f"chunk {name}: {type(error).__name__}: {error}", "no exception", False)
    return tally.row(part.what)
