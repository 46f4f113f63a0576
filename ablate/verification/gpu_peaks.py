"""Peak speeds of GPUs by format, and the fraction of the peak that a measured time reaches. Imports no torch.

Each entry names its NVIDIA document. The figures were taken from pages that cite these documents. The pages
agree except for GB200 (some have 2,250, 4,500 and 9,000) and the FP4 of B300 (13,125 to 15,000). Check the
datasheet before publishing a fraction of the peak.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

Peaks = Mapping[str, float]
"""FLOP/s by format (bf16, fp8, fp4); a missing format is unknown, or not supported by the GPU."""


class Gpu(NamedTuple):
    """Dense peaks of one kind of GPU in TFLOP/s, accumulated in fp32; None for a format that it lacks."""

    pattern: str
    """Pattern for the end of the driver's name of the GPU."""
    bf16: float
    fp8: float | None
    fp4: float | None
    source: str

    @property
    def peaks(self) -> Peaks:
        peaks = {"bf16": self.bf16, "fp8": self.fp8, "fp4": self.fp4}
        return {name: 1e12 * peak for name, peak in peaks.items() if peak is not None}


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
"""Known GPUs. NVIDIA's figures for most of them assume structured sparsity, which training does not use; they
are halved here. The two GeForce cards accumulate FP8 products in fp32 at half the rate of fp16, so they have
the lower figure."""


def known(name: str) -> Gpu | None:
    """Return the GPU with a driver's name, such as `NVIDIA H100 80GB HBM3`; None if it is not in the table,
    or is a slice of a GPU (MIG)."""
    bare = name.removeprefix("NVIDIA ").removeprefix("GeForce ").strip()
    return next((gpu for gpu in GPUS if re.fullmatch(gpu.pattern, bare) and "MIG" not in bare), None)


def share(flops: Mapping[str, float], seconds: float, peaks: Peaks) -> float | None:
    """Return the fraction of the peak: ideal seconds for these FLOPs, by format, over the measured seconds.
    None if the peak of one of the formats is unknown."""
    if any(name not in peaks for name in flops):
        return None
    return sum(count / peaks[name] for name, count in flops.items()) / seconds
