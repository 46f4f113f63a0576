"""Recipes that a command gets in the form of its own training stack: `{export:te}` in its `run`.

A placeholder that is a word of its own becomes the stack's options, or the path of the exported file if the
stack has none; within a word it becomes the path. The files are written to the folder `export` of the trial's
files. Reading them back is the confirmation of the recipe, which the command then need not give.
"""

import os
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from ablate.engines.hardware import stray_switch
from ablate.errors import nearest
from ablate.numerics.spec import Spec
from ablate.recipes.layers import Layer
from ablate.recipes.recipe import Recipe
from ablate.recipes.targets.commands import STACKS, Export, confirm, exported, path_of
from ablate.recipes.targets.model import Lost, Model
from ablate.training.own_code.process_environment import in_force

PLACEHOLDER = "export"
_PRECISION = re.compile(
    r"--(?:fp[48]-[\w-]+|te-precision-config-file|override\.imports)\b|\bNVTE_(?:NVFP4|BACKWARD)\w*(?==)"
)
"""Options of Megatron-LM and torchtitan, and variables of Transformer Engine, that decide the precision."""
_BY = ("workload.export.blocks or workload.export.model", "workload.export.model")
"""Keys that give the number of blocks, and the layers."""


class ExportOptions(Spec):
    """Facts of the model, for the placeholders `{export:...}` of `run`."""

    NAMES: ClassVar[tuple[str, ...]] = ("model",)

    blocks: int | None = Field(None, ge=1)
    """Number of the model's blocks; for Megatron-LM, `--num-layers` in `run` gives it, too."""
    model: str | None = None
    """Folder with `config.json`, or name on the Hugging Face hub: names the layers that rules select."""


def misfit(stack: str) -> str | None:
    """Return why `{export:stack}` cannot be filled in; None if it can."""
    if stack in STACKS:
        return None
    if not stack:
        return f"{{export}} names no training stack; write {{export:NAME}}, NAME one of {', '.join(STACKS)}"
    return f"{{export:{stack}}}: no such training stack; {nearest(stack, STACKS)}"


def stacks_in(word: str) -> tuple[list[str], bool]:
    """Return the stacks that the placeholders of a word name, and True if one is the whole word."""
    parts = list(string.Formatter().parse(word))
    found = [form for _, name, form, _ in parts if name == PLACEHOLDER and form]
    return found, bool(found) and len(parts) == 1 and not parts[0][0]


def of_precision(text: str) -> str:
    """Return the first word of a command, or of a script, that sets a precision by itself; empty for none."""
    found = _PRECISION.search(
        "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    )
    return found[0] if found else ""


class Paths:
    """Value of the placeholder `export` within a word, whose format is the name of a stack: a path in the
    folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __format__(self, stack: str) -> str:
        return str(path_of(stack, self._folder))


class NotExpressed(ValueError):
    """A stack of a command cannot express a recipe, for `reasons`: a field of the recipe, or `run`, and the
    sentence about it."""

    def __init__(self, reasons: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(why for _, why in reasons))
        self.reasons = list(reasons)


@dataclass(frozen=True)
class Exported:
    """A command with a recipe in the forms of its stacks."""

    words: list[str]
    """Program and arguments."""
    texts: Mapping[Path, str]
    """Files to write."""
    variables: Mapping[str, str | None]
    """Environment variables; None: it must not be set."""


def with_exports(
    stacks: Iterable[str],
    recipe: Recipe,
    options: ExportOptions,
    layers: tuple[Layer, ...],
    folder: Path,
    fill: Callable[[Mapping[str, Sequence[str]]], list[str]],
) -> Exported:
    """Return a command with its exports, to be written to the folder, each of them read back. Writes nothing.
    `layers` is empty if they are not known; `fill` returns program and arguments, for the words that each
    stack's placeholder becomes. NotExpressed if a stack cannot express the recipe, or the command changes it
    elsewhere."""
    model = Model("this trial's recipe", options.blocks, layers, by=_BY)
    reasons: list[tuple[str, str]] = []
    made: dict[str, Export] = {}
    words = fill({})
    for stack in stacks:
        try:
            made[stack] = exported(stack, recipe, model, folder, words)
        except Lost as lost:
            reasons += [_placed(stack, reason) for reason in lost.reasons]
    variables: dict[str, str | None] = {}
    for export in made.values():
        variables |= export.variables
    if any(export.imported for export in made.values()):
        paths = (str(folder), os.environ.get("PYTHONPATH"))
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if not reasons:
        words = fill({stack: export.options for stack, export in made.items()})
        environment = in_force(os.environ, variables)
        for stack, export in made.items():
            try:
                confirm(stack, recipe, model, export, words, environment)
            except Lost as lost:
                reasons += [
                    ("run", f"{{{PLACEHOLDER}:{stack}}}: with the other words of run: {reason}")
                    for reason in lost.reasons
                ]
    if reasons:
        raise NotExpressed(reasons)
    texts = {path: text for export in made.values() for path, text in export.texts.items()}
    return Exported(words, texts, variables)


def write(export: Exported, stacks: Iterable[str]) -> None:
    """Write the files of a command's exports, and print what they are, for the trial's log. RuntimeError if a
    variable changes the numbers of Transformer Engine whatever the recipe is; OSError if a file cannot be
    written."""
    stray = stray_switch(in_force(os.environ, export.variables))
    if stray and any(STACKS[stack].te for stack in stacks):
        raise RuntimeError(f"{stray} is set and changes numbers whatever the recipe is; unset it")
    for path, text in export.texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"{path}: the recipe of this trial, read back and compared", flush=True)


def _placed(stack: str, reason: str) -> tuple[str, str]:
    """Return the field that a reason is about, and the reason with the placeholder before it."""
    field = reason.split()[0].strip(",:")
    known = field.partition(".")[0] in Recipe.model_fields
    return f"recipe.{field}" if known else "run", f"{{{PLACEHOLDER}:{stack}}}: {reason}"
