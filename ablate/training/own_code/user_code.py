"""A user's training function: where it is, and whether it can be a workload. Nothing of it is imported here.

The function is in a file (`file: train.py`), in a module (`function: package.train:main`) of the experiment's
folder or installed, or registered by an installed package as an entry point of the group `ablate.workloads`.
"""

from importlib.metadata import entry_points
from pathlib import Path

from ablate import own_source
from ablate.errors import nearest
from ablate.own_source import Code, functions

GROUP = "ablate.workloads"
"""Group of entry points by which installed packages offer training functions."""


def find(place: Path, function: str) -> Code:
    """Return the code that a workload's `file` and `function` name: `train` in the file `place`; or, if
    `place` is a folder, `package.module:train` or the name of an entry point. ValueError if there is no such
    module or entry point."""
    if not place.is_dir():
        return Code(place, function, place.parent)
    if ":" not in function:
        known = {entry.name: entry.value for entry in entry_points(group=GROUP)}
        if function not in known:
            offered = f"; installed packages offer {', '.join(sorted(known))}" if known else ""
            raise ValueError(
                f"{function!r} names no training function: give `file: train.py` with it,"
                f" `function: module:function`, or an entry point of the group {GROUP}{offered}"
            )
        function = known[function]
    return own_source.find(place, function)


def problem(code: Code) -> str | None:
    """Return why a function cannot be a workload; None if it can."""
    path, function = code.path, code.function
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


def declares_config(code: Code) -> bool:
    """Return True if the function's second parameter is annotated, so that its class checks the config."""
    taken = functions(code.path)[code.function].args
    parameters = [*taken.posonlyargs, *taken.args]
    return len(parameters) > 1 and parameters[1].annotation is not None
