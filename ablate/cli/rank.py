"""`ablate rank`: order recipes by the errors of their operands on a step of a bf16 model."""

import io
import sys
import time
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ablate.cli.common import Due, Screen, plain_table, print_starting
from ablate.cli.options import JsonOption
from ablate.errors import InputError, as_input_error
from ablate.experiment import predicted_order, recipe_source
from ablate.experiment.load import load
from ablate.recipes import PRESETS
from ablate.recipes.recipe import Layers
from ablate.training.workloads.base import Workload
from ablate.training.workloads.python import Python

if TYPE_CHECKING:
    from ablate.training.operand_capture import Capture
    from ablate.training.operand_errors import RecipeErrors
    from ablate.verification.operand_order import Ranking

DEFAULT = (
    "nvfp4",
    "nvfp4_1d_weight",
    "four_over_six",
    "quartet2",
    "tetrajet2",
    "fp4_all_the_way",
    "averis",
    "ue5m3",
)
"""Recipes of the NVFP4 family that are ranked if none is named."""
_SILENT_SECONDS = 5.0
"""Seconds between two lines on the progress."""


def rank(
    recipes: Annotated[list[str] | None, typer.Argument(metavar="[RECIPE]...")] = None,
    every: Annotated[bool, typer.Option("--all")] = False,
    model: Annotated[str | None, typer.Option(metavar="FOLDER")] = None,
    python: Annotated[str | None, typer.Option(metavar="FILE:FUNCTION")] = None,
    dumps: Annotated[Path | None, typer.Option(metavar="FOLDER")] = None,
    batches: Annotated[int, typer.Option(min=1, max=3)] = 3,
    as_json: JsonOption = False,
) -> None:
    """Order recipes by the quantisation error of their operands on one step of a bf16 model.

    One recipe comes before another if its error is lower and its bias not higher. It cannot order stochastic
    rounding against rounding to nearest, or a rotation of a gradient alone: training decides. How often the
    order is that of training is printed below the table (docs/use/rank.md).

    Args:
        recipes: Presets or recipe files; default: 8 of the NVFP4 family.
        every: Rank every preset.
        model: Model of transformers, or its config.json alone.
        python: Function of a trial, or an experiment.
        dumps: Dumps of x, w and dy, as `ablate conform` reads them.
        batches: Batches, or steps of --python.
    """
    names = list(dict.fromkeys(recipes or (PRESETS if every else DEFAULT)))
    sources = [source for source in (model, python, dumps) if source is not None]
    if (recipes and every) or len(sources) > 1:
        raise InputError("give recipes or --all, and at most one of --model, --python and --dumps")
    with as_input_error(ValueError):
        made = [recipe_source.load(name) for name in names]
    print_starting("importing torch", quiet=as_json)
    from ablate.engines.blocks import passed_over
    from ablate.training import operand_capture
    from ablate.training.operand_errors import measure
    from ablate.verification.conformance.dumps import captured
    from ablate.verification.operand_order import Ranking

    note = partial(print, file=io.StringIO() if as_json else sys.stderr, flush=True)
    workload = None if python is None else _workload(python)
    with passed_over(set()) as others:
        if workload is not None:
            found = operand_capture.of_workload(workload, f"--python {python}", batches)
        elif model is not None:
            found = operand_capture.of_model(model, batches)
        else:
            found = operand_capture.built_in(batches, note) if dumps is None else captured(dumps)
    started, due = time.monotonic(), Due(_SILENT_SECONDS)

    def show(count: int) -> None:
        if due():
            note(f"{count / found.total:.0%} of the operands cast")

    measured = measure(made, found.batches, found.layers, found.fixed, progress=show, titles=names)
    ranking = Ranking(dict(zip(names, measured, strict=True)))
    if model is None and dumps is None:
        predicted_order.keep(workload, made, ranking.before)
    source = f"{python} at its start" if python else model or dumps or "the built-in model"
    about = f"{source}, {_described(found, measured, others)}"
    screen = Screen(width=100, quiet=as_json)
    screen.document(ranking.document() | {"measured_on": about})
    _print(screen, ranking, f"{about}, {time.monotonic() - started:.1f} s")


def _described(found: "Capture", measured: "Sequence[RecipeErrors]", others: Collection[str]) -> str:
    """Return what was captured, and what was not. `others`: classes of layers that were not converted."""
    layers, batches, _ = measured[0].error.shape
    about = f"{layers} converted layers, batches: {batches}"
    if found.text:
        about += f" of {found.text}"
    if not found.layers and any(own.recipe.layers != Layers() for own in measured):
        about += ", rules on layers left out"  # which block a layer is in is not known
    if (idle := len(found.layers) - layers) > 0:
        about += f", without {idle} of experts that some batch has no token for"
    if others:
        about += f", not converted: {', '.join(sorted(others))}, subclasses of nn.Linear"
    return about


def _workload(source: str) -> Workload:
    """Return the workload of FILE:FUNCTION, or of an experiment; InputError if it is computed elsewhere."""
    if source.endswith((".yaml", ".yml")):
        workload = load(Path(source)).base.config
        if not workload.in_process:
            raise InputError(f"--python {source}: its workload trains nothing in this process; see --dumps")
        return workload
    file, colon, function = source.rpartition(":")
    if not colon:
        raise InputError(
            f"--python {source}: write FILE:FUNCTION, or name an experiment; the function takes `trial`,"
            " calls trial.convert(model), and takes each of trial.steps(batch) within trial.step()"
            " (docs/use/api.md)"
        )
    if not Path(file).is_file():
        raise InputError(f"--python {source}: no such file as {file}")
    return Python(file=str(Path(file).resolve()), function=function)


# --- printing -------------------------------------------------------------------------------------

_HEADS = ("", "recipe", "error", "fprop", "dgrad", "wgrad", "bias", "4-bit FLOPs", "before")


def _print(screen: Screen, ranking: "Ranking", about: str) -> None:
    from ablate.verification.operand_order import ACCURACY, Order

    others = " Groups are not ordered." * (len(ranking.groups) > 1)
    screen.print(Text(f"Error of operands on {about}; lower is nearer to bf16.{others}"))
    for title, names in ranking.groups.items():
        screen.print("", Text(title, "bold"), sep="\n")
        _print_group(screen, ranking, names)
    orders = [order for names in ranking.groups.values() for order in ranking.pairs(names).values()]
    if any(not order.decided and order is not Order.GROUP for order in orders):
        where = "`ablate init mine --forks`, with two of these under `ablate: {recipe: [...]}`"
        screen.print(Text(f"To train such a pair: {where} and your workload."))
    screen.print("", Text(ACCURACY), sep="\n")


def _print_group(screen: Screen, ranking: "Ranking", names: Sequence[str]) -> None:
    from ablate.verification.operand_order import Order

    rows = []
    orders = {} if ranking.measured[names[0]].passes == (False, False) else ranking.pairs(names)
    for number, name in enumerate(names, 1):
        errors = ranking.measured[name]
        decided = (second for (first, second), order in orders.items() if first == name and order.decided)
        before = ", ".join(str(names.index(second) + 1) for second in decided)
        bias = f"{errors.by_layer(bias=True).mean():.4f}"
        bias = bias if (errors.bias != errors.error).any() else "= error"
        shown = [f"{value:.4f}" for value in (errors.by_layer().mean(), *errors.by_product().values())]
        rows.append((str(number), name, *shown, bias, f"{errors.four_bits:.0%}", before))
    right = [head for head in _HEADS if head not in ("recipe", "before")]
    screen.print(plain_table(*_HEADS, rows=rows, right=right))
    kept = {name: int((ranking.measured[name].by_layer() == 0).sum()) for name in names}
    if orders and len(set(kept.values())) > 1:
        layers = len(ranking.measured[names[0]].by_layer())
        listed = ", ".join(f"{name} leaves {count} of {layers}" for name, count in kept.items() if count)
        advice = (
            "for casts alone, rank files with the same `layers`: {from: NAME, layers: {last_fraction: 0}}"
        )
        screen.print(Text(f"Layers in bf16 have error 0: {listed} so, which is part of its place; {advice}."))
    for order, words in (
        (Order.CLOSE, "Too close to call"),
        (Order.BIAS, "Lower error, more bias: training decides"),
        (Order.ROTATION, "Rotation of a gradient alone: training decides"),
    ):
        pairs = [pair for pair, own in orders.items() if own is order]
        if pairs:
            listed = ", ".join(f"{names.index(a) + 1} and {names.index(b) + 1}" for a, b in pairs)
            screen.print(Text(f"{words}: {listed}."))
