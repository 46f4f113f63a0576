"""Roundings, over the registries of roundings and elements, against a search through the enumerated grid."""

import math

import numpy as np
import pytest
import torch
from oracles import grids
from support.cases import every

from ablate.numerics.formats import ELEMENTS
from ablate.numerics.rounding import ROUNDINGS, SCALE_ROUNDINGS, ceil, floor, nearest, stochastic, toward

FRACTIONS = (0.0, 1 / 512, 1 / 256, 0.1, 1 / 3, 0.5, 0.7, 255 / 256, 511 / 512)


grid = grids.named


def between(element: str) -> torch.Tensor:
    """Values of both signs on, halfway between, just beside and beyond the grid points, and Gaussian ones."""
    points = grid(element)
    halfway = ((points[1:] + points[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(halfway, np.float32(limit)) for limit in (0, np.inf)]
    drawn = torch.randn(1000, generator=torch.Generator().manual_seed(0)).numpy() * points[-1] / 2
    y = torch.from_numpy(np.concatenate((points, halfway, *beside, drawn, [points[-1] * 1.5, 3e38]))).float()
    return torch.cat((y, -y))


every_pair = every(rounding=ROUNDINGS, element=ELEMENTS)
"""Promises of every rounding on every element format."""


@every_pair
def test_a_value_goes_to_one_of_its_two_neighbours(rounding, element):
    tiny = 2.0 ** torch.linspace(-149, 0, 300)
    y = torch.cat((between(element), tiny, -tiny)).repeat(4)
    bits = torch.arange(len(y)) * 37 % 256.0
    rounded = ROUNDINGS[rounding](y, ELEMENTS[element], bits, 8)
    low, high = grids.neighbours(y.double().numpy(), grid(element))
    found = rounded.abs().double().numpy()
    assert ((found == low) | (found == high)).all()
    assert ((rounded == 0) | (rounded.signbit() == y.signbit())).all()


@every_pair
def test_a_grid_value_stays_whatever_the_bits(rounding, element):
    y = torch.from_numpy(np.concatenate((grid(element), -grid(element)))).float()
    for bits in (0.0, 128.0, 255.0):
        assert torch.equal(ROUNDINGS[rounding](y, ELEMENTS[element], torch.full_like(y, bits), 8), y)


@every_pair
def test_it_is_symmetric_and_keeps_the_sign_of_zero(rounding, element):
    y = between(element)
    bits = torch.arange(len(y)) % 256.0
    up, down = (ROUNDINGS[rounding](sign * y, ELEMENTS[element], bits, 8) for sign in (1, -1))
    assert torch.equal(up, -down)
    assert torch.equal(up.signbit(), y.signbit())


@every_pair
def test_it_is_monotone_under_equal_bits(rounding, element):
    y = between(element).sort().values
    for bits in (0.0, 77.0, 255.0):
        rounded = ROUNDINGS[rounding](y, ELEMENTS[element], torch.full_like(y, bits), 8)
        # Where bits are equal, stochastic rounding moves away from zero alike on both sides.
        assert (rounded.diff() >= 0).all()


@every_pair
def test_it_saturates_and_hides_no_nan(rounding, element):
    top = ELEMENTS[element].max
    y = torch.tensor([top * 1.01, -top * 1.01, 1e30, -math.inf, math.inf, math.nan])
    rounded = ROUNDINGS[rounding](y, ELEMENTS[element], torch.zeros(6), 8)
    assert rounded[:5].tolist() == [top, -top, top, -top, top]
    assert rounded[5].isnan()


@every_pair
def test_it_leaves_its_input_and_the_bits_alone(rounding, element):
    y, bits = between(element), torch.arange(len(between(element))) % 256.0
    before = y.clone(), bits.clone()
    ROUNDINGS[rounding](y, ELEMENTS[element], bits, 8)
    assert torch.equal(y, before[0])
    assert torch.equal(bits, before[1])


@pytest.mark.parametrize("element", ELEMENTS)
def test_nearest_is_nearest_with_ties_to_the_even_code(element, generator):
    points = grid(element)
    halfway = (points[1:] + points[:-1]) / 2
    above, below = (
        np.nextafter(halfway.astype(np.float32), np.float32(np.inf)),
        np.nextafter(halfway.astype(np.float32), np.float32(0)),
    )
    y = torch.cat(
        [*map(torch.from_numpy, (halfway, above, below)), 4 * torch.randn(4096, generator=generator)]
    ).float()
    y = torch.cat((y, -y))
    np.testing.assert_array_equal(nearest(y, ELEMENTS[element]).numpy(), grids.nearest(y.numpy(), points))


def test_e2m1_ties_are_those_of_the_specification():
    y = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.1, 1e30])
    assert nearest(y, ELEMENTS["e2m1"]).tolist() == [0, 1, 1, 2, 2, 4, 4, 6, 6]


@every(sign=[1, -1], fraction=FRACTIONS, element=ELEMENTS)
def test_eight_bits_round_up_exactly_floor_256_f_times_of_256(element, fraction, sign):
    every = torch.arange(256.0)
    for low, high in zip(grid(element)[:-1], grid(element)[1:], strict=True):
        y = np.float32(low + fraction * (high - low))
        exact = (float(y) - low) / (
            high - low
        )  # the fraction that fp32 holds: a dyadic step makes this exact
        rounded = sign * stochastic(torch.full((256,), sign * float(y)), ELEMENTS[element], every, 8)
        assert (rounded == high).sum() == math.floor(256 * exact)
        assert ((rounded == high) | (rounded == low)).all()


@every(width=[16, 24], fraction=FRACTIONS)
def test_wider_draws_round_up_below_the_threshold_floor_2_to_the_width_times_f(fraction, width):
    y = np.float32(2 + fraction)  # between 2 and 3
    threshold = math.floor(2**width * (float(y) - 2))
    bits = [
        b
        for b in (0, threshold - 2, threshold - 1, threshold, threshold + 1, 2**width - 1)
        if 0 <= b < 2**width
    ]
    rounded = stochastic(
        torch.full((len(bits),), float(y)), ELEMENTS["e2m1"], torch.tensor(bits).float(), width
    )
    assert rounded.tolist() == [3.0 if b < threshold else 2.0 for b in bits]


@pytest.mark.parametrize("element", ELEMENTS)
def test_the_mean_of_every_draw_of_bits_is_the_value_cut_to_so_many_bits(element):
    y = between(element)
    y = y[y.abs() <= ELEMENTS[element].max]
    total = sum(stochastic(y, ELEMENTS[element], torch.full_like(y, bits), 8).double() for bits in range(256))
    step = ELEMENTS[element].step(y).double()
    cut = (y.double() / step * 256).trunc() / 256 * step
    torch.testing.assert_close(total / 256, cut, rtol=1e-12, atol=0)


@pytest.mark.parametrize("element", ELEMENTS)
def test_floor_and_ceil_are_the_two_neighbours(element):
    y = between(element).abs()
    y = y[y <= ELEMENTS[element].max]
    expected = np.array([grids.neighbours(value, grid(element)) for value in y.double().tolist()])
    np.testing.assert_array_equal(floor(y, ELEMENTS[element]).numpy(), expected[:, 0])
    np.testing.assert_array_equal(ceil(y, ELEMENTS[element]).numpy(), expected[:, 1])
    for rounding in SCALE_ROUNDINGS.values():
        rounded = rounding(y, ELEMENTS[element], torch.full_like(y, 100.0), 8)
        assert ((floor(y, ELEMENTS[element]) <= rounded) & (rounded <= ceil(y, ELEMENTS[element]))).all()


@pytest.mark.parametrize("element", ELEMENTS)
class TestToward:
    """Q-EMA's rounding: of a value's two neighbours the one that another value is nearer to."""

    def test_a_value_is_its_own_best_target_but_for_ties_which_go_away_from_zero(self, element):
        y = between(element)
        own, plain = toward(y, y, ELEMENTS[element]), nearest(y, ELEMENTS[element])
        low, high = floor(y.abs(), ELEMENTS[element]), ceil(y.abs(), ELEMENTS[element])
        tie = y.abs().double() == (low.double() + high.double()) / 2
        assert torch.equal(own[~tie], plain[~tie])
        assert torch.equal(own[tie].abs(), high[tie])

    def test_the_target_chooses_between_the_values_own_neighbours_alone(self, element, generator):
        y = between(element)
        target = y + torch.randn(len(y), generator=generator) * ELEMENTS[element].max / 4
        mine = toward(y, target, ELEMENTS[element]).double().numpy()
        for value, wanted, got in zip(y.double().tolist(), target.double().tolist(), mine, strict=True):
            low, high = grids.neighbours(value, grid(element))
            sign = math.copysign(1, value)
            assert got == sign * (high if wanted * sign >= (low + high) / 2 else low)

    def test_it_leaves_its_inputs_alone(self, element):
        y, target = between(element), between(element).flip(0)
        before = y.clone(), target.clone()
        toward(y, target, ELEMENTS[element])
        assert torch.equal(y, before[0])
        assert torch.equal(target, before[1])


DOWN, UP = [0, 0.5, 1, 1.5, 2, 3, 4], [0.5, 1, 1.5, 2, 3, 4, 6]
TIES = {"nearest": [0, 1, 1, 2, 2, 4, 4], "away": UP, "stochastic": DOWN, "floor": DOWN, "ceil": UP}
"""Results of each rounding at the points halfway between E2M1's neighbours, drawing 128 of 256. A new rounding needs a line."""


def test_every_rounding_says_what_becomes_of_a_tie():
    assert TIES.keys() == SCALE_ROUNDINGS.keys()
    y = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    for name, rounded in SCALE_ROUNDINGS.items():
        assert rounded(y, ELEMENTS["e2m1"], torch.full_like(y, 128.0), 8).tolist() == TIES[name]
