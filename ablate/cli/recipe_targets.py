"""`ablate recipe export`, `import` and `audit`: recipes for training stacks, and of them."""

import importlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from ablate.cli.common import DONE, FAILED, console
from ablate.cli.recipe import Set, Source, differences, layers_of, print_differences, resolve
from ablate.engines.hardware import stray_switch
from ablate.errors import InputError
from ablate.experiment.yaml_document import as_text
from ablate.recipes import Recipe
from ablate.recipes.recipe import Layers
from ablate.recipes.targets import TARGETS, Lost, Model
from ablate.recipes.targets.megatron import VARIABLES, from_environment, read, standing_in
from ablate.recipes.targets.model import skipped
from ablate.recipes.te_import import is_te_recipe, recipe_of

_PLAIN = ("json", "yaml")
_PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".bin")
_EXPORT = re.compile(r"^\s*(?:export\s+)?([A-Z][A-Z0-9_]*)=(\S*)\s*$")
_UNSET = re.compile(r"^\s*unset\s+([A-Z0-9_]+)\s*$")
_CLASSES = ("NVFP4BlockScaling", "MXFP8BlockScaling", "Float8CurrentScaling", "DelayedScaling")

Arguments = Annotated[
    str | None, typer.Option("--megatron-args", help="Arguments of Megatron-LM, as one string.")
]
Script = Annotated[
    Path | None,
    typer.Option(help="Script or text with arguments of Megatron-LM and `export NAME=value` lines."),
]
Te = Annotated[
    str | None,
    typer.Option(
        "--te",
        help="Class of Transformer Engine that the job makes without arguments, such as NVFP4BlockScaling.",
    ),
]
Object = Annotated[
    str | None, typer.Option("--object", help="Recipe object of Transformer Engine, as module:name.")
]
Environment = Annotated[
    Path | None, typer.Option("--env", help="File with NAME=value lines; default: this environment.")
]


def export(
    source: Source,
    target: Annotated[
        Literal["te", "megatron", "bridge", "torchao", "torchtitan", "json", "yaml"],
        typer.Option("--to", help="Training stack."),
    ],
    turn: Set = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder with config.json, or name on the Hugging Face hub: names layers and blocks."
        ),
    ] = None,
    blocks: Annotated[int | None, typer.Option(min=1, help="Number of the model's blocks.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write; default: print.")] = None,
) -> None:
    """Write a recipe as what a training stack reads, with every argument.

    Only what the stack computes exactly is written; otherwise every field that would be lost is listed, with
    exit status 2.
    """
    recipe = resolve(source, turn or [])
    if target in _PLAIN:
        text = (
            recipe.model_dump_json(indent=2) + "\n"
            if target == "json"
            else as_text(recipe.model_dump(mode="json"))
        )
    else:
        facts = Model(source, blocks, () if model is None else layers_of(model, recipe))
        try:
            text = TARGETS[target].write(recipe, facts)
        except Lost as lost:
            raise InputError([f"{source} --to {target}: {reason}" for reason in lost.reasons]) from None
    if out is None:
        print(text, end="")
    else:
        out.write_text(text)
        console().print(f"{out}: {TARGETS[target].what if target in TARGETS else target}", markup=False)


def import_recipe(
    arguments: Arguments = None,
    script: Script = None,
    te: Te = None,
    made: Object = None,
    environment: Environment = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write; default: print.")] = None,
) -> None:
    """Print the recipe that a training stack's configuration stands for, as a recipe file.

    Exactly one of --megatron-args, --script, --te and --object says where it is. What has no counterpart here
    is refused.
    """
    recipe, _ = _in_force(arguments, script, te, made, environment)
    text = as_text(recipe.model_dump(mode="json"))
    if out is None:
        print(text, end="")
    else:
        out.write_text(text)
        console().print(f"{out}: a recipe file, for `recipe:` of an experiment", markup=False)


def audit(
    source: Source,
    turn: Set = None,
    arguments: Arguments = None,
    script: Script = None,
    te: Te = None,
    made: Object = None,
    environment: Environment = None,
    blocks: Annotated[int | None, typer.Option(min=1, help="Number of the model's blocks.")] = None,
) -> None:
    """Compare the recipe that is intended with the one that a job's configuration puts in force.

    Environment variables count: Transformer Engine takes its defaults from them. Exit status: 0 they are the
    same, 1 they differ, 2 bad input.
    """
    intended = resolve(source, turn or [])
    found, variables = _in_force(arguments, script, te, made, environment)
    screen = console()
    for name, (_, option, default) in VARIABLES.items():
        if made is None and variables.get(name, default) != default:
            screen.print(f"{name}={variables[name]} sets {option}", soft_wrap=True, markup=False)
    stray = stray_switch(variables)
    if stray:
        screen.print(f"{stray} is set and changes numbers whatever the recipe is", markup=False)
    try:
        one, other = (
            _counted(recipe, Model(blocks=blocks)).model_dump(mode="json") for recipe in (intended, found)
        )
    except Lost as lost:
        raise InputError([f"{source}: {reason}" for reason in lost.reasons]) from None
    changes = list(differences(one, other))
    if not changes and not stray:
        screen.print(Text(f"The job trains by {source}.", "green"))
        raise typer.Exit(DONE)
    if changes:
        print_differences(screen, changes, source, "in force")
    raise typer.Exit(FAILED)


def _in_force(
    arguments: str | None, script: Path | None, te: str | None, made: str | None, environment: Path | None
) -> tuple[Recipe, dict[str, str]]:
    """Return the recipe of a job, and its environment variables."""
    given = [value for value in (arguments, script, te, made) if value is not None]
    if len(given) != 1:
        raise InputError(["give one of --megatron-args, --script, --te and --object"])
    variables = dict(os.environ) if environment is None else _variables(_text(environment), {})
    words = [] if arguments is None else [arguments]
    if script is not None:
        text = _text(script)
        variables = _variables(text, variables)
        words = [_without_comments(text)]
    try:
        if made is not None:
            return _of_object(made), variables
        if te is not None:
            if te not in _CLASSES:
                raise InputError([f"--te {te}: one of {', '.join(_CLASSES)}"])
            recipe = recipe_of(standing_in(te, from_environment(te, variables)))
        else:
            recipe = read(words, variables)
    except ValueError as error:
        raise InputError([str(error)]) from None
    return recipe, variables


def _of_object(made: str) -> Recipe:
    module, colon, name = made.partition(":")
    if Path(made).suffix in _PICKLES:
        raise InputError(
            [f"--object {made}: files are not unpickled, which would run their code; name module:object"]
        )
    if not colon or not name:
        raise InputError([f"--object {made}: write module:name, such as my_recipes:RECIPE"])
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError([f"--object {made}: {error}"]) from None
    finally:
        sys.path.pop(0)
    if isinstance(found, Recipe):
        return found
    if not is_te_recipe(found):
        raise InputError(
            [f"--object {made}: {type(found).__name__} is no recipe object of Transformer Engine"]
        )
    try:
        return recipe_of(found)
    except ValueError as error:
        raise InputError([f"--object {made}: {error}"]) from None


def _text(path: Path) -> str:
    if path.suffix in _PICKLES:
        raise InputError([f"{path}: files are not unpickled, which would run their code; give its arguments"])
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError([f"{path}: {getattr(error, 'strerror', None) or 'it is no text'}"]) from None


def _variables(text: str, before: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables after the `export`, `NAME=value` and `unset` lines of a text."""
    variables = dict(before)
    for line in text.splitlines():
        if match := _EXPORT.match(line):
            variables[match[1]] = match[2].strip("\"'")
        elif match := _UNSET.match(line):
            variables.pop(match[1], None)
    return variables


def _without_comments(text: str) -> str:
    """Return the words of a shell script that may be arguments."""
    lines = (re.sub(r"(^|\s)#.*", "", line) for line in text.splitlines())
    return " ".join(re.sub(r"[()\\\"']", " ", line) for line in lines)


def _counted(recipe: Recipe, model: Model) -> Recipe:
    """Return a recipe whose layer counts are numbers of blocks at both ends."""
    if not recipe.layers.last_fraction:
        return recipe
    first, last = skipped(recipe, model, "the job")
    return recipe.model_copy(
        update={"layers": Layers(skip_first=first, skip_last=last, rules=recipe.layers.rules)}
    )
