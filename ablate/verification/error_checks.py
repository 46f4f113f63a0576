"""Checks of `ablate doctor` on quantisation error: squared errors on normal data, and the error of a mean of
stochastic draws.

The expected values are published figures, or follow from the bias and variance of a rounding. All data are
drawn from a seed.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import BlockScale, Hadamard, Outer, Quant, Range, Select
from ablate.verification.check_result import Row, near, normal, present

ROOM = Range(headroom=17 / 16)


def mx(element: str, rounding: str) -> Quant:
    """Return an MX quantiser: 1x32 blocks with power-of-two scales, and no outer scale. `rounding` is OCP's
    `floor`, which maps the power of two at or below a block's amax to the element's largest power of two, or
    `ceil`, which never saturates."""
    top = ELEMENTS[element].top_power if rounding == "floor" else None
    scale = BlockScale(format="e8m0", rounding=rounding)
    return Quant(element=element, block="1x32", scale=scale, range=Range(map_to=top), outer=None)


def four_over_six(criterion: str) -> Quant:
    """Return the Four Over Six quantiser; its bound of 256 leaves headroom for the smaller scale."""
    return Quant(select=Select(among="scales", criterion=criterion), outer=Outer(bound=256.0))


FIGURES = {
    "NVFP4 1x16, to nearest": (Quant(), 9.05, 0.01),
    "NVFP4 16x16, to nearest": (Quant(block="16x16"), 12.39, 0.01),
    "NVFP4, stochastic, headroom 17/16": (Quant(rounding="stochastic", range=ROOM), 23.5, 0.01),
    "NVFP4, stochastic, no headroom": (Quant(rounding="stochastic"), 18.8, 0.01),
    "MXFP4 1x32, floor": (mx("e2m1", "floor"), 13.2, 0.01),
    "MXFP4 1x32, ceil": (mx("e2m1", "ceil"), 13.3, 0.01),
    "NVINT4 1x16": (Quant(element="int4"), 7.45, 0.01),
    "Four Over Six MSE, bound 256": (four_over_six("mse"), 7.57, 0.01),
    "Four Over Six MAE, bound 256": (four_over_six("mae"), 7.80, 0.01),
    "MS-EDEN, rotated by 128": (Quant(rounding="ms_eden", outer=Outer(bound=256.0)), 9.72, 0.02),
    "the best block scale, by search": (Quant(select=Select(among="search")), 6.60, 0.03),
}
"""Quantiser, its relative mean squared error in thousandths, and the tolerance at 4 million elements."""


def relative_error(x: Tensor, estimate: Tensor) -> float:
    """Return the sum of squared errors over the sum of squares, in thousandths."""
    return 1000 * ((estimate - x).double().square().sum() / x.double().square().sum()).item()


def figures(side: int, slack: float) -> Iterator[Row]:
    """Measure the error of each quantiser on `side` x `side` normal numbers; `slack` widens the tolerance."""
    x = normal(side, side)
    for name, (quant, figure, tolerance) in FIGURES.items():
        turn = Hadamard(size=128, signs="per_step") if quant.rounding == "ms_eden" else None
        operand = quantize(x, quant, rotation=turn, clock=Clock(0), keep=turn is not None)
        error = relative_error(x if turn is None else present(operand.source), operand.dequantize())
        yield near(name, error, figure, tolerance + slack)
    operand = quantize(x, Quant(), keep=True)
    above = (present(operand.scaled).abs().view(-1, 16).amax(1) > 6).double().mean().item()
    yield near("blocks above 6 x scale, percent", 100 * above, 50.9, 0.01 + slack)


MEANS = {1: 23.4, 4: 5.87, 16: 1.47, 64: 0.367, 256: 0.092}
"""Error, in thousandths, of the mean of N independent stochastic roundings with headroom; it falls as 1/N."""


def errors_of_means(quant: Quant, x: Tensor, most: int) -> dict[int, float]:
    """Return the error of the mean of N draws, for the N of MEANS up to `most`."""
    total, errors = torch.zeros_like(x), {}
    for n in range(1, most + 1):
        total += quantize(x, quant, clock=Clock(1, step=n)).dequantize()
        if n in MEANS:
            errors[n] = relative_error(x, total / n)
    return errors


def unbiased(rows: int, most: int, tolerance: float) -> Iterator[Row]:
    """Check that stochastic rounding with headroom is unbiased: errors of means of N draws fall as 1/N."""
    x = normal(rows, 1024)
    errors = errors_of_means(Quant(rounding="stochastic", bits=24, range=ROOM), x, most)
    for n, error in errors.items():
        yield near(f"mean of {n} draws, 24 bits", error, MEANS[n], tolerance)
    slope = np.polyfit(np.log(list(errors)), np.log(list(errors.values())), 1)[0]
    yield near("slope of log error over log N", slope, -1, 0.01)


def biased() -> Iterator[Row]:
    """Measure two causes that keep a mean from converging: 8 random bits truncate, and no headroom clips."""
    x = normal(256, 1024)
    truncated = errors_of_means(Quant(rounding="stochastic", range=ROOM), x, 256)[256]
    yield near("mean of 256 draws, 8 bits", truncated, 0.092, 0.04, "truncation")
    stalled = errors_of_means(Quant(rounding="stochastic", bits=24), x, 256)[256]
    yield near("mean of 256 draws, no headroom, stalls", stalled, 0.173, 0.04, "the sample")
