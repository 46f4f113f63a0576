"""Times of `ablate bench` by torch.utils.benchmark over interleaved rounds, and a profile of a call."""

import itertools
import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

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
    from ablate.execution.trial_process import tune_process

    tune_process()


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

    `least`: seconds for which a short call is repeated in each round; `before` runs before each call; its own
    time is measured, too, and subtracted; `clock`, in seconds; None: torch's, which waits for a GPU.
    """
    from torch.utils import benchmark

    code, clock = "before(); call()" if before else "call()", clock or benchmark.timer
    timers = [
        benchmark.Timer(code, timer=clock, globals={"before": before, "call": call})
        for call in (*calls.values(), *([lambda: None] if before else []))
    ]
    blocks = [[timer.blocked_autorange(min_run_time=least) for timer in timers] for _ in range(rounds)]
    found = [benchmark.Measurement.merge(one)[0] for one in zip(*blocks, strict=True)]
    idle = found.pop().median if before else 0.0
    return {
        name: replace(one, raw_times=[max(seconds - idle, 1e-9) for seconds in one.raw_times])
        for name, one in zip(calls, found, strict=True)
    }


def on_device(
    calls: Mapping[Key, Callable[[], object]], rounds: int, device: str, least: float = 0.0
) -> "dict[Key, Measurement]":
    """Measure as `interleaved`; on a GPU with an empty L2 cache, without launches, and for 20 ms a round.
    Before each call the cache is overwritten, and the GPU kept busy while kernels are launched. In a training
    step launches overlap with kernels in the same way."""
    if device != "cuda":
        return interleaved(calls, rounds, least)
    import torch

    size = 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    cache = torch.empty(size, dtype=torch.int8, device="cuda")

    def before() -> None:
        cache.zero_()
        torch.cuda._sleep(AHEAD)

    return interleaved(calls, rounds, 0.02, before)


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
    """Return the fraction of a call's time in each of GROUPS and the `rest`, and the `peak` of its memory, in
    bytes of tensors above those that existed before the call.

    `trace`: file to write a trace to, for chrome://tracing or Perfetto; `layers`: those whose quantisers are
    counted as such, from now on under a name.
    """
    import torch
    from torch.profiler import ProfilerActivity, record_function

    from ablate.numerics.quantize import quantize

    for layer in layers:  # compiled quantisers are no operators of torch, and have no name there
        layer.quantize = record_function("quantise")(quantize)
    devices = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_initialized()
    with torch.profiler.profile(activities=devices, profile_memory=True) as profiler:
        call()
    if trace:
        profiler.export_chrome_trace(str(trace))
    averages = profiler.key_averages()
    spent = dict.fromkeys(GROUPS, 0.0)
    for name, heads in GROUPS.items():
        for event in averages:
            if event.key.startswith(heads):  # a quantiser is all that it calls
                spent[name] += event.cpu_time_total if name == "quantisers" else event.self_cpu_time_total
    spent["rest"] = max(0.0, sum(event.self_cpu_time_total for event in averages) - sum(spent.values()))
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    changes = (event.nbytes() for event in events if event.name() == "[memory]")
    peak = max(itertools.accumulate(changes, initial=0))  # above what there was before the call
    whole = sum(spent.values())
    return {name: value / whole for name, value in spent.items()} | {"peak": float(peak)}
