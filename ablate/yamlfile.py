"""YAML as plain values that remember where they stood, and complaints that say so. The only file that knows a YAML library.

YAML 1.2: `on` is a word, `1e-3` a number, a duplicate key an error. Aliases are refused: an experiment needs none, and a few
nested ones can unfold into gigabytes.
"""

import difflib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError, YAMLStreamError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

_LARGEST_FILE = 1 << 20
_DEEPEST = 64
_UNSHOWN = object()

Path_ = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a file, and where: `line` and `column` count from 1."""

    file: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.message}"


class InputError(Exception):
    """What a user gave cannot be run: all problems at once. Ends a command with status 2."""

    def __init__(self, problems: Sequence[Problem | str]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = list(problems)


@dataclass
class Document:
    """A parsed file: its plain value, and the position of every key and item by its path."""

    file: str
    value: Any
    text: str
    positions: dict[Path_, tuple[int, int]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def problem(self, path: Iterable[str | int], reason: str, value: Any = _UNSHOWN) -> None:
        """Note that what stands at `path` is wrong: `field: value: reason`, at the nearest known position."""
        path = tuple(path)
        known = next(path[:n] for n in range(len(path), -1, -1) if path[:n] in self.positions)
        line, column = self.positions[known]
        name = ".".join(str(part) for part in path)
        shown = "" if value is _UNSHOWN else f"{display(value)}: "
        problem = Problem(self.file, line, column, f"{name}: {shown}{reason}" if name else f"{shown}{reason}")
        if problem not in self.problems:
            self.problems.append(problem)

    def check(self) -> None:
        """Raise InputError where problems were noted, in the order of the file."""
        if self.problems:
            raise InputError(sorted(self.problems, key=lambda p: (p.line, p.column)))


def scalar(text: str) -> Any:
    """A value as a YAML file would hold it; the text itself where that is no YAML."""
    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError:
        return text


def display(value: Any) -> str:
    """A value as YAML writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(word: str, known: Iterable[str], count: int = 6) -> str:
    """`'clip' is the nearest of clip, element, ...`: what a mistyped word may have meant."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=count, cutoff=0.0)
    listed = ", ".join(near + ([f"... ({len(known)} in all)"] if len(known) > len(near) else []))
    return f"{near[0]!r} is the nearest of {listed}" if near else "nothing can be set here"


def read(path: Path) -> Document:
    """Parse a file, or raise InputError in one sentence with the place."""
    name = str(path)
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise InputError([f"{name}: {path.stat().st_size} bytes; an experiment is at most {_LARGEST_FILE}"])
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        hint = f"; {nearest(path.name, near)}" if near else ""
        raise InputError([f"{name}: no such file{hint}"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError([f"{name}: cannot be read: {error}"]) from None
    return parse(text, name)


def parse(text: str, name: str) -> Document:
    """Parse YAML text, or raise InputError with file, line and column."""
    yaml = YAML(typ="rt", pure=True)
    try:
        _refuse_what_unfolds(yaml, text, name)
        node = yaml.compose(io.StringIO(text))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(filter(None, (error.context, error.problem))) or "is not YAML"
        raise InputError([Problem(name, mark.line + 1, mark.column + 1, what)]) from None
    except (YAMLError, YAMLStreamError, ValueError) as error:
        raise InputError([f"{name}: not YAML: {str(error).splitlines()[0]}"]) from None
    document = Document(name, None, text, {(): (1, 1)})
    if not isinstance(node, MappingNode):
        what = "empty" if node is None else "a list" if isinstance(node, SequenceNode) else "a single value"
        raise InputError([Problem(name, 1, 1, f"an experiment is a mapping (question: ..., ablate: ...); this file is {what}")])
    try:
        document.value = _plain(yaml, node, (), document)
    except ValueError as error:
        raise InputError([f"{name}: holds a value that cannot be read: {error}"]) from None
    document.check()
    return document


def _refuse_what_unfolds(yaml: YAML, text: str, name: str) -> None:
    levels, reason = 0, ""
    for event in yaml.parse(io.StringIO(text)):
        levels += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if isinstance(event, AliasEvent):
            reason = f"alias *{event.anchor}: aliases are refused, since a few can unfold into gigabytes; write the value out"
        elif levels > _DEEPEST:
            reason = f"nested more than {_DEEPEST} levels deep: an experiment has a handful of levels"
        if reason:
            raise InputError([Problem(name, event.start_mark.line + 1, event.start_mark.column + 1, reason)])


def _plain(yaml: YAML, node: Node, path: Path_, document: Document) -> Any:
    """The node as Python's own dict, list, str, int, float, bool or None; notes positions and duplicate keys on the way."""
    if isinstance(node, SequenceNode):
        for index, item in enumerate(node.value):
            document.positions[*path, index] = (item.start_mark.line + 1, item.start_mark.column + 1)
        return [_plain(yaml, item, (*path, index), document) for index, item in enumerate(node.value)]
    if isinstance(node, MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            document.positions.setdefault((*path, key), (key_node.start_mark.line + 1, key_node.start_mark.column + 1))
            if key in result:
                where = key_node.start_mark
                document.problems.append(Problem(document.file, where.line + 1, where.column + 1, f"{key}: stands twice"))
            result[key] = _plain(yaml, value_node, (*path, key), document)
        return result
    return _scalar(yaml, node)


def _scalar(yaml: YAML, node: ScalarNode) -> Any:
    value = yaml.constructor.construct_object(node, deep=True)
    for kind in (bool, int, float, str):
        if isinstance(value, kind) or (kind is bool and type(value).__name__ == "ScalarBoolean"):
            return kind(value)
    return value if value is None else str(node.value)
