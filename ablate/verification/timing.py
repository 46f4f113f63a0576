"""How long things take, fairly: interleaved rounds, medians; and what one call spends its time and memory on.

For `ablate bench`.
"""

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

Work = dict[str, Callable[[], Any]]

GROUPS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::"),
    "quantisers": ("quantise",),
    "attention": ("aten::_scaled_dot_product",),
    "optimizer": ("aten::_fused_adamw_",),
}
"""Groups of a step's operations, by the beginnings of the profiler's names; all else is `rest`."""

_ENERGY = Path("/sys/class/powercap/intel-rapl:0")


def one_thread() -> None:
    """As a trial runs; and without the profiler's remarks."""
    os.environ |= {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    import torch

    from ablate.execution.trial_process import tune_process

    tune_process()
    torch.set_num_threads(1)


def medians(work: Work, rounds: int, least: float = 0.0) -> dict[str, float]:
    """Seconds of each, in turn within each round, after one that does not count; short ones are repeated for
    `least` seconds.

    So slow drifts of the machine meet all alike, and what is short runs with its data in cache, as in
    training.
    """
    repeats = {name: 1 + int(least / seconds(call, 2)) if least else 1 for name, call in work.items()}
    measured = [
        {name: seconds(call, repeats[name]) for name, call in work.items()} for _ in range(rounds + 1)
    ]
    return {name: statistics.median(line[name] for line in measured[1:]) for name in work}


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Mean seconds of a call."""
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    wait()
    return (time.perf_counter() - start) / repeats


class Clock(Protocol):
    """Moments on a device: taken while it may still be computing, read afterwards."""

    def begin(self) -> None:
        """Before a call: what must not be found in a cache, or waited for, is put out of the way."""

    def mark(self) -> Any:
        """Now, in the order of what the device is given to do."""

    def stretches(self, marks: list[Any]) -> list[float]:
        """Seconds between one mark and the next."""


class Wall:
    """The clock on the wall, for a processor that computes when it is called."""

    def begin(self) -> None:
        """Nothing: caches stay warm, as between a training step's layers."""

    def mark(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter()

    def stretches(self, marks: list[float]) -> list[float]:
        """Their differences."""
        return [after - before for before, after in itertools.pairwise(marks)]


class Events:
    """CUDA's events.

    Before each call the L2 cache is overwritten, and the GPU kept busy while the host gives it all there is
    to do, so that launches do not count: a training step's are hidden so.
    """

    AHEAD = 4_000_000
    """Cycles that the GPU idles: about 2 ms, more than the launches of a layer's two passes take."""

    def __init__(self) -> None:
        import torch

        size = 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._cache = torch.empty(size, dtype=torch.int8, device="cuda")

    def begin(self) -> None:
        """Empty the L2 cache, then idle."""
        import torch

        self._cache.zero_()
        torch.cuda._sleep(self.AHEAD)

    def mark(self) -> Any:
        """An event on the current stream."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stretches(self, marks: list[Any]) -> list[float]:
        """Seconds between events, once the last has come to pass."""
        marks[-1].synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(marks)]


def stretches(
    work: Mapping[Any, Callable[[Callable[[], None]], None]], rounds: int, clock: Clock, least: float = 0.0
) -> dict[Any, list[float]]:
    """Median seconds of each stretch of each call, which calls its argument at the ends of its stretches; in
    turn within each round.

    The first calls do not count. In a round short ones are repeated for `least` seconds, a hundred times at
    most.
    """
    for call in work.values():  # compiles, allocates
        _stretches(call, clock)
    repeats = {
        name: min(100, math.ceil(least / sum(_stretches(call, clock)))) if least else 1
        for name, call in work.items()
    }
    seen: dict[Any, list[list[float]]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, call in work.items():
            seen[name] += (_stretches(call, clock) for _ in range(repeats[name]))
    return {
        name: [statistics.median(column) for column in zip(*lines, strict=True)]
        for name, lines in seen.items()
    }


def _stretches(call: Callable[[Callable[[], None]], None], clock: Clock) -> list[float]:
    marks: list[Any] = []
    clock.begin()
    call(lambda: marks.append(clock.mark()))
    return clock.stretches(marks)


def joules(call: Callable[[], Any]) -> float | None:
    """Return the energy of a call in joules by the processor package's counter; None without one (Intel's
    RAPL, readable by root alone).
    """
    counter = _ENERGY / "energy_uj"
    if not os.access(counter, os.R_OK):
        return None
    before = int(counter.read_text())
    call()
    wrap = int((_ENERGY / "max_energy_range_uj").read_text())
    return (int(counter.read_text()) - before) % wrap / 1e6


def profile(call: Callable[[], Any], trace: Path | None = None) -> dict[str, float]:
    """Of one call: the share of its time in each of GROUPS and the `rest`, and the peak of its tensors' bytes
    above those before it.

    `trace`: where to write what chrome://tracing and Perfetto show.
    """
    import torch.profiler

    with _named_quantisers(), torch.profiler.profile(activities=_activities(), profile_memory=True) as seen:
        call()
    if trace:
        seen.export_chrome_trace(str(trace))
    spent = dict.fromkeys((*GROUPS, "rest"), 0.0)
    for event in seen.key_averages():
        group = next((name for name, heads in GROUPS.items() if event.key.startswith(heads)), "rest")
        spent[group] += event.self_cpu_time_total if group != "quantisers" else event.cpu_time_total
    inner = spent["quantisers"] - sum(
        e.self_cpu_time_total for e in seen.key_averages() if e.key.startswith("quantise")
    )
    spent["rest"] = max(0.0, spent["rest"] - inner)
    whole = sum(spent.values())
    return {name: value / whole for name, value in spent.items()} | {
        "peak": float(max(_levels(seen), default=0))
    }


def _activities() -> list[Any]:
    import torch
    from torch.profiler import ProfilerActivity

    return [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_initialized() else [])


@contextmanager
def _named_quantisers() -> Iterator[None]:
    """Quantisers under a name that the profiler shows: what runs in them is no operator of torch's."""
    import torch

    from ablate.engines import emulated_layer

    before = emulated_layer.quantize

    def named(*given: Any, **options: Any) -> Any:
        with torch.profiler.record_function("quantise"):
            return before(*given, **options)

    emulated_layer.quantize = named
    try:
        yield
    finally:
        emulated_layer.quantize = before


def _levels(seen: Any) -> Iterator[int]:
    """Bytes of tensors above those at the start, after each allocation."""
    level = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            level += event.nbytes()
            yield level
