"""The estimated time of a block on GPUs: its arithmetic, and that the tables which it reads are complete."""

import csv
import io
import subprocess
import sys
from pathlib import Path

import pytest
from support.imaginary_gpu import why_not

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_estimates
from gpu_estimates import CARDS, LAUNCH, Kernel

from ablate.recipes import PRESETS

ROOT = Path(__file__).parents[2]


def test_a_kernel_takes_the_longest_of_bytes_instructions_and_multiplications():
    """Each of these is bound by another; the figures are worked out by hand for the H100."""
    issued = {("rows, nearest", "sm_90a"): 30.0}
    kernels = [
        Kernel("other", 1, 3_350_000_000, 0, 0),  # 1 ms of 3.35 TB/s
        Kernel("rows, nearest", 2, 1000, 2_230_000_000, 0),  # 66.9e9 of 33.45e12 instructions: 2 ms
        Kernel("product bfloat16 1x1x1", 1, 1000, 0, 2_968_500_000_000),  # 3 ms of 989.5 TFLOP/s
        Kernel("product float32 1x1x1", 1, 1000, 0, 267_600_000_000),  # 4 ms of 66.9 TFLOP/s
        Kernel("waits", 7, 0, 0, 0),
    ]
    one = gpu_estimates.estimate(kernels, CARDS["H100"], issued)
    assert one.seconds == pytest.approx(0.010 + 5 * LAUNCH, rel=1e-9)
    assert (one.launches, one.waits, one.bytes) == (5, 7, 3_350_003_000)


def test_a_kernel_of_unknown_instructions_is_refused():
    with pytest.raises(KeyError):
        gpu_estimates.estimate([Kernel("rows, nearest", 1, 1, 1, 0)], CARDS["H100"], {})


def test_every_preset_is_counted_and_every_kernel_has_its_instructions():
    kernels, issued = gpu_estimates.counts(), gpu_estimates.instructions()
    assert kernels.keys() == PRESETS.keys()
    for mine in kernels.values():
        for card in CARDS.values():
            assert gpu_estimates.estimate(mine, card, issued).seconds > 0
    flops = {name: sum(one.flops for one in mine) for name, mine in kernels.items()}
    assert flops["nvfp4"] == flops["bf16"]  # the same products, quantised


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "an imaginary GPU can be plugged in")
@pytest.mark.slow
def test_the_counts_of_nvfp4_are_those_of_the_code():
    """A change of what a step asks of the device needs new counts, and new estimates on the page."""
    pytest.importorskip("triton")
    program = ROOT / "benchmarks" / "gpu_counts.py"
    done = subprocess.run(
        [sys.executable, program, "nvfp4"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    with program.with_suffix(".csv").open() as file:
        committed = [row for row in csv.DictReader(file) if row["preset"] == "nvfp4"]
    assert list(csv.DictReader(io.StringIO(done.stdout))) == committed


def test_the_error_of_the_estimates_is_that_of_the_measured_steps():
    steps, multiples = gpu_estimates.error("ms"), gpu_estimates.error("of bf16")
    assert (steps.number, multiples.number) == (4, 13)
    product = (35.7 / 20.6) * (52.0 / 26.6) * (39.7 / 24.8) * (56.8 / 31.7)
    assert steps.factor == pytest.approx(product**0.25)
    assert steps.most == pytest.approx(52.0 / 26.6 / steps.factor)
    assert multiples.least == pytest.approx(3.35 / 5.01 / multiples.factor)


def test_the_page_has_lines_that_the_program_prints():
    """The page has the head, the lines of some presets, and the error of the estimate."""
    page = (ROOT / "docs" / "project" / "benchmarks.md").read_text()
    head, *printed = gpu_estimates.table()
    assert all(sentence in " ".join(page.split()) for sentence in gpu_estimates.errors())
    written = page.partition(f"{head}\n")[2].partition("\n\n")[0].splitlines()
    assert len(written) > 5
    assert written == [line for line in printed if line in written]
