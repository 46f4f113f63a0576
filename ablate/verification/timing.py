"""Times of `ablate bench` by torch.utils.benchmark over interleaved rounds, and a profile of a call."""

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch.utils.benchmark import Measurement

    from ablate.engines.emulated_layer import EmulatedLinear

Key = TypeVar("Key", bound=Hashable)

GROUPS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::"),
    "quantisers": ("quantise",),
    "attention": ("aten::_scaled_dot_product",),
    "optimizer": ("aten::_fused_adamw_",),
}
"""Groups of a step's operations, by prefixes of the profiler's names; all others are `rest`."""
AHEAD = 4_000_000
"""Cycles for which a GPU is kept busy: about 2 ms, longer than the launches of a layer's two passes."""


def one_thread() -> None:
    """Configure this process as a trial, with one thread and without the profiler's log messages."""
    os.environ |= {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    import torch

    from ablate.execution.trial_process import tune_process

    tune_process()
    torch.set_num_threads(1)


def interleaved(
    calls: Mapping[Key, Callable[[], object]],
    rounds: int,
    least: float = 0.0,
    before: Callable[[], object] | None = None,
    clock: Callable[[], float] | None = None,
) -> "dict[Key, Measurement]":
    """Return the seconds of each call as a measurement with `median` and `iqr`.

    Every round runs all calls in turn, so that slow drifts of the machine affect all of them alike. Within a
    round, runs before the measured ones compile, allocate and bring the data into the cache.

    Args:
        calls: Functions to measure, by name.
        rounds: Number of rounds.
        least: Seconds for which a short call is repeated in each round.
        before: Function that runs before each call; its own time is measured, too, and subtracted.
        clock: Clock in seconds; None: torch's, which waits for a GPU.
    """
    from torch.utils import benchmark

    timers = [
        benchmark.Timer(
            "before(); call()" if before else "call()",
            timer=clock or benchmark.timer,
            globals={"before": before, "call": call},
        )
        for call in (*calls.values(), *([lambda: None] if before else []))
    ]
    blocks = [[timer.blocked_autorange(min_run_time=least) for timer in timers] for _ in range(rounds)]
    found = [benchmark.Measurement.merge(one)[0] for one in zip(*blocks, strict=True)]
    idle = found.pop().median if before else 0.0
    return {
        name: replace(one, raw_times=[max(seconds - idle, 1e-9) for seconds in one.raw_times])
        for name, one in zip(calls, found, strict=True)
    }


def cold_gpu() -> Callable[[], object]:
    """Return a function that overwrites the L2 cache, then keeps the GPU busy while kernels are launched.

    Launches are then not measured. In a training step they overlap with kernels in the same way.
    """
    import torch

    size = 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    cache = torch.empty(size, dtype=torch.int8, device="cuda")

    def before() -> None:
        cache.zero_()
        torch.cuda._sleep(AHEAD)

    return before


def on_device(
    calls: Mapping[Key, Callable[[], object]], rounds: int, device: str, least: float = 0.0
) -> "dict[Key, Measurement]":
    """Measure as `interleaved`; on a GPU with an empty cache, without launches, and for 20 ms a round."""
    return (
        interleaved(calls, rounds, 0.02, cold_gpu())
        if device == "cuda"
        else interleaved(calls, rounds, least)
    )


def cuda_peak(call: Callable[[], object]) -> float:
    """Return the peak of the allocated bytes of the current GPU during a call, above those before it."""
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


def profile(
    call: Callable[[], object], trace: Path | None = None, layers: "Iterable[EmulatedLinear]" = ()
) -> dict[str, float]:
    """Return the fraction of a call's time in each of GROUPS and the `rest`, and the `peak` of its memory.

    The peak is in bytes of tensors, above those that existed before the call.

    Args:
        call: Function to profile.
        trace: File to write a trace to, for chrome://tracing or Perfetto.
        layers: Layers whose quantisers are counted as such.
    """
    import torch
    from torch.profiler import ProfilerActivity

    devices = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_initialized()
    with (
        _named_quantisers(layers),
        torch.profiler.profile(activities=devices, profile_memory=True) as profiler,
    ):
        call()
    if trace:
        profiler.export_chrome_trace(str(trace))
    spent = dict.fromkeys((*GROUPS, "rest"), 0.0)
    averages = profiler.key_averages()
    for event in averages:
        group = next((name for name, heads in GROUPS.items() if event.key.startswith(heads)), "rest")
        spent[group] += event.self_cpu_time_total if group != "quantisers" else event.cpu_time_total
    inner = spent["quantisers"] - sum(e.self_cpu_time_total for e in averages if e.key.startswith("quantise"))
    spent["rest"] = max(0.0, spent["rest"] - inner)
    level, levels = 0, [0]  # bytes of tensors above those at the start, after each allocation
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        level += event.nbytes() if event.name() == "[memory]" else 0
        levels.append(level)
    whole = sum(spent.values())
    return {name: value / whole for name, value in spent.items()} | {"peak": float(max(levels))}


@contextmanager
def _named_quantisers(layers: "Iterable[EmulatedLinear]") -> Iterator[None]:
    """Record the quantisers of these layers under a name: compiled ones are no operators of torch."""
    import torch

    from ablate.numerics.quantize import quantize

    def named(*args: Any, **options: Any) -> Any:  # the arguments of quantize
        with torch.profiler.record_function("quantise"):
            return quantize(*args, **options)

    layers = list(layers)
    for layer in layers:
        layer.quantize = named
    try:
        yield
    finally:
        for layer in layers:
            layer.quantize = quantize
