"""Parse YAML into a frozen document: plain values, and the line and column of every key and item. Only this
file uses a YAML library.

YAML 1.2: `on` is a string, `1e-3` a number, a duplicate key an error. Aliases are refused: an experiment
needs none, and a few nested ones can expand to gigabytes. Also refused are tags other than those of plain
values (`!!str`, `!!int`, ...), keys that are lists or mappings, integers beyond 64 bits, and characters that
files or terminals cannot hold. Every refusal has its line and column.
"""

import io
import math
from collections.abc import Iterable, Iterator, Mapping
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

from ablate.errors import InputError, Problem, Reading, first_line, nearest, one_line, settled
from ablate.files import Json

_LARGEST_FILE = 1 << 20
_DEEPEST = 64
_LARGEST_INTEGER = (1 << 63) - 1
_TAGS = {
    ScalarEvent: ("!", *(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null"))),
    SequenceStartEvent: ("tag:yaml.org,2002:seq",),
    MappingStartEvent: ("tag:yaml.org,2002:map",),
}
"""Tags that only repeat the type that a value has without them."""
_UNSHOWN = object()

Path_ = tuple[str | int, ...]


@dataclass(frozen=True)
class Document:
    """Parsed file: its plain value, and the position of every key and item by its path. Nothing writes to
    it."""

    file: str
    value: Mapping[str, Json]
    text: str
    positions: Mapping[Path_, tuple[int, int]]
    written: Mapping[Path_, str] = field(default_factory=dict)
    """Keys as written in the file, by the paths of those that have another name in `value`."""

    def mapping(self, key: str) -> Mapping[str, Json]:
        """Return the mapping at a top-level key; an empty one if there is none."""
        content = self.value.get(key)
        return content if isinstance(content, dict) else {}

    def problem(self, path: Iterable[str | int], reason: str, value: object = _UNSHOWN) -> Problem:
        """Return a problem with the value at `path`: `field: value: reason`, at the nearest known
        position."""
        parts = tuple(path)
        parts = tuple(self.written.get(parts[: depth + 1], part) for depth, part in enumerate(parts))
        nearest_path = next(parts[:n] for n in range(len(parts), -1, -1) if parts[:n] in self.positions)
        name = one_line(".".join(str(part) for part in parts))
        shown = "" if value is _UNSHOWN else f"{display(value)}: "
        message = f"{name}: {shown}{reason}" if name else f"{shown}{reason}"
        return Problem(self.file, *self.positions[nearest_path], one_line(message))


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
            raise InputError(Problem(name, 1, 1, what))
        content = path.read_bytes()
    except FileNotFoundError:
        near = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        hint = f"; {nearest(path.name, near)}" if near else ""
        raise InputError(f"{name}: no such file{hint}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: cannot be read: {error}") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, column = _line_and_column(content[: error.start].decode("utf-8-sig", "replace"))
        what = f"byte {content[error.start]:#04x} is not UTF-8, the encoding of experiment files"
        raise InputError(Problem(name, line, column, what)) from None
    return parse(text, name)


def parse(text: str, name: str) -> Document:
    """Parse YAML text. InputError, with file, line and column, if it is none or is refused."""
    yaml = YAML(typ="rt", pure=True)
    node = settled(_composed(yaml, text, name))
    if not isinstance(node, MappingNode):
        what = "empty" if node is None else "a list" if isinstance(node, SequenceNode) else "a single value"
        why = f"an experiment file is a mapping (question: ..., ablate: ...); this file is {what}"
        raise InputError(Problem(name, 1, 1, why))
    value = settled(_mapping(yaml, node, name))
    return Document(name, value, text, {(): (1, 1), **dict(_positions(node, ()))})


def _line_and_column(before: str) -> tuple[int, int]:
    return before.count("\n") + 1, len(before) - before.rfind("\n")


def _at(name: str, start: Event | Node, message: str) -> Problem:
    return Problem(name, start.start_mark.line + 1, start.start_mark.column + 1, one_line(message))


def _composed(yaml: YAML, text: str, name: str) -> Reading[Node | None]:
    """Return the root of a text's nodes; a tag that changes a value's type is a problem. InputError at an
    alias, too deep nesting, or what is no YAML."""
    last: Event | None = None
    levels = 0
    try:
        for event in yaml.parse(io.StringIO(text)):
            last = event
            if getattr(event, "version", None) not in (None, (1, 2)):
                what = "1.1 reads `on` as true and 010 as 8; leave the line with %YAML out"
                raise InputError(_at(name, event, f"experiment files are YAML 1.2: {what}"))
            levels += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if isinstance(event, AliasEvent):
                what = "aliases are refused, because a few can expand to gigabytes; write the value out"
                raise InputError(_at(name, event, f"alias *{event.anchor}: {what}"))
            if levels > _DEEPEST:
                what = f"nested more than {_DEEPEST} levels deep; an experiment needs fewer than ten"
                raise InputError(_at(name, event, what))
            tag = getattr(event, "tag", None)
            if tag and tag not in _TAGS.get(type(event), ()):
                shown = f"!!{tag.rpartition(':')[2]}" if tag.startswith("tag:yaml.org,2002:") else tag
                what = "an experiment file contains plain values only; leave it out"
                yield _at(name, event, f"tag {shown} is refused: {what}")
        return yaml.compose(io.StringIO(text))
    except InputError:
        raise
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(filter(None, (error.context, error.problem))) or "is not YAML"
        raise InputError(Problem(name, mark.line + 1, mark.column + 1, one_line(what))) from None
    except ReaderError as error:
        what = f"character {error.character:#06x} is not allowed in YAML"
        raise InputError(Problem(name, *_line_and_column(text[: error.position]), what)) from None
    except Exception as error:  # the library has more classes than it documents, and defects of its own
        line, column = (last.end_mark.line + 1, last.end_mark.column + 1) if last else (1, 1)
        what = one_line(first_line(error))
        raise InputError(Problem(name, line, column, f"not YAML from here on: {what}")) from None


def _positions(node: Node, path: Path_) -> Iterator[tuple[Path_, tuple[int, int]]]:
    if isinstance(node, SequenceNode):
        parts = [(index, item, item) for index, item in enumerate(node.value)]
    elif isinstance(node, MappingNode):
        parts = [(key.value, key, value) for key, value in node.value]
    else:
        return
    for part, start, child in parts:
        yield (*path, part), (start.start_mark.line + 1, start.start_mark.column + 1)
        yield from _positions(child, (*path, part))


def _plain(yaml: YAML, node: Node, name: str) -> Reading[Json]:
    if isinstance(node, MappingNode):
        return (yield from _mapping(yaml, node, name))
    if not isinstance(node, SequenceNode):
        return (yield from _scalar(yaml, node, name))
    items = []
    for item in node.value:
        items.append((yield from _plain(yaml, item, name)))
    return items


def _mapping(yaml: YAML, node: MappingNode, name: str) -> Reading[dict[str, Json]]:
    """Return a mapping as `_plain` does; a duplicate key is a problem."""
    result: dict[str, Json] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, ScalarNode):
            yield _at(name, key_node, "a key must be a string; this one is a list or a mapping")
            continue
        key = key_node.value
        if key in result:
            yield _at(name, key_node, f"{key}: is given twice")
        if wrong := _unusable(key):
            yield _at(name, key_node, f"{key}: {wrong}")
        result[key] = yield from _plain(yaml, value_node, name)
    return result


def _scalar(yaml: YAML, node: Node, name: str) -> Reading[Json]:
    try:
        value = yaml.constructor.construct_object(node, deep=True)
    except Exception as error:  # of whatever class: `!!bool x` is a KeyError
        kind = str(node.tag).rpartition(":")[2]
        why = "has too many digits" if "digits" in str(error) else f"is no {kind}"
        yield _at(name, node, f"{display(node.value)}: {why}")
        return None
    if type(value).__name__ == "ScalarBoolean":
        value = bool(value)
    if isinstance(value, str) or not (value is None or isinstance(value, bool | int | float)):
        value = str(node.value)
    if wrong := _unusable(value):
        yield _at(name, node, f"{display(node.value)}: {wrong}")
        return None
    for plain in (bool, int, float):  # in place of the library's classes, which keep how a number was written
        if isinstance(value, plain):
            if plain is float and math.isinf(value) and not node.value.lower().endswith(".inf"):
                why = "is beyond the largest number, about 1.8e308"
                yield _at(name, node, f"{display(node.value)}: {why}")
            return plain(value)
    return value


def _unusable(value: object) -> str | None:
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
    """Return an experiment's text, which `parse` accepts, with other values of some top-level keys; None
    removes the key. Comments and order stay."""
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
