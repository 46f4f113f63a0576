"""Lint of docstrings: none begins with a question word. `python tests/lint_docstrings.py [PATH ...]`; default: all Python of this repository.

A docstring says what a thing is or does: "Return ...", "Frozen description of ...". One that begins with What, Whether or Where says it
backwards, and its reader has to turn the sentence around.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

WORDS = {"what", "whether", "of", "where", "how", "which", "who", "whose", "when", "why", "that"}
ROOT = Path(__file__).parent.parent
FOLDERS = ("ablate", "analysis", "benchmarks", "docker", "docs", "tests")


def docstrings(parsed: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring: of modules, classes, functions, and of the names that a string follows."""
    for node in ast.walk(parsed):
        for statement in getattr(node, "body", None) if isinstance(getattr(node, "body", None), list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value


def offenders(path: Path) -> list[str]:
    """Return `file:line: first words` of each docstring of a file that begins with a question word."""
    return [
        f"{path}:{line}: {text.strip()[:60]!r}"
        for line, text in docstrings(ast.parse(path.read_text()))
        if text.split() and text.split()[0].strip(",:`'").lower() in WORDS
    ]


if __name__ == "__main__":
    paths = [Path(word) for word in sys.argv[1:]] or [ROOT / folder for folder in FOLDERS]
    files = sorted(file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py")))
    found = [line for file in files for line in offenders(file)]
    print(*found, sep="\n")
    print(f"{len(found)} docstrings of {len(files)} files begin with a question word")
    sys.exit(bool(found))
