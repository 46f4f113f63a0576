"""Source of users' functions: the file of each, the files of their own that it imports, and their digest.

To plan, none of it is imported. A trial's identity has the content of the user's own code, so that an edit of
it runs its trials again and an edit of an unrelated file does not. "Own" is what the file imports, and what
that imports: beside it, in folders that a file adds to `sys.path`, and elsewhere on `sys.path` outside of the
interpreter and `site-packages` (the working folder, PYTHONPATH, editable installs), or in its own installed
package. Other installed packages are recorded with a trial's environment and are not part of its identity.

Imports are read from the syntax tree (source_imports.py). What an execution imports beyond these files is
refused (`Watch`). Not covered: compiled modules, and code that is read and executed as text.
"""

import ast
import glob
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache as cached
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from ablate import cache, source_imports
from ablate.errors import InputError
from ablate.files import below
from ablate.source_imports import tree


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
    """Return the code of a function `package.module:function`; ValueError if there is no such module. Modules
    of the folder `place` come first; None: installed modules alone."""
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
    return {node.name: node for node in tree(path).body if isinstance(node, ast.FunctionDef)}


def constants(path: Path) -> dict[str, ast.expr]:
    """Return the values assigned to names at the top level of a file; SyntaxError, OSError as `functions`."""
    assigned = (node for node in tree(path).body if isinstance(node, ast.Assign))
    return {
        target.id: node.value for node in assigned for target in node.targets if isinstance(target, ast.Name)
    }


def changed_elsewhere(path: Path, name: str) -> int:
    """Return a line of a file that may change what `constants` has of a name; 0 if there is none.

    Such a line binds the name once more, in whatever scope. A list can be changed by all that have it, so any
    further use of it counts.
    """
    whole = tree(path)
    plain = [node for node in whole.body if isinstance(node, ast.Assign)]
    first = next(target for node in plain for target in node.targets if _binds(target, name))
    mutable = isinstance(constants(path)[name], ast.List)
    for node in ast.walk(whole):
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


def closure(code: Code) -> dict[Path, Path]:
    """Return the function's file and the files of its own that it imports, directly or not, each with the
    folder that the module's name is relative to; sorted."""
    parts = code.module.split(".") if code.module else ()
    found = dict.fromkeys([code.path, *_files(code.root, parts)], code.root)
    folders, searched = dict[Path, None](), set[object]()
    waiting = [*found]
    while waiting:
        path = waiting.pop()
        imports = source_imports.imports(path)
        added = {folder for text in imports.folders for folder in _places(path, text)} - folders.keys()
        if added := added - {Path(os.path.realpath(code.root))}:
            folders |= dict.fromkeys(sorted(added))
            waiting, searched = [*found], set()
        for name in imports.names:
            key = name, path.parent if name[0] else None
            for file, folder in _named(name, path, found[path], code, folders) if key not in searched else ():
                if file not in found:
                    waiting.append(file)
                if file not in found or folder == code.root:
                    found[file] = folder
            searched.add(key)
    return dict(sorted(found.items()))


def digest(code: Code, globs: Sequence[str] = ()) -> str:
    """Return 16 hex digits that identify the content of a function's closure and of the files that absolute
    `globs` name. OSError or SyntaxError if a file cannot be read."""
    found = closure(code)
    elsewhere = {file: folder for file, folder in found.items() if folder != code.root}
    named = sorted((file.relative_to(folder).as_posix(), file) for file, folder in elsewhere.items())
    return _identified([file for file in files_of(code, globs) if file not in elsewhere], code.root, named)


def files_of(code: Code, globs: Sequence[str] = ()) -> list[Path]:
    """Return the files of a function's closure and those that absolute patterns name; sorted."""
    more = (Path(name) for pattern in globs for name in glob.glob(pattern, recursive=True))
    return sorted({*closure(code), *(file for file in more if file.is_file())})


def digest_of(files: Iterable[Path], folder: Path) -> str:
    """Return 16 hex digits that identify files, named relative to a folder, with the closures of Python
    files; OSError, SyntaxError."""
    return _identified(closures(files), folder)


def closures(files: Iterable[Path]) -> list[Path]:
    """Return files and, of Python files, the files of their own that they import, directly or not; sorted."""
    each = (closure(Code(file, "", file.parent)) if file.suffix == ".py" else (file,) for file in files)
    return sorted({file for own in each for file in own})


def drop_old_bytecode(files: Iterable[Path]) -> None:
    """Delete bytecode from before the last change of its source, so that Python compiles the source again;
    OSError if it cannot be deleted.

    Python takes bytecode for that of a source of the same size and time of modification in whole seconds. An
    edit of one digit within that second, or one by a program that restores the time, would run the old code
    under the new code's id.
    """
    for file in files:
        if file.suffix != ".py":
            continue
        folder = Path(importlib.util.cache_from_source(str(file))).parent
        for compiled in folder.glob(f"{glob.escape(file.stem)}.*.pyc"):  # of every version of Python
            if compiled.stat().st_mtime_ns <= file.stat().st_ctime_ns:
                compiled.unlink(missing_ok=True)


def content(path: Path) -> str:
    """Return 16 hex digits of a file's content, or of all files of a folder with their names; OSError. Links
    to folders are followed: code that reads the folder reads those files as well."""
    return _identified(listed(path), path)


def listed(path: Path) -> list[Path]:
    """Return a file, or all files of a folder; FileNotFoundError if there is none."""
    found = [path] if path.is_file() else below(path)
    if not found:
        raise FileNotFoundError(2, "No such file, or an empty folder", str(path))
    return found


def _identified(files: Sequence[Path], folder: Path, elsewhere: Sequence[tuple[str, Path]] = ()) -> str:
    """Return 16 hex digits of the names of files, relative to a folder, and their contents; `elsewhere`:
    further files, each after its name."""
    names = [_relative(file, folder) for file in files]
    contents = cache.digest([*files, *(file for _, file in elsewhere)])
    return cache.key_of(names, contents, *([[name for name, _ in elsewhere]] if elsewhere else []))[:16]


def load(code: Code) -> Callable[..., object]:
    """Import a function's file anew and return the function; modules beside the file can be imported by it.

    Modules that earlier calls imported are forgotten: they may have changed, or be those of another folder
    with the same name. So is bytecode from before the last change of a file.
    """
    own = closure(code)
    drop_old_bytecode(own)
    if code.package == OURS:
        return _imported(code)
    users, real = {*map(str, _FOLDERS), str(code.root)}, {*map(os.path.realpath, own)}
    if not code.package:
        _FOLDERS.add(code.root)
        sys.path[:] = [str(code.root), *(entry for entry in sys.path if entry not in users)]
    inside = tuple(f"{str(folder).rstrip(os.sep)}{os.sep}" for folder in _FOLDERS)
    files, path = _own_modules(sys.modules), {*sys.path}
    stale = {name for name, at in files.items() if at.startswith(inside) or os.path.realpath(at) in real}
    kept = {name: sys.modules[name] for name in files.keys() - stale}
    _forget([*files, *(name for name in sys.modules if name.partition(".")[0] == code.package)])
    try:
        return _imported(code)
    finally:
        _FOLDERS.update(Path(entry) for entry in {*sys.path} - path)
        anew = {name.partition(".")[0] for name in _own_modules(sys.modules)}
        sys.modules |= {name: module for name, module in kept.items() if name.partition(".")[0] not in anew}


def _imported(code: Code) -> Callable[..., object]:
    importlib.invalidate_caches()
    module = importlib.import_module(code.module) if code.module else import_file(code.path)
    return getattr(module, code.function)


def load_apart(code: Code) -> Callable[..., object]:
    """Import a function's file anew, beside whatever is imported, and return the function.

    Modules of the same names that are in use, such as those of a trial's training code, stay as they are, and
    later imports do not find the new ones. A module beside the file must therefore be imported at its top.
    InputError if another file was imported than those of `closure`, whose digest the function has.
    """
    own = closure(code)
    drop_old_bytecode(own)
    path = [*sys.path]
    with alone(own):
        sys.path.insert(0, str(code.root))
        watch = Watch(own)
        try:
            function = _imported(code)
            watch.refuse()
            return function
        finally:
            sys.path[:] = path


@contextmanager
def alone(files: Mapping[Path, Path]) -> Iterator[None]:
    """Inside this context, no module of a user's own is imported, and names of a closure's `files` are left
    to them; afterwards, the modules of before are."""
    names = {_module_name(file, folder) for file, folder in files.items()}
    names |= {name.rpartition(".")[0] for name in names}  # a folder that is a package without a file
    names = {name for name in names if name.partition(".")[0] != OURS}
    before = dict(sys.modules)
    _forget({*_own_modules(before), *names})
    try:
        yield
    finally:
        _forget({*_own_modules(sys.modules), *names})
        sys.modules |= {name: module for name, module in before.items() if name not in sys.modules}


class Watch:
    """Modules of a user's own that are imported from its creation on; an id has the content of `files`."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files, self._before = {*map(os.path.realpath, files)}, dict(sys.modules)

    def refuse(self, remedy: str = "") -> None:
        """Raise InputError if a module of another file was imported, and forget it. `remedy`: a further way
        to have the file in the id, for the sentence."""
        new = {name: each for name, each in [*sys.modules.items()] if self._before.get(name) is not each}
        self._before = dict(sys.modules)
        files = _own_modules(new)
        others = [name for name, file in files.items() if os.path.realpath(file) not in self._files]
        _forget(others)
        if others:
            name = min(others)
            why = f"{files[name]} is imported, and no import statement names it, so that no trial's id has it"
            raise InputError(f"{why}: write `import {name}` at the top of the file{remedy}")


def _own_modules(modules: Mapping[str, ModuleType]) -> dict[str, str]:
    """Return the files of modules that belong neither to the interpreter nor to installed packages, by name.
    Modules that an installed package generates elsewhere, as torch's compiler does, are the package's."""
    own = {}
    for name, module in list(modules.items()):
        file, top = getattr(module, "__file__", None), name.partition(".")[0]
        if not isinstance(file, str) or not file.endswith((".py", ".pyc")) or top in (*_NOT_OWN, "__main__"):
            continue
        parent = getattr(sys.modules.get(top), "__file__", None)
        if not installed(file) and not (isinstance(parent, str) and installed(parent)):
            own[name] = file
    return own


@cached
def installed(file: str) -> bool:
    """Return True for a path of the interpreter's, or below `site-packages`."""
    return file.startswith(_LIBRARIES) or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def late_imports(code: Code) -> Iterator[str]:
    """Yield file, line and sentence of each import inside a function that names an own file.

    Such an import is executed in a trial, when `load_apart` has put other modules of its name back. Those of
    an installed package are found there as well.
    """
    found = closure(code) if not code.package else {}
    for path, folder in found.items():
        if path.is_relative_to(code.root / OURS):
            continue
        for name, line in source_imports.imports(path).names.items():
            if line and any(file in found for file, _ in _named(name, path, folder, code, ())):
                yield f"{path}:{line} imports inside a function a file beside it"


def hidden_files(code: Code) -> Iterator[str]:
    """Yield file, line and sentence of each call beside the function that executes a file by its path."""
    for path, folder in closure(code).items():
        if folder == code.root and not installed(str(path)) and not path.is_relative_to(code.root / OURS):
            for line in source_imports.imports(path).hidden:
                yield f"{path}:{line} executes a file by its path, so that no trial's id has it"


def _module_name(path: Path, root: Path) -> str:
    """Return the name by which a file below `root` is imported."""
    parts = path.relative_to(root).with_suffix("").parts if path.is_relative_to(root) else (path.stem,)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _forget(names: Iterable[str]) -> None:
    for name in names:
        sys.modules.pop(name, None)


OURS = __package__.partition(".")[0]
"""This package, which is not imported anew: another `ablate` would have other classes of the same names."""
_FOLDERS: set[Path] = set()
"""Folders of the users' files that this process has imported."""


_NOT_OWN = (OURS, "torch", "numpy", "triton")
"""Packages that are recorded with a trial's environment, wherever they are installed."""
_LIBRARIES = tuple({form(sysconfig.get_path("stdlib")) + os.sep for form in (str, os.path.realpath)})


def import_file(path: Path) -> ModuleType:
    """Import a file as a module of its name, anew."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look a class's module up there
    spec.loader.exec_module(module)
    return module


def _places(path: Path, text: str) -> Iterator[Path]:
    """Yield the paths that a text in a file may mean: Python takes it as relative to the working folder."""
    for folder in {path.parent, Path.cwd()}:
        yield Path(os.path.realpath(folder / text))


def _named(
    name: source_imports.Name, path: Path, folder: Path, code: Code, added: Iterable[Path]
) -> Iterator[tuple[Path, Path]]:
    """Yield the own files of a module's name, which the file `path` imports, each with the folder that the
    name is relative to.

    `folder`: the one that the name of `path` is relative to. `added`: folders that files add to `sys.path`.
    All of them are searched, in whatever order they are.
    """
    level, parts = name
    if level:
        yield from ((file, folder) for file in _files(path.parents[level - 1], parts))
        return
    bases = [*added] if code.package not in ("", parts[0]) else [code.root, *added]
    beside = (code.root / f"{parts[0]}.py", code.root / parts[0] / "__init__.py")
    if parts[0] not in _NOT_OWN and (code.package or not any(file.is_file() for file in beside)):
        bases += _bases(parts[0])
    for base in bases if parts[0] not in _NOT_OWN else bases[:1]:
        yield from ((file, base) for file in _files(base, parts))


def _bases(top: str) -> Iterator[Path]:
    """Yield the folders of `sys.path` in which a module or package of a user's own is found."""
    users = {str(folder) for folder in _FOLDERS}
    path = [entry for entry in sys.path if entry not in users]
    for finder in sys.meta_path:  # those of editable installs, too
        if spec := finder.find_spec(top, path if finder is PathFinder else None):
            places = spec.submodule_search_locations or [spec.origin or ""]
            yield from (Path(each).parent for each in places if os.path.isabs(each) and not installed(each))
            return


def _files(base: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yield the files of a dotted module name: of each package on the way, and of the module itself."""
    for depth in range(1, len(parts) + 1):
        stem = base.joinpath(*parts[:depth])
        for file in (stem / "__init__.py", stem.with_suffix(".py")):
            if file.is_file():
                yield file


def _relative(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix() if file.is_relative_to(folder) else file.name
