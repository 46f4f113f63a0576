"""A user's training file: its functions, the files that it imports, and their digest. Imports none of it.

A trial's identity has the content of the user's own code, so that an edit of it runs its trials again and an
edit of an unrelated file does not. "Own" is what the file imports, and what that imports, among the files
beside it; installed packages are recorded with a trial's environment and are not part of its identity.
Imports are read from the syntax tree: a module that is imported by a computed name is not found, and is
listed under `sources` instead.
"""

import ast
import glob
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from ablate import cache
from ablate.errors import nearest


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    """Return the functions at the top level of a file by name; SyntaxError, OSError if it cannot be read."""
    return {node.name: node for node in _tree(path).body if isinstance(node, ast.FunctionDef)}


def problem(path: Path, function: str) -> str | None:
    """Return why a function of a file cannot be a workload; None if it can."""
    try:
        known = functions(path)
    except SyntaxError as error:
        return f"{path}:{error.lineno}: {error.msg}"
    except UnicodeDecodeError:
        return f"{path} is no Python file"
    except OSError as error:
        return f"{path}: {error.strerror}"
    if function not in known:
        return f"{path} has no function {function!r} at its top level; {nearest(function, known)}"
    taken = known[function].args
    parameters = [*taken.posonlyargs, *taken.args]
    required = len(parameters) - len(taken.defaults)
    if not parameters or required > 2:
        where = f"{path}:{known[function].lineno}"
        return f"{where}: {function} must take one argument, the trial, or two: trial and config"
    return None


def declares_config(path: Path, function: str) -> bool:
    """Return True if the function's second parameter is annotated, so that its class checks the config."""
    taken = functions(path)[function].args
    parameters = [*taken.posonlyargs, *taken.args]
    return len(parameters) > 1 and parameters[1].annotation is not None


def closure(path: Path) -> tuple[Path, ...]:
    """Return a file and the files of its folder, at any depth, that it imports, directly or not; sorted."""
    root, found, waiting = path.parent, {path}, [path]
    while waiting:
        for other in _imported(waiting.pop(), root):
            if other not in found:
                found.add(other)
                waiting.append(other)
    return tuple(sorted(found))


def digest(path: Path, globs: Sequence[str] = ()) -> str:
    """Return 16 hex digits that identify the content of a file, of its closure and of files that globs name.

    Args:
        path: the file.
        globs: absolute patterns of further files.

    Raises:
        OSError, SyntaxError: a file cannot be read.
    """
    more = (Path(name) for pattern in globs for name in glob.glob(pattern, recursive=True))
    files = sorted({*closure(path), *(file for file in more if file.is_file())})
    return _identified(files, path.parent)


def digest_of(files: Iterable[Path], folder: Path) -> str:
    """Return 16 hex digits that identify files, with the closures of Python files; OSError, SyntaxError.

    Args:
        files: the files.
        folder: folder to which their names are relative.
    """
    closures = (closure(file) if file.suffix == ".py" else (file,) for file in files)
    return _identified(sorted({file for each in closures for file in each}), folder)


def content(path: Path) -> str:
    """Return 16 hex digits of a file's content, or of all files of a folder with their names; OSError."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    if not files:
        raise FileNotFoundError(2, "No such file, or an empty folder", str(path))
    return _identified(files, path)


def _identified(files: Sequence[Path], folder: Path) -> str:
    """Return 16 hex digits of the names of files, relative to a folder, and their contents."""
    return cache.key_of([_relative(file, folder) for file in files], cache.digest(files))[:16]


def load(path: Path, function: str) -> Callable[..., object]:
    """Import a file anew and return one of its functions; modules beside the file can be imported by it.

    Modules that earlier calls imported are forgotten: they may have changed, or be those of another folder
    with the same name.
    """
    _FOLDERS.add(path.parent)
    for name, module in list(sys.modules.items()):
        if any(_lies_in(getattr(module, "__file__", None), folder) for folder in _FOLDERS):
            del sys.modules[name]
    users = {str(folder) for folder in _FOLDERS}
    sys.path[:] = [str(path.parent), *(entry for entry in sys.path if entry not in users)]
    importlib.invalidate_caches()
    return getattr(_module(path), function)


_FOLDERS: set[Path] = set()
"""Folders of the users' files that this process has imported."""


def _lies_in(file: str | None, folder: Path) -> bool:
    """Return True for a file of a user's folder that belongs to no installed package."""
    return file is not None and Path(file).is_relative_to(folder) and "site-packages" not in Path(file).parts


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look a class's module up there
    spec.loader.exec_module(module)
    return module


def _imported(path: Path, root: Path) -> Iterator[Path]:
    """Yield the files under `root` that a file's import statements name."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(root, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = path.parents[node.level - 1] if node.level else root
            parts = node.module.split(".") if node.module else []
            yield from _files(base, parts)
            for alias in node.names:
                yield from _files(base, [*parts, alias.name])


def _files(base: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yield the files of a dotted module name: of each package on the way, and of the module itself."""
    for depth in range(1, len(parts) + 1):
        stem = base.joinpath(*parts[:depth])
        for file in (stem / "__init__.py", stem.with_suffix(".py")):
            if file.is_file():
                yield file


def _relative(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix() if file.is_relative_to(folder) else file.name


def _tree(path: Path) -> ast.Module:
    status = path.stat()
    return _parsed(path, status.st_mtime_ns, status.st_size)


@lru_cache(256)
def _parsed(path: Path, changed: int, size: int) -> ast.Module:
    return ast.parse(path.read_bytes(), str(path))
