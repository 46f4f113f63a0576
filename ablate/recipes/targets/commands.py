"""Recipes in the command line of a training stack: its options, its files, its environment variables.

The problem. A command that a sweep runs should need no change: it must get each arm's recipe in the form that
its stack reads already, and it must be certain that the recipe arrived.

The idea. `exported` writes a recipe by a target of `TARGETS` and says what the command needs beside its own
words. Then the command is read back as a whole: an option that stands elsewhere in it, or a variable, may
change the recipe that it was given.

    exported("torchtitan", nvfp4, Model(blocks=6), folder, words)
        options    --override.imports recipe_torchtitan.quantised
        texts      {folder/recipe_torchtitan.py: "..."}

A stack that has no options for a recipe gets the path of the file. Targets that cannot say "nothing is
quantised" are left out: the baseline is run by the same command.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ablate.recipes.recipe import Recipe
from ablate.recipes.targets import TARGETS, megatron, torchao
from ablate.recipes.targets.model import Lost, Model, skipped

_STEM = "recipe_"
_IMPORTS = "--override.imports"


@dataclass(frozen=True)
class Export:
    """A recipe for one process of a stack."""

    path: Path
    """File with the recipe, as `ablate recipe export` writes it."""
    texts: Mapping[Path, str]
    """All files to write."""
    options: tuple[str, ...]
    """Words of the command line in place of a placeholder that is a word of its own."""
    variables: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables; None: it must not be set."""
    imported: bool = False
    """True if the command imports the file: its folder belongs on PYTHONPATH."""


@dataclass(frozen=True)
class Stack:
    """A training stack whose command can be given a recipe."""

    suffix: str
    export: Callable[[Recipe, Model, Path, Sequence[str]], Export]
    """Return the export: arguments are recipe, facts of the model, path of the file, and the command's words
    without it; raises Lost."""
    version: int = 1
    """Raise by hand if the same recipe makes the stack compute other numbers: it is part of a trial's id."""
    te: bool = False
    """True if Transformer Engine computes it, whose environment variables count."""


def path_of(name: str, folder: Path) -> Path:
    """Return the file that a stack's export is written to."""
    return folder / f"{_STEM}{name}{STACKS[name].suffix}"


def exported(name: str, recipe: Recipe, model: Model, folder: Path, words: Sequence[str]) -> Export:
    """Return what a command, of these words without the export, needs for its stack to compute a recipe, with
    files for the folder; Lost for each field that the stack cannot express. Writes nothing.
    """
    return STACKS[name].export(recipe, model, path_of(name, folder), words)


def confirm(
    name: str,
    recipe: Recipe,
    model: Model,
    export: Export,
    words: Sequence[str],
    environment: Mapping[str, str],
) -> None:
    """Read a whole command back, words and environment with the export, and compare the recipe in force with
    the one that was exported; Lost if it is another, or cannot be read.
    """
    if name == "torchtitan" and sum(word.partition("=")[0] == _IMPORTS for word in words) > 1:
        raise Lost(f"{_IMPORTS} stands in the command already, and torchtitan takes the last one alone")
    options, count = export.options, len(export.options)
    given = any(tuple(words[at : at + count]) == options for at in range(len(words) - count + 1))
    if name != "megatron" or not given:
        return
    texts = {str(path): text for path, text in export.texts.items()}
    try:
        megatron.confirm(
            recipe,
            _counted(model, words),
            [shlex.join(words)],
            environment,
            lambda path: texts[path] if path in texts else Path(path).read_text(encoding="utf-8"),
            "the command",
        )
    except ValueError as error:
        raise (error if isinstance(error, Lost) else Lost(str(error))) from None


def _of_file(target: str, recipe: Recipe, model: Model, path: Path, words: Sequence[str]) -> Export:
    """Return the export of a stack that imports a file and has no option for it."""
    return Export(path, {path: TARGETS[target].write(recipe, model)}, (str(path),), imported=True)


def _json(recipe: Recipe, model: Model, path: Path, words: Sequence[str]) -> Export:
    text = recipe.model_dump_json(indent=2) + "\n"
    if Recipe.model_validate_json(text) != recipe:
        raise Lost("fprop, dgrad, wgrad: the recipe file stands for another recipe")
    return Export(path, {path: text}, (str(path),))


def _torchtitan(recipe: Recipe, model: Model, path: Path, words: Sequence[str]) -> Export:
    made = _of_file("torchtitan", recipe, model, path, words)
    converts = torchao.torchtitan_blocks(recipe, model)
    return replace(made, options=(_IMPORTS, f"{path.stem}.{torchao.OVERRIDE}") if converts else ())


def _counted(model: Model, words: Sequence[str]) -> Model:
    """Return the facts of a model with the number of blocks by Megatron's `--num-layers`; Lost if another
    number is given, ValueError as of `megatron.read`.
    """
    blocks = megatron.blocks_of([shlex.join(words)])
    if blocks and model.depth and blocks != model.depth:
        raise Lost(f"layers: --num-layers is {blocks}, and export says {model.depth} blocks; leave out one")
    return model if model.depth else replace(model, blocks=blocks)


def _megatron(recipe: Recipe, model: Model, path: Path, words: Sequence[str]) -> Export:
    try:
        model = _counted(model, words)
        first, last = skipped(recipe, depth := model.depth)
        if not recipe.products.plain and depth is not None and first + last >= depth:
            raise Lost(f"layers: no block is quantised: {first} and {last} of {depth} stay in bf16")
        made = megatron.job(recipe, model)
    except ValueError as error:
        raise (error if isinstance(error, Lost) else Lost(str(error))) from None
    texts = {path: TARGETS["megatron"].write(recipe, model)}
    options = [word for option in made.options.items() for word in option if word]
    variables = dict(made.variables)
    if made.layers:
        file = path.with_suffix(".yaml")
        texts[file] = made.layers
        options += ["--te-precision-config-file", str(file)]
        variables[megatron.FILE] = str(file)
    return Export(path, texts, tuple(options), variables)


STACKS: Mapping[str, Stack] = {
    "torchtitan": Stack(".py", _torchtitan),
    "megatron": Stack(".sh", _megatron, te=True),
    "bridge": Stack(".py", partial(_of_file, "bridge"), te=True),
    "te": Stack(".py", partial(_of_file, "te"), te=True),
    "torchao": Stack(".py", partial(_of_file, "torchao")),
    "json": Stack(".json", _json),
}
"""Stacks that a command can name, as `{export:torchtitan}`."""
