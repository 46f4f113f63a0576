"""What known GPUs multiply at most, by format, and what share of that a measured time is. Torch-free.

Each entry names the document of NVIDIA's that prints it. Those were read through pages that cite them, which
agree but for GB200 (some say 2,250, 4,500 and 9,000) and the FP4 of B300 (13,125 to 15,000): a figure of
yours that matters deserves a look at the datasheet.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

Peaks = Mapping[str, float]
"""FLOP/s by format (bf16, fp8, fp4): a format that is not there is not known, or not multiplied."""


class Gpu(NamedTuple):
    """Dense peaks of one kind of GPU in TFLOP/s, accumulated in fp32; None: its tensor cores have not that
    format.
    """

    pattern: str
    """Pattern for the end of the driver's name of the GPU."""
    bf16: float
    fp8: float | None
    fp4: float | None
    source: str

    @property
    def peaks(self) -> Peaks:
        """FLOP/s by format."""
        return {
            name: 1e12 * peak for name in ("bf16", "fp8", "fp4") if (peak := getattr(self, name)) is not None
        }


GPUS = (
    Gpu(r"GB300", 2500, 5000, 15000, "GB300 NVL72 datasheet, over 72 GPUs"),
    Gpu(r"B300( SXM\d)?( AC)?", 2250, 4500, 13500, "HGX B300 datasheet, over 8 GPUs"),
    Gpu(r"GB200", 2500, 5000, 10000, "Blackwell architecture brief, GB200"),
    Gpu(r"B200", 2250, 4500, 9000, "Blackwell architecture brief, HGX B200"),
    Gpu(r"H200 NVL", 835.5, 1670.5, None, "H200 datasheet, NVL"),
    Gpu(r"H200", 989.5, 1979, None, "H200 datasheet, SXM"),
    Gpu(r"H100 NVL", 835.5, 1670.5, None, "H100 datasheet, NVL"),
    Gpu(r"H100 PCIe", 756, 1513, None, "H100 datasheet, PCIe"),
    Gpu(r"H100 (SXM5|80GB HBM3)", 989.5, 1979, None, "H100 datasheet, SXM"),
    Gpu(r"RTX 5090", 209.5, 419, 1676, "RTX Blackwell GPU architecture whitepaper"),
    Gpu(r"RTX 4090", 165.2, 330.3, None, "Ada GPU architecture whitepaper"),
    Gpu(r"L40S", 362.05, 733, None, "L40S datasheet"),
    Gpu(r"L40", 181.05, 362, None, "L40 datasheet"),
    Gpu(r"A100[- ].*", 312, None, None, "A100 datasheet"),
)
"""NVIDIA prints twice as much for most of them, with structured sparsity, which a training product has not:
halved here. The two GeForce cards add FP8 products in fp32 at half the rate of fp16, so theirs is the lower
figure."""


def known(name: str) -> Gpu | None:
    """The GPU of a driver's name, such as `NVIDIA H100 80GB HBM3`; None of one that is not in the table, and
    of a slice of one (MIG).
    """
    bare = name.removeprefix("NVIDIA ").removeprefix("GeForce ").strip()
    return next((gpu for gpu in GPUS if re.fullmatch(gpu.pattern, bare) and "MIG" not in bare), None)


def share(flops: Mapping[str, float], seconds: float, peaks: Peaks) -> float | None:
    """What part of the peak a time is: the seconds that these FLOPs, by format, would take at their peaks,
    over those that they took.

    None where the peak of one of the formats is not known.
    """
    if any(name not in peaks for name in flops):
        return None
    return sum(count / peaks[name] for name, count in flops.items()) / seconds
