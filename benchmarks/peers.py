"""Comparison with the public libraries that emulate NVFP4, in one run on this CPU.

Rounds are interleaved, medians count, and every library has one thread. The commands install nothing:
`make peers` makes the environment of requirements.txt and runs both. A library that is missing or cannot run
on a CPU is a row with the reason. Every library computes through its own public interface (libraries.py); its
row names it. In `step`, model, weights, batches, loss, clipping and optimizer are ours for all: only the
linears in the blocks are replaced.
"""

import json
import logging
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from libraries import LIBRARIES
from rich.table import Table
from torch import Tensor, nn

import ablate
from ablate import provenance
from ablate.cli.common import console, run
from ablate.errors import InputError
from ablate.execution.trial_process import tune_process
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import Quant
from ablate.recipes import PRESETS
from ablate.training.loop import Telemetry
from ablate.training.workloads.gpt import Gpt

WARM_UP = 2
"""Rounds before those that count."""
SAME = 1e-6
"""Relative difference below which two values have the same code and block scale.

Libraries apply the tensor scale at other places, which changes the last bits of fp32.
"""
NEVER = 10**6
NVFP4 = Quant()  # blocks of 1x16, E2M1, E4M3 scales, the tensor's amax, round to nearest
Call = Callable[[], Any]

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


@dataclass
class Entry:
    """A library, its computation, and the time that it took, or the reason why it is not measured."""

    name: str
    computes: str
    build: Callable[..., Call] | None = None
    """Function of the arguments of `prepare` that imports the library and returns the timed call."""
    library: str = ""
    """Its name in LIBRARIES; empty for ours."""
    why: str = ""
    """Reason why the entry is not measured; empty if it is."""
    call: Call | None = None
    first: Any = None
    """Result of the first call, which is not timed."""
    seconds: list[float] = field(default_factory=list)
    learned: dict[str, Any] = field(default_factory=dict)
    """Measurements beside the time, by column."""

    @property
    def version(self) -> str | None:
        """Return the installed version; None if it is not installed."""
        if self.library not in LIBRARIES:
            return None if self.library else ablate.__version__
        return LIBRARIES[self.library].version

    @property
    def counted(self) -> list[float]:
        """Return the seconds of the rounds that count; [] if it was not measured."""
        return self.seconds[WARM_UP:]

    @property
    def median(self) -> float:
        """Return the median seconds of one call; nan if it was not measured."""
        return statistics.median(self.counted) if self.counted else math.nan

    def prepare(self, *given: Any) -> None:
        """Build the call and make it once. A missing library or an exception becomes the entry's reason."""
        if self.build is None:
            return
        if self.version is None:
            self.why = f"{LIBRARIES[self.library].package} is not installed; it is in requirements.txt"
            return
        try:
            with redirect_stdout(StringIO()):  # some print when they are imported
                call = self.build(*given)
                self.first = call()
            self.call = call
        except Exception as error:  # the boundary to other people's code: what it says is the row
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Record an exception as the reason why the entry is not measured."""
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        self.why = f"{self.why} ({reason})" if self.why else reason
        self.call, self.seconds = None, []


def measure(
    entries: Iterable[Entry],
    rounds: int,
    after: Callable[[Entry, Any], None] | None = None,
    least: float = 0.0,
) -> None:
    """Time every entry in turn within each round, so that changes of the machine's speed affect all alike.

    Args:
        entries: entries after `prepare`; those that cannot be measured are left out.
        rounds: number of rounds that count; `WARM_UP` more come before them.
        after: function of an entry and the result of its call; called after each round, and not timed.
        least: seconds for which a shorter call is repeated: its data are then in cache, as in training.
    """
    for _ in range(rounds + WARM_UP):
        for entry in entries:
            if entry.call is None:
                continue
            try:
                repeats = 1 + int(least / entry.seconds[0]) if entry.seconds else 1
                start = time.perf_counter()
                for _ in range(repeats):
                    result = entry.call()
                entry.seconds.append((time.perf_counter() - start) / repeats)
            except Exception as error:  # as in prepare()
                entry.fail(error)
                continue
            if after:
                after(entry, result)


def library(name: str, title: str, computes: str, kind: str, wrap: Callable = lambda made: made) -> Entry:
    """Return the entry of a library, whose field `kind`, of `Library`, is what is timed."""
    made = getattr(LIBRARIES[name], kind)
    return Entry(title, computes, lambda *given: wrap(made)(*given), name)


ABSENT = (
    ("microxcaling", "not on PyPI; and its block scales are powers of two, so it computes MXFP4, not NVFP4"),
    ("Quartet II", "not on PyPI; and its kernels are CUDA for Blackwell"),
)
"""Public libraries that cannot be measured on such a machine, whatever is installed."""


# --- one tensor -----------------------------------------------------------------------------------


def exact(x: Tensor) -> Tensor:
    """Return our quantisation of x, dequantised, which the others are compared with."""
    return quantize(x, NVFP4).dequantize()


def kernel_entries() -> list[Entry]:
    """Return ours first, then every library that is known to offer this, even if it cannot run here."""
    operand = "to the operand of a product: code x block scale, exact in bf16; its fp32 factor apart"
    plain = "the same, then dequantize() to fp32, which is plain torch"
    return [
        Entry("ablate", operand, lambda x: partial(quantize, x, NVFP4)),
        Entry("ablate, dequantised", plain, lambda x: partial(exact, x)),
        library(
            "transformer_engine",
            "Transformer Engine",
            "its Python reference, rows only; decoded to fp32",
            "round_trip",
        ),
        library(
            "torchao",
            "torchao",
            "NVFP4Tensor.to_nvfp4 with a per-tensor scale; dequantize to fp32",
            "round_trip",
        ),
        library(
            "torchao",
            "torchao, compiled",
            "the same through torch.compile, as its documentation advises",
            "round_trip",
            lambda made: lambda x: torch.compile(made(x)),
        ),
        library(
            "compressed_tensors",
            "compressed-tensors",
            "scheme NVFP4: dynamic scales, fake_quantize to fp32",
            "round_trip",
        ),
        library(
            "fouroversix",
            "fouroversix",
            "quantize_to_fp4 by static_6 (plain NVFP4), in PyTorch; dequantize to fp32",
            "round_trip",
        ),
        library(
            "modelopt",
            "nvidia-modelopt",
            "NVFP4QTensor: quantize, dequantize to fp32; its fake quantiser needs CUDA",
            "round_trip",
        ),
        *(Entry(name, "", library=name, why=why) for name, why in ABSENT),
    ]


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
    _quietly_on_one_thread()
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    bf16 = x.bfloat16().float()
    compared = kernel_entries()
    with torch.no_grad():
        for entry in compared:
            entry.prepare(x)
        measure(compared, rounds, least=0.02)
        for entry in compared:
            if entry.call is not None:
                theirs = entry.first, entry.build(bf16)()
                entry.learned = {
                    "other": _other(theirs[0], exact(x)),
                    "other_bf16": _other(theirs[1], exact(bf16)),
                }
    against = {"ours/theirs": compared[0], "dequantised/theirs": compared[1]}
    lines = [_line(entry, x.numel() / 1e6, "Melem/s", against) for entry in compared]
    forms = {"ms": ".2f", "Melem/s": ",.0f", "ours/theirs": ".1f", "dequantised/theirs": ".1f"}
    _show(lines, forms | {"other": ",", "other_bf16": ","})
    print(f"\nOne tensor, fp32 [{rows}, {columns}], N(0, 1); median of {rounds} rounds.")
    print(
        "ours/theirs: our speed over theirs, as an operand, and dequantised (deq.), which is like for like."
    )
    print(
        "other: how many values got another code or block scale than ours, of this tensor, "
        "and of its bf16 copy, which has exact ties."
    )
    given = {"command": "kernels", "rows": rows, "columns": columns, "dtype": "float32", "rounds": rounds}
    _write(file, given, lines)


def _other(theirs: Any, ours: Tensor) -> int:
    """Return the number of dequantised values with another code or block scale than ours.

    An operand of ours is dequantised first.
    """
    theirs = theirs.dequantize() if hasattr(theirs, "block_scale") else theirs
    return int(((theirs - ours).abs() > SAME * ours.abs()).sum())


# --- one training step ----------------------------------------------------------------------------


def step_entries() -> list[Entry]:
    """Return ours first, with its baselines, then every library that trains in NVFP4, if only in part."""
    nvfp4 = "NVIDIA's recipe: 2D weights, stochastic gradients, wgrad rotated; products in bf16"
    fused = "the same with compile: true, which fuses what surrounds the products"
    baseline = "baseline: nothing quantised"
    four = (
        "FourOverSixLinear, static_6: the same recipe, products in fp32; its Hadamard matrix put on the CPU"
    )
    te = "its Python reference, quantisers and custom_gemm: the same, but gradients to nearest; "
    gpu = "its kernels are Triton's and need a GPU"
    forward = "no training linear: it quantises the forward product only; its fake quantiser needs CUDA"
    gradient = "no training linear: its fake quantisation passes no gradient"

    def trained(made: Callable[[nn.Linear], nn.Module]) -> Callable[[Gpt], Call]:
        return lambda config: stepper(config, "bf16", made)

    return [
        Entry("ablate, nvfp4", nvfp4, lambda config: stepper(config, "nvfp4")),
        Entry("ablate, nvfp4, compiled", fused, lambda config: stepper(config, "nvfp4", compiled=True)),
        Entry("ablate, bf16", baseline, lambda config: stepper(config, "bf16")),
        Entry("ablate, fp32", baseline, lambda config: stepper(config, "fp32")),
        library("fouroversix", "fouroversix", f"{four} from outside", "linear", trained),
        library(
            "transformer_engine",
            "Transformer Engine",
            f"{te}products in fp32, block by block",
            "linear",
            trained,
        ),
        Entry(
            "torchao",
            "NVFP4Linear of its NVFP4 training",
            trained(LIBRARIES["torchao"].linear),
            "torchao",
            gpu,
        ),
        Entry("compressed-tensors", "", library="compressed_tensors", why=gradient),
        Entry("nvidia-modelopt", "", library="modelopt", why=forward),
        *(Entry(name, "", library=name, why=why) for name, why in ABSENT),
    ]


def shape(layers: int, width: int, tokens: int) -> Gpt:
    """Return the workload: sequences of 128, heads of 64, an MLP of three widths, no warm-up.

    Every dimension is a multiple of 128: torchao refuses others, and fouroversix fails on them when it
    quantises a transpose.
    """
    size = {"layers": layers, "width": width, "heads": width // 64, "hidden": 3 * width, "context": 128}
    return Gpt(**size, batch=tokens // 128, warmup=0, decay="none", steps=NEVER, eval_every=NEVER)


def stepper(
    config: Gpt, preset: str, linear: Callable[[nn.Linear], nn.Module] | None = None, compiled: bool = False
) -> Call:
    """Return a call that trains one step more, without telemetry and evaluation, and returns its record.

    `linear` replaces every linear layer in the blocks.
    """
    config = config.model_copy(update={"compile": compiled})
    run = config.prepare(PRESETS[preset](), 0, "cpu")
    for name, one in list(run.model.blocks.named_modules()) if linear else ():
        if isinstance(one, nn.Linear):
            parent, _, child = name.rpartition(".")
            setattr(run.model.blocks.get_submodule(parent), child, linear(one))
    steps: Iterator[Any] = config.train(run, Telemetry(every=NEVER, log=1, shadow=NEVER))

    def call() -> Any:
        record = next(steps)
        if "nan/first_step" in record.metrics:
            raise FloatingPointError("a loss or a gradient is not finite")
        return record

    return call


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
    _quietly_on_one_thread()
    config = shape(layers, width, tokens)
    compared = step_entries()
    for entry in compared:
        entry.prepare(config)

    def keep_loss(entry: Entry, record: Any) -> None:
        entry.learned["loss"] = record.metrics["train/loss"]

    measure(compared, rounds, keep_loss)
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


# --- asked and shown ------------------------------------------------------------------------------


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
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    tune_process()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # fouroversix draws its roundings from the global generator


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
        head = name.replace("_", ", ").replace("dequantised/theirs", "deq./theirs")
        table.add_column(head, justify="right", no_wrap=True)
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
