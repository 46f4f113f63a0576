"""`ablate recipe show` and `diff`: recipes as three products with six operands. Without torch.

What `show --yaml` and `--json` print are recipe files, which `show`, `diff` and experiments read back.
"""

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ablate.cli.common import console
from ablate.cli.option_groups import App
from ablate.errors import InputError
from ablate.experiment import recipe_source
from ablate.experiment.arms import KnobError, StartingPoint
from ablate.experiment.yaml_document import as_text, scalar
from ablate.files import Json
from ablate.numerics.choices import CANDIDATES, GEMM_OUTPUTS
from ablate.numerics.spec import Quant
from ablate.recipes import KNOBS, PRESETS, SLOTS, Recipe
from ablate.recipes.layers import Layer, select
from ablate.recipes.recipe import Dgrad, Fprop, Products, Wgrad
from ablate.training.workloads.knobs import WORKLOAD_KNOBS

app = App(
    help="Show a recipe, diff two, export one to a training stack, import one from it, or audit a job's.",
    no_args_is_help=True,
)

HEADER = ("operand", "element", "block", "block scale", "outer scale", "rounding", "and")
EQUATIONS = {"fprop": "y = x w^T", "dgrad": "dx = g w", "wgrad": "dw = g^T x"}
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
        metavar="RECIPE", help="Name of a preset, or a recipe file (YAML).", autocompletion=complete_presets
    ),
]


@app.command()
def show(
    source: Source,
    turn: Set = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the canonical JSON instead.")] = False,
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="Print a recipe file instead, which an experiment can name.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder with config.json, or name on the Hugging Face hub; count its layers by layer policy."
        ),
    ] = None,
) -> None:
    """Print a recipe: its three products with six operands, then its layer policy and schedule."""
    recipe = resolve(source, turn or [])
    placed = () if model is None else tuple(placements(recipe, layers_of(model, recipe)))
    if as_json:
        print(recipe.model_dump_json(indent=2))
        return
    if as_yaml:
        print(as_text(recipe.model_dump(mode="json")), end="")
        return
    screen = console()
    explained = inspect.getdoc(PRESETS[source]) if source in PRESETS else "A recipe file."
    screen.print(Text(source, style="bold"), Text(explained or ""), "", sep="\n")
    rows = {slot: (slot, *_cells(recipe.slot(slot), recipe.dtype)) for slot in SLOTS}
    widths = [
        max(len(cells[column]) for cells in (HEADER, *rows.values()) if column < len(cells))
        for column in range(len(HEADER))
    ]
    for product, equation in EQUATIONS.items():
        screen.print(Text(f"{equation}   {outline(getattr(recipe, product))}", style="cyan"))
        table = _table()
        for name, width in zip(HEADER, widths, strict=True):
            table.add_column(Text(name, style="dim"), min_width=width)
        for operand in getattr(recipe, product).operands:
            table.add_row(*rows[f"{product}.{operand}"])
        screen.print(table, "")
    for line in rest(recipe):
        screen.print(Text(line))
    if placed:
        screen.print("", Text(f"in {model}"), *(Text(f"  {line}") for line in placed), sep="\n")


@app.command()
def diff(
    first: Source,
    second: Source,
) -> None:
    """Print the differences between two recipes, by path."""
    one, other = (resolve(name, []).model_dump(mode="json") for name in (first, second))
    changes = list(differences(one, other))
    screen = console()
    if not changes:
        screen.print(f"{first} and {second} are the same recipe.")
        return
    print_differences(screen, changes, first, second)


def print_differences(
    screen: Console, changes: Sequence[tuple[str, str, str]], first: str, second: str
) -> None:
    """Print what `differences` found, under the names of the two recipes."""
    table = _table("field", first, second)
    for path, *values in changes:
        table.add_row(path, *map(Text, values))
    screen.print(table)


def resolve(source: str, turned: list[str]) -> Recipe:
    """Return a preset or a recipe file with changed knobs (`knob=value`); InputError with all reasons."""
    try:
        recipe = recipe_source.load(source)
    except ValueError as error:
        raise InputError([str(error)]) from None
    pairs = [text.partition("=") for text in turned]
    hint = f"knobs are {', '.join(KNOBS)}, or recipe.<path>"
    unfinished = [f"--set {knob}: write knob=value; {hint}" for knob, equals, _ in pairs if not equals]
    if unfinished:
        raise InputError(unfinished)
    outside = [
        f"--set {knob}: a recipe has no workload and is one preset; {hint}"
        for knob, *_ in pairs
        if knob == "recipe" or knob in WORKLOAD_KNOBS or knob.startswith("workload.")
    ]
    if outside:
        raise InputError(outside)
    try:
        return StartingPoint("gpt", {}, source, own=recipe).recipe(
            {knob: scalar(value) for knob, _, value in pairs}
        )
    except KnobError as error:
        raise InputError([f"--set {knob}: {why}" for knob, why in error.reasons]) from None


def layers_of(model: str, recipe: Recipe) -> tuple[Layer, ...]:
    """Return the linear layers of a model; InputError if they cannot be listed, or if a rule
    selects none.
    """
    from ablate.training.models.described import outline

    try:
        layers = outline(model).layers
    except (OSError, ValueError) as error:
        raise InputError([f"--model {model}: {error}"]) from None
    idle = [(number, select(rule.match, layers).reason) for number, rule in enumerate(recipe.layers.rules)]
    if reasons := [f"recipe.layers.rules.{number}.match: {reason}" for number, reason in idle if reason]:
        raise InputError(reasons)
    return layers


# --- in words -------------------------------------------------------------------------------------


def _cells(quant: Quant | None, dtype: str) -> tuple[str, ...]:
    if quant is None:
        return (dtype,)
    return (
        quant.element,
        quant.block or "-",
        block_scale(quant),
        outer_scale(quant),
        rounding(quant),
        ", ".join(extras(quant)),
    )


def block_scale(quant: Quant) -> str:
    """Return a description of the block scale: `e4m3`, `e8m0 floor`, ..."""
    if quant.scale is None:
        return "none"
    how = "" if quant.scale.rounding == "nearest" else f" {quant.scale.rounding}"
    zero = "" if quant.scale.zero == "zero" else f", zero as {quant.scale.zero}"
    lengths = " and ".join(map(str, quant.scale.micro_exponents or ()))
    return f"{quant.scale.format}{how}{zero}{f', one bit for every {lengths}' if lengths else ''}"


def outer_scale(quant: Quant) -> str:
    """Return a description of the outer scale: `tensor amax to 448`, `none`, ..."""
    outer = quant.outer
    if outer is None:
        return "none"
    return f"{outer.granularity} {outer.statistic}{'' if quant.scale is None else f' to {outer.bound:g}'}"


def rounding(quant: Quant) -> str:
    """Return a description of the rounding: `nearest`, `stochastic, 8 bits`, ..."""
    return f"stochastic, {quant.bits} bits" if quant.rounding == "stochastic" else quant.rounding


def extras(quant: Quant) -> Iterator[str]:
    """Yield short descriptions of everything else that a quantiser does."""
    if quant.select:
        yield f"{CANDIDATES[quant.select.among]} by {quant.select.criterion}"
    clip_range = quant.range
    if clip_range.statistic != "amax":
        yield f"range {clip_range.statistic}"
    for name, value, usual in (
        ("to", clip_range.map_to, None),
        ("headroom", clip_range.headroom, 1),
        ("prescale", clip_range.prescale, 1),
    ):
        if value != usual:
            yield f"{name} {value:.4g}"
    if quant.from_forward:
        yield "from the forward copy" + (" in bf16" if quant.source == "forward_bf16" else "")
    if quant.transform:
        changed = quant.transform.model_dump(exclude_defaults=True)
        yield "takes out " + ", ".join(
            f"{key} {value}" if value is not True else key for key, value in changed.items()
        )
    if quant.estimator:
        yield quant.estimator if isinstance(quant.estimator, str) else f"DGE k={quant.estimator.k:g}"


def outline(product: Fprop | Dgrad | Wgrad) -> str:
    """Return a description of the rotation and the output type of a product."""
    hadamard = product.hadamard
    turned = (
        "not rotated"
        if hadamard is None
        else f"both operands rotated by {hadamard.size}, signs {hadamard.signs}"
    )
    if getattr(product, "dequantised", False):
        turned = "in bf16, on the forward copy dequantised"
    return (
        f"{turned}; {f'dw in {product.dw}' if isinstance(product, Wgrad) else GEMM_OUTPUTS[product.gemm][1]}"
    )


def rest(recipe: Recipe) -> Iterator[str]:
    """Yield one line for each layer rule, phase and other field that differs from the default."""
    for number, rule in enumerate(recipe.layers.rules):
        yield f"layers.rules.{number}, {rule.match}: {used(rule.use)}"
    for name in ("layers", "weights"):
        spec, usual = getattr(recipe, name), type(getattr(recipe, name))()
        changed = (
            field
            for field in type(spec).model_fields
            if field != "rules" and getattr(spec, field) != getattr(usual, field)
        )
        yield from (f"{name}.{field}: {_word(spec.model_dump(mode='json')[field])}" for field in changed)
    for phase in recipe.schedule:
        yield f"from {phase.start} on, {phase.slots} products: {used(phase.use)}"


def used(products: Products | None) -> str:
    """Return `high precision`, or the element type of each quantised operand."""
    if products is None or products.plain:
        return "high precision"
    return ", ".join(f"{slot} {quant.element}" for slot, quant in products.quantised())


def placements(recipe: Recipe, layers: Sequence[Layer]) -> Iterator[str]:
    """Yield one line for each part of a recipe that selects layers: their number and what they use."""
    counts = recipe.layers.model_dump(exclude={"rules"}, exclude_defaults=True)
    for decider, products, selected in recipe.placements(layers):
        if isinstance(decider, int):
            what = f"layers.rules.{decider}, {recipe.layers.rules[decider].match}"
        else:
            what = (
                "the recipe's own products"
                if decider == "own"
                else ", ".join(f"layers.{name} {n:g}" for name, n in counts.items())
            )
        yield f"{what}: {len(selected)} of {len(layers)} layers" + (
            "" if decider == "own" else f", {used(products)}"
        )


def differences(
    one: Mapping[str, Json], other: Mapping[str, Json], path: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Yield (path, value, other value) for each difference of two dumps; a disabled part is one line."""
    for key in one:
        here, a, b = f"{path}{key}", one[key], other[key]
        if isinstance(a, dict) and isinstance(b, dict):
            yield from differences(a, b, f"{here}.")
        elif a != b:
            yield here, _word(a), _word(b)


def _word(value: Json) -> str:
    """Return a short text for a value: `off`, `size 128, signs per_step`; of a quantiser, its main fields."""
    if value is None:
        return "off"
    if isinstance(value, dict):
        shown = {key: value[key] for key in ("element", "block", "rounding")} if "element" in value else value
        return ", ".join(f"{key} {_word(inner)}" for key, inner in shown.items() if inner is not None)
    return value if isinstance(value, str) else json.dumps(value)


def _table(*names: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name)
    return table
