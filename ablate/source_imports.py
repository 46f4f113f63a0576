"""Modules that a Python file imports, and folders that it adds to `sys.path`, read without executing it.

    ROOT = Path(__file__).parent.parent                 # paths are computed from such assignments
    sys.path.insert(0, str(ROOT / "lib"))               # a folder: .../lib
    import helper, package.part                         # names: helper, package.part
    from . import beside                                # a name relative to the file's package
    importlib.import_module(f"{KIND}.small")            # a name, if that of KIND can be computed

Only strings and paths of an expression are computed, from a list of functions of `os.path` and `pathlib`.
Not found: names and folders that need anything else, such as a loop's variable or an environment variable.
"""

import ast
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_NODES = (
    *(ast.Call, ast.Attribute, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.Div, ast.Add, ast.Subscript),
    *(ast.JoinedStr, ast.FormattedValue, ast.UnaryOp, ast.USub),
)
_ATTRIBUTES = (
    "path/dirname/abspath/realpath/normpath/join/fspath/pardir/curdir/sep/getcwd/Path/cwd/parent/parents/resolve"
    "/absolute/joinpath/as_posix/expanduser"
)
"""Nodes and attributes of an expression that is computed: none of them changes or executes anything."""
_PATHS: Mapping[str, object] = {
    **{"os": os, "osp": os.path, "pathlib": pathlib, "Path": Path, "str": str, "path": os.path},
    **{name: getattr(os.path, name) for name in ("dirname", "abspath", "realpath", "normpath", "join")},
}
_IMPORTERS = ("import_module", "__import__", "run_module")
_BY_PATH = ("spec_from_file_location", "SourceFileLoader", "run_path")
"""Functions that execute the file of a path."""
_COMPUTED = tuple(word.encode() for word in (*_IMPORTERS, *_BY_PATH, "path", "addsitedir"))
"""Words without which a file has import statements alone, so that its expressions need not be read."""

Name = tuple[int, tuple[str, ...]]
"""Leading dots of a module's name, and its parts."""


class Imports(NamedTuple):
    """Names of modules, added folders, and lines that execute a file without its name."""

    names: Mapping[Name, int]
    """With the line, if it is inside a function; else 0."""
    folders: Collection[str]
    """As the file has them: relative ones are relative to the working directory."""
    hidden: Collection[int]
    """Lines that execute a file by its path."""


def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file; SyntaxError, OSError if it cannot be read."""
    status = path.stat()
    return _parsed(path, status.st_mtime_ns, status.st_size)


def imports(path: Path) -> Imports:
    """Return what a file imports; SyntaxError, OSError if it cannot be read."""
    status = path.stat()
    return _imports(path, status.st_mtime_ns, status.st_size, os.getcwd())


def _names(node: ast.AST, known: Mapping[str, object]) -> Iterator[Name]:
    """Yield the names of modules that a node of a syntax tree imports. `known`: values of names."""
    if isinstance(node, ast.Import):
        yield from ((0, tuple(alias.name.split("."))) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parts = tuple(node.module.split(".")) if node.module else ()
        yield node.level, parts
        yield from ((node.level, (*parts, alias.name)) for alias in node.names)
    elif isinstance(node, ast.Call) and _last(node.func) in _IMPORTERS and node.args:
        name = str(_value(node.args[0], known) or "")
        if bare := name.lstrip("."):
            yield len(name) - len(bare), tuple(bare.split("."))


def _assigned(whole: ast.Module, path: Path) -> dict[str, object]:
    """Return the strings and paths that a file assigns to names, and functions for paths."""
    known = {**_PATHS, "__file__": str(path)}
    for node in ast.walk(whole):
        if isinstance(node, ast.Assign) and (value := _value(node.value, known)) is not None:
            known |= {target.id: value for target in node.targets if isinstance(target, ast.Name)}
    return known


def _value(node: ast.expr, known: Mapping[str, object]) -> str | Path | None:
    """Return the string or path that an expression has; None if it needs more than is computed here."""
    for part in ast.walk(node):
        if not isinstance(part, _NODES) or (
            isinstance(part, ast.Attribute) and part.attr not in _ATTRIBUTES.split("/")
        ):
            return None
    try:
        value = eval(compile(ast.Expression(node), "", "eval"), {"__builtins__": {}}, dict(known))
    except (
        Exception
    ):  # an unknown name, or operands that do not fit: the same as an expression that is not read
        return None
    return value if isinstance(value, str | Path) else None


def _added(node: ast.AST, known: Mapping[str, object]) -> Iterator[str]:
    waiting: list[ast.AST] = []
    if isinstance(node, ast.Assign | ast.AugAssign) and "sys.path" in ast.unparse(node):
        waiting = [node.value]
    elif isinstance(node, ast.Call):
        on_path = (
            _last(node.func) in ("insert", "append", "extend")
            and _last(getattr(node.func, "value", node)) == "path"
        )
        waiting = [*node.args] if on_path or _last(node.func) == "addsitedir" else []
    while waiting:
        part = waiting.pop()
        value = _value(part, known) if isinstance(part, ast.expr) else None
        if value is None:
            waiting += ast.iter_child_nodes(part)
        else:
            yield str(value)


def _last(node: ast.AST) -> str:
    """Return the last part of a dotted name; empty for another expression."""
    return getattr(node, "attr", "") or getattr(node, "id", "")


@lru_cache(4096)
def _imports(path: Path, changed: int, size: int, folder: str) -> Imports:
    text = path.read_bytes()
    whole = _syntax(text, path)
    computed = any(word in text for word in _COMPUTED)
    known = _assigned(whole, path) if computed else {}
    found, folders, hidden = dict[Name, int](), dict[str, None](), list[int]()
    waiting: list[tuple[ast.AST, bool]] = [(whole, False)]
    while waiting:
        node, inside = waiting.pop()
        for name in _names(node, known):
            found[name] = max(found.get(name, 0), getattr(node, "lineno", 0) if inside else 0)
        folders |= dict.fromkeys(_added(node, known) if computed else ())
        if isinstance(node, ast.Call) and _last(node.func) in _BY_PATH:
            hidden.append(node.lineno)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        children = ast.iter_child_nodes(node)
        waiting += ((child, inside) for child in children if computed or not isinstance(child, ast.expr))
    return Imports(found, folders, hidden)


@lru_cache(1024)
def _parsed(path: Path, changed: int, size: int) -> ast.Module:
    return _syntax(path.read_bytes(), path)


def _syntax(text: bytes, path: Path) -> ast.Module:
    try:
        return ast.parse(text, str(path))
    except SyntaxError as error:
        if error.filename is None:  # Python gives no place for a null byte
            line = text.count(b"\n", 0, max(0, text.find(b"\0"))) + 1
            error.filename, error.lineno = str(path), line
        raise
