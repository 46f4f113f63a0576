"""Source of users' functions: the file of each, the files of their own that it imports, and their digest.

To plan, none of it is imported. A trial's identity has the content of the user's own code, so that an edit of
it runs its trials again and an edit of an unrelated file does not. "Own" is what the file imports, and what
that imports, among the files beside it, or in its own installed package; other installed packages are
recorded with a trial's environment and are not part of its identity. Imports are read from the syntax tree: a
module that is imported by a computed name is not found.
"""

import ast
import glob
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from ablate import cache
from ablate.files import below


@dataclass(frozen=True)
class Code:
    """A function, by the file that has it."""

    path: Path
    function: str
    root: Path
    """Folder that names of modules are relative to."""
    module: str = ""
    """Name by which it is imported; empty: by its file."""
    package: str = ""
    """Installed package, the only one whose files are the function's own; empty: all files in `root` are."""


def find(place: Path | None, name: str) -> Code:
    """Return the code of a function of a module.

    Args:
        place: folder whose modules come first; None: installed modules alone.
        name: `package.module:function`.

    Raises:
        ValueError: there is no such module.
    """
    module, _, function = name.partition(":")
    parts = module.split(".")
    if not all(part.isidentifier() for part in [*parts, function]):
        raise ValueError(f"{name!r} is not of the form module:function")
    beside = [file for file in _files(place, parts) if _is_module(file, parts)] if place else []
    return Code(beside[-1], function, place, module) if place and beside else _installed(parts, function)


def _installed(parts: Sequence[str], function: str) -> Code:
    """Return the code of a module of an installed package; ValueError if there is none."""
    module = ".".join(parts)
    spec = importlib.util.find_spec(parts[0])
    origins = spec.submodule_search_locations if spec else None
    if spec and origins is not None:
        root = Path(next(iter(origins))).parent
    elif spec and spec.origin and Path(spec.origin).suffix == ".py":
        root = Path(spec.origin).parent
    else:
        raise ValueError(f"there is no module {module}, beside the experiment or installed")
    found = [file for file in _files(root, parts) if _is_module(file, parts)]
    if not found:
        raise ValueError(f"there is no module {module} in {root / parts[0]}")
    return Code(found[-1], function, root, module, parts[0])


def _is_module(file: Path, parts: Sequence[str]) -> bool:
    """Return True if a file is the module of this name itself, not a package on the way to it."""
    return file.parts[-len(parts) :] == (*parts[:-1], f"{parts[-1]}.py") or file.parts[-len(parts) - 1 :] == (
        *parts,
        "__init__.py",
    )


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    """Return the functions at the top level of a file by name; SyntaxError, OSError if it cannot be read."""
    return {node.name: node for node in _tree(path).body if isinstance(node, ast.FunctionDef)}


def constants(path: Path) -> dict[str, ast.expr]:
    """Return the values assigned to names at the top level of a file; SyntaxError, OSError as `functions`."""
    assigned = (node for node in _tree(path).body if isinstance(node, ast.Assign))
    return {
        target.id: node.value for node in assigned for target in node.targets if isinstance(target, ast.Name)
    }


def changed_elsewhere(path: Path, name: str) -> int:
    """Return a line of a file that may change what `constants` has of a name; 0 if there is none.

    Such a line binds the name once more, in whatever scope. A list can be changed by all that have it, so any
    further use of it counts.
    """
    tree = _tree(path)
    plain = [node for node in tree.body if isinstance(node, ast.Assign)]
    first = next(target for node in plain for target in node.targets if _binds(target, name))
    mutable = isinstance(constants(path)[name], ast.List)
    for node in ast.walk(tree):
        bound = node is not first and _binds(node, name, mutable)
        if bound and isinstance(node, ast.stmt | ast.expr | ast.alias):
            return node.lineno
    return 0


def _binds(node: ast.AST, name: str, or_reads: bool = False) -> bool:
    """Return True if a node of a syntax tree binds a name; with `or_reads` also if it reads it."""
    if isinstance(node, ast.Name):
        return node.id == name and (or_reads or not isinstance(node.ctx, ast.Load))
    if isinstance(node, ast.alias):
        return name == (node.asname or node.name)
    return isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name


def closure(code: Code) -> tuple[Path, ...]:
    """Return the function's file and the files of its own that it imports, directly or not; sorted."""
    found = {code.path, *_files(code.root, code.module.split(".") if code.module else ())}
    waiting = [*found]
    while waiting:
        for other in _imported(waiting.pop(), code.root, code.package):
            if other not in found:
                found.add(other)
                waiting.append(other)
    return tuple(sorted(found))


def digest(code: Code, globs: Sequence[str] = ()) -> str:
    """Return 16 hex digits that identify the content of a function's closure and of files that globs name.

    Args:
        code: the function.
        globs: absolute patterns of further files.

    Raises:
        OSError, SyntaxError: a file cannot be read.
    """
    return _identified(files_of(code, globs), code.root)


def files_of(code: Code, globs: Sequence[str] = ()) -> list[Path]:
    """Return the files of a function's closure and those that absolute patterns name; sorted."""
    more = (Path(name) for pattern in globs for name in glob.glob(pattern, recursive=True))
    return sorted({*closure(code), *(file for file in more if file.is_file())})


def digest_of(files: Iterable[Path], folder: Path) -> str:
    """Return 16 hex digits that identify files, with the closures of Python files; OSError, SyntaxError.

    Args:
        files: the files.
        folder: folder to which their names are relative.
    """
    return _identified(closures(files), folder)


def closures(files: Iterable[Path]) -> list[Path]:
    """Return files and, of Python files, the files beside them that they import, directly or not; sorted."""
    each = (closure(Code(file, "", file.parent)) if file.suffix == ".py" else (file,) for file in files)
    return sorted({file for own in each for file in own})


def drop_old_bytecode(files: Iterable[Path]) -> None:
    """Delete bytecode from before the last change of its source, so that Python compiles the source again.

    Python takes bytecode for that of a source of the same size and time of modification in whole seconds. An
    edit of one digit within that second, or one by a program that restores the time, would run the old code
    under the new code's id.

    Args:
        files: files of the user's code; those that are not Python have no bytecode.

    Raises:
        OSError: the bytecode cannot be deleted.
    """
    for file in files:
        if file.suffix != ".py":
            continue
        folder = Path(importlib.util.cache_from_source(str(file))).parent
        for compiled in folder.glob(f"{glob.escape(file.stem)}.*.pyc"):  # of every version of Python
            if compiled.stat().st_mtime_ns <= file.stat().st_ctime_ns:
                compiled.unlink(missing_ok=True)


def content(path: Path) -> str:
    """Return 16 hex digits of a file's content, or of all files of a folder with their names; OSError.

    Links to folders are followed: code that reads the folder reads those files as well.
    """
    return _identified(listed(path), path)


def listed(path: Path) -> list[Path]:
    """Return a file, or all files of a folder; FileNotFoundError if there is none."""
    found = [path] if path.is_file() else below(path)
    if not found:
        raise FileNotFoundError(2, "No such file, or an empty folder", str(path))
    return found


def _identified(files: Sequence[Path], folder: Path) -> str:
    """Return 16 hex digits of the names of files, relative to a folder, and their contents."""
    return cache.key_of([_relative(file, folder) for file in files], cache.digest(files))[:16]


def load(code: Code) -> Callable[..., object]:
    """Import a function's file anew and return the function; modules beside the file can be imported by it.

    Modules that earlier calls imported are forgotten: they may have changed, or be those of another folder
    with the same name. So is bytecode from before the last change of a file.
    """
    drop_old_bytecode(closure(code))
    if code.package == OURS:
        return getattr(importlib.import_module(code.module), code.function)
    if code.package:
        own = [name for name in sys.modules if name.partition(".")[0] == code.package]
        for name in own:
            del sys.modules[name]
        return getattr(importlib.import_module(code.module), code.function)
    _FOLDERS.add(code.root)
    inside = tuple(f"{str(folder).rstrip(os.sep)}{os.sep}" for folder in _FOLDERS)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != OURS and _lies_in(getattr(module, "__file__", None), inside):
            del sys.modules[name]
    users = {str(folder) for folder in _FOLDERS}
    sys.path[:] = [str(code.root), *(entry for entry in sys.path if entry not in users)]
    importlib.invalidate_caches()
    module = importlib.import_module(code.module) if code.module else _module(code.path)
    return getattr(module, code.function)


def load_apart(code: Code) -> Callable[..., object]:
    """Import a function's file anew, beside whatever is imported, and return the function.

    Modules of the same names that are in use, such as those of a trial's training code, stay as they are, and
    later imports do not find the new ones. A module beside the file must therefore be imported at its top.

    Raises:
        ImportError: another file was imported than those of `closure`, whose digest the function has.
    """
    own = closure(code)
    drop_old_bytecode(own)
    files: dict[str, list[Path]] = {}
    for file in own:
        files.setdefault(_module_name(file, code.root), []).append(file)
    files = {name: paths for name, paths in files.items() if name.partition(".")[0] != OURS}
    names = {part for name in files for part in _packages(name)}
    before, path = dict(sys.modules), [*sys.path]
    _forget(names)
    sys.path.insert(0, str(code.root))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(code.module) if code.module else _module(code.path)
        _refuse_others(code, files, before, {str(code.root), os.getcwd(), *sys.path} - {*path, ""})
        return getattr(module, code.function)
    finally:
        sys.path[:] = path
        _forget(names)
        sys.modules |= {name: before[name] for name in names & before.keys()}


def _refuse_others(
    code: Code, files: Mapping[str, Sequence[Path]], before: Mapping[str, ModuleType], folders: Iterable[str]
) -> None:
    """Raise ImportError if an import has found another file than those of a function's closure.

    Args:
        code: the function, whose file was just imported.
        files: files of its closure, by the names of their modules.
        before: modules that were imported already.
        folders: entries of `sys.path` whose modules are the function's own.
    """
    others = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if before.get(name) is module or not isinstance(file, str):
            continue
        if name in files:
            if not any(path.samefile(file) for path in files[name]):
                others[name] = f"{name} is {file}, and not {files[name][0]}: rename one of the two"
        elif not code.package and any(_is_found(file, name, folder) for folder in folders):
            others[name] = f"{file} is imported, and no import statement for a file beside it names it"
    _forget(others)
    if others:
        raise ImportError(min(others.values()))


def _is_found(file: str, name: str, folder: str) -> bool:
    """Return True if a module's file is what a folder has by this name."""
    first = file.removeprefix(f"{folder.rstrip(os.sep)}{os.sep}").partition(os.sep)[0]
    return file.startswith(folder) and first.partition(".")[0] == name.partition(".")[0] != OURS


def _packages(name: str) -> Iterator[str]:
    """Yield a dotted name and those of the packages around it."""
    parts = name.split(".")
    return (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))


def late_imports(code: Code) -> Iterator[str]:
    """Yield file and line of each import inside a function that names one of the function's own files.

    Such an import is executed in a trial, when `load_apart` has put other modules of its name back. Those of
    an installed package are found there as well.
    """
    for path in closure(code) if not code.package else ():
        if path.is_relative_to(code.root / OURS):
            continue
        for function in ast.walk(_tree(path)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.stmt) and any(_named(node, path, code.root, code.package)):
                        yield f"{path}:{node.lineno}"


def _module_name(path: Path, root: Path) -> str:
    """Return the name by which a file below `root` is imported."""
    parts = path.relative_to(root).with_suffix("").parts if path.is_relative_to(root) else (path.stem,)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _forget(names: Iterable[str]) -> None:
    """Drop modules, so that the next import reads their files again."""
    for name in names:
        sys.modules.pop(name, None)


OURS = __package__.partition(".")[0]
"""This package, which is not imported anew: another `ablate` would have other classes of the same names."""
_FOLDERS: set[Path] = set()
"""Folders of the users' files that this process has imported."""


def _lies_in(file: object, inside: tuple[str, ...]) -> bool:
    """Return True for a file below one of these prefixes that belongs to no installed package.

    Compares strings: there are thousands of modules, and a Path of each would take longer than a short run.
    """
    return isinstance(file, str) and file.startswith(inside) and "site-packages" not in Path(file).parts


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look a class's module up there
    spec.loader.exec_module(module)
    return module


def _imported(path: Path, root: Path, package: str) -> Iterator[Path]:
    """Yield the files under `root` that a file's import statements name; of one package alone, if given."""
    for node in ast.walk(_tree(path)):
        yield from _named(node, path, root, package)


def _named(node: ast.AST, path: Path, root: Path, package: str) -> Iterator[Path]:
    """Yield the files that a node names if it is an import statement; arguments as of `_imported`."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            parts = alias.name.split(".")
            yield from _files(root, parts) if package in ("", parts[0]) else ()
    elif isinstance(node, ast.ImportFrom):
        base = path.parents[node.level - 1] if node.level else root
        parts = node.module.split(".") if node.module else []
        if node.level or not package or parts[0] == package:
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
