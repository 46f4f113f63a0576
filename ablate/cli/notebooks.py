"""Run a notebook in this process and render it as a page: no kernel, no port, nothing of the user's IPython.

The notebooks in `analysis/` open in Jupyter as they are. A report needs their outputs only, and starting a
kernel for each takes longer than all that they compute. Only this file uses IPython's shell.
"""

import atexit
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ablate.results.page import slug

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


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
    """Run all cells of a notebook, one after the other, in a namespace of its own.

    Args:
        path: file of the notebook.
        parameters: values for the names that its cell tagged `parameters` assigns; others are ignored.

    Raises:
        NotebookError: a cell failed.
    """
    from IPython.utils.capture import capture_output

    cells, number = [], 0
    # Warnings and standard error are left out: they name files of this machine, but the page is for others.
    with _shell() as shell, warnings.catch_warnings(action="ignore"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])  # one text, or its lines
            if cell["cell_type"] != "code":
                cells.append(Cell(cell["cell_type"] == "markdown", source))
                continue
            number += 1
            # The trap's hook gives way to that of the capture only if the trap is set before.
            with shell.display_trap, capture_output() as captured:
                result = shell.run_cell(source)
            if isinstance(result.error_in_exec, KeyboardInterrupt):  # the user's, which the shell has caught
                raise result.error_in_exec
            if error := result.error_before_exec or result.error_in_exec:
                raise NotebookError(
                    f"notebook {path.stem} stopped in cell {number}: {type(error).__name__}: {error}; "
                    f"run it in Jupyter to see more: {path}"
                )
            if hidden := "parameters" in cell["metadata"].get("tags", ()):
                shell.user_ns.update({key: parameters[key] for key in parameters if key in shell.user_ns})
            printed = [{"text/plain": captured.stdout}] if captured.stdout.strip() else []
            outputs = (*printed, *(output.data for output in captured.outputs))
            cells.append(Cell(False, source, outputs, hidden))
    return cells


@contextmanager
def _shell() -> "Iterator[InteractiveShell]":
    """Yield a shell with an empty namespace, without history, profile or start-up files."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    before = os.environ.get("IPYTHONDIR")
    with tempfile.TemporaryDirectory(prefix="ablate-ipython-") as folder:
        os.environ["IPYTHONDIR"] = folder
        InteractiveShell.clear_instance()
        # A module of its own: IPython would put one in the place of this program's __main__.
        module = ModuleType("ablate_notebook")
        config = Config({"HistoryManager": {"enabled": False}})
        shell = InteractiveShell.instance(config=config, user_module=module, user_ns=module.__dict__)
        try:
            yield shell
        finally:
            atexit.unregister(shell.atexit_operations)  # what it would do then is done now
            shell.atexit_operations()
            InteractiveShell.clear_instance()
            sys.modules.pop(module.__name__, None)
            os.environ.pop("IPYTHONDIR")
            if before is not None:
                os.environ["IPYTHONDIR"] = before


def page(cells: list[Cell], template: Path, **values: object) -> str:
    """Return cells as an HTML page.

    Args:
        cells: what `run` returned.
        template: Jinja template; it has `cells` and the filter `markdown`, and no automatic escapes.
        values: further values of the template.
    """
    from jinja2 import Environment, FileSystemLoader
    from markdown_it import MarkdownIt

    environment = Environment(loader=FileSystemLoader(template.parent), autoescape=False)
    texts = MarkdownIt("commonmark")
    environment.filters["markdown"] = lambda source: _with_anchors(texts.render(source))
    return _with_contents(environment.get_template(template.name).render(cells=cells, **values))


def _with_anchors(html: str) -> str:
    return re.sub(r"<h2>(.*?)</h2>", lambda found: f'<h2 id="{slug(found[1])}">{found[1]}</h2>', html)


def _with_contents(html: str) -> str:
    """Return a page with links to its headings."""
    headings = re.findall(r'<h2 id="([^"]*)">(.*?)</h2>', html)
    items = "".join(f'<li><a href="#{anchor}">{title}</a></li>' for anchor, title in headings)
    contents = f'<nav class="contents" aria-label="Contents"><ul>{items}</ul></nav>' if items else ""
    return html.replace("<!--contents-->", contents, 1)


def markdown(cells: list[Cell]) -> str:
    """Return cells as Markdown: without code, figures as links to their files."""
    parts = [
        text
        for cell in cells
        for text in (
            *([cell.source] if cell.markdown else []),
            *(
                output.get("text/markdown", output.get("text/plain", "")) for output in cell.outputs
            ),  # an empty section has an empty one
        )
    ]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"
