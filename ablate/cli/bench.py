"""`ablate bench`: time quantisers, layers and training steps on this machine.

Times are medians over interleaved rounds, on one thread; `spread` is the interquartile range as a fraction.
"""

import math
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from ablate.cli.common import console, plain_table, print_starting
from ablate.cli.option_groups import App
from ablate.cli.options import JsonOption
from ablate.engines import AUTO, ENGINES
from ablate.errors import InputError, nearest
from ablate.recipes import PRESETS
from ablate.training.hyperparameters import MOST_LAYERS, MOST_SEQUENCES, MOST_WIDTH
from ablate.verification import bench_runs, linear_layers, timing
from ablate.verification.bench_runs import Line, enough_memory, in_both_modes

app = App(help="Time quantisers, layers and training steps on this machine.", no_args_is_help=True)

Rounds = Annotated[int, typer.Option(min=1, help="Number of interleaved rounds; the median is reported.")]
Presets = Annotated[list[str] | None, typer.Argument(metavar="[PRESET]...")]
OnDevice = Annotated[Literal["cpu", "cuda"], typer.Option(help="Device to measure on.")]
FORMS = {
    **dict.fromkeys(("ms", "forward ms", "backward ms"), "{:.3g}"),
    "step ms": "{:.1f}",
    **dict.fromkeys(("tokens/s", "Melem/s", "copy GB/s", "peak MiB"), "{:,.0f}"),
    **dict.fromkeys(("of memcpy", "of bf16", "of fp32"), "{:.2f}"),
    **dict.fromkeys((*timing.GROUPS, "rest", "spread"), "{:.0%}"),
    **{f"{way} {unit}": "{:,.0f}" for way in ("forward", "backward") for unit in ("GFLOP/s", "TFLOP/s")},
    **{f"{way} {share}": "{:.0%}" for way in ("forward", "backward") for share in ("of peak", "casts")},
}
"""Format of each numeric column."""


@dataclass(frozen=True)
class Output:
    """Options on the result of a measurement.

    Args:
        png: Also draw a figure to this file.
    """

    as_json: JsonOption = False
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE")] = None

    def begin(self) -> None:
        """Check the path of the figure before the measurements, which take minutes, and set the threads."""
        if self.png and (self.png.is_dir() or not self.png.absolute().parent.is_dir()):
            raise InputError(f"--png {self.png}: must name a file in an existing folder")
        if self.png and (suffix := self.png.suffix[1:]):
            from matplotlib.backend_bases import FigureCanvasBase

            if suffix not in (types := FigureCanvasBase.get_supported_filetypes()):
                raise InputError(f"--png {self.png}: no such format; {nearest(suffix, types)}")
        timing.one_thread()

    def show(
        self,
        lines: list[Line],
        figure: str,
        *axes: str | tuple[str, ...],
        about: Mapping[str, object] | None = None,
        hidden: Collection[str] = (),
    ) -> None:
        """Draw the lines by `figure`, a function of `ablate.reports.figures`, with its further arguments
        `axes`, and print them.

        `about`: what JSON has beside the lines; None: nothing, it is a list of lines. `hidden`: columns that
        the table leaves out.
        """
        if self.png:
            from ablate.reports import figures

            getattr(figures, figure)(lines, *axes).write(self.png)
        screen = console(self.as_json)
        screen.document(lines if about is None else {**about, "lines": lines})
        names = [name for name in lines[0] if name not in hidden]
        heads = [name.replace("forward", "fwd").replace("backward", "bwd") for name in names]  # for one line
        right = [head for name, head in zip(names, heads, strict=True) if name in FORMS]
        cells = ([(FORMS.get(name, "{}"), line[name]) for name in names] for line in lines)
        rows = (["-" if cell is None else form.format(cell) for form, cell in row] for row in cells)
        screen.print(plain_table(*heads, right=right, rows=rows))


@app.command()
def kernels(
    shapes: Annotated[list[str] | None, typer.Argument(metavar="[ROWSxCOLUMNS]...")] = None,
    rounds: Rounds = 15,
    builds: bool = False,
    device: OnDevice = "cpu",
    *,
    output: Output,
) -> None:
    """Time the quantisers: million elements per second, including amax, and speed relative to a copy of the
    tensor.

    On a GPU the compiled quantisers alone are timed, by CUDA events and with an empty L2 cache, beside a copy
    within its memory. A tensor should be larger than that cache.

    Args:
        shapes: Shapes of the tensors; default: 1024x1024.
        builds: Time every compiled build that this CPU can run, not only the fastest.
    """
    print_starting("importing torch, then timing the quantisers", quiet=output.as_json)
    sizes = dict.fromkeys(_size(text, 2) for text in shapes or ["1024x1024"])
    _device(device)
    if builds and device == "cuda":
        raise InputError("--builds: the builds are for CPUs; leave it out, or use --device cpu")
    output.begin()
    largest = max(sizes, key=math.prod)
    with enough_memory("x".join(map(str, largest)), 8 * math.prod(largest), device):  # fp32, and a copy
        lines = bench_runs.quantiser_speeds(sizes, device, rounds, builds)
    output.show(lines, "bars", "Melem/s", "operation", "back end")


@dataclass(frozen=True)
class GptOptions:
    """Options on the model to time.

    Args:
        layers: Number of blocks of the gpt.
        width: Width of the gpt, a multiple of 64.
        tokens: Tokens in a step, a multiple of 128.
    """

    layers: Annotated[int, typer.Option(min=1, max=MOST_LAYERS)] = 6
    width: Annotated[int, typer.Option(min=64, max=MOST_WIDTH)] = 256
    tokens: Annotated[int, typer.Option(min=128, max=128 * MOST_SEQUENCES)] = 2048


@app.command()
def step(
    gpt: GptOptions,
    presets: Presets = None,
    rounds: Rounds = 9,
    all_presets: bool = False,
    compiled: Annotated[bool, typer.Option("--compile")] = False,
    trace: Annotated[Path | None, typer.Option(metavar="FOLDER")] = None,
    device: OnDevice = "cpu",
    *,
    output: Output,
) -> None:
    """Time a training step of a gpt in each preset: tokens per second, time by operation, and peak memory.

    Quantised presets are timed twice: with products in bf16_out, the default, and with all products in
    fp32_out. On a GPU the time is not divided by operation; --trace shows its kernels.

    Args:
        presets: Presets besides bf16; default: fp32 and nvfp4.
        all_presets: Time every preset, each in its default mode alone.
        compiled: Also time each preset with compile: true; takes half a minute more.
        trace: Folder for a profiler trace of each preset's step.
    """
    names = _with_bf16([*PRESETS] if all_presets else presets or ["fp32", "nvfp4"])
    for option, size, unit in (("width", gpt.width, 64), ("tokens", gpt.tokens, 128)):
        if size % unit:
            raise InputError(f"--{option} {size}: give a multiple of {unit}")
    print_starting("importing torch, then timing training steps", quiet=output.as_json)
    _device(device)
    if output.png and device == "cuda":
        raise InputError(
            f"--png {output.png}: the figure divides a step by operation, which is measured on CPUs;"
            " use --trace"
        )
    if trace and trace.exists() and not trace.is_dir():
        raise InputError(f"--trace {trace}: is a file; name a folder")
    output.begin()
    recipes = {name: PRESETS[name]() for name in names} if all_presets else in_both_modes(names)
    asked = f"--layers {gpt.layers}, --width {gpt.width} and --tokens {gpt.tokens}"
    weights = 12 * gpt.layers * gpt.width**2  # in blocks, each with a gradient and two moments in fp32
    # And the outputs of a layer in bf16: torch would refuse them only after seconds of drawing tokens.
    with enough_memory(asked, 16 * weights * len(recipes) + 2 * gpt.tokens * gpt.width, device):
        steppers = bench_runs.steppers(recipes, gpt.layers, gpt.width, gpt.tokens, device, compiled)
        lines = bench_runs.step_speeds(steppers, gpt.tokens, device, rounds, trace)
    output.show(lines, "shares", "step ms", "preset", (*timing.GROUPS, "rest"))


@dataclass(frozen=True)
class LayerOptions:
    """Options on the layers to time, and on what computes them.

    Args:
        shapes: Shape of a layer; repeatable.
        tokens: Tokens for --model; default: 512 on a CPU, 8192 on a GPU.
        engine: Engines to time; auto: Transformer Engine if preset and machine allow it. Of several, those
          that cannot run a preset here are skipped, with the reason.
        weights: Type of the weights; fp32, as in training, is cast to bf16 in every pass.
        wide: Also time quantised presets with all products in fp32_out.
    """

    shapes: Annotated[list[str] | None, typer.Option("--shape", metavar="TOKENSxINxOUT")] = None
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help=f"Time the four layers of a block of {', '.join(linear_layers.MODELS)}; repeatable.",
        ),
    ] = None
    tokens: Annotated[int | None, typer.Option(min=16)] = None
    engine: Annotated[str, typer.Option(metavar="ENGINE[,ENGINE]...")] = AUTO
    weights: Literal["bf16", "fp32"] = "fp32"
    wide: Annotated[bool, typer.Option("--fp32-out")] = False


@app.command()
def linear(
    layers: LayerOptions,
    presets: Presets = None,
    rounds: Rounds = 5,
    device: Literal["cpu", "cuda"] | None = None,
    *,
    output: Output,
) -> None:
    """Time forward and backward of a linear layer in each preset: speed, and fraction of the hardware's peak.

    Default shapes: 2048 tokens through square layers of width 1024 and 2048, and 512 tokens through a layer
    from 4096 to 14336. The peak is the dense one of each product's format in NVIDIA's datasheet; on CPUs and
    other GPUs, the measured speed of torch's bf16 product. Casts: the fraction of the time that making the
    operands takes by itself, for engines that show them.

    Args:
        presets: Presets besides bf16; default: nvfp4, mxfp8 and fp8_current.
        device: Device to measure on; default: a GPU if there is one.
    """
    names = _with_bf16(presets or ["nvfp4", "mxfp8", "fp8_current"])
    print_starting("importing torch, then timing layers", quiet=output.as_json)
    target = _device(device)
    sizes = _layers(layers, target)
    output.begin()
    recipes = in_both_modes(names) if layers.wide else {name: PRESETS[name]() for name in names}
    engines = list(dict.fromkeys(layers.engine.split(",")))
    if wrong := _unknown("engine", engines, [AUTO, *ENGINES], "--engine "):
        raise InputError(*wrong)
    chosen, remarks = linear_layers.cases(engines, recipes, sizes, target)
    for remark in remarks:
        print(remark, file=sys.stderr)
    largest = max(sizes, key=lambda shape: shape.bytes)
    with enough_memory(largest.size, largest.bytes, target):
        found = linear_layers.layer_speeds(chosen, sizes, target, layers.weights, rounds)
    about = {
        "machine": linear_layers.machine(target),
        "date": f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        "weights": layers.weights,
        "of peak": found.yardstick,
    }
    hidden = {"multiplies", "forward peak", "backward peak"}
    if all(line["shape"] == line["size"] for line in found.lines):
        hidden.add("size")
    notes = (found.unit, f"Lines: {found.yardstick}.")
    output.show(found.lines, "speeds", *notes, about=about, hidden=hidden)
    reached = [f"{speed:,.0f}" for speed in sorted(found.reached)]
    figure = f": {reached[0]} to {reached[-1]} {found.unit}" if reached else ""
    console(output.as_json).lines(f"Of peak: a share of {found.yardstick}{figure}.")


# --- checks of what is asked ----------------------------------------------------------------------


def _device(asked: str | None) -> str:
    """Return the class of device to use; InputError if this machine has none."""
    import torch

    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise InputError("--device cuda: torch sees no GPU with CUDA here; use --device cpu")
    return asked or ("cuda" if available else "cpu")


def _layers(asked: LayerOptions, device: str) -> list[linear_layers.Shape]:
    models, tokens = asked.models or [], asked.tokens
    wrong = _unknown("model", models, linear_layers.MODELS, "--model ")
    if tokens and not models:
        wrong.append("--tokens needs --model; a --shape includes its tokens")
    if wrong:
        raise InputError(*wrong)
    texts = asked.shapes or ([] if models else ["2048x1024x1024", "2048x2048x2048", "512x4096x14336"])
    shapes = [linear_layers.Shape("x".join(map(str, size)), *size) for size in (_size(t, 3) for t in texts)]
    for name in models:
        shapes += linear_layers.shapes_of(name, tokens or linear_layers.TOKENS[device])
    return list(dict.fromkeys(shapes))


def _with_bf16(names: list[str]) -> list[str]:
    if wrong := _unknown("preset", names, PRESETS):
        raise InputError(*wrong)
    return list(dict.fromkeys(("bf16", *names)))


def _unknown(kind: str, names: Iterable[str], valid: Collection[str], option: str = "") -> list[str]:
    return [f"{option}{name}: no such {kind}; {nearest(name, valid)}" for name in names if name not in valid]


def _size(text: str, dimensions: int) -> tuple[int, ...]:
    parts = text.split("x")
    if len(parts) != dimensions or not all(part.isdecimal() and int(part) >= 16 for part in parts):
        raise InputError(
            f"{text}: not a shape; give {dimensions} numbers of 16 or more, as in "
            f"{'x'.join(['1024'] * dimensions)}"
        )
    return tuple(map(int, parts))
