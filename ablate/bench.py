"""`ablate bench`: how fast quantisers, layers, training steps and the start of a trial are here. Medians, interleaved, on one thread."""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ablate import measure
from ablate.cli import console, run
from ablate.recipes import PRESETS
from ablate.yamlfile import InputError, nearest

app = typer.Typer(help="How fast quantisers, layers and training steps are on this machine.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
Png = Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw the figures into this file, too.")]
Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds; the median counts.")]
Names = Annotated[list[str] | None, typer.Argument(metavar="[PRESET]...", help="Presets beside bf16; default fp32 and nvfp4.")]
Line = dict[str, Any]

FORMS = {"ms": "{:.3g}", "step ms": "{:.1f}", "forward ms": "{:.1f}", "backward ms": "{:.1f}", "tokens/s": "{:,.0f}"}
FORMS |= {"Melem/s": "{:,.0f}", "of memcpy": "{:.2f}", "of bf16": "{:.2f}", "of fp32": "{:.2f}", "GFLOP/s": "{:,.0f}"}
FORMS |= {"peak MiB": "{:,.0f}", "joules": "{:.2f}"} | dict.fromkeys((*measure.GROUPS, "rest"), "{:.0%}")
"""How columns are written."""


@app.command()
def kernels(
    shapes: Annotated[list[str] | None, typer.Argument(metavar="[ROWSxCOLUMNS]...", help="Default 1024x1024.")] = None,
    rounds: Rounds = 15,
    builds: Annotated[bool, typer.Option("--builds", help="Every compiled build that this CPU runs, not its best alone.")] = False,
    as_json: AsJson = False,
    png: Png = None,
) -> None:
    """Quantise a tensor every way: million elements a second, amax included, and speed over that of a copy of the same bytes."""
    import torch

    sizes = [_size(text, 2) for text in shapes or ["1024x1024"]]
    _check(png)
    measure.one_thread()
    found = []
    for (rows, columns), dtype in itertools.product(sizes, (torch.bfloat16, torch.float32)):
        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
        work = {
            (back_end, name): partial(_with_build, build, partial(call, x))
            for (back_end, build), (name, call) in itertools.product(_back_ends(builds).items(), _operations(x).items())
        }
        seconds = measure.medians(work | {"copy": partial(torch.empty_like(x).copy_, x)}, rounds, least=0.01)
        about = {"shape": f"{rows}x{columns}", "dtype": str(dtype).removeprefix("torch.")}
        for back_end, name in work:
            spent = seconds[back_end, name]
            speed = {"ms": 1000 * spent, "Melem/s": x.numel() / spent / 1e6, "of memcpy": seconds["copy"] / spent}
            found.append({"operation": name, **about, "back end": back_end, **speed})
    _draw(png, "bars", found, "Melem/s", "operation", "back end")
    _show(found, as_json)


@app.command()
def step(
    presets: Names = None,
    layers: Annotated[int, typer.Option(min=1)] = 6,
    width: Annotated[int, typer.Option(min=64)] = 256,
    tokens: Annotated[int, typer.Option(min=128)] = 2048,
    rounds: Rounds = 9,
    compiled: Annotated[bool, typer.Option("--compile", help="Each preset with compile: true, too; half a minute more.")] = False,
    trace: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write a profiler trace of each preset's step here.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: AsJson = False,
    png: Png = None,
) -> None:
    """One training step of a gpt in each preset: time, tokens a second, where the time goes, and the peak of its tensors.

    Quantised presets come twice: as they are, products in bf16_out, and with every product in fp32_out.
    """
    names = _presets(presets or ["fp32", "nvfp4"])
    _check(png)
    measure.one_thread()
    recipes = _in_both_modes(names)
    steppers = {name: _stepper(recipe, layers, width, tokens, device) for name, recipe in recipes.items()}
    if compiled:
        whole = {name: recipe for name, recipe in recipes.items() if recipe.products.backward_needs is None}
        steppers |= {f"{name}, compiled": _stepper(recipe, layers, width, tokens, device, True) for name, recipe in whole.items()}
    seconds = measure.medians(steppers, rounds)
    if trace:
        trace.mkdir(parents=True, exist_ok=True)
    found = []
    for name, call in steppers.items():
        shares = measure.profile(call, trace and trace / f"{name.replace(', ', '-')}.json")
        line = {"preset": name, "step ms": 1000 * seconds[name], "tokens/s": tokens / seconds[name]}
        line |= {f"of {base}": seconds[name] / seconds[base] for base in ("bf16", "fp32") if base in seconds}
        line |= {"peak MiB": shares.pop("peak") / 2**20, **shares}
        energy = measure.joules(call)
        found.append(line if energy is None else line | {"joules": energy})
    _draw(png, "shares", found, "step ms", "preset", (*measure.GROUPS, "rest"))
    _show(found, as_json)


@app.command()
def linear(
    presets: Names = None,
    shapes: Annotated[list[str] | None, typer.Option("--shape", metavar="TOKENSxINxOUT", help="Repeatable.")] = None,
    rounds: Rounds = 5,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: AsJson = False,
    png: Png = None,
) -> None:
    """Forward and backward of one linear layer, emulated in each preset, at the shapes of language models.

    Quantised presets come twice, as in `step`. Default shapes: 2048 tokens through a square layer of 1024 and one of 2048, and the wide
    half of an MLP of 4096.
    """
    names = _presets(presets or ["nvfp4"])
    sizes = [_size(text, 3) for text in shapes or ["2048x1024x1024", "2048x2048x2048", "512x4096x14336"]]
    _check(png)
    measure.one_thread()
    found = []
    for size in sizes:
        passes = {name: _passes(recipe, *size, device) for name, recipe in _in_both_modes(names).items()}
        work = {(name, way): call for name, both in passes.items() for way, call in both.items()}
        seconds = measure.medians(work, rounds)
        flops = 2 * size[0] * size[1] * size[2]
        for name in passes:
            forward, both = seconds[name, "forward"], seconds[name, "both"]
            times = {"forward ms": 1000 * forward, "backward ms": 1000 * (both - forward), "GFLOP/s": 3 * flops / both / 1e9}
            shape = "x".join(map(str, size))
            found.append({"shape": shape, "preset": name, **times, "of bf16": both / seconds["bf16", "both"]})
    _draw(png, "bars", found, "of bf16", "shape", "preset")
    _show(found, as_json)


@app.command()
def start(rounds: Rounds = 9, as_json: AsJson = False) -> None:
    """How long a trial on a warm worker takes from its fork to its first step: a gpt of the default size."""
    from ablate.child import rehearse
    from ablate.workloads.gpt import Gpt

    measure.one_thread()
    rehearse()
    measured = sorted(_forked(lambda: Gpt().prepare(PRESETS["nvfp4"](), 0, "cpu")) for _ in range(rounds))
    _show([{"what": "fork to first step", "ms": 1000 * measured[rounds // 2]}], as_json)


@app.command()
def faults(
    count: Annotated[int, typer.Option("--faults", min=1, help="How many are made.")] = 100,
    seed: Annotated[int, typer.Option(help="Which, and when.")] = 0,
    state: Annotated[Path | None, typer.Option(help="A new folder for the sweeps, and the evidence; default: one that goes.")] = None,
    without: Annotated[list[str] | None, typer.Option(metavar="KIND", help="A kind to leave out; repeatable.")] = None,
) -> None:
    """Kill everything that can be killed, at random moments of a small real sweep, and look for what was lost, or done twice.

    Controller, workers, trials, Ray, an MLflow server and a PostgreSQL of our own, on this machine. Exit status 1 if a promise broke.
    """
    from ablate import faults

    if wrong := [f"--without {name}: no such kind; {nearest(name, faults.FAULTS)}" for name in without or () if name not in faults.FAULTS]:
        raise InputError(wrong)
    raise typer.Exit(int(not faults.told(state, count, seed, [name for name in faults.FAULTS if name not in (without or ())], console())))


# --- what is measured ------------------------------------------------------------------------------------------------------


def _operations(x: Any) -> dict[str, Callable[[Any], Any]]:
    import torch

    from ablate.numerics.philox import Clock
    from ablate.numerics.quantize import quantize
    from ablate.numerics.spec import Hadamard, Outer, Quant

    nearest, square, rotation = Quant(), Quant(block="16x16"), Hadamard()
    given = Quant(outer=Outer(statistic=f"static:{x.abs().max().item()}"))
    drawn = partial(quantize, quant=Quant(rounding="stochastic"), clock=Clock(0))
    found = {
        "rows, nearest": lambda x: quantize(x, nearest),
        "rows, nearest, amax given": lambda x: quantize(x, given),
        "rows, stochastic": lambda x: drawn(x),
        "columns, nearest": lambda x: quantize(x.t(), nearest),
        "columns, stochastic": lambda x: drawn(x.t()),
        "16x16, nearest": lambda x: quantize(x, square),
    }
    if x.dtype == torch.bfloat16:  # what is rotated is bf16
        found |= {
            "columns, rotated, nearest": lambda x: quantize(x.t(), nearest, rotation=rotation),
            "columns, rotated, stochastic": lambda x: drawn(x.t(), rotation=rotation),
        }
    return found


def _back_ends(every: bool) -> dict[str, Any]:
    """The build that runs here, the others that could, and None for the reference, by name."""
    from ablate.numerics.kernels import cpu

    mine = cpu.level()
    levels = list(cpu.LEVELS.values())
    others = [*levels[levels.index(mine) + 1 :], "portable"] if mine in levels else []
    return {name: cpu.load(cpu.path(name)) for name in (mine, *(others if every else []))} | {"reference": None}


def _with_build(build: Any, call: Callable[[], Any]) -> None:
    from ablate.numerics.kernels import cpu

    before, cpu.build = cpu.build, lambda: build
    try:
        call()
    finally:
        cpu.build = before


def _in_both_modes(names: list[str]) -> dict[str, Any]:
    """The presets' recipes, and those that quantise with every product in fp32_out, too."""
    recipes = {name: PRESETS[name]() for name in names}
    return recipes | {f"{name}, fp32_out": _fp32_out(recipe) for name, recipe in recipes.items() if not recipe.products.plain}


def _fp32_out(recipe: Any) -> Any:
    """The recipe with the accumulators of all products kept."""
    names = {"fprop": "gemm", "dgrad": "gemm", "wgrad": "dw"}
    wide = {"gemm": "fp32_out", "dw": "fp32"}
    return recipe.model_copy(update={n: getattr(recipe, n).model_copy(update={f: wide[f]}) for n, f in names.items()})


def _stepper(recipe: Any, layers: int, width: int, tokens: int, device: str, compile: bool = False) -> Callable[[], Any]:
    """Training steps, one a call, with no telemetry and no evaluation."""
    from ablate.train import Telemetry
    from ablate.workloads.gpt import Gpt

    never = 10**6
    shape = {"layers": layers, "width": width, "heads": width // 64, "context": 128, "batch": tokens // 128}
    config = Gpt(**shape, steps=never, eval_every=never, warmup=0, decay="none", compile=compile)
    steps: Iterator[Any] = config.train(config.prepare(recipe, 0, device), Telemetry(every=never, log=1, shadow=never))
    return partial(next, steps)


def _passes(recipe: Any, tokens: int, inputs: int, outputs: int, device: str) -> dict[str, Callable[[], Any]]:
    """One layer's forward pass, and forward and backward."""
    import torch

    from ablate.engines.emulated import DTYPES, EmulatedLinear
    from ablate.numerics.philox import Clock

    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(tokens, n, generator=generator).to(device, torch.bfloat16) for n in (inputs, outputs))
    x.requires_grad_()
    bare = torch.nn.Linear(inputs, outputs, bias=False, device=device)
    layer = EmulatedLinear(bare, "linear", Clock(0), DTYPES[recipe.dtype])
    layer.products = recipe.products

    def both() -> None:
        x.grad = layer.weight.grad = None
        layer(x).backward(dy)

    return {"forward": partial(layer, x), "both": both}


def _forked(call: Callable[[], Any]) -> float:
    """Seconds from here to the end of `call` in a forked child."""
    read, write = os.pipe()
    began = time.perf_counter()
    if not (pid := os.fork()):
        try:
            call()
            os.write(write, repr(time.perf_counter() - began).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        took = float(answer.read())
    os.waitpid(pid, 0)
    return took


# --- asked and shown -------------------------------------------------------------------------------------------------------


def _presets(names: list[str]) -> list[str]:
    wrong = [f"{name}: no such preset; {nearest(name, PRESETS)}" for name in names if name not in PRESETS]
    if wrong:
        raise InputError(wrong)
    return list(dict.fromkeys(("bf16", *names)))


def _size(text: str, dimensions: int) -> tuple[int, ...]:
    parts = text.split("x")
    if len(parts) != dimensions or not all(part.isdecimal() and int(part) >= 16 for part in parts):
        raise InputError([f"{text}: not a shape; it takes {dimensions} numbers of 16 or more, as in {'x'.join(['1024'] * dimensions)}"])
    return tuple(map(int, parts))


def _check(png: Path | None) -> None:
    """Before anything is measured, which takes minutes."""
    if png and (png.is_dir() or not png.absolute().parent.is_dir()):
        raise InputError([f"--png {png}: it must name a file in a folder that exists"])


def _draw(png: Path | None, how: str, found: list[Line], *axes: Any) -> None:
    if png:
        from ablate import figures

        getattr(figures, how)(found, *axes).write(png)


def _show(found: list[Line], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=1))
        return
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in found[0]:
        table.add_column(name, justify="right" if name in FORMS else "left")
    for line in found:
        table.add_row(*(FORMS[name].format(value) if name in FORMS else str(value) for name, value in line.items()))
    console().print(table)


if __name__ == "__main__":
    run(app)
