"""Configurations of jobs, as the commands `recipe import` and `recipe audit` take them: as recipes."""

import importlib
import os
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ablate.errors import InputError, as_input_error
from ablate.recipes import Recipe
from ablate.recipes.targets import fouroversix, megatron
from ablate.recipes.targets.shell import Script, Started
from ablate.recipes.targets.torchao import is_torchao_config, recipe_of_torchao
from ablate.recipes.te_import import CLASSES, is_te_recipe, recipe_of

_PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".bin")
_FIRST = 4096
_MAGIC = {
    b"PK\x03\x04": "a zip archive, as torch.save writes",
    b"\x80": "a pickle",
    b"\x1f\x8b": "compressed",
}
"""First bytes of files that are not text, with a description."""
_EXPORT = re.compile(r"\s*(?:export\s+|declare -x\s+)?([A-Za-z_]\w*)=(.*?)\s*$")


@dataclass(frozen=True)
class Job:
    """A job's configuration: one of the first five fields, and its environment."""

    arguments: str | None = None
    """Arguments of Megatron-LM."""
    script: Path | None = None
    te: str | None = None
    """Class of Transformer Engine that is made without arguments."""
    made: str | None = None
    """Object, as module:name."""
    fouroversix: Path | None = None
    environment: Path | None = None

    @as_input_error(ValueError)
    def in_force(self) -> tuple[Recipe, dict[str, str]]:
        """Return the recipe that the job trains by, and its environment variables; InputError if nothing or
        too much is given, or it cannot be read or has no counterpart.
        """
        sources = (self.arguments, self.script, self.te, self.made, self.fouroversix)
        if sum(value is not None for value in sources) != 1:
            raise InputError("give one of --megatron-args, --script, --te, --object and --fouroversix")
        variables = self._started.environment
        return self._recipe(variables), variables

    @as_input_error(ValueError)
    def ignored(self) -> list[str]:
        """Return a sentence for each argument about precision that Megatron-LM accepts and ignores;
        InputError if the arguments cannot be read.
        """
        return list(megatron.without_effect(self._started.words))

    @as_input_error(ValueError)
    def blocks(self) -> int | None:
        """Return the number of the model's blocks, None if the arguments do not say it; InputError as
        `ignored`.
        """
        return megatron.blocks_of(self._started.words)

    @cached_property
    def _started(self) -> Started:
        """Return the arguments of Megatron-LM, and the environment that the job gets."""
        variables = dict(os.environ) if self.environment is None else _variables(self.environment)
        if self.script is None:
            return Started([] if self.arguments is None else [self.arguments], variables)
        started = Script(self.script, self._script, variables).job()
        return started._replace(words=[shlex.join(started.words)])

    @cached_property
    def _script(self) -> str:
        return "" if self.script is None else _text(self.script)

    def _recipe(self, variables: Mapping[str, str]) -> Recipe:
        if self.made is not None:
            return _of_object(self.made)
        if self.fouroversix is not None:
            with as_input_error(ValueError, before=f"{self.fouroversix}: "):
                return fouroversix.read(_text(self.fouroversix))
        if self.te is not None:
            if self.te not in CLASSES:
                raise ValueError(f"--te {self.te}: one of {', '.join(CLASSES)}")
            return recipe_of(megatron.standing_in(self.te, megatron.from_environment(self.te, variables)))
        layers = megatron.embedded(self._script.replace("\r\n", "\n"))
        made = {} if layers is None else {variables.get(megatron.FILE, megatron.FILE_NAME): layers}
        return megatron.read(
            self._started.words, variables, lambda path: made[path] if path in made else _text(Path(path))
        )


def _of_object(made: str) -> Recipe:
    module, colon, name = made.partition(":")
    for path in (Path(made), Path(module)):
        first = b""
        with suppress(OSError, ValueError), path.open("rb") as file:
            first = file.read(_FIRST)
        if _binary(path, first):
            raise ValueError(
                f"--object {made}: files are not unpickled, which would run their code; name module:object"
            )
    if not colon or not name:
        raise ValueError(f"--object {made}: write module:name, such as my_recipes:RECIPE")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--object {made}: {error}") from None
    finally:
        sys.path.pop(0)
    if isinstance(found, Recipe):
        return found
    with as_input_error(ValueError, before=f"--object {made}: "):
        if is_te_recipe(found):
            return recipe_of(found)
        if is_torchao_config(found):
            return recipe_of_torchao(found)
    raise ValueError(
        f"--object {made}: {type(found).__name__} is no recipe object of Transformer Engine and no training"
        " configuration of torchao"
    )


def _binary(path: Path, first: bytes) -> str | None:
    """Return what a file is by its first bytes or its name, if not text; None for text."""
    named = "a pickle by its name" if path.suffix in _PICKLES else "no text" if b"\0" in first else None
    return next((what for magic, what in _MAGIC.items() if first.startswith(magic)), named)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:  # once: a pipe, such as <(env), has nothing for a second reader
            if kind := _binary(path, first := file.read(_FIRST)):
                raise InputError(
                    f"{path}: {kind}; files are not unpickled, which would run their code; give the"
                    " configuration as text"
                )
            return (first + file.read()).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or 'it is no text'}") from None


def _variables(path: Path) -> dict[str, str]:
    variables: dict[str, str] = {}
    for number, line in enumerate(_text(path).splitlines()):
        if "NVTE_" in line or "_EXPORT_ENV" in line:
            variables = Script(path, "\n" * number + line, variables, exporting=True).environment
        elif match := _EXPORT.match(line):
            variables[match[1]] = match[2].strip("\"'")
    return variables
