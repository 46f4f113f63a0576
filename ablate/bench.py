"""`ablate bench kernels`, `ablate bench step`: how fast quantisers and training steps are here. Medians, interleaved, on one thread."""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import typer
from rich.table import Table

from ablate.cli import console, run
from ablate.recipes import PRESETS
from ablate.yamlfile import InputError, nearest

app = typer.Typer(help="How fast quantisers and training steps are on this machine.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


@app.command()
def kernels(
    rows: Annotated[int, typer.Option(min=16)] = 1024,
    columns: Annotated[int, typer.Option(min=16)] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; the median counts.")] = 15,
    as_json: AsJson = False,
) -> None:
    """Quantise one tensor every way: million elements a second, amax included, beside the reference and a copy of the same bytes."""
    import torch

    _one_thread()
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
        work = {name: partial(call, x) for name, call in _operations().items()}
        work |= {f"{name}, reference": partial(_by_reference, call) for name, call in work.items()}
        seconds = _medians(work | {"copy": x.clone}, rounds, least=0.01)
        for name in _operations():
            speed, reference, copy = (x.numel() / seconds[key] / 1e6 for key in (name, f"{name}, reference", "copy"))
            found.append(
                {"operation": name, "dtype": str(dtype).removeprefix("torch."), "Melem/s": speed, "reference": reference, "copy": copy}
            )
    _show(found, as_json, {"Melem/s": "{:,.0f}", "reference": "{:,.0f}", "copy": "{:,.0f}"})


@app.command()
def step(
    presets: Annotated[list[str] | None, typer.Argument(help="Presets beside bf16; default fp32 and nvfp4.")] = None,
    layers: Annotated[int, typer.Option(min=1)] = 6,
    width: Annotated[int, typer.Option(min=64)] = 256,
    tokens: Annotated[int, typer.Option(min=128)] = 2048,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; the median counts.")] = 9,
    as_json: AsJson = False,
) -> None:
    """One training step of a gpt in each preset: milliseconds, tokens a second, and the ratio to bf16."""
    names = list(dict.fromkeys(("bf16", *(presets or ("fp32", "nvfp4")))))
    unknown = [f"{name}: no such preset; {nearest(name, PRESETS)}" for name in names if name not in PRESETS]
    if unknown:
        raise InputError(unknown)
    _one_thread()
    seconds = _medians({name: _stepper(name, layers, width, tokens) for name in names}, rounds)
    found = [
        {"preset": name, "step ms": 1000 * seconds[name], "tokens/s": tokens / seconds[name], "of bf16": seconds[name] / seconds["bf16"]}
        for name in names
    ]
    _show(found, as_json, {"step ms": "{:.1f}", "tokens/s": "{:,.0f}", "of bf16": "{:.2f}"})


def _operations() -> dict[str, Callable[[Any], Any]]:
    from ablate.numerics.philox import Clock
    from ablate.numerics.quantize import quantize
    from ablate.numerics.spec import Hadamard, Quant

    drawn = partial(quantize, quant=Quant(rounding="stochastic"), clock=Clock(0))
    return {
        "rows, nearest": lambda x: quantize(x, Quant()),
        "rows, stochastic": lambda x: drawn(x),
        "columns, nearest": lambda x: quantize(x.t(), Quant()),
        "columns, stochastic": lambda x: drawn(x.t()),
        "columns, rotated, nearest": lambda x: quantize(x.t(), Quant(), rotation=Hadamard()),
        "columns, rotated, stochastic": lambda x: drawn(x.t(), rotation=Hadamard()),
        "16x16, nearest": lambda x: quantize(x, Quant(block="16x16")),
    }


def _by_reference(call: Callable[[], Any]) -> None:
    from ablate.numerics.kernels import cpu

    build, cpu.build = cpu.build, lambda: None
    try:
        call()
    finally:
        cpu.build = build


def _stepper(name: str, layers: int, width: int, tokens: int) -> Callable[[], Any]:
    """Training steps, one a call, with no telemetry and no evaluation."""
    from ablate.train import Telemetry
    from ablate.workloads.gpt import Gpt

    never = 10**6
    shape = {"layers": layers, "width": width, "heads": width // 64, "context": 128, "batch": tokens // 128}
    config = Gpt(**shape, steps=never, eval_every=never, warmup=0, decay="none")
    steps: Iterator[Any] = config.train(config.prepare(PRESETS[name](), 0, "cpu"), Telemetry(every=never, log=1, shadow=never))
    return partial(next, steps)


def _medians(work: dict[str, Callable[[], Any]], rounds: int, least: float = 0.0) -> dict[str, float]:
    """Seconds of each, in turn within each round, after one round that does not count; short ones repeated for `least` seconds.

    So slow drifts of the machine meet all alike, and what is short runs with its data in cache, as in training.
    """
    repeats = {name: 1 + int(least / _seconds(call, 1)) for name, call in work.items()}
    seconds = [{name: _seconds(call, repeats[name]) for name, call in work.items()} for _ in range(rounds + 1)]
    return {name: statistics.median(measured[name] for measured in seconds[1:]) for name in work}


def _seconds(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def _one_thread() -> None:
    """As a trial runs."""
    import torch

    from ablate.child import tune_process

    tune_process()
    torch.set_num_threads(1)


def _show(found: list[dict[str, Any]], as_json: bool, forms: dict[str, str]) -> None:
    if as_json:
        print(json.dumps(found, indent=1))
        return
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in found[0]:
        table.add_column(name, justify="right" if name in forms else "left")
    for line in found:
        table.add_row(*(forms[name].format(value) if name in forms else value for name, value in line.items()))
    console().print(table)


if __name__ == "__main__":
    run(app)
