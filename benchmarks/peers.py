"""Comparison with the public libraries that emulate NVFP4, in one run on this CPU.

Rounds are interleaved, medians count, and every library has one thread. The commands install nothing:
`make peers` makes the environment of requirements.txt and runs both. A library that is missing or cannot run
on a CPU is a row with the reason. Every library computes through its own public interface; its row names it.
"""

import json
import logging
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from peer_entry import WARM_UP, Entry, measure
from rich.table import Table

from ablate import provenance
from ablate.cli.common import console, run
from ablate.errors import InputError

app = typer.Typer(
    help="Compare with the public libraries that emulate NVFP4 on a CPU: "
    "one run, interleaved rounds, medians, one thread.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # a bad argument is one plain sentence
)
Rounds = Annotated[
    int,
    typer.Option(min=1, help=f"Interleaved rounds; the median counts. {WARM_UP} more come first and do not."),
]
Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file, too.")
]

SAME = 1e-6
"""Relative difference below which two values have the same code and block scale.

Libraries apply the tensor scale at other places, which changes the last bits of fp32.
"""


@app.command()
def kernels(
    rows: Annotated[int, typer.Option(min=128, help="Rows of the tensor; a multiple of 128.")] = 1024,
    columns: Annotated[int, typer.Option(min=64, help="Columns; a multiple of 64.")] = 1024,
    rounds: Rounds = 15,
    file: Json = None,
) -> None:
    """Quantise and dequantise one fp32 tensor.

    NVFP4 by rows: E2M1, blocks of 16, E4M3 scales, amax included, to nearest.
    """
    _check({"--rows": (rows, 128), "--columns": (columns, 64)}, file)
    import torch
    from peer_kernels import entries, exact

    _quietly_on_one_thread()
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    bf16 = x.bfloat16().float()
    compared = entries()
    with torch.no_grad():
        for entry in compared:
            entry.prepare(x)
        measure(compared, rounds, least=0.02)
        for entry in filter(_measured, compared):
            entry.learned = {
                "other": _other(entry.first, exact(x)),
                "other_bf16": _other(entry.build(bf16)(), exact(bf16)),
            }
    ours, dequantised = compared[:2]
    lines = [
        _line(entry, x.numel() / 1e6, "Melem/s", {"ours/theirs": ours, "dequantised/theirs": dequantised})
        for entry in compared
    ]
    _show(
        lines,
        {
            "ms": ".2f",
            "Melem/s": ",.0f",
            "ours/theirs": ".1f",
            "dequantised/theirs": ".1f",
            "other": ",",
            "other_bf16": ",",
        },
    )
    print(f"\nOne tensor, fp32 [{rows}, {columns}], N(0, 1); median of {rounds} rounds.")
    print(
        "ours/theirs: our speed over theirs, as an operand, and dequantised (deq.), which is like for like."
    )
    print(
        "other: how many values got another code or block scale than ours, of this tensor, "
        "and of its bf16 copy, which has exact ties."
    )
    _write(
        file,
        {"command": "kernels", "rows": rows, "columns": columns, "dtype": "float32", "rounds": rounds},
        lines,
    )


@app.command()
def step(
    layers: Annotated[int, typer.Option(min=1, help="Transformer blocks.")] = 6,
    width: Annotated[int, typer.Option(min=128, help="Width of the model; a multiple of 128.")] = 256,
    tokens: Annotated[int, typer.Option(min=128, help="Tokens in a batch; a multiple of 128.")] = 2048,
    rounds: Rounds = 5,
    file: Json = None,
) -> None:
    """Train a small GPT, one step.

    Forward, backward and AdamW; all three products of the linears in its blocks in NVFP4.
    """
    _check({"--width": (width, 128), "--tokens": (tokens, 128)}, file)
    from peer_steps import entries, shape

    _quietly_on_one_thread()
    config = shape(layers, width, tokens)
    compared = entries()
    for entry in compared:
        entry.prepare(config)
    measure(compared, rounds, _keep_loss)
    lines = [_line(entry, tokens, "tokens/s", {"ours/theirs": compared[0]}) for entry in compared]
    _show(lines, {"ms": ",.0f", "tokens/s": ",.0f", "ours/theirs": ".2f", "loss": ".4f"})
    given = {
        "layers": layers,
        "width": width,
        "hidden": config.hidden_width,
        "tokens": tokens,
        "rounds": rounds,
    }
    print(
        f"\nOne model, {', '.join(f'{name} {value}' for name, value in given.items())}; "
        "the same first weights and the same batches."
    )
    print(
        f"ours/theirs: our speed (nvfp4) over theirs. loss: in step {rounds + WARM_UP + 1}, "
        "all at the full learning rate."
    )
    _write(file, {"command": "step", **given}, lines)


def _check(multiples: dict[str, tuple[int, int]], file: Path | None) -> None:
    """Raise InputError for wrong arguments, before anything is measured, which takes minutes."""
    wrong = [
        f"{name} {value}: not a multiple of {by}, which some libraries need"
        for name, (value, by) in multiples.items()
        if value % by
    ]
    if file and (file.is_dir() or not file.absolute().parent.is_dir()):
        wrong.append(f"--json {file}: it must name a file in a folder that exists")
    if wrong:
        raise InputError(*wrong)


def _quietly_on_one_thread() -> None:
    """Set up this process as for a trial of ours, and silence the libraries' warnings between the rows."""
    import torch

    from ablate.execution.trial_process import tune_process

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    tune_process()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # fouroversix draws its roundings from the global generator


def _measured(entry: Entry) -> bool:
    return entry.call is not None


def _keep_loss(entry: Entry, record: Any) -> None:
    entry.learned["loss"] = record.metrics["train/loss"]


def _other(theirs: Any, ours: Any) -> int:
    """Return the number of dequantised values with another code or block scale than ours.

    An operand of ours is dequantised first.
    """
    theirs = theirs.dequantize() if hasattr(theirs, "block_scale") else theirs
    return int(((theirs - ours).abs() > SAME * ours.abs()).sum())


def _line(entry: Entry, work: float, rate: str, against: dict[str, Entry]) -> dict[str, Any]:
    """Return a row as it is written to JSON; `not_measured` is the reason, in place of figures."""
    line = {"library": entry.name, "version": entry.version, "computes": entry.computes}
    if not entry.counted:
        return line | {"not_measured": entry.why}
    times = {"ms": entry.median, "ms_min": min(entry.counted), "ms_max": max(entry.counted)}
    line |= {name: 1000 * seconds for name, seconds in times.items()} | {rate: work / entry.median}
    return line | {name: entry.median / ours.median for name, ours in against.items()} | entry.learned


def _show(lines: list[dict[str, Any]], forms: dict[str, str]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("library", no_wrap=True)
    table.add_column("version", no_wrap=True)
    for name in forms:
        table.add_column(
            name.replace("_", ", ").replace("dequantised/theirs", "deq./theirs"),
            justify="right",
            no_wrap=True,
        )
    table.add_column("what it computes, fp32 in" if "other" in forms else "what it computes", ratio=1)
    for line in lines:
        cells = [format(line[name], form) if name in line else "-" for name, form in forms.items()]
        computes = f"not measured: {line['not_measured']}" if "not_measured" in line else line["computes"]
        table.add_row(line["library"], line["version"] or "-", *cells, computes)
    console().print(table)


def _write(file: Path | None, given: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    if file:
        machine = {name: value for name, value in provenance.environment().items() if name != "host"}
        file.write_text(
            json.dumps({**given, "threads": 1, "machine": machine, "rows": lines}, indent=1) + "\n"
        )


if __name__ == "__main__":
    run(app)
