"""`ablate recipe show` and `diff`: recipes as three products with six operands. Without torch.

`show --yaml` and `--json` print recipe files, which `show`, `diff` and experiments read back.
"""

import inspect
import json
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ablate.cli.common import console, plain_table
from ablate.cli.option_groups import App
from ablate.cli.options import Flags
from ablate.errors import InputError
from ablate.experiment import recipe_source
from ablate.experiment.arms import RECIPE_FILES, KnobError, StartingPoint
from ablate.experiment.yaml_document import as_text, scalar
from ablate.numerics.own import shown
from ablate.numerics.spec import Quant, own_words
from ablate.recipes import KNOBS, PRESETS, SLOTS, Recipe
from ablate.recipes.layers import Layer, select
from ablate.recipes.recipe_text import (
    EQUATIONS,
    block_scale,
    differences,
    extras,
    outer_scale,
    outline,
    placements,
    rest,
    rounding,
)
from ablate.store.named_arms import members_of
from ablate.training.models import described
from ablate.training.workloads.knobs import WORKLOAD_KNOBS

app = App(
    help="Show a recipe, diff two, export one to a training stack, import one, audit a job's.",
    no_args_is_help=True,
)

HEADER = ("operand", "element", "block", "block scale", "outer scale", "rounding", "and")
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Set a knob or a full path first: rht=false, recipe.fprop.x.block=1x32; repeatable."
    ),
]


def complete_presets(incomplete: str) -> list[str]:
    """Return the presets whose names begin so, for the shell's completion."""
    return [name for name in PRESETS if name.startswith(incomplete)]


Source = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="Name of a preset, a recipe file (YAML), or an arm of a sweep, SWEEP:ARM.",
        autocompletion=complete_presets,
    ),
]


@app.command()
def show(
    source: Source,
    flags: Flags,
    turn: Set = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    as_yaml: Annotated[bool, typer.Option("--yaml")] = False,
    model: str | None = None,
) -> None:
    """Print a recipe: its three products with six operands, then its layer policy and schedule.

    Args:
        as_json: Print the canonical JSON instead.
        as_yaml: Print a recipe file instead, which an experiment can name.
        model: Folder with config.json, or name on the Hugging Face hub; count its layers by layer policy.
    """
    recipe = resolve(source, turn or [], flags)
    placed = () if model is None else tuple(placements(recipe, layers_of(model, recipe)))
    if as_json or as_yaml:
        print(recipe_file(recipe, Path.cwd(), as_json), end="")
        return
    screen = console()
    explained = inspect.getdoc(PRESETS[source]) if source in PRESETS else "A recipe file."
    screen.print(Text(source, style="bold"), Text(explained or ""), "", sep="\n")
    rows = {slot: (slot, *_cells(recipe.slot(slot), recipe.dtype)) for slot in SLOTS}
    widths = [max(map(len, cells)) for cells in zip_longest(HEADER, *rows.values(), fillvalue="")]
    for product, equation in EQUATIONS.items():
        screen.print(Text(f"{equation}   {outline(getattr(recipe, product))}", style="cyan"))
        cells = (rows[f"{product}.{operand}"] for operand in getattr(recipe, product).operands)
        table = plain_table(*HEADER, rows=cells, style="")
        for column, name, width in zip(table.columns, HEADER, widths, strict=True):
            column.header, column.min_width = Text(name, "dim"), width
        screen.print(table, "")
    for line in rest(recipe):
        screen.print(Text(line))
    if placed:
        screen.print("", Text(f"in {model}"), *(Text(f"  {line}") for line in placed), sep="\n")


def recipe_file(recipe: Recipe, folder: Path, as_json: bool) -> str:
    """Return the text of a recipe file in `folder`, to which files of the user's functions are relative, as
    YAML or canonical JSON, and print the functions' files that it needs to standard error."""
    text = recipe.model_dump_json(indent=2) + "\n"
    for word in sorted({word for _, word in own_words(recipe)}):
        near, quoted = word.seen_from(folder), json.dumps(word, ensure_ascii=False)
        text = text.replace(quoted, json.dumps(near, ensure_ascii=False))
        note = f"It calls {near.partition('#')[0]}, with digest {word.digest}: its reader needs this file."
        print(note, file=sys.stderr)
    return text if as_json else as_text(json.loads(text))


@app.command()
def diff(first: Source, second: Source, flags: Flags) -> None:
    """Print the differences between two recipes, by path."""
    recipes = [resolve(name, [], flags) for name in (first, second)]
    one, other = (recipe.model_dump(mode="json") for recipe in recipes)
    changes = list(differences(one, other))
    screen = console()
    for word in sorted({word for recipe in recipes for _, word in own_words(recipe)}):
        if not word.unchanged:
            screen.lines(Text(f"{shown(word)} was edited since, or is gone."))
    if not changes:
        screen.print(f"{first} and {second} are the same recipe.")
        return
    print_differences(screen, changes, first, second)


def print_differences(
    screen: Console, changes: Sequence[tuple[str, str, str]], first: str, second: str
) -> None:
    """Print what `differences` found, under the names of the two recipes."""
    rows = ((path, Text(one), Text(other)) for path, one, other in changes)
    screen.print(plain_table("field", first, second, rows=rows))


def resolve(source: str, turned: list[str], flags: Flags | None = None) -> Recipe:
    """Return the recipe of a preset, a recipe file, or SWEEP:ARM with changed knobs (`knob=value`);
    InputError with all reasons. `flags` say where the state folder is."""
    try:
        if ":" in source and Path(source).suffix not in RECIPE_FILES:  # an arm, as its trials have it
            member = members_of(source, (flags or Flags()).settings().state)[0]
            recipe = recipe_source.parse(member.resolved.recipe or {}, source)
        else:
            recipe = recipe_source.load(source)
    except ValueError as error:
        raise InputError(str(error)) from None
    pairs = [text.partition("=") for text in turned]
    hint = f"knobs are {', '.join(KNOBS)}, or recipe.<path>"
    if unfinished := [knob for knob, equals, _ in pairs if not equals]:
        raise InputError(*[f"--set {knob}: write knob=value; {hint}" for knob in unfinished])
    why, others = f"a recipe has no workload and is one preset; {hint}", ("recipe", *WORKLOAD_KNOBS)
    if outside := [knob for knob, *_ in pairs if knob in others or knob.startswith("workload.")]:
        raise InputError(*[f"--set {knob}: {why}" for knob in outside])
    try:
        values = {knob: scalar(value) for knob, _, value in pairs}
        return StartingPoint("gpt", {}, source, own=recipe).recipe(values)
    except KnobError as error:
        raise InputError(*[f"--set {knob}: {why}" for knob, why in error.reasons]) from None


def layers_of(model: str, recipe: Recipe) -> tuple[Layer, ...]:
    """Return the linear layers of a model; InputError if they cannot be listed, or if a rule selects none."""
    try:
        layers = described.outline(model).layers
    except (OSError, ValueError) as error:
        raise InputError(f"--model {model}: {error}") from None
    idle = [(number, select(rule.match, layers).reason) for number, rule in enumerate(recipe.layers.rules)]
    if reasons := [f"recipe.layers.rules.{number}.match: {reason}" for number, reason in idle if reason]:
        raise InputError(*reasons)
    return layers


def _cells(quant: Quant | None, dtype: str) -> tuple[str, ...]:
    if quant is None:
        return (dtype,)
    scales = block_scale(quant), outer_scale(quant)
    return (shown(quant.element), quant.block or "-", *scales, rounding(quant), ", ".join(extras(quant)))
