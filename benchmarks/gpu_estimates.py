"""Estimated time of a transformer block's training step on GPUs, by preset, and the error of the estimate.

    python benchmarks/gpu_estimates.py          # the table of docs/project/benchmarks.md

A kernel takes the longest of three: its bytes at the memory's speed, its instructions at the speed at which
they are issued, its multiplications at the peak of the tensor cores (fp32: of the other cores). A block takes
the sum over its kernels, plus a fixed time for each launch. That is a lower bound: no kernel reaches these
peaks. Steps that were measured take longer by one factor, which the times of the table contain.

gpu_measured.csv has the steps of 2026-11-26 and 27, measured and estimated: the lower bound from the counts
of 2026-11-24, which are those of the code that ran. Whole steps are in ms. What is given as a multiple of
bf16 has other sizes, and the estimate is that of a block; of the two blocks of four_over_six, one is in bf16.

gpu_counts.csv has the kernels of one more block of a gpt of width 2048 in a step of 8,192 tokens, by
gpu_counts.py, and kernel_code.json the instructions of ours, by kernel_code.py. The estimate leaves out waits
for the device and the instructions of torch's own kernels.
"""

import csv
import json
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

from ablate.verification.gpu_peaks import known

HERE = Path(__file__).parent
LAUNCH = 2e-6
"""Seconds between the end of a kernel and the start of the next: an assumption."""


class Card(NamedTuple):
    """Speeds of a GPU beside those of gpu_peaks.py, from the same documents."""

    driver_name: str
    target: str
    """Compute capability, as in kernel_code.json."""
    bandwidth: float
    """Bytes per second of its memory."""
    fp32: float
    """FLOP/s in fp32 without tensor cores. Half of it is the number of instructions per second, counted per
    thread: integer instructions are taken to be as fast."""


CARDS = {
    "H100": Card("NVIDIA H100 80GB HBM3", "sm_90a", 3.35e12, 66.9e12),
    "B200": Card("NVIDIA B200", "sm_100a", 8e12, 75e12),
    "RTX 5090": Card("NVIDIA GeForce RTX 5090", "sm_120a", 1.792e12, 104.8e12),
}


class Kernel(NamedTuple):
    """Kernel of a preset's block, with the sums over its launches."""

    name: str
    launches: int
    bytes: int
    elements: int
    """0: the kernel is torch's, and has no row in kernel_code.json."""
    flops: int


def counts() -> dict[str, list[Kernel]]:
    """Return the kernels of a block, by preset."""
    kernels: dict[str, list[Kernel]] = {}
    with (HERE / "gpu_counts.csv").open() as file:
        for row in csv.DictReader(file):
            numbers = (int(row[name]) for name in ("launches", "bytes", "elements", "flops"))
            kernels.setdefault(row["preset"], []).append(Kernel(row["kernel"], *numbers))
    return kernels


def instructions() -> dict[tuple[str, str], float]:
    """Return instructions per element, by kernel and target."""
    rows = json.loads((HERE / "kernel_code.json").read_text())
    return {(row["kernel"], row["target"]): row["instructions per element"] for row in rows}


class Error(NamedTuple):
    """Error of estimates that were measured."""

    number: int
    factor: float
    """Geometric mean of measured by estimated."""
    least: float
    """Smallest and largest of measured by estimated, by this factor."""
    most: float


def error(unit: str) -> Error:
    """Return the error of the estimates of whole steps, in `ms`, or of multiples, `of bf16`."""
    with (HERE / "gpu_measured.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["unit"] == unit]
    ratios = [float(row["measured"]) / float(row["estimated"]) for row in rows]
    factor = geometric_mean(ratios)
    return Error(len(rows), factor, min(ratios) / factor, max(ratios) / factor)


class Estimate(NamedTuple):
    """Work of a block's step, and its time."""

    seconds: float
    launches: int
    bytes: int
    waits: int


def estimate(kernels: list[Kernel], card: Card, issued: dict[tuple[str, str], float]) -> Estimate:
    """Return the estimated time of a block on a card.

    Args:
        kernels: kernels of the block.
        card: the GPU.
        issued: instructions per element, by kernel and target.

    Raises:
        KeyError: there is no count of instructions for one of our kernels.
    """
    gpu = known(card.driver_name)
    assert gpu is not None, card.driver_name
    seconds = 0.0
    launches = moved = waits = 0
    for kernel in kernels:
        if kernel.name == "waits":
            waits = kernel.launches
            continue
        speed = card.fp32 if kernel.name.startswith("product float32") else gpu.peaks["bf16"]
        each = issued[kernel.name, card.target] if kernel.elements else 0.0
        issuing = kernel.elements * each / (card.fp32 / 2)
        seconds += max(kernel.bytes / card.bandwidth, kernel.flops / speed, issuing)
        seconds += kernel.launches * LAUNCH
        launches += kernel.launches
        moved += kernel.bytes
    return Estimate(seconds, launches, moved, waits)


def table() -> list[str]:
    """Return the lines of a table in Markdown: work of a block, and its time in milliseconds, with the factor
    of the steps that were measured. Presets with equal figures share a row."""
    issued, kernels, factor = instructions(), counts(), error("ms").factor
    heads = ["preset", "launches (waits)", "GB", *(f"{name}, ms" for name in CARDS)]
    rows: dict[tuple[str, ...], list[str]] = {}
    for preset, mine in kernels.items():
        ones = {name: estimate(mine, card, issued) for name, card in CARDS.items()}
        work = ones["H100"]
        waits = f" ({work.waits})" if work.waits else ""
        times = [f"{1000 * factor * one.seconds:.1f}" for one in ones.values()]
        row = f"{work.launches:,}{waits}", f"{work.bytes / 1e9:.1f}", *times
        rows.setdefault(row, []).append(f"`{preset}`")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return lines + [f"| {', '.join(presets)} | {' | '.join(row)} |" for row, presets in rows.items()]


def errors() -> list[str]:
    """Return sentences on the error of the estimates that were measured."""
    steps, multiples = error("ms"), error("of bf16")
    return [
        f"{steps.number} whole steps took {steps.factor:.2f} times the lower bound,"
        f" each {steps.least:.2f} to {steps.most:.2f} times that.",
        f"{multiples.number} multiples of bf16 were {multiples.factor:.2f} times the estimated ones,"
        f" each {multiples.least:.2f} to {multiples.most:.2f} times that.",
    ]


if __name__ == "__main__":
    print(*table(), "", *errors(), sep="\n")
