"""From what a user names to a subject: a function, a Subject, our emulator, an entry point."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from ablate.errors import InputError, nearest
from ablate.experiment.recipe_source import load
from ablate.own_source import import_file
from ablate.verification.conformance.emulator import emulator
from ablate.verification.conformance.subject import Subject

GROUP = "ablate.conformance"
"""Entry points of packages that bring their own subjects: a name, and a Subject or a function."""
SEED = 17
"""Seed that a function of (x, w, dy, seed) is handed."""
_PARAMETERS = {
    ("x",): "cast",
    ("w",): "cast_square",
    ("x", "amax"): "cast_given",
    ("x", "seed"): "cast_stochastic",
    ("x", "w", "dy"): "product",
    ("x", "w", "dy", "seed"): "product",
    ("x", "w", "dy", "offsets"): "grouped",
}
"""Field of `Subject` by the names of a function's parameters that have no default."""


def as_subject(thing: object, name: str) -> Subject:
    """Return a Subject: itself, or the one of a function, by the names of its parameters. InputError if it is
    neither, or its parameters have other names."""
    if isinstance(thing, Subject):
        return thing
    if not callable(thing):
        raise InputError(f"{name} is a {type(thing).__name__}; name a function or a Subject")
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        raise InputError(f"{name} does not show its parameters: wrap it in a function of x") from None
    needed = tuple(
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    )
    if not needed and not inspect.isclass(thing) and not signature.parameters:
        return as_subject(_called(thing, name), name)
    if needed not in _PARAMETERS:
        forms = ", ".join(f"({', '.join(form)})" for form in _PARAMETERS)
        raise InputError(f"{name}({', '.join(needed)}): the parameters of a subject are {forms}")
    seeded = needed == ("x", "w", "dy", "seed")  # always by one seed: a property asks for the same bits twice
    functions: dict[str, Any] = {
        _PARAMETERS[needed]: (lambda x, w, dy: thing(x, w, dy, SEED)) if seeded else thing
    }
    return Subject(name, **functions)


def _called(function: Callable[[], object], name: str) -> object:
    """Return what a function without parameters makes: a Subject, imported when it is needed."""
    try:
        made = function()
    except Exception as error:
        raise InputError(f"{name}() raises {_told(error)}") from error
    if not isinstance(made, Subject):
        raise InputError(f"{name}() returned a {type(made).__name__}; without parameters, return a Subject")
    return made


def find(text: str, recipe: str, device: str = "cpu") -> Subject:
    """Return the subject that a user names: `module:function`, `file.py:function`, `module:OBJECT`, `ablate`,
    or the name of an entry point. InputError if nothing of that name can be imported, or it is not a subject.

    `recipe`: name of the one that our emulator computes; `device`: on which tensors are handed to the
    subject.
    """
    place, colon, name = text.rpartition(":")
    if colon:
        module = _opened(place, text)
        if not hasattr(module, name):
            public = [one for one in vars(module) if not one.startswith("_")]
            raise InputError(f"{text}: {place} has no {name}; {nearest(name, public)}")
        subject = as_subject(getattr(module, name), name)
    else:
        subject = _named(text, recipe)
    return replace(subject, device=device) if device != "cpu" else subject


def names() -> dict[str, Callable[[str], Subject]]:
    """Return the subjects that have a name, `ablate` and entry points, as functions of the recipe's name."""
    found: dict[str, Callable[[str], Subject]] = {"ablate": lambda recipe: emulator(load(recipe))}
    for entry in entry_points(group=GROUP):
        found[entry.name] = lambda recipe, entry=entry: as_subject(entry.load(), entry.name)  # type: ignore[misc]
    return found


def _named(text: str, recipe: str) -> Subject:
    known = names()
    if text.endswith(".py"):
        things = vars(_opened(text, text)).items()
        own = [
            name
            for name, thing in things
            if isinstance(thing, Subject)
            or (inspect.isfunction(thing) and thing.__module__ == Path(text).stem)
        ]
        raise InputError(
            f"{text}: name one of its functions, as {text}:NAME; it has {', '.join(own) or 'none'}"
        )
    if text not in known:
        hint = f"give module:function, file.py:function or a folder of dumps; {nearest(text, known)}"
        raise InputError(f"{text}: {hint}")
    return known[text](recipe)


def _opened(place: str, text: str) -> ModuleType:
    """Import a module from the current folder or the environment, or a file with its folder's modules."""
    path = Path(place) if place.endswith(".py") else None
    if path is not None and not path.is_file():
        raise InputError(f"{path}: no such file")
    folder = os.getcwd() if path is None else str(path.resolve().parent)
    try:
        if folder not in sys.path:
            sys.path.insert(0, folder)
        return importlib.import_module(place) if path is None else import_file(path)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{text}: importing {place} raises {_told(error)}") from error


def _told(error: BaseException) -> str:
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}"
