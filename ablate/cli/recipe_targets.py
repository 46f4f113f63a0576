"""`ablate recipe export`, `import` and `audit`: recipes for training stacks, and of them."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from ablate.cli.common import DONE, FAILED, console
from ablate.cli.options import Flags
from ablate.cli.recipe import Set, Source, app, layers_of, print_differences, recipe_file, resolve
from ablate.engines.hardware import stray_switch
from ablate.errors import InputError
from ablate.experiment.yaml_document import as_text
from ablate.files import Json
from ablate.recipes import Recipe
from ablate.recipes.layers import Layer
from ablate.recipes.recipe import Layers, Products
from ablate.recipes.recipe_text import differences
from ablate.recipes.targets import TARGETS, Lost, Model
from ablate.recipes.targets.experts import grouped_switches
from ablate.recipes.targets.jobs import Job
from ablate.recipes.targets.megatron import VARIABLES
from ablate.recipes.targets.model import skipped

_PLAIN = ("json", "yaml")

Arguments = Annotated[
    str | None, typer.Option("--megatron-args", help="Arguments of Megatron-LM, as one string.")
]
Script = Annotated[
    Path | None,
    typer.Option(help="Shell script that starts one job of Megatron-LM, or text with its arguments."),
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
Fouroversix = Annotated[
    Path | None, typer.Option(help="JSON of fouroversix's ModelQuantizationConfig, or a config.json with it.")
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", help="Folder with config.json, or name on the Hugging Face hub: names layers and blocks."
    ),
]
Blocks = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of the model's blocks; default: Megatron's --num-layers, if it is read."
    ),
]
Environment = Annotated[
    Path | None, typer.Option("--env", help="File with NAME=value lines; default: this environment.")
]


@app.command()
def export(
    source: Source,
    flags: Flags,
    target: Annotated[
        Literal["te", "megatron", "bridge", "torchao", "torchtitan", "fouroversix", "json", "yaml"],
        typer.Option("--to", help="Training stack."),
    ],
    turn: Set = None,
    model: ModelName = None,
    blocks: Blocks = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write; default: print.")] = None,
) -> None:
    """Write a recipe as what a training stack reads, with every argument.

    Only what the stack computes exactly is written; otherwise every field that would be lost is listed, with
    exit status 2.
    """
    recipe = resolve(source, turn or [], flags)
    if target in _PLAIN:
        text = recipe_file(recipe, out.parent if out else Path.cwd(), target == "json")
    else:
        layers = () if model is None else layers_of(model, recipe)
        facts = Model(_title(source, turn or []), blocks, layers)
        try:
            text = TARGETS[target].write(recipe, facts)
        except Lost as lost:
            raise InputError(*[f"{source} --to {target}: {reason}" for reason in lost.reasons]) from None
    _put(text, out, TARGETS[target].what if target in TARGETS else target)


def _title(source: str, turned: list[str]) -> str:
    """Return what is exported, settings included, as one line that a comment or a docstring can hold."""
    whole = f"{source} with {', '.join(turned)}" if turned else source
    return " ".join(whole.split()).replace("\\", "/").replace('"', "'")


@app.command("import")
def import_recipe(
    arguments: Arguments = None,
    script: Script = None,
    te: Te = None,
    made: Object = None,
    fouroversix: Fouroversix = None,
    environment: Environment = None,
    model: ModelName = None,
    blocks: Blocks = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write; default: print.")] = None,
) -> None:
    """Print the recipe that a training stack's configuration stands for, as a recipe file.

    Exactly one of --megatron-args, --script, --te, --object and --fouroversix says where it is. What has no
    counterpart here is refused, by its field, and so is an argument that the stack ignores.
    """
    job = Job(arguments, script, te, made, fouroversix, environment)
    recipe, *_ = _read(job, model, blocks)
    if ignored := job.ignored():
        raise InputError(*ignored)
    text = as_text(recipe.model_dump(mode="json"))
    _put(text, out, "a recipe file, for `recipe:` of an experiment")


@app.command()
def audit(
    source: Source,
    flags: Flags,
    turn: Set = None,
    arguments: Arguments = None,
    script: Script = None,
    te: Te = None,
    made: Object = None,
    fouroversix: Fouroversix = None,
    environment: Environment = None,
    model: ModelName = None,
    blocks: Blocks = None,
) -> None:
    """Compare the recipe that is intended with the one that a job's configuration puts in force.

    Environment variables count: Transformer Engine takes its defaults from them. With --model, layers are
    compared one by one. Exit status: 0 they are the same, 1 they differ, 2 bad input.
    """
    intended = resolve(source, turn or [], flags)
    job = Job(arguments, script, te, made, fouroversix, environment)
    found, variables, facts = _read(job, model, blocks)
    screen = console()
    for name, (_, option, default) in VARIABLES.items():
        if made is None and fouroversix is None and variables.get(name, default) != default:
            screen.print(f"{name}={variables[name]} sets {option}", soft_wrap=True, markup=False)
    switches = grouped_switches(variables, found) if made is None and fouroversix is None else ()
    for sentence in (*switches, *job.ignored()):
        screen.print(sentence, soft_wrap=True, markup=False)
    stray = stray_switch(variables)
    if stray:
        screen.print(f"{stray} is set and changes numbers whatever the recipe is", markup=False)
    try:
        one, other = _comparable(intended, found, facts)
    except Lost as lost:
        raise InputError(*[f"audit {source}: {reason}" for reason in lost.reasons]) from None
    changes = list(differences(one, other))
    if not changes and not stray:
        screen.print(Text(f"The job trains by {source}.", "green"))
        raise typer.Exit(DONE)
    if changes:
        print_differences(screen, changes, source, "in force")
    raise typer.Exit(FAILED)


def _put(text: str, out: Path | None, what: str) -> None:
    """Print a text, or write it to a file and say what it is, and if it replaced other content."""
    if out is None:
        print(text, end="")
        return
    before = out.read_bytes() if out.is_file() else None
    out.write_text(text)
    replaced = "" if before in (None, text.encode()) else "; it replaced a file with other content"
    console().print(f"{out}: {what}{replaced}", markup=False, soft_wrap=True)


def _comparable(one: Recipe, other: Recipe, model: Model) -> tuple[dict[str, Json], dict[str, Json]]:
    """Return both recipes as data in which equal placements of layers are equal.

    Layers are compared one by one if they are known, by block if all rules name blocks, else as they are
    written.
    """
    layers, depth = model.layers, model.depth
    rules = (*one.layers.rules, *other.layers.rules)
    if (
        not layers
        and rules
        and depth is not None
        and all({*rule.match.fields} == {"blocks"} for rule in rules)
    ):
        layers = tuple(Layer(f"block {block}", block, frozenset()) for block in range(depth))
    if not layers:
        sides = ((one, "the intended recipe"), (other, "the job"))
        first, second = (_counted(recipe, side, model).model_dump(mode="json") for recipe, side in sides)
        return first, second
    data = []
    for recipe in (one, other):
        placed = {name: recipe.decided(decider) for name, decider in recipe.layers.deciders(layers).items()}
        data.append(
            recipe.model_dump(mode="json", exclude={"layers"})
            | {"layers": {name: _assigned(products, recipe) for name, products in placed.items()}}
        )
    return data[0], data[1]


def _assigned(products: Products | None, recipe: Recipe) -> Json:
    """Return what a layer's products are: a word, or all their fields."""
    if products is None or products.plain:
        return "high precision"
    return "the recipe's products" if products == recipe.products else products.model_dump(mode="json")


def _read(job: Job, model: str | None, blocks: int | None) -> tuple[Recipe, dict[str, str], Model]:
    """Return the recipe of a job, its environment variables and the facts of its model."""
    layers = () if model is None else layers_of(model, Recipe())
    facts = Model(model or "the job", blocks or job.blocks(), layers)
    return *job.in_force(), facts


def _counted(recipe: Recipe, side: str, model: Model) -> Recipe:
    """Return a recipe whose layer counts are numbers of blocks at both ends; Lost, which names the side, if
    it counts a share of an unknown number.
    """
    share = recipe.layers.last_fraction
    if not share:
        return recipe
    if model.depth is None:
        raise Lost(
            [
                f"layers.last_fraction {share:g}: {side} counts a share of the blocks, and their number is"
                " not known; give --blocks N, --model, or --num-layers among Megatron's arguments"
            ]
        )
    first, last = skipped(recipe, model, side)
    return recipe.model_copy(
        update={"layers": Layers(skip_first=first, skip_last=last, rules=recipe.layers.rules)}
    )
