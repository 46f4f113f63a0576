"""Estimated time of a transformer block's training step on GPUs, by preset: never measured.

    python benchmarks/gpu_estimates.py          # the table of docs/benchmarks.md

A kernel takes the longest of three: its bytes at the memory's speed, its instructions at the speed at which
they are issued, its multiplications at the peak of the tensor cores (fp32: of the other cores). A block takes
the sum over its kernels, plus a fixed time for each launch. `before` is the estimate without instructions and
launches. All are lower bounds: no kernel reaches these peaks.

gpu_counts.csv: launches, bytes read and written, elements and FLOPs of one more block of a gpt of width 2048
in a step of 8,192 tokens, by kernel, optimizer included. Counted where torch sees an imaginary GPU and runs
on FakeTensors, as the difference of two models. Attention and RMSNorm are counted as the fused kernels that
CUDA builds have. `waits` are waits for the device, which the estimate leaves out; so are instructions of
torch's own kernels. gpu_instructions.csv: from gpu_instructions.py.
"""

import csv
from pathlib import Path
from typing import NamedTuple

from ablate.verification.gpu_peaks import known

HERE = Path(__file__).parent
LAUNCH = 2e-6
"""Seconds between the end of a kernel and the start of the next: an assumption."""


class Card(NamedTuple):
    """Speeds of a GPU beside those of gpu_peaks.py, from the same documents."""

    driver_name: str
    capability: str
    """Column of gpu_instructions.csv."""
    bandwidth: float
    """Bytes per second of its memory."""
    fp32: float
    """FLOP/s in fp32 without tensor cores. Half of it is the number of instructions per second, counted per
    thread: integer instructions are taken to be as fast."""


CARDS = {
    "H100": Card("NVIDIA H100 80GB HBM3", "sm_90", 3.35e12, 66.9e12),
    "B200": Card("NVIDIA B200", "sm_100", 8e12, 75e12),
    "RTX 5090": Card("NVIDIA GeForce RTX 5090", "sm_120", 1.792e12, 104.8e12),
}


class Kernel(NamedTuple):
    """Kernel of a preset's block, with the sums over its launches."""

    name: str
    launches: int
    bytes: int
    elements: int
    flops: int


def counts() -> dict[str, list[Kernel]]:
    """Return the kernels of a block, by preset."""
    kernels: dict[str, list[Kernel]] = {}
    with (HERE / "gpu_counts.csv").open() as file:
        for row in csv.DictReader(file):
            numbers = (int(row[name]) for name in ("launches", "bytes", "elements", "flops"))
            kernels.setdefault(row["preset"], []).append(Kernel(row["kernel"], *numbers))
    return kernels


def instructions() -> dict[str, dict[str, float]]:
    """Return instructions per element, by kernel and capability."""
    with (HERE / "gpu_instructions.csv").open() as file:
        return {
            row["kernel"]: {name: float(value) for name, value in row.items() if name != "kernel"}
            for row in csv.DictReader(file)
        }


def form_of(kernel: str) -> str | None:
    """Return the row of gpu_instructions.csv for a kernel of gpu_counts.csv; None for torch's."""
    if not kernel.startswith("triton "):
        return None
    form = kernel.removeprefix("triton ")
    return form.replace(" stochastic first stochastic", "") if form.startswith("by_both") else form


class Estimate(NamedTuple):
    """Seconds of a block's step."""

    before: float
    """Longest of bytes and multiplications, kernel by kernel."""
    now: float
    """With instructions, and with launches."""
    launches: int
    bytes: int
    waits: int


def estimate(kernels: list[Kernel], card: Card, issued: dict[str, dict[str, float]]) -> Estimate:
    """Return the estimated time of a block on a card.

    Args:
        kernels: kernels of the block.
        card: the GPU.
        issued: instructions per element, by kernel and capability.

    Raises:
        KeyError: there is no count of instructions for one of our kernels.
    """
    gpu = known(card.driver_name)
    assert gpu is not None, card.driver_name
    before = now = 0.0
    launches = moved = waits = 0
    for kernel in kernels:
        if kernel.name == "waits":
            waits = kernel.launches
            continue
        speed = card.fp32 if kernel.name.startswith("product float32") else gpu.peaks["bf16"]
        longest = max(kernel.bytes / card.bandwidth, kernel.flops / speed)
        form = form_of(kernel.name)
        each = issued[form][card.capability] if form else 0.0
        before += longest
        now += max(longest, kernel.elements * each / (card.fp32 / 2)) + kernel.launches * LAUNCH
        launches += kernel.launches
        moved += kernel.bytes
    return Estimate(before, now, launches, moved, waits)


def tables() -> list[str]:
    """Return the lines of two tables in Markdown: work of a block and H100; B200 and RTX 5090."""
    issued, kernels = instructions(), counts()
    base = {name: estimate(kernels["bf16"], card, issued) for name, card in CARDS.items()}
    lines: list[str] = []
    for part in (("H100",), ("B200", "RTX 5090")):
        heads = [] if lines else ["launches", "GB", "waits"]
        heads += [f"{card}, {what}" for card in part for what in ("before, ms", "ms", "of bf16")]
        lines += [""] if lines else []
        lines += [f"| preset | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
        for preset, mine in kernels.items():
            cells = [f"`{preset}`"]
            for card in part:
                one = estimate(mine, CARDS[card], issued)
                if card == "H100":
                    cells += [f"{one.launches:,}", f"{one.bytes / 1e9:.1f}", str(one.waits)]
                cells += [
                    f"{1000 * one.before:.1f}",
                    f"{1000 * one.now:.1f}",
                    f"{one.now / base[card].now:.2f}",
                ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    print(*tables(), sep="\n")
