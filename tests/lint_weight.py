"""Ratchet of the package's weight: `python tests/lint_weight.py` fails if `ablate/` outgrows tests/weight.json.

Three numbers may not rise by more than one per cent over those that are committed: code lines of `ablate/` (lines with
code on them: no blanks, comments or docstrings), commands, and options of commands. `--write` commits the present
numbers to the file: after a cut always; after a rise only with its reason in the commit's body.

Printed beside them, without a limit: lines, code lines and functions by package, lines of tests and benchmarks, words
of the documents by hand and generated, and the ten files that grew most since the last tag (or, without a tag, since
the last change of tests/weight.json).
"""

import ast
import io
import json
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import typer

ROOT = Path(__file__).parent.parent
LIMITS = Path(__file__).with_name("weight.json")
SLACK = 0.01
"""Share by which a number may exceed its limit, so that not every commit has to change the file."""
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
GENERATED = ("recipes.md", "experiment.md", "conformance.md", "families.md")
"""Pages that programs write."""
GENERATED_END = {"tensor_cores.md": "## Every preset"}
"""Headings from which on a program writes the rest of a page."""


def docstring_lines(parsed: ast.AST) -> set[int]:
    """Return the lines of all strings that stand alone: docstrings of modules, classes, functions and names."""
    lines: set[int] = set()
    for node in ast.walk(parsed):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                lines.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return lines


@cache
def code_lines(text: str) -> int:
    """Return the number of lines with code: a token other than a comment, outside of docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(text)))


def functions(text: str) -> int:
    """Return the number of functions and methods."""
    return sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(ast.parse(text)))


def leaves(command: click.Command) -> Iterator[click.Command]:
    """Yield the commands that run something: a group's, in place of the group."""
    if isinstance(command, click.Group) or hasattr(command, "commands"):
        for inner in command.commands.values():
            yield from leaves(inner)
    else:
        yield command


def weight(package: Path) -> dict[str, int]:
    """Return the three numbers that have a limit."""
    from ablate.cli.commands import whole_app

    commands = list(leaves(typer.main.get_command(whole_app())))
    return {
        "code_lines": sum(code_lines(path.read_text()) for path in package.rglob("*.py")),
        "commands": len(commands),
        "options": sum(param.param_type_name == "option" for each in commands for param in each.params),
    }


def excess(now: dict[str, int], limits: dict[str, int]) -> list[str]:
    """Return a sentence for each number above its limit and the slack."""
    return [
        f"{name.replace('_', ' ')}: {now[name]:,} are above {limit:,} and 1 % of slack, by "
        f"{now[name] - int(limit * (1 + SLACK)):,}. Remove as much elsewhere, or run `python tests/lint_weight.py "
        "--write` and give the reason in the commit's body."
        for name, limit in limits.items()
        if now[name] > limit * (1 + SLACK)
    ]


def stale(now: dict[str, int], limits: dict[str, int]) -> list[str]:
    """Return the numbers whose limit stands more than 3 % above them: it was not lowered after a cut."""
    return [name.replace("_", " ") for name, limit in limits.items() if now[name] < 0.97 * limit]


def by_package(package: Path) -> Iterator[str]:
    """Yield a line for each folder of the package: lines, code lines, functions per 100 code lines."""
    for folder in [*sorted(path for path in package.iterdir() if path.is_dir()), package]:
        files = list(folder.rglob("*.py") if folder != package else folder.glob("*.py"))
        texts = [path.read_text() for path in files]
        if code := sum(map(code_lines, texts)):
            lines, count = sum(text.count("\n") for text in texts), sum(map(functions, texts))
            yield f"  {folder.name:14} {lines:7,} lines {code:7,} code {100 * count / code:5.1f} functions per 100"


def words(root: Path) -> tuple[int, int]:
    """Return the words of README, CONTRIBUTING and docs: written by hand, and generated."""
    hand = generated = 0
    for path in [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]:
        text = path.read_text()
        if path.name in GENERATED:
            written, made = "", text
        elif heading := GENERATED_END.get(path.name):
            written, _, made = text.partition(f"\n{heading}\n")
        else:
            written, made = text, ""
        hand += _words(written)
        generated += _words(made)
    return hand, generated


def _words(text: str) -> int:
    """Return the words of a text; the bar of a table and the mark of a list are none."""
    return sum(any(map(str.isalnum, word)) for word in text.split())


def git(*words: str) -> str:
    """Return git's output in the checkout; nothing outside of one."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def growths() -> Iterator[str]:
    """Yield the ten files of the package that grew most since the last tag, or the last change of the limits."""
    since = git("describe", "--tags", "--abbrev=0") or git("log", "-1", "--format=%h", "--", str(LIMITS))
    if not since:
        return
    rows = [line.split("\t") for line in git("diff", "--numstat", since, "--", "ablate").splitlines()]
    grown = sorted(
        ((int(added) - int(removed), file) for added, removed, file in rows if added != "-"), reverse=True
    )
    yield f"growth since {since}:"
    yield from (f"  {lines:+6,} {file}" for lines, file in grown[:10] if lines > 0)


def main() -> int:
    """Print all numbers; return 1 if one is above its limit."""
    now = weight(ROOT / "ablate")
    if "--write" in sys.argv[1:]:
        LIMITS.write_text(json.dumps(now, indent=1) + "\n")
    limits = json.loads(LIMITS.read_text())
    print(*(f"{name.replace('_', ' ')}: {now[name]:,} (limit {limits[name]:,})" for name in limits), sep=", ")
    print(*by_package(ROOT / "ablate"), sep="\n")
    for folder in ("tests", "benchmarks"):
        texts = [path.read_text() for path in (ROOT / folder).rglob("*.py")]
        print(f"  {folder:14} {sum(text.count(chr(10)) for text in texts):7,} lines")
    hand, generated = words(ROOT)
    print(f"words of README, CONTRIBUTING and docs: {hand:,} by hand, {generated:,} generated")
    print(*growths(), sep="\n")
    if loose := stale(now, limits):
        print(
            f"Lower the limit of {' and '.join(loose)} to the result: `python tests/lint_weight.py --write`."
        )
    found = excess(now, limits)
    print(*found, sep="\n", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
