"""Record of the functions of the package that are called: each begins with a statement that notes its name.

Python 3.11 has nothing cheaper: a trace function makes tests take twice as long. The statement is added to the
syntax tree when a module is imported, on the line of the first statement of the function.
"""

import ast
import builtins
import importlib.machinery
import sys
from pathlib import Path

from mutants.changes import Source
from mutants.draw import PACKAGE

CALLED: set[tuple[str, str]] = set()
"""File, a path in the package, and qualified name of each function that was called."""
_NAME = "__called__"


def recording(text: str, file: str) -> ast.Module:
    """Return the syntax tree of a module whose functions note their calls."""
    source = Source(text)
    for name, function in source.functions():
        documented = ast.get_docstring(function, clean=False) is not None
        note = ast.parse(f"{_NAME}(({file!r}, {name!r}))").body[0]
        for node in ast.walk(note):
            ast.copy_location(node, function.body[0])
        function.body.insert(int(documented), note)
    return source.tree


class _Loader(importlib.machinery.SourceFileLoader):
    """Loader of code that was compiled before."""

    def __init__(self, name, path, code):
        super().__init__(name, path)
        self.code = code

    def get_code(self, fullname):
        return self.code


class _Finder:
    """Finder of the package's modules, before all others."""

    def __init__(self, codes):
        self.codes = codes

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != PACKAGE.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin in self.codes:
            spec.loader = _Loader(name, spec.origin, self.codes[spec.origin])
        return spec


def install() -> None:
    """Record the calls in all modules of the package that are imported from now on."""
    setattr(builtins, _NAME, CALLED.add)
    codes = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        file = str(path.relative_to(PACKAGE))
        codes[str(path)] = compile(
            recording(Path(path).read_text(), file), str(path), "exec", dont_inherit=True
        )
    sys.meta_path.insert(0, _Finder(codes))
