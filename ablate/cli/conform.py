"""`ablate conform`: find out whether somebody's FP4 quantiser or product computes a recipe."""

import sys
import textwrap
import time
from collections import Counter
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ablate.cli.common import DONE, FAILED, Screen, print_starting
from ablate.cli.options import JsonOption
from ablate.errors import InputError, as_input_error, first_line, one_line
from ablate.verification.conformance.result import Row, counts

if TYPE_CHECKING:
    from ablate.verification.conformance.run import Findings

_WIDTH, _NAME = 80, 28
_STYLES = {"pass": "green", "variant": "yellow", "fail": "bold red", "report": "cyan", "n/a": "dim"}


def conform(
    subject: Annotated[str, typer.Argument()] = "",
    recipe: Annotated[str, typer.Option("--as")] = "nvfp4",
    only: Annotated[list[str] | None, typer.Option(metavar="PROPERTY")] = None,
    as_json: JsonOption = False,
    device: str = "cpu",
    seed: Annotated[int | None, typer.Option(min=0, max=2**62)] = None,
    save: Annotated[Path | None, typer.Option(metavar="CSV")] = None,
    demo: bool = False,
) -> None:
    """Find out whether a quantiser or product computes a recipe, and show its first wrong stage.

    Codes and scales are compared exactly with the recipe's specification, on data that hits ties, subnormals,
    saturation and odd shapes; draws by their distribution; products by a bound on their sums. Exit status: 0
    all properties hold, 1 one fails, 2 bad input. A folder of dumps has the tensors x, w, dy, y, dx and dw of
    layers in NAME.safetensors or NAME.pt, or the files of Transformer Engine's DumpTensors.

    Args:
        subject: module:function, file.py:function, module:SUBJECT, or a folder of dumps.
        recipe: Recipe that it should compute.
        only: Examine this property only; repeatable.
        device: Device of the tensors that it is handed.
        seed: Seed of the data; default: 0. For dumps that the emulator wrote: the seed of their run.
        save: Write every number of the wrong stages to this file.
        demo: Show a published fault, injected and detected.
    """
    if demo == bool(subject) or (demo and (recipe != "nvfp4" or only or device != "cpu" or seed)):
        raise InputError("give a subject, such as my_kernels.py:quantise, or --demo alone")
    if save is not None and (save.is_dir() or not save.absolute().parent.is_dir()):
        raise InputError(f"--save {save}: name a file in a folder that exists")
    print_starting("importing torch", quiet=as_json or demo)
    started, screen = time.monotonic(), Screen(width=_WIDTH, quiet=as_json)
    rows: list[Row] = []

    def show(row: Row) -> None:
        known = any(row.stage and _alike(row) == _alike(other) for other in rows)
        rows.append(row)
        if row.outcome != "n/a":
            print_row(screen, row, known=known)

    # What a subject prints must not stand within the JSON document.
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        if demo:
            from ablate.verification.conformance import demo as fault
            from ablate.verification.conformance.run import conform as examine

            screen.print(fault.STORY)
            findings = examine(fault.faulty(), fault.RECIPE, only=fault.PROPERTIES, show=show)
        else:
            findings = _examined(subject, recipe, only, device, seed, show)
    screen.document(_document(findings, seconds := time.monotonic() - started))
    _print_end(screen, findings, len(rows), seconds)
    if save is not None:
        try:
            count = findings.save(save)
        except OSError as why:
            raise InputError(f"--save {save}: {why.strerror}; name a file in a folder that exists") from None
        screen.print(Text(f"{count:,} wrong numbers are in {save}"))
    raise typer.Exit(DONE if findings.passed != demo else FAILED)


def _alike(row: Row) -> tuple[str, str]:
    """Return the name of a row's wrong stage and what to declare: rows that share both are shown once."""
    return row.stage.partition(":")[0], row.declare


def _examined(
    subject: str, recipe: str, only: list[str] | None, device: str, seed: int | None, show: Any
) -> "Findings":
    from ablate.experiment.recipe_source import load
    from ablate.verification.conformance.source import find, names

    with as_input_error(ValueError, before="--as "):
        made = load(recipe)
    if subject not in names() and Path(subject).is_file() and Path(subject).suffix in (".safetensors", ".pt"):
        raise InputError(f"{subject}: give the folder of the dumps, {Path(subject).parent}")
    if subject not in names() and Path(subject).is_dir():
        if only:
            raise InputError("--only names a property of a subject; of a folder of dumps, leave it out")
        from ablate.verification.conformance.replay import replay
        from ablate.verification.conformance.run import Findings

        rows = tuple(one.row for one in replay(Path(subject), made, seed))
        return Findings(str(Path(subject)), recipe, rows, "dumped products are the recipe's")
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise InputError(f"--device {one_line(device)}: torch cannot use it: {first_line(error)}") from None
    from ablate.verification.conformance.run import conform as examine

    return examine(find(subject, recipe, device), recipe, only=only or (), seed=seed or 0, show=show)


# --- printing -------------------------------------------------------------------------------------


def print_row(screen: Screen, row: Row, known: bool = False) -> None:
    """Print one property in a line, and below it what differs, with the first block; of a row whose wrong
    stage and declaration are `known` from one above, the stage alone."""
    counted = "" if row.outcome == "report" else counts(row)
    word = row.outcome.upper() if row.outcome == "fail" else str(row.outcome)
    style = _STYLES[row.outcome]
    line = f"{row.property:{_NAME}}{counted:>30}".rstrip()
    if len(row.property) > _NAME:  # of a dumped layer
        line = one_line(row.property)
    screen.print(Text.assemble((f"{word:8}", style), line))

    def indented(text: str, style: str = "", hanging: int = 0) -> None:
        for line in textwrap.wrap(one_line(text), _WIDTH - 8, subsequent_indent=" " * hanging):
            screen.print(Text(" " * 8 + line, style))

    if row.detail and row.outcome != "pass" and not known:
        indented(row.detail)
    if (block := row.block) is not None and not known:
        indented(f"first at {block.place}")
        for word, computed, values in (
            ("input", "", block.source),
            ("recipe", block.computed, block.expected),
            ("subject", block.computed_by_subject, block.got),
        ):
            if shown := computed or " ".join(f"{value:.5g}" for value in values):
                indented(f"{word + ':':9}{shown}", "dim" if word == "input" else "", 9)
    if row.stage:
        indented(f"first wrong stage: {row.stage}", "bold")


def _print_end(screen: Screen, findings: "Findings", printed: int, seconds: float) -> None:
    for row in findings.rows[printed:]:  # of a folder of dumps
        print_row(screen, row)
    if skipped := Counter(row.detail for row in findings.rows if row.outcome == "n/a"):
        reasons = "; ".join(f"{reason} ({count})" for reason, count in skipped.items())
        screen.print(Text(textwrap.fill(f"Not examined: {reasons}.", _WIDTH), "dim"))
    style = "bold green" if findings.passed else "bold red"
    screen.print(Text(textwrap.fill(findings.text, _WIDTH), style))
    screen.print(Text(f"({seconds:.1f} s)", "dim"))


def _document(findings: "Findings", seconds: float) -> dict[str, object]:
    rows = [vars(row) | {"block": row.block and vars(row.block)} for row in findings.rows]
    return {
        **{name: getattr(findings, name) for name in ("subject", "recipe", "passed", "text")},
        "seconds": round(seconds, 2),
        "rows": [{key: value for key, value in row.items() if key != "wrong"} for row in rows],
    }
