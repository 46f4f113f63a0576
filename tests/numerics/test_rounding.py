"""Roundings, over the registry, against a search through the enumerated grid."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import grids

from ablate.numerics.formats import ELEMENTS
from ablate.numerics.rounding import ROUNDINGS, nearest, stochastic

FLOATS = st.floats(-1e6, 1e6, width=32)
FRACTIONS = (0.0, 1 / 512, 1 / 256, 0.1, 1 / 3, 0.5, 0.7, 255 / 256, 511 / 512)


def grid(element: str) -> np.ndarray:
    return grids.magnitudes(ELEMENTS[element].mantissa, ELEMENTS[element].emin, ELEMENTS[element].max)


def test_e2m1_is_the_grid_of_the_specification():
    np.testing.assert_array_equal(grid("e2m1"), [0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("element", ELEMENTS)
@given(value=FLOATS, bits=st.integers(0, 255))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_value_goes_to_one_of_its_two_neighbours(rounding, element, value, bits):
    y = ROUNDINGS[rounding](torch.tensor([value]), ELEMENTS[element], torch.tensor([float(bits)]), 8).item()
    assert abs(y) in grids.neighbours(value, grid(element))
    assert y == 0 or math.copysign(1, y) == math.copysign(1, value)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("element", ELEMENTS)
def test_a_grid_value_stays(rounding, element):
    y = torch.from_numpy(np.concatenate((grid(element), -grid(element)))).float()
    for bits in (0.0, 128.0, 255.0):
        assert torch.equal(ROUNDINGS[rounding](y, ELEMENTS[element], torch.full_like(y, bits), 8), y)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("element", ELEMENTS)
def test_a_rounding_leaves_its_input_alone(rounding, element, generator):
    y = torch.randn(64, generator=generator)
    before = y.clone()
    ROUNDINGS[rounding](y, ELEMENTS[element], torch.zeros(64), 8)
    assert torch.equal(y, before)


@pytest.mark.parametrize("element", ELEMENTS)
def test_nearest_is_nearest_with_ties_to_the_even_code(element, generator):
    points = grid(element)
    halfway = (points[1:] + points[:-1]) / 2
    above, below = (
        np.nextafter(halfway.astype(np.float32), np.float32(np.inf)),
        np.nextafter(halfway.astype(np.float32), np.float32(0)),
    )
    y = torch.cat([*map(torch.from_numpy, (halfway, above, below)), 4 * torch.randn(4096, generator=generator)]).float()
    y = torch.cat((y, -y))
    np.testing.assert_array_equal(nearest(y, ELEMENTS[element]).numpy(), grids.nearest(y.numpy(), points))


def test_e2m1_ties_are_those_of_the_specification():
    y = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.1, 1e30])
    assert nearest(y, ELEMENTS["e2m1"]).tolist() == [0, 1, 1, 2, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("element", ELEMENTS)
def test_eight_bits_round_up_exactly_floor_256_f_times_of_256(element, fraction, sign):
    every = torch.arange(256.0)
    for low, high in zip(grid(element)[:-1], grid(element)[1:], strict=True):
        y = np.float32(low + fraction * (high - low))
        exact = (float(y) - low) / (high - low)  # the fraction that fp32 holds: a dyadic step makes this exact
        rounded = sign * stochastic(torch.full((256,), sign * float(y)), ELEMENTS[element], every, 8)
        assert (rounded == high).sum() == math.floor(256 * exact)
        assert ((rounded == high) | (rounded == low)).all()


@pytest.mark.parametrize("width", [16, 24])
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_wider_draws_round_up_below_the_threshold_floor_2_to_the_width_times_f(fraction, width):
    y = np.float32(2 + fraction)  # between 2 and 3
    threshold = math.floor(2**width * (float(y) - 2))
    bits = [b for b in (0, threshold - 2, threshold - 1, threshold, threshold + 1, 2**width - 1) if 0 <= b < 2**width]
    rounded = stochastic(torch.full((len(bits),), float(y)), ELEMENTS["e2m1"], torch.tensor(bits).float(), width)
    assert rounded.tolist() == [3.0 if b < threshold else 2.0 for b in bits]


@pytest.mark.parametrize("element", ELEMENTS)
def test_stochastic_rounding_saturates_beyond_the_largest_magnitude(element):
    top = ELEMENTS[element].max
    y = torch.tensor([top * 1.01, -top * 1.01, 1e30, -1e30])
    assert stochastic(y, ELEMENTS[element], torch.zeros(4), 8).tolist() == [top, -top, top, -top]
