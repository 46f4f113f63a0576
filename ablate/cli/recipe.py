"""`ablate recipe`: recipes as three products with six operands, and for training stacks, and of them.

`show --yaml` and `--json` print recipe files, which `show`, `diff` and experiments read back. Without torch.
"""

import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from ablate.cli.common import DONE, FAILED, console, plain_table
from ablate.cli.option_groups import App
from ablate.cli.options import Flags
from ablate.engines.hardware import stray_switch
from ablate.errors import InputError, as_input_error
from ablate.experiment import recipe_source
from ablate.experiment.arms import RECIPE_FILES, KnobError, StartingPoint
from ablate.experiment.yaml_document import as_text, scalar
from ablate.numerics.own import shown
from ablate.numerics.spec import own_words
from ablate.recipes import KNOBS, PRESETS, SLOTS, Recipe
from ablate.recipes.layers import Layer, select
from ablate.recipes.recipe_text import EQUATIONS, OPERAND, cells, differences, outline, placements, rest
from ablate.recipes.targets import TARGETS, Lost, Model
from ablate.recipes.targets.experts import grouped_switches
from ablate.recipes.targets.jobs import Job
from ablate.recipes.targets.megatron import VARIABLES
from ablate.recipes.targets.model import comparable
from ablate.store.named_arms import members_of
from ablate.training.models import described
from ablate.training.workloads.knobs import WORKLOAD_KNOBS

app = App(
    help="Show a recipe, diff two, export one to a training stack, import one, audit a job's.",
    no_args_is_help=True,
)

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
    rows = {slot: (slot, *cells(recipe.slot(slot), recipe.dtype)) for slot in SLOTS}
    widths = [max(map(len, column)) for column in zip_longest(OPERAND, *rows.values(), fillvalue="")]
    for product, equation in EQUATIONS.items():
        screen.print(Text(f"{equation}   {outline(getattr(recipe, product))}", style="cyan"))
        operands = (rows[f"{product}.{operand}"] for operand in getattr(recipe, product).operands)
        table = plain_table(*OPERAND, rows=operands, style="")
        for column, name, width in zip(table.columns, OPERAND, widths, strict=True):
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
    with as_input_error(ValueError):
        if ":" in source and Path(source).suffix not in RECIPE_FILES:  # an arm, as its trials have it
            member = members_of(source, (flags or Flags()).settings().state)[0]
            recipe = recipe_source.parse(member.resolved.recipe or {}, source)
        else:
            recipe = recipe_source.load(source)
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
    with as_input_error(OSError, ValueError, before=f"--model {model}: "):
        layers = described.outline(model).layers
    idle = [(number, select(rule.match, layers).reason) for number, rule in enumerate(recipe.layers.rules)]
    if reasons := [f"recipe.layers.rules.{number}.match: {reason}" for number, reason in idle if reason]:
        raise InputError(*reasons)
    return layers


ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", help="Folder with config.json, or name on the Hugging Face hub: names layers and blocks."
    ),
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="File to write; default: print.")]
Blocks = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of the model's blocks; default: Megatron's --num-layers, if it is read."
    ),
]


@dataclass(frozen=True)
class JobOptions:
    """Options that say where the configuration of a job is: one of the first five, in the order of `Job`.

    Args:
        arguments: Arguments of Megatron-LM, as one string.
        script: Shell script that starts one job of Megatron-LM, or text with its arguments.
        te: Class of Transformer Engine that the job makes without arguments, such as NVFP4BlockScaling.
        made: Recipe object of Transformer Engine, as module:name.
        fouroversix: JSON of fouroversix's ModelQuantizationConfig, or a config.json with it.
        environment: File with NAME=value lines; default: this environment.
    """

    arguments: Annotated[str | None, typer.Option("--megatron-args")] = None
    script: Path | None = None
    te: Annotated[str | None, typer.Option("--te")] = None
    made: Annotated[str | None, typer.Option("--object")] = None
    fouroversix: Path | None = None
    environment: Annotated[Path | None, typer.Option("--env")] = None
    model: ModelName = None
    blocks: Blocks = None

    def read(self) -> tuple[Job, Recipe, dict[str, str], Model]:
        """Return the job, its recipe, its environment variables and the facts of its model."""
        values = vars(self)
        job = Job(*[values[name] for name in values if name not in ("model", "blocks")])
        layers = () if self.model is None else layers_of(self.model, Recipe())
        facts = Model(self.model or "the job", self.blocks or job.blocks(), layers)
        return job, *job.in_force(), facts


@app.command()
def export(
    source: Source,
    flags: Flags,
    target: Annotated[
        Literal["te", "megatron", "bridge", "torchao", "torchtitan", "fouroversix", "json", "yaml"],
        typer.Option("--to"),
    ],
    turn: Set = None,
    model: ModelName = None,
    blocks: Blocks = None,
    out: Out = None,
) -> None:
    """Write a recipe as what a training stack reads, with every argument.

    Only what the stack computes exactly is written; otherwise every field that would be lost is listed, with
    exit status 2.

    Args:
        target: Training stack.
    """
    recipe = resolve(source, turn or [], flags)
    if target in ("json", "yaml"):
        _put(recipe_file(recipe, out.parent if out else Path.cwd(), target == "json"), out, target)
        return
    title = f"{source} with {', '.join(turn)}" if turn else source
    title = " ".join(title.split()).replace("\\", "/").replace('"', "'")  # in a comment or a docstring
    facts = Model(title, blocks, () if model is None else layers_of(model, recipe))
    with _input_errors(f"{source} --to {target}"):
        _put(TARGETS[target].write(recipe, facts), out, TARGETS[target].what)


@app.command("import")
def import_recipe(options: JobOptions, out: Out = None) -> None:
    """Print the recipe that a training stack's configuration stands for, as a recipe file.

    Exactly one of --megatron-args, --script, --te, --object and --fouroversix says where it is. What has no
    counterpart here is refused, by its field, and so is an argument that the stack ignores.
    """
    job, recipe, *_ = options.read()
    if ignored := job.ignored():
        raise InputError(*ignored)
    text = as_text(recipe.model_dump(mode="json"))
    _put(text, out, "a recipe file, for `recipe:` of an experiment")


@app.command()
def audit(source: Source, flags: Flags, turn: Set = None, *, options: JobOptions) -> None:
    """Compare the recipe that is intended with the one that a job's configuration puts in force.

    Environment variables count: Transformer Engine takes its defaults from them. With --model, layers are
    compared one by one. Exit status: 0 they are the same, 1 they differ, 2 bad input.
    """
    intended = resolve(source, turn or [], flags)
    job, found, variables, facts = options.read()
    megatron = options.made is None and options.fouroversix is None
    screen = console()
    for name, (_, option, default) in VARIABLES.items():
        if megatron and variables.get(name, default) != default:
            screen.lines(f"{name}={variables[name]} sets {option}")
    switches = grouped_switches(variables, found) if megatron else ()
    screen.lines(*switches, *job.ignored())
    if stray := stray_switch(variables):
        screen.print(f"{stray} is set and changes numbers whatever the recipe is")
    with _input_errors(f"audit {source}"):
        changes = list(differences(*comparable(intended, found, facts)))
    if not changes and not stray:
        screen.print(Text(f"The job trains by {source}.", "green"))
        raise typer.Exit(DONE)
    if changes:
        print_differences(screen, changes, source, "in force")
    raise typer.Exit(FAILED)


@contextmanager
def _input_errors(what: str) -> Iterator[None]:
    """Turn what a stack cannot express into an InputError with all reasons."""
    try:
        yield
    except Lost as lost:
        raise InputError(*[f"{what}: {reason}" for reason in lost.reasons]) from None


def _put(text: str, out: Path | None, what: str) -> None:
    """Print a text, or write it to a file and say what it is, and if it replaced other content."""
    if out is None:
        print(text, end="")
        return
    before = out.read_bytes() if out.is_file() else None
    out.write_text(text, encoding="utf-8")
    replaced = "" if before in (None, text.encode()) else "; it replaced a file with other content"
    console().lines(f"{out}: {what}{replaced}")
