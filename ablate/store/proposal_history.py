"""File with the history of a loop of proposals, in which a change of what was judged is found.

The problem. A gate over many proposals is right only about all of them: whoever leaves out discarded ones, or
judges one again until it passes, keeps noise. The file is written by the loop that it constrains, often an
agent's.

The idea. One JSON line declares the loop (alpha, number of proposals, direction, noise floor); each judgement
appends one line with the runs that it saw for the first time. A line has the digest of the line before it, so
that no line can be changed, removed from the middle, or moved. The last digest also stands in a second file,
`<history>.head`, so that a shortened history is found; and each judgement returns it as a token, which a
caller who keeps it elsewhere can give back.

Found: lines that were edited, reordered, removed (also at the end), or torn; a history without its head, or a
head without its history. Not found without a token: both files replaced by older copies, deleted, or written
anew with digests that fit. Never found: runs that were not given, and a new history for the same loop.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ablate.errors import InputError
from ablate.files import Damaged, lock, read_json, write, write_text

FORMAT = 1


@dataclass(frozen=True)
class Declaration:
    """First line of a history: what is fixed before the first proposal.

    Attributes:
        plan: Arguments of `ablate.results.proposals.Plan`.
        minimize: True if smaller values are better.
        floor: Values of the reruns that measure the noise floor.
    """

    plan: Mapping[str, float]
    minimize: bool
    floor: Sequence[float]


@dataclass(frozen=True)
class Judgement:
    """Line of a history: one decision on a proposal.

    Attributes:
        proposal: Name of the proposal, the first one under which it was given.
        content: Digest of the change, or "".
        candidate: Value of each new run of the candidate, by id. Diverged runs are not finite.
        baseline: The same for the baseline.
        decision: The decision, as `ablate.results.proposals.Decision.document` returns it.
    """

    proposal: str
    content: str
    candidate: Mapping[str, float]
    baseline: Mapping[str, float]
    decision: Mapping[str, Any]


@dataclass(frozen=True)
class ProposalHistory:
    """Checked content of a history: its judgements, the first one first, and the digest of each line, that of
    the declaration first."""

    declaration: Declaration
    judgements: tuple[Judgement, ...]
    digests: tuple[str, ...]

    @property
    def token(self) -> str:
        """Digest of the last line."""
        return self.digests[-1]


def locked(path: Path) -> AbstractContextManager[object]:
    """Hold the lock of a history within the block; wait for other processes."""
    return lock(path.with_name(f"{path.name}.lock"))


def create(path: Path, declaration: Declaration) -> ProposalHistory:
    """Write a new history, which must not exist, and return it."""
    text, digest = _line(declaration, "")
    write(_head(path), {"lines": 1, "digest": digest})
    write_text(path, text)
    return ProposalHistory(declaration, (), (digest,))


def append(path: Path, history: ProposalHistory, judgement: Judgement) -> ProposalHistory:
    """Append a judgement and return the longer history. The caller holds the lock and has read the file."""
    count = len(history.digests)
    if _read_head(path) != (count, history.token):  # the last process ended before its head
        write(_head(path), {"lines": count, "digest": history.token})
    text, digest = _line(judgement, history.token)
    write_text(path, path.read_text(encoding="utf-8").rstrip("\n") + "\n" + text)
    write(_head(path), {"lines": count + 1, "digest": digest})
    judgements = (*history.judgements, judgement)
    return ProposalHistory(history.declaration, judgements, (*history.digests, digest))


def read(path: Path) -> ProposalHistory | None:
    """Return a history after checking every line; None if it was not begun. A history may be one line longer
    than its head says, since a process may end between two writes. InputError if the file or its head is
    damaged, was changed or shortened, or one of them is missing."""
    if path.is_dir():
        raise InputError(f"{path}: a folder: name the file of a history, such as {path.name}/loop.jsonl")
    head = _read_head(path)
    if not path.exists():
        if head is None or head[0] == 1:  # a head of one line: the process ended before the first write
            return None
        raise InputError(
            f"{path}: the history is missing, and {_head(path).name} counts {head[0]} lines of it:"
            " restore it, since a loop that has forgotten its proposals is judged wrongly"
        )
    if head is None:
        raise InputError(
            f"{_head(path)}: this file is missing, so that a shortened history would not be found: restore it"
        )
    lines, digests, previous = path.read_bytes().splitlines(), [], ""
    parsed = [_parse(path, number, line) for number, line in enumerate(lines, 1)]
    for number, document in enumerate(parsed, 1):
        before, digest = document.pop("previous", None), document.pop("digest", None)
        if before != previous or digest != _digest([previous, document]):
            raise InputError(
                f"{path}:{number}: this line, or one before it, was changed, removed or moved: restore it"
            )
        previous = digest
        digests.append(digest)
    count, digest = head
    if not 0 <= len(digests) - count <= 1 or digests[count - 1] != digest:
        raise InputError(
            f"{path}: its {len(digests)} lines are not the {count}, ending in {digest[:12]}, that"
            f" {_head(path).name} names: the history was shortened or replaced. Restore it"
        )
    try:
        if parsed[0].pop("format") != FORMAT:
            raise InputError(f"{path}:1: written by another version: format {FORMAT} is read")
        for document in parsed[1:]:
            for side in ("candidate", "baseline"):  # values that are not finite are texts there
                document[side] = {run: float(value) for run, value in document[side].items()}
        judgements = [Judgement(**document) for document in parsed[1:]]
        return ProposalHistory(Declaration(**parsed[0]), tuple(judgements), tuple(digests))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: not a history of proposals: {error}") from None


def _head(path: Path) -> Path:
    return path.with_name(f"{path.name}.head")


def _read_head(path: Path) -> tuple[int, str] | None:
    """Return number and last digest of the lines that a history had when it was last written."""
    head = _head(path)
    if not head.exists():
        return None
    try:
        content = read_json(head)
        count, digest = content["lines"], content["digest"]
    except (Damaged, KeyError) as error:
        raise InputError(f"{head}: damaged ({error}): restore it") from None
    if type(count) is not int or count < 1 or not isinstance(digest, str):
        raise InputError(f"{head}: it does not name the lines of a history: restore it")
    return count, digest


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise InputError(f"{path}:{number}: torn or damaged: it is not a JSON object. Restore the history")
    return document


def _content(line: Declaration | Judgement) -> dict[str, Any]:
    """Return a line as JSON that every reader understands: values that are not finite become texts."""
    if isinstance(line, Declaration):
        return {"format": FORMAT, **asdict(line)}
    document = {field.name: getattr(line, field.name) for field in fields(line)}
    for side in ("candidate", "baseline"):
        document[side] = {
            run: value if math.isfinite(value) else repr(value) for run, value in document[side].items()
        }
    return document


def _line(line: Declaration | Judgement, previous: str) -> tuple[str, str]:
    """Return a line as text, and its digest."""
    content = _content(line)
    digest = _digest([previous, content])
    return json.dumps({**content, "previous": previous, "digest": digest}, allow_nan=False) + "\n", digest


def _digest(content: object) -> str:
    """Return the SHA-256 of a JSON value, whatever the order of its keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
