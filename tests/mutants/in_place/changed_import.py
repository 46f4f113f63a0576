"""Import hook that compiles one module from another text than its file has.

`ABLATE_MUTANT` names a JSON file with the path of the module's file and the text. The file itself stays as it
is, and no bytecode of the text is written.
"""

import importlib.machinery
import json
import linecache
import os
import sys
from pathlib import Path

VARIABLE = "ABLATE_MUTANT"


class _Loader(importlib.machinery.SourceFileLoader):
    """Loader of the changed text. Tracebacks and `inspect.getsource` have it as well."""

    def __init__(self, name, path, text):
        super().__init__(name, path)
        self.text = text

    def get_code(self, fullname):
        lines = self.text.splitlines(keepends=True)
        linecache.cache[self.path] = len(self.text), None, lines, self.path
        return compile(self.text, self.path, "exec", dont_inherit=True)

    def get_data(self, path):
        return self.text.encode() if path == self.path else super().get_data(path)


class _Finder:
    """Finder of one module, before all others."""

    def __init__(self, path, text):
        self.path, self.text = path, text
        self.last = "" if (stem := Path(path).stem) == "__init__" else stem

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "ablate" or (self.last and name.rpartition(".")[2] != self.last):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin is None or not os.path.samefile(spec.origin, self.path):
            return None
        spec.loader = _Loader(name, spec.origin, self.text)
        return spec


def install() -> None:
    """Put the changed module of `ABLATE_MUTANT`, if it is set, in front of its file."""
    if os.environ.get(VARIABLE):
        change = json.loads(Path(os.environ[VARIABLE]).read_text())
        sys.meta_path.insert(0, _Finder(change["path"], change["text"]))
