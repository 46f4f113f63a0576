"""Run a notebook in this process and render it as a page: no kernel, no port, nothing of the user's IPython.

The notebooks in `analysis/` open in Jupyter as they are. A report needs their outputs only, and a kernel for
each takes longer than all that they compute. Their cells are plain Python, without IPython's magics: a cell
is executed, and the value of its last expression is what it shows.
"""

import ast
import io
import json
import re
import warnings
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ablate.reports.page import slug


class NotebookError(Exception):
    """A cell of a notebook failed. The message names the notebook, the cell and the error."""


@dataclass(frozen=True)
class Cell:
    """One cell that has run."""

    markdown: bool
    source: str
    outputs: tuple[Mapping[str, Any], ...] = ()
    """Texts that it showed, by media type (`text/html`, `image/svg+xml`, `text/markdown`, `text/plain`)."""
    hidden: bool = False
    """True for the cell of parameters."""

    @property
    def shown(self) -> bool:
        """True if it showed anything: an empty section has empty texts."""
        return any(output.get("text/html", output.get("text/plain", "")).strip() for output in self.outputs)


def run(path: Path, parameters: Mapping[str, object]) -> list[Cell]:
    """Run all cells of a notebook, one after the other, in a namespace of its own; NotebookError if a cell
    failed.

    `parameters`: values for the names that its cell tagged `parameters` assigns; others are ignored.
    """
    cells, number, names = [], 0, dict[str, Any](__name__=path.stem)
    # Warnings and standard error are left out: they name files of this machine, but the page is for others.
    with warnings.catch_warnings(action="ignore"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])  # one text, or its lines
            if cell["cell_type"] != "code":
                cells.append(Cell(cell["cell_type"] == "markdown", source))
                continue
            number += 1
            try:
                with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()):
                    value = _executed(source, f"{path.stem}, cell {number}", names)
            except Exception as error:
                raise NotebookError(
                    f"notebook {path.stem} stopped in cell {number}: {type(error).__name__}: {error}; "
                    f"run it in Jupyter to see more: {path}"
                ) from error
            if hidden := "parameters" in cell["metadata"].get("tags", ()):
                names.update({key: parameters[key] for key in parameters if key in names})
            outputs = [{"text/plain": printed.getvalue()}] if printed.getvalue().strip() else []
            cells.append(Cell(False, source, (*outputs, *_shown(value)), hidden))
    return cells


def _executed(source: str, name: str, names: dict[str, Any]) -> object:
    """Execute a cell in a namespace, which is changed, and return the value of its last expression; None if
    it ends otherwise. `name`: the cell's, for a traceback."""
    tree = ast.parse(source, name)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        last = None
    exec(compile(ast.Module(tree.body[:-1] if last else tree.body, []), name, "exec"), names)
    return eval(compile(ast.Expression(last.value), name, "eval"), names) if last else None


def _shown(value: object) -> list[Mapping[str, Any]]:
    """Return what Jupyter shows of a value, by media type, as a list: an empty one for None."""
    if value is None:
        return []
    bundle = getattr(value, "_repr_mimebundle_", None)
    return [bundle() if bundle else {"text/plain": repr(value)}]


def page(cells: list[Cell], template: Path, **values: object) -> str:
    """Return cells, as `run` returns them, as an HTML page, with links to its headings. The Jinja template
    has `cells`, the further values and the filter `markdown`, and no automatic escapes."""
    from jinja2 import Environment, FileSystemLoader
    from markdown_it import MarkdownIt

    environment = Environment(loader=FileSystemLoader(template.parent), autoescape=False)
    texts = MarkdownIt("commonmark")
    environment.filters["markdown"] = lambda source: re.sub(
        r"<h2>(.*?)</h2>", lambda found: f'<h2 id="{slug(found[1])}">{found[1]}</h2>', texts.render(source)
    )
    html = environment.get_template(template.name).render(cells=cells, **values)
    headings = re.findall(r'<h2 id="([^"]*)">(.*?)</h2>', html)
    items = "".join(f'<li><a href="#{anchor}">{title}</a></li>' for anchor, title in headings)
    contents = f'<nav class="contents" aria-label="Contents"><ul>{items}</ul></nav>' if items else ""
    return html.replace("<!--contents-->", contents, 1)


def markdown(cells: list[Cell]) -> str:
    """Return cells as Markdown: without code, figures as links to their files."""
    parts: list[str] = []
    for cell in cells:
        parts += [cell.source] if cell.markdown else []
        parts += [output.get("text/markdown", output.get("text/plain", "")) for output in cell.outputs]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"  # an empty section has no text
