"""One-token changes of a function: the mistakes that a draw of mutants consists of.

A site is a place in a function's syntax tree where one token can be changed so that the text still parses and
the result is most likely another. Left out is what no test should see: docstrings, annotations, decorators,
messages of errors and logs, `__repr__`, waiting times, floats below 1e-6, which guard divisions.
"""

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
OPERATORS = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
SILENT = {"print", "warn", "debug", "info", "warning", "log", "echo", "sleep", "cast"}
"""Calls that are not changed: logs, waiting, and types."""
NO_RESULT = {"timeout", "maxsize", "strict", "stacklevel", "daemon", "wait", "figsize", "dpi", "indent"}
"""Arguments by name of which a change is a matter of time or looks."""
TEXTS = {"__repr__", "__str__", "__rich__"}
"""Methods that are not changed."""
SMALL = 1e-6


@dataclass(frozen=True)
class Site:
    """One change: bytes from `start` to `end` of the file's text become `after`."""

    kind: str
    start: int
    end: int
    before: str
    after: str
    line: int

    def apply(self, text: str) -> str:
        """Return the text of the file with this change."""
        content = text.encode()
        return (content[: self.start] + self.after.encode() + content[self.end :]).decode()


@dataclass
class Source:
    """Text of a file, its tree, and the offset of each of its lines in bytes."""

    text: str
    tree: ast.Module = field(init=False)
    content: bytes = field(init=False)
    lines: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.text)
        self.content = self.text.encode()
        self.lines = [0]
        for line in self.content.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the bytes of a node: its first, and the one after its last."""
        start = self.lines[node.lineno - 1] + node.col_offset
        return start, self.lines[node.end_lineno - 1] + node.end_col_offset

    def functions(self) -> Iterator[tuple[str, Function]]:
        """Yield qualified name and node of each function and method; nested functions belong to the outer one."""
        pending: list[tuple[str, ast.AST]] = [("", self.tree)]
        while pending:
            prefix, parent = pending.pop()
            for node in ast.iter_child_nodes(parent):
                if isinstance(node, Function):
                    yield prefix + node.name, node
                elif isinstance(node, ast.ClassDef):
                    pending.append((f"{prefix}{node.name}.", node))


def normalised(function: Function) -> str:
    """Return a function's syntax without docstrings, annotations and layout."""
    whole: list[tuple[ast.AST, str, object]] = []  # put back afterwards: a copy would take most of the time

    def bare(node: ast.AST, name: str, value: object) -> None:
        whole.append((node, name, getattr(node, name)))
        setattr(node, name, value)

    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            bare(node, "annotation", None)
        elif isinstance(node, Function | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
            bare(node, "body", node.body[1:])
        if isinstance(node, Function):
            bare(node, "returns", None)
    shape = ast.dump(function)
    for node, name, value in whole:
        setattr(node, name, value)
    return shape


def key_of(name: str, shape: str, number: int, site: Site) -> str:
    """Return the key of a change: the same wherever the function stands, another when it is changed."""
    return hashlib.sha256(f"{name}\n{shape}\n{number} {site.kind} {site.after}".encode()).hexdigest()[:16]


def called(node: ast.AST) -> str:
    """Return the last name of what a call calls, or nothing."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def says_something(node: ast.AST) -> bool:
    """Return True for a call that makes a message, a log or an error."""
    return called(node) in SILENT or called(node).endswith(("Error", "Warning"))


def sites(source: Source, function: Function) -> list[Site]:
    """Return the changes of a function, in the order of its syntax tree."""
    if function.name in TEXTS:
        return []
    result: list[Site] = []

    def add(kind: str, start: int, end: int, after: str, line: int) -> None:
        result.append(Site(kind, start, end, source.content[start:end].decode(), after, line))

    def between(kind: str, left: ast.AST, right: ast.AST, pattern: str, after: str) -> None:
        """Add a change of the token between two expressions, if nothing else can be meant."""
        start, end = source.span(left)[1], source.span(right)[0]
        gap = source.content[start:end].decode()
        if len(hits := [*re.finditer(pattern, gap)]) == 1 and "#" not in gap:
            add(kind, start + hits[0].start(), start + hits[0].end(), after, left.end_lineno)

    def negate(test: ast.expr) -> None:
        """Add the negation of a condition; of a `not`, its loss."""
        start, end = source.span(test)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = source.span(test.operand)[0]
            if source.content[start:inner] == b"not ":
                add("negated condition", start, inner, "", test.lineno)
        elif not (isinstance(test, ast.Compare) and len(test.ops) == 1):  # its comparison has the same change
            text = source.content[start:end].decode()
            if "\n" not in text:
                add("negated condition", start, end, f"(not ({text}))", test.lineno)

    def visit_all(nodes: list[ast.AST]) -> None:
        for node in nodes:
            visit(node)

    def visit(node: ast.AST) -> None:
        match node:
            case ast.Raise():
                add("dropped statement", *source.span(node), "pass", node.lineno)
                return
            case ast.JoinedStr():
                return  # Python 3.11 has no positions of what is within
            case ast.Assert():
                visit(node.test)
                return
            case ast.AnnAssign():
                visit_all([node.value] if node.value else [])
                return
            case ast.ClassDef():
                visit_all(node.body)
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                defaults = [one for one in (*node.args.defaults, *node.args.kw_defaults) if one]
                visit_all([*defaults, *node.body])
                return
            case ast.Call() if says_something(node):
                return
            case ast.keyword() if node.arg in NO_RESULT:
                return
            case ast.Expr(value=ast.Constant()):
                return
            case ast.Expr(value=ast.Call() as call) if not says_something(call):
                add("dropped statement", *source.span(node), "pass", node.lineno)
            case ast.AugAssign():
                add("dropped statement", *source.span(node), "pass", node.lineno)
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                add("dropped statement", *source.span(node), "pass", node.lineno)
            case ast.Compare(ops=[operator], comparators=[right]):
                pattern, after = COMPARISONS[type(operator)]
                guarded = rf"\b{pattern}\b" if pattern[0].isalpha() else pattern
                between("comparison", node.left, right, guarded, after)
            case ast.BinOp() if type(node.op) in OPERATORS and not any(
                isinstance(side, ast.JoinedStr)
                or (isinstance(side, ast.Constant) and isinstance(side.value, str))
                for side in (node.left, node.right)
            ):
                before, after = OPERATORS[type(node.op)]
                between("operator", node.left, node.right, re.escape(before), after)
            case ast.BoolOp():
                word, after = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for left, right in zip(node.values, node.values[1:], strict=False):
                    if len(node.values) == 2:
                        between("operator", left, right, rf"\b{word}\b", after)
            case ast.UnaryOp(op=ast.USub()):
                start = source.span(node)[0]
                add("operator", start, start + 1, " ", node.lineno)
            case ast.If() | ast.IfExp():
                negate(node.test)
            case ast.comprehension():
                for test in node.ifs:
                    negate(test)
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                add("operator", *source.span(node.func), CALLS[name], node.lineno)
            case ast.Constant(value=bool()):
                add("boolean", *source.span(node), str(not node.value), node.lineno)
            case ast.Constant(value=int()):
                add("constant", *source.span(node), str(node.value + 1), node.lineno)
            case ast.Constant(value=float()) if abs(node.value) >= SMALL:
                add("constant", *source.span(node), repr(node.value * 2), node.lineno)
        visit_all(list(ast.iter_child_nodes(node)))

    visit(function)
    return result
