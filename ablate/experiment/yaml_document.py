"""Parse YAML into plain values with their positions, and collect problems by line and column. Only this file
uses a YAML library.

YAML 1.2: `on` is a string, `1e-3` a number, a duplicate key an error. Aliases are refused: an experiment
needs none, and a few nested ones can expand to gigabytes. Also refused are tags other than those of plain
values (`!!str`, `!!int`, ...), keys that are lists or mappings, integers beyond 64 bits, and characters that
files or terminals cannot hold. Every refusal has its line and column.
"""

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    Event,
    MappingStartEvent,
    ScalarEvent,
    SequenceStartEvent,
)
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from ablate.errors import InputError, Problem, nearest, one_line
from ablate.files import Json

_LARGEST_FILE = 1 << 20
_DEEPEST = 64
_LARGEST_INTEGER = (1 << 63) - 1
_MOST_NOTED = 1000
"""Problems after which reading stops: a file with more is no experiment, and each may need a search for the
nearest word."""
_MOST_PRINTED = 50
"""Largest number of problems that are printed."""
_TAGS = {
    ScalarEvent: ("!", *(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null"))),
    SequenceStartEvent: ("tag:yaml.org,2002:seq",),
    MappingStartEvent: ("tag:yaml.org,2002:map",),
}
"""Tags that only repeat the type that a value has without them."""
_UNSHOWN = object()

Path_ = tuple[str | int, ...]


@dataclass
class Document:
    """Parsed file: its plain value, and the position of every key and item by its path."""

    file: str
    value: dict[str, Json]
    text: str
    positions: dict[Path_, tuple[int, int]] = field(default_factory=dict)
    problems: dict[Problem, None] = field(default_factory=dict)
    """Problems in the order in which they were noted, each once."""
    written: dict[Path_, str] = field(default_factory=dict)
    """Keys as written in the file, by the paths of those that were renamed in `value`."""

    def problem(self, path: Iterable[str | int], reason: str, value: object = _UNSHOWN) -> None:
        """Note that the value at `path` is wrong: `field: value: reason`, at the nearest known position.

        InputError at the largest number of problems.
        """
        remark = self._at(tuple(path), reason, value)
        self.note(remark.line, remark.column, remark.message)

    def mapping(self, path: Sequence[str]) -> dict[str, Json]:
        """Return the mapping at `path` in `value`; an empty one if there is none."""
        content: Json = self.value
        for part in path:
            content = content.get(part) if isinstance(content, dict) else None
        return content if isinstance(content, dict) else {}

    def rename(self, path: tuple[str, ...], key: str, new: str) -> None:
        """Rename a key of the mapping at `path` in `value`. Paths use the new name from now on, messages the
        written one."""
        content = self.mapping(path)
        items = [(new if name == key else name, value) for name, value in content.items()]
        content.clear()
        content.update(items)
        self.written[*path, new] = key

    def remark(self, path: Iterable[str | int], reason: str, value: object = _UNSHOWN) -> str:
        """Return a remark on something that is not wrong, in the form of a problem. Nothing is noted."""
        return str(self._at(tuple(path), reason, value))

    def _at(self, path: Path_, reason: str, value: object) -> Problem:
        """Return a problem at the nearest known position of `path`."""
        path = tuple(self.written.get(path[: depth + 1], part) for depth, part in enumerate(path))
        nearest_path = next(path[:n] for n in range(len(path), -1, -1) if path[:n] in self.positions)
        line, column = self.positions[nearest_path]
        name = one_line(".".join(str(part) for part in path))
        shown = "" if value is _UNSHOWN else f"{display(value)}: "
        return Problem(self.file, line, column, f"{name}: {shown}{reason}" if name else f"{shown}{reason}")

    def note(self, line: int, column: int, message: str) -> None:
        """Note a problem at a line and a column."""
        self.problems[Problem(self.file, line, column, one_line(message))] = None
        if len(self.problems) >= _MOST_NOTED:
            self.check()

    def check(self) -> None:
        """Raise InputError if problems were noted, with the first of them in the order of the file and the
        number of the others."""
        if not self.problems:
            return
        problems = sorted(self.problems, key=lambda p: (p.line, p.column))
        if len(problems) > _MOST_PRINTED:
            last, more = problems[_MOST_PRINTED - 1], len(problems) - _MOST_PRINTED
            stopped = len(problems) >= _MOST_NOTED
            count = f"at least {more}" if stopped else f"{more}"
            most = ": reading stopped there" if stopped else ""
            problems = [
                *problems[:_MOST_PRINTED],
                Problem(self.file, last.line, last.column, f"and {count} more problems{most}"),
            ]
        raise InputError(problems)


def scalar(text: str) -> Json:
    """Return the value that a YAML file would hold; the text itself if it is no YAML."""
    try:
        return YAML(typ="safe", pure=True).load(text)
    except Exception:  # of whatever class: constructors of tags raise their own
        return text


def display(value: object) -> str:
    """Return a value as YAML writes it, at most 60 characters of it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read(path: Path) -> Document:
    """Parse a file. InputError, with line and column, if it cannot be read or is no YAML."""
    name = str(path)
    try:
        if path.stat().st_size > _LARGEST_FILE:
            what = f"is {path.stat().st_size} bytes long; an experiment is at most {_LARGEST_FILE}"
            raise InputError([Problem(name, 1, 1, what)])
        content = path.read_bytes()
    except FileNotFoundError:
        near = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        hint = f"; {nearest(path.name, near)}" if near else ""
        raise InputError([f"{name}: no such file{hint}"]) from None
    except (OSError, ValueError) as error:
        raise InputError([f"{name}: cannot be read: {error}"]) from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, column = _line_and_column(content[: error.start].decode("utf-8-sig", "replace"))
        what = f"byte {content[error.start]:#04x} is not UTF-8, the encoding of experiment files"
        raise InputError([Problem(name, line, column, what)]) from None
    return parse(text, name)


def parse(text: str, name: str) -> Document:
    """Parse YAML text. InputError, with file, line and column, if it is none or is refused."""
    yaml = YAML(typ="rt", pure=True)
    last: Event | None = None
    document = Document(name, {}, text, {(): (1, 1)})
    try:
        for event in _sound(yaml, text, document):
            last = event
        node = yaml.compose(io.StringIO(text))
    except InputError:
        raise
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(filter(None, (error.context, error.problem))) or "is not YAML"
        raise InputError([Problem(name, mark.line + 1, mark.column + 1, one_line(what))]) from None
    except ReaderError as error:
        what = f"character {error.character:#06x} is not allowed in YAML"
        raise InputError([Problem(name, *_line_and_column(text[: error.position]), what)]) from None
    except Exception as error:  # the library has more classes than it documents, and defects of its own
        line, column = (last.end_mark.line + 1, last.end_mark.column + 1) if last else (1, 1)
        what = one_line((str(error) or type(error).__name__).splitlines()[0])
        raise InputError([Problem(name, line, column, f"not YAML from here on: {what}")]) from None
    document.check()
    if not isinstance(node, MappingNode):
        what = "empty" if node is None else "a list" if isinstance(node, SequenceNode) else "a single value"
        raise InputError(
            [
                Problem(
                    name,
                    1,
                    1,
                    f"an experiment file is a mapping (question: ..., ablate: ...); this file is {what}",
                )
            ]
        )
    document.value = _plain_mapping(yaml, node, (), document)
    document.check()
    return document


def _line_and_column(before: str) -> tuple[int, int]:
    """Return line and column of the end of a text."""
    return before.count("\n") + 1, len(before) - before.rfind("\n")


def _sound(yaml: YAML, text: str, document: Document) -> Iterator[Event]:
    """Yield the parser's events. InputError at an alias or too deep nesting; a tag that changes a value's
    type is noted."""
    levels = 0
    for event in yaml.parse(io.StringIO(text)):
        yield event
        line, column = event.start_mark.line + 1, event.start_mark.column + 1
        levels += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if isinstance(event, AliasEvent):
            what = "aliases are refused, because a few can expand to gigabytes; write the value out"
            raise InputError(
                [Problem(document.file, line, column, one_line(f"alias *{event.anchor}: {what}"))]
            )
        if levels > _DEEPEST:
            what = f"nested more than {_DEEPEST} levels deep; an experiment needs fewer than ten"
            raise InputError([Problem(document.file, line, column, what)])
        tag = getattr(event, "tag", None)
        if tag and tag not in _TAGS.get(type(event), ()):
            shown = f"!!{tag.rpartition(':')[2]}" if tag.startswith("tag:yaml.org,2002:") else tag
            document.note(
                line,
                column,
                f"tag {shown} is refused: an experiment file contains plain values only; leave it out",
            )


def _plain(yaml: YAML, node: Node, path: Path_, document: Document) -> Json:
    """Return a node as dict, list, str, int, float, bool or None. Record positions, and note duplicate
    keys."""
    if isinstance(node, SequenceNode):
        for index, item in enumerate(node.value):
            document.positions[*path, index] = (item.start_mark.line + 1, item.start_mark.column + 1)
        return [_plain(yaml, item, (*path, index), document) for index, item in enumerate(node.value)]
    return (
        _plain_mapping(yaml, node, path, document)
        if isinstance(node, MappingNode)
        else _scalar(yaml, node, document)
    )


def _plain_mapping(yaml: YAML, node: MappingNode, path: Path_, document: Document) -> dict[str, Json]:
    """Return a mapping as `_plain` does."""
    result: dict[str, Json] = {}
    for key_node, value_node in node.value:
        line, column = key_node.start_mark.line + 1, key_node.start_mark.column + 1
        if not isinstance(key_node, ScalarNode):
            document.note(line, column, "a key must be a string; this one is a list or a mapping")
            continue
        key = key_node.value
        document.positions.setdefault((*path, key), (line, column))
        if key in result:
            document.note(line, column, f"{key}: is given twice")
        if wrong := _unusable(key):
            document.note(line, column, f"{key}: {wrong}")
        result[key] = _plain(yaml, value_node, (*path, key), document)
    return result


def _scalar(yaml: YAML, node: Node, document: Document) -> Json:
    line, column = node.start_mark.line + 1, node.start_mark.column + 1
    try:
        value = yaml.constructor.construct_object(node, deep=True)
    except Exception as error:  # of whatever class: `!!bool x` is a KeyError
        name = str(node.tag).rpartition(":")[2]
        why = "has too many digits" if "digits" in str(error) else f"is no {name}"
        document.note(line, column, f"{display(node.value)}: {why}")
        return None
    if isinstance(value, str) or not (
        value is None or isinstance(value, bool | int | float) or type(value).__name__ == "ScalarBoolean"
    ):
        value = str(node.value)
    wrong = _unusable(value)
    if wrong:
        document.note(line, column, f"{display(node.value)}: {wrong}")
        return None
    for kind in (bool, int, float):
        if isinstance(value, kind) or (kind is bool and type(value).__name__ == "ScalarBoolean"):
            if kind is float and math.isinf(value) and not node.value.lower().endswith(".inf"):
                document.note(
                    line, column, f"{display(node.value)}: is beyond the largest number, about 1.8e308"
                )
            return kind(value)
    return value


def _unusable(value: object) -> str | None:
    """Return the reason to refuse a value that YAML allows; None if it is accepted."""
    if isinstance(value, str):
        if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
            return "contains NUL or half of a surrogate pair, which cannot be stored in a file"
    elif isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        return "does not fit into 64 bits; write it with a decimal point if it is a real number"
    return None


def as_text(value: Json) -> str:
    """Return data as YAML that `read` reads back: keys in their order, innermost mappings in one line."""
    writer, text = YAML(typ="rt", pure=True), io.StringIO()
    writer.width = 110
    writer.representer.add_representer(
        type(None), lambda to, _: to.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    writer.dump(_styled(value), text)
    return text.getvalue()


def _styled(part: Json) -> object:
    """Return data for a writer, with innermost mappings in one line."""
    if isinstance(part, list):
        return [_styled(item) for item in part]
    if not isinstance(part, dict):
        return part
    mapping = CommentedMap((key, _styled(item)) for key, item in part.items())
    if not any(isinstance(item, dict | list) for item in part.values()):
        mapping.fa.set_flow_style()
    return mapping


def with_values(text: str, values: Mapping[str, Json]) -> str:
    """Return an experiment's text with other values of some top-level keys; comments and order stay.

    Args:
        text: YAML that `parse` accepts.
        values: values by key; None removes the key.
    """
    yaml = YAML()
    yaml.preserve_quotes, yaml.width = True, _LARGEST_FILE  # no line is folded
    content = yaml.load(text)
    for key, value in values.items():
        if key == "null":
            content.pop(None, None)  # a bare null: as a key is no text to YAML
        if value is None:
            content.pop(key, None)
            continue
        content[key] = _styled(value)
    stream = io.StringIO()
    yaml.dump(content, stream)
    return stream.getvalue()
