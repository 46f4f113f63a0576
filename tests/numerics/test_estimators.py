"""The gradient of the forward cast, where it is estimated: one factor for every element, over the registry."""

import math

import numpy as np
import pytest
import torch
from oracles import grids

from ablate.numerics.estimators import ESTIMATORS, slope
from ablate.numerics.formats import ELEMENTS
from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.spec import BlockScale, Dge, Hadamard, Outer, Quant, Range

NAMED = {"clip_mask": "clip_mask", "dge": Dge()}
"""Spelling of each entry of ESTIMATORS; a new one needs a line."""


def operand(scaled: torch.Tensor, estimator, element: str = "e2m1") -> Operand:
    return Operand(scaled, Quant(element=element, estimator=estimator), scaled=scaled)


def test_every_estimator_is_tried_here():
    assert NAMED.keys() == ESTIMATORS.keys()


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("name", ESTIMATORS)
class TestEstimators:
    """Promises of every estimator on every element format."""

    def test_it_is_a_finite_factor_not_below_zero_for_every_element(self, name, element):
        top = ELEMENTS[element].max
        points = torch.from_numpy(grids.named(element)).float()
        scaled = torch.cat(
            (torch.linspace(-2 * top, 2 * top, 1001), points, (points[1:] + points[:-1]) / 2)
        ).view(1, -1)
        factor = slope(operand(scaled, NAMED[name], element))
        assert factor.shape == scaled.shape
        assert factor.dtype == torch.float32
        assert factor.isfinite().all()
        assert (factor >= 0).all()

    def test_it_is_symmetric_and_stops_what_saturates(self, name, element):
        top = ELEMENTS[element].max
        scaled = torch.linspace(0, 1.5 * top, 1001).view(1, -1)
        factor = slope(operand(scaled, NAMED[name], element))
        assert torch.equal(slope(operand(-scaled, NAMED[name], element)), factor)
        assert factor[scaled > top].eq(0).all()
        assert factor[(scaled > 0) & (scaled < top)].gt(0).all()

    def test_it_leaves_the_operand_alone(self, name, element):
        scaled = torch.linspace(-9, 9, 64).view(4, 16)
        before = scaled.clone()
        slope(operand(scaled, NAMED[name], element))
        assert torch.equal(scaled, before)


def test_the_clip_mask_is_one_strictly_inside_the_grid():
    scaled = torch.tensor([[0.0, -5.999, 5.999, 6.0, -6.0, 6.001, 1e30]])
    assert slope(operand(scaled, "clip_mask")).tolist() == [[1, 1, 1, 0, 0, 0, 0]]


def test_the_clip_mask_of_a_clipping_statistic_is_zero_where_the_cast_saturated(generator):
    # Quartet's forward: 1x32 blocks, 2.92 standard deviations at the top, powers of two rounded down.
    scale = BlockScale(format="e8m0", rounding="floor")
    quant = Quant(
        block="1x32", scale=scale, outer=None, range=Range(statistic="std:2.92247856"), estimator="clip_mask"
    )
    x = torch.randn(64, 64, generator=generator)
    result = quantize(x, quant, keep=True, rotation=Hadamard(size=32, signs="none"))
    mask = slope(result)
    assert torch.equal(mask == 0, result.scaled.abs() >= 6)
    assert 0 < (mask == 0).double().mean() < 0.1
    assert result.codes[mask == 0].abs().eq(6).all()


@pytest.mark.parametrize(("k", "clip"), [(5.0, 3.0), (1.0, 3.0), (10.0, 2.0), (5.0, 1e6)])
def test_the_differentiable_estimator_is_its_papers_formula(k, clip):
    # arXiv 2501.17116: f'(t) = min(|2t/d - 1|^(1/k - 1) / k, clip), t the distance from the lower of the two neighbours, d apart.
    points = grids.named("e2m1")
    y = np.linspace(0.01, 5.99, 997)
    lower = points[np.searchsorted(points, y, side="right") - 1]
    upper = points[np.searchsorted(points, y, side="right")]
    expected = np.minimum(np.abs(2 * (y - lower) / (upper - lower) - 1) ** (1 / k - 1) / k, clip)
    mine = slope(operand(torch.from_numpy(y).float().view(1, -1), Dge(k=k, clip=clip)))
    # The power -4/5 of a difference near 0 amplifies fp32's rounding of y.
    np.testing.assert_allclose(mine.numpy()[0], expected, rtol=1e-3)


def test_the_differentiable_estimator_integrates_to_one_step_between_two_neighbours():
    # Unclipped, the slope is the derivative of a curve from one grid point to the next: its mean over the interval is 1.
    for low, high in zip(grids.named("e2m1")[:-1], grids.named("e2m1")[1:], strict=True):
        t = (np.arange(200_000) + 0.5) / 200_000
        y = torch.from_numpy(low + t * (high - low)).float().view(1, -1)
        mean = slope(operand(y, Dge(k=2.0, clip=1e6))).double().mean().item()
        assert mean == pytest.approx(1, rel=5e-3)  # an integrable pole in the middle, sampled


def test_it_peaks_halfway_and_is_one_over_k_at_a_grid_point():
    for k in (2.0, 5.0):
        at = slope(operand(torch.tensor([[0.25, 2.5, 5.0, 0.0, 2.0, 6.0]]), Dge(k=k)))
        assert at.tolist() == [[3, 3, 3, *[pytest.approx(1 / k)] * 3]]
    assert math.isclose(slope(operand(torch.tensor([[0.3]]), Dge(k=1.0))).item(), 1)


def test_the_scaled_elements_are_those_that_were_rounded(generator):
    quant = Quant(
        element="e2m1", block=None, scale=None, outer=Outer(granularity="row", bound=1.0), estimator=Dge()
    )
    x = torch.randn(8, 32, generator=generator)
    result = quantize(x, quant, keep=True)
    np.testing.assert_allclose(
        result.scaled.numpy(), (x * 6 / x.abs().amax(1, keepdim=True)).numpy(), rtol=1e-6
    )
    assert slope(result).shape == x.shape
