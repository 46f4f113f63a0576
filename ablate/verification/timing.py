"""Measurements of `ablate bench`: medians over interleaved rounds, and profiles of time and memory."""

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from ablate.engines.emulated_layer import EmulatedLinear

Key = TypeVar("Key", bound=Hashable)

GROUPS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::"),
    "quantisers": ("quantise",),
    "attention": ("aten::_scaled_dot_product",),
    "optimizer": ("aten::_fused_adamw_",),
}
"""Groups of a step's operations, by prefixes of the profiler's names; all others are `rest`."""

_ENERGY = Path("/sys/class/powercap/intel-rapl:0")


def one_thread() -> None:
    """Configure this process as a trial, with one thread and without the profiler's log messages."""
    os.environ |= {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    import torch

    from ablate.execution.trial_process import tune_process

    tune_process()
    torch.set_num_threads(1)


def medians(calls: Mapping[Key, Callable[[], object]], rounds: int, least: float = 0.0) -> dict[Key, float]:
    """Return the median seconds of each call.

    Every round runs all calls in turn, so that slow drifts of the machine affect all of them alike. The first
    round does not count. Short calls are repeated, and then run with their data in cache, as in training.

    Args:
        calls: Functions to measure, by name.
        rounds: Number of rounds that count.
        least: Seconds for which a call is repeated in each round.
    """
    repeats = {name: 1 + int(least / seconds(call, 2)) if least else 1 for name, call in calls.items()}
    measured = [
        {name: seconds(call, repeats[name]) for name, call in calls.items()} for _ in range(rounds + 1)
    ]
    return {name: statistics.median(spent[name] for spent in measured[1:]) for name in calls}


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the mean seconds of a call."""
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    wait()
    return (time.perf_counter() - start) / repeats


Mark = TypeVar("Mark")
"""Time stamp of one kind of stopwatch."""


class Stopwatch(Protocol[Mark]):
    """Time stamps on a device; they may be taken while it still computes, and are read afterwards."""

    def begin(self) -> None:
        """Prepare the device for a call that is measured."""

    def mark(self) -> Mark:
        """Return a time stamp, ordered after all work submitted to the device so far."""

    def stretches(self, marks: list[Mark]) -> list[float]:
        """Return the seconds between each mark and the next."""


class WallStopwatch:
    """Stopwatch for a processor, which computes synchronously: the wall clock."""

    def begin(self) -> None:
        """Do nothing: caches stay warm, as between the layers of a training step."""

    def mark(self) -> float:
        """Return the time of a monotonic clock in seconds."""
        return time.perf_counter()

    def stretches(self, marks: list[float]) -> list[float]:
        """Return the seconds between each mark and the next."""
        return [after - before for before, after in itertools.pairwise(marks)]


class CudaStopwatch:
    """Stopwatch for a GPU: CUDA events.

    Before each call the L2 cache is overwritten, and the GPU is kept busy while the host launches the
    kernels, so that launches are not measured. In a training step they overlap with kernels in the same way.
    """

    AHEAD = 4_000_000
    """Cycles for which the GPU is kept busy: about 2 ms, longer than the launches of a layer's two passes."""

    def __init__(self) -> None:
        import torch

        size = 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._cache = torch.empty(size, dtype=torch.int8, device="cuda")

    def begin(self) -> None:
        """Overwrite the L2 cache, then keep the GPU busy."""
        import torch

        self._cache.zero_()
        torch.cuda._sleep(self.AHEAD)

    def mark(self) -> "torch.cuda.Event":
        """Record an event on the current stream."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stretches(self, marks: "list[torch.cuda.Event]") -> list[float]:
        """Wait for the last event; return the seconds between each event and the next."""
        marks[-1].synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(marks)]


def stretches(
    calls: Mapping[Key, Callable[[Callable[[], None]], None]],
    rounds: int,
    stopwatch: Stopwatch[Mark],
    least: float = 0.0,
) -> dict[Key, list[float]]:
    """Return the median seconds of each stretch of each call.

    Every round runs all calls in turn. The first run of a call, which compiles and allocates, does not count.

    Args:
        calls: Functions to measure, by name. A function calls its argument at the start and at the end of
            each stretch.
        rounds: Number of rounds.
        stopwatch: Clock of the device.
        least: Seconds for which a short call is repeated in each round, at most 100 times.
    """
    for call in calls.values():
        _stretches(call, stopwatch)
    repeats = {
        name: min(100, math.ceil(least / sum(_stretches(call, stopwatch)))) if least else 1
        for name, call in calls.items()
    }
    measured: dict[Key, list[list[float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            measured[name] += (_stretches(call, stopwatch) for _ in range(repeats[name]))
    return {
        name: [statistics.median(column) for column in zip(*lines, strict=True)]
        for name, lines in measured.items()
    }


def medians_by(
    stopwatch: Stopwatch[Mark], calls: Mapping[Key, Callable[[], object]], rounds: int, least: float = 0.0
) -> dict[Key, float]:
    """Return the median seconds of each call on a device, as `stretches` measures them."""

    def marked(call: Callable[[], object]) -> Callable[[Callable[[], None]], None]:
        def whole(mark: Callable[[], None]) -> None:
            mark()
            call()
            mark()

        return whole

    measured = stretches({name: marked(call) for name, call in calls.items()}, rounds, stopwatch, least)
    return {name: spent for name, (spent,) in measured.items()}


def _stretches(call: Callable[[Callable[[], None]], None], stopwatch: Stopwatch[Mark]) -> list[float]:
    marks: list[Mark] = []
    stopwatch.begin()
    call(lambda: marks.append(stopwatch.mark()))
    return stopwatch.stretches(marks)


def joules(call: Callable[[], object]) -> float | None:
    """Return the energy of a call in joules, from the processor's counter (Intel RAPL, readable by root
    only).

    None without such a counter.
    """
    counter = _ENERGY / "energy_uj"
    if not os.access(counter, os.R_OK):
        return None
    before = int(counter.read_text())
    call()
    wrap = int((_ENERGY / "max_energy_range_uj").read_text())
    return (int(counter.read_text()) - before) % wrap / 1e6


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
    import torch.profiler

    with (
        _named_quantisers(layers),
        torch.profiler.profile(activities=_activities(), profile_memory=True) as profiler,
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
    whole = sum(spent.values())
    return {name: value / whole for name, value in spent.items()} | {
        "peak": float(max(_levels(profiler), default=0))
    }


def _activities() -> "list[torch.profiler.ProfilerActivity]":
    import torch
    from torch.profiler import ProfilerActivity

    return [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_initialized() else [])


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


def _levels(profiler: "torch.profiler.profile") -> Iterator[int]:
    """Yield the bytes of tensors above those at the start, after each allocation."""
    level = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            level += event.nbytes()
            yield level
